"""The inner loops of reading many windows (training samples) of a shard, compiled with numba where it is installed."""

from __future__ import annotations

import functools

import numpy as np

from pipeline.base.compiled import njit
from tokenizer.shards.layout import ENDS
from tokenizer.shards.sums import BLOCK

#: how many numbers `gather` needs for each shard
PLACES = 6
#: number of document ends in a block of their file
ENDS_PER_BLOCK = BLOCK // ENDS.itemsize


#: bytes of a part of a block, and words of 8 bytes in it. `crc32` computes the sums of the four parts of a block at the
#: same time, because each word waits for the tables of the word before it
PART = BLOCK // 4
WORDS = PART // 8


@functools.cache
def crc_tables() -> np.ndarray:
    """Return the tables for computing CRC-32, u32 (12, 256). Table k < 8 is for `add_word`: it has the sum of each byte
    followed by k zero bytes. Table 8 + k is for `skip_part`: it has what byte k of a sum becomes after PART zero
    bytes."""
    tables = np.zeros((12, 256), np.uint32)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = tables[0] >> 1 ^ np.where(tables[0] & 1, np.uint32(0xEDB88320), np.uint32(0))
    for k in range(1, 8):
        tables[k] = tables[k - 1] >> 8 ^ tables[0][tables[k - 1] & 255]
    joined = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    for _ in range(PART):
        joined = joined >> 8 ^ tables[0][joined & 255]
    tables[8:] = joined
    return tables


@njit(cache=True, nogil=True)
def add_word(crc: np.uint32, word: np.uint64, tables: np.ndarray) -> np.uint32:
    """Return the sum `crc` continued with the 8 bytes of a word (slicing by 8: Kounavis and Berry 2008)."""
    x, byte = word ^ np.uint64(crc), np.uint64(255)
    return np.uint32(tables[7, x & byte] ^ tables[6, x >> np.uint64(8) & byte] ^ tables[5, x >> np.uint64(16) & byte]
                     ^ tables[4, x >> np.uint64(24) & byte] ^ tables[3, x >> np.uint64(32) & byte]
                     ^ tables[2, x >> np.uint64(40) & byte] ^ tables[1, x >> np.uint64(48) & byte]
                     ^ tables[0, x >> np.uint64(56)])


@njit(cache=True, nogil=True)
def skip_part(crc: np.uint32, tables: np.ndarray) -> np.uint32:
    """Return the sum `crc` continued with PART zero bytes. With it, sums of consecutive parts of a block are joined."""
    byte = np.uint32(255)
    return np.uint32(tables[8, crc & byte] ^ tables[9, crc >> np.uint32(8) & byte]
                     ^ tables[10, crc >> np.uint32(16) & byte] ^ tables[11, crc >> np.uint32(24)])


@njit(cache=True, nogil=True)
def crc32(data: np.ndarray, tables: np.ndarray) -> np.uint32:
    """Return what zlib.crc32 returns for a block of a file, which may be shorter if it is the last one."""
    start, done = np.uint32(0xFFFFFFFF), 0
    if data.size == BLOCK:
        words = data.view(np.uint64)
        second, third, fourth = np.uint32(0), np.uint32(0), np.uint32(0)
        for i in range(WORDS):
            start = add_word(start, words[i], tables)
            second = add_word(second, words[WORDS + i], tables)
            third = add_word(third, words[2 * WORDS + i], tables)
            fourth = add_word(fourth, words[3 * WORDS + i], tables)
        start, done = skip_part(start, tables) ^ second, BLOCK
        start = skip_part(skip_part(start, tables) ^ third, tables) ^ fourth
    for i in range(done, data.size):
        start = start >> np.uint32(8) ^ tables[0, (start ^ np.uint32(data[i])) & np.uint32(255)]
    return start ^ np.uint32(0xFFFFFFFF)


@njit(cache=True, nogil=True)
def gather(memory: np.ndarray, places: np.ndarray, shards: np.ndarray, firsts: np.ndarray, rows: np.ndarray,
           tokens: np.ndarray, like: np.ndarray, tables: np.ndarray, ranges: np.ndarray) -> None:
    """Copy windows (training samples of L + 1 tokens) of a shard set to `tokens`, which has L + 1 columns. Window i
    begins at token firsts[i] of shard shards[i], and goes to tokens[rows[i]]. Tokens have the type of `like`.

    `memory` is the whole memory of this process as one array of bytes. So one call can read from any number of mapped
    files. `places` has a row of PLACES numbers for each shard. The first four are positions in `memory`: those of the
    shard's tokens, of its document ends, of its flags `known` (`tokenizer.shards.sums`), and of the checksums of its
    tokens. The last two are the number of its document ends, and the size of its tokens in bytes. `tables` are those of
    `crc_tables`.

    The documents that end in window i are found, too: their ends e have firsts[i] < e <= firsts[i] + L. The range [low,
    high) of their numbers in the shard is written to ranges[i]. (-1, -1) is written instead if the data cannot be
    trusted, that is in these cases:

    - A block of the window's tokens differs from its checksum.
    - The ends in the range and their two neighbours do not increase.
    - One of these ends is in a block that was not compared with its checksum before (its flag in `known` is 0).

    The caller then checks the window itself, and raises an error if it is damaged."""
    width, size = tokens.shape[1], like.itemsize
    for i in range(firsts.size):
        first, place = firsts[i], places[shards[i]]
        begin_byte = place[0] + first * size
        sums, sound = memory[place[3]:place[3] + (place[5] + BLOCK - 1) // BLOCK * 4].view(np.uint32), True
        for block in range(first * size // BLOCK, ((first + width) * size - 1) // BLOCK + 1):
            data = memory[place[0] + block * BLOCK:place[0] + min(block * BLOCK + BLOCK, place[5])]
            sound &= crc32(data, tables) == sums[block]
        row, window = tokens[rows[i]], memory[begin_byte:begin_byte + width * size].view(like.dtype)
        for j in range(width):
            row[j] = window[j]
        ends = memory[place[1]:place[1] + place[4] * 8].view(np.int64)
        known = memory[place[2]:place[2] + (place[4] * 8 + BLOCK - 1) // BLOCK]
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
        for block in range(begin // ENDS_PER_BLOCK, (stop - 1) // ENDS_PER_BLOCK + 1):
            sound &= known[block] != 0
        for number in range(begin + 1, stop):
            sound &= ends[number - 1] < ends[number]
        # the range is right if its ends, and the two next to it, lie where they should
        sound &= (low == 0 or ends[low - 1] <= first) and (low == ends.size or ends[low] > first)
        sound &= (high == low or ends[high - 1] < first + width) and (high == ends.size or ends[high] >= first + width)
        ranges[i, 0], ranges[i, 1] = (low, high) if sound else (-1, -1)


@njit(cache=True, nogil=True)
def positions(memory: np.ndarray, places: np.ndarray, shards: np.ndarray, firsts: np.ndarray, ranges: np.ndarray,
              bounds: np.ndarray) -> None:
    """Write the document ends that `gather` has found to `bounds`, as positions 1 to L in their windows (training
    samples). They are in the order of the windows, without gaps."""
    number = 0
    for i in range(firsts.size):
        place = places[shards[i]]
        ends = memory[place[1]:place[1] + place[4] * 8].view(np.int64)
        for end in range(ranges[i, 0], ranges[i, 1]):
            bounds[number] = ends[end] - firsts[i]
            number += 1
