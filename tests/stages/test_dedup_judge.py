"""Pairs of kept documents that resemble each other: the most similar ones are written, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.store.fs import Store
from stages.dedup import judge
from stages.dedup.fragment import NEAR, most_similar
from stages.dedup.minhash import MinHash
from stages.dedup.verify import candidate
from tests.conftest import alone
from tests.stages.dedup_corpus import vocabulary
from tests.stages.dedup_fragment import Doc, run_fragment, write_parts

#: arguments of the task
ARGS = {"verify": 0.75, "max_comparisons": 64}


def judge_of(size: int, write_near: Any, held: int) -> judge.ClusterJudge:
    """Return the judge of a template's `size` pages: half of the shingles of each are the template's, so all stay and
    resemble each other."""
    rng = np.random.default_rng(1)
    template = rng.integers(0, 2**64, 40, np.uint64)
    sets = [np.unique(np.r_[template, rng.integers(0, 2**64, 10, np.uint64)]) for _ in range(size)]
    candidates = np.zeros(size, [*candidate(1).descr, ("source", "<u4")])
    candidates["row"] = candidates["id_lo"] = candidates["offset"] = np.arange(size)
    candidates["count"], candidates["chars"] = 50, 400
    reader = SimpleNamespace(get=lambda file, offset, count, expected: sets[offset], chunk_bytes=1 << 20)
    return judge.ClusterJudge(candidates, candidates["source"], np.zeros(size, np.int64), ARGS, reader,
                              dict.fromkeys(("comparisons", "removed", "kept", "capped", "max_cluster_kept"), 0),
                              write_near, held=held)


def peak_and_pairs() -> tuple[int, int]:
    """Return the most bytes that Python allocates while it decides about 600 pages of a template, and the number of
    pairs that resemble each other."""
    judge_of(40, lambda source, near: None, held=1 << 10).verdicts()     # loads the kernels
    of_cluster = judge_of(600, lambda source, near: None, held=1 << 10)
    tracemalloc.start()
    of_cluster.verdicts()
    return tracemalloc.get_traced_memory()[1], of_cluster.counters["comparisons"]


def test_memory_does_not_grow_with_the_pairs_of_a_large_cluster():
    peak, pairs = alone(peak_and_pairs)
    assert pairs > 36_000
    assert peak < 24 * pairs, peak                                  # an array of all pairs needs as much


def test_the_most_similar_documents_are_chosen_as_by_sorting():
    draw = random.Random(4)
    documents = np.array([draw.randint(0, 9) for _ in range(600)])
    near = np.zeros(600, NEAR)
    near["similarity"] = [draw.choice([0.5, 0.6, 0.7]) for _ in range(600)]
    near["id_hi"], near["id_lo"] = ([draw.randint(0, 2) for _ in range(600)], draw.sample(range(600), 600))
    slow = [number for document in range(10) for number in sorted(
        np.flatnonzero(documents == document).tolist(),
        key=lambda n: (-near["similarity"][n], int(near["id_hi"][n]), int(near["id_lo"][n])))[:16]]
    assert most_similar(documents, near).tolist() == slow
    assert most_similar(documents[:0], near[:0]).tolist() == []


@pytest.mark.parametrize("count", [judge.SMALL, judge.SMALL + 8])
def test_slices_name_the_same_documents_however_many_pairs_are_held(tmp_path, monkeypatch, count):
    """Both for a cluster about which the kernel decides and for a larger one."""
    draw = random.Random(7)
    names = vocabulary(draw)
    template = draw.choices(names, k=150)
    docs = [Doc(" ".join([*template[:draw.randint(130, 150)], *draw.choices(names, k=30)]), "web",
                f"{draw.getrandbits(128):032x}") for _ in range(count)]
    columns = []
    for held in (1, 20, 1 << 16):
        monkeypatch.setattr(judge, "HELD", held)
        store, barrier = Store(tmp_path / str(held)), MinHash({"bands": 40, "rows": 2})
        got = run_fragment(barrier, write_parts(barrier, docs, store, part_rows=12), store)
        columns.append([pq.read_table(store.at(ref["$ref"]))["near"].to_pylist() for ref in got.slices if ref])
    assert columns[0] == columns[1] == columns[2]
    assert max(len(near or ()) for part in columns[0] for near in part) == 16
