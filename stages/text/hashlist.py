"""Stores big lists of strings (4.5 million blocked domains, for instance) on disk, as sorted 64-bit hashes in a
memory-mapped file.

A Python set of 4.5 million strings costs 2 s and 0.5 GB in every worker. The file has 36 MB, which all workers share,
and takes no time to open. Two different strings have the same hash (xxh3_64) with probability 2**-64, so one in 4 *
10**12 look-ups in a list of this size gives a wrong answer.

A list may have labels: a number from 1 to 255 for each string, which is stored in the lowest byte of the hash. Two
different strings then have the same remaining 56 bits with probability 2**-56.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import xxhash

from pipeline.base.files import replacing

_LABEL = np.uint64(255)


class HashList:
    """A list of strings, stored as hashes in a file that `write_hashes` wrote. `string in hash_list` tells whether the
    list contains a string."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._hashes = np.asarray(np.load(path, mmap_mode="r"))

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, item: str) -> bool:
        value = _hash(item.encode("utf-8", "surrogatepass"))
        at = int(self._hashes.searchsorted(value))
        return at < len(self._hashes) and self._hashes[at] == value


class LabelledList:
    """A list of strings with labels (numbers from 1 to 255), stored as hashes in a file that `write_labelled` wrote."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._hashes = np.asarray(np.load(path, mmap_mode="r"))

    def __len__(self) -> int:
        return len(self._hashes)

    def label(self, item: str) -> int:
        """Return the label (a number from 1 to 255) of a string; 0 if the list lacks the string."""
        value = _hash(item.encode("utf-8", "surrogatepass")) & ~_LABEL
        at = int(self._hashes.searchsorted(value))
        if at == len(self._hashes) or (self._hashes[at] ^ value) > _LABEL:
            return 0
        return int(self._hashes[at] & _LABEL)


def entry(line: bytes) -> bytes:
    """Return the entry in one line of a list, without white space around it. The result is empty if the line is a
    comment, which begins with #."""
    line = line.strip()
    return b"" if line.startswith(b"#") else line


def write_hashes(lines: Iterable[bytes], path: Path, read: Callable[[bytes], bytes] = entry) -> None:
    """Write the sorted hashes of a list of strings to `path`, atomically, for `HashList`. `read` turns a line (UTF-8)
    into the entry to store; empty entries are skipped."""
    values = _hashes(lines, read)
    values.sort()
    _save(path, values[_firsts(values)])


def write_labelled(lists: Iterable[tuple[int, Iterable[bytes]]], path: Path,
                   read: Callable[[bytes], bytes] = entry) -> None:
    """Write the sorted hashes of several lists of strings, with their labels, to `path`, atomically, for
    `LabelledList`. `lists` yields (label, lines) for each list, and `read` turns a line (UTF-8) into the entry to
    store; empty entries are skipped. A string that is in several lists gets the lowest of their labels."""
    parts = []
    for label, lines in lists:
        values = _hashes(lines, read)
        values &= ~_LABEL
        values |= np.uint64(label)
        parts.append(values)
    values = np.concatenate([np.zeros(0, np.uint64), *parts])
    del parts
    values.sort()
    _save(path, values[_firsts(values >> np.uint64(8))])


def _hash(item: bytes) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(item))


def _hashes(lines: Iterable[bytes], read: Callable[[bytes], bytes]) -> np.ndarray:
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(item) for line in lines if (item := read(line))), np.uint64)


def _firsts(values: np.ndarray) -> np.ndarray:
    """Return a boolean array that is true at the first of each run of equal values in a sorted array."""
    firsts = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=firsts[1:])
    return firsts


def _save(path: Path, values: np.ndarray) -> None:
    with replacing(path) as part, open(part, "wb") as f:
        np.save(f, values)
