"""The bill: what a recipe will leave and cost, extrapolated from a sample that was run (`pipeline.forecast.sample`).

Every number is {"value", "low", "high"}. What a task of the sample left or cost counts as many times as its source is
larger than its sample. The range is that of a bootstrap over the units of the sample (95 %, corrected for small numbers
and for the share that was seen), for CPU time widened by what one machine differs from itself (`ranges.NOISE`). CPU
time of a node is a line through its tasks but the first of each worker, which loads models: what a task costs before
its first document (a median), and what each byte costs (a median of slopes: Theil 1950, Sen 1968).

Two things do not grow evenly. Deduplication finds more the more there is: a pair of documents is in a sample of one
thousandth once in a million, so what the sample found is a lower bound, and pairs divided by the square of the share an
upper one. And a tokenizer trained on little text knows that text too well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.forecast.mixture import mixture
from pipeline.forecast.ranges import Range, around, line, noisy, point, scaled, summed, times
from pipeline.forecast.sample import Sampled
from pipeline.store.records import PartRecord
from stages.dedup.fragment import GROUP_BYTES, GROUP_ROWS

DRAWS = 400
#: text a token stands for differs by up to this between a tokenizer trained on little text and on enough
MEMORISED, ENOUGH_TEXT = 1.35, 1000
START_S = 15.0               # until workers are there, models are loaded and the report is written


def bill(sampled: Sampled, *, cores: int, price: float | None = None) -> dict[str, Any]:
    """The document `tokenmill plan --sample --json` prints.

    `cores`: for the wall time. `price`: of a core for an hour, in any currency; None leaves the cost out.
    """
    return _Bill(sampled, cores, price).document()


class _Bill:
    def __init__(self, sampled: Sampled, cores: int, price: float | None) -> None:
        self.s, self.cores, self.price = sampled, cores, price
        self.scale = {name: s.scale for name, s in sampled.sources.items()}
        self.target = sampled.recipe.run.partition
        self.nodes = {n["name"]: n for n in sampled.nodes}
        self.notes = [note for s in sampled.sources.values() for note in s.notes]
        #: what deduplication up to a node changes against the sample: documents of a source that come through, for
        #: each one of the sample's
        self.through: dict[str, dict[str, Range]] = {}
        self.duplicates: list[dict[str, Any]] = []
        self.factor = dict.fromkeys(self.nodes, 1.0)

    def document(self) -> dict[str, Any]:
        rows = [self._node(node) for node in self.s.nodes if node["kind"] != "index"]
        reading = self._reading()
        cpu = summed([r["cpu_s"] for r in [*reading, *rows]])
        wall = self._wall(reading, rows, cpu)
        streams = self._streams()
        mixed, said = mixture(self.s.recipe, {s["stream"]: s["tokens"] for s in streams})
        self.notes += said
        found = {
            "sample": {name: {"files": s.files, "files_read": s.files_read, "records": s.records_read,
                              "records_drawn": s.drawn, "bytes_drawn": s.drawn_bytes, "scale": round(s.scale, 3)}
                       for name, s in self.s.sources.items()},
            "sample_wall_s": round(self.s.wall_s, 1),
            "datasets": self._datasets(), "streams": streams, "mixture": mixed, "duplicates": self.duplicates,
            "nodes": [*reading, *rows],
            "total": {"cpu_hours": times(cpu, 1 / 3600), "disk_bytes": summed([r["disk_bytes"] for r in rows]),
                      # publishing gives files on a disk a second name, in object storage a second copy
                      "published_bytes": summed([times(r["disk_bytes"], self._published(r["name"])) for r in rows]),
                      "exchange_bytes": summed([r["exchange_bytes"] for r in rows]),
                      "memory_mb_per_worker": max((r["memory_mb"] for r in rows), default=0.0),
                      "cores": self.cores, "wall_s": wall},
            "notes": self.notes,
        }
        if self.price is not None:
            found["total"] |= {"price_per_core_hour": self.price, "cost": times(cpu, self.price / 3600)}
        return found

    # -- nodes ---------------------------------------------------------------------------------------------------
    def _reading(self) -> list[dict[str, Any]]:
        """Reading the sources: measured on all that was read, so it is not of a sample where every file was."""
        rows = []
        for name, s in self.s.sources.items():
            value = s.read_cpu_s * s.bytes / max(s.bytes_read, 1)
            tasks = self._partitions({name})
            rows.append({"name": f"read {name}", "kind": "read", "cpu_s": noisy(point(value)), "memory_mb": 0.0,
                         "tasks": tasks, "longest_s": value / tasks,
                         "disk_bytes": point(0.0), "exchange_bytes": point(0.0)})
        return rows

    def _node(self, node: Mapping[str, Any]) -> dict[str, Any]:
        records = self.s.records[node["name"]]
        self._before(node)
        before = self._overall(node["name"], records)
        if node["kind"] == "barrier":
            cpu, disk, exchange = self._barrier(node, records, before)
            tasks = self._barrier_tasks(node, records)
        elif node["kind"] == "tokenizer":                                # one, however much there is
            cpu, disk, exchange = self._tokenizer(node, records), point(sum(map(_disk, records))), point(0.0)
            tasks = max(len(records), 1)
        else:
            self._applies(node, records)
            # shards are assembled of what the parts became: that takes and leaves more in proportion
            of_parts = [r for r in records if not r.node.endswith("/assemble")]
            cpu = scaled(times(self._linear(of_parts), _more(records, of_parts, lambda r: r.cpu_s)), before)
            disk = scaled(times(self._stored(of_parts), _more(records, of_parts, _disk)), before)
            exchange, tasks = point(0.0), self._tasks(of_parts)
        return {"name": node["name"], "kind": node["kind"], "cpu_s": noisy(cpu), "disk_bytes": disk,
                "exchange_bytes": exchange, "memory_mb": max((r.rss_mb for r in records), default=0.0), "tasks": tasks,
                "longest_s": cpu["value"] / max(tasks, 1)}

    def _before(self, node: Mapping[str, Any]) -> None:
        """What of every source comes into a node: as much as out of the nodes before it."""
        made = {}
        for source in self.scale:
            found = [self.through[d][source] for d in node["deps"] if d in self.through]
            made[source] = {"value": max((f["value"] for f in found), default=1.0),
                            "low": min((f["low"] for f in found), default=1.0),
                            "high": max((f["high"] for f in found), default=1.0)}
        self.through[node["name"]] = made

    def _overall(self, name: str, records: Sequence[PartRecord]) -> Range:
        """The same over all sources, by the bytes the tasks read of each."""
        sizes: dict[str, float] = defaultdict(float)
        for record in records:
            for source, counted in _read(record).items():
                if source in self.scale:
                    sizes[source] += counted.get("bytes", 0) * self.scale[source]
        total, made = sum(sizes.values()), self.through[name]
        sizes = sizes if total else dict.fromkeys(self.scale, 1.0)
        return {k: sum(made[s][k] * size for s, size in sizes.items()) / sum(sizes.values())
                for k in ("value", "low", "high")}

    def _linear(self, records: Sequence[PartRecord]) -> Range:
        """CPU seconds of a node whose tasks each read a part."""
        if not records:
            return point(0.0)
        weights = np.array([self._weight(r) for r in records])
        size = np.array([_bytes_in(r) for r in records], dtype=float)
        cpu = np.array([r.cpu_s for r in records])
        # the first task of a worker loads models, and it is a large one: they go out by size. So many tasks of the
        # sample did, and each worker of the run will
        later = self._later(records)
        fixed, slope = line(size[later], cpu[later])
        tasks = self._tasks(records)
        value = fixed * min(tasks, float(weights.sum())) + slope * float((weights * size).sum())
        rest = cpu - fixed - slope * size
        load = 0.0 if later.all() else max(0.0, float(rest[~later].mean()))
        below, above = self._spread(weights, np.where(later, cpu, fixed + slope * size), records)
        even = float((weights * cpu)[later].sum()) / max(float((weights * size)[later].sum()), 1.0)
        at_most = even * float((weights * size).sum()) + load * min(self.cores, tasks)
        return {"value": value, "low": max(0.0, value - below), "high": max(value + above, at_most)}

    def _later(self, records: Sequence[PartRecord]) -> np.ndarray:
        """Which tasks found what they need in a worker: all but the first of every worker in either run of the sample,
        by the numbers of their attempts (all where there are no others)."""
        firsts: dict[str, list[str]] = defaultdict(list)
        for record in records:
            epoch, serial = record.attempt.split("-")[:2]
            firsts[epoch] = sorted([*firsts[epoch], serial])[:self.s.workers]
        later = np.array([r.attempt.split("-")[1] not in firsts[r.attempt.split("-")[0]] for r in records])
        return later if later.any() else np.ones(len(records), bool)

    def _stored(self, records: Sequence[PartRecord]) -> Range:
        """Bytes on disk of such a node: what a file takes empty, and what each byte read leaves."""
        if not records:
            return point(0.0)
        weights = np.array([self._weight(r) for r in records])
        size = np.array([_bytes_in(r) for r in records], dtype=float)
        left = np.array([float(_disk(r)) for r in records])
        fixed, slope = line(size, left)
        value = fixed * min(self._tasks(records), float(weights.sum())) + slope * float((weights * size).sum())
        even = self._total(records, _disk)
        below, above = self._spread(weights, left, records)
        return {"value": value, "low": max(0.0, value - below), "high": max(value + above, even["value"])}

    def _barrier(self, node: Mapping[str, Any], records: Sequence[PartRecord],
                 before: Range) -> tuple[Range, Range, Range]:
        """Cost grows with the documents, from two sizes of the sample; exchange files likewise."""
        quarter = self.s.quarter.get(node["name"], [])
        parts = [r for d in node["deps"] for r in self.s.records.get(d, ())]
        small = [r for d in node["deps"] for r in self.s.quarter.get(d, ())]
        docs, few = _docs(parts), _docs(small)
        whole = sum(_kept_docs(r, s) * self.scale.get(s, 1.0) for r in parts for s in r.counters["kept"])
        cpu, less = sum(r.cpu_s for r in records), sum(r.cpu_s for r in quarter)
        even = cpu / max(docs, 1) * whole
        slope = max(0.0, (cpu - less) / (docs - few)) if quarter and docs > few else 0.0
        value = min(even, cpu + slope * (whole - docs)) if slope else even / 2
        time = {"value": value, "low": min(value, cpu), "high": max(even, value)}
        written = sum(i.bytes for r in records for i in r.files.values()) / max(docs, 1) * whole
        return scaled(time, before), point(0.0), scaled(around(written, 0.7, 1.5), before)

    def _barrier_tasks(self, node: Mapping[str, Any], records: Sequence[PartRecord]) -> int:
        """Tasks go by groups of parts, and by ranges of what those write."""
        parts = [r for d in node["deps"] for r in self.s.records.get(d, ())]
        size = sum(r.files["kept.parquet"].bytes * self._weight(r) for r in parts)
        docs = sum(r.files["kept.parquet"].rows * self._weight(r) for r in parts)
        mapped = max(sum(r.node == records[0].node for r in records), 1) if records else 1     # its first wave
        groups = max(mapped, math.ceil(size / GROUP_BYTES), math.ceil(docs / GROUP_ROWS))
        return max(1, math.ceil(len(records) * groups / mapped))

    def _tokenizer(self, node: Mapping[str, Any], records: Sequence[PartRecord]) -> Range:
        trained = self.s.recipe.tokenizer.train if self.s.recipe.tokenizer else None
        cpu = sum(r.cpu_s for r in records)
        if trained is None or not records:
            return point(cpu)
        seen = sum(r.counters.get("bytes", 0) for r in records)
        whole = min(trained.sample, seen * max(self.scale.values()))
        factor = whole / max(seen, 1)
        return {"value": cpu * max(1.0, 0.7 * factor), "low": cpu, "high": cpu * max(1.0, factor)}

    def _applies(self, node: Mapping[str, Any], records: Sequence[PartRecord]) -> None:
        """Bound what a deduplication that this pass applies removes of all documents, by source."""
        label = next((d for d in node["deps"] if self.nodes[d]["kind"] == "barrier"), None)
        if label is None:
            return
        docs: dict[str, int] = defaultdict(int)
        gone: dict[str, int] = defaultdict(int)
        for record in records:
            for source, n in record.counters["in"].items():
                docs[source] += n["docs"]
            for name, stats in record.counters["stages"].items():
                if name.startswith("barrier:"):
                    for by_source in stats["dropped"].values():
                        for source, n in by_source.items():
                            gone[source] += n
        rarest = min(1 / self.scale.get(s, 1.0) for s in docs) if docs else 1.0
        for source, n in docs.items():
            scale, found = self.scale.get(source, 1.0), gone[source]
            total, share = n * scale, 1 / scale
            low = found * scale
            pairs = min(found / (share * rarest), total)
            high = min((found + 2 + 2 * math.sqrt(found + 1)) / (share * rarest), total) if rarest < 1 else low
            value = math.sqrt(low * max(pairs, low)) if found else low
            stays = max(total - low, 1.0)                        # what the sample says is left
            mine = {"value": (total - value) / stays, "low": (total - high) / stays, "high": 1.0}
            was = self.through[node["name"]][source]
            self.through[node["name"]][source] = {k: v * was[k] for k, v in mine.items()}
            self.duplicates.append({"node": node["name"], "source": source, "documents": total,
                                    "in_sample": found / max(n, 1), "removed": {"value": value, "low": low,
                                                                               "high": high}})
        if max(self.scale.values(), default=1.0) > 1:
            self.notes.append(f"{node['name']}: duplicates do not grow evenly with the input. A sample shows few of "
                              f"them, for both copies of a pair must be in it: what it found is the least, pairs "
                              f"divided by the square of its share the most")

    # -- what is left --------------------------------------------------------------------------------------------
    def _published(self, name: str) -> float:
        """The share of a node's files that is published."""
        names = {"dropped.parquet", "quarantine.parquet", "body", "ends", "table.parquet"}
        names |= {"kept.parquet"} if self.nodes[name]["publishes"] else set()
        files = [f for r in self.s.records[name] for f in r.files.items()]
        return sum(i.bytes for n, i in files if n in names) / max(sum(i.bytes for _, i in files), 1)

    def _datasets(self) -> list[dict[str, Any]]:
        """Documents and bytes of text of every published dataset by source."""
        found = []
        for node in self.s.nodes:
            if not node["publishes"]:
                continue
            records = self.s.records[node["name"]]
            sources = {}
            for source in self.scale:
                docs = self._total(records, lambda r, s=source: _kept_docs(r, s), source)
                size = self._total(records, lambda r, s=source: r.counters["kept"].get(s, {}).get("bytes", 0), source)
                if docs["high"] and any(source in r.counters["in"] for r in records):
                    through = self.through[node["name"]][source]
                    sources[source] = {"documents": scaled(docs, through), "text_bytes": scaled(size, through)}
            found.append({"dataset": node["dataset"], "sources": sources,
                          "documents": summed([s["documents"] for s in sources.values()]),
                          "text_bytes": summed([s["text_bytes"] for s in sources.values()])})
        return found

    def _streams(self) -> list[dict[str, Any]]:
        found = []
        trained = self.s.recipe.tokenizer.train if self.s.recipe.tokenizer else None
        seen = sum(r.counters.get("bytes", 0) for n in self.s.nodes if n["kind"] == "tokenizer"
                   for r in self.s.records[n["name"]])
        little = trained is not None and seen < ENOUGH_TEXT * trained.vocab and max(self.scale.values()) > 1
        for node in (n for n in self.s.nodes if n["kind"] == "shards"):
            records = [r for r in self.s.records[node["name"]] if r.node.endswith("/encode")]
            through = self._overall(node["name"], records)
            made = {split: scaled(self._total(records, lambda r, s=split: r.counters[s]["tokens"]), through)
                    for split in ("train", "val")}
            if little:
                made = {k: {**v, "value": v["value"] * math.sqrt(MEMORISED), "high": v["high"] * MEMORISED}
                        for k, v in made.items()}
            found.append({"stream": node["name"].removeprefix("shards:"), "tokens": made["train"],
                          "held_out": made["val"]})
        if little and found:
            self.notes.append(f"tokens: the tokenizer of the sample was trained on {seen:,} bytes only and spells them "
                              f"in fewer tokens than one trained on more will")
        return found

    # -- numbers -------------------------------------------------------------------------------------------------
    def _weight(self, record: PartRecord) -> float:
        """How many times this task stands for itself."""
        sizes = {s: c.get("bytes", 0) + 1e-9 for s, c in _read(record).items() if s in self.scale}
        total = sum(sizes.values())
        return sum(self.scale[s] * b / total for s, b in sizes.items()) if total else max(self.scale.values())

    def _total(self, records: Sequence[PartRecord], of: Any, source: str | None = None) -> Range:
        """The total of `of(record)` over all that the sample stands for."""
        if not records:
            return point(0.0)
        weights = np.array([self.scale[source] if source else self._weight(r) for r in records])
        values = np.array([float(of(r)) for r in records])
        value = float((weights * values).sum())
        low, high = self._spread(weights, values, records)
        if not value and weights.max() > 1:
            high = 3 * float(weights.max())                   # none of n seen: at most 3 in n (rule of three)
        return {"value": value, "low": max(0.0, value - low), "high": value + high}

    def _spread(self, weights: np.ndarray, values: np.ndarray, records: Sequence[PartRecord]) -> tuple[float, float]:
        """(below, above) the total at 95 %: a bootstrap over the units."""
        n = len(values)
        if n < 2 or weights.max() <= 1:
            return 0.0, float((weights * values).sum()) if n < 2 and weights.max() > 1 else 0.0
        size = np.array([_bytes_in(r) for r in records], dtype=float) + 1.0
        counts = np.random.default_rng(20260101).multinomial(n, np.full(n, 1 / n), size=DRAWS)
        # as a ratio to the bytes read: that the units differ in size is no uncertainty
        totals = (counts * (weights * values)).sum(1) / (counts * (weights * size)).sum(1) * (weights * size).sum()
        low, high = np.quantile(totals, [0.025, 0.975])
        value = float((weights * values).sum())
        widen = math.sqrt(n / (n - 1)) * 1.1 * math.sqrt(max(0.0, 1 - 1 / float(weights.max())))
        return max(0.0, value - low) * widen, max(0.0, high - value) * widen

    def _tasks(self, records: Sequence[PartRecord]) -> int:
        """How many tasks a node will have, of which each reads a part, as these of its sample do."""
        return max(1, self._partitions({source for record in records for source in _read(record)}))

    def _partitions(self, sources: set[str]) -> int:
        return sum(max(1, math.ceil(s.payload_read * s.bytes / max(s.bytes_read, 1) / self.target))
                   for name, s in self.s.sources.items() if name in sources)

    def _wall(self, reading: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], cpu: Range) -> Range:
        """Seconds on `cores` cores: work divided evenly, up to every node waiting for its longest task after its work
        was shared out (Graham 1966), which never takes longer than one core."""
        at_least = START_S + cpu["low"] / self.cores
        tails = sum(r["longest_s"] for r in [*reading, *rows])
        longest = max((r["longest_s"] for r in rows), default=0.0)
        value = START_S + max(cpu["value"] / self.cores, longest) + (tails if self.cores > 1 else 0.0) / 2
        high = START_S + cpu["high"] / self.cores + (tails * cpu["high"] / max(cpu["value"], 1e-9)
                                                     if self.cores > 1 else 0.0)
        return {"value": value, "low": min(at_least, value), "high": max(high, value) * 1.25}


def _read(record: PartRecord) -> dict[str, dict[str, Any]]:
    """What a task read, by source: {"docs", "bytes"}. Nothing for tasks of barriers, tokenizers and whole shards."""
    return record.counters.get("in") or record.counters.get("sources") or {}


def _bytes_in(record: PartRecord) -> int:
    return sum(c.get("bytes", 0) for c in _read(record).values())


def _more(records: Sequence[PartRecord], some: Sequence[PartRecord], of: Callable[[PartRecord], float]) -> float:
    """How many times larger the sum of `of` is over all records than over some of them."""
    part = sum(map(of, some))
    return sum(map(of, records)) / part if part else 1.0


def _docs(records: Sequence[PartRecord]) -> int:
    return sum(k["docs"] for r in records for k in r.counters.get("kept", {}).values())


def _kept_docs(record: PartRecord, source: str) -> int:
    return record.counters["kept"].get(source, {}).get("docs", 0)


def _disk(record: PartRecord) -> int:
    return sum(i.bytes for i in record.files.values())
