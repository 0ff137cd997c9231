"""Studies, which compare short trainings (arms): what their tables say; arms of several runs, with several tokenizers
or widths; and a study that is killed."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.base.clock import Clock
from tests.processes import descendants, signal_all, stopped, until
from tests.trainer.processes import begin, module_with
from tests.trainer.synthetic import language, make_run, quiet, write_shards
from tokenizer.mixture.curriculum import Curriculum
from trainer.__main__ import main
from trainer.base.config import ConfigError, TrainingError
from trainer.base.interrupts import stopping
from trainer.checkpoint import saver
from trainer.loop.run import open_run
from trainer.model.config import ModelConfig
from trainer.tools import arm_processes, experiment_arms, halving
from trainer.tools.ablate import bytes_per_token, names_of, scaled, tokens_of
from trainer.tools.arm import Arm, arm_of, settings_of
from trainer.tools.arm_statistics import POWER, contrasts, holm, quantile, seeds_for, tail
from trainer.tools.arm_table import BITS, NATS, lines, table
from trainer.tools.halving import losses_at

SEQUENCE = {"sequence": 32, "batch": 160}
PHASES = [{"name": "stable", "until": "100%", **SEQUENCE, "mix": {"web": 50, "code": 50}}]


# -- statistics --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("free", "two_sided", "value"), [      # from tables of Student's t
    (1, 0.05, 12.706), (1, 0.2, 3.078), (2, 0.01, 9.925), (3, 0.05, 3.182), (4, 0.001, 8.610), (7, 0.1, 1.895),
    (10, 0.05, 2.228), (30, 0.01, 2.750), (120, 0.05, 1.980)])
def test_students_t_is_as_in_the_tables(free, two_sided, value):
    assert quantile(1 - two_sided / 2, free) == pytest.approx(value, abs=6e-4)
    assert tail(value, free) == pytest.approx(two_sided, rel=2e-3)


def test_holm_corrects_the_smallest_most_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0]) and holm([0.02]) == [0.02] and holm([]) == []


@pytest.mark.parametrize(("arms", "seeds"), [(2, 3), (4, 3), (6, 2)])
def test_equal_arms_seldom_seem_to_differ_however_many_there_are(arms, seeds):
    rng = np.random.default_rng(arms)
    values = rng.normal(0, 0.1, (2000, arms, seeds)) + rng.normal(0, 1, (2000, 1, seeds))
    false = np.mean([min(contrasts(v).p) < 0.05 for v in values])
    assert 0.01 < false < 0.065


@pytest.mark.parametrize("copied", [(1, 0), (2, 1)])       # an arm, and the arm whose copy it is
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_copies_of_an_arm_do_not_hide_the_noise(copied, seeds):
    """Arms without a difference seldom seem to differ, and intervals hold in 95 of 100 studies, if two arms are equal
    bit by bit."""
    rng = np.random.default_rng(seeds)
    values = rng.normal(0, 0.1, (2000, 3, seeds)) + rng.normal(0, 1, (2000, 1, seeds))
    values[:, copied[0]] = values[:, copied[1]]
    found = [contrasts(v) for v in values]
    assert np.mean([min(one.p) < 0.05 for one in found]) < 0.06
    assert 0.935 < np.mean([abs(one.deltas[2]) <= one.half for one in found]) < 0.965


def test_arms_that_are_all_equal_have_no_noise():
    same = contrasts([[1.0, 2.0]] * 3)
    assert (same.deltas, same.half, same.p) == ([0.0, 0.0, 0.0], 0.0, [1.0, 1.0])
    assert contrasts([[1.0, 2.0]]).half is None and contrasts([[1.0], [2.0]]).half is None


@pytest.mark.parametrize(("arms", "difference"), [(2, 0.3), (3, 0.5)])
def test_so_many_seeds_do_show_the_difference(arms, difference):
    seeds = seeds_for(difference, math.sqrt(2) * 0.3, arms)
    assert 3 < seeds < 40
    rng = np.random.default_rng(7)
    shift = np.zeros((arms, 1))
    shift[1] = difference
    shown = [contrasts(rng.normal(0, 0.3, (arms, seeds)) + shift).p[0] < 0.05 for _ in range(1000)]
    assert POWER - 0.05 < np.mean(shown) < 0.95
    assert seeds_for(difference / 1000, 1.0, arms) is None


def test_the_table_says_what_it_shows_in_words():
    rng = np.random.default_rng(1)
    base = rng.normal(2, 0.1, 4)
    losses = {name: [{"held-out": v + d + rng.normal(0, 0.001)} for v in base]
              for name, d in (("raw", 0), ("clean", -0.1), ("copy", 0), ("bad", 0.1))}
    said = "\n".join(lines(table(losses, BITS)))
    assert "clean is better than raw on held-out" in said and "bad is worse than raw" in said
    assert "copy is not told apart from raw" in said and "corrected for 3 comparisons" in said and "bits/byte" in said


def test_arms_that_are_equal_bit_by_bit_are_called_equal():
    same = [{"web": 1.0}, {"web": 2.0}]
    found = table({"a": same, "b": same})
    assert found["sources"]["web"]["arms"]["b"] == {"loss": 1.5, "delta": 0.0, "p": 1.0, "beyond_noise": False,
                                                    "seeds_needed": None}
    assert "they are equal" in "\n".join(lines(found))


# -- arms of several runs ----------------------------------------------------------------------------------------------
def runs_of(top: Path, *chains: int) -> list[Path]:
    """Make a store with a run for each of `chains`. All runs have the same held-out shards of `web`; the texts of
    `code` are in another language in each run, which its number in `chains` determines."""
    made = []
    for i, chain in enumerate(chains):
        run = make_run(top / f"s{i}", phases=[{**PHASES[0], "mix": {"code": 1}}], total=3200, documents=200)
        shutil.rmtree(top / f"s{i}" / "shards" / "code")
        folder = top / f"s{i}" / "shards" / "code"
        sets = {split: write_shards(folder / f"split={split}", "code", split, language(50 + chain, n, chain=chain), 1)
                for split, n in (("train", 200), ("val", 9))}
        document = json.loads((run / "curriculum.json").read_text())
        document.pop("sha256")
        [code] = [s for s in document["streams"] if s["name"] == "code"]
        code.update(sha256=sets["train"]["sha256"], tokens=sets["train"]["tokens"], val_sha256=sets["val"]["sha256"],
                    val_tokens=sets["val"]["tokens"])
        Curriculum.from_json(document).save(run / "curriculum.json")
        made.append(run.rename(run.with_name(f"study@v{i}")))
    return made


def test_runs_are_judged_by_what_they_hold_out_in_common(tmp_path, capsys, forked_arms):
    """The language of `web` is chain 0: the run that trains on it is better on the text that both hold out."""
    runs = runs_of(tmp_path, 5, 0)
    command = ["ablate", *map(str, runs), "--out", str(tmp_path / "out"), "--seeds", "2", "--device", "cpu", "--jobs",
               "2", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unit"] == BITS and found["arms"] == ["v0", "v1"] and list(found["sources"]) == ["web"]
    better = found["sources"]["web"]["arms"]["v1"]
    assert better["delta"] < -0.1 and better["beyond_noise"]
    assert {name: cost["tokens"] for name, cost in found["costs"].items()} == {"v0": 6400, "v1": 6400}
    out = tmp_path / "out" / "ablate"
    assert json.loads((out / "table.json").read_text()) == found
    assert "v1 is better than v0 on web" in (out / "table.txt").read_text()
    for plot in ("intervals.svg", "curves.svg"):
        assert "v1" in (out / plot).read_text()


def test_runs_without_common_held_out_text_are_refused(tmp_path, capsys):
    runs = runs_of(tmp_path, 5, 0)
    for run in runs:
        document = json.loads((run / "curriculum.json").read_text())
        document.pop("sha256")
        document["streams"] = [s if s["name"] == "code" else {**s, "val": None, "val_sha256": None, "val_tokens": 0}
                               for s in document["streams"]]
        Curriculum.from_json(document).save(run / "curriculum.json")
    assert main(["ablate", *map(str, runs), "--out", str(tmp_path / "out")]) == 2
    assert "no stream has the same held-out data" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["ablate", *map(str, runs), "--out", str(tmp_path / "out"), "--on", "math"]) == 2
    assert "--on math" in capsys.readouterr().err


def test_held_out_text_with_loss_masks_is_refused_before_anything_is_trained(tmp_path, capsys):
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100, masked=("code",))
    assert main(["ablate", str(run), "--arm", "x", "clip=0.5", "--on", "code"]) == 2
    assert "has loss masks" in capsys.readouterr().err and not (run / "train").exists()


def test_other_tokenizers_read_as_many_bytes(tmp_path):
    first, second = (open_run(str(run), None, None, []) for run in runs_of(tmp_path, 5, 0))
    assert bytes_per_token(first) == pytest.approx(3)
    assert tokens_of([first, second], 1000) == [1000, 1000] and tokens_of([first, second], None) == [3200, 3200]
    document = second.curriculum.to_json()
    document["tokenizer"]["sha256"] = "d" * 64
    manifest = next((second.store / "shards" / "code" / "split=train").glob("shards.json"))
    text = json.loads(manifest.read_text())
    text["text_bytes"] *= 2                                                    # its tokens stand for twice the text
    for shard in text["shards"]:
        shard["text_bytes"] *= 2
    manifest.write_text(json.dumps(text))
    from dataclasses import replace
    other = replace(second, curriculum=Curriculum.from_json(document))
    assert bytes_per_token(other) == pytest.approx(6)
    assert tokens_of([first, other], 1000) == [1000, 500] and tokens_of([other, first], 1000) == [1000, 2000]


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "what is compared"), (["A"], "what is compared"), (["A", "B", "--arm", "x", "clip=1"], "what is compared"),
    (["--data", "a.yaml"], "needs the pipeline")])
def test_without_something_to_compare_the_ways_are_named(capsys, arguments, said):
    assert main(["ablate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_variants_of_a_study_are_called_by_their_names():
    assert names_of(["x/runs/s@raw", "y/s@clean/"]) == ["raw", "clean"]
    assert names_of(["x/runs/s@raw", "x/runs/t@raw"]) == ["s@raw", "t@raw"]


# -- widths ------------------------------------------------------------------------------------------------------------
def test_a_wider_model_has_more_heads_and_the_learning_rates_of_the_narrowest():
    settings = {"model": {"preset": "demo"}}
    wide = ModelConfig(**scaled(settings, 256, 64))
    assert (wide.width, wide.heads, wide.kv_heads, wide.dim, wide.ffn, wide.mup) == (256, 8, 4, 32, 768, 64)
    assert wide.layers == 4 and wide.qk_norm and wide.rate("blocks.0.mlp.up.weight") == 1 / 4
    assert ModelConfig(**scaled(settings, 64, 64)).rate("blocks.0.mlp.up.weight") == 1


def test_heads_are_as_many_as_the_width_asks_for_whatever_theirs():
    """In Qwen3-0.6B, all heads together are twice as wide as the model."""
    preset = {"model": {"preset": "qwen3-0.6b"}}
    same = ModelConfig(**ModelConfig.PRESETS["qwen3-0.6b"])
    assert ModelConfig(**scaled(preset, 1024, 1024)) == replace(same, mup=1024)
    half = ModelConfig(**scaled(preset, 512, 512))
    assert (half.heads, half.kv_heads, half.dim, half.ffn) == (8, 4, 128, 1536)


def test_rates_that_are_meant_for_a_width_stay_so():
    settings = {"model": {"preset": "demo", "mup": 128}}
    narrow = ModelConfig(**scaled(settings, 64, 64))
    assert narrow.mup == 128 and narrow.rate("blocks.0.mlp.up.weight") == 2


@pytest.mark.parametrize(("widths", "changes", "said"), [
    ("64,100", [], "multiple of 64"), ("64;128", [], "commas"), ("64", ["optimizer.kind=adafactor"], "no rule")])
def test_widths_that_cannot_be_are_refused(tmp_path, capsys, widths, changes, said):
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100, model={"preset": "demo"})
    command = ["ablate", str(run), "--arm", "x", "clip=0.5", "--widths", widths]
    assert main([*command, *(word for change in changes for word in ("--set", change))]) == 2
    assert said in capsys.readouterr().err and not (run / "train").exists()


# -- processes ---------------------------------------------------------------------------------------------------------
def test_an_arm_that_fails_is_named_with_the_end_of_its_log(tmp_path, capsys):
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100)
    [file] = (tmp_path / "shards" / "web" / "split=val").glob("*.tokens")
    file.write_bytes(file.read_bytes()[:-64])
    assert main(["ablate", str(run), "--arm", "x", "clip=0.5", "--tokens", "320", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "the training of base, seed 0, ended with exit code 1" in said and "log.txt" in said and file.name in said


@pytest.mark.parametrize(("arguments", "said"), [
    (["--gpus", "2"], "need --address"), (["--address", "localhost:1", "--gpus", "1", "--ranks", "2"], "not both")])
def test_options_of_a_cluster_belong_together(tmp_path, capsys, arguments, said):
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100)
    assert main(["ablate", str(run), "--arm", "x", "clip=0.5", *arguments]) == 2
    assert said in capsys.readouterr().err and not (run / "train").exists()


def test_a_study_inside_torchrun_is_refused(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100)
    monkeypatch.setenv("RANK", "0")
    assert main(["ablate", str(run), "--arm", "x", "clip=0.5"]) == 2 and "without torchrun" in capsys.readouterr().err


def test_halving_of_models_of_several_widths_is_refused(tmp_path, capsys):
    run = make_run(tmp_path, phases=PHASES, total=3200, documents=100)
    assert main(["ablate", str(run), "--arm", "x", "clip=0.5", "--widths", "36,72", "--halving"]) == 2
    assert "leave out one of the two options" in capsys.readouterr().err


class Child:
    """Stands in for subprocess.Popen in a study that `begin` has started: a fork of the study. From the third on, a
    training stops (SIGSTOP) once its first checkpoint is committed."""

    started = 0

    def __init__(self, command: list[str], env: dict[str, str], stdout: Any, preexec_fn: Callable[[], None],
                 **_: object) -> None:
        Child.started += 1
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        for number in stopping():                      # as exec does with the study's own handlers
            signal.signal(number, signal.SIG_DFL)
        preexec_fn()
        os.dup2(stdout.fileno(), 2)
        os.environ.update(env)
        if Child.started > 2:
            saver.retain = self.stopped(saver.retain)
        try:
            os._exit(main(command[3:]))
        finally:
            os._exit(1)

    def stopped(self, retain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a stand-in for `retain`, which is called after a commit. At its first call it stops this process."""
        def stand_in(*arguments: Any) -> Any:
            saver.retain = retain
            os.kill(os.getpid(), signal.SIGSTOP)
            return retain(*arguments)

        return stand_in

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode


