"""The exchange: moves records between tasks through files in the store, and not through Ray's object store. Barriers
(steps that need all documents, such as deduplication), the tasks that draw the texts for a tokenizer, and `materialize`
use it.

A map task writes one file of fixed-size records (a packed numpy dtype). The file has `buckets` segments, one for each
bucket. A reduce task reads one bucket of every file, by range. Inside a segment, records are sorted by the key fields
that the writer chose. Records with equal keys stay in the order of writing, and so do all records if there are no key
fields. Neither task needs memory in proportion to the data: the writer spills sorted runs to scratch files and merges
them, and the reader merges blocks (`merge_segments`). Only `read_segment` returns a whole bucket of one file.

A file consists of these parts, whose numbers are little-endian:

1. ``TMSEG002``, the length of the header (u64), and the header (JSON: dtype, buckets, rows, key, index, covers).
   Spaces pad the header, so that all three together take a multiple of 64 bytes; the length includes them. `index` in
   the header has an xxh3-128 checksum for each page of the index.
2. The index, divided into pages, each of which describes PAGE buckets (the last page fewer). A page holds the offsets
   at which its buckets begin, the offset at which the last one ends (each u64, counted in records from the first record
   of the file), and an xxh3-128 checksum of each bucket's records.
3. The records.

The file's content hash is the sha256 of the header without `covers`. A reader checks the header against the content
hash in its reference to the file, the page of a bucket against the header, and the bucket against the page. It thus
notices damage in every range that it uses, and need not read the whole file.

`covers` lists the content hashes of the dataset parts that the records come from. These parts may change while the
records stay the same. `covers` therefore does not enter the content hash: tasks that read the file run again only if
its records changed.
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
import xxhash

from pipeline.engine.shuffle.merge import (
    LIMITS,
    MergeLimits,
    Read,
    Run,
    group_equal,
    limit_runs,
    merge,
    pread,
    sort_keys,
)
from pipeline.store.errors import GONE, DamagedFile
from pipeline.store.fs import Store

MAGIC = b"TMSEG002"
#: bytes of a checksum, and buckets per page of the index
SUM, PAGE = 16, 1024
ALIGN = 64
#: bytes read at once from the beginning of a file; they hold the header and the index of 2,000 buckets
HEAD = 64 << 10

def _check(dtype: np.dtype[Any]) -> np.dtype[Any]:
    dtype = np.dtype(dtype)
    packed = dtype.names is None or sum(dtype[name].itemsize for name in dtype.names) == dtype.itemsize
    if dtype.hasobject or not packed or dtype.itemsize == 0 or ">" in json.dumps(dtype.descr):
        raise TypeError(f"records of an exchange are packed, little-endian and of fixed size, not {dtype}")
    return dtype


# -- writing ---------------------------------------------------------------------------------------------------------
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
                  "key": None if self.key is None else list(self.key), "index": "0" * 2 * SUM * _pages(self.buckets)}
        offsets = np.concatenate([[0], np.cumsum(self._counts)]).astype("<u8")
        sums: list[bytes] = []
        if self._spill is not None:
            self._records = self._ids = np.empty(0, np.uint8)           # make room for the merge
            self._spill.flush()
        with open(self.path, "wb") as f:
            f.seek(len(_head(header, self.covers)) + _index_bytes(self.buckets))
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
        self.content = _content(header)

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


def _content(header: Mapping[str, Any]) -> str:
    """Returns the content hash of an exchange file (records that tasks pass to each other): the sha256 of its header
    without `covers`."""
    content = json.dumps({name: value for name, value in header.items() if name != "covers"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _pages(buckets: int) -> int:
    return -(-buckets // PAGE)


def _index_bytes(buckets: int) -> int:
    return 8 * (buckets + _pages(buckets)) + SUM * buckets


def _of_array(records: np.ndarray) -> tuple[Read, int]:
    return (lambda a, b: records[a:b]), len(records)


def _descr(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else [list(field) for field in dtype.descr]


# -- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SegmentFile:
    """The beginning of an exchange file (records that tasks pass to each other, in buckets), after it was read and
    checked: a description of the records, and the offsets of the file's sections."""

    store: Store
    path: str
    dtype: np.dtype[Any]
    buckets: int
    rows: int
    key: tuple[str, ...] | None
    covers: tuple[str, ...]
    after: int                     # offset of the index, bytes
    index: str                     # a checksum per page of the index, hexadecimal
    head: bytes                    # the beginning of the file, with the index if that is small

    @classmethod
    def open(cls, store: Store, ref: Mapping[str, Any]) -> SegmentFile:
        """Read the beginning of an exchange file (records that tasks pass to each other, in buckets). `ref` refers to
        it: {"$ref": its path, "bytes": its size, "content": the hash of its header}. Raises DamagedFile when the file
        is missing or has another size, or when its header has another hash. On object storage, the size is not checked
        here; a file that was cut short is noticed when its records are read."""
        path, size = ref["$ref"], ref["bytes"]
        if store.local is not None and store.size(path) != size:       # on object storage that would cost a request
            raise DamagedFile(path, "is gone or has another size than its record says")
        data = _range(store, path, 0, min(HEAD, size))
        after = 16 + int.from_bytes(data[8:16], "little")
        if data[:8] != MAGIC or after > size:
            raise DamagedFile(path, f"does not begin as an exchange file does ({data[:8]!r})")
        if after > len(data):
            data += _range(store, path, len(data), min(after + HEAD, size))
        try:
            header = json.loads(data[16:after])
        except ValueError as e:
            raise DamagedFile(path, "has a damaged header") from e
        if not isinstance(header, dict) or _content(header) != ref["content"]:
            raise DamagedFile(path, "has a damaged header")
        descr, key = header["dtype"], header["key"]
        dtype = np.dtype(descr if isinstance(descr, str) else [(f[0], f[1], *map(tuple, f[2:])) for f in descr])
        if dtype.hasobject:                            # the bytes of the file would be taken for addresses of memory
            raise DamagedFile(path, "has records of Python objects")
        file = cls(store, path, dtype, header["buckets"], header["rows"], None if key is None else tuple(key),
                   tuple(header["covers"]), after, header["index"], data)
        if file.start + file.rows * dtype.itemsize != size:
            raise DamagedFile(path, "is cut short")
        return file

    @property
    def start(self) -> int:
        """The offset in bytes at which the records begin in the exchange file."""
        return self.after + _index_bytes(self.buckets)

    def bounds(self, bucket: int) -> tuple[int, int, bytes]:
        """Returns (first, stop, checksum) of a bucket of the exchange file: the bucket's records are the records
        [first, stop) of the file. Of a large index, only the page that describes the bucket is read. Raises IndexError
        if the file has no such bucket, and DamagedFile if the page is damaged."""
        if not 0 <= bucket < self.buckets:
            raise IndexError(f"{self.store.at(self.path)} has buckets 0 to {self.buckets - 1}, not {bucket}")
        number, place = divmod(bucket, PAGE)
        page_buckets = min(PAGE, self.buckets - number * PAGE)
        offset, size = self.after + number * (8 * (PAGE + 1) + SUM * PAGE), 8 * (page_buckets + 1) + SUM * page_buckets
        end = offset + size
        page = self.head[offset:end] if end <= len(self.head) else _range(self.store, self.path, offset, end)
        if xxhash.xxh3_128_hexdigest(page) != self.index[2 * SUM * number:2 * SUM * (number + 1)]:
            raise DamagedFile(self.path, f"has a damaged index at bucket {bucket}")
        first, stop = np.frombuffer(page, "<u8", 2, 8 * place).tolist()
        return first, stop, page[8 * (page_buckets + 1) + SUM * place:][:SUM]


