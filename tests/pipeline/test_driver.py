"""The driver starts the nodes of a plan as soon as their inputs exist, and gives each node the records of its own
tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.driver.sums import sum_records
from pipeline.engine.messages import Assignment, Done, Event
from pipeline.engine.task import TaskSpec
from pipeline.plan.drive import TooManyErrors, check_error_rate, drive
from pipeline.plan.nodes import Node
from pipeline.plan.survey import survey
from pipeline.store.records import PartRecord
from tests.pipeline.engine_tasks import MemoryLog


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


class Backend:
    """A backend with two slots. It ends tasks in the order in which they were submitted, except the task with the key
    `slow`, which only ends when nothing else runs."""

    interruptible, slots = False, 2

    def __init__(self, slow: str = "") -> None:
        self.slow, self.open, self.order = slow, [], []

    def start(self, memory_mb: int = 0) -> None: ...
    def close(self) -> None: ...
    def cancel(self, ids: list[int]) -> None: ...

    def set_demand(self, waiting: dict) -> dict:
        return {}

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        return self.slots - len(self.open)

    def submit(self, assignment: Assignment) -> None:
        self.open.append(assignment)

    def wait(self, timeout: float) -> list[Event]:
        done = next((a for a in self.open if a.spec.key != self.slow), self.open[0])
        self.open.remove(done)
        self.order.append(done.spec.key)
        return [Done(done.id, record(done.spec.key))]


def test_nodes_run_together_and_get_their_own_records():
    backend, order = Backend(), []
    results = drive(diamond(), Scheduler(backend, MemoryLog()), lambda n, *_: order.append(n.name))
    assert sorted(backend.order[:3]) == ["a1", "a2", "b1"] and sorted(backend.order) == ["a1", "a2", "a3", "b1", "c1"]
    assert results == {"a": ["a1", "a2", "a3"], "b": ["b1"], "none": [], "c": ["c1"]}
    assert order.index("a") < order.index("c") and set(order) == set(results)


def test_a_node_goes_on_though_a_task_of_another_is_still_running():
    chain = [node("slow", (), [["z"]]), *diamond()]
    backend = Backend(slow="z")
    drive(chain, Scheduler(backend, MemoryLog()), lambda *_: None)
    assert backend.order[-1] == "z", "the others did not wait for it"


def test_tasks_are_read_as_the_run_goes_on():
    """A node of 5,000 tasks: what is in memory is a few of them."""

    def work(results):
        def specs():
            for i in range(5000):
                yield spec(f"{i:032d}")

        records = yield specs()
        return sum(1 for _ in records), records[4999].key, len(records[10:20])

    backend = Backend()
    results = drive([Node("big", "pass", (), work)], Scheduler(backend, MemoryLog()), lambda *_: None)
    assert results["big"] == (5000, f"{4999:032d}", 10)
    assert backend.order[0] < f"{1000:032d}", "it began before all were read"


def test_nodes_that_wait_for_each_other_are_an_error():
    with pytest.raises(RuntimeError, match="wait for each other: x, y"):
        drive([node("x", ("y",), []), node("y", ("x",), [])], Scheduler(Backend(), MemoryLog()), lambda *_: None)


def test_survey_drives_nodes_as_far_as_the_records_carry():
    known = {k: record(k) for k in ("a1", "a2", "b1")}
    states = {s.node.name: s for s in survey(diamond(), lambda keys: {k: known[k] for k in keys if k in known})}
    assert (states["a"].fresh, states["a"].stale, states["a"].weight) == (2, 1, 5)
    assert (states["b"].fresh, states["b"].stale) == (1, 0)
    assert states["c"].unknown and not states["none"].unknown


def test_error_rate_counts_failed_documents_not_unreadable_records():
    bad = record("k", quarantined={"error:ValueError": 30, "truncated": 500},
                 read={"web": {"records": 1500, "bad": {"truncated": 500}, "skipped": {}}},
                 **{"in": {"web": {"docs": 1000, "bytes": 1}}})
    clean, sums = Node("clean", "pass", (), None), sum_records("clean", "pass", [bad])
    [said] = check_error_rate(clean, sums, 0.03)
    assert said.startswith("source 'web': 500 of 1500 records could not be read (33.3%): truncated × 500")
    assert check_error_rate(clean, sums, 0.4) == []
    with pytest.raises(TooManyErrors, match=r"clean: 30 of 1000 documents failed \(3\.0%.*ValueError × 30"):
        check_error_rate(clean, sums, 0.02)


def test_error_rate_of_a_token_stream():
    made = [replace(record(k, quarantined={"error:ValueError": 8, "crash:SIGSEGV": 1}, sources={}, skipped=5,
                   train={"docs": 480, "tokens": 1, "bytes": 1}, val={"docs": 11, "tokens": 1, "bytes": 1}),
                    node="shards:web/encode") for k in ("a", "b")]
    both, one = sum_records("shards:web", "shards", made), sum_records("shards:web", "shards", made[:1])
    node = Node("shards:web", "shards", (), None)
    check_error_rate(node, both, 0.018)
    check_error_rate(node, one, 0)                    # ten may always fail
    with pytest.raises(TooManyErrors, match=r"shards:web: 18 of 1000 documents failed \(1\.8%, allowed 1\.7%\): "
                                            r"error:ValueError × 16, crash:SIGSEGV × 2.*inspect shards=web --quar"):
        check_error_rate(node, both, 0.017)


@pytest.mark.parametrize(("read", "picks", "said"), [
    ({"records": 7, "bad": {"missing_text": 7}, "skipped": {}}, False, "no document, 7 records were read (missing_te"),
    ({"records": 3, "bad": {}, "skipped": {"http_status": 3}}, False, "no document, 3 records were read (http_status"),
    ({"records": 0, "bad": {}, "skipped": {}}, False, "no document, 0 records were read (its files hold none)"),
    ({"records": 0, "bad": {}, "skipped": {}}, True, ""),
    ({"records": 100, "bad": {"bad_json": 1}, "skipped": {"empty": 90}}, False, "")])
def test_sources_that_could_not_be_read_are_named(read, picks, said):
    sums = sum_records("clean", "pass", [record("k", read={"web": read})])
    found = check_error_rate(Node("clean", "pass", (), None), sums, 0.01, picks=picks)
    assert bool(found) is bool(said) and said in "".join(found)


@pytest.mark.parametrize("node", ["shards:new/encode", "shards:old/encode", "shards:newer/encode"])
def test_a_record_that_another_node_made_counts_as_its_wave(node):
    """A stream was renamed, or two datasets share a barrier: their tasks have the same keys."""
    sums = sum_records("shards:new", "shards", [replace(record("k", train={"docs": 3}), node=node)])
    assert sums.counters == {"encode": {"train": {"docs": 3}}}
