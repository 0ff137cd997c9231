"""Opens, reads and writes all of Tokenmill's Parquet files. Every file is written with page checksums, and every page
is checked when it is read.

A flipped bit in a compressed page often decodes to other text without an error. With a checksum per page (CRC-32 of its
compressed bytes), reading such a page fails instead. Page headers and the footer have no checksum, so a file with a
recorded sha256 is compared with that hash as well (`pipeline.store.fs.Store.checked`).

Files of other programs may lack page checksums; pages without a checksum are read unchecked. parquet-mr and Spark write
checksums.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

#: a path, or an open file (Python's or pyarrow's)
Source: TypeAlias = str | os.PathLike[str] | BinaryIO | pa.NativeFile


def open_parquet(source: Source, *, memory_map: bool = False, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a Parquet file whose pages are checked as they are read; use it as a context manager. `dictionaries`:
    columns to read dictionary-encoded, as distinct values and indices.

    Reading ahead is switched off: the process would abort if one of Arrow's threads dropped a buffer of a Python file
    while the interpreter ends. For the same reason, pass `use_threads=False` when you read from a Python file object.
    """
    return pq.ParquetFile(source, memory_map=memory_map, read_dictionary=list(dictionaries), pre_buffer=False,
                          page_checksum_verification=True)


def read_table(source: Source, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a whole Parquet file, or only `columns` of it, without starting threads."""
    with open_parquet(source) as file:
        return file.read(columns=None if columns is None else list(columns), use_threads=False)


def parquet_writer(where: Source, schema: pa.Schema, **options: Any) -> pq.ParquetWriter:
    """Returns a writer of a Parquet file with zstd-compressed pages and page checksums. `options` are those of
    `pyarrow.parquet.ParquetWriter`."""
    return pq.ParquetWriter(where, schema, write_page_checksum=True, **{"compression": "zstd", **options})


def write_table(table: pa.Table, where: Source, *, row_group_size: int | None = None, **options: Any) -> None:
    """Write a table as one Parquet file, with `parquet_writer`."""
    with parquet_writer(where, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=row_group_size)
