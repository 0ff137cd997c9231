"""Exports to object storage other than S3, and to file:// addresses: the files that a folder gets, whole or not at
all."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.app import run_command
from pipeline.cli.incomplete import MARK
from pipeline.store.fs import Store
from pipeline.store.remote import Remote
from pipeline.store.streamed_set import StreamedSet
from tests.tokenizer.exports import corpus, tree
from tokenizer.export.export import FORMATS
from tokenizer.shards.layout import ShardError
from tokenizer.shards.reader import ShardSet


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}/out" if request.param == "memory" else f"file://{tmp_path}/there"


def objects(url: str) -> dict[str, bytes]:
    return {path: Store(url).read(path) for path in Store(url).list("")}


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_has_the_bytes_of_one_to_a_folder(url, tmp_path, format):
    shard_set = corpus(tmp_path / "set", 300)
    line = ["shards", "export", str(shard_set.folder), "--format", format, "--quiet", "--out"]
    assert run_command([*line, str(tmp_path / "out")]) == 0
    assert run_command([*line, url]) == 0
    assert objects(url) == tree(tmp_path / "out")
    assert run_command([*line, url]) == 2, "a folder with files is refused"
    assert objects(url) == tree(tmp_path / "out")


def test_a_damaged_set_leaves_nothing(url, tmp_path, capsys):
    shard_set = corpus(tmp_path / "set", 300)
    body = shard_set.folder / shard_set.manifest.shards[2].body
    body.write_bytes(b"\xff\x00" + body.read_bytes()[2:])
    assert run_command(["shards", "export", str(shard_set.folder), "--format", "ds", "--out", url]) == 1
    err = capsys.readouterr().err
    assert str(body) in err and err.count("\n") == 1 and objects(url) == {}


def test_a_killed_export_is_completed(url, tmp_path, monkeypatch):
    shard_set = corpus(tmp_path / "set", 300)
    line = ["shards", "export", str(shard_set.folder), "--format", "litdata", "--quiet", "--out"]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "remove", lambda self, path: None)              # killed before the mark is removed
        assert run_command([*line, url]) == 0
    assert MARK in objects(url)
    Store(url).remove("index.json")
    assert run_command([*line, url]) == 0 and run_command([*line, str(tmp_path / "out")]) == 0
    assert objects(url) == tree(tmp_path / "out")


def test_other_storage_gets_each_object_by_way_of_one_temporary_file(tmp_path, monkeypatch):
    """As on Google Cloud Storage: the temporary file of an object is gone before the next one is begun."""
    from pipeline.store import remote

    monkeypatch.setattr(remote.InMemory, "writer", Remote.writer)
    scratches: list[str] = []
    upload = Remote.upload

    def watch(self: Remote, local: str, path: str) -> None:
        assert not any(Path(folder).exists() for folder in scratches)
        scratches.append(str(Path(local).parent))
        upload(self, local, path)

    monkeypatch.setattr(Remote, "upload", watch)
    shard_set = corpus(tmp_path / "set", 300)
    url = f"memory://{uuid.uuid4().hex}/out"
    line = ["shards", "export", str(shard_set.folder), "--format", "ds", "--quiet", "--out"]
    assert run_command([*line, url]) == 0 and run_command([*line, str(tmp_path / "out")]) == 0
    assert objects(url) == tree(tmp_path / "out") and len(scratches) == len(tree(tmp_path / "out"))


@pytest.fixture
def sets(tmp_path: Path) -> Iterator[tuple[ShardSet, StreamedSet]]:
    """A shard set on the disk, with loss masks in two of its shards, and the same in object storage."""
    store = Store(f"memory://{uuid.uuid4().hex}/set")
    for path, data in tree(corpus(tmp_path / "set", 300, masked=(0, 2)).folder).items():
        store.write(path, data)
    (tmp_path / "copies").mkdir()
    with contextlib.closing(StreamedSet(store, tmp_path / "copies")) as there:
        yield ShardSet(tmp_path / "set"), there


def test_a_set_in_object_storage_is_read_in_all_ways_of_one_on_the_disk(sets):
    here, there = sets
    for shard in range(len(here.manifest.shards)):
        np.testing.assert_array_equal(there.body(shard), here.body(shard))
    there.prefetch([(0, 100)])
    np.testing.assert_array_equal(there.counts(3, len(here)), here.counts(3, len(here)))
    length, numbers = 16, np.arange(here.windows(16))[::-1]
    rows = np.arange(len(numbers))
    tokens = np.zeros((2, len(rows), length + 1), here.dtype)
    [ours], [theirs] = (one.samples(numbers, length, tokens[i], rows, compiled=i == 1) for i, one in enumerate(sets))
    np.testing.assert_array_equal(*tokens)
    np.testing.assert_array_equal(ours.positions, theirs.positions)
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    with pytest.raises(IndexError, match=f"of {len(here)}"):
        there.read(0, len(here) + 1)


@pytest.mark.parametrize("times", [1, 2])
def test_damaged_bytes_are_requested_again_and_then_refused(sets, monkeypatch, times):
    here, there = sets
    read, requests = Store.read_range, []

    def damaged(self: Store, path: str, start: int, stop: int) -> bytes:
        data = read(self, path, start, stop)
        requests.append(path)
        return data if requests.count(path) > times else bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(Store, "read_range", damaged)
    if times == 1:
        np.testing.assert_array_equal(there.read(0, 50), here.read(0, 50))
    else:
        with pytest.raises(ShardError, match=r"\.tokens: damaged at byte 0"):
            there.read(0, 50)
    assert len(requests) == 2
