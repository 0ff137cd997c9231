"""Decides which supervisors a cluster should have: where to start one, which to preempt, and what to request from an
autoscaler. A supervisor is an actor that runs tasks in child processes on a node (a machine of the cluster).

This module only decides, from plain numbers; `ray_backend` carries the decisions out. The rules:

* A supervisor is started only for waiting tasks that find no room, never in advance. It takes the free CPUs of its node
  (at most 16) with the same share of the free memory, or all GPUs of the node (`pools.Available.shape_for`).
* A task may fit no supervisor although it would fit a node. Supervisors of one node are then preempted: they finish the
  tasks they run and end, and a supervisor with enough memory or GPUs takes their place.
* A task that fits no node at all waits for a larger node, which an autoscaler may add. After `fit_s` seconds the run
  ends with an error that names the task.
* A supervisor that has been idle for `idle_s` seconds ends, so that its node can be given back.
* A node on which several supervisors in a row died or did not start gets no supervisor for a while. Each further death
  makes this pause longer. Otherwise a faulty machine would receive tasks and lose them as long as the run lasts.
* A node that is draining (about to be taken away) gets no supervisor. Its present supervisors hand back the tasks that
  they have not begun.
* The user is warned of waiting tasks: at once if no node is large enough, and after WARN_S seconds if other programs
  use all nodes that are large enough, or if all `workers` are busy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.engine.backends.nodes import Host, WorkerSlot
from pipeline.engine.backends.pools import OWN_MB, Available, ResourceShape, StarvationGuard, cannot, needs
from pipeline.engine.task import ResourceRequest

FIT_S = 600.0            # seconds a task waits for a node that it fits on
IDLE_S = 60.0            # seconds after which a supervisor without work ends
REST_S, LONGEST_REST_S = 2.0, 120.0
STEADY_S = 60.0          # seconds a supervisor lives until its node's record of crashes is cleared
PREEMPT_S = 30.0         # seconds that preempted room stays reserved
PENDING_S = 120.0        # seconds until a supervisor that is not ready is given up: other programs have its resources
WARN_S = 60.0            # seconds without a supervisor for a task that fits a node, until the user is warned
BLIND_S = 5.0            # a longer gap between two polls means that this driver stood still, not the supervisors
START_S = 600.0          # seconds without a single ready supervisor after which the run ends
MAX_DEATHS = 5           # supervisors that may die in a row before any of them is ready
MAX_DEMAND = 1000        # most tasks for which an autoscaler is asked to make room at a time

log = logging.getLogger("tokenmill")


@dataclass
class ScalingPlan:
    """The decisions about supervisors (actors that run tasks on the nodes) at one moment. `start`: supervisors to
    start, as (node, number of the supervisor on the node, its resources). `leave`: supervisors that must finish their
    tasks and end. `demand`: for each kind of task (tasks that declare the same resources), the number of tasks for
    which an autoscaler should add nodes. It counts the tasks for which neither the present supervisors nor those of
    `start` have room, up to MAX_DEMAND. Tasks without a GPU are counted only as far as `workers` allows further
    children."""

    start: list[tuple[Host, int, ResourceShape]] = field(default_factory=list)
    leave: list[WorkerSlot] = field(default_factory=list)
    demand: dict[ResourceRequest, int] = field(default_factory=dict)


class Fleet:
    """Keeps the supervisors of a run (actors that run tasks in child processes on the nodes of a cluster), and decides
    which of them to start and to end. `workers` bounds the number of child processes without a GPU (None: all CPUs).
    `fit_s`: seconds that a task waits for a larger node if it fits no node of the cluster. `idle_s`: seconds until an
    idle supervisor ends (None: never)."""

    def __init__(self, workers: int | None = None, *, fit_s: float = FIT_S, idle_s: float | None = IDLE_S) -> None:
        self.workers, self.fit_s, self.idle_s = workers, fit_s, idle_s
        self.worker_slots: dict[tuple[str, int], WorkerSlot] = {}
        self.hosts: dict[str, Host] = {}
        self.waiting: Mapping[ResourceRequest, int] = {}
        self.tags: dict[str, str] = {}               # node → CPU tag, from its supervisors' fingerprints
        self.refused: dict[str, str] = {}            # node name → why it is refused
        self.guard = StarvationGuard()
        self._unfit_since: dict[ResourceRequest, float] = {}         # kinds that fit no node
        self._crashes: dict[str, tuple[int, float]] = {}             # node → (crashes in a row, end of its pause)
        #: node on which supervisors were preempted → the kind of task that gets their room, and when one of them was
        #: last seen leaving
        self._preempted: dict[str, tuple[ResourceRequest, float]] = {}
        self._warned: set[tuple[str, ResourceRequest]] = set()
        self._unplaced_since: dict[ResourceRequest, float] = {}      # kinds that no supervisor takes
        self._deaths, self._last_death = 0, ""       # supervisors that died before they were ready, in a row
        self.alone_since: float | None = None        # since when a supervisor is needed and none is ready
        self._polled_at = float("inf")

    @property
    def usable(self) -> list[WorkerSlot]:
        return [p for p in self.worker_slots.values() if p.usable]

    # -- what waits ----------------------------------------------------------------------------------------------
    def set_demand(self, waiting: Mapping[ResourceRequest, int], now: float) -> dict[ResourceRequest, str]:
        """Set how many tasks of each kind wait to run. Tasks that declare the same resources are of one kind. Returns
        {kind: reason} for the kinds that have fitted no node for `fit_s` seconds, because they need more memory or GPUs
        or another type of CPU. Returns {} until `plan` has been called."""
        self.waiting = waiting
        self.guard.observe(self.usable, waiting, now)
        if not self.hosts:
            return {}
        missing = [k for k in waiting if not any(p.takes(k) for p in self.worker_slots.values())
                   and not any(self._could_run(h, k) for h in self.hosts.values())]
        for kind in missing:
            if kind not in self._unfit_since and self.fit_s:
                log.warning("waiting up to %.0f s for a node: a task cannot run yet: %s", self.fit_s, self._why(kind))
        self._unfit_since = {k: self._unfit_since.get(k, now) for k in missing}
        return {k: self._why(k) for k, since in self._unfit_since.items() if now - since >= self.fit_s}

    def _why(self, kind: ResourceRequest) -> str:
        able = [h for h in self._open_hosts() if h.cpus or h.gpus]
        return cannot(kind, ((h.name, h.largest, h.gpus, self.tags.get(h.id, "")) for h in able))

    def _open_hosts(self) -> list[Host]:
        return [h for h in self.hosts.values() if not h.draining and h.name not in self.refused]

    def _could_run(self, host: Host, kind: ResourceRequest) -> bool:
        """Whether a task that declares the resources `kind` would fit this node if neither other programs nor our
        supervisors (actors that run tasks) used the node. No task fits a node that is draining (about to be taken away)
        or was refused (because of its code, or because it does not see the store)."""
        return (not host.draining and host.name not in self.refused
                and (not kind.cpu or self.tags.get(host.id, kind.cpu) == kind.cpu)
                and Available(host.cpus, host.memory_mb, host.gpus).shape_for(host.clamp(kind)) is not None)

    def before_poll(self, now: float) -> None:
        """Discount the time in which this driver did not run, because its machine was suspended or its process was
        stopped. The answers of supervisors (actors that run tasks) could not arrive in that time, so it must not make
        any supervisor count as late."""
        if (blind := now - self._polled_at) > BLIND_S:
            for slot in self.worker_slots.values():
                slot.polled = min(now, slot.polled + blind)
                slot.started += 0.0 if slot.ready else min(now - slot.started, blind)
            if self.alone_since is not None:
                self.alone_since = min(now, self.alone_since + blind)
        self._polled_at = now

    # -- what to do ----------------------------------------------------------------------------------------------
    def plan(self, hosts: Iterable[Host], now: float) -> ScalingPlan:
        """Decide which supervisors (actors that run tasks) to start and to end on the existing nodes, and for how many
        tasks the autoscaler should add nodes."""
        self.hosts = {h.id: h for h in sorted(hosts, key=lambda h: h.id)}
        plan = ScalingPlan()
        plan.leave += [p for p in self.worker_slots.values() if not p.leaving and p.host in self.hosts
                         and self.hosts[p.host].draining]
        for slot in plan.leave:
            slot.drained = True
        for slot in self.worker_slots.values():
            if not (slot.ready or slot.leaving or slot.drained) and now - slot.started > self._patience(slot.host):
                log.warning("node %s: a supervisor has not come up for %.0f s and is given up", slot.name,
                            now - slot.started)
                plan.leave.append(slot)
                self._crashed(slot, now)
        free = {h.id: self._free(h) for h in self._open_hosts() if now >= self._crashes.get(h.id, (0, 0.0))[1]}
        spare = self._spare_children()
        numbers = {h: {n for node, n in self.worker_slots if node == h} for h in free}
        preempting = self._preempting_for(free, plan, now)
        self._unplaced_since = {k: since for k, since in self._unplaced_since.items() if k in self.waiting}
        for kind in sorted(self.waiting, key=lambda k: (k not in preempting, -k.gpus, -k.memory_mb, k.cpu)):
            able = self._takers(kind, plan)
            short = self.waiting[kind] - sum(p.room(kind) for p in able)
            placed = 0
            for id, room in free.items():
                host = self.hosts[id]
                if not self._could_run(host, kind):
                    self._warn_too_small(host, kind)
                    continue
                elsewhere = preempting - {kind} and self.workers is not None and not kind.gpus
                if elsewhere or self._preempted.get(id, (kind, 0))[0] != kind:
                    continue                              # freed room is reserved for the kind that preempted
                while short > placed and (shape := room.shape_for(host.clamp(kind), spare)) is not None:
                    number = next(n for n in range(len(numbers[id]) + 1) if n not in numbers[id])
                    numbers[id].add(number)
                    plan.start.append((host, number, shape))
                    room = free[id] = room.less(shape)
                    spare -= 0 if shape.gpus else shape.slots
                    placed += self.slot(host, number, shape).capacity(kind)
            if short > placed:
                if not able and not placed and kind not in preempting:
                    going = self._preempt(kind, free, plan)
                    plan.leave += going
                    self._preempted.update({p.host: (kind, now) for p in going})
                plan.demand[kind] = min(short - placed, MAX_DEMAND if kind.gpus else max(0, min(spare, MAX_DEMAND)))
            if able or placed or kind in preempting:
                self._unplaced_since.pop(kind, None)
            else:
                self._warn_of_waiting(kind, now)
        plan.leave += self._idle(now, plan)
        return plan

    def _preempting_for(self, free: Mapping[str, Available], plan: ScalingPlan, now: float) -> set[ResourceRequest]:
        """Returns the kinds of tasks for which supervisors (actors that run tasks) were preempted, that is, made to
        end. Tasks of one kind declare the same resources. The room that these supervisors leave on their nodes is
        reserved for these kinds, for at most PREEMPT_S seconds after the last of them has left."""
        for host, (kind, _) in list(self._preempted.items()):
            if any(p.leaving and p.host == host for p in self.worker_slots.values()):
                self._preempted[host] = kind, now
            if host not in free or kind not in self.waiting or self._takers(kind, plan) \
                    or now - self._preempted[host][1] > PREEMPT_S:
                del self._preempted[host]
        return {kind for kind, _ in self._preempted.values()}

    def _takers(self, kind: ResourceRequest, plan: ScalingPlan) -> list[WorkerSlot]:
        """Returns the supervisors (actors that run tasks) that can take a task that declares the resources `kind`.
        Supervisors that are still starting are included, those that are about to end are not."""
        return [p for p in self.worker_slots.values() if not p.leaving and p not in plan.leave and p.takes(kind)]

    def greeted(self, slot: WorkerSlot, now: float) -> None:
        """Note that a supervisor (an actor that runs tasks) has answered for the first time and may get tasks."""
        slot.ready, slot.idle_since, self._deaths = True, now, 0

    def died(self, slot: WorkerSlot, now: float, why: str = "") -> None:
        """Note that a supervisor (an actor that runs tasks) died although it was not asked to end."""
        if not slot.ready:
            self._deaths, self._last_death = self._deaths + 1, why
        self._crashed(slot, now)

    def _crashed(self, slot: WorkerSlot, now: float) -> None:
        """Note that a supervisor (an actor that runs tasks) died or did not start. From the second such crash in a row
        on, its node gets no supervisor for a while.

        There is one exception: a failed start causes no pause if no supervisor is ready, and none is starting on a node
        without crashes. Otherwise a run whose supervisors never start would wait through longer and longer pauses
        before it ends (`stuck`).
        """
        before = 0 if slot.ready and now - slot.started > STEADY_S else self._crashes.get(slot.host, (0, 0.0))[0]
        alone = not slot.ready and not self._any_sound()
        pause_s = min(LONGEST_REST_S, REST_S * 2 ** before) if before and not alone else 0.0
        self._crashes[slot.host] = before + 1, now + pause_s
        if pause_s > 10:
            log.warning("node %s lost %d supervisors in a row: it gets no work for %.0f s", slot.name, before + 1,
                        pause_s)

    def _any_sound(self) -> bool:
        """Whether any supervisor (an actor that runs tasks) is ready, or is starting on a node that has had no recent
        crash."""
        return any(p.ready or p.host not in self._crashes for p in self.worker_slots.values())

    def _patience(self, host: str) -> float:
        """Returns the seconds within which a new supervisor (an actor that runs tasks) on this node must be ready. Each
        failed start on the node doubles this time, up to eight times PENDING_S. With a fixed time, no supervisor would
        ever become ready on a very slow machine."""
        return PENDING_S * float(2 ** min(self._crashes.get(host, (0, 0.0))[0], 3))

    def stuck(self, now: float) -> str | None:
        """Returns the reason why no supervisor (an actor that runs tasks) can be expected to become ready. Returns None
        if one is ready or may still become ready, or if no task waits."""
        if any(p.ready for p in self.worker_slots.values()) or not self.waiting:
            self.alone_since, self._deaths, self._last_death = None, 0, ""
            return None
        if self.alone_since is None:
            self.alone_since = now
        if self._deaths >= MAX_DEATHS and not self._any_sound():
            return f"supervisors die before they are ready: {self._last_death}"
        if self.refused and not self.worker_slots and all(h.name in self.refused for h in self.hosts.values()
                                                   if h.cpus or h.gpus):
            return "no node has the code and libraries of the driver: " + " | ".join(
                f"{name}: {why}" for name, why in sorted(self.refused.items())) + \
                ". Install the same version on every node, or send the code along with --ship-code"
        if now - self.alone_since > START_S:
            died = f"; {self._deaths} died before that, the last one: {self._last_death}" if self._deaths else ""
            return (f"no supervisor was ready within {START_S:.0f} s ({self._places(self.hosts.values())}){died}; stop "
                    f"other programs there, ask for fewer --workers, or see in Ray's logs why starting takes so long")
        return None

    def _warn_of_waiting(self, kind: ResourceRequest, now: float) -> None:
        """Warn once that tasks that declare the resources `kind` have waited for WARN_S seconds although they would fit
        a node, because other programs use that node or all `workers` are busy. `set_demand` warns of tasks that fit no
        node."""
        able = [h for h in self.hosts.values() if self._could_run(h, kind)]
        if not able or not self._unplaced_since.setdefault(kind, now) + WARN_S <= now or ("", kind) in self._warned:
            return
        self._warned.add(("", kind))
        log.warning("%d tasks that declare %s have been waiting for %.0f s for a place: %s", self.waiting[kind],
                    needs(kind), now - self._unplaced_since[kind],
                    f"all --workers {self.workers} are busy" if self._spare_children() < 1 and not kind.gpus
                    else self._places(able))

    @staticmethod
    def _places(hosts: Iterable[Host]) -> str:
        """Returns text that names at most ten of these nodes, and says how much of each other programs use."""
        result = [f"{h.name}: others use {h.others.cpus} of {h.cpus} CPUs, {h.others.memory_mb:,} of {h.memory_mb:,} MB"
                 + (f", {h.others.gpus} of {h.gpus} GPUs" if h.gpus else "") for h in hosts]
        more = f" and {len(result) - 10} more" if len(result) > 10 else ""
        return "; ".join(result[:10]) + more or "there is no node"

    def slot(self, host: Host, number: int, shape: ResourceShape) -> WorkerSlot:
        """Returns the object that describes a supervisor (an actor that runs tasks) with these resources on this node.
        The supervisor is not started yet."""
        return WorkerSlot(shape.slots, max(1, shape.memory_mb - OWN_MB), shape.gpus, self.tags.get(host.id, ""),
                          host.name, host.largest_mb or 0, host=host.id, number=number, shape=shape)

    def _spare_children(self) -> int:
        in_use = sum(p.slots for p in self.worker_slots.values() if not p.gpus)
        return self.workers - in_use if self.workers is not None else 1 << 30

    def _free(self, host: Host) -> Available:
        free = Available(host.cpus, host.memory_mb, host.gpus).less(host.others)
        for slot in self.worker_slots.values():
            if slot.host == host.id:
                free = free.less(slot.shape)
        return free

    def _preempt(self, kind: ResourceRequest, free: Mapping[str, Available], plan: ScalingPlan) -> list[WorkerSlot]:
        """Chooses supervisors (actors that run tasks) that must leave one node so that a task that declares the
        resources `kind` fits there, and returns them. The node is the one where the fewest tasks are affected, and on
        it supervisors with few tasks leave first. A supervisor that has had no task yet stays if waiting tasks can use
        it; otherwise two kinds would preempt each other for ever. Returns [] while any supervisor is leaving, because
        the room that the leaving supervisor frees may suffice."""
        if plan.leave or any(p.leaving for p in self.worker_slots.values()):
            return []
        best: tuple[int, list[WorkerSlot]] | None = None
        for host in (self.hosts[id] for id in free):
            if not self._could_run(host, kind):
                continue
            room, spare, going = free[host.id], self._spare_children(), []
            movable = [p for p in self.worker_slots.values() if p.host == host.id and p.ready
                       and (p.served or not any(p.takes(k) for k in self.waiting))]
            for slot in sorted(movable, key=lambda p: (len(p.open), p.number)):
                going.append(slot)
                room = Available(room.cpus + slot.shape.cpus, room.memory_mb + slot.shape.memory_mb,
                            room.gpus + slot.shape.gpus)
                spare += 0 if slot.gpus else slot.slots
                if room.shape_for(host.clamp(kind), spare) is not None:
                    cost = sum(len(p.open) for p in going)
                    if best is None or cost < best[0]:
                        best = cost, going
                    break
        return best[1] if best else []

    def _idle(self, now: float, plan: ScalingPlan) -> list[WorkerSlot]:
        result = []
        for slot in self.worker_slots.values():
            if slot.open or not slot.ready or any(slot.takes(k) for k in self.waiting):
                slot.idle_since = now
            elif self.idle_s is not None and now - slot.idle_since > self.idle_s and not slot.leaving \
                    and slot not in plan.leave:
                result.append(slot)
        return result

    def _warn_too_small(self, host: Host, kind: ResourceRequest) -> None:
        """Warn, once per node and `kind` (the resources that a task declares), that the node has too little memory for
        such a task."""
        if (host.name, kind) in self._warned or kind.gpus > host.gpus or host.largest >= kind.memory_mb:
            return
        self._warned.add((host.name, kind))
        log.warning("node %s is skipped for tasks that declare %s: it can give a task %d MB",
                    host.name, needs(kind), max(0, host.largest))
