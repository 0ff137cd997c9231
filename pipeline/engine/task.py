"""Defines the interface of tasks, the units of work that the engine runs: `task.run(inputs, cursor, out) -> counters`.

A task is a class with a `name`, a `version` and a static `run`. It reads the files that its JSON arguments name, writes
named files, and returns counters that can be merged over tasks (`store.records.merge_counters`). It never sees Ray, the
commit log or other tasks::

    class CountLines:
        name = "count_lines"
        version = 1

        @staticmethod
        def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
            with open(inputs.fetch(inputs.args["file"]), "rb") as f:
                n = sum(1 for _ in f)
            Path(out.path("lines.txt")).write_text(str(n))
            return {"lines": n}

Workers find a task by its import path 'module:Class'. The key under which its results are stored covers the name and
the version instead. A class of Tokenmill may therefore move to another module, and its stored results stay valid. (For
a user's own class, the key also covers the source code of its module.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from pipeline.base.errors import TokenmillError
from pipeline.base.files import state
from pipeline.store.errors import GONE, ChangedFile, DamagedFile
from pipeline.store.fs import Needs, Store, matches
from pipeline.store.records import READING, Counters

if TYPE_CHECKING:
    import numpy as np

    from pipeline.engine.shuffle.segment_writer import SegmentWriter
    from stages import task


class ResourceRequest(NamedTuple):
    """The resources that a task needs. Tasks with equal requests are of one kind and wait in one queue."""

    memory_mb: int
    gpus: float = 0.0                  # below 1 a share of one device, else whole devices (1.5 takes two)
    cpu: str = ""                      # CPU tag its numbers depend on (`base.machine.cpu_tag`); "": any CPU


class Skip(NamedTuple):
    """A row (a document) that killed the process of its task at stage number `stage`, for `reason`. Later attempts at
    the task put the row into quarantine instead of processing it.

    A row may also kill the process while it is read from an input file. `stage` then encodes the number of this file
    (`CrashCursor.reading`). Later attempts stop reading before the row, and continue behind it if the file's format
    allows it.
    """

    row: int
    stage: int
    reason: str


@dataclass(frozen=True)
class TaskSpec:
    """The description of one task, the unit of work. `key` identifies the result: tasks with equal keys have equal
    results. `args` are the arguments, as JSON. The module `pipeline.store.content_keys` computes keys, and lists the
    dicts that have a special meaning in `args`."""

    key: str
    task: str                          # import path 'module:Class'
    node: str                          # dataset, or 'dataset/wave'; for progress, the log and the report
    args: dict[str, Any]
    weight: int = 1                    # bytes read; orders tasks (largest first), and sets the ETA and CPU limits
    label: str = ""                    # for people: 'web/crawl-01.warc.gz [3/8]'
    memory_mb: int = 500               # memory that it may use, without that of an idle child process
    gpus: float = 0.0
    order: int = 0                     # position in the node's plan order
    origin: str = ""                   # source or dataset of its part
    replay_key: str = ""               # key without thresholds; tasks with the same one compute the same signals
    cpu: str = ""                      # CPU tag in the keys of its numeric stages; it runs only on such CPUs
    confined: bool = True              # False: a user's own stage or reader needs more rights
    roots: tuple[str, ...] = ()        # object storage, besides the store, that its input files are read from

    @property
    def kind(self) -> ResourceRequest:
        return ResourceRequest(self.memory_mb, self.gpus, self.cpu)

    def to_json(self) -> dict[str, Any]:
        """Return the task's fields as a dict by name, which can be written as JSON. `args` is shared with this object,
        not copied."""
        return {**vars(self), "roots": list(self.roots)}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> TaskSpec:
        return cls(**{**doc, "roots": tuple(doc.get("roots", ()))})


class ChangedInput(Exception):
    """Raised when an input file has changed since the run was planned."""

    permanent = True


class DamagedIndex(TokenmillError):
    """Raised when a file of an index outside the store (`tokenmill dedup index`) is missing or damaged."""

    permanent = True


def _changed(ref: Mapping[str, Any]) -> ChangedInput:
    return ChangedInput(f"{ref['$file']} (below {ref['root']}) changed since the run was planned; run again")


def _unchanged(path: str, ref: Mapping[str, Any]) -> bool:
    """Whether the local file at `path` is still the version that `ref` describes, with which the run was planned.
    Compares the size and the modification time, or the size and the hash if `ref` has a hash. Hashing a large file for
    every task that reads it would be slow. The file is therefore not hashed again if its inode, size and times are
    those that the driver saw when it hashed the file."""
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return False
    if info.st_size != ref["size"]:
        return False
    hashed = re.fullmatch(r"(?:sha256:)?([0-9a-f]{64})", ref["etag"])
    if hashed is None:
        return not ref["etag"].isdecimal() or str(info.st_mtime_ns) == ref["etag"]
    return ref.get("$volatile", {}).get("hashed") == state(info) or matches(path, hashed[1])


class CrashCursor:
    """The crash cursor of a task: a record of what its process works on, as three aligned int64 (first row, last row,
    stage).

    The cursor is in shared memory and so survives the death of its process. The supervisor, which started the process,
    then reads from the cursor which document the process died on. (The inline backend has no such processes; it uses
    the cursor, a bytearray, only for error messages.)

    Row -1 means outside any document; no document is blamed for a death there. Stage -1 means before the first stage.
    While a row is read from an input file, the stage holds the file's number (`reading`), so that the file can be
    blamed.
    """

    SIZE = 24
    __slots__ = ("_buffer", "set")

    def __init__(self, buffer: mmap.mmap | bytearray | None = None) -> None:
        self._buffer = bytearray(self.SIZE) if buffer is None else buffer
        #: set(first row, last row, stage); not a method, since it is called for every document and stage
        self.set: Callable[[int, int, int], None] = partial(struct.Struct("<qqq").pack_into, self._buffer, 0)
        self.clear()

    def clear(self) -> None:
        self.set(-1, -1, -1)

    def reading(self, row: int, file: int) -> None:
        """Note in the crash cursor that row `row` is being read from input file number `file` of the task."""
        self.set(row, row, READING - file)

    def read(self) -> tuple[int, int, int]:
        """Returns (first row, last row, stage). Writing the three numbers is not atomic, so this may read a new first
        row together with an older, smaller last row. The last row is then raised to the first, because an empty range
        of rows would have a CPU limit of 0."""
        first, last, stage = struct.unpack_from("<qqq", self._buffer, 0)
        return first, max(first, last), stage


class TaskInputs:
    """All that a task may read: its arguments and the files that they name."""

    def __init__(self, spec: TaskSpec, store: Store, scratch: str, *, skip: Iterable[Skip] = (),
                 only: Iterable[int] | None = None, batch_rows: int | None = None, file: int | None = None,
                 confine: Callable[[Sequence[str]], None] = lambda programs: None) -> None:
        from pipeline.store.lists import unfold

        self.spec, self.key, self.store, self.scratch = spec, spec.key, store, scratch
        self.args: dict[str, Any] = unfold(spec.args, store.read)
        #: rows of this partition to quarantine instead of processing
        self.skip: dict[int, Skip] = {fault.row: fault for fault in skip}
        #: in crash triage, the only rows to process, else None; the output of such a run is discarded
        self.only = None if only is None else frozenset(only)
        #: most documents to process between two updates of the crash cursor: 1 while a crash is investigated, and after
        #: an investigation without proof; else None
        self.batch_rows = batch_rows
        #: in crash triage, the number of the only input file to read (as `CrashCursor.reading` counts), else None
        self.file = file
        #: confines this process, which then has no rights that a parser must not have. A task calls it with the
        #: programs that its stages start, after it has set up the stages and before it parses input
        self.confine = confine
        self._by_range: dict[str, Mapping[str, Any]] = {}      # files of the store read by range
        self._read: dict[str, Mapping[str, Any]] = {}          # input files on this disk that were handed out

    def fetch(self, ref: Mapping[str, Any], needs: Needs | None = None) -> str:
        """Return the local path of the file that the argument `ref` names. `ref` holds either `$ref`, a file of the
        store, or `$file`, an input file. The task must not change the file. A remote file is downloaded to the scratch
        folder, through this machine's cache. `needs` is a function that may choose byte ranges of a remote input file.
        The local file then holds these ranges, and other ranges may be missing.

        Raises ChangedInput if an input file has changed since the run was planned, because results made from it must
        not be stored under this task's key. Raises DamagedFile if a file of the store differs from its record."""
        if "$ref" in ref:
            return self.store.checked(ref["$ref"], ref["sha256"], self.scratch, size=ref.get("bytes"))
        store = Store(ref["root"])
        if store.local is None:
            try:
                return store.fetch(ref["$file"], self.scratch, size=ref["size"], version=ref["etag"], needs=needs)
            except (ChangedFile, FileNotFoundError) as e:
                raise _changed(ref) from e
        path = store.at(ref["$file"])
        self._read[path] = ref
        if not _unchanged(path, ref):
            raise _changed(ref)
        return path

    def check(self) -> None:
        """Raise ChangedInput when one of the local input files that `fetch` returned has changed since the run was
        planned."""
        for path, ref in self._read.items():
            if not _unchanged(path, ref):
                raise _changed(ref)

    def open(self, ref: Mapping[str, Any]) -> BinaryIO:
        """Open a file of the store for reading at any position. The contents are not checked here. The caller must
        compare the bytes that it reads with checksums that it knows, and raise the error that `damaged` returns if they
        differ. Raises DamagedFile when the file is missing."""
        self._by_range[ref["$ref"]] = ref
        try:
            return self.store.open(ref["$ref"])
        except FileNotFoundError as e:
            raise self.damaged(ref, GONE) from e

    def _place(self, ref: Mapping[str, Any]) -> tuple[Store, str]:
        """Returns (store, path) of a file that is read by range: a file of the store (`$ref`), or of a deduplication's
        index outside the store (`$file`)."""
        if "$file" in ref:
            return Store(ref["root"]), ref["$file"]
        self._by_range[ref["$ref"]] = ref
        return self.store, ref["$ref"]

    def read_range(self, ref: Mapping[str, Any], start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop) of a file of the store, or of a deduplication's index outside the store.
        Returns fewer bytes if the file was cut short. The bytes are not checked here: the caller must compare them with
        checksums that it knows. Raises the error that `damaged` returns when the file is missing."""
        store, path = self._place(ref)
        try:
            return store.read_range(path, start, stop)
        except FileNotFoundError as e:
            raise self.damaged(ref, GONE) from e

    def damaged(self, ref: Mapping[str, Any], why: str = "is damaged: its checksum is wrong") -> Exception:
        """Returns the error that a task must raise when a file that it reads by range does not hold the bytes that were
        written. The error is DamagedFile for a file of the store, which the run then makes again. It is DamagedIndex
        for a file of a deduplication's index outside the store, which only the user can make again."""
        if "$file" in ref:
            return DamagedIndex(f"{ref['$file']} (below {ref['root']}) {why}; make the index again with `tokenmill "
                                f"dedup index`")
        return DamagedFile(ref["$ref"], why)

    def find_damage(self, named: str = "") -> DamagedFile | None:
        """Checks the files of the store that the task read by range. Returns the error for the first file whose bytes
        differ from its record, or None if all files agree with their records. The file at the path `named` is checked
        first."""
        for path in sorted(self._by_range, key=lambda path: path != named):
            ref = self._by_range[path]
            try:
                with tempfile.TemporaryDirectory(dir=self.scratch) as folder:        # one copy on disk at a time
                    self.store.checked(path, ref["sha256"], folder, size=ref.get("bytes"))
            except DamagedFile as e:
                return e
        return None

    def segment(self, ref: Mapping[str, Any], bucket: int) -> np.ndarray:
        """Returns the records of one bucket of an exchange file, read-only. Exchange files carry records from task to
        task (`TaskOutputs.segments`). Only this bucket of the file is read.

        Raises DamagedFile when the file is missing or damaged. For a file of an index outside the store, raises
        DamagedIndex instead, also when it has no such bucket."""
        from pipeline.engine.shuffle.exchange import read_segment

        store, path = self._place(ref)
        try:
            return read_segment(store, {**ref, "$ref": path}, bucket)
        except DamagedFile as e:
            raise (self.damaged(ref, e.why) if "$file" in ref else e) from e
        except (ValueError, TypeError, LookupError, OverflowError) as e:
            if "$file" not in ref:                            # whoever made the index can give it any header
                raise
            raise self.damaged(ref, f"is no file of this index ({e})") from e

    def segments(self, refs: Sequence[Mapping[str, Any]], bucket: int, *, whole: Sequence[str] = (),
                 numbered: bool = False) -> Iterator[np.ndarray]:
        """Yields the records of one bucket of many exchange files, in blocks. The records are merged by the key that
        the files are sorted by (`exchange.merge_segments`). Exchange files carry records from task to task
        (`TaskOutputs.segments`)."""
        from pipeline.engine.shuffle.exchange import merge_segments

        self._by_range |= {ref["$ref"]: ref for ref in refs}
        return merge_segments(self.store, refs, bucket, whole=whole, numbered=numbered, scratch=self.scratch)


