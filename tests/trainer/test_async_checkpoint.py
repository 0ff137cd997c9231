"""Checkpoints that are written in the background: they are equal to synchronous ones, only one is written at a time,
none is ever half complete, and failures are reported.

No test measures time: a writer that is meant to be slow waits until the test lets it go on.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from tests.trainer.checkpoint_ranks import killed
from tests.trainer.processes import begin
from tests.trainer.synthetic import losses, make_run, quiet
from tests.trainer.test_checkpoint import FAST
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint import saver as saving
from trainer.checkpoint.reader import SafeMetadataReader
from trainer.loop.run import Run, open_run
from trainer.loop.train import train
from trainer.observe.metrics import read

ASYNC = [*FAST, "checkpoint.async=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("store"), documents=200)


def opened(folder: Path, out: Path, *overrides: str) -> Run:
    return open_run(str(folder), None, str(out), [*ASYNC, *overrides])


@pytest.fixture(scope="module")
def sync(folder, tmp_path_factory):
    """The output folder of a training with synchronous checkpoints, all of which are kept."""
    from trainer.parallel.world import world

    out = tmp_path_factory.mktemp("sync")
    with world("cpu") as here:
        train(open_run(str(folder), None, str(out), [*FAST, "checkpoint.keep=99"]), here, 20, quiet)
    return out


def content(found: ckpt.Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint that one rank wrote, by name."""
    reader = SafeMetadataReader(found.folder)
    metadata = reader.read_metadata()
    state = {name: torch.empty(about.size, dtype=about.properties.dtype)
             for name, about in metadata.state_dict_metadata.items()}
    torch.distributed.checkpoint.load(state, storage_reader=SafeMetadataReader(found.folder))
    return state


class Gate:
    """A FileSystemWriter (`writer`) that waits in its thread until `open` is set. It sets `reached` when it begins to
    wait."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        gate, writer = self, saving.FileSystemWriter

        class Waiting(writer):
            def write_data(self, plan, planner):
                gate.reached.set()
                assert gate.open.wait(600)
                return super().write_data(plan, planner)

        self.writer = Waiting


@pytest.mark.parametrize("kept", [False, True], ids=["new copies", "one copy, as on CUDA"])
def test_it_is_the_same_checkpoint_bit_for_bit(folder, sync, tmp_path, alone, monkeypatch, kept):
    """Also when training has gone on before the first byte is written: the copy is what is written. On CUDA the copy of
    a checkpoint is written over that of the one before."""
    if kept:
        stager = BlockingAsyncStager(True)
        monkeypatch.setattr(saving, "BlockingAsyncStager", lambda _cuda: stager)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)    # only CUDA has pinned memory
    gate, steps = Gate(), []

    def opens(saver: saving.Saver, *_: object) -> None:
        if saver.writing is not None and not gate.open.is_set():
            steps.append(saver.writing.meta["step"])
            if len(steps) == 3:                      # three steps later
                gate.open.set()

    real = saving.Saver.poll
    with mock.patch.object(saving, "FileSystemWriter", gate.writer), \
            mock.patch.object(saving.Saver, "poll", lambda self: (opens(self), real(self))[1]):
        train(opened(folder, tmp_path, "checkpoint.keep=99"), alone, 20, quiet)
    assert steps == [6, 6, 6]                        # it was in flight while steps were done
    assert not kept or stager.state_dict_cache
    there, here = (ckpt.complete(out / "checkpoints") for out in (sync, tmp_path))
    assert [c.step for c in there] == [c.step for c in here] == [6, 12, 18, 20]
    for a, b in zip(there, here):
        one, two = content(a), content(b)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert {**a.meta, "train": None} == {**b.meta, "train": None}
    assert losses(tmp_path) == losses(sync)
    lines = [line for line in read(tmp_path / "metrics.jsonl") if line["event"] == "checkpoint"]
    assert [line["step"] for line in lines] == [6, 12, 18, 20]
    assert all(line["bytes"] > 0 and line["written_s"] >= 0 for line in lines)


def test_the_thread_that_writes_opens_no_context_on_another_gpu(tmp_path, alone):
    """A new thread is on device 0, whichever its rank computes on."""
    saver = saving.Saver(tmp_path, ckpt.CheckpointConfig(async_=True), alone)
    saver.world = replace(alone, device=torch.device("cuda", 3))
    job = saving.Writing(tmp_path / "step_00000001" / "attempt", {"step": 1, "tokens": 1}, 0.0)
    job.attempt.mkdir(parents=True)
    with mock.patch.object(torch.cuda, "set_device") as device:
        saver._write(job, {"x": torch.ones(2)})
    assert job.failed is None
    device.assert_called_once_with(saver.world.device)


def test_there_is_one_in_flight_and_the_next_waits_for_it(folder, tmp_path, alone):
    """The writer of step 6 is held until training wants to begin step 12's: that waits, and both are complete."""
    gate, seen, said, passed = Gate(), [], [], [0.0]
    real = saving.Saver.wait
    clock = SimpleNamespace(perf_counter=lambda: passed[0])

    def wait(saver: saving.Saver) -> None:
        if saver.writing is not None and not gate.open.is_set():
            seen.append((saver.writing.meta["step"], [c.step for c in ckpt.complete(tmp_path / "checkpoints")]))
            join = saver.writing.thread.join

            def late() -> None:                      # opens while it is waited for, so that all of it is time waited
                passed[0] += 30.0
                gate.open.set()
                join()

            saver.writing.thread.join = late
        real(saver)

    with mock.patch.object(saving, "FileSystemWriter", gate.writer), mock.patch.object(saving.Saver, "wait", wait), \
            mock.patch.object(saving, "time", clock):
        train(opened(folder, tmp_path, "checkpoint.keep=99"), alone, 14, said.append)
    assert seen == [(6, [])]
    assert [c.step for c in ckpt.complete(tmp_path / "checkpoints")] == [6, 12, 14]
    [line] = [text for text in said if text.startswith("checkpoint step_00000006")]
    held = next(x["seconds"] for x in read(tmp_path / "metrics.jsonl") if x["event"] == "checkpoint" and x["step"] == 6)
    assert held == 30 and "training waited for" in line and "bytes a parameter" in line


