"""Imports of llm.c files: documents that go on in the next file, headers that do not fit, and what an import cannot
restore."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.exports import corpus
from tests.tokenizer.imports import documents_of, imported, refused
from tests.tokenizer.test_shards import EOS, write_set
from tokenizer.export.export import export
from tokenizer.shards.reader import ShardSet


def write(folder: Path, *files: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for number, tokens in enumerate(files):
        header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
        (folder / f"train_{number:06d}.bin").write_bytes(header.ljust(1024, b"\0")
                                                         + struct.pack(f"<{len(tokens)}H", *tokens))
    return folder


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
def test_a_document_may_go_on_in_the_next_file(tmp_path, block):
    folder = write(tmp_path / "in", [EOS, 5, 6, EOS, EOS, 7], [8], [9, EOS, 10, EOS], [11, EOS])
    result = imported(folder, "nanogpt", 300, tmp_path / "store", block_tokens=block)
    assert [(id, tokens) for id, tokens, _ in documents_of(result.path)] == [
        ("train_000000.bin#0", [5, 6, EOS]), ("train_000000.bin#1", [EOS]), ("train_000000.bin#2", [7, 8, 9, EOS]),
        ("train_000002.bin#0", [10, EOS]), ("train_000003.bin#0", [11, EOS]), ("train_000003.bin#1", [EOS])]


def test_an_eos_inside_a_document_ends_it(tmp_path):
    """The format cannot say that it does not; the tokens and the bytes of another export are the same."""
    write_set(tmp_path / "set", [[np.array([5, EOS, 6]), np.array([7])]], 300)
    export(ShardSet(tmp_path / "set"), "nanogpt", tmp_path / "out")
    result = imported(tmp_path / "out", "nanogpt", 300, tmp_path / "store")
    assert [tokens for _, tokens, _ in documents_of(result.path)] == [[5, EOS], [6, EOS], [7, EOS]]
    export(ShardSet(result.path), "nanogpt", tmp_path / "again")
    name = "train_000000.bin"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize(("change", "words"), [
    ({"magic": 1}, ("byte 0", "20240520")), ({"version": 2}, ("byte 4", "version 2")),
    ({"magic": 20240801}, ("byte 4",)), ({"magic": 20240801, "version": 7}, ("byte 8",)),
    ({"count": (1 << 31) - 1}, ("byte 8", "truncated")), ({"count": -1}, ("byte 8",)), ({"count": 2}, ("byte 8",))])
def test_a_header_that_does_not_fit_is_named(tmp_path, change, words):
    refused(write(tmp_path / "in", [EOS, 5, 6], **change), "nanogpt", "train_000000.bin", *words)


def test_a_file_that_begins_within_a_document_is_refused(tmp_path):
    refused(write(tmp_path / "in", [5, EOS, 6]), "nanogpt", "train_000000.bin", "byte 1,024", f"({EOS})")


def test_a_document_without_an_end_does_not_fill_the_memory(tmp_path):
    message = refused(write(tmp_path / "in", [EOS, 7, EOS, *[5] * 2000, EOS]), "nanogpt", f"EOS (token id {EOS})",
                      longest=1000, block_tokens=300)
    assert "byte 1,030" in message


def test_documents_of_any_shards_are_one_stream(tmp_path):
    shard_set = corpus(tmp_path / "set", 300, shards=[[4, 0], [0], [7, 9, 0], [3]])
    export(ShardSet(shard_set.folder), "nanogpt", tmp_path / "out")
    result = imported(tmp_path / "out", "nanogpt", 300, tmp_path / "store")
    assert [tokens for _, tokens, _ in documents_of(result.path)] == [d.tolist() for d in shard_set.documents]
