"""Pretraining in stages: a stable phase, an anneal, and a long-context phase beyond the total, with a learning rate,
RoPE settings and optimiser state of its own. Also edits of a training that has begun."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.synthetic import language as documents
from tests.trainer.synthetic import losses, make_run, quiet, steps, write_shards
from tokenizer.mixture.curriculum import Curriculum
from trainer.__main__ import main
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.ledger import Ledger
from trainer.loop.run import differences, open_run
from trainer.loop.train import train
from trainer.observe.metrics import read

PEAK = 0.004
PHASES = [
    {"name": "stable", "until": "60%", "sequence": 32, "batch": 160, "mix": {"web": 70, "code": 30}},
    {"name": "anneal", "until": "100%", "mix": {"web": 30, "code": 70}, "lr": "decay"},
    {"name": "long", "extra": 960, "sequence": 64, "batch": 192, "rope_theta": 2e6, "reset_optimizer": True,
     "rope_scaling": {"kind": "linear", "factor": 2}, "lr": {"peak": PEAK, "warmup": 384, "shape": "cosine"}}]
SET = ["evaluate.every=1000", "log_every=1000", "checkpoint.every=4", "schedule.warmup=320"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("store"), documents=400, total=1600, phases=PHASES)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The output folder of the uninterrupted training: 6 steps of the phase `stable`, 4 of `anneal`, 5 of `long`."""
    from trainer.parallel.world import world

    out = tmp_path_factory.mktemp("whole")
    with world("cpu") as here:
        train(open_run(str(folder), None, str(out), SET), here, None, quiet)
    return out


def test_phases_are_what_they_say(folder, whole):
    curriculum = Curriculum.load(folder / "curriculum.json")
    assert [(p.name, p.steps, p.sequence, p.extra) for p in curriculum.phases] == [
        ("stable", 6, 32, False), ("anneal", 4, 32, False), ("long", 5, 64, True)]
    lines = steps(whole)
    assert [line["phase"] for line in lines] == ["stable"] * 6 + ["anneal"] * 4 + ["long"] * 5
    rates = [line["lr"] for line in lines]
    assert rates[2:6] == [0.01] * 4                       # warm-up over two steps
    assert rates[6:10] == pytest.approx([0.01 * x for x in (7 / 8, 5 / 8, 3 / 8, 1 / 8)])
    # a ramp from nothing (the optimiser begins anew) to the phase's own peak over two of its five steps, then cosine
    assert rates[10:12] == pytest.approx([PEAK / 4, PEAK * 3 / 4])
    assert PEAK > rates[12] > rates[13] > rates[14] > 0


def test_resumed_in_the_middle_of_each_phase_it_equals_the_uninterrupted_run(folder, whole, tmp_path, alone):
    """Also with a stop exactly at each border."""
    for stop in (3, 6, 8, 10, 12):
        train(open_run(str(folder), None, str(tmp_path), SET), alone, stop, quiet)
    train(open_run(str(folder), None, str(tmp_path), SET), alone, None, quiet)
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-6)
    a, b = (ckpt.latest(out / "checkpoints").meta for out in (whole, tmp_path))
    assert a["chain"] == b["chain"] and a["phase"] == "long"
    ends = [c.step for c in ckpt.complete(whole / "checkpoints") if c.meta["pinned"]]
    assert ends == [6, 10, 15]


def test_positions_and_moments_are_the_phase_s(folder, whole, tmp_path, alone):
    """Red when the phase's theta, its scaling or the reset is left out: the losses then are others."""
    run = open_run(str(folder), None, str(tmp_path), SET)
    *before, long = run.curriculum.phases
    for i, change in enumerate(({"rope_theta": None}, {"rope_scaling": None}, {"reset_optimizer": False})):
        other = replace(run, curriculum=replace(run.curriculum, phases=(*before, replace(long, **change))),
                        out=tmp_path / str(i))
        train(other, alone, 13, quiet)
        got, want = losses(other.out), losses(whole)
        assert {s: got[s] for s in range(1, 11)} == pytest.approx({s: want[s] for s in range(1, 11)}, abs=1e-6)
        assert max(abs(got[s] - want[s]) for s in (11, 12, 13)) > 1e-4, change


@pytest.mark.parametrize("change", [{"rope_theta": 1e4}, {"rope_scaling": None}, {"reset_optimizer": False},
                                    {"lr": {"peak": 0.1, "warmup": 0, "shape": "linear", "floor": 0.0}},
                                    {"ramp": [[3, 1]]}, {"groups": {"all": ["web"]}}], ids=str)
