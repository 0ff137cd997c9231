"""Implements Adafactor (arXiv 1804.04235), with the same results as torch.optim.Adafactor; tests compare the two. The
state is tiny: the second moments of a matrix are kept as one row and one column, and there is no first moment.

This implementation never waits for the device. torch's implementation reads its step counter and two norms of every
tensor on the host, which stalls a GPU several times per parameter. It also does not support `found_inf`, the flag on
the device that cancels a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainer.model.tensor import local
from trainer.optim.config import MupRule, OptimizerConfig
from trainer.optim.groups import MoveOptimizer, gradients, like

#: lower bounds: a second moment is at least EPS1², and the root mean square of a parameter at least EPS2
EPS1, EPS2 = torch.finfo(torch.float32).eps, 1e-3


@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """Settings of Adafactor. An update is first limited to the root mean square `update_clip`. It is then multiplied by
    the parameter's root mean square (but at least 0.001) and by the smaller of `lr` and 1 / √step. `lr` is thus
    relative to the size of a parameter. The decay factor of the second moments is 1 - step^beta2_decay."""

    kind: Literal["adafactor"] = "adafactor"
    lr: float = 1e-2
    beta2_decay: float = -0.8
    update_clip: float = 1.0

    def check(self) -> None:
        super().check()
        if self.beta2_decay >= 0 or self.update_clip <= 0:
            raise ValueError("beta2_decay must be < 0, update_clip > 0")

    def mup_rule(self) -> MupRule:
        return "unknown"

    def state_bytes(self, parameters: int, matrices: int, width: int) -> float:
        return 8.0 * parameters / width                             # one row and one column for each matrix

    def build(self, groups: list[dict[str, Any]], device: torch.device) -> Adafactor:
        return Adafactor(groups, self)


def summed(x: Tensor, dim: int | None = None) -> Tensor:
    """Sum `x` over dimension `dim`, which stays with size 1, or over all dimensions if `dim` is None. If `x` is divided
    among ranks (DTensor), the sum includes the parts of all ranks."""
    x = x.sum() if dim is None else x.sum(dim, keepdim=True)
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    return x


class Adafactor(MoveOptimizer):
    """The optimiser Adafactor. The state of a parameter p, `state[p]`, has the keys step, row and column for a matrix,
    and step and variance for a vector."""

    def __init__(self, groups: list[dict[str, Any]], config: AdafactorConfig) -> None:
        super().__init__(groups, config)
        self.config = config

    def move(self, params: list[Tensor], lr: float, decay: float, go: Tensor) -> None:
        for p, gradient in zip(params, gradients(params)):
            self._move(p, gradient, lr, decay, go)

    def _move(self, p: Tensor, grad: Tensor, lr: float, decay: float, go: Tensor) -> None:
        state, matrix = self.state[p], p.ndim > 1
        # replace the gradient of a skipped step, because NaN times 0 below would be NaN
        gradient = like(p, torch.where(go > 0, grad, 0.0))
        squares = gradient.square()
        new = {"row": summed(squares, -1) / p.shape[-1], "column": summed(squares, -2) / p.shape[-2]} if matrix else \
            {"variance": squares}
        if not state:
            state["step"] = torch.zeros_like(go)
            state.update({key: torch.zeros_like(value) for key, value in new.items()})
        state["step"] += go
        step = state["step"].clamp_min(1.0)
        forget = step ** self.config.beta2_decay * go
        for key, value in new.items():
            local(state[key]).lerp_(local(value), forget)
        if matrix:
            mean = local(summed(state["row"], -2)) / p.shape[-2]
            variance = local(state["row"]) @ local(state["column"]) / mean.clamp_min(EPS1)
        else:
            variance = local(state["variance"])
        update = variance.clamp_min(EPS1 * EPS1).rsqrt_().mul_(local(gradient))
        rms = (local(summed(like(p, update).square())) / p.numel()).sqrt()
        size = (local(summed(p.square())) / p.numel()).sqrt().clamp_min(EPS2)
        rate = size * torch.clamp_max(step.rsqrt(), lr) / (rms / self.config.update_clip).clamp_min(1.0)
        values = local(p)
        values.mul_(1 - lr * decay * go).sub_(update * (rate * go))
