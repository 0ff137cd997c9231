"""Draws the plan of a run as a graph from top to bottom, with the number of documents on each arrow.

The nodes are the passes (groups of steps that run together), the deduplications and the other parts of the plan. Each
node is drawn one row below the lowest node that it gets documents from. An arrow that spans several rows runs between
the boxes of the rows that it crosses."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pipeline.base.humanize import count, plural
from pipeline.base.svg import Element, tag
from pipeline.report.graph import joined

#: box of a node, room for an arrow that passes between boxes, room between boxes, height of a row
BOX, TALL, LANE, GAP, ROW = 172, 44, 30, 18, 96
#: characters of a box's two lines
TITLE, LINE = 22, 26
#: most nodes that are drawn, after nodes that are alike were joined
MOST = 120

Place = tuple[str, int]                        # (name of a node, row); an arrow has one in each row that it crosses


def draw(document: Mapping[str, Any]) -> Element | None:
    """Draw the plan as a graph in SVG. Returns None if it has no nodes, or more than MOST of them. A node may have a
    `state`; its box then shows the word and has the class `state-WORD`."""
    graph = joined(document)
    edges = graph["edges"]
    linked = {end for e in edges for end in (e["from"], e["to"])}
    nodes = {n["name"]: n for n in graph["nodes"] if n["name"] in linked}
    if not nodes or len(nodes) > MOST:
        return None
    row = _rows(list(nodes), edges)
    chains = [_chain(e["from"], e["to"], row, number) for number, e in enumerate(edges)]
    x, width = _columns(nodes, row, chains)
    high = (max(row.values()) + 1) * ROW - (ROW - TALL) + 4
    out = []
    for edge, chain in zip(edges, chains, strict=True):
        out += _arrow(edge, [(x[place], place[1] * ROW) for place in chain])
    for name, node in nodes.items():
        out.append(_box(node, x[name, row[name]], row[name] * ROW + 2))
    words = "; ".join(f"{e['from']} to {e['to']}: {_label(e)}" for e in edges[:40] if _label(e))
    return tag("svg", *out, class_="dag", width=width, height=high, viewBox=f"0 0 {width} {high}", role="img",
               aria_label=f"The plan as a graph. {words}")


def _rows(names: list[str], edges: list[dict[str, Any]]) -> dict[str, int]:
    """Return the row of each node of the graph. It is one more than the largest row of the node's predecessors. A node
    without predecessors (a source) is placed right above the first node that reads it."""
    before: dict[str, list[str]] = {name: [] for name in names}
    for edge in edges:
        before[edge["to"]].append(edge["from"])
    row: dict[str, int] = {}
    for _ in names:                        # a node may come before one that it depends on, after nodes were joined
        for name in names:
            row[name] = max((row.get(b, 0) + 1 for b in before[name]), default=0)
    for name in names:
        after = [row[e["to"]] for e in edges if e["from"] == name]
        if not before[name] and after:
            row[name] = min(after) - 1
    return row


def _chain(start: str, end: str, row: Mapping[str, int], number: int) -> list[Place]:
    """Return the places that an arrow passes, one in each row from the node `start` to the node `end`. `number` is the
    number of the arrow."""
    return [(start, row[start]), *((f"\0{number}", r) for r in range(row[start] + 1, row[end])), (end, row[end])]


def _columns(nodes: Mapping[str, Any], row: Mapping[str, int],
             chains: list[list[Place]]) -> tuple[dict[Place, float], float]:
    """Return the horizontal centre of each place (a box, or a point where an arrow crosses a row), and the width of the
    picture. Within a row, the places are sorted by the mean position of their neighbours in the rows above and below,
    which avoids most crossings of arrows."""
    layers: list[list[Place]] = [[] for _ in range(max(row.values()) + 1)]
    for name in nodes:
        layers[row[name]].append((name, row[name]))
    beside: dict[Place, list[Place]] = {}
    for chain in chains:
        for place in chain[1:-1]:
            layers[place[1]].append(place)
        for one, two in pairwise(chain):
            beside.setdefault(one, []).append(two)
            beside.setdefault(two, []).append(one)
    rooms = [sum((BOX if name in nodes else LANE) + GAP for name, _ in layer) for layer in layers]
    width = float(max([*rooms, 2 * BOX]))
    x: dict[Place, float] = {}

    def lay(layer: list[Place], room: float) -> None:
        left = (width - room) / 2
        for place in layer:
            wide = (BOX if place[0] in nodes else LANE) + GAP
            x[place] = left + wide / 2
            left += wide

    for layer, room in zip(layers, rooms, strict=True):
        lay(layer, room)
    for turn in range(6):
        step = 1 if turn % 2 == 0 else -1
        for number in range(len(layers))[::step]:
            def middle(place: Place) -> float:
                near = beside.get(place, [])
                return sum(x[p] for p in near) / len(near) if near else x[place]

            layers[number].sort(key=middle)
            lay(layers[number], rooms[number])
    return x, width


def _arrow(edge: Mapping[str, Any], points: list[tuple[float, float]]) -> list[Element]:
    """Draw an arrow through `points`, each (horizontal centre, top of its row). Its label, such as a count of documents
    or tokens, stands beside its upper end."""
    (x, top), (end, _) = points[0], points[-1]
    y = top + TALL + 2
    path = f"M{x:.0f} {y:.0f}"
    for place, (to, row) in enumerate(points[1:], 1):
        stop = row - (6 if place == len(points) - 1 else 0)
        path += f"C{x:.0f} {y + 26:.0f} {to:.0f} {stop - 26:.0f} {to:.0f} {stop:.0f}"
        x, y = to, float(stop)
        if place < len(points) - 1:                       # straight past the boxes of this row
            y = float(row + TALL + 2)
            path += f"V{y:.0f}"
    out = [tag("path", tag("title", f"{edge['from']} → {edge['to']}: {_label(edge) or 'no documents'}"), d=path,
               class_="edge against" if edge.get("against") else "edge"),
           tag("path", class_="head", d=f"M{end:.0f} {y + 7:.0f}l-4.5 -8h9z")]
    if label := _label(edge):
        (first, top), (second, _) = points[0], points[1]
        out.append(tag("text", label, class_="edge-count", x=first + (second - first) * 0.3, y=top + TALL + 24,
                       text_anchor="middle"))
    return out


def _label(edge: Mapping[str, Any]) -> str:
    if "docs" in edge:
        return count(edge["docs"])
    if edge.get("against"):
        return "compared"
    return f"{count(edge['tokens'])} tokens" if "tokens" in edge else ""


def _box(node: Mapping[str, Any], x: float, y: float) -> Element:
    """Draw the box of a node: its name, and below it its steps and how many documents it dropped."""
    kind, name = node["kind"], node["name"]
    label = name.removeprefix("index:").removeprefix("shards:").removesuffix(":")
    if kind == "folder":
        label = name.rstrip("/").rpartition("/")[2]
    title = f"{node['members']} {_plural(kind)}" if node.get("members", 1) > 1 else label
    steps = ", ".join(node["steps"])
    line = {"index": "source", "folder": f"index of {steps}", "shards": "token stream",
            "curriculum": f"phases: {steps}"}.get(kind, " → ".join(node["steps"]) or kind)
    if node.get("dropped"):
        line = f"−{count(node['dropped'])} · {line}"
    state = node.get("state", "")
    if state:
        line = f"{state} · {line}"
    about = f"{name} ({kind}): {' → '.join(node['steps']) or kind}"
    about += "" if kind == "folder" else f"; {plural(node['tasks'], 'task')}"
    if node.get("dropped"):
        about += f"; dropped {plural(node['dropped'], 'document')}"
    about += f"; {state}" if state else ""
    return tag("g", tag("title", about),
               tag("rect", class_=f"box {kind}{f' state-{state}' if state else ''}", x=x - BOX / 2, y=y, width=BOX,
                   height=TALL, rx=7),
               tag("text", _short(title, TITLE), class_="t-name", x=x, y=y + 18, text_anchor="middle"),
               tag("text", _short(line, LINE), class_="axis", x=x, y=y + 34, text_anchor="middle"))


def _plural(kind: str) -> str:
    return {"index": "sources", "pass": "passes", "shards": "token streams"}.get(kind, f"{kind}s")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most - 1] + "…"
