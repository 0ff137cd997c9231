"""The API and the pages about shards: they agree with the manifests, the order and the reader of shards, and show no
personal data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.app import run_command
from tests.service.conftest import problem
from tests.service.shard_site import MAIL, make_site
from tests.service.test_pages import client_of, read, text_of
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.mixture.steps import step_at, steps
from tokenizer.shards.reader import ShardSet

API = "/api/v1/stores/main/shards"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def api(root: Path) -> Any:
    return client_of({"main": root})


@pytest.fixture(scope="module")
def curriculum(root: Path) -> Curriculum:
    return Curriculum.load(root / "runs/main/curriculum.json")


@pytest.fixture(scope="module")
def train(root: Path) -> ShardSet:
    return ShardSet(root / "shards/web/split=train")


def got(api: Any, path: str, **params: Any) -> Any:
    answer = api.get(API + path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_facts_are_those_of_the_manifest_and_the_curriculum(api, curriculum, train):
    listed = got(api, "")
    [facts] = [s for s in listed["sets"] if s["split"] == "train"]
    assert (facts["stream"], facts["tokens"], facts["documents"]) == ("web", train.tokens, train.documents_count)
    assert facts["tokenizer"] == {"sha256": train.manifest.tokenizer, "vocab_size": 300, "eos": train.eos}
    assert facts == got(api, "/web/train")
    order = listed["order"]
    assert (order["run"], order["hash"], order["steps"]) == ("main", curriculum.order, curriculum.steps)
    assert [p["name"] for p in order["phases"]] == ["first", "second"]
    assert [s["tokens"] for p in order["phases"] for s in p["streams"]] == [p.tokens for p in curriculum.phases]


def test_find_says_what_the_command_says_and_which_steps_read_the_document(api, root, curriculum, train, capsys):
    at = Order(curriculum).locate(0, curriculum.samples)
    everything = []
    for span in train.documents(0, train.tokens)[:8]:
        assert run_command(["shards", "find", str(root / "shards/web/split=train"), "--id", span.id, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        [place] = got(api, "/find", id=span.id[:12], split="train")["places"]
        assert {name: place[name] for name in told} == told and place["tokens"] == span.stop - span.start
        reads = [step for step in steps(curriculum) for n in range(step.first, step.stop)
                 if at.window[n] * at.sequence[n] < span.stop and (at.window[n] + 1) * at.sequence[n] >= span.start]
        assert [r["step"] for r in place["steps"]] == [step.number + 1 for step in reads]
        everything += reads
    assert everything
    assert span.id in {p["id"] for p in got(api, "/find", id=span.id[0])["places"]}
    assert got(api, "/find", id="x")["places"] == []


def test_a_step_has_the_documents_whose_tokens_its_windows_hold(api, curriculum, train):
    for number in (1, curriculum.phases[0].steps, curriculum.steps):
        step, rows, after = step_at(curriculum, number), [], 0
        while after is not None:
            page = got(api, f"/steps/{number}", limit=1, after=after)
            rows, after = rows + page["rows"], page["next"]
        assert [row["sample"] for row in rows] == list(range(step.first, step.stop))
        for row in rows:
            start = row["window"] * row["tokens"]
            spans = {s.id: s for s in train.documents(start, start + row["tokens"])}
            assert {d["id"] for d in row["documents"]} == spans.keys()
            for d in row["documents"]:
                assert start + d["tokens"][0] + (spans[d["id"]].start < start) * -d["begins"] == spans[d["id"]].start
                assert (d["dataset"], d["source"]) == ("clean", "web") and MAIL not in d["url"]
            window = got(api, f"/web/train/windows/{row['window']}", length=row["tokens"])
            assert row["documents"] == window["documents"]


def test_personal_data_is_masked_unless_an_operator_asks_which_is_noted(root):
    viewer, operator = (client_of({"main": root}, role) for role in ("viewer", "operator"))
    path, details = f"{API}/steps/1", {"details": True, "limit": 50}
    assert "alert(" in viewer.get(path, params=details).text and MAIL not in viewer.get(path, params=details).text
    problem(viewer.get(path, params={**details, "unmasked": True}, headers={"Accept": "*/*"}), 403)
    before = len(list(root.glob("audit/*")))
    assert MAIL in operator.get(path, params={**details, "unmasked": True}).text
    notes = sorted(root.glob("audit/*"))
    assert len(notes) == before + 1 and json.loads(notes[-1].read_bytes())["unmasked"]["step"] == 1


@pytest.mark.parametrize(("path", "params", "status", "key"), [
    ("/nosuch/train", {}, 404, "stream"), ("/..%2f../train", {}, 404, None), ("/web/test", {}, 422, "split"),
    ("/find", {}, 422, "id"), ("/find", {"id": "0", "run": "nosuch"}, 404, "run"), ("/steps/0", {}, 422, "step"),
    ("/steps/100000", {}, 404, "step"), ("/steps/1", {"limit": 1000}, 422, "limit"),
    ("/steps/1", {"run": "../main"}, 404, "run"), ("", {"run": "../runs/main"}, 404, "run"),
    ("", {"run": "\0"}, 404, "run"), ("/steps/1", {"run": "\0"}, 404, "run"), ("", {"run": "ü" * 200}, 404, "run"),
    ("/web/train/windows/1", {}, 422, "length"),
    ("/web/train/windows/99999999", {"length": 32}, 404, "window")])
def test_mistakes_are_problems(api, path, params, status, key):
    document = problem(api.get(API + path, params=params, headers={"Accept": "*/*"}), status)
    assert key is None or (document["key"] == key and document["remedy"])


def test_a_damaged_document_table_is_told_and_not_read(root, tmp_path):
    shutil.copytree(root, tmp_path / "store")
    [table] = (tmp_path / "store/shards/web/split=train").glob("*.parquet")
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.unlink()
    table.write_bytes(bytes(data))
    client = client_of({"main": tmp_path / "store"})
    assert table.name in problem(client.get(f"{API}/find?id=0", headers={"Accept": "*/*"}), 409)["detail"]


def test_find_uses_the_lookup_index_of_a_set(api, root, tmp_path, train, monkeypatch):
    shutil.copytree(root, tmp_path / "store")
    indexed = client_of({"main": tmp_path / "store"})
    for split in ("train", "val"):
        assert run_command(["shards", "index", str(tmp_path / f"store/shards/web/split={split}"), "-q"]) == 0
    monkeypatch.setattr("pipeline.service.shard_sets.places", lambda *_: pytest.fail("all documents were read"))
    ids = [span.id for span in train.documents(0, train.tokens)[:3]]
    answers = [got(indexed, "/find", id=id) for id in (*ids, ids[0][:1], "x", "0" * 32)]
    monkeypatch.undo()
    for id, answer in zip((*ids, ids[0][:1], "x", "0" * 32), answers, strict=True):
        expected = got(api, "/find", id=id)
        assert sorted(answer["places"], key=str) == sorted(expected["places"], key=str)
    [index] = (tmp_path / "store/shards/web/split=train").glob("lookup-*.index")
    index.write_bytes(index.read_bytes()[:-16])
    assert index.name in problem(indexed.get(f"{API}/find?id={ids[0]}", headers={"Accept": "*/*"}), 409)["detail"]


def test_pages_lead_from_a_document_to_its_windows_and_steps_and_back(api, train):
    [row] = got(api, "/steps/1", limit=1)["rows"]
    start = row["window"] * row["tokens"]
    span = train.documents(start, start + row["tokens"])[0]
    tree = read(api, f"/stores/main/datasets/clean/documents/{span.id}")
    hrefs = tree.xpath("//table[caption='Places in the shards']//a/@href")
    assert any("/windows/" in h for h in hrefs) and any("/step?" in h for h in hrefs)
    for href in hrefs[:6]:
        shown = read(api, href)
        assert shown.xpath(f"//a[contains(@href, '{span.id}')]")
        assert MAIL not in text_of(shown)
    tree = read(api, f"/stores/main/shards?id={span.id[:10]}")
    assert span.id in text_of(tree.xpath("//table[caption='Places in the shards']")[0])
    assert len(tree.xpath("//table[caption='Phases']/tbody/tr")) == 2
    assert "whose id begins so" in text_of(read(api, "/stores/main/shards?id=nosuch"))
    read(api, "/stores/main/shards/step?step=99999", 404)


def test_a_store_without_shards_says_so(tmp_path):
    (tmp_path / "store").mkdir()
    client = client_of({"main": tmp_path / "store"})
    assert client.get(API).json() == {"sets": [], "order": None}
    assert "There are none" in text_of(read(client, "/stores/main/shards"))
    problem(client.get(f"{API}/steps/1", headers={"Accept": "*/*"}), 404)
