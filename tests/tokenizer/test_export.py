"""Exports hold the documents of the shard set, token by token. When a set is damaged or refused, or an export is
stopped, nothing is left."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.cli.app import run_command
from pipeline.cli.formats import TokenFormat
from tests.conftest import alone
from tests.tokenizer.exports import VOCABS, Corpus, corpus, tree
from tests.tokenizer.test_encode_tasks import CONFIG, Runner, encode
from tests.tokenizer.test_loss_spans import mixed
from tokenizer.export.export import FORMATS, export
from tokenizer.export.source import BLOCK_TOKENS, ExportError
from tokenizer.shards.layout import ShardError
from tokenizer.shards.reader import ShardSet

MASKED = [name for name, format in FORMATS.items() if format.holds_loss]
UNMASKED = [name for name in FORMATS if name not in MASKED]


def test_the_command_offers_every_format():
    assert {f.value for f in TokenFormat} == set(FORMATS)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", FORMATS)
def test_equal_sets_give_equal_bytes_whether_linked_or_copied(tmp_path, monkeypatch, name, vocab):
    shard_set = corpus(tmp_path / "set", vocab)
    first = export(ShardSet(shard_set.folder), name, tmp_path / "a")
    again = export(ShardSet(shard_set.folder), name, tmp_path / "b")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copied = export(ShardSet(shard_set.folder), name, tmp_path / "c")
    assert first == again == copied._replace(linked=first.linked)
    assert copied.linked == 0
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c")
    assert (first.documents, first.tokens) == (len(shard_set.documents), sum(map(len, shard_set.documents)))
    assert first.files == len(tree(tmp_path / "a"))
    assert first.bytes == sum(map(len, tree(tmp_path / "a").values()))
    assert sum(p.stat().st_size for p in (tmp_path / "a").rglob("*") if p.stat().st_nlink > 1) >= first.linked


@pytest.mark.parametrize("kind", ["body", "ends", "table", "loss"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_named_and_nothing_is_left(tmp_path, name, kind):
    shard_set = corpus(tmp_path / "set", 300, masked=(0, 2))
    path = shard_set.folder / getattr(shard_set.manifest.shards[2], kind)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    drop = name in UNMASKED
    if kind in unread(name):
        export(ShardSet(shard_set.folder), name, tmp_path / "out", drop_loss=drop)
        return
    with pytest.raises(ShardError, match=path.name):
        export(ShardSet(shard_set.folder), name, tmp_path / "out", drop_loss=drop)
    assert sorted(os.listdir(tmp_path)) == ["set"]


def unread(name: str) -> set[str]:
    """Return the kinds of files of a shard that an export in this format does not read."""
    kinds = {"loss"} if name in UNMASKED else set()
    if name in ("ds", "megatron", "nanogpt"):
        kinds.add("table")
    return kinds | {"ends"} if name == "nanogpt" else kinds


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stopped_leaves_nothing_and_progress_ends_at_the_total(tmp_path, name):
    shard_set, seen = corpus(tmp_path / "set", 300), []

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(ShardSet(shard_set.folder), name, tmp_path / "out", progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["set"]
    export(ShardSet(shard_set.folder), name, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert sorted(seen) == seen
    assert seen[-1] == (2 * shard_set.manifest.tokens,) * 2


def test_a_folder_that_holds_something_is_refused(tmp_path):
    shards = ShardSet(corpus(tmp_path / "set", 300).folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link"):
        with pytest.raises(ExportError, match=name):
            export(shards, "ds", tmp_path / name)
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    export(shards, "ds", tmp_path / "empty")
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "full", "link", "set"]


@pytest.mark.parametrize("name", FORMATS)
def test_loss_masks_are_refused_unless_they_are_held_or_dropped(tmp_path, name):
    shards = ShardSet(corpus(tmp_path / "set", 300, masked=(0, 2)).folder)
    if name in UNMASKED:
        with pytest.raises(ExportError, match="--drop-loss"):
            export(shards, name, tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["set"]
    export(shards, name, tmp_path / "dropped", drop_loss=True)
    plain = ShardSet(corpus(tmp_path / "plain", 300).folder)
    export(plain, name, tmp_path / "never", drop_loss=True)
    if name != "litdata":                                       # its index names the shard set, which has the masks
        assert tree(tmp_path / "dropped") == tree(tmp_path / "never")


def test_folders_that_cannot_be_replaced_are_refused_first(tmp_path, monkeypatch):
    shard_set = ShardSet(corpus(tmp_path / "set", 300).folder)
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for out, said in (("/proc", "not empty|mounted"), (".", "current folder"),
                      (str(tmp_path / "link"), "symbolic link"), (str(tmp_path / "set"), "not empty")):
        with pytest.raises(ExportError, match=said):
            export(shard_set, "ds", Path(out))
    assert sorted(os.listdir(tmp_path)) == ["here", "link", "set"] and os.listdir(tmp_path / "here") == []


def test_a_set_without_documents_is_refused(tmp_path):
    shard_set = corpus(tmp_path / "set", 300, shards=())
    with pytest.raises(ExportError, match="no documents"):
        export(ShardSet(shard_set.folder), "ds", tmp_path / "out")


@pytest.mark.parametrize("name", FORMATS)
def test_ids_outside_the_vocabulary_are_refused(tmp_path, name):
    shard_set = corpus(tmp_path / "set", 70_000, stray=2**31 + 7)
    with pytest.raises(ShardError, match="outside the vocabulary"):
        export(ShardSet(shard_set.folder), name, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["set"]


def measured_peak(shard_set: Path, name: str, out: Path) -> int:
    """Return the most bytes that Python allocates to export a shard set. What is imported and cached at first use does
    not count."""
    export(ShardSet(corpus(out.with_name("small"), 50_000, shards=([3],)).folder), name, out.with_name("first"))
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    export(ShardSet(shard_set), name, out)
    peak = tracemalloc.get_traced_memory()[1]
    assert pa.total_allocated_bytes() <= arrow, "nothing is kept where tracemalloc does not see it"
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_memory_does_not_grow_with_the_shard(tmp_path, large, name):
    """A shard of 35 MB, one document of which is longer than a block, in blocks of 8 MB."""
    peak = alone(measured_peak, large.folder, name, tmp_path / "out")
    assert peak < (60e6 if name in ("mds", "litdata") else 25e6), f"{peak:,}"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    rng = np.random.default_rng(5)
    lengths = [5, BLOCK_TOKENS + 17, *rng.integers(0, 3000, 9_000).tolist()]
    return corpus(tmp_path_factory.mktemp("large"), 50_000, shards=(lengths,))


def test_a_set_of_the_pipeline_is_the_same_for_any_partition_size(tmp_path):
    """Documents of which only spans count, among others; the names of parts and their rows differ."""
    trees: dict[str, list[dict[str, bytes]]] = {name: [] for name in FORMATS}
    for size in (500, 9):
        (tmp_path / str(size)).mkdir()
        run = Runner(tmp_path / str(size))
        info, _ = encode(run, run.parts(mixed(), size), CONFIG, 3000)
        shards = ShardSet(run.store.local / info["train"]["path"])
        assert len(shards.manifest.shards) > 5 and shards.targets() < shards.tokens
        for name in FORMATS:
            export(shards, name, tmp_path / f"{size}-{name}", drop_loss=name in UNMASKED)
            trees[name].append(tree(tmp_path / f"{size}-{name}"))
    for name, (first, second) in trees.items():
        assert first == second, name


# -- the command ---------------------------------------------------------------------------------------------------
def test_the_command_says_what_it_wrote(tmp_path, capsys):
    shard_set = corpus(tmp_path / "set", 300)
    line = ["shards", "export", str(shard_set.folder), "--format", "ds", "--out", str(tmp_path / "new" / "out")]
    assert run_command(line) == 0
    out = capsys.readouterr().out
    assert f"{shard_set.manifest.documents} documents" in out and out.count("\n") == 1
    assert run_command([*line[:-1], str(tmp_path / "json"), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["format"], row["tokens"], row["path"]) == ("ds", shard_set.manifest.tokens, str(tmp_path / "json"))
    assert 0 < row["linked"] < row["bytes"]


def test_progress_has_a_rate_and_the_time_left(tmp_path, capsys, monkeypatch):
    shard_set, seconds = corpus(tmp_path / "set", 300), itertools.count(step=11)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    line = ["shards", "export", str(shard_set.folder), "--format", "megatron", "--out"]
    assert run_command([*line, str(tmp_path / "shown")]) == 0
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 3                                      # one for each shard, which is one block
    assert re.fullmatch(r"\S+ k?B of \d+ kB, \S+ k?B/s, about \d+ s left", shown[0])
    assert shown[-1].endswith("about 0 s left")
    for option in ("--quiet", "--json"):
        assert run_command([*line, str(tmp_path / option), option]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("out", "key"), [("s3://key:secret@bucket/x", "--out"), ("set", "--out"),
                                          ("out", "--drop-loss")])
def test_errors_of_the_command_are_one_line(tmp_path, capsys, monkeypatch, out, key):
    shard_set = corpus(tmp_path / "set", 300, masked=(0,))
    monkeypatch.chdir(tmp_path)
    name = "megatron" if key == "--drop-loss" else "ds"
    assert run_command(["shards", "export", str(shard_set.folder), "--format", name, "--out", out]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and key in err
    assert os.listdir(tmp_path) == ["set"]


def test_a_damaged_set_fails_the_command(tmp_path, capsys):
    shard_set = corpus(tmp_path / "set", 300)
    path = Path(shard_set.folder / shard_set.manifest.shards[0].body)
    path.write_bytes(b"\xff\x00" + path.read_bytes()[2:])
    assert run_command(["shards", "export", str(shard_set.folder), "--format", "ds", "--out", str(tmp_path / "o")]) == 1
    err = capsys.readouterr().err
    assert path.name in err and err.count("\n") == 1
