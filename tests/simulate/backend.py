"""A backend in virtual time whose workers misbehave."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.engine.messages import (
    Assignment,
    Done,
    Event,
    Failed,
    Failure,
    FailureKind,
    Hanging,
    Hindered,
    Lost,
    Quarantined,
    Returned,
    TaskStatus,
)
from pipeline.engine.task import ResourceRequest, TaskSpec
from pipeline.store.records import FileInfo, PartRecord
from tests.simulate.faults import Odds
from tests.simulate.plan import FILE, ROWS, STAGE, data_of
from tests.simulate.storage import Requests

if TYPE_CHECKING:
    from tests.simulate.world import Driver

NODES, SLOTS = 2, 3
#: what becomes of an attempt. straggle, fail late: it takes SLOW times as long, and fails then;
#: vanish: its node dies as it ends, after its upload
ODDS: Odds = (("exception", .04), ("same", .01), ("environment", .03), ("lost", .03), ("returned", .03),
              ("hanging", .01), ("straggle", .06), ("fail late", .03), ("innocent", .05), ("vanish", .02))
#: the plan's failing task fails until this much time has passed
FAILING_S = 60.0
SLOW = 15
#: what becomes of an event on its way. late: it comes seconds after those that were sent behind it
EVENT_ODDS: Odds = (("twice", .05), ("late", .05))
RETRY_S, TRIES = 2.0, 3


@dataclass
class Attempt:
    id: int
    spec: TaskSpec
    name: str
    skip: dict[int, str]             # row → reason
    fate: str
    node: int
    cancelled: bool = False


class SimBackend:
    """The nodes of one driver, with slots. When the driver dies, running attempts go on, but nobody learns of their
    results."""

    interruptible = False

    def __init__(self, driver: Driver) -> None:
        self.driver, self.world = driver, driver.world
        self.requests = Requests(self.world, f"worker {driver.name}")
        self.running: dict[int, Attempt] = {}
        self.inbox: list[dict[str, Any]] = []
        self._random = self.world.faults.random(f"times {driver.name}")

    # -- what the scheduler calls ------------------------------------------------------------------------------------
    def start(self, memory_mb: int = 0) -> None:
        self.driver.point("start")

    @property
    def slots(self) -> int:
        return NODES * SLOTS

    def set_demand(self, waiting: Mapping[ResourceRequest, int]) -> Mapping[ResourceRequest, str]:
        return {}

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        return self.slots - len(self.running)

    def submit(self, assignment: Assignment) -> None:
        self.driver.point("submit")
        spec = assignment.spec
        skip = {fault.row: fault.reason for fault in assignment.skip}
        self.world.audit.dispatched(self.driver, assignment.id, spec, skip)
        for row in spec.args.get("skip", ()):
            skip.setdefault(row, "quarantined")
        fate = self.world.faults.pick(f"task {spec.label}", ODDS)
        label, how = self.world.plan.failing
        if label == spec.label and self.world.time < FAILING_S:
            fate = self.world.faults.pick(f"failing {label}", ((how, 1.0),)) or fate
        if fate == "innocent" and (spec.node != "first" or self.world.audit.was_recorded(spec.key)):
            fate = ""                              # after a first record, a task must always give the same
        attempt = Attempt(assignment.id, spec, assignment.attempt, skip, fate, self._random.randrange(NODES))
        self.running[attempt.id] = attempt
        seconds = 0.1 + self._random.expovariate(0.5)
        slow = SLOW if fate in ("straggle", "fail late") else 1
        self.world.later(seconds * slow, lambda: self._work(attempt))

    def cancel(self, ids: list[int]) -> None:
        self.driver.point("cancel")
        for i in ids:
            if i in self.running:
                self.running.pop(i).cancelled = self._random.random() < 0.5      # if False, it ends before it is told

    def wait(self, timeout: float) -> list[Event]:
        self.driver.point("wait")
        self.driver.wait(timeout, lambda: bool(self.inbox))
        events, self.inbox = self.inbox, []
        self.driver.point("events")
        self.world.audit.told(self.driver, events)
        return events

    def emit(self, run: str, snapshot: Mapping[str, Any]) -> None:
        """Ignore the snapshot, because nobody watches."""

    def close(self) -> None:
        self.running.clear()

    # -- what the workers do -----------------------------------------------------------------------------------------
    def _say(self, event: Event) -> None:
        fault = self.world.faults.pick(f"event {self.driver.name}", EVENT_ODDS)
        for delay in ([0.05, 3.0] if fault == "twice" else [8.0] if fault == "late" else [0.05]):
            self.world.later(delay, lambda: self.inbox.append(event))

    def _end(self, attempt: Attempt, event: Event) -> None:
        self.running.pop(attempt.id, None)
        self._say(event)

    def _fail(self, attempt: Attempt, kind: FailureKind, message: str, row: int | None = None, path: str = "") -> None:
        self._end(attempt, Failed(attempt.id, Failure(kind, message, row, path)))

    def _work(self, attempt: Attempt) -> None:
        """Perform the middle of an attempt, in which most faults happen."""
        if attempt.cancelled:
            return
        spec, number = attempt.spec, attempt.id
        guilty = self.world.plan.crashing(spec.label) - attempt.skip.keys()
        innocent = {int(self._random.random() * ROWS)} - attempt.skip.keys() if attempt.fate == "innocent" else set()
        for row in sorted({*guilty, *innocent}):
            attempt.skip[row] = "crash:SIGSEGV"
            self._say(Quarantined(number, row, 0, "crash:SIGSEGV"))
        match attempt.fate:
            case "exception" | "fail late":
                self._fail(attempt, "exception", f"it failed at {self.world.time}")
            case "same":
                self._fail(attempt, "exception", "it always fails here", row=3)
            case "environment":
                self._fail(attempt, "environment", "memory")
            case "returned":
                self._end(attempt, Returned((number,), "drained"))
            case "lost":
                self._lose(attempt.node)
            case "hanging":
                self._say(Hanging(TaskStatus(number, 1, 0, 1.0, 1.0, "h", 1, "")))
                self._upload(attempt, 1)
            case _:
                self._upload(attempt, 1)

    def _lose(self, node: int) -> None:
        """Let a node die, with everything that runs on it."""
        gone = [a for a in self.running.values() if a.node == node]
        for attempt in gone:
            attempt.cancelled = True
            del self.running[attempt.id]
        self._say(Lost(tuple(a.id for a in gone), "node died"))

    def _upload(self, attempt: Attempt, tries: int) -> None:
        """Read the inputs of an attempt, write its file, and report it."""
        if attempt.cancelled:
            return
        spec, name = attempt.spec, f"{attempt.name}-{tries:08x}"
        if (damage := self._damage(spec)) is not None:
            self._fail(attempt, "damaged", f"{damage} is damaged", path=damage)
            return
        data = data_of(spec.key, set(range(ROWS)) - attempt.skip.keys())
        path, sha256 = f"objects/{spec.key}/{name}.{FILE}", hashlib.sha256(data).hexdigest()
        try:
            self.requests.pipe_file(path, data)
        except OSError as e:
            if tries == TRIES:
                self._fail(attempt, "environment", f"cannot write {path}: {e}")
                return
            self._say(Hindered(attempt.id, str(e)))
            self.world.later(RETRY_S, lambda: self._upload(attempt, tries + 1))
            return
        if attempt.fate == "vanish":
            self._lose(attempt.node)
            self._say(self._done(attempt, name, path, data, sha256))       # was on its way when the node died
            return
        self._end(attempt, self._done(attempt, name, path, data, sha256))

    def _done(self, attempt: Attempt, name: str, path: str, data: bytes, sha256: str) -> Done:
        spec = attempt.spec
        quarantine = [{"row": row, "id": f"{spec.label}/{row}", "stage": STAGE, "stage_key": STAGE, "reason": reason}
                      for row, reason in sorted(attempt.skip.items())]
        record = PartRecord(spec.key, "rows", spec.node, name, {FILE: FileInfo(path, len(data), sha256, sha256, 1)},
                            {"records": ROWS}, quarantine)
        return Done(attempt.id, record)

    def _damage(self, spec: TaskSpec) -> str | None:
        """Return the first input that differs from its record, or None. Reading it does not fail here, because the
        faults of `storage` already include that."""
        for ref in spec.args.get("inputs", ()):
            data = self.world.bucket.objects.get(ref["$ref"])
            if data is None or hashlib.sha256(data).hexdigest() != ref["sha256"]:
                return str(ref["$ref"])
        return None
