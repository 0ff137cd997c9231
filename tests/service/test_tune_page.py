"""The page of the playground: it shows the same as the API, its form works without scripts, and its button starts a
run."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import lxml.html
import pytest
from starlette.datastructures import QueryParams
from starlette.testclient import TestClient

from pipeline.cluster.attempts import bad_name
from pipeline.cluster.queue import Queue
from pipeline.recipe.marks import parse_yaml
from pipeline.service import tune
from pipeline.service.checks import check
from pipeline.service.latest import runs_with
from pipeline.service.playground import Playground
from pipeline.service.tune import RequestedChanges
from pipeline.service.tune_page import address, name_of, read_form
from pipeline.store.fs import Store
from tests.service.conftest import write_run
from tests.service.corpus import documents, publish_rows
from tests.service.test_pages import client_of, links, read, text_of
from tests.service.tuned_site import make_site
from tests.service.tuned_site import run as run_site

pytestmark = pytest.mark.usefixtures("checks_here")
PAGE = "/stores/s/runs/r/datasets/clean/tune"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("tune"), "english", "until-drop")


@pytest.fixture(scope="module")
def browser(site: Path) -> TestClient:
    return client_of({"s": site / "store"}, "operator", allowed_roots=(str(site),), backend="inline")


def send(client: TestClient, tree: Any, exact: bool = False, **fields: Any) -> Any:
    """Fill in the form as a browser would (unchanged fields are sent, too) and send it. Returns the address to which
    the answer redirects."""
    form = tree.get_element_by_id("tune")
    for name, value in fields.items():
        if name == "off":
            form.xpath(f".//input[@name='off'][@value='{value}']")[0].checked = True
        else:
            form.fields[name] = value
    answer = client.get(form.get("action"), params=[*form.form_values(), *([("exact", "true")] if exact else [])])
    assert answer.status_code == 303
    return answer.headers["location"]


def changes_in(where: str) -> Any:
    return json.loads(parse_qs(urlsplit(where).query)["changes"][0])


def answer_of(client: TestClient, changes: Any, **more: str) -> Any:
    return client.get(f"/api/v1{PAGE}/answer", params={"changes": json.dumps(changes), **more}).json()


def row(tree: Any, caption: str, name: str) -> list[str]:
    [line] = tree.xpath(f"//table[starts-with(caption, '{caption}')]/tbody/tr[normalize-space(th)='{name}']")
    return [text_of(cell) for cell in line.findall("td")]


def test_the_form_asks_for_what_was_changed_and_nothing_else(browser: TestClient) -> None:
    tree = read(browser, PAGE)
    assert row(tree, "Totals", "Kept")[0] == row(tree, "Totals", "Kept")[1]
    assert tree.xpath("//input[@name='t.1.min_doc_words']/@value") == ["60"]
    where = send(browser, tree, exact=True, off=3, **{"t.1.min_doc_words": "120", "t.1.max_doc_words": ""})
    changes = {"thresholds": {"1": {"min_doc_words": 120, "max_doc_words": None}}, "off": [3]}
    assert changes_in(where) == changes
    tree = read(browser, where)
    wanted = answer_of(browser, changes, exact="true")
    for side in ("kept", "dropped", "unknown"):
        shown = row(tree, "Totals", side.capitalize())
        assert shown[1] == f"{wanted['totals']['after'][side]['documents']:,}"
    assert wanted["totals"]["before"] != {k: wanted["totals"]["after"][k] for k in ("kept", "dropped")}
    moves = tree.xpath("//table[starts-with(caption, 'Documents that end otherwise')]/tbody/tr")
    assert [text_of(move.findall("td")[-2]) for move in moves] == [f"{m['documents']:,}" for m in wanted["moves"]]
    assert len(tree.xpath("//ol[@class='documents']/li")) == len(wanted["examples"]) > 0
    assert tree.xpath("//input[@name='off'][@value='3']/@checked") and send(browser, tree) == where.replace(
        "&exact=true", "")


def test_a_wrong_value_is_told_and_stays_in_its_field(browser: TestClient) -> None:
    for name, typed, key in (("t.1.min_doc_words", "many", "min_doc_words"), ("t.4.drop", "[x", "drop")):
        answer = browser.get(PAGE, params={"form": "1", name: typed})
        tree = lxml.html.document_fromstring(answer.text)
        assert answer.status_code == 422 and key in text_of(tree.xpath("//div[@role='alert']")[0])
        assert tree.xpath(f"//input[@name='{name}']/@value") == [typed]
    wrong = {"thresholds": {"0": {"dup_line_frac": "<b>"}}}
    tree = read(browser, address("s", "r", "clean", RequestedChanges(**wrong)), 422)
    assert "dup_line_frac" in text_of(tree.xpath("//div[@role='alert']")[0]) and tree.xpath("//form[@id='tune']")
    assert "Traceback" not in text_of(read(browser, f"{PAGE}?changes=%7B", 422))
    read(browser, PAGE.replace("clean", "gone"), 404)


def test_counting_exactly_is_the_only_button_if_the_sample_has_all_documents(
        browser: TestClient, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def buttons(client: TestClient) -> list[str]:
        return [text_of(button) for button in read(client, PAGE).get_element_by_id("tune").iter("button")]

    assert buttons(browser) == ["Count exactly"]
    monkeypatch.setattr(tune, "Playground", partial(Playground, sample=30))
    sampled = client_of({"s": site / "store"})
    assert buttons(sampled) == ["Ask the sample", "Count exactly"]
    changes = {"thresholds": {"1": {"min_doc_words": 120}}, "off": []}
    shown = row(read(browser, address("s", "r", "clean", RequestedChanges(**changes))), "Totals", "Kept")
    assert shown == row(read(sampled, address("s", "r", "clean", RequestedChanges(**changes), exact=True)), "Totals",
                        "Kept")


def test_a_threshold_that_is_off_is_called_empty_everywhere(browser: TestClient) -> None:
    """As the field is, which cannot hold the recipe's word `null`."""
    tree = read(browser, PAGE)
    helps = {element.get("id"): text_of(element) for element in tree.xpath("//span[contains(@class, 'help')]")}
    assert helps["k-1-min_doc_words-help"].startswith("fewest words; empty: no such rule – in the run: 60,")
    assert helps["k-1-max_doc_words-help"].startswith("most words; empty: no limit – in the run: 100000,")
    assert "in the run: empty" in helps["k-0-top_2_gram-help"]
    assert not re.search(r"\bnull\b|\bnone\b", " ".join(helps.values()))


