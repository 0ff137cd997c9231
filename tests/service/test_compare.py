"""Two runs that are compared over HTTP: the answer is that of the command, DuckDB counts the same changes in what each
run published, and what cannot be compared is a problem, in the API and on the page."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from starlette.testclient import TestClient

from pipeline.recipe import load_recipe
from pipeline.report.compare import FinishedRun, compare_runs
from pipeline.run import make_backend, run_recipe
from pipeline.service.app import create_app
from pipeline.service.duck import QueryLimits
from pipeline.service.query import Queries
from pipeline.service.settings import ServiceSettings
from pipeline.service.watch import RunWatch
from pipeline.store.fs import Store
from tests.corpus import sentences
from tests.service.conftest import BASE, problem, write_run
from tests.service.test_pages import EVIL, HTML, client_of, links, read, text_of

API, PAGE = "/api/v1/stores/s/compare", "/stores/s/compare"
BOTH = "?before=first&after=second"
RECIPE = """
version: 1
sources:
  web: {read: jsonl, path: web.jsonl}
  docs: {read: jsonl, path: docs.jsonl}
datasets:
  clean:
    from: [web, docs]
    steps:
    - gopher_quality: {min_doc_words: 20, min_stop_words: null}
    - exact
  long: {from: clean, steps: [{where: {signals: {gopher_words: {max: 90}}}}]}
