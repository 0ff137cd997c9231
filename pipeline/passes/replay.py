"""Verdicts replayed from stored signals: what an earlier pass over the same documents still says.

A pass that differs from an earlier one in thresholds alone (`decision` fields) has the same *basis*: the content key
of its task with the stages' keys taken without those fields. For every document the earlier parts hold its signals,
and the changed stages are asked twice, under the old and under the new thresholds. Where all answers agree, the row
is taken over as it stands. Where one differs, and for documents the earlier pass had lost to errors, the document is
read again and goes through the chain as ever. So the outcome is the same to the byte as if nothing had been there,
and the work is that of the documents whose verdict changes: what a dropped document's later signals would be, which
nobody has computed, need not be known.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.base.parquet import open_parquet, read_table
from pipeline.engine.task import Inputs
from pipeline.store.parts import read_documents
from pipeline.store.records import Counters, PartRecord
from stages.document import Document
from stages.stage import role_of

if TYPE_CHECKING:
    from pipeline.passes.chain import Batch, Failures, Step, Verdicts

#: key of the Parquet metadata of kept.parquet under which the thresholds stand that it was made with
THRESHOLDS = b"tokenmill.thresholds"


def thresholds(steps: Sequence[Step]) -> dict[bytes, bytes]:
    """The `decision` fields of a chain, as metadata of the part it makes."""
    said = [{f: v for f, v in s.stage.config.model_dump(mode="json").items()
             if role_of(type(s.stage.config), f) == "decision"} for s in steps]
    return {THRESHOLDS: json.dumps(said, sort_keys=True).encode()}


def replay_arg(record: PartRecord) -> dict[str, Any]:
    """What a task gets to hear about the earlier one (an argument that never enters a key)."""
    return {"files": {name: info.ref() for name, info in record.files.items()}, "counters": record.counters,
            "cpu_s": record.cpu_s}


class NotReproduced(Exception):
    """The earlier chain does not say now what it said then, or cannot be read any more: nothing can be concluded from
    what it said."""


@contextlib.contextmanager
def _sound() -> Iterator[None]:
    """A file that cannot be decoded (Arrow's errors of that kind carry no errno) raises NotReproduced."""
    try:
        yield
    except (ValueError, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise
        raise NotReproduced(str(e)) from e


class Earlier:
    """The parts of an earlier pass with the same basis, read beside the documents of this one, in the same order.

    `steps` is the earlier chain: this one's stages under the thresholds of then. They share their models.
    `until_drop`: whether a document went no further than the stage that dropped it.
    """

    def __init__(self, inputs: Inputs, said: Mapping[str, Any], steps: Sequence[Step], sides: Sequence[str],
                 until_drop: bool) -> None:
        """Raises DamagedFile when a part is gone or damaged, NotReproduced when the earlier pass cannot be replayed."""
        files = {name: inputs.fetch(ref) for name, ref in said["files"].items()}
        with _sound():
            self._open(files, said, steps, sides, until_drop)

    def _open(self, files: dict[str, str], said: Mapping[str, Any], steps: Sequence[Step], sides: Sequence[str],
              until_drop: bool) -> None:
        missing = [name for name in ("kept.parquet", *(f"side.{s}.parquet" for s in sides)) if name not in files]
        metadata = {} if missing else _schema_metadata(files["kept.parquet"])
        if missing or THRESHOLDS not in metadata:
            raise ValueError(f"the earlier parts lack {', '.join(missing) or 'their thresholds'}")
        self.counters: Counters = said["counters"]
        self.cpu_s: float = said["cpu_s"] + self.counters.get("replayed", {}).get("cpu_s", 0.0)
        self.steps = [_under(step, then) for step, then in zip(steps, json.loads(metadata[THRESHOLDS]), strict=True)]
        self._changed = [i for i, (a, b) in enumerate(zip(self.steps, steps)) if a.stage.config != b.stage.config]
        self._now, self._until_drop = steps, until_drop
        self._places = {step.name: i for i, step in enumerate(steps)}
        self._sure = not (_ambiguous(steps, self._changed) or _ambiguous(self.steps, self._changed))
        ids = read_table(files["kept.parquet"], columns=["id"])["id"].to_pylist()
        self._rows = {id: row for row, id in enumerate(ids)}
        self._kept = enumerate(read_documents(files["kept.parquet"]))
        self._sides = {s: _Rows(files[f"side.{s}.parquet"]) for s in sides}
        facts = read_table(files["dropped.parquet"], columns=["id", "stage", "reason"]).to_pydict()
        self._fates = dict(zip(facts["id"], zip(facts["stage"], facts["reason"])))
        self._dropped = read_documents(files["dropped.parquet"])
        lost = read_table(files["quarantine.parquet"], columns=["id", "reason"]).to_pydict()
        #: documents that no stage has seen then: they were condemned
        self.skipped = {id for id, why in zip(lost["id"], lost["reason"]) if not why.startswith("error:")}
        self._failed = set(lost["id"]) - self.skipped

    def saw(self, id: str) -> bool:
        """Whether the chain saw this document then."""
        return id in self._rows or id in self._fates or id in self._failed

    def outcome(self, doc: Document) -> tuple[Document, tuple[str, str] | None] | None:
        """What became of `doc` then and does now: (the row as it was written, None when kept or (stage, reason)).
        None: it has to be looked at again. To be asked in the order of the input."""
        with _sound():
            return self._outcome(doc)

    def _outcome(self, doc: Document) -> tuple[Document, tuple[str, str] | None] | None:
        row, fate = self._rows.get(doc.id), self._fates.get(doc.id)
        if row is not None:
            was = next((d for n, d in self._kept if n == row), None)
            if was is None or not self._same(was, len(self._now), None):
                return None
            for name, side in self._sides.items():
                if (found := side.at(row)) is not None:
                    was.side[name] = found
            return was, None
        if fate is None or fate[0] not in self._places:
            return None
        was = next((d for d in self._dropped if d.id == doc.id), None)
        return (was, fate) if was is not None and self._same(was, self._places[fate[0]], fate[1]) else None

    def verify(self, batch: Batch, verdicts: Verdicts, failures: Failures) -> None:
        """See that what came of documents in the earlier chain, gone through again, is what came of them then. Raises
        NotReproduced: a user's stage may have made something of its thresholds when it was set up, which both chains
        share, or depend on more than the document."""
        for row, doc in batch:
            if row in verdicts:
                place, reason = verdicts[row]
                same = self._fates.get(doc.id) == (self.steps[place].name, reason)
            else:
                same = doc.id in (self._failed if row in failures else self._rows)
            if not same:
                raise NotReproduced(doc.id)

    def _same(self, was: Document, end: int, reason: str | None) -> bool:
        """Do the changed stages say the same about it as they did then? The one at place `end` dropped it, for
        `reason`; those behind it have seen it only where signals are asked of dropped documents, too (and may have
        changed its text)."""
        for place in self._changed:
            if place > end and self._until_drop:
                break
            if not self._sure:
                return False
            try:
                then, now = (steps[place].stage.verdict(was) for steps in (self.steps, self._now))
            except MemoryError:
                raise
            except Exception:            # no such method, a signal that was not computed: `process` says what it is
                return False
            if then != now:
                return False
            # a user's stage is believed where it says what was done; otherwise that is found out (`verify`)
            if self._now[place].foreign and (place > end or then != (reason if place == end else None)):
                return False
        return True


def without_zeros(counters: Mapping[str, Any]) -> Counters:
    """Counters without those that are 0, and dicts without any."""
    clean = {k: without_zeros(v) if isinstance(v, Mapping) else v for k, v in counters.items()}
    return {k: v for k, v in clean.items() if v}


class _Rows:
    """Rows of a side table, which holds at most one a kept document, by number and in order."""

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


def _under(step: Step, then: Mapping[str, Any]) -> Step:
    """A stage as it was under other thresholds; what it has loaded serves both."""
    stage = copy.copy(step.stage)
    stage.config = type(stage.config).model_validate({**stage.config.model_dump(), **then})
    return replace(step, stage=stage)


def _ambiguous(steps: Sequence[Step], changed: Sequence[int]) -> bool:
    """Does a later stage write over what a changed one decides by? Then the stored signals are not its own."""
    for place in changed:
        stage = steps[place].stage
        mine = {*stage.signals, *stage.reads()}
        for later in steps[place + 1:]:
            if (mine & set(later.stage.signals) or later.foreign or later.name == steps[place].name
                    or ("language" in mine and later.stage.sets_language)):
                return True
    return False


def _schema_metadata(path: str) -> dict[bytes, bytes]:
    with open_parquet(path) as file:
        return file.schema_arrow.metadata or {}
