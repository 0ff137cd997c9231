"""Figures about the order of a curriculum, counted window by window."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from pipeline.report.order import order_quality
from tokenizer.mixture.curriculum import Curriculum, TokenizerRef
from tokenizer.mixture.order import Order
from tokenizer.mixture.phases import Phase, Stream


def curriculum(weights: dict[str, int], samples: int, batch: int, tokens: int = 200_000, **more: Any) -> Curriculum:
    streams = tuple(Stream(name, name, None, "0", None, tokens, 0, "uint16") for name in weights)
    phase = Phase("one", 0, samples, samples, 128, batch, weights, "stable", {}, "repeat", **more)
    return Curriculum(3, TokenizerRef("0", 800, 0, "t"), 512, streams, (phase,), "")


def test_every_window_counted():
    plan = curriculum({"a": 3, "b": 1, "c": 2}, 24 * 10, 24)
    quality = order_quality(plan)
    assert quality is not None and (quality["steps"], quality["of"], quality["samples"]) == (10, 10, 240)
    order = Order(plan)
    whole = order.supers[0] * 4
    deviation = 0.0
    for s, (name, weight) in enumerate({"a": 3, "b": 1, "c": 2}.items()):
        neighbours, expected, windows = 0, 0.0, 0
        distances: list[float] = []
        for first in range(0, 240, 24):
            located = order.locate(first, first + 24)
            mine = [int(w) for w, of in zip(located.window, located.stream, strict=True) if of == s]
            deviation = max(deviation, abs(len(mine) - 24 * weight / 6))
            neighbours += sum(abs(a - b) == 1 for a, b in combinations(mine, 2))
            expected += len(mine) * (len(mine) - 1) / whole
            windows += len(mine)
            distances += [abs(a - b) for a, b in zip(mine, mine[1:], strict=False)]  # noqa: RUF007
        assert quality["streams"][name] == {
            "windows": windows, "neighbours": neighbours, "expected": pytest.approx(expected, abs=1e-3),
            "spread": pytest.approx(sum(distances) / len(distances) / (whole / 3), abs=1e-4)}
    assert quality["deviation"] == pytest.approx(deviation) and deviation <= 1


def test_our_order_is_near_a_random_one():
    quality = order_quality(curriculum({"a": 1, "b": 1}, 512 * 200, 512, tokens=20_000_000))
    assert quality is not None and quality["steps"] <= 66
    for stream in quality["streams"].values():
        assert 0.95 < stream["spread"] < 1.05 and stream["neighbours"] < 4 * stream["expected"] + 5


def test_growing_batches_and_short_runs():
    quality = order_quality(curriculum({"a": 1}, 40, 16, ramp=[[8, 4], [24, 8]]))
    assert quality is not None and (quality["of"], quality["samples"]) == (5, 40)
    assert order_quality(None) is None
