"""Reads parts (Parquet files of documents) for the tasks that make tokens. It yields the rows that a token stream
takes, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.parquet import open_parquet
from stages.document import Document
from stages.filter.where import Where

#: maximum of a batch: documents, and bytes of their text. A longer document is a batch of its own
BATCH, BATCH_BYTES = 256, 8 << 20


class Selection:
    """Decides which documents a stream or a dataset takes, by the setting `where` of the recipe: {source: [names],
    language: [codes]}. Without this setting, all documents are taken."""

    def __init__(self, where: Mapping[str, Any] | None) -> None:
        self.config = Where.Config(**where) if where else None
        self.columns = frozenset(where or ())

    def takes(self, doc: Document) -> bool:
        return self.config is None or not self.config.refuses(doc.source, doc.language, doc.signals.get("script"))

    def mask(self, batch: pa.RecordBatch) -> np.ndarray:
        """Returns which rows of a batch are selected, as bool (rows,)."""
        if self.config is None:
            return np.ones(len(batch), bool)
        rows = list(zip(*(_column(batch, name) for name in ("source", "language")), _scripts(batch)))
        accepted = {row: not self.config.refuses(*row) for row in set(rows)}
        return np.fromiter((accepted[row] for row in rows), bool, len(batch))


def _column(batch: pa.RecordBatch, name: str) -> list[Any]:
    return batch.column(name).to_pylist() if name in batch.schema.names else [""] * len(batch)


def _scripts(batch: pa.RecordBatch) -> list[float | None]:
    """Return the signal `script` of each row: the number of the writing system of its text, or None where it was not
    computed."""
    if "signals" in batch.schema.names:
        signals = batch.column("signals")
        if signals.type.get_field_index("script") >= 0:
            return pc.struct_field(signals, "script").to_pylist()
    return [None] * len(batch)


@dataclass
class Rows:
    """A batch of rows taken from a part (file of documents), in order."""

    batch: pa.RecordBatch
    rows: np.ndarray              # their row numbers in the part, int64
    rows_read: int                     # rows of the part that were read to find them

    @property
    def ids(self) -> list[str]:
        return self.batch.column("id").to_pylist()

    def column(self, name: str) -> list[Any]:
        if name == "bytes":       # UTF-8 length of the text
            return pc.struct_field(self.batch.column("signals"), "bytes").cast(pa.int64()).to_pylist()
        return self.batch.column(name).to_pylist()

    def column_of(self, name: str) -> pa.Array | None:
        """Returns the column `name` of these rows as it is in the file, or None if the file does not have it."""
        return self.batch.column(name) if name in self.batch.schema.names else None


def rows_of(path: str, selection: Selection, columns: Sequence[str], batch: int = BATCH) -> Iterator[Rows]:
    """Yields the rows of a part (file of documents) that `selection` takes, at most `batch` rows and BATCH_BYTES of
    text at a time. A document longer than BATCH_BYTES is a batch of its own. The column `bytes`, the UTF-8 length of
    the text, is available without reading the texts. Memory: one row group of the columns read."""
    need = {"id", *columns, *selection.columns} - {"bytes"}
    if "bytes" in columns:
        need |= {"signals.bytes"}
    if "language" in selection.columns and "signals" not in need:
        need |= {"signals.script"}
    first = 0
    with open_parquet(path) as file:
        # read by row group: a batch that crosses row groups would keep all of them in memory
        for group in range(file.num_row_groups):
            for block in file.iter_batches(batch, row_groups=[group], columns=sorted(need)):
                for piece in _cut(block):
                    keep = selection.mask(piece)
                    rows = np.flatnonzero(keep)
                    yield Rows(piece if keep.all() else piece.filter(pa.array(keep)), rows + first, len(piece))
                    first += len(piece)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cuts a batch and yields the pieces, each with consecutive rows. A piece has at most BATCH_BYTES of text, or is a
    single row with a longer text."""
    if "text" not in batch.schema.names:
        yield batch
        return
    ends = np.cumsum(pc.binary_length(batch.column("text")).to_numpy(zero_copy_only=False).astype(np.int64))
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BATCH_BYTES, "right")))
        yield batch.slice(start, stop - start)
        start = stop
