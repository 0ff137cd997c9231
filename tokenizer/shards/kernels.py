"""The inner loops of reading many windows of a shard, compiled with numba where it is installed."""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from tokenizer.shards.layout import ENDS
from tokenizer.shards.sums import BLOCK

#: document ends in a block of their file
ENDS_PER_BLOCK = BLOCK // ENDS.itemsize


@njit(cache=True, nogil=True)
def gather(body: np.ndarray, ends: np.ndarray, known: np.ndarray, firsts: np.ndarray, rows: np.ndarray,
           tokens: np.ndarray, found: np.ndarray) -> None:
    """Copy windows from the tokens of a shard, `body`: the one that begins at token firsts[i] to tokens[rows[i]].
    `tokens` has L + 1 columns. Find the document ends e with firsts[i] < e <= firsts[i] + L, and write the range
    [low, high) of their numbers in `ends` to found[i]. The range is (-1, -1) if these ends and the two next to them do
    not increase, or if one of them is in a block of `ends` whose entry in `known` is 0 (not compared with its checksum
    yet)."""
    width = tokens.shape[1]
    for i in range(firsts.size):
        first = firsts[i]
        row, window = tokens[rows[i]], body[first:first + width]
        for j in range(width):
            row[j] = window[j]
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
        # neighbours of the range prove it right
        sound &= (low == 0 or ends[low - 1] <= first) and (low == ends.size or ends[low] > first)
        sound &= (high == low or ends[high - 1] < first + width) and (high == ends.size or ends[high] >= first + width)
        found[i, 0], found[i, 1] = (low, high) if sound else (-1, -1)


@njit(cache=True, nogil=True)
def positions(ends: np.ndarray, firsts: np.ndarray, found: np.ndarray, places: np.ndarray) -> None:
    """Write the document ends that `gather` has found to `places`, those of one window after those of another, as
    positions in their window, 1 to L."""
    place = 0
    for i in range(firsts.size):
        for number in range(found[i, 0], found[i, 1]):
            places[place] = ends[number] - firsts[i]
            place += 1
