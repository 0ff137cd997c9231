"""The driver starts nodes as soon as their inputs are there and hands every node the records of its own tasks."""

from __future__ import annotations

import pytest

from pipeline.driver import TooManyErrors, check_error_rate, drive, survey
from pipeline.engine.task import PartRecord, TaskSpec
from pipeline.plan.passes import Node


def spec(key: str) -> TaskSpec:
    return TaskSpec(key, "m:T", "n", {}, weight=5)


def record(key: str, **counters) -> PartRecord:
    return PartRecord(key, "m:T", "n", "a", {}, counters)


def node(name: str, deps: tuple[str, ...], batches: list[list[str]]) -> Node:
    def work(results):
        assert all(d in results for d in deps)
        got = []
        for batch in batches:
            records = yield [spec(k) for k in batch]
            assert [r.key for r in records] == batch, "somebody else's records"
            got += batch
        return got

    return Node(name, "pass", deps, work)


def diamond() -> list[Node]:
    return [node("a", (), [["a1", "a2"], ["a3"]]), node("b", (), [["b1"]]), node("none", ("b",), [[]]),
            node("c", ("a", "none"), [["c1"]])]


def test_nodes_run_together_and_get_their_own_records():
    batches: list[list[str]] = []

    def execute(specs):
        batches.append([s.key for s in specs])
        return [record(s.key) for s in specs]

    order: list[str] = []
    results = drive(diamond(), execute, lambda n, r: order.append(n.name))
    assert batches == [["a1", "a2", "b1"], ["a3"], ["c1"]]
    assert results == {"a": ["a1", "a2", "a3"], "b": ["b1"], "none": [], "c": ["c1"]}
    assert order.index("a") < order.index("c") and set(order) == set(results)


def test_nodes_that_wait_for_each_other_are_an_error():
    with pytest.raises(RuntimeError, match="wait for each other: x, y"):
        drive([node("x", ("y",), []), node("y", ("x",), [])], lambda s: [], lambda n, r: None)


def test_survey_drives_nodes_as_far_as_the_records_carry():
    known = {k: record(k) for k in ("a1", "a2", "b1")}
    states = {s.node.name: s for s in survey(diamond(), known.get)}
    assert (states["a"].fresh, states["a"].stale, states["a"].weight) == (2, 1, 5)
    assert (states["b"].fresh, states["b"].stale) == (1, 0)
    assert states["c"].unknown and not states["none"].unknown


def test_error_rate_counts_failed_documents_not_unreadable_records():
    bad = record("k", quarantined={"error:ValueError": 30, "truncated": 500}, read={"web": {"bad": {"truncated": 500}}},
                 **{"in": {"web": {"docs": 1000, "bytes": 1}}})
    check_error_rate(Node("clean", "pass", (), None), [bad], 0.03)
    with pytest.raises(TooManyErrors, match=r"clean: 30 of 1000 documents failed \(3\.0%.*ValueError × 30"):
        check_error_rate(Node("clean", "pass", (), None), [bad], 0.02)


def test_error_rate_of_a_token_stream():
    made = [record(k, quarantined={"error:ValueError": 8, "crash:SIGSEGV": 1}, sources={}, skipped=5,
                   train={"docs": 480, "tokens": 1, "bytes": 1}, val={"docs": 11, "tokens": 1, "bytes": 1})
            for k in ("a", "b")]
    node = Node("shards:web", "shards", (), None)
    check_error_rate(node, made, 0.018)
    check_error_rate(node, made[:1], 0)                    # ten may always fail
    with pytest.raises(TooManyErrors, match=r"shards:web: 18 of 1000 documents failed \(1\.8%, allowed 1\.7%\): "
                                            r"error:ValueError × 16, crash:SIGSEGV × 2.*quarantine/shards=web/"):
        check_error_rate(node, made, 0.017)
