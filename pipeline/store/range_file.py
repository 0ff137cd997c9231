"""Reads an object of remote storage like a file."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from typing import Any

#: a fetch reads at least so many bytes (as far as the object has them): at first, and after many sequential reads
AHEAD_LEAST, AHEAD_MOST = 256 << 10, 8 << 20


class RemoteFile(io.RawIOBase):
    """Base class of read-only files over a remote object of `size` bytes. `fetch(start, stop)` must return a range of
    the object's bytes. A subclass defines `read`, which reads from `_position` on and moves it."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self.size, self._fetch, self._position = size, fetch, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self.size)[whence])
        return self._position

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[:len(data)] = data
        return len(data)


class RangeFile(RemoteFile):
    """A read-only file over a remote object of `size` bytes. `fetch(start, stop)` must return a range of the object's
    bytes. At least 256 KiB are fetched at a time. While reading is sequential, this amount doubles with each fetch, up
    to 8 MiB. So reading a Parquet footer transfers little, and reading a row group takes few requests."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__(size, fetch)
        self._first = 0
        self._data = b""
        self._ahead = AHEAD_LEAST

    def read(self, size: int = -1) -> bytes:
        stop = self.size if size is None or size < 0 else min(self._position + size, self.size)
        if stop <= self._position:
            return b""
        last = self._first + len(self._data)
        if not (self._first <= self._position and stop <= last):
            goes_on = self._first <= self._position <= last and self._data
            self._ahead = min(2 * self._ahead, AHEAD_MOST) if goes_on else AHEAD_LEAST
            buffered = self._data[self._position - self._first:] if goes_on else b""
            start = self._position + len(buffered)
            more = self._fetch(start, min(max(stop, start + self._ahead), self.size))
            if len(more) < stop - start:
                raise OSError(errno.EIO, f"the object ends at {start + len(more)}, it had {self.size} bytes")
            self._first, self._data = self._position, buffered + more
        data = self._data[self._position - self._first:stop - self._first]
        self._position = stop
        return data
