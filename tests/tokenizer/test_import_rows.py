"""Rows (training samples of one length) that were exported come back as packed rows of a shard set, and are exported
again byte by byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.app import run_command
from tests.tokenizer.exports import corpus, tree
from tests.tokenizer.packs import slow_sample, write_packing
from tests.tokenizer.test_export_order import Training, training  # noqa: F401  the fixture
from tests.tokenizer.test_shards import EOS
from tokenizer.export.export import export_rows
from tokenizer.export.source import ExportError
from tokenizer.imports.imports import FORMATS, Imported, import_tokens
from tokenizer.imports.source import Coding, TokenFileError
from tokenizer.shards.layout import token_dtype
from tokenizer.shards.reader import ShardSet, loss_mask
from tokenizer.shards.verify import verify

KEEPING = [name for name, format in FORMATS.items() if format.keeps_rows]
NO_LOSS = {"megatron", "litdata"}


def import_rows(path: Path, format: str, vocab: int, store: Path, sequence: int, step: int = 300) -> Imported:
    (store / "shards").mkdir(parents=True, exist_ok=True)
    return import_tokens(path, format, Coding("t" * 64, vocab, EOS), store / "shards" / "web", "web",
                         lambda file, number: f"{file}#{number}", shard_bytes=step * token_dtype(vocab).itemsize,
                         sequence=sequence)


def files(folder: Path) -> dict[str, object]:
    """Return the files of an export for comparison. `updated_at` of litdata names the rows' order, which an import
    does not know."""
    result: dict[str, object] = dict(tree(folder))
    if any(name.startswith("chunk-") for name in result):
        result["index.json"] = {**json.loads(result["index.json"]), "updated_at": None}
    return result


def rows_in(folder: Path) -> list[tuple[list[int], list[int], list[bool]]]:
    """Return (tokens, beginnings of documents, whether each target counts) for each packed row of a set."""
    shards = ShardSet(folder)
    packing = shards.published_packing()
    assert packing is not None
    shards = ShardSet(folder, packing=packing.sha256)
    assert shards.packed is not None
    result = []
    for number in range(len(shards.packed)):
        tokens, bounds, counts = shards.packed_row(shards.packed.row(number))
        targets = [True] * packing.longest if counts is None else counts.tolist()
        result.append((tokens.tolist(), bounds.tolist(), targets))
    return result


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("span", [(0, 60), (60, 85), (3, 4), (90, 130)], ids="{0[0]}:{0[1]}".format)
def test_samples_in_training_order_come_back_and_are_exported_again(training, tmp_path, name, span):  # noqa: F811
    training.export(name, tmp_path / "out", *span, drop_loss=name in NO_LOSS)
    samples, vocab = training.samples[slice(*span)], training.curriculum.tokenizer.vocab_size
    length = len(samples[0].counts)
    result = import_rows(tmp_path / "out", name, vocab, tmp_path / "store", length)
    assert (result.rows, verify(result.path)) == (len(samples), [])
    rows = rows_in(result.path)
    for (tokens, bounds, counts), sample in zip(rows, samples, strict=True):
        assert tokens == sample.tokens.tolist() and bounds == sample.bounds.tolist()
        assert name in NO_LOSS or counts == sample.counts.tolist()
    export_rows(ShardSet(result.path), name, tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "out")


@pytest.mark.parametrize("masked", [(), (1,)], ids=["no masks", "masks"])
@pytest.mark.parametrize("name", KEEPING)
def test_packed_rows_with_padding_come_back_and_are_exported_again(tmp_path, name, masked):
    made = corpus(tmp_path / "set", 300, [[30, 1, 0, 90, 7, 16, 15, 14], [5, 31, 33, 0, 0, 12]], masked=masked)
    write_packing(made.folder, 32)
    export_rows(ShardSet(made.folder), name, tmp_path / "out", drop_loss=name in NO_LOSS)
    result = import_rows(tmp_path / "out", name, 300, tmp_path / "store", 32)
    assert verify(result.path) == []
    export_rows(ShardSet(result.path), name, tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "out")
    if name not in NO_LOSS:
        assert rows_in(result.path) == rows_in(made.folder)
        packings = [ShardSet(folder).published_packing() for folder in (made.folder, result.path)]
        assert packings[0].filled == packings[1].filled and packings[0].padding > 0


def test_packed_rows_are_exported_as_the_trainer_reads_them(tmp_path):
    made = corpus(tmp_path / "set", 300, [[30, 1, 0, 90, 7, 16, 15, 14], [5, 31, 33, 0, 0, 12]], masked=(1,))
    write_packing(made.folder, 32)
    export_rows(ShardSet(made.folder), "parquet", tmp_path / "out")
    shards = ShardSet(made.folder)
    packed = shards.packed_rows(shards.published_packing().sha256)
    table = [row for path in sorted((tmp_path / "out").iterdir()) for row in pq.read_table(path).to_pylist()]
    assert [row["window"] for row in table] == [row["sample"] for row in table] == list(range(len(packed)))
    for number, row in enumerate(table):
        expected = slow_sample(shards, packed.row(number), 32)
        counts = np.array(row["loss"] or [True] * 32) & loss_mask(np.array(row["ends"], np.int64), 32)
        assert row["input_ids"][:-1] == expected["inputs"]
        assert [token if count else None for token, count in zip(row["input_ids"][1:], counts)] == expected["targets"]


def test_shards_end_where_rows_end(training, tmp_path):  # noqa: F811
    """Small shards: every row has all its pieces in one shard."""
    training.export("ds", tmp_path / "out", 0, 60)
    vocab, results = training.curriculum.tokenizer.vocab_size, []
    for step in (20, 100, 10**6):
        result = import_rows(tmp_path / "out", "ds", vocab, tmp_path / f"store{step}", 16, step)
        results.append((result.shards, rows_in(result.path)))
        assert verify(result.path) == []
    assert results[0][0] > results[1][0] > results[2][0] == 1
    assert results[0][1] == results[1][1] == results[2][1]


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_of_another_project_need_no_ends(tmp_path, rows):
    """Packed rows as many data sets have them: the column input_ids alone, where EOS ends each document."""
    tokens = np.random.default_rng(rows).choice([EOS, 5, 6, 7], (rows, 9))
    pq.write_table(pa.table({"input_ids": tokens.tolist()}), tmp_path / "a.parquet")
    result = import_rows(tmp_path / "a.parquet", "parquet", 300, tmp_path / "store", 8)
    for row, (imported, bounds, counts) in zip(tokens.tolist(), rows_in(result.path), strict=True):
        assert imported == row and all(counts)
        assert bounds == [p for p in range(1, 9) if row[p - 1] == EOS]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(KEEPING)))
def test_a_format_without_the_last_target_is_refused(training, tmp_path, name):  # noqa: F811
    training.export(name, tmp_path / "out", 0, 60, drop_loss=True)
    with pytest.raises(TokenFileError) as error:
        import_rows(tmp_path / "out", name, training.curriculum.tokenizer.vocab_size, tmp_path / "store", 16)
    assert "--sequence" in str(error.value) and "\n" not in str(error.value)
    assert list((tmp_path / "store" / "shards").iterdir()) == []


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("sequence", [15, 17, 33])
def test_rows_of_another_length_are_refused(training, tmp_path, name, sequence):  # noqa: F811
    training.export(name, tmp_path / "out", 0, 59, drop_loss=name in NO_LOSS)
    with pytest.raises(TokenFileError) as error:
        import_rows(tmp_path / "out", name, training.curriculum.tokenizer.vocab_size, tmp_path / "store", sequence)
    assert f"sequence {sequence}" in str(error.value) and "\n" not in str(error.value)
    assert list((tmp_path / "store" / "shards").iterdir()) == []


def test_a_set_without_packed_rows_has_no_rows_to_export(tmp_path):
    made = corpus(tmp_path / "set", 300, [[30, 1]])
    with pytest.raises(ExportError, match="--rows"):
        export_rows(ShardSet(made.folder), "ds", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("column", "value"), [
    ("ends", [3, 3]), ("ends", [9]), ("ends", [0]), ("loss", [True] * 9), ("loss", [True] * 7)])
def test_damaged_columns_of_rows_are_refused(tmp_path, column, value):
    pq.write_table(pa.table({"input_ids": [[5] * 9], column: [value]}), tmp_path / "a.parquet")
    with pytest.raises(TokenFileError, match=column):
        import_rows(tmp_path / "a.parquet", "parquet", 300, tmp_path / "store", 8)


def test_held_out_rows_are_refused_by_the_command(tmp_path, capsys):
    assert run_command(["shards", "import", str(tmp_path), "--format", "ds", "--tokenizer", "t.json", "--name", "web",
                        "--store", str(tmp_path / "store"), "--sequence", "8", "--val", "0.1"]) == 2
    assert "--val" in capsys.readouterr().err


def test_the_command_exports_rows_of_a_set_alone(training, tmp_path, capsys):  # noqa: F811
    made = corpus(tmp_path / "set", 300, [[30, 1, 40, 6]])
    write_packing(made.folder, 16)
    line = ["shards", "export", "--rows", "--format", "mds", "--out", str(tmp_path / "out"), "--json"]
    assert run_command([*line, "--order", "r", "--store", str(training.store)]) == 2
    assert "--rows" in capsys.readouterr().err
    assert run_command([*line, str(made.folder)]) == 0
    packing = ShardSet(made.folder).published_packing()
    assert json.loads(capsys.readouterr().out)["samples"] == packing.rows
    assert isinstance(training, Training)
