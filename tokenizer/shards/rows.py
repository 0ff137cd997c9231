"""Reads materialised rows: the samples of a training, written out in their order for sequential reading.

Row n of a set is sample n of its curriculum. A row has the L + 1 tokens of the sample. A set is a folder with
`rows.json` and row files. A range of consecutive rows, all of one phase (stretch of the training), has its own files.
In the format `bytes`, these are three or four plain files::

    p0-00000.SHA.tokens   (rows, L + 1) u8, u16 or u32, little-endian
    p0-00000.SHA.bounds   (rows, ceil(L / 8)) u8: bit p - 1 is set where a document begins at position p in [1, L]
                          after the end of another, LSB first; in packed rows also where a piece or padding begins
    p0-00000.SHA.loss     (rows, ceil(L / 8)) u8: bit p - 1 is set where the token at position p in [1, L] counts for
                          the loss; written only when some token of the file does not count
    p0-00000.SHA.origin   (rows,) ORIGIN: stream, epoch and window of each row

SHA is the first 12 hex characters of the file's sha256, so that files of an older set are never mistaken for new ones.

In the format `parquet`, a range of rows is one file with the columns `sample u64, stream string, epoch u32, window u64,
input_ids list<u8|u16|u32>, ends list<u32>`; `ends` has the positions p that `bounds` marks. There is also a column
`loss list<bool>` if the set has a packed stream, or a stream with `loss_spans` (parts of documents that count in the
loss). It says whether the tokens at positions 1 to L count, and is null for a row in which all count. All files of a
set have the same columns.

In both formats, the first token of a document does not count if another document ends before it in the row (`bounds`,
`ends`), whatever `loss` says.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.base.files import sha256
from pipeline.base.parquet import open_parquet
from tokenizer.shards.layout import ShardError, wrong_type

MAGIC = "tokenmill-rows"
MANIFEST = "rows.json"
ORIGIN = np.dtype([("stream", "<u2"), ("epoch", "<u4"), ("window", "<u8")])


class Row(NamedTuple):
    """One sample of a training, of L + 1 tokens, as the trainer reads it. `stream`, `epoch` and `window` say where the
    tokens come from."""

    tokens: np.ndarray            # (L + 1,)
    bounds: np.ndarray            # in the form of ShardSet.bounds, int64
    stream: str
    epoch: int
    window: int
    counts: np.ndarray | None = None      # which of tokens[1:] count for the loss, bool (L,); None: all


class RowOrigin(NamedTuple):
    """The place of an imported row (training sample) in the training that wrote it: sample number, stream, and epoch
    and window in the stream. Epoch and window are None if the files do not say them. The ids of the documents that an
    import makes from the row contain these values."""

    sample: int
    stream: str
    epoch: int | None
    window: int | None

    def id(self, piece: int) -> str:
        """Return the id of piece number `piece` (from 0) of the row. The id contains this origin."""
        place = "" if self.epoch is None else f"epoch={self.epoch}/window={self.window}/"
        return f"sample={self.sample}/{place}piece={piece}/stream={self.stream}"

    @classmethod
    def of_id(cls, id: str) -> RowOrigin | None:
        """Parse an id that the method `id` has made, and return the origin in it. Returns None for any other id."""
        match = ORIGIN_ID.fullmatch(id)
        return None if match is None else cls(int(match[1]), match[4], *(
            None if value is None else int(value) for value in match.group(2, 3)))


#: pattern of the names of files of rows
FILE_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*", re.ASCII)
ORIGIN_ID = re.compile(r"sample=(\d+)/(?:epoch=(\d+)/window=(\d+)/)?piece=\d+/stream=(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class RowFile:
    """The files of a range of consecutive rows (samples in training order), all of one phase (stretch of the training).
    `files` maps the kind of a file to its name, and `sha256` maps the kind to the file's sha256. The kinds are tokens,
    bounds, origin and optionally loss, or only parquet."""

    phase: int
    first: int                    # sample number of its first row
    rows: int
    sequence: int
    files: dict[str, str]
    sha256: dict[str, str]


@dataclass(frozen=True)
class RowManifest:
    """The contents of `rows.json`, which describes a set of rows (samples in training order)."""

    format: str                   # bytes | parquet
    dtype: str
    order: str                    # order hash of the curriculum
    streams: tuple[str, ...]
    rows: int
    files: tuple[RowFile, ...]
    magic: str = MAGIC
    version: int = 1

    def dumps(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def parquet_schema(dtype: np.dtype, masked: bool = False) -> pa.Schema:
    """Return the schema of a Parquet file with rows (samples in training order). `dtype` is that of the tokens. With
    `masked`, the schema has the column `loss`, which says which tokens count in the loss."""
    return pa.schema([("sample", pa.uint64()), ("stream", pa.string()), ("epoch", pa.uint32()), ("window", pa.uint64()),
                      ("input_ids", pa.list_(pa.from_numpy_dtype(dtype))), ("ends", pa.list_(pa.uint32())),
                      *([("loss", pa.list_(pa.bool_()))] if masked else [])])


def pack_bits(flags: np.ndarray) -> np.ndarray:
    """Pack flags (rows, L) of 0 or 1 into bits (rows, ceil(L / 8)), least significant bit first."""
    return np.packbits(flags, axis=1, bitorder="little")


def unpack_bounds(bits: np.ndarray, length: int) -> np.ndarray:
    """Return the positions in [1, L] of one row (sample) at which a new document begins, int64. `bits` has a bit for
    each position, as in a bounds file, and `length` is L."""
    return np.flatnonzero(np.unpackbits(bits, count=length, bitorder="little")) + 1


def unpack_loss(bits: np.ndarray, length: int) -> np.ndarray:
    """Return which of the tokens at positions 1 to L of one row (sample) count in the loss, bool (L,). `bits` has a bit
    for each position, as in a loss file, and `length` is L."""
    return np.unpackbits(bits, count=length, bitorder="little").view(bool)


def read_manifest(data: bytes, where: object) -> RowManifest:
    """Return the contents of `rows.json`; `where` names the file in error messages. Raises ShardError when they do not
    describe a set of rows (samples in training order)."""
    try:
        doc = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ShardError(f"{where}: no materialised rows there ({e}); materialise the run again") from e
    if not isinstance(doc, dict) or doc.get("magic") != MAGIC or doc.get("version") != 1:
        raise ShardError(f"{where}: not a set of rows this Tokenmill reads")
    try:
        if not (wrong := wrong_type(RowManifest, doc)):
            wrong = "".join(wrong_type(RowFile, file, f"files[{i}].") for i, file in enumerate(doc["files"]))
        if wrong or doc["dtype"] not in ("uint8", "uint16", "uint32"):
            raise ValueError(wrong or f"dtype is {doc['dtype']!r}")
        for name in (name for file in doc["files"] for name in file["files"].values()):
            # a copy of a set in object storage is written to a folder by these names, so no name may lead out of it
            if not FILE_NAME.fullmatch(name) or name == MANIFEST:
                raise ValueError(f"{name!r} is no name of a file of rows")
        return RowManifest(**{**doc, "streams": tuple(doc["streams"]),
                              "files": tuple(RowFile(**file) for file in doc["files"])})
    except (ValueError, TypeError, KeyError) as e:
        raise ShardError(f"{where}: damaged ({e!s:.200}); materialise the run again") from e


class RowSet:
    """Reads a set of materialised rows: samples of a training, written to files in their order. It holds one row
    (format `bytes`) or one row group (format `parquet`) in memory. When a file is opened, its sha256 is checked;
    ShardError is raised when the sha256 is wrong."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        try:
            self.manifest = read_manifest(path.read_bytes(), path)
        except OSError as e:
            raise ShardError(f"{path}: no materialised rows there ({e}); materialise the run again") from e
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._firsts = [f.first for f in self.manifest.files]
        self._open: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self.manifest.rows

    def row(self, number: int) -> Row:
        """Read row number `number` of the set, which is the sample of the training with this number. Raises IndexError
        when there is no such row, and ShardError when its file is damaged."""
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        file_number = bisect.bisect_right(self._firsts, number) - 1
        file = self.manifest.files[file_number]
        read_row = self._row_of_bytes if self.manifest.format == "bytes" else self._row_of_parquet
        return read_row(file_number, file, number - file.first)

    def maps(self, file_number: int) -> dict[str, np.ndarray]:
        """Return the files of a range of rows as read-only memory maps {kind: array}, in the shapes that the docstring
        of this module gives. `file_number` is the place of the range in `manifest.files`. Raises ShardError for a set
        in the format `parquet`, and when a file is damaged."""
        file = self.manifest.files[file_number]
        if self.manifest.format != "bytes":
            raise ShardError(f"{self.folder}: the rows are in the format {self.manifest.format}; materialise the run "
                             f"again with --format bytes")
        if self._open[0] != file_number:
            self._check(file)
            bits = (file.rows, -(-file.sequence // 8))
            shapes = {"tokens": (self.dtype, (file.rows, file.sequence + 1)), "bounds": (np.dtype("u1"), bits),
                      "origin": (ORIGIN, (file.rows,)), "loss": (np.dtype("u1"), bits)}
            self._open = (file_number, {kind: np.memmap(self.folder / name, shapes[kind][0], "r", shape=shapes[kind][1])
                                        for kind, name in file.files.items()})
        maps: dict[str, np.ndarray] = self._open[1]
        return maps

    def _check(self, file: RowFile) -> None:
        for kind, name in file.files.items():
            if sha256(self.folder / name) != file.sha256[kind]:
                raise ShardError(f"{self.folder / name}: damaged: its bytes are not those {MANIFEST} names; "
                                 f"materialise the run again")

    def _row_of_bytes(self, file_number: int, file: RowFile, place: int) -> Row:
        maps = self.maps(file_number)
        origin = maps["origin"][place]
        counts = unpack_loss(maps["loss"][place], file.sequence) if "loss" in maps else None
        return Row(np.array(maps["tokens"][place]), unpack_bounds(maps["bounds"][place], file.sequence),
                   self.manifest.streams[int(origin["stream"])], int(origin["epoch"]), int(origin["window"]),
                   None if counts is None or counts.all() else counts)

    def _row_of_parquet(self, file_number: int, file: RowFile, place: int) -> Row:
        if self._open[0] != file_number:
            self._check(file)
            table = open_parquet(self.folder / file.files["parquet"])
            sizes = [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
            self._open = (file_number, (table, np.cumsum([0, *sizes]), {}))
        table, starts, cache = self._open[1]
        group = int(np.searchsorted(starts, place, side="right")) - 1
        if group not in cache:
            cache.clear()
            cache[group] = table.read_row_group(group)
        row = cache[group].slice(place - int(starts[group]), 1)
        return Row(row["input_ids"][0].values.to_numpy().astype(self.dtype, copy=False),
                   row["ends"][0].values.to_numpy().astype(np.int64), row["stream"][0].as_py(), row["epoch"][0].as_py(),
                   row["window"][0].as_py(),
                   np.array(row["loss"][0].as_py()) if "loss" in row.schema.names and row["loss"][0].is_valid else None)
