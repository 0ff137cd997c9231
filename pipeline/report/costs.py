"""Makes the report's sections about time. They give what the work cost according to the records, whichever run did it.

These figures are measurements, the only ones in the report that no query over the parts can reproduce.
"""

from __future__ import annotations

from typing import Any

from pipeline.report.nodes import Node


def pass_costs(passes: list[Node]) -> list[dict[str, Any]]:
    """For every pass: tasks, documents and bytes in, CPU seconds, wall seconds of all tasks (each has one core),
    documents per second and core, the largest memory of a task (MB)."""
    rows = []
    for node in passes:
        read = node.counters.get("in", {}).values()
        docs = sum(s["docs"] for s in read)
        rows.append({"pass": node.name, "tasks": node.tasks, "docs": docs,
                     "bytes": sum(s["bytes"] for s in read), "cpu_s": node.cpu_s, "wall_s": node.wall_s,
                     "docs_per_core_s": docs / node.wall_s if node.wall_s > 1e-6 else None,
                     "max_rss_mb": node.max_rss_mb})
    return rows


def _before(node: Node) -> float:
    """The CPU seconds that earlier passes spent on the replayed results."""
    return node.counters.get("replayed", {}).get("cpu_s", 0.0)


def stage_costs(passes: list[Node]) -> list[dict[str, Any]]:
    """For every stage of every pass: documents in and dropped, CPU seconds, documents per CPU-second, share of all CPU.
    """
    rows = []
    for node in passes:
        inside = 0.0
        for label, stats in node.counters.get("stages", {}).items():
            inside += stats["cpu_s"]
            rows.append({"pass": node.name, "stage": label.partition(":")[2], "in": stats["in"],
                         "dropped": sum(n for by in stats["dropped"].values() for n in by.values()),
                         "cpu_s": stats["cpu_s"]})
        docs = sum(s["docs"] for s in node.counters.get("in", {}).values())
        rows.append({"pass": node.name, "stage": "read and write", "in": docs, "dropped": 0,
                     "cpu_s": max(0.0, node.cpu_s + _before(node) - inside)})
    total = sum(r["cpu_s"] for r in rows) or 1.0
    for row in rows:
        row["share"] = row["cpu_s"] / total
        row["docs_per_cpu_s"] = row["in"] / row["cpu_s"] if row["cpu_s"] > 1e-6 else None
    return rows


def task_costs(nodes: list[Node]) -> list[dict[str, Any]]:
    """For every node of the plan: tasks, CPU and wall seconds, the largest memory of a task (MB)."""
    return [{"node": n.name, "kind": n.kind, "tasks": n.tasks, "cpu_s": n.cpu_s, "wall_s": n.wall_s,
             "max_rss_mb": n.max_rss_mb} for n in nodes]
