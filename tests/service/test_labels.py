"""Labels of documents: everybody gets the same draw of documents, and labels are stored, compared, and written to files
for training a classifier."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lxml.html
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from pipeline.cli.app import run_command
from pipeline.service import audit
from pipeline.service.drawing import drawn
from pipeline.service.html import path
from pipeline.service.label_routes import text_hash
from pipeline.service.labels import DamagedLabel, Label, Labels, latest, summary
from pipeline.service.playground import Changes, Playground
from pipeline.store.fs import Store
from tests.service.conftest import problem
from tests.service.corpus import publish_rows
from tests.service.test_pages import client_of, read, text_of
from tests.service.test_tune_page import press, row
from tests.service.tuned_site import CHAINS, make_site, run, sides, write_recipe

DATASET = "/stores/s/datasets/clean"
API = f"/api/v1{DATASET}/labels"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with two runs, the second with a higher threshold. The file `sides.json` says where each run put the
    documents."""
    top = make_site(tmp_path_factory.mktemp("labels"), "signals", "all")
    first = sides(top / "store")
    (top / "store/runs/r").rename(top / "store/runs/low")
    steps = json.loads(json.dumps(CHAINS["signals"]))
    steps[0]["gopher_quality"]["min_doc_words"] = 200
    write_recipe(top, steps, "all", "high.yaml")
    run(top, top / "store", "high.yaml")
    (top / "sides.json").write_text(json.dumps([first, sides(top / "store")]))
    return top


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def client(site: Path) -> TestClient:
    made = client_of({"s": site / "store"}, "operator")
    made.headers["Accept"] = "application/json"
    return made


def next_of(client: TestClient, by: str, **asked: str) -> Any:
    answer = client.get(f"{API}/next", params={"by": by, **asked})
    assert answer.status_code == 200, answer.text
    return answer.json()


def label(client: TestClient, by: str, name: str, document: Any) -> Any:
    return client.post(API, json={"document": document["id"], "label": name, "by": by, "text": document["text_hash"]})


def label_all(client: TestClient, by: str, names: Any, **asked: str) -> list[str]:
    """Label all documents of a draw. Returns their ids in order."""
    ids = []
    while (document := next_of(client, by, **asked)["document"]) is not None:
        assert label(client, by, names(document), document).status_code == 201
        ids.append(document["id"])
    return ids


def test_everybody_gets_the_same_documents_and_each_once(client: TestClient, site: Path) -> None:
    ann = label_all(client, "ann", lambda _: "good", run="r")
    assert sorted(ann) == sorted(sides(site / "store")) and ann != sorted(ann)
    state = next_of(client, "ann", run="r")
    assert (state["labelled"], state["of"], state["document"]) == (len(ann), len(ann), None)
    other = client_of({"s": site / "store"}, "operator")                      # another server
    assert [next_of(other, "bob", run="r")["document"]["id"], next_of(other, "ann", run="r")["document"]] == [
        ann[0], None]


def test_documents_on_which_runs_differ_are_those_that_one_dropped(client: TestClient, made: Path) -> None:
    low, high = json.loads((made / "sides.json").read_text())
    differ = {id for id in low if (low[id][0] == "kept") != (high[id][0] == "kept")}
    assert set(label_all(client, "ann", lambda _: "bad", draw="runs", run="r", other="low")) == differ != set()
    assert problem(client.get(f"{API}/next", params={"by": "a", "draw": "runs", "run": "r", "other": "r"}),
                   422)["key"] == "other"


def test_documents_at_the_edge_change_sides_first_when_the_threshold_moves(site: Path) -> None:
    game = Playground(Store(site / "store"), "r", "clean")
    order = [document.id for document in drawn(game, "edge", "0.min_doc_words", None)]
    near = Changes({0: {"min_doc_words": 150}}), Changes({0: {"min_doc_words": 250}})
    moved = {id for changes in near for id, *_ in game.outcomes(game.moved(changes)).documents()}
    all_moved = {id for value in (1, 10_000) for id, *_ in
                 game.outcomes(game.moved(Changes({0: {"min_doc_words": value}}))).documents()}
    assert set(order) == all_moved and moved and len(moved) < len(order)
    assert moved <= set(order[:len(moved) + 4]), "bins of the threshold hold a few documents each"


