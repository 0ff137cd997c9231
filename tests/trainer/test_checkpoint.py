"""Checkpoints: a resumed training is exactly the uninterrupted one, a kill at any point leaves a checkpoint that can be
loaded, and hostile or foreign checkpoints are refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.trainer.checkpoint_ranks import killed
from tests.trainer.processes import begin
from tests.trainer.synthetic import losses, make_run, quiet
from tokenizer.mixture.curriculum import Curriculum, edit
from trainer.base.config import TrainingError
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint import in_use, saver
from trainer.loop.run import Run, differences, open_run
from trainer.loop.train import train
from trainer.observe.metrics import read
from trainer.parallel.world import World

FAST = ["evaluate.every=1000", "log_every=1000", "checkpoint.every=6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("store"), documents=200)


def opened(folder: Path, out: Path, *overrides: str) -> Run:
    return open_run(str(folder), None, str(out), [*FAST, *overrides])


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory):
    """The output folder of the uninterrupted training."""
    from trainer.parallel.world import world

    out = tmp_path_factory.mktemp("whole")
    with world("cpu") as here:
        train(opened(folder, out), here, None, quiet)
    return out


@pytest.fixture(scope="module")
def whole(done):
    """The losses of the uninterrupted training."""
    return losses(done)


def test_stop_and_resume_at_any_step_is_exact(folder, whole, tmp_path, alone):
    for stop in (1, 13, 24, 31, 44):
        train(opened(folder, tmp_path), alone, stop, quiet)
        assert ckpt.latest(tmp_path / "checkpoints").step == stop
    assert losses(tmp_path) == pytest.approx(whole, abs=1e-6)
    assert train(opened(folder, tmp_path), alone, None, quiet)["steps"] == 44           # nothing left to do
    assert losses(tmp_path) == pytest.approx(whole, abs=1e-6)


def test_accumulation_and_micro_batches_change_nothing(folder, whole, tmp_path, alone):
    train(opened(folder, tmp_path, "micro_batch=64"), alone, 26, quiet)                 # two rows of 32, or one of 64
    got = losses(tmp_path)
    assert got == pytest.approx({step: whole[step] for step in got}, abs=1e-4)
    assert len(got) == 26


def test_half_precision_trains_and_resumes(folder, whole, tmp_path, alone):
    """bf16 products over fp32 parameters follow the fp32 losses, and the probe after loading agrees."""
    for stop in (6, 12):
        train(opened(folder, tmp_path, "precision=bf16"), alone, stop, quiet)
    got = losses(tmp_path)
    assert len(got) == 12
    assert got != {step: whole[step] for step in got}
    assert got == pytest.approx({step: whole[step] for step in got}, rel=0.01)


@pytest.mark.parametrize(("where", "left"), [
    ("data", 6), pytest.param("commit", 6, marks=pytest.mark.slow),
    pytest.param("committed", 12, marks=pytest.mark.slow)])
def test_kill_in_a_checkpoint_leaves_a_loadable_latest(folder, whole, tmp_path, alone, where, left):
    arguments = ["run", str(folder), "--out", str(tmp_path), *(x for key in FAST for x in ("--set", key))]
    training = begin(killed, where, arguments)
    training.join(600)
    assert training.exitcode == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / "step_00000012").is_dir()
    assert ckpt.latest(tmp_path / "checkpoints").step == left
    train(opened(folder, tmp_path), alone, 20, quiet)
    resumed = next(line for line in read(tmp_path / "metrics.jsonl") if line["event"] == "resume")
    assert resumed["step"] == left
    assert losses(tmp_path) == pytest.approx({step: whole[step] for step in range(1, 21)}, abs=1e-6)
    attempts = [p for p in (tmp_path / "checkpoints").glob("step_*/*") if p.is_dir()]
    assert len(attempts) == 2                                                           # what was torn has been removed


def test_only_the_latest_and_the_ends_of_phases_are_kept(folder, tmp_path, alone):
    copied = tmp_path / "checkpoints" / "step_00000012_mine"                            # is nobody's but the user's
    train(opened(folder, tmp_path, "checkpoint.keep=2"), alone, 12, quiet)
    shutil.copytree(tmp_path / "checkpoints" / "step_00000012", copied)
    train(opened(folder, tmp_path, "checkpoint.keep=2"), alone, 40, quiet)
    assert (copied / "COMPLETE").exists()
    assert [c.step for c in ckpt.complete(tmp_path / "checkpoints")] == [24, 34, 36, 40]
    assert [c.meta["pinned"] for c in ckpt.complete(tmp_path / "checkpoints")] == [True, True, False, False]


def test_another_training_is_refused_with_what_differs(folder, tmp_path, alone):
    train(opened(folder, tmp_path), alone, 2, quiet)
    with pytest.raises(ckpt.CheckpointError, match=r"train\.optimizer\.lr: checkpoint 0\.01, now 0\.02(.|\n)*--out"):
        train(opened(folder, tmp_path, "optimizer.lr=0.02"), alone, 4, quiet)
    train(opened(folder, tmp_path, "micro_batch=32", "log_every=7"), alone, 4, quiet)   # these may change


def test_a_mixture_can_be_edited_ahead_but_not_behind(folder, whole, tmp_path, alone):
    run = opened(folder, tmp_path / "out")
    train(run, alone, 12, quiet)
    old = run.curriculum
    phase = old.phases[0]
    ahead = type(phase)(**{**vars(phase), "name": "new", "samples": 60, "reserved": 60, "weights": {"web": 1}})
    edited = edit(old, 12 * phase.batch, [ahead])
    summary = train(Run(run.folder, run.store, run.out, edited, run.config), alone, None, quiet)
    assert summary["steps"] == 24
    got = losses(tmp_path / "out")
    assert {s: got[s] for s in range(1, 13)} == pytest.approx({s: whole[s] for s in range(1, 13)}, abs=1e-6)
    streams = [set(line["streams"]) for line in read(tmp_path / "out" / "metrics.jsonl") if line["event"] == "step"]
    assert all(s == {"web"} for s in streams[12:])

    train(opened(folder, tmp_path / "late"), alone, 12, quiet)
    behind = edit(old, 6 * phase.batch, [ahead])
    with pytest.raises(ckpt.CheckpointError, match="cut at sample 30, but 60 samples have been read"):
        train(Run(run.folder, run.store, tmp_path / "late", behind, run.config), alone, None, quiet)


def test_a_longer_run_must_not_move_the_learning_rate(folder, tmp_path):
    """Warm-up as a share of the total: tokens that had the peak would be in the warm-up of a run ten times as long."""
    run = opened(folder, tmp_path, "schedule.warmup=10%", "schedule.floor=0.1")
    old, phase = run.curriculum, run.curriculum.phases[0]
    meta = {"config": run.config.identity(), "curriculum": old.to_json(), "samples": 12 * phase.batch,
            "tokens": 12 * phase.batch * phase.sequence}
    more = type(phase)(**{**vars(phase), "name": "more", "samples": 200 * phase.batch, "reserved": 200 * phase.batch,
                          "on_exhausted": "repeat", "lr": "stable"})
    longer = Run(run.folder, run.store, run.out, edit(old, old.samples - old.phases[-1].batch, [more]), run.config)
    assert differences(meta, run) == []
    [said] = differences(meta, longer)
    assert "learning rate would jump from 1 to 0." in said and "in tokens" in said
    in_tokens = opened(folder, tmp_path, "schedule.warmup=64", "schedule.floor=0.1")
    meta["config"] = in_tokens.config.identity()
    assert differences(meta, Run(run.folder, run.store, run.out, longer.curriculum, in_tokens.config)) == []


def recommit(found: ckpt.Checkpoint) -> None:
    """Rewrite COMPLETE so that it agrees with the present files, changed ones included."""
    marker = found.folder.parent / "COMPLETE"
    files = sorted(found.folder.iterdir())
    marker.write_text(json.dumps({"attempt": found.folder.name, "files": {p.name: p.stat().st_size for p in files},
                                  "sha256": {p.name: ckpt.sha256(p) for p in files}}))


def test_a_checkpoint_that_gives_another_loss_is_not_gone_on_from(folder, tmp_path, alone):
    """Its bytes are those that were committed, and yet model or data are not what they were."""
    train(opened(folder, tmp_path), alone, 8, quiet)
    found = ckpt.latest(tmp_path / "checkpoints")
    meta = {**found.meta, "probe": {**found.meta["probe"], "loss": found.meta["probe"]["loss"] + 0.01}}
    (found.folder / "meta.json").write_text(json.dumps(meta))
    recommit(found)
    with pytest.raises(ckpt.CheckpointError, match="model or data have changed"):
        train(opened(folder, tmp_path), alone, 10, quiet)


def first_rank(step: int, summed: bool = False, same: bool = True):
    """Return a stand-in for `World.broadcast` on a rank other than 0. It returns what rank 0 would send: an empty
    ledger, that nothing was cleared, and the step that rank 0 chose."""
    sent = iter([lambda _data: bytes(8), lambda _data: b"\0",
                 lambda data: struct.pack("<?", summed) + (data[1:] if same else bytes(32)),
                 lambda _data: struct.pack("<q", step)])
    return lambda _here, data: next(sent)(data)


def test_a_rank_that_does_not_see_the_checkpoint_does_not_begin_anew(folder, tmp_path, alone):
    """…while the first one resumes: it would wait for it forever."""
    with mock.patch.object(World, "broadcast", first_rank(6)), mock.patch.object(ckpt, "PATIENCE_S", 0), \
            pytest.raises(ckpt.CheckpointError, match=r"does not see the checkpoint of step 6.*share the folder"):
        train(opened(folder, tmp_path), alone, None, quiet)


def test_a_rank_that_does_not_see_the_summary_does_not_train_alone(folder, done, tmp_path, alone):
    """The first one has seen it and is through."""
    shutil.copytree(done, tmp_path / "out")
    (tmp_path / "out" / "summary.json").unlink()
    run = opened(folder, tmp_path / "out")
    with mock.patch.object(World, "broadcast", first_rank(run.curriculum.steps, True)), \
            mock.patch.object(ckpt, "load") as load:
        assert train(run, replace(alone, rank=1), None, quiet) == {}
    assert not load.called


def test_a_rank_that_has_read_another_curriculum_does_not_train(folder, tmp_path, alone):
    """An edit that one node does not see yet: its data would be other data, its collectives other collectives."""
    with mock.patch.object(World, "broadcast", first_rank(0, same=False)), \
            pytest.raises(TrainingError, match="rank 1 has read another recipe or curriculum"):
        train(opened(folder, tmp_path), replace(alone, rank=1), None, quiet)


def committed(folder: Path, step: int) -> ckpt.Checkpoint:
    """Write a committed checkpoint without tensors."""
    attempt = folder / f"step_{step:08d}" / "attempt"
    attempt.mkdir(parents=True)
    (attempt / "meta.json").write_text(json.dumps({"step": step, "tokens": step}))
    commit = {"attempt": "attempt", "files": {"meta.json": (attempt / "meta.json").stat().st_size},
              "sha256": {"meta.json": ckpt.sha256(attempt / "meta.json")}}
    ckpt.put_absent(attempt.parent / "COMPLETE", json.dumps(commit).encode())
    return ckpt.latest(folder)


def test_a_listing_that_is_old_is_looked_at_again(tmp_path):
    """Another node of a file system over the network sees a new checkpoint a while later."""
    looks = mock.Mock(wraps=time, sleep=mock.Mock(side_effect=[committed(tmp_path / "late", 6)]))
    with mock.patch.object(ckpt, "time", looks), \
            mock.patch.object(ckpt, "survey", side_effect=[([], []), ckpt.survey(tmp_path / "late")]):
        assert ckpt.at(tmp_path, 6).step == 6
    assert ckpt.at(tmp_path, 0) is None


def test_what_cannot_be_deleted_yet_is_deleted_later_and_ends_nothing(tmp_path):
    real = shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    for step in (1, 2, 3):
        committed(tmp_path, step)
        with mock.patch.object(ckpt.shutil, "rmtree", busy if step < 3 else real):
            ckpt.retain(tmp_path, ckpt.CheckpointConfig(keep=1))
        assert [c.step for c in ckpt.complete(tmp_path)] == [step]
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000003"]


def test_another_process_that_deletes_or_marks_a_checkpoint_ends_nothing(tmp_path, monkeypatch):
    """A person deletes a checkpoint while it is asked whether it awaits its scores; a process marks one as in use just
    before its empty folder is deleted."""
    checkpoints = [committed(tmp_path, step) for step in (1, 2, 3)]
    mark, rmdir = tmp_path / "step_00000002" / f"{in_use.NAME}.0", Path.rmdir

    def removed(checkpoint: ckpt.Checkpoint) -> bool:
        if checkpoint.step == 1:
            shutil.rmtree(checkpoint.folder.parent)
        return False

    def marked(place: Path) -> None:
        if place == mark.parent:
            mark.touch()
        rmdir(place)

    monkeypatch.setattr(Path, "rmdir", marked)
    ckpt.retain(tmp_path, ckpt.CheckpointConfig(keep=1), removed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    assert list(mark.parent.iterdir()) == [mark]
    monkeypatch.undo()
    ckpt.retain(tmp_path, ckpt.CheckpointConfig(keep=1))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000003"]
    shutil.rmtree(checkpoints[2].folder.parent)
    ckpt.delete(checkpoints[2])
    (tmp_path / "step_00000004" / "attempt").mkdir(parents=True)             # being written; no checkpoint is left
    assert ckpt.retain(tmp_path, ckpt.CheckpointConfig(keep=1)) == []
    assert (tmp_path / "step_00000004" / "attempt").is_dir()


def test_two_trainers_in_one_folder(folder, tmp_path, alone):
    """The second to complete a step is refused: put-if-absent, not the last one wins."""
    real = ckpt.put_absent

    def late(path: Path, data: bytes) -> bool:
        if path.parent.name == "step_00000006":
            path.write_text("{}")                    # the other trainer's
        return real(path, data)

    with mock.patch.object(saver, "put_absent", late), \
            pytest.raises(ckpt.CheckpointError, match="another trainer has completed this step"):
        train(opened(folder, tmp_path), alone, 7, quiet)
    assert (tmp_path / "checkpoints" / "step_00000006" / "COMPLETE").read_text() == "{}"


def test_put_absent(tmp_path):
    assert ckpt.put_absent(tmp_path / "x", b"one")
    assert not ckpt.put_absent(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_metadata_of_a_hostile_checkpoint_runs_no_code(folder, tmp_path, alone):
    train(opened(folder, tmp_path), alone, 2, quiet)
    found = ckpt.latest(tmp_path / "checkpoints")
    touched = tmp_path / "touched"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {touched}",)

    (found.folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    recommit(found)
    with pytest.raises(ckpt.CheckpointError, match=r"posix\.system, which none of this trainer's does"):
        train(opened(folder, tmp_path), alone, 4, quiet)
    assert not touched.exists()


def test_curricula_survive_the_checkpoint(folder, tmp_path, alone):
    run = opened(folder, tmp_path)
    train(run, alone, 2, quiet)
    meta = ckpt.latest(tmp_path / "checkpoints").meta
    assert Curriculum.from_json(meta["curriculum"]) == run.curriculum
