"""If a node of a plan is fresh as a whole (its recorded results are up to date), its tasks are not looked at one by
one. If anything about the node differs, they are."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.task import TaskSpec
from pipeline.plan.estimate import open_plan
from pipeline.plan.fresh import FOLDER, FreshNodes, path_of
from pipeline.plan.nodes import Work
from pipeline.plan.provenance import node_ingredients
from pipeline.plan.survey import NodeState, survey
from pipeline.recipe import load_recipe
from pipeline.report.collect import collect
from pipeline.run import RunSummary, make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.garbage import remove_packed_segments, remove_unnamed
from pipeline.store.log import Fenced, Log
from stages.catalog import reader_class
from tests.corpus import sentences

RECIPE = """
version: 1
sources:
  docs: {read: text, path: docs}
  lines: {read: jsonl, path: lines.jsonl.gz}
datasets:
  read: {from: [docs, lines], steps: [pii]}
  deduped: {from: read, steps: [exact, gopher_quality]}
  clean: {from: deduped, steps: [{pii: {phones: true}}]}
run: {partition: 6KB}
"""
NODES = {"index:docs", "index:lines", "read", "deduped/exact.0", "deduped", "clean"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A site with texts, a file that cannot be split, a recipe, and the store of a run."""
    top = tmp_path_factory.mktemp("fresh")
    (top / "docs").mkdir()
    for i in range(12):
        write(top, i)
    rng, prose = random.Random(8), sentences()
    (top / "lines.jsonl.gz").write_bytes(gzip.compress(b"".join(
        json.dumps({"text": " ".join(rng.sample(prose, 40))}).encode() + b"\n" for _ in range(12))))
    (top / "recipe.yaml").write_text(RECIPE)
    execute(top, report=True)
    return top


@pytest.fixture
def site(made, tmp_path) -> Path:
    """A copy of `made` that a test may change. Published parts remain hard links."""
    os.system(f"cp -a {made} {tmp_path / 'site'}")
    return tmp_path / "site"


def write(site: Path, i: int) -> None:
    (site / "docs" / f"d{i:02d}.txt").write_text(" ".join(random.Random(i).sample(sentences(), 40)))


def execute(site: Path, *overrides: str, store: str = "store", report: bool = False) -> RunSummary:
    return run_recipe(load_recipe(site / "recipe.yaml", list(overrides)), str(site / store),
                      make_backend=make_backend("inline", 1, None), report=report)


def walked(site: Path, *overrides: str) -> tuple[set[str], dict[str, NodeState]]:
    """Make a plan. Returns (the nodes of whose tasks it asks the log, the state that it finds for each node)."""
    plan = open_plan(load_recipe(site / "recipe.yaml", list(overrides)), str(site / "store"))
    asked: set[str] = set()
    for node in plan.nodes:
        node.work = noting(node.name, node.work, asked)
    return asked, {state.node.name: state for state in survey(plan.nodes, plan.log.get_all, plan.fresh)}


def noting(name: str, work: Callable, asked: set[str]) -> Callable:
    """Wrap the work of a node. It adds the node's name to `asked` when somebody reads its tasks."""
    def named(specs: Iterable[TaskSpec]) -> Iterator[TaskSpec]:
        for spec in specs:
            asked.add(name)
            yield spec

    def noted(results: Mapping[str, Any]) -> Work:
        going = work(results)
        try:
            specs = next(going)
            while True:
                specs = going.send((yield named(specs)))
        except StopIteration as stop:
            return stop.value

    return noted


def published(site: Path, store: str = "store") -> dict[str, str]:
    return {name: dataset_hash(Store(site / store), name) for name in ("read", "deduped", "clean")}


def same_as_anew(site: Path, *overrides: str) -> None:
    """Check that what is published equals what a run into an empty store publishes."""
    execute(site, *overrides, store="anew")
    assert published(site) == published(site, "anew")


def retire(site: Path, node: str) -> None:
    with Log.open(Store(site / "store")) as log:
        record = next(r for r in log.records() if r.node == node)
        assert log.retire(record.key, record.attempt, "a test wants it")


