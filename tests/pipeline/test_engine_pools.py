"""Which task fits where (memory, CPUs and devices), and which task is next. Pure computation, without processes."""

from __future__ import annotations

import random

import pytest

from pipeline.engine.backends.pools import (
    OWN_MB,
    Available,
    Capacity,
    ResourceShape,
    StarvationGuard,
    most_room,
    per_devices,
    room_in,
    share,
)
from pipeline.engine.task import ResourceRequest
from pipeline.engine.worker.limits import Devices, visible_gpus

SMALL, LARGE, GPU = ResourceRequest(500), ResourceRequest(8000), ResourceRequest(500, 1.0)
GB = 1000


# -- workers ---------------------------------------------------------------------------------------------------------
def test_a_box_holds_what_its_memory_holds_whatever_its_slots():
    worker = Capacity(16, 8000)
    assert [worker.capacity(k) for k in (SMALL, LARGE, ResourceRequest(8001), ResourceRequest(3000))] == [16, 1, 0, 2]
    worker.add(1, ResourceRequest(3000))
    assert [worker.room(k) for k in (SMALL, LARGE, ResourceRequest(3000), ResourceRequest(6000))] == [10, 0, 1, 0]
    worker.add(2, ResourceRequest(6000))                     # does not fit beside the first: it is prefetched
    assert (worker.prefetched, worker.room(SMALL)) == (1, 10)
    assert worker.remove([1, 7]) == {1}
    assert (worker.prefetched, worker.room(SMALL), worker.room(ResourceRequest(3000))) == (0, 4, 0)


def test_shares_of_devices():
    assert [share(g) for g in (0.3, 0.5, 1, 1.5, 2)] == [pytest.approx(1 / 3), 0.5, 1, 2, 2]
    assert [per_devices(4, g) for g in (0.3, 0.5, 1, 1.5, 3, 8)] == [12, 8, 4, 2, 1, 0]
    worker = Capacity(8, 64 * GB, gpus=2)
    assert [worker.capacity(ResourceRequest(1, g)) for g in (0.25, 0.5, 1, 2, 3)] == [8, 4, 2, 1, 0]
    assert not worker.takes(SMALL) and Capacity(8, 64 * GB, gpus=2, shared=True).takes(SMALL)
    worker.add(1, ResourceRequest(1, 0.5))
    assert [worker.room(ResourceRequest(1, g)) for g in (0.5, 1, 2)] == [3, 1, 0]


def test_numeric_tasks_only_run_on_their_cpu():
    here, there = Capacity(2, 4 * GB, cpu="x86_64-avx512"), Capacity(2, 4 * GB, cpu="arm-base")
    unknown = Capacity(2, 4 * GB)
    numeric = ResourceRequest(500, 0.0, "x86_64-avx512")
    assert [b.takes(numeric) for b in (here, there, unknown)] == [True, False, True]
    assert [b.takes(SMALL) for b in (here, there, unknown)] == [True, True, True]
    assert room_in([here, there], numeric) == 2 and room_in([here, there], SMALL) == 4
    assert room_in([there], numeric) == -2, "it takes none, not even at hand"


def test_no_more_is_kept_at_hand_than_could_run():
    workers = [Capacity(4, 8 * GB), Capacity(4, 8 * GB)]
    taken = {SMALL: 0, LARGE: 0}
    for kind in (LARGE, SMALL):
        workers = [Capacity(4, 8 * GB), Capacity(4, 8 * GB)]
        while room_in(workers, kind) > -sum(b.slots for b in workers):
            most_room(workers, kind)[0].add(taken[kind], kind)
            taken[kind] += 1
        assert max(len(b.open) for b in workers) == min(len(b.open) for b in workers)
    assert taken == {LARGE: 4, SMALL: 16}                     # twice what runs at a time


def test_what_is_taken_always_fits_together():
    rng = random.Random(4)
    kinds = [ResourceRequest(*k) for k in ((300,), (2500,), (7000,), (500, 0.5), (500, 1), (900, 2))]
    for _ in range(300):
        worker = Capacity(rng.randint(1, 8), rng.randint(500, 9000), rng.choice([0, 1, 2]), shared=True)
        for i in range(30):
            kind = rng.choice(kinds)
            if rng.random() < 0.3:
                worker.remove(rng.sample(list(worker.open), min(2, len(worker.open))))
            elif (room := worker.room(kind)) > 0:
                before = worker.prefetched
                for j in range(room):
                    worker.add(100 * i + j, kind)
                assert worker.prefetched <= before, "what there is room for starts at once"
            running = list(worker.open.values())
            if worker.prefetched == 0 and running:
                assert len(running) <= worker.slots
                assert sum(k.memory_mb for k in running) <= worker.memory_mb
                assert sum(share(k.gpus) for k in running if k.gpus) <= worker.gpus + 1e-6


