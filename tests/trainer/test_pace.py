"""The pace of a process beside a training, with simulated steps."""

from __future__ import annotations

import random

import pytest

from trainer.loop.pace import LEAST, Pace


def simulate(pace: Pace, steps: int, slowdown: float, noise: float, seed: int = 0, usual: float = 1.0,
             shape: int = 0) -> tuple[float, float]:
    """Let `steps` steps pass, which take `slowdown` longer while the process runs. Returns (by which share they took
    longer on average, share of the steps in which the process ran)."""
    rng = random.Random(seed)
    delay = running = 0.0
    for _ in range(steps):
        seconds = usual * rng.lognormvariate(0, noise)
        if pace.runs:
            delay += slowdown * usual
            running += 1
            seconds += slowdown * usual
        pace.add(shape, seconds, 1)
    return delay / usual / steps, running / steps


@pytest.mark.parametrize("slowdown", [0.05, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_steps_are_delayed_by_the_share_and_no_more(slowdown, noise):
    results = [simulate(Pace(0.02), 10_000, slowdown, noise, seed) for seed in range(6)]
    assert sum(delay for delay, _ in results) / 6 <= (0.0225 if not noise else 0.025)
    assert min(running for _, running in results) >= 0.5 * min(1, 0.02 / slowdown)     # the budget is used, too


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_a_process_that_delays_nothing_runs_nearly_all_the_time(noise):
    assert simulate(Pace(0.02), 20_000, 0.0, noise)[1] > 0.75


def test_nothing_runs_until_the_usual_time_is_known_and_again_with_another_shape():
    pace = Pace(0.02)
    pace.add(1, 9.0, 1)                                              # the first step of a shape is not measured
    for _ in range(LEAST):
        assert not pace.runs
        pace.add(1, 1.0, 1)
    assert pace.runs
    assert not pace.add(2, 3.0, 1)                                   # longer sequences
    assert simulate(pace, 5000, 1.0, 0.05, usual=3.0, shape=2)[0] <= 0.022


def test_a_machine_that_becomes_slow_or_fast_by_itself_is_learned():
    pace = Pace(0.02)
    for usual in (1.0, 2.0, 1.0):
        assert simulate(pace, 5000, 0.01, 0.05, usual=usual)[1] > 0.5
    assert simulate(pace, 20_000, 1.0, 0.05)[0] <= 0.025
