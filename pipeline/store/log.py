"""The commit log of a store: a sequence of files, called segments, that record which tasks are done.

Segments are `log/00000001.json`, `log/00000002.json`, … (format: `pipeline.store.segment`, rules: docs/contracts.md,
Store). A driver (the process that schedules the tasks of a run) appends a segment by creating the file of the next
number. Creating it fails if another driver has created it already (put-if-absent). There are two kinds of segments:

- An *epoch* segment opens an epoch, the term of the driver that appends it, and gives this driver the lease, the right
  to append to the log. Any other driver meets this segment at its next append, raises Fenced, and can commit nothing
  more: it is fenced.
- A *records* segment holds the records of tasks that the driver finished, and the rows of input that it quarantined
  because they killed a process. Each task has a key. The first record of a key counts. When a driver finds that the
  files of a record are damaged or missing, it retires (withdraws) the record, and the next record that is committed
  for the key counts.

Segments are never changed. The state of the log is obtained by replaying them in order (`pipeline.store.view`), or from
a snapshot of them, which the driver takes in the background (`pipeline.store.snapshot`).

`store gc` removes segments that a snapshot holds. It keeps two kinds of segments: those that open an epoch, and those
after the segment that opened the epoch of `store gc` itself. A driver that was fenced long ago therefore still meets,
at its next append, the segment that fenced it. A driver may also read the log before a `store gc` and append its epoch
segment afterwards, under a number that is free only because `store gc` removed the segment. To let the driver detect
this, `store gc` creates a file `log/epochs/EPOCH` for every epoch up to its own before it removes any segment.

A driver that starts and finds an open epoch checks whether the driver of that epoch is alive. If both run on the same
machine, a dead process is recognised at once. Otherwise the starting driver reads the other one's heartbeat
(`log/heartbeat/EPOCH.json`, a counter) once a second. If the counter does not change for PATIENCE_S, the other driver
is considered dead. A mistake does no harm to the store: the heartbeat only decides when to try, and the segments alone
decide which driver has the lease.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pipeline.base.clock import SYSTEM, Clock
from pipeline.store import lease, segment, snapshot
from pipeline.store.fs import Store, StoreError
from pipeline.store.lease import Holder, identity
from pipeline.store.records import PartRecord
from pipeline.store.segment import FORMAT, Facts, decode_segment, dumps, encode_record, segment_name
from pipeline.store.snapshot import PACK_BYTES, PACK_SEGMENTS
from pipeline.store.view import LogView

SEGMENT_RECORDS = 1000       # docs/contracts.md: Store
SEGMENT_S = 1.0              # age of the oldest waiting record, in seconds, at which a segment is written
HEARTBEAT_S = 5.0

T = TypeVar("T")
log = logging.getLogger("tokenmill")


class Fenced(StoreError):
    """Raised when another driver (the process that schedules a run) has taken over the store. The driver that gets this
    error can commit nothing more and exits with status 1."""


class OtherContent(StoreError):
    """Raised when a task wrote files with other contents than its earlier attempt did. The task had to run again
    because files of that attempt were damaged or missing."""


def attempt_name(epoch: int, serial: int) -> str:
    """Return the name of an attempt to run a task: an epoch and a serial number, eight digits each. An epoch is the
    term of one driver, the process that schedules tasks. The name is unique, because only this driver has the epoch,
    and it gives each attempt the next serial number. The garbage collector reads the epoch from the first eight
    characters."""
    return f"{epoch:08d}-{serial:08d}"


def epoch_mark(epoch: int) -> str:
    """Return the path of the file that `store gc` creates for an epoch before it removes files of the log. An epoch is
    the term of one driver, the process that schedules tasks. If the file exists, a driver that is about to open this
    epoch has an outdated view of the log."""
    return f"log/epochs/{epoch:08d}"


class Log(LogView):
    """The commit log of a store, open for appending by the one driver (process that schedules a run) that holds its
    lease, the right to append. Thread-safe. A background thread writes heartbeats and commits the records that wait.
    Another thread writes a snapshot (a compact copy of the log) when one is due.

    When another driver has taken over the store, the next commit or `check_lease` notices it and raises Fenced. From
    then on, every method that writes to the log raises Fenced.
    """

    def __init__(self, store: Store, clock: Clock = SYSTEM, segment_records: int = SEGMENT_RECORDS,
                 pack_segments: int = PACK_SEGMENTS) -> None:
        super().__init__(store)
        self.opened = 0                                       # number of the segment that opened our epoch
        self._clock, self._segment_records, self._pack_segments = clock, segment_records, pack_segments
        self._lock = threading.RLock()
        self._waiting: list[bytes] = []
        self._quarantined: list[dict[str, Any]] = []
        self._released: list[str] = []
        self._retired: list[dict[str, Any]] = []
        self._sending: tuple[int, dict[str, Any]] | None = None      # number and body of the segment being written
        self._oldest = 0.0                                    # when the oldest waiting entry came
        self._beaten = 0.0                                    # when the last heartbeat was written
        self._counter = 0
        self._failed: Exception | None = None
        self._closed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._packer: threading.Thread | None = None
        self._next_snapshot = 0                               # number of segments at which a snapshot is due

    @staticmethod
    def read(store: Store) -> LogView:
        """Read the current log without taking its lease (the right to append), as `tokenmill plan` and `tokenmill
        report` do."""
        view = LogView(store)
        view.refresh()
        return view

    @classmethod
    def open(cls, store: Store, *, run: str = "", takeover: bool = False, clock: Clock = SYSTEM,
             holder: Holder | None = None, threaded: bool = True,
             segment_records: int = SEGMENT_RECORDS, pack_segments: int = PACK_SEGMENTS) -> Log:
        """Open the log for appending: replay it and take its lease, the right to append. Only one driver (process that
        schedules a run) has the lease at a time. `run` names this driver in the messages of other drivers. With
        `takeover`, the lease is taken even from a living driver.

        Raises LeaseHeld when a living driver holds the lease, CorruptLog for a damaged log, and StoreError when the
        store cannot be written. `clock` and `holder` are for simulations, which pass a clock and a driver of their own.
        With `threaded` False no background thread is started, and the caller must call `tend`.
        """
        log = cls(store, clock, segment_records, pack_segments)
        log._begin(holder or identity(run), takeover)
        if threaded:
            log._thread = threading.Thread(target=log._tend_until_closed, name="log", daemon=True)
            log._thread.start()
        return log

    def _begin(self, holder: Holder, takeover: bool) -> None:
        """Take the lease of the log, the right to append to it. This driver (process that schedules a run) appends a
        segment (file of the log) that opens a new epoch, the term of this driver. Unless `takeover` is set, first check
        that no living driver holds the lease; raises LeaseHeld when one does."""
        self.store.check_conditional_put()
        number = 0                                               # segment we last tried to write and found taken
        while True:
            try:
                self.refresh()
            except OSError as e:
                raise StoreError(f"cannot read {self.store.at('log')}: {e}; see that the store can be read") from e
            if self.segments < number:
                raise StoreError(f"{self.store.at(segment_name(number))} is there but not listed; see that this user "
                                 f"can read {self.store.at('log')}")
            if self.holder is not None and not takeover:
                lease.wait_until_free(self.store, self.holder, self.epoch, self._clock)
            body = {"format": FORMAT, "kind": "epoch", "epoch": self.epoch + 1, "nonce": self._clock.new_id(),
                    "holder": holder}
            number = self.segments + 1
            if segment.create(self.store, number, body, self._clock) is None:
                next_epoch = self.epoch + 1
                if not self.store.exists(epoch_mark(next_epoch)):
                    self._replay(number, body)
                    self.opened = number
                    break
            # another driver was faster, and `store gc` may have run as well: read on
        self._next_snapshot = 0 if self.holes else self.packed + self._pack_segments
        self._beat()

    def _beat(self, closed: bool = False) -> None:
        self._counter += 1
        self._beaten = self._clock.now()
        # `holder` and `at` are for display (`cluster.attempts`): no decision depends on them
        beat = {"counter": self._counter, "closed": closed, "holder": self.holder, "at": round(self._clock.wall(), 1)}
        self.store.write(lease.heartbeat_name(self.epoch), dumps(beat))

    def _tend_until_closed(self) -> None:
        while not self._stop.wait(SEGMENT_S / 4) and self.tend():
            pass

    def tend(self) -> bool:
        """Do the periodic work of the log: commit records that have waited for SEGMENT_S seconds, write the heartbeat
        when it is due, and start a snapshot (a compact copy of the log) when one is due. Returns False when a commit
        failed. After that the log cannot be written, and the next call that appends or flushes raises the error of the
        failed commit."""
        with self._lock:
            if self._uncommitted and self._clock.now() - self._oldest >= SEGMENT_S:
                try:
                    self.flush()
                except Exception:
                    return False
            if self._clock.now() - self._beaten >= HEARTBEAT_S:
                with contextlib.suppress(Exception):          # the next heartbeat may get through
                    self.check_lease()                             # a driver that was taken over writes no heartbeat
                    self._beat()
            due = self.segments >= self._next_snapshot or self.unpacked >= 2 * PACK_BYTES
        if due and self._thread is None:
            self._take_snapshot()
        elif due and (self._packer is None or not self._packer.is_alive()):
            self._packer = threading.Thread(target=self._take_snapshot, name="log snapshot", daemon=True)
            self._packer.start()
        return True

    def _take_snapshot(self) -> None:
        """Write packs (files that compact many segments of the log, `pipeline.store.snapshot`) for the segments that no
        undamaged pack holds. The lock is not held while packs are written, so that no commit waits. If this process is
        killed or another takes over the log while it writes, its packs do no harm, because they hold only committed
        segments."""
        with self._lock:
            last = self.segments
            tail = last - self.packed >= self._pack_segments or self.unpacked >= 2 * PACK_BYTES
            self._next_snapshot, self.unpacked = last + self._pack_segments, 0 if tail else self.unpacked
        try:
            for hole in list(self.holes):
                for pack in snapshot.take(self.store, *hole, self.damaged, self._pack_segments,
                                          stopped=self._stop.is_set):
                    self.damaged.discard(pack)
                if self._stop.is_set():
                    return
                self.holes.remove(hole)
            for pack in snapshot.take(self.store, self.packed + 1, last if tail else 0, self.damaged,
                                      self._pack_segments, full=True, stopped=self._stop.is_set):
                self.damaged.discard(pack)
                self.packed = pack.last
            if self._stop.is_set():
                return
            if self.damaged:
                self.check_lease()
            for pack in [pack for pack in self.damaged if pack.last <= self.packed]:
                self.store.remove(pack.path)                  # other packs hold its segments
                self.damaged.discard(pack)
            self._next_snapshot = self.packed + self._pack_segments
        except Exception as e:
            log.warning("no snapshot of the log was taken (%s); the next start takes longer, nothing is lost", e)

    # -- writing -------------------------------------------------------------------------------------------------
    def append(self, record: PartRecord) -> PartRecord:
        """Add the record of a finished task to the next segment (file of the log). The segment is committed about
        SEGMENT_S seconds later, or at once by `flush` or when it is full. Returns the record that counts, which is the
        first one for its key. Raises OtherContent when an earlier record of the key was retired (withdrawn) because of
        damage, and the files of `record` have other contents than the files of that earlier record."""
        with self._lock:
            self._check()
            before = self.retired_contents(record.key)
            other = sorted(n for n, info in record.files.items() if before.get(n, info.content) != info.content)
            if other and record.key not in self:
                raise OtherContent(
                    f"{record.node}: task {record.key} ran again and wrote other contents to {', '.join(other)} than "
                    f"at first, so the results of later tasks would not fit: a stage or a library has changed. Use the "
                    f"environment with which the store was made, or a new --store")
            data = encode_record(record)
            if self._add_record(Facts(record.key, record.replay_key, bool(record.quarantine)), data):
                self._wait(self._waiting, data)
                return record
            return self.get(record.key)  # type: ignore[return-value]

    def quarantine(self, key: str, row: int, stage: int, reason: str) -> None:
        """Quarantine a row (a document) that the unfinished task `key` reads, so that the task's next attempt skips the
        row even if this process dies. The quarantine is committed about SEGMENT_S seconds later, or at once by `flush`.
        If a row is quarantined twice, the first `stage` (number of the stage that failed) and `reason` count."""
        entry = {"key": key, "row": row, "stage": stage, "reason": reason}
        with self._lock:
            self._check()
            if self._quarantine_row(entry):
                self._wait(self._quarantined, entry)

    def release(self, key: str) -> None:
        """Withdraw the quarantine of all rows of the task `key`, and commit this before returning. It is called when
        the task has failed for good. Skipping the rows did not help, so nothing shows that they were to blame, and the
        next run reads them again."""
        with self._lock:
            self._check()
            if self._quarantined_rows.pop(key, None) is not None:
                self._released.append(key)
                self.flush()                # now, because replaying a segment applies quarantines before releases

    def retire(self, key: str, attempt: str, why: str) -> bool:
        """Withdraw the record of the task `key` that `attempt` committed, because its files are damaged or missing.
        `why` describes the damage. The withdrawal is committed before returning. The task runs again when its result is
        needed. Returns False when the key has no record, or when its current record comes from another attempt."""
        return self._retire_all([{"key": key, "attempt": attempt, "why": why}]) > 0

    def retire_unnamed(self, pairs: Iterable[tuple[str, str]], why: str = "no run names it") -> int:
        """Withdraw records of tasks whose results are no longer wanted, and commit this before returning. `pairs` gives
        each as (key, attempt), and `why` says why. The content hashes of their files are not kept, so if such a task
        runs again, its files may have other contents. Returns the number of records withdrawn."""
        return self._retire_all({"key": key, "attempt": attempt, "why": why, "unnamed": True}
                                for key, attempt in pairs)

    def retire_files(self, damaged: Mapping[str, str]) -> int:
        """Withdraw the commit records that name damaged files, and commit this before returning. `damaged` maps the
        path of a file (objects/KEY/ATTEMPT.name) to a description of the damage. A path that no record names is
        ignored. Returns the number of records withdrawn."""
        def entries() -> Iterator[dict[str, Any]]:
            for path, why in damaged.items():
                key = path.split("/")[1] if path.startswith("objects/") else ""
                record = self.get(key)                        # None if an earlier file already retired it
                if record is not None and any(info.path == path for info in record.files.values()):
                    yield {"key": key, "attempt": record.attempt, "why": why}
        return self._retire_all(entries())

    def _retire_all(self, entries: Iterable[dict[str, Any]]) -> int:
        """Withdraw the record that each entry {key, attempt, why} names, and commit the entries. Returns the number of
        records withdrawn. When a folder of the store was lost, there may be a million entries, so each segment (file of
        the log) gets a bounded number of them."""
        retired = 0
        with self._lock:
            self.flush()
            for entry in entries:
                if self._retire(entry, self.segments + 1):
                    self._retired.append(entry)
                    retired += 1
                if len(self._retired) >= self._segment_records:
                    self.flush()
            self.flush()
        return retired

    def _wait(self, queue: list[T], entry: T) -> None:
        if not self._waiting and not self._quarantined:
            self._oldest = self._clock.now()
        queue.append(entry)
        if len(self._waiting) + len(self._quarantined) >= self._segment_records:
            self.flush()

    @property
    def _uncommitted(self) -> bool:
        """Whether entries of the log wait to be written, or were being written when this process was interrupted."""
        return bool(self._waiting or self._quarantined or self._released or self._retired
                    or (self._sending is not None and self._sending[0] > self.segments))

    def flush(self) -> None:
        """Commit all entries added to the log so far, and return when they are durable. After an interrupt (Ctrl-C)
        `flush` may be called again. The second call tries to create the same segment (file of the log) under the same
        number. A nonce (random id) in the segment shows whether the interrupted call had already created it."""
        with self._lock:
            self._check()
            while self._uncommitted:
                number = self.segments + 1
                if self._sending is None or self._sending[0] != number:
                    body: dict[str, Any] = {
                        "format": FORMAT, "kind": "records", "epoch": self.epoch, "nonce": self._clock.new_id(),
                        "records": self._waiting, "quarantined": self._quarantined}
                    body |= {name: entries for name, entries in (("released", self._released),
                                                                 ("retired", self._retired)) if entries}
                    self._sending, self._waiting, self._quarantined = (number, body), [], []
                    self._released, self._retired = [], []
                try:
                    other = segment.create(self.store, *self._sending, self._clock)
                    if other is not None:
                        raise self._fenced(other)
                except Exception as e:
                    # final even if a retry might work: a put of unknown outcome may still reach the store
                    self._failed = e
                    raise
                self.segments = number
                self.unpacked += sum(map(len, self._sending[1]["records"]))

    def check_lease(self) -> None:
        """Raise Fenced if another driver (process that schedules a run) has taken over the store. A driver calls this
        before it changes files that the commit log does not protect, such as a published dataset."""
        with self._lock:
            self._check()
            name = segment_name(self.segments + 1)
            if self.store.exists(name):
                self._failed = self._fenced(decode_segment(self.store.read(name), self.store.at(name)))
                raise self._failed

    def _fenced(self, other: dict[str, Any]) -> Fenced:
        holder = other.get("holder") or {"run": "?", "host": "?", "pid": "?"}
        return Fenced(f"this run lost {self.store.root} to run '{holder['run']}' (host {holder['host']}, process "
                      f"{holder['pid']}), which took the store over. What this run had committed is kept: let that run "
                      f"finish, or start again later")

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Commit all entries added to the log and give up its lease (the right to append). If an entry cannot be
        committed, raises the error of the failed commit, which may have happened earlier in the background thread. A
        second call does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._packer is not None:
            self._packer.join()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._uncommitted:
                self.flush()
            if self._failed is None:
                self._failed = StoreError(f"the log of {self.store.root} is closed")
                self._beat(closed=True)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
