"""Lion (arXiv 2302.06675): the sign of an interpolated momentum. One state tensor a parameter, not two as AdamW has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.optim.groups import Rates, local, performed


@dataclass(frozen=True)
class LionConfig(Rates):
    """Every entry moves by the rate itself, so it wants 3 to 10 times less `lr` and as much more `weight_decay` than
    AdamW (their product, the decay of a step, stays)."""

    kind: Literal["lion"] = "lion"
    lr: float = 2e-4
    weight_decay: float = 0.5
    betas: tuple[float, float] = (0.9, 0.99)

    def check(self) -> None:
        super().check()
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError("betas must be in [0, 1)")


class Lion(torch.optim.Optimizer):
    """state[p] = {"momentum"}, sharded like p. Entry by entry, so every rank works on its own part."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            values = [local(p) for p in params]
            gradients = [local(p.grad) for p in params]
            momenta = [local(self.state[p]["momentum"]) for p in params]
            go = performed(self, values[0].device)
            if go is not None:           # a momentum that is drawn towards itself stays what it was, exactly
                gradients = [torch.where(go > 0, g, m) for g, m in zip(gradients, momenta)]
            first, second = group["betas"]
            updates = torch._foreach_lerp(momenta, gradients, 1 - first)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(updates, -group["lr"] if go is None else -group["lr"] * go)
            decay = group["lr"] * group["weight_decay"]
            torch._foreach_mul_(values, 1 - decay if go is None else 1 - decay * go)
            torch._foreach_add_(values, updates)
            torch._foreach_lerp_(momenta, gradients, 1 - second)


def build(config: LionConfig, groups: list[dict[str, Any]]) -> Lion:
    return Lion(groups, config.lr, config.betas)
