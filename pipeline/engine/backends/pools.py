"""Computes how many tasks a supervisor can take, and how large a new supervisor should be. A supervisor runs tasks in
child processes of one machine. This module only calculates; it starts nothing and does not use Ray.

A *worker* is a supervisor with its children. Its `Capacity` is the number of children that may run at the same time,
the memory that their tasks may declare together, and the GPUs. On a cluster, tasks with and without a GPU have separate
workers, so that filters run beside a classifier and neither takes the other's place. With the process backend, one
worker takes both (`shared`). Tasks that declare the same `ResourceRequest` are of one kind. A worker takes a kind if a
single task of this kind fits.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.engine.task import ResourceRequest

OWN_MB = 300             # memory of the supervisor itself, without its children
CPUS_A_WORKER = 16          # docs/contracts.md: Tasks and blame
PATIENCE_S = 10.0        # seconds that tasks of a kind wait without room until a worker is reserved for them


def share(gpus: float) -> float:
    """Returns the number of GPUs that a task occupies if it declares `gpus`. A fraction is rounded up to an equal part
    of one GPU: 0.3 becomes a third, so that three such tasks fit. A larger number is rounded up to whole GPUs: 1.5
    becomes 2."""
    return 1 / int(1 / gpus + 1e-9) if 0 < gpus < 1 else float(math.ceil(gpus))


def per_devices(devices: int, gpus: float) -> int:
    """Returns the number of tasks that can run on `devices` GPUs at the same time if each task declares `gpus`."""
    return devices * round(1 / share(gpus)) if gpus < 1 else int(devices // share(gpus))


@dataclass
class Capacity:
    """The capacity of one supervisor, which runs tasks in child processes, and its present load. `open` lists the
    assignments (attempts at tasks) of the supervisor in the order of their arrival, as {id: kind}. Tasks that declare
    the same resources are of one kind."""

    slots: int
    memory_mb: int
    gpus: int = 0
    cpu: str = ""                # CPU tag, "" until it is known
    name: str = "this machine"
    largest_mb: int = 0          # for a task that runs alone; above `memory_mb` only where memory is not reserved
    shared: bool = False         # takes tasks with and without a GPU
    open: dict[int, ResourceRequest] = field(default_factory=dict)
    reserved_for: ResourceRequest | None = None         # no other kind goes here until a task of this kind has come
    _runs: int = 0               # assignments of `open` that run; the others are prefetched (they wait for a slot)
    _memory: int = 0
    _gpus: float = 0.0
    _capacity: dict[tuple[ResourceRequest, str], int] = field(default_factory=dict)

    def takes(self, kind: ResourceRequest) -> bool:
        """Whether a task that declares the resources `kind` can ever run in this supervisor, even when no other task
        runs there."""
        return (kind.memory_mb <= max(self.memory_mb, self.largest_mb)
                and (not kind.cpu or self.cpu in ("", kind.cpu))
                and (share(kind.gpus) <= self.gpus if kind.gpus else self.shared or not self.gpus))

    def capacity(self, kind: ResourceRequest) -> int:
        """Returns the number of tasks that can run at the same time in this supervisor if each declares the resources
        `kind` and no other tasks run."""
        count = self._capacity.get((kind, self.cpu))
        if count is None:                        # cached: computed for every worker and assignment
            count = min(self.slots, max(1, self.memory_mb // max(kind.memory_mb, 1))) if self.takes(kind) else 0
            if kind.gpus:
                count = min(count, per_devices(self.gpus, kind.gpus))
            self._capacity[kind, self.cpu] = count
        return count

    def room(self, kind: ResourceRequest) -> int:
        """Returns how many further tasks that declare the resources `kind` would start immediately in this supervisor,
        besides the tasks that run."""
        if self._runs >= self.slots or not self.capacity(kind) or self.reserved_for not in (None, kind):
            return 0
        by_memory = (self.memory_mb - self._memory) // max(kind.memory_mb, 1)
        free = min(self.slots - self._runs, by_memory if self._runs else max(1, by_memory))
        if kind.gpus:
            free = min(free, int((self.gpus - self._gpus) / share(kind.gpus) + 1e-6))
        return max(0, free)

    @property
    def has_slot(self) -> bool:
        return self._runs < self.slots

    @property
    def prefetched(self) -> int:
        """Return the number of assignments (attempts at tasks) that this worker has in advance: they wait until a
        running one ends."""
        return len(self.open) - self._runs

    def add(self, id: int, kind: ResourceRequest) -> None:
        self.open[id] = kind
        self._run_if_fits(kind)
        if self.reserved_for == kind:
            self.reserved_for = None

    def remove(self, ids: Iterable[int]) -> set[int]:
        """Remove those of the assignments (attempts at tasks) `ids` that this worker has, and return their ids."""
        removed = {i for i in ids if self.open.pop(i, None) is not None}
        if removed:
            self._pack()
        return removed

    def _pack(self) -> None:
        """Determine which of the assignments (attempts at tasks) in `open` run: those that fit together, in the order
        in which the supervisor starts them. All others are prefetched: they wait until a running one ends."""
        self._runs, self._memory, self._gpus = 0, 0, 0.0
        for kind in self.open.values():
            if self._runs == self.slots:
                break
            self._run_if_fits(kind)

    def _run_if_fits(self, kind: ResourceRequest) -> None:
        """Add an assignment (an attempt at a task) with the resources `kind` to the load of this worker, if it fits
        beside those that run here. If it does not fit, change nothing."""
        gpus = share(kind.gpus) if kind.gpus else 0.0
        if self._runs < self.slots and self._gpus + gpus <= self.gpus + 1e-6 and (
                not self._runs or self._memory + kind.memory_mb <= self.memory_mb):
            self._runs, self._memory = self._runs + 1, self._memory + kind.memory_mb
            self._gpus += gpus


WorkerT = TypeVar("WorkerT", bound=Capacity)


def room_in(workers: Sequence[Capacity], kind: ResourceRequest) -> int:
    """Returns the number of assignments (attempts at tasks) with the resources `kind` that would start immediately on
    these workers together. If none would start, returns 0 or a negative number, as `protocols.Backend.room_for` defines
    it. Tasks that wait at a full worker do not reduce the room of an idle worker."""
    free = sum(b.room(kind) for b in workers if b.has_slot)
    if free:
        return free
    prefetched = capacity = 0
    for worker in workers:
        if worker.reserved_for is None and (most := worker.capacity(kind)):
            prefetched, capacity = prefetched + worker.prefetched, capacity + most
    # prefetch at most one task for each that can run; more could wait long here while other workers become free
    return max(0, capacity - prefetched) - max(1, sum(b.slots for b in workers))


def best_first(workers: Sequence[WorkerT], kind: ResourceRequest) -> Iterator[WorkerT]:
    """Yields, for one assignment (an attempt at a task) after the other, the worker that should take it. All
    assignments declare the resources `kind`. The caller must add the assignment to this worker before it takes the next
    worker from the iterator. The worker is the one that `most_room` puts first. With n workers it is found in O(log n)
    time, while a call of `most_room` takes O(n)."""
    rooms = [(-room, place) for place, b in enumerate(workers) if b.has_slot and (room := b.room(kind))]
    heapq.heapify(rooms)
    while rooms:
        place = rooms[0][1]
        yield workers[place]
        if room := workers[place].room(kind):
            heapq.heapreplace(rooms, (-room, place))
        else:
            heapq.heappop(rooms)
    able = [(b.prefetched, place) for place, b in enumerate(workers)
            if b.reserved_for in (None, kind) and b.capacity(kind)]
    heapq.heapify(able)
    while able:
        place = able[0][1]
        yield workers[place]
        heapq.heapreplace(able, (workers[place].prefetched, place))


def most_room(workers: Sequence[WorkerT], kind: ResourceRequest) -> list[WorkerT]:
    """Returns the workers that may take an assignment (an attempt at a task) with the resources `kind`, best first. If
    some workers would start the assignment immediately, the others are left out, and the worker with most room comes
    first. Otherwise the worker with the fewest waiting assignments comes first. Equally good workers stay in the order
    of `workers`."""
    rooms = [(-room, place, b) for place, b in enumerate(workers) if b.has_slot and (room := b.room(kind))]
    if rooms:
        return [b for _, _, b in sorted(rooms)]
    able = [b for b in workers if b.reserved_for in (None, kind) and b.capacity(kind)]
    return sorted(able, key=lambda b: b.prefetched)


class StarvationGuard:
    """Makes sure that large tasks get to run. Small tasks would otherwise take all room that becomes free, and a large
    task would never fit.

    Tasks that declare the same resources are of one kind. A kind starves when its tasks wait, no worker has room for
    one, and no worker has one already. After PATIENCE_S seconds of this, one worker is reserved for the kind. It takes
    no tasks of other kinds until it has got a task of this kind, or until none of them waits."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._since: dict[ResourceRequest, float] = {}

    def observe(self, workers: Sequence[Capacity], waiting: Mapping[ResourceRequest, int], now: float) -> None:
        at_work = {kind for b in workers for kind in b.open.values()}
        starved = [k for k in waiting if k not in at_work and any(b.takes(k) for b in workers)
                   and not any(b.room(k) for b in workers)]
        self._since = {k: self._since.get(k, now) for k in starved}
        for worker in workers:
            if worker.reserved_for is not None and waiting.get(worker.reserved_for, 0) == 0:
                worker.reserved_for = None
        for kind, since in self._since.items():
            if now - since < self.patience_s or any(b.reserved_for == kind for b in workers):
                continue
            free = [b for b in workers if b.takes(kind) and b.reserved_for is None]
            if free:
                min(free, key=lambda b: len(b.open)).reserved_for = kind


