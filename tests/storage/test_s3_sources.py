"""The page that shows a document's source beside its text, where the source is in S3: what is fetched, from where it
may be fetched, and what an answer tells about the storage."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.service import sources
from pipeline.service.duck import QueryLimits
from pipeline.service.fetch_source import fetch
from pipeline.service.query import Queries
from pipeline.store.remote import connect
from tests.service.conftest import PATIENT_S, patient, problem  # noqa: F401  (a fixture)
from tests.service.test_pages import client_of, read
from tests.service.test_sources import EVIL, MAIL, documents, page_of, record, source
from tests.storage.s3_server import KEYS

RECIPE = """
version: 1
sources:
  crawl: {read: warc, path: "BUCKET/in/*.warc"}
  packed: {read: warc, path: ["BUCKET/in/packed.warc.gz"]}
  lines: {read: jsonl, path: BUCKET/in/lines}
  files: {read: text, path: "BUCKET/in/texts/**"}
datasets:
  pages: {from: [crawl, packed], steps: [{html: {}}]}
  rest: {from: [lines, files], steps: [exact]}
"""


@pytest.fixture
def top(bucket: str, tmp_path: Path) -> Path:
    """A folder with a store whose run has read its sources from a bucket."""
    lines = "".join(json.dumps({"text": f"line {i} {EVIL}"}) + "\n" for i in range(3)).encode()
    objects = {"a.warc": b"".join(record(i) for i in range(3)),
               "packed.warc.gz": b"".join(gzip.compress(record(i)) for i in range(3, 6)),
               "lines/a.jsonl": lines, "lines/b.jsonl.gz": gzip.compress(lines.replace(b"line", b"packed")),
               "texts/deep/a b.txt": f"a file {EVIL}".encode()}
    for name, data in objects.items():
        connect(bucket).write(f"in/{name}", data)
    connect(bucket).write("inner/secret.txt", b"hunter2")
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("BUCKET", bucket))
    run_recipe(load_recipe(tmp_path / "recipe.yaml", []), str(tmp_path / "store"), run="main",
               make_backend=make_backend("inline", 1, None))
    return tmp_path


def client(top: Path, *roots: str, role: str = "operator") -> TestClient:
    return client_of({"main": top / "store"}, role, allowed_roots=roots)


def refused(api: TestClient, dataset: str, id: str, status: int) -> dict[str, Any]:
    """Ask for the source of a document, which must be refused with `status`. Checks that the answer has no secret, no
    address of the storage and no local path. Returns it."""
    document: dict[str, Any] = problem(source(api, dataset, id), status)
    for secret in (*KEYS.values(), "s3://", os.environ["AWS_ENDPOINT_URL"], "hunter2", "/tmp"):
        assert secret not in json.dumps(document)
    assert document["key"] and document["remedy"]
    return document


@pytest.mark.slow
def test_a_source_in_a_bucket_is_what_the_reader_got(top: Path, bucket: str) -> None:
    api = client(top, f"{bucket}/in")
    for name, i in (("crawl", 1), ("packed", 5)):
        row = documents(api, "pages", name)[i % 3]
        shown = source(api, "pages", row["id"], unmasked=True).json()
        assert (shown["what"], shown["text"], shown["cut"]) == ("record", page_of(i), False)
    rows = documents(api, "rest", "lines")
    for what, text in (("line", "line 1"), ("read", "packed 2")):
        row = next(row for row in rows if row["text"].startswith(text))
        shown = source(api, "rest", row["id"], unmasked=True).json()
        assert (shown["what"], f"{text} {EVIL}") == (what, json.loads(shown["text"])["text"] if what == "line" else
                                                     shown["text"])
    [row] = documents(api, "rest", "files")
    answer = source(api, "rest", row["id"])
    assert answer.json()["what"] == "file" and answer.json()["text"].startswith("a file") and MAIL not in answer.text
    tree = read(api, f"/stores/main/datasets/rest/documents/{row['id']}/source")
    assert tree.xpath("//main//pre")[0].text.startswith("a file <script>")


def test_only_what_is_needed_of_an_object_is_fetched(top: Path, bucket: str, s3: Any) -> None:
    data = b"".join(record(i) for i in range(3))
    connect(bucket).write("in/a.warc", data + b"x" * (80 << 20))
    api = client(top, f"{bucket}/in")
    row = documents(api, "pages", "crawl")[1]
    before = len(s3.requests)
    assert source(api, "pages", row["id"], unmasked=True).json()["text"] == page_of(1)
    received = sum(request.received for request in s3.requests[before:])
    assert len(data) < received < 66 << 20


def test_only_operators_and_only_below_the_allowed_addresses(top: Path, bucket: str) -> None:
    row = documents(client(top), "pages", "crawl")[0]
    for place in (f"{bucket}/inn", f"{bucket}/in/texts", f"{bucket}-2/in", "/", "hf://in"):
        assert "--allow-root" in refused(client(top, place), "pages", row["id"], 403)["remedy"]
    problem(source(client(top, f"{bucket}/in", role="viewer"), "pages", row["id"]), 403)


def test_a_forged_recipe_in_the_store_leads_nowhere_else(top: Path, bucket: str, s3: Any) -> None:
    """Whoever may write to the store may write a recipe there; the object storage is not even asked."""
    api = client(top, f"{bucket}/in")
    [row] = documents(api, "rest", "files")
    before = len(s3.requests)
    for path, root, status in (
            (f"{bucket}/inner/*", None, 403), (f"{bucket}/inner/secret.txt", None, 403),
            (f"{bucket}/in/*", f"{bucket}/inner", 403), (f"{bucket}/in/../inner/*", None, 403),
            (f"{bucket}/in/%2e%2e/inner/*", None, 403), (f"{bucket}/*", None, 403), (f"{bucket}*/in/*", None, 403),
            (f"{bucket}/in/*", "https://www.example.org/", 409), (f"{bucket}/in/*", "/etc", 409),
            (f"s3://user@{bucket[5:]}/in/*", None, 403), (f"simplecache::{bucket}/in/*", None, 409),
            ("http://127.0.0.1:1/in/*", None, 409), ("hf://datasets/in/*", None, 409), ("memory://in/*", None, 409),
            ([f"{bucket}/in/*", "/etc/*"], None, 409), ([f"{bucket}/in/*", f"{bucket}/inner/*"], None, 403)):
        forged = {"read": "text", "path": path, **({"root": root} if root else {})}
        (top / "store/runs/main/recipe.yaml").write_text(json.dumps({"sources": {"files": forged}}))
        refused(api, "rest", row["id"], status)
    assert len(s3.requests) == before


def test_the_process_that_fetches_refuses_a_forged_document(bucket: str, s3: Any, tmp_path: Path) -> None:
    """The address of the object is known only there: a document names its file."""
    request = {"patterns": [f"{bucket}/in/*"], "root": None, "roots": [f"{bucket}/in"], "reader": "text",
               "target": str(tmp_path / "source"), "most": 100}
    for file in ("../inner/secret.txt", "deep/../../inner/secret.txt", "..\\inner", "%2e%2e/inner", "a\nb", "x::y"):
        locator = {"file": file, "offset": 0, "record": 0, "sub": ""}
        assert fetch({**request, "locator": locator}) == {"refused": True}
    assert fetch({**request, "locator": {**locator, "file": "gone"}})["failed"] and os.listdir(tmp_path) == []


@pytest.mark.slow
def test_an_object_that_has_gone_or_is_too_large_is_said(top: Path, bucket: str) -> None:
    api = client(top, f"{bucket}/in")
    small: Any = api.app
    [row] = documents(api, "rest", "files")
    connect(bucket).remove("in/texts/deep/a b.txt")
    assert "not there" in refused(api, "rest", row["id"], 409)["detail"]
    packed = next(row for row in documents(api, "rest", "lines") if row["text"].startswith("packed"))
    assert source(api, "rest", packed["id"]).status_code == 200
    connect(bucket).write("in/lines/b.jsonl.gz", os.urandom(5000))
    small.state.queries = Queries(QueryLimits(seconds=PATIENT_S, fetched_bytes=4000))
    assert re.search("5,000 bytes.*4,000", refused(api, "rest", packed["id"], 409)["detail"])


def test_storage_that_refuses_is_said_without_its_address(top: Path, bucket: str, s3: Any) -> None:
    api = client(top, f"{bucket}/in")
    [row] = documents(api, "rest", "files")
    s3.trouble(lambda method, path, n: "deny")
    assert "object storage" in refused(api, "rest", row["id"], 409)["detail"]


def test_storage_that_keeps_silent_is_given_up_in_time(top: Path, bucket: str, s3: Any,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    api = client(top, f"{bucket}/in")
    [row] = documents(api, "rest", "files")
    monkeypatch.setattr(sources, "READ_S", 2.0)
    s3.trouble(lambda method, path, n: "hang")
    assert "not fetched" in refused(api, "rest", row["id"], 409)["detail"]
