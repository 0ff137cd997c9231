"""The exchange: how barriers and `materialize` move records between tasks, through files instead of Ray's object store.

A map task writes one file of `buckets` segments of fixed-size records (a packed numpy dtype). A reduce task reads its
bucket of all files, by range. Inside a segment records are sorted by the key fields the writer was given, ties in the
order of writing; without key fields they stand as written. Neither side needs memory in proportion to the data: the
writer spills sorted runs to scratch and merges them, the reader merges blocks.

File: ``TMSEG001``, header length (u64), header (JSON: dtype, buckets, rows, key, covers), padding to 64 bytes, then
buckets + 1 record offsets (u64), records. All little-endian. `covers` lists the contents of the parts the records come
from (contracts §5); it is no part of the file's `content`, so a task downstream is stale only when its records changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from pipeline.store.fs import Store

MAGIC = b"TMSEG001"
ALIGN = 64
#: bytes of records (with their buckets) a writer holds, and a merge reads ahead
MEMORY = 64 << 20
#: least bytes of a block of one run in a merge
BLOCK = 64 << 10
#: bytes of a file's beginning read at once; holds the header and the index of 8,000 buckets
HEAD = 64 << 10

Read = Callable[[int, int], np.ndarray]


# -- keys ------------------------------------------------------------------------------------------------------------
def sort_keys(records: np.ndarray, key: Sequence[str] | None) -> np.ndarray:
    """One sortable value a record, in the order of the fields `key` (None: all, in their order): uint64 where the key
    is one unsigned integer, otherwise byte strings that compare like the fields do. Floats are in their total order
    (-0.0 before 0.0, NaN last)."""
    names = records.dtype.names
    fields = [records] if names is None else [records[name] for name in (names if key is None else key)]
    if len(fields) == 1 and fields[0].ndim == 1 and fields[0].dtype.kind == "u":
        return fields[0].astype(np.uint64, copy=False)
    columns = [_ordered_bytes(field) for field in fields]
    flat = np.ascontiguousarray(np.concatenate(columns, axis=1))
    return flat.view(f"S{flat.shape[1]}").ravel()


def _ordered_bytes(field: np.ndarray) -> np.ndarray:
    """uint8 [n, width]: big-endian bytes whose order is that of the values."""
    kind, size = field.dtype.kind, field.dtype.itemsize
    if kind in "SV":
        return np.ascontiguousarray(field).view(np.uint8).reshape(len(field), -1)
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
    return bits.astype(f">u{size}").view(np.uint8).reshape(len(field), -1)


def _check(dtype: np.dtype[Any]) -> np.dtype[Any]:
    dtype = np.dtype(dtype)
    packed = dtype.names is None or sum(dtype[name].itemsize for name in dtype.names) == dtype.itemsize
    if dtype.hasobject or not packed or dtype.itemsize == 0 or ">" in json.dumps(dtype.descr):
        raise TypeError(f"records of an exchange are packed, little-endian and of fixed size, not {dtype}")
    return dtype


# -- writing ---------------------------------------------------------------------------------------------------------
class SegmentWriter:
    """Writes one exchange file at `path`. After `close` (or as a context manager): `rows`, `content`, and `largest`,
    the bytes of the largest bucket.

    `key`: fields to sort by; () keeps the order of writing, None means the whole record.
    """

    def __init__(self, path: str, dtype: Any, buckets: int, *, key: Sequence[str] | None = (),
                 covers: Sequence[str] = (), memory: int = MEMORY) -> None:
        if buckets < 1:
            raise ValueError(f"{path}: an exchange file has at least one bucket, not {buckets}")
        self.path, self.dtype, self.buckets = path, _check(dtype), buckets
        self.key = self.dtype.names if key is None and self.dtype.names else key
        self.covers, self.memory = list(covers), memory
        self.rows, self.largest, self.content = 0, 0, ""
        # half for the records as they come, half for their sorted copy
        capacity = max(1, memory // (2 * self.dtype.itemsize + 24))
        self._records, self._ids, self._used = np.empty(capacity, self.dtype), np.empty(capacity, np.uint32), 0
        self._counts = np.zeros(buckets, np.int64)
        self._runs: list[np.ndarray] = []          # of each run: where its buckets begin, in records of the file
        self._spill: BinaryIO | None = None

    def write(self, buckets: Any, records: np.ndarray) -> None:
        """Add records [n] to buckets [n] (integers below `buckets`)."""
        ids = np.asarray(buckets)
        if ids.shape != records.shape or records.ndim != 1 or records.dtype != self.dtype:
            raise TypeError(f"{self.path}: {ids.shape} buckets for records {records.shape} of {records.dtype}; as many "
                            f"of {self.dtype} are expected")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.buckets):
            raise ValueError(f"{self.path}: buckets {ids.min()} to {ids.max()}, the file has 0 to {self.buckets - 1}")
        start = 0
        while start < len(ids):
            if self._used == len(self._ids):
                self._flush()
            n = min(len(ids) - start, len(self._ids) - self._used)
            self._records[self._used:self._used + n] = records[start:start + n]
            self._ids[self._used:self._used + n] = ids[start:start + n]
            self._used += n
            start += n
        self.rows += len(ids)

    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """(records sorted by bucket, then key; records of each bucket); empties the buffer."""
        ids, records = self._ids[:self._used], self._records[:self._used]
        order = np.argsort(ids if self.buckets > 1 << 16 else ids.astype(np.uint16), kind="stable")   # u16: radix sort
        if self.key is None or self.key:
            first = np.argsort(sort_keys(records, self.key), kind="stable")
            order = first[np.argsort(ids[first].astype(np.uint16) if self.buckets <= 1 << 16 else ids[first],
                                     kind="stable")]
        counts = np.bincount(ids, minlength=self.buckets)
        self._used = 0
        self._counts += counts
        return records[order], counts

    def _flush(self) -> None:
        """Write the buffer to scratch as a sorted run."""
        if self._spill is None:
            self._spill = open(self.path + ".runs", "w+b")  # noqa: SIM115  (closed by `close`)
        records, counts = self._sorted()
        first = int(self._runs[-1][-1]) if self._runs else 0
        self._runs.append(first + np.concatenate([[0], np.cumsum(counts)]))
        self._spill.write(records.view(np.uint8).data)

    def close(self) -> None:
        """Merge what was spilled, and finish the file."""
        if self.content:
            return
        last, counts = self._sorted()
        starts = np.concatenate([[0], np.cumsum(counts)])
        header = {"dtype": _descr(self.dtype), "buckets": self.buckets, "rows": self.rows,
                  "key": None if self.key is None else list(self.key)}
        index = np.concatenate([[0], np.cumsum(self._counts)]).astype("<u8")
        said = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        said.update(index.tobytes())
        head = json.dumps({**header, "covers": self.covers}, sort_keys=True).encode()
        head += b" " * (-(len(MAGIC) + 8 + len(head)) % ALIGN)
        with open(self.path, "wb") as f:
            f.write(MAGIC + len(head).to_bytes(8, "little") + head + index.tobytes())
            if self._spill is None:
                said.update(last.view(np.uint8).data)
                f.write(last.view(np.uint8).data)
            else:
                self._records = self._ids = np.empty(0, np.uint8)       # make room for the merge
                self._spill.flush()
                for bucket in range(self.buckets):
                    sources = [self._run(run, bucket) for run in self._runs]
                    sources.append(_of_array(last[starts[bucket]:starts[bucket + 1]]))
                    for block in merge(sources, self.key, self.dtype.itemsize, self.memory):
                        said.update(block.view(np.uint8).data)
                        f.write(block.view(np.uint8).data)
        self._discard()
        self.largest = int(self._counts.max()) * self.dtype.itemsize
        self.content = said.hexdigest()

    def _run(self, run: np.ndarray, bucket: int) -> tuple[Read, int]:
        first, stop, size = int(run[bucket]), int(run[bucket + 1]), self.dtype.itemsize
        fd = self._spill.fileno()  # type: ignore[union-attr]

        def read(a: int, b: int) -> np.ndarray:
            return np.frombuffer(_pread(fd, (b - a) * size, (first + a) * size), self.dtype)
        return read, stop - first

    def _discard(self) -> None:
        if self._spill is not None:
            self._spill.close()
            os.unlink(self.path + ".runs")
            self._spill = None

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()


def _pread(fd: int, size: int, offset: int) -> bytes:
    data = b""
    while len(data) < size:                        # one call returns at most 2 GiB
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise EOFError(f"{size - len(data)} bytes are missing at {offset + len(data)} of a spilled run")
        data = data + more if data else more
    return data


def _of_array(records: np.ndarray) -> tuple[Read, int]:
    return (lambda a, b: records[a:b]), len(records)


def _descr(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else [list(field) for field in dtype.descr]


# -- merging ---------------------------------------------------------------------------------------------------------
def merge(sources: Sequence[tuple[Read, int]], key: Sequence[str] | None, itemsize: int,
          memory: int = MEMORY) -> Iterator[np.ndarray]:
    """Merge sorted runs, given as (read(start, stop), length), into sorted blocks; ties in the order of the runs.

    Holds about `memory` bytes, whatever the length of the runs and however many records share a key.
    """
    runs = [_Run(read, n) for read, n in sources if n]
    if (key is not None and not key) or len(runs) == 1:
        step = max(1, memory // 2 // itemsize)
        for run in runs:
            for a in range(0, run.length, step):
                yield run.read(a, min(a + step, run.length))
        return
    if sum(run.length for run in runs) * itemsize <= memory // 4:
        yield from _in_order([run.read(0, run.length) for run in runs], key)
        return
    # a block is held as records and keys, and once more while it is sorted
    step = max(1, max(memory // 4 // len(runs), BLOCK) // itemsize)
    while True:
        for run in runs:
            run.fill(step, key)
        runs = [run for run in runs if len(run.keys)]
        ends = [run.keys[-1] for run in runs if run.next < run.length]
        if not ends:
            if runs:
                yield from _in_order([run.block for run in runs], key)
            return
        limit = min(ends)                          # below it every run's records are in memory
        yield from _in_order([run.take(limit, "left") for run in runs], key)
        for run in runs:                           # those equal to it: all of the first run, then all of the second …
            while True:
                found = run.take(limit, "right")
                if len(found):
                    yield found
                if len(run.keys) or run.next == run.length:
                    break
                run.fill(step, key)


class _Run:
    """A sorted run and the block of it that is in memory."""

    def __init__(self, read: Read, length: int) -> None:
        self.read, self.length, self.next = read, length, 0
        self.block = self.keys = np.empty(0)

    def fill(self, step: int, key: Sequence[str] | None) -> None:
        """Read the next block when there is none left."""
        if not len(self.keys) and self.next < self.length:
            stop = min(self.next + step, self.length)
            self.block = self.read(self.next, stop)
            self.keys, self.next = sort_keys(self.block, key), stop

    def take(self, limit: Any, side: Any) -> np.ndarray:
        """Records below `limit` ('left') or up to it ('right'), which leave the block."""
        n = int(np.searchsorted(self.keys, limit, side))
        found, self.block, self.keys = self.block[:n], self.block[n:], self.keys[n:]
        return found


def _in_order(blocks: list[np.ndarray], key: Sequence[str] | None) -> Iterator[np.ndarray]:
    blocks = [b for b in blocks if len(b)]
    if len(blocks) > 1:
        every = np.concatenate(blocks)
        yield every[np.argsort(sort_keys(every, key), kind="stable")]
    elif blocks:
        yield blocks[0]


# -- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SegmentFile:
    """The beginning of an exchange file: what it holds and where."""

    store: Store
    path: str
    dtype: np.dtype[Any]
    buckets: int
    rows: int
    key: tuple[str, ...] | None
    covers: tuple[str, ...]
    start: int                     # of the records, bytes
    index: np.ndarray              # buckets + 1 record offsets

    @classmethod
    def open(cls, store: Store, ref: Mapping[str, Any]) -> SegmentFile:
        """Raises ValueError, naming the file, for anything that is not a whole exchange file."""
        path, size = ref["$ref"], ref["bytes"]
        data = store.read_range(path, 0, min(HEAD, size))
        if data[:8] != MAGIC:
            raise ValueError(f"{store.at(path)} is not an exchange file (it begins with {data[:8]!r})")
        after = 16 + int.from_bytes(data[8:16], "little")
        if after > len(data):
            data += store.read_range(path, len(data), min(after, size))
        header = json.loads(data[16:after])
        start = after + 8 * (header["buckets"] + 1)
        if start > len(data):
            data += store.read_range(path, len(data), min(start, size))
        descr = header["dtype"]
        dtype = np.dtype(descr if isinstance(descr, str) else [(f[0], f[1], *map(tuple, f[2:])) for f in descr])
        if start + header["rows"] * dtype.itemsize != size or len(data) < start:
            raise ValueError(f"{store.at(path)} is cut short: {size} bytes, its header says "
                             f"{start + header['rows'] * dtype.itemsize}; delete it and run again")
        key = None if header["key"] is None else tuple(header["key"])
        index = np.frombuffer(data, "<u8", header["buckets"] + 1, after).astype(np.int64)
        return cls(store, path, dtype, header["buckets"], header["rows"], key, tuple(header["covers"]), start, index)

    def bounds(self, bucket: int) -> tuple[int, int]:
        if not 0 <= bucket < self.buckets:
            raise IndexError(f"{self.store.at(self.path)} has buckets 0 to {self.buckets - 1}, not {bucket}")
        return int(self.index[bucket]), int(self.index[bucket + 1])

    def read(self, first: int, stop: int) -> np.ndarray:
        """Records [first, stop) of the file, read-only."""
        size = self.dtype.itemsize
        data = self.store.read_range(self.path, self.start + first * size, self.start + stop * size)
        return np.frombuffer(data, self.dtype)

    def source(self, bucket: int) -> tuple[Read, int]:
        first, stop = self.bounds(bucket)
        return (lambda a, b: self.read(first + a, first + b)), stop - first


def read_segment(store: Store, ref: Mapping[str, Any], bucket: int) -> np.ndarray:
    """The records of one bucket of the file `ref` ({"$ref", "bytes"}), read-only: mapped into memory where the store is
    local, fetched by one more range request where it is not."""
    file = SegmentFile.open(store, ref)
    first, stop = file.bounds(bucket)
    if store.local is None or first == stop:
        return file.read(first, stop)
    mapped = np.memmap(store.at(file.path), file.dtype, "r", file.start + first * file.dtype.itemsize, (stop - first,))
    return mapped.view(np.ndarray)


def merge_segments(store: Store, refs: Sequence[Mapping[str, Any]], bucket: int,
                   memory: int = MEMORY) -> Iterator[np.ndarray]:
    """The records of one bucket of all files in the order of the key they were sorted by, ties in the order of `refs`,
    in blocks. Files without a key follow each other as they stand. Memory: about `memory` bytes and the indexes."""
    files = [SegmentFile.open(store, ref) for ref in refs]
    for file in files[1:]:
        if (file.dtype, file.key) != (files[0].dtype, files[0].key):
            raise ValueError(f"{store.at(file.path)} holds {file.dtype} sorted by {file.key}, but "
                             f"{store.at(files[0].path)} {files[0].dtype} by {files[0].key}; they cannot be merged")
    if files:
        yield from merge([file.source(bucket) for file in files], files[0].key, files[0].dtype.itemsize, memory)
