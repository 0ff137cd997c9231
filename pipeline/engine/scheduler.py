"""The scheduler: hands tasks to a backend, commits what comes back, repeats what failed for reasons of its own.

Runs in the driver. It knows no Ray and no process: a backend takes *assignments* and gives *events*, both plain JSON,
which is all that ever crosses a process or machine boundary:

    assignment  {"id", "spec", "attempt", "skip": [[row, stage, reason], …]}
    event       {"event": "done",      "id", "record"}
                {"event": "failed",    "id", "kind", "message", "traceback"}   kind: exception | environment
                {"event": "lost",      "ids", "message"}                       the node died; nobody is to blame
                {"event": "condemned", "id", "row", "stage", "reason"}         a document is out
                {"event": "progress",  "running": [{"id", "row", "seconds"}]}

A condemnation goes into the log at once: whatever happens to this driver, later attempts at that key skip the row.
An `exception` is the task's own doing and counts against `max_attempts`. `environment` (a killed child, memory
pressure) and `lost` do not, but both are bounded, so that a task which takes its node down every time ends the run.
Only O(slots) assignments exist at a time, however many tasks there are.
"""

from __future__ import annotations

import bisect
import contextlib
import random
import signal
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.engine.task import PartRecord, TaskSpec

FLUSH_S = 1.0            # a record waits at most this long for its commit (contracts §1)
MAX_LOST = 8             # node deaths and environment failures a task may meet before the run gives up on it
STRAGGLER_FACTOR = 3.0   # a task this many times slower than the p95 of its node gets a second attempt beside the first
STRAGGLER_KNOWN = 5      # tasks that must have finished before a p95 means anything
STRAGGLER_S = 30.0       # never double a task that runs for less


class Backend(Protocol):
    """Where tasks run: inline, in child processes, on Ray."""

    interruptible: bool

    def start(self, memory_mb: int = 0) -> None:
        """Get ready to take tasks that declare up to `memory_mb`; a second call does nothing."""

    @property
    def slots(self) -> int:
        """Tasks that can run at the same time right now."""

    @property
    def room(self) -> int:
        """Assignments it would start at once; it takes up to `slots` more to keep at hand."""

    def submit(self, assignment: dict[str, Any]) -> None: ...

    def cancel(self, ids: list[int]) -> None:
        """Forget these assignments, killing what runs of them. Their events may or may not still come."""

    def wait(self, timeout: float) -> list[dict[str, Any]]:
        """Events, as soon as there are any, after `timeout` seconds at the latest."""

    def close(self) -> None:
        """Leave no process and no scratch file behind."""


class CommitLog(Protocol):
    """What the scheduler needs of `pipeline.store.log.Log`."""

    epoch: int

    def get(self, key: str) -> PartRecord | None: ...
    def append(self, record: PartRecord) -> Any: ...
    def condemn(self, key: str, row: int, stage: int, reason: str) -> None: ...
    def condemned(self, key: str) -> dict[int, tuple[int, str]]: ...
    def flush(self) -> None: ...


class Listener(Protocol):
    """What the scheduler tells `pipeline.engine.progress.Progress`."""

    def planned(self, specs: list[TaskSpec], fresh: dict[str, PartRecord]) -> None: ...
    def done(self, spec: TaskSpec, record: PartRecord) -> None: ...
    def failed(self, spec: TaskSpec, kind: str, message: str) -> None: ...
    def condemned(self, spec: TaskSpec, row: int, reason: str) -> None: ...
    def running(self, slots: int, tasks: list[tuple[TaskSpec, float, int]]) -> None: ...


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM: everything that was committed is kept; run again to go on. Not an Exception, so that no
    stage's error handling mistakes it for a bad document."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; what was committed is kept, run again to go on")
        self.signum = signum


class TaskFailed(Exception):
    """A task failed for good. `reasons` lists every failure of its attempts, in order."""

    def __init__(self, spec: TaskSpec, reasons: list[str]) -> None:
        self.spec, self.reasons = spec, reasons
        listing = "\n".join(f"  attempt {i}: {r}" for i, r in enumerate(reasons, 1))
        super().__init__(f"{spec.node}: {spec.label or spec.key} failed {len(reasons)} times ({spec.task})\n{listing}")


