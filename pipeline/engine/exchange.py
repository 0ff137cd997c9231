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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from pipeline.engine.merge import MEMORY, Read, Run, in_few, in_whole, merge, pread, sort_keys
from pipeline.store.fs import Store

MAGIC = b"TMSEG001"
ALIGN = 64
#: bytes of a file's beginning read at once; holds the header and the index of 8,000 buckets
HEAD = 64 << 10

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
            return np.frombuffer(pread(fd, (b - a) * size, (first + a) * size), self.dtype)
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


def _of_array(records: np.ndarray) -> tuple[Read, int]:
    return (lambda a, b: records[a:b]), len(records)


def _descr(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else [list(field) for field in dtype.descr]


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
    after: int                     # where the index begins, bytes
    head: bytes                    # the beginning of the file, with the index if that is small

    @classmethod
    def open(cls, store: Store, ref: Mapping[str, Any]) -> SegmentFile:
        """Raises ValueError, naming the file, for anything that is not a whole exchange file."""
        path, size = ref["$ref"], ref["bytes"]
        data = store.read_range(path, 0, min(HEAD, size))
        if data[:8] != MAGIC:
            raise ValueError(f"{store.at(path)} is not an exchange file (it begins with {data[:8]!r})")
        after = 16 + int.from_bytes(data[8:16], "little")
        if after > len(data):
            data += store.read_range(path, len(data), min(after + HEAD, size))
        header = json.loads(data[16:after])
        descr = header["dtype"]
        dtype = np.dtype(descr if isinstance(descr, str) else [(f[0], f[1], *map(tuple, f[2:])) for f in descr])
        end = after + 8 * (header["buckets"] + 1) + header["rows"] * dtype.itemsize
        if end != size or len(data) < min(after, size):
            raise ValueError(f"{store.at(path)} is cut short: {size} bytes, its header says {end}; delete it and run "
                             f"again")
        key = None if header["key"] is None else tuple(header["key"])
        return cls(store, path, dtype, header["buckets"], header["rows"], key, tuple(header["covers"]), after, data)

    @property
    def start(self) -> int:
        """Where the records begin, bytes."""
        return self.after + 8 * (self.buckets + 1)

    def bounds(self, bucket: int) -> tuple[int, int]:
        """Records [first, stop) of the file are those of the bucket. Of a large index only this entry is read."""
        if not 0 <= bucket < self.buckets:
            raise IndexError(f"{self.store.at(self.path)} has buckets 0 to {self.buckets - 1}, not {bucket}")
        at = self.after + 8 * bucket
        entry = self.head[at:at + 16] if at + 16 <= len(self.head) else self.store.read_range(self.path, at, at + 16)
        first, stop = np.frombuffer(entry, "<u8").tolist()
        if not first <= stop <= self.rows:
            raise ValueError(f"{self.store.at(self.path)}: its index is damaged; delete it and run again")
        return first, stop

    def read(self, first: int, stop: int) -> np.ndarray:
        """Records [first, stop) of the file, read-only."""
        return _read(self.store, self.path, self.dtype, self.start, first, stop)


def _read(store: Store, path: str, dtype: np.dtype[Any], start: int, first: int, stop: int) -> np.ndarray:
    """Raises ValueError, naming the file, where it ends before `stop`: fewer records would be documents lost."""
    data = store.read_range(path, start + first * dtype.itemsize, start + stop * dtype.itemsize)
    if len(data) != (stop - first) * dtype.itemsize:
        raise ValueError(f"{store.at(path)} is cut short: records {first} to {stop} have {len(data)} bytes instead of "
                         f"{(stop - first) * dtype.itemsize}; delete it and run again")
    return np.frombuffer(data, dtype)


def read_segment(store: Store, ref: Mapping[str, Any], bucket: int) -> np.ndarray:
    """The records of one bucket of the file `ref` ({"$ref", "bytes"}), read-only: mapped into memory where the store is
    local, fetched by one more range request where it is not."""
    file = SegmentFile.open(store, ref)
    first, stop = file.bounds(bucket)
    if store.local is None or first == stop:
        return file.read(first, stop)
    mapped = np.memmap(store.at(file.path), file.dtype, "r", file.start + first * file.dtype.itemsize, (stop - first,))
    return mapped.view(np.ndarray)


def merge_segments(store: Store, refs: Sequence[Mapping[str, Any]], bucket: int, memory: int = MEMORY, *,
                   whole: Sequence[str] = (), numbered: bool = False,
                   scratch: str | None = None) -> Iterator[np.ndarray]:
    """The records of one bucket of all files in the order of the key they were sorted by, ties in the order of `refs`,
    in blocks. Files without a key follow each other as they stand.

    `whole`: the first fields of the key; records in which they are equal come in one block. `numbered`: records get one
    field more, `source` (u4), the number of their file. `scratch`: folder for what does not fit, where there are more
    than `merge.FAN_IN` files (default: the system's). Memory: about `memory` bytes and 300 bytes a file, however large
    the bucket is; one file is open at a time.
    """
    runs: list[Run] = []
    like: SegmentFile | None = None
    # the heads of remote files are fetched many at a time
    for number, file in enumerate(store.map(lambda ref: SegmentFile.open(store, ref), refs)):
        if like is None:
            like = file
        elif (file.dtype, file.key) != (like.dtype, like.key):
            raise ValueError(f"{store.at(file.path)} holds {file.dtype} sorted by {file.key}, but "
                             f"{store.at(like.path)} {like.dtype} by {like.key}; they cannot be merged")
        runs.append(_run_of(file, bucket, number if numbered else None))
    if like is None:
        return
    dtype = _numbered(like.dtype) if numbered else like.dtype
    # the number is no part of the order: ties are in the order of the files anyway
    key = like.dtype.names if numbered and like.key is None else like.key
    with tempfile.TemporaryDirectory(prefix="merge-", dir=scratch) as folder:
        blocks = merge(in_few(runs, key, dtype, folder, memory), key, dtype.itemsize, memory)
        yield from in_whole(blocks, whole) if whole else blocks


def _numbered(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype([*dtype.descr, ("source", "<u4")])


def _run_of(file: SegmentFile, bucket: int, number: int | None) -> Run:
    """A bucket of a file as a run: of the file only what is needed to read it is kept."""
    first, stop = file.bounds(bucket)
    store, path, dtype, start = file.store, file.path, file.dtype, file.start

    def read(a: int, b: int) -> np.ndarray:
        records = _read(store, path, dtype, start, first + a, first + b)
        if number is None:
            return records
        out = np.empty(len(records), _numbered(dtype))
        for name in dtype.names or ():
            out[name] = records[name]
        out["source"] = number
        return out
    return read, stop - first
