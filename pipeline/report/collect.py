"""What a run did, as numbers: report.json, from the log's records and the published parts. No document is reprocessed.

Everything here can be recomputed by a query over the parts (tests/e2e/test_report_figures.py does, with DuckDB).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.task import Counters, PartRecord, merge_counters
from pipeline.store.fs import Store
from stages.document import document_id
from stages.mix.curriculum import Curriculum
from stages.mix.realised import realised

#: samples shown for each reason, characters of each, parts looked through for them (first ones by key)
SAMPLES, EXCERPT, SAMPLE_PARTS = 3, 320, 64

Get = Callable[[str], PartRecord | None]


def write_report(store: Store, run: str, get: Get) -> dict[str, Any]:
    """Collect the report of a run and write runs/RUN/report.{json,html} and STORE/report.json. Returns the document."""
    from pipeline.report.html import render

    document = collect(store, run, get)
    data = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).encode()
    store.write(f"runs/{run}/report.json", data)
    store.write("report.json", data)
    store.write(f"runs/{run}/report.html", render(document).encode())
    return document


def collect(store: Store, run: str, get: Get) -> dict[str, Any]:
    """The report as one JSON document; see the functions below for its sections."""
    plan = json.loads(store.read(f"runs/{run}/plan.json"))
    nodes = [Node(n, [r for r in map(get, n["keys"]) if r is not None]) for n in plan["nodes"]]
    missing = sum(len(n["keys"]) for n in plan["nodes"]) - sum(len(n.records) for n in nodes)
    passes = [n for n in nodes if n.kind == "pass"]
    tokens = token_counts(store, nodes)
    return {
        "version": 1, "run": run, "recipe": plan["recipe"], "missing_records": missing,
        "sources": {name: source_section(name, info, passes) for name, info in plan["sources"].items()},
        "funnel": funnel(plan, passes, tokens),
        "datasets": {n.dataset: dataset_section(store, n.dataset, [p for p in passes if p.dataset == n.dataset])
                     for n in passes if n.publishes},
        "stages": stage_costs(passes),
        "tasks": task_costs(nodes),
        "duplicates": [duplicate_section(n, nodes) for n in nodes if n.kind == "barrier"],
        "tokens": tokens,
        "mixture": mixture(store, run),
        "lineage": [n.lineage() for n in nodes],
    }


class Node:
    """A node of plan.json with the records of its tasks and their counters, added up: of a pass as they are, of other
    nodes by wave, since waves count different things."""

    def __init__(self, doc: dict[str, Any], records: list[PartRecord]) -> None:
        self.name, self.kind, self.dataset = doc["name"], doc["kind"], doc["dataset"]
        self.steps, self.deps, self.publishes = doc["steps"], doc["deps"], doc["publishes"]
        self.records = records
        self.counters: Counters = {}
        for record in records:
            into = self.counters
            if self.kind != "pass":
                into = into.setdefault(record.node.removeprefix(self.name).strip("/") or "task", {})
            merge_counters(into, record.counters)

    def lineage(self) -> dict[str, Any]:
        files = [f for r in self.records for f in r.files.values()]
        return {"name": self.name, "kind": self.kind, "deps": self.deps, "steps": self.steps,
                "tasks": len(self.records), "bytes": sum(f.bytes for f in files),
                "cpu_s": round(sum(r.cpu_s for r in self.records), 2),
                "content": _digest([f.content for f in files])}


def _digest(contents: list[str]) -> str:
    return document_id("lineage", "", "\n".join(contents), len(contents))


def source_section(name: str, info: dict[str, Any], passes: list[Node]) -> dict[str, Any]:
    """Files and bytes of a source; records that were skipped or unreadable, by reason."""
    out = {**info, "records": 0, "skipped": {}, "bad": {}}
    for node in passes:
        for record in node.records:
            merge_counters(out, record.counters.get("read", {}).get(name, {}))
    return out


def funnel(plan: dict[str, Any], passes: list[Node], tokens: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each source the way down: documents and bytes read, then kept after every dataset it passes, then tokens.

    `bytes` of the first row are raw bytes (HTML, PDF); of the others UTF-8 bytes of text.
    """
    out: dict[str, list[dict[str, Any]]] = {}
    for name in plan["sources"]:
        first = next((p for p in passes if name in p.counters.get("in", {}) and f"index:{name}" in p.deps), None)
        rows = []
        if first is not None:
            rows.append({"step": "read", **first.counters["in"][name]})
        for node in passes:
            if node.publishes and name in node.counters.get("in", {}):
                rows.append({"step": node.dataset, **node.counters["kept"].get(name, {"docs": 0, "bytes": 0})})
        for shard in tokens.values():
            if name in shard["sources"]:
                rows.append({"step": f"tokens ({shard['name']})", "docs": shard["docs"], "tokens": shard["tokens"]})
        out[name] = rows
    return out


