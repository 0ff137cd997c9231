"""Appends the documents of an encoded part to a shard (file of tokens), for the task `AssembleShard`, whose arguments
are `args`. `piece` is one of its pieces, and `table`, `body` and `loss` are the contents of the piece's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenizer.shards.writer import ShardWriter

#: rows of a document table that are read at a time, and documents that are added at a time
TABLE_BATCH, BATCH = 4096, 256


def add_piece(writer: ShardWriter, args: Mapping[str, Any], piece: Mapping[str, Any], table: pq.ParquetFile,
              body: np.ndarray, loss: np.ndarray | None) -> None:
    """Append the documents of an encoded part that start in the token range of the shard."""
    begin = 0
    for batch in table.iter_batches(TABLE_BATCH):
        ends = batch.column("end").to_numpy().astype(np.int64)
        starts = np.concatenate([[begin], ends[:-1]])
        begin = int(ends[-1])
        # starts increase: the documents of this shard are one run of rows
        first, stop = np.searchsorted(starts + piece["offset"], (args["start"], args["stop"]))
        if first < stop:
            rows = batch.slice(first, stop - first)
            writer.add(body[starts[first]:ends[stop - 1]], ends[first:stop] - starts[first:stop],
                       rows.column("id").to_pylist(), piece["part"], rows.column("row").to_numpy() + np.uint32(piece.get("row", 0)),
                       rows.column("n_bytes").to_numpy(),
                       None if loss is None else loss[starts[first]:ends[stop - 1]])


def add_ranges(writer: ShardWriter, args: Mapping[str, Any], piece: Mapping[str, Any], table: pq.ParquetFile,
               body: np.ndarray, loss: np.ndarray | None) -> None:
    """Append those documents of an encoded part that are in the piece's ranges, in the order of their rows in the part,
    and that start in the token range of the shard. So the order within a stream does not depend on the labels."""
    rows = pa.concat_tables([_table_rows(table, first, stop) for first, stop, _, _ in piece["ranges"]])
    ends = rows["end"].to_numpy().astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    place = 0
    for first, stop, begin, _ in piece["ranges"]:
        starts[place] = begin                          # the row before it belongs to another range
        place += stop - first
    order = np.argsort(rows["row"].to_numpy(), kind="stable")
    lengths = (ends - starts)[order]
    inside = np.cumsum(lengths) - lengths + piece["offset"]
    here, after = (int(n) for n in np.searchsorted(inside, (args["start"], args["stop"])))
    for place in range(here, after, BATCH):
        some = order[place:min(place + BATCH, after)]
        batch = rows.take(some)
        writer.add(np.concatenate([body[starts[r]:ends[r]] for r in some]), lengths[place:place + len(some)],
                   batch["id"].to_pylist(), piece["part"], batch["row"].to_numpy(), batch["n_bytes"].to_numpy(),
                   None if loss is None else np.concatenate([loss[starts[r]:ends[r]] for r in some]))


def _table_rows(table: pq.ParquetFile, first: int, stop: int) -> pa.Table:
    """Return the rows [first, stop) of a document table. Only the row groups that hold them are read."""
    sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    groups = [i for i, size in enumerate(sizes) if begins[i] < stop and begins[i] + size > first]
    return table.read_row_groups(groups, use_threads=False).slice(first - int(begins[groups[0]]), stop - first)
