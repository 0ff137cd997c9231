"""The store knows which folders outside it hold copies, so that a takedown can name them."""

from __future__ import annotations

import shutil
import socket

import pytest

from pipeline.cli import shard_sets
from pipeline.cli.shard_sets import note_export
from pipeline.store.copies import Copy, note_copy, noted_copies
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store

HERE = socket.gethostname()


@pytest.fixture
def store(tmp_path) -> Store:
    (tmp_path / "store/log").mkdir(parents=True)
    (tmp_path / "store/log/00000001").write_bytes(b"x")
    (tmp_path / "store/shards/web/split=train").mkdir(parents=True)
    return Store(tmp_path / "store")


def test_copies_are_named_once_until_they_are_removed(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        note_copy(store, "index", "clean", "may.index")
    note_copy(store, "rows", "demo", "s3://team/rows")
    (tmp_path / "may.index").mkdir()
    index, rows = Copy("index", "clean", str(tmp_path / "may.index"), HERE), Copy("rows", "demo", "s3://team/rows", "")
    assert set(noted_copies(store)) == {index, rows} and len(noted_copies(store)) == 2
    assert index.remedy(store) == f"give `tokenmill dedup forget {index.place} --store {store.root}`"
    shutil.rmtree(tmp_path / "may.index")
    assert noted_copies(store) == [rows]
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert len(noted_copies(store)) == 2, "this machine cannot know"


def test_an_export_is_noted_in_the_store_of_its_shards(store, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(tmp_path / "store")
    for shards in ("shards/web/split=train", f"{store.root}/shards/web/split=train/shards-0123.json"):
        note_export(shards, str(out))
    assert noted_copies(store) == [Copy("tokens", "shards/web/split=train", str(out), HERE)]
    shutil.copytree(tmp_path / "store/shards", tmp_path / "copy/shards")
    note_export(str(tmp_path / "copy/shards/web/split=train"), str(out))
    assert not (tmp_path / "copy/copies").exists() and not capsys.readouterr().err, "no store, so nothing is noted"

    def refuse(*args: str) -> None:
        raise StoreError("read-only")

    monkeypatch.setattr(shard_sets, "note_copy", refuse)
    note_export("shards/web/split=train", str(tmp_path / "other"))
    assert f"a takedown will not name {tmp_path}/other" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "rows"}'])
def test_a_damaged_note_ends_a_takedown(store, text):
    store.write("copies/0.json", text.encode())
    with pytest.raises(StoreError, match=r"copies/0\.json is damaged"):
        noted_copies(store)
