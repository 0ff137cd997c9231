"""Checkpoints that two ranks wrote in the background are read by three ranks, and by one; and one rank reads those of a
tensor group."""

from __future__ import annotations

import shutil

import pytest

from tests.trainer.checkpoint_ranks import SET, SPLIT
from tests.trainer.processes import launch
from tests.trainer.synthetic import losses, make_run, quiet
from trainer.checkpoint import checkpoints as ckpt
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.observe.metrics import read

pytestmark = pytest.mark.slow
MODULE = "tests.trainer.checkpoint_ranks"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The results of a training on two ranks, continued on three and on one. `whole` and `split` are uninterrupted
    trainings on one rank."""
    from trainer.parallel.world import world

    store = tmp_path_factory.mktemp("store")
    run, out = str(make_run(store, documents=200, total=2240)), store / "out"
    out.mkdir()
    launch(MODULE, 2, "two", run, str(out))
    shutil.copytree(out / "reshard", out / "alone")
    launch(MODULE, 3, "three", run, str(out))
    with world("cpu") as here:
        train(open_run(run, None, str(out / "alone"), SET), here, 11, quiet)
        train(open_run(run, None, str(out / "whole"), SET), here, None, quiet)
        train(open_run(run, None, str(out / "split"), [*SET, *SPLIT]), here, 7, quiet)
        train(open_run(run, None, str(out / "tensor"), [*SET, *SPLIT]), here, 7, quiet)
    return out


def test_saved_by_two_loaded_by_three(out):
    lines = read(out / "reshard" / "metrics.jsonl")
    assert [line["world"] for line in lines if line["event"] in ("start", "resume")] == [2, 3]
    assert next(line for line in lines if line["event"] == "resume")["changed"] == ["world: checkpoint 2, now 3"]
    got, want = losses(out / "reshard"), losses(out / "whole")
    assert got.keys() == want.keys() and len(got) == 13
    assert max(abs(got[s] - want[s]) for s in got) <= 1e-4      # two ranks add in another order from the first step on
    alone = losses(out / "alone")                                # the same checkpoint, read by one rank
    assert max(abs(got[s] - alone[s]) for s in range(9, 12)) <= 1e-5
    meta = [ckpt.latest(out / name / "checkpoints").meta for name in ("reshard", "whole")]
    assert meta[0]["chain"] == meta[1]["chain"] and meta[0]["world"] == 3
    names = [p.name for p in ckpt.latest(out / "reshard" / "checkpoints").folder.iterdir()]
    assert {n.split("_")[2] for n in names if n.endswith(".distcp")} == {"0", "1", "2"}
    assert ckpt.latest(out / "reshard" / "checkpoints").sha256.keys() == set(names)


def test_saved_by_a_tensor_group_loaded_by_one(out):
    got, want = losses(out / "tensor"), losses(out / "split")
    assert len(got) == 7
    assert max(abs(got[s] - want[s]) for s in got) <= 1e-5
    changed = next(x for x in read(out / "tensor" / "metrics.jsonl") if x["event"] == "resume")["changed"]
    assert changed == ["world: checkpoint 2, now 1", "train.parallel.tensor: checkpoint 2, now 1"]


def test_a_rank_that_cannot_write_ends_all(out):
    """None hangs, none goes on; the one before is sound."""
    said = [(out / f"failing.{rank}").read_text() for rank in range(2)]
    assert all("step_00000006" in text for text in said)
    assert any("No space left" in text for text in said)
    assert ckpt.latest(out / "failing" / "checkpoints").step == 3
    assert max(losses(out / "failing")) == 7
