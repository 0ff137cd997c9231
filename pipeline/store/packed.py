"""Keeps the records of the commit log that were read from packs, files that compact many segments of the log
(`pipeline.store.snapshot`).

The records are in a temporary file, compressed as in the packs. Memory holds 50 bytes for each record, as arrays. A
record is decompressed only when it is asked for.
"""

from __future__ import annotations

import functools
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from pipeline.store.errors import disk_full
from pipeline.store.snapshot import BLOCK, PackData, digest, inflate

#: decompressed blocks that are kept, because the records of a plan's next tasks lie near each other
CACHED_BLOCKS = 64


class PackedRecords:
    """Holds the records of tasks that come from packs (files that compact the commit log), and finds them by number or
    by key. A record's number is its position in the order of commits.

    To fill the object, call `add` for each pack, and then `settle`. To make withdrawals take effect, replay the log
    segment by segment. Before each segment, set `limit` to the number of records in the segments replayed so far.
    Records with numbers of `limit` or more are not found.

    At most one record of a key is valid: the first, until `drop` withdraws it. Then the next record that is committed
    for the key becomes valid, that is, the first with a number of at least `limit`. Records of the key with lower
    numbers never become valid, because another record was valid when they were committed.
    """

    def __init__(self) -> None:
        self.limit = 0
        #: (number of records before the segment, number of the segment, its body without records), for each segment
        #: that holds anything besides records
        self.events: list[tuple[int, int, dict[str, Any]]] = []
        self._size = 0
        self._added = 0
        self._columns: list[tuple[np.ndarray, ...]] = []      # columns of each pack, until `settle`
        self._numbers: list[int] = []                         # number of each pack's first record
        self._raw: list[int] = []                             # bytes of each pack's segments
        self._offsets: list[np.ndarray] = []                  # places of each pack's blocks in the file
        self._keys, self._order = np.empty(0, "S16"), np.empty(0, np.int32)     # sorted keys; the record number of each
        self._replay_keys = np.empty(0, "S16")
        self._places, self._lengths = np.empty(0, "<u8"), np.empty(0, "<u4")
        self._counts = np.empty(0, bool)
        self._block = functools.lru_cache(CACHED_BLOCKS)(self._read_block)

    @functools.cached_property
    def _file(self) -> IO[bytes]:
        """The temporary file, made for the first pack. It lives as long as this object."""
        return tempfile.TemporaryFile()

    def add(self, data: PackData, begin: int) -> None:
        """Add the records and the events of a pack (a file that compacts segments of the commit log). The events of a
        segment are everything in its body except records. Segments with numbers below `begin` are left out."""
        with disk_full(tempfile.gettempdir()):
            self._file.write(data.blocks)
            self._file.flush()
        offsets = np.cumsum([self._size, *data.block_sizes])
        self._size = int(offsets[-1])
        self._offsets.append(offsets)
        self._raw.append(data.raw)
        self._numbers.append(self._added)
        skipped = int(data.counts[:max(0, begin - data.pack.first)].sum())
        before = self._added - skipped + np.cumsum(data.counts)
        self.events += [(int(before[number - data.pack.first]), number, body) for number, body in data.events
                        if number >= begin]
        self._columns.append(tuple(column[skipped:] for column in (
            data.keys, data.replay_keys, data.places, data.lengths, data.quarantines)))
        self._added = int(before[-1])

    def settle(self) -> list[int]:
        """Build the index of all added records, so that they can be found. Returns the numbers of the records that
        quarantine documents."""
        if not self._columns:
            return []
        keys, self._replay_keys, self._places, self._lengths, quarantines = (
            np.concatenate(columns) for columns in zip(*self._columns))
        self._columns = []
        self._order = np.argsort(keys, kind="stable").astype(np.int32)
        self._keys = keys[self._order]
        first = np.ones(len(keys), bool)
        first[1:] = self._keys[1:] != self._keys[:-1]
        self._counts = np.zeros(len(keys), bool)
        self._counts[self._order[first]] = True
        self.limit = self._added
        return np.flatnonzero(quarantines).tolist()

    # -- one record ----------------------------------------------------------------------------------------------
    def numbers_of(self, key: str) -> list[int]:
        """Return the numbers of all records of the task `key`, including those that are not valid."""
        return _equal(self._keys, self._order, key)

    def find(self, key: str) -> int | None:
        """Return the number of the valid record of the task `key`; None when there is none."""
        if not len(self._keys):
            return None
        return next((n for n in self.numbers_of(key) if self._counts[n] and n < self.limit), None)

    def counts(self, number: int) -> bool:
        return bool(self._counts[number])

    def drop(self, key: str, number: int) -> None:
        """Withdraw record `number`, which is the valid record of the task `key`. The first record of the key whose
        number is at least `limit` then becomes valid, if there is one. `limit` is the number of records replayed so
        far."""
        self._counts[number] = False
        for later in self.numbers_of(key):
            if later >= self.limit:
                self._counts[later] = True
                break

    def data(self, number: int) -> bytes:
        """Return the bytes of record `number`, as `encode_record` encoded it."""
        place, length = int(self._places[number]), int(self._lengths[number])
        pack = bisect_right(self._numbers, number) - 1
        first, last = place // BLOCK, (place + length - 1) // BLOCK
        data = b"".join(self._block(pack, block) for block in range(first, last + 1))
        return data[place - first * BLOCK:place - first * BLOCK + length]

    def _read_block(self, pack: int, block: int) -> bytes:
        begin, end = self._offsets[pack][block:block + 2].tolist()
        return inflate(os.pread(self._file.fileno(), end - begin, begin),
                       min(BLOCK, self._raw[pack] - block * BLOCK))

    # -- all records ---------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Return how many records are valid, at most one per task."""
        return int(np.count_nonzero(self._counts[:self.limit]))

    def numbers(self, after: int = -1) -> Iterator[int]:
        """Yield the numbers of all valid records (at most one per task) in ascending order, which is the order of
        commits. Only numbers greater than `after` are yielded."""
        step = 1 << 14                                        # records may be dropped during the iteration
        for begin in range(after + 1, self.limit, step):
            for number in np.flatnonzero(self._counts[begin:min(begin + step, self.limit)]).tolist():
                if self._counts[begin + number]:
                    yield begin + number

    def last(self) -> int | None:
        """Return the number of the last valid record; None when there is none."""
        numbers = np.flatnonzero(self._counts[:self.limit])
        return int(numbers[-1]) if len(numbers) else None

    def earlier(self, replay_key: str) -> int | None:
        """Return the number of the latest valid record with this replay key (a task's key computed without its
        thresholds); None when there is none."""
        if not len(self._keys):
            return None
        numbers = _equal(*self._by_replay_key, replay_key)
        return next((n for n in reversed(numbers) if self._counts[n] and n < self.limit), None)

    @functools.cached_property
    def _by_replay_key(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.flatnonzero(self._replay_keys != b"")
        order = order[np.argsort(self._replay_keys[order], kind="stable")]
        return self._replay_keys[order], order.astype(np.int32)


def _equal(keys: np.ndarray, numbers: np.ndarray, key: str) -> list[int]:
    """Return the numbers of the records of the task `key`. `keys` holds the hashed keys of all records, sorted, and
    numbers[i] is the number of the record with keys[i]."""
    hashed = digest(key)
    first = last = int(np.searchsorted(keys, hashed))
    while last < len(keys) and keys[last] == hashed:
        last += 1
    result: list[int] = numbers[first:last].tolist()
    return result
