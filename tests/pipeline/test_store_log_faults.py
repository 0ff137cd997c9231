"""The commit log when its files are damaged, or the storage refuses, fails or loses what it is asked."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from pipeline.store import fs as store_fs
from pipeline.store import lease
from pipeline.store import log as store_log
from pipeline.store.fs import Store, StoreError
from pipeline.store.lease import LeaseHeld
from pipeline.store.log import Log
from pipeline.store.segment import CorruptLog, encode_segment
from tests.pipeline import test_store_log
from tests.pipeline.test_store_log import record
from tests.simulate.clock import VirtualClock

store = test_store_log.store  # a fixture


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "garbage"])
def test_damaged_segment_is_named_with_a_remedy(tmp_path, damage):
    store = Store(tmp_path)
    with Log.open(store) as log:
        log.append(record("a"))
    path = tmp_path / "log" / "00000002.json"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-20], "flipped": data.replace(b'"records":1', b'"records":2'), "empty": b"",
                      "garbage": b"{]"}[damage])
    for attempt in (Log.read, Log.open):
        with pytest.raises(CorruptLog, match=r"log/00000002\.json is damaged.*restore it from a copy.*move it away"):
            attempt(store)


def test_missing_segment_and_unknown_format(tmp_path):
    store = Store(tmp_path)
    with Log.open(store) as log:
        log.append(record("a"))
        log.flush()
        log.append(record("b"))
    (tmp_path / "log" / "00000002.json").unlink()
    with pytest.raises(CorruptLog, match=r"00000002\.json is missing though later segments"):
        Log.read(store)
    (tmp_path / "log" / "00000002.json").write_bytes(encode_segment({"format": 99}))
    with pytest.raises(StoreError, match="format 99"):
        Log.read(store)


def test_a_listing_that_passed_a_segments_place_before_it_was_made(store, monkeypatch):
    """A large folder is listed piece by piece while a driver appends: it may tell a segment and not the one before."""
    with Log.open(store) as log:
        for key in ("a", "b", "c"):
            log.append(record(key))
            log.flush()
        whole = Store.list
        monkeypatch.setattr(Store, "list", lambda self, prefix, after="": (
            path for path in whole(self, prefix, after) if path not in ("log/00000002.json", "log/00000003.json")))
        assert [r.key for r in Log.read(store).records()] == ["a", "b", "c"]


def test_a_listing_begins_behind_a_name(store):
    for name in ("log/1", "log/2", "log/3", "log/packs/1", "other"):
        store.write(name, b"x")
    assert list(store.list("log", after="log/2")) == ["log/3", "log/packs/1"]
    assert list(store.list("log", after="log/9")) == ["log/packs/1"]


def test_a_challenger_that_stood_still_has_not_watched(store, monkeypatch):
    """The machine of both stops for longer than anybody waits: the holder, which could not write either, is no deader
    than its challenger."""
    monkeypatch.setattr(lease, "alive", lambda holder: None)
    first, naps = Log.open(store, run="first", clock=(clock := VirtualClock()), threaded=False), []

    def asleep(seconds: float) -> None:
        naps.append(seconds)
        challenger.time += 60
        if len(naps) == 3:                               # after it, both go on
            clock.sleep(store_log.HEARTBEAT_S)
            first.tend()
    challenger = VirtualClock(asleep=asleep)
    with pytest.raises(LeaseHeld, match="first"):
        Log.open(store, clock=challenger)
    assert len(naps) == 3
    first.close()


def test_unwritable_store(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"cannot write .*file/log/00000001\.json: .*; a file stands"):
        Log.open(Store(tmp_path / "file"))
    for number, text in ((13, "give this user write permission"), (30, "read-only"), (28, "disk is full")):
        def refuse(*_a, number=number, **_k):
            raise OSError(number, os.strerror(number))
        monkeypatch.setattr(store_fs.os, "fsync", refuse)
        with pytest.raises(StoreError, match=text):
            Log.open(Store(tmp_path / "store"))
    assert not list((tmp_path / "store" / "log").glob("*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_write_permission(tmp_path):
    (tmp_path / "store").mkdir(mode=0o555)
    with pytest.raises(StoreError, match="give this user write permission"):
        Log.open(Store(tmp_path / "store"))


def test_no_hard_links_no_store(tmp_path, monkeypatch):
    def refuse(*_a, **_k):
        raise OSError(1, "Operation not permitted")
    monkeypatch.setattr(store_fs.os, "link", refuse)
    with pytest.raises(StoreError, match=r"without hard links.*object storage"):
        Log.open(Store(tmp_path / "store"))
    assert not list((tmp_path / "store" / "log").glob("*"))


@pytest.mark.parametrize("reply", ["error", "exists"])
def test_link_that_worked_though_nfs_said_no(tmp_path, monkeypatch, reply):
    link = os.link

    def lossy(a, b):
        link(a, b)
        raise OSError(5, "Input/output error") if reply == "error" else FileExistsError(17, "File exists")
    monkeypatch.setattr(store_fs.os, "link", lossy)
    assert Store(tmp_path).put_absent("log/00000001.json", b"x") is True


class Moody(MemoryFileSystem):
    """Object storage in memory whose next creations fail as `mood` says."""

    protocol = "moody"
    store: dict = {}          # noqa: RUF012  (fsspec's way: the class is the bucket)
    pseudo_dirs = [""]        # noqa: RUF012
    mood: list = []           # noqa: RUF012

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        mood = Moody.mood.pop(0) if Moody.mood and mode == "create" and "probe" not in path else ""
        if mood == "lost request":
            raise TimeoutError("no answer")
        if mood == "ignores":
            mode = "overwrite"
        super().pipe_file(path, value, mode=mode, **kwargs)
        if mood == "lost reply":
            raise TimeoutError("no answer")
        if mood == "repeated":                            # the client library sent it twice: done, then 412
            raise FileExistsError(path)


@pytest.fixture
def moody():
    fsspec.register_implementation("moody", Moody, clobber=True)
    Moody.store.clear()
    Moody.mood.clear()
    return Store("moody://bucket/store")


def test_doubtful_puts_are_settled_by_the_nonce(moody):
    with Log.open(moody) as log:
        for i, mood in enumerate(["lost reply", "repeated", "lost request", ""]):
            Moody.mood[:] = [mood]
            log.append(record(f"k{i}"))
            log.flush()
    assert [r.key for r in Log.read(moody).records()] == ["k0", "k1", "k2", "k3"]
    assert len([p for p in moody.list("log") if "heartbeat" not in p]) == 5


def test_put_that_never_gets_through_is_final(moody, monkeypatch):
    monkeypatch.setattr(moody.remote, "clock", VirtualClock())
    log = Log.open(moody)
    Moody.mood[:] = ["lost request"] * 20
    log.append(record("k"))
    with pytest.raises(StoreError, match=r"cannot write .*00000002\.json.*no answer"):
        log.flush()
    Moody.mood.clear()
    with pytest.raises(StoreError, match="cannot write"):
        log.append(record("k2"))
    with pytest.raises(StoreError):
        log.close()


def test_object_store_without_conditional_put_is_refused(moody, monkeypatch):
    monkeypatch.setattr(Moody, "pipe_file", lambda self, path, value, mode="overwrite", **kw:
                        MemoryFileSystem.pipe_file(self, path, value))
    with pytest.raises(StoreError, match="ignores conditional writes"):
        Log.open(moody)
    assert not list(moody.list(""))


def test_storage_that_looks_before_it_writes_is_refused(moody, monkeypatch):
    """fsspec's own way to create a file passes two writes in a row, and lets two drivers win at the same time."""
    monkeypatch.setattr(Moody, "pipe_file", fsspec.AbstractFileSystem.pipe_file)
    assert moody.put_absent("one", b"1") and not moody.put_absent("one", b"2"), "one writer sees nothing of it"
    both = threading.Barrier(2, timeout=120)
    exists = Moody.exists

    def look(self, path, **kw):
        there = exists(self, path, **kw)
        both.wait()                                           # both have looked, none has written
        return there
    with monkeypatch.context() as m:
        m.setattr(Moody, "exists", look)
        with ThreadPoolExecutor(2) as pool:
            assert sum(pool.map(lambda data: moody.put_absent("two", data), (b"a", b"b"))) == 2
    with pytest.raises(StoreError, match=r"cannot create a file in one step only if.*use a local disk.*S3"):
        Log.open(moody)
    assert not list(moody.list("log"))


