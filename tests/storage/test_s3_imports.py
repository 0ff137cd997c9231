"""Imports and texts from object storage and to it: the same files as in a local folder, whole or not at all, and little
of them on the disk of this machine."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipeline.base.scratch import Scratch
from pipeline.cli.app import run_command
from pipeline.cli.incomplete import MARK
from pipeline.cli.stored_files import token_files
from pipeline.cli.streamed import streamed
from pipeline.store.fs import Store
from tests.storage.test_s3_formats import objects, put
from tests.tokenizer.exports import corpus, tree
from tests.tokenizer.imports import EOS, STEP, like_a_run
from tokenizer.export.export import FORMATS, export
from tokenizer.imports.imports import Imported, import_tokens
from tokenizer.imports.source import Coding, TokenFileError
from tokenizer.load import load_tokenizer
from tokenizer.shards.reader import ShardSet
from tokenizer.train import train_bpe

CODING = Coding("t" * 64, 300, EOS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 300, path)
    return path


def write_ds(folder: Path, tokenizer: Path, documents: int = 50) -> None:
    eos = load_tokenizer(tokenizer).eos
    folder.mkdir()
    (folder / "a.ds").write_bytes(b"".join(t.to_bytes(2, "little") for t in [5, eos] * documents))
    (folder / "a.ds.index").write_bytes(b"".join(e.to_bytes(8, "little") for e in range(2, 2 * documents + 1, 2)))


def test_an_import_from_and_to_a_bucket_has_the_bytes_of_one_on_a_disk(bucket, tmp_path, tokenizer, capsys):
    write_ds(tmp_path / "in", tokenizer)
    put(tmp_path / "in", f"{bucket}/in")
    line = ["--format", "ds", "--tokenizer", str(tokenizer), "--name", "web", "--val", "0.3",
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


def no_scratch(self: Scratch, base: str | None = None) -> None:
    raise AssertionError("needs no temporary files")


@pytest.mark.parametrize("format", FORMATS)
def test_token_files_in_a_bucket_are_read_without_a_copy_on_this_machine(bucket, tmp_path, monkeypatch, format):
    shard_set = like_a_run(tmp_path / "set", 300, masked=(0, 1) if FORMATS[format].holds_loss else ())
    export(ShardSet(shard_set.folder), format, tmp_path / "in")
    put(tmp_path / "in", f"{bucket}/in")

    def imported(path: str, out: Path) -> Imported:
        with token_files(path, "PATH") as (source, stored):
            return import_tokens(source, format, CODING, out, "web", lambda file, number: f"{file}#{number}",
                                 shard_bytes=2 * STEP, stored=stored)

    local = imported(str(tmp_path / "in"), tmp_path / "local")
    monkeypatch.setattr(Scratch, "__init__", no_scratch)
    remote = imported(f"{bucket}/in", tmp_path / "remote")
    assert (remote.sha256, tree(tmp_path / "remote")) == (local.sha256, tree(tmp_path / "local"))


@pytest.mark.parametrize("rows", [0, 64])
def test_an_import_to_a_bucket_has_one_shard_at_a_time_on_the_disk(bucket, tmp_path, monkeypatch, rows):
    rng = np.random.default_rng(1)
    if rows:
        rng.integers(4, 300, (900, rows + 1), np.uint16).tofile(tmp_path / "a.ds")
        np.arange(rows + 1, 900 * (rows + 1) + 1, rows + 1, dtype=np.uint64).tofile(tmp_path / "a.ds.index")
        source = tmp_path / "a.ds"
    else:
        export(ShardSet(corpus(tmp_path / "set", 300, [[40] * 200, [9] * 900]).folder), "ds", tmp_path / "in")
        source = tmp_path / "in"
    upload, held = Store.upload, []

    def watched(self: Store, local: str, path: str) -> None:
        held.append(sum(p.stat().st_size for p in Path(local).parents[1].rglob("*") if p.name == "body"))
        upload(self, local, path)

    monkeypatch.setattr(Store, "upload", watched)
    arguments = (source, "ds", CODING, tmp_path / "out", "web", lambda file, number: f"{file}#{number}")
    import_tokens(*arguments, shard_bytes=4000, sequence=rows)
    result = import_tokens(*arguments, shard_bytes=4000, sequence=rows,
                           place=partial(streamed, f"{bucket}/out", "--name web"))
    assert objects(f"{bucket}/out") == tree(tmp_path / "out")
    assert result.shards > 4 and 0 < max(held) < 4000 + 2 * 200


def import_line(folder: Path, tokenizer: Path, store: str) -> list[str]:
    return ["shards", "import", str(folder), "--format", "ds", "--tokenizer", str(tokenizer), "--name", "web",
            "--val", "0.3", "--quiet", "--store", store]


@pytest.mark.parametrize("last", [".parquet", "shards.json"])
def test_a_killed_import_is_no_shard_set_and_the_same_command_completes_it(bucket, s3_server, tmp_path, tokenizer,
                                                                          capsys, last):
    """The process gets SIGKILL while the server has a request that writes the named object."""
    write_ds(tmp_path / "in", tokenizer)
    write_ds(tmp_path / "other", tokenizer, 60)
    line = import_line(tmp_path / "in", tokenizer, f"{bucket}/store")
    killed = s3_server.killed_at(lambda method, path: method == "PUT" and last in path and "/shards/web/" in path,
                                 *line)
    assert killed.returncode == -signal.SIGKILL
    left = objects(f"{bucket}/store/shards/web")
    assert MARK in left and "split=train/shards.json" not in left
    assert run_command(import_line(tmp_path / "other", tokenizer, f"{bucket}/store")) == 2
    assert MARK in capsys.readouterr().err and objects(f"{bucket}/store/shards/web") == left
    assert run_command(line) == 0 and run_command(import_line(tmp_path / "in", tokenizer, str(tmp_path / "s"))) == 0
    assert objects(f"{bucket}/store/shards") == tree(tmp_path / "s" / "shards")


def test_two_documents_of_one_id_leave_nothing_in_the_bucket(bucket, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"input_ids": [[5, EOS], [6, EOS]] * 500, "id": [*map(str, range(999)), "7"]}),
                   tmp_path / "a.parquet")
    with pytest.raises(TokenFileError, match="has the id '7'"):
        import_tokens(tmp_path / "a.parquet", "parquet", CODING, Path("out"), "web", str, shard_bytes=400,
                      place=partial(streamed, f"{bucket}/out", "--name web"))
    assert objects(f"{bucket}/out") == {}


def test_an_object_that_changes_during_an_import_ends_it(bucket, tmp_path):
    export(ShardSet(corpus(tmp_path / "set", 300).folder), "ds", tmp_path / "in")
    put(tmp_path / "in", f"{bucket}/in")

    def change_and_import() -> None:
        with token_files(f"{bucket}/in", "PATH") as (path, stored):
            Store(f"{bucket}/in").write("00001.ds", b"other bytes")
            import_tokens(path, "ds", CODING, tmp_path / "out", "web", lambda file, number: f"{file}#{number}",
                          stored=stored)

    with pytest.raises(TokenFileError, match=f"{bucket}/in/00001.ds: changed while"):
        change_and_import()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("killed", [False, True])
def test_texts_are_decoded_from_bucket_to_bucket_without_a_copy_on_this_machine(bucket, tmp_path, tokenizer,
                                                                             monkeypatch, killed):
    write_ds(tmp_path / "in", tokenizer)
    put(tmp_path / "in", f"{bucket}/in")
    line = ["shards", "decode", "--format", "ds", "--tokenizer", str(tokenizer), "--quiet", "--out"]
    assert run_command([*line, str(tmp_path / "out"), str(tmp_path / "in")]) == 0
    monkeypatch.setattr(Scratch, "__init__", no_scratch)
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "remove", lambda self, path: None)             # killed before the mark is removed
            assert run_command([*line, f"{bucket}/out", f"{bucket}/in"]) == 0
        assert MARK in objects(f"{bucket}/out")
    assert run_command([*line, f"{bucket}/out", f"{bucket}/in"]) == 0
    assert objects(f"{bucket}/out") == tree(tmp_path / "out")
