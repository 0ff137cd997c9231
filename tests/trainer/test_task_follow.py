"""Scores of checkpoints beside a training: what is scored, and that no kill loses or doubles a row of tasks.jsonl."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from pipeline.base.files import sha256
from tests.processes import stopped, until
from tests.trainer.evaluation import word_run
from tests.trainer.processes import Forked, begin, module_with, run_command
from tests.trainer.synthetic import quiet
from trainer.__main__ import main
from trainer.base.config import ConfigError, build
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint import in_use, saver
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.ledger import Ledger
from trainer.evaluation import rows as score_data
from trainer.evaluation import score_rows
from trainer.evaluation.task_file import FOLDER
from trainer.loop import task_watcher
from trainer.loop.config import TaskScoringConfig, TrainConfig
from trainer.loop.run import open_run
from trainer.loop.stability import Rewind, StabilityMonitor, StepRecord
from trainer.loop.train import Trainer, train
from trainer.observe.goodput import Goodput
from trainer.observe.metrics import read
from trainer.parallel.world import world
from trainer.tools import task_eval

pytest.importorskip("tokenizers")


def scored_run(folder: Path, **tasks: Any) -> Path:
    """A run whose recipe asks for scores of every fifth step on the task `quiz`."""
    settings = {"every": 5, "tasks": [str(folder / "quiz.yaml")], "data": str(folder / "data"), **tasks}
    return word_run(folder, checkpoint={"every": 5, "keep": 9}, seed=3,
                    evaluate={"every": 1000, "tasks": settings})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained to its end without scores."""
    folder = tmp_path_factory.mktemp("follow")
    run = scored_run(folder)
    with world("cpu") as here:
        train(open_run(str(run), None, None, ["evaluate.tasks=null"]), here, None, quiet)
    return run


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "tasks.jsonl").read_text().splitlines()]


def places(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["step"], row["task"], row["measure"]) for row in found]


