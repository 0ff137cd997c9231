"""Exports to object storage and imports from it: the same files as in a local folder, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.app import run_command
from pipeline.cli.errors import BadUsage
from pipeline.cli.transfer import MARK, uploaded
from pipeline.store.fs import Store
from tests.tokenizer.exports import corpus, tree
from tests.tokenizer.packs import write_packing
from tests.tokenizer.test_encode_tasks import Runner
from tests.tokenizer.test_materialize import curriculum, materialise, published
from tokenizer.load import load_tokenizer
from tokenizer.train import train_bpe


def put(folder: Path, url: str) -> None:
    store = Store(url)
    for path, data in tree(folder).items():
        store.write(path, data)


def objects(url: str) -> dict[str, bytes]:
    store = Store(url)
    return {path: store.read(path) for path in store.list("")}


@pytest.mark.parametrize("name", ["ds", "mds"])
def test_an_export_of_a_set_in_a_bucket_has_the_bytes_of_one_on_a_disk(bucket, tmp_path, capsys, name):
    shard_set = corpus(tmp_path / "set", 300, masked=(0, 2))
    put(shard_set.folder, f"{bucket}/set")
    line = ["shards", "export", "--format", name, "--json", "--out"]
    assert run_command([*line, str(tmp_path / "out"), str(shard_set.folder)]) == 0
    assert run_command([*line, f"{bucket}/out", f"{bucket}/set"]) == 0
    local, remote = map(json.loads, capsys.readouterr().out.splitlines())
    assert objects(f"{bucket}/out") == tree(tmp_path / "out")
    assert (remote["path"], remote["tokens"]) == (f"{bucket}/out", local["tokens"])


def test_packed_rows_of_a_set_in_a_bucket_are_exported_and_imported(bucket, tmp_path):
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 300, tmp_path / "tokenizer.json")
    shard_set = corpus(tmp_path / "set", 280, masked=(0, 2))
    write_packing(shard_set.folder, 64)
    put(shard_set.folder, f"{bucket}/set")
    line = ["shards", "export", "--format", "ds", "--rows", "--quiet", "--out"]
    assert run_command([*line, str(tmp_path / "out"), str(shard_set.folder)]) == 0
    assert run_command([*line, f"{bucket}/out", f"{bucket}/set"]) == 0
    assert objects(f"{bucket}/out") == tree(tmp_path / "out")
    for metadata in (path for path in Store(f"{bucket}/out").list("") if path.endswith(".metadata")):
        Store(f"{bucket}/out").remove(metadata)                    # it names the tokenizer of the set, which is no file
    taken = ["shards", "import", f"{bucket}/out", "--format", "ds", "--tokenizer", str(tmp_path / "tokenizer.json"),
             "--store", f"{bucket}/store", "--name", "web", "--sequence", "64", "--quiet"]
    assert run_command(taken) == 0
    assert run_command([*line, f"{bucket}/again", f"{bucket}/store/shards/web/split=train"]) == 0
    before, after = objects(f"{bucket}/out"), objects(f"{bucket}/again")
    assert {path: after[path] for path in before} == before


def test_samples_of_a_run_in_a_bucket_are_exported(bucket, s3_server, tmp_path, capsys):
    run = Runner(tmp_path)
    streams = [published(run.store.local, name, [[40] * 30], 300) for name in ("big", "small")]
    c = curriculum(streams, 300)
    _, folder = materialise(run, c, "bytes", 600, 700)
    (tmp_path / "runs" / "r").mkdir(parents=True)
    c.save(tmp_path / "runs" / "r" / "curriculum.json")
    folder.rename(tmp_path / "runs" / "r" / "rows-bytes")
    put(tmp_path / "runs", f"{bucket}/store/runs")
    line = ["shards", "export", "--format", "parquet", "--phase", "b", "--order", "r"]
    assert run_command([*line, "--store", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    s3_server.trouble(None)
    assert run_command([*line, "--store", f"{bucket}/store", "--out", f"{bucket}/out"]) == 0
    assert objects(f"{bucket}/out") == tree(tmp_path / "out")
    read = {r.path.split("?")[0].rpartition("/")[2] for r in s3_server.requests if r.method == "GET"}
    assert {name[:2] for name in read if name.endswith(".tokens")} == {"p1"}, "rows of other phases are not fetched"


def upload(url: str, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    with uploaded(url, "--out") as folder:
        folder.mkdir()
        (folder / name).write_bytes(name.encode())
        meanwhile()


def test_of_two_exports_to_one_url_one_is_whole_and_the_other_is_refused(bucket):
    url = f"{bucket}/out"
    with pytest.raises(BadUsage, match="another command has written"):
        upload(url, "slow.ds", lambda: upload(url, "fast.ds"))
    assert objects(url) == {"fast.ds": b"fast.ds"}


def test_a_folder_whose_upload_was_killed_is_not_imported(bucket, tmp_path, capsys):
    shard_set = corpus(tmp_path / "set", 300)
    assert run_command(["shards", "export", str(shard_set.folder), "--format", "olmo", "--out", f"{bucket}/half"]) == 0
    Store(f"{bucket}/half").write(MARK, b"")
    train_bpe(["a few words"] * 20, 300, tmp_path / "tokenizer.json")
    assert run_command(["shards", "import", f"{bucket}/half", "--format", "olmo", "--store", str(tmp_path / "store"),
                        "--tokenizer", str(tmp_path / "tokenizer.json"), "--name", "web"]) == 2
    assert MARK in capsys.readouterr().err and not (tmp_path / "store/shards/web").exists()


def test_a_bucket_with_objects_is_refused_and_kept(bucket, tmp_path, capsys):
    shard_set = corpus(tmp_path / "set", 300)
    line = ["shards", "export", str(shard_set.folder), "--format", "ds", "--out"]
    for taken in ("mine", "INCOMPLETE"):
        Store(f"{bucket}/{taken}").write(taken, b"kept")
        assert run_command([*line, f"{bucket}/{taken}"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: --out") and taken in err and err.count("\n") == 1
        assert objects(f"{bucket}/{taken}") == {taken: b"kept"}


def test_a_killed_export_is_completed_by_the_same_command_and_by_no_other(bucket, tmp_path, monkeypatch, capsys):
    shard_set, upload, killed = corpus(tmp_path / "set", 300), Store.upload, []

    def die(self: Store, local: str, path: str) -> None:
        upload(self, local, path)
        killed.append(path)
        monkeypatch.setattr(Store, "remove", lambda self, path: None)           # a killed process removes nothing
        raise OSError(5, "Input/output error")

    def line(format: str, out: str) -> list[str]:
        return ["shards", "export", str(shard_set.folder), "--format", format, "--out", f"{bucket}/{out}"]

    with monkeypatch.context() as patch:
        monkeypatch = patch
        patch.setattr(Store, "upload", die)
        assert run_command(line("ds", "again")) == 1
    left = objects(f"{bucket}/again")
    assert set(left) == {MARK, *killed}
    assert run_command(line("olmo", "again")) == 2 and MARK in capsys.readouterr().err
    assert objects(f"{bucket}/again") == left
    sent: list[str] = []
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "upload", lambda self, local, path: (sent.append(path), upload(self, local, path))[1])
        assert run_command(line("ds", "again")) == 0
    assert not set(sent) & set(killed)
    assert run_command(line("ds", "whole")) == 0
    assert objects(f"{bucket}/again") == objects(f"{bucket}/whole")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_upload_that_fails_leaves_nothing_and_is_marked_while_it_lasts(bucket, tmp_path, monkeypatch, failing):
    shard_set, upload = corpus(tmp_path / "set", 300), Store.upload
    seen: list[set[str]] = []

    def fail(self: Store, local: str, path: str) -> None:
        seen.append(set(objects(f"{bucket}/out")))
        if len(seen) > failing:
            raise OSError(5, "Input/output error")
        upload(self, local, path)

    monkeypatch.setattr(Store, "upload", fail)
    line = ["shards", "export", str(shard_set.folder), "--format", "mds", "--out", f"{bucket}/out"]
    assert run_command(line) == int(failing < 2)                # there are two files
    assert all("INCOMPLETE" in names for names in seen)
    assert all("index.json" not in names for names in seen), "the index is last"
    written = set(objects(f"{bucket}/out"))
    assert "INCOMPLETE" not in written and (not written) is (failing < 2)


def test_a_damaged_set_in_a_bucket_is_named_by_its_url(bucket, tmp_path, capsys):
    shard_set = corpus(tmp_path / "set", 300)
    body = shard_set.manifest.shards[1].body
    (shard_set.folder / body).write_bytes(b"\xff\x00" + (shard_set.folder / body).read_bytes()[2:])
    put(shard_set.folder, f"{bucket}/set")
    assert run_command(["shards", "export", f"{bucket}/set", "--format", "ds", "--out", f"{bucket}/out"]) == 1
    err = capsys.readouterr().err
    assert f"{bucket}/set/{body}" in err and err.count("\n") == 1 and objects(f"{bucket}/out") == {}
    assert run_command(["shards", "export", f"{bucket}/none", "--format", "ds", "--out", f"{bucket}/out"]) == 1
    assert f"{bucket}/none" in capsys.readouterr().err


def test_an_import_from_and_to_a_bucket_has_the_bytes_of_one_on_a_disk(bucket, tmp_path, capsys):
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 300, tmp_path / "tokenizer.json")
    eos = load_tokenizer(tmp_path / "tokenizer.json").eos
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.ds").write_bytes(b"".join(t.to_bytes(2, "little") for t in [5, eos] * 50))
    (tmp_path / "in" / "a.ds.index").write_bytes(b"".join(e.to_bytes(8, "little") for e in range(2, 101, 2)))
    put(tmp_path / "in", f"{bucket}/in")
    line = ["--format", "ds", "--tokenizer", str(tmp_path / "tokenizer.json"), "--name", "web", "--val", "0.3",
            "--store"]
    assert run_command(["shards", "import", str(tmp_path / "in"), *line, str(tmp_path / "store")]) == 0
    assert run_command(["shards", "import", f"{bucket}/in", *line, f"{bucket}/store"]) == 0
    assert objects(f"{bucket}/store/shards") == tree(tmp_path / "store" / "shards")
    assert f"{bucket}/store/shards/web/split=train" in capsys.readouterr().out
    before = objects(f"{bucket}/store/shards")
    assert run_command(["shards", "import", f"{bucket}/in", *line, f"{bucket}/store"]) == 2
    assert "--name web" in capsys.readouterr().err and objects(f"{bucket}/store/shards") == before
    Store(f"{bucket}/in").write("a.ds.index", b"12345678")
    line[line.index("web")] = "other"
    assert run_command(["shards", "import", f"{bucket}/in", *line, f"{bucket}/store"]) == 1
    err = capsys.readouterr().err
    assert f"{bucket}/in/a.ds" in err and err.count("\n") == 1 and objects(f"{bucket}/store/shards") == before