run: {partition: 20KB}
"""
CHANGED = "datasets.clean.steps.gopher_quality.min_doc_words=60"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of three runs, of which the last has another dataset, and copies of what the first two
    published. The second run reads a text that was changed."""
    top, rng, prose = tmp_path_factory.mktemp("compare"), random.Random(5), sentences()
    rows = [{"text": " ".join(rng.sample(prose, rng.randrange(1, 9))), "url": f"https://a.example/{i}"}
            for i in range(90)]
    rows += [{"text": f"{evil} {' and the word'.join(map(str, range(15)))}", "url": f"https://a.example/{evil}"}
             for evil in EVIL]
    rows += [{**row, "url": row["url"] + "/again"} for row in rows[:12]]
    (top / "r.yaml").write_text(RECIPE)
    for run, settings in (("first", []), ("second", [CHANGED])):
        if run == "second":
            rows[60] = {**rows[60], "text": f"{EVIL[6]} {EVIL[0]} {' and the word'.join(map(str, range(40)))}"}
        for name, part in (("docs", rows[::3]), ("web", [row for i, row in enumerate(rows) if i % 3])):
            (top / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        run_recipe(load_recipe(top / "r.yaml", settings), str(top / "store"), run=run,
                   make_backend=make_backend("inline", 1, None))
        for folder in ("datasets", "dropped"):
            shutil.copytree(top / "store" / folder / "clean", top / run / folder)
    (top / "r.yaml").write_text(RECIPE.replace("clean", "other").replace("long", "more"))
    run_recipe(load_recipe(top / "r.yaml", []), str(top / "store"), run="other",
               make_backend=make_backend("inline", 1, None))
    return top


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Path:
    """A store that a test may change."""
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


def ask(client: TestClient, query: str = BOTH) -> dict[str, Any]:
    answer = client.get(f"{API}{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(site: Path, query: str, status: int) -> dict[str, Any]:
    """Check that the API refuses a comparison, and that the page says the same. Returns the problem."""
    client = client_of({"s": site})
    document = problem(client.get(f"{API}{query}", headers={"Accept": "application/json"}), status)
    shown = text_of(read(client, f"{PAGE}{query}", status).xpath("//div[@role='alert']")[0])
    assert document["detail"] in shown and document["remedy"] in shown and f"Where: {document['key']}" in shown
    return document


# -- the answer ------------------------------------------------------------------------------------------------------
def test_the_answer_is_that_of_the_command(made: Path) -> None:
    store = Store(made / "store")
    wanted = compare_runs(*(FinishedRun.open(store, run) for run in ("first", "second")))
    document = ask(client_of({"s": made / "store"}))
    assert document.pop("problems") == []
    assert document == json.loads(json.dumps(wanted))
    assert {row["key"]: (row["before"], row["after"]) for row in document["recipe"]} == {
        "datasets.clean.steps.gopher_quality.min_doc_words": (20, 60)}


def test_duckdb_counts_the_same_changes(made: Path) -> None:
    def side(run: str) -> str:
        kept, dropped = (f"read_parquet('{made / run / folder}/*.parquet')" for folder in ("datasets", "dropped"))
        return (f"select id, source, text, 'kept' fate, null reason from {kept} union all "
                f"select id, source, text, 'dropped', reason from {dropped}")

    rows = duckdb.sql(f"""
        select a.fate, a.reason, b.fate, b.reason, coalesce(a.source, b.source),
               a.fate is not distinct from b.fate and a.reason is not distinct from b.reason
               and (a.fate != 'kept' or a.text = b.text), count(*)
        from ({side("first")}) a full join ({side("second")}) b using (id) group by all""").fetchall()
    section = ask(client_of({"s": made / "store"}))["documents"]["clean"]
    counted = Counter({(*row[:5],): row[6] for row in rows if not row[5]})
    assert section["same"] == sum(row[6] for row in rows if row[5])
    of_answer: Counter[Any] = Counter()
    for group in section["groups"]:
        before, after = (group[name] or {} for name in ("before", "after"))
        for source, n in group["sources"].items():
            of_answer[before.get("fate"), before.get("reason"), after.get("fate"), after.get("reason"), source] += n
    assert of_answer == counted
    assert {key[::2] for key in counted} >= {("kept", "dropped", "web"), ("kept", "dropped", "docs"),
                                             ("kept", "kept", "docs")}


# -- the page --------------------------------------------------------------------------------------------------------
def test_the_page_shows_the_changes_and_leads_to_the_documents(made: Path) -> None:
    client = client_of({"s": made / "store"})
    tree, document = read(client, PAGE + BOTH), ask(client)
    assert not tree.xpath("//script")
    [recipe] = tree.xpath("//table[caption='Keys of the recipe that differ']/tbody/tr")
    assert [text_of(cell) for cell in recipe] == ["datasets.clean.steps.gopher_quality.min_doc_words", "20", "60"]
    section = document["documents"]["clean"]
    groups = tree.xpath("//table[caption='What changed in clean']/tbody/tr")
    assert [text_of(group.find("td")) for group in groups] == [f"{group['docs']:,}" for group in section["groups"]]
    assert text_of(groups[0].find("th")) == "kept → dropped by gopher_quality: gopher_short_doc"
    totals = {text_of(row.find("th")): text_of(row.findall("td")[0])
              for row in tree.xpath("//table[starts-with(caption, 'Documents and tokens that')]/tbody/tr")}
    report = json.loads((made / "store/runs/first/report.json").read_text())
    assert totals["clean documents"] == str(report["datasets"]["clean"]["docs"])
    newly = section["examples"]["newly_dropped"]
    distances = [example["distance"] for example in newly]
    assert distances == sorted(distances) and len(newly) == 5
    changed = tree.xpath("//details[starts-with(normalize-space(summary), 'Changed text')]//pre")
    assert len(changed) == 2 and "\\u202eevil" in text_of(changed[1]) and changed[1].xpath("mark")
    shown = tree.xpath("//ol[@class='documents']/li//h4/a")
    assert len(shown) < len(tree.xpath("//ol[@class='documents']/li")), "what only the first run has is not published"
    assert [text_of(link) for link in shown[:5]] == [example["id"] for example in newly]
    for link in shown:
        assert text_of(link) in text_of(read(client, link.get("href")))


def test_more_examples_are_shown_on_demand(made: Path) -> None:
    client = client_of({"s": made / "store"})
    section = ask(client)["documents"]["clean"]
    [more] = {href for href in links(read(client, PAGE + BOTH)) if "examples=" in href}
    tree = read(client, more)
    newly, *_ = tree.xpath("//details[starts-with(normalize-space(summary), 'Newly dropped')]")
    assert len(newly.xpath(".//li")) == min(50, section["changes"]["newly_dropped"]) > 5
    assert not [href for href in links(tree) if "examples=" in href]
    assert ask(client, BOTH + "&examples=0")["documents"]["clean"]["examples"] == {}


def test_attacks_in_documents_and_names_stay_text(site: Path) -> None:
    """`read` fails on elements that no template makes. The report names hostile sources and stages."""
    client = client_of({"s": site})
    shown = text_of(read(client, PAGE + BOTH + "&examples=50"))
    assert all(evil in shown for evil in (EVIL[0], EVIL[1], "\\u202eevil"))
    for run in ("first", "second"):
        path = site / f"runs/{run}/report.json"
        report = json.loads(path.read_text())
        report["sources"]["web\u202e<b>" + run] = report["sources"].pop("web")
        for rows in report["funnel"].values():
            rows[0]["step"] = EVIL[0]
        path.write_text(json.dumps(report))
    assert "web\\u202e<b>second" in text_of(read(client, PAGE + BOTH))


def test_addresses_within_a_private_network_are_masked_as_in_the_recipe_of_a_run(site: Path) -> None:
    path = site / "runs/second/recipe.yaml"
    recipe = path.read_text().replace("web.jsonl", "http://10.1.2.3:8265/web.jsonl")
    path.write_text(recipe + "notes: {'10.1.2.4:80': [10.1.2.5:6379]}\n")
    client = client_of({"s": site})
    rows = {row["key"]: row["after"] for row in ask(client)["recipe"]}
    assert rows["sources.web.path"][0].endswith("/http://***/web.jsonl") and rows["notes"] == {"***": ["***"]}
    for shown in (text_of(read(client, PAGE + BOTH)), client.get("/api/v1/stores/s/runs/second/recipe.yaml").text):
        assert "10.1.2." not in shown and "http://***/web.jsonl" in shown


def test_runs_with_the_same_results_are_called_equal(site: Path) -> None:
    shutil.copytree(site / "runs/first", site / "runs/copy")
    report = json.loads((site / "runs/copy/report.json").read_text())
    report["tasks"][0]["wall_s"] += 1
    (site / "runs/copy/report.json").write_text(json.dumps(report))
    client = client_of({"s": site})
    assert ask(client, "?before=first&after=copy")["equal"]
    tree = read(client, f"{PAGE}?before=first&after=copy")
    assert "the same results" in text_of(tree) and not tree.xpath("//ol[@class='documents']")
    (site / "runs/copy/tasks.parquet").write_bytes(b"PAR1")
    assert not ask(client, "?before=first&after=copy")["equal"], "nothing is known about the documents"


def test_links_lead_to_documents_of_the_later_run_also_when_the_two_are_swapped(site: Path) -> None:
    """Neither of the two is the store's latest run."""
    for day, run in enumerate(("first", "second", "other"), 1):
        Store(site).write(f"runs/{run}/run.json", json.dumps({"begun": f"2026-01-0{day}T00:00:00Z"}).encode())
    client = client_of({"s": site})
    tree = read(client, PAGE + BOTH)
    [swap] = [link.get("href") for link in tree.xpath("//a[.='Swap']")]
    shown = [{text_of(link) for link in page.xpath("//ol[@class='documents']/li//h4/a")}
             for page in (tree, read(client, swap))]
    assert shown[0] == shown[1] != set()


def test_only_runs_that_have_not_finished_are_looked_up_again(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, watch, opened = Store(site), RunWatch(0.0), []
    write_run(store, "going", "running")
    finished = asyncio.run(watch.finished("s", store))
    assert set(finished) == {"first", "second", "other"} and finished[0] == "other"
    monkeypatch.setattr(Store, "exists", lambda self, path: opened.append(path) or Path(self.at(path)).exists())
    shutil.rmtree(site / "runs/first")
    store.write("runs/going/tasks.parquet", b"")
    assert set(asyncio.run(watch.finished("s", store))) == {"going", "second", "other"}
    assert opened == ["runs/going/tasks.parquet"]


def test_runs_that_ran_again_under_their_names_are_in_their_new_places(site: Path) -> None:
    store, watch = Store(site), RunWatch(0.0)

    def run_again(name: str, begun: str) -> None:
        facts = json.loads(store.read(f"runs/{name}/run.json"))
        store.write(f"runs/{name}/run.json", json.dumps({**facts, "begun": begun}).encode())
        report = json.loads(store.read("report.json"))
        store.write("report.json", json.dumps({**report, "run": name}).encode())

    assert asyncio.run(watch.finished("s", store))[0] == "other"
    run_again("first", "2031-01-01T00:00:00Z")
    run_again("other", "2032-01-01T00:00:00Z")
    assert asyncio.run(watch.finished("s", store)) == ["other", "first", "second"]


# -- how one gets there ----------------------------------------------------------------------------------------------
def test_the_store_and_the_run_lead_to_the_comparison(made: Path) -> None:
    client = client_of({"s": made / "store"})
    [form] = read(client, "/stores/s").xpath("//form[@aria-label='Compare two runs']")
    assert form.get("action") == PAGE and dict(form.form_values()) == {"before": "second", "after": "other"}
    form.fields["before"], form.fields["after"] = "first", "second"
    assert read(client, f"{PAGE}?{'&'.join(f'{k}={v}' for k, v in form.form_values())}").xpath("//h2[@id='moved']")
    [again] = read(client, "/stores/s?after=second").xpath("//form[@aria-label='Compare two runs']")
    assert dict(again.form_values()) == {"before": "second", "after": "other"}, "runs of all pages"
    assert PAGE + BOTH in links(read(client, "/stores/s/runs/second"))
    for run, before in (("first", "other"), ("other", "second")):             # neither has a run before it that fits
        [link] = [href for href in links(read(client, f"/stores/s/runs/{run}")) if href.startswith(PAGE)]
        assert link == f"{PAGE}?after={run}"
        [form] = read(client, link).xpath("//form[@aria-label='Compare two runs']")
        assert dict(form.form_values()) == {"before": before, "after": run}


def test_one_run_alone_leads_to_the_playground_instead(site: Path) -> None:
    for run in ("second", "other"):
        shutil.rmtree(site / f"runs/{run}")
    client = client_of({"s": site})
    assert not read(client, "/stores/s").xpath("//form")
    tree = read(client, f"{PAGE}?after=first")
    assert not tree.xpath("//form") and "/stores/s/runs/first" in links(tree) and "Tune" in text_of(tree)
    shutil.rmtree(site / "runs/first")
    assert "No run has finished" in text_of(read(client, PAGE))


# -- what cannot be compared -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("query", "status", "key"), [
    ("?before=first&after=absent", 404, "after"), ("?before=..&after=first", 404, "before"),
    ("?before=%E2%80%AE%3Cb%3E&after=first", 404, "before"), ("?before=first&after=first", 422, "after"),
    ("?before=first&after=other", 422, "after"), ("?before=going&after=first", 409, "before"),
    ("?before=first&after=bare", 409, "after")])
def test_what_cannot_be_compared_is_a_problem(site: Path, query: str, status: int, key: str) -> None:
    write_run(Store(site), "going", "running")
    shutil.copytree(site / "runs/first", site / "runs/bare")
    (site / "runs/bare/report.json").unlink()
    document = refused(site, query, status)
    assert document["key"] == key and "\u202e" not in json.dumps(document, ensure_ascii=False)


@pytest.mark.parametrize("query", ["", "?before=first", "?before=&after=first", BOTH + "&examples=51",
                                   BOTH + "&examples=-1", BOTH + "&examples=x"])
def test_wrong_parameters_are_a_problem(made: Path, query: str) -> None:
    problem(client_of({"s": made / "store"}).get(API + query), 422)


def edited(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        document = json.loads(data)
        result = change(document)
        return json.dumps(document if result is None else result).encode()

    return edit


@pytest.mark.parametrize(("name", "damage"), [
    ("report.json", lambda data: b"["), ("report.json", lambda data: b"[" * 100_000),
    ("report.json", lambda data: data + b" " * (4 << 20)),
    ("report.json", edited(lambda report: [])), ("report.json", edited(lambda report: report.update(version=3))),
    ("report.json", edited(lambda report: report["datasets"].update(clean=1))),
    ("report.json", edited(lambda report: report.update(recipe="f" * 32))),
    ("plan.json", lambda data: b"\xff"), ("plan.json", edited(lambda plan: plan["nodes"][0].pop("kind") and None)),
    ("plan.json", edited(lambda plan: plan["nodes"][0].update(tasks="many"))),
    ("recipe.yaml", lambda data: b"\xff"), ("recipe.yaml", lambda data: b"datasets: [clean]"),
    ("recipe.yaml", lambda data: b"datasets: {clean: {steps: 1}}"),
    ("recipe.yaml", lambda data: b"a: &a [1, 1]\n" + b"".join(
        b"%c: &%c [*%c, *%c]\n" % (x, x, x - 1, x - 1) for x in range(98, 122)) + data)])
def test_a_damaged_file_of_a_run_is_a_problem_that_names_it(site: Path, name: str,
                                                            damage: Callable[[bytes], bytes]) -> None:
    path = site / "runs/second" / name
    path.write_bytes(damage(path.read_bytes()))
    document = refused(site, BOTH, 409)
    assert document["key"] == "after" and f"runs/second/{name}" in document["detail"] and document["remedy"]


def test_a_link_out_of_the_store_is_not_followed(site: Path, tmp_path: Path) -> None:
    (site / "runs/second/report.json").rename(tmp_path / "report.json")
    os.symlink(tmp_path / "report.json", site / "runs/second/report.json")
    assert "link to elsewhere" in refused(site, BOTH, 404)["detail"]


def test_damaged_tasks_leave_recipe_and_figures(site: Path) -> None:
    """What became of documents is not known then."""
    (site / "runs/second/tasks.parquet").write_bytes(b"PAR1")
    client = client_of({"s": site})
    document = ask(client)
    why = document["problems"][0]
    assert len(document["problems"]) == 2 and why["status"] == 409 and "tasks.parquet" in why["detail"]
    assert document["documents"] == {}
    assert document["recipe"] and document["figures"] and not document["equal"]
    tree = read(client, PAGE + BOTH)
    assert why["detail"] in text_of(tree) and tree.xpath("//h2[@id='moved']")


# -- limits ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def hurried(made: Path) -> Iterator[TestClient]:
    """A client of a server whose queries have no time."""
    app = create_app(ServiceSettings({"s": str(made / "store")}, look_s=0.0))
    app.state.queries = Queries(QueryLimits(seconds=1e-6))
    with TestClient(app, base_url=BASE, headers=HTML) as client:
        yield client


def test_documents_that_take_too_long_are_left_out(hurried: TestClient) -> None:
    document = ask(hurried)
    why = document["problems"][0]
    assert why["title"] == "The query is too dear" and "tokenmill report --compare first second" in why["remedy"]
    assert document["documents"] == {} and document["recipe"] and document["figures"] and not document["equal"]
    assert why["remedy"] in text_of(read(hurried, PAGE + BOTH))


def test_a_comparison_is_remembered_until_documents_are_taken_down(site: Path) -> None:
    client = client_of({"s": site})
    document = ask(client)
    shutil.rmtree(site / "objects")
    assert ask(client) == document, "no document was read again"
    (site / "takedowns").mkdir()
    (site / "takedowns/00000001.json").write_text("{}")
    section = ask(client)["documents"]["clean"]
    assert section["missing"]["before"] and not section["examples"] and section["same"] < 100


def test_an_incomplete_comparison_is_not_remembered(site: Path) -> None:
    client, complete = client_of({"s": site}), ask(client_of({"s": site}))
    (site / "objects").rename(site / "away")
    assert any(ask(client)["documents"]["clean"]["missing"].values()) and "cannot be read" in text_of(
        read(client, PAGE + BOTH))
    (site / "away").rename(site / "objects")
    assert ask(client) == complete
