"""Makes the report's section about the plan as a graph. It has the nodes (passes, deduplications …), and the number of
documents or tokens that each node hands to the next."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any

from pipeline.report.nodes import NodeFigures
from tokenizer.mixture.curriculum import Curriculum

#: nodes of a kind with the same successors are drawn as one node if there are more of them than this
ALIKE = 5


def graph(nodes: list[NodeFigures], tokens: Mapping[str, Any], curriculum: Curriculum | None) -> dict[str, Any]:
    """Return the plan of a run as a graph: {nodes, edges}. A node has its name, kind, steps, tasks and, if it drops
    documents, `dropped`. An edge leads from the node `from` to the node `to`, and has one of three entries:

    * `docs`: the number of documents that `to` gets from `from`. It is left out where it is unknown: a pass that reads
      several passes and selects documents by `where` counts what it reads by source, not by pass.
    * `tokens`: on an edge from a token stream to the curriculum, the number of tokens of the stream.
    * `against`: the barrier `to` only compares its documents with those of `from`. `from` is another barrier, or a
      folder (`tokenmill dedup index`), which is a node of the kind `folder`.

    The pass (group of steps that run together) after a barrier (such as deduplication) has an edge from the barrier. It
    has none from the passes before the barrier.
    """
    by_name = {n.name: n for n in nodes}
    drawn: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    for node in nodes:
        barriers = [d for d in node.deps if d in by_name and by_name[d].kind == "barrier"]
        edges += compared(drawn, node.name, node.steps, node.against, by_name)
        dropped = _dropped(node, "barrier:", with_prefix=False)
        drawn.append({"name": node.name, "kind": node.kind, "steps": node.steps, "tasks": node.tasks,
                      **({"dropped": dropped} if dropped else {})})
        for dep in barriers or [d for d in node.deps if d in by_name]:
            edge: dict[str, Any] = {"from": dep, "to": node.name}
            if dep in barriers:
                removed = _dropped(node, "barrier:", with_prefix=True)
                edge["docs"] = _docs_read(node) - removed
                barrier = next(d for d in drawn if d["name"] == dep)
                barrier["dropped"] = barrier.get("dropped", 0) + removed
            elif by_name[dep].kind == "index" and node.kind == "shards":
                sources = tokens.get(node.name.removeprefix("shards:"), {}).get("sources", {})
                edge["docs"] = sources.get(dep.removeprefix("index:"), {}).get("docs", 0)
            elif by_name[dep].kind == "index":
                edge["docs"] = node.counters.get("in", {}).get(dep.removeprefix("index:"), {}).get("docs", 0)
            elif node.kind == "shards":
                stream = tokens.get(node.name.removeprefix("shards:"), {})
                if by_name[dep].kind == "pass":
                    edge["docs"] = (stream["docs"] + stream["val_docs"] + stream["near_held_out"]
                                    + sum(stream["quarantined"].values()))
            elif by_name[dep].kind == "pass" and node.kind == "pass":
                if (docs := _docs_from(node, by_name[dep], by_name)) is not None:
                    edge["docs"] = docs
            elif by_name[dep].kind == "pass" and node.kind != "tokenizer":
                edge["docs"] = _docs_kept(by_name[dep])
            edges.append(edge)
    if curriculum is not None:
        drawn.append({"name": "curriculum", "kind": "curriculum", "steps": [p.name for p in curriculum.phases],
                      "tasks": 0})
        tokens_from: dict[str, int] = {}
        for s in curriculum.streams:                 # node shards:web made the stream `web`, or `web.en`, `web.de` …
            origin = max((n for n in by_name if f"shards:{s.name}.".startswith(f"{n}.")), key=len, default="")
            tokens_from[origin] = tokens_from.get(origin, 0) + s.tokens
        edges += [{"from": origin, "to": "curriculum", "tokens": n} for origin, n in tokens_from.items() if origin]
    return {"nodes": drawn, "edges": edges}


def compared(nodes: list[dict[str, Any]], name: str, steps: list[str], against: Iterable[str],
             planned: Container[str]) -> list[dict[str, Any]]:
    """Return the edges to the barrier `name` from the nodes and folders `against`, whose indexes it reads. A folder is
    not one of the nodes of the plan (`planned`), so it is added to `nodes`. The entry `steps` of a folder lists the
    steps of all barriers that read it."""
    edges = []
    for other in against:
        edges.append({"from": other, "to": name, "against": True})
        if other not in planned:
            folder = next((node for node in nodes if node["name"] == other), None)
            if folder is None:
                nodes.append(folder := {"name": other, "kind": "folder", "steps": [], "tasks": 0})
            folder["steps"] = list(dict.fromkeys([*folder["steps"], *steps]))
    return edges


def _docs_read(node: NodeFigures) -> int:
    return sum(s["docs"] for s in node.counters.get("in", {}).values())


def _docs_kept(node: NodeFigures) -> int:
    return sum(s["docs"] for s in node.counters.get("kept", {}).values())


def _docs_from(node: NodeFigures, parent: NodeFigures, by_name: Mapping[str, NodeFigures]) -> int | None:
    """Return the number of documents that `node` reads from `parent`, both of them passes (groups of steps that run
    together). Returns None if this is unknown, because `node` has several parents and reads fewer documents than the
    parents kept."""
    parents = [by_name[d] for d in node.deps if d in by_name]
    if parents == [parent]:
        return _docs_read(node)
    counted = node.counters.get("in", {})
    direct = sum(counted.get(p.name.removeprefix("index:"), {}).get("docs", 0) for p in parents if p.kind == "index")
    kept = sum(_docs_kept(p) for p in parents if p.kind == "pass")
    return _docs_kept(parent) if _docs_read(node) - direct == kept else None


def _dropped(node: NodeFigures, prefix: str, *, with_prefix: bool) -> int:
    """Count the documents that stages of a pass (steps that run together) dropped. With `with_prefix`, only stages
    whose labels begin with `prefix` count; without it, only the other stages count."""
    return sum(n for label, stats in node.counters.get("stages", {}).items() if label.startswith(prefix) == with_prefix
               for by in stats["dropped"].values() for n in by.values())


def joined(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the graph of the plan with similar nodes joined into one. Similar nodes have the same kind, steps and (if
    they have one) `state`, and hand their documents to the same nodes. They are joined if there are more than ALIKE of
    them. Their counts are added up."""
    nodes, edges = list(document["nodes"]), list(document["edges"])
    for _ in range(3):        # repeated: when passes have been joined, the sources that they read may be joined, too
        after: dict[str, set[str]] = {n["name"]: set() for n in nodes}
        for edge in edges:
            after[edge["from"]].add(edge["to"])
        groups: dict[Any, list[dict[str, Any]]] = {}
        for node in nodes:
            alike = node["kind"], tuple(node["steps"]), node.get("state"), tuple(sorted(after[node["name"]]))
            groups.setdefault(alike, []).append(node)
        name_of: dict[str, str] = {}
        for group in groups.values():
            if len(group) > ALIKE:
                name = _unused(f"{group[0]['kind']}:{len(group)} alike", {*after, *name_of.values()})
                name_of |= dict.fromkeys((n["name"] for n in group), name)
        if not name_of:
            break
        nodes = _join_nodes(nodes, name_of)
        edges = _join_edges(edges, name_of)
    return {"nodes": nodes, "edges": edges}


