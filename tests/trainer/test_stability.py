"""A step with an outlier changes nothing, on any rank and without waiting for the device. Going back and skipping steps
gives the same training as if it had never read their data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.trainer import killed_anywhere
from tests.trainer.processes import begin, launch
from tests.trainer.stability_ranks import REWIND, garbage, opened, poisoned, scenarios
from tests.trainer.synthetic import make_run, quiet
from tokenizer.mixture.steps import TrainingStep
from trainer.base.config import ConfigError, TrainingError
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.ledger import Ledger
from trainer.loop import train as loop
from trainer.loop.config import RewindConfig, StabilityConfig, TriggerConfig
from trainer.loop.high_loss import HighLossRows
from trainer.loop.run import open_run
from trainer.loop.stability import Rewind, SpikeDetector, StabilityMonitor, StepRecord, rewind_target
from trainer.loop.train import train
from trainer.observe.metrics import read
from trainer.observe.worst_rows import read_high_loss

CPU = torch.device("cpu")


def steps(out: Path) -> dict[int, dict]:
    """Return {step: its metrics}. Steps that were undone by a rewind are not among them."""
    lines = [line for line in read(out / "metrics.jsonl") if line["event"] == "step"]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line for line in lines}


def losses(out: Path) -> dict[int, float]:
    return {step: line["loss"] for step, line in steps(out).items()}


# -- the detector alone ----------------------------------------------------------------------------------------------
def judged(detector: SpikeDetector, loss: float, norm: float, targets: float = 10.0, phase: int = 0) -> list[float]:
    return detector.judge(phase, torch.tensor([loss * targets, 0.0, targets, 0.0], dtype=torch.float64),
                       torch.tensor(norm)).tolist()


def test_the_guard_is_the_rule_of_olmo_over_accepted_steps():
    """Against numpy: mean and standard deviation of the last accepted, bad ones left out, after `warm` of them."""
    rng = np.random.default_rng(0)
    detector = SpikeDetector(StabilityConfig(sigma=3.0, window=16, warm=8), CPU)
    kept: list[tuple[float, float]] = []
    bad = 0
    for i in range(200):
        loss, norm = 3 + 0.1 * rng.standard_normal(), 1 + 0.05 * rng.standard_normal()
        if i % 11 == 5:
            loss += [0.2, 0.5, math.nan, math.inf][i % 4]
        if i % 13 == 7:
            norm += [0.1, 0.3, math.nan, 1e30][i % 4]
        norm = float(np.float32(norm))
        last = np.array(kept[-16:])
        limit = last.mean(0) + 3 * last.std(0, ddof=1) if len(kept) >= 8 else np.full(2, math.inf)
        expected = not (math.isfinite(loss) and math.isfinite(norm)) or loss > limit[0] or norm > limit[1]
        got = judged(detector, loss, norm)
        assert got[0] == expected, i
        assert got[2:] == pytest.approx(limit.tolist())
        assert got[1] == pytest.approx(last[:, 0].mean()) if len(kept) >= 8 else math.isnan(got[1])
        if not expected:
            kept.append((loss, norm))
        bad += expected
    assert 15 < bad < 60


def test_only_what_is_no_number_is_left_out_without_a_sigma_and_while_it_is_warming_up():
    for config in (StabilityConfig(sigma=None, warm=2), StabilityConfig(warm=10)):
        detector = SpikeDetector(config, CPU)
        got = [judged(detector, *pair)[0] for pair in ((1, 1), (1.1, 1), (1, 1.1), (1e9, 1), (1, 1e9), (math.nan, 1),
                                                    (1, math.inf))]
        assert got == [0, 0, 0, 0, 0, 1, 1]


def test_a_new_phase_has_another_loss_and_prompts_alone_say_nothing():
    detector = SpikeDetector(StabilityConfig(window=8, warm=4), CPU)
    rng = np.random.default_rng(1)
    for _ in range(8):
        assert judged(detector, 1 + 0.01 * rng.standard_normal(), 1)[0] == 0
    before = detector.state()
    assert judged(detector, 0, 0, targets=0)[0] == 0
    assert detector.state() == before
    assert judged(detector, 2, 1)[0] == 1
    assert judged(detector, 2, 1, phase=1)[0] == 0


def test_the_guard_goes_on_as_it_was():
    config = StabilityConfig(sigma=2.0, window=8, warm=4)
    rng = np.random.default_rng(2)
    pairs = rng.normal(1, 0.1, (40, 2))
    whole, first, second = (SpikeDetector(config, CPU) for _ in range(3))
    expected = [judged(whole, *pair) for pair in pairs]
    got = [judged(first, *pair) for pair in pairs[:19]]
    second.load(json.loads(json.dumps(first.state())))
    got += [judged(second, *pair) for pair in pairs[19:]]
    assert str(got) == str(expected)
    second.load(None)
    assert math.isnan(judged(second, 1, 1)[1])
    SpikeDetector(StabilityConfig(window=4, warm=2), CPU).load(first.state())      # another window: anew, no error


# -- the policy alone ------------------------------------------------------------------------------------------------
def seen(step: int, loss: float | None = 1.0, bad: bool = False, mean: float = 1.0) -> StepRecord:
    return StepRecord(step, loss, 1.0, bad, mean, 2.0, 2.0)


def reviewed(config: StabilityConfig, rows: list[StepRecord], parts: int = 1) -> Rewind | None:
    policy, size = StabilityMonitor(config), -(-len(rows) // parts)
    for start in range(0, len(rows), size):
        after = StabilityMonitor(config)
        after.load(json.loads(json.dumps(policy.state())))              # as over a resume
        policy = after
        if found := policy.review(rows[start:start + size], "explain"):
            return found
    return None


@pytest.mark.parametrize("parts", [1, 40])
def test_triggers(parts):
    skips = StabilityConfig(rewind=RewindConfig(TriggerConfig(skips=3, within=10), skip=40))
    rows = [seen(s, bad=s in (50, 55, 61, 64)) for s in range(41, 81)]
    assert reviewed(skips, rows, parts) == Rewind(55, 64, 35, 75, "3 updates skipped within 10", 5)
    rows = [seen(s, bad=s in (50, 55, 60)) for s in range(41, 81)]
    assert reviewed(skips, rows, parts) is None
    above = StabilityConfig(rewind=RewindConfig(TriggerConfig(loss_above=0.5, for_=4), skip=9))
    high = {47: 1.6, 48: 1.6, 49: 1.6, 52: 1.6, 53: None, 54: math.nan, 55: 9.0, 56: 1.51}
    rows = [seen(s, high.get(s, 1.5)) for s in range(41, 81)]
    assert reviewed(above, rows, parts) == Rewind(
        53, 56, 49, 58, "loss more than 0.5 above the mean 1.000 for 4 steps", 5)
    assert reviewed(above, [seen(s, 9.0, mean=math.nan) for s in range(41, 81)], parts) is None


@pytest.mark.parametrize("parts", [1, 40])
def test_it_stops_when_there_is_no_use(parts):
    config = StabilityConfig(in_a_row=3, most=5, window=20)
    with pytest.raises(TrainingError, match=r"step 52: .*diverged: 3 steps on end.*`explain 50`.*train\.skip"):
        reviewed(config, [seen(s, 9.0, s in (42, 43, 50, 51, 52)) for s in range(41, 81)], parts)
    with pytest.raises(TrainingError, match=r"step 60: .*5 of the last 20 steps"):
        reviewed(config, [seen(s, 9.0, s in (36, 48, 50, 53, 56, 60)) for s in range(31, 81)], parts)
    assert reviewed(config, [seen(s, bad=s % 5 == 0) for s in range(41, 81)], parts) is None


def test_why_a_step_is_left_out():
    row = StepRecord(3, 4.5, math.inf, True, 1.0, 2.25, math.inf)
    assert row.why == "loss 4.5 > 2.25, norm inf"
    assert row._replace(loss=math.nan, norm=1.0, norm_limit=2.0).why == "loss nan"
    assert row._replace(loss=None).why == "norm inf"


def test_the_way_back_leads_before_the_steps_to_pass_over():
    at = {step: SimpleNamespace(step=step) for step in (10, 20, 30)}
    rewind = Rewind(first=25, step=31, start=21, stop=41, why="x", budget=5)
    assert rewind_target([at[10], at[20], at[30]], rewind) == (at[20], 21)
    assert rewind_target([at[10], at[30]], rewind) == (at[10], 21)
    assert rewind_target([SimpleNamespace(step=22), at[30]], rewind)[1] == 23             # only what it has not learned
    assert rewind_target([], rewind) == (None, 21)
    with pytest.raises(TrainingError, match=r"since step 25, but no checkpoint before.*checkpoint\.keep"):
        rewind_target([at[30]], rewind)


@pytest.mark.parametrize(("key", "message"), [
    ("stability.rewind={trigger: {loss_above: 0.5, for: 20}, skip: 30}", "skip at least 40: twice"),
    ("stability.rewind={trigger: {within: 20}}", "give skips or loss_above"),
    ("stability.rewind={trigger: {loss_above: 0.5, fore: 20}}", "unknown key.*did you mean 'for'"),
    ("stability.sigma=0", "sigma must be > 0"), ("skip=[[5, 5]]", r"\[first, stop\] step numbers from 1"),
    ("skip=[[0, 5]]", "from 1"), ("skip=[3, 5]", r"skip\[0\]: expected a list")])
def test_configuration_errors(tmp_path_factory, key, message):
    with pytest.raises(ConfigError, match=message):
        open_run(str(plain_run(tmp_path_factory)), None, None, [key])


# -- in a training ---------------------------------------------------------------------------------------------------
_made: list[Path] = []


def plain_run(tmp_path_factory) -> Path:
    if not _made:
        _made.append(make_run(tmp_path_factory.mktemp("store"), documents=200))
    return _made[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return plain_run(tmp_path_factory)


@pytest.fixture(scope="module")
def out(folder, tmp_path_factory):
    """The results of `scenarios` on one rank and on two, and of the trainings that they are compared with."""
    from trainer.parallel.world import world

    out = tmp_path_factory.mktemp("out")
    with world("cpu") as here:
        scenarios(str(folder), str(out / "one"), here)
        train(opened(str(folder), str(out / "plain")), here, 18, quiet)
        train(opened(str(folder), str(out / "manual"), "skip=[[10, 16]]"), here, 18, quiet)
    launch("tests.trainer.stability_ranks", 2, str(folder), str(out / "two"))
    return out


def test_a_poisoned_rank_is_no_step_of_any(out):
    plain = losses(out / "plain")
    for ranks in ("one", "two"):
        found = steps(out / ranks / "poisoned")
        assert [s for s, line in found.items() if line.get("skipped")] == [9]
        assert found[9]["grad_norm"] is None
        assert "norm nan" in found[9]["why"]
        assert all(abs(found[s]["loss"] - plain[s]) < 1e-4 for s in range(1, 10))      # step 9 itself saw no poison
        assert found[10]["loss"] != pytest.approx(plain[10], abs=1e-5)                 # but moved nothing
        assert len(found) == 10
    one, two = losses(out / "one" / "poisoned"), losses(out / "two" / "poisoned")
    assert one == pytest.approx(two, abs=1e-4)


def test_a_spike_is_left_out_and_said(out):
    for ranks in ("one", "two"):
        found = steps(out / ranks / "spike")
        assert [s for s, line in found.items() if line.get("skipped")] == [14]
        assert found[14]["why"].startswith("loss ")
        assert " > " in found[14]["why"]
        assert found[14]["loss"] > found[13]["loss"] + 0.5
    assert losses(out / "one" / "spike") == pytest.approx(losses(out / "two" / "spike"), abs=1e-4)


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_going_back_gives_the_training_that_never_saw_the_steps(out, ranks):
    """Also when (two ranks) it died between deciding and going back; the same as passing them over by hand."""
    ledger = Ledger.read(out / ranks / "rewind")
    assert [(line["event"], line["step"], line["steps"], line["back"], line["checkpoint"]) for line in ledger.lines] \
        == [("rewind", 14, [10, 16], 6, "step_00000006")]
    found, manual = steps(out / ranks / "rewind"), steps(out / "manual")
    assert list(found) == list(range(1, 19))
    assert {s for s, line in found.items() if line.get("skipped")} == set(range(10, 16))
    assert all(found[s]["loss"] is None and "went back from step 14 to 6" in found[s]["why"] for s in range(10, 16))
    # step 16 is garbage too, but not enough to go back again
    same = [s for s in range(1, 17) if s not in range(10, 16)]
    assert [found[s]["loss"] for s in same[:-1]] == pytest.approx([manual[s]["loss"] for s in same[:-1]], abs=1e-4)
    assert [found[s]["lr"] for s in same] == [manual[s]["lr"] for s in same]
    assert [line["samples"] for line in found.values()] == [line["samples"] for line in steps(out / "plain").values()]
    kept = ckpt.complete(out / ranks / "rewind" / "checkpoints")
    assert [c.step for c in kept] == [6, 12, 18]
    assert all(ledger.sound(c.meta) for c in kept)
    # of what was gone back before, the rows are still known
    assert {s for s in range(10, 17) if read_high_loss(out / ranks / "rewind", s, s < 16)} >= {13, 14, 16}
    assert not read_high_loss(out / ranks / "rewind", 15, True)


def test_passing_over_moves_no_position(out):
    manual, plain = steps(out / "manual"), steps(out / "plain")
    assert [(s["step"], s["samples"], s["tokens"]) for s in manual.values()] == \
        [(s["step"], s["samples"], s["tokens"]) for s in plain.values()]
    assert all(manual[s]["why"] == "train.skip" and manual[s]["loss"] is None for s in range(10, 16))
    assert [manual[s]["lr"] for s in range(16, 19)] == [plain[s]["lr"] for s in range(16, 19)]
    assert manual[16]["loss"] != plain[16]["loss"]
    assert losses(out / "manual")[9] == plain[9]["loss"]


def test_the_worst_rows_are_those_of_the_highest_loss_on_any_number_of_ranks(out):
    """Of each printed interval three; a row is named by its sample."""
    one, two = ([row for s in range(1, 17) for row in read_high_loss(out / ranks / "spike", s)]
                for ranks in ("one", "two"))
    assert [(r["step"], r["sample"], r["stream"]) for r in one] == [(r["step"], r["sample"], r["stream"]) for r in two]
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], abs=1e-4)
    spike = steps(out / "one" / "spike")[14]
    rows = [r for r in one if r["step"] == 14]
    assert rows
    assert all(spike["samples"] - 5 <= r["sample"] < spike["samples"] for r in rows)
    assert max(r["loss"] for r in rows) >= spike["loss"]


def test_resuming_judges_as_if_it_had_not_stopped(folder, out, tmp_path, alone):
    """SpikeDetector and policy come back with the checkpoint: the spike right after it is seen."""
    with garbage(14):
        for stop in (13, 16):
            train(opened(str(folder), str(tmp_path)), alone, stop, quiet)
    assert losses(tmp_path) == pytest.approx(losses(out / "one" / "spike"), abs=1e-6)
    assert [s for s, line in steps(tmp_path).items() if line.get("skipped")] == [14]


def test_ranges_may_be_given_on_resume_for_what_lies_ahead(folder, out, tmp_path, alone):
    train(opened(str(folder), str(tmp_path)), alone, 8, quiet)
    with pytest.raises(ConfigError, match=r"step 8 has been performed"):
        train(opened(str(folder), str(tmp_path), "skip=[[8, 16]]"), alone, 18, quiet)
    train(opened(str(folder), str(tmp_path), "skip=[[10, 16]]"), alone, 18, quiet)
    assert losses(tmp_path) == pytest.approx(losses(out / "manual"), abs=1e-6)


def test_the_end_may_be_skipped(tmp_path, alone):
    folder = make_run(tmp_path / "store", documents=60, total=1920)
    summary = train(opened(str(folder), str(tmp_path), "skip=[[8, 99]]"), alone, None, quiet)
    assert summary["steps"] == 11
    assert ckpt.latest(tmp_path / "checkpoints").step == 11
    assert [s for s, line in steps(tmp_path).items() if line.get("skipped")] == [8, 9, 10, 11]


def test_a_checkpoint_before_the_first_performed_step_is_resumed(folder, tmp_path, alone):
    """The optimiser has no moments yet; a checkpoint without them could not be read."""
    ahead = "skip=[[1, 9]]"
    train(opened(str(folder), str(tmp_path / "whole"), ahead), alone, 12, quiet)
    train(opened(str(folder), str(tmp_path / "parts"), ahead), alone, 6, quiet)
    train(opened(str(folder), str(tmp_path / "parts"), ahead), alone, 12, quiet)
    performed = {name: [losses(tmp_path / name)[s] for s in (9, 10, 11, 12)] for name in ("whole", "parts")}
    assert performed["parts"] == pytest.approx(performed["whole"], abs=1e-6)


def test_an_infinite_loss_is_worst_and_no_number(tmp_path, alone):
    rows = HighLossRows(tmp_path, 2, ["web"], alone)
    nll = torch.tensor([1.0, math.inf, 2.0], dtype=torch.float64)
    rows.add(TrainingStep(0, 0, 0, 3, 0), 0, nll, torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))
    rows.unpack(rows.packed().tolist())
    rows.write()
    assert [(line["sample"], line["loss"]) for line in read_high_loss(tmp_path, 1)] == [(1, None), (2, 2.0)]


def test_without_a_checkpoint_it_goes_back_to_the_start(folder, out, tmp_path, alone):
    said: list[str] = []
    with garbage(13, 14):
        train(opened(str(folder), str(tmp_path), *REWIND, "checkpoint.every=1000"), alone, 16, said.append)
    assert Ledger.read(tmp_path).lines[0]["checkpoint"] == "start"
    assert losses(tmp_path) == pytest.approx({s: x for s, x in losses(out / "manual").items() if s <= 16}, abs=1e-6)
    assert any("back to step 0, to skip steps 10 to 15" in text for text in said)


def test_a_used_up_budget_stops_with_a_report(folder, tmp_path, alone):
    with garbage(*range(18, 40)), pytest.raises(TrainingError, match=r"the steps 15 to 20 have been skipped "
                                                                     r"already and train\.stability\.rewind\.budget"):
        train(opened(str(folder), str(tmp_path), *REWIND, "stability.rewind.budget=1"), alone, None, quiet)
    ledger = Ledger.read(tmp_path)
    assert len(ledger.rewinds) == 1
    assert ckpt.latest(tmp_path / "checkpoints").step >= ledger.rewinds[-1]["back"]


def test_no_step_waits_for_the_device(folder, tmp_path, alone):
    """Nothing on the way of a step reads a tensor: here as on CUDA, where that would stall it."""
    inside: list[int] = []
    waits: list[str] = []
    window_add, read_batch = loop.MetricsBuffer.add, loop.forward_backward

    def begin(*arguments):
        inside.append(1)
        return read_batch(*arguments)

    def end(self, row):
        window_add(self, row)
        inside.clear()

    def watched(name):
        method = getattr(torch.Tensor, name)

        def call(self, *arguments, **options):
            if inside:
                waits.append(name)
            return method(self, *arguments, **options)
        return mock.patch.object(torch.Tensor, name, call)

    set_item = torch.Tensor.__setitem__

    def assigned(self, index, value):
        if inside and not isinstance(value, torch.Tensor) and self[index].ndim == 0:
            waits.append("__setitem__")                # torch copies the number from the host, and waits for that
        return set_item(self, index, value)

    names = ("item", "tolist", "__bool__", "__float__", "__index__", "cpu", "numpy", "nonzero")
    patches = [*map(watched, names), mock.patch.object(torch.Tensor, "__setitem__", assigned)]
    with mock.patch.object(loop, "forward_backward", begin), mock.patch.object(loop.MetricsBuffer, "add", end), \
            poisoned(alone, 0, 5):
        for patch in patches:
            patch.start()
        try:
            train(opened(str(folder), str(tmp_path)), alone, 12, quiet)
        finally:
            for patch in patches:
                patch.stop()
    assert waits == []
    assert steps(tmp_path)[5]["skipped"]


@pytest.mark.slow
def test_a_kill_between_any_two_lines_changes_nothing(folder, tmp_path):
    """Six of the 250 lines of what writes ledger, checkpoints and worst rows, and of going back."""
    log = tmp_path / "log"
    log.touch()
    process = begin(killed_anywhere.report, str(folder), str(tmp_path / "out"), 6, 1, log=str(log))
    process.join(1200)
    assert process.exitcode == 0, log.read_text()[-5000:]
