"""Decides which stragglers (tasks that run much longer than others) get a second attempt beside the first. The
functions only decide; `Scheduler._double_stragglers` starts the attempts.

The attempt that commits first counts, so a wrong guess only occupies a slot for a while. A second attempt on an idle
slot is free. If other tasks wait for the slot, three conditions must hold:

* All other tasks of the straggler's plan node (a group of tasks, such as a pass) have been handed out.
* Later plan nodes cannot begin before this node ends.
* The straggler runs far longer than other tasks of the node.

Second attempts may then hold at most a tenth of the slots, or one slot if there are fewer than ten. MapReduce bounds
its backup tasks similarly, and starts them when an operation is nearly complete (Dean and Ghemawat, OSDI 2004, §3.6).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from pipeline.engine.driver.flights import Flight
from pipeline.engine.task import TaskSpec

FACTOR = 3.0             # limit: FACTOR * p95 of the node if a slot is idle, else FACTOR * median, at least p95
MIN_FINISHED = 5                # with fewer finished tasks, the durations of a node mean nothing
SHARE = 10               # one in this many slots may hold a second attempt that displaces other work


def to_double(flights: Iterable[Flight], times: Mapping[str, Sequence[float]], now: float, *, idle: bool,
              unfinished: Container[str] = (), awaited: Container[str] = (), slots: int = 1,
              least_s: float = 0.0) -> list[TaskSpec]:
    """Returns the tasks that should get a second attempt beside the running one, longest-running first. A task that has
    a second attempt already is not among them.

    `times`: for each plan node (a group of tasks, such as a pass), the seconds that each of its finished tasks took
    from its dispatch to its end. `idle`: no task waits for a slot (a place for a running task). `unfinished`: plan
    nodes with tasks that have not been dispatched yet. `awaited`: plan nodes that must end before others can begin. A
    task that was dispatched less than `least_s` seconds ago gets no second attempt."""
    limits: dict[str, float] = {}                    # by node; sorted once, not for every attempt
    flown: set[str] = set()
    late: list[Flight] = []
    doubled: set[str] = set()
    doubles = 0
    for flight in flights:
        spec = flight.spec
        if spec.key in flown:
            doubled.add(spec.key)
            doubles += 1
            continue
        flown.add(spec.key)
        if spec.node not in limits:
            limits[spec.node] = _limit(times.get(spec.node, ()), idle, spec.node in awaited
                                       and spec.node not in unfinished)
        if now - flight.started >= max(least_s, limits[spec.node]):
            late.append(flight)
    late.sort(key=lambda f: f.started)
    specs = [f.spec for f in late if f.spec.key not in doubled]
    return specs if idle else specs[:max(0, max(1, slots // SHARE) - doubles)]


def _limit(times: Sequence[float], idle: bool, blocks: bool) -> float:
    """Returns after how many seconds a task of a plan node (a group of tasks, such as a pass) gets a second attempt.
    Returns infinity if fewer than MIN_FINISHED tasks of the node have finished, or if neither `idle` nor `blocks`
    holds.

    `times`: for each finished task of the node, the seconds that it took. `idle`: no task waits for a slot (a place for
    a running task). `blocks`: later nodes wait for this node, and all of its tasks have been handed out.
    """
    if len(times) < MIN_FINISHED or not (idle or blocks):
        return float("inf")
    ordered = sorted(times)
    median, p95 = ordered[(len(ordered) - 1) // 2], ordered[int(0.95 * (len(ordered) - 1))]
    return FACTOR * p95 if idle else max(FACTOR * median, p95)
