"""Implements Lion (arXiv 2302.06675), whose update is the sign of an interpolated momentum. Lion keeps one state tensor
per parameter; AdamW keeps two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.model.tensor import local
from trainer.optim.config import OptimizerConfig
from trainer.optim.groups import MoveOptimizer, gradients


@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """Settings of Lion. A step moves every entry of a parameter by the learning rate itself, so `lr` must be 3 to 10
    times lower than AdamW's. `weight_decay` must be higher than AdamW's by the same factor: a step shrinks weights by
    the product of `lr` and `weight_decay`, which is then the same as with AdamW."""

    kind: Literal["lion"] = "lion"
    lr: float = 2e-4
    weight_decay: float = 0.5
    betas: tuple[float, float] = (0.9, 0.99)

    def check(self) -> None:
        super().check()
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError("betas must be in [0, 1)")

    def state_bytes(self, parameters: int, matrices: int, width: int) -> float:
        return 4.0 * parameters

    def build(self, groups: list[dict[str, Any]], device: torch.device) -> Lion:
        return Lion(groups, self)


class Lion(MoveOptimizer):
    """The optimiser Lion. The state of a parameter p, `state[p]`, has the key momentum, a tensor sharded like p. The
    update is elementwise, so every rank works on its own part."""

    def __init__(self, groups: list[dict[str, Any]], config: LionConfig) -> None:
        super().__init__(groups, config)
        self.betas = config.betas

    def move(self, params: list[Tensor], lr: float, decay: float, go: Tensor) -> None:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        values = [local(p) for p in params]
        momenta = [local(self.state[p]["momentum"]) for p in params]
        # a skipped step (`go` 0) interpolates the momentum with itself, which leaves it exactly unchanged
        directions = [torch.where(go > 0, g, m) for g, m in zip(gradients(params), momenta)]
        first, second = self.betas
        updates = torch._foreach_lerp(momenta, directions, 1 - first)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, -lr * go)
        torch._foreach_mul_(values, 1 - lr * decay * go)
        torch._foreach_add_(values, updates)
        torch._foreach_lerp_(momenta, directions, 1 - second)
