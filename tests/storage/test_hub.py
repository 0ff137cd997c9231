"""The Hugging Face hub as a source. A small server stands in for the hub, with those parts of its protocol that reading
needs."""

from __future__ import annotations

import hashlib
import json
import re
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import pytest

from pipeline.engine.task import ChangedInput, TaskInputs, TaskSpec
from pipeline.plan.inputs import list_source
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store, StoreError
from tests.storage.servers import Handler, serving

pytest.importorskip("huggingface_hub")
COMMIT = "c" * 40


class _Hub(Handler):
    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path))
        url = urlsplit(self.path)
        if (found := re.fullmatch(r"/api/datasets/u/d/tree/[^/]+/?(.*)", unquote(url.path))) is not None:
            self._tree(found[1], "true" in parse_qs(url.query.lower()).get("recursive", [""]))
        elif re.fullmatch(r"/api/datasets/u/d(/revision/[^/]+)?", url.path):
            self.send_json({"_id": "1", "id": "u/d", "author": "u", "sha": COMMIT, "private": False, "tags": [],
                        "downloads": 0, "likes": 0, "disabled": False, "gated": False})
        elif (found := re.fullmatch(r"/datasets/u/d/resolve/[^/]+/(.*)", unquote(url.path))) is not None:
            self._file(found[1])
        else:
            self.send_json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.seen.append((self.command, self.path))
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        self.send_json([e for e in self._entries() if e["path"] in asked])

    def _entries(self) -> list[dict]:
        files = self.server.files
        folders = {name.rpartition("/")[0] for name in files if "/" in name}
        return [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in sorted(files.items())] + \
               [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in sorted(folders)]

    def _tree(self, folder: str, recursive: bool) -> None:
        top = folder + "/" if folder else ""
        below = [e for e in self._entries() if e["path"].startswith(top)]
        if not below:
            self.send_json({"error": "no such entry"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.send_json([e for e in below if recursive or "/" not in e["path"][len(top):]])

    def _file(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self.send_json({"error": "no such entry"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.send_range(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT,
                               "Accept-Ranges": "bytes"})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving(_Hub, files={}, seen=[]) as server:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.url, "token": False,
                                                       "skip_instance_cache": True})
        monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
        yield server


def rows(n: int, first: int = 0) -> bytes:
    return b"".join(json.dumps({"id": i, "text": f"text number {i} " + "word " * 60}).encode() + b"\n"
                    for i in range(first, first + n))


def test_a_run_on_the_hub_equals_one_on_disk(hub, tmp_path):
    hub.files = {"data/a.jsonl": rows(4000), "data/b.jsonl": rows(50, 4000), "README.md": b"x"}
    for name, data in hub.files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    hashes = []
    for place in (tmp_path / "in/data", "hf://datasets/u/d/data", "hf://datasets/u/d/data/*.jsonl"):
        recipe, store = tmp_path / "recipe.yaml", tmp_path / f"store{len(hashes)}"
        recipe.write_text(f"version: 1\nsources: {{s: {{read: jsonl, path: '{place}'}}}}\n"
                          f"datasets: {{d: {{from: s, steps: []}}}}\nrun: {{partition: 500KB}}\n")
        run_recipe(load_recipe(recipe, []), str(store), make_backend=make_backend("inline", 1, None), report=False)
        hashes.append(dataset_hash(Store(store), "d"))
    assert hashes[0] == hashes[1] == hashes[2]


def test_a_file_is_known_by_its_hash(hub, tmp_path):
    hub.files = {"data/a.jsonl": rows(5)}
    [one] = list_source("s", ["hf://datasets/u/d/data/a.jsonl"])
    assert list_source("s", ["hf://datasets/u/d/data/*.jsonl"])[0].etag == one.etag
    assert one.etag == hashlib.sha1(rows(5)).hexdigest()
    hub.files = {"data/a.jsonl": rows(5).upper()}
    with pytest.raises(ChangedInput):
        TaskInputs(TaskSpec("k", "m:C", "d", {}), Store(tmp_path), str(tmp_path)).fetch(one.arg())


def test_the_hub_is_no_store(hub, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    hub.files = {"data/a.jsonl": rows(5)}
    recipe.write_text("version: 1\nsources: {s: {read: jsonl, path: hf://datasets/u/d/data}}\n"
                      "datasets: {d: {from: s, steps: []}}\n")
    with pytest.raises(StoreError, match="can be a source or where results are published, but not a store"):
        run_recipe(load_recipe(recipe, []), "hf://datasets/u/d/store", make_backend=make_backend("inline", 1, None))
