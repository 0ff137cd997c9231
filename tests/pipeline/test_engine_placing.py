"""Assigning tasks to supervisors: many tasks that are submitted together are placed as if they were submitted one at a
time."""

import random

from pipeline.engine.backends.nodes import WorkerSlot
from pipeline.engine.backends.placing import Placement
from pipeline.engine.backends.pools import best_first, most_room, room_in
from pipeline.engine.messages import Assignment
from pipeline.engine.task import ResourceRequest, TaskSpec

SMALL, LARGE = ResourceRequest(500), ResourceRequest(4000)
KINDS = [SMALL, LARGE, ResourceRequest(900, 0.5), ResourceRequest(900, 2.0), ResourceRequest(300, 0.0, "arm-base")]


def assignment(id: int, kind: ResourceRequest = SMALL, key: str = "") -> Assignment:
    spec = TaskSpec(key or f"key-{id}", "test", "node", {}, memory_mb=kind.memory_mb, gpus=kind.gpus, cpu=kind.cpu)
    return Assignment(id, spec, f"attempt-{id}")


def workers_of(rng: random.Random, number: int) -> list[WorkerSlot]:
    """Return random supervisors of various sizes. Some hold tasks, and some are reserved for a kind of task."""
    workers = [WorkerSlot(rng.randint(1, 8), rng.randint(500, 9000), gpus=rng.choice([0, 0, 1, 2]),
                          cpu=rng.choice(["", "arm-base", "x86_64-avx2"]), shared=rng.random() < 0.5, host=str(place))
               for place in range(number)]
    for place, worker in enumerate(workers):
        for i in range(rng.randint(0, 6)):
            kind = rng.choice(KINDS)
            if worker.capacity(kind):
                worker.add(1000 + 10 * place + i, kind)
        if rng.random() < 0.2:
            worker.reserved_for = rng.choice(KINDS)
    return workers


def test_best_first_chooses_as_repeated_most_room_does():
    for seed in range(200):
        kind = random.Random(f"kind {seed}").choice(KINDS)
        one, many = (workers_of(random.Random(seed), 9) for _ in range(2))
        choice = best_first(many, kind)
        for id in range(40):
            fitting = most_room(one, kind)
            chosen = next(choice, None)
            assert (chosen and chosen.host) == (fitting[0].host if fitting else None), (seed, id)
            if chosen is None:
                break
            fitting[0].add(id, kind)
            chosen.add(id, kind)


def test_room_depends_only_on_the_assignments_and_their_order():
    for seed in range(200):
        rng = random.Random(seed)
        worker = workers_of(rng, 1)[0]
        for id in range(30):
            if rng.random() < 0.3:
                worker.remove(rng.sample(list(worker.open), min(2, len(worker.open))))
            elif worker.capacity(kind := rng.choice(KINDS)):
                worker.add(id, kind)
            anew = WorkerSlot(worker.slots, worker.memory_mb, worker.gpus, worker.cpu, shared=worker.shared,
                              reserved_for=worker.reserved_for)
            anew.open.update(worker.open)
            anew.open[-1] = SMALL
            anew.remove([-1])                                    # counts all of them from the beginning
            assert anew.prefetched == worker.prefetched, (seed, id)
            assert [anew.room(k) for k in KINDS] == [worker.room(k) for k in KINDS], (seed, id)


def test_room_says_how_many_more_may_be_prefetched():
    workers = [WorkerSlot(4, 8000, host=h) for h in "ab"]
    placement = Placement(lambda: workers)
    slots, taken = 8, {SMALL: 0, LARGE: 0}
    for kind in (LARGE, SMALL):
        workers[:] = [WorkerSlot(4, 8000, host=h) for h in "ab"]
        while (room := room_in(workers, kind)) > -slots:
            for _ in range(room if room > 0 else room + slots):        # as many as the scheduler hands out at a time
                placement.submit(assignment(sum(taken.values()), kind))
                taken[kind] += 1
            placement.place()
        assert len({len(w.open) for w in workers}) == 1
    assert taken == {LARGE: 8, SMALL: 16}, "twice what runs at a time"


def test_assignments_submitted_together_are_spread_over_the_workers():
    workers = [WorkerSlot(4, 8000, host=h) for h in "abc"]
    placement = Placement(lambda: workers)
    for id in range(8):
        placement.submit(assignment(id))
    assert not any(w.open for w in workers), "they are placed together"
    placement.place()
    assert sorted(len(w.open) for w in workers) == [2, 3, 3]
    assert sorted(a.id for w in workers for a in w.unsent) == list(range(8))


def test_second_attempt_goes_to_another_worker_than_the_first():
    workers = [WorkerSlot(8, 8000, host="a"), WorkerSlot(2, 8000, host="b")]
    placement = Placement(lambda: workers)
    placement.submit(assignment(1, key="slow"))
    placement.place()
    assert 1 in workers[0].open, "it has most room"
    placement.submit(assignment(2, key="slow"))
    placement.place()
    assert 2 in workers[1].open
    assert placement.settle(workers[0], [1, 2]) == {1} and placement.settle(workers[1], [1, 2]) == {2}
    placement.submit(assignment(3, key="slow"))
    placement.place()
    assert 3 in workers[0].open, "both earlier attempts have ended"


def test_second_attempt_goes_to_the_worker_of_the_first_if_no_other_has_room():
    workers = [WorkerSlot(8, 8000, host="a")]
    placement = Placement(lambda: workers)
    for id in (1, 2):
        placement.submit(assignment(id, key="slow"))
    placement.place()
    assert set(workers[0].open) == {1, 2}
