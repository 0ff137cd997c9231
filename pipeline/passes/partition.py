"""Reads the records of a partition for the document pass: in order, counted, and in batches.

A partition is the input of one task: either slices of source files, or one part (the output of one earlier task). Two
tables may say which rows of a part to leave out. The removal slice lists the rows that the barrier before this pass
removes. (A barrier is a step that needs all documents at once, such as deduplication.) The row set lists the rows that
earlier passes removed.

Some records have an outcome before any stage sees them. They could not be read, the barrier removed them, or in an
earlier attempt they killed a process or exceeded its CPU time or memory. Such a record carries its outcome through the
pass. Batches bound memory; the outcome of a document does not depend on the batch it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.base.parquet import open_parquet, read_table
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.chain import LoadedStage, count
from pipeline.passes.reading import SourceFiles
from pipeline.passes.rows import Selection
from pipeline.store.lists import unfold
from pipeline.store.parts import read_documents
from pipeline.store.records import READING, Counters
from pipeline.store.tombstones import TAKEN_DOWN, gone_documents
from stages.barrier import COUNT, SLICE_SCHEMA
from stages.document import BadRecord, Document
from stages.read.reader import Reader, Skipped

#: maximum of a batch: documents, bytes of raw input
BATCH_DOCS, BATCH_BYTES = 256, 8 << 20
#: maximum records of a batch, including those whose outcome is known before the chain
BATCH_RECORDS = 1024
#: verdicts of barriers decoded at a time
VERDICTS = 1024


@dataclass
class Removed:
    """A document that a barrier (a step such as deduplication) removed before this pass. It goes through no stage of
    the pass. `size` is the number of its bytes."""

    doc: Document
    reason: str
    similarity: float | None
    size: int

    def count(self, counters: Counters, barrier: str, sign: int = 1) -> None:
        """Count the document as dropped by the barrier `barrier` (a step such as deduplication). With `sign` -1, it is
        subtracted from the counts."""
        stats = counters["stages"].setdefault(
            f"barrier:{barrier}", {"in": 0, "bytes_in": 0, "bytes_out": 0, "cpu_s": 0.0, "dropped": {}})
        stats["in"] += sign
        stats["bytes_in"] += sign * self.size
        count(stats["dropped"].setdefault(self.reason, {}), self.doc.source, sign)
        count(counters["dropped_bytes"], self.doc.source, sign * self.size)


@dataclass
class Settled:
    """A document whose verdict in an earlier run of the pass still holds. `doc` is the document as the earlier run
    wrote it. `dropped` is (stage, reason), or None when the document was kept."""

    doc: Document
    dropped: tuple[str, str] | None


@dataclass
class QuarantinedRecord:
    """A record that goes into quarantine, for one of four reasons: it could not be read, a stage failed on it, in an
    earlier attempt it killed a process or exceeded its CPU time or memory, or it was taken out of the store. If the
    record stands for the lost rest of a file, `bytes` says how many bytes of the stored file were not read."""

    id: str
    source: str
    locator: dict[str, Any]
    stage: str
    reason: str
    detail: str = ""
    bytes: int | None = None


#: Items: a Document goes through the chain; the other kinds have a known outcome
Item = Document | Removed | Settled | QuarantinedRecord
#: (number in the partition, item), in order; for a document of a part, the number is its row in the part
Items = list[tuple[int, Item]]


class _Verdicts:
    """Looks up the entries of a table about rows of a part (file of documents). The table is a removal slice (rows that
    a barrier removes or cuts) or a row set (rows that are gone). Only VERDICTS entries are decoded at a time: an entry
    may name many passages to cut, and all entries together could exceed the memory of the task. Rows are therefore
    looked up in ascending order. A step back to an earlier row decodes the table again from its beginning."""

    def __init__(self, path: str | None) -> None:
        self._path, self._first = path, 0
        self._blocks: Iterator[list[dict[str, Any]]] = iter(())
        self._block: list[dict[str, Any]] = []
        #: row of the part → its place in the table
        self.rows: dict[int, int] = {} if path is None else {
            row: place for place, row in enumerate(read_table(path, columns=["row"])["row"].to_pylist())}

    def get(self, row: int) -> dict[str, Any] | None:
        """Return the entry about a row of the part, as a dict with the columns of the table (SLICE_SCHEMA or
        CUT_SCHEMA). Returns None if the table has no entry about the row."""
        place = self.rows.get(row)
        if place is None:
            return None
        if place < self._first or not self._block:
            self._first, self._block, self._blocks = 0, [], self._read()
        while place >= self._first + len(self._block):
            self._first += len(self._block)
            self._block = next(self._blocks)
        return self._block[place - self._first]

    def _read(self) -> Iterator[list[dict[str, Any]]]:
        assert self._path is not None
        with open_parquet(self._path) as file:
            for batch in file.iter_batches(VERDICTS, use_threads=False):
                yield batch.to_pylist()


class PartitionReader:
    """Reads the records of one partition (the input of a document pass task) in batches. `tombstones` says which
    documents were taken out of the store. `quarantined` maps the ids of documents to their quarantine entries in the
    commit log. These documents killed a process at a stage of `steps`, or exceeded its CPU time or memory."""

    def __init__(self, inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs, steps: Sequence[LoadedStage],
                 counters: Counters) -> None:
        self.inputs, self.cursor, self.out, self.steps, self.counters = inputs, cursor, out, steps, counters
        self.args = inputs.args
        quarantined = unfold(self.args.get("$volatile", {}).get("quarantined", []), inputs.store.read)
        keys, reader = {step.key for step in steps}, self.args.get("reader", {}).get("key")
        self.quarantined = {entry["id"]: entry for entry in quarantined if entry["stage_key"] in keys}
        self._bad_files = [entry for entry in quarantined if "file" in entry and entry["stage_key"] == reader]
        self._skip = {row: fault for row, fault in inputs.skip.items() if fault.stage > READING}
        self.tombstones = gone_documents(self.args.get("$volatile", {}).get("tombstones", {}), inputs.fetch)
        self._reader: Reader | None = None
        part = self.args.get("part", {})
        #: by row of the part: the row set that earlier passes left, and the removal slice of the barrier before this
        #: pass
        self._earlier, self._slice = self._verdicts(part.get("gone")), self._verdicts(part.get("removed"))
        #: by row of the part: for how many further documents a document stands; None if the pass does not hand this on
        self._counts = self._read_counts(part["counts"]) if "counts" in part else None

    def batches(self) -> Iterator[Items]:
        """Yields the documents of the partition in batches, together with records whose outcome is already known. A
        batch ends when it has BATCH_DOCS documents (fewer after a crash), BATCH_BYTES bytes or BATCH_RECORDS
        records."""
        batch: Items = []
        documents = size = 0
        limit = min(BATCH_DOCS, self.inputs.batch_rows or BATCH_DOCS)
        for row, item, item_bytes in self._items():
            batch.append((row, item))
            documents += isinstance(item, Document)
            size += item_bytes
            if documents >= limit or size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
                yield batch
                batch, documents, size = [], 0, 0
        if batch:
            yield batch

    def _items(self) -> Iterator[tuple[int, Item, int]]:
        """Yields (number of the record in the partition, item, bytes of the item) and counts the records. An item is a
        document, or a record whose outcome is already known. Documents that the argument `where` does not select are
        left out."""
        read: dict[str, Any] = {"records": 0, "skipped": {}, "bad": {}}
        if "source" in self.args:
            self.counters["read"][self.args["source"]] = read
        where = Selection(self.args["where"]) if self.args.get("where") else None
        only, records = self.inputs.only, 0
        suspects = bool(self._skip or self.quarantined or self.tombstones)
        for row, record in self._records():
            if isinstance(record, Document):
                if where is not None and not where.takes(record):
                    continue
            elif isinstance(record, Removed):
                if only is None:
                    record.size = self._count_in(record.doc)
                    yield row, record, record.size
                continue
            records += 1
            if only is not None and row not in only:
                continue
            if isinstance(record, Document):
                size = self._count_in(record)
                yield row, (self._quarantined_before(row, record) if suspects else None) or record, size
            elif isinstance(record, Skipped):
                count(read["skipped"], record.reason, 1)
            else:
                count(read["bad"], record.reason, 1)
                yield row, QuarantinedRecord(record.id, self.args.get("source", ""), record.locator, "read",
                                             record.reason, record.detail, record.bytes or None), 0
        read["records"] = records
        if self._reader is not None and self._reader.lost:
            read["lost"] = self._reader.lost

    def _records(self) -> Iterator[tuple[int, Document | BadRecord | Removed]]:
        """Yields (number, record) for all records of the partition, in order. The number of the record being read is
        kept in the crash cursor, from which the supervising process sees which record caused a crash."""
        if "part" not in self.args:
            files = SourceFiles(self.inputs, self.cursor, self.out, self.counters, self._bad_files)
            self._reader = files.reader
            yield from files
            return
        point = self.cursor.set
        point(0, 0, -1)
        for row, record in self._part(self.args["part"]):
            yield row, record
            point(row + 1, row + 1, -1)

    def _part(self, part: dict[str, Any]) -> Iterator[tuple[int, Document | Removed]]:
        for row, doc in enumerate(read_documents(self.inputs.fetch(part["text"]))):
            earlier, verdict = self._earlier.get(row), self._slice.get(row)
            if earlier is not None:
                if earlier["reason"]:
                    continue                             # the pass that removed it has counted and written it
                _note(doc, earlier)
            if verdict is not None:
                _note(doc, verdict)
                if verdict["reason"]:
                    doc.meta[part["barrier"]] = {"kept": verdict["kept"], "similarity": verdict["similarity"]}
                    yield row, Removed(doc, verdict["reason"], verdict["similarity"], 0)
                    continue
                doc.cuts = verdict.get("cuts")
            if self._counts is not None:
                doc.signals[COUNT] = (doc.signals.get(COUNT) or 1) + self._counts.get(row, 0)
                if doc.signals[COUNT] > 1:
                    doc.meta.setdefault("cluster", doc.id)       # `exact` names a cluster by the document that it keeps
            yield row, doc

    def _read_counts(self, ref: dict[str, Any] | None) -> dict[int, int]:
        if ref is None:
            return {}
        table = read_table(self.inputs.fetch(ref))
        return dict(zip(table["row"].to_pylist(), table["more"].to_pylist(), strict=True))

    def _verdicts(self, ref: dict[str, Any] | None) -> _Verdicts:
        return _Verdicts(self.inputs.fetch(ref) if ref else None)

    def row_set(self, lost: Iterable[int]) -> pa.Table:
        """Returns the row set of the part after this pass: a table (SLICE_SCHEMA) of the rows that are gone, each with
        the reason. `lost` are the rows that stages of this pass dropped or failed on. A row that stays is also in the
        table if a barrier noted its cluster or near duplicates; its reason is "".

        The entry of a row that is gone does not name the document that was kept in its place. If it did, another choice
        among duplicates would change the keys of later tasks.
        """
        lost, barrier = set(lost), self.args["part"]["barrier"]
        rows = sorted({*self._earlier.rows, *self._slice.rows, *lost})
        columns: dict[str, list[Any]] = {name: [None] * len(rows) for name in SLICE_SCHEMA.names}
        columns["row"] = rows
        for place, row in enumerate(rows):
            earlier, verdict = self._earlier.get(row) or {}, self._slice.get(row) or {}
            reason = earlier.get("reason") or (barrier if verdict.get("reason") else "lost" if row in lost else "")
            columns["reason"][place] = reason
            if not reason:
                columns["cluster"][place] = verdict.get("cluster") or earlier.get("cluster")
                columns["near"][place] = verdict.get("near") or earlier.get("near")
        return pa.table(columns, schema=SLICE_SCHEMA)

    def _count_in(self, doc: Document) -> int:
        size = len(doc.raw) if doc.raw is not None else doc.text_bytes
        into = self.counters["in"].get(doc.source)
        if into is None:
            into = self.counters["in"][doc.source] = {"docs": 0, "bytes": 0}
        into["docs"] += 1
        into["bytes"] += size
        return size

    def _quarantined_before(self, row: int, doc: Document) -> QuarantinedRecord | None:
        """Returns the quarantine entry of a document that must not be processed, and None for other documents. There
        are two such cases: the document was taken out of the store, or it killed a process or exceeded its CPU time or
        memory. The latter is known from earlier attempts at this task (`TaskInputs.skip`) and from the commit log."""
        if self.tombstones.cover(doc.id, doc.url, doc.text):
            return taken_down(doc)
        if row in self._skip:
            fault = self._skip[row]
            step = self.steps[fault.stage] if 0 <= fault.stage < len(self.steps) else self.steps[0]
            self.out.quarantine(row, doc.id, step.name, step.key, fault.reason)
            return QuarantinedRecord(doc.id, doc.source, doc.locator, step.name, fault.reason)
        if doc.id in self.quarantined:
            entry = self.quarantined[doc.id]
            return QuarantinedRecord(doc.id, doc.source, doc.locator, entry["stage"], entry["reason"])
        return None


def taken_down(doc: Document) -> QuarantinedRecord:
    """Return the quarantine record of a document that was taken out of the store. It holds neither text nor URL of the
    document."""
    return QuarantinedRecord(doc.id, doc.source, doc.locator, "takedown", TAKEN_DOWN)


def _note(doc: Document, verdict: dict[str, Any]) -> None:
    """Copy what a barrier (such as deduplication) noted about a document into the document's metadata: its cluster, and
    its near duplicates with their similarities. `verdict` is the document's entry in the removal slice."""
    if verdict["cluster"] is not None:
        doc.meta["cluster"] = verdict["cluster"]
    if verdict["near"]:
        doc.meta["near_duplicates"] = {near["id"]: near["similarity"] for near in verdict["near"]}