def test_the_page_says_of_which_documents_it_counts_tokens(tmp_path: Path) -> None:
    site = make_site(tmp_path, "last", "until-drop")
    recipe = (site / "r.yaml").read_text()
    for shards, said in (("clean", False), ("other", True)):
        (site / "r.yaml").write_text(recipe.replace("run:", (
            "  other: {from: clean, steps: [exact]}\ntokenizer: {train: {kind: bpe, vocab: 300, from: clean}}\n"
            f"shards: {{a: {{from: {shards}, longest: 64, val: 10%}}}}\nrun:")))
        run_site(site, site / "store")
        shown = text_of(read(client_of({"s": site / "store"}), PAGE))
        assert "Tokens are those of the documents of clean, for training and held out." in shown
        assert ("Shards are made from other, so the report" in shown) == said
    shown = text_of(read(client_of({"s": site / "store"}), PAGE.replace("clean", "other")))
    assert "Tokens are those" in shown and "Shards are made from" not in shown


def test_the_name_of_a_run_says_what_is_changed() -> None:
    steps = {1: "gopher_quality", 3: "fineweb"}

    def name(thresholds: dict[int, dict[str, Any]], *off: int) -> str:
        return name_of(RequestedChanges(thresholds=thresholds, off=off), steps)

    assert name({1: {"min_doc_words": 150}}) == "min_doc_words-150"
    assert name({1: {"max_doc_words": None}}, 3) == "max_doc_words-null-without-fineweb"
    assert name({0: {"keep": ["en", "de"]}, 1: {"min": 0.25}}) == "keep-en-de-min-0.25"
    assert name({2: {f"threshold_{n}": n for n in range(9)}}) == (
        "threshold_0-0-threshold_1-1-threshold_2-2-threshold_3-3-and-5-more")
    assert name({0: {"max": -1}}) == "max-1" and name({}) == "unchanged"
    for value in ("../" * 80, "é" * 90, "\u202e/"):
        assert bad_name(name({0: {"drop": value}})) is None