@dataclass
class _Flight:
    spec: TaskSpec
    started: float


@dataclass
class _History:
    """What happened to one key so far."""

    reasons: list[str] = field(default_factory=list)
    exceptions: int = 0
    lost: int = 0


class Scheduler:
    """Runs task specs on a backend and commits their records.

    `dispatch_seed` shuffles the order of dispatch (tests: nothing may depend on it); by default the largest goes first.
    """

    def __init__(self, backend: Backend, log: CommitLog, progress: Listener | None = None, *, max_attempts: int = 3,
                 dispatch_seed: int | None = None, straggler_s: float = STRAGGLER_S) -> None:
        self.backend, self.log, self.progress = backend, log, progress
        self.max_attempts, self.dispatch_seed, self.straggler_s = max_attempts, dispatch_seed, straggler_s
        self._serial = 0
        self._stop: int | None = None

    def run(self, specs: list[TaskSpec]) -> list[PartRecord]:
        """Records of `specs` in their order. What the log holds already is not run again; equal keys run once.

        Raises TaskFailed, Interrupted, and what the log raises (Fenced when another driver took over). In every case
        the backend is left with nothing running and everything that finished is committed.
        """
        by_key = {s.key: s for s in reversed(specs)}
        fresh = {key: record for key in by_key if (record := self.log.get(key)) is not None}
        if self.progress:
            self.progress.planned(specs, fresh)
        todo = [s for key, s in by_key.items() if key not in fresh]
        if todo:
            # before the signal handlers: ray.init installs its own
            self.backend.start(max(s.memory_mb for s in todo))
            with self._signals():
                fresh.update(self._run(todo))
        return [fresh[s.key] for s in specs]

    def _run(self, todo: list[TaskSpec]) -> dict[str, PartRecord]:
        if self.dispatch_seed is None:
            todo.sort(key=lambda s: (-s.weight, s.node, s.order, s.key))
        else:
            todo.sort(key=lambda s: s.key)
            random.Random(self.dispatch_seed).shuffle(todo)
        queue = deque(todo)
        left = {s.key for s in todo}
        records: dict[str, PartRecord] = {}
        flights: dict[int, _Flight] = {}
        history: dict[str, _History] = defaultdict(_History)
        times: dict[str, list[float]] = defaultdict(list)
        flushed = time.monotonic()
        try:
            while left:
                self._check_stop()
                while queue and self._has_room(len(queue)):
                    self._dispatch(queue.popleft(), flights)
                if not queue:
                    self._double_stragglers(flights, times)
                verdicts = False
                for event in self.backend.wait(0.5):
                    match event["event"]:
                        case "done" if event["id"] in flights:
                            spec = flights[event["id"]].spec
                            record = PartRecord.from_json(event["record"])
                            self.log.append(record)
                            records[spec.key] = self.log.get(spec.key) or record     # the first one counts
                            left.discard(spec.key)
                            bisect.insort(times[spec.node], time.monotonic() - flights[event["id"]].started)
                            history.pop(spec.key, None)
                            twins = [i for i, f in flights.items() if f.spec.key == spec.key]
                            for i in twins:
                                del flights[i]
                            self.backend.cancel([i for i in twins if i != event["id"]])
                            if self.progress:
                                self.progress.done(spec, records[spec.key])
                        case "failed" if event["id"] in flights:
                            spec = flights.pop(event["id"]).spec
                            self._failed(spec, event, history[spec.key])
                            if not any(f.spec.key == spec.key for f in flights.values()):
                                queue.insert(self.backend.slots, spec)    # soon, so that a hopeless run ends soon
                        case "lost":
                            for i in event["ids"]:
                                if i in flights:
                                    spec = flights.pop(i).spec
                                    self._failed(spec, {"kind": "lost", **event}, history[spec.key])
                                    if not any(f.spec.key == spec.key for f in flights.values()):
                                        queue.appendleft(spec)
                        case "condemned" if event["id"] in flights:
                            spec = flights[event["id"]].spec
                            self.log.condemn(spec.key, event["row"], event["stage"], event["reason"])
                            verdicts = True
                            if self.progress:
                                self.progress.condemned(spec, event["row"], event["reason"])
                        case "progress":
                            self._show(event["running"], flights)
                # a verdict cost two children and more: it is committed before the part goes on
                if verdicts or time.monotonic() - flushed > FLUSH_S:
                    self.log.flush()
                    flushed = time.monotonic()
            self._check_stop()
        finally:
            self.backend.cancel(list(flights))
            if records:
                self.log.flush()
        return records

    # -- dispatch ------------------------------------------------------------------------------------------------
    def _has_room(self, queued: int) -> bool:
        """One task a slot; and one more at hand for each slot while there is plenty, so that a slot never waits for us.
        Near the end nothing is held at hand: it would sit behind a long task while another slot is idle."""
        room = self.backend.room
        return room > 0 or (room > -self.backend.slots and queued > 2 * self.backend.slots)

    def _dispatch(self, spec: TaskSpec, flights: dict[int, _Flight]) -> None:
        self._serial += 1
        flights[self._serial] = _Flight(spec, time.monotonic())
        skip = self.log.condemned(spec.key)      # by attempts of this driver and of those before it
        self.backend.submit({"id": self._serial, "spec": spec.to_json(),
                             "attempt": f"{self.log.epoch:08d}-{self._serial:08d}",
                             "skip": [[row, stage, reason] for row, (stage, reason) in sorted(skip.items())]})

    def _double_stragglers(self, flights: dict[int, _Flight], times: dict[str, list[float]]) -> None:
        """Start a second attempt of tasks that take suspiciously long, on idle slots. Whoever commits first counts."""
        now = time.monotonic()
        if self.backend.room <= 0:
            return
        attempts = Counter(f.spec.key for f in flights.values())
        for flight in list(flights.values()):
            known = times[flight.spec.node]          # sorted
            if self.backend.room <= 0 or len(known) < STRAGGLER_KNOWN:
                continue
            p95 = known[int(0.95 * (len(known) - 1))]
            if now - flight.started < max(self.straggler_s, STRAGGLER_FACTOR * p95):
                continue
            if attempts[flight.spec.key] == 1:
                self._dispatch(flight.spec, flights)

    # -- failure -------------------------------------------------------------------------------------------------
    def _failed(self, spec: TaskSpec, event: dict[str, Any], past: _History) -> None:
        """Note a failed attempt; raises TaskFailed when it was the last one."""
        past.reasons.append(event["message"] + (f"\n{event['traceback'].rstrip()}" if event.get("traceback") else ""))
        if event["kind"] == "exception":
            past.exceptions += 1
        else:
            past.lost += 1
        if self.progress:
            self.progress.failed(spec, event["kind"], event["message"])
        if past.exceptions >= self.max_attempts or past.lost >= MAX_LOST:
            raise TaskFailed(spec, past.reasons)

    def _show(self, running: list[dict[str, Any]], flights: dict[int, _Flight]) -> None:
        if self.progress:
            tasks = [(flights[r["id"]].spec, r["seconds"], r["row"]) for r in running if r["id"] in flights]
            self.progress.running(self.backend.slots, tasks)

    # -- stop ----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a clean stop while tasks run; a second one is handled as before us (it kills)."""
        if threading.current_thread() is not threading.main_thread():
            yield                     # only the main thread may install handlers; its owner calls `stop`
            return
        before = {s: signal.getsignal(s) or signal.SIG_DFL for s in (signal.SIGINT, signal.SIGTERM)}

        def handler(signum: int, frame: Any) -> None:
            for s, old in before.items():
                signal.signal(s, old)
            if self.backend.interruptible:
                raise Interrupted(signum)
            self.stop(signum)

        for s in before:
            signal.signal(s, handler)
        try:
            yield
        finally:
            for s, old in before.items():
                signal.signal(s, old)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask `run` to stop: it kills its children, commits what is finished and raises Interrupted."""
        self._stop = signum

    def _check_stop(self) -> None:
        if self._stop is not None:
            signum, self._stop = self._stop, None
            raise Interrupted(signum)