def test_what_has_begun_cannot_become_another(folder, tmp_path, change):
    run = open_run(str(folder), None, str(tmp_path), SET)
    meta = {"config": run.config.identity(), "curriculum": run.curriculum.to_json(), "tokens": 2368}
    *before, long = run.curriculum.phases
    other = replace(run, curriculum=replace(run.curriculum, phases=(*before, replace(long, **change))))
    [key] = change
    assert [line.split(":")[0] for line in differences({**meta, "samples": long.stop - 3}, other)] == \
        [f"phase long.{key}"]
    assert differences({**meta, "samples": long.stop - 3}, run) == []
    assert differences({**meta, "samples": long.start, "tokens": 1600}, other) == []          # it lies ahead


def test_many_streams_in_the_order_of_an_earlier_version_are_not_gone_on_with(folder, tmp_path):
    run = open_run(str(folder), None, str(tmp_path), SET)
    *before, long = run.curriculum.phases
    many = replace(run.curriculum, phases=(*before, replace(long, weights={f"s{i}": 1 for i in range(9)})))
    meta = {"config": run.config.identity(), "curriculum": many.to_json(), "tokens": 2368, "samples": long.stop - 3}
    assert differences(meta, replace(run, curriculum=many)) == []
    meta["curriculum"]["version"] = 1
    [said] = differences(meta, replace(run, curriculum=many))
    assert "phase long: an earlier Tokenmill read its 9 streams in another order" in said


def test_reset_is_what_a_new_optimiser_is(alone):
    parameters = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    old, new = (torch.optim.AdamW(ps, lr=0.1, fused=True) for ps in (parameters, twins))

    def step(optimizer, ps, scale):
        for i, p in enumerate(ps):
            p.grad = torch.full_like(p, scale * (i + 1))
        optimizer.step()

    step(old, parameters, 5.0)
    ckpt.reset(old)
    for p, q in zip(parameters, twins):
        q.data.copy_(p.data)
    for scale in (-1.0, 2.0):
        step(old, parameters, scale)
        step(new, twins, scale)
    assert all(torch.equal(p, q) for p, q in zip(parameters, twins))


# -- edits -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def store(tmp_path):
    """A run without the phase `long`, in a store that also has a stream that the run does not have."""
    run = make_run(tmp_path / "store", documents=400, total=1600, phases=PHASES[:2])
    folder = tmp_path / "store" / "shards" / "fresh"
    for split, n in (("train", 300), ("val", 8)):
        write_shards(folder / f"split={split}", "fresh", split, documents(77, n, chain=9), 2)
    return run


def edit(run: Path, at: str, phases: str, *more: str) -> int:
    file = run.parent / "phases.yaml"
    file.write_text(phases)
    settings = [x for key in SET for x in ("--set", key)]
    return main(["edit", str(run), "--at", at, "--phases", str(file), *settings, *more])


LONG = "- {name: long, extra: 960, sequence: 64, batch: 192, rope_theta: 2e6, reset_optimizer: true, " \
       "rope_scaling: {kind: linear, factor: 2}, lr: {peak: 0.004, warmup: 384, shape: cosine}}"


def test_a_long_phase_added_to_a_finished_run_continues_it(store, folder, whole, alone, capsys):
    """…and is the run that had it from the beginning."""
    train(open_run(str(store), None, None, SET), alone, None, quiet)
    assert json.loads((store / "train" / "summary.json").read_text())["steps"] == 10
    assert edit(store, "now", LONG) == 0
    said = capsys.readouterr().out
    assert "phase long: new, 960 tokens from sample 50 on" in said and "curriculum.1.json" in said
    assert Curriculum.load(store / "curriculum.json") == Curriculum.load(folder / "curriculum.json")
    told: list[str] = []
    summary = train(open_run(str(store), None, None, SET), alone, None, told.append)
    assert summary["steps"] == 15
    assert losses(store / "train") == pytest.approx(losses(whole), abs=1e-6)
    assert any("phase long: new" in text for text in told)
    [line] = [x for x in Ledger.read(store / "train").lines if x["event"] == "edit"]
    assert (line["step"], line["changes"]) == (10, ["phase long: new, 960 tokens from sample 50 on"])
    resumed = next(x for x in read(store / "train" / "metrics.jsonl") if x["event"] == "resume")
    assert "phase long: new, 960 tokens from sample 50 on" in resumed["changed"]


