"""Exports as Parquet: read by pyarrow and DuckDB, and by Hugging Face's datasets where it is installed (tested with
5.2.0)."""

from __future__ import annotations

import os

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tokenizer.exports import VOCABS, Corpus, corpus
from tokenizer.export.export import export
from tokenizer.export.parquet import offsets_of
from tokenizer.export.source import ExportError
from tokenizer.shards.reader import ShardSet

NAMES = [f"train-{i:05d}-of-00003.parquet" for i in range(3)]


@pytest.fixture(params=VOCABS)
def shard_set(request, tmp_path) -> Corpus:
    shard_set = corpus(tmp_path / "set", request.param, masked=(0, 2))
    export(ShardSet(shard_set.folder), "parquet", tmp_path / "out")
    return shard_set


def test_rows_are_the_documents(shard_set, tmp_path):
    assert sorted(os.listdir(tmp_path / "out")) == NAMES
    width = pa.from_numpy_dtype(shard_set.manifest.dtype)
    for number, name in enumerate(NAMES):
        table = pq.read_table(tmp_path / "out" / name, page_checksum_verification=True)
        assert table.schema.types == [pa.string(), pa.list_(width), pa.list_(pa.bool_())]
        rows = shard_set.of_shard(number)
        assert table["id"].to_pylist() == [shard_set.ids[i] for i in rows]
        assert table["input_ids"].to_pylist() == [shard_set.documents[i].tolist() for i in rows]
        assert table["loss"].to_pylist() == [shard_set.targets[i].tolist() for i in rows]
    files = str(tmp_path / "out" / "*.parquet")
    [counts] = duckdb.sql(f"select count(*), sum(len(input_ids)) from '{files}'").fetchall()
    assert counts == (len(shard_set.documents), shard_set.manifest.tokens)
    [[targets]] = duckdb.sql(f"select count(*) from (select unnest(loss) as t from '{files}') where t").fetchall()
    assert targets == sum(int(t.sum()) for t in shard_set.targets)


def test_a_set_without_masks_has_no_column_of_them(tmp_path):
    plain = corpus(tmp_path / "set", 300)
    export(ShardSet(plain.folder), "parquet", tmp_path / "out")
    assert pq.read_schema(tmp_path / "out" / NAMES[0]).names == ["id", "input_ids"]


def test_a_document_beyond_i32_is_refused():
    assert offsets_of(["a", "b"], np.array([3, 2**31 - 1])).to_pylist() == [0, 3, 2**31 - 1]
    with pytest.raises(ExportError, match="document b"):
        offsets_of(["b"], np.array([2**31]))


def test_datasets_finds_the_split_and_the_documents(shard_set, tmp_path):
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["train"]
    assert loaded["train"]["id"][:] == shard_set.ids
    for row, document in zip(loaded["train"], shard_set.documents, strict=True):
        assert np.array_equal(row["input_ids"], document)
