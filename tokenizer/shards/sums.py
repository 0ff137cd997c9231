"""Block sums: checksums of the blocks of a file. With them, a few kilobytes that are read at a random position can be
verified without reading the whole file.

There is one CRC-32 (u32, little-endian) for every BLOCK bytes of a file; the last block may be shorter. A block is as
large as a page of memory, so checking a range reads only the pages of the range itself. The sums take a thousandth of
the data's size. The manifest has the sha256 of the file with the sums.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import numpy as np

#: number of bytes that one sum covers: a page of memory
BLOCK = 4096
SUMS = np.dtype("<u4")


class BlockSummer:
    """Computes the checksum of each block (a fixed number of bytes) of a file that is written piece by piece. The
    result does not depend on the sizes of the pieces."""

    def __init__(self) -> None:
        self._sums = array("I")
        self._rest = b""

    def update(self, data: bytes) -> None:
        held = self._rest + data
        view, stop = memoryview(held), len(held) // BLOCK * BLOCK
        self._sums.extend(zlib.crc32(view[a:a + BLOCK]) for a in range(0, stop, BLOCK))
        self._rest = held[stop:]

    def finish(self) -> bytes:
        """Return the sums of all blocks, little-endian."""
        rest = [zlib.crc32(self._rest)] if self._rest else []
        return np.array([*self._sums, *rest], SUMS).tobytes()


def blocks_of(size: int) -> int:
    """Number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK)


def damaged_block(data: memoryview, first: int, sums: Sequence[int]) -> int | None:
    """Return the number of the first block in `data` that does not match its sum; None when all match. `data` holds
    consecutive blocks, of which the first has number `first`. `sums` are the sums of these blocks."""
    for i, expected in enumerate(sums):
        if zlib.crc32(data[i * BLOCK:(i + 1) * BLOCK]) != expected:
            return first + i
    return None
