"""Holds the outcomes of documents that were judged again under other thresholds, and counts the documents by outcome.
An outcome is: kept, dropped or unknown, and why.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.base.prf import prf
from pipeline.passes.outcomes import REASONS, ChangedSteps, Outcome
from pipeline.service.intervals import count_interval, sum_interval
from pipeline.service.sampling import PURPOSE, SEED
from pipeline.service.signal_table import DocumentTable

SIDES = ("kept", "dropped", "unknown")


@dataclass(frozen=True)
class OwnThreshold:
    """A separate value of one threshold for each document. `values` has, for each row of the table of documents, the
    value of the setting `key` of the step at index `place`. The numbers that the step compares with this threshold are
    appended to `compared`."""

    place: int
    key: str
    values: np.ndarray
    compared: list[np.ndarray] | None = None


@dataclass(frozen=True)
class UnderChanges:
    """A function that tells what would become of a document if thresholds of its steps were changed or steps left out.
    The outcome is kept, dropped (where and why) or unknown. In the run, the document was dropped by the step with index
    `end`, for `reason`, or was kept."""

    moved: ChangedSteps
    end: int
    reason: str
    own: OwnThreshold | None

    def __call__(self, doc: Any) -> Outcome:
        moved = self.moved
        if self.own is not None:
            stage = copy.copy(moved.now[self.own.place])
            assert stage is not None
            number = doc.caller_column(self.own.values, self.own.compared)
            stage.config = stage.config.model_copy(update={self.own.key: number})
            moved = copy.copy(moved)
            moved.now = {**moved.now, self.own.place: stage}
        return moved.outcome(doc, self.end, self.reason)


@dataclass
class Replayed:
    """The outcomes (kept, dropped or unknown, and why) of documents before and after a change of thresholds. `rows` are
    the rows of the judged documents in `table`. `before` and `after` have an index into `outcomes` for each of these
    rows: that of the outcome in the run, and that of the outcome under the changes."""

    table: DocumentTable
    rows: np.ndarray
    outcomes: list[Outcome]
    before: np.ndarray
    after: np.ndarray

    @cached_property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays with the side of each judged document: first its side in the run, then its side under the changes.
        A side is an index in SIDES (kept, dropped, unknown)."""
        numbers = np.array([SIDES.index(outcome.side) for outcome in self.outcomes] or [0], np.int8)
        return numbers[self.before], numbers[self.after]

    def changed(self) -> np.ndarray:
        """Return the indices (into `rows`) of the documents whose side (kept, dropped or unknown) changes."""
        was, now = self.sides
        return np.flatnonzero(was != now)

    def documents(self) -> Iterator[tuple[str, Outcome, Outcome]]:
        """Yield (id, outcome in the run, outcome under the changes) of each document whose side (kept, dropped or
        unknown) changes. The order is random, but always the same."""
        places = self.changed()
        ids = self.table.ids(self.rows[places])
        for id, place in sorted(zip(ids, places.tolist()), key=lambda pair: (prf(SEED, PURPOSE, pair[0]), pair[0])):
            yield id, self.outcomes[self.before[place]], self.outcomes[self.after[place]]


def summary(replayed: Replayed, total: int) -> dict[str, Any]:
    """Count the judged documents, before and after the changes of thresholds, and return the counts as JSON. Each count
    is {documents, bytes}. If the run made shards, a count also has `tokens` and `tokens_of`. The latter is the number
    of documents in shards, whose tokens are counted and not estimated.

    The values are numbers. If the judged documents are a sample of `total`, or if tokens are estimated, the values are
    {estimate, low, high} instead.
    """
    table, rows = replayed.table, replayed.rows
    was, now = replayed.sides
    counts = _Counts(table, rows, total)
    moves: list[dict[str, Any]] = []
    changed = np.flatnonzero(replayed.before != replayed.after)
    pairs = replayed.before[changed].astype(np.int64) * len(replayed.outcomes) + replayed.after[changed]
    different, which = np.unique(pairs, return_inverse=True)
    for pair, count in zip(different.tolist(), counts.by(which, len(different), changed)):
        old, new = (replayed.outcomes[i] for i in divmod(pair, len(replayed.outcomes)))
        moves.append({"from": old._asdict(), "to": new._asdict(), **count})
        if new.side == "unknown":
            moves[-1]["remedy"] = REASONS[new.reason]
    moves.sort(key=lambda move: -_number(move["documents"]))
    between = counts.by(was.astype(np.int64) * len(SIDES) + now, len(SIDES) ** 2)
    zeros = np.zeros(len(rows), np.int64)
    return {"exact": len(rows) >= total, "documents": total, "counted": len(rows),
            "totals": _both(counts, zeros, 1, was, now)[0], "enters": between[SIDES.index("dropped") * len(SIDES)],
            "leaves": between[SIDES.index("dropped")], "unknown": counts.by(now, len(SIDES))[SIDES.index("unknown")],
            "moves": moves, "groups": _groups(replayed, counts)}