def test_an_unchanged_run_walks_no_node_and_says_the_same(site):
    before = {name: (site / "store" / "runs" / name).stat() for name in os.listdir(site / "store" / "runs")}
    [run] = before
    report = json.loads((site / "store/report.json").read_text())
    progress = json.loads((site / f"store/runs/{run}/progress.json").read_text())
    tasks = (site / f"store/runs/{run}/tasks.parquet").read_bytes()
    folder = (site / "store/datasets/clean").stat().st_ino
    asked, states = walked(site)
    assert asked == set() and states.keys() == NODES
    assert not any(s.stale or s.pending or s.unknown for s in states.values())

    first = walked_anew(site)
    assert {n: (s.fresh, s.weight_fresh, s.sums.rows, s.sums.counters) for n, s in states.items()} == \
        {n: (s.fresh, s.weight_fresh, s.sums.rows, s.sums.counters) for n, s in first.items()}

    summary = execute(site, report=True)
    assert summary.executed == 0 and summary.reused == len(Log.read(Store(site / "store")))
    assert "" not in json.loads((site / f"store/runs/{run}/progress.json").read_text())["nodes"]
    assert (site / "store/datasets/clean").stat().st_ino == folder, "it was published again"
    assert (site / f"store/runs/{run}/tasks.parquet").read_bytes() == tasks
    again = json.loads((site / "store/report.json").read_text())
    assert {**again, "made": None} == {**report, "made": None}, "the attempt began later"
    assert any("cannot be split" in warning for warning in summary.warnings)
    again = json.loads((site / f"store/runs/{run}/progress.json").read_text())
    for name, node in progress["nodes"].items():
        assert [again["nodes"][name][k] for k in ("parts", "done", "bytes", "bytes_done", "docs", "quarantined")] == \
            [node[k] for k in ("parts", "done", "bytes", "bytes_done", "docs", "quarantined")]
        assert again["nodes"][name]["reused"] == node["parts"]


def walked_anew(site: Path) -> dict[str, NodeState]:
    """Return the states that a plan finds when it looks at the tasks of every node."""
    plan = open_plan(load_recipe(site / "recipe.yaml", []), str(site / "store"))
    return {s.node.name: s for s in survey(plan.nodes, plan.log.get_all)}


def test_the_report_adds_up_records_as_the_run_did(site):
    store = Store(site / "store")
    [run] = os.listdir(site / "store/runs")
    document = json.loads(json.dumps(collect(store, run, Log.read(store).get)))
    assert {**document, "made": None} == {**json.loads(store.read("report.json")), "made": None}, "the store was moved"


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "remove"])
def test_a_damaged_file_of_a_node_costs_time_only(site, harm):
    for number, path in enumerate(sorted((site / "store" / FOLDER).iterdir())):
        data = bytearray(path.read_bytes())
        if harm == "flip":
            at = (7 + 101 * number) % len(data)
            data[at] ^= 4
        path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-16]), "empty": b"", "remove": b""}[harm])
        if harm == "remove":
            path.unlink()
    asked, _ = walked(site)
    assert asked >= {"read", "deduped", "clean"}
    summary = execute(site)
    assert summary.executed == 0
    assert walked(site)[0] == set(), "the files are there again"


@pytest.mark.parametrize("node", ["read", "deduped", "clean"])
def test_a_retired_record_is_made_anew(site, node):
    """The file of its node, and those of all others, are older than the retirement."""
    retire(site, node)
    asked, states = walked(site)
    assert node in asked and states[node].stale == 1
    before = published(site)
    assert execute(site).executed >= 1
    assert published(site) == before
    assert walked(site)[0] == set()


def test_a_store_that_was_taken_back_is_not_taken_for_what_it_was(site):
    """The log of a backup, with the files of nodes that ended later. It then grows past the segment they name."""
    shutil.copytree(site / "store/log", site / "log")
    write(site, 90)
    execute(site)
    nodes = {p.name: p.read_bytes() for p in (site / "store" / FOLDER).iterdir()}
    segments = len(list((site / "store/log").glob("0*.json")))
    shutil.rmtree(site / "store/log")
    shutil.copytree(site / "log", site / "store/log")
    asked, states = walked(site)
    assert "read" in asked and states["read"].stale > 0, "the log is shorter than it was"
    while len(list((site / "store/log").glob("0*.json"))) <= segments:
        Log.open(Store(site / "store")).close()
    assert {p.name: p.read_bytes() for p in (site / "store" / FOLDER).iterdir()} == nodes
    asked, states = walked(site)
    assert "read" in asked and states["read"].stale > 0, "the log is another one"
    execute(site)
    same_as_anew(site)


def test_an_added_file_is_read_and_goes_through_every_node_behind(site):
    """Only the first nodes see the list of files: the others have to see that results before them are others."""
    write(site, 91)
    asked, states = walked(site)
    assert "read" in asked and states["read"].stale and "index:lines" not in asked
    execute(site)
    same_as_anew(site)
    assert walked(site)[0] == set()


def test_a_removed_and_a_changed_file_are_noticed(site):
    (site / "docs/d03.txt").unlink()
    write(site, 4)
    (site / "docs/d04.txt").write_text((site / "docs/d05.txt").read_text() + " More of it.")
    execute(site)
    same_as_anew(site)


def test_a_changed_threshold_walks_what_it_changes(site):
    change = "datasets.clean.steps.pii.ipv6=true"
    asked, _ = walked(site, change)
    assert asked == {"clean"}
    execute(site, change)
    same_as_anew(site, change)


