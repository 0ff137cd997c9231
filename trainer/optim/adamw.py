"""AdamW (arXiv 1711.05101), fused, with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True)
class AdamWConfig:
    """`lr` is the peak; the schedule multiplies it. `weight_decay` is for matrices, not embeddings, norms, biases."""

    kind: Literal["adamw"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def check(self) -> None:
        if self.lr <= 0 or self.eps <= 0 or self.weight_decay < 0 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError("lr and eps must be > 0, weight_decay ≥ 0, betas in [0, 1)")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """True for matrices other than the embedding (SmolLM3, OLMo 2: decay on embeddings or gains does no good)."""
    return parameter.ndim >= 2 and not name.startswith("embed.")


def build(config: AdamWConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """The optimiser over `model.named_parameters()`. Each group has a `name`, for `describe`."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        groups[decays(name, parameter)].append(parameter)
    listed = [
        {"name": "matrices", "params": groups[True], "weight_decay": config.weight_decay},
        {"name": "embeddings, norms, biases", "params": groups[False], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in listed if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps,
                             fused=True)


def describe(optimizer: torch.optim.Optimizer) -> str:
    """A table of the parameter groups: what decays and what does not."""
    lines = [f"{'group':<28}{'tensors':>8}{'parameters':>14}{'lr':>10}{'decay':>8}"]
    lines += [f"{g['name']:<28}{len(g['params']):>8}{sum(p.numel() for p in g['params']):>14,}{g['lr']:>10.2g}"
              f"{g['weight_decay']:>8.2g}" for g in optimizer.param_groups]
    return "\n".join(lines)
