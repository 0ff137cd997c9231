"""Starts the runs of a store's queue, one after the other. An entry of the queue is a submitted run. Every server of a
store (`tokenmill serve`) uses this module; the queue decides which of the servers starts an entry
(`pipeline.cluster.queue`).

A server starts each run as a driver, a process that plans the run and commits its tasks. The driver has its own
session, so it goes on when the server ends. The next server sees from the store that the run goes on. An entry is
started again if its driver has died, or was never started because its server died. If the head of the Ray cluster is
lost, the driver dies, and the entry waits until the cluster answers again. Tasks that the run has committed are not
repeated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.process import import_path
from pipeline.cluster.attempts import ask_to_stop, asked_to_stop, facts_of, latest_heartbeat, progress_of
from pipeline.cluster.queue import Queue, QueueEntry, QueueError
from pipeline.store.fs import Store
from pipeline.store.lease import PATIENCE_S, Holder, alive, identity
from pipeline.store.web import DIRECT

#: seconds after which another server takes over a claim if no driver has begun, even if the first server lives
START_S = 120.0
#: seconds without a heartbeat after which a driver on another machine counts as dead
UNSEEN_S = 3 * PATIENCE_S
#: seconds until an entry is started again if its driver could not reach the cluster: at first, and at most. Each
#: further failure doubles them, because each start adds three files to the queue
FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 300.0
#: the run counts as failed after so many starts in a row that ended without a message and without a finished task
MOST_DEATHS = 5
#: the environment variable by which a driver gets the roots (JSON) that its recipe is confined to
ROOTS = "TOKENMILL_ROOTS"


class Child(Protocol):
    """The driver of a run (the process that schedules its tasks), as a child process of this server."""

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs."""


@dataclass(frozen=True)
class DriverOptions:
    """The options with which a server starts drivers (the processes that schedule runs), such as the backend and the
    number of workers. Recipes do not contain them. `roots` are the folders and URLs that recipes may read; None allows
    all. `folder` is the working directory of the drivers; None means that of the server. `secrets` names environment
    variables that a driver must not see."""

    backend: str = "process"
    workers: int | None = None
    address: str | None = None
    insecure_local: bool = False
    allow_code: bool = False
    roots: tuple[str, ...] | None = None
    folder: str | None = None
    secrets: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        return ["--backend", self.backend, *(("--workers", str(self.workers)) if self.workers else ()),
                *(("--address", self.address) if self.address else ()),
                *(("--insecure-local",) if self.insecure_local else ()),
                *(("--allow-custom-stages",) if self.allow_code else ())]


