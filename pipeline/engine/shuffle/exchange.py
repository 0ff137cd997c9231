"""The exchange: moves records between tasks through files in the store, and not through Ray's object store. Barriers
(steps that need all documents, such as deduplication), the tasks that draw the texts for a tokenizer, and `materialize`
use it.

A map task writes one file of fixed-size records (a packed numpy dtype). The file has `buckets` segments, one for each
bucket. A reduce task reads one bucket of every file, by range. Inside a segment, records are sorted by the key fields
that the writer chose. Records with equal keys stay in the order of writing, and so do all records if there are no key
fields. Neither task needs memory in proportion to the data: the writer (`segment_writer.py`) spills sorted runs to
scratch files and merges them, and the reader merges blocks (`merge_segments`). Only `read_segment` returns a whole
bucket of one file.

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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from pipeline.engine.shuffle.merge import LIMITS, MergeLimits, Run, group_equal, limit_runs, merge
from pipeline.store.errors import GONE, DamagedFile
from pipeline.store.fs import Store

MAGIC = b"TMSEG002"
#: bytes of a checksum, and buckets per page of the index
SUM, PAGE = 16, 1024
#: bytes read at once from the beginning of a file; they hold the header and the index of 2,000 buckets
HEAD = 64 << 10


def content_hash(header: Mapping[str, Any]) -> str:
    """Returns the content hash of an exchange file (records that tasks pass to each other): the sha256 of its header
    without `covers`."""
    content = json.dumps({name: value for name, value in header.items() if name != "covers"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def index_pages(buckets: int) -> int:
    return -(-buckets // PAGE)


def index_bytes(buckets: int) -> int:
    return 8 * (buckets + index_pages(buckets)) + SUM * buckets


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
        if not isinstance(header, dict) or content_hash(header) != ref["content"]:
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
        return self.after + index_bytes(self.buckets)

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
