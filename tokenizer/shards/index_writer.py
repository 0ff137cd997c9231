"""Writes the lookup index of a shard set (`tokenizer.shards.lookup`). Memory hardly grows with the number of documents:
keys are sorted in runs of a fixed size, and the runs are merged from a temporary file. Of each page that was written,
only the first key and the checksum stay in memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipeline.base.domain import domain_of
from pipeline.base.files import replacing
from tokenizer.shards.index import ShardIndex
from tokenizer.shards.lookup import (
    COLUMNS,
    ENTRY,
    HEADER,
    MAGIC,
    PAGE,
    U64,
    VERSION,
    checksum,
    key_of,
    key_of_id,
    name_of,
    sealed,
)
from tokenizer.shards.origin import OpenPart
from tokenizer.shards.urls import documents, paths_of

#: number of entries that are sorted in memory at a time, and that merging all runs holds in memory
RUN = 1 << 21
_DIGITS = np.full(256, 255, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def write_index(shards: ShardIndex, folder: Path, datasets: Iterable[tuple[str, Mapping[str, str]]],
                open_part: OpenPart, run: int = RUN, page: int = PAGE) -> Path:
    """Write the lookup index of a shard set to the folder `folder`, and return its path.

    The URLs of the documents are read from the published datasets, which `datasets` yields as (name, {key of a part:
    its path}). A part is a file of a dataset, and `open_part` opens one. If the texts of the documents are not in the
    store, as with an imported set, the index has no URLs. About `run` entries of each column are sorted in memory at a
    time, and a page of the index has `page` entries. Raises ShardError when a part no longer has the documents that
    were encoded from it."""
    with ExitStack() as stack:
        columns = {name: EntrySorter(folder, run) for name in (COLUMNS if shards.manifest.has_texts else COLUMNS[:1])}
        for sorter in columns.values():
            stack.enter_context(sorter)
        has_hex_ids, first = True, 0
        for ids, urls in documents(shards, paths_of(datasets) if shards.manifest.has_texts else None, open_part):
            keys = hex_keys(ids)
            has_hex_ids = has_hex_ids and keys is not None
            numbers = np.arange(first, first + len(ids), dtype=U64)
            first += len(ids)
            columns["id"].add(np.array([key_of_id(id) for id in ids], U64) if keys is None else keys, numbers)
            for name, texts in (("url", urls), ("domain", [domain_of(url) for url in urls])):
                if name in columns:
                    chosen = [i for i, text in enumerate(texts) if text]
                    columns[name].add(np.array([key_of(texts[i] or "") for i in chosen], U64), numbers[chosen])
        path = folder / name_of(shards.manifest.sha256)
        with replacing(path) as part, open(part, "wb") as file:
            file.write(bytes(HEADER))
            trees = {name: write_tree(file, sorter.sorted(), page) for name, sorter in columns.items()}
            file.seek(0)
            file.write(sealed({"magic": MAGIC, "version": VERSION, "set": shards.manifest.sha256,
                               "documents": shards.manifest.documents, "hex_ids": has_hex_ids, "page": page,
                               "columns": trees}))
    return path


def hex_keys(ids: Sequence[str]) -> np.ndarray | None:
    """Return the keys of all ids as u64 (n,), as `lookup.key_of_id` computes them. Returns None when some id is not 32
    hex digits (in lower case)."""
    digits = _DIGITS[np.frombuffer("".join(ids).encode(), np.uint8)]
    if any(len(id) != 32 for id in ids) or len(digits) != 32 * len(ids) or (digits == 255).any():
        return None
    pairs = digits.reshape(-1, 16, 2)
    return (pairs[..., 0] << 4 | pairs[..., 1])[:, :8].copy().view(">u8").ravel().astype(U64)


def write_tree(file: BinaryIO, blocks: Iterator[np.ndarray], size: int) -> dict[str, object]:
    """Append the tree of a column of the lookup index to `file`, which is at its end. `blocks` are the column's sorted
    entries, arrays [n, 2]. A page has `size` entries; the last page of a level may have fewer.

    Returns what the header says of the column: `levels` has [offset, number of entries] for each level, leaves first,
    and `root` is the checksum of the single page of the last level. A column without entries has no levels, and the
    root 0."""
    levels: list[list[int]] = []
    while True:
        above: list[tuple[int, int]] = []
        levels.append([file.tell(), 0])
        for page in _pages(blocks, size):
            data = page.astype(U64).tobytes()
            file.write(data)
            above.append((int(page[0, 0]), checksum(data)))
            levels[-1][1] += len(page)
        if not above:
            return {"levels": [], "root": 0}
        if len(above) == 1:
            return {"levels": levels, "root": above[0][1]}
        blocks = iter([np.array(above, U64)])


def _pages(blocks: Iterator[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Cut arrays of entries into pages of `size` entries. The last page may have fewer."""
    rest = np.empty((0, 2), U64)
    for block in blocks:
        rest = np.concatenate([rest, block])
        whole = len(rest) // size * size
        yield from np.split(rest[:whole], range(size, whole, size)) if whole else ()
        rest = rest[whole:]
    if len(rest):
        yield rest


