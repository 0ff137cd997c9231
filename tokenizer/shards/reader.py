"""Reads a shard set (a list of token files) as if it were one long sequence of tokens.

Memory does not grow with the number of documents. Tokens and document ends are memory-mapped: their pages belong to the
page cache and are shared by all ranks of a node. The document table is read a row group at a time.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pyarrow import fs

from tokenizer.shards.kernels import PLACES, crc_tables, gather, positions
from tokenizer.shards.layout import ENDS, REMEDY, ShardError
from tokenizer.shards.packed import NUMBERS, PackedRows, PackedShard, Packing, read_numbers, read_packing
from tokenizer.shards.set_files import SetFiles

#: smallest number of windows that are read together; fewer are read faster one by one
TOGETHER = 8
#: seconds for which `ShardSet.unchecked` does not return a shard again
CHECKED = 0.1
#: the memory of this process as one array of bytes, from its second page on. No processor gives a process more than
#: 2^56 bytes. With it, one call of `gather` can read any number of mapped files; numba takes no list of arrays
MEMORY = np.ctypeslib.as_array((ctypes.c_ubyte * (1 << 56)).from_address(mmap.PAGESIZE))


def loss_mask(bounds: np.ndarray, length: int) -> np.ndarray:
    """Return which of the L = `length` targets of a window (one sample) count in the loss, bool (L,). Target i is token
    i + 1 of the window. All count except the first token of each document, which would be predicted from the EOS of
    another document. `bounds`, from `ShardSet.bounds`, are the positions where documents begin."""
    mask = np.ones(length, bool)
    mask[np.asarray(bounds, np.int64) - 1] = False
    return mask


class WindowBounds(NamedTuple):
    """The positions in some windows (training samples) at which documents begin."""

    rows: np.ndarray              # row of each window in the array with the tokens
    counts: np.ndarray            # number of positions of each window
    positions: np.ndarray         # what `ShardSet.bounds` returns for the first window, then for the next, int64


class ShardSet(SetFiles):
    """A shard set, open for reading. Tokens are counted over all its shards, as if they were one file.

    `path` is a manifest file, or a folder of shard sets. In a folder, the manifest of the set `sha256` is read if there
    is one, else `shards.json`. ShardError is raised if `sha256` is given and the set has another one.

    `filesystem` is a pyarrow filesystem in which `path` is, by default the local one. In another one, for instance
    object storage, only the manifest, the document tables and packed rows can be read. That is enough for `documents`.
    Tokens and document ends are memory-mapped, so they need local files.

    If `packing` is given (the sha256 of packed rows of the set), samples are these rows instead of windows, and the
    attribute `packed` describes them."""

    #: whether the tokens are in local files; a subclass may read them from elsewhere
    has_local_tokens = True

    def __init__(self, path: str | Path, sha256: str | None = None, filesystem: fs.FileSystem | None = None,
                 packing: str | None = None) -> None:
        super().__init__(path, sha256, filesystem)
        #: what `gather` needs to know of each shard; -1 if the shard has not been read with it yet
        self._at = np.full((len(self.manifest.shards), PLACES), -1, np.int64)
        self._checked_at = np.full(len(self.manifest.shards), -np.inf)
        #: whether the set has tokens that are not targets. Computed once, because it is needed for every sample, and a
        #: set may have ten thousand shards
        self._masked = any(shard.loss for shard in self.manifest.shards)
        if packing is not None:
            self.packed = self.packed_rows(packing)

    def __len__(self) -> int:
        return self.tokens

    def windows(self, length: int) -> int:
        """Return the number of windows (samples) of L = `length` targets in the set. Window w is tokens w·L to w·L + L
        inclusive, L + 1 in all."""
        return max(0, self.tokens - 1) // length

    def window(self, w: int, length: int) -> np.ndarray:
        """Read window number `w` of windows of L = `length` targets. Returns its L + 1 tokens, a copy in the shard's
        dtype. The last token is also the first of window w + 1."""
        if not 0 <= w < self.windows(length):
            raise IndexError(f"window {w} of {self.windows(length)} (length {length})")
        return self.read(w * length, w * length + length + 1)

    def bounds(self, w: int, length: int) -> np.ndarray:
        """Return the positions p in [1, L] of window w at which a document begins, int64, increasing. A window has L =
        `length` targets. Position p - 1 holds the EOS of the document before. Position 0 is never returned.

        The positions come from the list of document ends, not from EOS tokens. With document masking, attention does
        not cross p, and the token at p is not a target, because it would be predicted from that EOS."""
        start = w * length
        return self.ends(start + 1, start + length + 1) - start

    def samples(self, windows: np.ndarray | Sequence[int], length: int, tokens: np.ndarray, rows: np.ndarray,
                compiled: bool = False) -> list[WindowBounds]:
        """Read many windows (samples) of L = `length` targets. Window windows[i] goes to row rows[i] of the array
        `tokens`, which has L + 1 columns. With `compiled`, which needs numba, reading TOGETHER or more windows is
        faster.

        Returns the positions at which documents begin in the windows, as one or two WindowBounds that together have all
        windows. Raises IndexError when the set has no such window, and ShardError when what is read is damaged."""
        windows = np.asarray(windows, np.int64)
        if not compiled or len(windows) < TOGETHER or not self.has_local_tokens:
            return [self._one_by_one(windows.tolist(), length, tokens, rows)]
        starts = windows * length
        shards = np.searchsorted(self._starts[1:], starts, side="right")
        last = np.searchsorted(self._starts[1:], starts + length, side="right")
        # windows that are in several shards, or not in the set
        is_alone = (shards != last) | (starts < 0) | (last == len(self.offsets) - 1)
        parts = []
        if is_alone.any():
            alone = np.flatnonzero(is_alone)
            parts.append(self._one_by_one(windows[alone].tolist(), length, tokens, rows[alone]))
            starts, shards, rows = starts[~is_alone], shards[~is_alone], rows[~is_alone]
        return [*parts, self._gathered(shards, starts - self._starts[shards], tokens, rows)]

    def _one_by_one(self, windows: Sequence[int], length: int, tokens: np.ndarray, rows: np.ndarray) -> WindowBounds:
        """Read windows as `samples` does, but one at a time. Unlike in `_gathered`, a window may lie in several
        shards."""
        last, size, offsets = self.windows(length) - 1, self.dtype.itemsize, self.offsets
        is_remote = not self.has_local_tokens
        places: list[int] = []
        counts: list[int] = []
        for row, w in zip(rows.tolist(), windows):
            start = w * length
            shard = bisect.bisect_right(offsets, start) - 1
            # a window that is not in the set, or in several shards
            if not 0 <= w <= last or start + length >= offsets[shard + 1] or is_remote:
                tokens[row], ends = self.window(w, length), self.bounds(w, length).tolist()
            else:
                first = start - offsets[shard]
                stop = first + length + 1
                body, file = self._tokens.get(shard) or self._open_tokens(shard)
                file.check(first * size, stop * size)
                tokens[row] = body[first:stop]
                low, high = self._ends_between(shard, first + 1, stop)
                ends = [end - first for end in self._ends[shard].view[low:high]]
            places += ends
            counts.append(len(ends))
        return WindowBounds(rows, np.array(counts, np.int64), np.array(places, np.int64))

    def _gathered(self, shards: np.ndarray, firsts: np.ndarray, tokens: np.ndarray, rows: np.ndarray) -> WindowBounds:
        """Read windows (training samples) with compiled loops. Window i must lie in one shard, number `shards[i]`, and
        begins at token `firsts[i]` of that shard."""
        width, size = tokens.shape[1], self.dtype.itemsize
        for shard in np.unique(shards[self._at[shards, 0] < 0]).tolist():
            self._at[shard] = self._addresses(shard)
        ranges = np.empty((len(firsts), 2), np.int64)
        gather(MEMORY, self._at, shards, firsts, rows, tokens, np.empty(0, self.dtype), crc_tables(), ranges)
        for i in np.flatnonzero(ranges[:, 0] < 0).tolist():        # damaged, or with ends that were not checked before
            shard, first = int(shards[i]), int(firsts[i])
            body, file = self._tokens[shard]
            file.check(first * size, (first + width) * size)
            tokens[rows[i]] = body[first:first + width]
            ranges[i] = self._ends_between(shard, first + 1, first + width)
        counts = ranges[:, 1] - ranges[:, 0]
        bounds = np.empty(int(counts.sum()), np.int64)
        positions(MEMORY, self._at, shards, firsts, ranges, bounds)
        return WindowBounds(rows, counts, bounds)

    def _addresses(self, shard: int) -> list[int]:
        """Map the files of a shard into memory, where they stay mapped. Returns the six numbers that `gather` needs for
        the shard (its argument `places`). Addresses are relative to MEMORY."""
        ends = self._ends.get(shard) or self._open_ends(shard)
        body, _ = self._tokens.get(shard) or self._open_tokens(shard)
        arrays = body, ends.array, ends.file.known, self.block_sums(shard, "body")
        return [*(int(array.ctypes.data) - int(MEMORY.ctypes.data) for array in arrays), len(ends.array), body.nbytes]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), counted over all shards of the set. Returns a copy. Raises IndexError when the
        range is not within the set."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        tokens = np.empty(stop - start, self.dtype)
        for shard, first, end, offset in self._pieces(start, stop):
            body = self.body(shard)
            self._file(shard, "body").check(first * self.dtype.itemsize, end * self.dtype.itemsize)
            tokens[offset:offset + end - first] = body[first:end]
        return tokens

    def unchecked(self, starts: np.ndarray, count: int) -> list[int]:
        """Return the numbers of the shards that hold the `count` tokens from each of `starts` on, increasing. Shards
        that were returned in the last CHECKED seconds are left out: the caller checks the sizes of a shard's files, and
        doing so for every batch would take a fifth of the time of reading it."""
        first = np.searchsorted(self._starts, starts, side="right") - 1
        last = np.searchsorted(self._starts, starts + count, side="left") - 1
        most = int((last - first).max(initial=0))
        shards, now = np.unique([np.minimum(first + i, last) for i in range(most + 1)]), time.monotonic()
        shards = shards[self._checked_at[shards] < now - CHECKED]
        self._checked_at[shards] = now
        return [int(shard) for shard in shards]

    def counts(self, start: int, stop: int) -> np.ndarray | None:
        """Return which of tokens [start, stop) are targets according to the loss masks, as bool (stop - start,).
        Returns None if the set has no masks. The first token of a document may be True here, although it is no target:
        `loss_mask` excludes it."""
        if not self._masked:
            return None
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        return self._mask(start, stop)

    def _mask(self, start: int, stop: int) -> np.ndarray:
        flags = np.ones(stop - start, bool)
        for shard, first, end, offset in self._pieces(start, stop):
            info = self.manifest.shards[shard]
            if info.loss:
                mask, _ = self._map(info.loss, np.dtype("u1"), info.tokens)
                self._file(shard, "loss").check(first, end)
                flags[offset:offset + end - first] = mask[first:end] != 0
        return flags

    def targets(self) -> int:
        """Return how many tokens of the set are targets according to the loss masks (flags that say which tokens count
        in the loss). This reads all masks."""
        return sum(int(np.count_nonzero(self._mask(first, end))) if info.loss else info.tokens
                   for info, first, end in zip(self.manifest.shards, self.offsets, self.offsets[1:]))

    def ends(self, start: int, stop: int) -> np.ndarray:
        """Return where documents end: all e with start <= e < stop such that e - 1 is the last token of a document.
        int64, increasing, counted over all shards of the set."""
        blocks = []
        # an end equal to a shard's first token belongs to the shard before it
        first = max(0, bisect.bisect_left(self.offsets, start) - 1)
        for shard in range(first, len(self.manifest.shards)):
            offset = self.offsets[shard]
            if offset >= stop:
                break
            ends = self._shard_ends(shard)
            low, high = self._ends_between(shard, max(0, start - offset), stop - offset)
            blocks.append(ends[low:high].astype(np.int64) + offset)
        return blocks[0] if len(blocks) == 1 else np.concatenate([np.empty(0, np.int64), *blocks])

    def spans(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (first tokens, exclusive ends, sizes in UTF-8 bytes) of the documents that have tokens in [start,
        stop), each an int64 array. This is faster than `documents`, because it reads one column of the document table
        instead of all."""
        blocks = []
        for shard, start_in_shard, stop_in_shard, _ in self._pieces(max(0, start), min(stop, self.tokens)):
            ends = self._shard_ends(shard)
            # numbers of the documents with the first and the last token of the range
            first, last = self._ends_between(shard, start_in_shard + 1, stop_in_shard)
            begins = np.concatenate((ends[first - 1:first] if first else [0], ends[first:last]))
            sizes = [row["n_bytes"] for row in self._table_rows(shard, first, last + 1, ["n_bytes"])]
            blocks.append(np.stack([begins.astype(np.int64) + self.offsets[shard],
                                    ends[first:last + 1].astype(np.int64) + self.offsets[shard],
                                    np.array(sizes, np.int64)]))
        return tuple(np.concatenate(blocks, 1)) if blocks else (np.empty(0, np.int64),) * 3

    def document_numbers(self, tokens: np.ndarray) -> np.ndarray:
        """Return the numbers of the documents that have the given tokens, int64 (N,). Documents are numbered from 0
        over all shards. The document ends that are read are not compared with their checksums."""
        numbers = np.empty(len(tokens), np.int64)
        shards = np.searchsorted(self.offsets, tokens, side="right") - 1
        first = 0
        for shard, info in enumerate(self.manifest.shards):
            inside = shards == shard
            if inside.any():
                local = (tokens[inside] - self.offsets[shard]).astype(ENDS)
                numbers[inside] = first + np.searchsorted(self._shard_ends(shard), local, side="right")
            first += info.documents
        return numbers

    def shard_ends(self, shard: int, first: int, stop: int) -> np.ndarray:
        """Return the exclusive ends of documents [first, stop) of a shard, in tokens of the shard, int64. Numbers
        beyond the last document are ignored. The ends are not compared with their checksums."""
        return self._shard_ends(shard)[first:stop].astype(np.int64)

    # -- packed rows ---------------------------------------------------------------------------------------------
    def packed_rows(self, sha256: str) -> PackedRows:
        """Open the packed rows (training samples of whole documents) of the set that have the given sha256. Raises
        ShardError if they are missing or damaged."""
        packing = read_packing(self.filesystem, self.folder, self.manifest, sha256)
        return PackedRows(packing, self.offsets, self._packed_numbers, str(self.folder))

    def packed_row(self, pieces: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Read a packed row: a training sample that consists of the given `pieces` of documents (`PackedRows.row`).
        Returns (tokens, bounds, targets):

        - `tokens` are the L + 1 tokens of the row. Padding is EOS.
        - `bounds` are the positions in [1, L] at which a piece of a document or padding begins, int64.
        - `targets` says which of the tokens at positions 1 to L are targets according to the loss masks, bool (L,).
          Padding is no target. It is None if all are targets.

        The first token of a piece may be True in `targets`, although it is no target: the caller must exclude the
        positions `bounds`."""
        assert self.packed is not None
        length = self.packed.longest
        tokens, counts = np.full(length + 1, self.eos, self.dtype), np.zeros(length + 1, bool)
        begins, place = [], 0
        for start, stop in pieces:
            end = place + stop - start
            tokens[place:end] = self.read(start, stop)
            of_piece = self.counts(start, stop)
            counts[place:end] = True if of_piece is None else of_piece
            place = end
            begins.append(end)
        bounds = np.array(begins if place <= length else begins[:-1], np.int64)
        return tokens, bounds, None if counts[1:].all() else counts[1:]

    def published_packing(self) -> Packing | None:
        """Return the manifest of the packed rows (training samples of whole documents) that were published last with
        the set, or None if the set has no packed rows. Raises ShardError if the manifest is damaged or belongs to
        another set."""
        return read_packing(self.filesystem, self.folder, self.manifest)

    def _packed_numbers(self, file: PackedShard, first: int, stop: int) -> np.ndarray:
        """Return integers [first, stop) of a file of packed rows (training samples of whole documents). A local file is
        compared with its sha256 when it is read for the first time. Raises ShardError if the file is missing or
        damaged."""
        if not isinstance(self.filesystem, fs.LocalFileSystem):
            return read_numbers(self.filesystem, self.folder / file.file, first, stop)
        is_checked = file.file in self._maps
        numbers, memory = self._map(file.file, NUMBERS, file.numbers)
        if not is_checked and hashlib.sha256(memory or b"").hexdigest() != file.sha256:
            del self._maps[file.file]
            raise ShardError(f"{self.folder / file.file}: damaged: {REMEDY}")
        return numbers[first:stop]
