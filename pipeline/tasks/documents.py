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
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.lists import unfold
from pipeline.engine.task import ChangedInput, Counters, Cursor, Inputs, Out
from pipeline.recipe.code import import_planned
from pipeline.store.parts import PartWriter, document_schema, read_documents
from pipeline.store.tables import QUARANTINE_SCHEMA, RowWriter, quarantine_row, to_blame
from pipeline.tasks.replay import Earlier, thresholds, without_zeros
from pipeline.tasks.storable import check, language_label, restore, scrub_row, state_of
from stages.catalog import load, reader_class
from stages.document import BadRecord, Document
from stages.read.reader import Skipped, Slice
from stages.stage import Stage, file_sha256

#: documents (or bytes of raw input) held between two looks at the clock and the writers; decides nothing about text
BATCH_DOCS, BATCH_BYTES = 64, 8 << 20

#: every side table begins with these: the row in kept.parquet, and whose it is
SIDE_COLUMNS = (pa.field("row", pa.uint32()), pa.field("id", pa.string()))


@dataclass
class Step:
    """One stage of the chain as loaded in this process."""

    name: str
    key: str
    label: str          # "0:html": its place and name, the name of its counters
    stage: Stage
    foreign: bool = False   # not ours: what it writes is checked
    side: str = ""          # name of its side table: two dedups of one pass may want signatures of different kinds

    def __post_init__(self) -> None:
        self.side = f"{self.name}-{self.key[:8]}"


_loaded: dict[str, Step] = {}


def load_chain(chain: list[dict[str, Any]]) -> list[Step]:
    """Stages of a chain, ready to use. A warm child keeps those of its latest chain (models are expensive to load, and
    to hold: the memory a task declares is for its own)."""
    idents = [json.dumps([place, entry["key"], entry["$volatile"]], sort_keys=True)
              for place, entry in enumerate(chain)]
    for ident in _loaded.keys() - set(idents):
        del _loaded[ident]
    for place, (ident, entry) in enumerate(zip(idents, chain)):
        if ident not in _loaded:
            hidden = entry["$volatile"]
            stage = load(hidden["target"])(hidden["config"])
            planned = hidden.get("resources", {})
            for field, path in stage.resource_files().items() if planned else ():
                if file_sha256(path) != planned.get(field):
                    raise ChangedInput(f"{path} is not the file this run was planned with; run again to plan with the "
                                       f"new one, and see that all nodes have the same")
            stage.setup()
            foreign = not hidden["target"].startswith("stages.") or entry["name"] == "datatrove"
            _loaded[ident] = Step(entry["name"], entry["key"], f"{place}:{entry['name']}", stage, foreign)
    return [_loaded[ident] for ident in idents]


class DocumentPass:
    """args: either source, reader {name, key, config} and slices [$file…], or part {text: $ref, removed: $ref | null,
    barrier}; where {source | language: [values]} of the documents taken; chain [{name, key, $volatile: {target,
    config}}], signals [names], signals_mode until-drop | all, $volatile {quarantined: [entry of the log], replay:
    `replay.replay_arg` of the same pass under other thresholds}.
    """

    version = 2

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        return _Run(inputs, cursor, out).run()


