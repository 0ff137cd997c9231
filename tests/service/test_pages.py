"""The pages: what they show of a real store."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import lxml.html
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from starlette.datastructures import QueryParams
from starlette.testclient import TestClient

from pipeline.base.visible import visible
from pipeline.recipe import load_recipe
from pipeline.report.collect import collect
from pipeline.run import make_backend, run_recipe
from pipeline.service.app import create_app
from pipeline.service.browse import BrowseView
from pipeline.service.documents import difference
from pipeline.service.html import STATIC, own_path, path, sides, static_path
from pipeline.service.pages import COUNTED, FEW, RUNS
from pipeline.service.problems import HttpProblem
from pipeline.service.settings import ServiceSettings
from pipeline.store.dataset import MANIFEST
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.corpus import sentences
from tests.service.conftest import BASE, OPERATOR, PATIENT_S, VIEWER, write_log, write_run
from tests.service.corpus import HOSTILE, documents

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
#: what must stay text, wherever it comes from
EVIL = ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\" onfocus=alert(1) autofocus x=\"",
        "'><svg/onload=alert(1)>", "</pre></details><style>*{display:none}</style>", "{{ 7 * 7 }}{% raw %}",
        "\u202eevil\u2066\x1b[2J\x00", "javascript:alert(1)", "<a href=https://evil.example>x</a>", "&lt;b&gt;&amp;",
        "<!--", "]]>", "<base href=https://evil.example>", "<meta http-equiv=refresh content=0>")
#: all that a page may be made of
TAGS = re.compile(
    "html|head|meta|title|link|script|body|a|header|nav|form|input|button|span|main|h[1-5]|div|p|b|code|pre|ol|ul|li|"
    "section|table|caption|thead|tbody|tr|th|td|progress|dl|dt|dd|details|summary|label|select|option|fieldset|legend|"
    "bdi|del|ins|mark|textarea|output|br|img|svg|g|rect|path|text")
ATTRIBUTES = re.compile(
    "lang|charset|name|content|rel|href|nonce|src|defer|class|id|tabindex|method|action|type|value|max|for|required|"
    "autocomplete|maxlength|inputmode|selected|scope|dir|open|role|colspan|data-events|data-from|data-every|data-ended|"
    "data-key|aria-label|aria-labelledby|aria-current|aria-describedby|min|max|step|checked|rows|download|spellcheck|"
    "hidden|data-cube|data-field|data-now|alt|width|height|viewbox|x|y|rx|d|text-anchor")
DATASET = "/stores/main/datasets/clean"
RECIPE = """
version: 1
sources:
  web: {read: jsonl, path: a.jsonl}
datasets:
  clean: {from: web, steps: [{gopher_quality: {min_stop_words: 2}}, exact]}
