"""The queue of a store: the recipes that were submitted to it, and which of them runs next.

    queue/00000007/0000.json    the submission: a recipe with its overrides, its run, who submitted it, and when
                   0001.json …  later events of the entry, one per file

A store has one driver (process that schedules a run) at a time, so its runs wait for each other in the order of their
numbers. Every file is created by put-if-absent (only if it does not exist) and never changed. An event is put at the
first free number of its entry. If two processes decide about the same entry at the same time, one of them creates the
file, and the other reads the file and decides again. Two servers can therefore not start an entry twice, and a cancel
and a start cannot both succeed. The commit log, which alone decides which driver may commit, does not know the queue.

An entry is `waiting` until a server claims it (event `start`), `starting` until its driver has begun (`running`), and
ends as `done`, `failed` or `cancelled`. An entry is claimed only when all entries before it have ended, and an entry
that has ended never changes. At most one entry is therefore starting or running. `pipeline.cluster.dispatch` claims
entries and starts their drivers.

Two events make an entry wait again. The event `unreachable` means that the Ray cluster did not answer. The event
`returned` has two causes: a driver from outside the queue used the store or took it over, or the entry's driver was
told to stop although nobody had cancelled the run.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.redact import redact
from pipeline.cluster.attempts import ask_to_stop, bad_name, utc_now
from pipeline.cluster.sealed import OtherFormat, Unsound, compact_json, opened, sealed
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store

FORMAT = 1
#: states of an entry that do not change any more
ENDED = ("done", "failed", "cancelled")
#: the state of an entry after an event, by the kind of the event
STATES = {"submitted": "waiting", "returned": "waiting", "unreachable": "waiting", "start": "starting",
          "running": "running", "cancelling": "running", **{state: state for state in ENDED}}
#: most entries that wait at a time
MOST_WAITING = 1000
#: most characters of an error that an event keeps
LONGEST_ERROR = 2000
#: entries at the end of the queue that are looked for even when a listing lacks them
RECENT = 64
_NAME = re.compile(r"queue/(\d{8})/(\d{4})\.json")


class QueueError(StoreError):
    """Raised when a request to the queue of runs cannot be granted. The message says why and what to do."""


class DamagedQueue(StoreError):
    """Raised when a file of the queue does not hold the bytes that were written to it, or was written by another
    version of Tokenmill."""


class RequestReused(QueueError):
    """Raised when a submission has the request id of an earlier, different submission."""


class RunTaken(QueueError):
    """Raised when the queue already has an unfinished entry with the run name of a new, different submission."""


class QueueFull(QueueError):
    """Raised when the queue cannot take a recipe because too many recipes already wait."""


class UnknownEntry(QueueError):
    """Raised when the queue has no entry of a given number."""


@dataclass(frozen=True)
class Submission:
    """A recipe that is submitted to the queue of a store. `request` identifies the request: if a client sends the
    request again, because the reply was lost, it gets the entry that the first request made. `by` is the role of the
    submitter, never a token. `name` and `base` are those of the recipe (`Recipe.name`, `Recipe.base`). `text` is the
    recipe's YAML, to which `overrides` and `inputs` are applied as `--set` and `--input` would be."""

    request: str
    run: str
    by: str
    name: str
    base: str
    text: str
    overrides: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    verify_inputs: bool = False
    resumes: bool = False

    def digest(self) -> str:
        """Return a hash of everything in the submission that determines the run, as 32 hex characters. The request id
        and the submitter are left out."""
        what = {k: v for k, v in asdict(self).items() if k not in ("request", "by")}
        return hashlib.blake2b(compact_json(what), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Event:
    """One event in the history of an entry of the queue. `holder` is set in the events `start` and `running`: the
    process that caused the event (`pipeline.store.lease.Holder`). `attempt` is set in the event `running`: the number
    of the attempt (start of the run) that begins with it. `tasks` is set in the event `start`: the number of tasks that
    the run had done before."""

    kind: str
    at: str
    nonce: str
    by: str = ""
    holder: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    tasks: int = 0
    error: str = ""


@dataclass(frozen=True)
class QueueEntry:
    """An entry of the queue: a submitted recipe, without its text, and all events in the order in which they happened.
    `events[0]` is the submission itself."""

    number: int
    run: str
    name: str
    by: str
    request: str
    digest: str
    resumes: bool
    events: tuple[Event, ...]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def state(self) -> str:
        """The state of the entry (a submitted run): waiting, starting, running, done, failed or cancelled."""
        return STATES[self.last.kind]

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def stopping(self) -> bool:
        """Whether the run of this entry was asked to stop, and has not ended yet."""
        return self.last.kind == "cancelling"

    @property
    def attempt(self) -> int:
        """Return the number of the latest attempt (start of the run). Each driver (process that schedules the run)
        begins one attempt; 0 when no driver has begun."""
        return next((e.attempt for e in reversed(self.events) if e.kind == "running"), 0)

    def unreachable(self) -> int:
        """Return the number of consecutive latest starts that failed because the cluster did not answer."""
        count, failed = 0, False                             # `failed`: the next start, going backwards, is counted
        for event in reversed(self.events):
            if event.kind == "unreachable":
                count, failed = count + 1, True
            elif event.kind == "start" and failed:
                failed = False
            elif event.kind != "running":
                break
        return count

    def deaths(self, done: int) -> int:
        """Return how often the run has died in succession: the number of its latest starts that ended without a message
        and without finishing a task. `done` is the number of tasks that the run has done by now. A start after which
        the entry waited again is skipped.

        A start has finished a task if more tasks are done after it than ever before it. The number just before the
        start may be too low for this comparison, because a start that dies while it plans has not yet found all results
        of earlier starts."""
        starts = [i for i, event in enumerate(self.events) if event.kind == "start"]
        count = most = 0
        for start, next_start in zip(starts, [*starts[1:], None]):
            most = max(most, self.events[start].tasks)
            after = done if next_start is None else self.events[next_start].tasks
            if not any(event.kind in ("returned", "unreachable") for event in self.events[start:next_start]):
                count = 0 if after > most else count + 1
        return count


def event_name(number: int, event: int) -> str:
    return f"queue/{number:08d}/{event:04d}.json"


class Queue:
    """The queue of runs of a store, as seen by one process. Thread-safe. The object remembers the files that it has
    read, because no file of the queue changes. Later calls read only new files."""

    def __init__(self, store: Store, clock: Clock = SYSTEM) -> None:
        self.store, self.clock = store, clock
        self._entries: dict[int, QueueEntry] = {}
        self._next = 0                                        # the first free number; 0 until the store was listed
        self._read_at = 0.0                                    # when all entries were last read
        self._lock = threading.RLock()

    # -- reading -------------------------------------------------------------------------------------------------
    def entries(self) -> list[QueueEntry]:
        """Return all entries of the queue as they are now, in the order of their numbers."""
        with self._lock:
            if self._next == 0:
                listed = {int(m[1]) for path in self.store.list("queue") if (m := _NAME.fullmatch(path))}
                last = max(listed, default=0)
                numbers = sorted(listed.union(range(max(1, last - RECENT), last)))
                for entry in self.store.map(self._load, numbers):
                    if entry is not None:
                        self._entries[entry.number] = entry
                self._next = last + 1
            for entry in [e for e in self._entries.values() if not e.ended]:
                self._entries[entry.number] = self._follow(entry)
            while (new := self._load(self._next)) is not None:
                self._entries[new.number] = new
                self._next += 1
            self._read_at = self.clock.now()
            return [self._entries[number] for number in sorted(self._entries)]

    def recent(self, seconds: float = 1.0) -> list[QueueEntry]:
        """Return all entries of the queue, as they were at most `seconds` ago. This is for callers that only show the
        queue. Changes made by this process are always included."""
        with self._lock:
            if self._next == 0 or self.clock.now() - self._read_at > seconds:
                return self.entries()
            return [self._entries[number] for number in sorted(self._entries)]

    def entry(self, number: int) -> QueueEntry:
        """Return entry `number` of the queue as it is now. Raises UnknownEntry when there is none."""
        with self._lock:
            cached = self._entries.get(number)
            entry = self._load(number) if cached is None else cached if cached.ended else self._follow(cached)
            if entry is None:
                raise UnknownEntry(f"the queue of {self.store.root} has no entry {number}; list the queue to see which "
                                   f"it has")
            if cached is not None:
                self._entries[number] = entry
            return entry

    def submission(self, number: int) -> Submission:
        """Return the recipe that was submitted as entry `number` of the queue, with its text. Raises UnknownEntry when
        there is no such entry."""
        body = self._read(event_name(number, 0))
        if body is None:
            raise UnknownEntry(f"the queue of {self.store.root} has no entry {number}")
        fields = dict(body["submission"])
        return Submission(**{**fields, "overrides": tuple(fields["overrides"]), "inputs": tuple(fields["inputs"])})

    def _load(self, number: int) -> QueueEntry | None:
        body = self._read(event_name(number, 0))
        if body is None:
            return None
        try:
            fields, event = body["submission"], Event(**body["event"])
            entry = QueueEntry(number, fields["run"], fields["name"], fields["by"], fields["request"], body["digest"],
                               fields["resumes"], (event,))
        except (KeyError, TypeError) as e:
            raise _newer(event_name(number, 0)) from e
        if bad_name(entry.run) is not None:                   # the name of the run becomes a path of the store
            raise self._damaged(event_name(number, 0), "names no run")
        return self._follow(entry)

    def _follow(self, entry: QueueEntry) -> QueueEntry:
        """Return `entry` (a submitted run) together with the events that other processes or this one have added to it
        since it was read."""
        while not entry.ended:
            name = event_name(entry.number, len(entry.events))
            body = self._read(name)
            if body is None:
                break
            try:
                event = Event(**body["event"])
                entry = replace(entry, events=(*entry.events, event))
                STATES[event.kind]
            except (KeyError, TypeError) as e:
                raise _newer(name) from e
        return entry

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return the JSON document in the file `name` of the queue; None when there is no such file. Raises
        DamagedQueue when the file is damaged, or was written by another version of Tokenmill."""
        try:
            data = self.store.read(name)
        except FileNotFoundError:
            return None
        try:
            return opened(data, FORMAT)
        except Unsound as e:
            raise self._damaged(name, str(e)) from None
        except OtherFormat:
            raise _newer(name) from None

    def _damaged(self, name: str, why: str) -> DamagedQueue:
        return DamagedQueue(f"{self.store.at(name)} {why}; move the folder {self.store.at(name.rpartition('/')[0])} "
                            f"away and submit its recipe again")

    # -- writing -------------------------------------------------------------------------------------------------
    def submit(self, submission: Submission) -> QueueEntry:
        """Put a recipe at the end of the queue and return its entry. If the same request was made before, the entry of
        that request is returned. If the submission resumes a run whose entry has not ended, that entry is returned.
        Raises QueueFull, RequestReused, RunTaken, and QueueError when the name of the run is not allowed.

        A request that two processes submit at the same time makes only one entry. Each process reads all earlier
        entries before it tries to take the next number. The process that comes second fails, reads the new entry, and
        returns it."""
        if (why := bad_name(submission.run)) is not None:
            raise QueueError(f"run {submission.run!r}: {why}")
        digest = submission.digest()
        with self._lock:
            while True:
                entries = self.entries()
                for entry in entries:
                    if entry.request == submission.request:
                        if entry.digest != digest:
                            raise RequestReused(f"the request id {submission.request!r} was used before, for run "
                                                f"'{entry.run}'; send another id with another recipe")
                        return entry
                    # each of two servers may have found the name free before the other put its entry
                    if entry.run == submission.run and not entry.ended:
                        if submission.resumes:
                            return entry
                        if entry.digest != digest:
                            raise RunTaken(f"the run '{entry.run}' of another submission is in the queue; choose "
                                           f"another name, or cancel that run")
                if sum(e.state == "waiting" for e in entries) >= MOST_WAITING:
                    raise QueueFull(f"{MOST_WAITING} recipes wait in {self.store.root} already; wait for some, or "
                                    f"cancel them")
                number = self._next
                event = Event("submitted", utc_now(self.clock), self.clock.new_id(), submission.by)
                self._put(event_name(number, 0), {"submission": asdict(submission), "digest": digest}, event)

    def append(self, entry: QueueEntry, kind: str, **facts: Any) -> QueueEntry | None:
        """Add an event to `entry` (a submitted run) in the store, and return the entry with the new event. `entry` must
        be as this process last read it. Returns None, and adds nothing, when the entry has ended, or when another
        process has added an event since."""
        if "error" in facts:
            facts["error"] = redact(facts["error"])[:LONGEST_ERROR]
        event = Event(kind, utc_now(self.clock), self.clock.new_id(), **facts)
        if entry.ended or not self._put(event_name(entry.number, len(entry.events)), {}, event):
            return None
        return self.entry(entry.number)

    def cancel(self, number: int, by: str) -> QueueEntry:
        """Cancel entry `number` of the queue. An entry that waits or starts has ended when this returns. The driver of
        a running entry (the process that schedules its tasks) is asked to stop and notices it within seconds. It lets
        running tasks go on for up to a minute, and keeps what was committed."""
        while True:
            entry = self.entry(number)
            if entry.state == "running":
                if not entry.stopping:
                    self.append(entry, "cancelling", by=by)
                    continue
                ask_to_stop(self.store, entry.run, entry.attempt)
                return entry
            if entry.ended:
                return entry
            self.append(entry, "cancelled", by=by)

    def _put(self, name: str, body: dict[str, Any], event: Event) -> bool:
        """Create a file of the queue. Returns False, and writes nothing, when the file exists already."""
        return self.store.put_absent(name, sealed({"event": asdict(event), **body}, FORMAT))


def places(entries: list[QueueEntry]) -> dict[int, int]:
    """Return {number of an entry: its place in the queue} for all waiting entries. The entry at place 1 starts next."""
    return {entry.number: i for i, entry in enumerate((e for e in entries if e.state == "waiting"), 1)}


def _newer(name: str) -> DamagedQueue:
    return DamagedQueue(f"{name} was written by another version of Tokenmill; use that version")

