"""Writes exchange files, by which tasks pass records to each other. `pipeline.engine.shuffle.exchange` describes the
files and reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import xxhash

from pipeline.engine.shuffle.exchange import MAGIC, PAGE, SUM, content_hash, index_bytes, index_pages
from pipeline.engine.shuffle.merge import LIMITS, MergeLimits, Read, merge, pread, sort_keys

#: the index begins at a multiple of so many bytes
ALIGN = 64


def _check(dtype: np.dtype[Any]) -> np.dtype[Any]:
    dtype = np.dtype(dtype)
    packed = dtype.names is None or sum(dtype[name].itemsize for name in dtype.names) == dtype.itemsize
    if dtype.hasobject or not packed or dtype.itemsize == 0 or ">" in json.dumps(dtype.descr):
        raise TypeError(f"records of an exchange are packed, little-endian and of fixed size, not {dtype}")
    return dtype


class SegmentWriter:
    """Writes one exchange file (records in `buckets` buckets, which other tasks read bucket by bucket) at `path`. The
    attribute `rows` is the number of records written so far. `close`, which a `with` block calls unless it raised, sets
    `content` (the content hash) and `largest` (the bytes of the largest bucket).

    `key`: fields to sort a bucket by; () keeps the order of writing, None sorts by all fields. `covers`: content hashes
    of the dataset parts that the records come from. `memory`: bytes that records in memory and their sorted copy may
    take together; when they are used up, the records are written to a scratch file.
    """

    def __init__(self, path: str, dtype: Any, buckets: int, *, key: Sequence[str] | None = (),
                 covers: Sequence[str] = (), memory: int = LIMITS.memory) -> None:
        if buckets < 1:
            raise ValueError(f"{path}: an exchange file has at least one bucket, not {buckets}")
        self.path, self.dtype, self.buckets = path, _check(dtype), buckets
        self.key = self.dtype.names if key is None and self.dtype.names else key
        self.covers, self.memory = list(covers), memory
        self.rows, self.largest, self.content = 0, 0, ""
        # half for incoming records, half for their sorted copy
        capacity = max(1, memory // (2 * self.dtype.itemsize + 24))
        self._records, self._ids, self._used = np.empty(capacity, self.dtype), np.empty(capacity, np.uint32), 0
        self._counts = np.zeros(buckets, np.int64)
        self._runs: list[np.ndarray] = []          # offsets of the buckets of each run, in records of the spill file
        self._spill: BinaryIO | None = None

    def write(self, buckets: Any, records: np.ndarray) -> None:
        """Add n records to the file. `buckets` holds n bucket numbers, one for each record, all below the file's number
        of buckets."""
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
        """Sorts the records in the buffer by bucket (the part of the file that they go to) and then by key, and empties
        the buffer. Returns (sorted records, number of records in each bucket)."""
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
        """Write the buffered records, sorted by bucket and key, to the scratch file as one more run, and empty the
        buffer. `close` merges the runs."""
        if self._spill is None:
            self._spill = open(self.path + ".runs", "w+b")  # noqa: SIM115  (closed by `close`)
        records, counts = self._sorted()
        first = int(self._runs[-1][-1]) if self._runs else 0
        self._runs.append(first + np.concatenate([[0], np.cumsum(counts)]))
        self._spill.write(records.view(np.uint8).data)

    def close(self) -> None:
        """Write the exchange file (records that tasks pass to each other, in buckets). The sorted runs in the scratch
        file are merged with the records still in memory, bucket by bucket, and the header and the index are put before
        them. Does nothing if the file is written already."""
        if self.content:
            return
        last, counts = self._sorted()
        starts = np.concatenate([[0], np.cumsum(counts)])
        header = {"dtype": _descr(self.dtype), "buckets": self.buckets, "rows": self.rows,
                  "key": None if self.key is None else list(self.key),
                  "index": "0" * 2 * SUM * index_pages(self.buckets)}
        offsets = np.concatenate([[0], np.cumsum(self._counts)]).astype("<u8")
        sums: list[bytes] = []
        if self._spill is not None:
            self._records = self._ids = np.empty(0, np.uint8)           # make room for the merge
            self._spill.flush()
        with open(self.path, "wb") as f:
            f.seek(len(_head(header, self.covers)) + index_bytes(self.buckets))
            for bucket in range(self.buckets):
                digest = xxhash.xxh3_128()
                for block in self._bucket(bucket, last[starts[bucket]:starts[bucket + 1]]):
                    data = np.ascontiguousarray(block).view(np.uint8).data
                    digest.update(data)
                    f.write(data)
                sums.append(digest.digest())
            pages = [offsets[begin:begin + PAGE + 1].tobytes() + b"".join(sums[begin:begin + PAGE])
                     for begin in range(0, self.buckets, PAGE)]
            header["index"] = "".join(xxhash.xxh3_128_hexdigest(page) for page in pages)
            f.seek(0)
            f.write(_head(header, self.covers) + b"".join(pages))
        self._discard()
        self.largest = int(self._counts.max()) * self.dtype.itemsize
        self.content = content_hash(header)

    def _bucket(self, bucket: int, unspilled: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the records of a bucket in blocks, in the order of the key. The records `unspilled`, which are still
        in memory, are merged with the bucket's records in the scratch file."""
        if not self._runs:
            yield unspilled
            return
        sources = [self._run(run, bucket) for run in self._runs]
        yield from merge([*sources, _of_array(unspilled)], self.key, self.dtype.itemsize, MergeLimits(self.memory))

    def _run(self, run: np.ndarray, bucket: int) -> tuple[Read, int]:
        first, stop, size = int(run[bucket]), int(run[bucket + 1]), self.dtype.itemsize
        fd = self._spill.fileno()  # type: ignore[union-attr]

        def read(begin: int, end: int) -> np.ndarray:
            return np.frombuffer(pread(fd, (end - begin) * size, (first + begin) * size), self.dtype)
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


def _head(header: Mapping[str, Any], covers: Sequence[str]) -> bytes:
    head = json.dumps({**header, "covers": list(covers)}, sort_keys=True).encode()
    head += b" " * (-(len(MAGIC) + 8 + len(head)) % ALIGN)
    return MAGIC + len(head).to_bytes(8, "little") + head


def _of_array(records: np.ndarray) -> tuple[Read, int]:
    return (lambda a, b: records[a:b]), len(records)


def _descr(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else [list(field) for field in dtype.descr]
