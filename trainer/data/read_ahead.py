"""Reads tokens from object storage shortly before the training needs them, so that a corpus may be larger than the disk
and the first step need not wait for a copy of it.

Only the tokens and loss masks stay in object storage. The small files of a shard set (manifest, document ends and
checksums, about a hundredth of it) are copied to the disk as always (`trainer.data.remote`). The order of samples is
known in advance, so the loader requests the ranges of bytes for the next steps while the trainer computes. A range is
forgotten when the samples of its step have been read; memory holds no more than these steps.

Bytes are requested in whole blocks of `tokenizer.shards.sums`, and each block is compared with its checksum before a
token of it is used. A block with a wrong checksum is requested once more, because connections, too, damage bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import fs

from tokenizer.shards.layout import REMEDY, ShardError
from tokenizer.shards.reader import ShardSet, WindowBounds
from tokenizer.shards.sums import BLOCK, blocks_of, damaged_block

#: requests to the bucket at the same time. A request takes 30 to 100 ms, so 128 of them bring 1,000 to 4,000 windows a
#: second to each rank, or half as many packed rows, whose documents are scattered
REQUESTS = 128
#: largest number of unneeded blocks between two wanted ranges that one request reads. These blocks (32 kB) take about a
#: millisecond; a second request would take 30 ms
NEAR = 8
#: largest number of blocks of a request for several ranges, so that a step is spread over many connections
MOST = 1024
#: number of steps whose samples are requested in advance
STEPS = 16


def request_threads() -> ThreadPoolExecutor:
    """Return threads that make REQUESTS requests at the same time. Also raise the number of pyarrow's own threads to
    REQUESTS. Call this before the filesystem is opened, because pyarrow's S3 client then gets as many connections as
    pyarrow has threads (but at least 25)."""
    pa.set_io_thread_count(max(pa.io_thread_count(), REQUESTS))
    return ThreadPoolExecutor(REQUESTS, thread_name_prefix="bucket")


class ByteRange(NamedTuple):
    """Consecutive blocks of a file: number of the shard, kind of the file (body or loss), and the blocks [first,
    stop)."""

    shard: int
    kind: str
    first: int
    stop: int


def together(wanted: Iterable[ByteRange]) -> Iterator[list[ByteRange]]:
    """Group ranges of blocks, so that one request can read each group. Yields the groups, sorted by file and block. In
    a group, at most NEAR blocks lie between two neighbouring ranges, and the whole spans at most MOST blocks. A single
    range that is longer is a group of its own."""
    group: list[ByteRange] = []
    stop = 0
    for one in sorted(wanted):
        if group and (one[:2] != group[0][:2] or one.first - stop > NEAR or one.stop - group[0].first > MOST):
            yield group
            group = []
        stop = max(stop, one.stop) if group else one.stop
        group.append(one)
    if group:
        yield group


class RemoteShardSet(ShardSet):
    """A shard set whose tokens and loss masks (whether each token counts in the loss) are in object storage, and whose
    other files are on this machine, at `path`. `folder` is the folder of the set on `remote`. Requests are made by the
    threads of `pool`."""

    has_local_tokens = False

    def __init__(self, path: Path, sha256: str, remote: fs.FileSystem, folder: str, pool: ThreadPoolExecutor,
                 packing: str | None = None) -> None:
        super().__init__(path, sha256, packing=packing)
        self._remote, self._place, self._pool = remote, folder, pool
        self._files: dict[str, Any] = {}
        self._coming: dict[ByteRange, Future[dict[ByteRange, bytes]]] = {}
        #: the ranges that were read since the last call of `prefetch`. Short documents of one batch often lie in the
        #: same block, which is thus requested once for all of them
        self._read: dict[ByteRange, bytes] = {}

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request some ranges of tokens [start, stop), and the loss masks of these tokens, without waiting for the
        answers. Ranges that are near each other in a file are read by one request."""
        self._read.clear()
        wanted = {one for start, stop in ranges for one in self._ranges(start, stop)}
        for group in together(wanted - self._coming.keys()):
            self._coming.update(dict.fromkeys(group, self._pool.submit(self._request_all, group)))

    def forget(self) -> None:
        """Forget all tokens that were requested and not read, for instance when training goes back to a checkpoint."""
        for coming in self._coming.values():
            coming.cancel()
        self._coming.clear()
        self._read.clear()

    def samples(self, windows: Sequence[int], length: int, tokens: np.ndarray, rows: np.ndarray,
                compiled: bool = False) -> list[WindowBounds]:
        for row, w in zip(rows.tolist(), windows):
            tokens[row] = self.window(w, length)
        bounds = [self.bounds(w, length) for w in windows]
        return [WindowBounds(rows, np.array([len(of_row) for of_row in bounds]), np.concatenate(bounds))]

    def read(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        size = self.dtype.itemsize
        tokens = np.empty(stop - start, self.dtype)
        for shard, first, end, offset in self._pieces(start, stop):
            data = self._bytes(shard, "body", first * size, end * size)
            tokens[offset:offset + end - first] = np.frombuffer(data, self.dtype)
        return tokens

    def _mask(self, start: int, stop: int) -> np.ndarray:
        flags = np.ones(stop - start, bool)
        for shard, first, end, offset in self._pieces(start, stop):
            if self.manifest.shards[shard].loss:
                data = self._bytes(shard, "loss", first, end)
                flags[offset:offset + end - first] = np.frombuffer(data, np.uint8) != 0
        return flags

    def _ranges(self, start: int, stop: int) -> list[ByteRange]:
        """Return the blocks that hold tokens [start, stop) and the loss mask of these tokens (whether each counts in
        the loss)."""
        ranges = []
        for shard, first, end, _ in self._pieces(max(0, start), min(stop, self.tokens)):
            size = self.dtype.itemsize
            ranges.append(ByteRange(shard, "body", first * size // BLOCK, blocks_of(end * size)))
            if self.manifest.shards[shard].loss:
                ranges.append(ByteRange(shard, "loss", first // BLOCK, blocks_of(end)))
        return ranges

    def _bytes(self, shard: int, kind: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file, after comparing the blocks that hold them with their checksums."""
        wanted = ByteRange(shard, kind, start // BLOCK, blocks_of(stop))
        if wanted not in self._read:
            self._read[wanted] = self._checked(wanted)
        return self._read[wanted][start - wanted.first * BLOCK:stop - wanted.first * BLOCK]

    def _checked(self, wanted: ByteRange) -> bytes:
        """Return the bytes of the blocks `wanted`, after comparing them with their checksums. The blocks are requested
        now if they were not requested before, and requested again if a checksum is wrong. Raises ShardError if it is
        wrong a second time."""
        coming = self._coming.pop(wanted, None)
        data = coming.result()[wanted] if coming is not None else self._request(wanted)
        damaged = self._damaged(wanted, data)
        if damaged is not None:
            data = self._request(wanted)
            damaged = self._damaged(wanted, data)
        if damaged is not None:
            raise ShardError(f"{self._path(wanted)}: damaged at byte {damaged * BLOCK:,}: {REMEDY}")
        return data

    def _damaged(self, wanted: ByteRange, data: bytes) -> int | None:
        """Return the number of the first block in `data`, the bytes of the blocks `wanted`, whose checksum is wrong, or
        None."""
        sums = self.block_sums(wanted.shard, wanted.kind)[wanted.first:wanted.stop].tolist()
        return damaged_block(memoryview(data), wanted.first, sums)

    def _request_all(self, group: list[ByteRange]) -> dict[ByteRange, bytes]:
        """Read several sorted ranges of one file by a single request. Returns the bytes of each range; the bytes
        between ranges are dropped."""
        whole = ByteRange(group[0].shard, group[0].kind, group[0].first, max(one.stop for one in group))
        data = self._request(whole)
        return {one: data[(one.first - whole.first) * BLOCK:(one.stop - whole.first) * BLOCK] for one in group}

    def _request(self, wanted: ByteRange) -> bytes:
        path = self._path(wanted)
        info = self.manifest.shards[wanted.shard]
        size = info.tokens * (self.dtype.itemsize if wanted.kind == "body" else 1)
        start, stop = wanted.first * BLOCK, min(wanted.stop * BLOCK, size)
        try:
            file = self._files.get(path)
            if file is None:                      # two threads may open it at once; both files can be read
                file = self._remote.open_input_file(path)
                if file.size() != size:
                    raise ShardError(f"{path}: {file.size():,} bytes, the manifest says {size:,}: damaged: {REMEDY}")
                self._files[path] = file
            data: bytes = file.read_at(stop - start, start)
        except FileNotFoundError:
            raise ShardError(f"{path}: missing: {REMEDY}") from None
        except OSError as error:
            raise ShardError(f"{path}: cannot be read ({' '.join(str(error).split())[:300]}); when the bucket answers "
                             f"again, start the training again: it continues from its last checkpoint") from None
        return data

    def _path(self, wanted: ByteRange) -> str:
        return f"{self._place}/{getattr(self.manifest.shards[wanted.shard], wanted.kind)}"