def study_of_children(arguments: list[str]) -> None:
    arm_processes.subprocess = module_with(Child)
    main(arguments)


@pytest.mark.slow
def test_a_killed_study_goes_on_and_gives_the_same_table(tmp_path, forked_arms):
    """Six trainings, two at a time; the study is killed when two are done, two have begun and two are waiting."""
    run = make_run(tmp_path, phases=PHASES, total=4800, documents=200, train={"checkpoint": {"every": 10}})
    command = ["ablate", str(run), "--arm", "clip", "clip=0.2", "--arm", "slow", "optimizer.lr=0.003", "--seeds", "2",
               "--jobs", "2", "--device", "cpu", "--out"]
    folder = tmp_path / "killed" / "ablate"
    study = begin(study_of_children, [*command, str(folder.parent)])

    def begun() -> list[int]:
        assert study.is_alive()
        trainings = [pid for pid in descendants(study.pid) if stopped(pid)]
        return trainings if len(trainings) == 2 else []

    trainings = until(begun, what="two trainings with a checkpoint")
    study.kill()
    study.join()
    done = {p: p.stat().st_mtime_ns for p in folder.glob("*/summary.json")}
    unfinished = {p.parent.name for p in folder.glob("*/checkpoints")} - {p.parent.name for p in done}
    assert len(done) == len(unfinished) == 2
    signal_all(trainings, signal.SIGCONT)             # the system has sent them a signal, because their study has ended
    assert main([*command, str(folder.parent)]) == 0
    assert {p: p.stat().st_mtime_ns for p in done} == done                      # what was done is not done again
    assert {p.parent.name for p in folder.glob("*/metrics.jsonl") if '"event": "resume"' in p.read_text()} == unfinished
    assert main([*command, str(tmp_path / "whole")]) == 0
    tables = [json.loads((at / "table.json").read_text()) for at in (folder, tmp_path / "whole" / "ablate")]
    assert tables[0]["sources"] == tables[1]["sources"] and len(tables[0]["arms"]) == 3
    assert not list(folder.glob("*/trainer.pid"))


