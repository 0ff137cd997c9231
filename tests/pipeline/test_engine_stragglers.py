"""Second attempts of slow tasks: the rule that decides about them, and its effect on a plan in virtual time."""

from __future__ import annotations

import pytest

from pipeline.base.prf import prf
from pipeline.engine.driver.flights import Flight
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.driver.stragglers import to_double
from pipeline.engine.messages import Assignment, Done, Event
from pipeline.engine.task import TaskSpec
from pipeline.plan.drive import drive
from pipeline.plan.nodes import Node
from pipeline.store.records import PartRecord
from tests.pipeline.engine_tasks import MemoryLog
from tests.simulate.clock import VirtualClock

TIMES = {"a": [10.0] * 19 + [40.0], "b": [10.0] * 4}


def flight(key: str, node: str, started: float) -> Flight:
    return Flight(TaskSpec(key, "", node, {}), started)


def keys(*arguments, **rule) -> list[str]:
    return [spec.key for spec in to_double(*arguments, **rule)]


@pytest.mark.parametrize(("now", "rule", "expected"), [
    (29.0, {"idle": True}, []), (30.0, {"idle": True}, ["x"]),                            # 3 × the p95, 10
    (29.0, {"idle": True, "least_s": 35.0}, []), (35.0, {"idle": True, "least_s": 35.0}, ["x"]),
    (90.0, {"idle": False}, []),                                                          # the slot is wanted
    (90.0, {"idle": False, "awaited": {"a"}, "unfinished": {"a"}}, []),
    (29.0, {"idle": False, "awaited": {"a"}}, []), (30.0, {"idle": False, "awaited": {"a"}}, ["x"])])
def test_the_rule(now, rule, expected):
    flights = [flight("x", "a", 0.0), flight("y", "a", now - 1), flight("z", "b", 0.0)]   # too little is known of b
    assert keys(flights, TIMES, now, **rule) == expected
    assert keys([*flights, flight("x", "a", now)], TIMES, now, **rule) == [], "once"


def test_a_node_of_uneven_tasks_is_judged_by_its_slow_ones():
    uneven = {"a": [10.0] * 10 + [90.0] * 10}
    assert keys([flight("x", "a", 0.0)], uneven, 60.0, idle=False, awaited={"a"}) == []
    assert keys([flight("x", "a", 0.0)], uneven, 90.0, idle=False, awaited={"a"}) == ["x"]


def test_work_is_displaced_from_a_tenth_of_the_slots_at_most_by_the_longest_first():
    flights = [flight(f"x{i}", "a", float(-i)) for i in range(8)]
    rule = {"idle": False, "awaited": {"a"}}
    assert keys(flights, TIMES, 100.0, slots=2, **rule) == ["x7"]
    assert keys(flights, TIMES, 100.0, slots=30, **rule) == ["x7", "x6", "x5"]
    assert keys([*flights, flight("x7", "a", 99.0)], TIMES, 100.0, slots=30, **rule) == ["x6", "x5"]
    assert len(keys(flights, TIMES, 100.0, slots=2, idle=True)) == 8, "what is idle costs nothing"


class Machine:
    """A backend with slots in virtual time. Tasks beyond the slots wait in their order. A task takes about ten seconds,
    by a seed, but the first attempt of the task `lame` takes a day."""

    interruptible = False

    def __init__(self, seed: int, slots: int, lame: str) -> None:
        self.seed, self.slots, self.lame, self.clock = seed, slots, lame, VirtualClock()
        self.waiting: list[Assignment] = []
        self.open: dict[int, tuple[float, Assignment]] = {}        # id → when it ends
        self.begun: list[str] = []
        self.ended: dict[str, float] = {}

    def start(self, memory_mb: int = 0) -> None: ...
    def close(self) -> None: ...

    def set_demand(self, waiting: dict) -> dict:
        return {}

    def cancel(self, ids: list[int]) -> None:
        self.waiting = [a for a in self.waiting if a.id not in ids]
        for i in ids:
            self.open.pop(i, None)

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        return self.slots - len(self.open) - len(self.waiting)

    def submit(self, assignment: Assignment) -> None:
        self.waiting.append(assignment)

    def begin(self) -> None:
        while self.waiting and len(self.open) < self.slots:
            a = self.waiting.pop(0)
            key = a.spec.key
            takes = 86400.0 if key == self.lame and key not in self.begun else 8.0 + prf(self.seed, "takes", key) % 5
            self.begun.append(key)
            self.open[a.id] = self.clock.time + takes, a

    def wait(self, timeout: float) -> list[Event]:
        """Return the next task that ends. At most one second passes, as between two looks at real workers; if none
        ends, the list is empty."""
        self.begin()
        if not self.open:
            return []
        end, a = min(self.open.values(), key=lambda job: (job[0], job[1].id))
        if end > self.clock.time + 1.0:
            self.clock.time += 1.0
            return []
        self.clock.time = max(self.clock.time, end)
        del self.open[a.id]
        key = a.spec.key
        self.ended.setdefault(key, self.clock.time)
        return [Done(a.id, PartRecord(key, "x", "t", a.attempt, {}, {}))]


def node(name: str, tasks: int, deps: tuple[str, ...] = ()) -> Node:
    weight = {"a": 3, "b": 2, "c": 4}[name]              # largest first: c as soon as it may, a, then b

    def work(results):
        return (yield [TaskSpec(f"{name}{i}", "m:T", name, {}, weight=weight) for i in range(tasks)])

    return Node(name, "pass", deps, work)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("awaited", [True, False])
def test_later_nodes_do_not_wait_for_a_straggler_until_the_whole_queue_is_empty(seed, awaited):
    """c waits for a, whose last task stands still; b has work for all slots for a long while."""
    machine = Machine(seed, slots=4, lame="a11")
    nodes = [node("a", 12), node("b", 200), node("c", 4, ("a",) if awaited else ())]
    scheduler = Scheduler(machine, MemoryLog(), straggler_s=5.0, clock=machine.clock)
    drive(nodes, scheduler, lambda *_: None)
    last_b = max(at for key, at in machine.ended.items() if key.startswith("b"))
    assert [k for k in set(machine.begun) if machine.begun.count(k) > 1] == ["a11"] and machine.begun.count("a11") == 2
    assert len(machine.ended) == 216
    if awaited:
        assert machine.ended["a11"] < 100 and machine.ended["c3"] < 150
        assert last_b > 300, "there was other work all the time"
    else:
        assert machine.ended["a11"] > last_b - 15, "nobody waits for it: b's tasks do not stand back"
