"""The assets page of a run: what is fresh, what each node of the plan made and cost, and what the checks of the
published documents find."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.base.clock import Clock
from pipeline.base.visible import visible
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.service.asset_checks import MANIFEST_BYTES, dataset_checks
from pipeline.service.asset_figures import read_figures
from pipeline.service.duck import Stop, TooDear
from pipeline.service.plans import KEPT_S, Plans
from pipeline.store.errors import EnvironmentFailure
from pipeline.store.fs import Store
from tests import commands
from tests.corpus import sentences
from tests.service.conftest import PATIENT_S, pass_time, problem, write_run
from tests.service.test_pages import EVIL, VIEWER, client_of, links, read, text_of

pytestmark = pytest.mark.usefixtures("checks_here")
RECIPE = """
version: 1
sources:
  web: {read: jsonl, path: web}
  docs: {read: text, path: docs}
datasets:
  clean: {from: web, steps: [{gopher_quality: {min_doc_words: 20, min_stop_words: 2}}]}
  deduped: {from: [clean, docs], steps: [exact, pii]}
run: {partition: 2KB, max_error_rate: 50%}
"""
API, PAGE = "/api/v1/stores/s/runs/first/assets", "/stores/s/runs/first/assets"
CHECKS = ["documents", "files", "content", "quarantine", "warnings"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store after a run. Its source `docs` lost most of its documents, because they are equal, and its source `web`
    has a line that is no JSON."""
    top = tmp_path_factory.mktemp("assets")
    prose = sentences()
    for folder in ("web", "docs"):
        (top / folder).mkdir()
    rows = [{"text": "\n".join(prose[i:i + 9])} for i in range(20)] + [{"text": f"short {i}"} for i in range(3)]
    (top / "web" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n")
    for i in range(8):
        (top / "docs" / f"{i}.txt").write_text("\n".join(prose[40:48] if i < 7 else prose[60:68]))
    (top / "recipe.yaml").write_text(RECIPE)
    execute(top)
    return top


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` that a test may change. Its run has read the inputs of `made`; `execute` makes it read its
    own."""
    shutil.copytree(made, tmp_path / "site")
    return tmp_path / "site"


def execute(site: Path, run: str = "first", *overrides: str) -> None:
    run_recipe(load_recipe(site / "recipe.yaml", list(overrides)), str(site / "store"), run=run,
               make_backend=make_backend("inline", 1, None))


def client(site: Path, role: str = "operator", **settings: Any) -> TestClient:
    return client_of({"s": site / "store"}, role, backend="inline",
                     **{"allowed_roots": (str(site.parents[1]),), **settings})


def ask(site: Path, role: str = "operator", run: str = "first", **settings: Any) -> dict[str, Any]:
    answer = client(site, role, **settings).get(f"/api/v1/stores/s/runs/{run}/assets")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def nodes_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in document["nodes"]}


def results(document: dict[str, Any], dataset: str) -> dict[str, str]:
    return {check["name"]: check["result"] for check in nodes_of(document)[dataset]["checks"]}


def message(document: dict[str, Any], dataset: str, name: str) -> str:
    return next(check["message"] for check in nodes_of(document)[dataset]["checks"] if check["name"] == name)


def edit_report(site: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change report.json: `change` changes the document that it gets, or returns another one."""
    path = site / "store/runs/first/report.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(change(document) or document))


def test_deduplications_show_what_they_are_compared_with(made, tmp_path):
    """The nodes `against`: another deduplication of the recipe, and the folder of an index. They are the same after the
    run (from its report) and before a run (from the plan alone)."""
    site = tmp_path / "site"
    shutil.copytree(made, site)
    (site / "recipe.yaml").write_text(RECIPE.partition("datasets:")[0] + "datasets:\n"
                                      "  old: {from: web, steps: [exact]}\n"
                                      "  new: {from: docs, steps: [{exact: {against: [old, may.index]}}]}\n")
    (site / "may.yaml").write_text(RECIPE.partition("datasets:")[0] + "datasets: {may: {from: web, steps: [exact]}}\n")
    run_recipe(load_recipe(site / "may.yaml"), str(site / "store"), run="may",
               make_backend=make_backend("inline", 1, None))
    folder = site / "may.index"
    done = commands.command("pipeline.cli", "dedup", "index", "may", "may", "--out", str(folder), "--store",
                            str(site / "store"), "--backend", "inline")
    assert done.returncode == 0, done.stderr
    execute(site, "grown")
    document = ask(site, run="grown")
    assert document["report"] and document["planned"]
    compared = [{"from": "old/exact.1", "to": "new/exact.1", "against": True},
                {"from": str(folder), "to": "new/exact.1", "against": True}]
    edges = [edge for edge in document["edges"] if edge.get("against")]
    assert edges == compared
    node = nodes_of(document)[str(folder)]
    assert (node["kind"], node["steps"], node["state"], node["tasks"]) == ("folder", ["exact"], None, 0)
    assert nodes_of(document)["new/exact.1"]["documents"] == {"in": 8, "kept": 2, "dropped": 6}
    (site / "store/runs/grown/report.json").unlink()
    document = ask(site, run="grown")
    assert not document["report"]
    assert [edge for edge in document["edges"] if edge.get("against")] == compared
    assert nodes_of(document)[str(folder)]["kind"] == "folder"
    assert "compared" in client(site).get("/stores/s/runs/grown/assets").text


# -- what a run has made ---------------------------------------------------------------------------------------------
def test_after_a_run_all_is_fresh_and_every_document_is_accounted_for(made):
    document = ask(made)
    assert document["problems"] == [] and document["report"] and document["planned"]
    nodes = nodes_of(document)
    assert {name: node["state"] for name, node in nodes.items()} == dict.fromkeys(
        ["index:web", "index:docs", "clean", "deduped:docs", "deduped/exact.1", "deduped"], "fresh")
    assert nodes["clean"]["documents"] == {"in": 23, "kept": 20, "dropped": 3}
    assert nodes["deduped/exact.1"]["documents"] == {"in": 28, "kept": 22, "dropped": 6}
    assert nodes["deduped"]["documents"] == {"in": 22, "kept": 22, "dropped": 0}
    assert nodes["deduped:docs"]["documents"] == {"in": 8, "kept": 8, "dropped": 0}
    assert nodes["index:web"]["documents"]["kept"] == 23
    assert all(node["stale"] == 0 and node["cost_now"] == {"cpu_s": 0, "disk_bytes": 0} for node in nodes.values())
    assert nodes["clean"]["cost"]["bytes"] > 0 and document["total"]["tasks_stale"] == 0
    assert {"from": "deduped/exact.1", "to": "deduped", "docs": 22} in document["edges"]
    assert [check["name"] for check in nodes["clean"]["checks"]] == CHECKS and nodes["deduped:docs"]["checks"] == []
    assert results(document, "clean") == dict.fromkeys(CHECKS, "passed") | {
        "quarantine": "warning", "warnings": "warning"}
    assert results(document, "deduped") == dict.fromkeys(CHECKS, "passed") | {"warnings": "warning"}
    assert message(document, "clean", "documents") == (
        "23 documents entered: 20 kept, 3 dropped, 0 removed as duplicates, 0 quarantined")
    assert message(document, "deduped", "documents").startswith("28 documents entered: 22 kept, 0 dropped, 6 removed")
    assert "1 record in quarantine" in message(document, "clean", "quarantine")
    assert "source 'web': 1 of 24 records could not be read" in message(document, "clean", "warnings")
    assert message(document, "deduped", "warnings") == "deduped/exact.1 removed 6 of 8 documents of source 'docs'"


class Still(Clock):
    """A clock that only moves when a test changes `passed`."""

    passed = 0.0

    def now(self) -> float:
        return self.passed


def test_a_page_that_is_loaded_again_plans_only_what_has_changed(site):
    """The recipe is planned anew after a run has written to the store, and after a while, for its inputs may change."""
    browser, clock, planned = client(site), Still(), []
    state = browser.app.state
    state.plans, check = Plans(clock), state.checks.check

    async def counted(*of: Any) -> Any:
        planned.append(of[1]["run"])
        return await check(*of)

    state.checks.check = counted

    def load() -> tuple[int, Any]:
        document = browser.get(API).json()
        assert document["problems"] == []
        return len(planned), {name: node["state"] for name, node in nodes_of(document).items()}

    times, states = load()
    assert times == 1 and load() == (1, states)
    assert "first" in read(browser, PAGE).text_content() and planned == ["first"]
    execute(site, "second", "datasets.clean.steps.gopher_quality.min_stop_words=3")
    times, states = load()
    assert times == 2 and load() == (2, states)
    (site / "docs" / "new.txt").write_text("\n".join(sentences()[100:108]))
    clock.passed = KEPT_S - 1
    assert load()[0] == 2
    clock.passed = 2 * KEPT_S
    assert load()[0] == 3
    assert browser.get(API, headers={"Authorization": f"Bearer {VIEWER}"}).json()["planned"] is False


def test_page_shows_what_the_api_says(made):
    browser, document = client(made), ask(made)
    assert PAGE in links(read(browser, "/stores/s/runs/first"))
    tree = read(browser, PAGE)
    rows = {text_of(row.find("th")): [text_of(cell) for cell in row.findall("td")]
            for row in tree.xpath("//table[caption='Nodes']/tbody/tr")}
    assert list(rows) == [node["name"] for node in document["nodes"]]
    assert rows["clean"][:9] == ["pass", "gopher_quality → exact_hash", "fresh",
                                 str(nodes_of(document)["clean"]["fresh"]), "0", "0", "23", "20", "3"]
    assert rows["clean"][9] == "2 warning, 3 passed of clean" and rows["index:web"][9] == "–"
    for row in tree.xpath("//table[caption='Nodes']//a"):
        assert tree.get_element_by_id(row.get("href").removeprefix("#")) is not None
    checks = tree.xpath("//table[caption='Checks of deduped']/tbody/tr")
    assert [[text_of(cell) for cell in row] for row in checks] == [
        [check["name"], check["result"], check["message"]] for check in nodes_of(document)["deduped"]["checks"]]
    assert not tree.xpath("//script | //*[@style]"), "the policy of a page refuses both"


def test_picture_tells_states_by_words_and_has_a_label(made):
    [picture] = read(client(made), PAGE).xpath("//svg[@role='img']")
    assert "clean to deduped/exact.1: 20" in picture.get("aria-label")
    boxes = picture.xpath(".//rect/@class")
    assert len(boxes) == 6 and all(name.endswith(" state-fresh") for name in boxes)
    assert "fresh · −3 · gopher_qual" in text_of(picture)


# -- what is stale, and why ------------------------------------------------------------------------------------------
def test_changed_inputs_make_nodes_stale_with_the_cause_and_others_wait(site, check_processes):
    execute(site)
    (site / "docs" / "new.txt").write_text("\n".join(sentences()[80:90]))
    document = ask(site)
    nodes = nodes_of(document)
    assert nodes["deduped:docs"]["state"] in ("stale", "partly") and nodes["deduped:docs"]["stale"] > 0
    assert nodes["deduped"]["state"] == nodes["deduped/exact.1"]["state"] == "waits"
    assert nodes["deduped/exact.1"]["stale"] is None, "nobody knows how many tasks it will have"
    assert nodes["clean"]["state"] == "fresh"
    assert [name for name, node in nodes.items() if node["causes"]] == ["deduped:docs"], "what waits has no own cause"
    [cause] = nodes["deduped:docs"]["causes"]
    assert cause["what"].startswith("input files added in source 'docs'") and "new.txt" in cause["what"]
    assert document["total"]["tasks_stale"] == nodes["deduped:docs"]["stale"]
    assert nodes["deduped:docs"]["documents"]["in"] == 8, "what the run made stays as it was"
    tree = read(client(site), PAGE)
    [why] = tree.xpath("//h3[text()='deduped:docs'][starts-with(@id, 'why-')]/following-sibling::ul[1]")
    assert cause["what"] in text_of(why)
    assert tree.xpath("//rect[contains(@class, 'state-waits')]") and "waits · " in text_of(tree.xpath("//svg")[0])


def test_a_later_run_has_replaced_the_documents(site):
    execute(site)
    execute(site, "second", "datasets.clean.steps.gopher_quality.min_doc_words=200")
    first, second = ask(site), ask(site, run="second")
    assert results(first, "clean")["content"] == "warning" and results(second, "clean")["content"] == "passed"
    assert "a later run has replaced" in message(first, "clean", "content")
    assert results(first, "clean")["files"] == "passed"
    assert nodes_of(first)["clean"]["state"] == "fresh", "its results are in the store"
    [change] = [c for c in first["changes"]["settings"] if c["key"].endswith("min_doc_words")]
    assert first["changes"]["run"] == "second" and (change["was"], change["now"]) == (200, 20)
    assert "min_doc_words" in text_of(read(client(site), PAGE).xpath("//table[caption='Changed settings']")[0])


def test_viewers_see_all_but_the_states(site):
    document = ask(site, "viewer")
    assert {node["state"] for node in document["nodes"]} == {"unknown"} and not document["planned"]
    [why] = document["problems"]
    assert why["title"] == "Operators only" and why["key"] == "Authorization" and why["remedy"]
    assert results(document, "clean")["content"] == "passed"
    tree = read(client(site, "viewer"), PAGE)
    assert "Operators only" in text_of(tree.xpath("//div[@role='alert']")[0])
    assert tree.xpath("//rect[contains(@class, 'state-unknown')]") and tree.xpath("//table[caption='Checks of clean']")
    assert problem(client(site, "nobody").get(API), 401)


def test_a_recipe_that_is_refused_leaves_the_states_unknown(site):
    execute(site)
    for settings, path, words in (({"allowed_roots": ()}, "", "web"), ({}, "web", "web")):
        if path:
            shutil.rmtree(site / path)
        document = ask(site, **settings)
        [why] = document["problems"]
        assert words in why["detail"] + why.get("key", "") and why["remedy"], why
        assert {node["state"] for node in document["nodes"]} == {"unknown"}
        assert results(document, "deduped")["documents"] == "passed"
        assert "What to do" in text_of(read(client(site, **settings), PAGE).xpath("//div[@role='alert']")[0])


def test_a_plan_that_takes_too_long_does_not_keep_the_page(site):
    class Slow:
        async def check(self, *_: Any) -> None:
            pass_time(0.6 * PATIENT_S)
            await asyncio.Event().wait()

    browser = client(site)
    browser.app.state.checks = Slow()
    document = browser.get(API).json()
    assert [why["title"] for why in document["problems"]] == ["Takes too long"] and document["problems"][0]["remedy"]
    assert results(document, "clean")["files"] == "passed"


# -- what checks find ------------------------------------------------------------------------------------------------
def test_published_files_that_are_missing_or_cut_are_found(site):
    kept, dropped = (sorted((site / "store" / folder / "clean").glob("*.parquet"))
                     for folder in ("datasets", "dropped"))
    kept[0].unlink()
    data = dropped[0].read_bytes()
    dropped[0].unlink()                                            # it is a link to the file of the task
    dropped[0].write_bytes(data[:-1])
    document = ask(site, "viewer")
    assert results(document, "clean")["files"] == "failed" and results(document, "deduped")["files"] == "passed"
    assert message(document, "clean", "files") == (f"datasets/clean/{kept[0].name} is missing; "
                                                   f"dropped/clean/{dropped[0].name} has another size")


def test_a_dataset_without_its_folders_is_found(site):
    shutil.rmtree(site / "store/dropped/clean")                    # as in a copy of the store
    shutil.rmtree(site / "store/datasets/deduped")
    document = ask(site, "viewer")
    assert results(document, "clean")["files"] == "warning" and "dropped/clean" in message(document, "clean", "files")
    assert [results(document, "deduped")[name] for name in ("files", "content", "documents")] == [
        "failed", "failed", "passed"]


def test_a_damaged_manifest_and_a_link_to_elsewhere_are_found(site, tmp_path):
    (site / "store/datasets/clean/.manifest").write_bytes(b"PAR1 no more")
    shutil.move(site / "store/datasets/deduped", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", site / "store/datasets/deduped")
    document = ask(site, "viewer")
    for dataset, words in (("clean", "cannot be read"), ("deduped", "link to elsewhere")):
        assert results(document, dataset)["files"] == results(document, dataset)["content"] == "failed"
        assert words in message(document, dataset, "files")


def test_documents_that_are_not_accounted_for_are_found(site):
    def lose(report: dict[str, Any]) -> None:
        report["datasets"]["clean"]["reasons"][0]["docs"] -= 2

    edit_report(site, lose)
    document = ask(site, "viewer")
    assert results(document, "clean")["documents"] == "failed"
    assert message(document, "clean", "documents").endswith("the difference is 2")
    edit_report(site, lambda report: report.update(missing_records=3))
    assert "3 tasks of the run left no record" in message(ask(site, "viewer"), "clean", "documents")


def test_quarantined_documents_are_accounted_for(site):
    """One that could not be read never entered; one on which a step failed did."""
    def fail(report: dict[str, Any]) -> None:
        report["datasets"]["clean"]["quarantined"]["error:ValueError"] = 1
        report["datasets"]["clean"]["docs"] -= 1

    edit_report(site, fail)
    document = ask(site, "viewer")
    assert message(document, "clean", "documents").endswith("3 dropped, 0 removed as duplicates, 1 quarantined")
    assert results(document, "clean")["documents"] == "passed" and "2 records" in message(document, "clean",
                                                                                         "quarantine")


def test_more_files_than_an_answer_compares_are_not_called_sound(made):
    at = Store(made / "store")
    figures = read_figures(at, "first")
    files = len(list((made / "store").glob("*/clean/part-*.parquet")))
    clean, deduped = (checks[1] for checks in dataset_checks(at, figures, Stop(60), files).values())
    assert clean["result"] == "passed" and deduped["result"] == "warning" and "not compared" in deduped["message"]


def test_a_manifest_too_large_for_an_answer_is_not_read(site):
    """A viewer must not make the server hold the lists of millions of files."""
    path = site / "store/datasets/clean/.manifest"
    os.truncate(path, MANIFEST_BYTES + 1)
    document = ask(site, "viewer")
    assert {results(document, "clean")[name] for name in ("files", "content")} == {"warning"}
    assert "too many files" in message(document, "clean", "content")
    assert results(document, "deduped")["files"] == "passed"


def test_storage_that_does_not_answer_is_no_failed_check(made):
    class Away(Store):
        def size(self, path: str) -> int | None:
            raise EnvironmentFailure("it does not answer")

    with pytest.raises(EnvironmentFailure):
        dataset_checks(Away(made / "store"), read_figures(Store(made / "store"), "first"), Stop(60))


def test_checks_end_when_their_time_is_up(made):
    with pytest.raises(TooDear):
        dataset_checks(Store(made / "store"), read_figures(Store(made / "store"), "first"), Stop(0))


# -- runs without a report, and with one that cannot be trusted -------------------------------------------------------
def test_a_run_without_a_report_shows_the_states_of_its_plan(site):
    (site / "store/runs/first/report.json").unlink()
    document = ask(site)
    nodes = nodes_of(document)
    assert not document["report"] and document["planned"] and len(nodes) == 6
    assert [why["title"] for why in document["problems"]] == ["Not there yet"] and document["problems"][0]["remedy"]
    assert nodes["clean"]["state"] and nodes["clean"]["documents"] is None and nodes["clean"]["checks"] == []
    assert [edge["from"] for edge in document["edges"] if edge["to"] == "deduped"] == ["deduped/exact.1"]
    tree = read(client(site), PAGE)
    assert tree.xpath("//svg") and not tree.xpath("//h2[text()='Checks']")


def test_a_run_that_keeps_nothing_says_so(store):
    write_run(store, "bare", "failed")
    tree = read(client_of({"s": Path(store.root)}), "/stores/s/runs/bare/assets")
    shown = [text_of(box) for box in tree.xpath("//div[@role='alert']")]
    assert len(shown) == 2 and "no report.json" in shown[0] and "keeps no recipe" in shown[1]
    assert not tree.xpath("//svg | //table")
    assert problem(client_of({"s": Path(store.root)}).get(
        "/api/v1/stores/s/runs/absent/assets", headers={"Accept": "application/json"}), 404)["key"] == "run"


@pytest.mark.parametrize("damage", [
    lambda report: [], lambda report: report.pop("lineage") and None,
    lambda report: report["lineage"][0].update(cpu_s="<b>"), lambda report: report["datasets"].pop("clean") and None,
    lambda report: report["graph"]["edges"].append({"from": "\u202ex", "to": "y"}),
    lambda report: report["passes"].clear(),
    lambda report: report["datasets"]["clean"].update(quarantined={"a": -1.5})])
def test_a_damaged_report_is_a_problem_and_the_states_are_shown(site, damage):
    document = json.loads((site / "store/runs/first/report.json").read_text())
    changed = damage(document)
    (site / "store/runs/first/report.json").write_text(json.dumps(document if changed is None else changed))
    document = ask(site)
    [why] = document["problems"]
    assert why["title"] == "Damaged report" and "tokenmill report" in why["remedy"] and "\u202e" not in why["detail"]
    assert not document["report"] and nodes_of(document)["clean"]["state"] != "unknown"


@pytest.mark.parametrize("evil", [*EVIL, "../../..", "a'b\"c"])
def test_hostile_names_stay_text(site, evil):
    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("clean", evil)
        if isinstance(value, dict):
            return {renamed(key): renamed(other) for key, other in value.items()}
        return [renamed(other) for other in value] if isinstance(value, list) else value

    edit_report(site, renamed)
    tree = read(client(site, "viewer"), PAGE)
    names = [th.text for th in tree.xpath("//table[caption='Nodes']/tbody/tr/th")]
    assert visible(evil) in names and not tree.xpath("//svg//script | //svg//img | //svg//a")
    assert visible(evil)[:20] in tree.xpath("//svg")[0].text_content()
    assert nodes_of(ask(site, "viewer"))[evil]["checks"]
