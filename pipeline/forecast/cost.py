"""Forecasts the output and the cost of a recipe, by extrapolation from a run of the recipe on a sample of its inputs.

The output and cost of each task of the sample run are multiplied by a factor: the size of the task's source divided by
the size of the sample of that source. The error of this extrapolation is a 95 % interval of the ratio of output (or
cost) to bytes read (Cochran 1977, 6.4). It is corrected for the share that was read.

Two quantities do not grow in proportion to the input. One is the number of tokens, because a tokenizer trained on
little text encodes that text in too few tokens. The other is the number of duplicates, whose share rises with the
number of documents. A sample of one thousandth holds both documents of a pair with a chance of one in a million.

The bounds of the number of duplicates follow from the duplicates in the sample. The lower bound divides them by the
sample's share of the source. The upper bound first adds a margin for chance, and then divides twice: by this share, and
by the smallest such share of all sources. It is at most the number of documents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pipeline.forecast.mixture import mixture
from pipeline.forecast.range import Range, exactly, total
from pipeline.forecast.results import (
    NOTHING,
    Amount,
    CostForecast,
    DatasetForecast,
    ExpectedDuplicates,
    NodeCost,
    StreamForecast,
    TotalCost,
)
from pipeline.forecast.sample import SampleRun
from pipeline.store.records import PartRecord
from stages.dedup.fragment import SIZES

#: A tokenizer trained on little text memorises that text and encodes it in few tokens. A tokenizer trained on enough
#: text, which is ENOUGH_TEXT bytes per token of the vocabulary, makes up to MEMORISED times as many tokens of it.
MEMORISED, ENOUGH_TEXT = 1.35, 1000
#: by which factors the CPU time of a job varies with the other load of the machine (NOISE), and the bytes of the files
#: that the tasks of a barrier exchange vary with the similarity of the documents (EXCHANGE)
NOISE, EXCHANGE = Range(1.0, 0.85, 1.2), Range(1.0, 0.7, 1.5)
#: seconds to start workers, load models and write the report
START_S = 15.0
#: a line is fitted only to at least this many tasks, and only if their sizes differ
LEAST_TASKS = 6
ALL = exactly(1.0)
PUBLISHED = {"dropped.parquet", "quarantine.parquet", "body", "ends", "table.parquet"}


def forecast(run: SampleRun, *, cores: int, price: float | None = None) -> CostForecast:
    """Return the cost forecast for a run of the whole recipe on `cores` cores, at `price` per core and hour. Without a
    price, the forecast has no cost in money."""
    from_sample = Extrapolation(run, cores)
    nodes = [from_sample.reading(name) for name in run.sources]
    nodes += [from_sample.node(node) for node in run.nodes if node["kind"] != "index"]
    streams = from_sample.streams()
    uses, notes = mixture(run.recipe, {s.stream: s.tokens for s in streams})
    cpu_hours = total(n.cpu_s for n in nodes) * (1 / 3600)
    return CostForecast(
        run.sources, run.wall_s, from_sample.datasets(), streams, uses, from_sample.duplicates, nodes,
        TotalCost(cores, cpu_hours, _wall(nodes, cores), total(n.disk_bytes for n in nodes),
                  total(n.published_bytes for n in nodes), total(n.exchange_bytes for n in nodes),
                  max(n.memory_mb for n in nodes), price, cpu_hours * price if price is not None else None),
        [*from_sample.notes, *notes])


def _wall(nodes: Sequence[NodeCost], cores: int) -> Range:
    """Return the wall-clock seconds of all nodes of the plan on `cores` cores, as an estimate with bounds.

    The lower bound divides the CPU time evenly among the cores. In the upper bound, every node also waits for its
    longest task after all its other tasks are done (Graham 1966), and the sum is raised by a quarter. The estimate
    includes half of these waits. On one core no node waits. The estimate and both bounds include START_S, the time to
    start workers, load models and write the report."""
    cpu = total(n.cpu_s for n in nodes) * (1 / cores)
    tails = sum(n.longest_s for n in nodes) if cores > 1 else 0.0
    value = START_S + max(cpu.value, max(n.longest_s for n in nodes)) + tails / 2
    return Range(value, min(START_S + cpu.low, value), 1.25 * max(START_S + cpu.high + tails, value))


def line(size: np.ndarray, cost: np.ndarray) -> tuple[float, float]:
    """Fit a line to the costs of tasks of different sizes. Returns (cost of a task without any bytes, cost per byte).
    Neither is negative. The line is fitted by medians (Theil 1950, Sen 1968), so that it is not distorted by a task
    that loads a model or compiles code.

    The cost per byte is at most the mean cost per byte of all tasks. If the medians show no growth, it is a quarter of
    this mean. With fewer than LEAST_TASKS tasks, or tasks of about equal size, the whole cost counts as cost per
    byte."""
    even = float(cost.sum()) / max(float(size.sum()), 1.0)
    i, j = np.triu_indices(len(size), 1)
    apart = np.abs(size[i] - size[j]) > 0.25 * float(np.median(size))
    if len(size) < LEAST_TASKS or not apart.any():
        return 0.0, even
    slope = min(max(float(np.median((cost[i] - cost[j])[apart] / (size[i] - size[j])[apart])), 0.0), even)
    return max(0.0, float(np.median(cost - slope * size))), slope or even / 4


class Extrapolation:
    """Extrapolates the costs and results of the tasks of a sample run to a run on the whole input of the recipe."""

    def __init__(self, run: SampleRun, cores: int) -> None:
        self.run, self.cores = run, cores
        self.scale = {name: s.scale for name, s in run.sources.items()}
        self.largest = max(self.scale.values(), default=1.0)
        self.nodes = {n["name"]: n for n in run.nodes}
        self.notes = [*run.notes, *(note for s in run.sources.values() for note in s.notes)]
        self.duplicates: list[ExpectedDuplicates] = []
        #: node → source → the share of all documents that deduplication keeps, divided by the share that it keeps in
        #: the sample
        self.through: dict[str, dict[str, Range]] = {}

    # -- nodes ---------------------------------------------------------------------------------------------------
    def reading(self, name: str) -> NodeCost:
        """Return the cost of reading the source `name`. It is extrapolated from all records that were read to draw the
        sample, including those that were not drawn."""
        source = self.run.sources[name]
        return NodeCost(f"read {name}", "read", NOISE * (source.read_cpu_s * source.grown),
                        tasks=self.partitions({name}))

    def node(self, node: Mapping[str, Any]) -> NodeCost:
        """Return the forecast cost of a node of the plan (a pass, a deduplication …). Call this for the nodes in the
        order of the plan, because it also sets `through[name]`. This factor corrects for duplicates that the sample
        does not show. It is the share of documents that deduplication keeps of the whole input, divided by the share
        that it keeps of the sample. A node starts with the factor of the nodes before it. A pass that drops duplicates
        lowers it."""
        name, kind, records = node["name"], node["kind"], self.run.records[node["name"]]
        befores = [self.through[d] for d in node["deps"] if d in self.through]
        self.through[name] = {s: Range(max((b[s].value for b in befores), default=1.0),
                                       min((b[s].low for b in befores), default=1.0),
                                       max((b[s].high for b in befores), default=1.0)) for s in self.scale}
        before = self._overall(name, records)
        memory = max((r.rss_mb for r in records), default=0.0)
        if kind == "barrier":
            cpu, exchange, tasks = self._barrier(node, records)
            return NodeCost(name, kind, NOISE * cpu * before, exchange_bytes=exchange * before, memory_mb=memory,
                            tasks=tasks)
        if kind == "tokenizer":                                          # its output does not grow with the input
            return NodeCost(name, kind, NOISE * self._training(records), exactly(sum(map(_disk, records))),
                            memory_mb=memory, tasks=max(len(records), 1))
        if kind == "pass" and any(self.nodes[d]["kind"] == "barrier" for d in node["deps"]):
            self._deduplicated(name, records)
        # tasks that assemble shards, or pack their documents, cost in proportion to the tasks that encode parts
        of_parts = [r for r in records if not r.node.endswith(("/assemble", "/pack"))]
        more = {measure: _ratio(sum(map(measure, records)), sum(map(measure, of_parts))) for measure in (_cpu, _disk)}
        cpu = self.over_tasks(of_parts, _cpu, first_loads=True) * more[_cpu]
        disk = self.over_tasks(of_parts, _disk) * more[_disk] * before
        published = PUBLISHED | {"kept.parquet"} if node["publishes"] else PUBLISHED
        share = _ratio(sum(i.bytes for r in records for n, i in r.files.items() if n in published),
                       sum(map(_disk, records)))
        return NodeCost(name, kind, NOISE * cpu * before, disk, published_bytes=disk * share, memory_mb=memory,
                        tasks=self.partitions({source for r in of_parts for source in _read(r)}))

    def _overall(self, name: str, records: Sequence[PartRecord]) -> Range:
        """Return the mean of `through[name]` over the sources. This factor corrects for documents that deduplication,
        up to the node `name`, removes from the whole input but not from the sample. Each source is weighted by the
        bytes of it that the node would read in a run on the whole input."""
        sizes: Counter[str] = Counter()
        for record in records:
            sizes.update({s: c.get("bytes", 0) * self.scale[s] for s, c in _read(record).items() if s in self.scale})
        if not sum(sizes.values()):
            sizes = Counter(dict.fromkeys(self.scale, 1))
        parts = [(self.through[name][s], size / sum(sizes.values())) for s, size in sizes.items()]
        return Range(sum(r.value * share for r, share in parts), sum(r.low * share for r, share in parts),
                     sum(r.high * share for r, share in parts))

    def _barrier(self, node: Mapping[str, Any], records: Sequence[PartRecord]) -> tuple[Range, Range, int]:
        """Extrapolate a deduplication to the whole input. Returns (CPU seconds, bytes of files that its tasks exchange,
        number of tasks). The lower bound of the CPU time is the time on the sample, since most of that may be start-up.
        The upper bound is that time multiplied by the growth in documents."""
        parts = [r for d in node["deps"] for r in self.run.records.get(d, ())]
        docs = sum(_kept_amount(r, s) for r in parts for s in self.scale)
        scaled = sum(_kept_amount(r, s) * scale for r in parts for s, scale in self.scale.items())
        grown = max(1.0, scaled / max(docs, 1))
        cpu = sum(r.cpu_s for r in records)
        # each task handles a group of parts of limited size, so the number of tasks grows with the number of groups
        size, rows = (sum(_text(r)[i] * self._weight(r) for r in parts) for i in (0, 1))
        groups = max(sum(r.node == records[0].node for r in records), 1) if records else 1       # tasks of first wave
        more = max(1.0, math.ceil(size / SIZES.group_bytes) / groups,
                   math.ceil(rows / SIZES.group_rows) / groups)
        return (Range(cpu * math.sqrt(grown), cpu, cpu * grown), EXCHANGE * (sum(map(_disk, records)) * grown),
                max(1, math.ceil(len(records) * more)))

    def _training(self, records: Sequence[PartRecord]) -> Range:
        """Return the CPU seconds to train the tokenizer on the whole input. `records` are those of the training on the
        sample. The CPU time grows at most in proportion to the size of the training text."""
        trained = self.run.recipe.tokenizer.train if self.run.recipe.tokenizer else None
        cpu, trained_bytes = sum(r.cpu_s for r in records), sum(r.counters.get("bytes", 0) for r in records)
        more = min(trained.sample_bytes / trained_bytes, self.largest) if trained and trained_bytes else 1.0
        return Range(cpu * max(1.0, 0.7 * more), cpu, cpu * max(1.0, more))

    def _deduplicated(self, name: str, records: Sequence[PartRecord]) -> None:
        """Estimate how many documents of each source a deduplication removes from the whole input, and add the
        estimates to `duplicates`. `name` is the pass that drops these documents, and `records` are the commit records
        of its tasks on the sample. Also lowers `through[name]`, the factor that corrects for documents that are removed
        from the whole input but not from the sample."""
        docs: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        for record in records:
            docs.update({source: n["docs"] for source, n in record.counters["in"].items()})
            for label, stats in record.counters["stages"].items():
                if label.startswith("barrier:"):
                    for by_source in stats["dropped"].values():
                        dropped.update(by_source)
        rarest = max((self.scale.get(s, 1.0) for s in docs), default=1.0)
        for source, n in docs.items():
            scale, removed = self.scale.get(source, 1.0), dropped[source]
            compared, low = n * scale, removed * scale
            # upper bound assumes the source with the smallest share
            high = min((removed + 2 + 2 * math.sqrt(removed + 1)) * scale * rarest, compared) if rarest > 1 else low
            value = math.sqrt(low * max(min(low * rarest, compared), low))
            stays = max(compared - low, 1.0)                           # documents kept, scaled up from the sample
            self.through[name][source] *= Range((compared - value) / stays, (compared - high) / stays, 1.0)
            self.duplicates.append(
                ExpectedDuplicates(name, source, compared, removed / max(n, 1), Range(value, low, high)))
        if self.largest > 1:
            self.notes.append(f"{name}: duplicates do not grow evenly with the input. A sample shows few of them, "
                              f"because both documents of a pair must be in it. The lower bound divides the number "
                              f"found by the sample's share, the upper bound by the square of the share")

    # -- output --------------------------------------------------------------------------------------------------
    def datasets(self) -> list[DatasetForecast]:
        """Return the forecast number of documents and bytes of text of every published dataset, for each source and in
        all."""
        out = []
        for node in (n for n in self.run.nodes if n["publishes"]):
            records, through = self.run.records[node["name"]], self.through[node["name"]]
            sources = {s: Amount(*(self._total(records, partial(_kept_amount, source=s, what=what), s) * through[s]
                                   for what in ("docs", "bytes")))
                       for s in self.scale if any(s in r.counters["in"] for r in records)}
            sources = {s: amount for s, amount in sources.items() if amount.documents.high}
            out.append(DatasetForecast(total(a.documents for a in sources.values()),
                                       total(a.text_bytes for a in sources.values()), node["dataset"], sources))
        return out

    def streams(self) -> list[StreamForecast]:
        out = []
        trained = self.run.recipe.tokenizer.train if self.run.recipe.tokenizer else None
        trained_bytes = sum(r.counters.get("bytes", 0) for n in self.run.nodes if n["kind"] == "tokenizer"
                            for r in self.run.records[n["name"]])
        little = trained is not None and trained_bytes < ENOUGH_TEXT * trained.vocab and self.largest > 1
        more = Range(math.sqrt(MEMORISED), 1.0, MEMORISED) if little else ALL
        for node in (n for n in self.run.nodes if n["kind"] == "shards"):
            records = [r for r in self.run.records[node["name"]] if r.node.endswith("/encode")]
            through = self._overall(node["name"], records) * more
            tokens, held_out = (self._total(records, partial(_tokens, split=split)) * through
                                for split in ("train", "val"))
            out.append(StreamForecast(node["name"].removeprefix("shards:"), tokens, held_out))
        if little and out:
            self.notes.append(f"tokens: the tokenizer of the sample was trained on only {trained_bytes:,} bytes, and "
                              f"encodes them in fewer tokens than a tokenizer trained on more text will")
        return out

    # -- numbers -------------------------------------------------------------------------------------------------
    def _weight(self, record: PartRecord) -> float:
        """Return how many tasks of a run on the whole input one task of the sample run represents."""
        sizes = {s: c.get("bytes", 0) + 1e-9 for s, c in _read(record).items() if s in self.scale}
        return sum(self.scale[s] * b for s, b in sizes.items()) / sum(sizes.values()) if sizes else self.largest

    def partitions(self, sources: Iterable[str]) -> int:
        """Return the number of tasks, in a run on the whole input, of a node of the plan that reads these sources."""
        payloads = [s.payload_read * s.grown for name, s in self.run.sources.items() if name in sources]
        return max(1, sum(max(1, math.ceil(payload / self.run.recipe.run.partition)) for payload in payloads))

    def over_tasks(self, records: Sequence[PartRecord], measure: Callable[[PartRecord], float],
               first_loads: bool = False) -> Range:
        """Extrapolate a cost to the whole input and return the sum over all tasks. `records` are the commit records of
        the tasks of one node, each of which read a part of the sample. `measure` returns the cost of a task. The sum is
        a fixed cost per task plus a cost per byte.

        `first_loads` says that the first task of a worker also loads models. The estimate of the sum leaves out this
        loading; the upper bound `high` contains the loading once per core.
        """
        if not records:
            return NOTHING
        weights, size, cost = self._arrays(records, measure)
        later = self._later(records) if first_loads else np.ones(len(records), bool)
        fixed, slope = line(size[later], cost[later])
        tasks = self.partitions({source for r in records for source in _read(r)})
        total_bytes = float((weights * size).sum())
        value = fixed * min(tasks, float(weights.sum())) + slope * total_bytes
        load = 0.0 if later.all() else max(0.0, float((cost - fixed - slope * size)[~later].mean()))
        margin = self._margin(weights, size, np.where(later, cost, fixed + slope * size))
        even = float((weights * cost)[later].sum()) / max(float((weights * size)[later].sum()), 1.0) * total_bytes
        return Range(value, max(0.0, value - margin),
                     max(value + margin, even + load * min(self.cores, tasks)))

    def _later(self, records: Sequence[PartRecord]) -> np.ndarray:
        """Return, for each task, whether its worker had loaded the models before. The first task of each worker had to
        load them. With n workers, the n tasks whose attempts have the lowest names count as these first tasks. If that
        leaves no other task, the result is True for all tasks."""
        firsts = sorted(r.attempt for r in records)[:self.run.workers]
        later = np.array([r.attempt not in firsts for r in records])
        return later if later.any() else np.ones(len(records), bool)

    def _total(self, records: Sequence[PartRecord], measure: Callable[[PartRecord], float],
               source: str | None = None) -> Range:
        """Return the sum of `measure` over the tasks, extrapolated to the whole input. If `source` is given, `measure`
        must count documents or bytes of this source alone."""
        if not records:
            return NOTHING
        weights, size, values = self._arrays(records, measure)
        if source is not None:
            weights = np.full(len(records), self.scale[source])
        value, margin = float((weights * values).sum()), self._margin(weights, size, values)
        if not value and weights.max() > 1:
            margin = 3 * float(weights.max())   # rule of three: of what n tasks never show, at most 3 in n are likely
        return Range(value, max(0.0, value - margin), value + margin)

    def _arrays(self, records: Sequence[PartRecord],
                measure: Callable[[PartRecord], float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays with one number for each task: its weight (how many tasks of the whole input it
        represents), the bytes it read, and its `measure`."""
        sizes = [sum(c.get("bytes", 0) for c in _read(r).values()) for r in records]
        return (np.array([self._weight(r) for r in records]), np.array(sizes, dtype=float),
                np.array([float(measure(r)) for r in records]))

    @staticmethod
    def _margin(weights: np.ndarray, size: np.ndarray, values: np.ndarray) -> float:
        """Return the 95 % error of the weighted sum of `values`, which has one value per task. The error is computed
        from the spread of the ratio of values to bytes, because a mere difference in the sizes of tasks adds no
        uncertainty. A single task shows no spread, so its whole value counts as error. If the whole input was read (no
        weight is above 1), there is no error."""
        n, most = len(values), float(weights.max())
        if most <= 1:
            return 0.0
        if n < 2:
            return float((weights * values).sum())
        size = size + 1.0
        ratio = float((weights * values).sum() / (weights * size).sum())
        spread = float((weights * (values - ratio * size)).std(ddof=1))
        return 2.15 * spread * math.sqrt(n * (1 - 1 / most))          # 2.15: Student's t for about 16 units


def _read(record: PartRecord) -> dict[str, dict[str, Any]]:
    """Return the documents and bytes that a task read, by source: {source: {"docs", "bytes"}}. The result is empty for
    tasks of deduplications and tokenizers, and for tasks that assemble shards (token files)."""
    return record.counters.get("in") or record.counters.get("sources") or {}


def _kept_amount(record: PartRecord, source: str, what: str = "docs") -> int:
    return record.counters.get("kept", {}).get(source, {}).get(what, 0)


def _text(record: PartRecord) -> tuple[int, int]:
    """Return (bytes of the file with the kept texts, number of kept documents) for a task of a pass over the
    documents."""
    if (text := record.files.get("kept.parquet")) is not None:
        return text.bytes, text.rows
    row_set = record.files["gone.parquet"].meta
    return row_set["bytes"], row_set["kept"]


def _tokens(record: PartRecord, split: str) -> int:
    return record.counters[split]["tokens"]


def _cpu(record: PartRecord) -> float:
    return record.cpu_s


def _disk(record: PartRecord) -> float:
    return float(sum(i.bytes for i in record.files.values()))


def _ratio(part: float, base: float) -> float:
    return part / base if base else 1.0
