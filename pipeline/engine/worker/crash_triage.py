"""Crash triage: finds the document that killed a child, and proves that it did (docs/contracts.md: Tasks and blame).

A child is a process that runs a task on many documents; a supervisor starts and watches it. Triage deals only with
deaths of children. If a stage (a step on documents) merely raises an exception, the task itself puts the document into
quarantine (`pipeline.passes.chain`, `documents`).

The code of this module has no side effects: `classify` interprets an exit status, and `CrashTriage` holds the state of
triage for one attempt at a task. The supervisor reports deaths to `CrashTriage`, and starts the next child in the mode
that `CrashTriage` chooses.

1. A child dies at rows a to b, for a reason that can be a document's fault (a crash, CPU time, memory).
2. If a < b, only rows a to b are *replayed* in a fresh child, one by one. The results are discarded.
3. The row at which that child dies (or row a, if a = b) is the suspect. It is *probed*, which means run alone in a
   fresh child. The row is quarantined only if this child dies, too. The other rows of a to b are then replayed again,
   and the partition (all documents of the task) runs again without the row. Triage only decides this. The supervisor
   reports the row, the scheduler notes it in the commit log, and the next child writes it to quarantine.parquet
   (`pipeline.passes.partition`).
4. If the child of step 2 or that of step 3 does not die, nothing is proved. The partition then runs again in a fresh
   child, one document at a time. After four crashes without proof, the attempt fails.

The child notes in shared memory which rows it works on and in which stage (`CrashCursor`, with special numbers for
other work). If a child dies while it reads a record of the task's input file n (stage -2 - n), the file is the suspect,
and is read *alone* in a fresh child. If this child dies too, later attempts stop reading before that record, and
continue behind it if the file's format allows it. It takes two deaths to find such a record, and a file may have at
most MAX_STOPS of them.

Some deaths are no document's fault. A new child then tries again, a few times (once after a stall), before the attempt
fails:

* deaths outside any document (row -1), or while a part of the store is read (stage -1);
* signals from outside (SIGKILL, SIGTERM, SIGBUS);
* memory pressure of the node;
* stalls, in which a child neither moves on nor computes.

If a full disk or unresponsive storage keeps a child from its work, the task is also tried again, after a wait. A child
that exceeds its CPU limit outside any document makes the attempt fail at once.
"""

from __future__ import annotations

import errno
import re
import signal
import traceback
from dataclasses import dataclass, field

from pipeline.engine.messages import Failure, FailureKind
from pipeline.store.errors import FULL, DamagedFile, EnvironmentFailure, StoreError
from pipeline.store.records import READING

#: signals that a process's own instructions cause. SIGBUS is not one of them. It means that a page of a mapped file (a
#: model, a list) could not be read, because the storage cannot be reached or a disk is full, or that the machine's
#: memory is broken
_OWN = {signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}
#: errors of a file system whose storage does not answer (NFS, FUSE, a broken disk)
_AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EHOSTDOWN, errno.ENOTCONN)
MEMORY_EXIT = 137       # exit status of a child after a MemoryError
#: number of records of one input file (or piece of it) that may kill its reader. After the first, the task continues
#: reading behind this record if the file's format allows it. After the second, it stops reading the file there. After
#: the third, it skips the whole file
MAX_STOPS = 3


@dataclass(frozen=True)
class Fault:
    """The reason why a child process (which runs a task) died. `charged` is True if the document that the child
    processed may be at fault. `reason` goes into the quarantine entry of that document."""

    reason: str
    charged: bool


CPU_LIMIT = Fault("cpu_limit", True)
MEMORY = Fault("memory", True)
STALLED = Fault("stalled", False)
PRESSURE = Fault("memory_pressure", False)
ENDLESS = Fault("cpu_limit", False)     # CPU limit outside documents: blames the task


def classify(returncode: int) -> Fault:
    """Returns the fault behind the exit status of a child process that the supervisor did not kill. As in `subprocess`,
    a negative status is the number of the signal that killed the child."""
    if returncode == MEMORY_EXIT:
        return MEMORY
    if returncode >= 0:
        return Fault(f"crash:exit{returncode}", True)
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return Fault(f"signal{-returncode}", False)
    if number == signal.SIGXCPU:                        # a process with a CPU budget, started by a stage
        return CPU_LIMIT
    if number in _OWN:
        return Fault(f"crash:{number.name}", True)
    return Fault(f"killed:{number.name}", False)        # the kernel's OOM killer, a preemption, an operator


def hinders(error: Exception) -> bool:
    """Whether an error that a task raised is a temporary fault of the machine or the storage, and not of the task."""
    return isinstance(error, EnvironmentFailure) or (isinstance(error, OSError) and error.errno in (*FULL, *_AWAY))


