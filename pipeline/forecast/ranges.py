"""Numbers that are not known exactly, {"value", "low", "high"}, and the line through what tasks of any size cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

#: CPU time of one and the same job on one machine, from quiet to loaded
NOISE = (0.85, 1.2)
#: of fewer tasks than this, or of tasks of one size, no line is drawn
LEAST_TASKS = 6

Range = dict[str, float]


def line(size: np.ndarray, cost: np.ndarray) -> tuple[float, float]:
    """(cost before the first byte, cost of a byte) of tasks by medians; neither is negative."""
    total = float(size.sum())
    even = float(cost.sum()) / max(total, 1.0)
    if len(size) < LEAST_TASKS or size.max() < 1.5 * size.min() + 1:
        return 0.0, even
    i, j = np.triu_indices(len(size), 1)
    apart = np.abs(size[i] - size[j]) > 0.25 * float(np.median(size))
    if not apart.any():
        return 0.0, even
    slope = float(np.median((cost[i] - cost[j])[apart] / (size[i] - size[j])[apart]))
    slope = min(max(slope, 0.0), even)
    fixed = max(0.0, float(np.median(cost - slope * size)))
    return fixed, slope or even / 4


def point(value: float) -> Range:
    return {"value": value, "low": value, "high": value}


def around(value: float, low: float, high: float) -> Range:
    return {"value": value, "low": value * low, "high": value * high}


def times(found: Range, factor: float) -> Range:
    return {k: v * factor for k, v in found.items()}


def scaled(found: Range, by: Range) -> Range:
    return {k: found[k] * by[k] for k in found}


def noisy(found: Range) -> Range:
    return {"value": found["value"], "low": found["low"] * NOISE[0], "high": found["high"] * NOISE[1]}


def summed(found: Sequence[Range]) -> Range:
    """Of numbers whose errors have nothing to do with each other: the distances add up as squares."""
    value = sum(f["value"] for f in found)
    return {"value": value, "low": max(0.0, value - math.sqrt(sum((f["value"] - f["low"]) ** 2 for f in found))),
            "high": value + math.sqrt(sum((f["high"] - f["value"]) ** 2 for f in found))}
