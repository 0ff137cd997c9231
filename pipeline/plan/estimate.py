"""What a run will cost before it runs: bytes in, CPU time, disk. Measured speeds of the store win over the table below.

The table is of one core of a 2-vCPU Xeon (AVX-512) over real web pages; `speed` is bytes a CPU-second into the stage,
`ratio` bytes out of it per byte in. Runs in the same store replace both with what their own documents showed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.driver import NodeState, survey
from pipeline.engine.task import PartRecord
from pipeline.plan.lint import lint
from pipeline.plan.passes import Node, Planner
from pipeline.plan.tokens import token_nodes
from pipeline.recipe import Recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log

#: stage → (bytes per CPU-second, bytes out per byte in)
TABLE: dict[str, tuple[float, float]] = {
    "html": (9e6, 0.04), "pdf": (2e6, 0.05), "url": (2e8, 0.97), "language": (1e7, 0.6),
    "gopher_repetition": (7e6, 0.9), "gopher_quality": (1.8e7, 0.8), "c4": (1e7, 0.85), "fineweb": (1.4e7, 0.9),
    "quality": (5e6, 0.5), "pii": (1e8, 1.0), "exact": (1e8, 0.95), "minhash": (6e6, 0.8), "datatrove": (1e6, 0.9),
}
UNKNOWN = (5e6, 1.0)
#: stored bytes per byte of text (Parquet, zstd), and what a stored document part is read at
COMPRESSED, READ_SPEED = 0.45, 3e8


def measured(records: Iterable[PartRecord]) -> dict[str, tuple[float, float]]:
    """Speed and ratio by stage name, from the counters of finished passes (stages that saw at least 1 MB)."""
    total: dict[str, list[float]] = {}
    for record in records:
        for label, stats in record.counters.get("stages", {}).items():
            name = label.partition(":")[2]
            into = total.setdefault(name, [0.0, 0.0, 0.0])
            for i, field in enumerate(("bytes_in", "bytes_out", "cpu_s")):
                into[i] += stats[field]
    return {name: (bytes_in / cpu, bytes_out / bytes_in) for name, (bytes_in, bytes_out, cpu) in total.items()
            if bytes_in > 1e6 and cpu > 0.01}


def survey_recipe(recipe: Recipe, store_root: str) -> dict[str, Any]:
    """The plan as a document: nodes in order with their steps, partitions, fresh and stale tasks, bytes, CPU, disk."""
    store = Store(store_root)
    log = Log.read(store) if store.exists("log") else None
    planner = Planner(recipe, store.read, quarantined=log.quarantined if log else None)
    nodes = planner.nodes() + token_nodes(recipe, planner)
    inputs = {}
    for name in planner.sources_used():
        files = planner.source_files(name)
        inputs[name] = {"files": len(files), "bytes": sum(f.size for f in files),
                        "expected": int(sum(f.size * planner.expansion(name, f.path) for f in files))}
    states = survey(nodes, log.get if log else lambda key: None)
    speeds = TABLE | (measured(log.records()) if log else {})
    flow = Flow(planner, speeds, inputs)
    rows = [flow.row(state) for state in states]
    return {"recipe": recipe.name, "digest": recipe.digest(), "store": store.root, "inputs": inputs, "nodes": rows,
            "warnings": [*recipe.warnings, *lint(recipe)],
            "total": {"tasks_fresh": sum(r["fresh"] for r in rows), "tasks_stale": sum(r["stale"] for r in rows),
                      "cpu_s": round(sum(r["cpu_s"] for r in rows), 1),
                      "disk_bytes": sum(r["disk_bytes"] for r in rows)}}


class Flow:
    """Bytes as they shrink on their way through the nodes, and the CPU seconds that takes."""

    def __init__(self, planner: Planner, speeds: dict[str, tuple[float, float]], inputs: dict[str, Any]) -> None:
        self.plans = {p.name: p for plans in planner.passes.values() for p in plans}
        self.speeds, self.inputs = speeds, inputs
        self.text: dict[str, float] = {}

    def row(self, state: NodeState) -> dict[str, Any]:
        node = state.node
        total = state.fresh + state.stale
        status = "waits" if state.unknown else "fresh" if state.stale == 0 else "stale" if not state.fresh else "partly"
        cpu, size, seen = self._cost(node)
        left = 0.0 if status == "fresh" else state.stale / total if total else 1.0
        return {"name": node.name, "kind": node.kind, "deps": list(node.deps), "steps": list(node.steps),
                "status": status, "partitions": total or None, "fresh": state.fresh, "stale": state.stale,
                "bytes_in": int(seen), "cpu_s": round(cpu * left, 1), "disk_bytes": int(size * left)}

    def _cost(self, node: Node) -> tuple[float, float, float]:
        """CPU seconds, bytes written, bytes read by a node as a whole."""
        if node.kind == "index":
            size = self.inputs[node.dataset]["expected"]
            return size / 5e8, 0.0, self.inputs[node.dataset]["bytes"]
        if node.kind != "pass":
            size = sum(self.text.get(d, 0.0) for d in node.deps)
            speed, _ = self.speeds.get(node.steps[0] if node.steps else "", UNKNOWN)
            return size / speed, size * 0.05, size
        plan = self.plans[node.name]
        size = seen = sum(self.inputs[n]["expected"] if kind == "source" else self.text.get(n, 0.0)
                          for kind, n in plan.inputs)
        cpu = seen / READ_SPEED
        if plan.barrier_name:
            size *= self.speeds.get(plan.barrier_name, (0, 0.8))[1]
        for step in plan.chain:
            speed, ratio = self.speeds.get(step.name, UNKNOWN)
            cpu += size / speed
            size *= ratio
        self.text[node.name] = size
        return cpu, size * COMPRESSED, seen
