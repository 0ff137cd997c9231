"""AdamW (arXiv 1711.05101), torch's own, fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.optim.groups import Rates


@dataclass(frozen=True)
class Moments(Rates):
    """What all of AdamW's kinds have. `betas`: decay of the two moments; `eps` keeps the quotient finite."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def check(self) -> None:
        super().check()
        if self.eps <= 0 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError("eps must be > 0, betas in [0, 1)")


@dataclass(frozen=True)
class AdamWConfig(Moments):
    """torch.optim.AdamW."""

    kind: Literal["adamw"] = "adamw"


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True): one kernel, and it heeds `found_inf`, by subtracting it from its step counters."""

    def __init__(self, groups: list[dict[str, Any]], config: Moments) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        found = getattr(self, "found_inf", None)
        if found is not None:
            self.found_inf = (found != 0).float()
        super().step(closure)
