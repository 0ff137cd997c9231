"""Compares the documents of one dataset in two runs: which documents were kept, dropped or quarantined in each run, and
which texts differ.

The documents of both runs are joined by id. Memory does not grow with the number of documents. For each document a
record of fixed size (`FACT`) is written to one of 256 files, chosen by the first byte of the id. Then one pair of files
is joined at a time.

Parts (files of documents) with the same rows in both runs (equal `content` hashes) are not read at all, and need no
longer exist. After a change of one threshold, most parts of large stores are of this kind.

Some parts of a run may not be readable. A document that only the other run has may be in these parts, so it counts as
`unknown`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.base.humanize import plural
from pipeline.base.scratch import Scratch
from pipeline.report.margins import COLUMNS, Margins
from pipeline.report.nodes import NodeFigures
from pipeline.store.dataset import QUARANTINE
from pipeline.store.errors import DamagedFile, StoreError
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo
from pipeline.store.temp import Spilled

KEPT, DROPPED, QUARANTINED = "kept", "dropped", "quarantined"
#: fate of a document → the file of a task that holds such documents, and the columns needed
FILES = {KEPT: ("kept.parquet", ("id", "source", "text")), DROPPED: ("dropped.parquet", COLUMNS),
         QUARANTINED: (QUARANTINE, ("id", "source", "stage", "reason"))}
#: what became of a document between the runs, in the order of reports
CHANGES = ("newly_dropped", "newly_kept", "changed_text", "other_reason", "only_before", "only_after", "unknown")
#: a document of one run: id and hash of the text as two numbers each, distance to the threshold, place (file and row),
#: numbers of its source and of its fate (`NameNumbers`)
FACT = np.dtype([("high", "<u8"), ("low", "<u8"), ("text_high", "<u8"), ("text_low", "<u8"), ("distance", "<f8"),
                 ("file", "<u4"), ("row", "<u4"), ("source", "<u4"), ("fate", "<u4")])
#: records (`FACT`) kept in memory before they are written to disk (56 bytes each), and most rows of a row group decoded
#: at a time
FACTS, ROWS = 1 << 19, 4096
#: unreadable parts that are named
NAMED = 10
ABSENT = -1


@dataclass
class Side:
    """A dataset in one of the two runs that are compared: its store, its passes in plan order, and its steps in the
    recipe. `check` is called often while the dataset is read; it may raise an error to end the comparison, as when its
    time is up."""

    store: Store
    passes: list[NodeFigures]
    steps: list[Any]
    tasks: int                                           # number of tasks in the plan, over all passes
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.margins = Margins(self.steps)
        self.files = Spilled[list[Any]](encode=list, decode=list)  # files read: [path, sha256, fate]
        self.missing: list[str] = []                               # parts that cannot be read: the first NAMED
        self.missing_parts = self.records = 0

    def parts(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield (fate, file) for all files with documents of the dataset; the fates are kept, dropped and quarantined.
        Kept documents are those of the last pass (group of steps that run together): what earlier passes keep is only
        the input of later ones. Sets `self.records` to the number of tasks that have a record in the log; the number is
        complete when the iteration has ended."""
        self.records = 0
        for node in self.passes:
            for record in node.records():
                self.check()
                self.records += 1
                for fate, (name, _) in FILES.items():
                    info = record.files.get(name)
                    if info is not None and info.rows and (fate != KEPT or node.publishes):
                        yield fate, info

    def add_missing(self, what: str, parts: int = 1) -> None:
        self.missing_parts += parts
        if len(self.missing) < NAMED:
            self.missing.append(what)