def dataset_section(store: Store, dataset: str, passes: list[Node]) -> dict[str, Any]:
    """Kept, dropped and quarantined documents of a dataset; reasons with samples; languages and lengths."""
    last = next(p for p in passes if p.publishes)
    reasons: dict[tuple[str, str], dict[str, Any]] = {}
    for node in passes:
        for label, stats in node.counters.get("stages", {}).items():
            stage = label.partition(":")[2]
            for reason, by_source in stats["dropped"].items():
                row = reasons.setdefault((stage, reason), {"stage": stage, "reason": reason, "docs": 0, "sources": {}})
                row["docs"] += sum(by_source.values())
                merge_counters(row["sources"], by_source)
    samples = drop_samples(store, dataset)
    quarantined: Counters = {}
    for node in passes:
        merge_counters(quarantined, node.counters.get("quarantined", {}))
    for key, row in reasons.items():
        row["samples"] = samples.get(key, [])
    return {
        "docs": sum(s["docs"] for s in last.counters.get("kept", {}).values()),
        "bytes": sum(s["bytes"] for s in last.counters.get("kept", {}).values()),
        "kept": last.counters.get("kept", {}),
        "reasons": sorted(reasons.values(), key=lambda r: (-r["docs"], r["stage"], r["reason"])),
        "quarantined": quarantined,
        "languages": last.counters.get("languages", {}),
        "lengths": last.counters.get("lengths", {}),
        "pii": pii_counts(store, dataset),
    }


