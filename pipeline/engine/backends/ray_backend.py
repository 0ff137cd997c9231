"""The Ray backend: runs tasks through supervisors on the nodes of a Ray cluster. A supervisor is a Ray actor that runs
tasks in child processes of its own. The cluster is one that this backend starts on this machine, or an existing one. In
the engine, only this module and the modules `ray_*` beside it use Ray.

Ray starts the supervisors and carries messages of a few kB; documents never travel through it. Ray's restarts and
retries are off, because the scheduler itself repeats the tasks of a dead node. A supervisor is a synchronous actor, so
its `poll` always runs on the main thread of its worker process. This is necessary because the kernel kills a child
process when the thread that started it ends. Each supervisor has at most one poll in flight. The module `fleet` decides
which supervisors to start and to end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.base import confinement
from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.errors import TokenmillError
from pipeline.base.scratch import Scratch
from pipeline.engine.backends.fingerprint import (
    Fingerprint,
    code_hash,
    declared_libraries,
    differences,
    fingerprint,
    roots,
)
from pipeline.engine.backends.fleet import IDLE_S, Fleet
from pipeline.engine.backends.head import watch_head
from pipeline.engine.backends.nodes import NOTHING, Host, WorkerSlot
from pipeline.engine.backends.placing import Placement
from pipeline.engine.backends.pools import OWN_MB, ResourceShape, room_in
from pipeline.engine.backends.ray_deaths import cause
from pipeline.engine.backends.ray_demand import PendingDemand
from pipeline.engine.backends.ray_local import attach, start_local
from pipeline.engine.backends.ray_metrics import Exporter
from pipeline.engine.backends.ray_supervisor import SupervisorActor
from pipeline.engine.messages import (
    EVENTS,
    Assignment,
    Done,
    Event,
    Failed,
    Lost,
    ProtocolError,
    Ready,
    Returned,
    StatusReport,
    encode,
)
from pipeline.engine.task import ResourceRequest
from pipeline.engine.worker import limits as measure
from pipeline.engine.worker.limits import ProcessLimits
from pipeline.store.disk import WITNESS
from pipeline.store.fs import Store

POLL_S = 1.0             # longest time in seconds that a supervisor holds a poll
MESSAGES_PER_S = 100     # answers of all supervisors together; each costs the driver CPU time
GROW_S = 2.0             # seconds between two inspections of the cluster
LATE_S = 10.0            # a supervisor whose answer is this late (s, beyond POLL_S) gets no new work until it answers
SILENT_S = 90.0          # a supervisor that has not answered a poll for so long (s) counts as dead (Ray notices a
                         # stopped node after about as long)

log = logging.getLogger("tokenmill")


class NoNodes(TokenmillError):
    """Raised when no supervisor (an actor that runs tasks) works and none will: all nodes were refused, supervisors die
    before they are ready, or none was ready in time. The message says why."""


class RayBackend:
    """Runs tasks on Ray: on a cluster that it starts on this machine (`address` None), or on the cluster at `address`.
    If this process is already connected to a Ray cluster, that cluster is used, and the connection stays open at the
    end.

    Tasks run in child processes of supervisors, which are actors on the nodes. `workers` bounds the number of children
    without a GPU (default: one per CPU). Supervisors start while tasks find no room, and end after `idle_s` idle
    seconds (in a cluster that this backend starts, only at the end). If the nodes of an existing cluster have no room
    left, Ray's autoscaler is asked for more nodes. The first supervisor is planned before `set_demand` says what tasks
    wait. It gets enough memory for a task of `child_memory_mb`, or of the `memory_mb` that `start` gets if that is
    more.

    `ship_code` sends Tokenmill's packages to the nodes of the cluster at `address` (Ray's `py_modules`). Without it,
    the packages must be installed on every node.
    """

    interruptible = False

    def __init__(self, store: Store, workers: int | None = None, address: str | None = None, *,
                 object_store_mb: int = 200, child_memory_mb: int = 500, limits: ProcessLimits | None = None,
                 scratch: str | None = None, ship_code: bool = False, idle_s: float = IDLE_S,
                 clock: Clock = SYSTEM) -> None:
        self.ship_code, self._clock = ship_code, clock
        self.store, self.workers, self.address = store, workers, address
        self.object_store_mb, self.child_memory_mb = object_store_mb, child_memory_mb
        self.limits, self.scratch = limits or ProcessLimits(), scratch
        self.fleet = Fleet(workers, idle_s=idle_s)
        self.nodes_lost = 0                           # supervisors that died after they were ready
        self._placement = Placement(lambda: self.fleet.usable)
        self._demand = PendingDemand()
        self._returned: list[Event] = []            # events for the next `wait`
        self._head: threading.Event | None = None     # set to end the watch over Ray's head
        self._started = self._own = False
        self._temp: Scratch | None = None
        self._witness: str | None = None
        self._gaps: set[str] = set()                  # gaps of confinement that the user was warned of
        self._libraries = declared_libraries()
        self._own_fingerprint: Fingerprint | None = None        # fingerprint of this process at its start
        self._planned_at = float("-inf")
        self._exporter = Exporter()

    # -- start and end -------------------------------------------------------------------------------------------
    def start(self, memory_mb: int = 0) -> None:
        if self._started:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not ray.is_initialized():
            if self.address is not None:
                attach(self.address, [r for r in roots().values() if r] if self.ship_code else [])
            else:
                base = tempfile.gettempdir()          # Ray's sockets lie below; their paths have at most 107 characters
                self._temp = Scratch(base if len(base) <= 8 else "/tmp")
                start_local(self.workers or len(os.sched_getaffinity(0)), self.object_store_mb, self._temp.path)
                # a cluster of our own: no node joins it, and no other program uses it
                self.fleet.fit_s, self.fleet.idle_s = 0.0, None
            self._own = True
        if self._temp is None:
            self._head = watch_head(ray.get_runtime_context().gcs_address)
        if self._temp is None and self.store.local is not None:
            self._witness = f"runs/{WITNESS}{self._clock.new_id()}"    # on a cluster a local path must be a shared one
            self.store.write(self._witness, b"")
        self.fleet.waiting = {ResourceRequest(max(self.child_memory_mb, memory_mb)): 1}   # until `set_demand` is called
        self._own_fingerprint = fingerprint(self._libraries)    # taken now: files edited later must not change it
        self._started, self.fleet.alone_since = True, None

    def close(self) -> None:
        """End all supervisors (actors that run tasks) with their children. If this backend started the cluster, end the
        cluster; if it connected to one, disconnect."""
        if self._head is not None:
            self._head.set()
        worker_slots, self.fleet.worker_slots = list(self.fleet.worker_slots.values()), {}
        if ray.is_initialized():
            self._demand.show({})
            self._dismiss(worker_slots, 5.0)
            if self._own:
                ray.shutdown()
        if self._witness is not None:
            with contextlib.suppress(OSError):
                self.store.remove(self._witness)
        if self._temp is not None:
            self._temp.close()
        self._started, self._own, self._temp, self._witness = False, False, None, None

    # -- what the scheduler uses ---------------------------------------------------------------------------------
    @property
    def slots(self) -> int:
        return sum(p.slots for p in self.fleet.usable)

    def set_demand(self, waiting: Mapping[ResourceRequest, int]) -> Mapping[ResourceRequest, str]:
        if set(waiting) - set(self.fleet.waiting):
            self._planned_at = float("-inf")               # a new kind of task: plan supervisors for it now
        return self.fleet.set_demand(waiting, self._clock.now())

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        self._placement.place()
        return room_in(self.fleet.usable, ResourceRequest(memory_mb, gpus, cpu))

    def submit(self, assignment: Assignment) -> None:
        self._placement.submit(assignment)

    def cancel(self, ids: list[int]) -> None:
        self._placement.place()
        for slot in self.fleet.worker_slots.values():
            removed = self._placement.settle(slot, ids)
            slot.unsent = [a for a in slot.unsent if a.id not in removed]
            if removed:
                slot.actor.cancel.remote(sorted(removed))  # runs after the poll in flight, whose events may still come

    def wait(self, timeout: float) -> list[Event]:
        self._placement.place()
        now = self._clock.now()
        self.fleet.before_poll(now)
        if due := now - self._planned_at > GROW_S:
            self._planned_at = now
            self._scale(now)
        self._dismiss([p for p in self.fleet.worker_slots.values() if p.leaving and not p.open])
        for slot in self.fleet.worker_slots.values():
            if slot.poll is None and slot.open:
                linger = min(POLL_S, len(self.fleet.worker_slots) / MESSAGES_PER_S)
                slot.poll, slot.polled = slot.actor.poll.remote([encode(a) for a in slot.unsent], POLL_S, linger), now
                slot.unsent = []
        polls = {p.poll: p for p in self.fleet.worker_slots.values() if p.poll is not None}
        events, self._returned = self._returned, []
        if not polls:
            self._check_any()
            if not (events or due):
                self._clock.sleep(min(timeout, 0.2))
            return events + self._report(due)
        done, _ = ray.wait(list(polls), timeout=0 if events or due else timeout)
        if done:                                           # and all other polls that are ready by now
            done, _ = ray.wait(list(polls), num_returns=len(polls), timeout=0)
        for ref in done:
            slot = polls.pop(ref)
            slot.poll, slot.late = None, False
            try:
                answer = ray.get(ref)
            except RayError as e:
                events += self._handle_death(slot, cause(e), getattr(e, "preempted", False))
                continue
            try:
                events += self._handle_events(slot, [EVENTS.decode(e) for e in answer])
            except ProtocolError as e:
                events += self._handle_death(slot, f"it does not speak the engine's protocol: {e}")
        for slot in polls.values():
            silent = self._clock.now() - slot.polled
            late, slot.late = slot.late, slot.ready and silent > POLL_S + LATE_S
            if slot.late and not late:
                log.warning("the workers on node %s have not answered for %.0f s; if they do not answer within %.0f s, "
                            "their tasks go to others: see whether that machine, or the network to it, stands still",
                            slot.host, silent, SILENT_S - silent)
            if slot.late and silent > SILENT_S:
                events += self._handle_death(slot, f"it has not answered for {silent:.0f} s")
        self._check_any()
        return events + self._report(due)

    def _report(self, due: bool) -> list[Event]:
        """Returns [one StatusReport for all supervisors] if a report is `due`, else []. Supervisors are actors that run
        tasks. The report lists the running tasks of all of them, because progress shows only the tasks of the latest
        report. Must be called after the events of a poll were handled: a task that ended in this poll is then not
        listed."""
        running = (s for p in self.fleet.worker_slots.values() for s in p.running if s.id in p.open)
        return [StatusReport(tuple(running))] if due else []

    def _handle_events(self, slot: WorkerSlot, events: list[Event]) -> list[Event]:
        for event in events:
            match event:
                case Ready():
                    self._greet(slot, event)
                case StatusReport(running):
                    slot.running = running
        self._placement.settle(slot, [e.id for e in events if isinstance(e, Done | Failed)])
        return [e for e in events if not isinstance(e, Ready | StatusReport)]

    def emit(self, run: str, snapshot: Mapping[str, Any]) -> None:
        if ray.is_initialized():
            self._exporter.export(run, snapshot, self.nodes_lost)

    # -- nodes ---------------------------------------------------------------------------------------------------
    def _scale(self, now: float) -> None:
        """Start and end supervisors (actors that run tasks) as `Fleet.plan` decides. A new supervisor gets tasks only
        after its first answer."""
        scaling = self.fleet.plan(self._hosts(), now)
        for slot in scaling.leave:
            self._vacate(slot)
        settled = all(p.ready and not p.leaving for p in self.fleet.worker_slots.values()) and not scaling.start
        self._demand.show(scaling.demand if settled and self._temp is None else {})
        for host, number, shape in scaling.start:
            self._spawn(host, number, shape)

    def _hosts(self) -> list[Host]:
        """Returns the living nodes of the cluster with their resources. Resources that are neither free nor reserved by
        this run's supervisors (actors that run tasks) count as used by other programs."""
        state: Any = ray._private.state
        nodes: list[dict[str, Any]] = state.nodes()
        draining, free = set(state.state.get_draining_nodes()), state.available_resources_per_node()
        result = []
        for info in nodes:
            if not info["Alive"]:
                continue
            id, total = info["NodeID"], info["Resources"]
            shapes = [p.shape for p in self.fleet.worker_slots.values() if p.host == id]
            used = {r: total.get(r, 0.0) - free.get(id, total).get(r, 0.0) for r in ("CPU", "memory", "GPU")}
            others = ResourceShape(0, max(0, round(used["CPU"]) - sum(s.cpus for s in shapes)),
                           max(0, (int(used["memory"]) >> 20) - sum(s.memory_mb for s in shapes)),
                           max(0, round(used["GPU"]) - sum(s.gpus for s in shapes)))
            if self._demand.shown and not shapes:
                others = NOTHING                       # a new node briefly runs our pending demand
            name = f"{info.get('NodeManagerHostname') or info['NodeManagerAddress']} ({id[:8]})"
            memory, largest = int(total.get("memory", 0)) >> 20, None
            if self._temp is not None:                 # a cluster of our own: memory is measured, not reserved
                memory, others = self._measured, NOTHING
                largest = measure.memory_use()[1] >> 20
            result.append(Host(id, name, int(total.get("CPU", 0)), memory, int(total.get("GPU", 0)), others,
                              id in draining, largest))
        return result

    @cached_property
    def _measured(self) -> int:
        """The memory of this machine that the run's supervisors (actors that run tasks) may use together, in MB. It is
        measured once, before the first supervisor starts."""
        used, total = measure.memory_use()
        return max(2 * OWN_MB, int(self.limits.memory_share * total - used) >> 20)

    def _spawn(self, host: Host, number: int, shape: ResourceShape) -> None:
        slot = self.fleet.slot(host, number, shape)
        actors: Any = SupervisorActor          # the class as the decorator changed it
        slot.actor = actors.options(
            num_cpus=shape.cpus, num_gpus=shape.gpus, memory=None if self._temp else shape.memory_mb << 20,
            scheduling_strategy=NodeAffinitySchedulingStrategy(host.id, soft=False),
        ).remote(self.store.root, shape.slots, self.limits.to_json(), memory_mb=slot.memory_mb, scratch=self.scratch,
                 folder=os.getcwd() if self._temp else None, libraries=self._libraries, witness=self._witness)
        slot.poll, slot.polled = slot.actor.poll.remote([], 0.0, 0.0), self._clock.now()
        slot.started = slot.idle_since = slot.polled
        self.fleet.worker_slots[host.id, number] = slot

    def _greet(self, slot: WorkerSlot, ready: Ready) -> None:
        """Handle the first answer of a supervisor (an actor that runs tasks). If its node has other code or libraries
        than the driver, or does not see the store, the node is refused. Otherwise the supervisor may work."""
        assert self._own_fingerprint is not None, "start() comes first"
        own, remote = self._own_fingerprint, ready.fingerprint
        slot.fingerprint = remote
        wrong = differences(own, remote)
        if wrong and remote.code == code_hash(roots()) != own.code:
            wrong.append("the node has the present code of this machine, but the code was changed since this run "
                         "began; run again")
        if ready.sees_store is False:
            wrong.append(f"it does not see the store {self.store.root}; put the store on a file system that all nodes "
                         f"share, or on object storage")
        if wrong:
            self.fleet.refused[slot.name] = "; ".join(wrong)
            log.warning("node %s is refused: %s", slot.name, self.fleet.refused[slot.name])
            self._dismiss([p for p in self.fleet.worker_slots.values() if p.host == slot.host])
            return
        gaps = confinement.missing(ready.confinement)
        if gaps and gaps not in self._gaps:
            self._gaps.add(gaps)
            log.warning("workers cannot be confined as they should be on node %s and others: %s", slot.name, gaps)
        self.fleet.tags[slot.host] = remote.cpu
        for p in self.fleet.worker_slots.values():
            if p.host == slot.host:
                p.cpu = remote.cpu
        self.fleet.greeted(slot, self._clock.now())

    def _vacate(self, slot: WorkerSlot) -> None:
        """Make a supervisor (an actor that runs tasks) leave its node. It gets no more tasks, hands back those that it
        has not begun, and ends when its running tasks are done."""
        slot.leaving = True
        waiting = set(slot.open).difference(status.id for status in slot.running)
        if waiting:
            why = f"node {slot.name} is drained" if slot.drained else f"node {slot.name} makes room for larger tasks"
            self._returned.append(Returned(tuple(sorted(waiting)), why))
            self.cancel(sorted(waiting))
        if slot.drained:
            log.warning("node %s is drained: %d tasks finish there, %d go elsewhere", slot.name, len(slot.open),
                        len(waiting))

    def _handle_death(self, slot: WorkerSlot, why: str, preempted: bool = False) -> list[Event]:
        """Handle the death of a supervisor (an actor that runs tasks). Returns events that give its assignments
        (attempts at tasks) back to the scheduler. An assignment that had been sent to the supervisor counts as lost,
        and one that had not been sent as returned. If its node was draining, or was taken away on purpose
        (`preempted`), all assignments count as returned. A replacement starts when tasks need one and there is room."""
        self.nodes_lost += slot.ready
        ids, unsent = sorted(slot.open), {a.id for a in slot.unsent}
        free = ids if preempted or slot.drained else [i for i in ids if i in unsent]
        words = f"node {slot.name} lost its supervisor: {why}"
        log.warning("%s", words)
        self._placement.settle(slot, ids)
        self._drop(slot)
        if not (preempted or slot.drained):
            self.fleet.died(slot, self._clock.now(), why)
        lost = tuple(i for i in ids if i not in free)
        return [*([Returned(tuple(free), words)] if free else []), *([Lost(lost, words, slot.host)] if lost else [])]

    def _drop(self, slot: WorkerSlot) -> None:
        self.fleet.worker_slots.pop((slot.host, slot.number), None)
        self._planned_at = self._clock.now() - GROW_S + 0.5          # plan a replacement soon
        with contextlib.suppress(RayError):
            ray.kill(slot.actor)

    def _dismiss(self, worker_slots: list[WorkerSlot], patience_s: float = 2.0) -> None:
        """End these supervisors (actors that run tasks), after giving them at most `patience_s` seconds to clean up."""
        closing = [p.actor.close.remote() for p in worker_slots if p.fingerprint]
        if closing:
            with contextlib.suppress(RayError):
                ray.wait(closing, num_returns=len(closing), timeout=patience_s)
        for slot in worker_slots:
            self._drop(slot)

    def _check_any(self) -> None:
        """Raise NoNodes if no supervisor (an actor that runs tasks) is ready and none can be expected to become ready
        (`Fleet.stuck`)."""
        if (why := self.fleet.stuck(self._clock.now())) is not None:
            raise NoNodes(why)
