"""The scheduler: hands tasks to a backend, commits the records of finished tasks, and retries failed attempts.

It runs in the driver and uses neither Ray nor child processes itself: a backend takes an `Assignment` (one attempt at a
task) and returns events (`pipeline.engine.messages`). The number of open assignments is proportional to the number of
slots, however many tasks there are.

The consequence of a failed attempt depends on the kind of failure:

* `exception`: the task's own code raised an exception. It counts against `max_attempts`. If two successive attempts
  raise the same message at the same row, the error counts as deterministic and ends the run.
* `permanent`: every other attempt would fail, too, for example because of a wrong setting. It ends the run at once.
* `environment` (a killed child, memory pressure, a full disk) and `lost` (the supervisor died, alone or with its node):
  the attempt is lost. `losses` compares the losses of a task with those of other tasks: a task that takes down its
  nodes ends the run after `max_lost` losses of one kind at the earliest, but preempted nodes do not end it as long as
  tasks finish. `environment` failures end it when `max_lost` per slot have come since a task last finished.
* `damaged`: a file of the store differs from its record. All other tasks are finished first. Then DamageFound is
  raised, and the run is planned again, so that the file is written again.

An attempt that comes back as `Returned` does not count as failed: it had not begun as far as the driver knew, or its
node had announced its end.

A quarantined row (a document that killed its process) is committed at once, so that later attempts at its task skip the
row even if this driver dies. When a task fails and gets no further attempt, its rows are released from quarantine,
because the task and not its documents may have been at fault.
"""

from __future__ import annotations

import contextlib
import signal
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

from pipeline.base.clock import SYSTEM, Clock
from pipeline.engine.driver.bad_files import BadFiles
from pipeline.engine.driver.endings import CannotRun, DamageFound, TaskFailed
from pipeline.engine.driver.flights import Flight, Flights
from pipeline.engine.driver.losses import CAUSES, MAX_LOST, History, TaskLosses
from pipeline.engine.driver.protocols import Backend, CommitLog, Listener, Running
from pipeline.engine.driver.queue import TaskBatch, TaskQueue, TaskRecords
from pipeline.engine.driver.stop import StopRequest
from pipeline.engine.driver.stragglers import to_double
from pipeline.engine.driver.sums import NodeSums
from pipeline.engine.messages import (
    Assignment,
    Done,
    Event,
    Failed,
    Failure,
    Hanging,
    Hindered,
    Lost,
    Quarantined,
    Returned,
    StatusReport,
    TaskStatus,
    skips,
)
from pipeline.engine.task import ResourceRequest, TaskSpec
from pipeline.store.log import SEGMENT_S, attempt_name
from pipeline.store.records import PartRecord

STRAGGLER_S = 30.0       # a task that has run for less is never doubled
LOOKS = 30               # checks for stragglers in that time; more would cost, since each walks all running attempts
TIMES = 512              # latest finished tasks of a node from which its median and p95 are taken
READ_AHEAD = 1000        # tasks of a batch read between two polls of the backend