"""


def client_of(stores: dict[str, Path], role: str = "", **settings: Any) -> TestClient:
    """Return a client that behaves as a browser without cookies. With `role`, it sends the token of this role."""
    tokens: dict[str, Any] = {"operator_token": OPERATOR, "viewer_token": VIEWER} if role else {}
    app = create_app(ServiceSettings({name: str(root) for name, root in stores.items()}, **tokens, **{
        "rate": 10_000, "burst": 10_000, "look_s": 0.0, "request_s": PATIENT_S, **settings}))
    token = {"operator": OPERATOR, "viewer": VIEWER}.get(role)
    return TestClient(app, base_url=BASE, follow_redirects=False,
                      headers=HTML | ({"Authorization": f"Bearer {token}"} if token else {}))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The documents of the real store: prose, a document that exists twice, short ones, and one of 2 MB in a single
    line."""
    rng, prose = random.Random(7), sentences()
    rows = [{"text": "\n\n".join(" ".join(rng.sample(prose, 8)) for _ in range(4)), "url": f"https://example.org/{i}"}
            for i in range(90)]
    rows += [rows[0] | {"url": "https://example.org/copy"}]
    rows += [{"text": f"short {evil}", "url": f"https://example.org/{evil}"} for evil in EVIL]
    rows += [{"text": "word " * 400_000, "url": "https://example.org/long"}]
    return rows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> Path:
    """A store that a run of a recipe has made, with its report."""
    top = tmp_path_factory.mktemp("pages")
    (top / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n")
    (top / "recipe.yaml").write_text(RECIPE)
    run_recipe(load_recipe(top / "recipe.yaml", []), str(top / "store"), make_backend=make_backend("inline", 1, None))
    return top / "store"


@pytest.fixture(scope="module")
def browser(root: Path) -> TestClient:
    return client_of({"main": root})


def read(client: TestClient, where: str, status: int = 200) -> Any:
    """Get the page at a path and parse it. Checks that it only has elements and attributes that our pages use, and that
    no link leads to another host."""
    answer = client.get(where)
    assert answer.status_code == status, answer.text[-2000:]
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", answer.headers["content-security-policy"])
    assert nonce and "unsafe" not in answer.headers["content-security-policy"]
    assert answer.text == visible(answer.text), "a control or bidirectional character is shown as such"
    tree = lxml.html.document_fromstring(answer.text)
    for element in tree.iter():
        assert isinstance(element.tag, str), "a comment"
        assert TAGS.fullmatch(element.tag), element.tag
        assert all(ATTRIBUTES.fullmatch(name) for name in element.attrib), element.attrib
        for name in ("href", "src", "action", "data-events", "data-from"):
            assert re.match(r"/(?!/)|#", element.get(name, "/")), element.get(name)
        if element.tag in ("script", "link"):
            assert element.get("nonce") == nonce[1] or element.get("rel") == "icon"
            assert (element.get("src") or element.get("href")).partition("?")[0] in {f"/static/{n}" for n in STATIC}
            assert not (element.text or "").strip(), "a script in the page"
    assert tree.find(".//main") is not None and len(tree.findall(".//h1")) == 1
    for field in tree.iterfind(".//main//form//*"):
        if field.tag in ("input", "select", "textarea") and field.get("type") != "hidden":
            assert tree.xpath(f"//label[@for='{field.get('id')}']"), field.get("id")
    ids = tree.xpath("//@id")
    assert len(ids) == len(set(ids))
    return tree


def text_of(element: Any) -> str:
    return " ".join(element.text_content().split())


def links(tree: Any) -> list[str]:
    return [href for href in tree.xpath("//a/@href | //link/@href | //script/@src") if not href.startswith("#")]


def crawl(client: TestClient, start: str = "/") -> Iterator[str]:
    """Follow all links, and yield their paths. Of the playground, only the first page is read, because its links lead
    to ever more thresholds."""
    seen, todo = {start}, [start]
    while todo:
        where = todo.pop()
        yield where
        if where.startswith(("/api/", "/static/")):
            answer = client.get(where)
            assert answer.status_code == 200, where
            continue
        leads_on = where.endswith("/tune") and "/runs/" not in where
        for href in [client.get(where).headers["location"]] if leads_on else links(read(client, where)):
            target = urlsplit(urljoin(f"{BASE}{where}", href))._replace(fragment="").geturl().removeprefix(BASE)
            if target not in seen and "/tune?" not in target:
                seen.add(target)
                todo.append(target)


# -- a real store ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_every_link_leads_somewhere(browser, rows):
    seen = list(crawl(browser))
    assert len({w for w in seen if "/documents/" in w and "?" not in w}) == len(rows) + 1, (
        "every document has its page, and the line that is no JSON")
    assert any(w.endswith("report.html") for w in seen) and any("after=" in w for w in seen)


def test_first_page_shows_stores_datasets_and_runs(root, tmp_path):
    tree = read(client_of({"main": root, "gone": tmp_path / "gone"}), "/")
    found = Store(root)
    [run] = {path.split("/")[1] for path in found.list("runs")}
    shown = text_of(tree)
    assert run in shown and "done" in shown and "The store is gone" in shown
    assert f"/api/v1/stores/main/runs/{run}/report.html" in links(tree) and f"/stores/main/runs/{run}" in links(tree)
    assert "/stores/gone" not in links(tree)


def test_run_that_has_ended_shows_its_passes_and_recipe_and_loads_no_script(browser, root):
    [run] = {name.split("/")[1] for name in Store(root).list("runs")}
    tree = read(browser, f"/stores/main/runs/{run}")
    progress = json.loads((root / "runs" / run / "progress.json").read_text())
    table = tree.xpath("//table[caption='Passes and tasks']/tbody/tr")
    assert [row.find("th").text for row in table] == list(progress["nodes"])
    read_in = progress["nodes"]["clean:1"]["documents_run"]["in"]
    heads = [text_of(head) for head in tree.xpath("//table[caption='Passes and tasks']/thead//th")]
    assert [row.findall("td")[heads.index("Reused") - 1].text for row in table] == [
        f"{node['docs_reused']:,}" for node in progress["nodes"].values()] == ["0"] * len(table)
    assert f"{read_in:,}" in [cell.text_content().strip() for cell in table[0].findall("td")]
    assert "gopher_quality" in tree.xpath("//details/pre")[0].text
    kept = {row.find("th").text_content(): row.find("td").text for row in tree.xpath(
        "//table[caption='What it kept']/tbody/tr")}
    report = json.loads((root / "runs" / run / "report.json").read_text())
    assert kept == {name: f"{section['docs']:,}" for name, section in report["datasets"].items()} != {}
    assert len(tree.xpath("//table[caption='What it kept']/thead//th")) == 3, "there was no run before it"
    assert not tree.xpath("//script") and not tree.xpath("//*[@data-events]")


def test_run_under_way_loads_the_script_that_follows_it(store):
    write_run(store, "waiting")
    (Path(store.root) / "runs/waiting/progress.json").unlink()
    browser = client_of({"s": Path(store.root)})
    tree = read(browser, "/stores/s/runs/waiting")
    assert len(tree.xpath("//script")) == 1
    [events] = tree.xpath("//*[@id='live']/@data-events")
    assert events == "/api/v1/stores/s/runs/waiting/events" and tree.xpath("//*[@id='connection'][@role='status']")
    assert "/stores/s/runs/waiting" in links(tree), "without the script, a link loads it again"
    write_run(store, "waiting", "failed", error="no space left", failures=[
        {"node": "clean", "label": "a.jsonl", "kind": "error", "message": "it broke", "times": 3}])
    tree = read(browser, "/stores/s/runs/waiting")
    assert not tree.xpath("//script") and "no space left" in text_of(tree)
    [row] = tree.xpath("//table[caption='Failed attempts']/tbody/tr")
    assert [text_of(cell) for cell in row] == ["a.jsonl", "clean", "3", "error", "it broke"]


def test_a_run_is_shown_beside_the_run_before_it(store):
    """The report of the run before is damaged, then sound, and then of other datasets."""
    store.write("runs/second/tasks.parquet", b"")
    for run in ("first", "second"):
        store.write(f"runs/{run}/recipe.yaml", b"datasets: {a: {}, b: {}}")
        store.write(f"runs/{run}/report.json", json.dumps({"datasets": {
            name: {"docs": docs, "bytes": 10, "more": []} for name, docs in (
                ("a", 1200 if run == "first" else 1500), ("b", 7))}}).encode())
    write_run(store, "first", facts={"before": "second"})
    browser = client_of({"s": store.local})

    def kept() -> list[list[str]]:
        rows = read(browser, "/stores/s/runs/first").xpath("//table[caption='What it kept']//tr")
        return [[cell.text_content() for cell in row] for row in rows]

    assert kept() == [["Dataset", "Documents", "Documents in second", "Text", "Text in second"],
                      ["a", "1,200", "1,500", "10 B", "10 B"], ["b", "7", "7", "10 B", "10 B"]]
    store.write("runs/second/report.json", b'{"datasets": {"a": {"docs": "x"}}}')
    assert kept()[1] == ["a", "1,200", "–", "10 B", "–"]
    store.write("runs/second/recipe.yaml", b"datasets: {a: {}}")
    assert kept()[1] == ["a", "1,200", "10 B"]
    store.write("runs/first/report.json", b"[")
    assert kept() == []


def test_pages_count_the_documents_of_a_run_once(store):
    """A document that goes through several passes counts once."""
    write_run(store, "first", docs=32_900, docs_read=9253)
    browser = client_of({"s": store.local})
    [shown] = read(browser, "/stores/s/runs/first").xpath("//dl/div[dt='Documents read']/dd")
    assert text_of(shown) == "9,253"
    [count] = read(browser, "/stores/s").xpath("//table[caption='Runs of s']//tr[th='first']/td[3]")
    assert text_of(count) == "9,253"


def test_run_links_to_the_log_if_there_is_one(store):
    """A run that a server has started is a local one, and has a log. A run of a terminal has none."""
    write_run(store, "mine", how="local")
    browser = client_of({"s": store.local})
    assert "/stores/s/runs/mine/log" not in links(read(browser, "/stores/s/runs/mine"))
    write_log(store, "mine", "one\n")
    assert "/stores/s/runs/mine/log" in links(read(browser, "/stores/s/runs/mine"))
    assert "one" in text_of(read(browser, "/stores/s/runs/mine/log"))


def test_log_is_read_a_stretch_at_a_time(store):
    write_log(store, "first", "one\n", "two\x1b[2J\n")
    browser, where, seen = client_of({"s": Path(store.root)}), "/stores/s/runs/first/log", ""
    for _ in range(5):
        tree = read(browser, where)
        seen += "".join(tree.xpath("//main/pre/text()"))
        further = tree.xpath("//a[@rel='next']/@href")
        if not further:
            break
        where = further[0]
    assert seen == "one\ntwo\\x1b[2J\n" and "has ended" in text_of(tree)


def test_runs_are_listed_a_page_at_a_time(store):
    for number in range(RUNS):
        write_run(store, f"run{number:03}")
    browser, where, seen = client_of({"s": Path(store.root)}), "/stores/s", []
    while where:
        tree = read(browser, where)
        seen.append(tree.xpath("//table[caption='Runs of s']/tbody/tr/th/a/text()"))
        where = next(iter(tree.xpath("//a[@rel='next']/@href")), "")
    assert [len(names) for names in seen] == [RUNS, 2]
    runs = [name for names in seen for name in names]
    assert runs == sorted(["first", "second", *(f"run{number:03}" for number in range(RUNS))])


def ids(tree: Any) -> list[str]:
    return [text_of(h) for h in tree.xpath("//ol[@class='documents']/li/h3")]


def all_ids(client: TestClient, where: str) -> list[str]:
    """Return the ids of the documents on all pages from `where` on."""
    seen: list[str] = []
    while where:
        tree = read(client, where)
        seen += ids(tree)
        where = next(iter(tree.xpath("//a[@rel='next']/@href")), "")
    return seen


def api_ids(client: TestClient, kind: str, **query: Any) -> list[str]:
    answer = client.get(f"/api/v1{DATASET}/{kind}", params={"limit": 200, **query})
    assert answer.status_code == 200, answer.text
    return [row["id"] for row in answer.json()["documents"]]


def test_pages_hold_what_the_api_says(browser):
    assert len(api_ids(browser, "kept")) > 50, "more than one page"
    for kind in ("kept", "dropped"):
        assert all_ids(browser, f"{DATASET}?kind={kind}") == api_ids(browser, kind)
    tree = read(browser, f"{DATASET}?kind=quarantined")
    assert ids(tree) == api_ids(browser, "quarantined") and "a.jsonl" in text_of(tree)


def test_counts_lead_to_the_documents_counted(browser):
    tree = read(browser, f"{DATASET}?kind=dropped")
    counted = {}
    for row in tree.xpath("//table[caption='Documents by reason']/tbody/tr"):
        [href] = row.xpath("th//a/@href")
        reason, number = text_of(row.find("th")), int(row.find("td").text.replace(",", ""))
        counted[reason] = number
        assert len(all_ids(browser, href)) == number == len(api_ids(browser, "dropped", reason=reason))
    assert sum(counted.values()) == len(api_ids(browser, "dropped")) and len(counted) >= 3
    assert counted["exact_text"] == 1


def test_many_documents_are_counted_when_somebody_asks(root, tmp_path):
    """The manifest says how many documents there are, here too many to count them for each page."""
    store = Path(shutil.copytree(root, tmp_path / "store"))
    manifest = store / "dropped" / "clean" / MANIFEST
    table = pq.read_table(manifest)
    rows = pc.multiply(table["rows"], COUNTED).cast(table.schema.field("rows").type)
    pq.write_table(table.set_column(table.schema.get_field_index("rows"), "rows", rows), manifest)
    browser = client_of({"main": store})
    tree = read(browser, f"{DATASET}?kind=dropped&source=web")
    assert ids(tree) and not tree.xpath("//table[caption='Documents by reason']")
    [href] = tree.xpath("//a[text()='Count by reason and language']/@href")
    tree = read(browser, href)
    assert tree.xpath("//table[caption='Documents by reason']")
    assert ids(tree) == api_ids(browser, "dropped", source="web")


def test_documents_are_shown_if_they_cannot_be_counted(browser, monkeypatch):
    async def refuse(*_: Any) -> None:
        raise HttpProblem(503, "Too dear", "it takes too long", remedy="ask for less")

    monkeypatch.setattr("pipeline.service.datasets.count_documents", refuse)
    tree = read(browser, f"{DATASET}?kind=dropped")
    assert ids(tree) and text_of(tree).count("Too dear: it takes too long") == 1


def submit(client: TestClient, tree: Any, **fields: str) -> Any:
    """Fill in the form of a page as a browser would, and return the page to which it leads."""
    form = tree.xpath("//form[@method='get']")[0]
    for name, value in fields.items():
        form.fields[name] = value
    pairs = [(name, value) for name, value in form.form_values() if name != "submit"]
    return client.get(form.get("action"), params=pairs)


def test_form_adds_a_filter_and_keeps_the_others(browser):
    tree = read(browser, f"{DATASET}?kind=dropped")
    answer = submit(browser, tree, reason="gopher_short_doc", sort="signals.gopher_words", order="descending")
    tree = lxml.html.document_fromstring(answer.text)
    assert ids(tree) == api_ids(browser, "dropped", reason="gopher_short_doc", sort="signals.gopher_words",
                                descending="true") != []
    answer = submit(browser, tree, signal_name="gopher_words", least="2", most="4")
    tree = lxml.html.document_fromstring(answer.text)
    assert ids(tree) == api_ids(browser, "dropped", reason="gopher_short_doc", signal="gopher_words:2:4",
                                sort="signals.gopher_words", descending="true") != []
    chips = [text_of(chip) for chip in tree.xpath("//ul[@class='chips']/li")]
    assert chips == ["reason: gopher_short_doc Remove", "signal: 2 ≤ gopher_words ≤ 4 Remove", "Remove all"]
    removed = read(browser, tree.xpath("//ul[@class='chips']/li[1]/a/@href")[0])
    assert ids(removed) == api_ids(browser, "dropped", signal="gopher_words:2:4", sort="signals.gopher_words",
                                   descending="true")
    assert len(ids(read(browser, tree.xpath("//ul[@class='chips']/li[3]/a/@href")[0]))) > len(ids(removed))


@pytest.mark.parametrize("fields", [
    {"domain": "example.org"}, {"text": "<script>"}, {"id": "0"}, {"source": "web"}, {"stage": "exact"}])
def test_each_field_of_the_form_is_that_of_the_api(browser, fields):
    answer = submit(browser, read(browser, f"{DATASET}?kind=dropped"), **fields)
    assert ids(lxml.html.document_fromstring(answer.text)) == api_ids(browser, "dropped", **fields)


def test_long_document_is_cut_with_a_note(browser, rows):
    [long] = api_ids(browser, "dropped", domain="example.org", signal="bytes:1000000:")
    where, shown = f"{DATASET}/documents/{long}", []
    while where:
        tree = read(browser, where)
        [text] = tree.xpath("//pre[contains(@class, 'text')]")
        assert rows[-1]["text"].startswith(text.text)
        shown.append(len(text.text))
        note = text_of(tree.xpath("//p[@role='note']")[0])
        assert f"the first {len(text.text):,} of {len(rows[-1]['text']):,} characters" in note
        where = next(iter(tree.xpath("//p[@role='note']/a/@href")), "").partition("#")[0]
    assert shown == [20_000, 200_000, 1_000_000]


def test_the_words_for_which_a_step_dropped_a_document_are_marked(tmp_path):
    rows = [{"text": f"{EVIL[0]} and Lorem Ipsum of {EVIL[6]} me@home.example.com. " * 2},
            {"text": "A tulip here, a TULIP there."},
            {"text": "Words.", "url": "https://a.example/<b>/porn?tulip"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lists.json").write_text('{"en": ["tulip"]}')
    (tmp_path / "recipe.yaml").write_text(RECIPE.partition("datasets:")[0] + """datasets:
  clean:
    from: web
    steps:
    - url
    - {badwords: {lists: lists.json, max_count: 0}}
    - {c4: {min_num_sentences: null, min_words_per_line: null}}
""")
    run_recipe(load_recipe(tmp_path / "recipe.yaml", []), str(tmp_path / "store"), run="r",
               make_backend=make_backend("inline", 1, None))
    store = Store(tmp_path / "store")
    reports = (json.loads(store.read("runs/r/report.json")), collect(store, "r", Log.read(store).get))
    marked = [{row["reason"] for row in report["datasets"]["clean"]["reasons"] if "match" in row["samples"][0]}
              for report in reports]
    assert marked == [{"badwords_count", "lorem_ipsum"}, {"lorem_ipsum"}], "the second recipe is from the store"
    browser = client_of({"s": tmp_path / "store"})
    links_of = {}
    for href in read(browser, "/stores/s/datasets/clean?kind=dropped").xpath("//ol[@class='documents']//a/@href"):
        links_of[text_of(read(browser, href).xpath("//p/b")[0])] = href
    pages = {reason: read(browser, href) for reason, href in links_of.items()}
    marks = {reason: [text_of(mark) for mark in page.xpath("//pre/mark")] for reason, page in pages.items()}
    assert marks == {"lorem_ipsum": ["Lorem Ipsum"] * 2, "hard_blacklisted": [],
                     "badwords_count": []}, "a file that a store's recipe names is not read"
    assert [text_of(mark) for mark in pages["hard_blacklisted"].xpath("//dd//mark")] == ["porn"]
    assert "Nothing is marked: the recipe names a file" in text_of(pages["badwords_count"])
    assert "Nothing is marked" not in text_of(pages["lorem_ipsum"])
    for recipe in ("[", "datasets: [1]", "datasets: {clean: {steps: [1, {}, {c4: 1}, {1: 2}, {c4: {a: 1}}]}}"):
        Store(tmp_path / "store").write("runs/r/recipe.yaml", recipe.encode())
        assert not read(browser, links_of["lorem_ipsum"]).xpath("//pre/mark")


def test_the_latest_run_is_named_where_the_list_does_not_reach_it(store):
    for i in range(FEW + 2):
        write_run(store, f"a{i:02}")
    store.write("report.json", b'{"run": "second"}')
    browser = client_of({"s": Path(store.root)})
    home = read(browser, "/")
    assert "/stores/s/runs/second" in links(home) and "order of their names" in text_of(home)
    assert "order of their names" not in text_of(read(browser, "/stores/s")), "all are there"


def test_duplicate_shows_the_document_that_was_kept(browser, rows):
    [copy] = api_ids(browser, "dropped", reason="exact_text")
    tree = read(browser, f"{DATASET}/documents/{copy}")
    assert "exact_text by exact" in text_of(tree)
    [href] = tree.xpath("//h2[text()='The document that was kept']/following-sibling::p[1]/a/@href")
    twin = read(browser, href)
    assert text_of(twin.xpath("//pre[contains(@class, 'text')]")[0]) == " ".join(rows[0]["text"].split())
    assert "0 words only in this document, 0 only in the kept one" in text_of(tree)


# -- differences -----------------------------------------------------------------------------------------------------
def test_sides_of_a_difference_are_the_texts():
    for seed in range(20):
        left, right = ("\n".join(row["text"] for row in documents(6, s)) for s in (seed, seed + 1))
        mixed = left[:200] + right[:200] + left[200:]
        for row in difference(left, mixed)["rows"]:
            if "left_out" not in row:
                both = sides(row)
                assert ["".join(text for text, _ in side) for side in both] == [row["removed"], row["kept"]]


# -- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", [
    "/stores/absent", "/stores/main/runs/absent", "/stores/main/datasets/absent", f"{DATASET}/documents/absent",
    "/nowhere", "/stores/main/runs/absent/log", f"{DATASET}?sort=absent", f"{DATASET}?kind=absent",
    f"{DATASET}?signal=a:x:", f"{DATASET}?after=x", "/static/absent", f"{DATASET}/documents/00?chars=-1"])
def test_an_error_is_a_page_for_a_browser_and_a_problem_for_others(browser, where):
    page = browser.get(where)
    other = browser.get(where, headers={"Accept": "application/json"})
    tree = read(browser, where, page.status_code)
    assert 400 <= page.status_code < 500
    if "?sort" in where or "?after" in where:                     # the page keeps the form, to put it right
        assert tree.xpath("//form[@method='get']")
        return
    problem = other.json()
    assert other.headers["content-type"] == "application/problem+json" and problem["status"] == page.status_code
    shown = text_of(tree)
    for name in ("title", "detail", "key", "remedy"):
        assert " ".join(problem.get(name, "").split()) in shown


def test_what_nobody_expected_is_a_page_without_a_trace(root, monkeypatch):
    browser = client_of({"main": root})
    monkeypatch.setattr("pipeline.service.pages._section", None)
    tree = read(browser, "/", 500)
    assert "Traceback" not in text_of(tree) and "NoneType" not in text_of(tree)


def test_limits_are_told_as_a_page(root):
    assert "URL too long" in text_of(read(client_of({"main": root}), "/?x=" + "x" * 9000, 414))


# -- who is let in ---------------------------------------------------------------------------------------------------
def test_browser_is_sent_to_sign_in_and_back(root):
    browser = client_of({"main": root}, "nobody")
    answer = browser.get(f"{DATASET}?kind=dropped")
    assert answer.status_code == 303 and answer.headers["location"].startswith("/login?next=")
    for other in (browser.get("/api/v1/stores"), browser.get("/", headers={"Accept": "application/json"})):
        assert other.status_code == 401 and other.headers["content-type"] == "application/problem+json"
    form = read(browser, answer.headers["location"]).forms[0]
    wrong = browser.post(form.get("action"), data={**dict(form.form_values()), "token": "wrong"})
    assert wrong.status_code == 401 and "Not a token of this server" in wrong.text and "set-cookie" not in wrong.headers
    right = browser.post(form.get("action"), data={**dict(form.form_values()), "token": VIEWER})
    assert right.status_code == 303 and right.headers["location"] == f"{DATASET}?kind=dropped"
    tree = read(browser, f"{DATASET}?kind=dropped")
    assert VIEWER not in lxml.html.tostring(tree, encoding="unicode")
    [out] = [form for form in tree.forms if form.get("action") == "/api/v1/session"]
    refused = browser.post(out.get("action"), data={"end": "1", "csrf": "wrong"})
    assert refused.status_code == 403 and browser.get("/").status_code == 200
    ended = browser.post(out.get("action"), data=dict(out.form_values()))
    assert ended.status_code == 303 and ended.headers["location"] == "/login"
    assert browser.get("/").status_code == 303


@pytest.mark.parametrize("next", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)",
                                  "/\t/evil.example", "\\\\evil.example", "", "/a\r\nSet-Cookie: x=y", "/é"])
