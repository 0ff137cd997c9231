"""Reads a remote object from front to back. The next bytes are requested while the reader still uses the current ones.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.store.range_file import RemoteFile

#: bytes of one request, pieces that are requested in advance, pieces that are kept. A reader may have three places in a
#: file (an index of Megatron-LM has three lists), each with the pieces that follow it
PIECE, AHEAD, KEPT = 4 << 20, 4, 20


class AheadFile(RemoteFile):
    """A read-only file over a remote object of `size` bytes. It reads the object in pieces of PIECE bytes. While the
    caller reads forward, the next AHEAD pieces are requested in advance, so that the caller seldom waits. Memory holds
    up to KEPT pieces (80 MiB), and the disk none.

    `fetch(start, stop)` must return a range of the object's bytes. Several threads call it.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__(size, fetch)
        self._pieces: OrderedDict[int, Future[bytes]] = OrderedDict()          # least recently read first
        self._pool = ThreadPoolExecutor(1 + AHEAD, thread_name_prefix="ahead")

    def read_at(self, start: int, size: int) -> bytes:
        """Read up to `size` bytes from byte `start` on. Raises OSError when the object has become shorter."""
        stop, parts = min(start + size, self.size), []
        for number in range(start // PIECE, -(-stop // PIECE)):
            begin = number * PIECE
            parts.append(self._piece(number)[max(start - begin, 0):stop - begin])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def forget(self, start: int, stop: int) -> None:
        """Drop the bytes [start, stop) from memory, so that they are requested again when they are read next. Callers
        use this when a checksum is wrong: the connection may have damaged the bytes."""
        for number in range(start // PIECE, -(-stop // PIECE)):
            self._pieces.pop(number, None)

    def _piece(self, number: int) -> bytes:
        """Return the piece with this number, and wait for it if necessary. If the caller reads from the beginning or
        reads forward (this piece or the one before it was already requested), the next AHEAD pieces are requested, too.
        Raises OSError when the object has become shorter."""
        goes_on = not number or number in self._pieces or number - 1 in self._pieces
        for wanted in range(number, min(number + 1 + AHEAD * goes_on, -(-self.size // PIECE))):
            if wanted not in self._pieces:
                self._pieces[wanted] = self._pool.submit(self._fetch, wanted * PIECE,
                                                         min((wanted + 1) * PIECE, self.size))
            self._pieces.move_to_end(wanted)
        self._pieces.move_to_end(number)
        try:
            data = self._pieces[number].result()
            if len(data) != min(PIECE, self.size - number * PIECE):
                raise OSError(errno.EIO, f"the object ends at {number * PIECE + len(data)}, it had {self.size} bytes")
        except Exception:
            del self._pieces[number]                             # the next call requests it again
            raise
        while len(self._pieces) > KEPT:
            self._pieces.popitem(last=False)[1].cancel()
        return data

    def read(self, size: int = -1) -> bytes:
        data = self.read_at(self._position, self.size if size is None or size < 0 else size)
        self._position += len(data)
        return data

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._pieces.clear()
        super().close()
