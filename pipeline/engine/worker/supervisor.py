"""The supervisor runs tasks in child processes, which it may kill. When a child dies, the supervisor finds the document
that killed it. This module does not use Ray.

All work happens in one method, `poll(assignments, timeout) -> events`. All calls must come from one thread, because a
child dies with the *thread* that started it (PR_SET_PDEATHSIG). Between two calls the children continue to work, but
nobody watches them. The first event that `poll` returns is `Ready`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from pipeline.base import confinement
from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.redact import redact
from pipeline.base.scratch import Scratch, user_folder
from pipeline.engine.backends.fingerprint import fingerprint
from pipeline.engine.backends.pools import OWN_MB
from pipeline.engine.messages import (
    Answer,
    Assignment,
    Done,
    Event,
    Failed,
    Failure,
    Finished,
    Hanging,
    Hindered,
    NeedsFreshProcess,
    ProtocolError,
    Quarantined,
    Raised,
    Ready,
    StatusReport,
    TaskStatus,
    Work,
    skips,
)
from pipeline.engine.worker import limits as measure
from pipeline.engine.worker.children import Children
from pipeline.engine.worker.crash_triage import (
    PRESSURE,
    CrashTriage,
    Fault,
    GaveUp,
    classify,
    describe,
)
from pipeline.engine.worker.excess import excess
from pipeline.engine.worker.job import Job
from pipeline.engine.worker.limits import Devices, ProcessLimits, visible_gpus
from pipeline.engine.worker.process import ChildProcess
from pipeline.store.errors import EnvironmentFailure
from pipeline.store.fs import Store

TICK_S = 0.1             # seconds between two checks of the limits
PROGRESS_S = 1.0
BLIND_S = 2.0            # a longer gap between two checks: this process stood still, or was not polled
RELIEF_S = 60.0          # seconds without memory pressure after which one more child may run again


class Supervisor:
    """Runs tasks in up to `slots` child processes, which it starts and watches. `memory_mb` bounds the memory that
    concurrent tasks declare together (default: the share `ProcessLimits.memory_share` of the memory of the cgroup or
    machine, less the memory in use and OWN_MB); a task that declares more runs alone. `devices` are the GPUs that the
    children share (default: those that `visible_gpus` names). The first event, `Ready`, contains the versions of
    `libraries`, and says whether the path `witness` exists in the store. Raises OSError on systems other than Linux."""

    def __init__(self, store: str, slots: int, limits: ProcessLimits | None = None, *, memory_mb: int | None = None,
                 devices: Sequence[str] | None = None, scratch: str | None = None,
                 libraries: list[str] | None = None, witness: str | None = None, clock: Clock = SYSTEM) -> None:
        if sys.platform != "linux":
            raise OSError("child processes need Linux (parent-death signal, /proc); use the inline backend here")
        self.store, self.slots, self.limits, self._clock = store, slots, limits or ProcessLimits(), clock
        used, total = measure.memory_use()
        self.memory_mb = memory_mb or max(0, int((self.limits.memory_share * total - used) / 2**20) - OWN_MB)
        confinement.not_dumpable()               # parsing children must not read our environment
        self.devices = Devices(visible_gpus() if devices is None else devices)
        self.scratch = Scratch(scratch)
        own = fingerprint(libraries or [])
        # the witness is a file the driver wrote into the store
        ready = Ready(own, confinement.support(), None if witness is None else Store(store).exists(witness))
        env = {"NUMBA_CACHE_DIR": str(user_folder() / f"numba-{own.code[:16]}"),
               "TOKENMILL_CACHE": str(user_folder(scratch) / "cache"), **os.environ}
        self._host = socket.gethostname()
        self._allowed = slots                    # most children at a time; lowered when memory runs short
        self._queue: deque[Job] = deque()
        self._children = Children(store, slots, self.devices, env, self.scratch, clock)
        self._events: list[Event] = [ready]
        self._reported_at = self._pressure_checked_at = self._pressure_at = self._watched_at = clock.now()

    # -- the one call --------------------------------------------------------------------------------------------
    def poll(self, assignments: Sequence[Assignment], timeout: float, linger: float = 0.0) -> list[Event]:
        """Accept `assignments` (attempts at tasks), work on all open ones, and return events. Returns as soon as there
        is an event, after `timeout` seconds at the latest, and at once when there is nothing to do. If the last
        StatusReport is at least PROGRESS_S seconds old, one is added; it does not count as an event here.

        With `linger`, events are gathered for that many seconds before they are returned, so that the driver of many
        supervisors gets few messages. They are returned earlier when a document was quarantined, or when a slot is idle
        and no task waits for it.
        """
        for assignment in assignments:
            triage = CrashTriage({s.row: (s.stage, s.reason) for s in assignment.skip},
                                 max_quarantined=self.limits.max_quarantined,
                                 max_environment=self.limits.max_environment)
            self._queue.append(Job(assignment, triage))
        began = self._clock.now()
        deadline = began + timeout
        while True:
            self._start()
            self._listen(min(TICK_S, max(0.0, deadline - self._clock.now())))
            self._watch()
            busy = len(self._children.jobs)
            if not (busy or self._queue) or self._clock.now() >= deadline:
                break
            if self._events and (self._clock.now() >= began + linger
                                 or (busy < self._allowed and not self._queue)
                                 or any(isinstance(e, Quarantined) for e in self._events)):
                break
        self._start()                            # start new jobs now: no event will wake the caller for that
        events, self._events = self._events, []
        if self._clock.now() - self._reported_at >= PROGRESS_S:
            self._reported_at = self._clock.now()
            events.append(StatusReport(tuple(
                self._status(c, c.job, self._reported_at)._replace(row=c.cursor.read()[0])
                for c in self._children if c.job)))
        return events

    def cancel(self, ids: list[int]) -> None:
        """Forget these assignments (attempts at tasks) and kill the children that work on them. The assignments produce
        no more events."""
        self._queue = deque(j for j in self._queue if j.id not in ids)
        for child in self._children:
            if child.job and child.job.id in ids:
                self._children.end(child)

    def close(self) -> None:
        """Kill all child processes and remove all scratch folders."""
        self._children.close()
        self._queue.clear()
        self.scratch.close()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the living child processes, which run the tasks."""
        return [c.pid for c in self._children]

    # -- starting ------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        """Give waiting jobs (attempts at tasks) to child processes, as far as slots, declared memory and GPUs allow."""
        while (job := self._next()) is not None:
            self._queue.remove(job)
            try:
                child = self._children.warm(job) or self._children.spawn(job)
            except (OSError, EnvironmentFailure) as e:       # a full disk, or no processes or memory left
                self._hindered(job, describe(e))
                continue
            child.node = job.spec.node
            job.started = job.started or self._clock.now()
            job.place, job.since, job.reports = (-1, -1, -1), self._clock.now(), 0
            triage = job.triage
            try:
                child.give(job, Work(job.spec, job.assignment.attempt, self.store, child.scratch, skips(triage.skip),
                                     triage.rows, triage.file, 1 if triage.rows else triage.batch_rows))
            except ProtocolError as e:
                child.finished()
                self._failed(job, Failure("permanent", f"{e}; lower run.partition"))

    def _next(self) -> Job | None:
        """Returns the job (attempt at a task) to start next: the first in the queue for which enough memory and GPUs
        are free. Returns None if there is no such job, or if as many children as allowed are busy. A job that `slots`
        others have overtaken blocks all jobs behind it. Otherwise the memory and GPUs that it needs might never be free
        at the same time."""
        busy = self._children.jobs
        if len(busy) >= self._allowed:
            return None
        declared_mb = sum(j.spec.memory_mb for j in busy)
        now = self._clock.now()
        for place, job in enumerate(self._queue):
            if job.retry_at > now:
                continue
            if (not busy or declared_mb + job.spec.memory_mb <= self.memory_mb) and (
                    self._children.warm(job) or self._children.can_free(job.share)):
                for passed in islice(self._queue, place):
                    passed.overtaken += 1
                return job
            if job.overtaken >= self.slots:
                return None
        return None

    # -- listening -----------------------------------------------------------------------------------------------
    def _listen(self, timeout: float) -> None:
        """Exchange bytes with the child processes for at most `timeout` seconds, and handle their answers."""
        if not self._children:
            if self._queue:
                self._clock.sleep(timeout)
            return
        sending = [child.send() for child in self._children]
        for key, _ in self._children.selector.select(min(timeout, 0.01) if any(sending) else timeout):
            child, what = key.data
            if child not in self._children:      # ended by an earlier event of this round
                continue
            try:
                answer = child.move(what, self._children.selector)
            except ProtocolError as e:
                self._died(child, Fault(f"protocol: {e}", False))
                continue
            if answer is not None and child.job:
                self._answered(child, child.job, answer)

    def _answered(self, child: ChildProcess, job: Job, answer: Answer) -> None:
        if not job.allows(answer):
            self._died(child, Fault("protocol: an answer that is not of its task", False))
            return
        child.finished()
        match answer:
            case NeedsFreshProcess() if not job.fresh:
                job.fresh = True
                self._queue.appendleft(job)
            case NeedsFreshProcess():
                self._failed(job, Failure("exception", "a new child process asked for a new process, as only "
                                                      "a used one may"))
            case Raised(failure) if failure.kind == "environment":
                self._hindered(job, failure.message, failure.traceback)
            case Raised(failure):
                self._failed(job, failure)
            case Finished(record):
                try:
                    if job.triage.passed():
                        self._events.append(Done(job.id, record))
                    else:
                        self._queue.appendleft(job)
                except GaveUp as e:
                    self._failed(job, Failure(e.kind, str(e)))
        # repeat a failed attempt in a fresh child: the state of the old one may have caused the failure
        if not isinstance(answer, Finished) or child.cpu_seconds() >= self.limits.recycle_cpu_s:
            self._children.end(child)

    def _hindered(self, job: Job, message: str, traceback: str = "") -> None:
        """Handle a job (attempt at a task) that the machine or the storage kept from its work: a full disk,
        unresponsive storage, or no memory or process left for a child. The job is tried again later by this supervisor.
        After several tries it is reported as failed."""
        try:
            job.retry_at = self._clock.now() + job.triage.hindered(message)
            self._queue.append(job)
            self._events.append(Hindered(job.id, redact(message)))
        except GaveUp as e:
            self._failed(job, Failure(e.kind, str(e), traceback=traceback))

    def _failed(self, job: Job, failure: Failure) -> None:
        """Report that a job (attempt at a task) failed. Secrets of this node are masked in the message here, because
        the driver may not know them and so could not mask them."""
        self._events.append(Failed(job.id, replace(failure, message=redact(failure.message),
                                                   traceback=redact(failure.traceback))))

    # -- watching ------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """Look for child processes that are dead, hang or exceed their limits, and handle them."""
        now = self._clock.now()
        if (blind := now - self._watched_at) > BLIND_S:
            # this machine or the driver stood still: time in which nobody watched the children must not count against
            # them
            for child in self._children:
                child.quiet_since = min(now, child.quiet_since + blind)
                if child.job:
                    child.job.since = min(now, child.job.since + blind)
        self._watched_at = now
        for child in self._children:
            if child.exited():
                answer = child.drain()           # it may have died just after answering
                if answer is not None and child.job:
                    self._answered(child, child.job, answer)
                if child in self._children:
                    self._died(child, None)
            elif child.job:
                self._report_hanging(child, child.job, child.cursor.read(), now)
                fault = excess(child, child.job, self.limits, now)
                if fault is not None:
                    self._died(child, fault)
        if now - self._pressure_checked_at >= self.limits.pressure_s:
            self._pressure_checked_at = now
            self._relieve()

    def _report_hanging(self, child: ChildProcess, job: Job, cursor: tuple[int, int, int], now: float) -> None:
        """Report a task whose crash cursor (the record of which document it works on) does not move. The report is
        repeated each time the standstill has become twice as long."""
        if cursor != job.place:
            job.place, job.since, job.reports = cursor, now, 0
        elif self.limits.hangs(now - job.since, now - child.quiet_since, job.reports):
            job.reports += 1
            self._events.append(Hanging(self._status(child, job, now)))

    def _status(self, child: ChildProcess, job: Job, now: float) -> TaskStatus:
        return TaskStatus(job.id, job.place[0], job.place[2], round(now - job.started, 1), round(now - job.since, 1),
                          self._host, child.pid, measure.doing(child.pid))

    def _relieve(self) -> None:
        """If memory is nearly full, kill the largest child process, and run fewer children for a while. If other
        processes fill the memory, the last busy child is spared, because otherwise no task would ever finish."""
        used, total = measure.memory_use()
        if used <= self.limits.memory_share * total or not self._children:
            if self._allowed < self.slots and self._pressure_checked_at - self._pressure_at > RELIEF_S:
                self._allowed, self._pressure_at = self._allowed + 1, self._pressure_checked_at
            return
        self._pressure_at = self._pressure_checked_at
        sizes = self._children.memory_mb()
        largest = max(sizes, key=lambda c: sizes[c])
        if not largest.job:
            self._children.end(largest)
            return
        busy = len(self._children.jobs)
        self._allowed = max(1, busy - 1)
        if busy > 1 or used - sum(sizes.values()) * 2**20 <= self.limits.memory_share * total:
            self._died(largest, PRESSURE)

    # -- ending --------------------------------------------------------------------------------------------------
    def _died(self, child: ChildProcess, fault: Fault | None) -> None:
        """End a child process that is dead, or that must die for `fault`. Crash triage (the search for the document at
        fault) then decides how the child's job (an attempt at a task) continues."""
        job = child.job
        self._children.end(child)
        if job is None:
            return
        cursor = child.last_position
        fault = fault or classify(child.returncode)
        try:
            quarantined = job.triage.died(fault, cursor)
            if quarantined:
                self._events.append(Quarantined(job.id, *quarantined))
            self._queue.appendleft(job)
        except GaveUp as e:
            stderr = child.stderr_tail()
            self._failed(job, Failure(e.kind, str(e),
                                      traceback=f"end of the output of the child process:\n{stderr}" if stderr else ""))
