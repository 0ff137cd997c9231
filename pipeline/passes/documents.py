"""Implements the document pass: one child process runs the documents of one partition through a chain of stages.

A partition is the input of one task: either slices of source files, or one part, which is the output of one earlier
task. A part may come with the removal slice of a barrier. A barrier is a step that needs all documents at once, such as
deduplication; its removal slice lists the rows of the part that it removes. The pass writes

    kept.parquet          documents that every stage kept
    gone.parquet          instead of kept.parquet, from a pass between two barriers: a row set, which lists the rows of
                          the part that this pass or earlier passes have removed (`stages.barrier`)
    dropped.parquet       documents that a stage or the barrier dropped, with `stage` and `reason`; the scrubber has
                          removed personal data from them
    quarantine.parquet    records that could not be read, and documents on which a stage failed, crashed, or exceeded
                          its CPU time or memory, with the error; also, without text and URL, documents that `tokenmill
                          takedown` has taken out
    side.STAGE-KEY.parquet  a side table for a later barrier: `row`, `id` and the columns that the barrier's `prepare`
                          stage computed for each kept document

A pass between two barriers that follow each other without a step only fills the side table of the second barrier. It
does not write the documents again, but a row set, and the pass after the second barrier reads the same part. The
documents that the first barrier removed are counted and written to dropped.parquet only once, by the pass between the
barriers.

`partition` reads batches of documents, `chain` takes them through the stages, and this module writes the outcomes. If
only thresholds changed since an earlier run, `replay` copies the rows of the earlier pass whose verdict stays the same.

Memory: the largest batch, one row group, and the models of the stages. It does not grow with the partition.

Before a stage sees documents, their row numbers are written to the crash cursor, a record in memory shared with the
supervising process. If the process dies, the supervisor has the documents of these rows processed one by one. Only a
document that kills a process again is quarantined.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa

from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.chain import Batch, Chain, count, load_chain, warm
from pipeline.passes.partition import Items, PartitionReader, QuarantinedRecord, Removed, Settled, taken_down
from pipeline.passes.replay import NotReproduced, Replay, thresholds
from pipeline.passes.storable import scrub_row
from pipeline.passes.tables import QUARANTINE_SCHEMA, RowWriter, quarantine_row
from pipeline.passes.tally import Tally
from pipeline.recipe.code import import_planned
from pipeline.store.parts import PartWriter, document_schema
from pipeline.store.records import Counters
from stages.barrier import write_slice
from stages.document import Document

#: first columns of every side table: the document's row in kept.parquet (in the part, if the pass writes a row set
#: instead), and its id
SIDE_COLUMNS = (pa.field("row", pa.uint32()), pa.field("id", pa.string()))


class DocumentPass:
    """The task of the document pass: runs the documents of one partition through a chain of stages.

    The documents come either from source files or from a part. For source files, the args are `source`, `reader` {name,
    key, config} and `slices` [$file…]. For a part, the arg `part` is a dict:

    * text: $ref of the documents
    * gone: $ref of a row set (list of rows that are gone), or null
    * removed: $ref of a removal slice (list of rows that a barrier removes), or null
    * barrier: the name of this barrier
    * counts: $ref of a table with the number of removed duplicates of each kept row, or null; missing unless the pass
      stores duplicate counts

    The other args are

    * rewrites: true to write kept.parquet, false to write a row set
    * where {source | language: [values]}: only matching documents are taken
    * chain [{name, key, $volatile: {target, config}}]: the stages, in order
    * signals [names]: the signals that get a column
    * signals_mode: until-drop (a dropped document goes no further) or all (later stages still compute its signals)

    Three more args are under $volatile, and do not enter the task's key:

    * quarantined: the commit log's entries about quarantined documents
    * tombstones: documents to leave out (`pipeline.store.tombstones`)
    * replay: an earlier run of the pass under other thresholds (`replay.replay_arg`)
    """

    name = "documents"
    version = 5
    sets_up = True

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        try:
            return _Pass(inputs, cursor, out, replay=True).run()
        except NotReproduced:
            for name in out.names:
                os.unlink(out.path(name))        # so that writers still open cannot write into the new files
            out.names.clear()
            out.quarantined.clear()
            return _Pass(inputs, cursor, out, replay=False).run()


class _Pass:
    def __init__(self, inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs, *, replay: bool) -> None:
        self.cursor, self.out, self.args = cursor, out, inputs.args
        for place in (self.args, self.args.get("reader", {})):       # code of the user's own stages and readers
            import_planned(inputs.store, place.get("$volatile", {}).get("code", ()))
        self.steps = load_chain(self.args["chain"])
        inputs.confine([program for step in self.steps for program in step.stage.programs()])
        warm(self.steps)
        names, until_drop = tuple(self.args["signals"]), self.args["signals_mode"] == "until-drop"
        self.kept_rows = 0                     # the writer counts only when it flushes; side tables need the row now
        self.kept = PartWriter(out.path("kept.parquet"), document_schema(names).with_metadata(
            thresholds(self.steps))) if self.args["rewrites"] else None
        self.lost: list[int] = []              # rows that stages dropped or failed on, for the row set
        self.dropped = PartWriter(out.path("dropped.parquet"), document_schema(names, dropped=True))
        self.quarantine = RowWriter(out.path("quarantine.parquet"), QUARANTINE_SCHEMA)
        self.sides = {s.side: RowWriter(out.path(f"side.{s.side}.parquet"), pa.schema([*SIDE_COLUMNS, *s.stage.side]))
                      for s in self.steps if s.stage.side is not None}
        self.tally = Tally(self.steps, names, until_drop)
        self.counters: Counters = {
            "read": {}, "in": {}, "kept": {}, "dropped_bytes": {}, "quarantined": {}, "languages": {},
            "lengths": {}, "stages": {s.label: {"in": 0, "bytes_in": 0, "bytes_out": 0, "cpu_s": 0.0, "dropped": {}}
                                      for s in self.steps}}
        self.chain = Chain(cursor, self.counters, until_drop)
        self.partition = PartitionReader(inputs, cursor, out, self.steps, self.counters)
        self.batches: Iterator[Items] = self.partition.batches()
        if replay and (earlier := Replay.of(inputs, self.steps, list(self.sides), self.chain,
                                            self.partition.quarantined)):
            self.batches = earlier.settled(self.batches)

    def run(self) -> Counters:
        for batch in self.batches:
            documents = [(row, item) for row, item in batch if isinstance(item, Document)]
            verdicts, failures = self.chain.through(self.steps, documents)
            self.cursor.clear()
            gone = self._gone(documents)
            if len(documents) == len(batch) and not (verdicts or failures or gone):       # the usual case
                self._keep(documents)
                continue
            for row, item in batch:
                if isinstance(item, QuarantinedRecord):
                    self._quarantine(row, item)
                elif isinstance(item, Removed):
                    self._remove(item)
                elif isinstance(item, Settled):
                    self._settle(row, item)
                elif row in gone:
                    self._quarantine(row, taken_down(item))
                elif row in verdicts:
                    self._drop(row, item, *verdicts[row])
                elif row in failures:
                    self._quarantine(row, QuarantinedRecord(item.id, item.source, item.locator, *failures[row]))
                else:
                    self._keep([(row, item)])
        self.cursor.clear()
        return self._close()

    def _gone(self, documents: Batch) -> set[int]:
        """Return the rows of those `documents` that `tokenmill takedown` has removed from the store. They are
        recognised by the id, URL and text that they have after the stages, which may have changed URL and text.
        Documents that are recognised before the stages do not get here: `partition` quarantines them."""
        tombstones = self.partition.tombstones
        return {row for row, doc in documents if tombstones.cover(doc.id, doc.url, doc.text)} if tombstones else set()

    # -- writing -------------------------------------------------------------------------------------------------
    def _keep(self, items: Batch) -> None:
        docs = [doc for _, doc in items]
        if self.kept is not None:
            self.kept.write_all(docs)
            items = list(enumerate(docs, self.kept_rows))
        if self.sides:
            for row, doc in items:
                for name in doc.side:
                    if name in self.sides:
                        self.sides[name].write({"row": row, "id": doc.id, **doc.side[name]})
        self.kept_rows += len(docs)
        self.tally.kept(docs)

    def _drop(self, row: int, doc: Document, place: int, reason: str) -> None:
        self.cursor.set(row, row, place)             # scrubbing may run out of memory: this document is then to blame
        scrub_row(doc)
        self.cursor.clear()
        self._lose(row)
        self._write_dropped(doc, self.steps[place].name, reason)

    def _write_dropped(self, doc: Document, stage: str, reason: str) -> None:
        self.tally.dropped(doc, stage)
        self.dropped.write(doc, stage=stage, reason=reason)

    def _settle(self, row: int, item: Settled) -> None:
        if item.dropped is None:
            self._keep([(row, item.doc)])
        else:
            self._write_dropped(item.doc, *item.dropped)

    def _remove(self, item: Removed) -> None:
        barrier = self.args["part"]["barrier"]
        item.count(self.counters, barrier)
        scrub_row(item.doc)
        self.tally.removed(item.doc, barrier, item.similarity)
        self.dropped.write(item.doc, stage=barrier, reason=item.reason)

    def _quarantine(self, row: int, item: QuarantinedRecord) -> None:
        self._lose(row)
        count(self.counters["quarantined"], item.reason, 1)
        self.quarantine.write(quarantine_row(item.id, item.source, item.locator, item.stage, item.reason, item.detail,
                                             item.bytes))

    def _lose(self, row: int) -> None:
        if self.kept is None:
            self.lost.append(row)

    def _close(self) -> Counters:
        self.tally.into(self.counters)
        for name, writer in (("kept.parquet", self.kept), ("dropped.parquet", self.dropped)):
            if writer is not None:
                writer.close()
                self.out.note(name, rows=writer.rows, content=writer.content, meta={"text_bytes": writer.text_bytes})
        if self.kept is None:
            write_slice(self.out, "gone.parquet", self.partition.row_set(self.lost), meta={
                "kept": self.kept_rows, "bytes": self.args["part"]["text"]["bytes"]})
        for name, side in self.sides.items():
            side.close()
            self.out.note(f"side.{name}.parquet", rows=side.rows)
        self.quarantine.close()
        self.out.note("quarantine.parquet", rows=self.quarantine.rows)
        return self.counters