class NameNumbers:
    """Numbers the names that many documents share, so that the record of a document holds a number instead of a name.
    The names are those of sources, or tuples (fate, stage, reason)."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, name: Any) -> int:
        n = self._numbers.setdefault(name, len(self.all))
        if n == len(self.all):
            self.all.append(name)
        return n


@dataclass
class MovedDocuments:
    """The result of comparing one dataset in two runs. A fate is (kept | dropped | quarantined, stage, reason), or None
    if a run does not have the document.

    * `same` counts unchanged documents. Both runs kept them with the same text, or neither kept them and their fates
      are equal.
    * `groups` counts the others by (change, fate before, fate after, source). A change is one of CHANGES, such as
      `newly_dropped`.
    * `nearest` lists, for each change, the documents nearest to the threshold that decided, as (record before, record
      after). A record that a run does not have is None.
    """

    same: int = 0
    groups: Counter[tuple[str, Any, Any, str]] = field(default_factory=Counter)
    nearest: dict[str, list[tuple[np.void | None, np.void | None]]] = field(default_factory=dict)


def compare_documents(before: Side, after: Side, limit: int, most: int = FACTS) -> MovedDocuments:
    """Compare the documents of a dataset in two runs. For each kind of change, at most `limit` documents are kept as
    examples. At most `most` records of documents are in memory at a time."""
    moved, sides, fates, sources = MovedDocuments(), (before, after), NameNumbers(), NameNumbers()
    equal = _equal_parts(before, after)
    for side in sides:
        if unrecorded := side.tasks - side.records:
            side.add_missing(f"{plural(unrecorded, 'task')} without a record in the log", unrecorded)
    with Scratch() as scratch:
        folders = [scratch.folder(), scratch.folder()]
        for side, folder in zip(sides, folders):
            spill = _Spill(folder, most)
            for fate, info in side.parts():
                if (fate, info.content) not in equal:
                    _add_part(side, fate, info, fates, sources, spill)
                elif side is before:
                    moved.same += info.rows
            spill.flush()
        best: dict[str, np.ndarray] = {}
        for prefix in range(256):
            before.check()
            pair = [_sorted(os.path.join(folder, str(prefix))) for folder in folders]
            _join(pair, (before, after), moved, fates.all, sources.all, best, limit)
    moved.nearest = {change: [(a if a["file"] != _NOWHERE else None, b if b["file"] != _NOWHERE else None)
                              for a, b in best[change]] for change in CHANGES if change in best}
    return moved


def _equal_parts(before: Side, after: Side) -> set[tuple[str, str]]:
    """Return (fate, content hash) of the files of documents that both runs have with the same rows. Every row of such a
    file counts as an unchanged document. A quarantined record may have no id and is then no document, so files of
    quarantined records are left out. Within a run, no two files are equal, because their documents have different ids.
    """
    before_parts, after_parts = ({(fate, info.content) for fate, info in side.parts() if fate != QUARANTINED}
                    for side in (before, after))
    return before_parts & after_parts


class _Spill:
    """Writes the records of documents to 256 files, chosen by the first byte of the document's id."""

    def __init__(self, folder: str, most: int) -> None:
        self._folder, self._most = folder, most
        self._waiting: list[np.ndarray] = []
        self._rows = 0

    def add(self, facts: np.ndarray) -> None:
        self._waiting.append(facts)
        self._rows += len(facts)
        if self._rows >= self._most:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        facts = np.concatenate(self._waiting)
        self._waiting, self._rows = [], 0
        prefix = (facts["high"] >> np.uint64(56)).astype(np.int64)
        order = np.argsort(prefix, kind="stable")
        values, starts = np.unique(prefix[order], return_index=True)
        for value, part in zip(values.tolist(), np.split(facts[order], starts[1:])):
            with open(os.path.join(self._folder, str(value)), "ab") as f:
                f.write(part.tobytes())


def _add_part(side: Side, fate: str, info: FileInfo, fates: NameNumbers, sources: NameNumbers, spill: _Spill) -> None:
    """Add to `spill` the records of the documents in the file `info` of one run; their fate in this run is `fate`. A
    file that is missing or damaged is noted as missing. If the damage shows only after some rows were added,
    DamagedFile is raised."""
    number, first = len(side.files), 0
    columns = list(FILES[fate][1])
    try:
        with side.store.parquet(info.path, info.sha256) as file:
            side.files.append([info.path, info.sha256, fate])
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns, use_threads=False):
                    side.check()
                    facts = _facts(batch, side, fate, info, fates, sources)
                    facts["file"], facts["row"] = number, np.arange(first, first + len(facts))
                    first += len(facts)
                    spill.add(facts[(facts["high"] != 0) | (facts["low"] != 0)])
    except DamagedFile as e:
        if len(side.files) > number:                     # some of its rows are in use already
            raise
        side.add_missing(f"{e.path} {e.why}")


def _facts(batch: pa.RecordBatch, side: Side, fate: str, info: FileInfo, fates: NameNumbers,
           sources: NameNumbers) -> np.ndarray:
    """Return a record (`FACT`) for each document in a batch of rows of the file that `info` describes. `fates` numbers
    the triples (fate, stage, reason), where the fate is kept, dropped or quarantined; `sources` numbers the names of
    sources. The fields `file` and `row` are left 0. A row of the quarantine file that has no id gets the id 0."""
    facts = np.zeros(batch.num_rows, FACT)
    ids = [id or "" for id in batch.column("id").to_pylist()]
    try:
        raw = bytes.fromhex("".join(id if id or fate != QUARANTINED else "0" * 32 for id in ids))
    except ValueError:
        raw = b""
    if len(raw) != 16 * len(ids):
        raise StoreError(f"{info.path}: an id is not 32 hexadecimal characters; look at the store with `tokenmill "
                         f"store verify`")
    numbers = np.frombuffer(raw, ">u8").reshape(-1, 2)
    facts["high"], facts["low"], facts["distance"] = numbers[:, 0], numbers[:, 1], np.nan
    facts["source"] = [sources.number(source or "") for source in batch.column("source").to_pylist()]
    if fate == KEPT:
        digests = b"".join(xxhash.xxh3_128_digest(str(text).encode()) for text in batch.column("text").to_pylist())
        facts["text_high"], facts["text_low"] = np.frombuffer(digests, "<u8").reshape(-1, 2).T
        facts["fate"] = fates.number((fate, "", ""))
        return facts
    pairs = zip(batch.column("stage").to_pylist(), batch.column("reason").to_pylist())
    facts["fate"] = [fates.number((fate, stage or "", reason or "")) for stage, reason in pairs]
    if fate == DROPPED:
        facts["distance"] = side.margins.distances(batch)
    return facts