def test_a_large_task_gets_its_turn():
    workers, guard = [Capacity(4, 9 * GB, name="a"), Capacity(4, 4 * GB, name="b")], StarvationGuard(patience_s=5)
    for i, worker in enumerate(workers):
        for j in range(4):
            worker.add(10 * i + j, ResourceRequest(1000))
    waiting = {LARGE: 1, ResourceRequest(1000): 1000}
    for now in (0.0, 4.0):
        guard.observe(workers, waiting, now)
        assert [b.reserved_for for b in workers] == [None, None]
    guard.observe(workers, waiting, 6.0)
    assert [b.reserved_for for b in workers] == [LARGE, None]
    workers[0].remove([0, 1])
    assert workers[0].room(ResourceRequest(1000)) == 0 and room_in(workers, ResourceRequest(1000)) <= 0
    workers[0].remove([2])
    assert workers[0].room(LARGE) == 1
    workers[0].add(99, LARGE)
    assert workers[0].reserved_for is None and workers[0].room(ResourceRequest(1000)) == 0
    workers[0].remove([99, 3])
    guard.observe(workers, {ResourceRequest(1000): 1000}, 7.0)
    assert workers[0].room(ResourceRequest(1000)) == 4


def test_a_box_is_given_free_when_what_it_was_kept_for_is_gone():
    worker, guard = Capacity(1, 9 * GB), StarvationGuard(patience_s=0)
    worker.add(1, SMALL)
    guard.observe([worker], {LARGE: 1}, 0.0)
    assert worker.reserved_for == LARGE
    guard.observe([worker], {SMALL: 5}, 1.0)
    assert worker.reserved_for is None


# -- devices -------------------------------------------------------------------------------------------------------
def test_devices_are_shared_out_and_come_back():
    devices = Devices(["GPU-a", "GPU-b"])
    assert devices.take(0.0) == {}
    half = devices.take(0.5)
    assert half == {"GPU-a": 0.5}
    assert devices.take(0.5) == {"GPU-a": 0.5}, "the started one first, so that a whole one stays"
    assert devices.take(2.0) is None
    assert devices.take(1.0) == {"GPU-b": 1.0}
    assert devices.take(0.5) is None
    devices.give_back(half)
    assert devices.copy().take(0.5) == {"GPU-a": 0.5}
    assert devices.take(0.5) == {"GPU-a": 0.5}, "a copy takes nothing from it"


def test_devices_are_those_that_are_visible():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-7f"}) == ["2", "GPU-7f"]
    for nothing in ("", "-1", "NoDevFiles"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": nothing}) == []


# -- shapes --------------------------------------------------------------------------------------------------------
def test_a_supervisor_takes_its_cpus_and_their_part_of_the_memory():
    assert Available(64, 256 * GB).shape_for(SMALL) == ResourceShape(16, 16, 64 * GB)
    assert Available(4, 16 * GB).shape_for(SMALL, most=1) == ResourceShape(1, 1, 4 * GB)
    assert Available(4, 16 * GB).shape_for(LARGE, most=1) == ResourceShape(1, 1, LARGE.memory_mb + OWN_MB)
    assert Available(64, 256 * GB).shape_for(ResourceRequest(100 * GB)) == ResourceShape(16, 16, 100 * GB + OWN_MB)
    assert Available(4, 4 * GB).shape_for(LARGE) is None
    assert Available(0, 4 * GB).shape_for(SMALL) is None
    assert Available(4, 16 * GB).shape_for(GPU) is None
    assert Available(96, 960 * GB, 8).shape_for(GPU) == ResourceShape(8, 8, 80 * GB, 8)
    # a CPU stays for the others
    assert Available(2, 8 * GB, 1).shape_for(ResourceRequest(1000, 0.25)) == ResourceShape(4, 1, 4300, 1)