def permanent(error: Exception) -> bool:
    """Whether every other attempt at the task would meet the same error. The class of the error declares this (for
    instance `SettingsError`, or the errors of a tokenizer that cannot be loaded or of an input that changed)."""
    return getattr(error, "permanent", False) is True


def failure(error: Exception, row: int, hint: str = "") -> Failure:
    """Returns the `Failure` message for `error`, which a task raised at the document in row `row`. Must be called while
    the error is being handled.

    The message has a `row` only if its kind is "exception" and `error` is no error of the operating system. Such an
    error may be temporary, so meeting it twice at one row proves nothing."""
    message, trace = describe(error) + hint, traceback.format_exc()[-8000:]
    if path := damaged_path(error):
        return Failure("damaged", message, path=path, traceback=trace)
    if hinders(error):
        return Failure("environment", message, traceback=trace)
    if permanent(error):
        return Failure("permanent", message, traceback=trace)
    return Failure("exception", message, row=None if isinstance(error, OSError) else row, traceback=trace)


def describe(error: BaseException) -> str:
    """Returns an error in words: 'Type: message', or the message alone if it already names file, key and remedy."""
    if isinstance(error, StoreError) or getattr(error, "permanent", False) is True:
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def gist(message: str) -> str:
    """Returns `message` without its paths. Messages about forty files on one full disk thus count as one message."""
    return re.sub(r"\S*/\S*", "…", message)


def damaged_path(error: BaseException) -> str:
    """Returns the path of the damaged file if `error`, one of its causes or one of its contexts is a DamagedFile;
    otherwise ""."""
    current: BaseException | None = error
    visited: set[int] = set()                   # an error raised again while handled is its own context
    while current is not None and id(current) not in visited:
        if isinstance(current, DamagedFile):
            return current.path
        visited.add(id(current))
        current = current.__cause__ or current.__context__
    return ""


#: hint for a task that ran out of memory outside documents
_TOO_BIG = ("; reading or writing its files takes more memory than its reader and stages declare: cut the input into "
            "smaller files (Parquet: smaller row groups), or lower the caps of its reader")


