"""What the scheduler needs: a backend that runs tasks, a log that commits records, a listener that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.engine.messages import Assignment, Event, FailureKind
from pipeline.engine.task import ResourceRequest, TaskSpec
from pipeline.store.records import PartRecord


class Backend(Protocol):
    """Where tasks run: inline, in child processes, on Ray."""

    interruptible: bool

    def start(self, memory_mb: int = 0) -> None:
        """Get ready to take tasks that declare up to `memory_mb`; a second call does nothing."""

    @property
    def slots(self) -> int:
        """Tasks that can run at the same time right now."""

    def set_demand(self, waiting: Mapping[ResourceRequest, int]) -> Mapping[ResourceRequest, str]:
        """Tasks that wait, by kind: what to get workers for. Returns the kinds that can never run here, and why."""

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        """Assignments of this kind it would start at once. 0 or less: none, as many are prefetched already; -slots or
        less: it takes no more."""

    def submit(self, assignment: Assignment) -> None: ...

    def cancel(self, ids: list[int]) -> None:
        """Forget these assignments, killing what runs of them. Their events may or may not still come."""

    def wait(self, timeout: float) -> list[Event]:
        """Events, as soon as there are any, after `timeout` seconds at the latest."""

    def emit(self, run: str, snapshot: Mapping[str, Any]) -> None:
        """Export a snapshot of the run's progress as metrics of the cluster (on Ray); elsewhere nothing."""

    def close(self) -> None:
        """Leave no process and no scratch file behind."""


class CommitLog(Protocol):
    """What the scheduler needs of `pipeline.store.log.Log`."""

    epoch: int

    def get(self, key: str) -> PartRecord | None: ...
    def append(self, record: PartRecord) -> Any: ...
    def quarantine(self, key: str, row: int, stage: int, reason: str) -> None: ...
    def quarantined_rows(self, key: str) -> dict[int, tuple[int, str]]: ...
    def release(self, key: str) -> None: ...
    def flush(self) -> None: ...


@dataclass(frozen=True)
class Running:
    """A task at work: for how many seconds, at which row and stage (-1: outside any document), for how long its cursor
    has not moved, in which process, and what that does (`limits.doing`)."""

    spec: TaskSpec
    seconds: float
    row: int
    stage: int = -1
    still: float = 0.0
    host: str = ""
    pid: int = 0
    does: str = ""


class Listener(Protocol):
    """What the scheduler tells `pipeline.engine.driver.progress.Progress`."""

    def plan_again(self) -> None: ...

    def planned(self, specs: list[TaskSpec], fresh: dict[str, PartRecord]) -> None: ...
    def done(self, spec: TaskSpec, record: PartRecord) -> None: ...
    def failed(self, spec: TaskSpec, kind: FailureKind, message: str, again: bool) -> None: ...
    def hindered(self, spec: TaskSpec, message: str) -> None: ...
    def repeated(self, spec: TaskSpec) -> None: ...
    def doubled(self, spec: TaskSpec) -> None: ...
    def quarantined(self, spec: TaskSpec, row: int, reason: str) -> None: ...
    def hanging(self, task: Running) -> None: ...
    def running(self, slots: int, tasks: list[Running]) -> None: ...
