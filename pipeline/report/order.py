"""Makes the report's section about the quality of the order of training samples. It says whether batches have the
planned mixture. It also says whether neighbours in a token stream, which are windows (samples) side by side, are as far
apart in the order as in a random order."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.report.shuffle import Shuffle
from pipeline.store.fs import Store
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order

#: approximate number of steps that are examined, evenly spread; most samples examined of a step
STEPS, SAMPLES = 64, 4096


def order_quality(curriculum: Curriculum | None, store: Store | None = None) -> dict[str, Any] | None:
    """Measure how well the order of training samples is mixed, on some of the steps: {steps, of, samples, deviation,
    streams, lags, run, repeats}.

    `steps` is the number of steps examined, `of` the number of all steps, and `samples` the number of samples examined.
    The weight of a token stream gives it a number of windows (samples) in a step. `deviation` is the largest difference
    between the real number and this number.

    For each stream, `windows` is the number examined, and `neighbours` is the number of pairs in one step that are
    adjacent in the stream. `expected` is the number of such pairs if windows were drawn at random from the whole
    stream. A phase draws from only a part of the stream, so `neighbours` may be larger than `expected` even in a random
    order. `spread` is the mean distance in the stream between windows that follow each other in the order, divided by
    this distance in a random order.

    `lags`, `run` and `repeats` compare the order with a perfect shuffle (`pipeline.report.shuffle`). Some of their
    figures are about documents and are read from the shards in `store`; without the shards they are None.
    """
    if curriculum is None or not curriculum.tokens:
        return None
    order = Order(curriculum)
    streams = {name: {"windows": 0, "neighbours": 0, "expected": 0.0, "distance": 0.0, "pairs": 0}
               for name in order.names}
    deviation, samples = 0.0, 0
    shuffle = Shuffle(curriculum, store)
    steps = _steps(curriculum)
    for phase, start, size in steps:
        located = order.locate(start, start + size)
        weights = order.apportioned[phase].weights
        samples += size
        shuffle.add(located)
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
                        for name, s in streams.items() if s["pairs"]}, **shuffle.figures()}


def _steps(curriculum: Curriculum) -> list[tuple[int, int, int]]:
    """Return the steps that are examined, as (phase, first sample, samples). They are evenly spread over each phase,
    and include its first and last step."""
    out = []
    for number, phase in enumerate(curriculum.phases):
        most = max(2, round(STEPS * phase.tokens / curriculum.tokens))
        for first, stop, batch in phase.stretches:
            steps = (stop - first) // batch
            chosen = np.unique(np.linspace(0, steps - 1, min(steps, most)).astype(np.int64))
            out += [(number, phase.start + first + int(step) * batch, min(batch, SAMPLES)) for step in chosen]
    return out