class GaveUp(Exception):
    """Raised when crash triage (the search for the document that kills the processes of a task) gives the attempt up.
    `kind` says what is at fault: "exception" (the task) or "environment" (the node)."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class CrashTriage:
    """The state of crash triage for one attempt at a task. Crash triage finds the document that kills the child
    processes of the attempt.

    `mode` says what the next child process does. It can "run" the partition (all documents of the task), "replay" rows
    one by one, "probe" a suspect row alone, or "read" one input file alone."""

    skip: dict[int, tuple[int, str]] = field(default_factory=dict)   # quarantined rows: (stage, reason)
    max_quarantined: int = 100       # more than this in one partition means bad code, not bad data
    max_environment: int = 3
    max_stalls: int = 1            # each stall lasts for the whole wall limit
    max_unproven: int = 3          # most crashes that do not happen again when they are investigated
    mode: str = "run"
    rows: tuple[int, int] | None = None     # first and last row to process in replay and probe
    file: int | None = None                 # input file to read alone, in mode "read"
    batch_rows: int | None = None
    environment: int = 0
    stalls: int = 0
    unproven: int = 0
    _range: tuple[int, int] | None = None   # rows left to replay after the probe
    _row: int = -1                          # row of the death, while its file is read alone
    _explained: bool = False                # a document of the batch was quarantined, so the other ones may pass

    @property
    def fresh(self) -> bool:
        """Whether the next child must be a new process. It must be new while a crash is investigated. It must also be
        new after a crash that did not happen again when the documents ran alone. State that earlier tasks left in the
        old process may have caused this crash."""
        return self.mode != "run" or self.unproven > 0

    def passed(self) -> bool:
        """Note that a child process has done its work without dying. Returns True if the child ran the whole partition
        (all documents of the task), so that triage is over. Otherwise returns False, and another child is needed."""
        if self.mode == "run":
            return True
        if self.mode == "replay" and self._explained:
            self.mode, self.rows, self._explained = "run", None, False
            return False
        self._not_proven("its documents crash together but not one by one" if self.mode == "replay" else
                         f"it dies at row {self.rows[0] if self.rows else -1}, but that document alone is well"
                         if self.mode == "probe" else
                         f"it dies while reading record {self._row}, but that file alone can be read")
        return False

    def hindered(self, message: str) -> float:
        """Note that a child process, which did not die, could not work. Either a disk is full, or storage did not
        answer after retries. Returns the seconds to wait before the next try. Raises GaveUp if there were too many such
        tries on this node."""
        self.environment += 1
        if self.environment > self.max_environment:
            raise GaveUp("environment", message)
        return 2.0 ** (self.environment - 1)

    def died(self, fault: Fault, cursor: tuple[int, int, int]) -> tuple[int, int, str] | None:
        """Note that a child process died for `fault` while it worked at `cursor` (first row, last row, stage). Returns
        (row, stage, reason) if a row must be quarantined, otherwise None. Raises GaveUp when nothing is left to try."""
        first, last, stage = cursor
        if fault is STALLED:
            self.stalls += 1
            if self.stalls > self.max_stalls:
                raise GaveUp("exception", f"child stood still {self.stalls} times, {_place(cursor)}: it waits for "
                                          f"something that does not come (a lock, storage, another process)")
            return None
        if fault is ENDLESS:
            raise GaveUp("exception", f"it computes {_place(cursor)} for longer than any input of its size should "
                                      f"take: a reader or a step does not come to an end; leave this input out, or cut "
                                      f"it into smaller files")
        if fault.charged and first >= 0 and stage <= READING:
            return self._died_reading(fault, first, stage)
        if not fault.charged or first < 0 or stage < 0:
            self.environment += 1
            if self.environment > self.max_environment:
                raise GaveUp("exception" if fault.charged else "environment",
                             f"child died {self.environment} times ({fault.reason}, {_place(cursor)})"
                             + (_TOO_BIG if fault is MEMORY else ""))
            return None
        if self.mode == "read":
            raise GaveUp("exception", f"told to read one file only, it died {_place(cursor)} ({fault.reason}); let it "
                                      f"honour inputs.file")
        if all(row in self.skip for row in range(first, last + 1)):
            raise GaveUp("exception", f"the task works on row {first}, which it was told to skip; "
                                      f"let it honour inputs.skip")
        if self.mode == "probe" and self.rows == (first, last):
            self.skip[first] = (stage, fault.reason)
            if len(self.skip) > self.max_quarantined:
                raise GaveUp("exception", f"more than {self.max_quarantined} documents of this partition had to be "
                                          f"quarantined, the last for {fault.reason}: bad code, not bad data")
            self._explained = self._range is not None
            self.mode, self.rows, self._range = ("replay", self._range, None) if self._range else ("run", None, None)
            return first, stage, fault.reason
        if self.mode == "run" and first < last:
            self.mode, self.rows, self._explained = "replay", (first, last), False
        elif self.mode == "probe" or first < last:      # it died at rows it was not told to process
            raise GaveUp("exception", f"told to work on rows {self.rows} one by one, it died at {first} to {last} "
                                      f"({fault.reason}); let it honour inputs.only and inputs.batch_rows")
        else:
            self._range = self.rows if self.mode == "replay" else None
            self.mode, self.rows = "probe", (first, first)
        return None

    def _died_reading(self, fault: Fault, row: int, stage: int) -> tuple[int, int, str] | None:
        if self.mode == "read" and self.file != READING - stage:
            raise GaveUp("exception", f"told to read one file only, it died {_place((row, row, stage))} of another; "
                                      f"let it honour inputs.file")
        if self.mode != "read":
            if sum(place == stage for place, _ in self.skip.values()) >= MAX_STOPS:
                raise GaveUp("exception", f"it goes on reading a file that it was told to pass over ({fault.reason}, "
                                          f"{_place((row, row, stage))}); let it honour inputs.skip")
            self.mode, self.file, self._row = "read", READING - stage, row
            self.rows, self._range, self._explained = None, None, False
            return None
        row = self._row
        # later rows get other numbers, so their verdicts no longer hold and triage must repeat them
        earlier = {skipped: verdict for skipped, verdict in self.skip.items() if skipped < row}
        self.skip = earlier | {row: (stage, fault.reason)}
        if len(self.skip) > self.max_quarantined:
            raise GaveUp("exception", f"more than {self.max_quarantined} documents and files of this partition had to "
                                      f"be quarantined, the last for {fault.reason}: bad code, not bad data")
        self.mode, self.file = "run", None
        return row, stage, fault.reason

    def _not_proven(self, what: str) -> None:
        self.unproven += 1
        if self.unproven > self.max_unproven:
            raise GaveUp("exception", f"{what}, {self.unproven} times: the cause is not one document, but perhaps a "
                                      f"memory leak, or too little declared memory; declare more memory_mb or make "
                                      f"smaller partitions")
        self.mode, self.rows, self._range, self.batch_rows, self.file = "run", None, None, 1, None


def _place(cursor: tuple[int, int, int]) -> str:
    if cursor[0] >= 0 and cursor[2] < 0:
        return f"while reading record {cursor[0]}"
    return f"at row {cursor[0]}, stage {cursor[2]}" if cursor[0] >= 0 else "outside any document"