def start_driver(store: Store, options: DriverOptions, entry: QueueEntry) -> subprocess.Popen[bytes]:
    """Start the driver (the process that schedules the run) of an entry of the queue. This server must have claimed the
    entry (taken it in order to start its run): the claim must be the entry's last event."""
    environment = {k: v for k, v in os.environ.items() if k not in options.secrets} | {"PYTHONPATH": import_path()}
    if options.roots is not None:
        environment |= {ROOTS: json.dumps(options.roots), DIRECT: "1"}
    # -P: Python must not import other packages from the folder the server was started in
    command = [sys.executable, "-P", "-m", "pipeline.cli", "resume", "--queued",
               f"{entry.number}/{len(entry.events)}", "--store", store.root, *options.arguments(), "--", entry.run]
    return subprocess.Popen(command, env=environment, cwd=options.folder, stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


class Dispatcher:
    """Starts the runs that wait in the queue of a store. A run whose driver (the process that schedules its tasks) has
    died is started again. A server calls `tick` every few seconds."""

    def __init__(self, queue: Queue, start: Callable[[QueueEntry], Child], clock: Clock = SYSTEM,
                 holder: Holder | None = None, is_alive: Callable[[Mapping[str, object]], bool | None] = alive) -> None:
        self.queue, self.store, self._clock = queue, queue.store, clock
        self._start, self._holder, self._alive = start, holder or identity(""), is_alive
        self._children: dict[tuple[int, int], Child] = {}    # by number and event of the claim
        self._last_values: dict[str, tuple[Any, float]] = {}        # subject → its last value, and since when

    def tick(self) -> None:
        """Bring the queue forward by one step. If no run is in progress, the next one is started. If the driver of the
        current run (the process that schedules it) has died, the run is started again. The entry ends instead if the
        run was cancelled, or if its driver has died too often. A driver that goes on although its run was cancelled is
        asked to stop."""
        self._children = {claim: child for claim, child in self._children.items() if child.poll() is None}
        head = next((entry for entry in self.queue.entries() if not entry.ended), None)
        if head is None:
            return
        if head.state == "waiting":
            if not (self._pauses(head) or self._store_is_held()):
                self._claim(head)
        elif self._is_abandoned(head):
            if head.stopping:
                self.queue.append(head, "cancelled", by=head.last.by)
            elif head.deaths(self._done(head)) >= MOST_DEATHS:
                self.queue.append(head, "failed", error=f"its driver has ended {MOST_DEATHS} times without a message "
                                  f"and without having finished a task; look at its log, or run `tokenmill resume "
                                  f"{head.run}` on the server's machine to see why")
            else:
                self._claim(head)
        elif head.stopping and not asked_to_stop(self.store, head.run, head.attempt):
            # the process that cancelled the entry was killed before it asked the driver to stop
            ask_to_stop(self.store, head.run, head.attempt)

    def _claim(self, entry: QueueEntry) -> None:
        claimed = self.queue.append(entry, "start", holder=self._holder, tasks=self._done(entry))
        if claimed is not None and claimed.last.kind == "start" and claimed.last.holder == self._holder:
            self._children[claimed.number, len(claimed.events)] = self._start(claimed)

    def _done(self, entry: QueueEntry) -> int:
        """Return the number of tasks that are done in the run of an entry of the queue, as the run's last progress
        report says."""
        return int(progress_of(self.store, entry.run).get("done") or 0)

    def _is_abandoned(self, entry: QueueEntry) -> bool:
        """Whether no process works on an entry of the queue, although a server has claimed it. A server claims an entry
        before it starts the entry's driver, the process that schedules the run.

        If no driver has begun the entry, it is abandoned in three cases:

        * This server claimed it, and the driver that it started has ended.
        * Another server claimed it, and that server is known to be dead.
        * Another server claimed it, and this server has seen the claim for more than START_S seconds.

        If a driver has begun the entry, it is abandoned when the driver is known to be dead. Where this machine cannot
        check that, the entry is abandoned once the heartbeat of the store has not changed for UNSEEN_S seconds.

        A wrong guess does no harm. If the server was only slow, it finds that its claim was taken over, and so does the
        driver that it starts. If the driver is alive, it holds the lease of the commit log, and no other driver can
        commit."""
        event, claim = entry.last, (entry.number, len(entry.events))
        if event.kind == "start":
            if event.holder == self._holder:
                return claim not in self._children
            return self._alive(event.holder) is False or self._unchanged("start", claim) > START_S
        holder = next(e.holder for e in reversed(entry.events) if e.kind == "running")
        living = self._alive(holder)
        if living is not None:
            return not living
        _, beat = latest_heartbeat(self.store)
        return self._unchanged("driver", (claim, beat.get("counter"), beat.get("closed"))) > UNSEEN_S

    def _pauses(self, entry: QueueEntry) -> bool:
        """Whether an entry of the queue must wait a little longer. It must if its driver (the process that schedules
        the run) could not reach the cluster a moment ago. Each further failure doubles the pause."""
        failures = entry.unreachable()
        return failures > 0 and self._unchanged("pause", (entry.number, len(entry.events))) < min(
            LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10))

    def _store_is_held(self) -> bool:
        """Whether the store seems to be in use by a driver (a process that schedules a run) that the queue did not
        start. The commit log decides whether the store is free; this check only avoids starting a driver in vain."""
        _, beat = latest_heartbeat(self.store)
        holder = beat.get("holder")
        if not isinstance(holder, dict) or beat.get("closed"):
            return False
        living = self._alive(holder)
        if living is not None:
            return living
        return self._unchanged("lease", (holder, beat.get("counter"))) <= PATIENCE_S

    def _unchanged(self, what: str, value: Any) -> float:
        """Return how many seconds ago this method was first called with the present `value` for `what`, without another
        value in between. It is 0 when the value has changed."""
        before, since = self._last_values.get(what, (None, 0.0))
        if before != value:
            self._last_values[what] = (value, self._clock.now())
            return 0.0
        return self._clock.now() - since


# -- the driver's side -----------------------------------------------------------------------------------------------
class ClaimLost(QueueError):
    """Raised when an entry of the queue was cancelled, or claimed by another server, before its driver began. The
    driver (the process that schedules the run) must not run the entry."""


def begin(queue: Queue, number: int, event: int, holder: Holder) -> QueueEntry:
    """Note in the queue that this driver (a process that schedules a run) has begun entry `number`, and return the
    entry. The note becomes event number `event` of the entry; it must follow directly on the claim by which a server
    started this driver. Raises ClaimLost when the entry has been cancelled or claimed again since that claim."""
    entry = queue.entry(number)
    attempt = facts_of(queue.store, entry.run).get("attempt", 0) + 1
    while asked_to_stop(queue.store, entry.run, attempt):     # run.json was lost, the request is for an earlier attempt
        attempt += 1
    begun = None
    if len(entry.events) == event and entry.last.kind == "start":
        begun = queue.append(entry, "running", holder=holder, attempt=attempt)
    if begun is None:
        raise ClaimLost(f"entry {number} of the queue, run '{entry.run}', was cancelled or started by another server "
                        f"before this driver began; nothing was run")
    return begun


def end(queue: Queue, number: int, event: int, kind: str, error: str = "") -> None:
    """Note in the queue how the run of entry `number` has ended. The entry ends if `kind` is done, failed or cancelled.
    It waits to be started again if `kind` is returned or unreachable; but if the run was cancelled, it ends as
    cancelled.

    `event` is the number of the event by which this driver (the process that scheduled the run) noted that it had
    begun. Does nothing when the entry has ended already, or when another driver has been started for it."""
    while True:
        entry = queue.entry(number)
        since = entry.events[event + 1:]
        if entry.ended or any(e.kind != "cancelling" for e in since):
            return
        if kind in ("returned", "unreachable") and entry.stopping:
            kind = "cancelled"
        if queue.append(entry, kind, **({"error": error} if error else {})) is not None:
            return


def confined_to() -> Sequence[str] | None:
    """Return the roots (folders and URLs) that the recipe of this driver process may read; None when it may read
    all."""
    roots = os.environ.get(ROOTS)
    return None if roots is None else tuple(json.loads(roots))
