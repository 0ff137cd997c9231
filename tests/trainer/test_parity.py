"""One and two ranks are the same training: real gloo processes, shards and batches that do not divide by two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.trainer.ranks import initial_hashes, one_global_seed, quiet
from tests.trainer.synthetic import make_run
from trainer import checkpoint as ckpt
from trainer import train as loop
from trainer.metrics import read
from trainer.parallel import world
from trainer.run import open_run

ROOT = Path(__file__).resolve().parents[2]


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read(out / "metrics.jsonl") if line["event"] == "step"}


def parity(a: dict[int, float], b: dict[int, float]) -> float:
    """Largest difference in loss of any step; both must have the same, at least 20, steps."""
    assert a.keys() == b.keys()
    assert len(a) >= 20
    return max(abs(a[step] - b[step]) for step in a)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Runs everything once: one rank here, two ranks in processes, each resuming what the other began."""
    store = tmp_path_factory.mktemp("store")
    run, out = str(make_run(store)), store / "out"
    out.mkdir()
    with world("cpu") as here:
        (out / "init.alone.json").write_text(json.dumps(initial_hashes(run, here)))
        loop.train(open_run(run, None, str(out / "one"), []), here, None, quiet)
        loop.train(open_run(run, None, str(out / "one-then-two"), []), here, 30, quiet)
        with mock.patch.object(loop, "initialise", one_global_seed):
            loop.train(open_run(run, None, str(out / "mutant-one"), []), here, 22, quiet)
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port), "WORLD_SIZE": "2",
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-m", "tests.trainer.ranks", run, str(out)], cwd=ROOT,
                              env={**environment, "RANK": str(r)}, stderr=subprocess.PIPE, text=True) for r in range(2)]
    try:
        errors = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    with world("cpu") as here:
        loop.train(open_run(run, None, str(out / "two-then-one"), []), here, None, quiet)
    return out


def test_two_ranks_give_the_losses_of_one(out):
    assert parity(losses(out / "one"), losses(out / "two")) < 1e-4


def test_the_parity_check_fails_when_one_global_seed_initialises_shards(out):
    assert parity(losses(out / "mutant-one"), losses(out / "mutant-two")) > 1e-4
    first = losses(out / "mutant-two")
    assert min(first.values()) < first[1]            # it trains all the same: nothing but parity tells


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
    norms = [[line["grad_norm"] for line in read(out / name / "metrics.jsonl") if line["event"] == "step"]
             for name in ("one", "two")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    a, b = (ckpt.latest(out / name / "checkpoints") for name in ("one", "two"))
    assert (a.step, a.meta["samples"]) == (b.step, b.meta["samples"]) == (44, 180)
    assert a.meta["probe"]["loss"] == pytest.approx(b.meta["probe"]["loss"], abs=1e-4)
    assert torch.__version__ == a.meta["torch"]
