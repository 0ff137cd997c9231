"""Makes the report's section about signals (numbers that steps compute for each document). It has the histogram of
every signal for kept and for dropped documents, its thresholds, and how many documents other thresholds would let pass.

The values are read from a sample of the stored documents (`pipeline.report.sampled`). A document that an earlier step
dropped has no value, unless the recipe says `signals: all`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipeline.passes.tally import BINS, HIGHEST, LOWEST
from pipeline.report.nodes import NodeFigures
from pipeline.report.sampled import PARTS, ROWS, extent, strata
from pipeline.store.fs import Store
from stages.stage import COMPARE, Bound, Stage, StageConfig, is_accepted

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: other thresholds that are tried: multiples of the threshold
FACTORS = (0.5, 0.8, 1.0, 1.25, 2.0)
#: most signals of a dataset; the steps of Tokenmill have fewer in all, but a step of one's own may have any number
MOST = 400


def score_bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the numbers of the histogram bins of finite values, as `pipeline.passes.tally.score_bin` defines them."""
    part, power = np.frexp(np.abs(values))
    number = (power.astype(np.int64) - LOWEST - 1) * BINS + ((part - 0.5) * 2 * BINS).astype(np.int64) + 1
    number = np.minimum(number, (HIGHEST - LOWEST) * BINS)
    number[(power <= LOWEST) | (values == 0)] = 0
    return np.where(values < 0, -number, number)


def measured(name: str, stage: Stage) -> dict[str, Any]:
    """Return the entry `measures` of a step in plan.json: the signals that it computes, and the bounds that its
    thresholds set. Each bound has the thresholds to try (`tried`)."""
    return {"step": name, "signals": list(stage.signals),
            "bounds": [{**bound._asdict(), "tried": tried(bound, stage.config)} for bound in stage.bounds()]}


def tried(bound: Bound, config: StageConfig) -> list[float]:
    """Return the threshold of a bound and other thresholds around it, in ascending order. If the threshold is a whole
    number of at least 2 (or at most -2), the others are whole numbers, too. Thresholds that a recipe would refuse
    beside the other settings in `config` are left out."""
    value = bound.value
    is_whole = value.is_integer() and abs(value) >= 2
    around = {float(round(value * f)) if is_whole else round(value * f, 12) for f in FACTORS}
    return sorted({value, *(other for other in around if is_accepted(config, bound.key, other))})


@dataclass
class _Signal:
    """Counts of the documents that have one signal (a number per document), for kept documents (True) and dropped ones
    (False) separately. `bins` counts them by histogram bin. `bounds` are the limits on the signal, each with the
    thresholds that are tried. `within` counts, by (bound, threshold), the documents that the threshold would let pass.
    """

    step: str
    bounds: dict[Bound, list[float]] = field(default_factory=dict)
    bins: dict[bool, dict[int, float]] = field(default_factory=lambda: {True: {}, False: {}})
    within: dict[bool, dict[tuple[Bound, float], float]] = field(default_factory=lambda: {True: {}, False: {}})

    def add(self, values: NDArray[np.float64], kept: bool, scale: float) -> None:
        values = values[np.isfinite(values)]
        for number, docs in zip(*np.unique(score_bins(values), return_counts=True), strict=True):
            self.bins[kept][int(number)] = self.bins[kept].get(int(number), 0.0) + float(docs) * scale
        for bound, thresholds in self.bounds.items():
            for value in thresholds:
                inside = COMPARE[bound.side](values, value)
                key = bound, value
                self.within[kept][key] = self.within[kept].get(key, 0.0) + float(inside.sum()) * scale

    def to_json(self, name: str) -> dict[str, Any]:
        kept, dropped = (round(sum(self.bins[k].values())) for k in (True, False))
        return {"signal": name, "step": self.step, "docs": kept + dropped, "kept": kept,
                "bins": {word: {str(b): n for b, docs in sorted(self.bins[k].items()) if (n := round(docs))}
                         for k, word in ((True, "kept"), (False, "dropped"))},
                "bounds": [{"key": b.key, "side": b.side, "value": b.value,
                            "at": [{"value": v, "docs": round(sum(w.get((b, v), 0.0) for w in self.within.values())),
                                    "kept": round(self.within[True].get((b, v), 0.0))} for v in thresholds]}
                           for b, thresholds in self.bounds.items()]}


def signal_section(store: Store, passes: list[NodeFigures], *, most_tasks: int = PARTS,
                   most_rows: int = ROWS) -> dict[str, Any]:
    """Make the report's section about the signals of a dataset (numbers computed for each document): {read, signals,
    left_out}. `read` says how many documents were read. Each signal has its step, its documents, its histogram bins,
    and its bounds.

    For each bound, thresholds are tried. `docs` is the number of documents whose value would pass. `kept` is how many
    of these the dataset keeps. Signals for which no document has a value are left out. `most_tasks` and `most_rows`
    limit what is read (`pipeline.report.sampled.strata`).
    """
    signals = _declared(passes)
    parts = strata(passes, most_tasks, most_rows)
    for part in parts:
        for info in part.files[:1]:                       # all files of a stratum have the same columns
            with store.parquet(info.path, info.sha256) as file:
                there = _fields(file.schema_arrow)
            columns = [name for name in signals if name in there]
            for batch, scale in part.rows(store, [f"signals.{name}" for name in columns]) if columns else ():
                _add(signals, batch, part.kept, scale)
    rows = [signal.to_json(name) for name, signal in signals.items()]
    rows = [row for row in rows if row["docs"]]
    return {"read": extent(parts), "signals": rows[:MOST], "left_out": max(0, len(rows) - MOST)}


def _declared(passes: list[NodeFigures]) -> dict[str, _Signal]:
    """Return the signals (numbers per document) that the steps of a dataset compute or judge, in the order of the
    recipe. If several steps compute a signal, the last of them counts as its step, because only the values of the last
    step are stored."""
    declared: dict[str, _Signal] = {}
    for node in passes:
        for stage in node.measures:
            for name in stage["signals"]:
                declared.setdefault(name, _Signal(stage["step"])).step = stage["step"]
            for entry in stage["bounds"]:
                bound = Bound(*(entry[name] for name in Bound._fields))
                bounds = declared.setdefault(bound.signal, _Signal(stage["step"])).bounds
                bounds.setdefault(bound, entry["tried"])            # a step used twice may repeat one
    return declared


def _fields(schema: pa.Schema) -> set[str]:
    kind = schema.field("signals").type
    return {kind.field(i).name for i in range(kind.num_fields)}


def _add(by_name: Mapping[str, _Signal], batch: pa.RecordBatch, kept: bool, scale: float) -> None:
    signals = batch.column("signals")
    for i in range(signals.type.num_fields):
        values = signals.field(i).to_numpy(zero_copy_only=False).astype(np.float64)      # null becomes NaN
        by_name[signals.type.field(i).name].add(values, kept, scale)