@dataclass(frozen=True)
class ResourceShape:
    """The resources that a new supervisor (which runs tasks in child processes) reserves on its node. `memory_mb`
    includes OWN_MB, the memory of the supervisor without its children."""

    slots: int
    cpus: int
    memory_mb: int
    gpus: int = 0


@dataclass
class Available:
    """The resources of a node (machine) that neither our supervisors (which run tasks) nor other programs have
    reserved."""

    cpus: int
    memory_mb: int
    gpus: int = 0

    def less(self, shape: ResourceShape) -> Available:
        return Available(self.cpus - shape.cpus, self.memory_mb - shape.memory_mb, self.gpus - shape.gpus)

    def shape_for(self, kind: ResourceRequest, most: int = CPUS_A_WORKER) -> ResourceShape | None:
        """Returns the resources of a supervisor to start on this node for tasks that declare the resources `kind`. A
        supervisor runs tasks in child processes. Returns None if not a single task fits.

        For tasks without a GPU, the supervisor gets the free CPUs, up to the smaller of `most` and CPUS_A_WORKER. It
        gets the same share of the free memory, or more if a single task needs more.

        For GPU tasks, the supervisor gets all free GPUs, as many children as tasks fit on the GPUs, and one CPU for
        each child. One CPU of the node is left for tasks without a GPU. The supervisor's share of the free memory
        equals its share of the free CPUs. If the tasks declare more memory, it gets that much, as far as it is free."""
        need = kind.memory_mb + OWN_MB
        if need > self.memory_mb:
            return None
        if kind.gpus:
            children = per_devices(self.gpus, kind.gpus)
            if children < 1:
                return None
            cpus = max(0, min(self.cpus - 1, children))      # one CPU remains for tasks without a GPU
            memory = max(self.memory_mb * cpus // max(self.cpus, 1), children * kind.memory_mb + OWN_MB)
            return ResourceShape(children, cpus, min(memory, self.memory_mb), self.gpus)
        cpus = min(self.cpus, CPUS_A_WORKER, most)
        if cpus < 1:
            return None
        return ResourceShape(cpus, cpus, max(need, self.memory_mb * cpus // self.cpus))


def needs(kind: ResourceRequest) -> str:
    """Return, in words, the resources `kind` that a task declares: memory, GPUs and the type of CPU."""
    words = [f"{kind.memory_mb:,} MB of memory"]
    if kind.gpus:
        words.append(f"{kind.gpus:g} GPU" + ("s" if kind.gpus > 1 else ""))
    if kind.cpu:
        words.append(f"a CPU of type {kind.cpu} (its numeric stages are keyed by that of the driver)")
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


def cannot(kind: ResourceRequest, places: Iterable[tuple[str, int, float, str]]) -> str:
    """Returns, in words, why a task that declares the resources `kind` fits no node. `places` describes every node:
    (name, memory of the largest possible task in MB, GPUs, instruction-set family of the CPU or "")."""
    ordered = sorted(places, key=lambda p: (p[1], p[2], p[0]))
    if not ordered:
        return f"it declares {needs(kind)}, and there is no node"
    name, memory, gpus, _ = ordered[-1]
    tags = Counter(p[3] for p in ordered if p[3])
    reason = f"it declares {needs(kind)}; the largest node, {name}, can give a task {memory:,} MB and {gpus:g} GPUs"
    if kind.cpu and kind.cpu not in tags:
        reason += f", and the nodes are {', '.join(sorted(tags)) or 'of unknown type'}"
    return reason
