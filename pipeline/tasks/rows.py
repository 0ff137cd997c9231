"""Rows of document parts as tasks about tokens read them: those a stream takes, in bounded batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.parquet import open_parquet
from stages.document import Document
from stages.stage import SettingsError
from stages.text.language_codes import names
from stages.text.scripts import CODES

#: documents, and bytes of their text, at a time; a longer document is a batch of its own
BATCH, BATCH_BYTES = 256, 8 << 20


class Where:
    """Which documents of a dataset belong to a stream: {source: [names], language: [codes], signals: {name: {min,
    max}}}. A language is wanted by any of its names (`stages.text.language_codes`).

    A range holds min <= value < max, so that buckets tile; a signal that was not computed is in no range.
    """

    def __init__(self, spec: Mapping[str, Any] | None) -> None:
        spec = dict(spec or {})
        given = {k: spec.pop(k) for k in ("source", "language") if k in spec}
        self.equal = {k: [v] if isinstance(v, str) else list(v) for k, v in given.items()}
        self.ranges = {k: (v.get("min"), v.get("max")) for k, v in spec.pop("signals", {}).items()}
        if spec:
            raise SettingsError(f"where: unknown keys {sorted(spec)}; known are source, language, signals")

    def speaks(self, language: str | None, script: float | None) -> bool:
        """Whether a document is in a language wanted: by its label, and the number of its script where it is known."""
        return "language" not in self.equal or any(
            names(wanted, language or "", CODES.get(int(script or 0), "")) for wanted in self.equal["language"])

    def takes(self, doc: Document) -> bool:
        """Whether a document has the source and the language wanted; says nothing of signals."""
        return doc.source in self.equal.get("source", (doc.source,)) and self.speaks(
            doc.language, doc.signals.get("script"))

    def mask(self, batch: pa.RecordBatch) -> np.ndarray:
        """Which rows of a batch are taken, bool (rows,)."""
        keep = np.ones(len(batch), bool)
        for column, values in self.equal.items():
            if column == "language":
                keep &= np.fromiter((self.speaks(*said) for said in zip(*_languages(batch))), bool, len(batch))
                continue
            keep &= np.asarray(pc.is_in(batch.column(column), pa.array(values, pa.string())).to_numpy(False), bool)
        for name, (low, high) in self.ranges.items():
            signals = batch.column("signals")
            if signals.type.get_field_index(name) < 0:
                known = ", ".join(f.name for f in signals.type)
                raise SettingsError(f"where.signals: the dataset has no signal '{name}'; it has {known}")
            value = pc.struct_field(signals, name).to_numpy(zero_copy_only=False).astype(float)
            keep &= ~np.isnan(value)
            keep &= value >= low if low is not None else True
            keep &= value < high if high is not None else True
        return keep


def _languages(batch: pa.RecordBatch) -> tuple[list[str | None], list[float | None]]:
    """Labels of languages, and numbers of scripts where the signal was computed."""
    scripts: list[float | None] = [None] * len(batch)
    if "signals" in batch.schema.names:
        signals = batch.column("signals")
        if signals.type.get_field_index("script") >= 0:
            scripts = pc.struct_field(signals, "script").to_pylist()
    return batch.column("language").to_pylist(), scripts


@dataclass
class Rows:
    """Some rows of a part that passed a `where`, in order."""

    batch: pa.RecordBatch
    rows: np.ndarray              # their row numbers in the part, int64
    seen: int                     # rows of the part read for them

    @property
    def ids(self) -> list[str]:
        return self.batch.column("id").to_pylist()

    def column(self, name: str) -> list[Any]:
        if name == "bytes":       # UTF-8 length of the text
            return pc.struct_field(self.batch.column("signals"), "bytes").cast(pa.int64()).to_pylist()
        return self.batch.column(name).to_pylist()


def rows_of(path: str, where: Where, columns: Sequence[str], batch: int = BATCH) -> Iterator[Rows]:
    """The rows of a part that `where` takes, at most `batch` of them and BATCH_BYTES of text (or one longer document)
    at a time. The column `bytes` is there without the texts. Memory: one row group of what is read."""
    need = {"id", *columns, *where.equal} - {"bytes"}
    if where.ranges:
        need |= {"signals"}
    elif "bytes" in columns:
        need |= {"signals.bytes"}
    if "language" in where.equal and "signals" not in need:
        need |= {"signals.script"}
    first = 0
    with open_parquet(path) as file:
        # a batch that crosses row groups would keep all of them in memory
        for group in range(file.num_row_groups):
            for block in file.iter_batches(batch, row_groups=[group], columns=sorted(need)):
                for got in _cut(block):
                    keep = where.mask(got)
                    rows = np.flatnonzero(keep)
                    yield Rows(got if keep.all() else got.filter(pa.array(keep)), rows + first, len(got))
                    first += len(got)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in runs of rows with at most BATCH_BYTES of text, or of one row."""
    if "text" not in batch.schema.names:
        yield batch
        return
    ends = np.cumsum(pc.binary_length(batch.column("text")).to_numpy(zero_copy_only=False).astype(np.int64))
    start = 0
    while start < len(ends):
        taken = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, taken + BATCH_BYTES, "right")))
        yield batch.slice(start, stop - start)
        start = stop
