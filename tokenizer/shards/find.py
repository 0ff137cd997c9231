"""Finds documents in a shard set by their id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenizer.shards.reader import ShardSet

#: rows of a document table that are compared at a time
ROWS = 1 << 16


def places(shard_set: ShardSet, id: str) -> Iterator[dict[str, Any]]:
    """Find the documents whose id begins with `id`. Yields a mapping for each document: its id, the range of its tokens
    (`start` and exclusive `stop`, counted over all shards of the set) and the name of the token file."""
    for shard, (offset, info) in enumerate(zip(shard_set.offsets, shard_set.manifest.shards)):
        with shard_set.table(shard) as table:
            for name, start, stop in ranges(table, id):
                yield {"id": name, "start": offset + start, "stop": offset + stop, "file": info.body}


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
