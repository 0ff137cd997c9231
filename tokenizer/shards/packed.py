"""Reads packed rows: training samples that hold whole documents instead of consecutive tokens of a stream.

The tokens of a shard set stay as they are. A packing (made by `tokenizer.shards.packing`) lies beside them and lists
the pieces of documents in each row. A row has L targets, and so L + 1 tokens. A packing has a file for each shard and a
manifest::

    00000.6a0f3cc1e5b2.packed    u64 little-endian. First two numbers for each piece: its first token and its exclusive
                                 end, counted from the start of the shard. The pieces are ordered by row. Then one
                                 number for each row: how many pieces come before it; and last the number of pieces
    packed-<sha256[:16]>.json    manifest: magic, version, sha256 of the shard set, L (`longest`), and for each shard
                                 the counts, name and sha256 of its file
    packed.json                  the manifest of the packing published last with the set

Rows are numbered from 0 over all shards of the set. A row ends with padding if its pieces have fewer than L + 1 tokens.
Padding is a document of its own: positions restart, attention does not cross its beginning, and its tokens are no
targets. Packing changes neither the shards nor their manifest, so a set can have several packings.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, overload

import numpy as np
from pyarrow import fs

from tokenizer.shards.layout import ENDS, REMEDY, Manifest, ShardError, is_count

MAGIC = "tokenmill-packed"
VERSION = 1
MANIFEST = "packed.json"
#: type of the numbers in the file of a shard
NUMBERS = ENDS


@dataclass(frozen=True)
class PackedShard:
    """Counts of the packed rows (training samples of whole documents) of one shard, and the file that lists them. A row
    has documents of one shard only."""

    index: int                    # number of the shard in its set
    rows: int
    pieces: int
    tokens: int                   # number of tokens in all rows, without padding
    documents: int                # number of documents of the shard, including those of one token, which are in no row
    longer: int                   # number of documents that do not fit into a row, and are cut
    file: str
    sha256: str                   # of the file

    @property
    def numbers(self) -> int:
        """How many integers are in the file that lists the shard's packed rows (see the docstring of this module)."""
        return 2 * self.pieces + self.rows + 1


