"""Makes the report's sections about time and memory.

The figures come from the commit records of tasks, so they include work that an earlier run did and this run reused.
They are measurements. All other figures of the report can be checked by a query over the published parts (files of
documents).
"""

from __future__ import annotations

from typing import Any

from pipeline.report.nodes import NodeFigures


def pass_costs(passes: list[NodeFigures]) -> list[dict[str, Any]]:
    """Return one row for every pass (steps that run together): its tasks, the documents and bytes that they read, CPU
    seconds, wall seconds, documents per second and core, and the largest memory of a task in MB. Wall seconds are added
    up over the tasks, each of which has one core."""
    rows = []
    for node in passes:
        inputs = node.counters.get("in", {}).values()
        docs = sum(s["docs"] for s in inputs)
        rows.append({"pass": node.name, "tasks": node.tasks, "docs": docs,
                     "bytes": sum(s["bytes"] for s in inputs), "cpu_s": node.cpu_s, "wall_s": node.wall_s,
                     "docs_per_core_s": docs / node.wall_s if node.wall_s > 1e-6 else None,
                     "max_rss_mb": node.max_rss_mb})
    return rows


def _before(node: NodeFigures) -> float:
    """Return the CPU seconds of the earlier tasks whose results the tasks of `node` (a pass of the plan) reused. After
    a change of thresholds, a pass derives new results from the stored ones instead of running all stages again."""
    return node.counters.get("replayed", {}).get("cpu_s", 0.0)


def stage_costs(passes: list[NodeFigures]) -> list[dict[str, Any]]:
    """Return one row for every stage (step) of every pass (group of steps that run together): documents in and dropped,
    CPU seconds, documents per CPU second, and the stage's share of the CPU time of all rows.

    The removals of a barrier (such as deduplication) are carried out by the pass after the barrier, and are the first
    row of this pass. In each pass, the row "read and write" is the CPU time that no stage used.
    """
    rows = []
    for node in passes:
        docs, inside = sum(s["docs"] for s in node.counters.get("in", {}).values()), 0.0
        stages = node.counters.get("stages", {})
        # the barrier has judged all documents that the pass read; a barrier that removed none has no counters
        rows += [{"pass": node.name, "stage": name, "in": docs, "cpu_s": 0.0,
                  "dropped": _dropped(stages.get(f"barrier:{name}", {"dropped": {}}))}
                 for step in node.steps if (name := step.removeprefix("apply ")) != step]
        for label, stats in stages.items():
            if label.startswith("barrier:"):
                continue
            inside += stats["cpu_s"]
            rows.append({"pass": node.name, "stage": label.partition(":")[2], "in": stats["in"],
                         "dropped": _dropped(stats), "cpu_s": stats["cpu_s"]})
        rows.append({"pass": node.name, "stage": "read and write", "in": docs, "dropped": 0,
                     "cpu_s": max(0.0, node.cpu_s + _before(node) - inside)})
    total = sum(r["cpu_s"] for r in rows) or 1.0
    for row in rows:
        row["share"] = row["cpu_s"] / total
        row["docs_per_cpu_s"] = row["in"] / row["cpu_s"] if row["cpu_s"] > 1e-6 else None
    return rows


def _dropped(stats: dict[str, Any]) -> int:
    """Return how many documents a stage dropped, for all reasons and sources, by its counters."""
    return sum(n for by_source in stats["dropped"].values() for n in by_source.values())


def task_costs(nodes: list[NodeFigures]) -> list[dict[str, Any]]:
    """Return one row for every node of the plan (pass, deduplication …): its tasks, their CPU and wall seconds, and the
    largest memory of a task in MB."""
    return [{"node": n.name, "kind": n.kind, "tasks": n.tasks, "cpu_s": n.cpu_s, "wall_s": n.wall_s,
             "max_rss_mb": n.max_rss_mb} for n in nodes]
