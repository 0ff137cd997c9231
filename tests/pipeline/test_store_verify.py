"""Verifying a store: it continues after an interruption, and repair and garbage collection leave alone what they must
not touch."""

from __future__ import annotations

import errno
import hashlib
import json

import pytest

from pipeline.store import verify
from pipeline.store.errors import cannot_write
from pipeline.store.fs import Store
from pipeline.store.garbage import unnamed
from pipeline.store.log import Log, attempt_name
from pipeline.store.records import FileInfo, PartRecord
from pipeline.store.verify import File, problem, repair, verify_store


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store")


def commit(store: Store, log: Log, key: str) -> None:
    attempt, data = attempt_name(log.epoch, 0), key.encode()
    info = FileInfo(f"objects/{key}/{attempt}.kept.parquet", len(data), hashlib.sha256(data).hexdigest(), "c" * 64, 1)
    store.write(info.path, data)
    log.append(PartRecord(key, "m:C", "clean", attempt, {"kept.parquet": info}, {}))


def test_repairing_leaves_manifests_that_this_version_cannot_read(store):
    pinned = json.dumps({"magic": "tokenmill-shards", "version": 99}).encode()
    for name in ("shards.json", "shards-0123456789abcdef.json"):
        store.write(f"shards/web/split=train/{name}", pinned)
    store.write("datasets/clean/.manifest", b"PAR1 no Parquet PAR1")
    with Log.open(store) as log:
        damaged = verify_store(store, log).damaged
        assert len(damaged) == 3
        assert repair(store, log, damaged) == (0, 0, 0, [], [])
    assert store.read("shards/web/split=train/shards-0123456789abcdef.json") == pinned
    assert store.exists("shards/web/split=train/shards.json") and store.exists("datasets/clean/.manifest")


def test_a_repair_that_was_interrupted_goes_on_where_it_stopped(store, monkeypatch):
    with Log.open(store) as log:
        for n in range(6):
            commit(store, log, f"k{n}")
    read: list[str] = []
    monkeypatch.setattr(verify, "problem", lambda store, file: read.append(file.path) or problem(store, file))

    def stop(done, total):
        raise KeyboardInterrupt

    with Log.open(store) as log, pytest.raises(KeyboardInterrupt):
        verify_store(store, log, stop, batch=2)
    with Log.open(store) as log:                         # a new epoch, the same records
        assert verify_store(store, log, batch=2).files == 6
    assert len(read) == len(set(read)) == 6
    with Log.open(store) as log, pytest.raises(KeyboardInterrupt):
        verify_store(store, log, stop, batch=2)
    with Log.open(store) as log:
        commit(store, log, "k6")                         # other records: from the beginning
        log.flush()
        read.clear()
        assert verify_store(store, log, batch=2).files == len(read) == 7


def test_a_store_that_can_only_be_read_is_verified(store, monkeypatch):
    with Log.open(store) as log:
        commit(store, log, "k")

    def refuse(self, path, *rest):
        raise cannot_write(path, OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(Store, "write", refuse)
    monkeypatch.setattr(Store, "remove", refuse)
    done = verify_store(store, Log.read(store))
    assert (done.files, done.damaged) == (1, {})


def test_a_bad_sector_is_damage_and_ends_no_verification(store, monkeypatch):
    def broken(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store, "open", broken)
    assert problem(store, File("objects/k/a.kept.parquet", 1, "")) == "cannot be read (Input/output error)"


def test_records_of_a_run_whose_list_of_tasks_is_gone_are_kept(store):
    with Log.open(store, run="one") as log:
        commit(store, log, "k")
        store.write("runs/one/progress.json", json.dumps({"state": "done"}).encode())
        log.flush()
        what, pairs = unnamed(store, log)
    assert what.records == 0 and pairs == []
