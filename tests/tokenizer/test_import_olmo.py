"""Imports of OLMo-core and dolma files: widths of tokens, documents found by their .csv.gz file or by EOS, and files
that do not fit together."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.imports import documents_of, imported, refused
from tests.tokenizer.test_shards import EOS


def write(folder: Path, tokens: list[int], lines: str | None, dtype: str = "<u2", name: str = "part-0-00000") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.npy").write_bytes(np.array(tokens, dtype).tobytes())
    if lines is not None:
        (folder / f"{name}.csv.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


@pytest.mark.parametrize(("vocab", "dtype"), [(256, "u1"), (257, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_the_width_follows_from_the_vocabulary(tmp_path, vocab, dtype):
    folder = write(tmp_path / "in", [5, EOS, 7, 8, EOS], "0,2,first,s3://x/y,1\n2,5,\"a,b\",s3://x/y,2\n", dtype)
    result = imported(folder, "olmo", vocab, tmp_path / "store")
    assert [(id, tokens) for id, tokens, _ in documents_of(result.path)] == [("first", [5, EOS]), ("a,b", [7, 8, EOS])]


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_without_a_list_of_documents_eos_ends_them(tmp_path, block):
    folder = write(tmp_path / "in", [5, EOS, EOS, 7, 8, EOS], None)
    write(tmp_path / "in", [9, EOS], None, name="part-0-00001")
    result = imported(folder, "olmo", 300, tmp_path / "store", block_tokens=block)
    assert [(id, tokens) for id, tokens, _ in documents_of(result.path)] == [
        ("part-0-00000.npy#0", [5, EOS]), ("part-0-00000.npy#1", [EOS]), ("part-0-00000.npy#2", [7, 8, EOS]),
        ("part-0-00001.npy#0", [9, EOS])]
    refused(write(tmp_path / "in", [5, EOS, 7], None), "olmo", "part-0-00000.npy", "byte 4", f"{EOS}")


@pytest.mark.parametrize(("lines", "words"), [
    ("0,2,a\n3,5,b\n", ("line 2",)), ("0,2,a\n2,9,b\n", ("csv.gz",)), ("0,2,a\n", ("token 2 of 5",)),
    ("0,x,a\n", ("line 1",)), ("0,2\n", ("line 1",)), ("\n", ("line 1",)), ("0," + "9" * 50 + ",a\n", ("line 1",)),
    ("0," + "9" * 5000 + ",a\n", ("line 1",)), ("0,2," + "a" * 100_000 + "\n", ("line 1",)),
    ("0,0,a\n0,5,b\n", ("csv.gz",)), ('0,2,"a\n', ("line 1",)), ("0,3,a\n3,5,b\n", ("npy: byte 4", "EOS"))])
def test_lists_of_documents_that_do_not_fit_are_named(tmp_path, lines, words):
    refused(write(tmp_path / "in", [5, EOS, 7, 8, EOS], lines), "olmo", "part-0-00000", *words)


def test_other_files_are_named(tmp_path):
    folder = write(tmp_path / "in", [5, EOS], "0,2,a\n")
    (folder / "part-0-00000.csv.gz").write_bytes(b"0,2,a\n")
    refused(folder, "olmo", "part-0-00000.csv.gz", "gzip")
    np.save(folder / "part-0-00000.npy", np.array([5, EOS], "<u2"))
    refused(folder, "olmo", "part-0-00000.npy", "NumPy", "tofile")
    refused(write(tmp_path / "in", [5, EOS], "0,2,a\n", "<u4"), "olmo", "npy: byte 2", "--tokenizer")


def test_masks_and_tokens_belong_together(tmp_path):
    folder = write(tmp_path / "in", [5, EOS], "0,2,a\n")
    (folder / "labels_mask-0-00000.npy").write_bytes(b"\0\1")
    assert [targets for *_, targets in documents_of(imported(folder, "olmo", 300, tmp_path / "store").path)] == [
        [False, True]]
    write(folder, [5, EOS], "0,2,a\n", name="part-0-00001")
    refused(folder, "olmo", "labels_mask-0-00001.npy", "missing")
    (folder / "part-0-00001.npy").unlink()
    (folder / "labels_mask-0-00001.npy").write_bytes(b"\0\1")
    refused(folder, "olmo", "labels_mask-0-00001.npy", "without its tokens")
    (folder / "labels_mask-0-00001.npy").unlink()
    (folder / "part-0-00000.csv.gz").unlink()
    refused(folder, "olmo", "part-0-00000.csv.gz", "missing")


def test_tokens_of_twice_the_width_are_not_cut_in_two(tmp_path):
    tokens = [7 + i % 50 if i % 5 else EOS for i in range(1, 101)]
    folder = write(tmp_path / "in", tokens, None, "<u4")
    refused(folder, "olmo", "part-0-00000.npy", "byte 0", "every second token is 0")
