"""Reads the samples of one stream from its shards for `materialize`: the windows of consecutive tokens, or packed
rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.engine.task import TaskInputs
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.shards.layout import ENDS, ShardError
from tokenizer.shards.packed import NUMBERS, PackedRows, PackedShard, Packing
from tokenizer.shards.packing import BLOCK_ROWS, BLOCK_TOKENS
from tokenizer.shards.sums import BLOCK, SUMS, blocks_of, damaged_block

#: bytes of tokens, or of records, that a task works on at a time
BLOCK_BYTES = 1 << 20


def source_of(inputs: TaskInputs, shards: Sequence[Mapping[str, Any]], curriculum: Curriculum, stream: int) -> _Windows:
    """Returns an object that reads the training samples of one stream of a curriculum. `stream` is the number of the
    stream, and `shards` describes its shards, as the argument `shards` of `materialize.ScatterWindows` does."""
    kind = _Windows if curriculum.streams[stream].packing is None else _Packed
    return kind(inputs, shards, curriculum, stream)


def memory_mb(curriculum: Curriculum, stream: int) -> int:
    """Returns how many MB of memory a task needs that reads samples of a stream. For packed rows, a task holds up to
    two blocks of tokens at a time. Each token takes 12 bytes: the token itself, its flags, and copies of both in a row.
    """
    block = max(BLOCK_TOKENS, BLOCK_ROWS * curriculum.longest)
    return 500 if curriculum.streams[stream].packing is None else max(500, 300 + 24 * block // 10**6)


class _Windows:
    """Reads token ranges and super-windows (`longest` consecutive tokens each) of a stream from its shards. On object
    storage, only the bytes of the range are requested."""

    def __init__(self, inputs: TaskInputs, shards: Sequence[Mapping[str, Any]], curriculum: Curriculum,
                 stream: int) -> None:
        self.inputs, self.shards, self.longest = inputs, shards, curriculum.longest
        self.dtype = np.dtype(curriculum.streams[stream].dtype).newbyteorder("<")
        #: super-windows that are read at a time
        self.step = max(1, BLOCK_BYTES // (self.longest * self.dtype.itemsize))
        self._ends: dict[str, np.ndarray] = {}

    def supers(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the three arrays of `read` for the super-windows [first, stop) and one more token, the last target. A
        super-window is `longest` consecutive tokens of the stream."""
        return self.read(first * self.longest, stop * self.longest + 1)

    def starts(self, windows: np.ndarray, first: int, length: int) -> np.ndarray:
        """Returns the offsets at which windows begin in the arrays of `supers(first, …)`. `windows` are numbers of
        windows (training samples of `length` tokens) in the stream, and `first` is the number of the first super-window
        read."""
        return windows * length - first * self.longest

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the tokens [start, stop) of the stream, and two u8 arrays of the same length. Element i of the first
        is 1 if a document ends right before token start + i. Element i of the second is 1 if token start + i counts for
        the loss."""
        tokens, flags = np.empty(stop - start, self.dtype), np.zeros(stop - start, np.uint8)
        counts = np.ones(stop - start, np.uint8)
        filled = 0
        for shard in self.shards:
            offset = shard["offset"]
            begin, end = max(start, offset), min(stop, offset + shard["tokens"])
            if begin < end:
                size = self.dtype.itemsize
                data = self._range(shard, "body", (begin - offset) * size, (end - offset) * size)
                tokens[begin - start:end - start] = np.frombuffer(data, self.dtype)
                if "loss" in shard:
                    data = self._range(shard, "loss", begin - offset, end - offset)
                    counts[begin - start:end - start] = np.frombuffer(data, np.uint8) != 0
                filled += end - begin
            # the end of a shard's last document is flagged at the first token of the next shard
            if offset < stop and offset + shard["tokens"] >= start:
                ends = self._ends_of(shard)
                i, j = np.searchsorted(ends, np.array([max(0, start - offset), stop - offset], ENDS))
                flags[ends[i:j].astype(np.int64) + (offset - start)] = 1
        if filled != stop - start:
            raise ShardError(f"shards hold {filled} of the tokens [{start}, {stop}) that the curriculum reads: they "
                             f"were replaced since; run the recipe again")
        return tokens, flags, counts

    def _range(self, shard: Mapping[str, Any], kind: str, start: int, stop: int) -> memoryview:
        """Returns bytes [start, stop) of the file `kind` of a shard: its body (the tokens) or its loss mask. The blocks
        that hold them are compared with their checksums first."""
        ref, size = shard[kind], shard["tokens"] * (self.dtype.itemsize if kind == "body" else 1)
        first, last = start // BLOCK, blocks_of(stop)
        data = self.inputs.read_range(ref, first * BLOCK, min(last * BLOCK, size))
        before = 0 if kind == "body" else blocks_of(shard["tokens"] * self.dtype.itemsize) + blocks_of(
            shard["documents"] * ENDS.itemsize)
        sums = np.memmap(self.inputs.fetch(shard["blocks"]), SUMS, "r")[before + first:before + last].tolist()
        if (bad := damaged_block(memoryview(data), first, sums)) is not None:
            raise self.inputs.damaged(ref, f"is damaged at byte {bad * BLOCK:,}")
        return memoryview(data)[start - first * BLOCK:stop - first * BLOCK]

    def _ends_of(self, shard: Mapping[str, Any]) -> np.ndarray:
        name = shard["ends"]["$ref"]
        if name not in self._ends:
            self._ends[name] = np.memmap(self.inputs.fetch(shard["ends"]), ENDS, "r")
        return self._ends[name]


class _Packed(_Windows):
    """Reads packed rows of a stream, which take the place of super-windows, from its shards. Each of `shards` has a
    mapping `packed`: {$ref, facts: the fields of PackedShard, before: number of the stream's rows before the
    shard}."""

    def __init__(self, inputs: TaskInputs, shards: Sequence[Mapping[str, Any]], curriculum: Curriculum,
                 stream: int) -> None:
        super().__init__(inputs, shards, curriculum, stream)
        self.eos, self._before = curriculum.tokenizer.eos, shards[0]["packed"]["before"]
        #: rows of a block, which read the same range of tokens, are read together
        self.step = max(BLOCK_TOKENS // self.longest, BLOCK_ROWS)
        files = tuple(PackedShard(**shard["packed"]["facts"]) for shard in shards)
        maps = {file.index: np.memmap(inputs.fetch(shard["packed"]["ref"]), NUMBERS, "r")
                for file, shard in zip(files, shards)}
        offsets = [shard["offset"] for shard in shards] + [shards[-1]["offset"] + shards[-1]["tokens"]]
        self._rows = PackedRows(Packing("", self.longest, files), offsets, lambda file, first, stop:
                                maps[file.index][first:stop], curriculum.streams[stream].train)

    def supers(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the packed rows (training samples of whole documents) [first, stop) back to back, as the three arrays
        of `read`. Padding consists of EOS tokens. Its first token is flagged like the first token of a document. No
        token of the padding counts for the loss."""
        width, row = self.longest + 1, first
        tokens = np.full((stop - first) * width, self.eos, self.dtype)
        flags, counts = np.zeros_like(tokens, np.uint8), np.zeros_like(tokens, np.uint8)
        while row < stop:
            shard = self._rows.shard_of(row - self._before)
            end = min(stop, self._rows.firsts[shard + 1] + self._before)
            pieces, numbers = self._rows.pieces(row - self._before, end - self._before)
            low, high = int(pieces[:, 0].min()), int(pieces[:, 1].max())
            source, _, source_counts = self.read(low, high)
            sizes = pieces[:, 1] - pieces[:, 0]
            filled = np.add.reduceat(sizes, np.cumsum(numbers) - numbers)
            rows = np.repeat(np.arange(row, end) - first, numbers)
            places = np.cumsum(sizes) - sizes - np.repeat(np.cumsum(filled) - filled, numbers) + rows * width
            for place, size, start in zip(places.tolist(), sizes.tolist(), (pieces[:, 0] - low).tolist()):
                tokens[place:place + size] = source[start:start + size]
                counts[place:place + size] = source_counts[start:start + size]
            flags[places] = 1
            flags[(np.arange(row, end) - first)[filled < width] * width + filled[filled < width]] = 1
            row = end
        return tokens, flags, counts

    def starts(self, windows: np.ndarray, first: int, length: int) -> np.ndarray:
        return (windows - first) * (length + 1)