def _range(store: Store, path: str, start: int, stop: int) -> bytes:
    try:
        return store.read_range(path, start, stop)
    except FileNotFoundError as e:
        raise DamagedFile(path, GONE) from e


def _read(store: Store, path: str, dtype: np.dtype[Any], start: int, first: int, stop: int) -> np.ndarray:
    """Returns the records [first, stop) of an exchange file (records that tasks pass to each other) whose records begin
    at byte `start`. Raises DamagedFile when the file ends early, because documents would be lost with the missing
    records."""
    data = _range(store, path, start + first * dtype.itemsize, start + stop * dtype.itemsize)
    if len(data) != (stop - first) * dtype.itemsize:
        raise DamagedFile(path, "is cut short")
    return np.frombuffer(data, dtype)


def read_segment(store: Store, ref: Mapping[str, Any], bucket: int) -> np.ndarray:
    """Returns the records of one bucket of an exchange file, read-only. Tasks pass records to each other in such files,
    which are divided into buckets. `ref` names the file ({"$ref", "bytes", "content"}). In a local store, the records
    are mapped into memory; from a remote store, they are fetched by one range request. Raises DamagedFile when the file
    is missing, or the header, the index or the records are damaged."""
    file = SegmentFile.open(store, ref)
    first, stop, expected = file.bounds(bucket)
    if store.local is None or first == stop:
        records = _read(store, file.path, file.dtype, file.start, first, stop)
    else:
        records = np.memmap(store.at(file.path), file.dtype, "r", file.start + first * file.dtype.itemsize,
                            (stop - first,)).view(np.ndarray)
    if xxhash.xxh3_128_digest(records.view(np.uint8).data) != expected:
        raise DamagedFile(file.path, f"is damaged in bucket {bucket}")
    return records


