"""The driver's queue of tasks, and how the scheduler takes tasks from it."""

import pytest

from pipeline.engine.driver.queue import TaskQueue
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.messages import Assignment, Done, Event, Lost
from pipeline.engine.task import TaskSpec
from pipeline.store.records import PartRecord
from tests.pipeline import engine_tasks as t


def test_queue_pops_the_largest_tasks_of_a_kind_first_however_many_at_a_time():
    specs = [TaskSpec(f"{i:03}", "m:T", "clean", {}, weight=i * 7 % 50, memory_mb=500 + 100 * (i % 2))
             for i in range(100)]
    orders = []
    for most in (1, 7, 1000):
        queue = TaskQueue(lambda keys: {})
        queue.add(specs)
        list(queue.read(1000))
        orders.append([])
        for kind in queue.kinds():
            while kind in queue.waiting:
                orders[-1] += [spec.key for spec in queue.pop(kind, most)]
        assert not len(queue)
    assert orders[0] == orders[1] == orders[2]
    first = [s for s in specs if s.key in orders[0][:50]]
    assert len({s.kind for s in first}) == 1
    assert orders[0][:50] == [s.key for s in sorted(first, key=lambda s: (-s.weight, s.key))]


def test_a_task_of_two_batches_runs_once_and_completes_both():
    """Also one that stands twice in a batch. A batch that was read to its end is not read again."""
    records = {}
    queue = TaskQueue(lambda keys: {key: records[key] for key in keys if key in records})
    a, b = (TaskSpec(key, "m:T", "clean", {}) for key in "ab")
    one, two = queue.add([a, b, a]), queue.add([b])
    assert [[s.key for s in new] for new, _ in queue.read(2)] == [["a", "b"], []]
    assert (len(queue), queue.unread, two.source) == (2, True, None)
    for _ in range(2):
        assert [[s.key for s in new] for new, _ in queue.read(2)] in ([[]], [])
    assert not queue.unread and queue.finished() == []
    for spec in queue.pop(a.kind, 5):
        records[spec.key] = PartRecord(spec.key, "m:T", "clean", "x", {}, {})
        queue.done(spec.key)
    assert not len(queue)
    [(batch, first), (other, second)] = queue.finished()
    assert (batch, other) == (one, two)
    assert ([r.key for r in first], [r.key for r in second]) == (["a", "b", "a"], ["b"])
    del records["b"]
    with pytest.raises(KeyError, match="task b has no record in the log"):
        list(second)


class LosesAll:
    """A backend that loses all tasks in their first attempt, and runs them in the second."""

    interruptible = False

    def __init__(self, slots: int) -> None:
        self.slots, self.questions, self.attempts = slots, 0, 0
        self._open: list[Assignment] = []

    def start(self, memory_mb: int = 0) -> None: ...

    def cancel(self, ids: list[int]) -> None: ...

    def set_demand(self, waiting: dict) -> dict:
        return {}

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        self.questions += 1
        return self.slots - len(self._open)

    def submit(self, assignment: Assignment) -> None:
        self._open.append(assignment)
        self.attempts += 1
        assert len(self._open) <= self.slots

    def wait(self, timeout: float) -> list[Event]:
        given, self._open = self._open, []
        if self.attempts == self.slots:                   # the first attempts at all of them
            return [Lost(tuple(a.id for a in given), "the rack has no power")]
        return [Done(a.id, PartRecord(a.spec.key, a.spec.task, a.spec.node, a.attempt, {}, {})) for a in given]


def test_lost_tasks_are_handed_out_again_without_a_question_for_each():
    """On a large cluster a question about room goes through hundreds of supervisors, and a lost rack means thousands of
    tasks."""
    backend = LosesAll(slots=400)
    specs = [TaskSpec(f"key-{i}", "m:T", "node", {}, memory_mb=500 + 100 * (i >= 300)) for i in range(400)]
    records = Scheduler(backend, t.MemoryLog()).run(specs)
    assert len(records) == 400 and backend.attempts == 800
    assert backend.questions < 20
