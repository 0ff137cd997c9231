"""Defines the interfaces that the scheduler uses: a backend that runs tasks, a log that commits the records of finished
tasks, and a listener that shows the progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.engine.driver.sums import BatchSums
from pipeline.engine.messages import Assignment, Event, FailureKind
from pipeline.engine.task import ResourceRequest, TaskSpec
from pipeline.store.records import PartRecord


class Backend(Protocol):
    """The interface of a backend, to which the scheduler hands tasks. A backend runs them in the driver's process, in
    child processes, or on a Ray cluster."""

    interruptible: bool

    def start(self, memory_mb: int = 0) -> None:
        """Get ready to run tasks. `memory_mb` is the largest memory that the first tasks declare. A second call does
        nothing."""

    @property
    def slots(self) -> int:
        """Return the number of slots at the moment, that is, of tasks that can run at the same time."""

    def set_demand(self, waiting: Mapping[ResourceRequest, int]) -> Mapping[ResourceRequest, str]:
        """Tell the backend how many tasks of each kind wait, so that it can start workers for them. Tasks that declare
        the same resources are of one kind. Returns {kind: reason} for the kinds that can never run on this backend."""

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        """Returns how many assignments (attempts at tasks) with these resources would start immediately. If none would
        start, the result r is 0 or negative. The backend then accepts up to `slots` + r further assignments in advance,
        which wait until a slot is free."""

    def submit(self, assignment: Assignment) -> None: ...

    def cancel(self, ids: list[int]) -> None:
        """Forget these assignments (attempts at tasks) and kill those that run. Events about them may still arrive."""

    def wait(self, timeout: float) -> list[Event]:
        """Return events as soon as there are any. Returns [] if none comes within `timeout` seconds, or at once if
        nothing runs. (The inline backend runs one task in this call, however long that takes.)"""

    def emit(self, run: str, snapshot: Mapping[str, Any]) -> None:
        """Export a snapshot of the run's progress as metrics of the cluster (Ray only)."""

    def close(self) -> None:
        """End all processes and remove all scratch files."""


class CommitLog(Protocol):
    """The methods of the commit log (`pipeline.store.log.Log`, the list of finished tasks) that the scheduler uses."""

    epoch: int

    def get_all(self, keys: Sequence[str]) -> Mapping[str, PartRecord]: ...
    def append(self, record: PartRecord) -> PartRecord: ...
    def quarantine(self, key: str, row: int, stage: int, reason: str) -> None: ...
    def quarantined_rows(self, key: str) -> dict[int, tuple[int, str]]: ...
    def release(self, key: str) -> None: ...
    def flush(self) -> None: ...


@dataclass(frozen=True)
class Running:
    """A running task, for display. `seconds`: for how long it has run. `row`: the document that it works on, or the
    first one of a batch; -1 outside any document. `stage`: the number of the stage that the document is in, negative
    before the first stage. `still`: for how many seconds `row` and `stage` have not changed. `does`: what its process
    `pid` on `host` does, such as "computing" or "sleeping" (`limits.doing`)."""

    spec: TaskSpec
    seconds: float
    row: int
    stage: int = -1
    still: float = 0.0
    host: str = ""
    pid: int = 0
    does: str = ""


class Listener(Protocol):
    """The interface through which the scheduler reports the events of a run. `driver.progress.Progress` implements
    it."""

    def plan_again(self) -> None: ...

    def planned(self, specs: list[TaskSpec], fresh: Mapping[str, PartRecord]) -> None: ...
    def reused(self, sums: BatchSums) -> None: ...
    def done(self, spec: TaskSpec, record: PartRecord) -> None: ...
    def failed(self, spec: TaskSpec, kind: FailureKind, message: str, again: bool) -> None: ...
    def hindered(self, spec: TaskSpec, message: str) -> None: ...
    def repeated(self, spec: TaskSpec) -> None: ...
    def doubled(self, spec: TaskSpec) -> None: ...
    def quarantined(self, spec: TaskSpec, row: int, reason: str) -> None: ...
    def hanging(self, task: Running) -> None: ...
    def stopping(self) -> None: ...
    def running(self, slots: int, tasks: list[Running]) -> None: ...
