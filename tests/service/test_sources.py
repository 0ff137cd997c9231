"""The source of a document beside its text: what the reader read, from where it may be read again, by whom, and that it
is never shown as HTML."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.base import confinement
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.service import sources
from pipeline.service.read_source import LONGEST
from tests.corpus import sentences
from tests.service.conftest import problem
from tests.service.test_pages import client_of, read

MAIL = "jane.roe@home.example.com"
EVIL = f"<script>alert('{MAIL}')</script><img src=https://evil.example onerror=alert(1)>\u202e"
RECIPE = """
version: 1
sources:
  crawl: {read: warc, path: in/*.warc}
  lines: {read: jsonl, path: in/*.jsonl}
  files: {read: text, path: in/texts}
datasets:
  pages: {from: crawl, steps: [{html: {}}]}
  rest: {from: [lines, files], steps: [exact]}
"""


def page_of(i: int) -> str:
    text = "".join(f"<p>{' '.join(sentences()[i * 6 + k:i * 6 + k + 6])}</p>" for k in range(4))
    return f"<html><head><title>Page {i}</title></head><body><article>{text}{EVIL}</article></body></html>"


def record(i: int) -> bytes:
    body = page_of(i).encode()
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + body
    head = (f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: https://example.org/{i}\r\nWARC-Date: "
            f"2026-01-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:{i:032x}>\r\nContent-Type: application/http; "
            f"msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n")
    return head.encode() + http + b"\r\n\r\n"


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("sources")
    (top / "in/texts").mkdir(parents=True)
    (top / "in/a.warc").write_bytes(b"".join(record(i) for i in range(3)))
    (top / "in/a.jsonl").write_text("".join(json.dumps({"text": f"line {i} {EVIL}"}) + "\n" for i in range(3)))
    (top / "in/texts/a.txt").write_text(f"a file {EVIL}")
    (top / "recipe.yaml").write_text(RECIPE)
    run_recipe(load_recipe(top / "recipe.yaml", []), str(top / "store"), run="main",
               make_backend=make_backend("inline", 1, None))
    return top


def client(top: Path, role: str = "operator", roots: tuple[str, ...] = ("in",)) -> TestClient:
    return client_of({"main": top / "store"}, role, allowed_roots=tuple(str(top / root) for root in roots))


def documents(api: TestClient, dataset: str, source: str) -> list[dict[str, Any]]:
    answer = api.get(f"/api/v1/stores/main/datasets/{dataset}/kept", params={"source": source, "show": "text"})
    assert answer.status_code == 200 and answer.json()["documents"], answer.text
    rows: list[dict[str, Any]] = answer.json()["documents"]
    return rows


def source(api: TestClient, dataset: str, id: str, **params: Any) -> Any:
    return api.get(f"/api/v1/stores/main/datasets/{dataset}/documents/{id}/source", params=params,
                   headers={"Accept": "*/*"})


def test_the_source_is_what_the_reader_got(top):
    api = client(top)
    for i, row in enumerate(documents(api, "pages", "crawl")):
        shown = source(api, "pages", row["id"], unmasked=True).json()
        assert (shown["what"], shown["text"], shown["cut"]) == ("record", page_of(i), False)
    for i, row in enumerate(documents(api, "rest", "lines")):
        shown = source(api, "rest", row["id"], unmasked=True).json()
        assert (shown["what"], json.loads(shown["text"])) == ("line", {"text": f"line {i} {EVIL}"})
    [row] = documents(api, "rest", "files")
    shown = source(api, "rest", row["id"], unmasked=True, chars=6).json()
    assert (shown["what"], shown["text"], shown["cut"]) == ("file", "a file", True)


@pytest.mark.parametrize("size", [LONGEST - 1, LONGEST + 1])
def test_the_size_of_a_line_that_is_not_read_whole_is_not_known(tmp_path, size):
    (tmp_path / "in").mkdir()
    line = json.dumps({"text": "x" * (size - 1 - len('{"text": ""}'))}) + "\n"
    (tmp_path / "in/a.jsonl").write_text(line)
    (tmp_path / "recipe.yaml").write_text("version: 1\nsources: {lines: {read: jsonl, path: in/*.jsonl}}\n"
                                          "datasets: {rest: {from: lines}}\n")
    run_recipe(load_recipe(tmp_path / "recipe.yaml", []), str(tmp_path / "store"), run="main",
               make_backend=make_backend("inline", 1, None))
    api = client(tmp_path)
    [row] = documents(api, "rest", "lines")
    assert source(api, "rest", row["id"], chars=9).json()["bytes"] == (len(line) if size < LONGEST else None)
    [shown] = read(api, f"/stores/main/datasets/rest/documents/{row['id']}/source").xpath(
        "//dt[text()='Size']/../dd/text()")
    assert shown.startswith("more than 4") == (size > LONGEST)


def test_personal_data_is_masked_unless_asked_for_which_is_noted(top):
    api = client(top)
    [row] = documents(api, "rest", "files")
    assert MAIL not in source(api, "rest", row["id"]).text
    before = len(list((top / "store/audit").glob("*")))
    assert MAIL in source(api, "rest", row["id"], unmasked=True).text
    notes = sorted((top / "store/audit").glob("*"))
    assert len(notes) == before + 1 and json.loads(notes[-1].read_bytes())["unmasked"]["source"] is True


def test_only_operators_and_only_below_allowed_folders(top):
    [row] = documents(client(top), "rest", "files")
    problem(source(client(top, "viewer"), "rest", row["id"]), 403)
    for roots in ((), ("store",)):
        document = problem(source(client(top, roots=roots), "rest", row["id"]), 403)
        assert "--allow-root" in document["remedy"] and str(top) not in json.dumps(document)
    assert not read(client(top, "viewer"), f"/stores/main/datasets/rest/documents/{row['id']}").xpath(
        "//a[text()='Source beside the text']")


def test_a_link_out_of_the_folder_and_a_file_that_has_gone_are_refused(top, tmp_path):
    shutil.copytree(top, tmp_path / "site")
    site = tmp_path / "site"
    recipe = site / "store/runs/main/recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(top), str(site)))
    facts = site / "store/runs/main/run.json"
    facts.write_text(facts.read_text().replace(str(top), str(site)))
    api = client(site)
    [row] = documents(api, "rest", "files")
    assert source(api, "rest", row["id"]).status_code == 200
    (site / "in/texts/a.txt").unlink()
    problem(source(api, "rest", row["id"]), 409)
    (site / "in/texts/a.txt").symlink_to("/etc/passwd")
    problem(source(api, "rest", row["id"]), 403)


def test_the_process_that_reads_gets_no_secrets(top, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    started: list[Any] = []
    real = subprocess.Popen
    monkeypatch.setattr(sources.subprocess, "Popen", lambda *a, **k: started.append(k["env"]) or real(*a, **k))
    api = client(top)
    [row] = documents(api, "rest", "files")
    assert source(api, "rest", row["id"]).status_code == 200 and "AWS_SECRET_ACCESS_KEY" not in started[0]
    if confinement.support()["landlock"]:
        monkeypatch.setenv("NETRC", str(top / "in/texts/a.txt"))
        problem(source(api, "rest", row["id"]), 409)


def test_the_page_shows_the_source_as_text_beside_the_text(top):
    api = client(top)
    row = documents(api, "pages", "crawl")[0]
    tree = read(api, f"/stores/main/datasets/pages/documents/{row['id']}")
    [href] = tree.xpath("//a[text()='Source beside the text']/@href")
    tree = read(api, href)                                        # no script or image of the document is in it
    [raw, text] = tree.xpath("//main//pre")
    assert raw.text.startswith("<html><head><title>Page 0") and "<script>alert(" in raw.text and MAIL not in raw.text
    assert text.text.strip() and "<p>" not in text.text
