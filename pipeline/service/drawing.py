"""Draws (selects) documents of a finished run for people to label: at random, nearest to a threshold, or those that
another run decided differently. Everybody gets the same documents of a draw in the same order, so that two people label
the same ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.base.prf import prf
from pipeline.report.nodes import take
from pipeline.service.cube import edge_distances
from pipeline.service.finished import PlaygroundError
from pipeline.service.playground import Playground
from pipeline.service.sampling import SEED
from pipeline.store.records import FileInfo

#: most documents of a draw; if a run has more than COMPARED documents, only its sample is compared with another run
MOST_DRAWN, COMPARED = 2000, 500_000
#: draws of a dataset that stay in memory
KEPT_DRAWS = 16
#: the columns of a document that is read
COLUMNS = ["id", "url", "source", "language", "text", "signals"]
Draw = Literal["random", "edge", "runs"]


@dataclass(frozen=True)
class Drawn:
    """A document that was selected for people to label. Holds its id, the file of the run that has it, and the number
    of its row in this file. `side` says whether the run kept or dropped it. For a dropped document, the step and the
    reason are given, too."""

    id: str
    info: FileInfo
    row: int
    side: str
    stage: str
    reason: str


def drawn(game: Playground, draw: Draw, threshold: str, other: Playground | None) -> list[Drawn]:
    """Select documents of a finished run for people to label, and return them in order, at most MOST_DRAWN. `game` is
    the playground of the run, an object that holds the run's documents. `draw` says which are selected:

    - 'random': documents at random
    - 'edge': those nearest to `threshold` (STEP.KEY)
    - 'runs': those that one run kept and the other dropped; `other` is the playground of the other run

    Raises PlaygroundError when the draw is not possible.
    """
    parts = tuple(file.info.sha256 for file in other.files) if draw == "runs" and other else ()
    key = (draw, threshold if draw == "edge" else "", other.run if other and parts else "", hash(parts))
    if key not in game.drawn:
        rows, ids = _rows(game, draw, threshold, other)
        while len(game.drawn) >= KEPT_DRAWS:
            del game.drawn[next(iter(game.drawn))]
        game.drawn[key] = [_place(game, int(row), id) for row, id in zip(rows, ids)]
    result: list[Drawn] = game.drawn[key]
    return result


def _rows(game: Playground, draw: Draw, threshold: str, other: Playground | None) -> tuple[Any, list[str]]:
    table = game.table
    if draw == "runs":
        if other is None or other.run == game.run:
            raise PlaygroundError("two runs are compared; name another one", "other")
        return _otherwise(game, other)
    rows = table.sample
    if draw == "edge":
        step, _, name = threshold.partition(".")
        if not step.isascii() or not step.isdecimal():
            raise PlaygroundError("a threshold is STEP.KEY, such as 1.min_doc_words", "threshold")
        distances = edge_distances(game, int(step[:6]), name)[rows]
        rows, distances = rows[np.isfinite(distances)], distances[np.isfinite(distances)]
        nearest = np.argsort(distances, kind="stable")[:2 * MOST_DRAWN]
        rows, distances = rows[nearest], distances[nearest]
        ids = table.ids(rows)
        order = sorted(range(len(ids)), key=lambda i: (distances[i], _number(ids[i])))[:MOST_DRAWN]
    else:
        ids = table.ids(rows)
        order = heapq.nsmallest(MOST_DRAWN, range(len(ids)), key=lambda i: _number(ids[i]))
    return rows[order], [ids[i] for i in order]


def _otherwise(game: Playground, other: Playground) -> tuple[list[int], list[str]]:
    """Return the documents that one of two runs kept and the other dropped, at most MOST_DRAWN. `game` and `other` are
    the playgrounds of the two runs, objects that hold the runs' documents. The result is a list of their rows in
    `game`, and a list of their ids."""
    there = {id: kept for id, _, kept in _compared(other)}
    differ = [(id, row) for id, row, kept in _compared(game) if there.get(id, kept) != kept]
    chosen = heapq.nsmallest(MOST_DRAWN, differ, key=lambda pair: _number(pair[0]))
    return [row for _, row in chosen], [id for id, _ in chosen]


def _compared(game: Playground) -> Iterator[tuple[str, int, bool]]:
    """Yield (id, row, whether the run kept it) for the documents of a run that are compared with those of another run.
    These are all documents or, if there are more than COMPARED, a random sample. `game` is the playground of the run,
    an object that holds the run's documents."""
    table = game.table
    rows = np.arange(len(table)) if len(table) <= COMPARED else table.sample
    return zip(table.ids(rows), rows.tolist(), (table.end[rows] == len(game.links)).tolist())


def _number(id: str) -> tuple[int, str]:
    return prf(SEED, "labels", id), id


def _place(game: Playground, row: int, id: str) -> Drawn:
    table = game.table
    end, reason = int(table.end[row]), table.reasons[int(table.reason[row])]
    dropped = end < len(game.links)
    return Drawn(id, table.files[int(table.file[row])].info, int(table.row[row]), "dropped" if dropped else "kept",
                 game.links[end].name if dropped else "", reason if dropped else "")


def read_drawn(game: Playground, document: Drawn) -> dict[str, Any]:
    """Read the stored row (text, metadata, signals …) of a document that was selected for labelling, from the file that
    the run wrote."""
    return take(game.store, document.info, [document.row], COLUMNS)[document.row]
