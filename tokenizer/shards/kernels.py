"""The inner loops of reading many windows (training samples) of a shard, compiled with numba where it is installed."""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from tokenizer.shards.layout import ENDS
from tokenizer.shards.sums import BLOCK

#: how many numbers `gather` needs for each shard
PLACES = 4
#: number of document ends in a block of their file
ENDS_PER_BLOCK = BLOCK // ENDS.itemsize


@njit(cache=True, nogil=True)
def gather(memory: np.ndarray, places: np.ndarray, shards: np.ndarray, firsts: np.ndarray, rows: np.ndarray,
           tokens: np.ndarray, like: np.ndarray, ranges: np.ndarray) -> None:
    """Copy windows (training samples of L + 1 tokens) of a shard set to `tokens`, which has L + 1 columns. Window i
    begins at token firsts[i] of shard shards[i], and goes to tokens[rows[i]]. `memory` are the bytes of this process.
    `places` has four numbers (PLACES) for each shard, so that one call can read from any number of shards: where in
    `memory` its tokens, its document ends, and its `known` (`tokenizer.shards.sums`) begin, and how many document ends
    it has. Tokens are of the type of `like`.

    Also find the documents that end in window i, and write the range [low, high) of their numbers in the shard to
    ranges[i]. These are the ends e with firsts[i] < e <= firsts[i] + L. The range is (-1, -1) if it is not proved
    right. That is so if the ends in the range and their two neighbours do not increase, or if one of them is in a block
    of the file whose entry in `known` is 0 (not compared with its checksum yet)."""
    width, size = tokens.shape[1], like.itemsize
    for i in range(firsts.size):
        first, place = firsts[i], places[shards[i]]
        begin_byte = place[0] + first * size
        row, window = tokens[rows[i]], memory[begin_byte:begin_byte + width * size].view(like.dtype)
        for j in range(width):
            row[j] = window[j]
        ends = memory[place[1]:place[1] + place[3] * 8].view(np.int64)
        known = memory[place[2]:place[2] + (place[3] * 8 + BLOCK - 1) // BLOCK]
        low, high = 0, ends.size
        while low < high:
            middle = (low + high) // 2
            if ends[middle] <= first:
                low = middle + 1
            else:
                high = middle
        high = low
        while high < ends.size and high - low < width and ends[high] < first + width:
            high += 1
        begin, stop = max(low - 1, 0), min(high + 1, ends.size)
        sound = True
        for block in range(begin // ENDS_PER_BLOCK, (stop - 1) // ENDS_PER_BLOCK + 1):
            sound &= known[block] != 0
        for number in range(begin + 1, stop):
            sound &= ends[number - 1] < ends[number]
        # the ends next to the range prove it right
        sound &= (low == 0 or ends[low - 1] <= first) and (low == ends.size or ends[low] > first)
        sound &= (high == low or ends[high - 1] < first + width) and (high == ends.size or ends[high] >= first + width)
        ranges[i, 0], ranges[i, 1] = (low, high) if sound else (-1, -1)


@njit(cache=True, nogil=True)
def positions(memory: np.ndarray, places: np.ndarray, shards: np.ndarray, firsts: np.ndarray, ranges: np.ndarray,
              bounds: np.ndarray) -> None:
    """Write the document ends in the ranges that `gather` has found to `bounds`, as positions 1 to L in their windows
    (training samples). The ends of one window follow those of another."""
    number = 0
    for i in range(firsts.size):
        place = places[shards[i]]
        ends = memory[place[1]:place[1] + place[3] * 8].view(np.int64)
        for end in range(ranges[i, 0], ranges[i, 1]):
            bounds[number] = ends[end] - firsts[i]
            number += 1
