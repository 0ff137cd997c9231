"""Reads samples from shards. Each sample becomes a row of a batch (`trainer.data.batches`): its tokens, the positions
at which documents begin, and which tokens are targets. Tokens and document bounds are checked before use, so that
damage raises an error that names the file."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenizer.mixture.kernels import is_compiled
from tokenizer.shards.layout import ENDS, REMEDY, ShardError
from tokenizer.shards.packed import NUMBERS
from tokenizer.shards.page_cache import read_from_disk
from tokenizer.shards.reader import ShardSet, WindowBounds

#: one sample: its tokens (at most L + 1), the bounds of documents inside it, the index of its stream, and optionally
#: which of its targets count in the loss (None: all)
Row = tuple[np.ndarray, np.ndarray, int] | tuple[np.ndarray, np.ndarray, int, np.ndarray | None]


class SampleRows(Sequence[Row]):
    """Samples of L tokens each, stored together in a few arrays. A batch is made faster from these than from single
    rows. The object is also a sequence with a Row for each sample."""

    def __init__(self, tokens: np.ndarray, bounds: np.ndarray, counts: np.ndarray, streams: np.ndarray,
                 masks: Sequence[np.ndarray | None]) -> None:
        self.tokens = tokens                                  # (samples, L + 1)
        #: positions in [1, L] at which documents begin: those of the first sample, in order, then those of the next
        self.bounds = bounds
        self.counts = counts                                  # number of positions of each sample
        self.streams = streams                                # int64
        self.masks = masks                                    # which of L targets count in the loss; None: all
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        end = self._ends[number]
        return (self.tokens[number], self.bounds[end - self.counts[number]:end], int(self.streams[number]),
                self.masks[number])

    @classmethod
    def of(cls, rows: Sequence[Row]) -> SampleRows:
        """Return a SampleRows with the given rows, which must all have the same number of tokens."""
        return cls(np.stack([row[0] for row in rows]), np.concatenate([row[1] for row in rows]),
                   np.array([len(row[1]) for row in rows]), np.array([row[2] for row in rows], np.int64),
                   [mask for row in rows for mask in (row[3:] or (None,))])


def windows(sets: Sequence[ShardSet], places: np.ndarray | Sequence[tuple[int, int]], length: int) -> Sequence[Row]:
    """Read samples as input of `collate`. Each of `places` is (index into `sets`, number of a sample in that set). A
    sample is a window of `length` consecutive tokens and the token after it. In a set with packed rows, it is one of
    these rows. Raises ShardError for a file that is missing, unreadable or cut, and for impossible tokens or document
    ends."""
    places = np.asarray(places, np.int64).reshape(-1, 2)
    streams = places[:, 0].copy()
    of_stream = {stream: np.flatnonzero(streams == stream) for stream in np.unique(streams).tolist()}
    if any(sets[stream].packed is not None for stream in of_stream):
        is_packed = np.isin(streams, [stream for stream in of_stream if sets[stream].packed is not None])
        packed, others = iter(packed_rows(sets, places[is_packed].tolist())), iter(windows(sets, places[~is_packed],
                                                                                           length))
        return [next(packed if of_packed else others) for of_packed in is_packed.tolist()]
    before = read_from_disk()
    for stream, rows in of_stream.items():
        shards, starts = sets[stream], places[rows, 1] * length
        shards.prefetch(zip(starts.tolist(), (starts + length + 1).tolist()))
        for shard in shards.unchecked(starts, length + 1):
            refuse_short(shards, shard)
    dtype = np.result_type(*(sets[stream].dtype for stream in of_stream)) if of_stream else np.dtype(np.uint8)
    tokens = np.empty((len(places), length + 1), dtype)
    compiled = is_compiled(tokens.size)
    found: list[WindowBounds] = []
    masks: list[np.ndarray | None] = [None] * len(places)
    for stream, rows in of_stream.items():
        numbers = places[rows, 1]
        found += sets[stream].samples(numbers, length, tokens, rows, compiled)
        if sets[stream].counts(0, 0) is not None:
            for number, mask in zip(rows.tolist(), masks_of(sets[stream], numbers.tolist(), length)):
                masks[number] = mask
    has_read = read_from_disk() > before
    for stream in of_stream:
        sets[stream].page_cache.note(has_read)
    samples = SampleRows(tokens, *in_order(found), streams, masks)
    if not are_possible(sets, samples, length):
        for (stream, window), row in zip(places.tolist(), samples):
            refuse_unknown(sets[stream], window * length, row[0])
            refuse_unordered(sets[stream], window * length, row[1], length)
    return samples


def in_order(found: Sequence[WindowBounds]) -> tuple[np.ndarray, np.ndarray]:
    """Put the document bounds of a batch into the order of its rows. Each item of `found` has the bounds (positions at
    which documents begin) in some of the rows. Returns (bounds of all rows one after the other, number of bounds of
    each row)."""
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows, counts, positions = (np.concatenate(column) for column in zip(*found))
    order = np.argsort(rows)
    begins, counts = (np.cumsum(counts) - counts)[order], counts[order]
    chosen = np.arange(len(positions)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return positions[chosen], counts


def masks_of(shards: ShardSet, numbers: Sequence[int], length: int) -> list[np.ndarray | None]:
    """Return for each of the windows (samples) `numbers` which of its L = `length` targets count in the loss, as bool
    (L,). If the shard set has no loss masks, all targets count, and every item is None."""
    if shards.counts(0, 0) is None:                           # no window has a mask
        return [None] * len(numbers)
    # only tokens that were prefetched are read: others may be in blocks of a remote file that were not requested
    found = (shards.counts(window * length, window * length + length + 1) for window in numbers)
    return [None if counts is None else counts[1:] for counts in found]


def are_possible(sets: Sequence[ShardSet], rows: SampleRows, length: int) -> bool:
    """Return whether all tokens of `rows` are in the vocabulary, and all document bounds increase and lie within their
    samples of `length` tokens. The result is False exactly when `refuse_unknown` or `refuse_unordered` would raise an
    error for one of the samples. Checking all samples at once is much faster than calling these functions."""
    bounds = rows.bounds
    places = np.repeat(np.arange(len(rows)) * (length + 1), rows.counts) + bounds
    if bounds.size and not (bounds.min() >= 1 and bounds.max() <= length and (places[1:] > places[:-1]).all()):
        return False
    sizes = np.array([shards.vocab_size for shards in sets])[rows.streams]
    return not len(rows) or bool((rows.tokens.max(axis=1) < sizes).all())


def packed_rows(sets: Sequence[ShardSet], places: Sequence[tuple[int, int]]) -> list[Row]:
    """Read packed rows (training samples of whole documents), as input of `collate`. Each of `places` is (index into
    `sets`, number of the row in that set). Raises ShardError as `windows` does."""
    found: list[tuple[int, list[tuple[int, int]]]] = []
    checked: set[tuple[int, int]] = set()
    for stream, row in places:
        packed = sets[stream].packed
        assert packed is not None
        if (shard := (stream, packed.shard_of(row))) not in checked:
            checked.add(shard)
            refuse_short(sets[stream], shard[1])
        found.append((stream, packed.row(row)))
    for stream in sorted({stream for stream, _ in found}):
        sets[stream].prefetch([piece for other, pieces in found if other == stream for piece in pieces])
    rows: list[Row] = []
    for stream, pieces in found:
        tokens, bounds, counts = sets[stream].packed_row(pieces)
        if tokens.max() >= sets[stream].vocab_size:
            for start, stop in pieces:
                refuse_unknown(sets[stream], start, sets[stream].read(start, stop))
        rows.append((tokens, bounds, stream, counts))
    return rows


def token_ranges(shards: ShardSet, sample: int, length: int) -> list[tuple[int, int]]:
    """Return the ranges [first, stop) of tokens that make up sample number `sample` of `length` tokens. In a set with
    packed rows (samples of whole documents), they are the pieces of that row, otherwise the one range of that
    window."""
    return [(sample * length, sample * length + length + 1)] if shards.packed is None else shards.packed.row(sample)


def touched(shards: ShardSet, start: int, count: int) -> range:
    """Return the numbers of the shards that hold tokens [start, start + count)."""
    return range(bisect.bisect_right(shards.offsets, start) - 1, bisect.bisect_left(shards.offsets, start + count))


def refuse_short(shards: ShardSet, shard: int) -> None:
    """Raise ShardError when a file of shard number `shard` is gone, unreadable, or shorter than the manifest says. The
    files are tokens, loss mask, document ends and the list of packed rows. Reading a memory map of a file that has
    become shorter would kill the process with SIGBUS, without a message."""
    info = shards.manifest.shards[shard]
    files = [(info.ends, info.documents * ENDS.itemsize)]
    if shards.has_local_tokens:
        files.append((info.body, info.tokens * shards.dtype.itemsize))
        if info.loss:
            files.append((info.loss, info.tokens))
    if shards.packed is not None:
        rows = shards.packed.packing.files[shard]
        files.append((rows.file, rows.numbers * NUMBERS.itemsize))
    for name, size in files:
        try:
            there = shards.size_now(name)
        except FileNotFoundError:
            raise ShardError(f"{shards.folder}/{name}: gone: {REMEDY}") from None
        except OSError as e:
            raise ShardError(f"{shards.folder}/{name}: cannot be read ({e.strerror or e}); when the disk answers "
                             f"again, start the training again: it continues from its last checkpoint") from None
        if there < size:
            raise ShardError(f"{shards.folder}/{name}: {there} bytes, the manifest says {size}: cut: {REMEDY}")


def refuse_unknown(shards: ShardSet, start: int, tokens: np.ndarray) -> None:
    """Raise ShardError if one of `tokens` is not in the vocabulary. `start` is the position in `shards` from which they
    were read, by which the message locates the token. A token outside the vocabulary would make the embedding read
    beyond its end, and a GPU would fail with an assertion that does not name the data."""
    if len(tokens) and tokens.max() >= shards.vocab_size:
        first = int(np.argmax(tokens >= shards.vocab_size))
        shard = touched(shards, start + first, 1)[0]
        path, place = shards.folder / shards.manifest.shards[shard].body, start + first - shards.offsets[shard]
        raise ShardError(f"{path}: token {int(tokens[first]):,} at offset {place:,} (byte "
                         f"{place * shards.dtype.itemsize:,}), the vocabulary has {shards.vocab_size:,}: damaged: "
                         f"{REMEDY}")


def refuse_unordered(shards: ShardSet, start: int, bounds: np.ndarray, length: int) -> None:
    """Raise ShardError if the document bounds of a sample do not increase or do not lie within it. `bounds` are the
    positions at which documents begin. The sample has `length` tokens, which were read from position `start` of
    `shards` on."""
    if len(bounds) and not (bounds[0] >= 1 and bounds[-1] <= length and (bounds[1:] > bounds[:-1]).all()):
        names = ", ".join(shards.manifest.shards[i].ends for i in touched(shards, start, length + 1))
        raise ShardError(f"{shards.folder}/{names}: ends of documents near token {start:,} of the stream do not "
                         f"increase: damaged: {REMEDY}")
