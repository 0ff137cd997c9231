"""Stores a sample of the records of other readers in a Parquet file, and reads the sample back unchanged. `tokenmill
plan --sample` makes a cost forecast (CPU time, disk space, number of documents) from such a sample.

A row holds the whole result of a reader for one record: the document with its raw bytes or text, or the reason why
there is no document. The steps of a recipe therefore get the records of a sample exactly as they would get them from
the original files, with the same ids and locators.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pipeline.base.parquet import open_parquet
from stages.document import BadRecord, Document
from stages.read.reader import Reader, Skipped, Slice, bad, check_file, is_machine_fault
from stages.stage import StageConfig, signal

#: `kind` is document, bad or skipped. `text` is UTF-8 that may hold lone surrogates. `rank` is a
#: pseudo-random number: the sample consists of the records with the lowest ranks.
SCHEMA = pa.schema([
    ("rank", pa.uint64()), ("kind", pa.string()), ("id", pa.string()), ("text", pa.large_binary()),
    ("raw", pa.large_binary()), ("facts", pa.string())])
_FACTS = ("source", "url", "language", "date", "mime", "charset")


def payload(record: Document | BadRecord) -> int:
    """Return the number of bytes that the next step reads of a record: its raw bytes, or else its text in UTF-8. The
    result is 0 for a record that is no document."""
    if isinstance(record, BadRecord):
        return 0
    return len(record.raw) if record.raw is not None else len(record.text.encode("utf-8", "surrogatepass"))


def to_row(record: Document | BadRecord, rank: int) -> dict[str, Any]:
    """Return a record as a row of the Parquet file of a sample (`SCHEMA`). `rank` is the record's random number."""
    if isinstance(record, BadRecord):
        facts: dict[str, Any] = {"reason": record.reason, "locator": record.locator, "detail": record.detail,
                                 "fatal": record.fatal}
        kind, text, raw = "skipped" if isinstance(record, Skipped) else "bad", None, None
    else:
        facts = {name: getattr(record, name) for name in _FACTS}
        facts |= {"meta": record.meta, "locator": record.locator, "signals": record.signals,
                  "loss_spans": record.loss_spans}
        kind, text, raw = "document", record.text.encode("utf-8", "surrogatepass"), record.raw
    return {"rank": rank, "kind": kind, "id": record.id, "text": text, "raw": raw, "facts": json.dumps(facts)}


def from_row(row: dict[str, Any]) -> Document | BadRecord:
    """Return the record that a row of the Parquet file of a sample holds."""
    facts = json.loads(row["facts"])
    if row["kind"] != "document":
        make = Skipped if row["kind"] == "skipped" else BadRecord
        return make(facts["reason"], id=row["id"], locator=facts["locator"], detail=facts["detail"],
                    fatal=facts["fatal"])
    return Document(row["id"], row["text"].decode("utf-8", "surrogatepass"), raw=row["raw"], **facts)


class SampleReader(Reader):
    """Reads a sample of the records of other readers, which `tokenmill plan --sample` has written to a Parquet file."""

    name = "sample"
    collection = True
    version = 2
    suffixes = (".sample.parquet",)

    class Config(StageConfig):
        signals: tuple[str, ...] = signal((), "signals of the documents")

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.signals = self.config.signals

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        check_file(local, slice.path)
        ordinal = slice.ordinal
        try:
            with open_parquet(local) as file:
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(64, row_groups=[group]):
                        for row in batch.to_pylist():
                            yield from_row(row)
                            ordinal += 1
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            if is_machine_fault(e):
                raise
            yield bad("corrupt_sample", slice, 0, ordinal, detail=str(e), fatal=True)
