"""The process backend: one supervisor in the driver's own process, which runs tasks in child processes. It works
without Ray, on one Linux machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from pipeline.base import confinement
from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.machine import cpu_tag
from pipeline.engine.backends.pools import Capacity, StarvationGuard, cannot, room_in
from pipeline.engine.messages import Assignment, Done, Event, Failed
from pipeline.engine.task import ResourceRequest
from pipeline.engine.worker import limits as measure
from pipeline.engine.worker.limits import ProcessLimits
from pipeline.engine.worker.supervisor import Supervisor
from pipeline.store.fs import Store

log = logging.getLogger("tokenmill")


class ProcessBackend:
    """Runs tasks in up to `workers` child processes on this machine (default: one per CPU). The interface is that of
    `protocols.Backend`."""

    interruptible = False

    def __init__(self, store: Store, workers: int | None = None, *, limits: ProcessLimits | None = None,
                 memory_mb: int | None = None, scratch: str | None = None, clock: Clock = SYSTEM) -> None:
        self.store, self.slots = store, workers or len(os.sched_getaffinity(0))
        self.limits, self.memory_mb, self._scratch, self._clock = limits, memory_mb, scratch, clock
        self.supervisor: Supervisor | None = None
        self._waiting: list[Assignment] = []         # assignments for the next poll
        self.worker: Capacity | None = None                  # what the supervisor can take
        self._guard = StarvationGuard()

    def start(self, memory_mb: int = 0) -> None:
        if self.supervisor is None:
            self.supervisor = Supervisor(self.store.root, self.slots, self.limits, memory_mb=self.memory_mb,
                                         scratch=self._scratch, clock=self._clock)
            if gaps := confinement.missing(confinement.support()):
                log.warning("workers cannot be confined as they should be on this machine: %s", gaps)
            # memory is not reserved here: a task that declares more than is free at this moment runs alone
            machine = measure.memory_use()[1] >> 20
            self.worker = Capacity(self.slots, self.supervisor.memory_mb, len(self.supervisor.devices.names), cpu_tag(),
                           largest_mb=max(machine, self.supervisor.memory_mb), shared=True)

    def set_demand(self, waiting: Mapping[ResourceRequest, int]) -> Mapping[ResourceRequest, str]:
        assert self.worker is not None, "start() comes first"
        self._guard.observe([self.worker], waiting, self._clock.now())
        here = [(self.worker.name, self.worker.largest_mb, self.worker.gpus, self.worker.cpu)]
        return {kind: cannot(kind, here) for kind in waiting if not self.worker.takes(kind)}

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        return room_in([self.worker] if self.worker else [], ResourceRequest(memory_mb, gpus, cpu))

    def submit(self, assignment: Assignment) -> None:
        assert self.worker is not None, "start() comes first"
        self._waiting.append(assignment)
        self.worker.add(assignment.id, assignment.spec.kind)

    def cancel(self, ids: list[int]) -> None:
        if self.worker is not None:
            self.worker.remove(ids)
        self._waiting = [a for a in self._waiting if a.id not in ids]
        if self.supervisor is not None:
            self.supervisor.cancel(ids)

    def wait(self, timeout: float) -> list[Event]:
        assert self.supervisor is not None and self.worker is not None, "start() comes first"
        assignments, self._waiting = self._waiting, []
        events = self.supervisor.poll(assignments, timeout)
        self.worker.remove(e.id for e in events if isinstance(e, Done | Failed))
        return events

    def emit(self, run: str, snapshot: Mapping[str, Any]) -> None:
        """Does nothing, because only the Ray backend exports metrics."""

    def close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()
            self.supervisor = None
        self._waiting, self.worker = [], None