def _unused(name: str, used: set[str]) -> str:
    """Return `name` for a node that joins several nodes; if `name` is in `used`, a number is appended. Such a name
    states only the kind and the number of the joined nodes, so two of them may be equal."""
    return next(n for i in itertools.count(1) if (n := name + (f" ({i})" if i > 1 else "")) not in used)


def _join_nodes(nodes: Iterable[dict[str, Any]], name_of: Mapping[str, str]) -> list[dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for node in nodes:
        name = name_of.get(node["name"], node["name"])
        into = out.setdefault(name, {**node, "name": name, "tasks": 0, "dropped": 0, "members": 0})
        for key in ("tasks", "dropped"):
            into[key] += node.get(key, 0)
        into["members"] += node.get("members", 1)
    return list(out.values())


def _join_edges(edges: Iterable[dict[str, Any]], name_of: Mapping[str, str]) -> list[dict[str, Any]]:
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for edge in edges:
        ends = name_of.get(edge["from"], edge["from"]), name_of.get(edge["to"], edge["to"])
        into = out.setdefault(ends, {"from": ends[0], "to": ends[1]})
        for key in ("docs", "tokens"):
            if key in edge:
                into[key] = into.get(key, 0) + edge[key]
        if edge.get("against"):
            into["against"] = True
    return list(out.values())
