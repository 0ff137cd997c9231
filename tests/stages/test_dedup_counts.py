"""The counts of duplicates equal brute force, however documents are divided into groups of parts and ranges of ids."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from pipeline.store.fs import Store
from stages.dedup.counts import count_waves
from stages.dedup.exact import Exact
from stages.dedup.fragment import Sizes, groups, slices_of
from tests.stages.dedup_fragment import Doc, run_fragment, write_parts


class Counting(Exact):
    """Stands in for a barrier: its waves are only those that count duplicates."""

    def of(self, slices, rounds, sizes):
        self.slices_before, self.most, self.plan = slices, rounds, sizes
        return self

    def waves(self, parts):
        return count_waves(parts, self.slices_before, False, self.most, self.plan)

    def slices(self, parts, results):
        return [None] * len(parts)


def documents(seed: int) -> list[Doc]:
    """Return documents, many of which share a text, a URL, or both."""
    rng = random.Random(seed)
    return [Doc(f"text {rng.randrange(25)}" + " " * rng.randrange(30), rng.choice(("web", "wiki")), f"{number:032x}",
                f"https://example.org/{rng.randrange(40)}", meta=(("doi", rng.randrange(50)),))
            for number in range(120)]


def count(parts, store, slices, rounds, sizes, shuffle=None):
    """Run the waves. Returns (references to the counts of each part, {id: number of further documents})."""
    outcome = run_fragment(Counting().of(slices, rounds, sizes), parts, store, shuffle=shuffle)
    refs = list(slices_of(groups(parts, sizes), outcome.results["counts"], "counts"))
    more = {}
    for part, ref in zip(parts, refs, strict=True):
        if ref is not None:
            with store.open(part.text["$ref"]) as text, store.open(ref["$ref"]) as counts:
                ids = pq.read_table(text, columns=["id"])["id"].to_pylist()
                more.update({ids[row["row"]]: row["more"] for row in pq.read_table(counts).to_pylist()})
    return refs, more


def brute_force(removed: dict[str, str]) -> Counter[str]:
    ends: Counter[str] = Counter()
    for end in removed:
        while end in removed:
            end = removed[end]
        ends[end] += 1
    return ends


@pytest.mark.parametrize("by", ["text", "both", ["meta.doi", "url", "text"]])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(group_rows=20, bucket_bytes=500, segment_bytes=1)])
def test_counts_follow_removals_over_several_properties(tmp_path, by, sizes):
    for seed in range(2):
        store, barrier = Store(tmp_path / str(seed)), Exact({"by": by})
        parts = write_parts(barrier, documents(seed), store, part_rows=7, ranks={"wiki": 0, "web": 1})
        outcome = run_fragment(barrier, parts, store)
        expected = brute_force({id: kept for id, (_, kept, _, _) in outcome.removed.items()})
        refs, more = count(parts, store, outcome.slices, barrier.rounds, sizes)
        assert more == expected and sum(more.values()) == len(outcome.removed) > 20
        others, _ = count(parts, store, outcome.slices, barrier.rounds, sizes, shuffle=seed)
        assert [ref and ref["content"] for ref in refs] == [ref and ref["content"] for ref in others]


def test_counts_of_earlier_barriers_are_added(tmp_path):
    store, barrier = Store(tmp_path), Exact({"by": "url"})
    parts = write_parts(barrier, documents(9), store, part_rows=7)
    first = run_fragment(barrier, parts, store)
    counts, before = count(parts, store, first.slices, 1, Sizes())
    # a second barrier that sees all documents again stands for one that removes others
    parts = [replace(part, counts=ref) for part, ref in zip(parts, counts, strict=True)]
    _, after = count(parts, store, first.slices, 1, Sizes())
    owed = Counter()
    for id, (_, kept, _, _) in first.removed.items():
        owed[kept] += 1 + before.get(id, 0)
    assert after == {id: before.get(id, 0) + owed[id] for id in before}
    # without removals, the counts stay as they are
    assert count(parts, store, [None] * len(parts), 1, Sizes())[1] == before


def test_removals_that_go_on_longer_than_a_barrier_says_are_refused(tmp_path):
    store, barrier = Store(tmp_path), Exact({"by": ["meta.doi", "url", "text"]})
    parts = write_parts(barrier, documents(1), store, part_rows=7)
    outcome = run_fragment(barrier, parts, store)
    with pytest.raises(ValueError, match="rounds"):
        count(parts, store, outcome.slices, 1, Sizes())