def merge_segments(store: Store, refs: Sequence[Mapping[str, Any]], bucket: int, limits: MergeLimits = LIMITS, *,
                   whole: Sequence[str] = (), numbered: bool = False,
                   scratch: str | None = None) -> Iterator[np.ndarray]:
    """Yields the records of one bucket of all exchange files `refs`, in blocks, merged by the key that the files are
    sorted by. Tasks pass records to each other in exchange files, which are divided into buckets. Records with equal
    keys come in the order of `refs`. If the files have no key, the records of one file follow those of the file before
    it.

    `whole`: first fields of the key; all records with equal values in them come in one block. `numbered`: adds the
    field `source` (u4), the position in `refs` of the file that the record comes from. `scratch`: folder for temporary
    files, needed for more than `limits.fan_in` files (default: the system's). Memory: about `limits.memory` bytes and
    300 bytes a file, however large the bucket is, and with `whole` the largest block of records with equal values. One
    file is open at a time. Raises ValueError if the files differ in dtype or key, and DamagedFile if one is damaged.
    """
    runs: list[Run] = []
    first_file: SegmentFile | None = None
    # many heads of remote files are fetched at a time
    for number, file in enumerate(store.map(lambda ref: SegmentFile.open(store, ref), refs)):
        if first_file is None:
            first_file = file
        elif (file.dtype, file.key) != (first_file.dtype, first_file.key):
            raise ValueError(f"{store.at(file.path)} holds {file.dtype} sorted by {file.key}, but "
                             f"{store.at(first_file.path)} {first_file.dtype} by {first_file.key}; they cannot be "
                             f"merged")
        runs.append(_run_of(file, bucket, number if numbered else None))
    if first_file is None:
        return
    dtype = _numbered(first_file.dtype) if numbered else first_file.dtype
    # the file number does not enter the order: ties already are in the order of the files
    key = first_file.dtype.names if numbered and first_file.key is None else first_file.key
    with tempfile.TemporaryDirectory(prefix="merge-", dir=scratch) as folder:
        blocks = merge(limit_runs(runs, key, dtype, folder, limits), key, dtype.itemsize, limits)
        yield from group_equal(blocks, whole) if whole else blocks


def _numbered(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype([*dtype.descr, ("source", "<u4")])


def _run_of(file: SegmentFile, bucket: int, number: int | None) -> Run:
    """Returns one bucket of an exchange file (records that tasks pass to each other) as a sorted run: (function that
    reads records, number of records). Memory holds only what is needed to read the records later. If `number` is not
    None, the function adds it to each record as the field `source`.

    A run must be read from beginning to end, because its checksum is compared after its last record. If the records are
    damaged, the task that used them gets an error before it returns, and so commits nothing.
    """
    first, stop, expected = file.bounds(bucket)
    store, path, dtype, start = file.store, file.path, file.dtype, file.start
    digest, position = xxhash.xxh3_128(), 0

    def read(begin: int, end: int) -> np.ndarray:
        nonlocal position
        records = _read(store, path, dtype, start, first + begin, first + end)
        if begin != position:
            raise RuntimeError(f"{path}: records {begin} to {end} of bucket {bucket} are read out of turn, after "
                               f"{position}")
        digest.update(records.view(np.uint8).data)
        position = end
        if end == stop - first and digest.digest() != expected:
            raise DamagedFile(path, f"is damaged in bucket {bucket}")
        if number is None:
            return records
        out = np.empty(len(records), _numbered(dtype))
        for name in dtype.names or ():
            out[name] = records[name]
        out["source"] = number
        return out
    return read, stop - first
