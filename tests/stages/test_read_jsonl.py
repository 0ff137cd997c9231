"""The reader of JSON lines: keys, limits, damage, and splits that change nothing."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from stages.document import BadRecord, Document, document_id
from stages.read.jsonl import Jsonl
from stages.read.reader import Skipped, Slice
from stages.read.streams import DamagedStream, DecompressedStream, read_elements, read_lines
from tests.conftest import shared_data


def read(local: object, slice: Slice | None = None, **config: object) -> list[Document | BadRecord]:
    return list(Jsonl(**config).read(str(local), slice or Slice("s", "a.jsonl")))


def facts(item: Document | BadRecord) -> tuple:
    if isinstance(item, BadRecord):
        return item.reason, item.id, str(item.locator), item.fatal
    meta = json.dumps(item.meta, sort_keys=True)
    return item.id, item.text, item.url, item.date, item.language, str(item.locator), meta


def reasons(items: list[Document | BadRecord]) -> Counter[str]:
    return Counter(i.reason if isinstance(i, BadRecord) else "document" for i in items)


def put(path: Path, *lines: object, end: str = "\n") -> Path:
    path.write_bytes("\n".join(x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in lines).encode()
                     + end.encode())
    return path


def test_keys_ids_and_places(tmp_path):
    local = put(tmp_path / "a", {"text": "one", "id": 7, "url": "http://x/", "date": "2020"},
                {"text": "zwei ü", "metadata": {"url": "http://y/", "lang": "de", "n": [1, {"a": None}]}})
    one, two = read(local, url="metadata.url", language="metadata.lang", keep=("metadata.n",))
    assert one.id == document_id("s", "a.jsonl", "", 0)
    assert (one.meta, one.date, one.url) == ({"id": 7}, "2020", "")
    assert (two.text, two.url, two.language) == ("zwei ü", "http://y/", "de")
    assert two.meta == {"metadata.n": [1, {"a": None}]}
    assert two.locator == {"file": "a.jsonl", "offset": local.read_bytes().index(b"\n") + 1, "record": 1, "sub": ""}


def test_what_is_kept_is_json(tmp_path):
    local = put(tmp_path / "a", '{"text": "a", "x": [NaN, {"y": -Infinity}, 1.5]}')
    (doc,) = read(local, keep=("x",))
    assert doc.meta == {"x": [None, {"y": None}, 1.5]}


def test_nesting_is_capped_by_a_count_not_by_the_stack_of_the_caller(tmp_path):
    """Where Python's recursion ends depends on who calls the reader, so it must not decide."""
    lines = ['{"text": "a", "x": ' + "[" * depth + "]" * depth + "}" for depth in (99, 100, 300, 960, 5000)]
    lines.append(json.dumps({"text": "[{" * 500, "x": ["{", "["] * 200}))
    local = put(tmp_path / "a", *lines)

    def deep(frames: int) -> list[str]:
        return deep(frames - 1) if frames else [facts(i)[0][:8] for i in read(local, keep=("x",))]

    assert deep(0) == deep(700)
    assert reasons(read(local, keep=("x",))) == {"document": 2, "bad_json": 4}


def test_every_bad_line_is_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "a"
    deep = b'{"text": ' + b"[" * 200_000
    path.write_bytes(b"\n".join([
        b'{"text": "good"}', b"{broken", b'{"text": "\xff\xfe"}', b'{"no": "text"}', b'{"text": 5}', b'["text"]', b"",
        b'{"text": "   "}', deep, b'{"text": "' + b"x" * 5000 + b'"}', b'{"text": "last"}']))
    items = read(path, max_line=300_000)
    assert reasons(items) == {"document": 3, "bad_json": 2, "invalid_utf8": 1, "missing_text": 3, "empty": 2}
    assert [i.locator["record"] for i in items] == list(range(11))
    assert {i.reason for i in items if isinstance(i, Skipped)} == {"empty"}
    assert reasons(read(path, max_line=4000))["line_too_long"] == 2
    assert read(path, max_line=4000)[-1].text == "last"


