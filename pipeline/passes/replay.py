"""Implements replay: when only thresholds changed, stored signals show which documents a pass (a group of steps that
run together) must process again.

Signals are numbers that stages store beside each document; thresholds are the `decision` fields of the stages' configs.
Two passes that differ only in thresholds have the same *replay key*, which is the content key of the task computed
without these fields. The output of the earlier pass holds the signals of every document. Each stage whose thresholds
changed judges these signals twice, under the old and under the new thresholds. If no verdict differs, the document's
row is copied. If one differs, or if the earlier pass failed on the document, the document goes through all stages
again. The result equals that of a pass from scratch byte for byte.

A dropped document lacks the signals of later stages. Replay does not need them: the document is either dropped again by
the same stage, or goes through all stages again. The counters begin with those of the earlier pass. When a document is
processed again, its old counts are subtracted first.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pipeline.base.parquet import open_parquet, read_table
from pipeline.engine.task import TaskInputs
from pipeline.passes.chain import Batch, Chain, Failures, LoadedStage, Verdicts
from pipeline.passes.partition import Items, Removed, Settled
from pipeline.passes.verdicts import overwritten, stored_verdicts, with_thresholds
from pipeline.store.errors import DamagedFile
from pipeline.store.parts import read_documents
from pipeline.store.records import Counters, PartRecord
from stages.document import Document
from stages.stage import role_of

#: key in the Parquet metadata of kept.parquet: the thresholds of the pass that wrote it
THRESHOLDS = b"tokenmill.thresholds"


def thresholds(steps: Sequence[LoadedStage]) -> dict[bytes, bytes]:
    """Returns the thresholds of a chain of stages (the `decision` fields of their configs), as metadata for the Parquet
    file that the pass writes."""
    decisions = [{field: value for field, value in step.stage.config.model_dump(mode="json").items()
                  if role_of(type(step.stage.config), field) == "decision"} for step in steps]
    return {THRESHOLDS: json.dumps(decisions, sort_keys=True).encode()}


def replay_arg(record: PartRecord) -> dict[str, Any]:
    """Returns the argument `replay` of a new task, which describes an earlier task whose results it may reuse. The
    argument does not enter the key of the new task."""
    return {"files": {name: info.ref() for name, info in record.files.items()}, "counters": record.counters,
            "cpu_s": record.cpu_s}


class NotReproduced(Exception):
    """Raised when the results of an earlier pass cannot be reused. Either its files cannot be read, or its chain of
    stages, run again, gives other verdicts than those it recorded. The new pass then starts again without replay."""


@contextlib.contextmanager
def _decoding_errors_as_not_reproduced() -> Iterator[None]:
    """Turns errors of decoding Parquet files into NotReproduced. Arrow raises them as ValueError, or as OSError without
    errno. An OSError with errno is a fault of the machine and is raised unchanged."""
    try:
        yield
    except (ValueError, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise
        raise NotReproduced(str(e)) from e


class Replay:
    """Copies documents from an earlier run of this pass (a group of steps that run together) if their verdicts still
    hold, in input order.

    `steps` is the chain of stages of this pass. The earlier chain has the same stages under the earlier thresholds. The
    stages of both chains share their models.
    """

    @classmethod
    def of(cls, inputs: TaskInputs, steps: Sequence[LoadedStage], sides: Sequence[str], chain: Chain,
           quarantined: Iterable[str]) -> Replay | None:
        """Returns the replay (the reuse of an earlier run's results) that the task's arguments ask for. Returns None if
        they ask for none. Also returns None if the pass must run from scratch, which is so in three cases:

        * The earlier files are missing, damaged or made by other code.
        * The earlier pass counted a document that has been quarantined since (`quarantined`).
        * The attempt follows a crash. Replay takes a document through a stage twice, and the memory or time that this
          needs may have caused the crash.
        """
        arg = inputs.args.get("$volatile", {}).get("replay")
        if arg is None or inputs.skip or inputs.only is not None or inputs.batch_rows is not None:
            return None
        with suppress(DamagedFile, NotReproduced):
            files = {name: inputs.fetch(ref) for name, ref in arg["files"].items()}
            with _decoding_errors_as_not_reproduced():
                replay = cls(files, steps, sides, chain, inputs.args.get("part", {}).get("barrier", ""))
            if not any(map(replay._saw, quarantined)):
                replay._begin_counters(arg["counters"], arg["cpu_s"])
                return replay
        return None

    def __init__(self, files: Mapping[str, str], steps: Sequence[LoadedStage], sides: Sequence[str], chain: Chain,
                 barrier: str) -> None:
        missing = [name for name in ("kept.parquet", *(f"side.{s}.parquet" for s in sides)) if name not in files]
        metadata = {} if missing else _schema_metadata(files["kept.parquet"])
        if missing or THRESHOLDS not in metadata:
            raise ValueError(f"the earlier parts lack {', '.join(missing) or 'their thresholds'}")
        self._steps, self._chain, self._barrier = steps, chain, barrier
        self._before = [replace(step, stage=with_thresholds(step.stage, thresholds))
                        for step, thresholds in zip(steps, json.loads(metadata[THRESHOLDS]), strict=True)]
        self._changed = [i for i, (a, b) in enumerate(zip(self._before, steps)) if a.stage.config != b.stage.config]
        self._places = {step.name: i for i, step in enumerate(steps)}
        self._sure = all(overwritten(chain_steps, i) is None
                         for chain_steps in (steps, self._before) for i in self._changed)
        ids = read_table(files["kept.parquet"], columns=["id"])["id"].to_pylist()
        self._rows = {id: row for row, id in enumerate(ids)}
        self._kept = enumerate(read_documents(files["kept.parquet"]))
        self._sides = {s: _SideRows(files[f"side.{s}.parquet"]) for s in sides}
        facts = read_table(files["dropped.parquet"], columns=["id", "stage", "reason"]).to_pydict()
        self._drops = dict(zip(facts["id"], zip(facts["stage"], facts["reason"])))
        self._dropped = read_documents(files["dropped.parquet"])
        quarantined = read_table(files["quarantine.parquet"], columns=["id", "reason"]).to_pydict()
        #: documents that no stage saw, because they were in quarantine for having killed a process or exceeded its CPU
        #: time or memory
        self._skipped = {id for id, reason in zip(quarantined["id"], quarantined["reason"])
                         if not reason.startswith("error:")}
        self._failed = set(quarantined["id"]) - self._skipped

    def _begin_counters(self, earlier: Counters, cpu_s: float) -> None:
        counters = self._chain.counters
        counters["stages"] |= copy.deepcopy(earlier["stages"])
        counters["dropped_bytes"] |= earlier["dropped_bytes"]
        counters["replayed"] = {"docs": 0, "cpu_s": cpu_s + earlier.get("replayed", {}).get("cpu_s", 0.0)}

    def settled(self, batches: Iterable[Items]) -> Iterator[Items]:
        """Yields the batches. A document whose verdict is unchanged since an earlier run of the pass is replaced by its
        row in the output of that run (`Settled`). Raises NotReproduced if the earlier run's results cannot be
        reused."""
        counters = self._chain.counters
        for batch in batches:
            with _decoding_errors_as_not_reproduced():
                batch = [(row, (self._verdict(item) or item) if isinstance(item, Document) else item)
                         for row, item in batch]
            counters["replayed"]["docs"] += sum(isinstance(item, Settled) for _, item in batch)
            for _, item in batch:
                if isinstance(item, Removed):
                    item.count(counters, self._barrier, -1)
            again = [(row, copy.deepcopy(item)) for row, item in batch
                     if isinstance(item, Document) and item.id not in self._skipped]
            self._check_reproduced(again, *self._chain.through(self._before, again, -1))
            yield batch
        _drop_zeros(counters)

    def _saw(self, id: str) -> bool:
        """Whether the earlier pass ran the document with this id through its stages."""
        return id in self._rows or id in self._drops or id in self._failed

    def _verdict(self, doc: Document) -> Settled | None:
        """Returns the document's row in the output of the earlier pass, if the new thresholds do not change its
        verdict. Returns None if the document has to go through the chain of stages again. Must be called in the order
        of the input."""
        row, drop = self._rows.get(doc.id), self._drops.get(doc.id)
        if row is not None:
            kept = next((d for n, d in self._kept if n == row), None)
            if kept is None or not self._same(kept, len(self._steps), None):
                return None
            for name, side in self._sides.items():
                if (values := side.at(row)) is not None:
                    kept.side[name] = values
            return Settled(kept, None)
        if drop is None or drop[0] not in self._places:
            return None
        dropped = next((d for d in self._dropped if d.id == doc.id), None)
        if dropped is None or not self._same(dropped, self._places[drop[0]], drop[1]):
            return None
        return Settled(dropped, drop)

    def _check_reproduced(self, batch: Batch, verdicts: Verdicts, failures: Failures) -> None:
        """Raise NotReproduced unless the earlier chain of stages, run again on the documents of `batch`, gives the
        outcomes that the earlier pass recorded. `verdicts` and `failures` are the outcomes of this new run.

        The check fails for a user's stage whose verdict depends on more than the document. It also fails for a stage
        that computes something from its thresholds in `setup`, because the earlier and the new chain share the result
        of `setup`.
        """
        for row, doc in batch:
            if row in verdicts:
                place, reason = verdicts[row]
                same = self._drops.get(doc.id) == (self._before[place].name, reason)
            else:
                same = doc.id in (self._failed if row in failures else self._rows)
            if not same:
                raise NotReproduced(doc.id)

    def _same(self, stored: Document, end: int, reason: str | None) -> bool:
        """Whether every changed stage gives a stored document the same verdict under the earlier and the new
        thresholds.

        The stage at place `end` of the chain dropped the document for `reason`; for a kept document, `end` is the
        length of the chain. Only with `signals: all` have stages after `end` seen the document; they may have changed
        its text.
        """
        for place in self._changed:
            if place > end and self._chain.until_drop:
                break
            if not self._sure:
                return False
            verdicts = stored_verdicts(stored, self._before[place].stage, self._steps[place].stage)
            if verdicts is None or verdicts[0] != verdicts[1]:
                return False
            # a user's stage is trusted only where it repeats the recorded verdict
            if self._steps[place].foreign and (place > end or verdicts[0] != (reason if place == end else None)):
                return False
        return True


def _drop_zeros(counters: Counters) -> None:
    """Remove counters that are zero after subtractions, because a pass that ran from scratch would not have them."""
    sources: set[str] = set()
    for stats in counters["stages"].values():
        stats["dropped"] = without_zeros(stats["dropped"])
        sources.update(*stats["dropped"].values())
    counters["dropped_bytes"] = {source: size for source, size in counters["dropped_bytes"].items()
                                 if source in sources}


def without_zeros(counters: Mapping[str, Any]) -> Counters:
    """Return a copy of the counters without zeros and empty dicts."""
    clean = {k: without_zeros(v) if isinstance(v, Mapping) else v for k, v in counters.items()}
    return {k: v for k, v in clean.items() if v}


class _SideRows:
    """Reads a side table: values that a stage computed for a later barrier (a step that sees all documents, such as
    deduplication). The table has at most one row for each kept document, in the order of the documents."""

    def __init__(self, path: str) -> None:
        self._rows = self._read(path)
        self._next = next(self._rows, None)

    @staticmethod
    def _read(path: str) -> Iterator[dict[str, Any]]:
        with open_parquet(path) as file:
            for batch in file.iter_batches(1024):
                yield from batch.to_pylist()

    def at(self, row: int) -> dict[str, Any] | None:
        while self._next is not None and self._next["row"] < row:
            self._next = next(self._rows, None)
        if self._next is None or self._next["row"] != row:
            return None
        return {k: v for k, v in self._next.items() if k not in ("row", "id")}


def _schema_metadata(path: str) -> dict[bytes, bytes]:
    with open_parquet(path) as file:
        return file.schema_arrow.metadata or {}
