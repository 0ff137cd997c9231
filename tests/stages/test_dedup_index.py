"""Crawls that are added one after another: the documents kept are those of one run over all, and no old one goes."""

from __future__ import annotations

import random

import pytest

from pipeline.store.fs import Store
from stages.dedup.fragment import Sizes
from stages.dedup.index import IndexedBarrier
from stages.dedup.minhash import MinHash
from tests.stages.dedup_corpus import corpus
from tests.stages.dedup_fragment import Doc, Outcome, run_fragment, write_parts
from tests.stages.test_dedup_exact import dated

CRAWLS = ("one", "two", "three")
RANKS = {name: number for number, name in enumerate(CRAWLS)}


def added_one_after_another(barrier: IndexedBarrier, docs: list[Doc], path, *, shuffle: int | None = None,
                            part_rows: int = 7) -> dict[str, Outcome]:
    """The outcome of each crawl, compared with the indexes of those before it."""
    store = Store(path)
    out: dict[str, Outcome] = {}
    for name in CRAWLS:
        mine = [doc for doc in docs if doc.dataset == name]
        parts = write_parts(barrier, mine, store, part_rows=part_rows)
        out[name] = run_fragment(barrier, parts, store, shuffle=shuffle, ranks=1,
                                 against=[earlier.index for earlier in out.values()])
    return out


def at_once(barrier: IndexedBarrier, docs: list[Doc], path) -> Outcome:
    return run_fragment(barrier, write_parts(barrier, docs, Store(path), ranks=RANKS), Store(path))


def removals(outcomes: dict[str, Outcome]) -> dict[str, tuple]:
    """Of each removed document the reason, the kept document and the similarity."""
    return {id: verdict[:3] for outcome in outcomes.values() for id, verdict in outcome.removed.items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("config", [{}, {"verify": 0.6, "bands": 30, "rows": 4},
                                    {"containment": 0.8, "bands": 40, "rows": 3},
                                    {"verify": 0.5, "bands": 30, "rows": 4, "prefer": ["priority", "newest"]},
                                    {"verify": 0.6, "bands": 40, "rows": 3, "max_comparisons": 2},
                                    {"dialect": "datatrove", "words": "language", "verify": 0.7}])
def test_near_duplicates_of_three_crawls_are_those_of_one_run(tmp_path, config, seed):
    rng = random.Random(seed)
    docs = [dated(rng, doc) for doc in corpus(seed, 30, CRAWLS)]
    whole = at_once(MinHash(config), docs, tmp_path / "whole")
    barrier = MinHash(config)
    barrier.sizes = Sizes(group_rows=20, bucket_bytes=4000, segment_bytes=1, shingle_cache_bytes=3000)
    parts = added_one_after_another(barrier, docs, tmp_path / "parts", shuffle=seed, part_rows=rng.choice([1, 5, 1000]))
    assert removals(parts) == {id: verdict[:3] for id, verdict in whole.removed.items()}
    assert sum(outcome.counters.get("verify", {}).get("removed_for_old", 0) for outcome in parts.values()) >= 3
