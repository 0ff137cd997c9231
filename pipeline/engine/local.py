"""The process backend: one supervisor in the driver's own process. Everything but Ray, on one Linux machine."""

from __future__ import annotations

import os
from typing import Any

from pipeline.engine.limits import Limits
from pipeline.engine.supervisor import Supervisor
from pipeline.store.fs import Store


class ProcessBackend:
    """Runs tasks in `workers` children of this process (default: one a CPU). See `scheduler.Backend`."""

    interruptible = False

    def __init__(self, store: Store, workers: int | None = None, *, limits: Limits | None = None,
                 memory_mb: int | None = None, scratch: str | None = None) -> None:
        self.store, self.slots = store, workers or len(os.sched_getaffinity(0))
        self.limits, self.memory_mb, self._scratch = limits, memory_mb, scratch
        self.supervisor: Supervisor | None = None
        self._waiting: list[dict[str, Any]] = []     # assignments for the next poll
        self._open: set[int] = set()

    def start(self, memory_mb: int = 0) -> None:
        if self.supervisor is None:
            self.supervisor = Supervisor(self.store.root, self.slots, self.limits, memory_mb=self.memory_mb,
                                         scratch=self._scratch)

    def room_for(self, memory_mb: int, gpus: float) -> int:
        return self.slots - len(self._open)

    def submit(self, assignment: dict[str, Any]) -> None:
        self._waiting.append(assignment)
        self._open.add(assignment["id"])

    def cancel(self, ids: list[int]) -> None:
        self._open.difference_update(ids)
        self._waiting = [a for a in self._waiting if a["id"] not in ids]
        if self.supervisor is not None:
            self.supervisor.cancel(ids)

    def wait(self, timeout: float) -> list[dict[str, Any]]:
        assert self.supervisor is not None, "start() comes first"
        assignments, self._waiting = self._waiting, []
        events = self.supervisor.poll(assignments, timeout)
        self._open.difference_update(e["id"] for e in events if e["event"] in ("done", "failed"))
        return events

    def close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()
            self.supervisor = None
        self._waiting, self._open = [], set()
