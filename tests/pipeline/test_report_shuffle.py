"""How an order of samples compares with a perfect shuffle, checked by counting pairs one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, groupby, pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from pipeline.report.order import order_quality
from pipeline.report.shuffle import StreamDocuments, expected_run
from pipeline.store.fs import Store
from tests.pipeline.test_report_order import curriculum
from tokenizer.imports.assemble import Assembly
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.shards.layout import MANIFEST, Manifest
from tokenizer.shards.reader import ShardSet


def write_set(folder: Path, name: str, lengths: list[int], shard_bytes: int = 1 << 30) -> ShardSet:
    folder.mkdir(parents=True)
    assembly = Assembly(folder, 800, 0, shard_bytes)
    tokens = np.ones(sum(lengths), np.uint16)
    tokens[np.cumsum(lengths) - 1] = 0
    assembly.add(ImportedDocuments("", 0, tokens, np.array(lengths), None, None),
                 [f"{i:032x}" for i in range(len(lengths))], 0, np.ones(len(lengths), bool))
    (folder / MANIFEST).write_text(Manifest.of(name, "train", "0" * 64, 800, 0, assembly.close()).dumps())
    return ShardSet(folder)


def lengths_of(seed: int, tokens: int, longest: int = 3000) -> list[int]:
    rng = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(rng.randrange(1, longest) if rng.random() < 0.3 else rng.randrange(1, 100))
    return lengths


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Curriculum, dict[str, ShardSet]]:
    """Two streams in a store, and a curriculum that reads a part of them."""
    root = tmp_path_factory.mktemp("store")
    sets = {name: write_set(root / name, name, lengths_of(seed, 120_000), 50_000)
            for seed, name in enumerate(("a", "b"))}
    plan = curriculum({"a": 3, "b": 1}, 40 * 12, 40)
    streams = tuple(replace(stream, tokens=sets[stream.name].tokens, sha256=sets[stream.name].sha256)
                    for stream in plan.streams)
    return Store(root), replace(plan, streams=streams), sets


def documents_in(shards: ShardSet, window: int, length: int) -> set[str]:
    return {span.id for span in shards.documents(window * length, window * length + length)}


def test_pairs_with_a_common_document_are_those_counted_one_by_one(stored):
    store, plan, sets = stored
    order = Order(plan)
    repeats, expected, by_lag = 0, 0.0, {lag: [0, 0, 0] for lag in (1, 2, 4, 8, 16, 32)}
    chance = {}
    for number, name in enumerate(order.names):
        windows = order.supers[number] * 4
        within = [documents_in(sets[name], window, 128) for window in range(windows)]
        common = sum(bool(one & other) for one, other in combinations(within, 2))
        chance[number] = common / (windows * (windows - 1) / 2)
        assert StreamDocuments(sets[name], windows, 128).common == pytest.approx(chance[number])
    for first in range(0, plan.samples, 40):
        at = order.locate(first, first + 40)
        within = [documents_in(sets[order.names[s]], w, 128) for s, w in zip(at.stream.tolist(), at.window.tolist(),
                                                                             strict=True)]
        pairs = list(combinations(range(40), 2))
        common = [at.stream[i] == at.stream[j] and bool(within[i] & within[j]) for i, j in pairs]
        repeats += sum(common)
        expected += sum(chance[int(at.stream[i])] for i, j in pairs if at.stream[i] == at.stream[j])
        for (i, j), of_document in zip(pairs, common, strict=True):
            if j - i in by_lag:
                sums = by_lag[j - i]
                sums[0], sums[2] = sums[0] + 1, sums[2] + of_document
                sums[1] += int(at.stream[i] == at.stream[j])
    quality = order_quality(plan, store)
    assert quality is not None and repeats > 0
    assert quality["repeats"] == {"pairs": repeats, "expected": pytest.approx(expected, abs=1e-3)}
    assert [(row["lag"], row["pairs"], row["stream"], row["document"]) for row in quality["lags"]] == [
        (lag, pairs, pytest.approx(same / pairs, abs=1e-6), pytest.approx(common / pairs, abs=1e-7))
        for lag, (pairs, same, common) in by_lag.items()]
    # in a shuffle, every place of a pair is equally likely
    [a, b] = [30, 10]
    assert all(row["stream_expected"] == pytest.approx((a * (a - 1) + b * (b - 1)) / (40 * 39), abs=1e-5)
               and row["document_expected"] == pytest.approx(expected / 12 / (40 * 39 / 2), abs=1e-7)
               for row in quality["lags"])


def test_the_longest_run_is_that_of_the_order_and_the_expected_one_that_of_shuffles(stored):
    _, plan, _ = stored
    order = Order(plan)
    runs = [(len(list(run)), order.names[stream]) for first in range(0, plan.samples, 40)
            for stream, run in groupby(order.locate(first, first + 40).stream.tolist())]
    quality = order_quality(plan)
    assert quality is not None
    assert (quality["run"]["windows"], quality["run"]["stream"]) == max(runs, key=lambda run: run[0])
    assert quality["repeats"] is None and all(row["document"] is None for row in quality["lags"])
    rng = random.Random(4)
    for batches, counts in ((12, [30, 10]), (1, [100, 60, 40]), (5, [2] * 40)):
        longest = []
        for _ in range(300):
            shuffled = [[s for s, n in enumerate(counts) for _ in range(n)] for _ in range(batches)]
            for batch in shuffled:
                rng.shuffle(batch)
            longest.append(max(len(list(run)) for batch in shuffled for _, run in groupby(batch)))
        expected = expected_run([(sum(counts), np.array(counts))] * batches)
        assert expected == pytest.approx(fmean(longest), rel=0.12), counts
    assert expected_run([(8, np.array([8]))]) == 8


def test_an_order_without_a_shuffle_is_told_from_one(tmp_path, monkeypatch):
    """Consecutive windows in a row have far more documents in common than a shuffle gives."""
    shards = write_set(tmp_path / "a", "a", lengths_of(7, 300_000, 20_000))
    plan = curriculum({"a": 1}, 64 * 30, 64)
    plan = replace(plan, streams=(replace(plan.streams[0], tokens=shards.tokens, sha256=shards.sha256),))
    ours = order_quality(plan, Store(tmp_path))
    real = Order.locate

    def in_file_order(order: Order, first: int, stop: int):
        return real(order, first, stop)._replace(window=np.arange(first, stop, dtype=np.int64))

    monkeypatch.setattr(Order, "locate", in_file_order)
    file_order = order_quality(plan, Store(tmp_path))
    assert ours is not None and file_order is not None
    assert ours["repeats"]["pairs"] < 1.6 * ours["repeats"]["expected"] + 20
    assert file_order["repeats"]["pairs"] > 5 * file_order["repeats"]["expected"]
    assert file_order["lags"][0]["document"] > 10 * ours["lags"][0]["document_expected"]
    assert all(one["document"] >= other["document"] for one, other in pairwise(file_order["lags"]))
