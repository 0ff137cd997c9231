"""Reads the records of a task's input files, and handles files that cannot be read.

The reading of a file ends early in three cases: its reader yields a fatal `BadRecord`, its reader raises an exception,
or the process dies. The unread rest of the file (or of the piece that the task reads) is then quarantined as one record
and counted under `bad_files` in the counters. The task continues with the next file.

After the death of a process, the reader may be able to continue behind the record (`Reader.beyond`). Less is lost then:
of a Parquet file, only the unread rows of the row group.

A record that killed a process is written to the commit log (`pipeline.store.view`). Every later task that reads the
same piece of the file stops before this record, and thus loses the same records. After MAX_STOPS such records, the
whole piece is quarantined.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any

from pipeline.engine.task import ChangedInput, CrashCursor, TaskInputs, TaskOutputs
from pipeline.engine.worker.crash_triage import MAX_STOPS
from pipeline.passes.storable import checked
from pipeline.passes.tables import to_blame
from pipeline.recipe.code import planned_reader
from pipeline.store.errors import StoreError
from pipeline.store.records import READING, Counters
from stages.document import BadRecord, Document, document_id
from stages.read.jsonl import clean
from stages.read.reader import Reader, Slice, bad
from stages.stage import SettingsError
from tokenizer.imports.source import WrongTokenizer

#: the argument ($file) that names a file, and the slice of the file to read
Piece = tuple[dict[str, Any], Slice]
#: (number of records of a file after which reading stops, because the next one killed a process; reason)
Stop = tuple[int, str]


class _NotFetched(Exception):
    """Raised when a file could not be fetched from its storage. The cause is not the content of the file."""


def to_blame_file(error: Exception) -> bool:
    """Whether a file may be the cause of an error that its reader raised. A missing permission, a changed file, a fault
    of the store or a wrong tokenizer is not the file's fault."""
    if isinstance(error, PermissionError) and error.errno != errno.EPERM:       # EPERM is raised by confinement
        return False
    return to_blame(error) and not isinstance(error, (ChangedInput, StoreError, WrongTokenizer))


def reason_of(error: Exception) -> str:
    return "wrong_schema" if isinstance(error, SettingsError) else f"error:{type(error).__name__}"


def fetch(inputs: TaskInputs, reader: Reader, arg: dict[str, Any], piece: Slice | None) -> str:
    """Returns the local path of an input file, which the task argument `arg` names. Of a remote file, only those byte
    ranges that the reader needs for `piece` (a slice of the file) are downloaded."""
    return inputs.fetch(arg, partial(_needs, reader, piece))


def _needs(reader: Reader, piece: Slice | None, size: int,
           read: Callable[[int, int], bytes]) -> list[tuple[int, int]] | None:
    try:
        return reader.needs(piece, size, read)
    except Exception as e:
        if not to_blame_file(e):
            raise
        return None                                  # fetch the whole file; reading it raises the error


