"""The inline backend: runs every task in the driver's own process, one after the other. It uses neither Ray nor child
processes, and enforces no limits.

It is meant for debugging (a breakpoint works in a stage, a step that processes documents), unit tests, and machines
without Linux. Results are the same as with other backends, but a document that crashes the interpreter ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.scratch import Scratch
from pipeline.engine.messages import Assignment, Done, Event, Failed
from pipeline.engine.task import CrashCursor, ResourceRequest
from pipeline.engine.worker.attempt import run_attempt
from pipeline.engine.worker.crash_triage import failure
from pipeline.store.fs import Store


class InlineBackend:
    """Runs tasks in the driver's own process: each call of `wait` runs one assignment (an attempt at a task) to its
    end. The interface is that of `protocols.Backend`."""

    def __init__(self, store: Store, *, scratch: str | None = None, clock: Clock = SYSTEM) -> None:
        self.store, self.scratch, self._clock = store, scratch, clock
        self._own: Scratch | None = None             # if this process is killed, a later one removes the folder
        #: True from when a task is submitted until it has run. A stop signal in this time interrupts the task at once,
        #: since there is no child to kill
        self.interruptible = False
        self._queue: deque[Assignment] = deque()

    def start(self, memory_mb: int = 0) -> None:
        if self.scratch is None:
            self._own = Scratch()
            self.scratch = self._own.path

    @property
    def slots(self) -> int:
        return 1

    def set_demand(self, waiting: Mapping[ResourceRequest, int]) -> Mapping[ResourceRequest, str]:
        return {}                                # nothing is limited here, so everything fits

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        return 1 - len(self._queue)

    def submit(self, assignment: Assignment) -> None:
        self._queue.append(assignment)
        self.interruptible = True

    def cancel(self, ids: list[int]) -> None:
        self._queue = deque(a for a in self._queue if a.id not in ids)
        self.interruptible = bool(self._queue)

    def wait(self, timeout: float) -> list[Event]:
        if not self._queue:
            return []
        assignment = self._queue.popleft()
        cursor = CrashCursor()
        try:
            return [Done(assignment.id, run_attempt(assignment.spec, self.store, assignment.attempt, cursor,
                                                    self.scratch, skip=assignment.skip, clock=self._clock))]
        except Exception as e:
            return [Failed(assignment.id, failure(e, cursor.read()[0]))]
        finally:
            self.interruptible = False

    def emit(self, run: str, snapshot: Mapping[str, Any]) -> None:
        """Does nothing, because only the Ray backend exports metrics."""

    def close(self) -> None:
        self._queue.clear()
        self.interruptible = False
        if self._own is not None:
            self._own.close()
            self.scratch = self._own = None
