"""Writes and reads files of shingle sets (hashes of the word n-grams of documents). The search for near-duplicates
compares texts by these sets.

A file has one set after another, each as sorted different uint64, little-endian. The file of candidates, which belongs
to it, says for each set where it begins, how many values it has, and the xxh3-64 of its bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import xxhash

from stages.barrier import FileRef
from stages.dedup.hashing import mix
from stages.dedup.sets import SET_BYTES
from stages.task import Inputs

#: _CHUNK: bytes of sets that are read at once; they fit into the processor's cache. _PIECE: bytes that should be read
#: from each file at once, because a request to object storage takes as long as reading so many bytes.
_CHUNK, _PIECE = 8 << 20, 256 << 10
#: checksum of the bytes of a set
_digest: Callable[[Any], int] = xxhash.xxh3_64_intdigest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]


class ShingleSetWriter:
    """Writes shingle sets into one file. A shingle set holds the hashes of the word n-grams of one document. Sets are
    collected until they have `chunk_bytes` bytes, and then written, ordered by the bucket of the cluster to which the
    document belongs. A task that reads one bucket thus finds many of its sets one after another."""

    def __init__(self, path: str, chunk_bytes: int) -> None:
        self._file: BinaryIO = open(path, "wb", 1 << 20)  # noqa: SIM115 (closed by `close`)
        self._chunk_bytes = chunk_bytes
        self._roots = [np.zeros(0, np.uint64)]
        self._pending: list[Hashes] = []
        self._bytes = self.written = 0
        #: of all sets, in the order in which they were added: numbers of values and checksums, and offsets by chunk
        self._counts: list[int] = []
        self._sums: list[int] = []
        self._offsets = [np.zeros(0, np.int64)]

    def add(self, roots: NDArray[np.uint64], values: Hashes, counts: NDArray[np.int64]) -> None:
        """Add the shingle sets (hashes of word n-grams) of several documents. `roots` names the cluster of each
        document. `values` holds the sets one after another, and `counts` the size of each set."""
        values, ends = values.astype("<u8", copy=False), np.cumsum(counts)
        sets = [values[start:end] for start, end in zip((ends - counts).tolist(), ends.tolist())]
        self._roots.append(roots)
        self._pending += sets
        self._counts += counts.tolist()
        self._sums += map(_digest, sets)
        self._bytes += values.nbytes
        if self._bytes > self._chunk_bytes:
            self._flush()

    def _flush(self) -> None:
        order = np.argsort(mix(np.concatenate(self._roots)), kind="stable")
        self._file.writelines([self._pending[number] for number in order.tolist()])
        counts = np.array(self._counts[len(self._counts) - len(order):], np.int64)[order]
        offsets = np.empty(len(order), np.int64)
        offsets[order] = self.written + np.cumsum(counts) - counts
        self._offsets.append(offsets)
        self.written += int(counts.sum())
        self._roots, self._pending, self._bytes = [np.zeros(0, np.uint64)], [], 0

    def close(self) -> tuple[list[int], NDArray[np.int64], list[int]]:
        """Close the file. Returns three lists with an entry for each set, in the order in which the sets were added:
        (the number of values of the set, the number of values before the set in the file, the checksum of the set)."""
        self._flush()
        self._file.close()
        return self._counts, np.concatenate(self._offsets), self._sums


class ShingleSetReader:
    """Reads shingle sets (hashes of the word n-grams of a document) from files when they are needed, and checks them
    against their checksums. The sets that were used most recently stay in memory, up to `cache_bytes` bytes in total;
    up to 32 files stay open."""

    def __init__(self, inputs: Inputs, refs: list[FileRef], cache_bytes: int) -> None:
        self._inputs, self._refs, self._cache_bytes = inputs, refs, cache_bytes
        #: bytes of sets that a caller should read by one call of `read`
        self.chunk_bytes = min(max(_CHUNK, _PIECE * len(refs)), cache_bytes)
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()
        self._sets: OrderedDict[tuple[int, int, int], NDArray[np.uint64]] = OrderedDict()
        self._bytes = 0

    def get(self, file: int, offset: int, count: int, expected: int) -> NDArray[np.uint64]:
        place = file, offset, count                        # an empty set begins where the next one does
        values = self._sets.get(place)
        if values is not None:
            self._sets.move_to_end(place)
            return values
        handle = self._opened(file)
        handle.seek(8 * offset)
        raw = handle.read(8 * count)
        if _digest(raw) != expected:
            raise self._inputs.damaged(self._refs[file])
        values = self._sets[place] = np.frombuffer(raw, "<u8")
        self._bytes += len(raw) + SET_BYTES
        while self._bytes > self._cache_bytes and len(self._sets) > 1:
            self._bytes -= self._sets.popitem(last=False)[1].nbytes + SET_BYTES
        return values

    def read(self, files: NDArray[Any], candidates: NDArray[Any]) -> tuple[Hashes, NDArray[np.int64]]:
        """Read the shingle sets of many candidates at once. `files` holds the number of each candidate's file. Sets
        that follow one another in a file are read together. Returns (all sets in one array, the position at which the
        set of each candidate begins in it). The sets that `get` keeps in memory are dropped."""
        self._sets, self._bytes = OrderedDict(), 0
        order = np.lexsort((candidates["offset"], files))
        files, records = files[order], candidates[order]
        counts = records["count"].astype(np.int64)
        first = records["offset"].astype(np.int64)
        ends = np.cumsum(counts)
        values = np.empty(int(counts.sum()), "<u8")
        data = values.view(np.uint8).data
        is_new = np.r_[True, (files[1:] != files[:-1]) | (first[1:] != first[:-1] + counts[:-1])]
        runs = np.flatnonzero(is_new)
        stops = np.r_[ends[runs[1:] - 1], ends[-1:]]
        for file, offset, start, stop in zip(files[runs].tolist(), first[runs].tolist(),
                                             (ends - counts)[runs].tolist(), stops.tolist()):
            handle: Any = self._opened(file)                   # the type BinaryIO lacks `readinto`
            handle.seek(8 * offset)
            handle.readinto(data[8 * start:8 * stop])          # if fewer bytes are read, the checksums do not fit
        starts = ends - counts
        sums = [_digest(values[start:stop]) for start, stop in zip(starts.tolist(), ends.tolist())]
        if sums != records["sum"].tolist():
            damaged = next(n for n, expected in enumerate(records["sum"].tolist()) if sums[n] != expected)
            raise self._inputs.damaged(self._refs[int(files[damaged])])
        offsets = np.empty(len(order), np.int64)
        offsets[order] = starts
        return values, offsets

    def _opened(self, file: int) -> BinaryIO:
        handle = self._files.get(file)
        if handle is None:
            handle = self._files[file] = self._inputs.open(self._refs[file])
            if len(self._files) > 32:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(file)
        return handle

    def close(self) -> None:
        for handle in self._files.values():
            handle.close()
