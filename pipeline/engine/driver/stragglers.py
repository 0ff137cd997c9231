"""Stragglers: which tasks get a second attempt beside the first. Pure functions.

The attempt that commits first counts, so a wrong guess costs a slot for a while and nothing else. On an idle slot a
second attempt is free. On a slot that other tasks wait for it must be worth its cost: the straggler's node has handed
out all its tasks, later nodes cannot begin before it ends, and it runs far longer than other tasks of its node. At most
a tenth of the slots, and at least one, hold such attempts, as speculation in MapReduce is bounded (Dean and Ghemawat,
OSDI 2004, §3.6, backs up what is left when an operation is nearly complete).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.engine.task import TaskSpec

FACTOR = 3.0             # times the p95 of its node on an idle slot; on a wanted one the median, and beyond the p95
KNOWN = 5                # tasks of a node that must have finished before its durations mean anything
SHARE = 10               # one of so many slots may hold a second attempt that displaces other work


@dataclass(frozen=True)
class Flight:
    """An attempt at a task, under way since `started` (the scheduler's clock)."""

    spec: TaskSpec
    started: float


def to_double(flights: Iterable[Flight], times: Mapping[str, Sequence[float]], now: float, *, idle: bool,
              unfinished: Container[str] = (), awaited: Container[str] = (), slots: int = 1,
              least_s: float = 0.0) -> list[TaskSpec]:
    """The tasks to begin a second time, the longest running first.

    `times`: seconds that tasks of a node took. `idle`: nothing waits for a slot. `unfinished`: nodes with tasks still
    to be handed out; `awaited`: nodes that others wait for. Nothing that runs for less than `least_s` is doubled.
    """
    flights = list(flights)
    attempts = Counter(f.spec.key for f in flights)
    late = []
    for flight in flights:
        known = sorted(times.get(flight.spec.node, ()))
        if len(known) < KNOWN or attempts[flight.spec.key] > 1:
            continue
        median, p95 = known[(len(known) - 1) // 2], known[int(0.95 * (len(known) - 1))]
        if idle:
            limit = FACTOR * p95
        elif flight.spec.node in awaited and flight.spec.node not in unfinished:
            limit = max(FACTOR * median, p95)
        else:
            continue
        if now - flight.started >= max(least_s, limit):
            late.append(flight)
    late.sort(key=lambda f: f.started)
    doubles = sum(n - 1 for n in attempts.values())
    return [f.spec for f in (late if idle else late[:max(0, max(1, slots // SHARE) - doubles)])]