def test_lone_surrogates_become_replacement_characters(tmp_path):
    local = put(tmp_path / "a", r'{"text": "a\ud800b \ud83d\ude00", "url": "u\udfff", "id": "i\ud800"}')
    (doc,) = read(local)
    assert doc.text == "a\ufffdb 😀" and doc.url == "u\ufffd" and doc.meta["id"] == "i\ufffd"
    doc.text.encode()


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n{"text": "y"}\r\n')
    assert [d.text for d in read(tmp_path / "a")] == ["x", "y"]


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lambda data: lzma.compress(data, preset=0),
        ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True)}


@pytest.fixture(scope="module")
def plain() -> bytes:
    rng = random.Random(1)
    return "".join(json.dumps({"text": "".join(rng.choices("abcdefgh ", k=900))}) + "\n" for _ in range(3000)).encode()


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_whole_cut_and_corrupt(tmp_path, suffix, plain):
    packed = PACK[suffix](plain)
    local = tmp_path / f"a.jsonl{suffix}"
    local.write_bytes(packed)
    whole = [facts(i) for i in read(local)]
    assert len(whole) == 3000 and all(len(f) == 7 for f in whole)
    if not suffix:
        return
    local.write_bytes(packed[:len(packed) * 2 // 3])
    cut = read(local)
    assert cut[-1].fatal and cut[-1].reason == "truncated"
    assert [facts(i) for i in cut[:-1]] == whole[:len(cut) - 1], "what came before the cut is there"
    assert len(cut) > 1000 or suffix in (".bz2", ".xz"), "whose blocks are larger than this file"
    broken = bytearray(packed)
    broken[len(packed) // 2] ^= 0xFF
    local.write_bytes(broken)
    assert sum(isinstance(i, BadRecord) for i in read(local)) >= 1


def test_a_line_of_20_mb_is_one_bad_record_in_bounded_memory(tmp_path):
    path = tmp_path / "a"
    with open(path, "wb") as f:
        f.write(b'{"text": "first"}\n{"text": "')
        for _ in range(20):
            f.write(b"x" * 1_000_000)
        f.write(b'"}\n{"text": "last"}\n')
    items = read(path, max_line=1 << 20)
    assert reasons(items) == {"document": 2, "line_too_long": 1}
    assert items[2].locator["offset"] == path.stat().st_size - len(b'{"text": "last"}\n')


@pytest.mark.parametrize("seed", range(8))
def test_splits_change_nothing(tmp_path, seed):
    rng = random.Random(seed)
    lines = [json.dumps({"text": "ü" * rng.randrange(0, 3000)}) if rng.random() < 0.9 else rng.choice(["", "{bad"])
             for _ in range(rng.randrange(1, 400))]
    local = put(tmp_path / "a", *lines, end=rng.choice(["\n", ""]))
    whole = [facts(i) for i in read(local)]
    for target in (1, 10_000, 200_000):
        pieces = Jsonl().splits(str(local), "a.jsonl", target)
        assert pieces[-1].stop == local.stat().st_size
        for a, b in itertools.pairwise(pieces):
            assert (a.stop, a.ordinal + a.records) == (b.start, b.ordinal)
        assert sum(p.records for p in pieces) == len(whole)
        assert [facts(i) for p in pieces for i in read(local, p.of("s", "a.jsonl"))] == whole


def test_a_compressed_file_is_read_in_one_piece(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"{}\n" * 100))
    reader = Jsonl()
    assert reader.splits(str(tmp_path / "a.gz"), "a.gz", 10) is None and "a.gz" in reader.warnings[0]


def test_empty_missing_and_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    assert read(tmp_path / "a") == [] and Jsonl().splits(str(tmp_path / "a"), "a", 10) is None
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        read(tmp_path / "gone")
    with pytest.raises(IsADirectoryError):
        read(tmp_path)


@pytest.mark.parametrize("cap", [5, 1 << 20])
def test_read_lines_against_split(tmp_path, cap):
    rng = random.Random(cap)
    data = b"\n".join(b"y" * rng.randrange(0, 12) for _ in range(50_000))
    (tmp_path / "a").write_bytes(data)
    with DecompressedStream(str(tmp_path / "a")) as stream:
        found = list(read_lines(stream, cap))
    expected, at = [], 0
    for line in data.split(b"\n"):
        expected.append((at, line if len(line) <= cap else None))
        at += len(line) + 1
    assert found == (expected if data.split(b"\n")[-1] else expected[:-1])


def test_real_files():
    for path in sorted(shared_data("text").rglob("*.jsonl.gz")):
        items = read(path)
        assert len(items) >= 10 and reasons(items) == {"document": len(items)}


# -- arrays ------------------------------------------------------------------------------------------------------------
class Blocks:
    """A stream that returns `size` bytes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self.blocks = [data[i:i + size] for i in range(0, len(data), size)]

    def read(self) -> bytes:
        return self.blocks.pop(0) if self.blocks else b""


def elements(data: bytes, size: int, cap: int = 1 << 20) -> list:
    out: list = []
    try:
        for _, element in read_elements(Blocks(data, size), cap):
            out.append(element.strip())
    except DamagedStream as e:
        out.append(e.reason)
    return out


def test_elements_of_an_array_are_what_json_says():
    """Arrays of anything, cut anywhere into blocks; what is no JSON gives the same for any blocks."""
    rng = random.Random(5)

    def value(depth: int = 0) -> object:
        kind = rng.randrange(6 if depth < 3 else 3)
        if kind > 3:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {"a": value(depth + 1)} if kind == 3 else rng.choice(
            [7, None, "".join(rng.choice('ab",[]{}\\:\n é漢') for _ in range(rng.randrange(20)))])

    for _ in range(150):
        rows = [value() for _ in range(rng.randrange(6))]
        data = json.dumps(rows, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode()
        for size in (1, 5, 1000):
            assert [json.loads(e) for e in elements(data, size)] == rows
        assert elements(data[:rng.randrange(len(data))], 7)[-1] == "truncated"
        rubbish = b"[" + bytes(rng.choice(b'[]{}",\\ a1\n') for _ in range(rng.randrange(20)))
        assert elements(rubbish, 1, 8) == elements(rubbish, 3, 8) == elements(rubbish, 100, 8)


def test_a_file_may_be_one_array(tmp_path):
    rows = [{"text": f"Text {i}", "id": i} for i in range(5)]
    whole = read(put(tmp_path / "lines.json", *rows))
    data = json.dumps(rows, indent=2).encode()
    for name, body in (("a.json", b"\xef\xbb\xbf" + data), ("b.json.gz", gzip.compress(data)),
                       ("flat.json", b" " + json.dumps(rows).encode() + b"\n")):
        (tmp_path / name).write_bytes(body)
        assert [(d.text, d.id, d.meta) for d in read(tmp_path / name)] == [(d.text, d.id, d.meta) for d in whole], name
        reader = Jsonl()
        assert reader.splits(str(tmp_path / name), name, 10) is None and "one JSON array" in reader.warnings[0]
    (tmp_path / "odd.json").write_bytes(
        b'[{"text": "one"},\n{"text": two}, {"text": "\xff"}, 4, {"text": "five"}] [1]')
    assert [i.reason if isinstance(i, BadRecord) else i.text for i in read(tmp_path / "odd.json")] == [
        "one", "bad_json", "invalid_utf8", "missing_text", "five", "bad_json"]
    (tmp_path / "cut.json").write_bytes(data[:-60])
    assert reasons(read(tmp_path / "cut.json")) == {"document": 3, "truncated": 1}
    assert reasons(read(tmp_path / "a.json", max_line=20)) == {"line_too_long": 1}
    assert reasons(read(put(tmp_path / "lists.json", [1], [2]))) == {"missing_text": 2}, "lines, each of them a list"
