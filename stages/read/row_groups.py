"""Bounds the memory that reading a row group of a Parquet file takes. A dictionary of Parquet stores a text once for
all rows that have it, so a small file may hold texts of any total size."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.parquet import open_parquet
from stages.document import BadRecord
from stages.read.reader import Slice, bad

#: Limits on the rows turned into documents at a time. _BATCH limits their number. _BATCH_BYTES limits their bytes if
#: each row were the largest entry of a dictionary, which stores a text once even if a million rows share it.
#: _LIKELY_BYTES limits their bytes if each row had the mean size.
_BATCH, _BATCH_BYTES, _LIKELY_BYTES = 256, 256 << 20, 32 << 20
#: rows whose dictionary entries are counted at a time
_COUNTED_ROWS = 1 << 16


def too_large(info: Any, size: int, slice: Slice, group: int, ordinal: int) -> BadRecord:
    """Return the `BadRecord` for a row group of `size` bytes, which are more than its reader may read."""
    record = bad("too_large", slice, group, ordinal, detail=f"{info.num_rows} rows of a row group of {size} bytes or "
                                                            f"more")
    record.bytes = sum(info.column(i).total_compressed_size for i in range(info.num_columns))
    return record


def rows_per_batch(group: Any, columns: list[str], local: str | None = None) -> int:
    """Return how many rows of a row group to read at a time. The number follows from the sizes that the metadata states
    and, if `local` (the path of the file) is given, from the sizes of the dictionary pages."""
    chunks = [group.column(i) for i in range(group.num_columns)]
    chunks = [c for c in chunks if c.path_in_schema in columns or c.path_in_schema.partition(".")[0] in columns]
    size = sum(c.total_uncompressed_size for c in chunks)
    largest = max((dictionary_bytes(c, local) for c in chunks if c.has_dictionary_page), default=0)
    return max(1, min(_BATCH, _LIKELY_BYTES * group.num_rows // max(size, 1), _BATCH_BYTES // max(largest, 1)))


def repeated_bytes(group: Any, local: str, number: int, column: str, most: int) -> int:
    """Return the number of bytes of all texts in a column of a row group, where a text counts once for each row that
    has it. `group` is the metadata of row group `number` in the file `local`. The result is 0 if the column is not
    mostly a dictionary, or if the number cannot exceed `most`. The bytes are counted before any row is read, and only
    until they exceed `most`."""
    chunk = next((c for i in range(group.num_columns) if (c := group.column(i)).path_in_schema == column), None)
    if chunk is None or not chunk.has_dictionary_page:
        return 0
    entries = dictionary_bytes(chunk, local)
    if 2 * entries < chunk.total_uncompressed_size or entries * group.num_rows <= most:
        return 0
    size = 0
    with open_parquet(local, dictionaries=[column]) as file:
        for batch in file.iter_batches(_COUNTED_ROWS, row_groups=[number], columns=[column]):
            texts = batch.column(0)
            lengths = pc.binary_length(pc.cast(texts.dictionary, pa.large_binary()))
            size += pc.sum(pc.take(lengths, texts.indices)).as_py() or 0
            if size > most:
                break
    return size


def dictionary_bytes(chunk: Any, local: str | None) -> int:
    """Return an upper bound on the bytes of one entry in the dictionary of a column chunk. The bound is the size of the
    dictionary page if `local` (the path of the file) is given and the page can be read, otherwise the size of the whole
    chunk.

    A page begins with a Thrift struct in compact protocol: (1: type, 2: uncompressed size, …), with i32 values as
    zigzag varints. The decoder refuses a page that inflates to another size, so a file cannot lie about the size.
    """
    if local is None or chunk.dictionary_page_offset is None:
        return chunk.total_uncompressed_size
    with open(local, "rb") as file:
        file.seek(chunk.dictionary_page_offset)
        head = file.read(16)
    at, value = 0, 0
    for _ in range(2):
        if head[at:at + 1] != b"\x15":                # the next field, an i32
            return chunk.total_uncompressed_size
        value, shift = 0, 0
        while (at := at + 1) < len(head):
            value |= (head[at] & 0x7F) << shift
            shift += 7
            if head[at] < 0x80:
                break
        at += 1
    return min(value >> 1, chunk.total_uncompressed_size) if not value & 1 else chunk.total_uncompressed_size
