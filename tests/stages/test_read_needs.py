"""A reader needs no more of a file than it says: in a file with holes everywhere else, every slice reads the same."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.catalog import reader_class
from stages.document import BadRecord
from stages.read.reader import Slice
from tests.corpus import pages, sentences, warc


def said(record) -> tuple:
    if isinstance(record, BadRecord):
        return record.reason, record.id, record.locator, record.fatal, record.detail
    return record.id, record.text, record.raw, record.url, record.meta, record.locator, record.date


def with_holes(path: Path, ranges, to: Path) -> Path:
    """Write a copy of a file in which only these ranges have their bytes; the rest is zeros. With None, it is a whole
    copy."""
    data = path.read_bytes()
    if ranges is None:
        to.write_bytes(data)
        return to
    with open(to, "wb") as f:
        f.truncate(len(data))
        for a, b in ranges:
            f.seek(a)
            f.write(data[a:b])
        f.truncate(len(data))
    return to


def rows(n: int, rng: random.Random) -> list[dict]:
    prose = sentences()
    return [{"text": " ".join(rng.sample(prose, rng.randint(1, 12))) if rng.random() < 0.95 else None,
             "id": f"r{i}", "url": f"https://x.example/{i}", "metadata.lang": "en",
             "extra": {"n": i, "s": ["a"] * (i % 4)}, "vector": rng.randbytes(400).hex()} for i in range(n)]


def jsonl(path: Path, rng: random.Random) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows(2000, rng)))


def parquet(path: Path, rng: random.Random) -> None:
    pq.write_table(pa.Table.from_pylist(rows(600, rng)), path, row_group_size=70, compression="zstd")


def plain_parquet(path: Path, rng: random.Random) -> None:
    pq.write_table(pa.Table.from_pylist(rows(600, rng)), path, row_group_size=70, use_dictionary=False,
                   compression="none", version="1.0", write_page_index=True)


def crawl(path: Path, rng: random.Random) -> None:
    path.write_bytes(warc(pages(120, rng.randint(0, 99))))


def plain_crawl(path: Path, rng: random.Random) -> None:
    path.write_bytes(gzip.decompress(warc(pages(60, rng.randint(0, 99)))))


MADE = {"jsonl": ("a.jsonl", jsonl, {"keep": ("extra",)}),
        "parquet": ("a.parquet", parquet, {"keep": ("metadata.lang", "extra")}),
        "plain-parquet": ("b.parquet", plain_parquet, {}), "warc": ("a.warc.gz", crawl, {}),
        "plain-warc": ("b.warc", plain_crawl, {})}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("damage", [0, 3])
def test_every_slice_reads_the_same_from_a_file_with_holes(kind, damage, tmp_path):
    name, make, config = MADE[kind]
    rng = random.Random(f"{kind}{damage}")
    path, path_holes = tmp_path / name, tmp_path / f"holes-{name}"
    make(path, rng)
    reader = reader_class(kind.rpartition("-")[2])(config)
    size = path.stat().st_size

    def read(a: int, b: int) -> bytes:
        with open(path, "rb") as f:
            f.seek(a)
            return f.read(max(0, b - a))

    target = size // 9
    splits = reader.splits(str(path), name, target)
    assert len(splits) > 3
    found = reader.splits(str(with_holes(path, reader.needs(None, size, read), path_holes)), name, target)
    assert found == splits, "the splits themselves"
    if damage:                                        # after the index was made; some of it where pieces meet
        data = bytearray(path.read_bytes())
        edges = [s.stop for s in splits[:-1]] if "parquet" not in kind else [size // 2]
        for _ in range(damage):
            at = min(max(0, rng.choice([rng.randrange(size), rng.choice(edges) + rng.randint(-12, 12)])), size - 9)
            data[at:at + 8] = rng.randbytes(8)
        path.write_bytes(bytes(data))
    total = 0
    for split in [*splits, None]:
        piece = split.of("s", name) if split else Slice("s", name)
        ranges = reader.needs(piece, size, read)
        held = size if ranges is None else sum(min(b, size) - max(a, 0) for a, b in ranges)
        total += held if split else 0
        expected = [said(r) for r in reader.read(str(path), piece)]
        assert [said(r) for r in reader.read(str(with_holes(path, ranges, path_holes)), piece)] == expected
        assert damage or expected
    assert total < size + len(splits) * (140 << 10), "slices of a file fetch it about once in all"


@pytest.mark.parametrize(("name", "reader"), [("a.jsonl.gz", "jsonl"), ("a.warc.lz4", "warc")])
def test_what_cannot_be_split_is_not_fetched_to_find_that_out(name, reader, tmp_path):
    made = reader_class(reader)({})
    head = gzip.compress(b"x" * 100) if reader == "jsonl" else b"\x04\x22\x4d\x18" + bytes(20)
    (tmp_path / name).write_bytes(head + bytes(1 << 20))
    ranges = made.needs(None, 1 << 20, lambda a, b: head[a:b])
    assert sum(b - a for a, b in ranges) <= 64 << 10
    assert made.splits(str(with_holes(tmp_path / name, ranges, tmp_path / f"x{name}")), name, 1000) is None
    assert made.needs(Slice("s", name), 1 << 20, lambda a, b: head[a:b]) is None


def test_only_the_columns_that_are_read_are_fetched(tmp_path):
    """Of a table whose embeddings are ten times its text."""
    rng, path = random.Random(1), tmp_path / "a.parquet"
    table = [{**r, "vector": rng.randbytes(5000)} for r in rows(600, rng)]
    pq.write_table(pa.Table.from_pylist(table), path, row_group_size=70)
    data = path.read_bytes()
    made = reader_class("parquet")({})
    ranges = made.needs(Slice("s", "a.parquet"), len(data), lambda a, b: data[a:b])
    assert sum(b - a for a, b in ranges) < 0.2 * len(data)
    assert (0, 4) in ranges, "the magic bytes, whole"
    found = made.read(str(with_holes(path, ranges, tmp_path / "b.parquet")), Slice("s", "a.parquet"))
    assert [said(r) for r in found] == [said(r) for r in made.read(str(path), Slice("s", "a.parquet"))]


def test_a_damaged_footer_is_left_to_the_reader(tmp_path):
    made = reader_class("parquet")({})
    for data in (b"", b"PAR1", bytes(100), b"x" * 50 + (10**6).to_bytes(4, "little") + b"PAR1",
                 b"x" * 50 + (20).to_bytes(4, "little") + b"PAR1"):
        assert made.needs(Slice("s", "a"), len(data), lambda a, b, data=data: data[a:b]) is None
