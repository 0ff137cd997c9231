"""Metrics: they are computed from a snapshot of the progress, and Prometheus gets the figures of a real run on Ray."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.driver.metrics import KINDS, METRICS, OUTCOMES, kind_of, outcomes, samples
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.protocols import Running
from pipeline.engine.task import TaskSpec
from pipeline.plan.planner import Planner
from pipeline.plan.tokens import token_nodes
from pipeline.recipe import load_recipe
from pipeline.run import run_recipe
from pipeline.store.fs import Store
from pipeline.store.records import PartRecord
from tests.corpus import write_warcs
from tests.simulate.clock import VirtualClock

RECIPE = """
version: 1
sources: {web: {read: warc, path: crawl/*.warc.gz}}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [gopher_quality, pii]}
  deduped: {from: clean, steps: [{exact: {}}]}
tokenizer: {train: {kind: bpe, vocab: 600, from: deduped, sample: 100KB}}
shards: {web: {from: deduped, longest: 256, val: 5%}}
run: {partition: 100KB}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    top = tmp_path_factory.mktemp("site")
    write_warcs(top / "crawl", 80, 2)
    (top / "recipe.yaml").write_text(RECIPE)
    return top


def record(spec: TaskSpec, counters: dict) -> PartRecord:
    return PartRecord(spec.key, spec.task, spec.node, "a", {}, counters, wall_s=1.0)


def a_pass(seen: int, kept: int, dropped: int, lost: int) -> dict:
    return {"in": {"web": {"docs": seen, "bytes": 9}}, "kept": {"web": {"docs": kept, "bytes": 9}},
            "stages": {"0:a": {"dropped": {"short": {"web": dropped}}}}, "quarantined": {"crash": lost} if lost else {}}


def values(run: str, snapshot: dict, lost: int = 0) -> dict[tuple[str, ...], float]:
    found = {(m.name, *labels.values()): v for m, labels, v in samples(run, snapshot, lost)}
    assert len(found) == len(list(samples(run, snapshot, lost)))       # no series twice
    return found


def test_a_snapshot_becomes_tasks_by_state_and_documents_by_outcome():
    clock = VirtualClock()
    progress = Progress("quiet", clock=clock)
    specs = [TaskSpec(f"k{i}", "m:T", node, {}, weight=100) for i, node in
             enumerate(["index:web:0", "clean:1", "clean", "clean", "deduped/minhash.0", "shards:web", "tokenizer:"])]
    progress.planned(specs, {"k2": record(specs[2], a_pass(1000, 1000, 0, 0))})
    clock.time = 10.0
    progress.failed(specs[1], "exception", "no", True)
    progress.repeated(specs[1])
    progress.doubled(specs[3])
    progress.done(specs[1], record(specs[1], a_pass(50, 40, 7, 3)))
    progress.done(specs[5], record(specs[5], {"train": {"docs": 5}, "val": {"docs": 1}, "quarantined": {"hang": 1}}))
    progress.running(4, [Running(specs[3], 2.0, 7)])
    got = values("r", progress.snapshot(), lost=2)
    assert {k[3]: v for k, v in got.items() if k[:3] == ("tokenmill_tasks", "r", "pass")} == {
        "waiting": 0, "running": 1, "done": 2, "reused": 1}
    assert {k[3]: v for k, v in got.items() if k[:3] == ("tokenmill_documents", "r", "pass")} == {
        "in": 50, "kept": 40, "dropped": 7, "quarantined": 3}           # what was reused is not counted again
    assert {k[3]: v for k, v in got.items() if k[:3] == ("tokenmill_documents", "r", "shards")} == {
        "in": 7, "kept": 6, "dropped": 0, "quarantined": 1}
    for name, expected in (("attempts_failed", 1), ("attempts_retried", 1), ("stragglers", 1), ("tasks_completed", 1),
                           ("bytes", 100)):
        assert got[f"tokenmill_{name}", "r", "pass"] == expected
    assert got["tokenmill_nodes_lost", "r"] == 2
    assert got["tokenmill_slots", "r"] == 4 and got["tokenmill_run_active", "r"] == 1
    assert got["tokenmill_eta_seconds", "r"] > 0 and got["tokenmill_bytes_left", "r"] == 400
    assert {m.name for m, _, _ in samples("r", progress.snapshot())} == {m.name for m in METRICS}
    progress.stopping()
    stopping = values("r", progress.snapshot())
    assert stopping["tokenmill_run_active", "r"] == 1 and stopping["tokenmill_slots", "r"] == 4, "tasks still run"
    progress.close("failed")
    ended = values("r", progress.snapshot())
    assert ended["tokenmill_run_active", "r"] == ended["tokenmill_slots", "r"] == 0
    assert ended["tokenmill_tasks", "r", "pass", "running"] == ended["tokenmill_eta_seconds", "r"] == 0


def test_every_series_is_there_from_the_first_snapshot_on():
    progress = Progress("quiet")
    before = values("r", progress.snapshot())
    progress.planned([TaskSpec("k", "m:T", "shards:web", {}, weight=10)], {})
    assert before.keys() == values("r", progress.snapshot()).keys()
    assert len(before) < 80 and not any(v for k, v in before.items() if k[0] != "tokenmill_run_active")


def test_an_unknown_eta_is_not_a_number():
    progress = Progress("quiet")
    progress.planned([TaskSpec("k", "m:T", "clean", {}, weight=10)], {})
    assert math.isnan(values("r", progress.snapshot())["tokenmill_eta_seconds", "r"])


def test_tasks_that_read_no_documents_count_none():
    assert outcomes({"docs": 12, "in": {"web": {"docs": 3}}}) == dict.fromkeys(OUTCOMES, 0)


def test_kinds_of_nodes_are_those_of_the_plan(site, tmp_path):
    recipe = load_recipe(site / "recipe.yaml")
    planner = Planner(recipe, Store(tmp_path).read_checked)
    nodes = planner.nodes() + token_nodes(recipe, planner)
    assert {n.kind for n in nodes} == set(KINDS)
    assert {n.name: kind_of(n.name) for n in nodes} == {n.name: n.kind for n in nodes}


@pytest.fixture(scope="module")
def emitted(site, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The store of a run 'r', and the snapshots that it emitted."""
    store, snapshots = tmp_path_factory.mktemp("store"), []

    class Watched(InlineBackend):
        def emit(self, run, snapshot):
            snapshots.append(json.loads(json.dumps(snapshot)))

    run_recipe(load_recipe(site / "recipe.yaml"), str(store), make_backend=Watched, run="r", report=False)
    return store, snapshots


def test_what_a_run_emits_adds_up_to_its_records(emitted):
    store, snapshots = emitted
    check_documents(values("r", snapshots[-1]), store)


def check_documents(got: dict, store) -> None:
    """Check that the numbers of documents are those of the published datasets."""
    import pyarrow.parquet as pq

    kept, dropped = (sum(pq.read_metadata(p).num_rows for p in (store / kind).glob("*/part-*.parquet"))
                     for kind in ("datasets", "dropped"))
    documents = {k[3]: round(v) for k, v in got.items() if k[0] == "tokenmill_documents" and k[2] == "pass"}
    assert kept > 100 and dropped > 5
    assert documents["kept"] == kept and documents["dropped"] == dropped and documents["quarantined"] == 0
    assert documents["in"] == kept + dropped
    assert got["tokenmill_documents", "r", "shards", "kept"] > 40
    assert got["tokenmill_run_active", "r"] == 0


LINE = re.compile(r'^(ray_tokenmill_\w+)\{(.*)\} (\S+)$')


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Read our metrics from one of Ray's metrics ports, as {(name, run, kind, state or outcome): value}."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            own = [labels[k] for k in ("run", "kind", "state", "outcome") if k in labels]
            found[(match[1], *own)] = float(match[3])
    return found


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")
def test_a_run_on_ray_shows_its_figures_on_the_metrics_port(ray_session, emitted, tmp_path):
    from pipeline.engine.backends.ray_backend import RayBackend

    store, snapshots = emitted
    name, backend = f"metrics-{tmp_path.name}", RayBackend(Store(tmp_path / "store"), 1)
    for snapshot in snapshots:                           # of which Ray's counters add up the differences
        backend.emit(name, snapshot)
    expected = {(m.exported, *labels.values()): value for m, labels, value in samples(name, snapshots[-1], 0)}
    assert {name for name, *_ in expected} == {m.exported for m in METRICS}
    deadline = time.monotonic() + 240
    while True:
        [node], shown = ray_session.nodes(), {}
        with contextlib.suppress(OSError):               # whoever answers there is a process that starts, too
            shown = {k: v for k, v in scrape(node["MetricsExportPort"]).items() if k in expected}
        if {k: pytest.approx(v, abs=1e-9) for k, v in expected.items()} == shown:
            break
        assert time.monotonic() < deadline, {k: (v, shown.get(k)) for k, v in expected.items() if shown.get(k) != v}
        time.sleep(1)
    check_documents({(k[0].removeprefix("ray_").removesuffix("_total"), "r", *k[2:]): v for k, v in shown.items()},
                    store)
