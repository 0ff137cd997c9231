"""Defines the base class of readers. A reader turns a slice of one file (the whole file or a piece of it) into
documents. It also says where a big file can be cut into pieces.

A reader only reads local files: it gets the path of the file on local disk (`local`). It also gets the path of the file
relative to the root of its source (`path`), from which the ids of documents are computed. Offsets count bytes of the
file as it is stored, which may be compressed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from stages.document import BadRecord, Document, document_id
from stages.stage import StageConfig, file_sha256, library_versions, python_version, resource_files

#: bytes after a slice that a reader may examine to see what follows
BEYOND = 64 << 10


@dataclass(frozen=True)
class Slice:
    """Says what to read of one file: everything (the default), or one piece of the file (a `Split`).

    `source` is the name of the source in the recipe, `path` the path relative to its root (forward slashes). `start`
    and `stop` are byte offsets in the stored file (row-group numbers for Parquet). `ordinal` is the number that the
    slice's first record has in the file, so that the ids of documents do not depend on how the file was cut.
    """

    source: str
    path: str
    start: int = 0
    stop: int | None = None
    ordinal: int = 0


@dataclass(frozen=True)
class Split:
    """A piece of a file, [start, stop), cut between records. It also has the number of its first record in the file,
    the number of its records, and their uncompressed bytes."""

    start: int
    stop: int
    ordinal: int
    records: int
    bytes: int

    def of(self, source: str, path: str) -> Slice:
        return Slice(source, path, self.start, self.stop, self.ordinal)


class Skipped(BadRecord):
    """A record that is sound but of which no document is made, such as a request, a redirect, or a binary file among
    source files.

    A `Skipped` is counted under its reason like any `BadRecord`, but is not quarantined.
    """


class Reader:
    """Base class of all readers. Subclasses are registered in `stages.catalog.READERS`, or named 'module:Class' in a
    recipe. They define the class attributes, `Config` and `read`, and also `splits` if their files can be cut.

    A file that is missing, is a folder or may not be read raises an OSError that names it (`check_file`): the
    environment is at fault, not a document. Anything wrong *inside* a file is yielded as a `BadRecord` and counted.

    After any other exception, or a crash, the part of the file that was not read yet is lost, unless the method
    `beyond` says where reading resumes. The file is then quarantined, and counts towards the limit `run.max_bad_files`.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    #: distributions whose versions enter the key
    libraries: ClassVar[tuple[str, ...]] = ()
    #: endings of the files that a directory source picks up, lower case
    suffixes: ClassVar[tuple[str, ...]] = ()
    #: the step that turns the reader's bytes into text, e.g. 'html'; "" if the reader gives text
    extractor: ClassVar[str] = ""
    #: the step that turns the reader's markup into plain text, e.g. 'latex'; "" if its text is no such markup
    markup: ClassVar[str] = ""
    #: True when its files hold tokens instead of documents. Such a source is named in `shards:` and in no dataset
    holds_tokens: bool = False
    #: True when some files must be read together, and `units` says which ones
    in_units: ClassVar[bool] = False
    #: True when a file holds many documents
    collection: ClassVar[bool] = False
    #: True when `tokenmill extract` uses it for members of archives that have its suffixes
    in_archives: ClassVar[bool] = False
    #: True for crawls: pages of unknown authors, in any language, with personal data in them
    crawl: ClassVar[bool] = False
    #: signals that its documents carry; they become columns of the datasets
    signals: tuple[str, ...] = ()
    #: memory that one child process needs while reading, MB
    memory_mb: ClassVar[int] = 300
    #: False for a custom reader that needs the network or credentials (`Stage.confined`)
    confined: ClassVar[bool] = True

    Config: ClassVar[type[StageConfig]] = StageConfig

    def __init__(self, config: Any = None, **kw: Any) -> None:
        if config is None or isinstance(config, dict):
            config = self.Config(**{**(config or {}), **kw})
        self.config: Any = config
        #: messages for the user about a file, e.g. why it cannot be split; filled by `splits` and `read`
        self.warnings: list[str] = []
        #: counts of values that were read but are in no document: {column: {reason: values}}
        self.lost: dict[str, dict[str, int]] = {}

    def key(self) -> str:
        """Return the reader's key: a hash (32 hex characters) of everything that decides which documents this reader
        makes of a file."""
        config = self.config.model_dump(mode="json") | {
            field: file_sha256(path) for field, path in resource_files(self.config).items()}
        doc = {"name": self.name, "version": self.version, "config": config,
               "libraries": library_versions(self.libraries), "python": python_version()}
        return hashlib.blake2b(json.dumps(doc, sort_keys=True).encode(), digest_size=16).hexdigest()

    def expansion(self, path: str) -> float:
        """Return the expected number of uncompressed bytes per stored byte of a file, for planning before the file is
        read."""
        lower = path.lower()
        if lower.endswith((".gz", ".tgz", ".zst", ".lz4", ".xz")):
            return 4.0
        return 5.0 if lower.endswith(".bz2") else 2.0 if lower.endswith((".parquet", ".zip")) else 1.0

    def splits(self, local: str, path: str, target: int) -> list[Split] | None:
        """Return pieces of about `target` uncompressed bytes that cover the file and are cut between records; None if
        the file cannot be split.

        The method may decompress the whole file once. Reading the pieces one after another gives exactly the documents
        that reading the whole file gives (tested for every reader that splits files).
        """
        return None

    def needs(self, slice: Slice | None, size: int, read: Callable[[int, int], bytes]) -> list[tuple[int, int]] | None:
        """Return the byte ranges [start, stop) of a file in object storage that must be fetched; None if the whole file
        must be. They are the bytes that the method `read` needs for a slice (the file or a piece of it). If `slice` is
        None, they are the bytes that `splits` needs.

        All other bytes of the local copy are a hole, which reads as zeros. `size` is the size of the file, and the
        argument `read(start, stop)` is a function that returns its bytes.
        """
        return None

    def beyond(self, local: str, slice: Slice, record: int) -> Slice | None:
        """Return the slice (piece of the file) with which reading resumes after record number `record` of the file has
        killed the process; None if reading cannot resume. The result is the part of `slice` after the record, or after
        the row group (or similar piece of the file) that contains the record."""
        return None

    def stored(self, local: str, slice: Slice, size: int) -> int:
        """Return how many of the `size` bytes of a stored file, which may be compressed, belong to a slice (the file or
        a piece of it)."""
        return (size if slice.stop is None else slice.stop) - slice.start

    def group(self, path: str) -> str:
        """Return the name of the group of files to which a file belongs; "" for a file without a group. The files of a
        group must be read together, so one task gets them all and passes them to `read_files` in the order of their
        paths."""
        return ""

    def units(self, root: str, paths: Sequence[str], find: Callable[[str], str]) -> list[list[str]]:
        """Return which files must be read together, as lists of paths in the order of their documents. Files that hold
        no documents may be left out, and one file may be in several lists. `paths` are the files of the source, `root`
        names their folder in messages, and `find` returns where a file is on this machine."""
        raise NotImplementedError(f"{type(self).__name__} does not define units")

    def read_files(self, files: Iterator[tuple[str, Slice]]) -> Iterator[Document | BadRecord]:
        """Yield the documents of several files, one file after the other. Each file is given as (local file, slice of
        the file to read)."""
        for local, slice in files:
            yield from self.read(local, slice)

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        """Yield the documents of a slice (a file or a piece of it) in the order of the file. A `BadRecord` or `Skipped`
        is yielded in place of each record of which no document is made."""
        raise NotImplementedError(f"{type(self).__name__} does not define read")


