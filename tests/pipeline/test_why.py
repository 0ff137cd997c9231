"""`tokenmill plan --why NODE` names the reason why a node has to run, and this is what a run then does."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.plan.estimate import open_plan, survey_recipe
from pipeline.plan.survey import survey
from pipeline.plan.why import UnknownNode, differences, explain, lines, stale_causes
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.filter.gopher_quality import GopherQuality
from tests.corpus import pages, sentences, warc, write_warcs

RECIPE = """
version: 1
sources:
  web: {read: warc, path: crawl/*.warc.gz}
  docs: {read: text, path: docs}
  log: {read: warc, path: log/*.warc.gz}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [gopher_quality, pii]}
  lines: {from: log, steps: [{html: {engine: resiliparse}}, pii]}
  deduped: {from: [clean, docs, lines], steps: [exact], priority: [docs, clean, lines]}
tokenizer: {train: {kind: bpe, vocab: 600, from: deduped, sample: 50KB}}
shards:
  web: {from: deduped, where: {source: web}, longest: 128, val: 5%}
run: {partition: 60KB}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with three WARC files, 30 texts, a WARC file of many partitions, the recipe, and the store of a run."""
    top = tmp_path_factory.mktemp("why")
    write_warcs(top / "crawl", 45, 3)
    (top / "docs").mkdir()
    (top / "log").mkdir()
    rng, prose = random.Random(7), sentences()
    for i in range(30):
        (top / "docs" / f"d{i:02d}.txt").write_text(" ".join(rng.sample(prose, 40)))
    (top / "log" / "a.warc.gz").write_bytes(warc(pages(80, seed=11)))
    (top / "recipe.yaml").write_text(RECIPE)
    execute(top)
    return top


@pytest.fixture
def site(made, tmp_path) -> Path:
    """A copy of `made` that a test may change. The files keep their times, which are part of their identity."""
    shutil.copytree(made, tmp_path / "site")
    return tmp_path / "site"


def execute(site: Path, *overrides: str) -> None:
    run_recipe(load_recipe(site / "recipe.yaml", list(overrides)), str(site / "store"),
               make_backend=make_backend("inline", 1, None), report=False)


def why(site: Path, name: str, *overrides: str) -> dict[str, Any]:
    return explain(load_recipe(site / "recipe.yaml", list(overrides)), str(site / "store"), name)


def causes(document: dict[str, Any]) -> list[str]:
    return [c["what"] for c in document["causes"]]


def ran(site: Path, *overrides: str) -> dict[str, int]:
    """Run the recipe. Returns {node: number of tasks that were committed}. Checks that this is what `plan` had
    promised."""
    promised = survey_recipe(load_recipe(site / "recipe.yaml", list(overrides)), str(site / "store"))
    before = {r.key for r in Log.read(Store(site / "store")).records()}
    execute(site, *overrides)
    found: dict[str, int] = {}
    for record in Log.read(Store(site / "store")).records():
        if record.key not in before:
            name = record.node.rpartition("/")[0] or record.node
            found[name] = found.get(name, 0) + 1
    assert set(promised["reruns"]) <= set(found)
    assert set(found) <= set(promised["reruns"]) | set(promised["waits"])
    return found


def test_everything_fresh_and_nothing_made(site):
    document = why(site, "clean")
    assert document["state"] == "fresh" and document["causes"] == [] and document["upstream"] == []
    assert "clean: is fresh" in lines(document)[0]
    (site / "store" / "runs" / document["compared_with"] / "provenance.json").unlink()
    [unknown] = causes(why(site, "clean", "datasets.clean.steps.gopher_quality.min_stop_words=3"))
    assert "did not record what it used" in unknown
    shutil.rmtree(site / "store")
    [cause] = why(site, "index:log")["causes"]
    assert cause["what"] == "nothing was run in this store yet" and cause["tasks"] == 1


def test_a_threshold_is_named_with_both_values_and_followed_downstream(site):
    change = "datasets.clean.steps.gopher_quality.min_stop_words=3"
    document = why(site, "clean", change)
    assert causes(document) == ["step.gopher_quality.min_stop_words: 2 → 3 (a threshold: verdicts are replayed)"]
    assert document["stale"] == document["causes"][0]["tasks"] > 0 and document["fresh"] == 0
    assert any("replay verdicts" in n for n in document["notes"])
    far = why(site, "deduped", change)
    assert far["state"] == "waits"
    shown = "\n".join(lines(far))
    assert "min_stop_words: 2 → 3" in shown, "the first cause is upstream"
    assert ran(site, change).keys() >= {"clean"}
    assert why(site, "clean", change)["state"] == "fresh"


def test_a_config_key_of_an_extractor_and_a_new_step(site):
    change = "datasets.extracted.steps.html.comments=true"
    [cause] = causes(why(site, "extracted", change))
    assert cause.startswith("step.html.comments: ") and cause.endswith(" → True")
    steps = why(site, "clean", "datasets.clean.steps=[gopher_quality, c4, pii]")
    assert any(c.startswith("steps: gopher_quality") and "c4" in c for c in causes(steps))
    assert not any(c.startswith("step.c4") for c in causes(steps)), "said once"


def test_another_version_of_a_stage_and_of_a_library(site, monkeypatch):
    monkeypatch.setattr(GopherQuality, "version", GopherQuality.version + 1)
    document = why(site, "clean")
    assert causes(document) == [f"step.gopher_quality version: {GopherQuality.version - 1} → {GopherQuality.version}"]
    assert ran(site)["clean"] == document["stale"]
    monkeypatch.setattr("stages.stage.library_versions", lambda names: dict.fromkeys(names, "99.0"))
    monkeypatch.setattr("pipeline.plan.provenance.library_versions", lambda names: dict.fromkeys(names, "99.0"))
    assert any("step.gopher_quality library spacy: " in c and "→ 99.0" in c for c in causes(why(site, "clean")))


def test_another_version_of_a_task_of_a_barrier_and_of_the_tokenizer(site, monkeypatch):
    from stages.dedup import exact

    monkeypatch.setattr(exact.ExactReduce, "version", 77)
    monkeypatch.setattr("pipeline.passes.fit_tokenizer.FitTokenizer.version", 78)
    [cause] = causes(why(site, "deduped/exact.1"))
    assert cause.startswith("task exact_reduce version: ") and cause.endswith(" → 77")
    assert any(c.startswith("task fit_tokenizer version: ") for c in causes(why(site, "tokenizer")))


def test_a_resource_file_with_other_content(site):
    banned = site / "banned.txt"
    banned.write_text("example.org\n")
    change = f"datasets.clean.steps=[{{url: {{integrated: false, domains: {banned}}}}}, gopher_quality, pii]"
    execute(site, change)
    assert why(site, "clean", change)["state"] == "fresh"
    banned.write_text("example.net\n")
    [cause] = causes(why(site, "clean", change))
    assert cause.startswith("step.url.domains (content of the file): ")


def test_an_added_file_reruns_itself_and_its_neighbours_only(site):
    before = {r.key for r in Log.read(Store(site / "store")).records() if r.node == "deduped:docs"}
    (site / "docs" / "d15b.txt").write_text(" ".join(random.Random(1).sample(sentences(), 40)))
    document = why(site, "deduped:docs")
    assert any(c.startswith("input files added in source 'docs': d15b.txt") for c in causes(document))
    assert 0 < document["stale"] <= 3 and document["fresh"] >= len(before) - 3, "its neighbours at most"
    assert sum(c["tasks"] for c in document["causes"]) == document["stale"]
    assert ran(site)["deduped:docs"] == document["stale"]


def test_a_removed_file_is_named_and_runs_nothing_that_did_not_hold_it(site):
    (site / "crawl" / "crawl-02.warc.gz").unlink()
    document = why(site, "extracted")
    assert document["stale"] <= 1
    found = ran(site)
    assert found.get("extracted", 0) == document["stale"]
    assert "index:web" not in found and "deduped:docs" not in found
    if document["stale"]:
        assert any("removed from source 'web': crawl-02.warc.gz" in c for c in causes(document))


def test_a_changed_file_is_named(site):
    path = site / "docs" / "d03.txt"
    path.write_text(path.read_text() + " And one more sentence.")
    document = why(site, "deduped:docs")
    assert causes(document)[0] == "input files changed in source 'docs': d03.txt"
    assert ran(site)["deduped:docs"] == document["stale"] <= 3
    os.utime(path, (1, 1))                                # another time is another file, until contents are hashed
    assert causes(why(site, "deduped:docs"))[0].startswith("input files changed")


def test_files_that_go_by_their_contents_now_have_not_changed(site):
    recipe = load_recipe(site / "recipe.yaml")
    document = explain(recipe, str(site / "store"), "deduped:docs", verify_inputs=True)
    assert document["stale"] > 0
    [cause] = causes(document)
    assert cause.startswith("input files of source 'docs' are compared by content now, but were compared by time in "
                            "that run")
    (site / "docs" / "d03.txt").write_text("Another text, of another size.")
    document = explain(recipe, str(site / "store"), "deduped:docs", verify_inputs=True)
    assert causes(document)[0] == "input files changed in source 'docs': d03.txt" and len(causes(document)) <= 2


def test_the_partition_size_reruns_what_reads_sources(site):
    document = why(site, "lines", "run.partition=30KB")
    index = document["upstream"][0]
    assert index["node"] == "index:log" and causes(index) == ["run.partition: 60000 → 30000"]
    found = ran(site, "run.partition=30KB")
    assert found["index:log"] == 1 and found["lines"] >= 2


def test_a_partition_inside_a_huge_file_is_resumed(site):
    """Lose the records of some partitions of one file, as a killed run would: those run again, no other."""
    log = Log.read(Store(site / "store"))
    inside = [r.key for r in log.records() if r.node == "lines"]
    assert len(inside) >= 4, "one file, many partitions"
    lost = set(inside[1:3])
    assert drop_records(site, lost) == 2
    assert "the log has no record under this key" in causes(why(site, "lines"))[0]
    (site / "store" / "runs" / why(site, "lines")["compared_with"] / "plan.json").unlink()      # it never ended
    document = why(site, "lines")
    assert (document["stale"], document["fresh"]) == (2, len(inside) - 2)
    assert "had the same settings, but ended before it reached this node" in causes(document)[0]
    assert all("a.warc.gz [" in label for label in document["causes"][0]["examples"])
    found = ran(site)
    assert found["lines"] == 2 and "index:log" not in found and set(found) == {"lines"}, \
        "parts that come out as they were leave what follows fresh"


def test_only_downstream_of_what_came_out_different(site):
    """A barrier's changed slice reruns the parts whose slice changed."""
    text = (site / "docs" / "d07.txt").read_text()
    path = site / "docs" / "d29.txt"
    path.write_text(text)                                             # now an exact duplicate
    parts = sum(r.node == "deduped" for r in Log.read(Store(site / "store")).records())
    document = why(site, "deduped")
    assert document["state"] == "waits"
    found = ran(site)
    assert 0 < found["deduped"] < parts


def test_a_run_with_other_settings_since_is_not_the_cause(site):
    """What the first run made is still there: settings that were tried and taken back make nothing stale."""
    first = why(site, "clean")["compared_with"]
    execute(site, "datasets.clean.steps.gopher_quality.min_stop_words=3", "run.partition=30KB")
    assert why(site, "clean")["state"] == why(site, "deduped:docs")["state"] == "fresh"
    (site / "docs" / "d15b.txt").write_text(" ".join(random.Random(1).sample(sentences(), 40)))
    document = why(site, "deduped:docs")
    assert document["compared_with"] == first and document["fresh"] > 0
    assert causes(document)[0].startswith("input files added in source 'docs': d15b.txt")
    assert not any("run.partition" in c for c in causes(document))
    assert ran(site)["deduped:docs"] == document["stale"]
    (site / "crawl" / "crawl-03.warc.gz").write_bytes(warc(pages(20, seed=77)))
    far = why(site, "clean")
    assert far["state"] == "waits"
    assert not any("min_stop_words" in line or "run.partition" in line for line in lines(far))


def test_nodes_by_the_names_people_use(site):
    assert why(site, "tokenizer")["node"] == "tokenizer:"
    assert why(site, "web")["node"] == "shards:web"
    with pytest.raises(UnknownNode, match=r"--why claen: there is no such node; did you mean 'clean'\?"):
        why(site, "claen")


def test_what_is_kept_of_a_run_holds_no_secret_and_no_place(site):
    run = why(site, "clean")["compared_with"]
    said = (site / "store" / "runs" / run / "provenance.json").read_text()
    assert str(site) not in said
    assert json.loads(said)["nodes"]["clean"]["step.gopher_quality.min_stop_words (threshold)"] == 2


def test_differences_in_words():
    assert differences({"a": 1}, {"a": 1}) == []
    assert differences({"a": 1, "signals": ["x"]}, {"a": 1, "signals": ["x", "y"]}) \
        == ["signals that steps before it write: y"]
    assert differences({"a": None}, {"a": [1, 2]}) == ["a: nothing → 1, 2"]


def drop_records(site: Path, keys: set[str]) -> int:
    """Rewrite the log without the records of `keys`. Returns how many were removed."""
    from pipeline.store.segment import decode_segment, encode_segment, facts

    dropped = 0
    for segment in sorted((site / "store" / "log").glob("*.json")):
        body = decode_segment(segment.read_bytes(), str(segment))
        if "records" in body:
            kept = [r for r in body["records"] if facts(r).key not in keys]
            dropped += len(body["records"]) - len(kept)
            body["records"] = kept
            segment.write_bytes(encode_segment(body))
    return dropped


def test_one_plan_gives_the_causes_of_all_nodes_that_are_stale_themselves(site):
    (site / "docs" / "d00.txt").write_text("another text")
    override = "datasets.clean.steps.gopher_quality.min_stop_words=3"
    plan = open_plan(load_recipe(site / "recipe.yaml", [override]), str(site / "store"))
    states = survey(plan.nodes, plan.log.get_all, plan.fresh, keep=True)
    stale = [state.node.name for state in states if state.stale]
    assert len(stale) == 2 < sum(bool(s.stale or s.pending or s.unknown) for s in states)
    assert stale_causes(plan, states, 20) == {name: why(site, name, override)["causes"] for name in stale}
    assert list(stale_causes(plan, states, 1)) == stale[:1] and stale_causes(plan, states, 0) == {}
