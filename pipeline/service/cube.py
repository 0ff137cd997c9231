"""Counts the documents that a dataset would have at every value of one threshold. The result is a table (a data cube);
the counts at any value of the threshold are sums of its cells.

The range of the threshold is divided into bins; the limits of the bins are called edges. While the threshold rises from
the lowest edge to the highest and everything else stays, a document may change sides (kept, dropped, unknown). The cube
needs the bin in which this happens, for each document.

A binary search over the edges finds these bins for all documents at once. In each round, the step with the threshold
judges every document, at the middle of the edges that are left for this document. So the code need not know the rule of
the step.

The search assumes that a document changes sides at most once. This is checked on a sample of documents. If the check
fails, the threshold has no cube.

At an edge the counts are exact. But if the playground has only a sample of the run's documents, counts are scaled to
all documents. Between two edges the true counts lie between the counts at these edges.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.passes.columnwise import NotColumnwise
from pipeline.passes.outcomes import ChangedSteps
from pipeline.service.finished import PlaygroundError
from pipeline.service.playground import Changes, Playground
from pipeline.service.replayed import SIDES, OwnThreshold
from stages.stage import StageConfig, is_accepted

#: BINS: about how many bins a threshold has. CHECKED: least size of the two samples, of all documents and of those that
#: change sides, on which `_once` checks that documents change sides at most once
BINS, CHECKED = 64, 500
#: what a cube counts, and on which sides; all documents on neither of these sides are dropped
WEIGHTS = ("documents", "bytes", "tokens", "tokens low", "tokens high")
COUNTED = (SIDES.index("kept"), SIDES.index("unknown"))


@dataclass
class Cube:
    """How many documents would be kept, and of how many this is unknown, as a function of one threshold. The values of
    the threshold are divided into bins; `edges` are the limits of the bins.

    - The array `start`, with the axes (group, side, weight), has the counts at the lowest edge.
    - The array `deltas`, with the axes (group, bin, side, weight), has what each bin adds to the counts.
    - A group is all documents of one source and language.
    - The sides (COUNTED) are kept and unknown.
    - The weights (WEIGHTS) are what is counted: documents, bytes and, if the run made shards, tokens (the estimate, and
      the lower and the upper end of its range).
    - `documents` is the number of all documents.
    - `up_to` is the barrier (such as a deduplication) at which the prediction ends: documents that reach it count as
      kept. It is "" if the prediction goes through all steps.
    """

    step: int
    key: str
    edges: list[float]
    groups: list[tuple[str, str]]
    start: np.ndarray
    deltas: np.ndarray
    documents: int
    up_to: str

    @property
    def weights(self) -> tuple[str, ...]:
        return WEIGHTS[:self.start.shape[2]]

    def at(self, value: float) -> dict[str, Any]:
        """Return the numbers of kept and unknown documents, bytes and tokens when the threshold is `value`, each as
        {estimate, low, high}. Raises PlaygroundError for a value outside the edges (limits of the bins).

        `low` and `high` are the smaller and the larger of the two counts at the edges around the value. `estimate` is
        their mean. Tokens are themselves estimated, so their `low` and `high` also include the range of that estimate.
        """
        if not self.edges[0] <= value <= self.edges[-1]:
            raise PlaygroundError(f"{value} lies outside the cube, from {self.edges[0]:g} to {self.edges[-1]:g}",
                                  self.key)
        below = bisect_right(self.edges, value) - 1
        ends = [below] if self.edges[below] == value else [below, below + 1]
        sums = [self.start.sum(0) + self.deltas[:, :end].sum((0, 1)) for end in ends]
        mean, low, high = np.mean(sums, 0), np.min(sums, 0), np.max(sums, 0)
        counts = {SIDES[side]: {what: {"estimate": round(mean[i, j]), "low": int(low[i, j]), "high": int(high[i, j])}
                                for j, what in enumerate(self.weights)} for i, side in enumerate(COUNTED)}
        for count in counts.values():
            for end in ("low", "high") if "tokens" in count else ():
                count["tokens"][end] = count.pop(f"tokens {end}")[end]
        return counts

    def to_json(self) -> dict[str, Any]:
        """Return the cube (table of counts by threshold) as JSON for a page. `cells` has an entry for each group
        (source and language). The entry's `start` has the counts at the lowest edge of the bins. Its `bins` have, for
        each bin in which a count changes, [number of the bin, changes of the counts]. `columns` names the counts, in
        order."""
        cells = []
        for number, (source, language) in enumerate(self.groups):
            bins = np.flatnonzero(self.deltas[number].any((1, 2)))
            cells.append({"source": source, "language": language, "start": self.start[number].reshape(-1).tolist(),
                          "bins": [[int(b), *self.deltas[number, b].reshape(-1).tolist()] for b in bins]})
        columns = [f"{SIDES[side]} {what}" for side in COUNTED for what in self.weights]
        return {"columns": columns, "step": self.step, "key": self.key, "edges": self.edges,
                "documents": self.documents, "up_to": self.up_to, "cells": cells}


def make_cube(playground: Playground, changes: Changes, step: int, key: str) -> Cube:
    """Return the cube of one threshold: a table that counts documents at every value of the setting `key` of a step.
    The other `changes` of settings stay in force. Raises PlaygroundError when this threshold can have no cube."""
    builder, value = _builder(playground, changes, step, key)
    with _by_columns(key):
        return builder.cube(step, value)


def edge_distances(playground: Playground, step: int, key: str) -> np.ndarray:
    """Return how near each document is to the threshold `key` of a step: how far the threshold must move from its value
    in the run until the document's outcome (kept, dropped, unknown) changes.

    The distance is counted in bins, the ranges of values into which the threshold's cube (table of counts) is divided.
    It is 0.5 if the outcome changes in a bin next to the value, and infinity if it never changes. Raises
    PlaygroundError if the run sets no value for the threshold, or if the threshold can have no cube.
    """
    builder, value = _builder(playground, Changes(), step, key)
    if value is None:
        raise PlaygroundError("the run has no limit here, so no document is at its edge; choose another threshold", key)
    with _by_columns(key):
        edges, first, last, switch = builder.switches(value)
    return np.where(first != last, np.abs(switch - np.searchsorted(edges, value) - 0.5), np.inf)


@contextlib.contextmanager
def _by_columns(key: str) -> Iterator[None]:
    try:
        yield
    except NotColumnwise:
        raise PlaygroundError("the step cannot judge many documents at once under other values of this key; ask for "
                              "each value", key) from None


def _builder(playground: Playground, changes: Changes, step: int, key: str) -> tuple[_CubeBuilder, float | None]:
    """Return an object that builds the cube (table of counts by value) of the threshold `key` of a step, and the value
    that the threshold has under `changes`. Raises PlaygroundError for a setting that can have no cube."""
    held = dict(changes.thresholds)
    held[step] = {**held.get(step, {})}
    moved = playground.moved(Changes(held, changes.off))
    place = next(i for i, link in enumerate(playground.links) if link.number == step)
    stage = moved.now[place]
    if stage is None or place >= moved.end:
        raise PlaygroundError("this step is left out, or is a step over all documents; it has no cube", "step")
    playground.moved(Changes({step: {key: getattr(stage.config, key, None)}}))          # a decision key
    value = getattr(stage.config, key)
    if isinstance(value, bool) or not (value is None or isinstance(value, (int, float))):
        raise PlaygroundError("this is no single number, so it has no cube; ask for each value", key)
    return _CubeBuilder(playground, moved, place, stage.config, key), value


class _CubeBuilder:
    def __init__(self, playground: Playground, moved: ChangedSteps, place: int, config: StageConfig, key: str) -> None:
        self.playground, self.moved, self.place, self.config, self.key = playground, moved, place, config, key
        self.table = playground.table

    def cube(self, step: int, value: float | None) -> Cube:
        return self._sum(step, *self.switches(value))

    def switches(self, value: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the edges (limits) of the bins into which the threshold's values are divided, and the three arrays of
        `_switches`: on which side each document is at these edges. Raises PlaygroundError when documents change sides
        more than once."""
        edges = self._edges(value)
        for values in (edges, edges[edges > 0]):                # for many rules, the threshold 0 means "no rule"
            if len(values) < 2:
                break
            first, last, switch = self._switches(values)
            if self._once(values, first, last, switch):
                return values, first, last, switch
        raise PlaygroundError("documents change sides more than once while this threshold moves, or no document is "
                              "judged by it; ask for each value", self.key)

    def _sides(self, values: np.ndarray, rows: np.ndarray, compared: list[np.ndarray] | None = None) -> np.ndarray:
        own = OwnThreshold(self.place, self.key, values, compared)
        return self.playground.outcomes(self.moved, rows, own).sides[1]

    def _edges(self, value: float | None) -> np.ndarray:
        """Return the edges (limits) of the bins into which the threshold's values are divided. The edges are quantiles
        of the numbers with which the step compares the threshold. The threshold's present value, one value below all
        numbers and one above are added. Values that a recipe would refuse are left out."""
        compared: list[np.ndarray] = []
        whole = np.full(len(self.table), 1.0 if value is None else float(value))
        self._sides(whole, np.arange(len(self.table)), compared)
        numbers = np.concatenate(compared) if compared else np.zeros(0)
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            return np.zeros(0)
        edges = np.quantile(numbers, np.linspace(0, 1, BINS), method="inverted_cdf")
        below, above = np.nextafter(edges[0], -np.inf), np.nextafter(edges[-1], np.inf)
        if not (numbers % 1).any():
            below, above = edges[0] - 1, edges[-1] + 1
        edges = np.unique(np.concatenate([edges, [below, above], [] if value is None else [float(value)]]))
        return edges[[is_accepted(self.config, self.key, edge) for edge in edges.tolist()]]

    def _switches(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Judge all documents at the values `edges` of the threshold, which are in rising order. Returns three arrays
        with a value for each document:

        - its side (an index in SIDES: kept, dropped or unknown) at the lowest edge
        - its side at the highest edge
        - the number of the first edge at which it has the side of the highest
        """
        rows = np.arange(len(self.table))
        values = np.full(len(rows), edges[0])
        first = self._sides(values, rows)
        values[:] = edges[-1]
        last = self._sides(values, rows)
        low, high = np.zeros(len(rows), np.int32), np.full(len(rows), len(edges) - 1, np.int32)
        while len(rows := np.flatnonzero((first != last) & (high - low > 1))):
            middle = (low[rows] + high[rows]) // 2
            values[rows] = edges[middle]
            there = self._sides(values, rows) == first[rows]
            low[rows[there]], high[rows[~there]] = middle[there], middle[~there]
        return first, last, high

    def _once(self, edges: np.ndarray, first: np.ndarray, last: np.ndarray, switch: np.ndarray) -> bool:
        """Return whether documents change sides (kept, dropped, unknown) at most once while the threshold goes through
        the edges of the bins. This is checked for a sample of all documents, and for a sample of those that change
        sides. Each of these documents is judged at every edge. It must have the side `first` before the edge number
        `switch`, and the side `last` from there on."""
        switching = np.flatnonzero(first != last)
        sample = np.unique(np.concatenate([rows[:: max(1, len(rows) // CHECKED)] for rows in (
            np.arange(len(self.table)), switching)]))
        values = np.empty(len(self.table))
        for number, edge in enumerate(edges):
            values[sample] = edge
            expected = np.where(number >= switch[sample], last[sample], first[sample])
            if (self._sides(values, sample) != expected).any():
                return False
        return True

    def _sum(self, step: int, edges: np.ndarray, first: np.ndarray, last: np.ndarray, switch: np.ndarray) -> Cube:
        group, names = self.table.groups_shown
        weights = [np.ones(len(first)), self.table.bytes]
        if self.table.tokens is not None:
            tokens = self.table.tokens
            weights += [tokens.estimate, tokens.low, tokens.high]
        start = np.zeros((len(names), len(COUNTED), len(weights)))
        deltas = np.zeros((len(names), len(edges) - 1, len(COUNTED), len(weights)))
        moves = first != last
        bins = len(edges) - 1
        for i, side in enumerate(COUNTED):
            for j, weight in enumerate(weights):
                there = first == side
                start[:, i, j] = np.bincount(group[there], weight[there], len(names))
                signed = weight * ((last == side).astype(float) - there)
                cells = group[moves] * bins + switch[moves] - 1
                deltas[:, :, i, j] = np.bincount(cells, signed[moves], len(names) * bins).reshape(len(names), bins)
        if self.playground.documents > len(self.table):
            factor = self.playground.documents / max(len(self.table), 1)
            start, deltas = start * factor, deltas * factor
        return Cube(step, self.key, edges.tolist(), names, start, deltas, self.playground.documents,
                    self.moved.barrier())