def test_labels_are_files_that_are_never_changed_and_every_server_tells_the_same(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    books = [Labels(store, "d") for _ in range(4)]

    def work(i: int) -> None:
        for n in range(10):
            books[i].put(Label(f"{n:032x}", "good" if i % 2 else "bad", f"person {i}", "0" * 32))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(list(store.list("labels"))) == 40 and not list(store.list("log"))
    assert books[0].all() == books[3].all() == Labels(store, "d").all()
    again = books[0].put(Label(f"{3:032x}", "bad", "person 0", "0" * 32))
    assert again in books[1].all() and len(books[1].all()) == 40, "the same label is there once"
    books[0].put(Label(f"{3:032x}", "good", "person 0", "0" * 32))
    assert latest(books[2].all())[f"{3:032x}"]["person 0"].label == "good"
    path = store.local / "labels/d/00000007.json"
    path.write_bytes(path.read_bytes().replace(b"good", b"evil").replace(b"bad", b"odd"))
    with pytest.raises(DamagedLabel):
        Labels(store, "d").all()


def test_agreement_is_that_of_the_definition() -> None:
    rng = random.Random(5)
    given = {f"{n}": (rng.choice(("good", "bad", "unsure")), rng.choice(("good", "bad", "unsure"))) for n in range(90)}
    labels = [Label(id, name, by, "") for id, pair in given.items() for by, name in zip(("ann", "bob"), pair)]
    labels += [Label("alone", "good", "cy", "")]
    result = summary(labels, 5)
    both = [pair for pair in given.values() if "unsure" not in pair]
    agree = sum(a == b for a, b in both) / len(both)
    marginals = [sum(pair[i] == "good" for pair in both) / len(both) for i in range(2)]
    chance = marginals[0] * marginals[1] + (1 - marginals[0]) * (1 - marginals[1])
    [pair] = result["pairs"]
    assert pair["people"] == ["ann", "bob"] and pair["both"] == len(both)
    assert pair["kappa"] == pytest.approx((agree - chance) / (1 - chance), abs=1e-4)
    assert result["disagreed"] == sum(set(pair) == {"good", "bad"} for pair in given.values())
    assert len(result["disagreements"]) == 5 and result["documents"] == 91
    assert result["unsure"] == sum(pair == ("unsure", "unsure") for pair in given.values())
    same = summary([Label("1", "good", by, "") for by in ("a", "b")], 5)["pairs"]
    assert same == [{"people": ["a", "b"], "both": 1, "agree": 1, "kappa": None}]


def test_the_export_trains_a_classifier(client: TestClient, site: Path, tmp_path: Path) -> None:
    few = {"draw": "runs", "run": "r", "other": "low"}
    ids = label_all(client, "ann", lambda d: "good" if d["chars"] > 700 else "bad", **few)
    first = next_of(client, "bob", **few)["document"]
    assert label(client, "bob", "bad" if first["chars"] > 700 else "good", first).status_code == 201
    stale = next_of(client, "bob", **few)["document"] | {"text_hash": "0" * 32}
    label(client, "ann", "unsure", stale)
    label(client, "bob", "good", stale)
    label(client, "bob", "good", {"id": "f" * 32, "text_hash": "0" * 32})
    answer = client.get(f"{API}/export")
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert {row["id"] for row in rows} == set(ids[2:])
    assert answer.headers["x-left-out"] == "1 disagreed, 1 gone, 1 changed"
    assert {row["label"] for row in rows} == {"good", "bad"}
    file = tmp_path / "labels.parquet"
    file.write_bytes(client.get(f"{API}/export", params={"format": "parquet"}).content)
    table = pq.read_table(file)                                               # of our own making, a moment ago
    assert sorted(table["text"].to_pylist()) == sorted(row["text"] for row in rows)
    (tmp_path / "labels.jsonl").write_text(answer.text)
    for name in ("labels.parquet", "labels.jsonl"):
        assert run_command(["classifier", "train", "--labelled", str(tmp_path / name), "--out",
                            str(tmp_path / f"{name}.bin"), "--epochs", "1", "--dim", "4"]) == 0
    assert not list(Path(client.app.state.settings.stores["s"]).glob("labels/*/*.jsonl"))


def test_personal_data_leaves_only_when_an_operator_asks(tmp_path: Path) -> None:
    mail = "jane.roe@home.example.com"
    text = f"write to {mail} " + "and so on " * 10
    document = {"id": "0" * 32, "text": text, "url": f"https://example.org/?m={mail}", "source": "web",
                "language": "en", "date": None, "signals": {"a": 1.0}, "meta": {}}
    publish_rows(Store(tmp_path / "store"), tmp_path / "scratch", [document], 1, name="clean")
    client = client_of({"s": tmp_path / "store"}, "operator")
    assert label(client, "ann", "good", document | {"text_hash": text_hash(text)}).status_code == 201
    pages = [client.get(where) for where in (f"{API}/export", f"{DATASET}/label?by=ann&document={document['id']}")]
    assert all("and so on" in page.text and "home.example" not in page.text for page in pages)
    [whole] = client.get(f"{API}/export", params={"unmasked": "true"}).text.splitlines()
    assert json.loads(whole)["text"] == text
    assert [entry for entry in audit.entries(Store(tmp_path / "store"), "", 10) if "unmasked" in entry]


def test_an_address_at_the_cut_of_an_export_is_masked(tmp_path: Path) -> None:
    text = "so " * 33_330 + "jane.roe@home.example.com and so on"
    assert text.index("jane") == 99_990
    document = {"id": "0" * 32, "text": text, "url": "https://example.org/", "source": "web", "language": "en",
                "date": None, "signals": {"a": 1.0}, "meta": {}}
    publish_rows(Store(tmp_path / "store"), tmp_path / "scratch", [document], 1, name="clean")
    client = client_of({"s": tmp_path / "store"}, "operator")
    assert label(client, "ann", "good", document | {"text_hash": text_hash(text)}).status_code == 201
    for asked, end in (({}, "so email@exam"), ({"unmasked": "true"}, "so jane.roe@h")):
        [row] = client.get(f"{API}/export", params=asked).text.splitlines()
        written = json.loads(row)["text"]
        assert len(written) == 100_000 and written.endswith(end)


def test_many_people_are_compared_by_what_both_have_labelled() -> None:
    labels = [Label(f"{n}", "good", f"p{n + k}", "") for n in range(1500) for k in (0, 1)]
    assert [pair["both"] for pair in summary(labels, 5)["pairs"]] == [1] * 1500           # of a million pairs


def test_pages_label_without_a_script_and_show_where_people_disagree(site: Path) -> None:
    browser = client_of({"s": site / "store"})
    tree = read(browser, f"{DATASET}/labels")
    assert f"{DATASET}/labels" in {a.get("href") for a in read(browser, DATASET).iter("a")}
    form = next(form for form in tree.forms if form.get("action") == f"{DATASET}/label")
    form.fields["by"] = "ann"
    where = browser.get(form.get("action"), params=form.form_values())
    assert where.status_code == 200
    seen = {}
    for by, pressed in (("ann", "good"), ("bob", "bad")):
        tree = read(browser, f"{DATASET}/label?by={by}&run=r")
        assert press(browser, tree, "/label", label=pressed, csrf="wrong").status_code == 403
        seen[by] = tree.xpath("//input[@name='document']/@value")
        answer = press(browser, tree, "/label", label=pressed)
        assert answer.status_code == 303
        following = read(browser, answer.headers["location"])
        assert following.xpath("//input[@name='document']/@value") != seen[by]
        assert f"labelled {pressed}" in text_of(following.xpath("//*[@role='status']")[0])
    assert seen["ann"] == seen["bob"]
    tree = read(browser, f"{DATASET}/labels")
    assert row(tree, "Agreement", "ann and bob")[:2] == ["1", "0"]
    hrefs = tree.xpath("//table[starts-with(caption, 'Documents on')]//a/@href")
    [again] = [href for href in hrefs if "by=bob" in href]
    assert press(browser, read(browser, again), "/label", label="good").status_code == 303
    assert not read(browser, f"{DATASET}/labels").xpath("//table[starts-with(caption, 'Documents on')]")
    hostile = path("stores", "s", "datasets", "clean", "label", by="\u202e<script>", run="r")
    assert "\\u202e<script>" in text_of(read(browser, hostile))


def test_bad_questions_are_problems_and_viewers_do_not_label(client: TestClient, site: Path) -> None:
    for asked, key in (({"by": ""}, "by"), ({"by": "a", "run": "gone"}, "run"), ({"by": "a", "draw": "x"}, "draw"),
                       ({"by": "a", "draw": "edge", "run": "r"}, "threshold"),
                       ({"by": "a", "draw": "edge", "run": "r", "threshold": "0.nope"}, "nope")):
        answer = client.get(f"{API}/next", params=asked)
        assert problem(answer, answer.status_code)["key"] == key and 400 <= answer.status_code < 500
    good = {"document": "0" * 32, "label": "good", "by": "ann", "text": "0" * 32}
    for wrong in ({"label": "best"}, {"by": "\x00"}, {"text": "x"}, {"document": ""}, {"more": 1}):
        problem(client.post(API, json={**good, **wrong}), 422)
    assert client.get(API.replace("clean", "gone")).status_code == 404
    viewer = client_of({"s": site / "store"}, "viewer")
    assert viewer.post(API, json=good).status_code == viewer.post(f"{DATASET}/label", data=good).status_code == 403
    assert viewer.get(f"{API}/export", params={"unmasked": "true"}).status_code == 403
    assert not read(viewer, f"{DATASET}/labels").xpath("//main//form")
    assert client.get(API).json()["documents"] == 0
    tree = lxml.html.document_fromstring(viewer.get(f"{DATASET}/label?by=a").text)
    assert "Operators only" in text_of(tree)
