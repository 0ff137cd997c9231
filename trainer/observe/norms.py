"""Measures how far a step moves the parameters. For each parameter group of the optimiser, it computes the norm of the
parameters, the norm of their update, and the ratio of the two. A ratio of about 10⁻³ per step is usual for Adam; a far
higher ratio means that the learning rate is too high, a far lower ratio that it is too low.

An update is the difference of the parameters before and after a step, so it can be measured for any optimiser. The
parameters must be copied before the step, which costs 4 bytes for each. A rank with more than SAMPLE values therefore
copies only the first part of every tensor, and the ratio is computed from the copied parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.model.tensor import copies, local

#: largest number of values that a rank copies, over all its parameters together (64 MB)
SAMPLE = 1 << 24


class Updates:
    """Measures how far one step of the optimiser moves the parameters. Creating the object copies (some of) the
    parameters, so create it before `optimizer.step()`. Call `sums` after that step. All values stay on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, sample: int = SAMPLE) -> None:
        self.groups = optimizer.param_groups
        count = sum(local(p).numel() for group in self.groups for p in group["params"])
        self.share = min(1.0, sample / max(1, count))
        self.before = [[self.part(p).clone() for p in group["params"]] for group in self.groups]

    def part(self, parameter: Tensor) -> Tensor:
        flat = local(parameter).reshape(-1)
        return flat[:math.ceil(flat.numel() * self.share)]

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Return this rank's sums for each parameter group, float64 [groups, 3], to be summed over all ranks. The three
        are: Σ p² of all parameters after the step; Σ p² of the copied parameters before the step; Σ Δ² of the changes
        of the copied parameters."""
        rows = []
        for group, before in zip(self.groups, self.before):
            row = torch.zeros(3, dtype=torch.float64, device=local(group["params"][0]).device)
            for parameter, old in zip(group["params"], before):
                now = self.part(parameter)
                squares = torch.stack((squared(local(parameter)), squared(old), squared(now - old)))
                row += squares.double() / copies(parameter)
            rows.append(row)
        return torch.stack(rows)


def metrics_fields(groups: Sequence[Mapping[str, Any]], sums: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return how far a step has moved the parameters, as fields of a metrics line: {"parameter_norm", "updates":
    {group: {"parameter_norm", "update_norm", "ratio"}}}. `groups` are the optimiser's parameter groups; `sums` is the
    result of `Updates.sums`, summed over all ranks. The ratio is that of the parameters that were copied for the
    measurement. The update norm is the ratio times the norm of all parameters, so it is an estimate if only some were
    copied."""
    result = {}
    for group, (all_squares, copied_squares, change_squares) in zip(groups, sums):
        ratio = (change_squares / copied_squares) ** 0.5 if copied_squares > 0 else 0.0
        norm = all_squares ** 0.5
        result[group["name"]] = {"parameter_norm": norm, "update_norm": ratio * norm, "ratio": ratio}
    return {"parameter_norm": sum(row[0] for row in sums) ** 0.5, "updates": result}


def squared(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32).square()
