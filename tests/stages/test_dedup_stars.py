"""Connected components, found in rounds of tasks, equal those of a union-find, for any graph and any number of buckets,
blocks and tasks."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engine.shuffle.exchange import merge_segments
from pipeline.engine.shuffle.merge import LIMITS, MergeLimits
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs, TaskSpec
from pipeline.store.content_keys import task_key
from pipeline.store.fs import Store
from pipeline.store.records import merge_counters
from stages.barrier import TaskResult
from stages.catalog import load
from stages.dedup.cluster import MEMBER, cluster_waves
from stages.dedup.fragment import SIZES, Sizes, read_segments, write_segments
from stages.dedup.lsh import EDGE, components


class WriteLinks:
    """Stands in for the waves before: writes the edges in its argument `edges`, [[a, b], …]."""

    name = "write_links"
    version = 1

    @staticmethod
    def run(inputs, cursor, out):
        edges = np.array([tuple(e) for e in inputs.args["edges"]], EDGE)
        write_segments(out, "links.seg", edges)
        return {"linked": len(edges)}


class ReadMembers:
    """Returns the members of all groups as counters: {place: root}."""

    name = "read_members"
    version = 1

    @staticmethod
    def run(inputs, cursor, out):
        found = {}
        for group, first in enumerate(inputs.args["firsts"]):
            members = np.concatenate(read_segments(inputs, inputs.args["members"], group, MEMBER))
            for m in members.tolist():
                place = (m[0] + first) << 32 | m[1]
                assert place not in found
                found[place] = m[2]
        return {str(k): v for k, v in found.items()}


class LimitedInputs(TaskInputs):
    """Task inputs that merge exchange files within smaller limits than the engine's."""

    limits = LIMITS

    def segments(self, refs, bucket, *, whole=(), numbered=False):
        return merge_segments(self.store, refs, bucket, self.limits, whole=whole, numbered=numbered,
                              scratch=self.scratch)


def run(store: Store, task: str, args: dict, limits: MergeLimits = LIMITS) -> TaskResult:
    """Run a task as the engine does, except that its files are named by its key, without an attempt."""
    spec = TaskSpec(task_key(task, args), task, "t", args)
    with tempfile.TemporaryDirectory() as scratch:
        inputs, out = LimitedInputs(spec, store, scratch), TaskOutputs(scratch)
        inputs.limits = limits
        counters = load(task).run(inputs, CrashCursor(), out)
        files = {}
        for name, note in out.names.items():
            path, data = f"objects/{spec.key}/{name}", Path(out.path(name)).read_bytes()
            store.upload(out.path(name), path)
            files[name] = {"$ref": path, "content": note["content"], "bytes": len(data),
                           "sha256": hashlib.sha256(data).hexdigest()}
    return TaskResult(files, counters)


def clusters(root, files: list[list[tuple[int, int]]], firsts: list[int], sizes: Sizes = SIZES,
             limits: MergeLimits = LIMITS) -> tuple[dict[int, int], dict, int]:
    """Find the connected components of edges in files. Returns ({place: root}, counters of the wave `clusters`, number
    of rounds). The places in the first file are counted from the first part of the first group."""
    store = Store(root)
    made = [run(store, "tests.stages.test_dedup_stars:WriteLinks", {"edges": [list(e) for e in f], "n": n})
            for n, f in enumerate(files)]
    empty = [run(store, "tests.stages.test_dedup_stars:WriteLinks", {"edges": [], "n": -n})
             for n in range(1, len(firsts))]
    done = {"bands": [made[0], *empty], "links": made[1:]}
    rounds = 0
    for wave in cluster_waves(firsts, sizes):
        while True:
            done[wave.name] = [run(store, d.task, d.args, limits) for d in wave.tasks(done)]
            rounds += wave.name == "star" and bool(done["star"])
            if not wave.again(done):
                break
    members = [r.files["members.seg"] for r in done["clusters"]]
    found = run(store, "tests.stages.test_dedup_stars:ReadMembers", {"members": members, "firsts": firsts}).counters \
        if members else {}
    counters: dict = {}
    for r in done["clusters"]:
        merge_counters(counters, r.counters)
    return {int(k): v for k, v in found.items()}, counters, rounds


