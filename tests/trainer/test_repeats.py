"""Spans of repetition are found exactly as defined, and no target inside a span counts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.synthetic import EOS, make_run
from trainer.data.batches import Data
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.model.config import RepeatsConfig
from trainer.model.loss import IGNORE
from trainer.model.repeats import repeated
from trainer.observe.metrics import read


def plainly(tokens: np.ndarray, ngram: int, times: int) -> np.ndarray:
    """Find the spans by their definition, token by token."""
    found = np.zeros(len(tokens), bool)
    for period in range(1, ngram + 1):
        for start in range(len(tokens)):
            if start and start - 1 + period < len(tokens) and tokens[start - 1] == tokens[start - 1 + period]:
                continue                                                 # not where a stretch begins
            stop = start + period
            while stop < len(tokens) and tokens[stop] == tokens[stop - period]:
                stop += 1
            if stop <= len(tokens) and stop - start >= times * period:
                found[start:stop] = True
    return found


@pytest.mark.parametrize("seed", range(40))
def test_as_the_definition_says(seed):
    """Few different tokens, so that there are repetitions of all lengths, at both ends and one in another."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2 + seed % 3, 120)
    for _ in range(3):
        at, period = int(rng.integers(0, 110)), int(rng.integers(1, 7))
        stop = min(120, at + period * int(rng.integers(2, 9)))
        tokens[at:stop] = np.resize(tokens[at:at + period], stop - at)
    ngram, times = int(rng.integers(1, 8)), int(rng.integers(2, 7))
    assert repeated(tokens.astype(np.uint16), ngram, times).tolist() == plainly(tokens, ngram, times).tolist()


def test_thirty_two_times_is_enough_and_thirty_one_is_not():
    head, unit, tail = np.arange(100, 120), np.arange(13), np.arange(200, 230)
    for times, length, expected in ((32, 32 * 13, True), (32, 32 * 13 - 1, False)):
        tokens = np.concatenate((head, np.resize(unit, length), tail))
        found = repeated(tokens, 13, times)
        assert found.any() == expected
        if expected:
            assert np.flatnonzero(found).tolist() == list(range(20, 20 + length))
    assert not repeated(np.concatenate((head, np.resize(np.arange(14), 40 * 14))), 13, 32).any()


def test_their_targets_do_not_count_on_any_rank_and_the_metrics_say_how_many(tmp_path, alone):
    folder = make_run(tmp_path, documents=300, total=1920, train={"loss": {"repeats": {"ngram": 2, "times": 4}}})
    run = open_run(str(folder), None, None, [])
    plain, masked = Data(run.curriculum, run.store), Data(run.curriculum, run.store, run.config.loss.repeats)
    total = 0
    for step in run.steps():
        whole, without = plain.step(step.first, step.batch, 0, 1), masked.step(step.first, step.batch, 0, 1)
        inside = whole.targets != without.targets
        assert (without.targets[inside] == IGNORE).all() and int(inside.sum()) == without.repeated
        assert without.tokens.equal(whole.tokens) and without.positions.equal(whole.positions)
        for row in range(step.batch):
            window = np.concatenate((whole.tokens[row, :1].numpy(), whole.targets[row].numpy()))
            known = window[1:] != IGNORE                     # where the raw token can be seen in `targets`
            expected = plainly(np.where(window == IGNORE, EOS + 1000 + np.arange(len(window)), window), 2, 4)[1:]
            assert (inside[row].numpy() | ~expected | ~known).all()
        ranks = [masked.step(step.first, step.batch, r, 2) for r in range(2)]
        assert sum(r.repeated for r in ranks) == without.repeated
        total += without.repeated
    assert total > 0
    train(run, alone, None, lambda _text: None)
    steps = [line for line in read(run.out / "metrics.jsonl") if line["event"] == "step"]
    assert sum(line["repeats"] for line in steps) == total
    assert steps[0]["targets"] + steps[0]["repeats"] == plain.step(0, 5, 0, 1).valid()


def test_the_window_is_all_that_decides(tmp_path):
    """A run of one token over the end of a window: each window judges what it holds of it."""
    tokens = np.concatenate((np.arange(1, 61), np.full(40, 7), np.arange(1, 61), [EOS]))
    found = [repeated(tokens[start:start + 65], 13, 8) for start in (0, 64)]
    assert [int(f.sum()) for f in found] == [0, 36]
    assert RepeatsConfig() == RepeatsConfig(13, 32)
