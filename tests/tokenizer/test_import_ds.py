"""Imports of datatrove files: sizes of tokens, indices that do not fit, loss masks, and a file that datatrove itself
wrote."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.tokenizer.imports import documents_of, imported, refused
from tests.tokenizer.test_shards import EOS
from tokenizer.imports.source import ImportLimits


def write(folder: Path, tokens: list[int], ends: list[int], code: str = "H", loss: bytes | None = None,
          name: str = "a") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.ds").write_bytes(struct.pack(f"<{len(tokens)}{code}", *tokens))
    (folder / f"{name}.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if loss is not None:
        (folder / f"{name}.ds.loss").write_bytes(loss)
    return folder


@pytest.mark.parametrize(("code", "vocab"), [("H", 300), ("I", 300), ("H", 70_000), ("I", 70_000)])
def test_tokens_of_both_sizes_fit_every_vocabulary(tmp_path, code, vocab):
    folder = write(tmp_path / "in", [5, EOS, EOS, 7, 8, EOS], [2, 3, 6], code)
    result = imported(folder, "ds", vocab, tmp_path / "store")
    assert [tokens for _, tokens, _ in documents_of(result.path)] == [[5, EOS], [EOS], [7, 8, EOS]]


@pytest.mark.parametrize(("ends", "words"), [
    ([2, 2, 6], ("a.ds.index", "number 0")), ([6, 2], ("a.ds.index",)), ([2, 1 << 63, 6], ("a.ds.index",)),
    ([2, (1 << 64) - 1], ("a.ds", "tokens")), ([2, 4], ("a.ds", "12 bytes")), ([0, 6], ("a.ds.index",)),
    ([2, 4, 6], ("a.ds: byte 6", f"EOS ({EOS})"))])
def test_an_index_that_does_not_fit_is_named(tmp_path, ends, words):
    refused(write(tmp_path / "in", [5, EOS, EOS, 7, 8, EOS], ends), "ds", *words)


def test_half_an_index_does_not_make_two_tokens_one(tmp_path):
    folder = write(tmp_path / "in", [5, 0, EOS, 0, 7, EOS], [3])
    (folder / "a.ds.metadata").write_text("Unknown Tokenizer|2|2\n6\n6 T")
    refused(folder, "ds", "a.ds", "12 bytes", "metadata")


def test_a_document_that_would_fill_the_memory_is_refused(tmp_path):
    folder = write(tmp_path / "in", [], [ImportLimits().longest + 1])
    with open(folder / "a.ds", "wb") as file:
        file.truncate(2 * (ImportLimits().longest + 1))                        # takes no space on the disk
    refused(folder, "ds", "a.ds.index", "document 0")


def test_masks_are_kept_and_those_that_do_not_fit_are_named(tmp_path):
    result = imported(write(tmp_path / "in", [5, EOS], [2], loss=b"\0\1"), "ds", 300, tmp_path / "store")
    assert [targets for *_, targets in documents_of(result.path)] == [[False, True]]
    refused(write(tmp_path / "in", [5, EOS], [2], loss=b"\0\7"), "ds", "a.ds.loss", "byte 1")
    refused(write(tmp_path / "in", [5, EOS], [2], loss=b"\0"), "ds", "a.ds.loss", "1 bytes")
    write(tmp_path / "in", [5, EOS], [2], loss=b"\0\1")
    refused(write(tmp_path / "in", [5, EOS], [2], name="b"), "ds", "b.ds.loss", "missing")


def test_files_are_read_in_the_order_of_their_names_and_documents_say_from_which(tmp_path):
    (tmp_path / "in" / "x").mkdir(parents=True)
    for name, token in (("b", 7), ("x/a", 9), ("a", 5)):
        write(tmp_path / "in", [token, EOS, token, token, EOS], [2, 5], name=name)
    write(tmp_path / "in", [6, EOS], [2], name=".hidden")
    result = imported(tmp_path / "in", "ds", 300, tmp_path / "store")
    assert [(id, tokens[0]) for id, tokens, _ in documents_of(result.path)] == [
        ("a.ds#0", 5), ("a.ds#1", 5), ("b.ds#0", 7), ("b.ds#1", 7), ("x/a.ds#0", 9), ("x/a.ds#1", 9)]


def test_files_of_datatrove_come_back(tmp_path):
    """Written by datatrove 0.10.1's own writer."""
    tokens = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    rng = np.random.default_rng(1)
    texts = [[*rng.integers(4, 300, n).tolist(), EOS] for n in (3, 0, 50)]
    file = tokens.TokenizedFile(str(tmp_path / "in"), "a.ds", tokenizer_name_or_path="t", save_final_metadata=True)
    for text in texts:
        file.write(text, None)
    file.close()
    assert [t for _, t, _ in documents_of(imported(tmp_path / "in", "ds", 300, tmp_path / "store").path)] == texts
