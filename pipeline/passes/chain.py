"""Runs batches of documents through a chain of stages (the code of the steps of a recipe), one stage after the other.

Before a stage sees documents, their row numbers are written to the crash cursor, a record in memory shared with the
supervising process. If the process dies, the supervisor has the documents of these rows processed one by one, and only
a document that kills a process again is quarantined. The outcome of a document does not depend on the batch it is in.
When a stage that takes whole batches raises an exception, its changes to the batch are undone, and the documents go
through this stage one by one. Only a document that fails alone is charged with the error.
"""

from __future__ import annotations

import gc
import json
import resource
import time
from dataclasses import dataclass
from typing import Any

from pipeline.base import confinement
from pipeline.engine.task import CrashCursor
from pipeline.passes.storable import State, check, check_spans, restore, state_of
from pipeline.passes.tables import to_blame
from pipeline.recipe.code import check_resources
from pipeline.store.records import Counters
from stages.catalog import load
from stages.document import Document
from stages.stage import Stage

#: documents with their numbers in the partition, in order
Batch = list[tuple[int, Document]]
#: document number → (place of the stage that dropped it, reason)
Verdicts = dict[int, tuple[int, str]]
#: document number → (stage, reason, detail): the stage raised, or wrote values that cannot be stored
Failures = dict[int, tuple[str, str, str]]


@dataclass
class LoadedStage:
    """A stage (the code of a recipe's step) that this process has imported, configured and set up."""

    name: str
    key: str
    label: str          # "0:html": its place and name, the key of its counters
    stage: Stage
    foreign: bool = False   # one of the user's own stages: the values it writes are checked
    side: str = ""  # name of its side table: two deduplications in one pass may need signatures of different kinds

    def __post_init__(self) -> None:
        self.side = f"{self.name}-{self.key[:8]}"


_loaded: dict[str, LoadedStage] = {}


def load_chain(chain: list[dict[str, Any]]) -> list[LoadedStage]:
    """Return the stages that `chain` (entries of a task's arguments) describes, loaded and set up, in order.

    A warm child (a worker process that is used for several tasks) keeps the stages of its latest chain, because models
    take long to load. It drops the stages of earlier chains, because a task declares memory for its own stages only.

    Two kinds of stages cannot be loaded by a sealed process (one that is cut off from the network): a user's own stage,
    and a stage that starts a program which the process may not start. FreshProcess is then raised.
    """
    idents = [json.dumps([place, entry["key"], entry["$volatile"]], sort_keys=True)
              for place, entry in enumerate(chain)]
    if unused := _loaded.keys() - set(idents):
        gc.unfreeze()                                # children freeze their objects; dropped stages must be collected
        for ident in unused:
            del _loaded[ident]
    for place, (ident, entry) in enumerate(zip(idents, chain)):
        if ident not in _loaded:
            hidden = entry["$volatile"]
            foreign = not hidden["target"].startswith("stages.") or entry["name"] == "datatrove"
            if foreign and confinement.sealed():
                raise confinement.FreshProcess(f"the step {entry['name']} may need the network to be set up")
            stage = load(hidden["target"])(hidden["config"])
            confinement.check(stage.programs())
            check_resources(stage.resource_files(), hidden.get("resources", {}))
            stage.setup()
            _loaded[ident] = LoadedStage(entry["name"], entry["key"], f"{place}:{entry['name']}", stage, foreign)
    return [_loaded[ident] for ident in idents]


