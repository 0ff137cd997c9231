"""Defines the messages between the driver, the supervisors and the children, and the code that turns them into bytes
and back where they cross a process boundary.

The driver schedules the tasks of a run and commits their results. A supervisor runs on a worker machine, and starts and
watches the children, which are the confined processes that run tasks.

* An `Assignment` goes from the driver's scheduler to a backend. The backend answers with events: `Done`, `Failed`,
  `Hindered`, `Lost`, `Returned`, `Hanging`, `Quarantined` and `StatusReport`. The first event of each supervisor is
  `Ready`, which is meant for the backend; the scheduler ignores it.
* A `Work` order goes from a supervisor to a child, which answers with `Finished`, `Raised` or `NeedsFreshProcess`.

Inside a process the objects themselves are passed. A process boundary is a child's pipe or a call of a Ray actor. There
`encode` turns a message into JSON, and the `Channel` of that direction turns it back into an object. The spec of a task
is thus serialised once to reach a supervisor on another node, and once for each child that gets the task.

A child parses hostile documents and may have been taken over by one. Its answers are therefore never unpickled. They
are read as JSON, and only expected messages with fields of the declared types are accepted (the contents of nested
lists and dicts are not checked here). Any other message ends the child, and its task is tried again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from pipeline.engine.backends.fingerprint import Fingerprint
from pipeline.engine.task import Skip, TaskSpec
from pipeline.store.records import PartRecord

M = TypeVar("M")
_LENGTH = struct.Struct(">I")
MAX_BYTES = 64 << 20         # bytes of the longest message on a child's pipe; a record is about 1 kB

#: what caused a failure. `exception`: the task's own code; the task is repeated a few times. `permanent`: an error that
#: every other attempt would meet. `environment`: the machine or the storage. `lost`: the death of the node. `damaged`:
#: a file of the store differs from its record
FailureKind = Literal["exception", "permanent", "environment", "lost", "damaged"]


class ProtocolError(ValueError):
    """Raised for a message that a channel does not accept. It is not decodable, its class is not expected, a field has
    another type than declared, or it has more than MAX_BYTES bytes."""


@dataclass(frozen=True)
class Failure:
    """Why an attempt at a task failed.

    `row` is the document at which the task's own code raised an exception (-1: outside any document). If the next
    attempt raises the same message at the same row, the run ends. `row` is None for errors that must not end the run in
    this way, for instance because they may be temporary. `path` is the damaged file of the store if `kind` is
    "damaged", else "". `traceback` is the traceback of the exception, or the end of the output of a child process that
    died, or "".
    """

    kind: FailureKind
    message: str
    row: int | None = None
    path: str = ""
    traceback: str = ""


class TaskStatus(NamedTuple):
    """The state of a running attempt at a task. `seconds`: for how long it has run. `row`: the document that it works
    on, or the first one of a batch; -1 outside any document. `stage`: the number of the stage that the document is in,
    negative before the first stage. `still`: for how many seconds `row` and `stage` have not changed. `does`: what its
    process does, such as "computing" or "sleeping" (`worker.limits.doing`)."""

    id: int
    row: int
    stage: int
    seconds: float
    still: float
    host: str
    pid: int
    does: str


# -- scheduler to backend ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Assignment:
    """One attempt at a task, which the scheduler hands to a backend. `id` is unique within a driver. `attempt` is the
    prefix of the names of the files that the attempt writes. `skip` lists the rows (documents) that killed earlier
    attempts."""

    id: int
    spec: TaskSpec
    attempt: str
    skip: tuple[Skip, ...] = ()


# -- backend to scheduler ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ready:
    """The first event of a supervisor, which starts and watches the processes that run tasks on a node. `confinement`:
    what the node's kernel supports for confining these processes. `sees_store`: whether the supervisor found a test
    file that the driver had written into the store; None if it was not asked to look for one."""

    fingerprint: Fingerprint
    confinement: dict[str, Any]
    sees_store: bool | None = None


@dataclass(frozen=True)
class Done:
    """Event: the task has run, and its files are in the store. `record` describes them."""

    id: int
    record: PartRecord


@dataclass(frozen=True)
class Failed:
    id: int
    failure: Failure


@dataclass(frozen=True)
class Hindered:
    """Event: the machine or the storage keeps a task from its work, for example a full disk. The task waits, and is
    tried again on the same node; after several tries in vain, `Failed` follows."""

    id: int
    message: str


@dataclass(frozen=True)
class Lost:
    """Event: the supervisor that ran these attempts at tasks died, alone or together with its node (machine), or does
    not answer any more. No document is to blame. `host` is the node's id, or "" if it is not known. A node may have
    several supervisors. Losses on one node within `losses.SAME_DEATH_S` seconds count as one death of the node."""

    ids: tuple[int, ...]
    message: str
    host: str = ""


@dataclass(frozen=True)
class Returned:
    """Event: these attempts at tasks had not started as far as the driver knows, or the end of their node (machine) was
    announced in advance. They do not count as failures."""

    ids: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Hanging:
    """Event: an attempt at a task has made no progress for a long time. Its crash cursor (the record of which document
    it works on) has not moved."""

    status: TaskStatus


@dataclass(frozen=True)
class Quarantined:
    """Event: a row is proved to kill the process that runs the task. Either it is a document that kills its process in
    a stage, or the process dies while it reads the row from an input file. Later attempts at the task skip such a
    document. They stop reading the file before such a row, and continue behind it if the file's format allows it."""

    id: int
    row: int
    stage: int
    reason: str


