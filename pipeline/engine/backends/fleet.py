"""Which supervisors a cluster should have: where to start one, which must make way, what to ask an autoscaler for.

Decisions only, from plain numbers; `ray_backend` carries them out. The rules:

* A supervisor is started only for tasks that wait and find no room, never ahead of work; it takes the CPUs of its node
  (at most 16) with their part of the memory, or the GPUs (`pools.Available.shape_for`).
* A task that fits none of them, though it would fit a node, makes the supervisors of one node leave: they finish what
  they run, then one of the right shape takes their place.
* What fits no node at all is waited for (an autoscaler may bring one), and then ends the run by name.
* A supervisor that has had nothing to do for `idle_s` goes, so that its node can be given back.
* A node on which supervisors die one after the other, or do not come up, rests, each time for longer: an idle worker
  on a sick machine would draw tasks and lose them for as long as the run lasts.
* Whoever has to wait is told: at once where no node is large enough, after a while where others use the nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.backends.fingerprint import Fingerprint
from pipeline.engine.backends.pools import OWN_MB, Available, Capacity, ResourceShape, StarvationGuard, cannot, needs
from pipeline.engine.messages import Assignment
from pipeline.engine.task import ResourceRequest

FIT_S = 600.0            # how long a node is waited for that a task would fit on
IDLE_S = 60.0            # a supervisor without work goes after this
REST_S, LONGEST_REST_S = 2.0, 120.0
STEADY_S = 60.0          # a supervisor that lived so long has shown that its node is well
WAY_S = 30.0             # a place that was made is kept so long
PENDING_S = 120.0        # a supervisor that is not ready by then is given up: somebody else has what it was to get
TELL_S = 60.0            # for how long no supervisor takes a task that fits a node, until somebody is told
BLIND_S = 5.0            # longer than this between two looks: it is us who stood still
START_S = 600.0          # without a single supervisor ready: give up
MAX_DEATHS = 5           # supervisors that may die in a row without any becoming ready
MAX_DEMAND = 1000        # tasks an autoscaler is told of at a time

NOTHING = ResourceShape(0, 0, 0)

log = logging.getLogger("tokenmill")


@dataclass(frozen=True)
class Host:
    """A node: what it has, and what of it others than us have reserved. `largest_mb`: of a task that runs alone, where
    nothing is reserved (None: what the memory leaves)."""

    id: str
    name: str
    cpus: int
    memory_mb: int
    gpus: int = 0
    others: ResourceShape = NOTHING
    draining: bool = False
    largest_mb: int | None = None

    @property
    def largest(self) -> int:
        return self.memory_mb - OWN_MB if self.largest_mb is None else self.largest_mb

    def clamp(self, kind: ResourceRequest) -> ResourceRequest:
        """The kind as it counts here: what may run alone need not fit the memory that is free just now."""
        if kind.memory_mb > self.largest or self.largest_mb is None:
            return kind
        return kind._replace(memory_mb=max(1, min(kind.memory_mb, self.memory_mb - OWN_MB)))


@dataclass
class WorkerSlot(Capacity):
    """A supervisor on a node. It gets work once it is `ready`, and no more when it is `leaving` or does not answer."""

    host: str = ""
    number: int = 0                  # of our supervisors on that node
    shape: ResourceShape = NOTHING
    ready: bool = False
    leaving: bool = False
    late: bool = False
    drained: bool = False            # its node is about to go
    fingerprint: Fingerprint | None = None                       # once it has told it
    started: float = 0.0
    idle_since: float = 0.0
    served: bool = False             # it has had a task
    running: set[int] = field(default_factory=set)               # as it said last
    unsent: list[Assignment] = field(default_factory=list)       # assignments for its next poll
    actor: Any = None
    poll: Any = None                 # the poll in flight, None when there is none
    polled: float = 0.0              # when it began

    def add(self, id: int, kind: ResourceRequest) -> None:
        super().add(id, kind)
        self.served = True

    @property
    def usable(self) -> bool:
        return self.ready and not self.leaving and not self.late


@dataclass
class ScalingPlan:
    """`leave`: those that must finish and go. `demand`: tasks nobody has room for, by kind."""

    start: list[tuple[Host, int, ResourceShape]] = field(default_factory=list)
    leave: list[WorkerSlot] = field(default_factory=list)
    demand: dict[ResourceRequest, int] = field(default_factory=dict)


class Fleet:
    """The supervisors of a run. `workers` bounds the children that have no GPU (None: all CPUs); a node is waited for
    `fit_s` when a task fits none; `idle_s` None keeps idle supervisors."""

    def __init__(self, workers: int | None = None, *, fit_s: float = FIT_S, idle_s: float | None = IDLE_S) -> None:
        self.workers, self.fit_s, self.idle_s = workers, fit_s, idle_s
        self.worker_slots: dict[tuple[str, int], WorkerSlot] = {}
        self.hosts: dict[str, Host] = {}
        self.waiting: Mapping[ResourceRequest, int] = {}
        self.tags: dict[str, str] = {}               # CPU tags of nodes, as their supervisors said
        self.refused: dict[str, str] = {}            # node name → why
        self.guard = StarvationGuard()
        self._unfit: dict[ResourceRequest, float] = {}          # since when no node fits
        self._falls: dict[str, tuple[int, float]] = {}       # node → supervisors that died in a row, rest until
        self._way: dict[str, tuple[ResourceRequest, float]] = {}    # node → kind they leave for, last seen to
        self._said: set[tuple[str, ResourceRequest]] = set()
        self._waits: dict[ResourceRequest, float] = {}          # since when no supervisor takes them
        self._deaths, self._last_death = 0, ""       # of supervisors that were not ready, in a row
        self.alone_since: float | None = None        # since when one is wanted and none is ready
        self._looked = float("inf")

    @property
    def usable(self) -> list[WorkerSlot]:
        return [p for p in self.worker_slots.values() if p.usable]

    # -- what waits ----------------------------------------------------------------------------------------------
    def set_demand(self, waiting: Mapping[ResourceRequest, int], now: float) -> dict[ResourceRequest, str]:
        """Note what waits. Returns the kinds that no node fits, once they were waited for long enough."""
        self.waiting = waiting
        self.guard.look(self.usable, waiting, now)
        if not self.hosts:
            return {}
        missing = [k for k in waiting if not any(p.takes(k) for p in self.worker_slots.values())
                   and not any(self._could(h, k) for h in self.hosts.values())]
        for kind in missing:
            if kind not in self._unfit and self.fit_s:
                log.warning("waiting up to %.0f s for a node: a task cannot run yet: %s", self.fit_s, self._why(kind))
        self._unfit = {k: self._unfit.get(k, now) for k in missing}
        return {k: self._why(k) for k, since in self._unfit.items() if now - since >= self.fit_s}

    def _why(self, kind: ResourceRequest) -> str:
        able = [h for h in self._open_hosts() if h.cpus or h.gpus]
        return cannot(kind, ((h.name, h.largest, h.gpus, self.tags.get(h.id, "")) for h in able))

    def _open_hosts(self) -> list[Host]:
        return [h for h in self.hosts.values() if not h.draining and h.name not in self.refused]

    def _could(self, host: Host, kind: ResourceRequest) -> bool:
        """Whether one task of this kind fits this node when all of it is ours."""
        return (not host.draining and host.name not in self.refused
                and (not kind.cpu or self.tags.get(host.id, kind.cpu) == kind.cpu)
                and Available(host.cpus, host.memory_mb, host.gpus).shape_for(host.clamp(kind)) is not None)

    def look(self, now: float) -> None:
        """We are about to see who has answered. Time in which nobody looked counts for no supervisor: after a machine
        was suspended, or a driver stopped, their answers are still on their way."""
        if (blind := now - self._looked) > BLIND_S:
            for slot in self.worker_slots.values():
                slot.polled = min(now, slot.polled + blind)
                slot.started += 0.0 if slot.ready else min(now - slot.started, blind)
            if self.alone_since is not None:
                self.alone_since = min(now, self.alone_since + blind)
        self._looked = now

    # -- what to do ----------------------------------------------------------------------------------------------
    def plan(self, hosts: Iterable[Host], now: float) -> ScalingPlan:
        """Look at the nodes, and say what to start, whom to let go and what to wish for."""
        self.hosts = {h.id: h for h in sorted(hosts, key=lambda h: h.id)}
        orders = ScalingPlan()
        orders.leave += [p for p in self.worker_slots.values() if not p.leaving and p.host in self.hosts
                         and self.hosts[p.host].draining]
        for slot in orders.leave:
            slot.drained = True
        for slot in self.worker_slots.values():
            if not (slot.ready or slot.leaving or slot.drained) and now - slot.started > self._patience(slot.host):
                log.warning("node %s: a supervisor has not come up for %.0f s and is given up", slot.name,
                            now - slot.started)
                orders.leave.append(slot)
                self._fell(slot, now)
        free = {h.id: self._free(h) for h in self._open_hosts() if now >= self._falls.get(h.id, (0, 0.0))[1]}
        left = self._left()
        numbers = {h: {n for at, n in self.worker_slots if at == h} for h in free}
        ways = self._ways(free, orders, now)
        self._waits = {k: since for k, since in self._waits.items() if k in self.waiting}
        for kind in sorted(self.waiting, key=lambda k: (k not in ways, -k.gpus, -k.memory_mb, k.cpu)):
            able = self._able(kind, orders)
            short = self.waiting[kind] - sum(p.room(kind) for p in able)
            placed = 0
            for id, rest in free.items():
                host = self.hosts[id]
                if not self._could(host, kind):
                    self._pass_over(host, kind)
                    continue
                elsewhere = ways - {kind} and self.workers is not None and not kind.gpus
                if elsewhere or self._way.get(id, (kind, 0))[0] != kind:
                    continue                              # what becomes free is for the kind they make way for
                while short > placed and (shape := rest.shape_for(host.clamp(kind), left)) is not None:
                    number = next(n for n in range(len(numbers[id]) + 1) if n not in numbers[id])
                    numbers[id].add(number)
                    orders.start.append((host, number, shape))
                    rest = free[id] = rest.less(shape)
                    left -= 0 if shape.gpus else shape.slots
                    placed += self.slot(host, number, shape).capacity(kind)
            if short > placed:
                if not able and not placed and kind not in ways:
                    going = self._preempt(kind, free, orders)
                    orders.leave += going
                    self._way.update({p.host: (kind, now) for p in going})
                orders.demand[kind] = min(short - placed, MAX_DEMAND if kind.gpus else max(0, min(left, MAX_DEMAND)))
            if able or placed or kind in ways:
                self._waits.pop(kind, None)
            else:
                self._tell(kind, now)
        orders.leave += self._idle(now, orders)
        return orders

    def _ways(self, free: Mapping[str, Available], orders: ScalingPlan, now: float) -> set[ResourceRequest]:
        """Kinds for which supervisors make way: what becomes free on their node is for them, unless somebody else's
        programs were quicker."""
        for host, (kind, _) in list(self._way.items()):
            if any(p.leaving and p.host == host for p in self.worker_slots.values()):
                self._way[host] = kind, now
            if host not in free or kind not in self.waiting or self._able(kind, orders) \
                    or now - self._way[host][1] > WAY_S:
                del self._way[host]
        return {kind for kind, _ in self._way.values()}

    def _able(self, kind: ResourceRequest, orders: ScalingPlan) -> list[WorkerSlot]:
        """Supervisors, also those that are starting, that stay and take this kind."""
        return [p for p in self.worker_slots.values() if not p.leaving and p not in orders.leave and p.takes(kind)]

    def greeted(self, slot: WorkerSlot, now: float) -> None:
        """A supervisor has answered and may work."""
        slot.ready, slot.idle_since, self._deaths = True, now, 0

    def died(self, slot: WorkerSlot, now: float, why: str = "") -> None:
        """A supervisor is dead that should not be."""
        if not slot.ready:
            self._deaths, self._last_death = self._deaths + 1, why
        self._fell(slot, now)

    def _fell(self, slot: WorkerSlot, now: float) -> None:
        """It died, or did not come up. The first time another one follows at once, and so it does while there is no
        other node: then the run is to end soon."""
        before = 0 if slot.ready and now - slot.started > STEADY_S else self._falls.get(slot.host, (0, 0.0))[0]
        alone = not slot.ready and not self._well()
        rest = min(LONGEST_REST_S, REST_S * 2 ** before) if before and not alone else 0.0
        self._falls[slot.host] = before + 1, now + rest
        if rest > 10:
            log.warning("node %s lost %d supervisors in a row: it gets no work for %.0f s", slot.name, before + 1, rest)

    def _well(self) -> bool:
        """Whether there is a supervisor, maybe still starting, on a node where none has died of late."""
        return any(p.ready or p.host not in self._falls for p in self.worker_slots.values())

    def _patience(self, host: str) -> float:
        """Seconds until a supervisor must be ready. Each one that failed doubles them, up to eight times as
        long: a slow machine would otherwise never get one up."""
        return PENDING_S * float(2 ** min(self._falls.get(host, (0, 0.0))[0], 3))

    def stuck(self, now: float) -> str | None:
        """Why waiting for supervisors any longer makes no sense; None while it does."""
        if any(p.ready for p in self.worker_slots.values()) or not self.waiting:
            self.alone_since = None
            return None
        if self.alone_since is None:
            self.alone_since = now
        if self._deaths >= MAX_DEATHS and not self._well():
            return f"supervisors die before they are ready: {self._last_death}"
        if self.refused and not self.worker_slots and all(h.name in self.refused for h in self.hosts.values()
                                                   if h.cpus or h.gpus):
            return "no node runs what the driver runs: " + " | ".join(
                f"{name}: {why}" for name, why in sorted(self.refused.items())) + \
                ". Install the same version on every node, or send the code along with --ship-code"
        if now - self.alone_since > START_S:
            return (f"no supervisor got its resources within {START_S:.0f} s ({self._places(self.hosts.values())}); "
                    f"stop what else runs there or ask for fewer --workers")
        return None

    def _tell(self, kind: ResourceRequest, now: float) -> None:
        """Say once that tasks wait for a place that somebody else has. (What fits no node is told by `set_demand`.)"""
        able = [h for h in self.hosts.values() if self._could(h, kind)]
        if not able or not self._waits.setdefault(kind, now) + TELL_S <= now or ("", kind) in self._said:
            return
        self._said.add(("", kind))
        log.warning("%d tasks that declare %s have been waiting for %.0f s for a place: %s", self.waiting[kind],
                    needs(kind), now - self._waits[kind],
                    f"--workers {self.workers} are at work" if self._left() < 1 and not kind.gpus
                    else self._places(able))

    @staticmethod
    def _places(hosts: Iterable[Host]) -> str:
        """Nodes, with what others use of them, in words: ten at most."""
        found = [f"{h.name}: others use {h.others.cpus} of {h.cpus} CPUs, {h.others.memory_mb:,} of {h.memory_mb:,} MB"
                 + (f", {h.others.gpus} of {h.gpus} GPUs" if h.gpus else "") for h in hosts]
        return "; ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "") or "there is no node"

    def slot(self, host: Host, number: int, shape: ResourceShape) -> WorkerSlot:
        """The supervisor of this shape; it is not one of ours yet."""
        return WorkerSlot(shape.slots, max(1, shape.memory_mb - OWN_MB), shape.gpus, self.tags.get(host.id, ""),
                          host.name, host.largest_mb or 0, host=host.id, number=number, shape=shape)

    def _left(self) -> int:
        taken = sum(p.slots for p in self.worker_slots.values() if not p.gpus)
        return self.workers - taken if self.workers is not None else 1 << 30

    def _free(self, host: Host) -> Available:
        free = Available(host.cpus, host.memory_mb, host.gpus).less(host.others)
        for slot in self.worker_slots.values():
            if slot.host == host.id:
                free = free.less(slot.shape)
        return free

    def _preempt(self, kind: ResourceRequest, free: Mapping[str, Available], orders: ScalingPlan) -> list[WorkerSlot]:
        """Supervisors that must leave one node so that a task of this kind finds its place there: those with the least
        to do, on the node where that is least. One that has not had a task yet stays, or kinds would drive each other
        away for ever. None while any leave already: their place may be what it takes."""
        if orders.leave or any(p.leaving for p in self.worker_slots.values()):
            return []
        best: tuple[int, list[WorkerSlot]] | None = None
        for host in (self.hosts[id] for id in free):
            if not self._could(host, kind):
                continue
            room, left, going = free[host.id], self._left(), []
            movable = [p for p in self.worker_slots.values() if p.host == host.id and p.ready
                       and (p.served or not any(p.takes(k) for k in self.waiting))]
            for slot in sorted(movable, key=lambda p: (len(p.open), p.number)):
                going.append(slot)
                room = Available(room.cpus + slot.shape.cpus, room.memory_mb + slot.shape.memory_mb,
                            room.gpus + slot.shape.gpus)
                left += 0 if slot.gpus else slot.slots
                if room.shape_for(host.clamp(kind), left) is not None:
                    cost = sum(len(p.open) for p in going)
                    if best is None or cost < best[0]:
                        best = cost, going
                    break
        return best[1] if best else []

    def _idle(self, now: float, orders: ScalingPlan) -> list[WorkerSlot]:
        found = []
        for slot in self.worker_slots.values():
            if slot.open or not slot.ready or any(slot.takes(k) for k in self.waiting):
                slot.idle_since = now
            elif self.idle_s is not None and now - slot.idle_since > self.idle_s and not slot.leaving \
                    and slot not in orders.leave:
                found.append(slot)
        return found

    def _pass_over(self, host: Host, kind: ResourceRequest) -> None:
        """Say once that a node is too small for some tasks."""
        if (host.name, kind) in self._said or kind.gpus > host.gpus or host.largest >= kind.memory_mb:
            return
        self._said.add((host.name, kind))
        log.warning("node %s is passed over for tasks that declare %s: it can give a task %d MB",
                    host.name, needs(kind), max(0, host.largest))