def expected(edges: list[tuple[int, int]]) -> dict[int, int]:
    a, b = (np.array([e[i] for e in edges], np.uint64) for i in (0, 1))
    nodes, roots = components(a, b)
    return dict(zip(nodes.tolist(), roots.tolist()))


def place(n: int) -> int:
    return (n % 7) << 32 | n // 7


#: node numbers to edges: random graphs, paths in any order, stars, cliques, all as (a, b) with a != b
_edges = st.one_of(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60),
    st.permutations(range(24)).map(lambda p: list(pairwise(p))),
    st.integers(0, 30).map(lambda c: [(c, i) for i in range(31)]),
    st.integers(2, 9).map(lambda n: [(i, j) for i in range(n) for j in range(i)]),
).map(lambda es: [(place(a), place(b)) for a, b in es if a != b])


SMALL = Sizes(segment_bytes=1, one_task_edges=0, folded_edges=9, spread_bytes=200)


@pytest.mark.hypothesis
@settings(max_examples=settings.default.max_examples // 8)
@given(st.lists(_edges, min_size=1, max_size=3), st.sampled_from([150, 900, 1 << 20]), st.sampled_from([700, 1 << 26]))
def test_any_graph(tmp_path_factory, graphs, bucket_bytes, memory):
    every = [e for g in graphs for e in g]
    found, counters, _ = clusters(tmp_path_factory.mktemp("g"), graphs, [0, 3, 5],
                                  replace(SMALL, bucket_bytes=bucket_bytes), MergeLimits(memory, block=100))
    assert found == expected(every)
    sizes = np.unique(list(found.values()), return_counts=True)[1] if found else np.zeros(0, int)
    if every:
        assert (counters["candidates"], counters["clusters"]) == (len(found), len(sizes))
        assert counters["max_cluster"] == sizes.max()
        assert sum(counters["cluster_sizes"].values()) == len(sizes)
        assert sum(n << int(b) for b, n in counters["cluster_sizes"].items()) <= len(found)


def test_a_long_path_takes_few_rounds(tmp_path):
    order = np.random.default_rng(3).permutation(250).tolist()
    for name, path in (("sorted", list(range(250))), ("mixed", order)):
        edges = [(place(a), place(b)) for a, b in pairwise(path)]
        found, counters, rounds = clusters(tmp_path / name, [edges[::2], edges[1::2]], [0],
                                           replace(SMALL, bucket_bytes=4000), MergeLimits(block=100))
        assert found == expected(edges) and len(set(found.values())) == 1
        assert counters["cluster_sizes"] == {"7": 1} and counters["max_cluster"] == 250
        assert rounds <= 16                        # 2 log2(250)


@pytest.mark.slow
def test_one_task_and_rounds_agree_on_a_graph_of_twenty_thousand(tmp_path):
    rng = np.random.default_rng(5)
    sizes = Sizes(segment_bytes=1, one_task_edges=0, spread_bytes=1 << 16, bucket_bytes=1 << 18)
    a = rng.integers(0, 20_000, 18_000)
    b = np.where(rng.random(18_000) < 0.2, a // 1000, rng.integers(0, 20_000, 18_000))       # hubs, and chance
    edges = [(place(x), place(y)) for x, y in zip(a.tolist(), b.tolist()) if x != y]
    by_rounds = clusters(tmp_path / "a", [edges[:10_000], edges[10_000:]], [0, 4], sizes, MergeLimits(block=16 << 10))
    in_one = clusters(tmp_path / "b", [edges[:10_000], edges[10_000:]], [0, 4])
    assert by_rounds[0] == in_one[0] and by_rounds[1] == in_one[1]
    assert by_rounds[2] > 2 and in_one[2] == 0