class Scheduler:
    """Runs tasks on a backend and commits the records of finished tasks. Use it as a context manager: at its exit, also
    after an error, running tasks are cancelled and the records of all finished tasks are committed.

    `add` takes the tasks of a plan node (a group of tasks, such as a pass), `step` advances all tasks, and `finished`
    returns the batches of tasks that are complete. The largest of the tasks that declare the same resources are
    dispatched first; in tests, `dispatch_seed` shuffles them, because no result may depend on this order. `grace_s`:
    seconds for which running tasks may go on after a SIGTERM; after a SIGINT, they are killed at once. `bad_files`
    counts input files that could not be read, and may end the run.
    """

    def __init__(self, backend: Backend, log: CommitLog, progress: Listener | None = None, *, max_attempts: int = 3,
                 max_lost: int = MAX_LOST, dispatch_seed: int | None = None, straggler_s: float = STRAGGLER_S,
                 grace_s: float = 0.0, clock: Clock = SYSTEM, bad_files: BadFiles | None = None) -> None:
        self.backend, self.log, self.progress, self.bad_files = backend, log, progress, bad_files
        self.max_attempts, self.max_lost = max_attempts, max_lost
        self.straggler_s, self.grace_s = straggler_s, grace_s
        self.executed = self.reused = 0              # tasks that ran here, tasks whose records were in the log
        self._dispatch_seed, self._clock = dispatch_seed, clock
        self._awaited: set[str] = set()              # nodes that other nodes wait for
        self._hindered = 0                           # environment failures since a task last finished
        self._flights = Flights(clock)
        self._trial = 0                              # id of the latest attempt at a suspect or a task that is held back
        self._given_up: list[str] = []               # keys of the tasks that get no further attempt
        self._forget()
        self._history: dict[str, History] = defaultdict(History)
        self._times: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=TIMES))
        self._started, self._flushed, self._doubled = False, 0.0, float("-inf")
        self._stop = StopRequest(clock)
        self._ending = contextlib.ExitStack()

    def _forget(self) -> None:
        self._queue = TaskQueue(self.log.get_all, self._dispatch_seed)
        self._retries: deque[TaskSpec] = deque()     # dispatched before new tasks
        self._undispatched: Counter[str] = Counter()         # tasks in the queue, by node
        self._damaged: dict[str, str] = {}           # unreadable file → the error

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.backend.cancel(list(self._flights))
            self._flights.end(list(self._flights))
            self._forget()
            if self.executed:
                self.log.flush()
        finally:
            self._ending.close()
            self._started = False

    def plan_again(self) -> None:
        """Reset the counts of reused tasks and of progress: the run is planned again, and adds the same tasks again."""
        self.reused = 0
        if self.progress:
            self.progress.plan_again()

    def run(self, specs: Iterable[TaskSpec]) -> list[PartRecord]:
        """Run the tasks `specs` as `add` and `step` do, and return their commit records in the order of `specs`. Raises
        the errors of `step`."""
        with self:
            batch = self.add(specs)
            while True:
                self.step()
                for done, records in self.finished():
                    if done is batch:
                        return list(records)

    def add(self, specs: Iterable[TaskSpec], awaited: bool = False) -> TaskBatch:
        """Add tasks. The iterable `specs` is read little by little while tasks run. A task whose record is in the
        commit log does not run again. Tasks with equal keys run once. `awaited`: other plan nodes (groups of tasks,
        such as a pass) cannot begin before these tasks are done."""
        def noted() -> Iterator[TaskSpec]:
            for spec in specs:
                self._awaited.add(spec.node)
                yield spec

        return self._queue.add(noted() if awaited else specs)

    def reuse(self, sums: NodeSums) -> None:
        """Count the tasks of a plan node (a group of tasks, such as a pass) whose results are all in the store already.
        These tasks are not added to the queue. `sums` are sums over their records. Raises TooManyBadFiles if more input
        files than allowed could not be read."""
        self.reused += sums.tasks
        for batch in sums.batches if self.progress else ():
            if batch.tasks:                                   # a batch without tasks has no node
                self.progress.reused(batch)  # type: ignore[union-attr]
        if self.bad_files:
            self.bad_files.add(sums.counters.get("bad_files", {}))
            self.bad_files.check()

    def finished(self) -> list[tuple[TaskBatch, TaskRecords]]:
        """Returns the batches of tasks that were completed since the last call, with their commit records."""
        return self._queue.finished()

    def step(self) -> None:
        """Advance the run: read a few more tasks, dispatch as many as there is room for, wait at most half a second for
        events, and commit the records of finished tasks within about SEGMENT_S seconds. Returns at once if no task is
        left.

        Raises TaskFailed, Interrupted, DamageFound (once no task is left but those that met a damaged file),
        TooManyBadFiles, and the errors of the backend and of the commit log (Fenced when another driver took over the
        store).
        """
        self.check_stop()
        for specs, fresh in self._queue.read(READ_AHEAD):
            self.reused += len(fresh)
            self._undispatched.update({s.key: s.node for s in specs if s.key not in fresh}.values())
            if self.progress:
                self.progress.planned(specs, fresh)
            if self.bad_files:
                for record in fresh.values():
                    self.bad_files.done(record)
        if not (len(self._queue) or self._retries or self._flights):
            if self._damaged and not self._queue.unread:
                raise DamageFound(self._damaged)
            return
        self._start()
        if not self._stop.asked:
            self._hand_out()
        if self._stop.asked and self.backend.interruptible:
            self._stop.end_grace()      # the stop came when no signal could interrupt tasks: do not wait for them
            self.check_stop()
        elif self._stop.asked and self.progress:
            self.progress.stopping()
        events, failure = self.backend.wait(0.0 if self._queue.unread else 0.5), None
        for event in events:
            try:
                self._handle(event)
            except TaskFailed as e:      # do not lose the other events of this poll
                failure = failure or e
        # commit a quarantine at once: it cost at least two children, and a dead driver must not lose it
        if any(isinstance(e, Quarantined) for e in events) or self._clock.now() - self._flushed > SEGMENT_S:
            self.log.flush()
            self._flushed = self._clock.now()
        if failure is not None:
            for key in self._given_up:
                self.log.release(key)
            raise failure
        if self.bad_files:
            self.bad_files.check()

    def _handle(self, event: Event) -> None:
        """Act on one event of the backend. Events about attempts that are no longer in flight are ignored."""
        match event:
            case Done(id, record) if id in self._flights:
                self._commit(id, record)
            case Failed(id, failure) if id in self._flights:
                self._failed(self._flights.end([id]), failure)
            case Lost(ids, message, host):
                self._failed(self._flights.end(ids), Failure("lost", message), host)
            case Returned(ids):
                self._repeat(self._flights.end(ids))
            case Quarantined(id, row, stage, reason) if id in self._flights:
                self._quarantine(self._flights[id].spec, row, stage, reason)
            case Hanging(status) if self.progress and status.id in self._flights:
                self.progress.hanging(self._running(status))
            case Hindered(id, message) if self.progress and id in self._flights:
                self.progress.hindered(self._flights[id].spec, message)
            case StatusReport(running) if self.progress:
                self.progress.running(self.backend.slots, [self._running(s) for s in running if s.id in self._flights])

    def _running(self, status: TaskStatus) -> Running:
        return Running(self._flights[status.id].spec, status.seconds, status.row, status.stage, status.still,
                       status.host, status.pid, status.does)

    def _start(self) -> None:
        if not self._started:
            # before our signal handlers are installed, because ray.init installs handlers of its own
            self.backend.start(max(kind.memory_mb for kind in (*self._queue.waiting, *(s.kind for s in self._retries))))
            self._ending.enter_context(self._stop.at_signals(self.grace_s, lambda: self.backend.interruptible))
            self._started, self._flushed = True, self._clock.now()

    def _commit(self, id: int, record: PartRecord) -> None:
        flight = self._flights[id]
        spec = flight.spec
        first = self.log.append(record)                          # the first record counts
        self.executed += 1
        self._hindered = 0
        self._queue.done(spec.key)
        self._history.pop(spec.key, None)
        self._times[spec.node].append(self._clock.now() - flight.started)
        twins = [i for i in self._flights.attempts(spec.key) if i != id]
        self._flights.end([id, *twins])
        if twins:
            self.backend.cancel(twins)
        if self.bad_files:
            self.bad_files.done(first)
        if self.progress:
            self.progress.done(spec, first)

    # -- dispatch ------------------------------------------------------------------------------------------------
    def _hand_out(self) -> None:
        waiting = dict(self._queue.waiting)
        for spec in self._retries:
            waiting[spec.kind] = waiting.get(spec.kind, 0) + 1
        for kind, why in self.backend.set_demand(waiting).items():
            raise CannotRun(next((s for s in self._retries if s.kind == kind), None) or self._queue.pop(kind)[0], why)
        rooms: dict[ResourceRequest, int] = {}         # computed once per kind: lost nodes may leave thousands of tasks
        for _ in range(len(self._retries)):
            spec = self._retries.popleft()
            kind = spec.kind
            if kind not in rooms:
                rooms[kind] = self._room(kind)
            if rooms[kind] and self._may_start(spec):
                self._dispatch(spec)
                # tasks of other kinds have less room now; at 0, `_room` must say whether more may be prefetched
                rooms = {kind: rooms[kind] - 1} if rooms[kind] > 1 else {}
            else:
                self._retries.append(spec)
        if len(self._queue) or self._retries:          # before tasks of the queue take the room
            self._double_stragglers(idle=False)
        for kind in self._queue.kinds():
            while kind in self._queue.waiting and (room := self._room(kind)):
                for spec in self._queue.pop(kind, min(room, READ_AHEAD)):
                    self._undispatched[spec.node] -= 1
                    self._dispatch(spec)
        if not (len(self._queue) or self._retries or self._queue.unread):
            self._double_stragglers(idle=True)

    def _room(self, kind: ResourceRequest) -> int:
        """Returns how many tasks that declare the resources `kind` may be dispatched at the moment. Each slot gets one
        task that runs. While more than two such tasks per slot wait, each slot also gets a second task in advance
        (prefetched), so that no slot waits for the driver. Near the end nothing is prefetched, because a prefetched
        task could wait behind a long one while another slot is idle."""
        room, slots = self.backend.room_for(*kind), self.backend.slots
        return room if room > 0 else max(0, min(room + slots, self._queue.waiting.get(kind, 0) - 2 * slots))

    def _may_start(self, spec: TaskSpec) -> bool:
        """Whether an attempt at this task may start at the moment. A task that was lost a few times waits while other
        tasks can run and show how often they are lost. Such tasks, and those that are suspected of taking their
        machines down, run one at a time, so that the next loss shows which task is the cause.

        If such a task may start, the caller must dispatch it immediately: this method takes the next attempt that is
        dispatched for the attempt that it has allowed.
        """
        losses = self._history[spec.key].losses if spec.key in self._history else None
        held_back = losses is not None and losses.held_back(self._clock.now())
        if losses is None or not (losses.suspect or held_back):
            return True
        others = self._queue.unread or any((k.gpus, k.cpu) == (spec.gpus, spec.cpu) for k in self._queue.waiting)
        if self._trial in self._flights or (held_back and others):
            return False
        self._trial = self._flights.latest + 1
        return True

    def _dispatch(self, spec: TaskSpec) -> None:
        id = self._flights.begin(spec)
        skip = self.log.quarantined_rows(spec.key)      # by this driver and earlier ones
        self.backend.submit(Assignment(id, spec, attempt_name(self.log.epoch, id), skips(skip)))

    def _double_stragglers(self, idle: bool) -> None:
        """Start second attempts at tasks that take suspiciously long (stragglers). The attempt that commits first
        counts. `idle`: no task waits for a slot, so that second attempts cost nothing."""
        if self._clock.now() - self._doubled < self.straggler_s / LOOKS:
            return
        self._doubled = self._clock.now()
        unfinished = {*(node for node, n in self._undispatched.items() if n > 0), *(s.node for s in self._retries)}
        for spec in to_double(self._flights.values(), self._times, self._clock.now(), idle=idle, unfinished=unfinished,
                              awaited=self._awaited, slots=self.backend.slots, least_s=self.straggler_s):
            # prefetched in place of a waiting task, or put on an idle slot
            if self.backend.room_for(*spec.kind) > (0 if idle else -self.backend.slots) and self._may_start(spec):
                self._dispatch(spec)
                if self.progress:
                    self.progress.doubled(spec)

    # -- failure -------------------------------------------------------------------------------------------------
    def _quarantine(self, spec: TaskSpec, row: int, stage: int, reason: str) -> None:
        """Quarantine a row (a document) of a task. All later attempts skip it, also those of other drivers."""
        self.log.quarantine(spec.key, row, stage, reason)
        if self.bad_files:
            self.bad_files.quarantined(spec, stage, reason)
        if self.progress:
            self.progress.quarantined(spec, row, reason)

    def _failed(self, flights: list[Flight], failure: Failure, host: str = "") -> None:
        """Count attempts that failed for one common reason, and queue their tasks again. `host` is the node that the
        attempts ran on, if known. Tasks that met a damaged file are not queued; `step` raises DamageFound for them
        later. Raises TaskFailed when one of the tasks gets no further attempt."""
        counts: Counter[tuple[float, str]] = Counter((f.spec.gpus, f.spec.cpu) for f in flights)
        if failure.kind in CAUSES:
            for place, number in counts.items():
                self._flights.base_rates[place].failed(failure.kind, number, host, self._clock.now())
        if failure.kind == "damaged":        # not repeated until that file is written again (`DamageFound`)
            self._damaged[failure.path] = failure.message
            return
        ended: TaskFailed | None = None
        for flight in {f.spec.key: f for f in flights}.values():      # a straggler and its double are one loss
            try:
                self._count(flight, failure, counts[flight.spec.gpus, flight.spec.cpu])
            except TaskFailed as e:          # the others are still to be counted
                ended = ended or e
        if ended is not None:
            raise ended
        self._repeat(flights)

    def _count(self, flight: Flight, failure: Failure, together: int) -> None:
        """Count a failed attempt. Raises TaskFailed when its task gets no further attempt. `together`: the number of
        attempts that failed at the same moment, including this one."""
        spec, now = flight.spec, self._clock.now()
        past, why = self._history[spec.key], ""
        final = past.failed(failure, self.max_attempts)
        if failure.kind in CAUSES:
            past.losses = past.losses or TaskLosses(self._flights.base_rates[spec.gpus, spec.cpu], now)
            past.losses.add(failure.kind, now - flight.started, together, self.executed)
            why = past.losses.judge(failure.kind, now, self.max_lost)
        self._hindered += failure.kind == "environment"
        final = final or why != "" or self._hindered >= self.max_lost * max(1, self.backend.slots)
        if self.progress:
            self.progress.failed(spec, failure.kind, failure.message, not final)
        if final:
            self._given_up.append(spec.key)
            raise TaskFailed(spec, past.reasons, past.tracebacks, why if len(past.reasons) > 1 else "")

    def _repeat(self, flights: list[Flight]) -> None:
        """Queue the tasks of these attempts again. They run before new tasks, so that a task that always fails ends the
        run soon. A task is queued once, even if two attempts at it ended together, and not at all while another attempt
        at it runs."""
        for key, spec in {f.spec.key: f.spec for f in flights}.items():
            if not self._flights.attempts(key):
                self._retries.append(spec)
                if self.progress:
                    self.progress.repeated(spec)

    # -- stop ----------------------------------------------------------------------------------------------------
    def stop(self, signum: int = signal.SIGTERM, grace_s: float = 0.0) -> None:
        """Ask for a stop, from any thread. No further task begins. Running tasks may finish within `grace_s` seconds;
        then they are killed. Finished tasks are committed, and the run raises Interrupted. If several stops are
        requested, the earliest deadline counts."""
        self._stop.ask(signum, grace_s)

    def check_stop(self) -> None:
        """Raise Interrupted if a stop was requested and no task runs, or the time for running tasks is over."""
        self._stop.check(idle=not self._flights)
