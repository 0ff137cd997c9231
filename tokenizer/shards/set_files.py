"""Opens the files of a shard set and checks what is read of them against the checksums of the set."""

from __future__ import annotations

import bisect
import hashlib
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from pyarrow import ArrowException, fs

from pipeline.base.parquet import open_parquet
from tokenizer.shards.index import ShardIndex
from tokenizer.shards.layout import ENDS, MANIFEST, REMEDY, TABLE_ROWS, Manifest, ShardError
from tokenizer.shards.mapped import mapped_file
from tokenizer.shards.page_cache import PageCache
from tokenizer.shards.sums import SUMS, CheckedFile, blocks_of

#: whether a memory map keeps the file open (`tokenizer.shards.mapped`)
HAS_DESCRIPTOR = sys.version_info < (3, 13)


class DocumentEnds(NamedTuple):
    """The document ends of a shard, int64, in two forms, because numpy is faster with many values, and a memoryview
    with one."""

    array: np.ndarray
    view: memoryview
    file: CheckedFile


class SetFiles(ShardIndex):
    """The files of a shard set: its manifest, and for each shard the tokens, the document ends, the loss mask (whether
    each token counts in the loss), their checksums, and the document table. The arguments are those of
    `tokenizer.shards.reader.ShardSet`.

    Tokens, ends and masks are memory-mapped when they are first needed, and stay mapped."""

    def __init__(self, path: str | Path, sha256: str | None = None, filesystem: fs.FileSystem | None = None) -> None:
        path, self.filesystem = Path(path), filesystem or fs.LocalFileSystem()
        names = [path] if path.suffix == ".json" else \
            [path / f"shards-{(sha256 or '')[:16]}.json", path / MANIFEST]
        try:
            infos = self.filesystem.get_file_info([str(name) for name in names])
            path = next((name for name, info in zip(names, infos) if info.type == fs.FileType.File), names[-1])
            with self.filesystem.open_input_stream(str(path)) as file:
                text = file.read()
        except FileNotFoundError as e:
            raise ShardError(f"{path}: no shard set there; run the recipe that writes it") from e
        except OSError as e:
            raise ShardError(f"{path}: cannot be read ({e})") from e
        super().__init__(Manifest.loads(text, str(path)))
        if sha256 is not None and self.manifest.sha256 != sha256:
            raise ShardError(f"{path}: holds shard set {self.manifest.sha256[:16]}…, pinned is {sha256[:16]}…: the "
                             f"data changed since the curriculum was resolved; resolve it again or restore the set")
        self.folder = path.parent
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self.eos, self.vocab_size = self.manifest.eos, self.manifest.vocab_size
        self.documents_count = self.manifest.documents
        self.page_cache = PageCache()
        self._maps: dict[str, tuple[np.ndarray, mmap.mmap | None]] = {}
        self._with_sums: dict[tuple[int, str], CheckedFile] = {}
        #: shard → what every window needs. Looking up the files again would take as long as copying a window
        self._starts = np.array(self.offsets)
        self._tokens: dict[int, tuple[np.ndarray, CheckedFile]] = {}
        self._ends: dict[int, DocumentEnds] = {}
        self._memories: dict[int, mmap.mmap] = {}

    @property
    def sha256(self) -> str:
        return self.manifest.sha256

    @contextmanager
    def table(self, shard: int) -> Iterator[pq.ParquetFile]:
        """Open the document table of shard number `shard` (a Parquet file) in a context. Raises ShardError when the
        table is missing, or when reading it within the context fails."""
        path = self.folder / self.manifest.shards[shard].table
        try:
            with self.filesystem.open_input_file(str(path)) as file, open_parquet(file) as table:
                yield table
        except FileNotFoundError as e:
            raise ShardError(f"{path}: missing: {REMEDY}") from e
        except (OSError, ArrowException) as e:
            raise ShardError(f"{path}: cannot be read ({e}); if it is damaged, {REMEDY}") from e

    def body(self, shard: int) -> np.ndarray:
        """Return the tokens of a shard as a read-only memory map."""
        info = self.manifest.shards[shard]
        return self._map(info.body, self.dtype, info.tokens)[0]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Ask the system to read some ranges of tokens [start, stop) from the disk, without waiting for them.

        A loader calls this for all samples of a batch before it reads the first one. The system then fetches exactly
        these samples, in parallel. Without the call, page faults would fetch the samples one after the other, each with
        read-ahead that is not needed. Does nothing while `page_cache` expects that the page cache has the samples."""
        if not self.page_cache.requests:
            return
        size, memories, page = self.dtype.itemsize, self._memories, mmap.PAGESIZE
        offsets, willneed = self.offsets, getattr(mmap, "MADV_WILLNEED", 0)
        for start, stop in ranges:
            shard = bisect.bisect_right(offsets, start) - 1
            # nearly every range is in one shard; calling `_pieces` for it would take as long as the request itself
            pieces = ((shard, start - offsets[shard], stop - offsets[shard], 0),) \
                if start < stop <= offsets[shard + 1] else self._pieces(start, stop)
            for number, begin, end, _ in pieces:
                memory = memories.get(number) or self._open_memory(number)
                if memory is not None:
                    first = begin * size // page * page
                    memory.madvise(willneed, first, end * size - first)

    def size_now(self, name: str) -> int:
        """Return the present size of a file of the set. Raises OSError when the file is gone. On Python below 3.13, a
        mapped file is still open, so its size is read by its descriptor, which is faster. A file that was removed then
        keeps its size."""
        memory = self._maps[name][1] if name in self._maps else None
        if memory is not None and HAS_DESCRIPTOR:
            return memory.size()
        return os.stat(f"{self.folder}/{name}").st_size

    def _open_memory(self, shard: int) -> mmap.mmap | None:
        """Return the memory map of a shard's tokens, for `prefetch`. Returns None if the shard has no tokens, or if the
        system has no madvise."""
        info = self.manifest.shards[shard]
        _, memory = self._map(info.body, self.dtype, info.tokens)
        if memory is not None and hasattr(memory, "madvise"):
            self._memories[shard] = memory
        return self._memories.get(shard)

    def _open_tokens(self, shard: int) -> tuple[np.ndarray, CheckedFile]:
        self._tokens[shard] = self.body(shard), self._file(shard, "body")
        return self._tokens[shard]

    def _open_ends(self, shard: int) -> DocumentEnds:
        ends = self._shard_ends(shard).view(np.int64)
        self._ends[shard] = DocumentEnds(ends, ends.data, self._file(shard, "ends"))
        return self._ends[shard]

    def _shard_ends(self, shard: int) -> np.ndarray:
        info = self.manifest.shards[shard]
        return self._map(info.ends, ENDS, info.documents)[0]

    def _ends_between(self, shard: int, low: int, high: int) -> tuple[int, int]:
        """Return the index range [first, last) of those document ends e of a shard for which low <= e < high. Raises
        ShardError when an end that decides the result is damaged.

        A binary search finds the range, and may read damaged ends on its way. Afterwards, checksums are compared only
        for the blocks with the ends of the range and the two ends next to it. Ends increase. So if these ends are
        sound, and the two neighbours lie outside [low, high), the range is right."""
        _, end, file = self._ends.get(shard) or self._open_ends(shard)
        count, size = len(end), ENDS.itemsize
        first = bisect.bisect_left(end, low)
        most = first + high - low                       # every document has at least one token
        last = bisect.bisect_left(end, high, first, most if most < count else count)
        file.check((first - 1) * size if first else 0, (last + 1 if last < count else count) * size)
        if (first > 0 and end[first - 1] >= low) or (first < count and end[first] < low) or (
                last > 0 and end[last - 1] >= high) or (last < count and end[last] < high):
            raise ShardError(f"{self.folder / self.manifest.shards[shard].ends}: ends do not increase: {REMEDY}")
        return first, last

    def _file(self, shard: int, kind: str) -> CheckedFile:
        """Return one of a shard's files with the checksums of its blocks. `kind` is body (tokens), ends (of documents)
        or loss (mask). The file must already be mapped into memory.

        Blocks are checked whenever they are read. Blocks of ends are checked only the first time, because hundreds of
        windows read the same one."""
        if (shard, kind) not in self._with_sums:
            name = getattr(self.manifest.shards[shard], kind)
            self._with_sums[shard, kind] = CheckedFile(self.folder / name, memoryview(self._maps[name][1] or b""),
                                                     self.block_sums(shard, kind), once=kind == "ends")
        return self._with_sums[shard, kind]

    def block_sums(self, shard: int, kind: str) -> np.ndarray:
        """Return the checksums of the blocks of one of a shard's files; `kind` is body (tokens), ends (of documents) or
        loss (mask)."""
        info = self.manifest.shards[shard]
        body, ends = blocks_of(info.tokens * self.dtype.itemsize), blocks_of(info.documents * ENDS.itemsize)
        first = {"body": 0, "ends": body, "loss": body + ends}[kind]
        size = {"body": body, "ends": ends, "loss": blocks_of(info.tokens)}[kind]
        return self._sums(shard)[first:first + size]

    def _sums(self, shard: int) -> np.ndarray:
        """Return the checksums of all blocks of a shard's files: first those of the body (tokens), then of the document
        ends, then of the loss mask (whether each token counts in the loss). At the first call for a shard, the file
        with the checksums is compared with the sha256 in the manifest."""
        info = self.manifest.shards[shard]
        is_checked = info.blocks in self._maps
        blocks = sum(map(blocks_of, (info.tokens * self.dtype.itemsize, info.documents * ENDS.itemsize,
                                     info.tokens if info.loss else 0)))
        sums, memory = self._map(info.blocks, SUMS, blocks)
        if not is_checked and hashlib.sha256(memory or b"").hexdigest() != info.blocks_sha256:
            del self._maps[info.blocks]
            raise ShardError(f"{self.folder / info.blocks}: damaged: {REMEDY}")
        return sums

    def _map(self, name: str, dtype: np.dtype, items: int) -> tuple[np.ndarray, mmap.mmap | None]:
        """Return the contents of a file as (read-only array of `items` items, memory map of the file, or None if it is
        empty). A file is mapped once and stays mapped. Raises ShardError when it is missing or has another size."""
        if name not in self._maps:
            self._maps[name] = mapped_file(self.folder / name, dtype, items, len(self.manifest.shards))
        return self._maps[name]

    def _table_rows(self, shard: int, first: int, stop: int, columns: list[str] | None = None) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with self.table(shard) as table:
            for group in range(first // TABLE_ROWS, (stop - 1) // TABLE_ROWS + 1):
                start = group * TABLE_ROWS
                table_rows = table.read_row_group(group, columns)
                rows += table_rows.slice(max(0, first - start), stop - max(first, start)).to_pylist()
        return rows
