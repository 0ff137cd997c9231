"""Packs documents into rows (training samples of one length) without cutting a document that fits into a row.

Windows of a concatenated stream cut a document wherever a window ends. Best-fit decreasing (Ding et al., "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830) puts whole documents into rows instead. The longest documents
come first. Each is put into the fullest row that still has room for it, or into a new row if there is none. The room
that is left in a row is padding.

A row of L targets has L + 1 tokens, like a window. A longer document is cut as windows cut it: into full rows, and a
rest that is packed like a document. Each piece begins with the last token of the piece before it, so every token of a
document but its first is a target exactly once. A document of one token (an empty text) has no target and is in no row.

Documents are packed block by block. So only one block, and a number for each row, are in memory, and the rows of a
block read neighbouring tokens. The result is a function of the ends of the documents and of L alone.
"""

from __future__ import annotations

import hashlib
from typing import Any, BinaryIO

import numpy as np

from tokenizer.shards.packed import NUMBERS

#: documents are packed in blocks of at most BLOCK_TOKENS tokens, or of at most BLOCK_ROWS full rows if that is more. A
#: longer document is a block of its own. The last rows of a block are partly empty, so a block must make many rows
BLOCK_TOKENS, BLOCK_ROWS = 1 << 22, 256
#: largest number of documents that are packed together; it bounds memory where documents are very short
BLOCK_DOCUMENTS = 1 << 20


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Assign pieces of documents, of the given `sizes`, to bins of `capacity` by best-fit decreasing. Returns the
    number of the bin of each piece, int64. Of several bins with the same room left, the one that was filled last is
    taken.

    Pieces of equal size are placed together, as many into one bin as fit. Placing them one by one would give the same
    result: a bin that has room for another piece is still the best fit after it got one.

    Bit n of `mask` is set if some bin has room for exactly n tokens. So the best fit for a size is the lowest set bit
    that is not below it."""
    bins = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    firsts = np.flatnonzero(np.diff(sizes[order], prepend=0))
    with_room: dict[int, list[int]] = {}                 # room → its bins, the latest last
    mask = count = 0
    for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(sizes)]):
        size = int(sizes[order[first]])
        while first < stop:
            larger = mask >> size
            room = size + (larger & -larger).bit_length() - 1 if larger else capacity
            in_one = room // size
            needed = -(-(stop - first) // in_one)
            if larger:
                waiting = with_room[room]
                used = waiting[:-needed - 1:-1]
                del waiting[-needed:]
                mask ^= 0 if waiting else 1 << room
            else:
                used = list(range(count, count + needed))
                count += needed
            placed = min(stop - first, in_one * len(used))
            bins[order[first:first + placed]] = np.repeat(used, in_one)[:placed]
            full, more = divmod(placed, in_one)
            for left, those in ((room - in_one * size, used[:full]), (room - more * size, used[full:])):
                if left and those:
                    with_room.setdefault(left, []).extend(those)
                    mask |= 1 << left
            first += placed
    return bins


def pieces_of(starts: np.ndarray, ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces that fit into rows (training samples) of `longest` targets. Document i has the tokens
    [starts[i], ends[i]). Returns the pieces as (first tokens, exclusive ends). A document of one token has no piece,
    and one of 2 to `longest` + 1 tokens is one piece."""
    whole, rest = np.divmod(ends - starts - 1, longest)
    counts = whole + (rest > 0)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(starts, counts) + number * longest
    return begins, np.minimum(begins + longest + 1, np.repeat(ends, counts))


def rows_of_block(starts: np.ndarray, ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack the documents of a block into rows (training samples). Document i has the tokens [starts[i], ends[i]).
    Returns the pieces of all rows, one row after the other, as int64 (pieces, 2), and the number of pieces of each row.
    The pieces of a row are in the order of the stream, and rows are in the order of their first pieces."""
    begins, stops = pieces_of(starts, ends, longest)
    bins = best_fit(stops - begins, longest + 1)
    _, firsts, bins, counts = np.unique(bins, return_index=True, return_inverse=True, return_counts=True)
    order = np.lexsort((begins, firsts[bins]))           # `firsts`: the first piece of a row, as pieces are in order
    return np.stack([begins, stops], 1)[order], counts[np.argsort(firsts)]


class PackedWriter:
    """Writes the packed rows of one shard to the file `path`. `tokenizer.shards.packed` describes the file. A row is a
    training sample of whole documents."""

    def __init__(self, path: str) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed by `close`
        self._digest = hashlib.sha256()
        self._counts = [np.zeros(1, np.int64)]
        self.pieces = self.rows = self.tokens = 0

    def add(self, pieces: np.ndarray, counts: np.ndarray) -> None:
        """Append packed rows (training samples). `pieces`, int64 (pieces, 2), has the first token and the exclusive end
        of each piece, one row after the other, and `counts` the number of pieces of each row."""
        self._write(pieces)
        self._counts.append(counts)
        self.pieces, self.rows = self.pieces + len(pieces), self.rows + len(counts)
        self.tokens += int((pieces[:, 1] - pieces[:, 0]).sum())

    def _write(self, numbers: np.ndarray) -> None:
        data = numbers.astype(NUMBERS).tobytes()
        self._file.write(data)
        self._digest.update(data)

    def close(self) -> dict[str, Any]:
        """Finish the file. Returns a part of the fields of `PackedShard`: the numbers of pieces, rows and tokens, and
        the sha256."""
        self._write(np.cumsum(np.concatenate(self._counts)))
        self._file.close()
        return {"pieces": self.pieces, "rows": self.rows, "tokens": self.tokens, "sha256": self._digest.hexdigest()}


def pack(path: str, ends: np.ndarray, longest: int) -> dict[str, Any]:
    """Pack the documents of one shard into rows (training samples) of `longest` targets, and write the rows to the file
    `path` (`tokenizer.shards.packed` describes it). `ends` are the ends of the documents, counted from the start of the
    shard. Consecutive documents are packed a block at a time, at most BLOCK_DOCUMENTS of them. So memory is
    proportional to the documents of a block, and to the number of all rows. Returns the fields of `PackedShard`, but
    without `index` and `file`."""
    documents = longer = 0
    block, writer = max(BLOCK_TOKENS, BLOCK_ROWS * longest), PackedWriter(path)
    first = begin = 0
    while first < len(ends):
        stop = int(np.searchsorted(ends, np.array(begin + block, ends.dtype), side="right"))
        stop = min(max(stop, first + 1), first + BLOCK_DOCUMENTS)
        stops = ends[first:stop].astype(np.int64)
        starts = np.concatenate(([begin], stops[:-1]))
        writer.add(*rows_of_block(starts, stops, longest))
        documents += stop - first
        longer += int(np.count_nonzero(stops - starts > longest + 1))
        first, begin = stop, int(stops[-1])
    return {"documents": documents, "longer": longer, **writer.close()}
