"""Several micro-batches in a step: the gradients are those of one large batch, and no rank holds more than its share of
them."""

from __future__ import annotations

import json

import pytest

from tests.trainer.processes import launch
from tests.trainer.ranks import ACCUMULATED, MODEL
from tests.trainer.synthetic import losses, make_run, quiet
from tests.trainer.test_parity import norms
from trainer.loop import train as loop
from trainer.loop.run import open_run
from trainer.parallel.world import world

#: shares of whole gradients that a rank of four holds
SHARES = {"full": 1 / 4, "hybrid": 1 / 2, "none": 1.0, "grad": 1 / 4}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A folder with two equal trainings: one rank computes a step at once; four ranks compute it in micro-batches of
    one row."""
    store = tmp_path_factory.mktemp("store")
    phases = [{"name": "all", "until": "100%", "sequence": 32, "batch": 288, "mix": {"web": 70, "code": 30}}]
    run, out = str(make_run(store, model=MODEL, documents=200, total=5760, phases=phases)), store / "out"
    out.mkdir()
    with world("cpu") as here:
        loop.train(open_run(run, None, str(out / "one"), []), here, 2, quiet)
    launch("tests.trainer.ranks", 4, "accumulated", run, str(out))
    return out


@pytest.mark.parametrize("name", ACCUMULATED)
def test_micro_batches_give_the_gradients_of_one_large_batch(four, name):
    one, found = losses(four / "one"), losses(four / name)
    assert list(found) == list(one) == [1, 2]
    assert max(abs(one[step] - found[step]) for step in one) < 1e-4
    assert norms(four / name) == pytest.approx(norms(four / "one"), rel=1e-3)


@pytest.mark.parametrize("name", ACCUMULATED)
def test_a_rank_holds_its_share_of_the_gradients(four, name):
    shard, _, way = name.partition("-")
    for rank in range(4):
        held, whole = json.loads((four / f"held.{rank}.json").read_text())[name]
        if way == "unsharded":
            assert held == whole
        else:                                                          # rows of parameters do not divide by four
            assert 0 < held <= 1.15 * SHARES[shard] * whole
