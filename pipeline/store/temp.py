"""Temporary databases and lists on disk, for data that a process needs while it runs and that would take too much
memory."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

from pipeline.store.errors import EnvironmentFailure
from pipeline.store.quick_json import dumps, loads

CACHE_MB = 8
#: most values in one statement; SQLite allows 999
MOST_KEYS = 256
#: items read at a time
CHUNK = 256
T = TypeVar("T")


class _Database(sqlite3.Connection):
    """A database connection that turns the error of a full disk into an EnvironmentFailure."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*args)
        except sqlite3.OperationalError as e:
            raise _as_failure(e) from e

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().executemany(*args)
        except sqlite3.OperationalError as e:
            raise _as_failure(e) from e


def _as_failure(error: sqlite3.OperationalError) -> Exception:
    if error.sqlite_errorcode & 0xff not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return error
    folder = os.environ.get("SQLITE_TMPDIR") or os.environ.get("TMPDIR") or f"/var/tmp or {tempfile.gettempdir()}"
    return EnvironmentFailure(f"cannot write temporary files in {folder}: {error}; free some space there, or set "
                              f"TMPDIR to a larger disk. What was committed is kept: run again")


def scratch_database(cache_mb: int = CACHE_MB) -> sqlite3.Connection:
    """Return an empty SQLite database that no other process sees. The database is removed when its connection or
    process ends. When it outgrows its cache of `cache_mb` MB, it continues in an unnamed file below TMPDIR. Several
    threads may use the database, one at a time. When the disk is full, its methods raise EnvironmentFailure."""
    db = sqlite3.connect("", isolation_level=None, check_same_thread=False, factory=_Database)
    for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", f"cache_size={-1024 * cache_mb}"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("BEGIN")           # one transaction that is never committed: otherwise each statement would be one
    return db


def path_bytes(path: str) -> bytes:
    """Encode a path as bytes. The bytes of several paths sort in the order of the paths. The path may hold lone
    surrogates, because file names need not be UTF-8."""
    return path.encode("utf-8", "surrogatepass")


def path_of(data: bytes) -> str:
    """Turn bytes that `path_bytes` returned back into the path."""
    return data.decode("utf-8", "surrogatepass")


class OnDisk(Sequence[T], Generic[T]):
    """Base class for a sequence on disk. Iterating over it reads CHUNK items at a time. A subclass sets `_size` (the
    number of items) and defines `_read`."""

    _size = 0

    def _read(self, first: int, stop: int) -> list[T]:
        """Return the items [first, stop) of the sequence."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            places = range(self._size)[index]
            return self._read(places.start, places.stop) if places.step == 1 else [self[i] for i in places]
        place = range(self._size)[index]
        return self._read(place, place + 1)[0]

    def __iter__(self) -> Iterator[T]:
        first = 0
        while first < self._size:                    # the list may grow during the iteration
            items = self._read(first, first + CHUNK)
            yield from items
            first += len(items)


class Spilled(OnDisk[T]):
    """A list on disk, to which items can only be appended. `encode` turns an item into a value that can be written as
    JSON; `decode` turns that value back into the item.

    The items are written to a database in blocks of CHUNK, because a SQL statement for each item would take longer than
    encoding the item. The items of the last, incomplete block are in memory.
    """

    def __init__(self, items: Iterable[T] = (), *, encode: Callable[[T], Any], decode: Callable[[Any], T]) -> None:
        self._encode, self._decode = encode, decode
        self._tail: list[Any] = []
        for item in items:
            self.append(item)

    @cached_property
    def _db(self) -> sqlite3.Connection:
        """The database, made for the first complete block. Most lists have none."""
        db = scratch_database(1)
        db.execute("CREATE TABLE block (number INTEGER PRIMARY KEY, data BLOB)")
        return db

    def append(self, item: T) -> None:
        self._tail.append(self._encode(item))
        self._size += 1
        if len(self._tail) == CHUNK:
            self._db.execute("INSERT INTO block VALUES (?, ?)", (self._size // CHUNK - 1, dumps(self._tail)))
            self._tail = []

    def _read(self, first: int, stop: int) -> list[T]:
        values: list[Any] = []
        for number in range(first // CHUNK, -(-min(stop, self._size) // CHUNK)):
            values += self._block(number)
        return [self._decode(value) for value in values[first % CHUNK:first % CHUNK + stop - first]]

    def _block(self, number: int) -> list[Any]:
        if number == self._size // CHUNK:
            data = dumps(self._tail)                 # its items must look like those that come from the disk
        else:
            data, = self._db.execute("SELECT data FROM block WHERE number = ?", (number,)).fetchone()
        values: list[Any] = loads(data)
        return values