class SourceFiles:
    """Iterates over the source files of a document pass, and yields (number in the partition, record) for every record.
    Before a record is read, its number is written to the crash cursor, so that the supervising process can identify a
    record that kills the process. `quarantined` are the commit log's entries about files of this reader."""

    def __init__(self, inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs, counters: Counters,
                 quarantined: Iterable[dict[str, Any]]) -> None:
        self.inputs, self.cursor, self.out, self.counters = inputs, cursor, out, counters
        args = inputs.args
        self.source: str = args["source"]
        entry = args["reader"]
        self.key, self.reader = entry["key"], planned_reader(inputs.store, entry)
        self.pieces: list[Piece] = [
            (arg, Slice(self.source, arg["$file"], arg.get("start", 0), arg.get("stop"), arg.get("ordinal", 0)))
            for arg in args["slices"]]
        self._current_slice: Slice | None = None                # slice of the next record
        self.quarantined: dict[str, list[Stop]] = {}
        for entry in quarantined:
            file = entry["file"]
            self.quarantined.setdefault(_identity(file), []).append((file["records"], entry["reason"]))

    def __iter__(self) -> Iterator[tuple[int, Document | BadRecord]]:
        row = 0
        for file, together in self._units():
            if self.inputs.file not in (None, file):
                continue
            self.cursor.reading(row, file)
            for record in self._records(file, together, row):
                if isinstance(record, BadRecord) and (record.fatal or record.bytes):
                    self._count(together[0], record)
                yield row, record
                row += 1
                self.cursor.reading(row, file)

    def _units(self) -> Iterator[tuple[int, list[Piece]]]:
        """Yields the units of reading, each as (number of its first slice, its slices). A slice is an input file or a
        piece of one. A unit is one slice, or all slices of a group of files that must be read together (a code
        repository)."""
        numbered = enumerate(self.pieces)
        for _, group in groupby(numbered, lambda item: self.reader.group(item[1][1].path) or item[0]):
            items = list(group)
            yield items[0][0], [piece for _, piece in items]

    def _records(self, file: int, together: list[Piece], row: int) -> Iterator[Document | BadRecord]:
        """Yields the records of a unit (one slice of a file, or the slices of files that must be read together). `row`
        is the number of its first record."""
        if reason := next((arg["bad"] for arg, _ in together if "bad" in arg), ""):    # marked bad in the listing
            yield self._rest_record(together, None, reason)
            return
        stops = self._stops(file, together[0], row)
        if len(stops) >= MAX_STOPS:
            yield self._rest_record(together, None, stops[0][1])
            return
        records, last, read = self._read(together), None, 0
        for number, (stop, reason) in enumerate([*stops, (-1, "")]):
            while read != stop:
                try:
                    record = next(records, None)
                except _NotFetched as e:
                    raise e.__cause__ or e from None
                except Exception as e:
                    if not to_blame_file(e):
                        raise
                    yield self._rest_record(together, last, reason_of(e), str(e), look=True)
                    return
                if record is None:
                    return
                if isinstance(record, BadRecord) and record.fatal:
                    record.bytes = self._stored(together, _offset(record))
                last, read = record, read + 1
                yield record
            # the search for the place to continue may also kill the process. The cursor charges such a crash to the
            # next record, which then becomes a stop, too; with it in `stops`, the search is not repeated
            look = number == 0 and (len(stops) == 1 or stops[1][0] > stop + 1)
            resume_at = None
            if look and len(together) == 1:
                self.cursor.reading(row + read + 1, file)
                resume_at = self._beyond(together[0], last)
            yield self._rest_record(together, last, reason, look=look, resume_at=resume_at)
            if resume_at is None:
                return
            together = [(together[0][0], resume_at)]
            records, last, read = self._read(together), None, read + 1

    def _read(self, together: list[Piece]) -> Iterator[Document | BadRecord]:
        def files() -> Iterator[tuple[str, Slice]]:
            for arg, piece in together:
                self._current_slice = piece
                try:
                    local = fetch(self.inputs, self.reader, arg, piece)
                except Exception as e:
                    raise _NotFetched from e
                yield local, piece

        return checked(self.reader, self.reader.read_files(files()))

    def _stops(self, file: int, piece: Piece, row: int) -> list[Stop]:
        """Returns the stops of a piece of a file. A stop is (number of records read before it, reason): the reading of
        the piece stops there, because the next record killed a process. The stops come from two places: from the commit
        log as it was when the task was planned, and from earlier attempts at this task (`TaskInputs.skip`). Stops from
        earlier attempts are also noted in this task's commit record."""
        arg, slice = piece
        identity = {"path": slice.path, "size": arg["size"], "etag": arg["etag"], "start": slice.start,
                    "stop": slice.stop}
        stops = dict(self.quarantined.get(_identity(identity), ()))
        for skipped_row, fault in self.inputs.skip.items():
            if fault.stage == READING - file:
                read = max(0, skipped_row - row)
                stops.setdefault(read, fault.reason)
                self.out.quarantine(skipped_row, document_id(self.source, _identity(identity), "", read), "read",
                                    self.key, fault.reason, {**identity, "records": read})
        return sorted(stops.items())

    def _beyond(self, piece: Piece, last: Document | BadRecord | None) -> Slice | None:
        arg, slice = piece
        with suppress(Exception):                    # the log says that the file is broken
            return self.reader.beyond(fetch(self.inputs, self.reader, arg, slice), slice, _next_record(slice, last))
        return None

    def _rest_record(self, together: list[Piece], last: Document | BadRecord | None, reason: str, detail: str = "", *,
                     look: bool = False, resume_at: Slice | None = None) -> BadRecord:
        """Returns a bad record that stands for all unread records of a unit (a piece of a file, or files that are read
        together). They begin after the record `last`. They end at the slice `resume_at`, where reading resumes, or
        without it at the end of the unit. `reason` and `detail` say why they were not read. With `look`, the file may
        be read to find how many bytes are lost."""
        slice = together[0][1] if len(together) == 1 else self._current_slice or together[0][1]
        offset = slice.start
        if len(together) == 1 and last is not None:
            offset = max(offset, _offset(last))
        record = bad(reason, slice, offset, _next_record(slice, last if len(together) == 1 else None), detail=detail,
                     fatal=True)
        record.bytes = self._stored(together, offset, look=look, resume_at=resume_at)
        return record

    def _stored(self, together: list[Piece], offset: int, *, look: bool = True, resume_at: Slice | None = None) -> int:
        """Returns how many bytes of the stored file lie between `offset` and the slice `resume_at`, or without it the
        end of the piece. In three cases, this is unknown, and the size of all files of the unit is returned: the unit
        has several files, the format cannot tell, or the file must not be read (`look` is False)."""
        arg, slice = together[0]
        if len(together) == 1 and look:
            missing = Slice(slice.source, slice.path, max(offset, slice.start),
                            resume_at.start if resume_at else slice.stop)
            with suppress(Exception):
                return self.reader.stored(fetch(self.inputs, self.reader, arg, slice), missing, arg["size"])
        return sum(arg["size"] for arg, _ in together)

    def _count(self, piece: Piece, record: BadRecord) -> None:
        slice = piece[1]
        whole_file = slice.start == 0 and slice.stop is None
        name = (str(record.locator.get("file") or slice.path) if whole_file else
                f"{slice.path} [{slice.start}:{'' if slice.stop is None else slice.stop}]")
        reasons = self.counters.setdefault("bad_files", {}).setdefault(self.source, {}).setdefault(clean(name), {})
        reasons[record.reason] = reasons.get(record.reason, 0) + record.bytes


def _identity(file: dict[str, Any]) -> str:
    """Returns a name for a piece of one version of a file. A changed file gets another name, so that old quarantine
    entries do not apply to it."""
    return json.dumps([file[k] for k in ("path", "size", "etag", "start", "stop")])


def _offset(record: Document | BadRecord) -> int:
    offset = record.locator.get("offset")
    return offset if isinstance(offset, int) else 0          # a user's reader may return any value


def _next_record(slice: Slice, last: Document | BadRecord | None) -> int:
    record = None if last is None else last.locator.get("record")
    return record + 1 if isinstance(record, int) else slice.ordinal