class TaskOutputs:
    """The outputs of a task: named files. The task writes them to a local scratch folder; when it returns, they are
    moved into the store under unique names."""

    def __init__(self, scratch: str, covers: Sequence[str] = ()) -> None:
        self.scratch = scratch
        #: content hashes of the parts that this task reads (`ref_contents`); each exchange file that it writes lists
        #: them as its `covers`
        self.covers = tuple(covers)
        self.names: dict[str, dict[str, Any]] = {}
        self.quarantined: list[dict[str, Any]] = []

    def path(self, name: str) -> str:
        """Returns the local path to write the output file `name` to (e.g. 'kept.parquet')."""
        self.names.setdefault(name, {})
        return os.path.join(self.scratch, "out." + name)

    def note(self, name: str, *, rows: int = 0, content: str | None = None, meta: dict[str, Any] | None = None) -> None:
        """Describe the output file `name`: its number of rows, its content hash (default: the sha256 of its bytes), and
        a few small facts `meta`, as JSON."""
        self.names.setdefault(name, {}).update(rows=rows, content=content, meta=meta or {})

    @contextlib.contextmanager
    def segments(self, name: str, dtype: Any, buckets: int, *,
                 key: Sequence[str] | None = (), memory: int = 64 << 20) -> Iterator[SegmentWriter]:
        """Write the exchange file `name`, whose records other tasks read bucket by bucket: `with out.segments(…) as
        writer: writer.write(bucket of each record, records)`.

        Inside a bucket, records are sorted by the fields `key` (None: by all fields). If `key` is (), they stay in the
        order of writing. `memory`: bytes that records in memory and their sorted copy may take together; when they are
        used up, the records are written to a scratch file.
        """
        from pipeline.engine.shuffle.segment_writer import SegmentWriter

        with SegmentWriter(self.path(name), dtype, buckets, key=key, covers=self.covers, memory=memory) as writer:
            yield writer
        self.note(name, rows=writer.rows, content=writer.content, meta={"buckets": buckets, "largest": writer.largest})

    def quarantine(self, row: int, id: str, stage: str, stage_key: str, reason: str,
                   file: Mapping[str, Any] | None = None) -> None:
        """Note that a document of the task is quarantined because it crashed its process, or used too much CPU time or
        memory. The note becomes part of the task's commit record. `file` is given if the process died while it read the
        document from an input file; `file` then tells later runs where to stop reading."""
        self.quarantined.append({"row": row, "id": id, "stage": stage, "stage_key": stage_key, "reason": reason,
                               **({} if file is None else {"file": dict(file)})})


class Task(Protocol):
    """The interface of a task (a unit of work). `name` is unique among the classes of tasks. Before a worker calls
    `run`, it takes rights away from its process (network, programs, files outside its folders). If the task has an
    attribute `sets_up` that is True, the process still has these rights when `run` begins. `run` then sets up its
    stages, and must give the rights up by calling `inputs.confine` before it parses input."""

    name: str
    version: int

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters: ...


if TYPE_CHECKING:

    def as_stages_see_them(inputs: TaskInputs, cursor: CrashCursor,
                           out: TaskOutputs) -> tuple[task.Inputs, task.Cursor, task.Out]:
        """Makes the type checker verify that `TaskInputs`, `CrashCursor` and `TaskOutputs` satisfy the protocols that
        the code of barrier tasks uses."""
        return inputs, cursor, out