def test_of_two_threads_one_creates_an_object_in_memory(tmp_path, monkeypatch):
    """fsspec's own way there, too, is to look and then to create."""
    store = Store(f"memory://create{tmp_path.name}-{os.getpid()}")
    commit, made = MemoryFile.commit, []

    def put(data: bytes) -> None:
        made.append(store.put_absent("one", data))
    other = threading.Thread(target=put, args=(b"b",))

    def late(self):
        if other.ident is None:
            other.start()
            other.join(0.2)                               # it gets through now, or it has to wait for us
        commit(self)
    monkeypatch.setattr(MemoryFile, "commit", late)
    put(b"a")
    other.join()
    assert sorted(made) == [False, True]
    store.remove("one")


def test_unreachable_and_read_only_object_stores_are_refused(moody, monkeypatch):
    class ClientError(Exception):
        pass

    def fail(*_a, **_k):
        raise ClientError("AccessDenied")
    for name in ("pipe_file", "exists"):
        monkeypatch.setattr(Moody, name, fail)
    with pytest.raises(StoreError, match=r"cannot write moody://bucket/store/.*: ClientError: AccessDenied.*creden"):
        Log.open(moody)


def test_a_hub_is_no_store():
    class Hub(Store):
        def __init__(self):
            self.root, self.local = "hf://datasets/a/b", None
    with pytest.raises(StoreError, match="not a store"):
        Log.open(Hub())
