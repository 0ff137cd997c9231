"""Defines the messages between the driver, the supervisors and the children, and the one codec that carries them across
process boundaries.

The driver schedules the tasks of a run and commits their results. A supervisor runs on a worker machine, and starts and
watches the children, which are the confined processes that run tasks.

* An `Assignment` goes from the driver's scheduler to a backend. Events come back: `Done`, `Failed`, `Hindered`, `Lost`,
  `Returned`, `Hanging`, `Quarantined`, `StatusReport`, and `Ready`, which is the first event of each supervisor.
* A `Work` order goes from a supervisor to a child, which answers with `Finished`, `Raised` or `NeedsFreshProcess`.

Inside a process the objects themselves are passed. At a process boundary, which is a child's pipe or a call of a Ray
actor, `encode` turns a message into JSON, and the `Channel` of that direction turns it back into an object. A task's
spec is thus serialised at most twice: on its way to another node, and on its way into a child.

A child parses hostile documents and may have been taken over by one. Its answers are therefore never unpickled. They
are read as JSON, only as one of the expected messages, and with fields of the declared types. A wrong message ends the
child and not the run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from pipeline.engine.backends.fingerprint import Fingerprint
from pipeline.engine.task import Skip, TaskSpec
from pipeline.store.records import PartRecord

M = TypeVar("M")
_LENGTH = struct.Struct(">I")
MAX_BYTES = 64 << 20         # bytes of the longest message; a record is about 1 kB

#: what caused a failure. `exception`: the task's own code; the task is repeated a few times. `permanent`: an error that
#: every other attempt would meet. `environment`: the machine or the storage. `lost`: the death of the node. `damaged`:
#: a file of the store differs from its record
FailureKind = Literal["exception", "permanent", "environment", "lost", "damaged"]


class ProtocolError(ValueError):
    """Bytes that are not a message, or a message that was not expected here."""


@dataclass(frozen=True)
class Failure:
    """Why an attempt at a task failed. `row`: the row at which the task's own code raised an exception. The same
    message at the same row in the next attempt ends the run. `row` is None for an error to which this rule must not
    apply, for instance because it may be temporary. `path`: the damaged file of the store, for the kind `damaged`."""

    kind: FailureKind
    message: str
    row: int | None = None
    path: str = ""
    traceback: str = ""


class TaskStatus(NamedTuple):
    """The state of a running attempt at a task. `row` and `stage` are those of its crash cursor, which says which
    document is being processed (-1: outside any document). The attempt has run for `seconds`, and its cursor has not
    moved for `still` seconds. `does` is the state of its process (`worker.limits.doing`)."""

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
    """One attempt at a task. `id` is unique within a driver, `attempt` is the prefix of the names of the attempt's
    files, and `skip` lists the rows that killed earlier attempts."""

    id: int
    spec: TaskSpec
    attempt: str
    skip: tuple[Skip, ...] = ()


# -- backend to scheduler ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ready:
    """A supervisor has started. `confinement`: what its node supports for confining children. `sees_store`: whether it
    found the test file that the driver had written into the store; None if it was not asked to look for one."""

    fingerprint: Fingerprint
    confinement: dict[str, Any]
    sees_store: bool | None = None


@dataclass(frozen=True)
class Done:
    """The task has run, and its files are in the store."""

    id: int
    record: PartRecord


@dataclass(frozen=True)
class Failed:
    id: int
    failure: Failure


@dataclass(frozen=True)
class Hindered:
    """A full disk or unresponsive storage keeps the task from its work. The task waits and is tried again on the same
    node.
    """

    id: int
    message: str


@dataclass(frozen=True)
class Lost:
    """The node died under these attempts; no document is to blame. `host`: the node's id, or "" if it is not known. A
    node may have several supervisors, and their losses count as one death."""

    ids: tuple[int, ...]
    message: str
    host: str = ""


@dataclass(frozen=True)
class Returned:
    """These attempts never started, or their node was drained (announced its end). They do not count as failures."""

    ids: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Hanging:
    """The crash cursor of an attempt, which marks the document being processed, has not moved for a long time."""

    status: TaskStatus


@dataclass(frozen=True)
class Quarantined:
    """Proof that a document kills its process, or that an input file does so from one of its records on. Later attempts
    skip that document, or the rest of that file."""

    id: int
    row: int
    stage: int
    reason: str


@dataclass(frozen=True)
class StatusReport:
    """The states of all running tasks. A supervisor reports its own tasks; the scheduler gets one report for all
    supervisors."""

    running: tuple[TaskStatus, ...]


Event = Ready | Done | Failed | Hindered | Lost | Returned | Hanging | Quarantined | StatusReport


# -- supervisor to child -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """An order to run the task `spec` on the store at `store`, with the folder `scratch` for temporary files. `rows` or
    `file` limits the run to some rows or to one input file, in order to investigate a crash; its output is then
    discarded."""

    spec: TaskSpec
    attempt: str
    store: str
    scratch: str
    skip: tuple[Skip, ...] = ()
    rows: tuple[int, int] | None = None          # first and last row
    file: int | None = None
    batch_rows: int | None = None


# -- child to supervisor -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Finished:
    record: PartRecord


@dataclass(frozen=True)
class Raised:
    failure: Failure


@dataclass(frozen=True)
class NeedsFreshProcess:
    """This child cannot run the task, because it was sealed (has given up its rights) for other stages. The task needs
    a new process."""


Answer = Finished | Raised | NeedsFreshProcess


# -- the codec ---------------------------------------------------------------------------------------------------------
#: declared types of fields that are checked when a message is read
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "float": (int, float), "int | None": (int, type(None)), "FailureKind": str,
    "dict[str, Any]": dict, "list[dict[str, Any]]": list, "Counters": dict}


def _checked(value: M) -> M:
    """Return the dataclass `value`. Raises TypeError when a field does not have its declared type."""
    for f in fields(value):                                                     # type: ignore[arg-type]
        expected, actual = _TYPES.get(str(f.type)), getattr(value, f.name)
        if (expected and not isinstance(actual, expected)) or (f.type == "FailureKind" and actual not in _KINDS):
            raise TypeError(f"{f.name} is not {f.type}")
    return value


def _record(doc: Mapping[str, Any]) -> PartRecord:
    record = _checked(PartRecord.from_json(doc))
    for file in record.files.values():
        _checked(file)
    return record


_KINDS = get_args(FailureKind)
#: field → function that restores a type JSON lacks
_READ: dict[str, Callable[[Any], Any]] = {
    "spec": TaskSpec.from_json,
    "record": _record,
    "failure": lambda doc: _checked(Failure(**doc)),
    "fingerprint": Fingerprint.from_json,
    "status": lambda row: TaskStatus(*row),
    "running": lambda rows: tuple(TaskStatus(*row) for row in rows),
    "skip": lambda rows: tuple(Skip(*row) for row in rows),
    "ids": tuple,
    "rows": lambda rows: rows if rows is None else (rows[0], rows[1]),
}


def _plain(value: Any) -> Any:
    if isinstance(value, TaskSpec | PartRecord):
        return value.to_json()
    if isinstance(value, Failure | Fingerprint):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return value


def encode(message: Any) -> dict[str, Any]:
    """Turn a message into JSON-able values. Values that already are JSON are shared, not copied."""
    return {"type": type(message).__name__, **{f.name: _plain(getattr(message, f.name)) for f in fields(message)}}


def pack(message: Any) -> bytes:
    """A message as bytes for a pipe: its length (4 bytes, big-endian) and its JSON. Raises ProtocolError when it is too
    long."""
    body = json.dumps(encode(message), separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes; a message may have {MAX_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Channel(Generic[M]):
    """Decodes the messages that cross a process boundary in one direction. It accepts only messages of the given
    classes."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def decode(self, doc: Any) -> M:
        """The inverse of `encode`. Raises ProtocolError for anything but an expected message."""
        try:
            kind = self._kinds[doc["type"]]
            message: M = _checked(kind(**{name: _READ[name](value) if name in _READ else value
                                          for name, value in doc.items() if name != "type"}))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise ProtocolError(f"not a message that may come here ({type(e).__name__}: {e}): {str(doc)[:200]}") from e
        return message

    def unpack(self, buffer: bytearray) -> M | None:
        """Remove the first complete message from `buffer` and return it; None if no message is complete yet. Raises
        ProtocolError for anything else than an expected message."""
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
    """Returns the entries of `rows` {row: (stage, reason)} as `Skip` objects, in order of the rows."""
    return tuple(Skip(row, stage, reason) for row, (stage, reason) in sorted(rows.items()))
