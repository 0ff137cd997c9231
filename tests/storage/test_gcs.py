"""Google Cloud Storage through gcsfs, on a small server that speaks its JSON API."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import re
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import pytest
from fsspec.utils import glob_translate

from pipeline.plan.file_list import FileList
from pipeline.plan.inputs import InputError, check_patterns, list_source
from pipeline.plan.objects import ListingJournal, walk
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store
from pipeline.store.gcs import Gcs
from pipeline.store.log import Fenced, Log
from pipeline.store.records import FileInfo, PartRecord
from pipeline.store.remote import in_parallel
from tests.hurried import HurriedClock
from tests.storage.servers import Handler, serving

pytest.importorskip("gcsfs")


class _Gcs(Handler):
    def _any(self) -> None:
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        with self.server.lock:
            self.server.seen += 1
            if self.server.moody and self.server.seen % 5 == 0:
                self.send_json({"error": {"code": 503, "message": "backend error"}}, 503)
                return
            self._route(url.path, query, body)

    do_GET = do_POST = do_PUT = do_DELETE = _any

    def _route(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path.startswith("/upload/"):
            self._upload(query, body)
        elif (found := re.fullmatch(r"/storage/v1/b/bucket/o/(.+)/rewriteTo/b/bucket/o/(.+)", path)) is not None:
            source = self.server.objects.get(unquote(found[1]))
            if source is None:
                self.send_json({"error": {"code": 404, "message": "Not Found"}}, 404)
                return
            self._put(unquote(found[2]), source[0])
            self.send_json({"kind": "storage#rewriteResponse", "done": True})
        elif path.rstrip("/") == "/storage/v1/b/bucket/o":
            if self.server.on_list(query):
                self.send_json({"error": {"code": 403, "message": "no more"}}, 403)
            else:
                self.send_json(self._page(**query))
        elif (found := re.fullmatch(r"(/download)?/storage/v1/b/bucket/o/(.+)", path)) is not None:
            self._object(unquote(found[2]), query, bool(found[1]))
        else:
            self.send_json({"error": {"code": 404, "message": "Not Found"}}, 404)

    def _page(self, prefix: str = "", delimiter: str = "", startOffset: str = "", pageToken: str = "",
              **_: str) -> dict[str, object]:
        """Answer a listing: at most `page` objects and folders, in order, after those of the page before."""
        names = [n for n in self.server.objects if n.startswith(prefix) and n >= startOffset]
        folders = {n[:n.index("/", len(prefix)) + 1] for n in names if delimiter and "/" in n[len(prefix):]}
        direct = {n for n in names if not (delimiter and "/" in n[len(prefix):])}
        found = [n for n in sorted(direct | folders) if n > pageToken]
        page = self.server.page
        answer = {"kind": "storage#objects", "items": [self._meta(n) for n in found[:page] if n in direct],
                  "prefixes": [n for n in found[:page] if n in folders]}
        return {**answer, "nextPageToken": found[page - 1]} if len(found) > page else answer

    def _object(self, name: str, query: dict[str, str], media: bool) -> None:
        if name not in self.server.objects:
            self.send_json({"error": {"code": 404, "message": "Not Found"}}, 404)
        elif self.command == "DELETE":
            del self.server.objects[name]
            self.send(b"", 204, {})
        elif media or query.get("alt") == "media":
            self.send_range(self.server.objects[name][0], {"Content-Type": "application/octet-stream"})
        else:
            self.send_json(self._meta(name))

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        if query.get("uploadType") == "multipart":
            mark = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            _, head, data = body.split(b"--" + mark, 2)
            name = json.loads(head.split(b"\n\n", 1)[1])["name"]
            data = data.split(b"\n\n", 1)[1].rpartition(b"\n--" + mark)[0]
        elif "upload_id" not in query:                          # a resumable upload begins
            number = str(len(self.server.uploads))
            self.server.uploads[number] = [query.get("name") or json.loads(body)["name"], b"",
                                           query.get("ifGenerationMatch")]
            self.send(b"", 200, {"Location": f"{self.server.url}/upload/storage/v1/b/bucket/o?upload_id={number}"})
            return
        else:
            upload = self.server.uploads[query["upload_id"]]
            upload[1] += body
            if not re.fullmatch(r"bytes .*/\d+", self.headers.get("Content-Range", "")) or \
                    len(upload[1]) < int(self.headers["Content-Range"].rpartition("/")[2]):
                self.send(b"", 308, {"Range": f"bytes=0-{len(upload[1]) - 1}"})
                return
            name, data = upload[:2]
            query = {"ifGenerationMatch": upload[2]} if upload[2] else {}
        if query.get("ifGenerationMatch") == "0" and name in self.server.objects:
            self.send_json({"error": {"code": 412, "message": "conditionNotMet"}}, 412)
            return
        self._put(name, data)
        self.send_json(self._meta(name))

    def _put(self, name: str, data: bytes) -> None:
        self.server.generation += 1
        self.server.objects[name] = (data, self.server.generation)

    def _meta(self, name: str) -> dict[str, str]:
        data, generation = self.server.objects[name]
        return {"kind": "storage#object", "name": name, "bucket": "bucket", "size": str(len(data)),
                "generation": str(generation), "etag": f"E{generation}", "storageClass": "STANDARD",
                "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(), "crc32c": str(zlib.crc32(data)),
                "timeCreated": "2026-01-01T00:00:00Z", "updated": "2026-01-01T00:00:00Z"}


@pytest.fixture
def gcs(monkeypatch, tmp_path):
    with serving(_Gcs, objects={}, uploads={}, lock=threading.Lock(), generation=0, seen=0, moody=False, page=500,
                 on_list=lambda query: None) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(Gcs, "clock", HurriedClock())
        for protocol in ("gs", "gcs"):
            monkeypatch.setitem(fsspec.config.conf, protocol, {"endpoint_url": server.url, "token": "anon",
                                                               "skip_instance_cache": True})
        yield server


def commit(log: Log, key: str) -> None:
    """Append a record and flush the log. If another driver has taken the log over, either call may raise the error: the
    background thread of the log checks the lease every five seconds, perhaps before `append`."""
    log.append(record(key))
    log.flush()


def record(key: str) -> PartRecord:
    return PartRecord(key, "m:C", "d", "00000001-00000001", {"a": FileInfo("objects/k/a", 1, "s", "c")}, {})


def test_files(gcs, tmp_path):
    store, data, gcs.page = Store("gs://bucket/some/store"), random.Random(1).randbytes(20 << 20), 100
    assert store.put_absent("a/x", b"one") and not store.put_absent("a/x", b"two")
    assert store.read("a/x") == b"one" and store.size("a/x") == 3 and store.size("a/y") is None
    (tmp_path / "up").write_bytes(data)
    store.upload(str(tmp_path / "up"), "a/up")
    assert Path(store.fetch("a/up", str(tmp_path))).read_bytes() == data
    assert store.read_range("a/up", 100, 200) == data[100:200] and store.read_range("a/x", 10, 20) == b""
    with store.open("a/up") as f:
        f.seek(-100, 2)
        assert f.read() == data[-100:]
    assert store.copy_all(("a/x", f"many/{i:04d}") for i in range(250)) == 250
    assert [e.path for e in store.entries("many")] == [f"many/{i:04d}" for i in range(250)]
    assert store.remove_all(store.list("many")) == 250 and list(store.list("many")) == []
    store.remove("many/0000")
    with pytest.raises(FileNotFoundError):
        store.copy_all([("a/nothing", "b")])


def test_one_of_many_creates_and_the_other_driver_is_fenced(gcs):
    store = Store("gs://bucket/some/store")
    won = list(in_parallel(lambda i: store.put_absent("race", f"{i}".encode()), range(16), 16))
    assert sum(won) == 1 and store.read("race") == f"{won.index(True)}".encode()
    first = Log.open(store, run="first")
    first.append(record("a"))
    first.flush()
    second = Log.open(Store(store.root), run="second", takeover=True)
    with pytest.raises(Fenced):
        commit(first, "b")
    second.close()
    assert [r.key for r in Log.read(store).records()] == ["a"]


TREE = ["a.txt", "a/1.txt", "a/2.md", "a/b/3.txt", "a/b/c/4.txt", "a.d/5.txt", "a0/6.txt", "b/.h/7.txt", "b/8.txt",
        "b/é.txt", ".c/9.txt", "[d]/e.txt"]
PATTERNS = ["**", "**/*.txt", "*", "*/*.txt", "a*/*", "a/**/*.txt", "*/b/*", "[ab]/**", "*/*/*/4.txt", "a/?.*", ".*/*",
            "**/b/**/*.txt", "a?[!1]/*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_wildcards_match_page_by_page_what_fsspec_matches(gcs, pattern):
    """From any path on, in order, though a page holds three names."""
    gcs.objects |= {f"top/in/{name}": (b"x", i) for i, name in enumerate([*TREE, "z/"])} | {"top/inn": (b"x", 99)}
    remote, gcs.page = Gcs("gs://bucket/top/in"), 3
    expected = [p[len("bucket/top/in/"):] for p in remote.fs.glob(f"bucket/top/in/{pattern}")]
    expected = sorted(p for p in expected if p in TREE)
    fits = re.compile(glob_translate(pattern)).match
    for after in ["", *TREE, "a/b/c", "zz"]:
        walked = [e.path for e in walk(remote, "", pattern.split("/"), lambda path: True, after) if fits(e.path)]
        assert walked == sorted(walked)
        assert [p for p in walked if p > after] == [p for p in expected if p > after], after


def test_an_interrupted_listing_goes_on_where_it_stopped(gcs, tmp_path):
    gcs.objects |= {f"in/{i // 100}/{i:04d}.txt": (b"x", i) for i in range(1000)}
    gcs.page, store, starts = 70, Store(tmp_path), []

    def run(pattern: str, lasts: int) -> FileList:
        """List the source. The server refuses every request for a page after the first `lasts`."""
        def asked(query: dict[str, str]) -> bool:
            starts.append(query.get("startOffset", ""))
            return len(starts) > lasts

        starts.clear()
        gcs.on_list = asked
        return list_source("s", [pattern], journal=ListingJournal(store, chunk=100))

    for pattern, last in (("gs://bucket/in", "in/3/0399.txt"), ("gs://bucket/in/*/*.txt", "in/2/0299.txt")):
        whole, requests = list(run(pattern, 100)), len(starts)
        for path in list(store.list("listing")):
            store.remove(path)
        with pytest.raises(StoreError):
            run(pattern, 8)
        assert list(run(pattern, 100)) == whole and len(whole) == 1000
        assert last in starts and len(starts) <= requests - 4, "it began after what was listed before"


def test_a_bucket_that_does_not_exist_is_not_an_empty_one(gcs):
    with pytest.raises(StoreError, match=r"gs://other/in"):
        list_source("s", ["gs://other/in/*.txt"])


def test_a_check_for_files_ends_with_the_first_page_that_has_one(gcs):
    gcs.objects |= {f"in/{i:04d}.{'txt' if i > 150 else 'log'}": (b"x", i) for i in range(1000)}
    gcs.page, starts = 100, []
    gcs.on_list = lambda query: starts.append(query.get("startOffset", ""))
    # gcsfs asks for an object and lists the folder of that name at the same time, and drops what answers last
    for pattern, suffixes, pages in (("gs://bucket/in", (), {1 + 1}), ("gs://bucket/in/*.txt", (), {2}),
                                     ("gs://bucket/in", (".txt",), {1 + 2}),
                                     ("gs://bucket/in/0999.txt", (".gz",), {0, 1})):
        starts.clear()
        check_patterns("s", [pattern], suffixes=suffixes)
        assert len(starts) in pages, pattern
    for pattern, suffixes in (("gs://bucket/in/*.gz", ()), ("gs://bucket/in", (".gz",)), ("gs://bucket/inn", ())):
        with pytest.raises(InputError, match=f"no object matches '{re.escape(pattern)}'"):
            check_patterns("s", ["gs://bucket/in", pattern], suffixes=suffixes)


def test_a_run_removes_the_journal_of_its_listing(gcs, tmp_path):
    for name in "ab":
        Store("gs://bucket/in").write(f"{name}.jsonl", json.dumps({"text": name * 30}).encode())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nsources: {s: {read: jsonl, path: 'gs://bucket/in/*.jsonl'}}\n"
                      "datasets: {d: {from: s, steps: [{exact: {}}]}}\n")
    store, given = Store(tmp_path / "store"), load_recipe(recipe, [])
    first = ListingJournal(store, chunk=1)
    assert len(list_source("s", ["gs://bucket/in/*.jsonl"], journal=first)) == 2
    assert len(list(store.list("listing"))) == 2
    gcs.on_list = lambda query: starts.append(query.get("startOffset", ""))  # None: go on
    starts: list[str] = []
    summary = run_recipe(given, str(tmp_path / "store"), make_backend=make_backend("inline", 1, None), report=False)
    assert summary.datasets == {"d": 2} and starts[0] == "in/b.jsonl"
    assert not list(store.list("listing"))


def test_a_run_equals_one_on_disk(gcs, tmp_path):
    rows = b"".join(json.dumps({"text": f"number {i} " + "word " * 50}).encode() + b"\n" for i in range(3000))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(rows)
    Store("gs://bucket/in").write("a.jsonl", rows)
    hashes = []
    for place, store in ((str(tmp_path / "in"), str(tmp_path / "store")), ("gs://bucket/in/*.jsonl", "gs://bucket/s")):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"version: 1\nsources: {{s: {{read: jsonl, path: '{place}'}}}}\n"
                          f"datasets: {{d: {{from: s, steps: [{{exact: {{}}}}]}}}}\nrun: {{partition: 300KB}}\n")
        run_recipe(load_recipe(recipe, []), store, make_backend=make_backend("inline", 1, None), report=False)
        hashes.append(dataset_hash(Store(store), "d"))
    assert hashes[0] == hashes[1]


def test_a_stuttering_backend(gcs, monkeypatch):
    async def hurried(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)

    # gcsfs itself waits one to two seconds before it repeats a request
    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=hurried))
    store = Store("gs://bucket/some/store")
    gcs.moody = True
    for i in range(8):
        assert store.put_absent(f"a/{i}", b"%d" % i)
    assert [store.read(p) for p in store.list("a")] == [b"%d" % i for i in range(8)]
