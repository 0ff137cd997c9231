"""Finds two documents of an import that have the same id."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from pipeline.base.parquet import open_parquet
from tokenizer.imports.source import TokenFileError

#: number of hashes that are compared at a time
BLOCK = 1 << 20


class IdHashes:
    """The hashes of the ids of all documents of an import, 8 bytes each. They are in the file `path`, so memory does
    not grow with their number."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        path.touch()

    def add(self, ids: Sequence[str]) -> None:
        with open(self.path, "ab") as file:
            np.fromiter(map(hashed, ids), "<u8", len(ids)).tofile(file)
        self.count += len(ids)

    def add_file(self, path: Path) -> None:
        """Add the hashes in the file of another IdHashes."""
        with open(path, "rb") as other, open(self.path, "ab") as file:
            shutil.copyfileobj(other, file, BLOCK)
        self.count += path.stat().st_size // 8

    def sort(self) -> None:
        """Sort the hashes in the file. Its bytes then depend only on the ids, not on their order."""
        if self.count:
            np.memmap(self.path, "<u8", "r+", shape=(self.count,)).sort()

    def check(self, documents: Iterable[tuple[str, str]]) -> None:
        """Raise TokenFileError if two documents have the same id. The file of hashes is removed in any case.
        `documents` yields the id and the place (file and number) of each document; it is read only when two hashes are
        equal."""
        self.sort()
        hashes = np.memmap(self.path, "<u8", "r", shape=(self.count,)) if self.count else np.empty(0, "<u8")
        doubled: set[int] = set()
        for start in range(0, self.count, BLOCK):
            block = np.asarray(hashes[start:start + BLOCK + 1])
            doubled.update(block[1:][block[1:] == block[:-1]].tolist())
        del hashes
        self.path.unlink()
        if not doubled:
            return
        seen: dict[str, str] = {}                 # id whose hash is doubled → its first document
        for id, place in documents:
            if hashed(id) not in doubled:
                continue
            if id in seen:
                raise TokenFileError(f"{place}: has the id {id[:80]!r} of {seen[id]}; ids must differ: rename one, or "
                                     f"leave the ids out")
            seen[id] = place


def hashed(id: str) -> int:
    return xxhash.xxh3_64_intdigest(id.encode())


def places_in(tables: Iterable[BinaryIO], files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the id and the place (file and number, as text) of every document in document tables of shards. `files` are
    the names of the files to which the numbers in the column `part` refer. The tables are closed."""
    for file in tables:
        with file, open_parquet(file) as table:
            for batch in table.iter_batches(columns=["id", "part", "row"], use_threads=False):
                for id, part, row in zip(*(batch.column(name).to_pylist() for name in ("id", "part", "row"))):
                    yield id, f"{files[part]}, document {row:,}"
