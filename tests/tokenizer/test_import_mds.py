"""Imports of MosaicML streaming files: types of arrays, other columns, and files that do not fit together."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.imports import documents_of, imported, refused
from tests.tokenizer.test_shards import EOS

CODES = {"uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "uint64": "Q",
         "int64": "q"}


def array(values: list[int], kind: str, length: int = 0) -> bytes:
    """Encode an array of one dimension. Its length is written in 1 << `length` bytes."""
    return bytes([1 << 2 | length]) + len(values).to_bytes(1 << length, "little") + struct.pack(
        f"<{len(values)}{CODES[kind]}", *values)


def sample(*columns: bytes) -> bytes:
    return struct.pack(f"<{len(columns)}I", *map(len, columns)) + b"".join(columns)


def write(folder: Path, samples: list[bytes], encodings: dict[str, str] | None = None,
          index: dict[str, Any] | None = None, config: dict[str, Any] | None = None,
          offsets: dict[int, int] | None = None, count: int | None = None) -> Path:
    """Write a file of samples and its index. `index` replaces keys of the index, `config` keys of the file's entry,
    `offsets` single offsets ({number: value}), and `count` the number of samples in the file."""
    folder.mkdir(exist_ok=True)
    columns = encodings or {"tokens": "ndarray:uint16"}
    entry = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26,
             "column_names": list(columns), "column_encodings": list(columns.values()),
             "column_sizes": [None] * len(columns)}
    head = json.dumps(entry).encode()
    places = [4 + 4 * (len(samples) + 1) + len(head) + sum(map(len, samples[:i])) for i in range(len(samples) + 1)]
    for number, offset in (offsets or {}).items():
        places[number] = offset
    data = struct.pack(f"<{1 + len(places)}I", len(samples) if count is None else count, *places) + head
    data += b"".join(samples)
    (folder / "a.mds").write_bytes(data)
    entry |= {"samples": len(samples), "zip_data": None,
              "raw_data": {"basename": "a.mds", "bytes": len(data), "hashes": {}}} | (config or {})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry], **(index or {})}))
    return folder


@pytest.mark.parametrize("kind", CODES)
def test_arrays_of_all_integers_are_read(tmp_path, kind):
    texts = [[5, EOS], [EOS], [100, 7, EOS]]
    folder = write(tmp_path / "in", [sample(array(text, kind, length)) for length, text in enumerate(texts, 1)],
                   {"tokens": f"ndarray:{kind}"})
    assert [t for _, t, _ in documents_of(imported(folder, "mds", 300, tmp_path / "store").path)] == texts


def test_other_columns_are_ignored_wherever_they_are(tmp_path):
    columns = {"age": "int", "id": "str", "loss": "ndarray:uint8", "tokens": "ndarray:uint16", "url": "str"}
    body = [b"one", array([0, 1], "uint8"), array([5, EOS], "uint16"), b"https://example.com"]
    folder = write(tmp_path / "in", [struct.pack("<4I", *map(len, body)) + bytes(8) + b"".join(body)], columns,
                   config={"column_sizes": [8, None, None, None, None]})
    result = imported(folder / "index.json", "mds", 300, tmp_path / "store")
    assert documents_of(result.path) == [("one", [5, EOS], [False, True])]


GOOD = sample(array([5, EOS], "uint16"))


@pytest.mark.parametrize(("change", "words"), [
    ({"index": {"version": 3}}, ("index.json", "version")), ({"index": {"shards": {}}}, ("index.json", "shards")),
    ({"index": {"shards": [7]}}, ("index.json",)), ({"config": {"format": "json"}}, ("index.json", "json")),
    ({"config": {"compression": "zstd"}}, ("index.json", "compression")),
    ({"config": {"raw_data": {"basename": "../a.mds", "bytes": 1}}}, ("index.json", "../a.mds")),
    ({"config": {"raw_data": {"basename": "/etc/passwd", "bytes": 1}}}, ("index.json", "/etc/passwd")),
    ({"config": {"raw_data": {"basename": "b.mds", "bytes": 1}}}, ("b.mds",)),
    ({"config": {"raw_data": {"basename": "a.mds", "bytes": 1}}}, ("a.mds", "bytes")),
    ({"config": {"samples": 1 << 60}}, ("a.mds", "byte 0")), ({"config": {"samples": True}}, ("index.json", "samples")),
    ({"config": {"column_sizes": []}}, ("index.json", "column_sizes")),
    ({"config": {"column_sizes": [4096]}}, ("index.json", "fixed")),
    ({"encodings": {"tokens": "ndarray:uint16:2"}}, ("index.json", "ndarray:uint16:2")),
    ({"encodings": {"tokens": "bytes"}}, ("index.json", "bytes")), ({"encodings": {"text": "str"}}, ("index.json",)),
    ({"encodings": {"tokens": "pkl"}}, ("index.json", "pkl")),
    ({"count": (1 << 32) - 1}, ("a.mds", "byte 0")), ({"offsets": {1: 1}}, ("a.mds", "byte 4")),
    ({"offsets": {0: 0}}, ("a.mds", "byte 4")), ({"offsets": {2: (1 << 32) - 1}}, ("a.mds", "byte 4")),
    ({"samples": [GOOD, sample(array([5, 6], "uint16"))]}, ("a.mds: byte", f"EOS ({EOS})")),
    ({"samples": [GOOD, sample(array([5, EOS], "uint16") + b"\0\0")]}, ("sample 1",)),
    ({"samples": [GOOD, sample(array([], "uint16"))]}, ("sample 1",)), ({"samples": [GOOD, b"\1"]}, ("sample 1",)),
    ({"samples": [GOOD, struct.pack("<I", 1 << 31)]}, ("sample 1",)), ({"samples": [GOOD, b""]}, ("sample 1",)),
    ({"samples": [GOOD, sample(b"\x09\x01\x02" + bytes(4))]}, ("sample 1", "dimension"))])
def test_what_does_not_fit_is_named(tmp_path, change, words):
    refused(write(tmp_path / "in", **{"samples": [GOOD, GOOD], **change}), "mds", *words)


def test_an_index_that_is_none_is_named(tmp_path):
    folder = write(tmp_path / "in", [GOOD])
    for text in ("", "[]", "[" * 100_000, "{\"version\": 2"):
        (folder / "index.json").write_text(text)
        refused(folder, "mds", "index.json")
    refused(folder / "a.mds", "mds", "a.mds", "index.json")
    with open(folder / "index.json", "wb") as file:
        file.truncate(1 << 40)
    refused(folder, "mds", "index.json", "bytes")


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    folder = write(tmp_path / "in", [GOOD])
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "shards": index["shards"] * 2}))
    refused(folder, "mds", "index.json", "twice")
