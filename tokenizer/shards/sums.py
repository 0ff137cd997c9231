"""Computes block sums, i.e. checksums of the blocks of a file. With them, a few kilobytes that are read at a random
position can be verified without reading the whole file.

There is one CRC-32 (u32, little-endian) for every BLOCK bytes of a file; the last block may be shorter. A block is as
large as a page of memory, so checking a range reads only the pages of the range itself. The sums take a thousandth of
the data's size. The manifest has the sha256 of the file with the sums.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokenizer.shards.layout import REMEDY, ShardError

#: number of bytes that one sum covers: a page of memory
BLOCK = 4096
SUMS = np.dtype("<u4")


class BlockSummer:
    """Computes the checksum of each block (a fixed number of bytes) of a file that is written piece by piece. The
    result does not depend on the sizes of the pieces."""

    def __init__(self) -> None:
        self._sums = array("I")
        self._unfinished = b""                    # the bytes after the last full block

    def update(self, data: bytes) -> None:
        """Take into account `data`, the next bytes of the file."""
        pending = self._unfinished + data
        view, stop = memoryview(pending), len(pending) // BLOCK * BLOCK
        self._sums.extend(zlib.crc32(view[begin:begin + BLOCK]) for begin in range(0, stop, BLOCK))
        self._unfinished = pending[stop:]

    def finish(self) -> bytes:
        """Return the checksums of all blocks of the file, as little-endian bytes."""
        partial = [zlib.crc32(self._unfinished)] if self._unfinished else []
        return np.array([*self._sums, *partial], SUMS).tobytes()


class CheckedFile:
    """The bytes of the file `path`, with the checksums of its blocks. With `once`, a block is checked only when it is
    used for the first time."""

    def __init__(self, path: Path, data: memoryview, sums: np.ndarray, once: bool) -> None:
        self._path, self._data, self._sums = path, data, sums.data
        self._known = bytearray(len(sums)) if once else None
        #: 1 for each block that is not checked again
        self.known = np.frombuffer(self._known, np.uint8) if self._known else np.empty(0, np.uint8)

    def check(self, start: int, stop: int) -> None:
        """Check the blocks that hold bytes [start, stop). Raises a ShardError that names the file and the offset if a
        checksum is wrong."""
        if stop <= start:
            return
        known, data, sums, crc32 = self._known, self._data, self._sums, zlib.crc32
        first, last = start // BLOCK, (stop - 1) // BLOCK
        if known is not None and last - first < 2 and known[first] and known[last]:
            return
        for block in range(first, last + 1):
            if known is not None and known[block]:
                continue
            begin = block * BLOCK
            if crc32(data[begin:begin + BLOCK]) != sums[block]:
                raise ShardError(f"{self._path}: damaged at byte {begin:,}: {REMEDY}")
            if known is not None:
                known[block] = 1


def blocks_of(size: int) -> int:
    """Return the number of blocks (see `BLOCK`) of a file of `size` bytes."""
    return -(-size // BLOCK)


def damaged_block(data: memoryview, first: int, sums: Sequence[int]) -> int | None:
    """Check consecutive blocks of a file, `data`, against their checksums, `sums`. Returns the number of the first
    block that does not match; None when all match. `first` is the number of the first block of `data` in the file."""
    for number, expected in enumerate(sums):
        if zlib.crc32(data[number * BLOCK:(number + 1) * BLOCK]) != expected:
            return first + number
    return None