@dataclass(frozen=True)
class StatusReport:
    """Event: the states of all running tasks. A supervisor (which runs the tasks of one node) reports its own tasks.
    The scheduler receives one report for all supervisors."""

    running: tuple[TaskStatus, ...]


Event = Ready | Done | Failed | Hindered | Lost | Returned | Hanging | Quarantined | StatusReport


# -- supervisor to child -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """An order to a child process to run the task `spec` on the store at `store`. `scratch` is a folder for temporary
    files.

    `rows` or `file` is set while a crash is investigated. With `rows`, the child processes only these rows. With
    `file`, it only reads the task's input file of this number, and processes no document. The output is discarded in
    both cases."""

    spec: TaskSpec
    attempt: str
    store: str
    scratch: str
    skip: tuple[Skip, ...] = ()
    rows: tuple[int, int] | None = None          # first and last row, both included
    file: int | None = None
    batch_rows: int | None = None                # most documents at a time (`TaskInputs.batch_rows`)


# -- child to supervisor -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Finished:
    record: PartRecord


@dataclass(frozen=True)
class Raised:
    failure: Failure


@dataclass(frozen=True)
class NeedsFreshProcess:
    """Answer of a child process that cannot run the task. The child gave up some rights when it ran an earlier task,
    and the stages of this task need these rights. The task needs a new process."""


Answer = Finished | Raised | NeedsFreshProcess


# -- the codec ---------------------------------------------------------------------------------------------------------
#: annotation of a field → types that its value may have when a message is read; other fields are not checked by it
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "float": (int, float), "int | None": (int, type(None)), "FailureKind": str,
    "dict[str, Any]": dict, "list[dict[str, Any]]": list, "Counters": dict}


@cache
def _checks(kind: type[Any]) -> list[tuple[str, type | tuple[type, ...]]]:
    """Returns the fields of a dataclass whose types are checked, each with the Python types that its value may have.
    The result is cached for each class, because the driver checks a record for every task."""
    return [(f.name, _TYPES[str(f.type)]) for f in fields(kind) if str(f.type) in _TYPES]


def _checked(value: M) -> M:
    """Return the dataclass object `value` unchanged. Raises TypeError when one of its fields does not have the declared
    type."""
    for name, expected in _checks(type(value)):                                 # type: ignore[arg-type]
        if not isinstance(getattr(value, name), expected):
            raise TypeError(f"{name} is not {expected}")
    return value


def _record(doc: Mapping[str, Any]) -> PartRecord:
    record = _checked(PartRecord.from_json(doc))
    for file in record.files.values():
        _checked(file)
    return record


def _failure(doc: Mapping[str, Any]) -> Failure:
    failure = _checked(Failure(**doc))
    if failure.kind not in _KINDS:
        raise TypeError(f"kind is none of {', '.join(_KINDS)}")
    return failure


_KINDS = get_args(FailureKind)
#: field → function that restores a type JSON lacks
_READ: dict[str, Callable[[Any], Any]] = {
    "spec": TaskSpec.from_json,
    "record": _record,
    "failure": _failure,
    "fingerprint": Fingerprint.from_json,
    "status": lambda row: TaskStatus(*row),
    "running": lambda rows: tuple(TaskStatus(*row) for row in rows),
    "skip": lambda rows: tuple(Skip(*row) for row in rows),
    "ids": tuple,
    "rows": lambda rows: rows if rows is None else (rows[0], rows[1]),
}


def _plain(value: Any) -> Any:
    if isinstance(value, (TaskSpec, PartRecord)):
        return value.to_json()
    if isinstance(value, (Failure, Fingerprint)):
        return dict(vars(value))
    return value


def encode(message: Any) -> dict[str, Any]:
    """Turn a message into a dict that can be written as JSON. Fields that are JSON already are shared with the message,
    not copied."""
    return {"type": type(message).__name__, **{name: _plain(value) for name, value in vars(message).items()}}


def pack(message: Any) -> bytes:
    """Returns a message as bytes for a pipe: the length of its JSON (4 bytes, big-endian), then the JSON. Raises
    ProtocolError when the JSON is longer than MAX_BYTES."""
    body = json.dumps(encode(message), separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes; a message may have {MAX_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Channel(Generic[M]):
    """Decodes the messages that cross a process boundary in one direction. It accepts only messages of the classes
    `kinds`."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def decode(self, doc: Any) -> M:
        """Turn the output of `encode` back into a message. Raises ProtocolError unless the result is a message that
        this channel accepts."""
        try:
            kind = self._kinds[doc["type"]]
            message: M = _checked(kind(**{name: _READ[name](value) if name in _READ else value
                                          for name, value in doc.items() if name != "type"}))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise ProtocolError(f"not a message that may come here ({type(e).__name__}: {e}): {str(doc)[:200]}") from e
        return message

    def unpack(self, buffer: bytearray) -> M | None:
        """Remove the first complete message from `buffer` and return it; None if no message is complete yet. Raises
        ProtocolError unless the message is one that this channel accepts."""
        if len(buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(buffer)
        if size > MAX_BYTES:
            raise ProtocolError(f"a message of {size} bytes: this is not the engine's protocol")
        if len(buffer) < _LENGTH.size + size:
            return None
        body = bytes(buffer[_LENGTH.size:_LENGTH.size + size])
        del buffer[:_LENGTH.size + size]
        try:
            doc = json.loads(body)
        except (ValueError, RecursionError) as e:
            raise ProtocolError(f"not a message of the engine: {body[:200]!r}") from e
        return self.decode(doc)


ASSIGNMENTS: Channel[Assignment] = Channel(Assignment)
EVENTS: Channel[Event] = Channel(Ready, Done, Failed, Hindered, Lost, Returned, Hanging, Quarantined, StatusReport)
ORDERS: Channel[Work] = Channel(Work)
ANSWERS: Channel[Answer] = Channel(Finished, Raised, NeedsFreshProcess)


def skips(rows: Mapping[int, tuple[int, str]]) -> tuple[Skip, ...]:
    """Turn {row: (stage, reason)}, the rows that a task must skip, into `Skip` objects in the order of the rows."""
    return tuple(Skip(row, stage, reason) for row, (stage, reason) in sorted(rows.items()))