def test_every_kind_of_key_is_read_back_as_it_was() -> None:
    keys = [{"key": name, "value": value, "type": kind, "optional": value is None} for name, value, kind in (
        ("a", 60, "integer"), ("b", 0.1, "number"), ("c", 3.0, "number"), ("d", None, "number"), ("e", True, "boolean"),
        ("f", ["en"], "json"), ("g", {"de": 0.5}, "json"))]
    texts = {"a": "60", "b": "0.1", "c": "3.0", "d": "", "e": "true", "f": '["en"]', "g": '{"de": 0.5}'}
    steps = [{"step": 0, "keys": keys}]

    def asked(**typed: str) -> Any:
        return read_form(steps, QueryParams({f"t.0.{name}": text for name, text in {**texts, **typed}.items()}))

    assert not asked().thresholds
    assert asked(a="61", b="1e-2", d="5", e="false", f="[]").thresholds == {
        0: {"a": 61, "b": 0.01, "d": 5, "e": False, "f": []}}


def test_moves_of_a_threshold_are_those_of_the_cube(browser: TestClient) -> None:
    tree = read(browser, f"{PAGE}?move=1.min_doc_words")
    [script] = tree.xpath("//script/@src")
    assert script.startswith("/static/tune.js")
    cube = browser.get(tree.get_element_by_id("slide").get("data-cube")).json()
    assert cube["key"] == "min_doc_words" and tree.xpath("//*[@data-field='t.1.min_doc_words']")
    rows = tree.xpath("//table[starts-with(caption, 'Values of')]/tbody/tr")
    assert 2 < len(rows) <= 19
    assert "60 in the run" in [text_of(line.find("th")) for line in rows], "also if it is none of the values between"
    for line in (rows[0], rows[len(rows) // 2], rows[-1]):
        chosen = line.xpath(".//a/@href")[0]
        wanted = answer_of(browser, changes_in(chosen), exact="true")["totals"]["after"]["kept"]["documents"]
        assert text_of(line.findall("td")[0]) == f"{wanted:,}", "a value of the table is an edge, where a cube is exact"
    assert not read(browser, PAGE).xpath("//script")
    assert "move" in text_of(read(browser, f"{PAGE}?move=99.x").xpath("//div[@role='alert']")[0])


def test_a_dataset_leads_to_the_playground_once_a_run_that_made_it_has_finished(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    publish_rows(store, tmp_path / "scratch", documents(4), 1, name="clean")
    for run, begun, dataset in (("new", "2026-02-01", "clean"), ("old", "2026-01-01", "clean"), ("x", "", "other")):
        write_run(store, run, facts={"begun": begun})
        store.write(f"runs/{run}/recipe.yaml", f"datasets: {{{dataset}: {{}}}}".encode())
    tree = read(client_of({"s": tmp_path / "store"}), "/stores/s/datasets/clean")
    assert not [href for href in links(tree) if href.endswith("/tune")]
    for run in ("new", "old", "x"):
        store.write(f"runs/{run}/tasks.parquet", b"")
    assert list(runs_with(store, "clean")) == ["new", "old"]
    store.write("report.json", b'{"run": "old"}')
    assert list(runs_with(store, "clean")) == ["old", "new"], "the latest to finish comes first"
    tree = read(client_of({"s": tmp_path / "store"}), "/stores/s/datasets/clean")
    assert "/stores/s/datasets/clean/tune" in links(tree)


def test_links_lead_to_the_playground_and_out_of_it(browser: TestClient) -> None:
    assert PAGE in links(read(browser, "/stores/s/runs/r"))
    [short] = [href for href in links(read(browser, "/stores/s/datasets/clean")) if href.endswith("/tune")]
    assert browser.get(short).headers["location"] == PAGE
    read(browser, short.replace("clean", "gone"), 404)
    changes = {"thresholds": {"1": {"min_doc_words": 77}}, "off": []}
    tree = read(browser, address("s", "r", "clean", RequestedChanges(**changes)))
    [saved] = [href for href in links(tree) if "recipe.yaml" in href]
    steps = parse_yaml(browser.get(saved).text, "")[0]["datasets"]["clean"]["steps"]
    assert steps[1]["gopher_quality"]["min_doc_words"] == 77
    for href in tree.xpath("//ol[@class='documents']//h3/a/@href"):
        read(browser, href)


def press(client: TestClient, tree: Any, action: str, **fields: str) -> Any:
    """Press a button of a page, that is, send its form. Returns the answer."""
    [form] = [form for form in tree.forms if form.get("method") == "post" and form.get("action").endswith(action)]
    return client.post(form.get("action"), data={**dict(form.form_values()), **fields},
                       headers={"Accept": "text/html"})


def test_run_shows_the_plan_and_then_submits_it_once(site: Path) -> None:
    browser = client_of({"s": site / "store"}, allowed_roots=(str(site),), backend="inline")
    changes = {"thresholds": {"1": {"min_doc_words": 78}}, "off": [3]}
    tree = read(browser, address("s", "r", "clean", RequestedChanges(**changes)))
    assert [text_of(item) for item in tree.xpath("//ul[@aria-label='Changes of the run']/li")] == [
        "gopher_quality.min_doc_words: 60 → 78", "without fineweb"]
    assert press(browser, tree, "/tune/plan", csrf="wrong").status_code == 403
    plan = press(browser, tree, "/tune/plan")
    assert plan.status_code == 200
    tree = lxml.html.document_fromstring(plan.text)
    assert row(tree, "What runs", "clean")[0] == "stale"
    shown = text_of(tree)
    assert tree.xpath("//input[@id='run']/@value") == ["min_doc_words-78-without-fineweb"]
    assert shown.index("Name of the run") < shown.index("What runs"), "the plan may be long"
    assert "that the recipe of r gives as well" in shown and "What the check says" not in shown
    assert "wait for them" not in shown, "all tasks are known"
    queue = Queue(Store(site / "store"))
    assert queue.entries() == []
    for _ in range(2):                                                        # pressed twice
        answer = press(browser, tree, "/tune/run")
        assert answer.status_code == 303 and answer.headers["location"] == "/stores/s/queue"
    [entry] = queue.entries()
    steps = parse_yaml(queue.submission(1).text, "")[0]["datasets"]["clean"]["steps"]
    assert [next(iter(step)) for step in steps] == ["gopher_repetition", "gopher_quality", "c4", "pii"]
    assert steps[1]["gopher_quality"]["min_doc_words"] == 78 and entry.name == "r"
    [shown] = read(browser, "/stores/s/queue").xpath("//table[caption='What waits and runs']/tbody/tr")
    assert entry.run == "min_doc_words-78-without-fineweb" and entry.run in text_of(shown)
    tree = read(browser, address("s", "r", "clean", RequestedChanges(**changes)))
    tree = lxml.html.document_fromstring(press(browser, tree, "/tune/plan").text)
    assert tree.xpath("//input[@id='run']/@value") == [f"{entry.run}-2"]
    assert press(browser, tree, "/tune/run", run=entry.run).status_code == 409, "the name is taken"


def test_the_plan_says_that_more_tasks_follow_and_where_the_lines_of_a_new_warning_are(tmp_path: Path) -> None:
    site = make_site(tmp_path, "deduped", "until-drop")
    browser = client_of({"s": site / "store"}, allowed_roots=(str(site),), backend="inline")
    tree = read(browser, address("s", "r", "clean", RequestedChanges(thresholds={"0": {"min_doc_words": 78}})))
    shown = text_of(lxml.html.document_fromstring(press(browser, tree, "/tune/plan").text))
    assert "wait for them" in shown and "What the check says" not in shown
    recipe = (site / "store/runs/r/recipe.yaml").read_text()
    at = recipe.index("shards:")
    request = {"name": "r", "base": str(site), "text": recipe[:at] + "  again: {from: clean, steps: [fineweb]}\n"
               + recipe[at:], "overrides": [], "inputs": [], "allow_code": False, "roots": [str(site)], "run": "",
               "store": str(site / "store"), "verify_inputs": False, "find_files_s": 0.0, "causes": 0}
    changed, plain = check({**request, "before": recipe}), check({**request, "before": ""})
    assert plain["run"] and changed["as_before"] > 0 == plain["as_before"], plain["problems"]
    assert len(plain["problems"]) == changed["as_before"] + len(changed["problems"])
    assert {p["key"].partition(".steps")[0] for p in changed["problems"]} == {"datasets.again"}


def test_where_signals_are_missing_a_run_with_all_of_them_is_offered(site: Path) -> None:
    browser = client_of({"s": site / "store"}, allowed_roots=(str(site),), backend="inline")
    known = read(browser, address("s", "r", "clean", RequestedChanges(thresholds={"1": {"min_doc_words": 79}})))
    assert not known.xpath("//input[@name='signals']"), "a stricter threshold leaves nothing unknown"
    unknown = read(browser, address("s", "r", "clean", RequestedChanges(thresholds={"1": {"min_doc_words": 5}})))
    assert unknown.xpath("//input[@name='signals']/@type") == ["checkbox"]
    queue = Queue(Store(site / "store"))
    for ticked, overrides in ({}, ()), ({"signals": "all"}, ("run.signals=all",)):
        plan = lxml.html.document_fromstring(press(browser, unknown, "/tune/plan", **ticked).text)
        before = {entry.number for entry in queue.entries()}
        assert press(browser, plan, "/tune/run").status_code == 303
        [number] = {entry.number for entry in queue.entries()} - before
        assert queue.submission(number).overrides == overrides


def test_a_recipe_whose_files_the_server_may_not_read_is_not_planned(site: Path, tmp_path: Path) -> None:
    browser = client_of({"s": site / "store"}, allowed_roots=(str(tmp_path),), backend="inline")
    answer = press(browser, read(browser, address("s", "r", "clean", RequestedChanges(off=[3]))), "/tune/plan")
    tree = lxml.html.document_fromstring(answer.text)
    assert answer.status_code == 422 and "sources.web.path" in text_of(tree)
    assert not [form for form in tree.forms if form.get("action").endswith("/tune/run")]


@pytest.mark.parametrize("role", ["", "operator", "viewer"])
@pytest.mark.parametrize("where", ["/stores/s", PAGE])
def test_only_who_has_signed_in_can_sign_out(site: Path, role: str, where: str) -> None:
    """The playground's page speaks of tokens, too: those of texts."""
    browser = client_of({"s": site / "store"}, role)
    assert ("Sign out" in text_of(read(browser, where))) == bool(role)


def test_the_page_says_before_the_plan_that_a_run_may_read_no_place(site: Path) -> None:
    where, changes = "--allow-root", RequestedChanges(off=[3])
    page = address("s", "r", "clean", changes)
    assert where in text_of(read(client_of({"s": site / "store"}, backend="inline"), page))
    assert where not in text_of(read(client_of({"s": site / "store"}, allowed_roots=(str(site),)), page))
    assert where not in text_of(read(client_of({"s": site / "store"}, "viewer"), page)), "a viewer starts no run"


def test_viewers_move_thresholds_and_run_nothing(site: Path) -> None:
    browser = client_of({"s": site / "store"}, "viewer")
    tree = read(browser, address("s", "r", "clean", RequestedChanges(off=[3])))
    assert row(tree, "Totals", "Kept") and not [f for f in tree.forms if f.get("action").endswith("plan")]
    for way in ("plan", "run"):
        assert browser.post(f"{PAGE}/{way}", data={"changes": "{}"}).status_code == 403


def test_a_page_needs_no_more_than_the_server_and_its_script(browser: TestClient) -> None:
    script = browser.get("/static/tune.js").text
    assert not re.search(r"https?:|innerHTML|eval\(|document\.write", script)