def test_a_write_that_fails_ends_the_training_and_the_one_before_is_sound(folder, sync, tmp_path, alone):
    real, real_poll, calls = saving.FileSystemWriter, saving.Saver.poll, []

    class Full(real):
        def write_data(self, plan, planner):
            (self.path / "half").write_bytes(b"x")
            raise OSError(28, "No space left on device")

    def second(path: Path):
        calls.append(path)
        return (Full if len(calls) == 2 else real)(path)

    def poll(saver: saving.Saver) -> None:             # the second has failed by the next step
        if saver.writing is not None and len(calls) == 2:
            saver.writing.thread.join()
        real_poll(saver)

    with mock.patch.object(saving, "FileSystemWriter", second), mock.patch.object(saving.Saver, "poll", poll), \
            pytest.raises(ckpt.CheckpointError, match=r"step_00000012\S* could not be written: rank 0: .*No space .* "
                                                      r"is sound"):
        train(opened(folder, tmp_path), alone, 40, quiet)
    assert max(losses(tmp_path)) == 13               # it did not go on to the next checkpoint
    assert ckpt.latest(tmp_path / "checkpoints").step == 6
    assert not list(tmp_path.rglob("half"))          # the disk is full: it would be in the way of the next
    train(opened(folder, tmp_path), alone, 20, quiet)
    assert losses(tmp_path) == pytest.approx(losses(sync), abs=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_could_not_hear_of_it_leaves_to_the_first(tmp_path, alone, rank):
    """A connection breaks once the first rank has all it needs: that is just about to commit these very files."""
    saver = saving.Saver(tmp_path, ckpt.CheckpointConfig(), alone)
    saver.world = replace(alone, rank=rank)
    job = saving.Writing(tmp_path / "step_00000001" / "attempt", {"step": 1, "tokens": 1}, 0.0)
    job.attempt.mkdir(parents=True)
    with mock.patch.object(saving.dcp, "save"), \
            mock.patch.object(saving.dist, "all_gather_object", side_effect=RuntimeError("Connection reset by peer")):
        saver._write(job, {"x": torch.ones(2)})
    assert "Connection reset" in str(job.failed)
    assert job.attempt.exists() == (rank > 0)


@pytest.mark.parametrize(("where", "left"), [("data", 6), pytest.param("commit", 6, marks=pytest.mark.slow),
                                             pytest.param("committed", 12, marks=pytest.mark.slow)])
def test_a_kill_in_the_background_leaves_a_loadable_latest(folder, sync, tmp_path, alone, where, left):
    arguments = ["run", str(folder), "--out", str(tmp_path), *(x for key in ASYNC for x in ("--set", key))]
    training = begin(killed, where, arguments)
    training.join(600)
    assert training.exitcode == -signal.SIGKILL
    assert ckpt.latest(tmp_path / "checkpoints").step == left
    train(opened(folder, tmp_path), alone, 20, quiet)
    assert next(x["step"] for x in read(tmp_path / "metrics.jsonl") if x["event"] == "resume") == left
    assert losses(tmp_path) == pytest.approx(losses(sync), abs=1e-6)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_waits_for_its_checkpoint(folder, tmp_path, alone, monkeypatch, number):
    """Sent while one is in flight and held: both are complete when training has ended."""
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_DFL)     # though these tests run with nohup
    gate, real = Gate(), saving.Saver.poll

    def poll(saver: saving.Saver) -> None:
        if saver.writing is not None and not gate.open.is_set() and gate.reached.wait(600):
            os.kill(os.getpid(), number)
            gate.open.set()
        real(saver)

    with mock.patch.object(saving, "FileSystemWriter", gate.writer), mock.patch.object(saving.Saver, "poll", poll), \
            pytest.raises(SystemExit) as stopped:
        train(opened(folder, tmp_path, "checkpoint.keep=99"), alone, 40, quiet)
    assert stopped.value.code == 128 + number
    done = [c.step for c in ckpt.complete(tmp_path / "checkpoints")]
    assert done[0] == 6 and len(done) == 2 and done[1] == max(losses(tmp_path)) < 12
    assert [x["step"] for x in read(tmp_path / "metrics.jsonl") if x["event"] == "checkpoint"] == done


