"""Exports to object storage and imports from it: the same files as in a local folder, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from pipeline.base.scratch import Scratch
from pipeline.cli.app import run_command
from pipeline.cli.errors import BadUsage
from pipeline.cli.formats import noted
from pipeline.cli.incomplete import MARK
from pipeline.cli.stored_files import token_files
from pipeline.cli.streamed import streamed
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store
from tests.tokenizer.exports import Corpus, corpus, tree
from tests.tokenizer.packs import write_packing
from tests.tokenizer.test_encode_tasks import Runner
from tests.tokenizer.test_materialize import curriculum, materialise, published
from tokenizer.export.export import FORMATS
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


def test_of_two_commands_that_write_to_one_url_one_is_whole_and_the_other_is_refused(bucket):
    url = f"{bucket}/out"
    with streamed(url, "--out", "slow") as slow:
        with pytest.raises(BadUsage, match=MARK), streamed(url, "--out", "fast"):
            raise AssertionError("must not be written")
        with slow.create("slow.ds") as file:
            file.write(b"slow")
    assert objects(url) == {"slow.ds": b"slow"}


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


def export_line(shard_set: Corpus, format: str, out: str) -> list[str]:
    return ["shards", "export", str(shard_set.folder), "--format", format, "--quiet", "--out", out]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_streamed_without_a_copy_on_this_machine(bucket, tmp_path, monkeypatch, format):
    shard_set = corpus(tmp_path / "set", 300, masked=(0, 2))
    drop = [] if FORMATS[format].holds_loss else ["--drop-loss"]
    assert run_command([*export_line(shard_set, format, str(tmp_path / "out")), *drop]) == 0

    def no_scratch(self: Scratch, base: str | None = None) -> None:
        raise AssertionError("an export to S3 needs no temporary files")

    monkeypatch.setattr(Scratch, "__init__", no_scratch)
    assert run_command([*export_line(shard_set, format, f"{bucket}/out"), *drop]) == 0
    assert objects(f"{bucket}/out") == tree(tmp_path / "out")


def test_a_killed_export_is_completed_by_the_same_command_and_by_no_other(bucket, tmp_path, monkeypatch, capsys):
    shard_set, writer, written = corpus(tmp_path / "set", 300), Store.writer, []

    @contextlib.contextmanager
    def die(self: Store, path: str) -> Iterator[BinaryIO]:
        with writer(self, path) as file:
            yield file
        written.append(path)
        if len(written) == 4:
            monkeypatch.setattr(Store, "remove", lambda self, path: None)       # a killed process removes nothing
            raise StoreError("killed")

    with monkeypatch.context() as patch:
        monkeypatch = patch
        patch.setattr(Store, "writer", die)
        assert run_command(export_line(shard_set, "ds", f"{bucket}/again")) == 1
    left = objects(f"{bucket}/again")
    assert set(left) == {MARK, *written} and len(written) == 4
    for other in (export_line(shard_set, "olmo", f"{bucket}/again"),
                  export_line(corpus(tmp_path / "other", 400), "ds", f"{bucket}/again")):
        assert run_command(other) == 2 and MARK in capsys.readouterr().err
    assert objects(f"{bucket}/again") == left
    sent: list[str] = []
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "writer", lambda self, path: (sent.append(path), writer(self, path))[1])
        assert run_command(export_line(shard_set, "ds", f"{bucket}/again")) == 0
    assert sent and not set(sent) & set(written)
    assert run_command(export_line(shard_set, "ds", f"{bucket}/whole")) == 0
    assert objects(f"{bucket}/again") == objects(f"{bucket}/whole")


@pytest.mark.parametrize(("request_number", "in_part"), [(2, False), (6, True), (9, False)])
def test_an_export_killed_at_a_request_looks_incomplete_and_can_be_run_again(bucket, s3_server, tmp_path,
                                                                             request_number, in_part):
    """The process gets SIGKILL while the server has its n-th request that writes: an object, or a part of one."""
    shard_set = corpus(tmp_path / "set", 300, [[5, 7], [9_000_000], [3] * 9])
    line, paths = export_line(shard_set, "ds", f"{bucket}/out"), []

    def comes_to(method: str, path: str) -> bool:
        if method in ("PUT", "POST"):
            paths.append(path)
        return len(paths) == request_number

    killed, last = s3_server.killed_at(comes_to, *line), paths[request_number - 1]
    assert killed.returncode == -signal.SIGKILL and ("partNumber" in last or "uploadId" in last) == in_part
    left = objects(f"{bucket}/out")
    assert MARK in left and len(left) < 10
    with pytest.raises(BadUsage, match=MARK), token_files(f"{bucket}/out", "PATH"):
        raise AssertionError("must not be read")
    assert run_command(line) == 0 and run_command(export_line(shard_set, "ds", str(tmp_path / "out"))) == 0
    assert objects(f"{bucket}/out") == tree(tmp_path / "out")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_export_that_fails_leaves_nothing_and_is_marked_while_it_lasts(bucket, tmp_path, monkeypatch, failing):
    shard_set, writer = corpus(tmp_path / "set", 300), Store.writer
    seen: list[set[str]] = []

    @contextlib.contextmanager
    def fail(self: Store, path: str) -> Iterator[BinaryIO]:
        seen.append(set(objects(f"{bucket}/out")))
        with writer(self, path) as file:
            yield file
            if len(seen) > failing:
                raise StoreError("Input/output error")

    monkeypatch.setattr(Store, "writer", fail)
    assert run_command(export_line(shard_set, "mds", f"{bucket}/out")) == int(failing < 2)      # there are two files
    assert all(MARK in names for names in seen)
    assert all("index.json" not in names for names in seen), "the index is last"
    written = set(objects(f"{bucket}/out"))
    assert MARK not in written and (not written) is (failing < 2)


def test_a_part_that_cannot_be_sent_ends_the_export_and_leaves_nothing(bucket, s3_server, tmp_path, capsys):
    shard_set = corpus(tmp_path / "set", 300, [[5, 7], [17_000_000]])
    s3_server.trouble(lambda method, path, n: "deny" if "partNumber=2" in path else None)
    assert run_command(export_line(shard_set, "olmo", f"{bucket}/out")) == 1
    err = capsys.readouterr().err
    s3_server.trouble(None)
    assert "part-0-00001.npy" in err and "Traceback" not in err and objects(f"{bucket}/out") == {}
    store = Store(bucket)
    assert not store.fs.call_s3("list_multipart_uploads", Bucket=store.remote.bucket).get("Uploads")


def test_an_object_that_the_completed_export_does_not_write_is_named(bucket, tmp_path, capsys, monkeypatch):
    shard_set = corpus(tmp_path / "set", 300)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "remove", lambda self, path: None)                 # killed after the last object
        assert run_command(export_line(shard_set, "ds", f"{bucket}/out")) == 0
    Store(f"{bucket}/out").write("strange", b"x")
    assert run_command(export_line(shard_set, "ds", f"{bucket}/out")) == 2
    assert "strange" in capsys.readouterr().err and MARK in objects(f"{bucket}/out")
    Store(f"{bucket}/out").remove("strange")
    Store(f"{bucket}/out").write("00000.ds", b"x")
    assert run_command(export_line(shard_set, "ds", f"{bucket}/out")) == 2
    assert "00000.ds" in capsys.readouterr().err and MARK in objects(f"{bucket}/out")


@pytest.mark.parametrize("size", [0, 1, 16 << 20, (16 << 20) + 1, (33 << 20) + 77])
def test_what_is_written_in_pieces_of_any_size_is_one_object(bucket, size):
    data, rng, store = random.Random(size).randbytes(size), random.Random(1), Store(f"{bucket}/pieces")
    with store.writer("object") as file:
        begin = 0
        while begin < size:
            step = rng.choice([0, 1, 4096, 1 << 20, 20 << 20])
            file.write(np.frombuffer(data[begin:begin + step], np.uint8).reshape(1, -1))
            begin += step
            assert file.tell() == min(begin, size) and store.size("object") is None
    assert store.read("object") == data
    with contextlib.suppress(ZeroDivisionError), store.writer("none") as file:
        file.write(data)
        raise ZeroDivisionError
    assert store.size("none") is None
    assert not store.fs.call_s3("list_multipart_uploads", Bucket=store.remote.bucket).get("Uploads")


@pytest.mark.parametrize("fault", ["damaged", "cut off", "reset"])
def test_bytes_that_a_connection_damages_are_requested_again(bucket, tmp_path, monkeypatch, fault):
    shard_set = corpus(tmp_path / "set", 300)
    put(shard_set.folder, f"{bucket}/set")
    real, requests = Store.read_range, dict[str, int]()

    def damaging(self: Store, path: str, start: int, stop: int) -> bytes:
        data = real(self, path, start, stop)
        requests[path] = requests.get(path, 0) + 1
        if requests[path] > 1 or not path.endswith(".tokens"):
            return data
        if fault == "reset":
            raise ConnectionResetError(104, "Connection reset by peer")
        return data[:-1] if fault == "cut off" else bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(Store, "read_range", damaging)
    line = ["shards", "export", "--format", "ds", "--quiet", "--out"]
    assert run_command([*line, str(tmp_path / "again"), f"{bucket}/set"]) == 0
    assert run_command([*line, str(tmp_path / "out"), str(shard_set.folder)]) == 0
    assert tree(tmp_path / "again") == tree(tmp_path / "out") and max(requests.values()) == 2


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


def test_an_export_is_noted_before_it_writes_and_not_if_it_is_refused(bucket):
    """A killed export leaves tokens in the bucket, which a takedown must name."""
    there: list[dict[str, bytes]] = []

    def note() -> None:
        there.append(objects(f"{bucket}/out"))

    with noted(note, f"{bucket}/out", "--out", "x") as target:
        assert [list(objects) for objects in there] == [[MARK]]
        with target.create("a") as file:
            file.write(b"x")
    Store(f"{bucket}/used").write("a", b"x")
    with pytest.raises(BadUsage, match="not empty"), noted(note, f"{bucket}/used", "--out", "x"):
        pass
    assert len(there) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_set_in_a_bucket_is_read_without_copies_of_its_tokens(bucket, tmp_path, monkeypatch, format):
    shards = [[5, 7, 300], [1, 1, 40], [60], [2] * 20, [9]]
    shard_set = corpus(tmp_path / "set", 300, shards, masked=(0, 2))
    put(shard_set.folder, f"{bucket}/set")
    drop = [] if FORMATS[format].holds_loss else ["--drop-loss"]
    copied, most, download = [], 0, Store.download

    def watched(self: Store, path: str, local: str) -> None:
        nonlocal most
        download(self, path, local)
        copied.append(path)
        most = max(most, sum(name.suffix == ".ends" for name in Path(local).parent.iterdir()))

    monkeypatch.setattr(Store, "download", watched)
    line = ["shards", "export", "--format", format, "--quiet", *drop, "--out"]
    assert run_command([*line, str(tmp_path / "out"), str(shard_set.folder)]) == 0
    assert run_command([*line, str(tmp_path / "again"), f"{bucket}/set"]) == 0
    assert tree(tmp_path / "again") == tree(tmp_path / "out")
    big = {name for info in shard_set.manifest.shards for name in (info.body, info.loss)}
    assert copied and not big & set(copied) and most <= 3