def is_machine_fault(e: BaseException) -> bool:
    """Return whether the machine, and not the file, is at fault for an error while reading. The machine is at fault
    when memory ran out or the operating system reported the error. Such an error must fail the task. If it were treated
    as damage in the file, the part of the file after it would be recorded as lost.

    An OSError without errno comes from a decoder, so the file is at fault. EINVAL counts as the file's fault, too: it
    comes from a seek to an impossible offset, which a damaged archive directory can cause.
    """
    return isinstance(e, MemoryError) or (isinstance(e, OSError) and e.errno not in (None, errno.EINVAL))


def check_file(local: str, path: str) -> int:
    """Return the size of a file in bytes. Raises an OSError that names the file and the remedy if it is a folder or
    missing."""
    if os.path.isdir(local):
        raise IsADirectoryError(f"{path}: is a folder, a reader needs a file; give the folder as the source's path")
    if not os.path.exists(local):
        raise FileNotFoundError(f"{path}: no such file; was it moved or deleted after the plan was made?")
    return os.stat(local).st_size


def locator(path: str, offset: int, record: int, sub: str = "") -> dict[str, Any]:
    """Return the locator of a record, which is its place in the input:

    - `file`: path of the file
    - `offset`: byte offset in the stored file; 0 if the file is compressed as a whole; for Parquet, the row group's
      number
    - `record`: number of the record in the file
    - `sub`: place inside the record, such as an archive member
    """
    return {"file": path, "offset": offset, "record": record, "sub": sub}


def bad(reason: str, slice: Slice, offset: int, record: int, *, member: str = "", detail: str = "",
        fatal: bool = False) -> BadRecord:
    """Return a `BadRecord` for a record that cannot be read, with the id and the locator (place in the input) that the
    record's document would have had."""
    return BadRecord(reason, id=document_id(slice.source, slice.path, member, record),
                     locator=locator(slice.path, offset, record, member), detail=detail, fatal=fatal)


def skipped(reason: str, slice: Slice, offset: int, record: int, *, member: str = "", detail: str = "") -> Skipped:
    """Return a `Skipped` for a record of which no document is made, with the id and the locator (place in the input)
    that the record's document would have had."""
    return Skipped(reason, id=document_id(slice.source, slice.path, member, record),
                   locator=locator(slice.path, offset, record, member), detail=detail)