def test_bf16_moments_are_smaller_and_close_but_not_the_same(folder, sync, tmp_path, alone):
    half = opened(folder, tmp_path, "checkpoint.moments=bf16", "checkpoint.keep=99")
    train(half, alone, 12, quiet)
    train(half, alone, 20, quiet)
    a, b = (next(c for c in ckpt.complete(out / "checkpoints") if c.step == 12) for out in (sync, tmp_path))
    one, two = content(a), content(b)
    moments = [name for name in one if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert moments and all(two[n].dtype == torch.bfloat16 and torch.equal(one[n].bfloat16(), two[n]) for n in moments)
    assert all(torch.equal(one[n], two[n]) for n in one if n not in moments)
    got, want = losses(tmp_path), losses(sync)
    assert {s: got[s] for s in range(1, 13)} == {s: want[s] for s in range(1, 13)}
    assert got != want
    assert got == pytest.approx(want, rel=2e-3)


def metas(*rows: tuple[int, int, bool, float | None]) -> list[ckpt.Checkpoint]:
    return [ckpt.Checkpoint(Path(str(step)), {"step": step, "tokens": tokens, "pinned": pinned, "heldout": heldout})
            for step, tokens, pinned, heldout in rows]


@pytest.mark.parametrize(("config", "stay"), [
    ({"keep": 1}, [40, 90]),
    ({"keep": 3}, [40, 70, 80, 90]),
    ({"keep": 1, "keep_every": 250}, [30, 40, 50, 80, 90]),
    ({"keep": 1, "keep_best": 2}, [40, 50, 70, 90]),
    ({"keep": 2, "keep_best": 1, "keep_every": 600}, [40, 60, 70, 80, 90]),
])
def test_what_stays(config, stay):
    """Ten tokens a step; step 40 ends a phase; the best were 70 and 50. A deleted one is never missed later."""
    rows = [(s, 10 * s, s == 40, {50: 2.0, 60: 3.0, 70: 1.5, 80: None}.get(s, 4.0)) for s in range(10, 100, 10)]
    found = metas(*rows)
    assert sorted(ckpt.steps_to_keep(found, ckpt.CheckpointConfig(**config))) == stay
    there: list[ckpt.Checkpoint] = []                # one by one, as a training does it
    for one in found:
        stay_now = ckpt.steps_to_keep([*there, one], ckpt.CheckpointConfig(**config))
        there = [c for c in (*there, one) if c.step in stay_now]
    assert [c.step for c in there] == stay


def test_the_best_is_kept_by_a_training(folder, tmp_path, alone):
    run = open_run(str(folder), None, str(tmp_path), ["log_every=1000", "checkpoint.every=4", "evaluate.every=4",
                                                      "checkpoint.keep=1", "checkpoint.keep_best=1"])
    train(run, alone, 23, quiet)
    judged = {line["step"]: line["loss"] for line in read(tmp_path / "metrics.jsonl") if line["event"] == "eval"}
    found = ckpt.complete(tmp_path / "checkpoints")
    assert all(c.meta["heldout"] == judged[c.step] for c in found)
    assert min(judged, key=judged.get) in [c.step for c in found]
    assert json.loads((found[-1].folder.parent / "COMPLETE").read_text())["sha256"].keys() == \
        {p.name for p in found[-1].folder.iterdir()}
