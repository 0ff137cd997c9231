"""Reads a shard set from front to back for an export. Every byte is compared with the checksums of the set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pipeline.base.files import sha256
from tokenizer.shards.layout import REMEDY, TABLE_ROWS, Shard, ShardError
from tokenizer.shards.reader import ShardSet

#: number of tokens that are read at a time
BLOCK_TOKENS = 1 << 22


class ExportError(ShardError):
    """Raised if a format cannot hold a shard set, or if the export cannot be written to the given folder. Nothing of
    the export is left on disk."""

    exit_code = 2


class ShardDocuments(NamedTuple):
    """Consecutive documents of a shard, with their tokens back to back."""

    ids: list[str]
    ends: np.ndarray              # exclusive end of each document in `tokens`, int64
    tokens: np.ndarray            # in the shard's dtype
    targets: np.ndarray | None    # whether each token is a target, u8; None: the export has no loss masks


class TableRows(NamedTuple):
    """Consecutive rows of a shard's document table, which has a row for each document."""

    ids: list[str]
    ends: np.ndarray              # exclusive end of each document in the shard, int64


class ExportSource:
    """Reads a shard set for an export. With `drop_loss`, its loss masks are ignored, so that all tokens count in the
    loss. `progress` is called after each read, with the number of bytes of tokens and loss masks that were read.

    An export reads blocks of BLOCK_TOKENS tokens, or one document if that is longer, so its memory does not grow with
    the size of a shard."""

    def __init__(self, shards: ShardSet, drop_loss: bool, progress: Callable[[int], None]) -> None:
        self.shards, self.manifest, self.progress = shards, shards.manifest, progress
        self.dtype, self.eos = shards.dtype, shards.eos
        self.masked = not drop_loss and any(info.loss for info in self.manifest.shards)
        #: numbers in the manifest of the shards that have documents
        self.numbers = [number for number, info in enumerate(self.manifest.shards) if info.documents]

    def info(self, number: int) -> Shard:
        return self.manifest.shards[number]

    def bytes(self) -> int:
        """Return how many bytes of tokens and loss masks an export reads: the sum of what `progress` gets."""
        tokens = self.manifest.tokens
        return tokens * self.dtype.itemsize + (tokens if self.masked else 0)

    def tokens(self, number: int) -> Iterator[np.ndarray]:
        """Yield the tokens of a shard, block by block."""
        for start, stop in self._blocks(number):
            yield self._read(number, start, stop)

    def targets(self, number: int) -> Iterator[np.ndarray]:
        """Yield whether each token of a shard is a target, u8 (0 or 1), block by block."""
        for start, stop in self._blocks(number):
            yield self._targets(number, start, stop)

    def ends(self, number: int) -> Iterator[np.ndarray]:
        """Yield the exclusive ends of a shard's documents, counted in tokens of the shard, int64. Each array has at
        least one end."""
        for start, stop in self._blocks(number):
            if len(ends := self._ends(number, start, stop)):
                yield ends

    def rows(self, number: int) -> Iterator[TableRows]:
        """Yield the rows of a shard's document table. The table is compared with its sha256 first, and its ends with
        those in the file of ends."""
        info, begin = self.info(number), 0
        path = self.shards.folder / info.table
        with self.shards.table(number) as table:
            if sha256(path) != info.table_sha256:
                raise ShardError(f"{path}: sha256 differs from the manifest: damaged or replaced: {REMEDY}")
            for batch in table.iter_batches(TABLE_ROWS, columns=["end", "id"], use_threads=False):
                ends = batch.column("end").to_numpy().astype(np.int64)
                if not np.array_equal(ends, self._ends(number, begin, int(ends[-1]))):
                    raise ShardError(f"{path}: `end` differs from {info.ends}: {REMEDY}")
                yield TableRows(batch.column("id").to_pylist(), ends)
                begin = int(ends[-1])

    def documents(self, number: int) -> Iterator[ShardDocuments]:
        """Yield the documents of a shard, about BLOCK_TOKENS tokens at a time and at least one document."""
        begin = 0
        for table in self.rows(number):
            first = 0
            while first < len(table.ids):
                last = max(first + 1, int(np.searchsorted(table.ends, begin + BLOCK_TOKENS, side="right")))
                stop = int(table.ends[last - 1])
                yield ShardDocuments(table.ids[first:last], table.ends[first:last] - begin,
                                     self._read(number, begin, stop),
                                     self._targets(number, begin, stop) if self.masked else None)
                begin, first = stop, last

    def _blocks(self, number: int) -> Iterator[tuple[int, int]]:
        tokens = self.info(number).tokens
        for start in range(0, tokens, BLOCK_TOKENS):
            yield start, min(start + BLOCK_TOKENS, tokens)

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of a shard. Raises ShardError when a token is outside the vocabulary, because
        formats with signed tokens would store another id."""
        offset = self.shards.offsets[number]
        tokens = self.shards.read(offset + start, offset + stop)
        if int(tokens.max()) >= self.shards.vocab_size:
            raise ShardError(f"{self.shards.folder / self.info(number).body}: token id {int(tokens.max())} is outside "
                             f"the vocabulary of {self.shards.vocab_size}: {REMEDY}")
        self.progress(tokens.nbytes)
        return tokens

    def _targets(self, number: int, start: int, stop: int) -> np.ndarray:
        offset = self.shards.offsets[number]
        counts = self.shards.counts(offset + start, offset + stop)
        self.progress(stop - start)
        return np.ones(stop - start, np.uint8) if counts is None else counts.view(np.uint8)

    def _ends(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the ends e of documents of a shard with `start` < e <= `stop`, in tokens of the shard."""
        offset = self.shards.offsets[number]
        return self.shards.ends(offset + start + 1, offset + stop + 1) - offset
