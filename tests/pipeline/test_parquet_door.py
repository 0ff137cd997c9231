"""Damage in a Parquet file that `pipeline.base.parquet` has written is noticed when the file is read."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.parquet import open_parquet, parquet_writer, read_table
from pipeline.store.parts import PartWriter, document_schema
from stages.document import Document
from tests.corpus import sentences


def part(path: Path) -> Path:
    rng, prose = random.Random(3), sentences()
    writer = PartWriter(str(path), document_schema())
    for i in range(400):
        writer.write(Document(f"{i:032x}", " ".join(rng.sample(prose, 30)), source="s"))
    writer.close()
    return path


def outcomes(path: Path, read, flips: int = 300) -> dict[str, int]:
    """Flip single random bits of the text column, and read the file each time. Returns how often this gave an error,
    another text, or the same text."""
    whole = path.read_bytes()
    with pq.ParquetFile(path) as file:
        column = file.metadata.row_group(0).column(file.schema_arrow.names.index("text"))
    start = column.dictionary_page_offset or column.data_page_offset
    wanted = read(path)
    seen = {"errors": 0, "other": 0, "same": 0}
    rng = random.Random(0)
    for _ in range(flips):
        bit = rng.randrange(8 * start, 8 * (start + column.total_compressed_size))
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            seen["same" if read(path).equals(wanted) else "other"] += 1
        except (OSError, pa.ArrowException):
            seen["errors"] += 1
    path.write_bytes(whole)
    return seen


def test_no_flipped_bit_of_a_text_becomes_another_text(tmp_path):
    seen = outcomes(part(tmp_path / "part.parquet"), lambda path: read_table(path, ["text"]))
    assert seen["other"] == 0 and seen["errors"] > 250, seen


def test_without_checking_many_would(tmp_path):
    """The measure itself: a reader that checks no page takes many a flipped bit for text."""
    seen = outcomes(part(tmp_path / "part.parquet"), lambda path: pq.read_table(path, columns=["text"]), 60)
    assert seen["other"] > 10, seen


def test_files_of_others_without_sums_are_read(tmp_path):
    table = pa.table({"a": [1, 2, 3]})
    pq.write_table(table, tmp_path / "plain.parquet")
    assert read_table(tmp_path / "plain.parquet").equals(table)
    with parquet_writer(tmp_path / "ours.parquet", table.schema) as writer:
        writer.write_table(table)
    with open_parquet(tmp_path / "ours.parquet") as file:
        assert file.read().equals(table)