# -- sorting -----------------------------------------------------------------------------------------------------------
class EntrySorter:
    """Sorts entries (key, number) by key; entries with equal keys keep the order in which they were added. About `run`
    entries are held in memory, and the rest in a temporary file in `folder`."""

    def __init__(self, folder: Path, run: int) -> None:
        self._file, self._run = tempfile.TemporaryFile(dir=folder), run    # noqa: SIM115  closed by `__exit__`
        self._ends = [0]                                          # where the runs in the file end, in entries
        self._pending: list[np.ndarray] = []
        self._waiting = 0

    def __enter__(self) -> EntrySorter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        self._pending.append(np.stack([keys, numbers], 1))
        self._waiting += len(keys)
        if self._waiting >= self._run:
            self._spill()

    def _spill(self) -> None:
        if self._waiting:
            self._file.write(_by_key(self._pending).tobytes())
            self._file.flush()
            self._ends.append(self._ends[-1] + self._waiting)
            self._pending, self._waiting = [], 0

    def sorted(self) -> Iterator[np.ndarray]:
        """Yield all entries in order, as arrays [n, 2] of at most about `run` entries."""
        self._spill()
        size = max(1, self._run // len(self._ends))
        runs = [_IndexRun(self._file.fileno(), first, stop, size) for first, stop in zip(self._ends, self._ends[1:])]
        while runs := [run for run in runs if len(run.block)]:
            # all entries with keys below this one are in memory, because every run is in memory up to it
            bound = min(run.block[-1, 0] for run in runs)
            yield _by_key([run.below(bound) for run in runs])
            for run in runs:                      # one key may have more entries than the memory holds
                yield from run.equal(bound)


def _by_key(blocks: Sequence[np.ndarray]) -> np.ndarray:
    entries = np.concatenate(blocks)
    return entries[np.argsort(entries[:, 0], kind="stable")]


class _IndexRun:
    """A sorted run of entries in a file, which is read from front to back. `block` has the next entries, at most
    `size`; it is empty at the end of the run."""

    def __init__(self, descriptor: int, first: int, stop: int, size: int) -> None:
        self._descriptor, self._next, self._stop, self._size = descriptor, first, stop, size
        self.block = np.empty((0, 2), U64)
        self._fill()

    def _fill(self) -> None:
        if not len(self.block) and self._next < self._stop:
            count = min(self._size, self._stop - self._next)
            data = os.pread(self._descriptor, count * ENTRY, self._next * ENTRY)
            self.block = np.frombuffer(data, U64).reshape(-1, 2)
            self._next += len(self.block)

    def _take(self, count: int) -> np.ndarray:
        taken, self.block = self.block[:count], self.block[count:]
        self._fill()
        return taken

    def below(self, key: np.uint64) -> np.ndarray:
        """Remove the entries with keys below `key` from the front of the run, and return them. All of them must be in
        `block`, that is, `key` must not be above the last key in `block`."""
        return self._take(int(np.searchsorted(self.block[:, 0], key, "left")))

    def equal(self, key: np.uint64) -> Iterator[np.ndarray]:
        """Remove the entries with the key `key` from the front of the run. Yields them a block at a time."""
        while count := int(np.searchsorted(self.block[:, 0], key, "right")):
            yield self._take(count)
