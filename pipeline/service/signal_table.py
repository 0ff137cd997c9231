"""Reads the documents of a finished run's dataset as columns. The columns are the step that dropped each document, its
source, language and bytes, and its signals (numbers that the steps computed).

A pass is a group of consecutive steps that run together. Each pass has written the documents that it dropped, and the
last pass also those that it kept. So every document is in one file.

Texts are not read. The column of a signal is read when a step needs it to judge documents again. The most recently used
columns stay in memory. A document takes about 40 bytes of memory, and 8 bytes more for each signal in memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.base.parquet import open_parquet
from pipeline.passes.columnwise import DocumentColumns
from pipeline.passes.storable import language_label
from pipeline.service import sampling
from pipeline.service.token_counts import TokenColumns, TokenCounts, with_estimates
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo

T = TypeVar("T")
#: files that are read at a time
THREADS = 2
#: bytes of signals kept in memory
SIGNAL_BYTES = 256 << 20
#: groups (source, language) that an answer lists; all others are summed up as one group
MOST_GROUPS = 200


@dataclass(frozen=True)
class DocumentFile:
    """A file of documents that a run wrote. `part` is the number of the pass (group of consecutive steps) that wrote
    it. If `dropped` is true, the file has dropped documents, and the columns `stage` and `reason`; otherwise it has
    kept documents."""

    info: FileInfo
    part: int
    dropped: bool


class DocumentTable:
    """The documents of a run's files as columns: numpy arrays with a value for each document. `sample` has the rows of
    a random sample. A hash of a document's id decides whether the document is in the sample, with probability `share`.
    With `only_sample`, the table has only the documents of the sample.

    The column `end` says which step dropped each document, by the step's place in the list of steps; `kept_end` stands
    for kept documents. `place(stage, part)` must return this place for a step's name and the number of the step's pass
    (group of steps). The column `row` has the number of the document's row in its file.
    """

    def __init__(self, store: Store, files: Sequence[DocumentFile], place: Callable[[str, int], int], kept_end: int,
                 share: float, only_sample: bool = False, tokens: TokenCounts | None = None) -> None:
        self._store, self.files = store, list(files)
        sources, languages, reasons = _Names(), _Names(), _Names()
        columns: dict[str, list[np.ndarray]] = {name: [] for name in (
            "end", "reason", "source", "language", "bytes", "file", "row", *(["tokens"] if tokens else []))}
        self._picked: list[np.ndarray | None] = []
        sampled = []

        def read(file: DocumentFile) -> tuple[pa.Table, np.ndarray, np.ndarray | None]:
            """Read a file of documents. Returns three things:

            - the columns of the documents; with `only_sample`, only of those in the sample
            - a bool array that says which of all documents in the file are in the sample
            - the number of tokens of each returned document (None without token counts)
            """
            table = self._read(file, ["id", "source", "language", "signals.bytes",
                                      *(("stage", "reason") if file.dropped else ())])
            ids = table["id"].to_pylist()
            of_sample = sampling.in_sample(ids, share, sampling.SEED)
            if only_sample:
                table, ids = table.filter(pa.array(of_sample)), list(itertools.compress(ids, of_sample))
            return table.drop_columns("id"), of_sample, None if tokens is None else tokens.of(ids)

        for number, (file, (table, of_sample, counts)) in enumerate(zip(self.files, _in_threads(read, self.files))):
            picked = np.flatnonzero(of_sample) if only_sample else None
            self._picked.append(picked)
            sampled.append(of_sample if picked is None else np.ones(len(picked), bool))
            rows = np.arange(table.num_rows, dtype=np.int32) if picked is None else picked.astype(np.int32)
            if counts is not None:
                columns["tokens"].append(counts)
            columns["row"].append(rows)
            columns["file"].append(np.full(len(rows), number, np.int32))
            columns["source"].append(sources.codes(table["source"]))
            columns["language"].append(languages.codes(table["language"]))
            columns["bytes"].append(_numbers(pc.struct_field(table["signals"].combine_chunks(), "bytes")))
            if file.dropped:
                stages = _Names()
                codes = stages.codes(table["stage"])
                ends = np.array([place(name, file.part) for name in stages.names] or [0], np.int16)
                columns["end"].append(ends[codes])
                columns["reason"].append(reasons.codes(table["reason"]))
            else:
                columns["end"].append(np.full(len(rows), kept_end, np.int16))
                columns["reason"].append(np.full(len(rows), reasons.number(""), np.int32))
        joined = {name: np.concatenate(parts) if parts else np.zeros(0, np.int32) for name, parts in columns.items()}
        self.end, self.reason, self.bytes = joined["end"], joined["reason"], joined["bytes"]
        #: tokens of each document; None if the run made no shards
        self.tokens: TokenColumns | None = (
            None if tokens is None else with_estimates(joined["tokens"], joined["bytes"], joined["source"]))
        self.file, self.row, self.reasons = joined["file"], joined["row"], reasons.names
        #: the rows of the sample
        self.sample = np.flatnonzero(np.concatenate(sampled)) if sampled else np.zeros(0, np.int64)
        self._signals = _LazySignals(self)
        self.columns = DocumentColumns(len(self.end), self._signals, self._signals.present, joined["language"],
                                       languages.names, joined["source"], sources.names)

    def __len__(self) -> int:
        return len(self.end)

    def _read(self, file: DocumentFile, columns: list[str]) -> pa.Table:
        with self._open(file) as parquet:
            return parquet.read(columns=columns, use_threads=False)

    @contextlib.contextmanager
    def _open(self, file: DocumentFile) -> Iterator[pq.ParquetFile]:
        """A context manager that yields a file opened as Parquet, after checking its hash. Files on a local disk are
        read in place: `Store.parquet` would make a temporary folder for each of them."""
        if self._store.local is None:
            with self._store.parquet(file.info.path, file.info.sha256) as parquet:
                yield parquet
        else:
            with open_parquet(self._store.checked(file.info.path, file.info.sha256, "")) as parquet:
                yield parquet

    def need(self, names: set[str]) -> None:
        """Load the columns of the given signals (numbers computed for each document) into memory, unless they are there
        already. Each file is opened once for all these signals."""
        missing = sorted(name for name in names if name not in self._signals.loaded)
        if not missing:
            return
        values: dict[str, list[np.ndarray]] = {name: [] for name in missing}
        present: dict[str, list[np.ndarray]] = {name: [] for name in missing}

        def read(file: DocumentFile) -> tuple[set[str], pa.StructArray | None, int]:
            with self._open(file) as parquet:
                there = {field.name for field in parquet.schema_arrow.field("signals").type}
                wanted = [f"signals.{name}" for name in missing if name in there]
                table = parquet.read(columns=wanted, use_threads=False) if wanted else None
                return there, None if table is None else table["signals"].combine_chunks(), parquet.metadata.num_rows

        for picked, (there, signals, rows) in zip(self._picked, _in_threads(read, self.files)):
            for name in missing:
                column = pa.nulls(rows, pa.float64()) if name not in there else pc.struct_field(signals, name)
                if picked is not None:
                    column = column.take(pa.array(picked))
                values[name].append(_numbers(column))
                present[name].append(pc.is_valid(column).to_numpy(zero_copy_only=False))
        for name in missing:
            self._signals.put(name, np.concatenate(values[name]) if values[name] else np.zeros(0),
                              np.concatenate(present[name]) if present[name] else np.zeros(0, bool), names)

    def alike(self, rows: np.ndarray | None) -> list[tuple[int, str, np.ndarray]]:
        """Group the documents that were dropped by the same step for the same reason; kept documents are a group, too.
        `rows` are the documents' rows in the table (None: all). Returns, for each group, (place of the step in the list
        of steps, reason, indices into `rows`)."""
        if rows is None:
            return self._all_alike
        kinds = self.end[rows].astype(np.int64) * max(len(self.reasons), 1) + self.reason[rows]
        order = np.argsort(kinds, kind="stable")
        values, starts = np.unique(kinds[order], return_index=True)
        return [(value // len(self.reasons), self.reasons[value % len(self.reasons)], places)
                for value, places in zip(values.tolist(), np.split(order, starts[1:]))]

    @cached_property
    def _all_alike(self) -> list[tuple[int, str, np.ndarray]]:
        return self.alike(np.arange(len(self)))

    @cached_property
    def groups_shown(self) -> tuple[np.ndarray, list[tuple[str, str]]]:
        """Group the documents by source and language. Returns the group number of each document, and the (source,
        language) of each group, the biggest group first. All groups beyond MOST_GROUPS are merged into one, ("…",
        "…"). The input may hold any string as a language. A string that does not look like one is replaced, as in a
        report."""
        labels = _Names()
        label = np.array([labels.number(language_label(name)) for name in self.columns.languages] or [0], np.int32)
        count = max(len(labels.names), 1)
        kinds = self.columns.source.astype(np.int64) * count + label[self.columns.language]
        values, group, counts = np.unique(kinds, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        number = np.full(len(order), MOST_GROUPS)
        number[order[:MOST_GROUPS]] = np.arange(min(len(order), MOST_GROUPS))
        names = [(self.columns.sources[value // count], labels.names[value % count])
                 for value in values[order[:MOST_GROUPS]].tolist()]
        return number[group], names + ([("…", "…")] if len(order) > MOST_GROUPS else [])

    def ids(self, rows: np.ndarray) -> list[str]:
        """Return the ids of the documents in these rows of the table, in the order of `rows`. The ids are read from the
        files."""
        ids = [""] * len(rows)
        for number in np.unique(self.file[rows]):
            places = np.flatnonzero(self.file[rows] == number)
            column = self._read(self.files[number], ["id"])["id"]
            for place, id in zip(places.tolist(), column.take(pa.array(self.row[rows[places]])).to_pylist()):
                ids[place] = id
        return ids


def _in_threads(read: Callable[[DocumentFile], T], files: Sequence[DocumentFile]) -> Iterator[T]:
    """Call `read` on each file, and yield the results in the order of the files. THREADS files are read at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(read, files)


