"""The learning rate over tokens: expected values for every shape, phases with a rate of their own, and growing
batches."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tests.trainer.synthetic import make_run
from tokenizer.mixture.curriculum import Phase as CurriculumPhase
from trainer.base.config import ConfigError, build
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.observe.metrics import read
from trainer.optim.schedule import Schedule, ScheduleConfig, span
from trainer.tools.sizes import plan


def Phase(name: str, tokens: int, lr: object, **keys) -> CurriculumPhase:
    """Return a phase with windows of one token, so that tokens and samples are the same, and a batch of 10."""
    keys = {"samples": tokens, "reserved": tokens, **keys}
    return CurriculumPhase(name, start=0, sequence=1, batch=10, weights={}, lr=lr, max_epochs={}, on_exhausted="error",
                           **keys)


def own(peak: float, warmup: int = 0, shape: str = "cosine", floor: float = 0.0) -> dict:
    return {"peak": peak, "warmup": warmup, "shape": shape, "floor": floor}


STABLE = [Phase("stable", 700, "stable"), Phase("anneal", 300, "decay")]
PLAIN = [Phase("one", 600, "stable"), Phase("two", 400, "stable")]
#: the rate of the optimiser; factors are shares of it
LR = 0.002


@pytest.mark.parametrize(("config", "phases", "values"), [
    (ScheduleConfig(warmup="10%"), STABLE,
     {0: 0, 25: 0.25, 50: 0.5, 100: 1, 400: 1, 700: 1, 775: 0.75, 850: 0.5, 1000: 0}),
    (ScheduleConfig(warmup="100", shape="1-sqrt"), STABLE, {700: 1, 775: 0.5, 850: 1 - 0.5 ** 0.5, 1000: 0}),
    (ScheduleConfig(warmup="0%", shape="cosine", floor=0.1), STABLE, {0: 1, 850: 0.55, 1000: 0.1}),
    (ScheduleConfig(warmup="0%", shape="exp"), STABLE,
     {700: 1, 775: 2 * 0.5 ** 0.25 - 1, 850: 2 ** 0.5 - 1, 1000: 0}),
    (ScheduleConfig(warmup="0%", shape="exp", floor=0.2), STABLE, {850: 0.2 + 0.8 * (2 ** 0.5 - 1), 1000: 0.2}),
    (ScheduleConfig(warmup="0%", decay="20%"), PLAIN, {0: 1, 800: 1, 900: 0.5, 1000: 0}),
    (ScheduleConfig(warmup="0%", decay="0%"), PLAIN, {0: 1, 1000: 1}),
    (ScheduleConfig(kind="cosine", warmup="20%"), PLAIN, {100: 0.5, 200: 1, 600: 0.5, 1000: 0}),
    (ScheduleConfig(kind="linear", warmup="200", floor=0.2), PLAIN, {200: 1, 600: 0.6, 1000: 0.2}),
    (ScheduleConfig(kind="constant", warmup="0%"), PLAIN, {0: 1, 500: 1, 1000: 1}),
    (ScheduleConfig(kind="multistep", warmup="10%", milestones=(("80%", 0.316), ("900", 0.1))), PLAIN,
     {50: 0.5, 100: 1, 799: 1, 800: 0.316, 899: 0.316, 900: 0.1, 1000: 0.1}),
    (ScheduleConfig(kind="inverse-sqrt", warmup="100"), PLAIN, {50: 0.5, 100: 1, 400: 0.5, 900: 1 / 3}),
    # phases with a rate of their own: peaks are rates, not shares
    (ScheduleConfig(warmup="0%", shape="1-sqrt"), [*STABLE, Phase("again", 400, own(0.001, 100))],
     {850: 1 - 0.5 ** 0.5, 999: 1 - (299 / 300) ** 0.5, 1000: 0, 1050: 0.25, 1100: 0.5, 1250: 0.25, 1400: 0}),
    # from where the phase before stood, up …
    (ScheduleConfig(warmup="0%", floor=0.25), [*STABLE, Phase("again", 400, own(0.002, 100, "linear", 0.5))],
     {1000: 0.25, 1050: 0.625, 1100: 1, 1250: 0.75, 1400: 0.5}),
    # … never down, and from nothing with fresh moments
    (ScheduleConfig(kind="constant", warmup="0%"),
     [Phase("a", 100, "stable"), Phase("b", 100, own(0.001, 50, "constant")),
      Phase("c", 100, own(0.001, 50, "exp"), reset_optimizer=True), Phase("d", 100, "stable")],
     {99: 1, 100: 0.5, 150: 0.5, 199: 0.5, 200: 0, 225: 0.25, 250: 0.5, 275: 0.5 * (2 ** 0.5 - 1), 300: 1}),
    # the first phase of all warms up as it says
    (ScheduleConfig(), [Phase("a", 100, own(0.004, 50, "linear"))], {0: 0, 25: 1, 50: 2, 75: 1, 100: 0}),
    # what lies beyond the total does not count in shares of it
    (ScheduleConfig(warmup="10%"), [*PLAIN, Phase("long", 500, own(0.0002, 100, "1-sqrt"), extra=True)],
     {50: 0.5, 100: 1, 900: 1, 950: 0.5, 1000: 0, 1050: 0.05, 1100: 0.1, 1200: 0.05}),
    (ScheduleConfig(kind="cosine", warmup="20%", floor=0.1), [*PLAIN, Phase("more", 500, "stable", extra=True)],
     {600: 0.55, 1000: 0.1, 1300: 0.1}),
])
def test_golden_values(config, phases, values):
    schedule = Schedule(config, phases, LR)
    assert {t: schedule.factor(t) for t in values} == pytest.approx(values, abs=1e-12)


def test_neighbouring_decay_phases_are_one_decay_and_nothing_comes_back_after_it():
    phases = [Phase("a", 400, "stable"), Phase("b", 200, "decay"), Phase("c", 200, "decay"), Phase("d", 200, "stable")]
    schedule = Schedule(ScheduleConfig(warmup="0%", floor=0.2), phases, LR)
    assert [schedule.factor(t) for t in (400, 500, 600, 700, 800, 900)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("lr", ["stable", "decay"])
def test_a_phase_after_the_fall_to_zero_is_refused(lr):
    """Its steps would cost what steps cost and change nothing."""
    phases = [Phase("a", 400, "decay"), Phase("b", 200, "stable"), Phase("c", 200, lr)]
    with pytest.raises(ConfigError, match=r"phase 'b' comes after the learning rate has fallen to 0.*schedule\.floor"):
        Schedule(ScheduleConfig(), phases, LR)
    Schedule(ScheduleConfig(), phases[1:], LR)
    Schedule(ScheduleConfig(), [phases[1], phases[0]], LR)
    Schedule(ScheduleConfig(), [phases[0], Phase("b", 200, own(0.001, 20))], LR)
    with pytest.raises(ConfigError, match="'more' comes after the learning rate has fallen"):
        Schedule(ScheduleConfig(kind="cosine"), [*PLAIN, Phase("more", 500, "stable", extra=True)], LR)


def test_a_second_decay_starts_where_the_first_one_ended():
    schedule = Schedule(ScheduleConfig(warmup="0%", floor=0.5),
                        [Phase("a", 100, "decay"), Phase("b", 100, "stable"), Phase("c", 100, "decay")], LR)
    assert [schedule.factor(t) for t in (0, 50, 100, 200, 250, 300)] == pytest.approx([1, 0.75, 0.5, 0.5, 0.5, 0.5])


def test_cutting_a_phase_with_its_own_rate_does_not_bend_what_has_been():
    curve = own(0.002, 100, "linear")
    whole = Schedule(ScheduleConfig(), [Phase("a", 500, curve)], LR)
    short = Schedule(ScheduleConfig(), [Phase("a", 200, curve, reserved=500), Phase("b", 300, own(0.002))], LR)
    assert [short.factor(t) for t in (50, 100, 199)] == [whole.factor(t) for t in (50, 100, 199)]


def test_the_rate_grows_with_the_root_of_the_batch_where_asked():
    phases = [Phase("a", 400, "stable", ramp=[[100, 1], [200, 4]]), Phase("b", 100, "stable")]
    values = {50: math.sqrt(0.1), 99: math.sqrt(0.1), 150: math.sqrt(0.4), 200: 1, 399: 1, 450: 1}
    schedule = Schedule(ScheduleConfig(kind="constant", warmup="0%", batch_rate="sqrt"), phases, LR)
    assert {t: schedule.factor(t) for t in values} == pytest.approx(values)
    schedule = Schedule(ScheduleConfig(kind="constant", warmup="0%"), phases, LR)
    assert {schedule.factor(t) for t in values} == {1.0}


def test_spans():
    assert span("2%", 5000) == 100
    assert span("0.5M", 10) == 500_000
    for bad in ("200%", "fast", "-3"):
        with pytest.raises(ValueError, match=r"%|count"):
            span(bad, 100)


def test_errors_name_phase_and_remedy():
    with pytest.raises(ConfigError, match=r"phase 'anneal' says lr: decay; use kind: wsd"):
        Schedule(ScheduleConfig(kind="cosine"), STABLE, LR)
    with pytest.raises(ConfigError, match=r"phase 'x': lr: 'decai' is not known; write lr: stable or lr: decay"):
        Schedule(ScheduleConfig(), [Phase("x", 10, "decai")], LR)


@pytest.mark.parametrize(("keys", "message"), [
    ({"kind": "multistep"}, r"milestones, e\.g\. \[\[80%, 0\.316\]"),
    ({"milestones": [["80%", 0.3]]}, "go with kind: multistep"),
    ({"kind": "multistep", "milestones": [["80%", 0]]}, "share of the peak, above 0"),
    ({"kind": "multistep", "milestones": [["180%", 0.1]]}, "not between 0% and 100%"),
    ({"kind": "inverse-sqrt", "warmup": "0%"}, "needs one"),
    ({"floor": 2}, "floor is a share"),
    ({"warmup": "300%"}, r"train\.schedule: warmup: '300%' is not between 0% and 100%; write tokens"),
    ({"decay": "some"}, r"train\.schedule: decay: .*; write tokens"),
    ({"batch_rate": "linear"}, "not one of 'sqrt'"),
])
def test_errors_of_the_configuration(keys, message):
    with pytest.raises(ConfigError, match=message):
        build(ScheduleConfig, keys, "train.schedule")


def test_a_training_with_a_growing_batch_and_a_rate_of_its_own(tmp_path, alone):
    """Steps, tokens and rates as written; an interruption while the batch grows changes nothing; the plan shows it."""
    folder = str(make_run(tmp_path, total=3840, documents=200, train={
        "optimizer": {"lr": 0.01}, "schedule": {"kind": "constant", "warmup": "0%", "batch_rate": "sqrt"}}, phases=[
        {"name": "grow", "until": "50%", "sequence": 32, "batch": {0: 32, 320: 64, 960: 128},
         "mix": {"web": 70, "code": 30}},
        {"name": "again", "until": "100%", "mix": {"code": 100},
         "lr": {"peak": 0.004, "warmup": 640, "shape": "linear", "floor": 0.5}}]))
    whole, parts = (open_run(folder, None, str(tmp_path / name), []) for name in ("whole", "parts"))
    train(whole, alone, None, lambda text: None)
    for stop in (7, 12, None):
        train(parts, alone, stop, lambda text: None)
    found = [[x for x in read(run.out / "metrics.jsonl") if x["event"] == "step"] for run in (whole, parts)]
    assert [[x["loss"] for x in lines] for lines in found][1] == pytest.approx([x["loss"] for x in found[0]], abs=1e-5)
    tokens = [0, *(x["tokens"] for x in found[0])]
    assert [b - a for a, b in pairwise(tokens)] == [32] * 10 + [64] * 11 + [128] * 7 + [128] * 15
    rates = [x["lr"] for x in found[0]]
    assert rates[:28] == pytest.approx([0.005] * 10 + [0.01 * 0.5 ** 0.5] * 11 + [0.01] * 7)
    assert rates[28:33] == pytest.approx([0.004] * 5)                 # from above it does not rise
    assert rates[33:] == pytest.approx([0.004 - 0.002 * (128 * i + 64) / 1280 for i in range(10)])
    shown = plan(whole, 1)
    assert "32→128" in shown and "43 steps" in shown
    told = {row[0]: row[5:] for line in shown.splitlines() if len(row := line.split()) == 7}
    assert [told[name] for name in ("grow", "again")] == \
        [[f"{rates[i]:.2e}" for i in ends] for ends in ((0, 27), (28, 42))]      # not a rate of the phase after it
