"""Measure how many reads, and how much time, a lookup in the index of a shard set takes.

    python -m benchmarks.lookup 100000000 --folder /tmp

The argument is the number of documents in the index (default: 10⁸). The index is synthetic: ids are random numbers, and
every document has a URL. A quarter of the documents have the same host, and every other host has about 38 documents.
The index is written by the code that `tokenmill shards index` uses. The document tables of all shards are one file, so
the disk holds the index (48 bytes per document) and one table. A read is a call of `read` on an unbuffered file; on
object storage it would be a range request.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.parquet import open_parquet, parquet_writer
from tokenizer.shards.find import places_of
from tokenizer.shards.index import ShardIndex
from tokenizer.shards.index_writer import RUN, EntrySorter, write_tree
from tokenizer.shards.layout import TABLE, TABLE_ROWS, Manifest, Shard
from tokenizer.shards.lookup import COLUMNS, HEADER, MAGIC, PAGE, U64, VERSION, Lookup, sealed

#: documents of a shard, about 1 GiB of two-byte tokens
SHARD_DOCS, TOKENS = 700_000, 750
LOOKUPS = 300
SEEDS = dict(zip(COLUMNS, (1, 2, 3), strict=True))


def keys(column: str, numbers: np.ndarray) -> np.ndarray:
    """Return the 64-bit keys of documents in the column `column` of the index. `numbers` are the documents' numbers. A
    key is splitmix64 of the document's number, or, for the column `domain`, of the number of its host."""
    x = numbers.astype(np.uint64)
    if column == "domain":                                             # a quarter of the documents have one host
        x = np.where(x % 4 == 0, 0, x // 50)
    x = (x + np.uint64(SEEDS[column] << 40)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class CountedFile(io.FileIO):
    reads = size_read = 0

    def readinto(self, buffer: Any, /) -> int:
        CountedFile.reads, CountedFile.size_read = CountedFile.reads + 1, CountedFile.size_read + len(buffer)
        return super().readinto(buffer) or 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        CountedFile.reads, CountedFile.size_read = CountedFile.reads + 1, CountedFile.size_read + len(data)
        return data


class Shards(ShardIndex):
    """Shards whose document tables are all the file `path`."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        super().__init__(manifest)
        self._path = path

    @contextlib.contextmanager
    def table(self, shard: int) -> Iterator[pq.ParquetFile]:
        with CountedFile(self._path) as file, open_parquet(file) as table:
            yield table


def write(folder: Path, count: int) -> tuple[Manifest, Path, Path]:
    table, index = folder / "table.parquet", folder / "lookup.index"
    rng = np.random.default_rng(0)
    with parquet_writer(table, TABLE, compression_level=3, write_statistics=True) as writer:
        for first in range(0, SHARD_DOCS, TABLE_ROWS):
            rows = np.arange(first, min(first + TABLE_ROWS, SHARD_DOCS))
            writer.write_table(pa.table([(rows + 1) * TOKENS, [rng.bytes(16).hex() for _ in rows], rows % 90 * 0, rows,
                                         rows * 0 + 3000], schema=TABLE))
    infos = [Shard(i, SHARD_DOCS * TOKENS, min(SHARD_DOCS, count - first), 0, *[""] * 9)
             for i, first in enumerate(range(0, count, SHARD_DOCS))]
    manifest = Manifest.of("web", "train", "", 50_000, 0, tuple(infos))
    trees = {}
    with open(index, "wb") as file:
        file.write(bytes(HEADER))
        for column in COLUMNS:
            with EntrySorter(folder, RUN) as sorter:
                for first in range(0, count, 1 << 20):
                    numbers = np.arange(first, min(first + (1 << 20), count), dtype=U64)
                    sorter.add(keys(column, numbers), numbers)
                trees[column] = write_tree(file, sorter.sorted(), PAGE)
        file.seek(0)
        file.write(sealed({"magic": MAGIC, "version": VERSION, "set": manifest.sha256, "documents": count,
                           "hex_ids": True, "page": PAGE, "columns": trees}))
    return manifest, table, index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", type=int, nargs="?", default=10**8)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        began = time.process_time()
        manifest, table, index = write(Path(name), options.documents)
        print(f"{options.documents:,} documents: {index.stat().st_size / 1e9:.2f} GB written in "
              f"{time.process_time() - began:.0f} CPU-s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB "
              f"resident")
        shards, rng = Shards(manifest, table), random.Random(1)
        for column in COLUMNS:
            reads, sizes, seconds = [], [], []
            for _ in range(LOOKUPS):
                number = rng.randrange(options.documents)
                key = int(keys(column, np.array([number]))[0])
                CountedFile.reads = CountedFile.size_read = 0
                start = time.perf_counter()
                with CountedFile(index) as file:
                    numbers = Lookup(file, manifest, str(index)).numbers(column, key, key)  # type: ignore[arg-type]
                    first = next(numbers)
                    next(places_of(shards, iter([first])))
                seconds.append(time.perf_counter() - start)
                assert column == "domain" or first == number
                reads.append(CountedFile.reads)
                sizes.append(CountedFile.size_read)
            print(f"{column:7} {max(reads)} reads at most, {sum(reads) / LOOKUPS:.2f} in the mean, of "
                  f"{sum(sizes) / LOOKUPS / 1e3:.0f} kB together; {sorted(seconds)[LOOKUPS // 2] * 1e3:.1f} ms in the "
                  f"median")


if __name__ == "__main__":
    main()
