"""Reads shard sets (token files) and materialised rows (training samples written as files) of object storage from front
to back, for exports. Little of them is on this machine's disk at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pipeline.store.ahead_file import AheadFile
from pipeline.store.fs import Store
from tokenizer.shards.layout import MANIFEST, REMEDY, Manifest, ShardError
from tokenizer.shards.packed import MANIFEST as PACKED
from tokenizer.shards.packed import Packing
from tokenizer.shards.requested import BlockRange, RequestedSet
from tokenizer.shards.rows import MANIFEST as ROWS
from tokenizer.shards.rows import RowSet, read_manifest
from tokenizer.shards.sums import BLOCK


class StreamedSet(RequestedSet):
    """A shard set (token files of one stream and split) in the folder `store` of object storage, for reading from front
    to back. Raises ShardError when there is no shard set.

    Tokens and loss masks are read ahead in memory, and compared with the checksums of their blocks. The other files, a
    few hundredths of the set, are copied to the folder `scratch` of this machine when they are needed. `scratch` holds
    those of at most three neighbouring shards.
    """

    def __init__(self, store: Store, scratch: Path) -> None:
        try:
            data = store.read(MANIFEST)
        except FileNotFoundError as e:
            raise ShardError(f"{store.root}: no shard set there ({e}); name a folder with {MANIFEST}") from e
        manifest = Manifest.loads(data, store.at(MANIFEST))
        (scratch / MANIFEST).write_bytes(data)
        self._store, self.source = store, str(scratch)
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

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: `AheadFile` requests the next bytes by itself."""

    def request(self, wanted: BlockRange, again: bool) -> bytes:
        key, start, stop = wanted[:2], wanted.first * BLOCK, wanted.stop * BLOCK
        name = getattr(self.manifest.shards[wanted.shard], wanted.kind)
        if key not in self._ahead:
            self._leave({wanted.shard})
            self._ahead[key] = AheadFile(self.checked_size(wanted, self._store.size(name)),
                                         lambda a, b: self._store.read_range(name, a, b))
        if again:
            self._ahead[key].forget(start, stop)
        return self._ahead[key].read_at(start, stop - start)

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
    """The materialised rows (training samples written as files) in the folder `store` of object storage. The rows are
    read range by range. The files that hold a range are copied to the folder `scratch` of this machine, and removed
    when the next range is read. Whole files are copied, because a recorded sha256 covers a whole file, and is compared
    before a row is used.

    Raises ShardError when there are no rows.
    """

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
