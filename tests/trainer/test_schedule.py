"""The learning rate over tokens: golden values of every shape, phases, and errors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from trainer.config import ConfigError
from trainer.schedule import Schedule, ScheduleConfig, span


@dataclass
class Phase:
    name: str
    tokens: int
    lr: str


STABLE = [Phase("stable", 700, "stable"), Phase("anneal", 300, "decay")]
PLAIN = [Phase("one", 600, "stable"), Phase("two", 400, "stable")]


@pytest.mark.parametrize(("config", "phases", "values"), [
    (ScheduleConfig(warmup="10%"), STABLE,
     {0: 0, 25: 0.25, 50: 0.5, 100: 1, 400: 1, 700: 1, 775: 0.75, 850: 0.5, 1000: 0}),
    (ScheduleConfig(warmup="100", shape="1-sqrt"), STABLE, {700: 1, 775: 0.5, 850: 1 - 0.5 ** 0.5, 1000: 0}),
    (ScheduleConfig(warmup="0%", shape="cosine", floor=0.1), STABLE, {0: 1, 850: 0.55, 1000: 0.1}),
    (ScheduleConfig(warmup="0%", decay="20%"), PLAIN, {0: 1, 800: 1, 900: 0.5, 1000: 0}),
    (ScheduleConfig(warmup="0%", decay="0%"), PLAIN, {0: 1, 1000: 1}),
    (ScheduleConfig(kind="cosine", warmup="20%"), PLAIN, {100: 0.5, 200: 1, 600: 0.5, 1000: 0}),
    (ScheduleConfig(kind="linear", warmup="200", floor=0.2), PLAIN, {200: 1, 600: 0.6, 1000: 0.2}),
    (ScheduleConfig(kind="constant", warmup="0%"), PLAIN, {0: 1, 500: 1, 1000: 1}),
])
def test_golden_values(config, phases, values):
    schedule = Schedule(config, phases)
    assert {t: schedule.factor(t) for t in values} == pytest.approx(values)


def test_neighbouring_decay_phases_are_one_decay_and_nothing_comes_back_after_it():
    phases = [Phase("a", 400, "stable"), Phase("b", 200, "decay"), Phase("c", 200, "decay"), Phase("d", 200, "stable")]
    schedule = Schedule(ScheduleConfig(warmup="0%", floor=0.2), phases)
    assert [schedule.factor(t) for t in (400, 500, 600, 700, 800, 900)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("lr", ["stable", "decay"])
def test_a_phase_after_the_fall_to_zero_is_refused(lr):
    """Its steps would cost what steps cost and change nothing."""
    phases = [Phase("a", 400, "decay"), Phase("b", 200, "stable"), Phase("c", 200, lr)]
    with pytest.raises(ConfigError, match=r"phase 'b' comes after the learning rate has fallen to 0.*schedule\.floor"):
        Schedule(ScheduleConfig(), phases)
    Schedule(ScheduleConfig(), phases[1:])
    Schedule(ScheduleConfig(), [phases[1], phases[0]])


def test_a_second_decay_starts_where_the_first_one_ended():
    schedule = Schedule(ScheduleConfig(warmup="0%", floor=0.5), [Phase("a", 100, "decay"), Phase("b", 100, "stable"),
                                                                 Phase("c", 100, "decay")])
    assert [schedule.factor(t) for t in (0, 50, 100, 200, 250, 300)] == pytest.approx([1, 0.75, 0.5, 0.5, 0.5, 0.5])


def test_spans():
    assert span("2%", 5000) == 100
    assert span("0.5M", 10) == 500_000
    for bad in ("200%", "fast", "-3"):
        with pytest.raises(ValueError, match=r"%|count"):
            span(bad, 100)


def test_errors_name_phase_and_remedy():
    with pytest.raises(ConfigError, match=r"phase 'anneal' says lr: decay; use kind: wsd"):
        Schedule(ScheduleConfig(kind="cosine"), STABLE)
    with pytest.raises(ConfigError, match=r"phase 'x': lr: 'decai' is not known; write lr: stable or lr: decay"):
        Schedule(ScheduleConfig(), [Phase("x", 10, "decai")])
