"""Implements AdamW with its two moments in 8 bits (Dettmers et al., arXiv 2110.02861): 2 bytes per parameter instead of
8.

A number is kept as one of 256 levels, multiplied by the largest magnitude in its block. The levels are dense near 0 and
are those of bitsandbytes and torchao. A block is up to 256 neighbours within a row. Blocks never span rows, so levels
and scales are plain tensors, sharded like the parameter. A checkpoint of them can be read by another number of ranks.

torchao's own optimiser is not used for two reasons. It keeps the blocks of a rank's shard inside tensor subclasses,
which our checkpoints (plain tensors, no pickles) cannot hold. It also does not support `found_inf`, the flag on the
device that cancels a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from trainer.base.config import ConfigError
from trainer.model.tensor import local
from trainer.optim.config import Moments
from trainer.optim.groups import MoveOptimizer, gradients, like

BLOCK = 256
#: matrices with fewer entries, and all vectors, keep their moments in float32
SMALLEST = 4096


@dataclass(frozen=True)
class AdamW8bitConfig(Moments):
    """Settings of AdamW with moments in 8 bits; their names are those of `adamw`. This optimiser cannot be used with
    `train.parallel.tensor` > 1."""

    kind: Literal["adamw8bit"] = "adamw8bit"

    def state_bytes(self, parameters: int, matrices: int, width: int) -> float:
        return (2 + 8 / BLOCK) * parameters                         # plus a scale for each block of each moment

    def stored_bytes(self, parameters: int, matrices: int, width: int, half: bool) -> float:
        return self.state_bytes(parameters, matrices, width)        # nearly all of it is 8-bit, stored as it is

    def build(self, groups: list[dict[str, Any]], device: torch.device) -> AdamW8bit:
        return AdamW8bit(groups, self)


def levels(signed: bool) -> Tensor:
    """Return the 256 numbers that 8 bits represent, ascending, in [-1, 1] (`signed`) or [0, 1]. They span seven
    decades; each decade has twice as many levels as the decade below it (the dynamic tree of Dettmers et al., arXiv
    2110.02861)."""
    result = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        result += [*means.tolist(), *((-means).tolist() if signed else ())]
    return torch.tensor(sorted(result), dtype=torch.float32)


def blocks(x: Tensor) -> Tensor:
    """Split each row of `x` [rows, cols] into blocks of BLOCK neighbours that share a scale. Returns [rows, blocks per
    row, BLOCK]. The last block of a row is padded with zeros."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def pack(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [rows, cols] float32 to 8 bits. Each block of a row is divided by its scale, and each number is
    replaced by the index of the nearest level in `table`. Returns the indices, uint8 [rows, cols], and the scales,
    float32 [rows, blocks per row]."""
    split = blocks(x)
    scale = split.abs().amax(-1)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(split / scale.clamp_min(1e-30)[..., None], between, out_int32=True)
    return codes.flatten(1)[:, :x.shape[1]].to(torch.uint8), scale


def unpack(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    return (blocks(table[codes.int()]) * scale[..., None]).flatten(1)[:, :codes.shape[1]]


class AdamW8bit(MoveOptimizer):
    """The optimiser AdamW with moments in 8 bits. The state of a parameter p, `state[p]`, has the keys step, first and
    second (the moments). If the moments are quantised, it also has first_scale and second_scale (the scales of the
    blocks)."""

    def __init__(self, groups: list[dict[str, Any]], config: AdamW8bitConfig) -> None:
        super().__init__(groups, config)
        self.config = config
        for p in (p for group in self.param_groups for p in group["params"]):
            if isinstance(p, DTensor) and packed(p) and any(
                    isinstance(place, Shard) and place.dim and p.device_mesh.size(i) > 1
                    for i, place in enumerate(p.placements)):
                raise ConfigError("train.optimizer.kind: adamw8bit keeps blocks within whole rows, which tensor "
                                  "parallelism splits; use kind: adamw, or parallel.tensor: 1")
        self.tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def move(self, params: list[Tensor], lr: float, decay: float, go: Tensor) -> None:
        for p, gradient in zip(params, gradients(params)):
            self._move(p, gradient, lr, decay, go)

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        state, own = self.state[p], local(p)
        state["step"] = torch.zeros((), device=own.device)
        for key in ("first", "second"):
            state[key] = like(p, torch.zeros_like(own, dtype=torch.uint8 if packed(p) else torch.float32))
            if packed(p):
                per_row = -(-p.shape[1] // BLOCK)
                scales = torch.zeros(own.shape[0], per_row, device=own.device)
                state[f"{key}_scale"] = like(p, scales, p.shape[0], per_row)
        return state

    def _move(self, p: Tensor, grad: Tensor, lr: float, decay: float, go: Tensor) -> None:
        state = self.state[p] or self._begin(p)
        values, gradient = local(p), torch.where(go > 0, grad.float(), 0.0)
        if values.device not in self.tables:
            self.tables[values.device] = levels(True).to(values.device), levels(False).to(values.device)
        tables = self.tables[values.device]
        old = [local(state[key]) for key in ("first", "second")]
        scales = [local(state[f"{key}_scale"]) for key in ("first", "second")] if packed(p) else []
        first, second = [unpack(*x) for x in zip(old, scales, tables)] if scales else old
        state["step"] += go
        step, (b1, b2) = state["step"].clamp_min(1.0), self.config.betas
        first = first.lerp(gradient, 1 - b1)
        second = second.lerp(gradient.square(), 1 - b2)
        size = (second / (1 - b2 ** step)).sqrt_().add_(self.config.eps)
        values.mul_(1 - lr * decay * go)
        values.sub_(first / (1 - b1 ** step) / size * (lr * go))
        for i, moment in enumerate((first, second)):
            new = pack(moment, tables[i]) if scales else (moment,)
            for x, y in zip((old[i], *scales[i:i + 1]), new):
                x.copy_(torch.where(go > 0, y, x))


def packed(p: Tensor) -> bool:
    return p.ndim == 2 and p.numel() >= SMALLEST
