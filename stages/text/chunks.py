"""Splits texts into words quickly, by a table of chunks (runs of characters without white space) and their words.

A text is read once, as UTF-8 bytes. `scan` cuts it at white space (as `str.split` does) and looks each chunk up in a
hash table of byte strings. `fold` joins the words of all chunks and counts the sentences of every line. Both functions
are compiled, and neither makes a Python object for a chunk. Two chunks are the same only if their bytes are equal;
equal hashes are not enough. Each table has a random seed for its hash function, so that nobody can write a text whose
chunks all collide. The seed changes no result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from pipeline.base.compiled import njit

#: The record of a chunk, half a cache line: its hash, its first eight bytes, its offset and size in `blob`, the index
#: of its first word in `parts`, the number of its words, and whether a neighbouring chunk may change how it is split
#: into words (`unsure`).
CHUNK = np.dtype([("hash", np.int64), ("head", np.uint64), ("offset", np.uint32), ("size", np.int32),
                  ("first", np.int32), ("count", np.int16), ("unsure", np.uint8)], align=True)
#: How a chunk changes the count of sentences. For a chunk inside a sentence, `begun` is the number of sentences that
#: begin in it, and `open` is 1 if it has an end mark (such as a full stop) after which no sentence has begun yet.
#: `begun_after` and `open_after` are the same numbers for a chunk that follows an end mark.
STEP = np.dtype([("begun", np.int16), ("begun_after", np.int16), ("open", np.uint8), ("open_after", np.uint8)])
#: Columns of the table of lines: first byte, the byte after the last, number of chunks, and number of sentences. The
#: last is -1 if the table of chunks does not suffice and spaCy's rules must count the sentences.
LINE_START, LINE_END, LINE_CHUNKS, LINE_SENTENCES = range(4)

#: classes of bytes: 0 part of a chunk, 1 white space, 2 white space that ends a line, 3 the first byte of a longer
#: character that may be white space
_CLASSES = np.zeros(256, np.uint8)
_CLASSES[[0x09, 0x1F, 0x20]] = 1
_CLASSES[[0x0A, 0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E]] = 2
_CLASSES[[0xC2, 0xE1, 0xE2, 0xE3]] = 3


class Chunks:
    """A table of chunks (runs of characters without white space) and the words of which each consists. Chunks are
    numbered from 0 in the order in which they are added.

    `rows` (CHUNK) and `steps` (STEP) have an entry for each chunk. `blob` (uint8) holds the bytes of all chunks, and
    `parts` (int32) the numbers of their words. `slots` (int32) is the hash table (open addressing, -1 is free).
    """

    def __init__(self) -> None:
        self.seed = int.from_bytes(os.urandom(7), "little")
        self.slots = np.full(1 << 14, -1, np.int32)
        self.rows = np.zeros(1 << 12, CHUNK)
        self.steps = np.zeros(1 << 12, STEP)
        self.blob = np.zeros(1 << 16, np.uint8)
        self.parts = np.zeros(1 << 13, np.int32)
        self.count = self.bytes = self.words = 0

    def __len__(self) -> int:
        return self.count

    def extend(self, chunks: Sequence[bytes], words: Sequence[int], counts: Sequence[int],
               steps: Sequence[tuple[int, int, int, int]], unsure: Sequence[bool]) -> None:
        """Add chunks (runs of characters without white space) that the table does not hold.

        - `words`: the word numbers of all new chunks, one chunk after the other
        - `counts`: for each chunk, the number of its words
        - `steps`: for each chunk, how it changes the count of sentences: (begun, open, begun_after, open_after) of STEP
        - `unsure`: for each chunk, whether a neighbouring chunk may change how it is split into words
        """
        added, data = len(chunks), b"".join(chunks)
        first, last = self.count, self.count + added
        self.rows, self.steps = room(self.rows, last), room(self.steps, last)
        self.parts = room(self.parts, self.words + len(words))
        self.blob = room(self.blob, self.bytes + len(data))
        self.blob[self.bytes:self.bytes + len(data)] = np.frombuffer(data, np.uint8)
        self.parts[self.words:self.words + len(words)] = words
        rows = self.rows[first:last]
        rows["size"] = sizes = np.fromiter(map(len, chunks), np.int64, added)
        rows["offset"] = self.bytes + np.cumsum(sizes) - sizes
        rows["count"] = counts
        rows["first"] = self.words + np.cumsum(counts) - counts
        rows["unsure"] = unsure
        for column, values in zip(("begun", "open", "begun_after", "open_after"), zip(*steps)):
            self.steps[column][first:last] = values
        self.count, self.bytes, self.words = last, self.bytes + len(data), self.words + len(words)
        hash_rows(self.rows, first, last, self.blob, self.seed)
        if 2 * last > len(self.slots):
            self.slots = np.full(1 << (2 * last).bit_length(), -1, np.int32)
            first = 0
        insert(self.slots, self.rows, first, last)

    def forget(self, count: int, size: int, words: int) -> None:
        """Remove the chunks that were added most recently, so that `count` chunks remain. `size` and `words` are the
        numbers of bytes and words that the remaining chunks have in all."""
        remove(self.slots, self.rows, count, self.count)
        self.count, self.bytes, self.words = count, size, words

    def edge(self, chunk: int, side: int) -> int:
        """Return the number of the first word (`side` 0) or last word (`side` 1) of chunk number `chunk`."""
        row = self.rows[chunk]
        return int(self.parts[row["first"] + (row["count"] - 1 if side else 0)])

    def scan(self, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Cut a text, given as UTF-8 bytes, into chunks (runs of characters without white space). Returns three values:
        the number of each chunk in the table, or -1 if the table lacks it, int32[n]; the start and end of each chunk in
        `data`, int32[n, 2]; and how many chunks the table lacks."""
        return scan(data, _CLASSES, self.slots, self.rows, self.blob, self.seed)

    def fold(self, data: np.ndarray, chunks: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the words of a text and facts about its lines, as three values: numbers of the words, int32; lines,
        int32[m, 4]; number of unsure chunks. `chunks` and `spans` are the results of `scan` for the text. A chunk is a
        run without white space. It is unsure if a neighbouring chunk may change how it is split into words.

        The lines have a row for each line with a chunk, and these columns:

        - LINE_START, LINE_END: its bytes in the text, without white space at its ends
        - LINE_CHUNKS: number of chunks
        - LINE_SENTENCES: number of sentences; -1 if the line has an unsure chunk
        """
        return fold(data, _CLASSES, chunks, spans, self.rows, self.steps, self.parts)

    def sentences(self, data: np.ndarray, chunks: np.ndarray, spans: np.ndarray) -> int:
        """Count the sentences in a text as if it were one line. `data` is the text in UTF-8, and `chunks` and `spans`
        are the results of `scan` for it."""
        return int(sentences(data, chunks, spans, self.steps, 0, len(chunks), len(data)))


def utf8(text: str) -> np.ndarray:
    """Return the UTF-8 bytes of a text, uint8. A lone surrogate is encoded in three bytes."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def room(column: np.ndarray, size: int) -> np.ndarray:
    """Return an array with room for `size` entries: `column` itself if it is long enough, and otherwise a copy whose
    length was doubled until the entries fit."""
    grown = len(column)
    while grown < size:
        grown *= 2
    if grown == len(column):
        return column
    out = np.zeros(grown, column.dtype)
    out[:len(column)] = column
    return out


@njit(cache=True, nogil=True)
def packed(data: np.ndarray, start: int, stop: int) -> np.uint64:
    """Return the bytes of `data` from `start` up to, but not including, `stop` as one number, in little-endian order.
    Only the first eight of them are used."""
    value = np.uint64(0)
    for i in range(min(stop - start, 8)):
        value |= np.uint64(data[start + i]) << np.uint64(8 * i)
    return value


@njit(cache=True, nogil=True)
def hash_bytes(data: np.ndarray, start: int, stop: int, head: np.uint64, seed: int) -> np.int64:
    """Return a 64-bit hash of the bytes of `data` from `start` up to, but not including, `stop`. The hash depends on
    `seed`. `head` must be packed(data, start, stop), the first eight of these bytes as a number."""
    h = (np.uint64(seed) ^ np.uint64(head)) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(32)
    while stop - start > 8:
        start += 8
        h = (h ^ packed(data, start, stop)) * np.uint64(0xD6E8FEB86659FD93)
        h ^= h >> np.uint64(32)
    h = (h ^ np.uint64(stop - start)) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(h ^ (h >> np.uint64(29)))


@njit(cache=True, nogil=True)
def hash_rows(rows: np.ndarray, first: int, last: int, blob: np.ndarray, seed: int) -> None:
    """Compute the fields `hash` and `head` (the first eight bytes) of the chunks from `first` up to, but not including,
    `last`. `rows` are the records of the chunks, and `blob` holds their bytes."""
    for i in range(first, last):
        start = np.int64(rows[i].offset)
        stop = start + rows[i].size
        head = packed(blob, start, stop)
        rows[i].head = head
        rows[i].hash = hash_bytes(blob, start, stop, head, seed)


@njit(cache=True, nogil=True)
def insert(slots: np.ndarray, rows: np.ndarray, first: int, last: int) -> None:
    mask = slots.shape[0] - 1
    for i in range(first, last):
        slot = rows[i].hash & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = i


@njit(cache=True, nogil=True)
def remove(slots: np.ndarray, rows: np.ndarray, first: int, last: int) -> None:
    """Remove the chunks from `first` up to, but not including, `last` from the hash table. They must be the chunks that
    were added last. The remaining chunks can still be found, because they were placed before the removed ones."""
    mask = slots.shape[0] - 1
    for i in range(last - 1, first - 1, -1):
        slot = rows[i].hash & mask
        while slots[slot] != i:
            slot = (slot + 1) & mask
        slots[slot] = -1


@njit(cache=True, nogil=True)
def space_at(data: np.ndarray, i: int, classes: np.ndarray) -> int:
    """Return the number of bytes of the white-space character at byte `i`, or 0 if no white space begins there. The
    number is negative if the character ends a line."""
    kind = classes[data[i]]
    if kind == 0:
        return 0
    if kind == 1:
        return 1
    if kind == 2:
        return -1
    size = data.shape[0]
    first = data[i]
    if first == 0xC2:
        if i + 1 < size:
            if data[i + 1] == 0xA0:
                return 2
            if data[i + 1] == 0x85:
                return -2
        return 0
    if i + 2 >= size:
        return 0
    second = data[i + 1]
    third = data[i + 2]
    if first == 0xE1:                                               # Ogham space mark
        return 3 if second == 0x9A and third == 0x80 else 0
    if first == 0xE3:                                               # ideographic space
        return 3 if second == 0x80 and third == 0x80 else 0
    if second == 0x80:
        if 0x80 <= third <= 0x8A or third == 0xAF:                  # U+2000 to U+200A, U+202F
            return 3
        if third == 0xA8 or third == 0xA9:                          # line and paragraph separator
            return -3
        return 0
    return 3 if second == 0x81 and third == 0x9F else 0             # U+205F


@njit(cache=True, nogil=True)
def scan(data: np.ndarray, classes: np.ndarray, slots: np.ndarray, rows: np.ndarray, blob: np.ndarray,
         seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The compiled code of `Chunks.scan`: cuts a text into chunks (runs of characters without white space) and looks
    them up in the table. The docstring of `Chunks.scan` explains the results."""
    size = data.shape[0]
    mask = slots.shape[0] - 1
    room = size // 2 + 1
    chunks = np.empty(room, np.int32)
    spans = np.empty((room, 2), np.int32)
    n = 0
    unknown = 0
    i = np.int64(0)
    while i < size:
        width = space_at(data, i, classes)
        if width:
            i += abs(width)
            continue
        start = i
        i += 1
        while i < size and not (classes[data[i]] and space_at(data, i, classes)):
            i += 1
        head = packed(data, start, i)
        key = hash_bytes(data, start, i, head, seed)
        slot = key & mask
        chunk = np.int32(-1)
        while slots[slot] >= 0:
            number = slots[slot]
            row = rows[number]
            if row.hash == key and row.head == head and row.size == i - start:
                place = np.int64(row.offset)
                equal = True
                for k in range(8, i - start):
                    if blob[place + k] != data[start + k]:
                        equal = False
                        break
                if equal:
                    chunk = number
                    break
            slot = (slot + 1) & mask
        unknown += 1 if chunk < 0 else 0
        chunks[n] = chunk
        spans[n, 0] = start
        spans[n, 1] = i
        n += 1
    return chunks[:n], spans[:n], unknown


@njit(cache=True, nogil=True)
def sentences(data: np.ndarray, chunks: np.ndarray, spans: np.ndarray, steps: np.ndarray, first: int, last: int,
              stop: int) -> int:
    """Count the sentences in the chunks (runs without white space) from `first` up to, but not including, `last`.
    `stop` is the byte at which the counted text ends.

    As in spaCy, white space is a token of its own, except a single space. After an end mark, such a token begins a
    sentence, because it is not punctuation. White space after the last chunk counts, too.
    """
    count = 1
    ended = 0
    for i in range(first, last):
        step = steps[chunks[i]]
        if ended:
            count += step.begun_after
            ended = step.open_after
        else:
            count += step.begun
            ended = step.open
        end = spans[i, 1]
        next = spans[i + 1, 0] if i + 1 < last else stop
        if ended and next > end and (next - end > 1 or data[end] != 32):
            count += 1
            ended = 0
    return count


@njit(cache=True, nogil=True)
def fold(data: np.ndarray, classes: np.ndarray, chunks: np.ndarray, spans: np.ndarray, rows: np.ndarray,
         steps: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The compiled code of `Chunks.fold`: returns the words of a text's chunks and facts about its lines. The docstring
    of `Chunks.fold` explains the results."""
    n = chunks.shape[0]
    words = 0
    breaks = 1
    unsure = 0
    ends = np.zeros(n, np.bool_)                                    # whether a line ends after the chunk
    for i in range(n):
        words += rows[chunks[i]].count
        unsure += rows[chunks[i]].unsure
        if i + 1 < n:
            k = np.int64(spans[i, 1])
            stop = spans[i + 1, 0]
            while k < stop:
                width = space_at(data, k, classes)
                if width < 0:
                    ends[i] = True
                    breaks += 1
                    break
                k += width
    if n == 0:
        breaks = 0
    else:
        ends[n - 1] = True
    ids = np.empty(words, np.int32)
    lines = np.empty((breaks, 4), np.int32)
    filled = 0
    line = 0
    first: int | np.int64 = np.int64(0)
    sure = True
    for i in range(n):
        row = rows[chunks[i]]
        place = row.first
        for part in range(row.count):
            ids[filled] = parts[place + part]
            filled += 1
        if row.unsure:
            sure = False
        if ends[i]:
            lines[line, LINE_START] = spans[first, 0]
            lines[line, LINE_END] = spans[i, 1]
            lines[line, LINE_CHUNKS] = i + 1 - first
            lines[line, LINE_SENTENCES] = (sentences(data, chunks, spans, steps, first, i + 1, np.int64(spans[i, 1]))
                                           if sure else -1)
            line += 1
            first = i + 1
            sure = True
    return ids, lines, unsure
