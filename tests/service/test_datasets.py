"""The API about published documents: what leaves the server, to whom, and how mistakes are reported."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from pipeline.service.app import create_app
from pipeline.service.datasets import answer
from pipeline.service.documents import difference
from pipeline.service.duck import Stop
from pipeline.service.problems import HttpProblem
from pipeline.service.settings import ServiceSettings
from pipeline.store.dataset import publish_quarantine, stream_quarantine
from pipeline.store.fs import Store
from tests.service.corpus import HOSTILE, documents, publish_rows, put_part
from tokenizer.shards.layout import Manifest

OPERATOR, VIEWER = "operator-0123456789abcdef", "viewer-0123456789abcdefg"
MAIL = "jane.roe@home.example.com"
BASE = "/api/v1/stores/main/datasets"


def row(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"id": hashlib.md5(name.encode()).hexdigest(), "text": text, "url": "https://example.org/a", "source": "web",
            "language": "en", "date": None, "signals": {"a": 1.0}, "meta": {}, **more}


TWIN = row("twin", "\n".join(["One two three four.", f"Write to {MAIL} for more.", "Five six seven eight."] * 3))
COPY = row("copy", TWIN["text"].replace("three", "THREE", 1), reason="near_duplicate", stage="minhash",
           meta={"minhash": {"kept": TWIN["id"], "similarity": 0.9}})
LONG = row("long", "word " * 1_000_000)
EVIL = row("evil", f"<script>alert('{MAIL}')</script>\u202e\x1b[2J\x00", url=f"https://example.org/?m={MAIL}",
           signals={"a": math.nan}, meta={"x": [MAIL], "<b>": "\u2066", "n": [math.nan, -math.inf]},
           source="</script>", language="\u202een")
DEEP = row("deep", "deep", meta={"minhash": 3, "d": json.loads("[" * 500 + "]" * 500)})
KEPT = [TWIN, LONG, EVIL, DEEP, *documents(40, 3)]
DROPPED = [COPY, row("orphan", "gone", reason="exact", stage="exact", meta={"exact": {"kept": "f" * 32}}),
           *documents(20, 4, dropped=True)]
BAD = [{"id": "e" * 32, "source": "web", "file": "f", "record": i, "stage": "html", "reason": "crashed",
        "detail": f"at {MAIL}", "bytes": None} for i in range(2)]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("datasets")
    publish_rows(Store(top / "store"), top / "scratch", KEPT, dropped=DROPPED, quarantined=BAD, parts=3)
    return top / "store"


def client(root: Path, token: str | None = OPERATOR) -> TestClient:
    app = create_app(ServiceSettings({"main": str(root)}, operator_token=OPERATOR, viewer_token=VIEWER, rate=10_000,
                                     burst=10_000))
    return TestClient(app, base_url="http://127.0.0.1:8700", raise_server_exceptions=False,
                      headers={"Authorization": f"Bearer {token}"} if token else {})


@pytest.fixture(scope="module")
def viewer(root) -> TestClient:
    return client(root, VIEWER)


@pytest.fixture(scope="module")
def operator(root) -> TestClient:
    return client(root)


def got(client: TestClient, path: str, **parameters: Any) -> Any:
    answered = client.get(BASE + path, params=parameters)
    assert answered.status_code == 200, answered.text
    return answered.json()


def test_datasets_and_their_columns(viewer):
    [listed] = got(viewer, "")["datasets"]
    assert listed["dataset"] == "d"
    for kind, rows in (("kept", KEPT), ("dropped", DROPPED)):
        assert listed[kind]["documents"] == len(rows)
        assert listed[kind]["text_bytes"] == sum(len(r["text"].encode()) for r in rows)
    one = got(viewer, "/d")
    assert {"signals.a", "signals.b", "signals.bytes", "text"} <= set(one["columns"]["kept"])
    assert {"reason", "stage"} <= set(one["columns"]["dropped"]) - set(one["columns"]["kept"])
    assert one["quarantined"]["documents"] == len(BAD)


def test_a_copy_of_a_store_without_what_was_dropped(tmp_path):
    publish_rows(Store(tmp_path / "store"), tmp_path / "scratch", documents(6, 1), 1)
    shutil.rmtree(tmp_path / "store/dropped")
    api = client(tmp_path / "store", VIEWER)
    [listed] = got(api, "")["datasets"]
    assert (listed["kept"]["documents"], listed["dropped"]["documents"]) == (6, 0)
    assert got(api, "/d")["columns"]["dropped"] == []
    answered = api.get(f"{BASE}/d/dropped")
    assert answered.status_code == 404 and str(tmp_path) not in answered.text


def test_pages_hold_every_document_once_and_no_personal_data(viewer):
    seen, after = [], ""
    while after is not None:
        answered = viewer.get(f"{BASE}/d/kept", params={"limit": 7, "after": after})
        assert answered.status_code == 200 and MAIL not in answered.text and "home.example" not in answered.text
        assert not {"\u202e", "\u2066", "\x1b", "\x00"} & set(answered.text)              # they come as escapes
        page = answered.json()
        seen += [d["id"] for d in page["documents"]]
        after = page["next"]
    assert seen == [r["id"] for r in KEPT]


def test_every_filter_of_the_api(viewer, operator):
    def count(client: TestClient = viewer, kind: str = "dropped", **filter: Any) -> list[str]:
        return sorted(d["id"] for d in got(client, f"/d/{kind}", limit=200, show="id", **filter)["documents"])

    def wanted(takes: Any, rows: Any = DROPPED) -> list[str]:
        return sorted(r["id"] for r in rows if takes(r))

    assert count(reason=["short", "exact"]) == wanted(lambda r: r["reason"] in ("short", "exact"))
    assert count(stage="c4", source=["web", "co'de"]) == wanted(
        lambda r: r["stage"] == "c4" and r["source"] in ("web", "co'de"))
    assert count(language="") == wanted(lambda r: r["language"] == "")
    assert count(signal="b:2:5") == wanted(lambda r: 2 <= r["signals"].get("b", -1) <= 5)
    assert count(signal=["b::5", "b:3:"]) == wanted(lambda r: 3 <= r["signals"].get("b", -1) <= 5)
    assert count(id=DROPPED[3]["id"][:6]) == [DROPPED[3]["id"]]
    for text in HOSTILE:
        assert count(operator, "kept", text=text, unmasked=True) == wanted(lambda r, text=text: text in r["text"], KEPT)


def test_sorting_and_sums_of_the_api(viewer):
    found = got(viewer, "/d/kept", sort="signals.bytes", descending=True, limit=5)["documents"]
    assert [d["id"] for d in found] == [r["id"] for r in sorted(
        KEPT, key=lambda r: (-len(r["text"].encode()), r["id"]))[:5]]
    groups = got(viewer, "/d/dropped/counts", by=["stage", "reason"])["groups"]
    assert sum(g["documents"] for g in groups) == len(DROPPED)
    spread = got(viewer, "/d/kept/histogram", of="b", bins=10, least=0, most=10)
    values = [r["signals"]["b"] for r in KEPT if "b" in r["signals"]]
    assert spread["counts"] == [values.count(float(i)) for i in range(10)]


def test_a_viewer_cannot_search_in_texts(viewer, operator):
    """Whether a page has a next one, or how many documents it has, would tell whether an address occurs."""
    for text in (MAIL, "jane.roe", "One two"):
        for path, more in (("", {"limit": 1}), ("/counts", {"by": "source"}), ("/histogram", {"of": "a"})):
            answered = viewer.get(f"{BASE}/d/kept{path}", params={**more, "text": text})
            assert answered.status_code == 403 and answered.json()["key"] == "text" and answered.json()["remedy"]
            assert "next" not in answered.json()
    for text in (MAIL, "jane.roe", "roe@home"):
        assert got(operator, "/d/kept", text=text)["documents"] == []
        found = got(operator, "/d/kept", text=text, unmasked=True)["documents"]
        assert {d["id"] for d in found} == {TWIN["id"], EVIL["id"]} and all(text in d["match"] for d in found)
    [twin] = got(operator, "/d/kept", text="One two")["documents"]
    assert "One two" in twin["match"] and MAIL not in json.dumps(twin)
    assert got(operator, "/d/kept/counts", by="source", text=MAIL)["documents"] == 2


def test_personal_data_in_odd_columns_stays_inside(tmp_path):
    """Dates and languages are stored as they were found: neither counts nor the place after a page show them."""
    rows = [row(str(i), "text", date=f"{i} of {MAIL}", language=f"{i}{MAIL}", url=f"http://{MAIL}/") for i in range(4)]
    publish_rows(Store(tmp_path / "store"), tmp_path / "scratch", rows, 1)
    api = client(tmp_path / "store", VIEWER)
    for by in ("language", "domain"):
        found = api.get(f"{BASE}/d/kept/counts", params={"by": by})
        assert found.json()["documents"] == 4 and MAIL not in found.text
    for sort in ("date", "language"):
        assert api.get(f"{BASE}/d/kept", params={"sort": sort, "limit": 2}).status_code == 403
        assert len(got(api, "/d/kept", sort=sort)["documents"]) == 4                   # no place is needed
        assert len(got(client(tmp_path / "store"), "/d/kept", sort=sort, limit=2, unmasked=True)["documents"]) == 2


def test_only_operators_see_personal_data_and_it_is_noted(viewer, operator, root):
    path = f"/d/documents/{TWIN['id']}"
    assert MAIL not in viewer.get(BASE + path).text
    assert viewer.get(BASE + path, params={"unmasked": True}).status_code == 403
    assert viewer.get(f"{BASE}/d/kept", params={"unmasked": True}).status_code == 403
    before = len(list(root.glob("audit/*")))
    assert got(operator, path, unmasked=True)["document"]["text"] == TWIN["text"]
    notes = sorted(root.glob("audit/*"))
    assert len(notes) == before + 1 and json.loads(notes[-1].read_bytes())["unmasked"]["id"] == TWIN["id"]
    assert MAIL not in operator.get(BASE + path).text                               # unless asked


def test_a_duplicate_names_the_kept_document_and_what_differs(viewer):
    found = got(viewer, f"/d/documents/{COPY['id'][:12]}")
    assert (found["kind"], found["id"]) == ("dropped", COPY["id"])
    assert found["verdict"] == {"stage": "minhash", "reason": "near_duplicate", "kept": TWIN["id"], "similarity": 0.9}
    twin = found["twin"]
    assert (twin["id"], twin["kind"], twin["document"]["source"]) == (TWIN["id"], "kept", "web")
    difference = twin["difference"]
    assert (difference["only_removed"], difference["only_kept"]) == (1, 1)
    [changed] = [r for r in difference["rows"] if r.get("pieces")]
    [[_, a, b, c, d]] = [p for p in changed["pieces"] if p[0] == "replace"]
    assert (changed["removed"][a:b], changed["kept"][c:d]) == ("THREE", "three")
    orphan = got(viewer, f"/d/documents/{DROPPED[1]['id']}")
    assert orphan["twin"] == {"id": "f" * 32, "kind": None, "difference": None}


def test_the_beginning_of_a_kept_and_a_dropped_id_is_refused(tmp_path):
    kept, dropped, bad = ({**rows[0], "id": prefix + "0" * 28} for rows, prefix in (
        (KEPT, "aaa1"), (DROPPED, "aaa2"), (BAD, "aab3")))
    publish_rows(Store(tmp_path / "store"), tmp_path / "scratch", [kept], 1, dropped=[dropped], quarantined=[bad])
    api = client(tmp_path / "store", VIEWER)
    for beginning, ids in (("aaa", (kept["id"], dropped["id"])), ("aa", (kept["id"], dropped["id"]))):
        refused = api.get(f"{BASE}/d/documents/{beginning}")
        assert refused.status_code == 400 and refused.json()["key"] == "id"
        assert all(id in refused.json()["detail"] for id in ids)
    for beginning, kind in (("aaa1", "kept"), ("aaa2", "dropped"), ("aab", "quarantined"), (kept["id"], "kept")):
        assert got(api, f"/d/documents/{beginning}")["kind"] == kind


def test_the_difference_of_equal_and_of_unlike_texts():
    assert difference("a b\nc", "a b\nc")["only_removed"] == 0
    unlike = difference("a b c", "x y z")
    assert (unlike["only_removed"], unlike["only_kept"]) == (3, 3)


def test_hostile_documents_come_whole_and_harmless(viewer, operator):
    found = got(viewer, f"/d/documents/{EVIL['id']}")["document"]
    assert found["text"].startswith("<script>alert(") and found["signals"]["a"] == "nan"
    assert MAIL not in json.dumps(found)
    raw = got(operator, f"/d/documents/{EVIL['id']}", unmasked=True)["document"]
    assert raw["text"] == EVIL["text"] and raw["meta"] == {**EVIL["meta"], "n": ["NaN", "-Infinity"]}
    long = got(viewer, f"/d/documents/{LONG['id']}", chars=20)["document"]
    assert (long["text"], long["chars"]) == (LONG["text"][:20], len(LONG["text"]))
    assert json.loads(got(viewer, f"/d/documents/{DEEP['id']}")["document"]["meta"]) == DEEP["meta"]


def test_a_document_that_split_shards_could_not_encode_has_its_entry(tmp_path):
    store = Store(str(tmp_path / "store"))
    publish_rows(store, tmp_path / "scratch", KEPT)
    entry = {**BAD[0], "id": KEPT[0]["id"], "stage": "encode", "reason": "error:ValueError"}
    record = put_part(store, tmp_path / "scratch", "f" * 32, "shards:web/encode", [], quarantined=[entry])
    publish_quarantine(store, stream_quarantine("web"), [record])
    empty = Manifest.of("web.en.b00", "train", "0" * 64, 400, 0, ())
    store.write("shards/web.en.b00/split=train/shards.json", empty.dumps().encode())
    found = got(client(tmp_path / "store"), f"/d/documents/{KEPT[0]['id']}")
    assert [(e["dataset"], e["stage"]) for e in found["quarantine"]] == [("shards=web", "encode")]


def test_quarantined_documents(viewer):
    found = got(viewer, f"/d/documents/{'e' * 32}")
    assert found["kind"] == "quarantined" and [e["record"] for e in found["quarantine"]] == [0, 1]
    assert MAIL not in json.dumps(found) and MAIL not in viewer.get(f"{BASE}/d/quarantined").text


@pytest.mark.parametrize(("path", "parameters", "status", "key"), [
    ("/nosuch/kept", {}, 404, "dataset"),
    ("/..%2fdropped%2fd/kept", {}, 404, None),
    ("/d/objects", {}, 422, "kind"),
    ("/d/kept", {"sort": "nosuch"}, 400, "sort"),
    ("/d/kept", {"sort": "signals.nosuch"}, 400, "sort"),
    ("/d/kept", {"sort": "id; drop table x"}, 400, "sort"),
    ("/d/kept", {"reason": "x"}, 400, "reason"),
    ("/d/kept", {"after": "nonsense"}, 400, "after"),
    ("/d/kept", {"limit": 0}, 422, "limit"),
    ("/d/kept", {"limit": 10**30}, 422, "limit"),
    ("/d/kept", {"show": "nosuch"}, 400, "show"),
    ("/d/kept", {"signal": "a:x:"}, 422, "signal"),
    ("/d/kept", {"signal": "a:nan:"}, 422, "signal"),
    ("/d/kept", {"signal": "nosuch:1:"}, 400, "signal"),
    ("/d/kept", {"text": "x" * 1001}, 422, "text"),
    ("/d/kept/counts", {}, 422, "by"),
    ("/d/kept/counts", {"by": "text"}, 400, "by"),
    ("/d/kept/histogram", {"of": "nosuch"}, 400, "signal"),
    ("/d/kept/histogram", {"of": "a", "least": "inf"}, 422, "least"),
    ("/d/documents/nosuch", {}, 404, "id"),
    ("/d/documents/%00", {}, 404, "id"),
    ("/nosuch/documents/x", {}, 404, "dataset"),
])
def test_mistakes_are_problems(viewer, path, parameters, status, key):
    answered = viewer.get(BASE + path, params=parameters)
    assert answered.status_code == status, answered.text
    assert answered.headers["content-type"] == "application/problem+json"
    problem = answered.json()
    assert key is None or (problem["key"] == key and problem["remedy"])
    assert "Traceback" not in answered.text and "/tmp" not in answered.text


def test_without_a_token_there_is_nothing(root):
    assert client(root, None).get(f"{BASE}/d/kept").status_code == 401
    assert client(root, "wrong").get(f"{BASE}/d/documents/x").status_code == 401


def test_a_damaged_part_is_a_problem(tmp_path):
    publish_rows(Store(tmp_path / "store"), tmp_path / "scratch", documents(30, 1), 2)
    part = next((tmp_path / "store/datasets/d").glob("part-000001*"))
    data = bytearray(part.read_bytes())
    part.unlink()
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    answered = client(tmp_path / "store").get(f"{BASE}/d/kept")
    assert answered.status_code == 409 and part.name in answered.text and "store verify --repair" in answered.text
    assert str(tmp_path) not in answered.text


def test_the_query_ends_when_the_client_goes():
    stop, begun = Stop(600), threading.Event()

    def query() -> None:
        begun.set()
        while True:
            stop.check()

    async def receive() -> dict[str, str]:
        await asyncio.to_thread(begun.wait)
        return {"type": "http.disconnect"}

    with pytest.raises(HttpProblem) as e:
        asyncio.run(answer(Request({"type": "http"}, receive), stop, query))
    assert e.value.status == 499