def _sorted(path: str) -> np.ndarray:
    """Return the records of documents in a file, sorted by id, with one record per document. If there are several, the
    first is taken: a document may be quarantined more than once."""
    if not os.path.exists(path):
        return np.empty(0, FACT)
    facts = np.fromfile(path, FACT)
    facts = facts[np.lexsort((facts["low"], facts["high"]))]
    again = (facts["high"][1:] == facts["high"][:-1]) & (facts["low"][1:] == facts["low"][:-1])
    return facts[np.concatenate(([True], ~again))]


#: file number in the placeholder record for a document that a run does not have
_NOWHERE = 2**32 - 1
_NONE = np.zeros((), FACT)
_NONE["file"], _NONE["distance"] = _NOWHERE, np.nan


def _pairs(pair: Iterable[np.ndarray]) -> np.ndarray:
    """Join the records (`FACT`) of the documents of two runs by id. Returns an array of records of shape [n, 2], with a
    row for each of the n ids, sorted by id. Column r has the record of run r, or _NONE if run r does not have the
    document."""
    both = list(pair)
    # as big-endian bytes, which sort as the numbers do
    keys = [np.frombuffer(np.stack([f["high"], f["low"]], axis=1).astype(">u8").tobytes(), "S16") for f in both]
    ids = np.unique(np.concatenate(keys))
    out = np.full((len(ids), 2), _NONE)
    for side, (facts, key) in enumerate(zip(both, keys)):
        out[np.searchsorted(ids, key), side] = facts
    return out


def _join(pair: Iterable[np.ndarray], sides: tuple[Side, Side], moved: MovedDocuments, fates: list[Any],
          sources: list[str], best: dict[str, np.ndarray], limit: int) -> None:
    """Count in `moved` the changes of the documents in one pair of files of records (one file per run). For each
    change, keep in `best` the `limit` documents nearest to the threshold that decided. `fates` and `sources` are the
    names that numbers in the records stand for."""
    rows = _pairs(pair)
    if not len(rows):
        return
    before, after = rows[:, 0], rows[:, 1]
    present = [side["file"] != _NOWHERE for side in (before, after)]
    kept = [has & np.isin(side["fate"], [n for n, fate in enumerate(fates) if fate[0] == KEPT])
            for has, side in zip(present, (before, after))]
    both = present[0] & present[1]
    texts = (before["text_high"] != after["text_high"]) | (before["text_low"] != after["text_low"])
    incomplete = [bool(side.missing_parts) for side in sides]
    masks = {"newly_dropped": kept[0] & both & ~kept[1], "newly_kept": both & ~kept[0] & kept[1],
             "changed_text": kept[0] & kept[1] & texts,
             "other_reason": both & ~kept[0] & ~kept[1] & (before["fate"] != after["fate"]),
             "only_before": ~present[1] & (not incomplete[1]), "only_after": ~present[0] & (not incomplete[0]),
             "unknown": (~present[1] & incomplete[1]) | (~present[0] & incomplete[0])}
    moved.same += len(rows) - int(sum(mask.sum() for mask in masks.values()))
    distance = np.fmin(before["distance"], after["distance"])
    for change, mask in masks.items():
        chosen = rows[mask]
        if not len(chosen):
            continue
        codes = np.stack([np.where(present[i][mask], chosen[:, i]["fate"].astype(np.int64), ABSENT) for i in (0, 1)]
                         + [np.where(present[0][mask], chosen[:, 0]["source"], chosen[:, 1]["source"])], axis=1)
        for (a, b, source), n in zip(*(x.tolist() for x in np.unique(codes, axis=0, return_counts=True))):
            moved.groups[change, fates[a] if a >= 0 else None, fates[b] if b >= 0 else None, sources[source]] += n
        order = np.argsort(distance[mask], kind="stable")[:limit]                      # NaN last, then by id
        nearest = np.concatenate([best.get(change, rows[:0]), chosen[order]])
        far = np.fmin(nearest[:, 0]["distance"], nearest[:, 1]["distance"])
        best[change] = nearest[np.argsort(far, kind="stable")[:limit]]