def rows_of(store: Store, folder: str, columns: list[str] | None = None, parts: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows of the published parts below `folder`, in the order of the part names."""
    names = [p for p in store.list(folder) if p.rpartition("/")[2].startswith("part-")]
    for name in names[:parts]:
        with store.open(name) as f:
            parquet = pq.ParquetFile(f)
            for batch in parquet.iter_batches(batch_size=1024, columns=columns):
                yield from batch.to_pylist()


def drop_samples(store: Store, dataset: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """A few dropped documents for each (stage, reason): those with the smallest ids, so the choice is reproducible."""
    best: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for row in rows_of(store, f"dropped/{dataset}", ["id", "url", "source", "text", "meta", "stage", "reason"],
                       SAMPLE_PARTS):
        heap = best.setdefault((row["stage"], row["reason"]), [])
        # a heap of the smallest ids: negate the order by complementing the hex digits
        key = row["id"].translate(str.maketrans("0123456789abcdef", "fedcba9876543210"))
        if len(heap) < SAMPLES or key > heap[0][0]:
            text = " ".join(row["text"].split())
            sample = {"id": row["id"], "url": row["url"], "source": row["source"], "excerpt": text[:EXCERPT],
                      "chars": len(row["text"]), "meta": json.loads(row["meta"] or "{}")}
            (heapq.heappush if len(heap) < SAMPLES else heapq.heapreplace)(heap, (key, sample))
    return {k: [s for _, s in sorted(heap, reverse=True)] for k, heap in best.items()}


def pii_counts(store: Store, dataset: str) -> dict[str, int]:
    """Sums of the `pii_*` signals over the kept documents: how many were found, never what."""
    out: dict[str, int] = {}
    for name in [p for p in store.list(f"datasets/{dataset}") if p.rpartition("/")[2].startswith("part-")]:
        with store.open(name) as f:
            parquet = pq.ParquetFile(f)
            fields = [x.name for x in parquet.schema_arrow.field("signals").type if x.name.startswith("pii_")]
            if not fields:
                continue
            column = parquet.read(columns=["signals"]).column("signals")
            for field in fields:
                total = pc.sum(pc.struct_field(column, field)).as_py() or 0
                out[field] = out.get(field, 0) + int(total)
    return out


def stage_costs(passes: list[Node]) -> list[dict[str, Any]]:
    """Documents in, dropped, CPU seconds, documents a CPU-second and share of all CPU, for every stage as it ran."""
    rows = []
    for node in passes:
        inside = 0.0
        for label, stats in node.counters.get("stages", {}).items():
            inside += stats["cpu_s"]
            rows.append({"pass": node.name, "stage": label.partition(":")[2], "in": stats["in"],
                         "dropped": sum(n for by in stats["dropped"].values() for n in by.values()),
                         "bytes_in": stats["bytes_in"], "cpu_s": stats["cpu_s"]})
        whole = sum(r.cpu_s for r in node.records)
        docs = sum(s["docs"] for s in node.counters.get("in", {}).values())
        rows.append({"pass": node.name, "stage": "read and write", "in": docs, "dropped": 0,
                     "bytes_in": sum(s["bytes"] for s in node.counters.get("in", {}).values()),
                     "cpu_s": max(0.0, whole - inside)})
    total = sum(r["cpu_s"] for r in rows) or 1.0
    for row in rows:
        row["share"] = row["cpu_s"] / total
        row["docs_per_cpu_s"] = row["in"] / row["cpu_s"] if row["cpu_s"] > 1e-6 else None
    return rows


def task_costs(nodes: list[Node]) -> list[dict[str, Any]]:
    return [{"node": n.name, "kind": n.kind, "tasks": len(n.records), "cpu_s": sum(r.cpu_s for r in n.records),
             "wall_s": sum(r.wall_s for r in n.records), "max_rss_mb": max((r.rss_mb for r in n.records), default=0.0)}
            for n in nodes]


def duplicate_section(barrier: Node, nodes: list[Node]) -> dict[str, Any]:
    """Removals of a barrier by reason and source, with the counters of its waves (candidates, clusters, pairs)."""
    removed: Counters = {}
    for node in nodes:
        if barrier.name in node.deps:
            for label, stats in node.counters.get("stages", {}).items():
                if label.startswith("barrier:"):
                    merge_counters(removed, stats["dropped"])
    return {"barrier": barrier.name, "dataset": barrier.dataset, "removed": removed, "counters": barrier.counters}


def token_counts(store: Store, nodes: list[Node]) -> dict[str, Any]:
    """Shard sets as published: documents and tokens of train and val, and the sources they hold."""
    out = {}
    for node in nodes:
        if node.kind != "shards":
            continue
        name = node.name.removeprefix("shards:")
        found: dict[str, Any] = {"name": name, "docs": 0, "tokens": 0, "val_docs": 0, "val_tokens": 0}
        for split, prefix in (("train", ""), ("val", "val_")):
            path = f"shards/{name}/split={split}/shards.json"
            if store.exists(path):
                doc = json.loads(store.read(path))
                found[f"{prefix}docs"] += doc["documents"]
                found[f"{prefix}tokens"] += doc["tokens"]
        found["sources"] = sorted(node.counters.get("encode", {}).get("sources", {}))
        out[name] = found
    return out


def mixture(store: Store, run: str) -> list[dict[str, Any]]:
    """Planned against realised windows for every phase and stream, counted over the whole order."""
    path = f"runs/{run}/curriculum.json"
    if not store.exists(path):
        return []
    curriculum = Curriculum.from_json(json.loads(store.read(path)), path)
    return realised(curriculum, curriculum.samples)