def test_a_live_edit_takes_over_at_its_step_and_may_bring_a_stream(store, alone, capsys):
    run = open_run(str(store), None, None, SET)
    train(run, alone, 4, quiet)
    before, old = losses(store / "train"), (store / "curriculum.json").read_bytes()
    assert edit(store, "5", "- {name: more, until: 100%, mix: {fresh: 50, web: 50}, lr: decay}") == 0
    assert (store / "curriculum.1.json").read_bytes() == old
    made = open_run(str(store), None, None, SET)
    assert [(p.name, p.steps) for p in made.curriculum.phases] == [("stable", 5), ("more", 5)]
    assert [s.name for s in made.curriculum.streams] == ["code", "web", "fresh"]
    said = capsys.readouterr().out
    assert "phase stable.samples: was 30, now 25\nphase anneal: taken out\nphase more: new, 800 tokens from" in said
    train(made, alone, None, quiet)
    lines = steps(store / "train")
    assert {s["step"]: s["loss"] for s in lines[:4]} == before
    assert [("fresh" in s["streams"]) for s in lines] == [False] * 5 + [True] * 5
    assert all(set(s["streams"]) <= {"fresh", "web"} for s in lines[5:])
    at = ckpt.latest(store / "train" / "checkpoints")
    assert main(["verify", str(store)]) == 1             # there is no tokenizer in this store; the data is right
    said = capsys.readouterr().out
    assert f"ok       hash chain {at.meta['chain']} of 10 steps" in said and "fresh" in said


def test_edits_that_cannot_be_are_refused_and_change_nothing(store, alone, capsys):
    train(open_run(str(store), None, None, SET), alone, 4, quiet)
    before = (store / "curriculum.json").read_bytes()
    more = "- {name: more, until: 100%, mix: {web: 100}}"
    for at, phases, message in (
            ("3", more, "the latest checkpoint is of step 4"),
            ("99", more, "give a step from 1 to 10"),
            ("soon", more, "or now"),
            ("5", "- {name: more, untl: 100%}", "phases[0].untl: unknown key"),
            ("5", "- {name: more, until: 100%, mix: {wbe: 1}}", "stream wbe is not one of the run's (code, web)"),
            ("5", "- {name: more, until: 20%, mix: {web: 1}}", "is not after the phase before it"),
            ("5", "- {name: more, extra: 1M, mix: {web: 1}}", "exhausts stream 'web'"),
            ("5", "more", "expected a list of phases"),
            ("5", "- {name: stable, until: 100%}", "two phases would be called 'stable'"),
            ("5", "- {name: a, until: 70%, lr: decay}\n- {name: b, until: 100%, lr: stable}", "would learn nothing"),
            ("5", "- {name: long, until: 100%, sequence: 64, batch: 192, rope_scaling: {kind: lin, factor: 2}}",
             "rope_scaling.kind")):
        assert edit(store, at, phases) == 2, phases
        assert message in (said := capsys.readouterr().err), said
    assert (store / "curriculum.json").read_bytes() == before
    assert [p.name for p in store.glob("curriculum*")] == ["curriculum.json"]
    # a training that ran on beyond the edit's step is refused, not bent
    metrics = store / "train" / "metrics.jsonl"
    done = metrics.read_text()
    metrics.write_text(done + '{"v": 1, "event": "step", "step": 6, "loss": 3.0}\n')      # as if it were running
    assert edit(store, "5", more) == 0
    assert "warning: step 6 has been done already" in capsys.readouterr().out
    metrics.write_text(done)
    later = open_run(str(store), None, None, SET)
    behind = replace(later, curriculum=Curriculum.loads(before, "before"))
    train(behind, alone, 8, quiet)
    with pytest.raises(ckpt.CheckpointError, match="cut at sample 25, but 40 samples have been read") as error:
        train(later, alone, None, quiet)
    assert f"Take these back (older curricula: {store / 'curriculum.1.json'}), or start anew" in str(error.value)
    assert edit(store, "now", more) == 2 and "curriculum.N.json" in capsys.readouterr().err


def test_an_edit_may_bring_another_train_section(store, alone, capsys):
    train(open_run(str(store), None, None, SET), alone, 4, quiet)
    new = store / "new.yaml"
    text = (store / "recipe.yaml").read_text()
    new.write_text(text.replace("lr: 0.01", "lr: 0.02"))
    phases = "- {name: more, until: 100%, mix: {web: 100}, lr: decay}"
    assert edit(store, "5", phases, "--recipe", str(new)) == 2
    assert "train.optimizer.lr: checkpoint 0.01, now 0.02" in capsys.readouterr().err
    assert not (store / "curriculum.1.json").exists()
    new.write_text(text.replace("log_every: 100", "log_every: 7"))
    assert edit(store, "5", phases, "--recipe", str(new)) == 0
    assert (store / "recipe.1.yaml").read_text() == text
    assert open_run(str(store), None, None, []).config.log_every == 7
    told: list[str] = []
    train(open_run(str(store), None, None, SET), alone, 6, told.append)
    assert any("phase stable.samples: was 30, now 25" in text for text in told)