class Chain:
    """Runs batches of documents through stages, and counts the documents in `counters`, a dict that the caller passes
    in. `counters["stages"]` has the counts of each stage. `counters["dropped_bytes"]` has the bytes of dropped
    documents by source. With `until_drop`, a dropped document does not go through the later stages."""

    def __init__(self, cursor: CrashCursor, counters: Counters, until_drop: bool) -> None:
        self.cursor, self.counters, self.until_drop = cursor, counters, until_drop

    def through(self, steps: list[LoadedStage], batch: Batch, sign: int = 1) -> tuple[Verdicts, Failures]:
        """Run a batch through `steps`, which change its documents in place. Returns the verdicts on dropped documents,
        and the documents on which a stage failed. An error that no document can have caused (`tables.to_blame`), such
        as a full disk, is raised.

        With `sign` -1, the counts of the batch are subtracted from the counters. Replay undoes the counts of an earlier
        run in this way. CPU time is always added.
        """
        verdicts: Verdicts = {}
        failures: Failures = {}
        alive = batch
        began = _cpu_s()                             # read once per stage, since it is a system call
        for place, step in enumerate(steps):
            if not alive:
                break
            stats = self.counters["stages"][step.label]
            # with `signals: all` later stages still compute signals of dropped documents; these are not counted again
            counted = [d for row, d in alive if row not in verdicts] if verdicts else [d for _, d in alive]
            stats["in"] += sign * len(counted)
            stats["bytes_in"] += sign * sum([d.text_bytes if d.raw is None else _payload(d) for d in counted])
            judged = self._apply(place, step, alive, verdicts, failures)
            alive = [item for item, reason in judged if reason is None]
            dropped = len(alive) < len(judged)
            if dropped:
                alive = []
            for item, reason in judged if dropped else ():
                if reason is None:
                    alive.append(item)
                    continue
                row, doc = item
                if row not in verdicts:
                    verdicts[row] = (place, reason)
                    count(stats["dropped"].setdefault(reason, {}), doc.source, sign)
                # with `signals: all`, a dropped document goes on, unless an extractor dropped it: it has no text
                if not (self.until_drop or step.stage.extracts):
                    alive.append(item)
            if step.stage.side is not None:
                for _, doc in alive:
                    if step.stage.name in doc.side:
                        doc.side[step.side] = doc.side.pop(step.stage.name)
            ended = _cpu_s()
            stats["cpu_s"], began = stats["cpu_s"] + ended - began, ended
            stats["bytes_out"] += sign * sum([d.text_bytes for row, d in alive if row not in verdicts] if verdicts else
                                              [d.text_bytes for _, d in alive])
        for row, doc in batch if verdicts else ():
            if row in verdicts:
                count(self.counters["dropped_bytes"], doc.source, sign * doc.text_bytes)
        return verdicts, failures

    def _apply(self, place: int, step: LoadedStage, alive: Batch, verdicts: Verdicts,
               failures: Failures) -> list[tuple[tuple[int, Document], str | None]]:
        """Run the documents `alive` through one stage, number `place` of the chain. Returns ((row, document), verdict)
        for each document on which the stage does not fail; the verdict is None (keep) or the reason to drop the
        document. Documents on which the stage fails are added to `failures`. Those that an earlier stage has dropped
        (they are in `verdicts`) are not added: they stay dropped."""
        stage, foreign, after = step.stage, step.foreign, []
        batch_verdicts: list[str | None] | None = None           # verdicts of the batch
        before: list[State] = []                        # the documents before the stage
        if stage.batched and len(alive) > 1:
            self.cursor.set(alive[0][0], alive[-1][0], place)
            before = [state_of(d) for _, d in alive]
            try:
                batch_verdicts = list(stage.process_batch([d for _, d in alive]))
                if len(batch_verdicts) != len(alive):
                    raise ValueError(f"{len(batch_verdicts)} verdicts about {len(alive)} documents")
            except MemoryError:
                raise
            except Exception:                       # undo; the loop below finds the failing document
                batch_verdicts = None
                for (_, doc), untouched in zip(alive, before):
                    restore(doc, untouched)
            if batch_verdicts is not None and not foreign:
                return list(zip(alive, batch_verdicts))
        point = self.cursor.set
        process = (lambda doc: stage.process_batch([doc])[0]) if stage.batched else stage.process
        for i, item in enumerate(alive):
            row, doc = item
            point(row, row, place)
            state = None if not foreign else state_of(doc) if batch_verdicts is None else before[i]
            text, spans = doc.text, doc.loss_spans
            try:
                reason = process(doc) if batch_verdicts is None else batch_verdicts[i]
                if state is not None:
                    check(doc, reason, state)
                elif spans and doc.loss_spans is spans:        # a stage that moves the spans makes a new list
                    check_spans(doc, text, spans)
            except MemoryError:
                raise
            except Exception as e:
                if not to_blame(e):
                    raise                           # a full disk or a missing library is no document's fault
                if state is not None:
                    restore(doc, state)             # values written before the failure may not be storable
                if row not in verdicts:
                    failures[row] = (step.name, f"error:{type(e).__name__}", f"{e}{confinement.hint(e)}")
                continue
            after.append((item, reason))
        return after


def _cpu_s() -> float:
    """Return the CPU seconds of this thread plus those of the finished processes that stages have started (for OCR, for
    example)."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + waited.ru_utime + waited.ru_stime


def count(into: dict[str, int], key: str, n: int) -> None:
    into[key] = into.get(key, 0) + n


def _payload(doc: Document) -> int:
    return len(doc.raw) if doc.raw is not None and not doc.text else doc.text_bytes
