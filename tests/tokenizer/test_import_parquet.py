"""Imports of Parquet files: types of columns, files written by Hugging Face's datasets, and rows that are no
documents."""

from __future__ import annotations

import base64
import resource
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.base.parquet import write_table
from tests.tokenizer.imports import documents_of, imported, refused
from tests.tokenizer.test_shards import EOS

#: a Parquet file with one row, compressed
ZEROS = (
    'c-m!BO-my|5Upv4F@lGvROntthzAD+zak`PaD^H%_%UJ(EUR85#vuk{GMhvP_T)`}j90Jz27iHfLC`<2veg~U9DIkWuIcw)RW(zl'
    'N)ByI;g0|X!Z^Up!{WcJJp~2`Sj1osZ|<HSEli_>j$42kTi;0&$Hw4OGx-9L;$rCI{g&C5!)K!#vP=TBRgeeibZh6~WfcYFg&b+L'
    'qO0CX<E+c=onVbMd0X1eMz_ZV6w^Wuht2RZZ1tvPa6gge2_Yktt6UFU6e<r+TCF5DM*1be(Tr)GxwkS;mbdPuzE7{_cz@8%fEN_7'
    'HtUHGy?`oxEudSngYZ)90?L)6RH^L$F7_9ZuhybQp-zkg>SLEECcjQ4qB?DuEAoA!J$=|9+BP4O%-9@+zh(A|wOjm4*E=+@Hq^k>'
    '7rKm2TYm1Wv>F|6?S1MG`Xmk|<9|ecOvz;*KAoFfOZq26R1Yi7Q)cq~+s3axApHcHjjEkLS7C3y7De;bPNyAbuftBa(Qajz3kypN'
    'Ipw<iWN-X#W&XYX178P`?E')


def write(folder: Path, columns: dict[str, Any], name: str = "train-00000-of-00001", **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_table(pa.table(columns), folder / f"{name}.parquet", **options)
    return folder


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16()),
                                  pa.list_(pa.int16()), pa.large_list(pa.uint64())])
def test_lists_of_all_integers_are_read(tmp_path, kind):
    tokens = pa.array([[5, EOS], [EOS], [299, 7, EOS]], kind)
    folder = write(tmp_path / "in", {"text": ["a", "b", "c"], "id": [1, 2, 3], "input_ids": tokens})
    result = imported(folder, "parquet", 300, tmp_path / "store")
    name = "train-00000-of-00001.parquet"                       # ids that are no strings are not kept
    assert [(id, tokens) for id, tokens, _ in documents_of(result.path)] == [
        (f"{name}#0", [5, EOS]), (f"{name}#1", [EOS]), (f"{name}#2", [299, 7, EOS])]


@pytest.mark.parametrize("block", [1, 30, 1000])
def test_row_groups_and_blocks_change_nothing(tmp_path, block):
    rng = np.random.default_rng(block)
    texts = [[*rng.integers(4, 300, rng.integers(0, 30)).tolist(), EOS] for _ in range(50)]
    loss = [rng.integers(0, 2, len(text)).astype(bool).tolist() for text in texts]
    folder = write(tmp_path / "in", {"loss": loss, "input_ids": texts, "id": [f"d{i}" for i in range(50)]},
                   row_group_size=11)
    result = imported(folder, "parquet", 300, tmp_path / "store", block_tokens=block, rows=7)
    assert documents_of(result.path) == [(f"d{i}", text, flags) for i, (text, flags) in enumerate(zip(texts, loss))]


@pytest.mark.parametrize(("columns", "words"), [
    ({"tokens": [[5, EOS]]}, ("input_ids", "tokens")), ({"input_ids": ["x"]}, ("input_ids", "string")),
    ({"input_ids": [[1.5]]}, ("input_ids", "double")), ({"input_ids": [[5, EOS], None]}, ("row", "null")),
    ({"input_ids": [[5, None, EOS]]}, ("row", "null")), ({"input_ids": [[5, EOS], []]}, ("row 1", "no tokens")),
    ({"input_ids": [[5, EOS], [6, 7]]}, ("row 1, token 1", f"EOS ({EOS})")),
    ({"input_ids": [[5, EOS], [6, -1, EOS]]}, ("row 1, token 1", "-1")),
    ({"input_ids": [[5, EOS]], "id": pa.array([None], pa.string())}, ("row", "null")),
    ({"input_ids": [[5, EOS]], "loss": [[True]]}, ("row", "loss")),
    ({"input_ids": [[5, EOS]], "loss": [[1, 2]]}, ("row", "loss")),
    ({"input_ids": [[5, EOS]], "loss": [[0.5, 1.0]]}, ("loss", "double"))])
def test_columns_that_do_not_fit_are_named(tmp_path, columns, words):
    refused(write(tmp_path / "in", columns), "parquet", "train-00000-of-00001.parquet", *words)


def test_other_files_and_missing_masks_are_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").write_bytes(b"no Parquet at all, but long enough")
    refused(tmp_path / "in", "parquet", "a.parquet", "cannot be read")
    write(tmp_path / "in", {"input_ids": [[5, EOS]], "loss": [[True, False]]}, "a")
    refused(write(tmp_path / "in", {"input_ids": [[5, EOS]]}, "b"), "parquet", "b.parquet", "loss")


def test_ids_that_would_fill_the_memory_and_doubled_columns_are_refused(tmp_path):
    folder = write(tmp_path / "in", {"id": ["a", "b" * 5000], "input_ids": [[5, EOS], [6, EOS]]})
    refused(folder, "parquet", "more than 4,096 characters")
    table = pa.table([pa.array([[5, EOS]]), pa.array([[6, EOS]])], ["input_ids", "input_ids"])
    pq.write_table(table, folder / "train-00000-of-00001.parquet")
    refused(folder, "parquet", "two columns of one name")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system tells no process its memory")
def test_a_row_that_fills_the_memory_is_refused(tmp_path):
    """200 million zeros, written by pyarrow with zstd, take 611 bytes in the file."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").write_bytes(zlib.decompress(base64.b85decode(ZEROS)))
    refused(tmp_path / "in", "parquet", "a.parquet", "rows from 0 on", "512 MiB", memory=512 << 20)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_linked_folders_are_not_passed_over(tmp_path):
    folder = write(tmp_path / "in", {"input_ids": [[5, EOS]]})
    write(tmp_path / "more", {"input_ids": [[6, EOS]]})
    (folder / "more").symlink_to(tmp_path / "more")
    refused(folder, "parquet", "more", "symbolic link to a folder")
