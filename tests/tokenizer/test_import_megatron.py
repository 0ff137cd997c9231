"""Imports of Megatron-LM files: types of tokens, documents of several sequences, and indices that do not fit."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.imports import documents_of, imported, refused
from tests.tokenizer.test_shards import EOS

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def write(folder: Path, sequences: list[list[int]], documents: list[int], code: int = 8, magic: bytes = b"MMIDIDX\0\0",
          version: int = 1, count: int | None = None, shift: int = 0, more: bytes = b"") -> Path:
    """Write a .bin and an .idx file. `documents` are the numbers of the first sequence of each document, then the
    number of sequences. `count` replaces the number of sequences, and `shift` is added to the last pointer."""
    folder.mkdir(exist_ok=True)
    flat, kind = [token for sequence in sequences for token in sequence], CODES.get(code, "f")
    (folder / "a.bin").write_bytes(struct.pack(f"<{len(flat)}{kind}", *flat))
    lengths = [len(sequence) for sequence in sequences]
    pointers = [struct.calcsize(kind) * sum(lengths[:i]) for i in range(len(lengths))]
    pointers[-1] += shift
    (folder / "a.idx").write_bytes(
        magic + struct.pack("<QBQQ", version, code, len(lengths) if count is None else count, len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents) + more)
    return folder


@pytest.mark.parametrize("code", CODES)
def test_all_types_of_integers_are_read(tmp_path, code):
    result = imported(write(tmp_path / "in", [[5, EOS], [100, 7, EOS]], [0, 1, 2], code), "megatron", 300,
                      tmp_path / "store")
    assert [tokens for _, tokens, _ in documents_of(result.path)] == [[5, EOS], [100, 7, EOS]]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 18])
def test_documents_of_several_sequences_are_whole(tmp_path, block):
    rng = np.random.default_rng(block)
    sequences = [rng.integers(4, 300, rng.integers(1, 5)).tolist() for _ in range(40)]
    documents = [0, *sorted(rng.choice(np.arange(1, 40), 11, replace=False).tolist()), 40]
    for last in documents[1:]:
        sequences[last - 1].append(EOS)
    result = imported(write(tmp_path / "in", sequences, documents), "megatron", 300, tmp_path / "store",
                      index_entries=block)
    assert [tokens for _, tokens, _ in documents_of(result.path)] == [
        [token for sequence in sequences[first:last] for token in sequence]
        for first, last in itertools.pairwise(documents)]


@pytest.mark.parametrize(("change", "words"), [
    ({"magic": b"MMIDIDX\0\1"}, ("a.idx", "byte 0")), ({"version": 2}, ("a.idx", "byte 9", "version 2")),
    ({"code": 7}, ("a.idx", "byte 17", "7")), ({"code": 6}, ("a.idx", "byte 17")),
    ({"count": 1 << 62}, ("a.idx", "byte 18")), ({"count": 3}, ("a.idx", "byte 18")),
    ({"shift": 2}, ("a.idx", "sequence 1")), ({"documents": [0, 2, 1]}, ("a.idx",)),
    ({"documents": [1, 2]}, ("a.idx", "not 0")), ({"documents": [0, 1]}, ("a.idx", "a.bin")),
    ({"documents": [0, 1, 1, 2]}, ("a.idx", "number 0")), ({"documents": [0, 1, 9]}, ("a.idx", "documents")),
    ({"documents": []}, ("a.idx", "byte 18")), ({"documents": [0, -1, 2]}, ("a.idx",)),
    ({"more": b"\0\0"}, ("a.idx", "modalities")), ({"more": b"\0" * 8}, ("a.idx", "byte 18")),
    ({"sequences": [[5, EOS], [-2, EOS]], "code": 4}, ("a.bin: byte 8", "-2"))])
def test_what_does_not_fit_is_named_with_its_place(tmp_path, change, words):
    refused(write(tmp_path / "in", **{"sequences": [[5, EOS], [6, 7, EOS]], "documents": [0, 1, 2], **change}),
            "megatron", *words)


def test_an_index_is_no_path_of_tokens_and_must_be_there(tmp_path):
    folder = write(tmp_path / "in", [[5, EOS]], [0, 1])
    refused(folder / "a.idx", "megatron", "a.idx", ".bin")
    (folder / "a.idx").unlink()
    refused(folder, "megatron", "a.idx", "cannot be read")