def test_every_checkpoint_is_scored_once_and_rows_say_what_results_say(trained: Path):
    assert main(["eval", str(trained), "--follow"]) == 0
    out = trained / "train"
    found, steps = rows(out), [c.step for c in ckpt.complete(out / "checkpoints")]
    assert len(set(places(found))) == len(found) and {row["step"] for row in found} == set(steps)
    assert places(found) == sorted(places(found), key=lambda place: place[:2])
    for row in found:
        result = json.loads((out / "evaluation" / f"step_{row['step']:08d}" / "quiz.json").read_text())
        assert result["measures"][row["measure"]]["value"] == row["value"]
        assert (row["version"], row["sha256"]) == (result["version"], result["sha256"])
    before = {path: path.stat().st_mtime_ns for path in (out / "evaluation").rglob("*.json*")}
    text = (out / "tasks.jsonl").read_text()
    (out / "tasks.jsonl").write_text(text[:len(text) // 2])           # a file that something else has cut
    assert main(["eval", str(trained), "--follow"]) == 0              # nothing is scored again
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (out / "tasks.jsonl").read_text() == text
    assert not list((out / "checkpoints").rglob(in_use.MARKS))


@pytest.mark.parametrize("late", [1, 2])
def test_two_processes_that_score_at_once_lose_no_rows(trained: Path, tmp_path: Path, monkeypatch, late: int):
    """Another process adds its rows after this one has read the file, and before it writes the file."""
    out = shutil.copytree(trained / "train", tmp_path / "train")
    assert main(["eval", str(trained), "--follow", "--trained", str(out)]) == 0
    result = json.loads(next((out / "evaluation").glob("*/quiz.json")).read_text())
    first, other = {**result, "task": "first"}, {**result, "task": "other"}
    before, write, calls = rows(out), score_rows.write_rows, []

    def save(one: dict[str, Any]) -> None:
        (score_rows.step_folder(out, one["model"]["step"]) / f"{one['task']}.json").write_text(json.dumps(one))

    def interrupted(out: Path, found: Any) -> None:
        calls.append(1)
        found = list(found)
        if len(calls) == late:
            save(other)
            score_rows.add(out, other)
        write(out, found)

    monkeypatch.setattr(score_rows, "write_rows", interrupted)
    if late == 2:                                       # the first write of this process already misses a result
        save({**result, "task": "earlier"})
    save(first)
    score_rows.add(out, first)
    tasks = {row["task"] for row in rows(out)}
    assert tasks == {"quiz", "first", "other"} | ({"earlier"} if late == 2 else set())
    assert [row for row in rows(out) if row["task"] == "quiz"] == before


def test_the_folder_of_an_arm_of_a_study_needs_neither_store_nor_trained(trained: Path):
    arm = trained.parents[1] / "studies" / "s" / "ablate" / "a-seed0"
    shutil.copytree(trained / "train" / "checkpoints", arm / "checkpoints")
    for name in ("recipe.yaml", "curriculum.json"):
        shutil.copyfile(trained / name, arm / name)
    folder = trained.parents[2]
    assert main(["eval", str(arm), "--data", str(folder / "data"), "--tasks", str(folder / "quiz.yaml")]) == 0
    steps = {c.step for c in ckpt.complete(arm / "checkpoints")}
    assert {row["step"] for row in rows(arm)} == {max(steps)}
    assert main(["eval", str(arm), "--follow", "--every", "1"]) == 0
    assert {row["step"] for row in rows(arm)} == steps


def test_only_every_nth_step_and_ends_of_phases_are_scored(trained: Path, tmp_path: Path):
    out = trained / "train"
    pinned = {c.step for c in ckpt.complete(out / "checkpoints") if c.meta["pinned"]}
    assert main(["eval", str(trained), "--follow", "--every", "10"]) == 0
    wanted = {c.step for c in ckpt.complete(out / "checkpoints") if c.step % 10 == 0} | pinned
    score_rows.forget(out, 0)
    assert not rows(out) and not list((out / "evaluation").glob("step_*"))
    assert main(["eval", str(trained), "--follow", "--every", "10"]) == 0
    assert {row["step"] for row in rows(out)} == wanted < {c.step for c in ckpt.complete(out / "checkpoints")}


def test_what_a_training_gives_up_is_forgotten(trained: Path):
    out = trained / "train"
    assert main(["eval", str(trained), "--follow"]) == 0
    steps = sorted({row["step"] for row in rows(out)})
    score_rows.forget(out, steps[1])
    assert {row["step"] for row in rows(out)} == set(steps[:2])
    assert sorted(p.name for p in (out / "evaluation").iterdir()) == [f"step_{step:08d}" for step in steps[:2]]


def test_a_checkpoint_in_use_is_kept_until_its_mark_is_old(trained: Path, tmp_path: Path):
    folder = shutil.copytree(trained / "train" / "checkpoints", tmp_path / "checkpoints")
    first, *_, last = (c.step for c in ckpt.complete(folder))
    config = CheckpointConfig(keep=1)
    pinned = {c.step for c in ckpt.complete(folder) if c.meta["pinned"]}
    with in_use.marked(folder / f"step_{first:08d}") as mark:
        with in_use.marked(mark.parent):
            assert len(list(mark.parent.glob(in_use.MARKS))) == 2
        assert in_use.in_use(mark.parent), "a reader that ends leaves the mark of another"
        ckpt.retain(folder, config)
        assert {c.step for c in ckpt.complete(folder)} == {first, last} | pinned
        os.utime(mark, (time.time() + in_use.FRESH_S + 60,) * 2)     # the clock was set back since
        assert not in_use.in_use(mark.parent)
        os.utime(mark, (time.time() - in_use.FRESH_S - 1,) * 2)
        ckpt.retain(folder, config)
        assert {c.step for c in ckpt.complete(folder)} == {last} | pinned
        assert not (folder / f"step_{first:08d}").exists()


def test_checkpoints_that_await_their_score_stay_but_not_without_end(trained: Path, tmp_path: Path):
    folder = shutil.copytree(trained / "train" / "checkpoints", tmp_path / "checkpoints")
    *early, last = ckpt.complete(folder)
    free = [c.step for c in early if not c.meta["pinned"]]
    pinned = {c.step for c in early if c.meta["pinned"]} | {last.step}
    assert len(free) > 1
    assert ckpt.retain(folder, CheckpointConfig(keep=1), lambda c: c.step == free[0]) == []
    assert {c.step for c in ckpt.complete(folder)} == {free[0]} | pinned
    for step in range(101, 101 + ckpt.AWAITING + 2):                  # the scoring is slower than the training
        copied = shutil.copytree(folder / last.folder.parent.name, folder / f"step_{step:08d}")
        (meta,) = copied.glob("*/meta.json")
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "step": step, "pinned": False}))
        record = json.loads((copied / "COMPLETE").read_text())
        record["files"]["meta.json"] = meta.stat().st_size
        record["sha256"]["meta.json"] = sha256(meta)
        (copied / "COMPLETE").write_text(json.dumps(record))
    waiting = [free[0], *range(101, 101 + ckpt.AWAITING + 1)]         # the last is the latest, which stays anyhow
    lost = ckpt.retain(folder, CheckpointConfig(keep=1), lambda c: not c.meta["pinned"])
    assert lost == waiting[:-ckpt.AWAITING]
    assert {c.step for c in ckpt.complete(folder)} == {*waiting[-ckpt.AWAITING:], 101 + ckpt.AWAITING + 1} | pinned


