"""Reads a shard set whose tokens and loss masks are elsewhere, for instance in object storage. They are requested in
whole blocks, and each block is compared with its checksum before a token of it is used."""

from __future__ import annotations

import abc
from typing import NamedTuple

import numpy as np

from tokenizer.shards.layout import REMEDY, ShardError
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.sums import BLOCK, blocks_of, damaged_block


class BlockRange(NamedTuple):
    """Consecutive blocks of a file: number of the shard, kind of the file (body or loss), and the blocks [first,
    stop)."""

    shard: int
    kind: str
    first: int
    stop: int


class RequestedSet(ShardSet, abc.ABC):
    """A shard set whose tokens and loss masks are requested from elsewhere. Its other files are on this machine."""

    has_local_tokens = False
    #: folder of the tokens and loss masks, for messages
    source: str

    @abc.abstractmethod
    def request(self, wanted: BlockRange, again: bool) -> bytes:
        """Return the bytes of some blocks. With `again`, an earlier request for them failed or returned damaged bytes,
        so the bytes must come from the source and not from a cache. Raises OSError when the connection fails, and
        ShardError when asking again cannot help."""

    def path(self, wanted: BlockRange) -> str:
        return f"{self.source}/{getattr(self.manifest.shards[wanted.shard], wanted.kind)}"

    def checked_size(self, wanted: BlockRange, size: int | None) -> int:
        """Compare the size of a file in storage with the manifest, and return it. The file is the one with the blocks
        `wanted`, and `size` is None if it is missing. Raises ShardError if it is missing or has another size."""
        expected = self.manifest.shards[wanted.shard].tokens * (self.dtype.itemsize if wanted.kind == "body" else 1)
        if size is None:
            raise ShardError(f"{self.path(wanted)}: missing: {REMEDY}")
        if size != expected:
            raise ShardError(f"{self.path(wanted)}: {size:,} bytes, the manifest says {expected:,}: damaged: {REMEDY}")
        return size

    def body(self, shard: int) -> np.ndarray:
        """Return the tokens of a shard, which are all requested and held in memory."""
        return self.read(self.offsets[shard], self.offsets[shard + 1])

    def read(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        return self._items("body", self.dtype, start, stop)

    def _mask(self, start: int, stop: int) -> np.ndarray:
        return self._items("loss", np.dtype("u1"), start, stop).astype(bool)

    def _items(self, kind: str, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        """Return the entries of tokens [start, stop) in the files of a `kind` (body: the tokens, loss: whether they are
        targets). A shard without a file of this kind gives 1 for each token."""
        items, size = np.ones(stop - start, dtype), dtype.itemsize
        for shard, first, end, offset in self._pieces(start, stop):
            if getattr(self.manifest.shards[shard], kind):
                wanted = BlockRange(shard, kind, first * size // BLOCK, blocks_of(end * size))
                data = memoryview(self._checked(wanted))
                items[offset:offset + end - first] = np.frombuffer(
                    data[first * size - wanted.first * BLOCK:end * size - wanted.first * BLOCK], dtype)
        return items

    def _checked(self, wanted: BlockRange) -> bytes:
        """Return the bytes of some blocks. If the request fails, or if the bytes differ from their checksums, they are
        requested once more, because a connection may have damaged them. Raises ShardError when the second attempt
        fails, too."""
        sums = self.block_sums(wanted.shard, wanted.kind)[wanted.first:wanted.stop].tolist()
        failure = ""
        for again in (False, True):
            try:
                data = self.request(wanted, again)
            except OSError as error:
                failure = f"cannot be read ({' '.join(str(error).split())[:300]}); run the command again"
                continue
            damaged = damaged_block(memoryview(data), wanted.first, sums)
            if damaged is None:
                return data
            failure = f"damaged at byte {damaged * BLOCK:,}: {REMEDY}"
        raise ShardError(f"{self.path(wanted)}: {failure}")
