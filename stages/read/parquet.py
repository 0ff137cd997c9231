"""Reads Parquet tables: one document per row. Big tables are split between row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import isfinite
from types import NoneType
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.base.parquet import open_parquet
from stages.document import BadRecord, Document, document_id
from stages.read.columns import MAX_VALUE, Columns, ColumnsConfig
from stages.read.jsonl import columns_of, make_document
from stages.read.reader import Reader, Slice, Split, bad, check_file, is_machine_fault, locator, skipped
from stages.read.row_groups import repeated_bytes, rows_per_batch, too_large
from stages.stage import SettingsError, signal

#: Rows of text, and bytes of another column, converted to Python objects at once. One by one takes three times as long.
_LISTED, _LISTED_BYTES = 32, 1 << 20
#: most bytes of text converted to Python objects at once
_PLAIN_BYTES = 4 << 20
#: bytes at the end of a file that usually hold its footer (Arrow reads as many first)
_TAIL = 64 << 10


class Parquet(Reader):
    """Reads Parquet tables: one document per row.

    In the locator (place in the input) of a document, `offset` is the number of the row group. A missing column is an
    error if it is `text` or named by `keep` or `signals`; any other column may be missing. `stages.read.columns` says
    how columns that no setting names are kept; binary ones among these columns are not read. Rows of which no document
    is made are counted under `invalid_utf8`, `missing_text` (null), `empty`, `too_large`, `corrupt_parquet` or
    `bad_value` (an id, url, date or language that Python cannot represent, e.g. a timestamp beyond the year 9999).
    `pipeline.passes.reading` quarantines rows that cannot be read.
    """

    name = "parquet"
    collection = True
    version = 2
    libraries = ("pyarrow",)
    suffixes = (".parquet", ".parq")
    memory_mb = 800

    class Config(ColumnsConfig):
        text: str = signal("text", "column of the text")
        id: str = signal("id", "column of the set's own id, kept in meta.id; '' for none")
        url: str = signal("url", "column of the URL; '' for none")
        date: str = signal("date", "column of the date; '' for none")
        language: str = signal("", "column of the language, if it is to be trusted")
        max_bytes: int = signal(64 << 20, "longest text, bytes; beyond: too_large", gt=0)
        max_group: int = signal(4 << 30, "largest row group, bytes inflated; beyond: too_large", gt=0)

    #: names in `meta` that a subclass sets itself
    reserved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        c = self.config
        self.columns = columns_of(c, c.text, reserved=self.reserved)
        self.signals, self.lost = c.signals, self.columns.lost
        self.required: tuple[str, ...] = (c.text, *self.columns.named, *c.signals)

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        check_file(local, slice.path)
        ordinal, group = slice.ordinal, slice.start
        try:
            with open_parquet(local) as file:
                columns = self._columns(file.schema_arrow, slice.path)
                binary = unread_columns(self.columns, file.schema_arrow)
                stop = file.num_row_groups if slice.stop is None else slice.stop
                for group in range(slice.start, stop):
                    first, info = ordinal, file.metadata.row_group(group)
                    for column in binary:
                        self.columns.lose(column, "binary", info.num_rows)
                    size = max(info.total_byte_size, repeated_bytes(info, local, group, self.config.text,
                                                                    self.config.max_group))
                    if size > self.config.max_group:
                        yield too_large(info, size, slice, group, ordinal)
                    else:
                        for batch in file.iter_batches(rows_per_batch(info, columns, local), row_groups=[group],
                                                       columns=columns):
                            for record in self._batch(batch, slice, group, ordinal):
                                yield record
                                ordinal += 1
                    ordinal = first + info.num_rows
        except (pa.ArrowException, OSError) as e:
            if is_machine_fault(e):
                raise
            yield bad("corrupt_parquet", slice, group, ordinal, detail=str(e).partition("\n")[0], fatal=True)

    def _columns(self, schema: pa.Schema, path: str) -> list[str]:
        names = schema.names
        for column in self.required:
            if column not in names:
                raise SettingsError(f"{path}: no column '{column}'; it has {', '.join(names)}. "
                                 "Say which holds the text with `text:`, and fix `keep:`")
        kind = schema.field(self.config.text).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
                or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise SettingsError(f"{path}: column '{self.config.text}' is {kind}, not text; name another with `text:`")
        selected = {self.config.text, *self._field_columns(), *self.columns.signals, *self.columns.of(names)}
        selected -= set(unread_columns(self.columns, schema))
        return [n for n in names if n in selected]

    def _field_columns(self) -> tuple[str, ...]:
        """Return the columns that become the id, URL, date and language of a document."""
        config = self.config
        return config.id, config.url, config.date, config.language

    def _batch(self, batch: pa.RecordBatch, slice: Slice, group: int, ordinal: int) -> Iterator[Document | BadRecord]:
        texts, config = batch.column(self.config.text), self.config
        meta_columns = [n for n in self.columns.of(batch.schema.names) if n in batch.schema.names]
        needed = {*self._field_columns(), *self.columns.signals, *meta_columns}
        columns = {n: texts if n == config.text else _values(batch.column(n))
                   for n in batch.schema.names if n in needed}
        all_lists = all(type(column) is list for column in columns.values())
        if all_lists and (documents := self._fast_documents(texts, columns, meta_columns, slice, group, ordinal)):
            yield from documents
            return
        if pa.types.is_dictionary(texts.type):                  # kept a dictionary: else each row would copy its text
            entries = pc.cast(texts.dictionary, pa.large_binary())
            values: Any = (v.as_py() for v in pa.DictionaryArray.from_arrays(texts.indices, entries))
        else:
            plain = pc.cast(texts, pa.large_binary())           # decoded one by one, so one bad row is one bad record
            values = (v for a in range(0, len(plain), _LISTED) for v in plain.slice(a, _LISTED).to_pylist())
        rows = [dict(zip(columns, row)) for row in zip(*columns.values())] if all_lists and columns else None
        for i, data in enumerate(values):
            if data is None:
                yield bad("missing_text", slice, group, ordinal + i, detail="null")
                continue
            if len(data) > config.max_bytes:
                yield bad("too_large", slice, group, ordinal + i, detail=f"{len(data)} bytes")
                continue
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as e:
                yield bad("invalid_utf8", slice, group, ordinal + i, detail=str(e))
                continue
            if not text or text.isspace():
                yield skipped("empty", slice, group, ordinal + i)
                continue

            def get(key: str, row: int = i) -> Any:
                column = columns.get(key)
                return column[row] if type(column) is list else None if column is None else column[row].as_py()

            try:
                doc: Document | BadRecord = make_document(slice, ordinal + i, group, text,
                                                          get if rows is None else rows[i].get, config, self.columns,
                                                          meta_columns, surrogates=False)
            except MemoryError:
                raise
            except UnicodeDecodeError as e:
                doc = bad("invalid_utf8", slice, group, ordinal + i, detail=str(e))
            except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, pa.ArrowException) as e:
                doc = bad("bad_value", slice, group, ordinal + i, detail=f"{type(e).__name__}: {e}")
            yield doc

    def _fast_documents(self, texts: pa.Array, columns: dict[str, Any], meta_columns: list[str], slice: Slice,
                        group: int, ordinal: int) -> list[Document] | None:
        """Return the documents of a batch at a third of the usual cost, or None if its rows must be checked one by one.
        The fast way needs a batch whose columns hold only strings, numbers and booleans. All texts of the batch must be
        present, valid UTF-8 and not blank, and they must be small in total."""
        config = self.config
        if self.columns.name_conflicts(meta_columns) or texts.null_count \
                or texts.nbytes > min(_PLAIN_BYTES, config.max_bytes) or config.text in columns \
                or not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            return None
        try:
            strings = texts.to_pylist()
        except UnicodeDecodeError:
            return None
        absent = [None] * len(strings)
        ids, urls, dates, languages = (columns.get(name, absent) for name in (
            config.id, config.url, config.date, config.language))
        if not all(strings) or any(map(str.isspace, strings)) or not all(
                map(_sound, (columns[name] for name in meta_columns))) or not all(
                map(_numbers, (columns[name] for name in self.columns.signals))) or any(
                type(v) is not str and v is not None for name in self._field_columns() for v in columns.get(name, ())):
            return None
        source, path, docs = slice.source, slice.path, []
        for row, (text, url, date, language, id) in enumerate(zip(strings, urls, dates, languages, ids), ordinal):
            doc = Document(document_id(source, path, "", row), text, source=source, url=url or "", date=date,
                           language=language or "", locator=locator(path, group, row))
            if id is not None:
                doc.meta["id"] = id
            docs.append(doc)
        for name in self.columns.signals:
            for doc, value in zip(docs, columns[name]):
                if value is not None:
                    doc.signals[name] = float(value)
        for name in meta_columns:
            key = self.columns.name(name)
            for doc, value in zip(docs, columns[name]):
                if value is not None:
                    doc.meta[key] = value
        return docs

    def needs(self, slice: Slice | None, size: int, read: Callable[[int, int], bytes]) -> list[tuple[int, int]] | None:
        """Return the byte ranges of a file in object storage that must be fetched to read a slice (the file or a piece
        of it): the footer and, in the row groups of the slice, the columns that are read. If `slice` is None, the
        ranges are those for `splits`. The result is None if the whole file must be fetched."""
        first = max(0, size - _TAIL)
        try:
            tail = read(first, size)
            footer = int.from_bytes(tail[-8:-4], "little") + 8
            if len(tail) < footer <= size:
                first = size - footer
                tail = read(first, size)
            if not (tail.endswith(b"PAR1") and footer <= len(tail)):
                return None                                     # `read` reports the error
            metadata = pq.read_metadata(pa.BufferReader(tail[-footer:]))
            columns = set(self._columns(metadata.schema.to_arrow_schema(), ""))
        except (pa.ArrowException, ValueError, OSError) as e:
            if is_machine_fault(e):
                raise
            return None
        ranges = [(0, 4), (first, size)]
        stop = 0 if slice is None else metadata.num_row_groups if slice.stop is None else slice.stop
        for group in range(slice.start if slice else 0, min(stop, metadata.num_row_groups)):
            for i in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(i)
                if any(chunk.path_in_schema == c or chunk.path_in_schema.startswith(c + ".") for c in columns):
                    starts = [chunk.data_page_offset, *([chunk.dictionary_page_offset] if chunk.has_dictionary_page
                                                        else [])]
                    # old writers did not count the header of the dictionary page, so Arrow reads further, too
                    ranges.append((min(starts), min(starts) + chunk.total_compressed_size + 4096))
        return ranges

    def beyond(self, local: str, slice: Slice, record: int) -> Slice | None:
        """Return the slice (piece of the file) with which reading resumes after row number `record` of the file has
        crashed the process. It is the part of `slice` after the row group of this row; None if nothing comes after this
        row group."""
        metadata, first = pq.read_metadata(local), slice.ordinal
        stop = metadata.num_row_groups if slice.stop is None else slice.stop
        for group in range(slice.start, stop):
            first += metadata.row_group(group).num_rows
            if record < first:
                return Slice(slice.source, slice.path, group + 1, stop, first) if group + 1 < stop else None
        return None

    def stored(self, local: str, slice: Slice, size: int) -> int:
        if slice.start == 0 and slice.stop is None:
            return size
        metadata = pq.read_metadata(local)
        groups = range(slice.start, metadata.num_row_groups if slice.stop is None else slice.stop)
        return sum(metadata.row_group(g).column(i).total_compressed_size for g in groups
                   for i in range(metadata.num_columns))

    def splits(self, local: str, path: str, target: int) -> list[Split] | None:
        """Return the pieces, of whole row groups and about `target` bytes, in which a file can be read. `start` and
        `stop` of a piece are numbers of row groups. Returns None for a file that is damaged or has no row group."""
        check_file(local, path)
        try:
            with open_parquet(local) as file:
                infos = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
                groups = [(g.num_rows, g.total_byte_size) for g in infos]
        except (pa.ArrowException, OSError) as e:
            if is_machine_fault(e):
                raise
            return None                                         # `read` reports the error
        pieces: list[Split] = []
        start = ordinal = rows = size = 0
        for i, (count, nbytes) in enumerate(groups):
            rows, size = rows + count, size + nbytes
            if size >= target or i == len(groups) - 1:
                pieces.append(Split(start, i + 1, ordinal, rows, size))
                start, ordinal, rows, size = i + 1, ordinal + rows, 0, 0
        return pieces or None


def _values(column: pa.Array) -> list[Any] | pa.Array:
    """Return the values of a column as a list. Returns the column itself if a list would take much memory, if the
    column's type is not text, integer, float32, float64, boolean or timestamp in nanoseconds, or if a value cannot be
    converted."""
    if column.nbytes > _LISTED_BYTES:
        return column
    kind = column.type
    if any(is_type(kind) for is_type in (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer,
                                         pa.types.is_float32, pa.types.is_float64, pa.types.is_boolean)):
        with suppress(UnicodeDecodeError):
            return column.to_pylist()
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        with suppress(pa.ArrowException, ArithmeticError, ValueError):
            return _nanoseconds(column)
    return column


def _nanoseconds(column: pa.Array) -> list[Any]:
    """Return nanosecond timestamps as datetimes, or as text if a datetime cannot hold all their digits. (For timestamps
    with more digits, Arrow's own conversion raises an error or, where pandas is installed, returns pandas objects.)"""
    microseconds = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    inexact = pc.not_equal(microseconds.cast(column.type), column).to_pylist()
    return [text if is_inexact else time for time, is_inexact, text in
            zip(microseconds.to_pylist(), inexact, pc.cast(column, pa.string()).to_pylist())]


def _sound(column: list[Any]) -> bool:
    """Return whether a document's `meta` can hold the values of a column unchanged."""
    kinds = {type(v) for v in column} - {NoneType}
    if kinds == {str}:
        return max(len(v) for v in column if v is not None) <= MAX_VALUE
    return kinds <= {bool, int} or (kinds == {float} and all(v is None or isfinite(v) for v in column))


def _numbers(column: list[Any]) -> bool:
    """Return whether the values of a column can become signals (floats) without a change of value."""
    kinds = {type(v) for v in column} - {NoneType}
    return kinds <= {bool} or (kinds <= {int, float} and all(v is None or (isfinite(v) and float(v) == v)
                                                              for v in column))


def unread_columns(columns: Columns, schema: pa.Schema) -> list[str]:
    """Return the binary columns among the columns that the setting `keep: all` selects. They are not read, because a
    document's `meta` cannot hold binary values. If `keep` is a list, no column is returned: binary columns in the list
    are read, as they may be text."""
    return [f.name for f in schema if columns.of([f.name]) and _binary(f.type)] if columns.all else []


def _binary(kind: pa.DataType) -> bool:
    """Return whether values of a type are binary or contain binary values."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind) or (
            pa.types.is_binary_view(kind)):
        return True
    inner = [kind.value_type] if pa.types.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    return any(map(_binary, inner))
