"""The store on a real S3 protocol: failing requests, conditional writes, long listings, large objects."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from pipeline.engine.task import TaskInputs, TaskSpec
from pipeline.store import retry
from pipeline.store.errors import EnvironmentFailure
from pipeline.store.fs import Store, StoreError
from pipeline.store.log import Fenced, Log
from pipeline.store.records import FileInfo, PartRecord
from pipeline.store.remote import in_parallel
from pipeline.store.s3 import S3
from tests.hurried import HurriedClock
from tests.storage.s3_server import KEYS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(bucket, monkeypatch) -> Store:
    monkeypatch.setattr(S3, "clock", HurriedClock())
    monkeypatch.setattr(retry._LastWarning, "time", -retry.QUIET_S)
    return Store(f"{bucket}/some/store")


def record(key: str) -> PartRecord:
    return PartRecord(key, "m:C", "d", "00000001-00000001", {"a": FileInfo("objects/k/a", 1, "s", "c")}, {})


def commit(log: Log, key: str) -> None:
    """Append a record and flush the log. If another driver has taken the log over, either call may raise the error: the
    background thread of the log checks the lease every five seconds, perhaps before `append`."""
    log.append(record(key))
    log.flush()


def every(n: int, what: str):
    """Return a function for `S3Server.trouble` by which `what` happens to every n-th request."""
    return lambda method, path, number: what if number % n == n - 1 else None


def test_bad_days(s3_server, s3, store, tmp_path):
    """Every third request fails, each in another way."""
    ways = ["503", "slow down", "drop", "cut", "lost reply"]
    s3_server.trouble(lambda method, path, n: ways[n // 3 % 5] if n % 3 == 2 else None)
    data = random.Random(1).randbytes(300_000)
    for i in range(6):
        assert store.put_absent(f"a/{i:02d}", data + bytes([i]))
        assert not store.put_absent(f"a/{i:02d}", b"other")
    assert [e.size for e in store.entries("a")] == [300_001] * 6
    (tmp_path / "up").write_bytes(data)
    store.upload(str(tmp_path / "up"), "b/up")
    assert store.copy_all((f"a/{i:02d}", f"c/{i}") for i in range(6)) == 6
    assert store.read_range("b/up", 1000, 2000) == data[1000:2000]
    for i in range(6):
        assert store.read(f"c/{i}") == data + bytes([i])
        assert store.size(f"c/{i}") == 300_001
    with store.open("b/up") as f:
        f.seek(-100, 2)
        assert f.read() == data[-100:]
    assert Path(store.fetch("b/up", str(tmp_path))).read_bytes() == data
    assert store.remove_all(store.list("c")) == 6
    assert not store.exists("c/0") and list(store.list("c")) == []


def test_silence_ends_in_a_time_out(s3_server, s3, store, monkeypatch):
    store.write("x", b"here")
    monkeypatch.setattr(S3, "options", {**S3.options, "config_kwargs": {**S3.options["config_kwargs"],
                                                                        "read_timeout": 0.5}})
    patient = Store(store.root)
    patient.remote.tries = 1000                        # a busy machine may need longer for an answer, and again
    s3_server.trouble(lambda method, path, n: "hang" if n == 0 else None)
    assert patient.read("x") == b"here"


def test_what_makes_no_sense_to_repeat_is_not_repeated(s3_server, s3, store):
    store.write("x", b"x")
    s3_server.trouble(None)
    with pytest.raises(FileNotFoundError):
        store.read("nothing")
    assert store.size("nothing") is None
    assert len(s3_server.requests) == 2
    s3_server.trouble(lambda *_: "deny")
    for what, call in (("read", lambda: store.read("x")), ("write", lambda: store.write("x", b"")),
                       ("list", lambda: list(store.list(""))), ("write", lambda: store.put_absent("y", b""))):
        s3_server.trouble(lambda *_: "deny")
        with pytest.raises(StoreError, match=f"cannot {what} {store.root}.*refused.*docs/storage.md") as e:
            call()
        assert len(s3_server.requests) == 1
        assert not any(secret in str(e.value) for secret in KEYS.values())
        assert not isinstance(e.value, EnvironmentFailure)


def test_patience_ends_and_says_so_once_a_minute(s3_server, s3, store, monkeypatch, caplog):
    clock = store.remote.clock = HurriedClock(still=True)
    monkeypatch.setattr(retry._LastWarning, "time", clock.now() - 61)
    s3_server.trouble(lambda *_: "503")
    with caplog.at_level(logging.WARNING, "tokenmill"):
        for _ in range(3):
            with pytest.raises(EnvironmentFailure, match=rf"cannot read {store.root}/x: .*503.* {retry.TRIES} times in "
                                                         r"a row.*run again"):
                store.read("x")
        assert len([r for r in caplog.records if "storage" in r.message]) == 1
        clock.passed += 61
        with pytest.raises(EnvironmentFailure):
            store.read("x")
    assert len([r for r in caplog.records if "storage" in r.message]) == 2
    assert retry.TRIES * 4 <= len(s3_server.requests) <= retry.TRIES * 8       # the client library repeats once


def test_no_bucket_no_package_no_credentials(s3, monkeypatch, tmp_path):
    nowhere = Store("s3://no-such-bucket-here/x")
    with pytest.raises(StoreError, match=r"cannot write s3://no-such-bucket-here/x/.*see that the bucket exists"):
        Log.open(nowhere)
    with pytest.raises(StoreError, match="see that the bucket exists"):
        list(nowhere.list(""))
    with pytest.raises(StoreError, match="credentials do not belong into an address") as e:
        Store("s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket/x")
    assert "AKIA" not in str(e.value) and "wJal" not in str(e.value)
    with pytest.raises(StoreError, match="addresses begin with s3://"):
        Store("nonsense://bucket/x")
    for name in KEYS:
        monkeypatch.delenv(name)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match="there are no credentials"):
        Store("s3://no-such-bucket-here/x").read("y")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("text", [
    "GET https://b.s3.amazonaws.com/k?X-Amz-Credential=AKIA1234567890123456%2F2026&X-Amz-Signature=deadbeef: 403",
    "hf_abcdefghijklmnopqrstuvwxyz012345", "s3://user:pass" "word@bucket/x", "ya29.a0AfH6SMBx-yz"])
@pytest.mark.parametrize("own", ["abcdefgh12345678", "/slash/first+gh12345678"])       # AWS draws slashes, too
def test_secrets_do_not_get_into_messages(text, own, monkeypatch):
    monkeypatch.setenv("SOME_SECRET_ACCESS_KEY", own)
    said = retry.error_text(OSError(f"{text} {own}"))
    for secret in ("AKIA", "deadbeef", "hf_abc", "pass" "word", "ya29.a0", "gh12345678"):
        assert secret not in said


def test_what_was_garbled_on_its_way_is_sent_again():
    from botocore.exceptions import ClientError, FlexibleChecksumError
    from s3fs.errors import translate_boto_error

    def refused(code: str, status: int) -> Exception:
        return translate_boto_error(ClientError({"Error": {"Code": code, "Message": "no"},
                                                 "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"))
    assert retry.comes_back(FlexibleChecksumError(error_msg="Expected checksum x did not match calculated checksum: y"))
    assert all(retry.comes_back(refused(*answer)) for answer in (
        ("BadDigest", 400), ("IncompleteBody", 400), ("RequestTimeout", 400), ("520", 520), ("SlowDown", 503)))
    assert not any(retry.comes_back(refused(*answer)) for answer in (
        ("InvalidRequest", 400), ("AccessDenied", 403), ("NoSuchKey", 404), ("PreconditionFailed", 412),
        ("NotImplemented", 501), ("XMinioStorageFull", 507)))


# -- commits -------------------------------------------------------------------------------------------------------
def test_one_of_many_creates(s3, store):
    for n in range(5):
        won = list(in_parallel(lambda i, n=n: store.put_absent(f"race/{n}", f"{n} {i}".encode()), range(16), 16))
        assert sum(won) == 1
        assert store.read(f"race/{n}") == f"{n} {won.index(True)}".encode()


@pytest.mark.parametrize("what", ["lost reply", "drop", "503"])
def test_a_doubtful_commit_is_settled(s3_server, s3, store, what):
    with Log.open(store) as log:
        for i in range(4):
            armed = iter([what])
            s3_server.trouble(lambda method, path, n, armed=armed: next(armed, None)
                              if method == "PUT" and "heartbeat" not in path else None)
            log.append(record(f"k{i}"))
            log.flush()
            assert any(r.method == "PUT" for r in s3_server.requests)
        s3_server.trouble(None)
    assert [r.key for r in Log.read(store).records()] == ["k0", "k1", "k2", "k3"]
    assert len([p for p in store.list("log") if "heartbeat" not in p]) == 5


def test_a_driver_that_was_taken_over_is_fenced(s3, store):
    first = Log.open(store, run="first")
    first.append(record("a"))
    first.flush()
    second = Log.open(Store(store.root), run="second", takeover=True)
    second.append(record("b"))
    second.flush()
    with pytest.raises(Fenced, match="took the store over"):
        commit(first, "c")
    with pytest.raises(Fenced):
        first.append(record("d"))
    second.close()
    assert [r.key for r in Log.read(store).records()] == ["a", "b"]


# -- sizes ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_listing_of_many_pages(s3_server, s3, store):
    names = sorted(f"many/{i % 7}/{hashlib.md5(str(i).encode()).hexdigest()}" for i in range(1345))
    list(store.map(lambda name: store.write(name, b"x"), names))
    store.write("many-more/x", b"x")
    s3_server.trouble(None)
    listing = store.list("many")
    assert next(listing) == names[0]
    assert len(s3_server.requests) == 1, "a page at a time"
    assert [names[0], *listing] == names
    assert len(s3_server.requests) == 2
    store.remove("many-more/x")
    assert [e.size for e in store.entries("")] == [1] * 1345


def test_a_listing_begins_behind_a_name_and_asks_for_no_others(s3_server, s3, store):
    for name in ("log/1", "log/2", "log/3", "log/packs/1"):
        store.write(name, b"x")
    s3_server.trouble(None)
    assert list(store.list("log", after="log/2")) == ["log/3", "log/packs/1"]
    assert ["start-after" in request.path for request in s3_server.requests] == [True]
    assert list(store.list("log", after="log/packs/1")) == []


def test_large_objects_go_in_parts_and_come_in_ranges(s3_server, s3, store, tmp_path):
    data = random.Random(2).randbytes((33 << 20) + 12345)
    local = tmp_path / "large.bin"
    local.write_bytes(data)
    met = set()

    def trouble(method, path, n):
        """Let each of the three uploads of a part, and the request that completes them, fail once."""
        for mark, what in (("PUT partNumber=1", "503"), ("PUT partNumber=2", "drop"),
                           ("PUT partNumber=3", "lost reply"), ("POST uploadId=", "lost reply")):
            verb, _, query = mark.partition(" ")
            if method == verb and query in path and mark not in met:
                met.add(mark)
                return what
        return None
    s3_server.trouble(trouble)
    store.upload(str(local), "large/a")
    assert not local.exists() and store.size("large/a") == len(data)
    parts = [r.sent for r in s3_server.requests if r.method == "PUT" and "partNumber" in r.path]
    assert len(parts) >= 6 and max(parts) < 17 << 20 and min(parts) > 1 << 20
    s3_server.trouble(every(4, "cut"))
    fetched = store.fetch("large/a", str(tmp_path))
    assert hashlib.sha256(Path(fetched).read_bytes()).digest() == hashlib.sha256(data).digest()
    gets = [r for r in s3_server.requests if r.method == "GET"]
    assert len(gets) >= 5 and max(r.received for r in gets) <= 8 << 20


def test_an_upload_that_fails_leaves_nothing(s3_server, s3, store, tmp_path):
    store.remote.tries = 2
    local = tmp_path / "large.bin"
    local.write_bytes(bytes(33 << 20))
    s3_server.trouble(lambda method, path, n: "503" if "partNumber=2" in path else None)
    with pytest.raises(EnvironmentFailure):
        store.upload(str(local), "large/a")
    s3_server.trouble(None)
    assert store.size("large/a") is None and local.exists()
    assert not store.fs.call_s3("list_multipart_uploads", Bucket=store.remote.bucket).get("Uploads")


def test_reading_ahead_follows_what_is_read(s3_server, s3, store):
    data = random.Random(3).randbytes(24 << 20)
    store.write("f", data)
    s3_server.trouble(None)
    with store.open("f") as f:
        assert f.seek(-8, 2) == len(data) - 8
        assert f.read(8) == data[-8:]
        f.seek(1 << 20)
        assert f.read(100) == data[1 << 20:(1 << 20) + 100]
    small = [r.received for r in s3_server.requests if r.method == "GET"]
    assert len(small) == 2 and sum(small) < 600 << 10
    s3_server.trouble(None)
    with store.open("f") as f:
        assert b"".join(iter(lambda: f.read(100_000), b"")) == data
    assert len([r for r in s3_server.requests if r.method == "GET"]) < 12


# -- inputs --------------------------------------------------------------------------------------------------------
def test_an_input_that_changed_under_the_same_size(s3, bucket, tmp_path):
    from pipeline.engine.task import ChangedInput
    from pipeline.plan.inputs import list_source

    source = Store(bucket)
    source.write("in/a.txt", b"the first text")
    [one] = list_source("s", [f"{bucket}/in/*.txt"])
    spec = TaskSpec("k", "m:C", "d", {})
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    assert Path(TaskInputs(spec, source, str(first)).fetch(one.arg())).read_bytes() == b"the first text"
    source.write("in/a.txt", b"THE OTHER TEXT")
    [other] = list_source("s", [f"{bucket}/in/*.txt"])
    assert other.size == one.size and other.etag != one.etag
    # what was planned then is still in the cache; where it is not, nothing else stands in for it
    assert Path(TaskInputs(spec, source, str(second)).fetch(one.arg())).read_bytes() == b"the first text"
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    third = tmp_path / "3"
    third.mkdir()
    with pytest.raises(ChangedInput, match=r"in/a\.txt|a\.txt"):
        TaskInputs(spec, source, str(third)).fetch(one.arg())
    assert not list(third.iterdir()) and not [p for p in (tmp_path / "cache").iterdir() if p.name[0] != "."]
    assert Path(TaskInputs(spec, source, str(third)).fetch(other.arg())).read_bytes() == b"THE OTHER TEXT"
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    source.remove("in/a.txt")
    with pytest.raises(ChangedInput):
        TaskInputs(spec, source, str(first)).fetch(other.arg())


def test_sources_in_a_bucket_are_what_they_are_in_a_folder(s3_server, s3, bucket, tmp_path):
    from pipeline.plan.inputs import list_source
    from pipeline.plan.objects import Listings

    source = Store(bucket)
    for name in ("d/a.txt", "d/b.md", "d/x/c.txt", "d/x/.hidden/h.txt", "d/x/y/e.txt", "d/.g.txt", "d.txt"):
        source.write(f"top/{name}", name.encode())
        path = tmp_path / "top" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    for patterns in (["top/d"], ["top/d/*.txt"], ["top/d/**/*.txt"], ["top/*/*/*.txt"], ["top/d/a.txt"],
                     ["top/d/x", "top/d/a.txt"], ["top/d/x/", "top/d/[ab].*"], ["top/d*"]):
        found = [list_source("s", [f"{base}/{p}" for p in patterns], suffixes=(".txt",))
                 for base in (bucket, str(tmp_path))]
        assert [(f.path, f.size) for f in found[0]] == [(f.path, f.size) for f in found[1]], patterns
        assert found[0]
    held: Listings = {}
    counts = []
    s3_server.trouble(None)
    for _ in range(3):
        list_source("s", [f"{bucket}/top/d/**/*.txt", f"{bucket}/top/d/x"], listings=held)
        counts.append(len(s3_server.requests))
    assert counts[0] > 0 and counts == counts[:1] * 3


def test_a_listing_begins_after_any_path(s3, bucket):
    from fsspec.utils import glob_translate

    from pipeline.plan.objects import walk

    source = Store(f"{bucket}/from")
    names = ["a.txt", "a/1.txt", "a/b/3.txt", "a/b/4.txt", "a0/6.txt", "b/8.txt", "b/c/9.txt"]
    for name in names:
        source.write(name, b"x")
    for after in ["", *names, "a/b", "zz"]:
        behind = [n for n in names if n > after]
        assert [e.path for e in source.remote.list("", after)] == behind
        for pattern in ("**", "*/*", "*/*/*", "a*/*/*"):
            walked = [e.path for e in walk(source.remote, "", pattern.split("/"), lambda path: True, after)]
            fits = re.compile(glob_translate(pattern)).match
            assert [n for n in walked if n > after and fits(n)] == [n for n in behind if fits(n)], (pattern, after)


def test_slices_of_a_big_object_fetch_their_own_bytes(s3_server, s3, bucket, tmp_path, monkeypatch):
    """As on many machines: no cache. The file travels once to be indexed and once in slices, not once a slice."""
    from pipeline.recipe import load_recipe
    from pipeline.run import make_backend, run_recipe
    from pipeline.store.dataset_hash import dataset_hash

    rng = random.Random(4)
    words = [f"w{i}" for i in range(5000)]
    (tmp_path / "in").mkdir()
    with open(tmp_path / "in" / "big.jsonl", "w") as f:
        for i in range(1200):
            f.write(json.dumps({"id": i, "text": " ".join(rng.choices(words, k=500))}) + "\n")
    data = (tmp_path / "in" / "big.jsonl").read_bytes()
    Store(bucket).write("in/big.jsonl", data)
    hashes = []
    for place, store in ((str(tmp_path / "in"), str(tmp_path / "store")), (f"{bucket}/in", f"{bucket}/store")):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"version: 1\nsources: {{s: {{read: jsonl, path: {place}}}}}\n"
                          f"datasets: {{d: {{from: s, steps: []}}}}\nrun: {{partition: 400KB}}\n")
        monkeypatch.setenv("TOKENMILL_CACHE_SIZE", "0")
        s3_server.trouble(None)
        run_recipe(load_recipe(recipe, []), store, make_backend=make_backend("inline", 1, None), report=False)
        hashes.append(dataset_hash(Store(store), "d"))
    assert hashes[0] == hashes[1]
    received = sum(r.received for r in s3_server.requests if r.method == "GET" and "/in/big.jsonl" in r.path)
    assert 2 * len(data) <= received < 2.1 * len(data)


# -- publication ---------------------------------------------------------------------------------------------------
def test_publication_is_parallel_and_right_after_a_kill(s3_server, s3, store, tmp_path):
    """Killed in the middle of its copies: the manifest always names what is there."""
    from pipeline.store.dataset import MANIFEST, manifest
    from tests.pipeline.test_store_dataset import key, part, publish

    a = [part(store, tmp_path, key(i), range(i * 10, i * 10 + 3)) for i in range(20)]
    publish(store, "clean", [a])
    names = manifest(store, "clean")["part"].to_pylist()
    b = a[5:] + [part(store, tmp_path, key(100 + i), range(5000 + i * 10, 5000 + i * 10 + 2)) for i in range(10)]
    code = f"""
        import json
        from tests.e2e.kill import die_at
        from pipeline.store.records import PartRecord
        from pipeline.store.fs import Store
        from pipeline.store.s3 import S3
        from tests.pipeline.test_store_dataset import publish
        die_at(S3, "copy", 17)
        records = [PartRecord.from_json(d) for d in json.load(open({str(tmp_path / 'b.json')!r}))]
        publish(Store({store.root!r}), "clean", [records])
    """
    (tmp_path / "b.json").write_text(json.dumps([r.to_json() for r in b]))
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT)
    assert died.returncode == -9
    assert manifest(store, "clean")["part"].to_pylist() == names, "the manifest comes last"
    assert set(names) <= {p.rpartition("/")[2] for p in store.list("datasets/clean")}
    s3_server.trouble(None)
    publish(store, "clean", [b])
    assert sorted(p.rpartition("/")[2] for p in store.list("datasets/clean")) == \
        sorted([MANIFEST, *manifest(store, "clean")["part"].to_pylist()])
    assert sum(manifest(store, "clean")["rows"].to_pylist()) == 15 * 3 + 10 * 2
    puts = [i for i, r in enumerate(s3_server.requests) if r.method == "PUT" and "/datasets/clean/" in r.path]
    assert MANIFEST in s3_server.requests[puts[-1]].path
    deletes = [i for i, r in enumerate(s3_server.requests) if r.method == "DELETE" and "/datasets/clean/" in r.path]
    assert deletes and min(deletes) > puts[-1]


def test_copies_overlap(s3, store):
    store.write("from", b"x")
    together = threading.Barrier(8, timeout=300)        # lets pass when eight are here at once
    real = store.remote.copy

    def copy(path, to):
        together.wait()
        real(path, to)
    store.remote.copy = copy
    assert store.copy_all(("from", f"to/{i}") for i in range(16)) == 16
    assert len(list(store.list("to"))) == 16