def test_results_with_other_examples_are_no_scores(trained: Path):
    """--shots and --seed decide which examples stand before a question."""
    out = trained / "train"
    settings = ["eval", str(trained), "--follow", "--data", str(trained.parents[2] / "data"), "--tasks",
                str(trained.parents[2] / "quiz.yaml")]
    found = []
    for more in ([], ["--shots", "1"], ["--shots", "1", "--seed", "7"], []):
        assert main([*settings, *more]) == 0
        path = out / "evaluation" / f"step_{max(row['step'] for row in rows(out)):08d}" / "quiz.json"
        result = json.loads(path.read_text())
        found.append((result["shots"], result["seed"]))
    assert found == [(2, 0), (1, 0), (1, 7), (2, 0)]


def test_checkpoints_that_are_gone_before_they_are_scored_are_named(trained: Path, tmp_path: Path, capsys):
    out = shutil.copytree(trained / "train", tmp_path / "train", ignore=shutil.ignore_patterns("evaluation", "tasks*"))
    ckpt.retain(out / "checkpoints", CheckpointConfig(keep=1))
    command = ["eval", str(trained), "--follow", "--trained", str(out)]
    left = {c.step for c in ckpt.complete(out / "checkpoints")}
    gone = [step for step in range(5, max(left), 5) if step not in left]
    assert main(command) == 0 and gone
    said = capsys.readouterr().err
    assert said.count("checkpoint.keep") == 1 and f"step {', '.join(map(str, gone))}:" in said
    assert {row["step"] for row in rows(out)} == left


@pytest.mark.parametrize(("change", "key"), [
    ({"tasks": ["helaswag"]}, "hellaswag"), ({"data": "nowhere"}, "nowhere"), ({"tasks": ["piqa"]}, "piqa.jsonl"),
    ({"every": 7}, "multiple"), ({"shots": 30}, "shots"), ({"share": 0}, "share"), ({"tasks": []}, "tasks")])
