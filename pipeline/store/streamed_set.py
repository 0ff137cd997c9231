"""Reads shard sets (token files) and materialised rows (training samples written as files) of object storage from front
to back, for exports. Little of them is on this machine's disk at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pipeline.store.ahead_file import AheadFile
from pipeline.store.fs import Store
from tokenizer.shards.layout import MANIFEST, REMEDY, Manifest, ShardError
from tokenizer.shards.packed import MANIFEST as PACKED
from tokenizer.shards.packed import Packing
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.rows import MANIFEST as ROWS
from tokenizer.shards.rows import RowSet, read_manifest
from tokenizer.shards.sums import BLOCK, blocks_of, damaged_block


class StreamedSet(ShardSet):
    """A shard set (token files of one stream and split) in the folder `store` of object storage, for reading from front
    to back. Tokens and loss masks are read ahead in memory, and compared with the checksums of their blocks. The other
    files, a few hundredths of the set, are copied to the folder `scratch` of this machine when they are needed.
    `scratch` holds those of at most three neighbouring shards. Raises ShardError when there is no shard set."""

    has_local_tokens = False

    def __init__(self, store: Store, scratch: Path) -> None:
        try:
            data = store.read(MANIFEST)
        except FileNotFoundError as e:
            raise ShardError(f"{store.root}: no shard set there ({e}); name a folder with {MANIFEST}") from e
        manifest = Manifest.loads(data, store.at(MANIFEST))
        (scratch / MANIFEST).write_bytes(data)
        self._store = store
        #: file that is copied → its shard
        self._shard_of = {name: number for number, info in enumerate(manifest.shards)
                          for name in (info.ends, info.table, info.blocks)}
        self._copied: set[str] = set()
        self._ahead: dict[tuple[int, str], AheadFile] = {}
        super().__init__(scratch)

    def published_packing(self) -> Packing | None:
        if PACKED not in self._copied and self._store.exists(PACKED):
            (self.folder / PACKED).write_bytes(self._store.read(PACKED))
            self._copied.add(PACKED)
        packing = super().published_packing()
        if packing is not None:
            (self.folder / packing.name).write_bytes((self.folder / PACKED).read_bytes())
            numbers = {info.index: number for number, info in enumerate(self.manifest.shards)}
            self._shard_of |= {file.file: numbers[file.index] for file in packing.files}
        return packing

    def read(self, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        return np.concatenate([np.empty(0, self.dtype), *(
            np.frombuffer(self._bytes(shard, "body", first * size, end * size), self.dtype)
            for shard, first, end, _ in self._pieces(start, stop))])

    def _mask(self, start: int, stop: int) -> np.ndarray:
        flags = np.ones(stop - start, bool)
        for shard, first, end, offset in self._pieces(start, stop):
            if self.manifest.shards[shard].loss:
                flags[offset:offset + end - first] = np.frombuffer(self._bytes(shard, "loss", first, end), bool)
        return flags

    def _bytes(self, shard: int, kind: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a shard's tokens (`kind` "body") or loss mask ("loss"), after their blocks
        were compared with the checksums. Raises ShardError when the file is missing, or damaged at the second reading,
        too."""
        info = self.manifest.shards[shard]
        name, size = getattr(info, kind), info.tokens * (self.dtype.itemsize if kind == "body" else 1)
        if (shard, kind) not in self._ahead:
            self._leave({shard})
            there = self._store.size(name)
            if there != size:
                raise ShardError(f"{self.folder / name}: {'missing' if there is None else f'{there:,} bytes'}, the "
                                 f"manifest says {size:,} bytes: {REMEDY}")
            self._ahead[shard, kind] = AheadFile(size, lambda a, b: self._store.read_range(name, a, b))
        first, last = start // BLOCK, blocks_of(stop)
        ahead, sums = self._ahead[shard, kind], self.block_sums(shard, kind)[first:last].tolist()
        damaged: int | None = None
        for _ in range(2):                                   # requested twice, because connections, too, damage bytes
            try:
                data = memoryview(ahead.read_at(first * BLOCK, (last - first) * BLOCK))
            except OSError as e:
                raise ShardError(f"{self.folder / name}: cannot be read ({e}); run the command again") from e
            damaged = damaged_block(data, first, sums)
            if damaged is None:
                return bytes(data[start - first * BLOCK:stop - first * BLOCK])
            ahead.forget(first * BLOCK, last * BLOCK)
        raise ShardError(f"{self.folder / name}: damaged at byte {(damaged or 0) * BLOCK:,}: {REMEDY}")

    def _map(self, name: str, dtype: np.dtype, items: int) -> tuple[np.ndarray, mmap.mmap | None]:
        self._copy(name)
        return super()._map(name, dtype, items)

    @contextlib.contextmanager
    def table(self, shard: int) -> Iterator[pq.ParquetFile]:
        self._copy(self.manifest.shards[shard].table)
        with super().table(shard) as table:
            yield table

    def _copy(self, name: str) -> None:
        if name in self._copied:
            return
        shard = self._shard_of[name]
        self._leave({shard - 1, shard, shard + 1})
        try:
            self._store.download(name, str(self.folder / name))
        except FileNotFoundError as e:
            raise ShardError(f"{self.folder / name}: missing: {REMEDY}") from e
        self._copied.add(name)

    def _leave(self, kept: set[int]) -> None:
        """Remove the copied files, and close the open ones, of all shards whose numbers are not in `kept`."""
        for name in [name for name in self._copied if self._shard_of.get(name, -1) not in {-1, *kept}]:
            os.unlink(self.folder / name)
            self._copied.remove(name)
            self._maps.pop(name, None)
        self._at[:] = -1                                     # addresses of what is unmapped now
        for of_shards in (self._ends, self._tokens, self._memories):
            for shard in of_shards.keys() - kept:
                del of_shards[shard]
        for key in [key for key in self._with_sums if key[0] not in kept]:
            del self._with_sums[key]
        for key in [key for key in self._ahead if key[0] not in kept]:
            self._ahead.pop(key).close()

    def close(self) -> None:
        self._leave(set())


class StreamedRows(RowSet):
    """The materialised rows (training samples written as files) in the folder `store` of object storage. The files that
    hold one range of rows are copied to the folder `scratch` of this machine, one range at a time. Whole files are
    copied because a recorded sha256 covers a whole file; it is compared before a row is used. Raises ShardError when
    there are no rows."""

    def __init__(self, store: Store, scratch: Path) -> None:
        try:
            data = store.read(ROWS)
        except FileNotFoundError as e:
            raise ShardError(f"{store.at(ROWS)}: no materialised rows there ({e}); materialise the run again") from e
        read_manifest(data, store.at(ROWS))
        (scratch / ROWS).write_bytes(data)
        self._store = store
        super().__init__(scratch)

    def maps(self, file_number: int) -> dict[str, np.ndarray]:
        if self._open[0] != file_number and self.manifest.format == "bytes":
            self._open = (-1, None)
            for path in self.folder.iterdir():
                if path.name != ROWS:
                    path.unlink()
            for name in self.manifest.files[file_number].files.values():
                try:
                    self._store.download(name, str(self.folder / name))
                except FileNotFoundError as e:
                    raise ShardError(f"{self.folder / name}: missing; materialise the run again") from e
        return super().maps(file_number)
