"""Makes the report's section about the quality of the order: whether batches have the planned mixture, and whether
windows that stand side by side in a stream are far apart in the order, as chance would place them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order

#: steps that are looked at, evenly spread; most samples of a step
STEPS, SAMPLES = 64, 4096


def order_quality(curriculum: Curriculum | None) -> dict[str, Any] | None:
    """{steps, of, samples, deviation, streams}. `steps` of all steps are looked at, with `samples` in all. `deviation`
    is the largest difference between the windows that a stream has in a step and its planned share of the step.

    A stream has `windows` (looked at) and `neighbours` (pairs of windows in one step that follow each other in the
    stream). `expected` are such pairs if windows were drawn at random from the whole stream; a phase reserves a part of
    the stream, so there are more. `spread` is the mean distance in the stream of windows that follow each other in the
    order, divided by the distance to expect. Random order gives 1."""
    if curriculum is None or not curriculum.tokens:
        return None
    order = Order(curriculum)
    streams = {name: {"windows": 0, "neighbours": 0, "expected": 0.0, "distance": 0.0, "pairs": 0}
               for name in order.names}
    deviation, samples = 0.0, 0
    steps = _steps(curriculum)
    for phase, start, size in steps:
        located = order.locate(start, start + size)
        weights = order.weights[phase]
        samples += size
        for number, name in enumerate(order.names):
            windows, epochs = located.window[located.stream == number], located.epoch[located.stream == number]
            deviation = max(deviation, abs(len(windows) - size * weights[number] / sum(weights)))
            if len(windows) < 2:
                continue
            stream_windows = order.supers[number] * (curriculum.longest // curriculum.phases[phase].sequence)
            sums = streams[name]
            sums["windows"] += len(windows)
            ordered = np.lexsort((windows, epochs))
            follows = (np.diff(windows[ordered]) == 1) & (np.diff(epochs[ordered]) == 0)
            sums["neighbours"] += int(follows.sum())
            sums["expected"] += len(windows) * (len(windows) - 1) / stream_windows
            sums["distance"] += float(np.abs(np.diff(windows)).sum()) * 3 / max(stream_windows, 2)
            sums["pairs"] += len(windows) - 1
    return {"steps": len(steps), "of": curriculum.steps, "samples": samples, "deviation": round(deviation, 6),
            "streams": {name: {"windows": s["windows"], "neighbours": s["neighbours"],
                               "expected": round(s["expected"], 3), "spread": round(s["distance"] / s["pairs"], 4)}
                        for name, s in streams.items() if s["pairs"]}}


def _steps(curriculum: Curriculum) -> list[tuple[int, int, int]]:
    """(phase, first sample, samples) of the steps that are looked at: of every phase some, the first and the last
    ones among them."""
    out = []
    for number, phase in enumerate(curriculum.phases):
        most = max(2, round(STEPS * phase.tokens / curriculum.tokens))
        for first, stop, batch in phase.stretches:
            steps = (stop - first) // batch
            chosen = np.unique(np.linspace(0, steps - 1, min(steps, most)).astype(np.int64))
            out += [(number, phase.start + first + int(step) * batch, min(batch, SAMPLES)) for step in chosen]
    return out