@dataclass(frozen=True)
class Packing:
    """The contents of a manifest of packed rows (training samples of whole documents), which says how the documents of
    a shard set are packed into rows."""

    shards: str                   # sha256 of the shard set
    longest: int                  # L, targets per row
    files: tuple[PackedShard, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def filled(self) -> int:
        """Number of target positions (there are `longest` in each packed row) that are not padding."""
        return sum(file.tokens - file.rows for file in self.files)

    @property
    def padding(self) -> float:
        """Share of the target positions that are padding."""
        return 1 - self.filled / (self.rows * self.longest) if self.rows else 0.0

    def facts(self) -> dict[str, Any]:
        """Return what a curriculum records about the packed rows (training samples of whole documents) of a stream:
        their sha256, targets per row, number of rows, and number of targets that are not padding."""
        return {"sha256": self.sha256, "longest": self.longest, "rows": self.rows, "filled": self.filled}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.dumps().encode()).hexdigest()

    @property
    def name(self) -> str:
        """Name of the file of this manifest of packed rows (training samples)."""
        return f"packed-{self.sha256[:16]}.json"

    def dumps(self) -> str:
        return json.dumps({"magic": MAGIC, "version": VERSION, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    def check_set(self, manifest: Manifest, where: str) -> None:
        """Raise ShardError if these packed rows (training samples) are of another shard set than the one that
        `manifest` describes. The message begins with `where`."""
        if self.shards != manifest.sha256 or [f.index for f in self.files] != [s.index for s in manifest.shards]:
            raise ShardError(f"{where}: these packed rows are of another shard set; run the recipe again")

    @classmethod
    def loads(cls, text: bytes, where: str) -> Packing:
        """Parse a manifest of packed rows (training samples of whole documents). Raises a ShardError that names the
        file `where` if it is not one."""
        try:
            doc = json.loads(text)
            if (doc.pop("magic", None), doc.pop("version", None)) != (MAGIC, VERSION):
                raise ValueError("not packed rows that this Tokenmill reads")
            result = cls(**{**doc, "files": tuple(PackedShard(**file) for file in doc["files"])})
            counts = [getattr(file, spec.name) for file in result.files for spec in fields(file) if spec.type == "int"]
            if result.longest < 1 or not all(map(is_count, (result.longest, *counts))):
                raise ValueError("its counts are not numbers")
            for file in result.files:       # the name must follow from the sum, so that it cannot lead elsewhere (../x)
                if file.file != file_name(file.index, file.sha256):
                    raise ValueError(f"{file.file!r} is no name of the rows of shard {file.index}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise ShardError(f"{where}: damaged ({e}): {REMEDY}") from e
        return result


def file_name(index: int, sha256: str) -> str:
    return f"{index:05d}.{sha256[:12]}.packed"


@overload
def read_packing(filesystem: fs.FileSystem, folder: Path, manifest: Manifest, sha256: str) -> Packing: ...
@overload
def read_packing(filesystem: fs.FileSystem, folder: Path, manifest: Manifest) -> Packing | None: ...


def read_packing(filesystem: fs.FileSystem, folder: Path, manifest: Manifest,
                 sha256: str | None = None) -> Packing | None:
    """Read a manifest of packed rows (training samples) of the shard set `manifest` from its folder: the one with the
    given sha256, or without `sha256` the one published last.

    Returns None if `sha256` is None and none was published. Raises ShardError if the manifest with this sha256 is
    missing, and if a manifest cannot be read, is damaged, or belongs to another shard set."""
    path = folder / (MANIFEST if sha256 is None else f"packed-{sha256[:16]}.json")
    try:
        with filesystem.open_input_stream(str(path)) as file:
            packing = Packing.loads(file.read(), str(path))
    except OSError as e:
        if sha256 is None and isinstance(e, FileNotFoundError):
            return None
        raise ShardError(f"{path}: cannot be read ({e}): {REMEDY}") from e
    if sha256 is not None and packing.sha256 != sha256:
        raise ShardError(f"{path}: holds the packed rows {packing.sha256[:16]}…, pinned are {sha256[:16]}…: damaged: "
                         f"{REMEDY}")
    packing.check_set(manifest, str(path))
    return packing


def read_numbers(filesystem: fs.FileSystem, path: Path, first: int, stop: int) -> np.ndarray:
    """Read integers [first, stop) of a file of packed rows (training samples of whole documents) in object storage.
    Raises ShardError if the file is missing or too short."""
    size = (stop - first) * NUMBERS.itemsize
    try:
        with filesystem.open_input_file(str(path)) as file:
            data = file.read_at(size, first * NUMBERS.itemsize)
    except OSError as e:
        raise ShardError(f"{path}: cannot be read ({e}): {REMEDY}") from e
    if len(data) != size:
        raise ShardError(f"{path}: ends before number {stop:,}: damaged: {REMEDY}")
    return np.frombuffer(data, NUMBERS)


#: reads numbers [first, stop) of a shard's file of packed rows
ReadNumbers = Callable[[PackedShard, int, int], np.ndarray]


class PackedRows:
    """The packed rows (training samples of whole documents) of a shard set. `offsets` has the first token of each shard
    in the stream, and last the number of all tokens (`ShardIndex.offsets`). The function `read` reads numbers from a
    file of packed rows. `where` is the folder of these files, for messages."""

    def __init__(self, packing: Packing, offsets: list[int], read: ReadNumbers, where: str) -> None:
        self.packing, self.longest, self.where = packing, packing.longest, where
        self._offsets, self._read = offsets, read
        #: a shard, its pieces in the order of the stream, and the row of each
        self._sorted = -1, np.empty((0, 2), np.int64), np.empty(0, np.int64)
        #: number of the first row of each shard, and the total
        self.firsts = [0]
        for file in packing.files:
            self.firsts.append(self.firsts[-1] + file.rows)

    def __len__(self) -> int:
        return self.firsts[-1]

    def shard_of(self, row: int) -> int:
        """Return the index in the set of the shard that holds packed row (training sample) number `row`. Raises
        IndexError when there is no such row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} packed rows")
        return bisect.bisect_right(self.firsts, row) - 1

    def row(self, row: int) -> list[tuple[int, int]]:
        """Return the pieces of documents in packed row number `row` (a training sample of whole documents), in order,
        as (first token, exclusive end), counted over all shards. Raises ShardError if the pieces are impossible, and
        IndexError if there is no such row. For a single row, this is much faster than `pieces`."""
        shard = self.shard_of(row)
        file, offset = self.packing.files[shard], self._offsets[shard]
        index = 2 * file.pieces + row - self.firsts[shard]
        low, high = self._read(file, index, index + 2).tolist()
        numbers = self._read(file, 2 * low, 2 * high).tolist() if low < high <= file.pieces else []
        pieces = list(zip(numbers[::2], numbers[1::2]))
        sizes = [stop - start for start, stop in pieces]
        if not pieces or min(sizes) < 1 or sum(sizes) > self.longest + 1 or \
                max(numbers) > self._offsets[shard + 1] - offset:
            raise self._damaged(file, row)
        return [(start + offset, stop + offset) for start, stop in pieces]

    def pieces(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (pieces, counts) for the packed rows [first, stop), which are training samples of whole documents.
        `pieces` is int64 (n, 2): the first token and the exclusive end of each piece, counted over all shards, in the
        order of the rows. `counts` has the number of pieces of each row.

        Raises IndexError if the rows are not all of one shard. Raises ShardError if the file is damaged: a row without
        pieces, an empty piece, tokens outside the shard, or a row that is too long."""
        shard = self.shard_of(first)
        file, before = self.packing.files[shard], self.firsts[shard]
        if stop - before > file.rows:
            raise IndexError(f"rows [{first}, {stop}) are not of one shard")
        index = 2 * file.pieces - before
        begins = self._read(file, index + first, index + stop + 1).astype(np.int64)
        counts = np.diff(begins)
        low, high = int(begins[0]), int(begins[-1])
        tokens = self._offsets[shard + 1] - self._offsets[shard]
        if (counts < 1).any() or not 0 <= low <= high <= file.pieces:
            raise self._damaged(file, first)
        pieces = self._read(file, 2 * low, 2 * high).astype(np.int64).reshape(-1, 2)
        sizes = pieces[:, 1] - pieces[:, 0]
        if (sizes < 1).any() or pieces.min() < 0 or pieces.max() > tokens or \
                np.add.reduceat(sizes, begins[:-1] - low).max() > self.longest + 1:
            raise self._damaged(file, first)
        return pieces + self._offsets[shard], counts

    def _damaged(self, file: PackedShard, row: int) -> ShardError:
        return ShardError(f"{self.where}: {file.file}: impossible pieces near row {row:,} of the stream: damaged: "
                          f"{REMEDY}")

    def rows_with(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers of the packed rows (training samples of whole documents) that hold a token of [start,
        stop), int64, increasing. The sorted pieces of the shard that was read last stay in memory, because documents
        are often looked up shard by shard."""
        found = [np.empty(0, np.int64)]
        for shard, file in enumerate(self.packing.files):
            if file.rows and self._offsets[shard] < stop and self._offsets[shard + 1] > start:
                if self._sorted[0] != shard:
                    pieces, counts = self.pieces(self.firsts[shard], self.firsts[shard + 1])
                    order = np.argsort(pieces[:, 0])
                    rows = np.repeat(np.arange(self.firsts[shard], self.firsts[shard + 1]), counts)
                    self._sorted = shard, pieces[order], rows[order]
                _, pieces, rows = self._sorted
                first = np.searchsorted(pieces[:, 1], start, side="right")      # pieces overlap by at most one token
                found.append(np.unique(rows[first:np.searchsorted(pieces[:, 0], stop)]))
        return np.concatenate(found)
