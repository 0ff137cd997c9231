"""Reads tokens from object storage shortly before the training needs them. A corpus may thus be larger than the disk,
and the first step need not wait for a copy of it.

Only the tokens and loss masks stay in object storage. The small files of a shard set (manifest, document ends and
checksums, about a hundredth of it) are copied to the disk as always (`trainer.data.remote`). The order of samples is
known in advance, so the loader requests the ranges of bytes for the next steps while the trainer computes. A range is
forgotten when the samples of its step have been read; memory holds no more than these steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from tokenizer.shards.layout import REMEDY, ShardError
from tokenizer.shards.requested import BlockRange, RequestedSet
from tokenizer.shards.sums import BLOCK, blocks_of

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
    """Return threads that make REQUESTS requests at the same time. Also raise the number of pyarrow's own I/O threads
    to REQUESTS, because pyarrow's S3 client opens as many connections as it has threads. Call this before the
    filesystem is opened."""
    pa.set_io_thread_count(max(pa.io_thread_count(), REQUESTS))
    return ThreadPoolExecutor(REQUESTS, thread_name_prefix="bucket")


def together(wanted: Iterable[BlockRange]) -> Iterator[list[BlockRange]]:
    """Group ranges of blocks, so that one request can read each group. Yields the groups, sorted by file and block. In
    a group, at most NEAR blocks lie between two neighbouring ranges. A group spans at most MOST blocks, or is a single
    longer range."""
    group: list[BlockRange] = []
    stop = 0
    for one in sorted(wanted):
        if group and (one[:2] != group[0][:2] or one.first - stop > NEAR or one.stop - group[0].first > MOST):
            yield group
            group = []
        stop = max(stop, one.stop) if group else one.stop
        group.append(one)
    if group:
        yield group


class RemoteShardSet(RequestedSet):
    """A shard set whose tokens and loss masks (whether each token counts in the loss) are in object storage, in the
    folder `folder` of `remote`. Its other files are on this machine, at `path`. Requests are made by the threads of
    `pool`."""

    def __init__(self, path: Path, sha256: str, remote: fs.FileSystem, folder: str, pool: ThreadPoolExecutor,
                 packing: str | None = None) -> None:
        super().__init__(path, sha256, packing=packing)
        self._remote, self.source, self._pool = remote, folder, pool
        self._files: dict[str, Any] = {}
        self._coming: dict[BlockRange, Future[dict[BlockRange, bytes]]] = {}
        #: the ranges that were read since the last call of `prefetch`. Short documents of one batch often lie in the
        #: same block, which is thus requested once for all of them
        self._read: dict[BlockRange, bytes] = {}

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

    def _ranges(self, start: int, stop: int) -> list[BlockRange]:
        """Return the blocks that hold tokens [start, stop) and the loss mask of these tokens (whether each counts in
        the loss)."""
        ranges = []
        for shard, first, end, _ in self._pieces(max(0, start), min(stop, self.tokens)):
            size = self.dtype.itemsize
            ranges.append(BlockRange(shard, "body", first * size // BLOCK, blocks_of(end * size)))
            if self.manifest.shards[shard].loss:
                ranges.append(BlockRange(shard, "loss", first // BLOCK, blocks_of(end)))
        return ranges

    def _checked(self, wanted: BlockRange) -> bytes:
        if wanted not in self._read:
            self._read[wanted] = super()._checked(wanted)
        return self._read[wanted]

    def request(self, wanted: BlockRange, again: bool) -> bytes:
        coming = self._coming.pop(wanted, None)
        return self._request(wanted) if coming is None else coming.result()[wanted]

    def _request_all(self, group: list[BlockRange]) -> dict[BlockRange, bytes]:
        """Read several sorted ranges of one file by a single request. Returns the bytes of each range; the bytes
        between ranges are dropped."""
        whole = BlockRange(group[0].shard, group[0].kind, group[0].first, max(one.stop for one in group))
        data = self._request(whole)
        return {one: data[(one.first - whole.first) * BLOCK:(one.stop - whole.first) * BLOCK] for one in group}

    def _request(self, wanted: BlockRange) -> bytes:
        path = self.path(wanted)
        try:
            file = self._files.get(path)
            if file is None:                      # two threads may open it at once; both files can be read
                file = self._remote.open_input_file(path)
                self.checked_size(wanted, file.size())
                self._files[path] = file
            start = wanted.first * BLOCK
            data: bytes = file.read_at(min(wanted.stop * BLOCK, file.size()) - start, start)
        except FileNotFoundError:
            raise ShardError(f"{path}: missing: {REMEDY}") from None
        except OSError as error:
            raise ShardError(f"{path}: cannot be read ({' '.join(str(error).split())[:300]}); when the bucket answers "
                             f"again, start the training again: it continues from its last checkpoint") from None
        return data