def test_mistakes_end_the_training_before_the_model_is_built(tmp_path: Path, capsys, monkeypatch, change, key):
    monkeypatch.setattr("trainer.loop.train.Transformer", lambda *_: pytest.fail("the model was built"))
    run = scored_run(tmp_path, **change)
    assert main(["run", str(run), "--device", "cpu"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("error: ") and key in error[0]


def test_a_missing_tokenizer_ends_the_training_before_the_model_is_built(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("trainer.loop.train.Transformer", lambda *_: pytest.fail("the model was built"))
    run = scored_run(tmp_path)
    (tmp_path / "store" / "tokenizers" / "none" / "tokenizer.json").unlink()
    assert main(["run", str(run), "--device", "cpu"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


# -- beside a training -----------------------------------------------------------------------------------------------
class StopsAt(NamedTuple):
    """A moment at which a process stops itself (SIGSTOP): after the `count`-th call of the function that writes a
    `commit` (of a checkpoint), a `result` (of a task) or a `row` (of tasks.jsonl)."""

    place: str
    count: int

    def watch(self) -> None:
        module, name = {"commit": (saver, "retain"), "result": (task_eval, "write_results"),
                        "row": (score_rows, "add")}[self.place]
        real, calls = getattr(module, name), []

        def stand_in(*arguments: Any) -> Any:
            result = real(*arguments)
            calls.append(1)
            if len(calls) == self.count:
                os.kill(os.getpid(), signal.SIGSTOP)
            return result

        setattr(module, name, stand_in)

    def __call__(self, arguments: list[str]) -> None:
        """Run the command `python -m trainer ARGUMENTS` until this moment."""
        self.watch()
        run_command(arguments)


def until_stopped(pid: int | None) -> None:
    assert pid is not None
    until(lambda: stopped(pid), what="the moment at which the process stops itself")


class Children(list[Forked]):
    """The processes that score and that were started. The next one stops itself at the moment `stops_at`."""

    stops_at: StopsAt | None = None


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    """Start the processes that score as forks, in which torch is imported. Returns those that were started."""
    started = Children()

    def popen(command: list[str], **settings: Any) -> Forked:
        started.append(Forked(command, env=settings["env"], target=started.stops_at))
        started.stops_at = None
        return started[-1]

    monkeypatch.setattr(task_watcher, "subprocess", module_with(popen))
    return started


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause the process that scores until the training waits for it at its end."""
    let, wait, ended = task_watcher.TaskWatcher.let, task_watcher.TaskWatcher.wait, []
    monkeypatch.setattr(task_watcher.TaskWatcher, "let", lambda self, runs: let(self, runs and bool(ended)))
    monkeypatch.setattr(task_watcher.TaskWatcher, "wait", lambda *given: ended.append(1) or wait(*given))


def perform(run: Path, out: Path, stop_at: int | None = None, say: Callable[[str], None] = quiet) -> dict[str, Any]:
    with world("cpu") as here:
        return train(open_run(str(run), None, str(out), []), here, stop_at, say)


@pytest.fixture(scope="module")
def quiet_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run, and the rows of its training when nothing is killed, scored after the end."""
    folder = tmp_path_factory.mktemp("quiet")
    run = scored_run(folder)
    with world("cpu") as here:
        train(open_run(str(run), None, None, ["evaluate.tasks=null"]), here, None, quiet)
    assert main(["eval", str(run), "--follow"]) == 0
    return run, rows(run / "train")


def test_a_training_scores_its_checkpoints_and_records_them_in_its_metrics(quiet_rows, tmp_path: Path, children):
    run, expected = quiet_rows
    lines: list[str] = []
    perform(run, tmp_path, say=lines.append)
    assert rows(tmp_path) == expected and len(children) == 1
    metrics = [line for line in read(tmp_path / "metrics.jsonl") if line["event"] == "tasks"]
    assert [line["step"] for line in metrics] == sorted({row["step"] for row in expected})
    for line in metrics:
        own = {row["measure"]: row["value"] for row in expected if row["step"] == line["step"]}
        assert line["scores"] == {"quiz": own} and line["main"]["quiz"]["value"] == own["bpb"]
    assert sum("quiz bpb" in line for line in lines) == len(metrics)
    assert 'tokenmill_train_task_score{run="toy",task="quiz"}' in (tmp_path / "trainer.prom").read_text()


@pytest.mark.parametrize("every", [5, 1])
def test_few_kept_checkpoints_lose_no_score_without_a_line(quiet_rows, tmp_path: Path, children, paused, every):
    """Nothing is scored when `keep` would delete a checkpoint. If every step has a checkpoint, more of them wait than
    may wait."""
    run, expected = quiet_rows
    lines: list[str] = []
    with world("cpu") as here:
        train(open_run(str(run), None, str(tmp_path), [
            "checkpoint.keep=1", f"checkpoint.every={every}", f"evaluate.tasks.every={every}"]), here, None,
            lines.append)
    lost = [line for line in lines if "deleted before it was scored" in line]
    in_quiet_run = {row["step"] for row in expected}
    steps = in_quiet_run if every == 5 else set(range(1, max(in_quiet_run) + 1))
    missing = steps - {row["step"] for row in rows(tmp_path)}
    assert bool(missing) == (every == 1) and len(lost) == len(missing)
    assert not missing & set(sorted(steps)[-1 - ckpt.AWAITING:])
    assert all(any(f"{step}" in line.partition(":")[0] for line in lost) for step in missing)
    assert [row for row in expected if row["step"] not in missing] == [
        row for row in rows(tmp_path) if row["step"] in in_quiet_run]
    last = ckpt.complete(tmp_path / "checkpoints")
    assert all(c.meta["pinned"] for c in last[:-1])                   # the others are deleted when they are scored


def test_only_the_process_that_a_training_starts_has_low_priority(trained: Path, tmp_path: Path):
    before = os.nice(0)
    watcher = task_watcher.TaskWatcher(open_run(str(trained), None, str(tmp_path), []), 1, quiet)
    watcher.command = [sys.executable, "-c", "import os; print(os.nice(0))"]
    with watcher:
        assert watcher.process is not None
        watcher.let(True)
        assert watcher.process.wait(300) == 0
    assert watcher.last_line() == str(min(19, before + task_watcher.NICE))
    assert main(["eval", str(trained), "--follow", "--tasks", str(trained.parents[2] / "quiz.yaml")]) == 0
    assert os.nice(0) == before


def test_only_the_first_rank_reads_the_data_of_tasks(trained: Path, tmp_path: Path, monkeypatch):
    read_files: list[Path] = []
    real = score_data.file_sha256
    monkeypatch.setattr(score_data, "file_sha256", lambda path: read_files.append(path) or real(path))
    with world("cpu") as here:
        for rank in (1, 0):
            assert not read_files
            run = open_run(str(trained), None, str(tmp_path), [])
            Trainer(run, replace(here, rank=rank), Ledger.open(run.out, here), None, Goodput(), quiet)
    assert [path.name for path in read_files] == ["quiz.jsonl"]


def test_a_killed_watcher_is_started_again(quiet_rows, tmp_path: Path, children, paused, monkeypatch):
    """It is killed when it has scored the first checkpoint."""
    run, expected = quiet_rows
    real, killed = task_watcher.TaskWatcher.wait, []

    def wait(self: task_watcher.TaskWatcher, interrupted: Callable[[], int]) -> None:
        def interrupted_once() -> int:
            if not killed:
                until_stopped(children[0].pid)
                children[0].send_signal(signal.SIGKILL)
                children[0].wait()
                killed.extend(rows(tmp_path))
            return interrupted()

        real(self, interrupted_once)

    monkeypatch.setattr(task_watcher.TaskWatcher, "wait", wait)
    children.stops_at = StopsAt("row", 1)
    perform(run, tmp_path)
    assert killed == [row for row in expected if row["step"] == 5] and len(children) == 2
    assert rows(tmp_path) == expected


def test_a_training_that_was_killed_goes_on_scoring_without_doubles(quiet_rows, tmp_path: Path, children):
    run, expected = quiet_rows
    process = begin(train_until, str(run), str(tmp_path), StopsAt("commit", 3))
    until_stopped(process.pid)
    assert len(ckpt.complete(tmp_path / "checkpoints")) == 3 and watchers(process.pid)
    process.kill()
    process.join()
    until(lambda: not watchers(process.pid), what="the end of the watcher")      # by the system: it may be paused
    perform(run, tmp_path)
    assert rows(tmp_path) == expected
    steps = [line["step"] for line in read(tmp_path / "metrics.jsonl") if line["event"] == "tasks"]
    assert steps == sorted({row["step"] for row in expected})


def watchers(pid: int | None) -> list[str]:
    """The processes that score for the training in the process `pid`."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline")
            if f"--end-with\0{pid}\0".encode() in read_bytes(path)]


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:                                                   # the process has ended
        return b""


def train_until(run: str, out: str, moment: StopsAt, scored: bool = True) -> None:
    moment.watch()
    if not scored:
        task_watcher.subprocess = module_with(mock.Mock(return_value=mock.Mock(poll=lambda: None)))
    perform(Path(run), Path(out))


def test_both_are_killed_when_a_result_has_no_rows_yet(quiet_rows, tmp_path: Path, children):
    """The first result of the training, and the last one, after which no other result makes the rows again."""
    run, expected = quiet_rows
    command = task_watcher.TaskWatcher(open_run(str(run), None, str(tmp_path), []), 1, quiet).command
    steps = sorted({row["step"] for row in expected})
    for commits, results, scored in ((2, 1, []), (len(steps) - 2, len(steps) - 1, steps[:-1])):
        training = begin(train_until, str(run), str(tmp_path), StopsAt("commit", commits), False)
        until_stopped(training.pid)
        watcher = Forked(command, env={}, target=StopsAt("result", results))
        until_stopped(watcher.pid)
        for process in (training, watcher):
            process.kill()
        watcher.wait()
        training.join()
        assert sorted({row["step"] for row in score_rows.read_rows(tmp_path)}) == scored
    perform(run, tmp_path)
    assert rows(tmp_path) == expected


def test_a_stopped_training_ends_its_watcher_and_the_next_one_catches_up(quiet_rows, tmp_path: Path, children):
    run, expected = quiet_rows
    perform(run, tmp_path, stop_at=12)
    assert children[-1].poll() is not None
    perform(run, tmp_path)
    assert rows(tmp_path) == expected


def test_a_watcher_that_cannot_work_does_not_end_the_training(quiet_rows, tmp_path: Path, children, monkeypatch):
    run, _ = quiet_rows
    lines: list[str] = []
    real = task_watcher.TaskWatcher.start

    def start(self: task_watcher.TaskWatcher) -> None:
        self.command[self.command.index("--tasks") + 1] = "nonsense"
        real(self)

    monkeypatch.setattr(task_watcher.TaskWatcher, "start", start)
    assert perform(run, tmp_path, say=lines.append)["steps"]
    assert len(children) == 1 and any("no longer scored" in line for line in lines)
    assert (tmp_path / "summary.json").exists()


def test_a_rewind_forgets_scores_of_steps_that_are_given_up(quiet_rows, tmp_path: Path, children, paused, monkeypatch):
    run, expected = quiet_rows
    real, seen = Trainer.rewind, []

    def rewind(self: Trainer, decision: Any) -> None:
        score_rows.write_rows(tmp_path, [{**row, "value": -1.0} for row in expected])     # of the models given up
        real(self, decision)
        seen.append({row["step"] for row in score_rows.read_rows(tmp_path)})

    def review(_self: StabilityMonitor, records: Sequence[StepRecord], _hint: str) -> Rewind | None:
        spike = not seen and any(record.step == 14 for record in records)
        return Rewind(13, 14, 13, 15, "a spike", 2) if spike else None

    monkeypatch.setattr(Trainer, "rewind", rewind)
    monkeypatch.setattr(StabilityMonitor, "review", review)
    perform(run, tmp_path)
    assert len(seen) == 1 and len(children) == 2
    assert seen[0] and max(seen[0]) <= 12 < max(row["step"] for row in expected)
    found, steps = rows(tmp_path), [c.step for c in ckpt.complete(tmp_path / "checkpoints")]
    assert {row["step"] for row in found} == set(steps) and max(steps) > 14
    assert all(row["value"] != -1.0 for row in found) and len(set(places(found))) == len(found)


def test_settings_are_checked_together():
    with pytest.raises(ConfigError, match=r"evaluate\.tasks\.every"):
        build(TrainConfig, {"model": {"layers": 1, "width": 8, "heads": 1, "ffn": 8}, "checkpoint": {"every": 4},
                            "evaluate": {"tasks": {"every": 6, "tasks": ["piqa"], "data": "x"}}}, "train")


def test_a_task_whose_only_form_is_code_is_refused_and_others_are_scored_without_it(tmp_path: Path):
    (tmp_path / "humaneval.jsonl").write_text("{}\n")
    (tmp_path / "programs.jsonl").write_text("{}\n")
    text = (FOLDER / "humaneval.yaml").read_text()
    alone = tmp_path / "programs.yaml"
    alone.write_text(re.sub(r"(?m)^forms: .*", "forms: [code]", text))
    [task] = task_watcher.scorable_tasks(TaskScoringConfig(5, ("humaneval",), str(tmp_path)))
    assert task.file.forms == ("bpb",)
    with pytest.raises(ConfigError, match="programs has only the form code"):
        task_watcher.scorable_tasks(TaskScoringConfig(5, (str(alone),), str(tmp_path)))


OWN = score_rows.origin_of({"task": "quiz", "sha256": "x", "shots": 2, "seed": 0, "data": {"quiz.jsonl": "aa"}})
ROW = {"measure": "bpb", "value": 1.0, **OWN._asdict()}


@pytest.mark.parametrize("other", [{}, {"seed": 1}, {"data": {"quiz.jsonl": "bb"}}, {"shots": 1}, {"sha256": "y"},
                                   {"model": {"step": 5, "tokens": 9, "parameters": 1, "checkpoint": "older"}}])
def test_only_results_of_the_same_data_and_seed_let_a_checkpoint_go(tmp_path: Path, other: dict[str, Any]):
    result = {"task": "quiz", "version": 1, "sha256": "x", "shots": 2, "seed": 0, "items": 3, "measures": {},
              "data": {"quiz.jsonl": "aa"}, "main": "bpb",
              "model": {"step": 5, "tokens": 9, "parameters": 1, "checkpoint": "attempt"}, **other}
    folder = score_rows.step_folder(tmp_path, 5)
    folder.mkdir(parents=True)
    (folder / "quiz.json").write_text(json.dumps(result))
    checkpoint = ckpt.Checkpoint(Path("attempt"), {"step": 5})
    assert (OWN in score_rows.results_by_origin(tmp_path, checkpoint)) == (not other)


def test_scores_of_other_data_or_examples_raise_no_alarm_in_a_training(trained: Path, tmp_path: Path):
    watcher = task_watcher.TaskWatcher(open_run(str(trained), None, str(tmp_path), []), 1, quiet)
    [own] = watcher.wanted
    scored = {"step": 5, "measure": "bpb", "value": 1.0, **own._asdict()}
    rows = [scored, {**scored, "step": 10, "seed": 7}, {**scored, "step": 15, "data": "other"},
            {**scored, "step": 20, "task": "another"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert watcher.look() == [scored]


def test_the_seed_counts_only_where_there_are_examples():
    results = [{"task": "quiz", "version": 1, "sha256": "x", "shots": shots, "seed": seed, "items": 3,
                "data": {name: "aa"}, "measures": {"bpb": {"value": 1.0, "stderr": 0.1}},
                "model": {"step": 5, "tokens": 9, "parameters": 1}}
               for shots, seed, name in ((0, 0, "a.jsonl"), (0, 5, "b.jsonl"), (1, 0, "a.jsonl"), (1, 5, "a.jsonl"))]
    origins = [score_rows.origin_of(score_rows.rows_of(result)[0]) for result in results]
    assert origins[0] == origins[1] and len(set(origins)) == 3


def test_rows_that_are_added_are_read_without_those_before(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(score_rows, "write_task_plot", lambda *_: None)
    parsed, real = [], score_rows._row
    monkeypatch.setattr(score_rows, "_row", lambda line: parsed.append(line) or real(line))
    reader = score_rows.RowReader(tmp_path, [OWN])
    assert reader.read() == []
    with open(tmp_path / "tasks.jsonl", "wb", buffering=0) as file:
        line = json.dumps({**ROW, "step": 0}).encode() + b"\n"
        file.write(line[:20])
        assert reader.read() == []
        file.write(line[20:])
        assert reader.read() == [{**ROW, "step": 0}]
    many = [{**ROW, "step": step} for step in range(200)]
    score_rows.write_rows(tmp_path, many)
    assert reader.read() == many
    for step in range(200, 204):
        parsed.clear()
        many.append({**ROW, "step": step})
        score_rows.write_rows(tmp_path, many)
        assert reader.read() == many[-2:] and len(parsed) == 2
    score_rows.write_rows(tmp_path, many[:50])
    assert reader.read() == many[:50]


def test_rows_that_are_there_already_are_no_new_scores(tmp_path: Path, monkeypatch):
    """A scoring process begins by making tasks.jsonl again. If it then crashes, this must not count as a new score."""
    monkeypatch.setattr(score_rows, "write_task_plot", lambda *_: None)
    path = tmp_path / score_rows.NAME
    score_rows.write_rows(tmp_path, [{**ROW, "step": 5}])
    os.utime(path, ns=(1, 1))
    score_rows.write_rows(tmp_path, [{**ROW, "step": 5}])
    assert path.stat().st_mtime_ns == 1
    path.write_bytes(path.read_bytes()[:20])
    score_rows.write_rows(tmp_path, [{**ROW, "step": 5}])
    assert path.stat().st_mtime_ns > 1 and score_rows.read_rows(tmp_path) == [{**ROW, "step": 5}]


@pytest.mark.parametrize("seed", range(5))
def test_no_row_stays_unread_in_whatever_order_checkpoints_are_scored(tmp_path: Path, seed: int, monkeypatch):
    monkeypatch.setattr(score_rows, "write_task_plot", lambda *_: None)
    choice, reader, seen = random.Random(seed), score_rows.RowReader(tmp_path, [OWN]), set()
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for _ in range(60):
        for _ in range(choice.randrange(3)):
            step, task, data = choice.randrange(12), choice.choice(["quiz", "piqa"]), choice.choice([OWN.data, "older"])
            if rows.get((step, task), {}).get("data") != OWN.data:     # as `--follow`, which scores nothing twice
                rows[step, task] = {**ROW, "step": step, "task": task, "data": data.ljust(64)[:64]}
        score_rows.write_rows(tmp_path, rows.values())
        seen |= {row["step"] for row in reader.read()}
        assert seen == {step for (step, task), row in rows.items() if (task, row["data"]) == ("quiz", OWN.data)}
