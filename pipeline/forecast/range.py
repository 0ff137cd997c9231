"""Represents numbers that are known only within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """An estimate `value` with its bounds `low` and `high`. Multiplication needs all three to be
    non-negative."""

    value: float
    low: float
    high: float

    def __mul__(self, by: Range | float) -> Range:
        by = by if isinstance(by, Range) else exactly(by)
        return Range(self.value * by.value, self.low * by.low, self.high * by.high)


def exactly(value: float) -> Range:
    return Range(value, value, value)


def total(ranges: Iterable[Range]) -> Range:
    """Return the sum of estimates with independent errors. The distance from the sum to its upper bound is the square
    root of the sum of the squared distances of the estimates to their upper bounds. The lower bound is computed in the
    same way from the lower bounds, and is at least 0."""
    ranges = list(ranges)
    value = sum(r.value for r in ranges)
    return Range(value, max(0.0, value - math.sqrt(sum((r.value - r.low) ** 2 for r in ranges))),
                 value + math.sqrt(sum((r.high - r.value) ** 2 for r in ranges)))