class _Counts:
    """Counts the documents, bytes and tokens of groups of documents. The documents are those in `rows` of a table. If
    these are fewer documents than `total`, they are a sample, and the counts are estimates with intervals."""

    def __init__(self, table: DocumentTable, rows: np.ndarray, total: int) -> None:
        self._sampled, self._total = len(rows), total
        #: (estimate, low, high) of what is summed up, with a value for each document; for bytes, all three are the same
        self._sums = {"bytes": (table.bytes[rows],) * 3}
        self._of = {"documents": np.ones(len(rows), bool)}
        if table.tokens is not None:
            tokens = table.tokens
            self._sums["tokens"] = (tokens.estimate[rows], tokens.low[rows], tokens.high[rows])
            self._of["tokens_of"] = tokens.counted[rows]

    def by(self, numbers: np.ndarray, different: int, places: np.ndarray | None = None) -> list[dict[str, Any]]:
        """Return the counts of documents, bytes and tokens of each group, for the groups 0 to `different` - 1. `places`
        selects the documents to count, as indices into `rows` (None: all), and `numbers` has the group of each selected
        document."""
        result: list[dict[str, Any]] = [{} for _ in range(different)]
        for name, mask in self._of.items():
            for count, hits in zip(result, np.bincount(numbers, _at(mask, places), different).tolist()):
                count[name] = int(hits) if self._sampled >= self._total else _rounded(
                    count_interval(int(hits), self._sampled, self._total))
        for name, (estimate, low, high) in self._sums.items():
            middles = self._intervals(numbers, different, _at(estimate, places))
            sides = [middles, middles]
            if low is not estimate:
                sides = [self._intervals(numbers, different, _at(values, places)) for values in (low, high)]
            for count, middle, below, above in zip(result, middles, *sides):
                whole = (middle[0], below[1], above[2])
                exact = self._sampled >= self._total and whole[1] == whole[2]
                count[name] = int(middle[0]) if exact else _rounded(whole)
        return result

    def _intervals(self, numbers: np.ndarray, different: int, values: np.ndarray) -> list[tuple[float, float, float]]:
        """Return, for each group of documents, the sum of a value over the group's documents, as (estimate, low, high).
        `numbers` has the group of each document, and `values` the document's value."""
        sums = np.bincount(numbers, values, different).tolist()
        squares = np.bincount(numbers, values * values, different).tolist()
        return [sum_interval(total, square, self._sampled, self._total) for total, square in zip(sums, squares)]


def _at(values: np.ndarray, places: np.ndarray | None) -> np.ndarray:
    return values if places is None else values[places]


def _both(counts: _Counts, group: np.ndarray, groups: int, was: np.ndarray, now: np.ndarray) -> list[dict[str, Any]]:
    """Return, for each group of documents, the counts of each side (kept, dropped, unknown) in the run (`before`) and
    under the changes (`after`). `group` has the group of each document, `was` and `now` its sides."""
    before, after = (counts.by(group * len(SIDES) + side, groups * len(SIDES)) for side in (was, now))
    result = []
    for first in range(0, groups * len(SIDES), len(SIDES)):
        result.append({"before": dict(zip(SIDES[:2], before[first:])), "after": dict(zip(SIDES, after[first:]))})
    return result


def _groups(replayed: Replayed, counts: _Counts) -> list[dict[str, Any]]:
    """Return, as JSON, the counts of each source and language: what was kept and dropped in the run, and what would be
    under the changes."""
    group, names = replayed.table.groups_shown
    both = _both(counts, group[replayed.rows], len(names), *replayed.sides)
    return [{"source": source, "language": language, **figures} for (source, language), figures in zip(names, both)]


def _rounded(interval: tuple[float, float, float]) -> dict[str, int]:
    estimate, low, high = interval
    return {"estimate": round(estimate), "low": int(np.floor(low)), "high": int(np.ceil(high))}


def _number(count: Any) -> int:
    return int(count["estimate"] if isinstance(count, dict) else count)
