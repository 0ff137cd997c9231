"""Exports to object storage other than S3, and to file:// addresses: the files that a folder gets, whole or not at
all."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from pipeline.cli.app import run_command
from pipeline.cli.incomplete import MARK
from pipeline.store.fs import Store
from pipeline.store.remote import Remote
from tests.tokenizer.exports import corpus, tree
from tokenizer.export.export import FORMATS


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
