"""Counts repeated word n-grams as DCLM and RedPajama-v2 do: every copy counts, the first one included.

The module `ngrams`, in contrast, counts as datatrove does, without the first copy. Words are compared, not only their
hashes, so results are equal on every machine. The code of the search stands in both modules, because a shared function
takes 3 to 5 times as long, inlined or not (numba 0.68, web pages).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.base.compiled import njit


def number(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Give the different words of a text numbers from 0, in the order in which they first occur. Returns (the number of
    each word of the text, in order, int32; for each number, the length of its word in characters, int32)."""
    id_of = {word: i for i, word in enumerate(dict.fromkeys(words))}
    ids = np.fromiter(map(id_of.__getitem__, words), np.int32, len(words))
    return ids, np.fromiter(map(len, id_of), np.int32, len(id_of))


@njit(cache=True, nogil=True)
def repeated(ids: np.ndarray, lengths: np.ndarray, low: int, high: int) -> np.ndarray:
    """Measure the repeated word n-grams of a text. `ids` holds the word numbers of the text, and `lengths[i]` is the
    number of characters of the word with number i. Returns a row of four int64 for every n from `low` to `high`:

    1. count of the most frequent n-gram
    2. characters of the first n-gram with that count
    3. characters of the longest n-gram with that count
    4. characters of all words inside an n-gram that occurs at least twice, each word once

    Spaces do not count as characters. If the text has fewer than n words, the row holds zeros.
    """
    words = ids.shape[0]
    out = np.zeros((high - low + 1, 4), np.int64)
    size = 16
    while size < 2 * words:
        size *= 2
    mask = size - 1
    table = np.empty(size, np.int32)
    number_of = np.empty(words, np.int32)
    counts = np.zeros(words, np.int32)
    hashes = np.zeros(words, np.uint64)
    for i in range(words):
        hashes[i] = np.uint64(1469598103934665603)
    for n in range(1, high + 1):
        # the hash of the n-gram at i extends that of the (n-1)-gram there by one word
        total = words - n + 1
        for i in range(total):
            h = (hashes[i] ^ np.uint64(ids[i + n - 1])) * np.uint64(0x9E3779B97F4A7C15)
            hashes[i] = h ^ (h >> np.uint64(29))
        if n < low or total <= 0:
            continue
        table[:] = -1
        counts[:total] = 0
        for i in range(total):
            slot = np.int64(hashes[i] & np.uint64(mask))
            while True:
                first = table[slot]
                if first < 0:
                    table[slot] = first = i
                    break
                equal = hashes[first] == hashes[i]
                if equal:
                    for k in range(n):
                        if ids[first + k] != ids[i + k]:
                            equal = False
                            break
                if equal:
                    break
                slot = (slot + 1) & mask
            number_of[i] = first
            counts[first] += 1
        best = 0
        for i in range(total):
            best = max(best, counts[i])
        row = n - low
        out[row, 0] = best
        reached = 0                                       # words before it have been counted
        for i in range(total):
            if counts[i] == best:                         # i is the first place of such an n-gram
                characters = 0
                for k in range(n):
                    characters += lengths[ids[i + k]]
                if out[row, 1] == 0:
                    out[row, 1] = characters
                out[row, 2] = max(out[row, 2], characters)
            if counts[number_of[i]] > 1:
                for k in range(max(reached, i), i + n):
                    out[row, 3] += lengths[ids[k]]
                reached = i + n
    return out
