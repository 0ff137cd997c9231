"""`tokenmill plan` says before a run what the run then does. Its statements are compared with the log of real small
runs."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.machine import usable_cores
from pipeline.plan import estimate
from pipeline.plan.estimate import describe_plan, measured, open_plan, survey_recipe
from pipeline.plan.inputs import InputError, list_source
from pipeline.plan.show import lines
from pipeline.plan.survey import survey
from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store, StoreError
from pipeline.store.log import Log
from pipeline.store.segment import CorruptLog
from stages.extract.html.step import Html
from stages.stage import Stage
from tests.corpus import pages, sentences, warc, write_warcs

RECIPE = """
version: 1
sources:
  web: {read: warc, path: crawl/*.warc.gz}
  docs: {read: text, path: docs}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [gopher_quality, pii]}
  deduped: {from: [clean, docs], steps: [{minhash: {verify: 0.75}}], priority: [docs, clean]}
tokenizer: {train: {kind: bpe, vocab: 600, from: deduped, sample: 50KB}}
shards:
  web: {from: deduped, where: {source: web}, longest: 128, val: 5%}
run: {partition: 60KB}
"""
DOWNSTREAM = {"deduped/minhash.1", "deduped", "tokenizer:", "shards:web"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with three WARC files of 60 pages in all, ten texts, the recipe, and the store of a run."""
    top = tmp_path_factory.mktemp("plan")
    write_warcs(top / "crawl", 60, 3)
    (top / "docs").mkdir()
    rng, prose = random.Random(7), sentences()
    for i in range(10):
        (top / "docs" / f"d{i}.txt").write_text(" ".join(rng.sample(prose, 20)))
    (top / "recipe.yaml").write_text(RECIPE)
    execute(top, top / "store")
    return top


def execute(site: Path, store: Path, *overrides: str) -> None:
    run_recipe(load_recipe(site / "recipe.yaml", list(overrides)), str(store),
               make_backend=make_backend("inline", 1, None))


def plan(site: Path, store: Path | None = None, *overrides: str) -> dict[str, Any]:
    return survey_recipe(load_recipe(site / "recipe.yaml", list(overrides)), str(store or site / "store"))


def node(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in document["nodes"] if r["name"] == name)


def shown(document: dict[str, Any]) -> str:
    return "\n".join(lines(document))


def really_ran(site: Path, tmp_path: Path, *overrides: str) -> dict[str, int]:
    """Run on a copy of the store. Returns {node: number of tasks that were committed}."""
    store = tmp_path / "copy"
    shutil.copytree(site / "store", store)
    before = {r.key for r in Log.read(Store(store)).records()}
    execute(site, store, *overrides)
    ran: dict[str, int] = {}
    for record in Log.read(Store(store)).records():
        if record.key not in before:
            name = record.node.rpartition("/")[0] or record.node           # 'deduped/minhash.1/bands', 'clean'
            ran[name] = ran.get(name, 0) + 1
    return ran


def holds(document: dict[str, Any], ran: dict[str, int]) -> None:
    """Check that what the plan promised is what happened."""
    promised, may = document["reruns"], set(document["waits"])
    assert set(promised) <= set(ran), "the plan named a node that did not run"
    assert set(ran) <= set(promised) | may, "a node ran that the plan did not name"
    for name, said in promised.items():
        if name not in may and not node(document, name)["more"]:
            assert ran[name] == said["tasks"], name
    assert not set(document["unchanged"]) & set(ran)


def test_nothing_run_yet(site, tmp_path):
    store = tmp_path / "new"
    document = plan(site, store)
    assert not store.exists(), "planning writes nothing"
    assert document["total"]["tasks_fresh"] == 0 and document["changes"] is None and document["measured"] == []
    assert document["inputs"]["docs"]["files"] == 10 and document["inputs"]["web"]["files"] == 3
    stored = sum(p.stat().st_size for p in (site / "crawl").iterdir())
    assert document["inputs"]["web"]["bytes"] == stored
    assert node(document, "extracted")["status"] in ("stale", "waits")
    assert node(document, "deduped:docs")["status"] == "stale"
    assert {r["name"] for r in document["nodes"]} >= {"extracted", "clean", *DOWNSTREAM}
    assert document["total"]["cpu_s"] > 0 and document["total"]["disk_bytes"] > 0
    said = shown(document)
    assert "typical speeds" in said and "extracted" in said and "minhash" in said


def test_order_steps_and_origins_are_those_of_the_recipe(site, tmp_path):
    document = plan(site, tmp_path / "new")
    names = [r["name"] for r in document["nodes"]]
    for row in document["nodes"]:
        assert all(names.index(d) < names.index(row["name"]) for d in row["deps"])
    clean = node(document, "clean")
    assert clean["steps"] == ["gopher_quality", "minhash_signature", "pii"] and clean["deps"] == ["extracted"]


def test_all_fresh(site, tmp_path):
    document = plan(site)
    assert document["reruns"] == {} and document["waits"] == []
    assert {r["status"] for r in document["nodes"]} == {"fresh"}
    assert document["total"]["tasks_stale"] == 0 and document["total"]["cpu_s"] == 0
    assert document["total"]["disk_bytes"] == 0
    assert document["changes"]["settings"] == []
    assert "everything is done already" in shown(document)
    assert really_ran(site, tmp_path) == {}


CURRICULUM = "{seed: 1, total: 20k, phases: [{name: all, until: 100%, sequence: 32, batch: 64, mix: {web: 1}}]}"


def test_what_changed_only_the_curriculum_or_the_training_runs_nothing_again(site, tmp_path):
    assert "nothing runs again" not in shown(plan(site)), "nothing has changed"
    said = shown(plan(site, None, f"curriculum={CURRICULUM}"))
    assert "what changed in curriculum\n" in said + "\n" and "writes the curriculum anew" in said
    assert "everything is done already" not in said and "cost:" not in said
    said = shown(plan(site, None, "train={schedule: {kind: wsd}}"))
    assert "what changed in train\n" in said and "when you train on that run" in said and "curriculum" not in said
    both = f"curriculum={CURRICULUM}", "train={schedule: {kind: wsd}}"
    assert "what changed in curriculum, train\n" in shown(plan(site, None, *both))
    assert really_ran(site, tmp_path, *both) == {}
    said = shown(plan(site, None, *both, "datasets.clean.steps.gopher_quality.min_doc_words=5"))
    assert "nothing runs again" not in said and "to run:" in said


def test_one_file_added(site, tmp_path):
    for name in ("crawl", "docs", "store"):
        shutil.copytree(site / name, tmp_path / name)               # with times: the same inputs at another place
    shutil.copy(site / "recipe.yaml", tmp_path)
    assert plan(tmp_path)["reruns"] == {}, "places of inputs are no part of any key"
    (tmp_path / "crawl" / "crawl-99.warc.gz").write_bytes(warc(pages(8, seed=9)))
    document = plan(tmp_path)
    extracted, clean = node(document, "extracted"), node(document, "clean")
    assert extracted["status"] == "partly" and 1 <= extracted["stale"] <= 2 < extracted["fresh"] + extracted["stale"]
    assert clean["status"] == "partly" and clean["stale"] == 0 and clean["pending"] == extracted["stale"]
    assert clean["partitions"] == extracted["partitions"]
    assert document["reruns"].keys() <= {"extracted", "index:web"} and set(document["waits"]) >= DOWNSTREAM
    assert "deduped:docs" in document["unchanged"]
    ran = really_ran(tmp_path, tmp_path / "x")
    holds(document, ran)
    assert ran["clean"] == extracted["stale"]


def test_a_changed_threshold_reruns_that_pass_and_asks_what_follows(site, tmp_path):
    change = "datasets.clean.steps.gopher_quality.min_stop_words=3"
    document = plan(site, None, change)
    clean = node(document, "clean")
    assert document["reruns"] == {"clean": {"tasks": clean["partitions"], "of": clean["partitions"]}}
    assert set(document["waits"]) == DOWNSTREAM
    assert set(document["unchanged"]) >= {"extracted", "deduped:docs"}
    assert [(c["key"], c["was"], c["now"]) for c in document["changes"]["settings"]] \
        == [("datasets.clean.steps[0].gopher_quality.min_stop_words", 2, 3)]
    said = shown(document)
    assert f"to run:    clean ({clean['partitions']} of {clean['partitions']})" in said
    assert "min_stop_words: 2 → 3" in said
    ran = really_ran(site, tmp_path, change)
    holds(document, ran)
    assert "extracted" not in ran and ran["clean"] == clean["partitions"]


def test_a_changed_decision_of_a_barrier_reruns_its_last_waves_only(site, tmp_path):
    change = "datasets.deduped.steps.minhash.verify=0.9"
    document = plan(site, None, change)
    assert document["reruns"].keys() == {"deduped/minhash.1"}
    barrier = node(document, "deduped/minhash.1")
    assert barrier["status"] == "partly" and barrier["fresh"] > 0 and barrier["more"]
    assert {"clean", "deduped:docs", "extracted"} <= set(document["unchanged"])
    holds(document, really_ran(site, tmp_path, change))


def test_a_changed_reader_config_reruns_that_source(site, tmp_path):
    change = "sources.web.max_bytes=900000"
    document = plan(site, None, change)
    assert document["reruns"].keys() <= {"index:web", "extracted"} and document["reruns"]
    assert node(document, "deduped:docs")["status"] == "fresh"
    assert node(document, "clean")["status"] == "waits"
    holds(document, really_ran(site, tmp_path, change))


def test_another_partition_size_is_planned_as_it_runs(site, tmp_path):
    change = "run.partition=200KB"
    document = plan(site, None, change)
    assert document["reruns"]
    assert (node(document, "extracted")["partitions"] or 0) < node(plan(site), "extracted")["partitions"]
    holds(document, really_ran(site, tmp_path, change))


def test_the_estimate_uses_measured_speeds_where_there_are_any(site):
    records = list(Log.read(Store(site / "store")).records())
    speeds = measured(records, least_bytes=1e3, least_cpu=0.0)
    assert {"html", "gopher_quality", "pii", "minhash", "shards", "tokenizer"} <= set(speeds.stages)
    stats = [s for r in records for label, s in r.counters.get("stages", {}).items() if label.endswith(":html")]
    expected = sum(s["bytes_in"] for s in stats) / sum(s["cpu_s"] for s in stats)
    assert speeds.of("html", Html())[0] == pytest.approx(expected)
    change = "datasets.extracted.steps.html.comments=true"
    recipe = load_recipe(site / "recipe.yaml", [change])
    there = open_plan(recipe, str(site / "store"))
    document = describe_plan(recipe, there, survey(there.nodes, there.log.get_all, there.fresh), speeds)
    assert "speeds measured in this store" in shown(document)
    extracted = node(document, "extracted")
    cost = extracted["cpu_s"] - estimate.START_CPU_S * min(extracted["stale"], usable_cores())
    really = sum(s["cpu_s"] for s in stats)
    assert 0.2 * really - 0.1 <= cost <= 5 * really + 0.1, "within the error of guessing what a WARC holds uncompressed"


def test_the_start_of_child_processes_is_counted_once_per_core_and_pass(site, monkeypatch):
    def costs(cores: int) -> dict[str, tuple[float, int, str, str]]:
        monkeypatch.setattr(estimate, "usable_cores", lambda: cores)
        document = plan(site, None, "datasets.clean.steps.gopher_quality.min_stop_words=3")
        return {row["name"]: (row["cpu_s"], row["stale"], row["kind"], row["status"]) for row in document["nodes"]}

    before = costs(0)
    for cores in (1, 64):
        for name, (cpu, stale, kind, status) in costs(cores).items():
            starts = 0 if kind != "pass" or status == "fresh" else min(max(stale, 1), cores)
            assert cpu == pytest.approx(before[name][0] + estimate.START_CPU_S * starts, abs=0.15), name
    assert any(row[1] > 1 for row in before.values())


def test_text_that_is_known_is_not_guessed(site):
    document = plan(site, None, "datasets.clean.steps.gopher_quality.min_stop_words=3")
    records = [r for r in Log.read(Store(site / "store")).records() if r.node == "extracted"]
    kept = sum(k["bytes"] for r in records for k in r.counters["kept"].values())
    assert node(document, "clean")["bytes_in"] == kept


class Odd(Stage):
    name = "odd"


def test_a_store_without_measurements_takes_what_steps_say_of_themselves():
    assert measured([]).of("html", Html()) == (5000 * 1000 / Html.cost_ms, Html.leaves) and not measured([]).stages
    assert measured([]).of("Odd", Odd()) == (estimate.UNKNOWN_SPEED, 1.0)
    own = estimate.Speeds(stages={"Odd": 1e6}, remaining={"Odd": 0.5})      # counters have the name of the class
    assert own.of("Odd", Odd()) == (1e6, 0.5)


@pytest.mark.parametrize(("change", "said"), [
    ("datasets.clean.steps.gopher_quality.min_stop_word=3", "did you mean 'min_stop_words'?"),
    ("datasets.clean.steps.gopher_qualty.min_stop_words=3", "did you mean 'gopher_quality'?"),
    ("sources.web.read=wrac", "did you mean 'warc'?"),
])
def test_recipe_errors_name_the_key(site, change, said):
    with pytest.raises(RecipeError) as e:
        plan(site, None, change)
    assert said in str(e.value) and change in str(e.value)


def test_inputs_that_are_not_there(site):
    with pytest.raises(InputError, match=r"source 'web': no file matches 'nowhere/\*\.warc\.gz'.*--input"):
        plan(site, None, "sources.web.path=nowhere/*.warc.gz")


def test_an_input_without_permission_is_planned_as_a_bad_file(site, monkeypatch):
    """It costs itself, not the run: that it cannot be read is part of what it is, until it can."""
    monkeypatch.setattr("pipeline.plan.inputs.os.access", lambda path, mode: not str(path).endswith("d3.txt"))
    listed = {f.path.rpartition("/")[2]: f.bad for f in list_source("docs", ["docs"], base=str(site))}
    assert listed.pop("d3.txt") == "no_permission" and set(listed.values()) == {""}


def test_a_file_is_no_store(site, tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match="is a file, not a store; choose another --store"):
        plan(site, tmp_path / "store")


def test_a_damaged_log_is_said_not_skipped(site, tmp_path):
    shutil.copytree(site / "store" / "log", tmp_path / "store" / "log")
    segment = max((tmp_path / "store" / "log").glob("*.json"))
    segment.write_bytes(segment.read_bytes()[:-20])
    with pytest.raises(CorruptLog, match="damaged"):
        plan(site, tmp_path / "store")


def test_changes_against_another_recipe_are_not_listed(site, tmp_path):
    (tmp_path / "other.yaml").write_text(RECIPE.replace("clean", "cleaned").replace("crawl/", f"{site}/crawl/")
                                         .replace("path: docs", f"path: {site}/docs"))
    assert survey_recipe(load_recipe(tmp_path / "other.yaml"), str(site / "store"))["changes"] is None
