"""Estimates the gradient noise scale: the batch size up to which a larger batch still saves steps (McCandlish et al.,
"An Empirical Model of Large-Batch Training", arXiv 1812.06162).

The noise scale is B_simple = tr Σ / |G|², where G is the gradient of the loss and Σ the covariance of one token's
gradient. A batch far below B_simple wastes no data; a batch far above it wastes most of its data.

For a batch of B tokens, E|G_B|² = |G|² + tr Σ / B. So tr Σ and |G|² follow from the squared gradient norms of a small
and a large batch (appendix A.1). The small batches are the micro-batches of all ranks; the large batch is the whole
step.

The gradient of a single micro-batch comes from a hook on the unsharded parameters of FSDP. The hook gets it on the rank
that computed it, before accumulation and reduction. The noise scale is measured only once per log interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from trainer.model.tensor import copies

#: weight of the old mean when a new measurement is added to it; high, because a single measurement is mostly noise
KEEP = 0.95


class MicroNorms:
    """Measures the squared gradient norms of single micro-batches of a model that is sharded by `fully_shard`.

    Call `start` before a step, `add` after every backward, and `take` at the end. All values stay on the device. While
    nothing is measured, the cost is one Python call per parameter and backward. `shared` is the number of ranks that
    compute the same micro-batch together (tensor parallelism).
    """

    def __init__(self, model: nn.Module, device: torch.device, shared: int = 1) -> None:
        self.on, self.shared = False, shared
        self.square = torch.zeros((), dtype=torch.float32, device=device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                sharded = {id(p) for p in module.parameters()}
                module.unshard()                     # FSDP keeps the unsharded Parameters, so hooks stay
                for parameter in module.parameters():
                    if id(parameter) not in sharded and parameter.requires_grad:
                        parameter.register_hook(self.hook)
                module.reshard()

    def hook(self, grad: Tensor) -> None:
        """Add the squared norm of one parameter's gradient to the sum for the current micro-batch. torch calls this in
        backward, before the gradient is accumulated. The gradient is not changed."""
        if self.on:
            self.square += part(grad.detach(), self.shared)

    def start(self) -> None:
        self.on = True
        self.square.zero_()
        self.sums = torch.zeros_like(self.sums)      # a new tensor, because the old one may be unread

    def add(self, targets: Tensor, scale: Tensor) -> None:
        """Finish the micro-batch of the last backward: add its squared gradient norm to the sums that `take` returns.
        `targets` (0-d) is the number of its targets that count in the loss, and `scale` (0-d) is the factor by which
        its loss was multiplied. A micro-batch without targets is left out."""
        if not self.on:
            return
        n = targets.double()
        there = n > 0
        n = n.clamp(min=1)
        norm = self.shared * self.square.double() / (scale.double() * n) ** 2      # of its mean gradient per target
        self.sums += torch.stack((norm, 1 / n, torch.ones_like(n))) * there
        self.square.zero_()

    def take(self) -> Tensor:
        """End the measurement of a step. Returns this rank's sums over its micro-batches i, float64 [3], to be summed
        over ranks: Σ |G_i|², where G_i is the mean gradient per target; Σ 1/n_i, where n_i is the number of targets;
        and the number of micro-batches."""
        self.on = False
        return self.sums


def part(grad: Tensor, shared: int) -> Tensor:
    """Return this rank's share of the squared norm of a gradient, 0-d float32. If `shared` ranks have computed the
    gradient together, their shares sum to the squared norm."""
    if not isinstance(grad, DTensor):
        return torch.linalg.vector_norm(grad, dtype=torch.float32).square() / shared
    if any(placement.is_partial() for placement in grad.placements):
        grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
    return torch.linalg.vector_norm(grad.to_local(), dtype=torch.float32).square() / copies(grad)


def estimate(small: float, inverse: float, big: float, targets: float) -> tuple[float, float]:
    """Return unbiased estimates of the two terms of the noise scale, (tr Σ per token, |G|²), from one step. Either may
    be negative, so use means over steps. Raises ValueError when the step was one micro-batch.

        small    mean of the squared gradient norms of the step's micro-batches
        inverse  mean of 1 / (number of targets of a micro-batch)
        big      squared gradient norm of the step
        targets  number of targets of the step
    """
    spread = inverse - 1 / targets
    if spread <= 1e-9 * inverse:
        raise ValueError("a step of one micro-batch has no noise to measure")
    trace = (small - big) / spread
    return trace, big - trace / targets


class NoiseScale:
    """Estimates the gradient noise scale tr Σ / |G|² over many steps (G: gradient of the loss; Σ: covariance of one
    token's gradient). Keeps exponential means of the estimates of tr Σ and |G|². The noise scale is the ratio of these
    means, not the mean of ratios (arXiv 1812.06162, appendix A.1). `lines` are lines of metrics.jsonl from former
    processes; their measurements are added first."""

    def __init__(self, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.trace = self.signal = self.weight = 0.0
        for line in lines:                           # measurements of former processes
            if "noise" in line:
                self.add(line["noise"]["trace"], line["noise"]["signal"])

    def add(self, trace: float, signal: float) -> None:
        self.trace = KEEP * self.trace + (1 - KEEP) * trace
        self.signal = KEEP * self.signal + (1 - KEEP) * signal
        self.weight = KEEP * self.weight + (1 - KEEP)

    @property
    def tokens(self) -> float | None:
        """The critical batch size in tokens, i.e. the noise scale. It is the ratio of two means, and None while one of
        them is not positive."""
        return self.trace / self.signal if self.signal > 0 and self.trace > 0 else None

    def measure(self, sums: Sequence[float], norm: float | None, targets: float) -> dict[str, Any] | None:
        """Add the measurement of one step to the estimate of the noise scale. Returns what the step's metrics line has
        under `noise`, or None when the step gives no estimate. `sums` is the result of `MicroNorms.take`, summed over
        all ranks; `norm` is the step's gradient norm (None: not finite), and `targets` its number of targets that count
        in the loss."""
        squares, inverses, count = sums
        if not count or not targets or norm is None or not math.isfinite(norm) or not math.isfinite(squares):
            return None
        try:
            trace, signal = estimate(squares / count, inverses / count, norm * norm, targets)
        except ValueError:
            return None
        self.add(trace, signal)
        return {"trace": trace, "signal": signal, "critical_batch_tokens": self.tokens}
