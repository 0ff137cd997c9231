"""Writes and reads parts: Parquet files of documents, with hashes of their contents.

Columns:

- `id`, `url`, `source`, `language`: strings
- `text`: large_string
- `date`: string, as the source has it; null when unknown
- `locator`: struct<file, offset, record, sub>, where the document was read
- `signals` (numbers that stages compute for a document): struct of float64; null when not computed. The signal `bytes`,
  the UTF-8 length of the text, is always present
- `meta`: JSON with sorted keys, because HF datasets refuses map columns
- `loss_spans`: list<struct<start, end>>, the ranges of the text (in UTF-8 bytes) that count in the training loss; null
  when the whole text counts
- `reason`, `stage`: only for dropped documents

The *row digest* is the sha256 of an encoding of a row. The encoding has, in this order:

- a hash of the names of the columns and signals
- the lengths of all strings (-1: null)
- the integers, and the floats by their exact bits
- the number of loss spans (-1: null)
- the null flags of the integers and floats
- the strings, the text last
- the loss spans

The `content` of a part is the sha256 of its row digests, sorted by the ids of the rows. It does not depend on row
order, row groups, compression or library versions. It changes when any field changes.

With the same library versions, the same documents in the same order give the same bytes. Writer options are fixed, row
groups depend only on the sizes of the rows, and no time is written to the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.base.parquet import open_parquet, parquet_writer
from stages.document import Document, DuplicateId, storable_text

#: uncompressed bytes of a row group; documents that would exceed this start the next group. It is a quarter of what
#: docs/contracts.md allows, because a child process holds one group of kept and one of dropped documents in memory, and
#: its resident memory is about three times their size.
ROW_GROUP_BYTES = 16 << 20
#: rows, or characters of text, converted to Arrow columns at a time; a longer text is a batch of its own
BATCH_ROWS, BATCH_CHARS = 2048, 4 << 20

LOCATOR = pa.struct([("file", pa.string()), ("offset", pa.int64()), ("record", pa.int64()), ("sub", pa.string())])
SPANS = pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64())]))
_any_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
_quoted = json.encoder.encode_basestring          # the encoder's function for one string, in C
_STRINGS = ("id", "url", "source", "language", "date", "meta", "reason", "stage")


def document_schema(signals: Iterable[str] = (), dropped: bool = False) -> pa.Schema:
    """Return the Arrow schema of a part (Parquet file of documents) with these signals, which are numbers stored beside
    the text. Their order does not matter, and the signal `bytes` is always added. With `dropped`, the columns `reason`
    and `stage` are added."""
    names = ["bytes", *sorted(set(signals) - {"bytes"})]
    fields = [("id", pa.string()), ("text", pa.large_string()), ("url", pa.string()), ("source", pa.string()),
              ("language", pa.string()), ("date", pa.string()), ("locator", LOCATOR),
              ("signals", pa.struct([(name, pa.float64()) for name in names])), ("meta", pa.string()),
              ("loss_spans", SPANS)]
    return pa.schema(fields + ([("reason", pa.string()), ("stage", pa.string())] if dropped else []))


def signal_names(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema.field("signals").type]


class PartWriter:
    """Writes documents to one Parquet file. Memory holds one row group, and 64 bytes for each row.

    After `close`, `rows`, `text_bytes` (UTF-8) and `content` (a hash that does not depend on the order of the rows)
    describe the file. Surrogates in a text have no UTF-8 encoding: a lone surrogate is written as U+FFFD, and a pair as
    the character it encodes.
    """

    def __init__(self, path: str, schema: pa.Schema, row_group_bytes: int = ROW_GROUP_BYTES,
                 batch_chars: int = BATCH_CHARS) -> None:
        self.path, self.schema = path, schema
        self._row_group_bytes, self._batch_chars = row_group_bytes, batch_chars
        self.rows = self.text_bytes = 0
        self.content: str | None = None
        self._names = signal_names(schema)
        self._signals = frozenset(self._names)
        self._extended = "reason" in schema.names
        self._digester = RowDigester(schema)
        self._pending: list[tuple[Any, ...]] = []
        self._chars = 0
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._ids: list[pa.Array] = []
        self._digests: list[bytes] = []
        self._writer = _part_file(path, schema)

    def write(self, doc: Document, *, reason: str | None = None, stage: str | None = None) -> None:
        """Add a document to the file. For a dropped document, `reason` and `stage` say why and by which stage it was
        dropped. Raises KeyError for a signal (number stored beside the text) that is not in the schema."""
        signals = doc.signals
        if not signals.keys() <= self._signals:
            name = sorted(signals.keys() - self._signals)[0]
            raise KeyError(f"signal '{name}' of document {doc.id} is not a column of {self.path}; name it in the "
                           f"`signals` of the stage that writes it")
        text, place, meta = doc.text, doc.locator.get, doc.meta
        if self._chars + len(text) > self._batch_chars:
            self._convert()
        self._chars += len(text)
        self._pending.append((
            doc.id, text, doc.url, doc.source, doc.language, doc.date, place("file"), place("offset"), place("record"),
            place("sub"), _meta_json(meta) if meta else "{}", doc.loss_spans,
            reason, stage, tuple(map(signals.get, self._names))))
        if len(self._pending) >= BATCH_ROWS:
            self._convert()

    def write_all(self, docs: list[Document]) -> None:
        """Add documents that were not dropped. The result is the same as if `write` were called for each document, in a
        third of the time."""
        chars = sum([len(d.text) for d in docs])
        if chars > self._batch_chars or not all(d.signals.keys() <= self._signals for d in docs):
            for doc in docs:
                self.write(doc)
            return
        if self._chars + chars > self._batch_chars:
            self._convert()
        self._chars += chars
        places, nothing, names = [d.locator.get for d in docs], [None] * len(docs), self._names
        self._pending += zip(
            [d.id for d in docs], [d.text for d in docs], [d.url for d in docs], [d.source for d in docs],
            [d.language for d in docs], [d.date for d in docs], [place("file") for place in places],
            [place("offset") for place in places], [place("record") for place in places],
            [place("sub") for place in places], [_meta_json(d.meta) if d.meta else "{}" for d in docs],
            [d.loss_spans for d in docs], nothing, nothing, [tuple(map(d.signals.get, names)) for d in docs])
        if len(self._pending) >= BATCH_ROWS:
            self._convert()

    def _convert(self) -> None:
        """Turn the buffered documents into one Arrow batch, and compute the row digests (hashes) of the batch."""
        if not self._pending:
            return
        *columns, signals = zip(*self._pending)
        self._pending, self._chars = [], 0
        id, text, url, source, language, date, file, offset, record, sub, meta, spans, reason, stage = columns
        texts = _strings(text, pa.large_string())
        sizes = np.diff(_offsets(texts))
        values: list[Sequence[float | None] | np.ndarray] = list(zip(*signals))
        values[0] = sizes.astype("<f8")                              # `bytes`
        arrays = [
            _strings(id), texts, _strings(url), _strings(source), _strings(language), _strings(date),
            pa.StructArray.from_arrays([_strings(file), pa.array(offset, pa.int64()), pa.array(record, pa.int64()),
                                        _strings(sub)], fields=list(LOCATOR)),
            pa.StructArray.from_arrays([_floats(v) for v in values], fields=list(self.schema.field("signals").type)),
            _strings(meta), pa.array(spans, SPANS)]
        if self._extended:
            arrays += [_strings(reason), _strings(stage)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        self._digests += self._digester.digests(batch)
        self._ids.append(arrays[0])
        self.rows += batch.num_rows
        self.text_bytes += int(sizes.sum())
        if self._bytes + batch.nbytes > self._row_group_bytes:
            self._flush()
        self._batches.append(batch)
        self._bytes += batch.nbytes

    def _flush(self) -> None:
        if self._batches:
            table = pa.Table.from_batches(self._batches)
            self._writer.write_table(table, row_group_size=table.num_rows)
            self._batches, self._bytes = [], 0

    def close(self) -> None:
        """Finish the file. Raises DuplicateId when two rows have the same id."""
        if self.content is not None:
            return
        self._convert()
        self._flush()
        self._writer.close()
        ids = pa.chunked_array(self._ids, pa.string())
        content, twin = _content(ids, self._digests)
        if twin is not None:
            raise DuplicateId(ids[twin].as_py(), str(self.path))
        self.content = content
        self._ids, self._digests = [], []


def _part_file(path: str, schema: pa.Schema) -> pq.ParquetWriter:
    return parquet_writer(
        path, schema, compression_level=3, version="2.6", data_page_version="1.0",
        use_dictionary=["source", "language", "locator.file", "reason", "stage"],
        # no statistics of texts: their minimum and maximum would be whole documents in the footer
        write_statistics=["id", "source", "language", "date", "reason", "stage", "locator.offset", "locator.record",
                          *(f"signals.{name}" for name in signal_names(schema))])


class PartCopy(NamedTuple):
    """What `copy_without` has written: the number of rows, the UTF-8 bytes of their texts together, and the hash of the
    rows ("" if the file does not hold documents)."""

    rows: int
    text_bytes: int
    content: str


def copy_without(source: str, target: str, gone: AbstractSet[str]) -> PartCopy:
    """Copy a Parquet file that has a column `id`, without the rows whose id is in `gone`. It takes memory for one row
    group, and 64 bytes for each row."""
    with open_parquet(source, memory_map=True) as file:
        schema = file.schema_arrow
        is_part = {"text", "signals"} <= set(schema.names)
        digester = RowDigester(schema) if is_part else None
        ids: list[pa.Array] = []
        digests: list[bytes] = []
        text_bytes = rows = 0
        left_out = pa.array(sorted(gone), pa.string())
        with _part_file(target, schema) if is_part else parquet_writer(target, schema) as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, use_threads=False)
                table = table.filter(pc.invert(pc.is_in(table["id"], left_out)))
                if not table.num_rows:
                    continue
                writer.write_table(table, row_group_size=table.num_rows)
                rows += table.num_rows
                if digester is None:
                    continue
                for batch in table.to_batches():
                    digests += digester.digests(batch)
                    ids.append(batch.column("id"))
                    text_bytes += int(pc.sum(pc.struct_field(batch.column("signals"), "bytes")).as_py() or 0)
    return PartCopy(rows, text_bytes, _content(pa.chunked_array(ids, pa.string()), digests)[0] if digester else "")


def _content(ids: pa.ChunkedArray, digests: list[bytes]) -> tuple[str, int | None]:
    """Return the hash of rows with these ids and row digests, and the number of a row whose id occurs twice (None if
    all differ)."""
    order, twin = _order(ids)
    return hashlib.sha256(np.frombuffer(b"".join(digests), "V32")[order].tobytes()).hexdigest(), twin


class RowDigester:
    """Computes row digests (hashes of single documents) for batches that have the Arrow schema `schema`. The docstring
    of the module defines the digest."""

    def __init__(self, schema: pa.Schema) -> None:
        self.signals = signal_names(schema)
        self.strings = [name for name in _STRINGS if name in schema.names]
        title = json.dumps(["tokenmill row 1", schema.names, self.signals], ensure_ascii=True)
        self._title = np.frombuffer(hashlib.sha256(title.encode()).digest(), "u1")

    def digests(self, batch: pa.RecordBatch) -> list[bytes]:
        """Return the sha256 of every row of the batch, as 32 bytes each."""
        n = batch.num_rows
        if n == 0:
            return []
        columns = {name: batch.column(name) for name in batch.schema.names}
        place, spans, text = columns["locator"], columns["loss_spans"], columns["text"].cast(pa.large_string())
        short = [columns[name].cast(pa.large_string()) for name in self.strings]
        short += [pc.struct_field(place, name).cast(pa.large_string()) for name in ("file", "sub")]
        lengths = [pc.fill_null(pc.binary_length(c).cast(pa.int64()), -1).to_numpy() for c in (*short, text)]
        numbers = [pc.struct_field(place, name) for name in ("offset", "record")]
        numbers += [pc.struct_field(columns["signals"], name) for name in self.signals]
        bits = [pc.fill_null(c, 0).to_numpy(zero_copy_only=False).view("<i8") for c in numbers]
        nulls = [c.is_null().to_numpy(zero_copy_only=False).view("u1") for c in numbers]
        counts = pc.fill_null(pc.list_value_length(spans).cast(pa.int64()), -1).to_numpy()
        head = np.stack([*lengths, *bits, counts], axis=1).astype("<i8").view("u1")
        head = np.concatenate([np.broadcast_to(self._title, (n, 32)), head, np.stack(nulls, axis=1)], axis=1)
        # all fields of a row but its text are joined into one string, because each further hash call would cost 0.3 µs;
        # the text is hashed by a call of its own, because copying it would cost more
        fixed = pa.LargeBinaryArray.from_buffers(pa.large_binary(), n, [
            None, pa.py_buffer(np.arange(0, (n + 1) * head.shape[1], head.shape[1])), pa.py_buffer(head)])
        joined = pc.binary_join_element_wise(fixed, *(c.cast(pa.large_binary()) for c in short),
                                             pa.scalar(b"", pa.large_binary()), null_handling="replace",
                                             null_replacement=b"")
        small_offsets, small = _offsets(joined).tolist(), _data(joined)
        body_offsets, body = _offsets(text).tolist(), _data(text)
        sha256, out = hashlib.sha256, []
        for i, more in enumerate((counts > 0).tolist()):
            h = sha256(small[small_offsets[i]:small_offsets[i + 1]])
            h.update(body[body_offsets[i]:body_offsets[i + 1]])
            if more:
                h.update(np.array([(s["start"], s["end"]) for s in spans[i].as_py()], dtype="<i8").tobytes())
            out.append(h.digest())
        return out


def read_documents(path: str, columns: Iterable[str] | None = None, batch_rows: int = 256) -> Iterator[Document]:
    """Yield the documents of a part (Parquet file of documents) in row order. If `columns` is given, only these columns
    are read; without the column `text`, the texts are "".

    Memory holds one row group of the columns read. Signals (numbers stored beside a text) that are null are absent from
    `doc.signals`.
    """
    with open_parquet(path, memory_map=True) as file:
        names = [c for c in file.schema_arrow.names if columns is None or c in set(columns)]
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False):
                yield from batch_documents(batch)


def batch_documents(batch: pa.RecordBatch) -> Iterator[Document]:
    """Yield the rows of an Arrow batch as documents. If the batch lacks a column, the document's field gets its
    default."""
    n, names = batch.num_rows, set(batch.schema.names)

    def column(name: str, default: Any) -> Iterable[Any]:
        if name not in names:
            return [default] * n
        values = batch.column(name)
        return [None] * n if values.null_count == n else values.to_pylist()

    def places() -> Iterable[Any]:
        if "locator" not in names:
            return [None] * n
        keys = [f.name for f in LOCATOR]
        return [dict(zip(keys, row)) for row in zip(*(pc.struct_field(batch.column("locator"), k).to_pylist()
                                                      for k in keys))]

    signals: Iterable[tuple[Any, ...]] = [()] * n
    keys: list[str] = []
    if "signals" in names:
        keys = [f.name for f in batch.schema.field("signals").type]
        signals = zip(*(c.to_pylist() for c in batch.column("signals").flatten()))
    for id, text, url, source, language, date, place, values, meta, spans in zip(
            column("id", ""), column("text", ""), column("url", ""), column("source", ""), column("language", ""),
            column("date", None), places(), signals, column("meta", None), column("loss_spans", None)):
        yield Document(id, text, source=source, url=url, language=language, date=date, locator=place,
                       meta=json.loads(meta) if meta and meta != "{}" else {}, loss_spans=spans,
                       signals={k: v for k, v in zip(keys, values) if v is not None})


def _meta_json(meta: dict[str, Any]) -> str:
    """Encode metadata as JSON with sorted keys, without escaping non-ASCII characters."""
    for key, value in meta.items():
        if type(value) is not str or type(key) is not str:
            return _any_json(meta)
    return "{" + ", ".join([f"{_quoted(key)}: {_quoted(meta[key])}" for key in sorted(meta)]) + "}"


def _order(ids: pa.ChunkedArray) -> tuple[np.ndarray, int | None]:
    """Return the row numbers in the order of the ids, and the number of a row whose id occurs twice (None when all ids
    differ)."""
    text = "".join(ids.to_pylist())
    raw = _unhex(text) if len(text) == 32 * len(ids) else None
    if raw is not None and pc.all(pc.equal(pc.binary_length(ids), 32)).as_py():      # our own ids: as numbers, faster
        high, low = raw.reshape(-1, 2).T
        order = np.argsort(high, kind="stable")
        if (high[order][1:] == high[order][:-1]).any():
            order = np.lexsort((low, high))
        same = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
    else:
        long = ids.cast(pa.large_string()).combine_chunks()
        order = pc.sort_indices(long).to_numpy()
        there = long.take(pa.array(order))
        same = pc.equal(there[1:], there[:-1]).to_numpy(zero_copy_only=False)
    return order, int(order[np.flatnonzero(same)[0]]) if same.any() else None


def _unhex(text: str) -> np.ndarray | None:
    """Convert every 16 hex digits of the text to one number. The numbers sort in the order of the digits. Returns None
    when the text holds other characters than lower-case hex digits."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    return np.frombuffer(raw, ">u8").astype("<u8") if raw.hex() == text else None


# -- Arrow, down to the buffers --------------------------------------------------------------------------------------
def _strings(values: Iterable[str | None], type: pa.DataType | None = None) -> pa.Array:
    type = type or pa.string()
    try:
        return pa.array(values, type)
    except UnicodeEncodeError:
        return pa.array([None if v is None else storable_text(v) for v in values], type)


def _floats(values: Any) -> pa.Array:
    try:
        return pa.array(values, pa.float64())
    except (pa.ArrowInvalid, pa.ArrowTypeError):        # booleans
        return pa.array([None if v is None else float(v) for v in values], pa.float64())


def _offsets(array: pa.Array) -> np.ndarray:
    """Return where the n strings of a large_string array begin and end in the buffer that `_data` returns, as n + 1
    offsets of type int64."""
    return np.frombuffer(array.buffers()[1], "<i8")[array.offset:array.offset + len(array) + 1]


def _data(array: pa.Array) -> memoryview:
    buffer = array.buffers()[2]
    return memoryview(b"") if buffer is None else memoryview(buffer)