def evaluated(run: Path, name: str, losses: dict[int, float]) -> Arm:
    """Return an arm whose metrics have evaluations at these steps."""
    base = open_run(str(run), None, None, [])
    arm = arm_of(base, name, 0, settings_of(base, []), base.curriculum, run.parent / "arms")
    arm.run.out.mkdir(parents=True)
    events = [{"event": "start", "step": 0},
              *({"event": "eval", "step": step, "loss": loss, "streams": {"a": {"loss": loss, "targets": 100}}}
                for step, loss in losses.items())]
    (arm.run.out / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return arm


def test_halving_compares_losses_of_one_step(tmp_path):
    """An arm that was trained without --halving has no evaluation where the others stop."""
    run = make_run(tmp_path, phases=PHASES, total=6400, documents=200)
    stopped = evaluated(run, "stopped", {0: 5.5, 8: 4.0, 10: 3.8})
    whole = evaluated(run, "whole", {0: 5.5, 4: 4.6, 8: 3.9, 16: 3.0, 40: 2.0})
    assert stopped.rung(0.25) == 10
    assert losses_at([stopped], 0.25, ["a"], NATS) == [3.8]
    assert losses_at([stopped, whole], 0.25, ["a"], NATS) == [4.0, 3.9]
    late = evaluated(run, "late", {0: 5.5, 40: 2.0})               # the losses before training tell nothing
    with pytest.raises(ConfigError, match="no evaluation at a common step"):
        losses_at([stopped, late], 0.25, ["a"], NATS)


def test_halving_ends_an_arm_without_a_loss_first(tmp_path, monkeypatch):
    run = make_run(tmp_path, phases=PHASES, total=6400, documents=200)
    monkeypatch.setattr(halving, "train_arms", lambda *_: None)
    losses = {"base": 5.0, "gone": math.nan, "good": 3.0, "fair": 4.0}
    arms = [evaluated(run, name, {10: loss, 20: loss}) for name, loss in losses.items()]
    messages: list[str] = []
    going, ended = halving.halved(arms, argparse.Namespace(), messages.append, ["a"], NATS)
    assert [arm.name for arm in going] == ["base", "good"] and [one["arm"] for one in ended] == ["fair", "gone"]
    assert ended[1]["loss"] is None and "gone ends after 25% of its steps: its loss is nan" in messages
    result = {**table({"base": [{"a": 5.0}], "good": [{"a": 3.0}]}), "ended": ended, "costs": {}}
    monkeypatch.setattr(experiment_arms, "cost_lines", lambda _costs: [])
    text = experiment_arms.report(result)
    assert "gone was ended after 25% of its steps (--halving), with a loss that is not finite" in text
    assert "fair was ended after 25% of its steps (--halving), -1.0000 nats/token from the first arm" in text


def test_a_study_that_fails_says_that_the_same_command_goes_on(tmp_path, monkeypatch):
    run = make_run(tmp_path, phases=PHASES, total=6400, documents=200)
    options = argparse.Namespace(jobs=1, ranks=None, device="cpu", address=None)
    monkeypatch.setattr(arm_processes, "command", lambda *_: ["sh", "-c", "exit 3"])
    with pytest.raises(TrainingError, match=r"base, seed 0, ended with exit code 3; the same .*log\.txt is empty$"):
        arm_processes.train_arms([evaluated(run, name, {}) for name in ("base", "other")], options, quiet)


@pytest.mark.parametrize("when", ["running", "starting"])
def test_a_study_that_is_stopped_ends_its_trainings_and_says_that_the_same_command_goes_on(
        tmp_path, monkeypatch, capsys, when):
    """Also a training that is just being started when the signal comes."""
    run = make_run(tmp_path, phases=PHASES, total=6400, documents=200)
    options = argparse.Namespace(jobs=1, ranks=None, device="cpu", address=None)
    started = []

    class Training(subprocess.Popen):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            started.append(self)
            if when == "starting":
                os.kill(os.getpid(), signal.SIGTERM)

    class Stopping(Clock):
        def sleep(self, seconds: float) -> None:
            if when == "running" and started[0].poll() is None:
                os.kill(os.getpid(), signal.SIGTERM)
            super().sleep(seconds)

    monkeypatch.setattr(subprocess, "Popen", Training)
    monkeypatch.setattr(arm_processes, "command", lambda *_: ["sleep", "60"])
    with pytest.raises(SystemExit, match="143"):
        arm_processes.train_arms([evaluated(run, name, {}) for name in ("base", "other")], options, quiet,
                                 clock=Stopping())
    assert [training.returncode for training in started] == [-signal.SIGTERM]
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped: ") and line.endswith("(1 had not begun); the same command goes on")


@pytest.mark.slow
def test_halving_ends_the_worse_arms_early_and_says_so(tmp_path, capsys, forked_arms):
    run = make_run(tmp_path, phases=PHASES, total=9600, documents=400)
    arms = [["frozen", "optimizer.lr=1e-6"], ["slow", "optimizer.lr=0.002"], ["clip", "clip=0.5"]]
    command = ["ablate", str(run), "--seeds", "1", "--tokens", "3200", "--device", "cpu", "--jobs", "2", "--halving",
               *(word for arm in arms for word in ("--arm", *arm))]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arms"][0] == "base" and len(found["arms"]) == 2 and "frozen" not in found["arms"]
    assert {one["arm"]: one["share"] for one in found["ended"]}["frozen"] == 0.25
    ended = next(one for one in found["ended"] if one["arm"] == "frozen")
    assert ended["delta"] > 0
    out = run / "train" / "ablate"
    assert not (out / "frozen-seed0" / "summary.json").exists()
    costs = found["costs"]
    assert list(costs) == ["base", *(name for name, _ in arms)] and costs["base"]["ended"] is None
    assert costs["base"]["tokens"] == 4 * costs["frozen"]["tokens"] == 3200
    assert costs["frozen"]["wall_s"] > 0 and costs["frozen"]["ended"] == 0.25
    smallest = min(stream.tokens for stream in Curriculum.load(run / "curriculum.json").streams)
    for name, read_tokens in (("base", 3200), ("frozen", 800)):          # half of them from each stream
        assert costs[name]["epochs"] == pytest.approx(read_tokens / 2 / smallest, rel=0.2)
    text = (out / "table.txt").read_text()
    assert "frozen was ended after 25%" in text and re.search(r"\nfrozen +800 .*  ended after 25%\n", text)
    before = {p: p.read_bytes() for p in out.glob("*/metrics.jsonl")}
    assert main([*command, "--json"]) == 0 and json.loads(capsys.readouterr().out) == found
    assert before == {p: p.read_bytes() for p in out.glob("*/metrics.jsonl")}
