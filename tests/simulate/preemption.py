"""A simulated cluster whose nodes are preempted, in virtual time: large runs, and tasks that take their nodes down.

    python -m tests.simulate.preemption --tasks 1000000 --preempted 0.3

`Scheduler`, `TaskQueue` and `Progress` are the real ones. The log is a dict and the workers are numbers, so a million
tasks take only minutes. The only fault is the death of nodes; `world` simulates all the others.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.driver.endings import TaskFailed
from pipeline.engine.driver.losses import MAX_LOST
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.messages import Assignment, Done, Event, Lost, Quarantined, Returned
from pipeline.engine.task import ResourceRequest, TaskSpec
from pipeline.store.records import PartRecord
from tests.simulate.clock import VirtualClock

TASK_S = 60.0                # an attempt of the usual length
KILLS_AFTER_S = 5.0          # a task that takes its node down runs for so long
DRAINS = 3 * MAX_LOST
REPLACED_S = 20.0            # after this time another node takes the place of a dead one
POLL_S = 0.1
IDLE_S = 5.0                 # a poll without events takes so long, so that a long run has few of them


class Endless(BaseException):
    """Raised if a task takes down one node after the other and is not found."""


@dataclass(frozen=True)
class Cluster:
    """The settings of a cluster. `preempted` is the share of attempts of usual length that are lost with their node,
    and `announced` the share of these preemptions that is announced. `killers` are labels of tasks that take their node
    down. Each of the `supervisors` of a dead node reports the attempts that it had."""

    nodes: int
    slots: int
    preempted: float = 0.0
    announced: float = 0.0
    killers: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()        # labels of tasks; their nodes are drained DRAINS times
    supervisors: int = 1         # of each node
    longest: int = 1             # one task in a hundred takes so many times as long


@dataclass
class Log:
    """The log as the scheduler needs it, in memory."""

    epoch: int = 1
    records: dict[str, PartRecord] = field(default_factory=dict)
    rows: dict[str, dict[int, tuple[int, str]]] = field(default_factory=dict)

    def get_all(self, keys: Sequence[str]) -> dict[str, PartRecord]:
        return {key: self.records[key] for key in keys if key in self.records}

    def append(self, record: PartRecord) -> PartRecord:
        return self.records.setdefault(record.key, record)

    def quarantine(self, key: str, row: int, stage: int, reason: str) -> None:
        self.rows.setdefault(key, {}).setdefault(row, (stage, reason))

    def quarantined_rows(self, key: str) -> dict[int, tuple[int, str]]:
        return self.rows.get(key, {})

    def release(self, key: str) -> None:
        self.rows.pop(key, None)

    def flush(self) -> None: ...


class SpotBackend:
    """A backend whose nodes may vanish at any time. An assignment goes to the node with the most free slots, and may
    wait there, as with Ray."""

    interruptible = False

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.clock = cluster, VirtualClock(seed)
        self._random = random.Random(seed)
        self.lost: Counter[str] = Counter()              # label → attempts lost with their node
        self.returned: Counter[str] = Counter()
        self.killed = 0                                  # nodes that a task took down
        self.heard: dict[str, set[int]] = {}             # label → rows that its latest attempt was told to skip
        self.skipped_after_loss = True                   # whether every attempt was told the rows of those before it
        self._open: dict[int, tuple[Assignment, int]] = {}           # assignment and node
        self._held: list[dict[int, None]] = [{} for _ in range(cluster.nodes)]   # by node: assignments, oldest first
        self._up = [True] * cluster.nodes
        self.slots = cluster.nodes * cluster.slots       # of the nodes that are up
        self._lives = [0] * cluster.nodes                # by node: how many nodes had its place before
        self._room = [(0, node) for node in range(cluster.nodes)]    # heap, may hold stale entries
        self._agenda: list[tuple[float, int, str, int]] = []
        self._serial = 0
        for node in range(cluster.nodes):
            self._preempt_later(node)

    # -- what the scheduler calls ------------------------------------------------------------------------------------
    def start(self, memory_mb: int = 0) -> None: ...

    def close(self) -> None: ...

    def emit(self, run: str, snapshot: Mapping[str, Any]) -> None: ...

    def set_demand(self, waiting: Mapping[ResourceRequest, int]) -> Mapping[ResourceRequest, str]:
        return {}

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        return self.slots - len(self._open)

    def submit(self, assignment: Assignment) -> None:
        label = assignment.spec.label
        rows = {skip.row for skip in assignment.skip}
        self.skipped_after_loss &= rows >= self.heard.get(label, set())
        self.heard[label] = rows
        while True:
            open_, node = heapq.heappop(self._room)
            if self._up[node] and open_ == len(self._held[node]):
                break
        self._open[assignment.id] = assignment, node
        self._held[node][assignment.id] = None
        heapq.heappush(self._room, (open_ + 1, node))
        if open_ < self.cluster.slots:
            self._begin(assignment.id)

    def cancel(self, ids: list[int]) -> None:
        for id in ids:
            if id in self._open:
                self._free(id)

    def wait(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        until = self.clock.time + (IDLE_S if timeout else 0.0)
        while self._agenda and self._agenda[0][0] <= until:
            at, _, what, number = heapq.heappop(self._agenda)
            if not events:
                until = min(until, at + POLL_S)
            self.clock.time = max(self.clock.time, at)
            events += getattr(self, f"_{what}")(number)
        self.clock.time = max(self.clock.time, until)
        return events

    # -- what happens ------------------------------------------------------------------------------------------------
    def _later(self, seconds: float, what: str, number: int) -> None:
        self._serial += 1
        heapq.heappush(self._agenda, (self.clock.time + seconds, self._serial, what, number))

    def _preempt_later(self, node: int) -> None:
        if self.cluster.preempted:
            rate = -math.log(1.0 - self.cluster.preempted) / TASK_S
            self._later(self._random.expovariate(rate), "preempted", node + self.cluster.nodes * self._lives[node])

    def _begin(self, id: int) -> None:
        spec = self._open[id][0].spec
        if spec.label in self.cluster.killers:
            self._later(KILLS_AFTER_S, "kills", id)
            return
        if spec.label in self.cluster.drained and self.returned[spec.label] < DRAINS:
            self._later(KILLS_AFTER_S, "drains", id)
            return
        times = self.cluster.longest if int(spec.key, 16) % 100 == 0 else 1
        self._later(TASK_S * times * self._random.uniform(0.8, 1.2), "ends", id)
        if int(spec.key, 16) % 10 == 1 and not self._open[id][0].skip:
            self._later(TASK_S / 3, "finds", id)

    def _free(self, id: int) -> None:
        _, node = self._open.pop(id)
        held = self._held[node]
        del held[id]
        heapq.heappush(self._room, (len(held), node))

    def _ends(self, id: int) -> list[Event]:
        if id not in self._open:
            return []
        assignment, node = self._open[id]
        self._free(id)
        if len(self._held[node]) >= self.cluster.slots:
            self._begin(list(self._held[node])[self.cluster.slots - 1])
        spec = assignment.spec
        return [Done(id, PartRecord(spec.key, "rows", spec.node, assignment.attempt, {}, {"docs": len(assignment.skip)},
                                    wall_s=TASK_S))]

    def _finds(self, id: int) -> list[Event]:
        """Report that a row has killed its child. The scheduler must not forget this."""
        if id not in self._open:
            return []
        self.heard[self._open[id][0].spec.label] = {1}
        return [Quarantined(id, 1, 0, "crash:SIGSEGV")]

    def _kills(self, id: int) -> list[Event]:
        if id not in self._open:
            return []
        self.killed += 1
        if self.killed > 10 * MAX_LOST:
            raise Endless
        return self._dies(self._open[id][1])

    def _drains(self, id: int) -> list[Event]:
        return self._dies(self._open[id][1], announced=True) if id in self._open else []

    def _preempted(self, number: int) -> list[Event]:
        life, node = divmod(number, self.cluster.nodes)
        if not self._up[node] or life != self._lives[node]:      # a task took it down meanwhile
            return []
        return self._dies(node, self._random.random() < self.cluster.announced)

    def _dies(self, node: int, announced: bool = False) -> list[Event]:
        ids = tuple(self._held[node])
        for id in ids:
            (self.returned if announced else self.lost)[self._open.pop(id)[0].spec.label] += 1
        self._held[node].clear()
        self._up[node] = False
        self.slots -= self.cluster.slots
        self._later(REPLACED_S, "comes", node)
        reports = [tuple(i for i in ids if i % self.cluster.supervisors == n) for n in range(self.cluster.supervisors)]
        return [Returned(held, "preempted") if announced else Lost(held, "node died", f"{node} {self._lives[node]}")
                for held in reports if held]

    def _comes(self, node: int) -> list[Event]:
        self._up[node] = True
        self.slots += self.cluster.slots
        self._lives[node] += 1
        heapq.heappush(self._room, (0, node))
        self._preempt_later(node)
        return []


class SpotScheduler(Scheduler):
    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        yield


def specs(tasks: int, seed: int) -> Iterator[TaskSpec]:
    rng = random.Random(f"{seed} keys")
    for i in range(tasks):
        yield TaskSpec(f"{rng.getrandbits(128):032x}", "sim:Rows", "node", {}, label=str(i), order=i)


def run(cluster: Cluster, tasks: int, seed: int) -> SpotBackend:
    """Run `tasks` tasks. Raises what the scheduler raises."""
    backend = SpotBackend(cluster, seed)
    finish(backend, tasks, seed)
    return backend


def finish(backend: SpotBackend, tasks: int, seed: int) -> None:
    log = Log()
    scheduler = SpotScheduler(backend, log, Progress("quiet", clock=backend.clock), clock=backend.clock)
    with scheduler:
        batch = scheduler.add(specs(tasks, seed))
        while not any(done is batch for done, _ in scheduler.finished()):
            scheduler.step()
    assert len(log.records) == tasks == scheduler.executed


# -- what has to hold ------------------------------------------------------------------------------------------------
#: clusters that lose nodes, and numbers of tasks. Some tasks are lost more often than MAX_LOST, the limit for a task
#: that takes its nodes down
STORMY = [(Cluster(40, 16, 0.3, longest=3), 8_000), (Cluster(2, 3, 0.3, longest=3), 1500),
          (Cluster(1, 4, 0.3), 1500), (Cluster(40, 16, 0.4, announced=0.5), 8_000)]
KILLER = frozenset({"17"})
#: clusters with a task that takes its node down, and how many it may take down before it is found
DEADLY = [(Cluster(40, 16, killers=KILLER), 10), (Cluster(2, 3, killers=KILLER), 16),
          (Cluster(1, 2, killers=KILLER), 16), (Cluster(40, 16, 0.3, killers=KILLER), 16),
          (Cluster(40, 64, 0.3, killers=KILLER, supervisors=4), 16),
          (Cluster(1, 32, killers=KILLER, supervisors=4), 16),
          # few others show the base rate
          (Cluster(2, 3, 0.3, killers=KILLER), 48), (Cluster(1, 4, 0.3, killers=KILLER), 48)]


def storms(seeds: Iterable[int]) -> str:
    """Return what goes wrong when nodes are preempted, or ""."""
    for seed in seeds:
        for cluster, tasks in STORMY:
            backend = SpotBackend(cluster, seed)
            try:
                finish(backend, tasks, seed)
            except TaskFailed as e:
                return f"{cluster}, seed {seed}: preemptions ended the run: {e}"
            if not backend.skipped_after_loss:
                return f"{cluster}, seed {seed}: a row that was quarantined was read again after its attempt was lost"
    return ""


def announcements(seed: int) -> str:
    """Return what goes wrong when a task meets one announced preemption after the other, or ""."""
    backend = SpotBackend(Cluster(4, 4, drained=KILLER), seed)
    try:
        finish(backend, 300, seed)
    except TaskFailed as e:
        return f"seed {seed}: announced preemptions ended the run: {e}"
    return ""


def killers(seeds: Iterable[int]) -> str:
    """Return what goes wrong when a task takes down its nodes, or ""."""
    for seed in seeds:
        for cluster, most in DEADLY:
            backend = SpotBackend(cluster, seed)
            try:
                finish(backend, 400, seed)
            except TaskFailed as e:
                if e.spec.label not in KILLER:
                    return f"{cluster}, seed {seed}: {e.spec.label} was blamed: {e}"
                if backend.killed > most:
                    return f"{cluster}, seed {seed}: the killer took {backend.killed} nodes down"
            except Endless:
                return f"{cluster}, seed {seed}: the killer took {backend.killed} nodes down, and goes on"
            else:
                return f"{cluster}, seed {seed}: the killer was done"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate.preemption", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--preempted", type=float, default=0.3)
    parser.add_argument("--nodes", type=int, default=625)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.process_time()
    backend = run(Cluster(options.nodes, options.slots, options.preempted, longest=3), options.tasks, options.seed)
    lost = backend.lost.values()
    spent = time.process_time() - began
    print(f"{options.tasks:,} tasks, {sum(lost):,} attempts lost, at most {max(lost, default=0)} of one task, "
          f"{sum(n >= MAX_LOST for n in lost):,} tasks lost {MAX_LOST} times or more; "
          f"{backend.clock.time / 3600:.1f} h of virtual time, {spent:.0f} s of CPU, "
          f"{1e3 * spent / options.tasks:.2f} ms a task")


if __name__ == "__main__":
    main()
