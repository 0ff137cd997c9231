"""The document pass: a partition's documents through a chain of stages, in one child process.

Reads source slices, or one upstream part together with the removal slice of a barrier, and writes

    kept.parquet          documents that every stage kept
    dropped.parquet       documents a stage dropped, with `stage` and `reason`, text passed through the scrubber
    quarantine.parquet    records that could not be read, crashed, hung or failed a stage, with the error
    side.STAGE-KEY.parquet  rows of a barrier's `prepare` stage for the kept documents: `row`, `id`, its columns

Memory is the largest batch plus one row group plus the models, never the partition. Every document is announced on the
crash cursor before a stage sees it, so its death costs that document and nothing else.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from pipeline.base.parquet import read_table
from pipeline.engine.task import Cursor, Inputs, Out
from pipeline.passes.chain import Chain, count, load_chain
from pipeline.passes.reading import SourceFiles
from pipeline.passes.replay import Earlier, NotReproduced, thresholds, without_zeros
from pipeline.passes.rows import Taken
from pipeline.passes.storable import scrub_row
from pipeline.passes.tables import QUARANTINE_SCHEMA, RowWriter, quarantine_row
from pipeline.passes.tally import Tally
from pipeline.recipe.code import import_planned
from pipeline.store.errors import DamagedFile
from pipeline.store.lists import unfold
from pipeline.store.parts import PartWriter, document_schema, read_documents
from pipeline.store.records import READING, Counters
from stages.document import BadRecord, Document
from stages.read.reader import Reader, Skipped

#: documents (or bytes of raw input) held between two looks at the clock and the writers; decides nothing about text
BATCH_DOCS, BATCH_BYTES = 256, 8 << 20
#: records of a batch, with those whose fate is known before it goes through the chain
BATCH_RECORDS = 1024

#: every side table begins with these: the row in kept.parquet, and whose it is
SIDE_COLUMNS = (pa.field("row", pa.uint32()), pa.field("id", pa.string()))


@dataclass
class _Removed:
    """A document the barrier before this pass removed. It goes through no stage and has no number of its own."""

    doc: Document
    reason: str
    similarity: float | None


class DocumentPass:
    """args: either source, reader {name, key, config} and slices [$file…], or part {text: $ref, removed: $ref | null,
    barrier}; where {source | language: [values]} of the documents taken; chain [{name, key, $volatile: {target,
    config}}], signals [names], signals_mode until-drop | all, $volatile {quarantined: [entry of the log], replay:
    `replay.replay_arg` of the same pass under other thresholds}.
    """

    name = "documents"
    version = 4
    sets_up = True

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        try:
            return _Run(inputs, cursor, out).run()
        except NotReproduced:                        # without the earlier pass, then
            for name in out.names:
                os.unlink(out.path(name))            # writers that are still open must not write into the new files
            out.names.clear()
            out.condemned.clear()
            return _Run(inputs, cursor, out, replay=False).run()


class _Run:
    def __init__(self, inputs: Inputs, cursor: Cursor, out: Out, replay: bool = True) -> None:
        self.inputs, self.cursor, self.out, self.args = inputs, cursor, out, inputs.args
        for about in (self.args, self.args.get("reader", {})):       # stages and readers of the user's own
            import_planned(inputs.store, about.get("$volatile", {}).get("code", ()))
        self.steps = load_chain(self.args["chain"])
        self.reader: Reader | None = None
        inputs.confine([program for step in self.steps for program in step.stage.programs()])
        self.until_drop = self.args["signals_mode"] == "until-drop"
        names = tuple(self.args["signals"])
        self.kept_rows = 0                     # the writer counts when it flushes; side tables need the row at once
        self.kept = PartWriter(out.path("kept.parquet"), document_schema(names).with_metadata(thresholds(self.steps)))
        self.dropped = PartWriter(out.path("dropped.parquet"), document_schema(names, dropped=True))
        self.quarantine = RowWriter(out.path("quarantine.parquet"), QUARANTINE_SCHEMA)
        self.sides = {s.side: RowWriter(out.path(f"side.{s.side}.parquet"), pa.schema([*SIDE_COLUMNS, *s.stage.side]))
                      for s in self.steps if s.stage.side is not None}
        keys = {s.key for s in self.steps}
        said = unfold(self.args.get("$volatile", {}).get("quarantined", []), inputs.store.read)
        self.condemned = {q["id"]: q for q in said if q["stage_key"] in keys}
        self.skip = {row: q for row, q in inputs.skip.items() if q.get("stage", 0) > READING}
        reader = self.args.get("reader", {}).get("key")
        self.bad_files = [q for q in said if "file" in q and q["stage_key"] == reader]
        self.tally = Tally(self.steps, names, self.until_drop)
        self.earlier = self._earlier() if replay else None
        self.counters: Counters = {
            "read": {}, "in": {}, "kept": {}, "dropped_bytes": {}, "quarantined": {}, "languages": {},
            "lengths": {}, "stages": {s.label: {"in": 0, "bytes_in": 0, "bytes_out": 0, "cpu_s": 0.0, "dropped": {}}
                                      for s in self.steps}}
        self.chain = Chain(cursor, self.counters, self.until_drop)
        if self.earlier is not None:
            self._take_over(self.earlier)

    def _earlier(self) -> Earlier | None:
        """The earlier pass to take verdicts from. None where a child has died of a document, in this attempt or an
        earlier one: what is looked into, and what follows from it, is the pass as it is anew. It takes less memory, and
        a document is not gone over twice, under both thresholds, which could be what it died of."""
        said, asked = self.args.get("$volatile", {}).get("replay"), self.inputs
        if said is None or asked.skip or asked.only is not None or asked.batch_rows is not None:
            return None
        with suppress(DamagedFile, NotReproduced):    # gone, damaged, or made by other code: everything is done again
            found = Earlier(asked, said, self.steps, list(self.sides), self.until_drop)
            # the counters of then hold what had not been condemned yet, and it is not to be met again to take it out
            return None if any(map(found.saw, self.condemned)) else found
        return None

    def _take_over(self, earlier: Earlier) -> None:
        """Begin with the earlier pass' counters of what is not counted document by document again."""
        was = earlier.counters
        self.counters["stages"] |= copy.deepcopy(was["stages"])
        self.counters["dropped_bytes"] = dict(was["dropped_bytes"])
        self.counters["replayed"] = {"docs": 0, "cpu_s": earlier.cpu_s}

    # -- reading -------------------------------------------------------------------------------------------------
    def _announced(self) -> Iterator[tuple[int, Document | BadRecord | _Removed]]:
        """Everything in the partition, in order, with its number. The cursor says which one is being read."""
        if "part" not in self.args:
            files = SourceFiles(self.inputs, self.cursor, self.out, self.counters, self.bad_files)
            self.reader = files.reader
            yield from files
            return
        point, row = self.cursor.set, 0
        point(0, 0, -1)
        for record in self._part(self.args["part"]):
            yield row, record
            row += not isinstance(record, _Removed)
            point(row, row, -1)

    def _part(self, part: dict[str, Any]) -> Iterator[Document | _Removed]:
        removed: dict[int, dict[str, Any]] = {}
        if part.get("removed"):
            for row in read_table(self.inputs.fetch(part["removed"])).to_pylist():
                removed[row["row"]] = row
        for row, doc in enumerate(read_documents(self.inputs.fetch(part["text"]))):
            said = removed.get(row)
            if said is not None:
                doc.meta["cluster"] = said["cluster"]
                if said["near"]:
                    doc.meta["near_duplicates"] = {n["id"]: n["similarity"] for n in said["near"]}
                if said["reason"]:
                    doc.meta[part["barrier"]] = {"kept": said["kept"], "similarity": said["similarity"]}
                    yield _Removed(doc, said["reason"], said["similarity"])
                    continue
            yield doc

    def _remove(self, removed: _Removed, size: int) -> None:
        """Write a document the barrier before this pass removed."""
        barrier, doc, reason = self.args["part"]["barrier"], removed.doc, removed.reason
        if self.earlier is None:                     # otherwise counted then
            stats = self.counters["stages"].setdefault(
                f"barrier:{barrier}", {"in": 0, "bytes_in": 0, "bytes_out": 0, "cpu_s": 0.0, "dropped": {}})
            stats["in"] += 1
            stats["bytes_in"] += size
            count(stats["dropped"].setdefault(reason, {}), doc.source, 1)
            count(self.counters["dropped_bytes"], doc.source, size)
        scrub_row(doc)
        self.tally.removed(doc, barrier, removed.similarity)
        self.dropped.write(doc, stage=barrier, reason=reason)

    # -- the loop ------------------------------------------------------------------------------------------------
    def run(self) -> Counters:
        # every record in its turn, whatever batch it is in: batches depend on what was condemned, or is looked into
        batch: list[tuple[int, Document | Callable[[], None]]] = []
        alive = size = 0                             # documents of the batch that go through the chain; bytes
        limit = min(BATCH_DOCS, self.inputs.batch_rows or BATCH_DOCS)
        where = self.args.get("where") or {}
        wanted = Taken(where)
        seen = self.counters["read"].setdefault(self.args["source"], {"records": 0, "skipped": {}, "bad": {}}) \
            if "source" in self.args else {"records": 0}
        only, suspects, records = self.inputs.only, bool(self.skip or self.condemned), 0
        plain = not (where or suspects) and only is None
        for row, record in self._announced():
            if plain and type(record) is Document:                # nearly all of them
                records += 1
                size += self._count_in(record)
                batch.append((row, record))
                alive += 1
            elif isinstance(record, _Removed):
                if only is None:
                    held = self._count_in(record.doc)
                    size += held
                    batch.append((row, partial(self._remove, record, held)))
            else:
                bad = isinstance(record, BadRecord)
                if where and not bad and not wanted.takes(record):
                    continue
                records += 1
                if only is not None and row not in only:
                    continue
                if bad:
                    batch.append((row, partial(self._unreadable, record, seen)))
                else:
                    size += self._count_in(record)
                    settled = self._condemned_before(row, record) if suspects else None
                    batch.append((row, settled or record))
                    alive += settled is None
            if alive >= limit or size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
                self._process(batch, alive)
                batch, alive, size = [], 0, 0
        self._process(batch, alive)
        seen["records"] = records
        if self.reader is not None and self.reader.lost:
            seen["lost"] = self.reader.lost
        self.cursor.clear()
        return self._close()

    def _unreadable(self, record: BadRecord, seen: dict[str, Any]) -> None:
        if isinstance(record, Skipped):
            count(seen["skipped"], record.reason, 1)
        else:
            count(seen["bad"], record.reason, 1)
            self._note(record.id, self.args.get("source", ""), record.locator, "read", record.reason, record.detail,
                       record.bytes or None)

    def _count_in(self, doc: Document) -> int:
        size = len(doc.raw) if doc.raw is not None else doc.text_bytes
        into = self.counters["in"].get(doc.source)
        if into is None:
            into = self.counters["in"][doc.source] = {"docs": 0, "bytes": 0}
        into["docs"] += 1
        into["bytes"] += size
        return size

    def _condemned_before(self, row: int, doc: Document) -> Callable[[], None] | None:
        """How to note a document that a supervisor condemned in this attempt (`skip`), or the log did in an earlier
        one; None for any other."""
        if row in self.skip:
            fault = self.skip[row]
            step = self.steps[fault["stage"]] if 0 <= fault.get("stage", -1) < len(self.steps) else self.steps[0]
            self.out.quarantine(row, doc.id, step.name, step.key, fault["reason"])
            return partial(self._note, doc.id, doc.source, doc.locator, step.name, fault["reason"], "")
        fault = self.condemned.get(doc.id)
        return fault and partial(self._note, doc.id, doc.source, doc.locator, fault["stage"], fault["reason"], "")

    def _process(self, batch: list[tuple[int, Document | Callable[[], None]]], alive: int) -> None:
        """Take a batch, `alive` of it documents, through the chain and write what became of everything in it, in order.
        """
        settled: dict[int, tuple[Document, tuple[str, str] | None]] = {}
        docs = todo = batch if alive == len(batch) else [item for item in batch if isinstance(item[1], Document)]
        if self.earlier is not None:
            settled = {row: said for row, doc in docs if (said := self.earlier.outcome(doc)) is not None}
            todo = [(row, doc) for row, doc in docs if row not in settled]
            self.counters["replayed"]["docs"] += len(settled)
            # what the earlier counters hold of these is taken out by doing to copies what was done then
            again = [(row, copy.deepcopy(doc)) for row, doc in todo if doc.id not in self.earlier.skipped]
            self.earlier.verify(again, *self.chain.through(self.earlier.steps, again, -1))
        verdicts, failures = self.chain.through(self.steps, todo)
        self.cursor.clear()
        if len(docs) == len(batch) and not (settled or verdicts or failures):
            self._keep([doc for _, doc in docs])
            return
        for row, doc in batch:
            if not isinstance(doc, Document):
                doc()
            elif row in settled:
                was, fate = settled[row]
                if fate is None:
                    self._keep([was])
                else:
                    self._write_dropped(was, *fate)
            elif row in verdicts:
                self._drop(row, doc, *verdicts[row])
            elif row in failures:
                self._note(doc.id, doc.source, doc.locator, *failures[row])
            else:
                self._keep([doc])

    # -- writing -------------------------------------------------------------------------------------------------
    def _keep(self, docs: list[Document]) -> None:
        self.kept.write_all(docs)
        if self.sides:
            for row, doc in enumerate(docs, self.kept_rows):
                for name in doc.side:
                    if name in self.sides:
                        self.sides[name].write({"row": row, "id": doc.id, **doc.side[name]})
        self.kept_rows += len(docs)
        self.tally.kept(docs)

    def _drop(self, row: int, doc: Document, place: int, reason: str) -> None:
        self.cursor.set(row, row, place)             # scrubbing may take more memory than the stages: it is to blame
        scrub_row(doc)
        self.cursor.clear()
        self._write_dropped(doc, self.steps[place].name, reason)

    def _write_dropped(self, doc: Document, stage: str, reason: str) -> None:
        self.tally.dropped(doc, stage)
        self.dropped.write(doc, stage=stage, reason=reason)

    def _note(self, id: str, source: str, locator: dict[str, Any], stage: str, reason: str, detail: str,
              bytes: int | None = None) -> None:
        count(self.counters["quarantined"], reason, 1)
        self.quarantine.write(quarantine_row(id, source, locator, stage, reason, detail, bytes))

    def _close(self) -> Counters:
        self.tally.into(self.counters)
        for name, writer in (("kept.parquet", self.kept), ("dropped.parquet", self.dropped)):
            writer.close()
            self.out.note(name, rows=writer.rows, content=writer.content, meta={"text_bytes": writer.text_bytes})
        for name, side in self.sides.items():
            side.close()
            self.out.note(f"side.{name}.parquet", rows=side.rows)
        self.quarantine.close()
        self.out.note("quarantine.parquet", rows=self.quarantine.rows)
        if self.earlier is not None:                 # what has come to nothing would not be there
            for stats in self.counters["stages"].values():
                stats["dropped"] = without_zeros(stats["dropped"])
            losers = {source for stats in self.counters["stages"].values() for by in stats["dropped"].values()
                      for source in by}
            lost = self.counters["dropped_bytes"]
            self.counters["dropped_bytes"] = {source: n for source, n in lost.items() if source in losers}
        return self.counters
