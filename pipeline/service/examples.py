"""Selects example documents that change sides (for example, from dropped to kept) under new thresholds, those nearest
to the new threshold first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.base.prf import prf
from pipeline.passes.columnwise import NotColumnwise
from pipeline.passes.outcomes import ChangedSteps
from pipeline.report.nodes import take
from pipeline.report.samples import sample
from pipeline.service.replayed import OwnThreshold, Replayed
from pipeline.service.sampling import PURPOSE, SEED
from pipeline.store.fs import Store

#: examples of each move; documents among which the examples are chosen
EXAMPLES, CONSIDERED = 5, 2000
#: steps between the old and the new threshold by which nearness is measured
STEPS = 64

#: the type of `Playground.outcomes`
Judge = Callable[[ChangedSteps, np.ndarray | None, OwnThreshold | None], Replayed]


def examples(store: Store, moved: ChangedSteps, replayed: Replayed, judge: Judge) -> list[dict[str, Any]]:
    """Return example documents that change sides (kept, dropped, unknown): at most EXAMPLES for each pair of old and
    new side. An example has a masked excerpt, the outcomes before and after the change, and the signals of the changed
    steps.

    If exactly one number was changed, `edge` says at which value of it the document changes sides. The value is given
    as a fraction of the way from the new value (0) to the old one (1), a multiple of 1/STEPS. If something else was
    changed, or the step cannot judge many documents at once, `edge` is None.
    """
    places = replayed.changed()
    places = places[::max(1, -(-len(places) // CONSIDERED))]
    if not len(places):
        return []
    edge = _edges(judge, moved, replayed, places)
    was, now = replayed.sides
    ids = replayed.table.ids(replayed.rows[places])
    order = sorted(range(len(places)), key=lambda i: (edge[i] if edge is not None else 0,
                                                     prf(SEED, PURPOSE, ids[i]), ids[i]))
    shown: dict[tuple[int, int], list[int]] = {}
    for i in order:
        indices = shown.setdefault((int(was[places[i]]), int(now[places[i]])), [])
        if len(indices) < EXAMPLES:
            indices.append(i)
    names = sorted(name for place in moved.now for name in moved.links[place].stage.signals)
    picked = [i for key in sorted(shown) for i in shown[key]]
    documents = _read(store, replayed, [int(replayed.rows[places[i]]) for i in picked], names)
    return [{**document, "from": replayed.outcomes[replayed.before[places[i]]]._asdict(),
             "to": replayed.outcomes[replayed.after[places[i]]]._asdict(),
             "edge": None if edge is None else float(edge[i])} for i, document in zip(picked, documents)]


def _edges(judge: Judge, moved: ChangedSteps, replayed: Replayed, places: np.ndarray) -> np.ndarray | None:
    """Return at which value of the changed threshold each document gets its old side (kept, dropped, unknown) back. The
    value is given as a fraction of the way from the new threshold (0) to the old one (1). Returns None if anything but
    one number was changed, or if the step cannot judge many documents at once."""
    numbers = [(place, name, old, new) for place, stage in moved.now.items() if stage is not None
               for name, new in stage.config.model_dump(mode="json").items()
               if (old := moved.links[place].stage.config.model_dump(mode="json")[name]) != new]
    if len(numbers) != 1 or len(moved.now) != 1:
        return None
    place, key, old, new = numbers[0]
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new)):
        return None
    old, new = float(old), float(new)
    rows, side = replayed.rows[places], replayed.sides[1][places]
    low, high = np.zeros(len(rows), np.int32), np.full(len(rows), STEPS, np.int32)
    values = np.zeros(len(replayed.table))
    while len(todo := np.flatnonzero(high - low > 1)):
        middle = (low[todo] + high[todo]) // 2
        values[rows[todo]] = new + (old - new) * middle / STEPS
        try:
            there = judge(moved, rows[todo], OwnThreshold(place, key, values)).sides[1]
        except NotColumnwise:
            return None
        same = there == side[todo]
        low[todo[same]], high[todo[~same]] = middle[same], middle[~same]
    return np.asarray(high / STEPS)


def _read(store: Store, replayed: Replayed, rows: list[int], signals: list[str]) -> list[dict[str, Any]]:
    table, examples = replayed.table, {}
    columns = ["id", "url", "source", "language", "text", "meta", "locator", "signals"]
    for number in sorted({int(table.file[row]) for row in rows}):
        here = [row for row in rows if table.file[row] == number]
        taken = take(store, table.files[number].info, [int(table.row[row]) for row in here], columns)
        for row in here:
            values = taken[int(table.row[row])]
            examples[row] = {**sample(values), "signals": {name: value for name in signals
                                                        if (value := values["signals"].get(name)) is not None}}
    return [examples[row] for row in rows]