class _Run:
    def __init__(self, inputs: Inputs, cursor: Cursor, out: Out) -> None:
        self.inputs, self.cursor, self.out, self.args = inputs, cursor, out, inputs.args
        import_planned(inputs.store, self.args.get("$volatile", {}).get("code", ()))     # stages of the user's own
        self.steps = load_chain(self.args["chain"])
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
        #: documents and bytes kept, by what the counters tell apart: one look-up a document instead of three
        self.tally: dict[tuple[str, str, int], list[int]] = {}
        self.earlier = self._earlier()
        self.counters: Counters = {
            "read": {}, "in": {}, "kept": {}, "dropped_bytes": {}, "quarantined": {}, "languages": {},
            "lengths": {}, "stages": {s.label: {"in": 0, "bytes_in": 0, "bytes_out": 0, "cpu_s": 0.0, "dropped": {}}
                                      for s in self.steps}}
        if self.earlier is not None:
            self._take_over(self.earlier)

    def _earlier(self) -> Earlier | None:
        said = self.args.get("$volatile", {}).get("replay")
        with suppress(FileNotFoundError, ValueError):       # gone, or made by other code: everything is done again
            return Earlier(self.inputs, said, self.steps, list(self.sides)) if said else None
        return None

    def _take_over(self, earlier: Earlier) -> None:
        """Begin with the earlier pass' counters of what is not counted document by document again."""
        was = earlier.counters
        self.counters["stages"] |= copy.deepcopy(was["stages"])
        self.counters["dropped_bytes"] = dict(was["dropped_bytes"])
        self.counters["replayed"] = {"docs": 0, "cpu_s": earlier.cpu_s}

    # -- reading -------------------------------------------------------------------------------------------------
    def records(self) -> Iterator[Document | BadRecord]:
        """Everything in the partition, in order; row numbers on the cursor count these."""
        if "part" in self.args:
            yield from self._part(self.args["part"])
            return
        entry = self.args["reader"]
        reader = reader_class(entry["name"])(entry["$volatile"]["config"])
        for arg in self.args["slices"]:
            piece = Slice(self.args["source"], arg["$file"], arg.get("start", 0), arg.get("stop"),
                          arg.get("ordinal", 0))
            yield from reader.read(self.inputs.fetch(arg, partial(reader.needs, piece)), piece)

    def _announced(self) -> Iterator[tuple[int, Document | BadRecord]]:
        """The records with their numbers. The cursor says which one is being read: there is no stage before the first.
        """
        point = self.cursor.set
        point(0, 0, -1)
        for row, record in enumerate(self.records()):
            yield row, record
            point(row + 1, row + 1, -1)

    def _part(self, part: dict[str, Any]) -> Iterator[Document]:
        removed: dict[int, dict[str, Any]] = {}
        if part.get("removed"):
            for row in pq.read_table(self.inputs.fetch(part["removed"])).to_pylist():
                removed[row["row"]] = row
        for row, doc in enumerate(read_documents(self.inputs.fetch(part["text"]))):
            said = removed.get(row)
            if said is not None:
                doc.meta["cluster"] = said["cluster"]
                if said["reason"]:
                    doc.meta[part["barrier"]] = {"kept": said["kept"], "similarity": said["similarity"]}
                    self._remove(doc, part["barrier"], said["reason"])
                    continue
            yield doc

    def _remove(self, doc: Document, barrier: str, reason: str) -> None:
        """A document the barrier before this pass removed."""
        size = self._count_in(doc)
        if self.earlier is None:                     # otherwise counted then
            stats = self.counters["stages"].setdefault(
                f"barrier:{barrier}", {"in": 0, "bytes_in": 0, "bytes_out": 0, "cpu_s": 0.0, "dropped": {}})
            stats["in"] += 1
            stats["bytes_in"] += size
            _add(stats["dropped"].setdefault(reason, {}), doc.source, 1)
            _add(self.counters["dropped_bytes"], doc.source, size)
        self._drop(doc, barrier, reason)

    # -- the loop ------------------------------------------------------------------------------------------------
    def run(self) -> Counters:
        batch: list[tuple[int, Document]] = []
        size = 0
        limit = min(BATCH_DOCS, self.inputs.batch_rows or BATCH_DOCS)
        where = self.args.get("where") or {}
        seen = self.counters["read"].setdefault(self.args["source"], {"records": 0, "skipped": {}, "bad": {}}) \
            if "source" in self.args else {"records": 0}
        only, suspects, records = self.inputs.only, bool(self.inputs.skip or self.condemned), 0
        for row, record in self._announced():
            bad = isinstance(record, BadRecord)
            if where and not bad and not all(getattr(record, k) in v for k, v in where.items()):
                continue
            records += 1
            if only is not None and row not in only:
                continue
            if bad:
                self._unreadable(record, seen)
                continue
            size += self._count_in(record)
            if not (suspects and self._condemned_before(row, record)):
                batch.append((row, record))
            if len(batch) >= limit or size >= BATCH_BYTES:
                self._process(batch)
                batch, size = [], 0
        self._process(batch)
        seen["records"] = records
        self.cursor.clear()
        return self._close()

    def _unreadable(self, record: BadRecord, seen: dict[str, Any]) -> None:
        if isinstance(record, Skipped):
            _add(seen["skipped"], record.reason, 1)
        else:
            _add(seen["bad"], record.reason, 1)
            self._note(record.id, self.args.get("source", ""), record.locator, "read", record.reason, record.detail)

    def _count_in(self, doc: Document) -> int:
        size = len(doc.raw) if doc.raw is not None else doc.text_bytes
        into = self.counters["in"].get(doc.source)
        if into is None:
            into = self.counters["in"][doc.source] = {"docs": 0, "bytes": 0}
        into["docs"] += 1
        into["bytes"] += size
        return size

    def _condemned_before(self, row: int, doc: Document) -> bool:
        """Documents a supervisor condemned in this attempt (`skip`), or the log did in an earlier one."""
        if row in self.inputs.skip:
            said = self.inputs.skip[row]
            step = self.steps[said["stage"]] if 0 <= said.get("stage", -1) < len(self.steps) else self.steps[0]
            self.out.quarantine(row, doc.id, step.name, step.key, said["reason"])
            self._note(doc.id, doc.source, doc.locator, step.name, said["reason"], "")
            return True
        if doc.id in self.condemned:
            said = self.condemned[doc.id]
            self._note(doc.id, doc.source, doc.locator, said["stage"], said["reason"], "")
            return True
        return False

    def _process(self, batch: list[tuple[int, Document]]) -> None:
        """Take a batch through the chain and write what became of it."""
        settled: dict[int, tuple[Document, tuple[str, str] | None]] = {}
        todo = batch
        if self.earlier is not None:
            settled = {row: said for row, doc in batch if (said := self.earlier.outcome(doc)) is not None}
            todo = [(row, doc) for row, doc in batch if row not in settled]
            self.counters["replayed"]["docs"] += len(settled)
            # what the earlier counters hold of these is taken out by doing to copies what was done then
            self._through(self.earlier.steps, [(row, copy.deepcopy(doc)) for row, doc in todo
                                               if doc.id not in self.earlier.skipped], -1)
        verdicts, failures = self._through(self.steps, todo)
        self.cursor.clear()
        if not (settled or verdicts or failures):
            for _, doc in batch:
                self._keep(doc)
            return
        for row, doc in batch:
            if row in settled:
                was, fate = settled[row]
                if fate is None:
                    self._keep(was)
                else:
                    self.dropped.write(was, stage=fate[0], reason=fate[1])
            elif row in verdicts:
                self._drop(doc, *verdicts[row])
            elif row in failures:
                self._note(doc.id, doc.source, doc.locator, *failures[row])
            else:
                self._keep(doc)

    def _through(self, steps: list[Step], batch: list[tuple[int, Document]], sign: int = 1) -> tuple[
            dict[int, tuple[str, str]], dict[int, tuple[str, str, str]]]:
        """Stage by stage; counts `sign` times. Returns, by row, verdicts (stage, reason) and failures (stage, reason,
        detail)."""
        verdicts: dict[int, tuple[str, str]] = {}
        failures: dict[int, tuple[str, str, str]] = {}
        alive = batch
        for place, step in enumerate(steps):
            if not alive:
                break
            stats = self.counters["stages"][step.label]
            # with `signals: all` dropped documents come along for their signals; they are in nobody's funnel
            counted = [d for row, d in alive if row not in verdicts] if verdicts else [d for _, d in alive]
            stats["in"] += sign * len(counted)
            stats["bytes_in"] += sign * sum([_payload(d) for d in counted])
            began = time.thread_time()
            judged = self._apply(place, step, alive, verdicts, failures)
            alive = []
            for item, reason in judged:
                if reason is None:
                    alive.append(item)
                    continue
                row, doc = item
                if row not in verdicts:
                    verdicts[row] = (step.name, reason)
                    _add(stats["dropped"].setdefault(reason, {}), doc.source, sign)
                # with `signals: all` a dropped document goes on through filters, to have every signal stored
                if not (self.until_drop or step.stage.extracts):
                    alive.append(item)
            if step.side in self.sides:
                for _, doc in alive:
                    if step.stage.name in doc.side:
                        doc.side[step.side] = doc.side.pop(step.stage.name)
            stats["cpu_s"] += time.thread_time() - began
            stats["bytes_out"] += sign * sum([d.text_bytes for row, d in alive if row not in verdicts])
        for row, doc in batch if verdicts else ():
            if row in verdicts:
                _add(self.counters["dropped_bytes"], doc.source, sign * doc.text_bytes)
        return verdicts, failures

    def _apply(self, place: int, step: Step, alive: list[tuple[int, Document]], verdicts: dict[int, tuple[str, str]],
               failures: dict[int, tuple[str, str, str]]) -> list[tuple[tuple[int, Document], str | None]]:
        """(item, verdict) of those that did not fail."""
        stage, foreign, after = step.stage, step.foreign, []
        whole: list[str | None] | None = None           # verdicts of the batch
        if stage.batched and len(alive) > 1:
            self.cursor.set(alive[0][0], alive[-1][0], place)
            before = [state_of(d) for _, d in alive]
            try:
                whole = list(stage.process_batch([d for _, d in alive]))
                if len(whole) != len(alive):
                    raise ValueError(f"{len(whole)} verdicts about {len(alive)} documents")
            except MemoryError:
                raise
            except Exception:                       # find the culprit: as they were, one by one
                whole = None
                for (_, doc), state in zip(alive, before):
                    restore(doc, state)
            if whole is not None and not foreign:
                return list(zip(alive, whole))
        point, state = self.cursor.set, None
        process = (lambda doc: stage.process_batch([doc])[0]) if stage.batched else stage.process
        for i, item in enumerate(alive):
            row, doc = item
            point(row, row, place)
            if foreign:
                state = state_of(doc) if whole is None else before[i]
            try:
                reason = process(doc) if whole is None else whole[i]
                if foreign:
                    check(doc, reason, state)
            except MemoryError:
                raise
            except Exception as e:
                if not to_blame(e):
                    raise                           # a full disk, a missing library: no document is to blame
                if state is not None:
                    restore(doc, state)             # what it wrote before it failed may not be storable
                if row not in verdicts:
                    failures[row] = (step.name, f"error:{type(e).__name__}", str(e))
                continue
            after.append((item, reason))
        return after

    # -- writing -------------------------------------------------------------------------------------------------
    def _keep(self, doc: Document) -> None:
        self.kept.write(doc)
        for name in doc.side:
            if name in self.sides:
                self.sides[name].write({"row": self.kept_rows, "id": doc.id, **doc.side[name]})
        self.kept_rows += 1
        kind = doc.source, doc.language, len(doc.text).bit_length()
        into = self.tally.get(kind)
        if into is None:
            into = self.tally[kind] = [0, 0]
        into[0] += 1
        into[1] += doc.text_bytes

    def _count_kept(self) -> None:
        for (source, language, bits), (docs, size) in self.tally.items():
            into = self.counters["kept"].setdefault(source, {"docs": 0, "bytes": 0})
            into["docs"] += docs
            into["bytes"] += size
            _add(self.counters["languages"].setdefault(source, {}), language_label(language), docs)
            _add(self.counters["lengths"].setdefault(source, {}), str(max(bits, 1) - 1), docs)

    def _drop(self, doc: Document, stage: str, reason: str) -> None:
        scrub_row(doc)
        self.dropped.write(doc, reason=reason, stage=stage)

    def _note(self, id: str, source: str, locator: dict[str, Any], stage: str, reason: str, detail: str) -> None:
        _add(self.counters["quarantined"], reason, 1)
        self.quarantine.write(quarantine_row(id, source, locator, stage, reason, detail))

    def _close(self) -> Counters:
        self._count_kept()
        for name, writer in (("kept.parquet", self.kept), ("dropped.parquet", self.dropped)):
            writer.close()
            self.out.note(name, rows=writer.rows, content=writer.content, meta={"text_bytes": writer.text_bytes})
        for name, side in self.sides.items():
            side.close()
            self.out.note(f"side.{name}.parquet", rows=side.rows)
        self.quarantine.close()
        self.out.note("quarantine.parquet", rows=self.quarantine.rows)
        if self.earlier is not None:                 # what has come to nothing would not be there
            self.counters["dropped_bytes"] = without_zeros(self.counters["dropped_bytes"])
            for stats in self.counters["stages"].values():
                stats["dropped"] = without_zeros(stats["dropped"])
        return self.counters


def _add(into: dict[str, int], key: str, n: int) -> None:
    into[key] = into.get(key, 0) + n


def _payload(doc: Document) -> int:
    return len(doc.raw) if doc.raw is not None and not doc.text else doc.text_bytes