def test_signing_in_leads_to_this_server_only(root, next):
    browser = client_of({"main": root}, "nobody")
    assert own_path(next) == "/"
    answer = browser.post("/api/v1/session", data={"token": VIEWER, "next": next})
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    assert read(browser, path("login", next=next)).xpath("//input[@name='next']/@value") == ["/"]
    assert own_path("/stores/a?b=c#d") == "/stores/a?b=c#d" and own_path("/") == "/"


def test_roles_see_what_they_may(root):
    for role, status in (("viewer", 403), ("operator", 200)):
        browser = client_of({"main": root}, role)
        tree = read(browser, f"{DATASET}?text=the", status)
        assert bool(ids(tree)) == bool(tree.xpath("//table[caption='Documents by source']")) == (status == 200)
        assert ("Operators only" in text_of(tree)) == (status == 403)
        assert role in text_of(tree.xpath("//header")[0])
        dropped = read(browser, f"{DATASET}?kind=dropped")
        assert dropped.xpath("//table[caption='Documents by reason']") and ids(dropped)
        assert bool(dropped.xpath("//input[@name='text']")) == (status == 200)


# -- files of the pages ----------------------------------------------------------------------------------------------
def test_static_files_are_open_kept_and_plain(root):
    browser = client_of({"main": root}, "nobody")
    for name, kind in STATIC.items():
        answer = browser.get(static_path(name))
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        assert "immutable" in answer.headers["cache-control"]
        addresses = re.sub(r"^ *//.*$|http://www.w3.org/2000/svg", "", answer.text, flags=re.M)
        assert "//" not in addresses, "a foreign address"
    assert "default-src 'none'" in browser.get(static_path("icon.svg")).headers["content-security-policy"]


def test_views_survive_their_address():
    rng = random.Random(3)
    for _ in range(200):
        values = tuple(dict.fromkeys((rng.choice(("source", "reason", "language")), rng.choice((*EVIL, *HOSTILE, "")))
                                     for _ in range(rng.randrange(4))))
        view = BrowseView("dropped", values, ("a:1:", "b::\u202e"), rng.choice(("stored", "signals.a")),
                          rng.random() < 0.5)
        assert BrowseView.read(QueryParams(view.query())) == view
        assert BrowseView.read(QueryParams({"chosen": view.query(), "source": "", "text": ""})) == view
        assert view.query().isascii()
