"""One rank and two ranks give the same training: real gloo processes, with shards and batches that cannot be divided by
two."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.trainer.processes import launch
from tests.trainer.ranks import MODEL, STOP, TOTAL, TWO, initial_hashes, one_global_seed, text
from tests.trainer.synthetic import losses, make_run, quiet
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.reader import SafeMetadataReader
from trainer.loop import resume
from trainer.loop import train as loop
from trainer.loop.run import open_run
from trainer.observe.metrics import read
from trainer.parallel.world import world


def parity(a: dict[int, float], b: dict[int, float], least: int = STOP) -> float:
    """Return the largest difference in loss over all steps that both trainings have. Fails if these are not at least
    the first `least` steps."""
    both = sorted(a.keys() & b.keys())
    assert both == list(range(1, len(both) + 1))
    assert len(both) >= least
    return max(abs(a[step] - b[step]) for step in both)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The results of all trainings: on one rank in this process, on two ranks in processes, and trainings that one rank
    begins and two ranks resume, or the other way round."""
    store = tmp_path_factory.mktemp("store")
    run, out = str(make_run(store, model=MODEL, total=TOTAL, documents=300)), store / "out"
    out.mkdir()
    with world("cpu") as here:
        (out / "init.alone.json").write_text(json.dumps(initial_hashes(run, here)))
        (out / "text.alone.json").write_text(json.dumps(text(run, here, [])))
        loop.train(open_run(run, None, str(out / "one"), []), here, None, quiet)
        loop.train(open_run(run, None, str(out / "one-then-two"), []), here, STOP, quiet)
        with mock.patch.object(resume, "initialise", one_global_seed):
            loop.train(open_run(run, None, str(out / "mutant-one"), []), here, STOP, quiet)
    launch("tests.trainer.ranks", 2, "parity", run, str(out))
    with world("cpu") as here:
        loop.train(open_run(run, None, str(out / "two-then-one"), []), here, None, quiet)
    return out


def saved(out: Path) -> dict[str, tuple]:
    """Return {name: (shape, dtype)} of the tensors in the latest checkpoint."""
    metadata = SafeMetadataReader(ckpt.latest(out / "checkpoints").folder).read_metadata().state_dict_metadata
    return {name: (tuple(x.size), x.properties.dtype) for name, x in metadata.items()}


def norms(out: Path) -> list[float]:
    return [line["grad_norm"] for line in read(out / "metrics.jsonl") if line["event"] == "step"]


@pytest.mark.parametrize("name", ["two", *TWO])
def test_two_ranks_give_the_losses_of_one(out, name):
    one, two = losses(out / "one"), losses(out / name)
    assert len(two) == (len(one) if name == "two" else STOP)
    assert parity(one, two) < 1e-4
    assert norms(out / name) == pytest.approx(norms(out / "one")[:len(two)], rel=1e-3)
    # also where parameters stay gathered after the forward passes before it
    assert saved(out / name) == saved(out / "one")


def test_the_parity_check_fails_when_one_global_seed_initialises_shards(out):
    first = losses(out / "mutant-two")
    assert parity(losses(out / "mutant-one"), first) > 1e-4
    assert min(first.values()) < first[1]            # it trains all the same: nothing but parity tells


def test_no_two_tensor_ranks_hold_the_same_shard(out):
    alone = json.loads((out / "init.alone.json").read_text())
    for rank in range(2):
        found = json.loads((out / f"shards.{rank}.json").read_text())
        assert {name: digest for name, (digest, _) in found["init"].items()} == \
            {name: digest for name, (digest, _) in alone.items()}
        assert found["sound"] == {"twins": [], "unequal": []}
        assert found["text"] == json.loads((out / "text.alone.json").read_text())
        # one seed on every rank: every matrix that is divided is the same on both
        assert found["mutant"]["twins"] == [name for name in alone if "norm" not in name]


def test_a_poisoned_rank_makes_all_ranks_leave_the_step_out(out):
    """One rank of a tensor group has a NaN in a gradient: the norm is NaN on both, and nothing changes on either."""
    a, b = (json.loads((out / f"poison.{rank}.json").read_text()) for rank in range(2))
    assert [str(x) for x in a] == [str(x) for x in b]
    assert [i for i, x in enumerate(a) if x != x] == [4]
    sound, found = losses(out / "tensor"), losses(out / "poison")
    assert [found[step] for step in range(1, 6)] == [sound[step] for step in range(1, 6)]      # of unchanged parameters
    assert all(found[step] == found[step] and found[step] != sound[step] for step in range(6, 9))
    lines = [line for line in read(out / "poison" / "metrics.jsonl") if line["event"] == "step"]
    assert [line["step"] for line in lines if line.get("skipped")] == [5]


def test_ranks_of_a_tensor_group_know_the_same_sums(out):
    """To the last bit, whatever each had: what they decide by must not differ."""
    a, b = (json.loads((out / f"shards.{rank}.json").read_text())["sum"] for rank in range(2))
    assert a == b == [0.1]


@pytest.mark.parametrize("resumed", ["two-then-one", "one-then-two"])
def test_resuming_with_another_number_of_ranks_gives_the_losses_of_an_uninterrupted_run(out, resumed):
    lines = read(out / resumed / "metrics.jsonl")
    assert [line["world"] for line in lines if line["event"] in ("start", "resume")] == \
        [2 if part == "two" else 1 for part in resumed.split("-then-")]
    assert parity(losses(out / "one"), losses(out / resumed)) < 1e-4


def test_initial_parameters_are_equal_and_shards_uneven(out):
    alone, *ranks = (json.loads((out / f"init.{who}.json").read_text()) for who in ("alone", 0, 1))
    for name, (digest, rows) in alone.items():
        assert ranks[0][name][0] == ranks[1][name][0] == digest, name
        assert ranks[0][name][1] + ranks[1][name][1] == rows, name
    assert any(ranks[0][name][1] != ranks[1][name][1] for name in alone)
    matrices = [digest for name, (digest, _) in alone.items() if "norm" not in name]
    assert len(set(matrices)) == len(matrices)


def test_other_results_are_equal_too(out):
    one, two = (json.loads((out / name / "summary.json").read_text()) for name in ("one", "two"))
    for key in ("heldout_loss", "heldout_loss_before", "unigram_entropy", "gap", "train_loss_last"):
        assert one[key] == pytest.approx(two[key], abs=1e-4), key
    a, b = (ckpt.latest(out / name / "checkpoints") for name in ("one", "two"))
    assert (a.step, a.meta["samples"]) == (b.step, b.meta["samples"]) == (11, 45)
    assert a.meta["probe"]["loss"] == pytest.approx(b.meta["probe"]["loss"], abs=1e-4)
    assert torch.__version__ == a.meta["torch"]
