"""The plan of a run as a picture: similar nodes are joined, counts are on the arrows, and boxes do not overlap."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations
from typing import Any

import pytest

from pipeline.engine.driver.sums import NodeSums
from pipeline.report.dag import BOX, draw
from pipeline.report.graph import graph, joined
from pipeline.report.nodes import NodeFigures
from pipeline.report.schema_figures import Graph


def node(name: str, kind: str = "pass", steps: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "steps": list(steps), "tasks": 1, **more}


def many(sources: int) -> dict[str, Any]:
    """Return a plan of `sources` sources with a pass each, all compared by one barrier."""
    nodes = [node(f"index:s{i}", "index") for i in range(sources)]
    nodes += [node(f"d:s{i}", steps=("hash",), dropped=2) for i in range(sources)]
    nodes += [node("d/exact.1", "barrier", ("exact",), dropped=7), node("d", steps=("apply exact",))]
    edges = [e for i in range(sources) for e in ({"from": f"index:s{i}", "to": f"d:s{i}", "docs": 10 + i},
                                                 {"from": f"d:s{i}", "to": "d/exact.1", "docs": 8 + i})]
    return {"nodes": nodes, "edges": [*edges, {"from": "d/exact.1", "to": "d", "docs": 5}]}


def passed(name: str, deps: list[str], read: dict[str, int], kept: dict[str, int]) -> NodeFigures:
    counters = {"in": {s: {"docs": n} for s, n in read.items()}, "kept": {s: {"docs": n} for s, n in kept.items()}}
    return NodeFigures({"name": name, "kind": "pass", "dataset": name, "steps": [], "deps": deps, "publishes": True},
                       lambda: iter(()), NodeSums(counters=counters))


@pytest.mark.parametrize(("deps", "read", "docs"), [
    (["one"], {"a": 400, "b": 100}, [500]), (["one"], {"b": 100}, [100]),
    (["one", "two"], {"a": 400, "b": 107}, [500, 7]), (["one", "two"], {"b": 107}, [None, None]),
    (["index:c", "one"], {"a": 400, "b": 100, "c": 3}, [3, 500]), (["index:c", "one"], {"b": 100, "c": 3}, [3, None])])
def test_an_arrow_says_what_the_second_pass_takes(deps, read, docs):
    """A `where` may leave out documents of the first."""
    index = NodeFigures({
        "name": "index:c",
        "kind": "index",
        "dataset": "",
        "steps": [],
        "deps": [],
        "publishes": False
    }, lambda: iter(()), NodeSums())
    nodes = [index, passed("one", [], {}, {"a": 400, "b": 100}), passed("two", [], {}, {"b": 7}),
             passed("five", deps, read, read)]
    edges = graph(nodes, {}, None)["edges"]
    assert [(e["from"], e.get("docs")) for e in edges] == list(zip(deps, docs, strict=True))


def test_a_deduplication_has_dotted_arrows_from_what_it_is_compared_with():
    """An arrow `against` says no number: no document takes this way. A folder that several steps read is one box."""
    def barrier(name: str, deps: list[str], against: list[str]) -> NodeFigures:
        return NodeFigures({"name": name, "kind": "barrier", "dataset": "", "steps": ["exact"], "deps": deps,
                            "publishes": False, "against": against}, lambda: iter(()), NodeSums())

    minhash = barrier("new/minhash.1", ["new:1"], ["/x/<may>.index/"])
    minhash.steps = ["minhash"]
    both = [n for n in graph([barrier("a/exact.1", [], ["/x/<may>.index/"]), minhash], {}, None)["nodes"]
            if n["kind"] == "folder"]
    assert both == [{"name": "/x/<may>.index/", "kind": "folder", "steps": ["exact", "minhash"], "tasks": 0}]
    nodes = [passed("old:1", [], {"a": 9}, {"a": 9}), barrier("old/exact.1", ["old:1"], ["/x/<may>.index/"]),
             passed("old", ["old:1", "old/exact.1"], {"old": 9}, {"a": 9}),
             passed("new:1", [], {"b": 4}, {"b": 4}),
             barrier("new/exact.1", ["new:1"], ["old/exact.1", "/x/<may>.index/"]),
             passed("new", ["new:1", "new/exact.1"], {"new": 4}, {"b": 4})]
    document = graph(nodes, {}, None)
    folder = {"name": "/x/<may>.index/", "kind": "folder", "steps": ["exact"], "tasks": 0}
    assert [n for n in document["nodes"] if n["kind"] == "folder"] == [folder]
    assert [(e["from"], e["to"]) for e in document["edges"] if e.get("against")] == [
        ("/x/<may>.index/", "old/exact.1"), ("old/exact.1", "new/exact.1"), ("/x/<may>.index/", "new/exact.1")]
    assert [(e["from"], e["to"], e["docs"]) for e in document["edges"] if not e.get("against")] == [
        ("old:1", "old/exact.1", 9), ("old/exact.1", "old", 9), ("new:1", "new/exact.1", 4), ("new/exact.1", "new", 4)]
    svg = str(draw(document))
    tree = ET.fromstring(svg)
    dotted = [path for path in tree.iter() if path.get("class") == "edge against"]
    assert [path[0].text for path in dotted] == [f"{a} → {b}: compared" for a, b in (
        ("/x/<may>.index/", "old/exact.1"), ("old/exact.1", "new/exact.1"), ("/x/<may>.index/", "new/exact.1"))]
    names = [text.text for text in tree.iter() if text.get("class") == "t-name"]
    assert "<may>.index" in names and "index of exact" in svg
    Graph.model_validate(document)


def test_nodes_that_are_alike_are_joined_and_their_counts_added_up():
    few = joined(many(3))
    assert len(few["nodes"]) == 8 and len(few["edges"]) == 7
    graph = joined(many(500))
    assert [(n["kind"], n["members"], n["dropped"]) for n in graph["nodes"]] == [
        ("index", 500, 0), ("pass", 500, 1000), ("barrier", 1, 7), ("pass", 1, 0)]
    assert [e["docs"] for e in graph["edges"]] == [sum(10 + i for i in range(500)), sum(8 + i for i in range(500)), 5]


def boxes(drawn: ET.Element) -> list[tuple[float, float]]:
    return [(float(r.get("x", 0)), float(r.get("y", 0))) for r in drawn.iter("rect")]


def test_boxes_stand_apart_and_inside_the_picture():
    graph = many(4)
    graph["nodes"].append(node("shards:x", "shards"))
    graph["edges"].append({"from": "d:s1", "to": "shards:x"})
    graph["edges"] += [{"from": "index:s0", "to": "shards:x", "docs": 3}, {"from": "d", "to": "shards:x", "docs": 5}]
    drawn = ET.fromstring(draw(graph) or "")
    places = boxes(drawn)
    assert len(places) == 11
    assert all(abs(ax - bx) >= BOX or abs(ay - by) >= 40 for (ax, ay), (bx, by) in combinations(places, 2))
    width = float(drawn.get("width", 0))
    assert all(0 <= x <= width - BOX for x, _ in places)
    tops = {t.text: float(t.get("y", 0)) for t in drawn.iter("text")}
    assert tops["s1"] < tops["d:s1"] < tops["d/exact.1"] < tops["d"] < tops["x"], "from top to bottom"
    assert len([p for p in drawn.iter("path") if p.get("class") == "head"]) == len(graph["edges"])


def test_what_is_empty_or_too_much_is_not_drawn():
    assert draw({"nodes": [], "edges": []}) is None
    assert draw({"nodes": [node("alone")], "edges": []}) is None
    wide = {"nodes": [node(f"n{i}", steps=(str(i),)) for i in range(200)],
            "edges": [{"from": f"n{i}", "to": f"n{i + 1}", "docs": 1} for i in range(199)]}
    assert draw(wide) is None


def test_names_are_escaped():
    evil = "<script>alert(1)</script>"
    drawn = draw({"nodes": [node(evil), node("b", steps=(evil,))], "edges": [{"from": evil, "to": "b", "docs": 3}]})
    assert drawn is not None and "<script" not in drawn and ET.fromstring(drawn) is not None


def test_groups_of_nodes_that_are_alike_stay_apart_by_state_and_by_what_they_lead_to():
    nodes = [node(f"index:{name}{i}", "index", state=state) for name, state in (
        ("a", "fresh"), ("b", "fresh"), ("c", "stale")) for i in range(6)]
    nodes += [node(name, steps=(name,), state="stale") for name in ("x", "y")]
    edges = [{"from": n["name"], "to": "y" if ":b" in n["name"] else "x", "docs": 1} for n in nodes[:-2]]
    graph = joined({"nodes": nodes, "edges": edges})
    assert [(n["members"], n["state"]) for n in graph["nodes"][:3]] == [(6, "fresh"), (6, "fresh"), (6, "stale")]
    assert sorted((e["to"], e["docs"]) for e in graph["edges"]) == [("x", 6), ("x", 6), ("y", 6)]


def test_a_box_says_its_state():
    nodes = [node("index:a", "index", state="fresh"), node("a", steps=("<b>",), state="stale", dropped=2), node("b")]
    edges = [{"from": "index:a", "to": "a"}, {"from": "a", "to": "b"}]
    svg = draw({"nodes": nodes, "edges": edges})
    assert svg is not None and 'class="box index state-fresh"' in svg and 'class="box pass state-stale"' in svg
    assert "stale · −2 · &lt;b&gt;" in svg and 'class="box pass"' in svg, "a report's boxes have no state"
