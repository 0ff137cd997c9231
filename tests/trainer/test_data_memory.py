"""A curriculum that is three times as long takes the loader no more memory. (SmolLM3's team met a loader whose index
grew with the length of the run.)

Here the data is repeated; tests/trainer/test_data.py tests data that is as large as the run.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tests.conftest import alone
from tests.trainer.synthetic import make_run
from tokenizer.mixture.curriculum import Curriculum
from trainer.data.batches import AHEAD, Data, Prefetch
from trainer.loop.run import Run, open_run

TIMES = 1000


def longer(run: Run, times: int) -> Run:
    phases, start = [], 0
    for phase in run.curriculum.phases:
        phases.append(replace(phase, start=start, samples=times * phase.samples, reserved=times * phase.samples,
                              on_exhausted="repeat"))
        start = phases[-1].stop
    made = replace(run.curriculum, phases=tuple(phases))
    return replace(run, curriculum=Curriculum.from_json(made.to_json()))


def peak(run: Run) -> int:
    """Return the most bytes that Python allocates while the loader is set up and reads the first, the middle and the
    last steps."""
    tracemalloc.start()
    data = Data(run.curriculum, run.store)
    for first in (0, run.curriculum.steps // 2, run.curriculum.steps - 20):
        for _ in islice(Prefetch(data, run.steps(run.sample_at(first)), 0, 2), 20):
            pass
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def measured_peaks(folder: Path) -> tuple[int, int]:
    """Return the peaks of a run TIMES // 3 and TIMES times as long as `make_run` makes it."""
    run = open_run(str(make_run(folder, documents=300)), None, None, [])
    long = longer(run, TIMES)
    assert long.curriculum.tokens == TIMES * run.curriculum.tokens == TIMES * 7680
    some = longer(run, TIMES // 3)
    peak(run)                                                        # what is imported and cached at first use
    assert some.curriculum.samples > 3 * AHEAD, "what is located ahead is the same for both"
    return peak(some), peak(long)


@pytest.mark.slow
def test_memory_is_constant_in_repeated_tokens(tmp_path):
    short, grown = alone(measured_peaks, tmp_path)
    assert grown < short + 300_000, (short, grown)
