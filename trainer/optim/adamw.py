"""Provides AdamW (arXiv 1711.05101), in torch's own fused implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.optim.config import Moments


@dataclass(frozen=True)
class AdamWConfig(Moments):
    """Settings of torch.optim.AdamW."""

    kind: Literal["adamw"] = "adamw"

    def build(self, groups: list[dict[str, Any]], device: torch.device) -> AdamW:
        return AdamW(groups, self)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), corrected for cancelled steps. A step is cancelled if the tensor `found_inf` is
    not 0. torch then subtracts `found_inf` from the step counters, which have already counted the step. This is right
    only if `found_inf` is 1. Therefore `step` first turns every value except 0 into 1."""

    def __init__(self, groups: list[dict[str, Any]], config: Moments) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            self.found_inf = (found_inf != 0).float()
        super().step(closure)