def test_results_of_fresh_nodes_are_there_for_others(site):
    """The pass behind the barrier is walked; the barrier and what it read are fresh."""
    change = "datasets.deduped.steps.gopher_quality.min_doc_words=720"
    asked, states = walked(site, change)
    assert {n for n in asked if not n.startswith("clean")} == {"deduped"} and states["deduped/exact.0"].stale == 0
    execute(site, change)
    same_as_anew(site, change)


def test_another_version_of_the_code_walks_every_node(site):
    plan = open_plan(load_recipe(site / "recipe.yaml", []), str(site / "store"))
    ingredients = node_ingredients(plan.planner, plan.nodes)
    same, other = (FreshNodes(plan.log, ingredients, [], **code) for code in ({}, {"code": "another"}))
    assert all(same.find(node) for node in plan.nodes)
    assert not any(other.find(node) for node in plan.nodes)


def test_a_plan_that_read_the_log_before_a_run_ended_believes_no_file_of_that_run(site):
    plan = open_plan(load_recipe(site / "recipe.yaml", []), str(site / "store"))
    write(site, 92)
    execute(site)
    states = {state.node.name: state for state in survey(plan.nodes, plan.log.get_all, plan.fresh)}
    assert states["read"].stale > 0, "the log as it was read lacks a record"


def test_a_collected_record_is_made_anew(site):
    shutil.rmtree(site / "store/runs")
    with Log.open(Store(site / "store")) as log:
        assert remove_unnamed(Store(site / "store"), log).records
    assert not list((site / "store" / FOLDER).iterdir())
    execute(site)
    same_as_anew(site)


def test_a_driver_that_was_taken_over_writes_no_file(site):
    store = Store(site / "store")
    plan = open_plan(load_recipe(site / "recipe.yaml", []), str(site / "store"))
    node, sums = plan.nodes[0], walked_anew(site)[plan.nodes[0].name].sums
    before = store.read(path_of(node.name))
    with Log.open(store) as first, Log.open(store, takeover=True):
        fresh = FreshNodes(first, {}, [])
        with pytest.raises(Fenced):
            fresh.ended(node, sums)
    assert store.read(path_of(node.name)) == before


@pytest.mark.parametrize("harm", ["part gone", "part replaced", "manifest", "one more", "marker"])
def test_what_is_published_is_made_whole_again(site, harm):
    folder, before = site / "store/datasets/clean", published(site)
    names = sorted(os.listdir(folder))
    part = next(p for p in folder.iterdir() if p.suffix == ".parquet" and p.stat().st_size)
    if harm == "part gone":
        part.unlink()
    elif harm == "part replaced":
        data = part.read_bytes()
        part.unlink()
        part.write_bytes(data[:-1] + b"x")
    elif harm == "manifest":
        data = (folder / ".manifest").read_bytes()
        (folder / ".manifest").unlink()
        (folder / ".manifest").write_bytes(data[:-1])
    elif harm == "one more":
        shutil.copy(part, folder / "part-999999-0.parquet")
    else:
        (site / "store/nodes/clean.published").write_bytes(b"{")
    assert execute(site).executed == 0
    assert sorted(os.listdir(folder)) == names and published(site) == before


def pack(site: Path) -> None:
    """Put all segments of the log into packs, and remove those segments that may be removed."""
    with Log.open(Store(site / "store"), threaded=False, pack_segments=1) as log:
        log.tend()
    with Log.open(Store(site / "store"), threaded=False) as log:
        assert remove_packed_segments(log) > 0


def test_a_node_stays_fresh_when_its_segments_lie_in_packs_alone(site):
    pack(site)
    assert walked(site)[0] == set()


def test_a_record_that_was_retired_before_the_nodes_ended_makes_none_of_them_walked(site):
    retire(site, "read")
    execute(site)                                            # the record is made anew, and every node ends again
    assert walked(site)[0] == set()
    pack(site)
    assert walked(site)[0] == set(), "a pack does not move it behind their ends"
    retire(site, "read")
    pack(site)
    assert walked(site)[0] >= {"read"}


@pytest.mark.parametrize(("pieces", "warned"), [(2, False), (3, False), (6, True)])
def test_a_file_that_cannot_be_split_is_warned_of_if_it_is_many_partitions_long(site, pieces, warned):
    file = site / "lines.jsonl.gz"
    expected = file.stat().st_size * reader_class("jsonl")({}).expansion(file.name)
    summary = execute(site, f"run.partition={int(expected / pieces)}", store="other")
    assert any("cannot be split" in warning for warning in summary.warnings) is warned
    [run] = (site / "other/runs").iterdir()
    assert any(node["name"] == "index:lines" and node["tasks"] for node in json.loads(
        (run / "plan.json").read_text())["nodes"]), "it was looked at"
