"""Tells which documents a shard set has and which tokens belong to each, from its manifest and its document tables
alone."""

from __future__ import annotations

import bisect
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from tokenizer.shards.layout import ENDS, Manifest
from tokenizer.shards.packed import PackedRows


class DocumentSpan(NamedTuple):
    """One document of a stream (data source): the range of its tokens, and the row and file from which it was
    encoded."""

    id: str
    start: int                    # first token, counted over all shards of the stream
    stop: int                     # exclusive end, EOS included
    part: int                     # index in the manifest's `parts` of the part it was encoded from
    row: int                      # row in that part's kept.parquet; GONE_ROW if the document was taken down
    n_bytes: int                  # UTF-8 bytes of its text


class ShardIndex:
    """Finds documents in a shard set. Subclasses open the document tables. Tokens are counted over all shards, as if
    they were one file."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.tokens = manifest, manifest.tokens
        #: the packed rows by which the set is read instead of by windows; None: by windows
        self.packed: PackedRows | None = None
        #: token offset of each shard's start, and the total
        self.offsets = [0]
        for shard in manifest.shards:
            self.offsets.append(self.offsets[-1] + shard.tokens)

    def table(self, shard: int) -> AbstractContextManager[pq.ParquetFile]:
        """Open the document table of a shard for reading, as a context manager. Raises ShardError or StoreError when
        the table cannot be read."""
        raise NotImplementedError

    def documents(self, start: int, stop: int) -> list[DocumentSpan]:
        """Return the documents that have tokens in [start, stop), in order. If the range is empty or not within the
        set, return []."""
        if not 0 <= start < stop <= self.tokens:
            return []
        documents: list[DocumentSpan] = []
        for shard, first, end, _ in self._pieces(start, stop):
            offset, begin = self.offsets[shard], 0
            with self.table(shard) as table:
                for group in range(table.num_row_groups):
                    last = table.metadata.row_group(group).column(0).statistics.max  # of `end`, which increases
                    if last > first:
                        rows = table.read_row_group(group)
                        ends = rows["end"].to_numpy()
                        limits = np.array([first, end - 1], ENDS)
                        first_row, last_row = np.searchsorted(ends, limits, side="right").tolist()
                        begin = int(ends[first_row - 1]) if first_row else begin
                        for row in rows.slice(first_row, last_row + 1 - first_row).to_pylist():
                            documents.append(DocumentSpan(row["id"], begin + offset, row["end"] + offset, row["part"],
                                                          row["row"], row["n_bytes"]))
                            begin = row["end"]
                    if last >= end:
                        break
                    begin = last
        return documents

    def documents_at(self, positions: list[int]) -> list[DocumentSpan]:
        """Return for each of the tokens `positions` the document that it belongs to. There must be at least one
        position, and all must be in the same shard. Every row group of the document table is read at most once."""
        shard = bisect.bisect_right(self.offsets, min(positions)) - 1
        offset, begin, spans = self.offsets[shard], 0, {}
        with self.table(shard) as table:
            for group in range(table.num_row_groups):
                last = table.metadata.row_group(group).column(0).statistics.max  # of `end`, which increases
                here = [p for p in positions if begin <= p - offset < last]
                if here:
                    rows = table.read_row_group(group)
                    ends = rows["end"].to_numpy().astype(np.int64)
                    for position, number in zip(here, np.searchsorted(ends, np.array(here) - offset, side="right")):
                        [row] = rows.slice(int(number), 1).to_pylist()
                        start = int(ends[number - 1]) if number else begin
                        spans[position] = DocumentSpan(row["id"], start + offset, row["end"] + offset, row["part"],
                                                       row["row"], row["n_bytes"])
                begin = last
        return [spans[position] for position in positions]

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Divide the range of tokens [start, stop) among shards. Returns (number of the shard, first token in the
        shard, exclusive end in the shard, offset of the piece from `start`) for each piece."""
        shard = bisect.bisect_right(self.offsets, start) - 1
        if start < stop <= self.offsets[shard + 1]:
            return [(shard, start - self.offsets[shard], stop - self.offsets[shard], 0)]
        pieces, position = [], start
        while position < stop:
            offset, end = self.offsets[shard], min(stop, self.offsets[shard + 1])
            if end > position:
                pieces.append((shard, position - offset, end - offset, position - start))
            position, shard = end, shard + 1
        return pieces
