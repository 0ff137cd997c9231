"""Finds documents in a shard set: by id, by number, or by the window (training sample) that reads them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenizer.shards.index import ShardIndex
from tokenizer.shards.layout import TABLE_ROWS
from tokenizer.shards.packed import PackedRows

#: number of rows of a document table that are compared at a time
ROWS = 1 << 16


def places(shard_set: ShardIndex, id: str) -> Iterator[dict[str, Any]]:
    """Find the documents of a shard set whose id begins with `id`. Yields a mapping for each document: its `id`, the
    range of its tokens (`start` and exclusive `stop`, counted over all shards of the set), and `file`, the name of the
    token file."""
    for shard, (offset, info) in enumerate(zip(shard_set.offsets, shard_set.manifest.shards)):
        with shard_set.table(shard) as table:
            for name, start, stop in ranges(table, id):
                yield {"id": name, "start": offset + start, "stop": offset + stop, "file": info.body}


def places_of(shard_set: ShardIndex, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Find documents by their numbers, which count from 0 over all shards of the set. Yields a mapping for each
    document, as `places` does. Neighbours in `numbers` that are in the same row group of a document table are read
    together."""
    firsts = [0, *accumulate(info.documents for info in shard_set.manifest.shards)]

    def group_of(number: int) -> tuple[int, int]:
        shard = bisect.bisect_right(firsts, number) - 1
        return shard, (number - firsts[shard]) // TABLE_ROWS

    for (shard, group), members in groupby(numbers, group_of):
        first, offset = firsts[shard] + group * TABLE_ROWS, shard_set.offsets[shard]
        with shard_set.table(shard) as table:
            before = table.metadata.row_group(group - 1).column(0).statistics.max if group else 0
            rows = table.read_row_group(group, ["end", "id"], use_threads=False)
        ends, ids = rows["end"].to_numpy(), rows["id"]
        for number in members:
            row = number - first
            yield {"id": ids[row].as_py(), "start": offset + int(ends[row - 1] if row else before),
                   "stop": offset + int(ends[row]), "file": shard_set.manifest.shards[shard].body}


def ranges(table: pq.ParquetFile, id: str) -> Iterator[tuple[str, int, int]]:
    """Find the documents whose id begins with `id` in the document table of one shard. Yields (id, first token,
    exclusive end) for each document, counted in tokens from the start of the shard."""
    import pyarrow.compute as pc  # loads modules that the trainer does not need

    previous_end = 0
    for batch in table.iter_batches(ROWS, columns=["id", "end"], use_threads=False):
        ends = batch.column("end").to_numpy()
        hits = np.flatnonzero(pc.starts_with(batch.column("id"), id).to_numpy(zero_copy_only=False))
        for row, name in zip(hits.tolist(), batch.column("id").take(pa.array(hits)).to_pylist()):
            yield name, int(ends[row - 1]) if row else previous_end, int(ends[row])
        previous_end = int(ends[-1]) if len(ends) else previous_end


def window_documents(shard_set: ShardIndex, window: int, length: int) -> list[dict[str, Any]]:
    """Return the documents in window number `window` of a stream, those with the most tokens in it first. A window is
    the `length` + 1 consecutive tokens of one training sample. If the set is read by packed rows instead of windows,
    `window` is the number of a row, and `length` the number of targets in a row. Each document is a mapping:

        id      the document's id
        tokens  the range [first, stop) of its positions in the window
        begins  how many of its tokens are before the window
        of      the number of all its tokens
        bytes   the size of its text in UTF-8
        key     the part (file of a published dataset) from which it was encoded; None if the set was not made from one
        at      the number of its row in that part

    A document that begins at the last position of a window is left out, because the model never reads the last
    token."""
    if shard_set.packed is not None:
        return _row_documents(shard_set, shard_set.packed, window)
    start, parts = window * length, shard_set.manifest.parts
    result = []
    for span in shard_set.documents(start, start + length + 1):
        first, stop = max(span.start - start, 0), min(span.stop - start, length + 1)
        if first < length:
            result.append({"id": span.id, "tokens": [first, stop], "begins": max(start - span.start, 0),
                           "of": span.stop - span.start, "bytes": span.n_bytes,
                           "key": parts[span.part] if parts else None, "at": span.row})
    return sorted(result, key=lambda d: d["tokens"][0] - d["tokens"][1])


def _row_documents(shard_set: ShardIndex, packed: PackedRows, row: int) -> list[dict[str, Any]]:
    """Return the documents in row number `row` of the packed rows (training samples of whole documents), as mappings
    like those of `window_documents`."""
    pieces, keys = packed.row(row), shard_set.manifest.parts
    result, first = [], 0
    for span, (start, stop) in zip(shard_set.documents_at([start for start, _ in pieces]), pieces):
        result.append({"id": span.id, "tokens": [first, first + stop - start], "begins": start - span.start,
                       "of": span.stop - span.start, "bytes": span.n_bytes, "key": keys[span.part] if keys else None,
                       "at": span.row})
        first += stop - start
    return sorted(result, key=lambda d: d["tokens"][0] - d["tokens"][1])
