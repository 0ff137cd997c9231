"""Defines the columns of quarantine files, and a class that writes rows into a Parquet file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pipeline.base import confinement
from pipeline.base.parquet import parquet_writer
from pipeline.base.process import ProcessDied
from pipeline.base.redact import redact
from stages.read.jsonl import clean
from stages.scrub.pii import scrub_text

#: a row of `quarantine/NAME/`: id and source of the document, file and number of the record, the stage that failed, the
#: reason, and as `detail` the message of the error, if there is one, without personal data and without secrets of the
#: node. `bytes`: for a record that stands for the lost rest of a file, how many bytes of the stored file were not read
QUARANTINE_SCHEMA = pa.schema([("id", pa.string()), ("source", pa.string()), ("file", pa.string()),
                               ("record", pa.int64()), ("stage", pa.string()), ("reason", pa.string()),
                               ("detail", pa.string()), ("bytes", pa.int64())])


def quarantine_row(id: str, source: str, locator: Mapping[str, Any], stage: str, reason: str,
                   detail: str = "", bytes: int | None = None) -> dict[str, Any]:
    # a file name may be invalid UTF-8, and an error message may quote invalid UTF-8
    file, detail = clean(locator.get("file") or ""), clean(detail[:5000])
    return {"id": id, "source": source, "file": scrub_text(file),
            "record": locator.get("record"), "stage": stage, "reason": reason,
            "detail": scrub_text(redact(detail))[:500], "bytes": bytes}


def to_blame(error: Exception) -> bool:
    """Whether the document may have caused an error that a stage raised on it. A lack of memory, a missing library or
    an error of the operating system, such as a full disk, is not the document's fault. If a process that the stage
    started was killed, the answer is also False; the supervisor then finds the cause. An operation that the confinement
    of the process forbids counts as the document's fault, because a parser tried it on this document."""
    if isinstance(error, PermissionError) and confinement.sealed():
        return True
    return not (isinstance(error, (MemoryError, ImportError, ProcessDied)) or (isinstance(error, OSError)
                                                                  and error.errno is not None))


class RowWriter:
    """Writes rows into a Parquet file, for example of quarantined records. It writes after every 8,192 rows. It writes
    earlier if the binary values of the waiting rows (such as hashes of all paragraphs of long books) reach 32 MiB."""

    FLUSH, FLUSH_BYTES = 1 << 13, 32 << 20

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self.schema = schema
        self.writer = parquet_writer(path, schema)
        self.pending: list[dict[str, Any]] = []
        self.rows = self._bytes = 0

    def write(self, row: dict[str, Any]) -> None:
        self.pending.append(row)
        self.rows += 1
        self._bytes += sum(len(value) for value in row.values() if type(value) is bytes)
        if len(self.pending) >= self.FLUSH or self._bytes >= self.FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self.writer.write_table(pa.Table.from_pylist(self.pending, schema=self.schema))
        self.pending, self._bytes = [], 0

    def close(self) -> None:
        self._flush()
        self.writer.close()
