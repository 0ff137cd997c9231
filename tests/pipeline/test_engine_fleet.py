"""Which supervisors a fleet starts, stops and gives up, and how their deaths are counted. Pure computation, without
processes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pipeline.engine.backends.fleet import Fleet
from pipeline.engine.backends.nodes import Host, WorkerSlot
from pipeline.engine.backends.pools import (
    Available,
    ResourceShape,
    cannot,
    most_room,
    room_in,
)
from pipeline.engine.backends.ray_deaths import cause
from pipeline.engine.task import ResourceRequest

SMALL, LARGE, GPU = ResourceRequest(500), ResourceRequest(8000), ResourceRequest(500, 1.0)
GB = 1000


# -- the fleet -----------------------------------------------------------------------------------------------------
def hosts(*given: tuple[str, int, int, int]) -> list[Host]:
    return [Host(name, f"node {name}", cpus, memory, gpus) for name, cpus, memory, gpus in given]


def carry_out(fleet: Fleet, nodes: list[Host], now: float, ready: bool = True) -> list[WorkerSlot]:
    """Start and stop at once what the fleet has planned. Returns the started slots; `ready` says whether they are ready
    at once."""
    orders = fleet.plan(nodes, now)
    for slot in orders.leave:
        slot.leaving = True
    started = []
    for host, number, shape in orders.start:
        slot = fleet.worker_slots[host.id, number] = fleet.slot(host, number, shape)
        slot.ready, slot.started = ready, now
        started.append(slot)
    for at, slot in list(fleet.worker_slots.items()):
        if slot.leaving and not slot.open:
            del fleet.worker_slots[at]
    return started


def test_supervisors_are_started_for_work_and_not_ahead_of_it():
    fleet, nodes = Fleet(), hosts(*((c, 16, 64 * GB, 0) for c in "abcdef"))
    fleet.set_demand({}, 0)
    assert carry_out(fleet, nodes, 0) == []
    fleet.set_demand({SMALL: 20}, 0)
    assert [p.host for p in carry_out(fleet, nodes, 0)] == ["a", "b"]
    fleet.set_demand({SMALL: 20}, 1)
    assert carry_out(fleet, nodes, 1) == [], "they have room for all that waits"
    assert len(carry_out(Fleet(workers=5), nodes, 0)) == 0
    few = Fleet(workers=20)
    few.set_demand({SMALL: 1000}, 0)
    assert [p.slots for p in carry_out(few, nodes, 0)] == [16, 4]


def test_what_finds_no_room_is_wished_for_but_never_more_than_waits():
    fleet, nodes = Fleet(), hosts(("a", 4, 16 * GB, 0))
    fleet.set_demand({SMALL: 9, GPU: 3}, 0)
    orders = fleet.plan(nodes, 0)
    assert [shape.slots for _, _, shape in orders.start] == [4]
    assert orders.demand == {GPU: 3, SMALL: 5}
    fleet.set_demand({SMALL: 1_000_000}, 0)
    assert fleet.plan(nodes, 0).demand[SMALL] <= 1000
    bounded = Fleet(workers=6)
    bounded.set_demand({SMALL: 100}, 0)
    assert bounded.plan(nodes, 0).demand == {SMALL: 2}


def test_tasks_with_and_without_a_gpu_run_beside_each_other():
    fleet, nodes = Fleet(), hosts(("a", 8, 32 * GB, 0), ("g", 8, 32 * GB, 2))
    fleet.set_demand({SMALL: 100, GPU: 10}, 0)
    started = carry_out(fleet, nodes, 0)
    assert sorted((p.host, p.slots, p.gpus) for p in started) == [("a", 8, 0), ("g", 2, 2), ("g", 6, 0)]
    assert (room_in(fleet.usable, GPU), room_in(fleet.usable, SMALL)) == (2, 14)
    for host in nodes:
        assert sum(p.shape.memory_mb for p in fleet.worker_slots.values() if p.host == host.id) <= host.memory_mb


def test_a_node_too_small_for_a_task_is_skipped_by_name(caplog):
    fleet, nodes = Fleet(), hosts(("s", 16, 4 * GB, 0), ("l", 2, 64 * GB, 0))
    fleet.set_demand({LARGE: 10}, 0)
    assert [p.host for p in carry_out(fleet, nodes, 0)] == ["l"]
    assert "node node s is skipped for tasks that declare 8,000 MB of memory: it can give a task 3700 MB" in \
        caplog.text
    fleet.set_demand({LARGE: 8, SMALL: 100}, 1)
    assert [p.host for p in carry_out(fleet, nodes, 1)] == ["s"], "it does for the others"


def test_supervisors_make_way_for_a_task_none_of_them_fits():
    fleet, nodes = Fleet(), hosts(("a", 64, 256 * GB, 0), ("b", 64, 256 * GB, 0))
    fleet.set_demand({SMALL: 1000}, 0)
    carry_out(fleet, nodes, 0)
    assert len(fleet.worker_slots) == 8 and room_in(fleet.usable, ResourceRequest(100 * GB)) <= -8 * 16
    for i, slot in enumerate(fleet.worker_slots.values()):
        for j in range(i + 1):
            slot.add(100 * i + j, SMALL)
    fleet.set_demand({ResourceRequest(100 * GB): 1, SMALL: 1000}, 1)
    carry_out(fleet, nodes, 1)
    leaving = [p for p in fleet.worker_slots.values() if p.leaving]
    assert [p.host for p in leaving] == ["a", "a"], "two of four give 128 GB, on the node with less to do"
    carry_out(fleet, nodes, 2)
    assert [p for p in fleet.worker_slots.values() if p.leaving] == leaving, "nobody else"
    for slot in leaving:
        slot.remove(list(slot.open))
    carry_out(fleet, nodes, 3)                                # they go,
    carry_out(fleet, nodes, 4)                                # and the right one comes
    assert room_in(fleet.usable, ResourceRequest(100 * GB)) == 1
    assert sum(p.shape.memory_mb for p in fleet.worker_slots.values() if p.host == "a") <= 256 * GB


def test_what_fits_no_node_is_waited_for_and_then_named():
    fleet, nodes = Fleet(fit_s=100), hosts(("s", 4, 4 * GB, 0), ("l", 2, 16 * GB, 1))
    waiting = {ResourceRequest(64 * GB): 1, ResourceRequest(500, 4.0): 2, SMALL: 5}
    assert fleet.set_demand(waiting, 0) == {}, "the nodes are not known yet"
    fleet.plan(nodes, 0)
    assert fleet.set_demand(waiting, 10) == {}
    assert fleet.set_demand(waiting, 109) == {}
    failed = fleet.set_demand(waiting, 111)
    assert set(failed) == {ResourceRequest(64 * GB), ResourceRequest(500, 4.0)}
    assert "declares 64,000 MB of memory; the largest node, node l, can give a task 15,700 MB and 1 GPUs" in \
        failed[ResourceRequest(64 * GB)]
    fleet.plan([*nodes, *hosts(("x", 8, 128 * GB, 4))], 112)
    assert fleet.set_demand(waiting, 113) == {}, "an autoscaler brought one"


def test_a_cpu_that_no_node_has_is_named():
    fleet, nodes = Fleet(fit_s=0), hosts(("a", 4, 16 * GB, 0))
    numeric = ResourceRequest(500, 0.0, "x86_64-avx512")
    fleet.set_demand({numeric: 1}, 0)
    [slot] = carry_out(fleet, nodes, 0)                        # what it has is found out by starting one there
    fleet.tags["a"] = slot.cpu = "arm-base"
    why = fleet.set_demand({numeric: 1}, 1)[numeric]
    assert "a CPU of type x86_64-avx512" in why and "the nodes are arm-base" in why


def test_idle_supervisors_go_and_those_with_work_or_with_hope_stay():
    fleet, nodes = Fleet(idle_s=60), hosts(("a", 4, 16 * GB, 0), ("g", 4, 16 * GB, 1))
    fleet.set_demand({SMALL: 5, GPU: 1}, 0)
    carry_out(fleet, nodes, 0)
    gpu = next(p for p in fleet.worker_slots.values() if p.gpus)
    busy = next(p for p in fleet.worker_slots.values() if not p.gpus)
    busy.add(1, SMALL)
    for now in range(1, 200, 10):
        fleet.set_demand({GPU: 1} if now < 100 else {}, now)
        carry_out(fleet, nodes, now)
        assert (gpu in fleet.worker_slots.values()) == (now < 155)
    assert list(fleet.worker_slots.values()) == [busy]
    assert Fleet(idle_s=None).plan(nodes, 1e9).leave == []


def test_a_drained_node_gets_nothing_and_gives_back():
    fleet, nodes = Fleet(), hosts(("a", 4, 16 * GB, 0), ("b", 4, 16 * GB, 0))
    fleet.set_demand({SMALL: 100}, 0)
    first, _ = carry_out(fleet, nodes, 0)
    first.add(1, SMALL)
    draining = [Host("a", "node a", 4, 16 * GB, draining=True), nodes[1]]
    assert carry_out(fleet, draining, 1) == []
    assert first.leaving and first.drained and not first.usable
    first.remove([1])
    carry_out(fleet, draining, 2)
    assert [p.host for p in fleet.worker_slots.values()] == ["b"]
    assert carry_out(fleet, draining, 3) == []


def test_a_node_whose_supervisors_die_one_after_the_other_rests_for_longer_each_time():
    fleet, nodes, now, rests = Fleet(), hosts(("a", 4, 16 * GB, 0)), 0.0, []
    fleet.set_demand({SMALL: 100}, now)

    def fall(lived: float) -> float:
        """Let a supervisor die `lived` seconds after its start. Returns the seconds until the next one is started."""
        nonlocal now
        [slot] = carry_out(fleet, nodes, now)
        slot.started = now
        now += lived
        del fleet.worker_slots[slot.host, slot.number]
        fleet.died(slot, now)
        waited = 0.0
        while not fleet.plan(nodes, now + waited).start:
            waited += 0.5
        now += waited
        return waited

    rests = [fall(3.0) for _ in range(8)]
    assert rests == [0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0]
    assert fall(100.0) == 0.0, "it has proved itself"


def test_a_supervisor_that_does_not_come_up_is_given_up(caplog):
    """Somebody else was quicker and has what it was to get: it would stand in the way of all demand for ever."""
    fleet, node = Fleet(), Host("a", "node a", 4, 16 * GB)
    taken = Host("a", "node a", 4, 16 * GB, others=ResourceShape(0, 4, 16 * GB))
    fleet.set_demand({SMALL: 10}, 0)
    [slot] = carry_out(fleet, [node], 0, ready=False)
    assert carry_out(fleet, [taken], 119) == [] and list(fleet.worker_slots.values()) == [slot]
    assert carry_out(fleet, [taken], 121) == [] and fleet.worker_slots == {}
    assert "not come up for 121 s" in caplog.text
    assert fleet.plan([taken], 122).demand == {SMALL: 10}
    [slot] = carry_out(fleet, [node], 130, ready=False)
    assert fleet.plan([node], 130 + 200).leave == [], "the second one gets longer: the machine may be slow"
    fleet.greeted(slot, 131)
    assert fleet.plan([node], 1000).leave == []


def fall_before_ready(fleet: Fleet, host: str, now: float) -> None:
    slot = next(p for p in fleet.worker_slots.values() if p.host == host)
    del fleet.worker_slots[slot.host, slot.number]
    fleet.died(slot, now, "OSError: no scratch")


def test_a_node_where_none_comes_up_rests_while_others_work():
    fleet, nodes, now, waits = Fleet(), hosts(("a", 1, 4 * GB, 0), ("b", 1, 4 * GB, 0)), 0.0, []
    fleet.set_demand({SMALL: 100}, now)
    carry_out(fleet, nodes, now, ready=False)
    for i in range(7):
        fall_before_ready(fleet, "a", now)
        assert fleet.stuck(now) is None, "the other one is still starting, or at work"
        if i == 5:
            fleet.greeted(next(p for p in fleet.worker_slots.values() if p.host == "b"), now)
        before = now
        while not carry_out(fleet, nodes, now, ready=False):
            now += 0.5
        waits.append(now - before)
    assert waits == [0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0]


def test_supervisors_that_die_wherever_they_start_end_the_run_soon():
    fleet, nodes = Fleet(), hosts(("a", 1, 4 * GB, 0), ("b", 1, 4 * GB, 0))
    fleet.set_demand({SMALL: 100}, 0)
    for i in range(5):
        carry_out(fleet, nodes, i, ready=False)
        assert fleet.stuck(i) is None and len(fleet.worker_slots) == 2
        fall_before_ready(fleet, "ab"[i % 2], i)
    assert fleet.stuck(5) == "supervisors die before they are ready: OSError: no scratch"


def starts(fleet: Fleet, at: Callable[[int], Host], deaths: tuple[int, ...]) -> str:
    """Plan every two seconds, as the backend does. At each time in `deaths`, one supervisor dies. Returns why the run
    ends, or ""."""
    fleet.set_demand({SMALL: 100}, 0)
    for now in range(0, 700, 2):
        carry_out(fleet, [at(now)], now, ready=False)
        if now in deaths:
            fall_before_ready(fleet, "a", now)
        if (why := fleet.stuck(now)) is not None:
            return why
    return ""


NODE = Host("a", "node a", 1, 4 * GB)
TAKEN = Host("a", "node a", 1, 4 * GB, others=ResourceShape(0, 1, 4 * GB))


@pytest.mark.parametrize(("deaths", "said"), [((100,), "1 died before that"), ((100, 300, 500), "3 died before that")])
def test_supervisors_that_die_slowly_are_named_beside_what_others_use(deaths, said):
    why = starts(Fleet(), lambda now: NODE, deaths)
    assert "no supervisor was ready within 600 s (node a: others use 0 of 1 CPUs" in why
    assert f"{said}, the last one: OSError: no scratch" in why


def test_one_early_death_does_not_hide_that_others_took_the_node():
    why = starts(Fleet(), lambda now: NODE if now < 22 else TAKEN, (20,))
    assert "others use 1 of 1 CPUs" in why and "1 died before that" in why


def test_a_death_of_long_ago_is_not_named():
    fleet = Fleet()
    fleet.set_demand({SMALL: 100}, 0)
    carry_out(fleet, [NODE], 0, ready=False)
    fall_before_ready(fleet, "a", 1)
    carry_out(fleet, [NODE], 2)
    assert fleet.stuck(3) is None, "one is ready"
    del fleet.worker_slots["a", 0]
    assert fleet.stuck(10) is None
    assert "died" not in fleet.stuck(611)


def test_a_driver_that_stood_still_takes_nobody_for_silent():
    fleet, nodes = Fleet(), hosts(("a", 1, 4 * GB, 0), ("b", 1, 4 * GB, 0))
    fleet.set_demand({SMALL: 100}, 0)
    asked, starting = carry_out(fleet, nodes, 0, ready=False)
    for now in (0, 1, 2, 3):
        fleet.before_poll(now)
    asked.ready, asked.polled = True, 2.5
    fleet.before_poll(1003)                                          # stopped for 1000 seconds
    assert (asked.polled, starting.started) == (1002.5, 1000)
    assert fleet.plan(nodes, 1003).leave == []
    asked.polled = 1003
    fleet.before_poll(2003)
    assert asked.polled == 2003, "never in the future"
    for now in range(2004, 2200):
        fleet.before_poll(now)
    assert asked.polled == 2003, "and this time it is its own"


def test_who_waits_for_what_others_use_is_told_and_then_the_run_ends(caplog):
    busy = Host("a", "node a", 8, 32 * GB, others=ResourceShape(0, 8, 30 * GB))
    fleet = Fleet()
    for now in (0, 30, 61, 100):
        fleet.set_demand({SMALL: 7}, now)
        assert fleet.plan([busy], now).start == [] and fleet.stuck(now) is None
        assert ("waiting for" in caplog.text) == (now > 60)
    assert caplog.text.count("7 tasks that declare 500 MB of memory have been waiting for 61 s for a place: node a: "
                             "others use 8 of 8 CPUs, 30,000 of 32,000 MB") == 1
    assert "within 600 s (node a: others use 8 of 8 CPUs" in fleet.stuck(601)
    carry_out(fleet, hosts(("b", 1, 4 * GB, 0)), 602)
    assert fleet.stuck(603) is None


def test_what_others_use_is_theirs():
    busy = Host("a", "node a", 8, 32 * GB, others=ResourceShape(0, 6, 24 * GB))
    fleet = Fleet()
    fleet.set_demand({SMALL: 100}, 0)
    assert [p.shape for p in carry_out(fleet, [busy], 0)] == [ResourceShape(2, 2, 8 * GB)]


def test_on_ones_own_machine_what_declares_more_than_is_free_runs_alone():
    here = Host("a", "this machine", 4, 2 * GB, largest_mb=8 * GB)
    fleet = Fleet(fit_s=0)
    fleet.set_demand({ResourceRequest(5 * GB): 3}, 0)
    [slot] = carry_out(fleet, [here], 0)
    assert (slot.capacity(ResourceRequest(5 * GB)), slot.room(ResourceRequest(5 * GB))) == (1, 1)
    assert fleet.set_demand({ResourceRequest(5 * GB): 3}, 0) == {}
    assert set(fleet.set_demand({ResourceRequest(9 * GB): 3}, 0)) == {ResourceRequest(9 * GB)}


def test_a_fleet_serves_everything_that_fits_somewhere():
    """Whatever comes in which order, on whatever nodes: in the end all has run, and nothing was promised twice."""
    for seed in range(50):
        rng = random.Random(seed)
        nodes = [Host(str(i), f"n{i}", rng.choice([1, 2, 8, 40]), rng.choice([2, 8, 64, 300]) * GB,
                      rng.choice([0, 0, 1, 4])) for i in range(rng.randint(1, 5))]
        kinds = [ResourceRequest(rng.choice([300, 1000, 6000, 50 * GB]), rng.choice([0, 0, 0.5, 1, 2]))
                 for _ in range(5)]
        fleet = Fleet(rng.choice([None, None, 1, 3]), fit_s=1e9, idle_s=20)
        serial, now, starts_in = 0, 0.0, rng.choice([0, 1, 5])
        fleet.guard.patience_s = 5
        fits = [k for k in kinds if any(Available(h.cpus, h.memory_mb, h.gpus).shape_for(k) for h in nodes)]
        left = {k: rng.randint(1, 30) for k in fits}
        while left:
            now += 1
            assert now < 3000, (seed, left, nodes)
            fleet.set_demand(left, now)
            carry_out(fleet, nodes, now, ready=False)
            for slot in fleet.worker_slots.values():
                slot.ready |= now - slot.started >= starts_in
            for host in nodes:
                own = [p.shape for p in fleet.worker_slots.values() if p.host == host.id]
                assert sum(s.memory_mb for s in own) <= host.memory_mb and sum(s.cpus for s in own) <= host.cpus
                assert sum(s.gpus for s in own) <= host.gpus
            for kind in list(left):
                while left.get(kind) and room_in(fleet.usable, kind) > 0:
                    serial += 1
                    most_room(fleet.usable, kind)[0].add(serial, kind)
                    left[kind] -= 1
                    if not left[kind]:
                        del left[kind]
            for slot in fleet.worker_slots.values():
                slot.remove([i for i in slot.open if rng.random() < 0.3])


def test_the_reason_names_need_and_node():
    why = cannot(ResourceRequest(9000, 0.5, "x86_64-avx2"), [("n1", 4000, 0, "arm-base"), ("n2", 8000, 1, "")])
    assert why == ("it declares 9,000 MB of memory, 0.5 GPU and a CPU of type x86_64-avx2 (its numeric stages are "
                   "keyed by that of the driver); the largest node, n2, can give a task 8,000 MB and 1 GPUs, and the "
                   "nodes are arm-base")
    assert cannot(SMALL, []) == "it declares 500 MB of memory, and there is no node"


# -- deaths --------------------------------------------------------------------------------------------------------
DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: S\n\tpid: 1\n"


@pytest.mark.parametrize(("said", "words"), [
    (DIED + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
     "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
     "process was killed by the OOM killer",
     "its process was killed from outside (SIGKILL, the kernel's OOM killer) or crashed"),
    (DIED + "The actor is dead because its worker process has died. Worker exit type: USER_ERROR Worker exit detail: "
     "Worker exits with an exit code 7. More.", "its process ended (USER_ERROR): Worker exits with an exit code 7"),
    (DIED + "The actor is dead because it was killed by `ray.kill`.", "it was killed by ray.kill"),
    ("The actor died because its node has died. Node Id: 52\n\tthe actor's node was terminated unexpectedly: health "
     "check failed due to missing too many heartbeats\nThe actor never ran",
     "its node died: health check failed due to missing too many heartbeats"),
    ("The actor a3 is unavailable: The actor is temporarily unavailable: RpcError: RPC error: Socket closed rpc_code: "
     "14. The task may", "its process or its node is gone (Socket closed)"),
    ("The actor died because of an error raised in its creation task, S.__init__()\n  File\nOSError: no disk",
     "it could not start: OSError: no disk"),
    ("1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 1.2.3.4, ID: 8f) was "
     "8.76GB used / 23.54GB limit (0.37)\nOOM kill reason", "Ray killed it because its node ran low on memory (8.76GB "
     "of 23.54GB used); stop what else runs there, or let the stages declare more memory_mb so that fewer children run "
     "together"),
    ("something new\nand more", "something new"),
])
def test_a_death_is_told_in_words(said, words):
    assert cause(Exception(said)) == words


def test_a_preempted_node_is_told():
    error = Exception("The actor died unexpectedly before finishing this task.")
    error.preempted = True
    assert cause(error) == "its node was preempted"