class _Names:
    """Replaces strings by numbers. The first different string gets 0, the next one 1, and so on. Equal strings get the
    same number, in whichever column they are."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number

    def codes(self, column: pa.ChunkedArray) -> np.ndarray:
        encoded = pc.fill_null(column.combine_chunks(), "").dictionary_encode()
        numbers = np.array([self.number(name) for name in encoded.dictionary.to_pylist()] or [0], np.int32)
        codes: np.ndarray = numbers[encoded.indices.to_numpy(zero_copy_only=False)]
        return codes


class _LazySignals(dict[str, np.ndarray]):
    """A dict {name of a signal: array with its value for each document}. A signal is a number that a step computed for
    each document. It is read from the files when its name is first looked up. A signal that no file has is NaN for
    every document."""

    def __init__(self, table: DocumentTable) -> None:
        super().__init__()
        self._table = table
        self.loaded: OrderedDict[str, None] = OrderedDict()
        self.present: dict[str, np.ndarray] = {}

    def __contains__(self, name: object) -> bool:
        if name not in self.loaded:
            self._table.need({str(name)})
        self.loaded.move_to_end(str(name))
        return True

    def put(self, name: str, values: np.ndarray, present: np.ndarray, needed: set[str]) -> None:
        self[name] = values
        if not present.all():
            self.present[name] = present
        self.loaded[name] = None
        for old in list(self.loaded):
            if sum(column.nbytes for column in self.values()) <= SIGNAL_BYTES:
                break
            if old not in needed:
                del self[old], self.loaded[old]
                self.present.pop(old, None)


def _numbers(column: Any) -> np.ndarray:
    """Convert the Arrow column of a signal (a number computed for each document) to float64, with NaN where the signal
    was not computed."""
    result: np.ndarray = pc.fill_null(column, float("nan")).to_numpy(zero_copy_only=False)
    return result

