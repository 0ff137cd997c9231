"""Imports give back what exports wrote: tokens, ends and masks. Damaged and refused files leave nothing behind."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.prf import below
from pipeline.cli.app import run_command
from pipeline.cli.formats import TokenFormat
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.conftest import alone
from tests.tokenizer.exports import VOCABS, corpus, tree
from tests.tokenizer.imports import documents_of, imported, like_a_run
from tokenizer.export.export import FORMATS as EXPORTS
from tokenizer.export.export import export
from tokenizer.export.source import ExportError
from tokenizer.imports.imports import FORMATS
from tokenizer.imports.source import TokenFile, TokenFileError
from tokenizer.load import load_tokenizer
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify
from tokenizer.train import train_bpe

MASKED = [name for name in FORMATS if EXPORTS[name].holds_loss]
#: formats that keep the ids of documents
NAMED = [name for name in FORMATS if name in ("olmo", "parquet", "mds")]


def test_the_command_offers_every_format():
    assert [f.value for f in TokenFormat] == list(FORMATS)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", FORMATS)
def test_an_import_of_an_export_has_the_bytes_of_the_set_and_so_has_its_export(tmp_path, name, vocab):
    """All but the ids, in formats that have none, and the sizes of texts, which no format has."""
    shard_set = like_a_run(tmp_path / "set", vocab, masked=(0, 2) if name in MASKED else ())
    export(ShardSet(shard_set.folder), name, tmp_path / "out")
    result = imported(tmp_path / "out", name, vocab, tmp_path / "store")
    manifest = ShardSet(result.path).manifest
    assert verify(result.path) == []
    assert (result.documents, result.tokens) == (shard_set.manifest.documents, shard_set.manifest.tokens)
    assert len(manifest.shards) > 3
    for kind in ("index", "sha256", "ends_sha256", "loss_sha256", "blocks_sha256"):
        assert [getattr(shard, kind) for shard in manifest.shards] == \
            [getattr(shard, kind) for shard in shard_set.manifest.shards], kind
    names = [span.id for span in ShardSet(result.path).documents(0, manifest.tokens)]
    assert names == shard_set.ids if name in NAMED else len(set(names)) == len(names)
    export(ShardSet(result.path), name, tmp_path / "again")
    assert without_identity(tmp_path / "again") == without_identity(tmp_path / "out")


def without_identity(folder: Path) -> dict[str, bytes]:
    """Return the files of an export by path. In litdata's index, the sha256 of the set is removed, because it depends
    on the ids of documents, which litdata does not store."""
    files = tree(folder)
    if "index.json" in files and "updated_at" in (index := json.loads(files["index.json"])):
        files["index.json"] = json.dumps({**index, "updated_at": None}).encode()
    return files


@pytest.mark.parametrize("name", FORMATS)
def test_equal_files_give_equal_bytes_wherever_they_are(tmp_path, name):
    shard_set = like_a_run(tmp_path / "set", 300)
    export(ShardSet(shard_set.folder), name, tmp_path / "out")
    first = imported(tmp_path / "out", name, 300, tmp_path / "store")
    (tmp_path / "out").rename(tmp_path / "moved")
    again = imported(tmp_path / "moved", name, 300, tmp_path / "other")
    assert tree(first.path) == tree(again.path)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60), cuts=st.integers(1, 5), block=st.integers(1, 99),
       mask=st.booleans())
@pytest.mark.parametrize("name", FORMATS)
def test_any_documents_come_back_for_any_block_size(tmp_path_factory, name, lengths, cuts, block, mask):
    folder = tmp_path_factory.mktemp("any")
    shards = [part.tolist() for part in np.array_split(lengths, cuts) if len(part)]
    shards[0][0] = 3                                            # `corpus` gives the first document these tokens
    shard_set = corpus(folder / "set", 300, shards=shards, masked=(0,) if mask and name in MASKED else ())
    export(ShardSet(shard_set.folder), name, folder / "out")
    result = imported(folder / "out", name, 300, folder / "store", block_tokens=block)
    assert [(tokens, targets) for _, tokens, targets in documents_of(result.path)] == \
        [(d.tolist(), t.tolist()) for d, t in zip(shard_set.documents, shard_set.targets)]
    assert verify(result.path) == []


@pytest.mark.parametrize("name", FORMATS)
def test_ids_outside_the_vocabulary_are_named_with_their_file(tmp_path, name):
    shard_set = corpus(tmp_path / "set", 300)
    export(ShardSet(shard_set.folder), name, tmp_path / "out")
    with pytest.raises(TokenFileError, match="299 is outside the vocabulary of 299") as error:
        imported(tmp_path / "out", name, 299, tmp_path / "store")
    assert str(tmp_path / "out") in str(error.value) and "\n" not in str(error.value)
    assert os.listdir(tmp_path / "store" / "shards") == []


@pytest.mark.parametrize("name", FORMATS)
def test_without_eos_the_expected_id_is_named(tmp_path, name):
    shard_set = corpus(tmp_path / "set", 300)
    export(ShardSet(shard_set.folder), name, tmp_path / "out")
    with pytest.raises(TokenFileError, match=r"EOS \((token id )?2\)"):
        imported(tmp_path / "out", name, 300, tmp_path / "store", eos=2)      # no document has it
    assert os.listdir(tmp_path / "store" / "shards") == []


@pytest.mark.parametrize("name", FORMATS)
def test_every_truncated_or_missing_file_is_an_error(tmp_path, name):
    """Cut to nothing, to half and by one byte; a file of metadata may be missing."""
    shard_set = corpus(tmp_path / "set", 300, shards=[[3, 9, 30], [5]], masked=(0,) if name in MASKED else ())
    export(ShardSet(shard_set.folder), name, tmp_path / "out")
    for path in sorted((tmp_path / "out").rglob("*")):
        if path.suffix == ".metadata":
            continue
        data = path.read_bytes()
        for size in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            with pytest.raises(TokenFileError) as error:
                imported(tmp_path / "out", name, 300, tmp_path / "store")
            assert "\n" not in str(error.value) and ": " in str(error.value)
        path.write_bytes(data)
    assert os.listdir(tmp_path / "store" / "shards") == []
    assert imported(tmp_path / "out", name, 300, tmp_path / "store").documents == 4


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_another_kind_are_an_error_and_never_a_crash(tmp_path, name):
    """Every file is overwritten in turn, byte by byte at random; an import ends in a set or an error that it knows."""
    shard_set = corpus(tmp_path / "set", 300, shards=[[3, 9, 30], [5]], masked=(0,) if name in MASKED else ())
    export(ShardSet(shard_set.folder), name, tmp_path / "out")
    rng, errors = np.random.default_rng(7), 0
    for attempt, path in enumerate(sorted((tmp_path / "out").rglob("*")) * 12):
        data = path.read_bytes()
        damaged = bytearray(data)
        for place in rng.integers(0, min(len(data), 64 if attempt % 2 else len(data)), 3):
            damaged[place] = rng.choice([0, 1, 127, 128, 255])
        path.write_bytes(damaged)
        try:
            imported(tmp_path / "out", name, 300, tmp_path / "store", f"n{attempt}")
        except TokenFileError:
            errors += 1
        path.write_bytes(data)
    assert errors


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, name, monkeypatch):
    shard_set = corpus(tmp_path / "set", 300)
    export(ShardSet(shard_set.folder), name, tmp_path / "out")
    close, changed = TokenFile.check_unchanged, []

    def change(file: TokenFile) -> None:
        if not changed:
            changed.append(file.path)
            os.utime(file.path, ns=(1, 1))
        close(file)

    monkeypatch.setattr(TokenFile, "check_unchanged", change)
    with pytest.raises(TokenFileError, match="changed while it was read") as error:
        imported(tmp_path / "out", name, 300, tmp_path / "store")
    assert str(changed[0]) in str(error.value)
    assert os.listdir(tmp_path / "store" / "shards") == []


@pytest.mark.parametrize("name", FORMATS)
def test_empty_input_and_missing_paths_are_errors(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("no tokens")
    for path in ("empty", "file.txt", "nowhere"):
        with pytest.raises(TokenFileError, match=path):
            imported(tmp_path / path, name, 300, tmp_path / "store")


def measured_peak(folder: Path, name: str) -> int:
    """Return the most bytes that Python allocates to import 24 MB of tokens in blocks of 0.5 MB."""
    rng = np.random.default_rng(5)
    shard_set = corpus(folder / "set", 50_000, shards=[rng.integers(0, 3000, 2000).tolist()] * 4)
    export(ShardSet(shard_set.folder), name, folder / "out")
    def run(store: str) -> None:
        imported(folder / "out", name, 50_000, folder / store, step=5_000_000, block_tokens=1 << 18)

    run("first")                                   # what is imported and cached at first use would count as well
    tracemalloc.start()
    run("second")
    return tracemalloc.get_traced_memory()[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_memory_does_not_grow_with_the_files(tmp_path, name):
    peak = alone(measured_peak, tmp_path, name)
    assert peak < 9e6, f"{peak:,}"


@pytest.mark.parametrize("held_out", ["x_val.0", "test-1", "validation/a"])
def test_held_out_files_are_not_mixed_with_others(tmp_path, held_out):
    for name in ("train-0", held_out):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.ds").write_bytes(b"\x05\x00\x03\x00")
        (tmp_path / f"{name}.ds.index").write_bytes((2).to_bytes(8, "little"))
    with pytest.raises(TokenFileError, match="held out"):
        imported(tmp_path, "ds", 300, tmp_path / "store")
    assert imported(tmp_path / f"{held_out}.ds", "ds", 300, tmp_path / "store").documents == 1


def test_pipes_and_links_to_nothing_are_errors(tmp_path):
    os.mkfifo(tmp_path / "a.ds")
    with pytest.raises(TokenFileError, match="is no file"):
        imported(tmp_path, "ds", 300, tmp_path / "store")
    (tmp_path / "a.ds").unlink()
    (tmp_path / "a.ds").symlink_to("nowhere")
    with pytest.raises(TokenFileError, match="cannot be read"):
        imported(tmp_path, "ds", 300, tmp_path / "store")


def test_a_name_that_is_taken_is_refused_and_kept(tmp_path):
    shard_set = corpus(tmp_path / "set", 300)
    export(ShardSet(shard_set.folder), "ds", tmp_path / "out")
    first = imported(tmp_path / "out", "ds", 300, tmp_path / "store")
    before = tree(tmp_path / "store")
    with pytest.raises(ExportError, match="--name web"):
        imported(tmp_path / "out", "ds", 300, tmp_path / "store")
    assert tree(tmp_path / "store") == before and first.documents == shard_set.manifest.documents


@pytest.mark.parametrize("name", NAMED)
def test_an_id_of_two_documents_is_refused_with_both_places(tmp_path, name):
    shard_set = corpus(tmp_path / "set", 300, shards=[[3, 9, 30], [5, 2]])
    export(ShardSet(shard_set.folder), name, tmp_path / "out")
    (tmp_path / "in").mkdir()
    for path in sorted((tmp_path / "out").iterdir()):           # equal lengths, so that no place in a file moves
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            ids = [id.replace(shard_set.ids[4], shard_set.ids[1]) for id in table["id"].to_pylist()]
            pq.write_table(table.set_column(0, "id", pa.array(ids)), tmp_path / "in" / path.name)
            continue
        data = data.replace(shard_set.ids[4].encode(), shard_set.ids[1].encode())
        (tmp_path / "in" / path.name).write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    with pytest.raises(TokenFileError, match=shard_set.ids[1]) as error:
        imported(tmp_path / "in", name, 300, tmp_path / "store")
    assert str(error.value).count(", document ") == 2 and "\n" not in str(error.value)
    assert os.listdir(tmp_path / "store" / "shards") == []


def test_equal_hashes_of_different_ids_are_no_error(tmp_path, monkeypatch):
    export(ShardSet(corpus(tmp_path / "set", 300).folder), "parquet", tmp_path / "out")
    monkeypatch.setattr("tokenizer.imports.ids.hashed", len)
    assert imported(tmp_path / "out", "parquet", 300, tmp_path / "store").documents == 112


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40), odd=st.sets(st.integers(0, 39)),
       mask=st.booleans(), block=st.integers(1, 99))
def test_documents_are_divided_between_training_and_validation(tmp_path_factory, lengths, odd, mask, block):
    folder = tmp_path_factory.mktemp("divided")
    shard_set = corpus(folder / "set", 300, shards=[[3, *lengths]], masked=(0,) if mask else ())
    export(ShardSet(shard_set.folder), "ds", folder / "out")
    chosen = {f"00000.ds#{number}" for number in odd if number}              # the first one is for training
    result = imported(folder / "out", "ds", 300, folder / "store", is_held_out=chosen.__contains__, block_tokens=block)
    expected: dict[str, list[tuple[str, list[int], list[bool]]]] = {"train": [], "val": []}
    for number, (tokens, targets) in enumerate(zip(shard_set.documents, shard_set.targets)):
        id = f"00000.ds#{number}"
        expected["val" if id in chosen else "train"].append((id, tokens.tolist(), targets.tolist()))
    for split, wanted in expected.items():
        assert documents_of(result.path.parent / f"split={split}") == wanted
        assert verify(result.path.parent / f"split={split}") == []
    assert (result.documents, result.held_out) == (len(expected["train"]), len(expected["val"]))


# -- the command ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 300, path)
    return path


def line(tmp_path: Path, tokenizer: Path, *more: str) -> list[str]:
    return ["shards", "import", str(tmp_path / "in"), "--format", "ds", "--tokenizer", str(tokenizer), "--store",
            str(tmp_path / "store"), "--name", "web", *more]


def write_ds(folder: Path, texts: list[list[int]]) -> None:
    folder.mkdir()
    (folder / "a.ds").write_bytes(b"".join(t.to_bytes(2, "little") for text in texts for t in text))
    ends = np.cumsum([len(text) for text in texts]).tolist()
    (folder / "a.ds.index").write_bytes(b"".join(e.to_bytes(8, "little") for e in ends))


def test_the_command_writes_a_set_that_other_commands_read(tmp_path, tokenizer, capsys):
    coder = load_tokenizer(tokenizer)
    texts = ["the quick fox", "", "lazy dog"]
    write_ds(tmp_path / "in", [[*ids.tolist(), coder.eos] for ids in coder.encode_batch(texts)])
    assert run_command(line(tmp_path, tokenizer, "--json")) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["documents"], row["shards"], row["format"]) == (3, 1, "ds")
    assert run_command(["shards", "verify", row["path"]]) == 0
    assert run_command(["shards", "stats", row["path"], "--json"]) == 0
    assert run_command(["shards", "head", row["path"], "--json"]) == 0        # finds the tokenizer in the store
    out = capsys.readouterr().out.splitlines()
    assert [json.loads(text)["text"] for text in out[2:]] == texts
    ids = [json.loads(text)["id"] for text in out[2:]]
    assert len(set(ids)) == 3 and all(len(id) == 32 for id in ids)
    assert run_command(["shards", "export", row["path"], "--format", "ds", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "00000.ds").read_bytes() == (tmp_path / "in" / "a.ds").read_bytes()
    capsys.readouterr()
    assert run_command(line(tmp_path, tokenizer)) == 2                        # the name is taken
    assert capsys.readouterr().err.startswith("error: --name web")


def test_the_command_holds_documents_out_as_a_run_does(tmp_path, tokenizer, capsys):
    coder = load_tokenizer(tokenizer)
    write_ds(tmp_path / "in", [[5, coder.eos]] * 400)
    assert run_command(line(tmp_path, tokenizer, "--val", "0.25", "--json")) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["documents"] + row["held_out"] == 400 and 60 < row["held_out"] < 140
    held_out = documents_of(tmp_path / "store" / "shards" / "web" / "split=val")
    assert len(held_out) == row["held_out"] and all(below(0, "val", id, 0.25) for id, _, _ in held_out)


def test_a_store_that_a_run_uses_is_not_imported_into(tmp_path, tokenizer, capsys):
    write_ds(tmp_path / "in", [[5, load_tokenizer(tokenizer).eos]])
    (tmp_path / "store").mkdir()
    with contextlib.closing(Log.open(Store(tmp_path / "store"), run="other", threaded=False)):
        assert run_command(line(tmp_path, tokenizer)) == 1
    err = capsys.readouterr().err
    assert "run 'other'" in err and err.count("\n") == 1
    assert not any((tmp_path / "store" / "shards").iterdir())
    assert run_command(line(tmp_path, tokenizer)) == 0


@pytest.mark.parametrize(("option", "value"), [("--name", "../x"), ("--name", ".hidden"),
                                               ("--store", "s3://key:secret@bucket/x"),
                                               ("--tokenizer", "nowhere.json")])
def test_errors_of_the_command_are_one_line(tmp_path, tokenizer, capsys, option, value):
    write_ds(tmp_path / "in", [[5, 3]])
    words = line(tmp_path, tokenizer)
    words[words.index(option) + 1] = value
    assert run_command(words) != 0
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and value.rpartition("@")[2] in err
    assert "secret" not in err and os.listdir(tmp_path) == ["in"]


def test_a_damaged_file_fails_the_command_and_leaves_nothing(tmp_path, tokenizer, capsys):
    write_ds(tmp_path / "in", [[5, 6, 7]])
    assert run_command(line(tmp_path, tokenizer)) == 1
    err = capsys.readouterr().err
    assert "a.ds: byte 4" in err and "EOS" in err and err.count("\n") == 1
    assert tree(tmp_path / "store" / "shards") == {}


def test_a_repair_of_the_store_keeps_what_cannot_be_made_again(tmp_path, capsys):
    like_a_run(tmp_path / "set", 300)
    export(ShardSet(tmp_path / "set"), "ds", tmp_path / "ds")
    folder = imported(tmp_path / "ds", "ds", 300, tmp_path / "store").path
    body = next(folder.glob("*.tokens"))
    body.write_bytes(b"\xff\x7f" + body.read_bytes()[2:])
    assert run_command(["store", "verify", "--repair", "--store", str(tmp_path / "store")]) == 1
    said = capsys.readouterr().err
    assert body.name in said and "was imported, so no run can write it again; restore it from a copy" in said
    assert body.exists()
