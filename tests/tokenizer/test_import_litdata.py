"""Imports of litdata files: types of tokens, the order of files, and files that do not fit together."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.imports import documents_of, imported, refused
from tests.tokenizer.test_shards import EOS

CODES = {"no_header_numpy:1": "h", "no_header_numpy:2": "i", "no_header_numpy:3": "q", "no_header_numpy:4": "B",
         "no_header_numpy:5": "H", "no_header_numpy:6": "I", "no_header_tensor:16": "i", "no_header_tensor:17": "q"}


def write(folder: Path, *files: list[list[int]], kind: str = "no_header_numpy:5", config: dict[str, Any] | None = None,
          chunk: dict[str, Any] | None = None, offsets: dict[int, int] | None = None) -> Path:
    """Write files of items and their index. `config` replaces keys in the config of the index, `chunk` keys of each
    entry for a file, and `offsets` single offsets ({number: value})."""
    folder.mkdir(exist_ok=True)
    chunks = []
    for number, texts in enumerate(files):
        items = [struct.pack(f"<{len(text)}{CODES[kind]}", *text) for text in texts]
        places = [4 + 4 * (len(items) + 1) + sum(map(len, items[:i])) for i in range(len(items) + 1)]
        for place, offset in (offsets or {}).items():
            places[place] = offset
        data = struct.pack(f"<{1 + len(places)}I", len(items), *places) + b"".join(items)
        (folder / f"chunk-0-{number}.bin").write_bytes(data)
        chunks.append({"chunk_bytes": len(data), "chunk_size": len(items), "dim": sum(map(len, texts)),
                       "filename": f"chunk-0-{number}.bin", **(chunk or {})})
    settings = {"compression": None, "data_format": [kind], "encryption": None, "item_loader": "TokensLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": {**settings, **(config or {})}}))
    return folder


@pytest.mark.parametrize("kind", CODES)
def test_all_types_of_integers_are_read(tmp_path, kind):
    folder = write(tmp_path / "in", [[5, EOS], [EOS]], [[100, 7, EOS]], kind=kind)
    result = imported(folder, "litdata", 300, tmp_path / "store")
    assert [tokens for _, tokens, _ in documents_of(result.path)] == [[5, EOS], [EOS], [100, 7, EOS]]


def test_files_are_read_in_the_order_of_the_index(tmp_path):
    folder = write(tmp_path / "in", *([[number + 4, EOS]] for number in range(12)))
    result = imported(folder, "litdata", 300, tmp_path / "store")
    assert [(id, tokens[0]) for id, tokens, _ in documents_of(result.path)] == [
        (f"chunk-0-{number}.bin#0", number + 4) for number in range(12)]


@pytest.mark.parametrize(("change", "words"), [
    ({"config": {"compression": "zstd"}}, ("index.json", "compression")),
    ({"config": {"encryption": {"key": 1}}}, ("index.json", "encryption")),
    ({"config": {"data_format": ["pickle"]}}, ("index.json", "pickle")),
    ({"config": {"data_format": ["no_header_numpy:5"] * 2}}, ("index.json", "data_format")),
    ({"config": {"data_format": 5}}, ("index.json", "data_format")),
    ({"chunk": {"filename": "../x.bin"}}, ("index.json", "../x.bin")), ({"chunk": {"filename": 5}}, ("filename",)),
    ({"chunk": {"chunk_size": 1}}, ("chunk-0-0.bin", "byte 0")),
    ({"chunk": {"chunk_size": None}}, ("index.json", "chunk_size")),
    ({"offsets": {1: 17}}, ("chunk-0-0.bin: byte", "uint16")), ({"offsets": {1: 16}}, ("chunk-0-0.bin", "no tokens")),
    ({"offsets": {1: 999}}, ("chunk-0-0.bin: byte 4",)), ({"offsets": {0: 4}}, ("chunk-0-0.bin: byte 4",)),
    ({"offsets": {2: 22}}, ("chunk-0-0.bin",)), ({"offsets": {1: 18}}, ("chunk-0-0.bin: byte 16", f"EOS ({EOS})"))])
def test_what_does_not_fit_is_named(tmp_path, change, words):
    refused(write(tmp_path / "in", [[5, EOS], [6, EOS]], **change), "litdata", *words)
