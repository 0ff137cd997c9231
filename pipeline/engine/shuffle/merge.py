"""Merges sorted runs of records in bounded memory, however many and however long the runs are, and however many keys
are equal.

A run is a pair (read, length): `read(start, stop)` returns its records [start, stop) as a numpy structured array. Runs
are sorted by the fields of a *key*. Runs whose key has no fields are not sorted; their records come one run after the
other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MergeLimits:
    """How much memory a merge of sorted runs may use, how large its blocks are, and how many runs it merges at a time.
    The merged records do not depend on these limits."""

    #: bytes that a writer or a merge may use for records in memory and their sorted copies
    memory: int = 64 << 20
    #: least bytes per block of a run: smaller blocks are not worth a request to object storage
    block: int = 128 << 10
    #: runs merged at a time; more are first merged in groups, into files on scratch
    fan_in: int = 128


LIMITS = MergeLimits()

Read = Callable[[int, int], np.ndarray]
Run = tuple[Read, int]


# -- keys ------------------------------------------------------------------------------------------------------------
def sort_keys(records: np.ndarray, key: Sequence[str] | None) -> np.ndarray:
    """Returns one value for each record. Sorting by these values sorts the records by the fields `key` (None: all
    fields). The values are uint64 if the key is one unsigned integer, otherwise byte strings. Floats are in total order
    (-0.0 before 0.0; NaN last, or first if its sign bit is set). Raises TypeError for fields of other types than
    numbers, booleans and bytes."""
    names = records.dtype.names
    fields = [records] if names is None else [records[name] for name in (names if key is None else key)]
    if len(fields) == 1 and fields[0].ndim == 1 and fields[0].dtype.kind == "u":
        return fields[0].astype(np.uint64, copy=False)
    columns = [_ordered_bytes(field) for field in fields]
    flat = np.ascontiguousarray(np.concatenate(columns, axis=1))
    return flat.view(f"S{flat.shape[1]}").ravel()


def _ordered_bytes(field: np.ndarray) -> np.ndarray:
    """Returns the n values of a field as big-endian bytes that sort like the values: an array uint8 [n, width]."""
    kind, size = field.dtype.kind, field.dtype.itemsize
    shape = len(field), size * int(np.prod(field.shape[1:]))
    if kind in "SV":
        return np.ascontiguousarray(field).view(np.uint8).reshape(shape)
    if kind == "b":
        field, kind = field.astype(np.uint8), "u"
    if kind not in "uif":
        raise TypeError(f"records of an exchange cannot be sorted by a field of type {field.dtype}")
    bits = np.ascontiguousarray(field).view(f"<u{size}")
    top = bits.dtype.type(1 << (8 * size - 1))
    if kind == "i":
        bits = bits ^ top
    elif kind == "f":
        bits = np.where(bits & top, ~bits, bits ^ top)
    return bits.astype(f">u{size}").view(np.uint8).reshape(shape)


# -- merging ---------------------------------------------------------------------------------------------------------
def merge(sources: Sequence[tuple[Read, int]], key: Sequence[str] | None, itemsize: int,
          limits: MergeLimits = LIMITS) -> Iterator[np.ndarray]:
    """Merge sorted runs and yield the records in sorted blocks. `sources` are the runs, each given as (read(start,
    stop), length). Records with equal keys come in the order of the runs. `itemsize` is the size of a record in bytes.

    Memory: about `limits.memory` bytes for up to `limits.fan_in` runs, however long they are and however many records
    share a key. Each further run needs at least one block (`limits.block`).
    """
    runs, memory = [_SortedRun(read, n) for read, n in sources if n], limits.memory
    if (key is not None and not key) or len(runs) == 1:
        step = max(1, memory // 2 // itemsize)
        for run in runs:
            for start in range(0, run.length, step):
                yield run.read(start, min(start + step, run.length))
        return
    if sum(run.length for run in runs) * itemsize <= memory // 4:
        yield from _in_order([run.read(0, run.length) for run in runs], key)
        return
    # a block is held as records and keys, and once more while it is sorted
    step = max(1, max(memory // 4 // len(runs), limits.block) // itemsize)
    while True:
        for run in runs:
            run.fill(step, key)
        runs = [run for run in runs if len(run.keys)]
        ends = [run.keys[-1] for run in runs if run.next < run.length]
        if not ends:
            if runs:
                yield from _in_order([run.block for run in runs], key)
            return
        limit = min(ends)                          # records below it are all in memory
        yield from _in_order([run.take(limit, "left") for run in runs], key)
        for run in runs:                           # records equal to `limit`, run by run
            while True:
                block = run.take(limit, "right")
                if len(block):
                    yield block
                if len(run.keys) or run.next == run.length:
                    break
                run.fill(step, key)


class _SortedRun:
    """A sorted run of records, and the block of its records that is in memory."""

    def __init__(self, read: Read, length: int) -> None:
        self.read, self.length, self.next = read, length, 0
        self.block = self.keys = np.empty(0)

    def fill(self, step: int, key: Sequence[str] | None) -> None:
        """Read the next block of the run into memory, if all records of the present block have been taken."""
        if not len(self.keys) and self.next < self.length:
            stop = min(self.next + step, self.length)
            self.block = self.read(self.next, stop)
            self.keys, self.next = sort_keys(self.block, key), stop

    def take(self, limit: Any, side: Any) -> np.ndarray:
        """Remove records from the beginning of the block in memory and return them. If `side` is 'left', these are the
        records with keys below `limit`; if it is 'right', those with keys up to and including `limit`."""
        n = int(np.searchsorted(self.keys, limit, side))
        records, self.block, self.keys = self.block[:n], self.block[n:], self.keys[n:]
        return records


def _in_order(blocks: list[np.ndarray], key: Sequence[str] | None) -> Iterator[np.ndarray]:
    blocks = [b for b in blocks if len(b)]
    if len(blocks) > 1:
        joined = np.concatenate(blocks)
        yield joined[np.argsort(sort_keys(joined, key), kind="stable")]
    elif blocks:
        yield blocks[0]


# -- many runs, whole keys -------------------------------------------------------------------------------------------
def limit_runs(runs: Sequence[Run], key: Sequence[str] | None, dtype: np.dtype[Any], scratch: str,
               limits: MergeLimits = LIMITS) -> list[Run]:
    """Merge groups of up to `limits.fan_in` consecutive sorted runs into one run each, until at most `limits.fan_in`
    runs remain, and return these. The merged runs are files in the folder `scratch`; no file stays open. Records with
    equal keys keep their order. If the key has no fields, the runs are returned unmerged."""
    runs = [run for run in runs if run[1]]
    files: list[str] = []
    while len(runs) > limits.fan_in and (key is None or key):
        merged = []
        for first in range(0, len(runs), limits.fan_in):
            number, path = tempfile.mkstemp(prefix="merged.", dir=scratch)
            with open(number, "wb") as file:
                for block in merge(runs[first:first + limits.fan_in], key, dtype.itemsize, limits):
                    file.write(np.ascontiguousarray(block).view(np.uint8).data)
            merged.append(path)
        for path in files:
            os.unlink(path)
        files, runs = merged, [_of_file(path, dtype) for path in merged]
    return runs


def _of_file(path: str, dtype: np.dtype[Any]) -> Run:
    size = dtype.itemsize

    def read(start: int, stop: int) -> np.ndarray:
        with open(path, "rb") as file:
            return np.frombuffer(pread(file.fileno(), (stop - start) * size, start * size), dtype)
    return read, os.path.getsize(path) // size


def group_equal(blocks: Iterable[np.ndarray], fields: Sequence[str]) -> Iterator[np.ndarray]:
    """Regroup sorted blocks so that all records with equal values in `fields` are in one block. `fields` are the first
    fields of the key that the blocks are sorted by. Memory: one block, and the largest group of equal records."""
    group: list[np.ndarray] = []
    for block in blocks:
        if not len(block):
            continue
        keys = sort_keys(block, fields)
        cut = int(np.searchsorted(keys, keys[-1], "left"))       # start of the last group of equal records
        if group and (cut or keys[0] != sort_keys(group[-1][-1:], fields)[0]):
            group.append(block[:cut])
            yield np.concatenate(group)
            group = []
        elif cut:
            yield block[:cut]
        group.append(block[cut:])
    if group:
        yield np.concatenate(group)


def pread(fd: int, size: int, offset: int) -> bytes:
    data = b""
    while len(data) < size:                        # one call returns at most 2 GiB
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise EOFError(f"{size - len(data)} bytes are missing at {offset + len(data)} of a spilled run")
        data = data + more if data else more
    return data
