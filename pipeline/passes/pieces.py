"""Copies the tokens of documents into a shard (file of tokens), for the task `AssembleShard`. The tokens come from
encoded parts, each of which holds the tokens of one file of documents.

In all functions, `args` are the task's arguments. `piece` describes one encoded part (an item of `args["pieces"]`), and
`table`, `body` and `loss` are the contents of this part's files.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.parquet import read_table
from pipeline.engine.task import TaskInputs
from pipeline.passes.part_tokens import LabelPiece
from tokenizer.shards.writer import ShardWriter

#: rows of a document table that are read at a time, and documents that are added at a time
TABLE_BATCH, BATCH = 4096, 256


def add_piece(writer: ShardWriter, args: Mapping[str, Any], piece: Mapping[str, Any], table: pq.ParquetFile,
              body: np.ndarray, loss: np.ndarray | None) -> None:
    """Append the documents of an encoded part to the shard of `writer`, as tokens. Only documents that start in the
    shard's token range are appended."""
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
                       rows.column("id").to_pylist(), piece["part"],
                       rows.column("row").to_numpy() + np.uint32(piece.get("row", 0)),
                       rows.column("n_bytes").to_numpy(),
                       None if loss is None else loss[starts[first]:ends[stop - 1]])


def add_ranges(writer: ShardWriter, args: Mapping[str, Any], piece: Mapping[str, Any], inputs: TaskInputs,
               dtype: np.dtype) -> None:
    """Append some documents of an encoded part to the shard of `writer`, as tokens: those that are in `piece["ranges"]`
    and start in the shard's token range. `EncodePart` has grouped the documents of the part by label (language, bucket,
    …), and each range holds the documents of one label.

    The documents are put back into the order of their rows in the part, so the order within a stream does not depend on
    the grouping. Only the ranges are read. Memory: the tokens of the ranges.
    """
    ranges = [LabelPiece(*values) for values in piece["ranges"]]
    width = dtype.itemsize
    body = np.concatenate([np.frombuffer(_read(inputs, piece["tokens"], r.first * width, r.stop * width, r.sums[0]),
                                         dtype) for r in ranges])
    loss = np.concatenate([np.frombuffer(_read(inputs, piece["loss"], r.first, r.stop, r.sums[2]), np.uint8)
                           for r in ranges]) if "loss" in piece else None
    tables = [read_table(pa.BufferReader(_read(inputs, piece["table"], r.table, r.table_stop, r.sums[1])))
              for r in ranges]
    rows = pa.concat_tables(tables)
    lengths = np.concatenate([np.diff(table["end"].to_numpy().astype(np.int64), prepend=0) for table in tables])
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(rows["row"].to_numpy(), kind="stable")
    inside = np.cumsum(lengths[order]) - lengths[order] + piece["offset"]
    here, after = (int(n) for n in np.searchsorted(inside, (args["start"], args["stop"])))
    for place in range(here, after, BATCH):
        chosen = order[place:min(place + BATCH, after)]
        batch = rows.take(chosen)
        spans = [slice(starts[r], starts[r] + lengths[r]) for r in chosen]
        writer.add(np.concatenate([body[span] for span in spans]), lengths[chosen], batch["id"].to_pylist(),
                   piece["part"], batch["row"].to_numpy(), batch["n_bytes"].to_numpy(),
                   None if loss is None else np.concatenate([loss[span] for span in spans]))


def _read(inputs: TaskInputs, ref: Mapping[str, Any], start: int, stop: int, checksum: int) -> bytes:
    """Return the bytes [start, stop) of the file `ref` of the store. Raises an error for damaged data if their CRC-32
    is not `checksum`."""
    data = inputs.read_range(ref, start, stop)
    if len(data) != stop - start or zlib.crc32(data) != checksum:
        raise inputs.damaged(ref)
    return data
