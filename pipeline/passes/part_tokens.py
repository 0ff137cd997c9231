"""Writes the tokens of one part (file of documents) for the task `EncodePart`, and those of token files for
`ImportTokens`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import open_parquet, parquet_writer, write_table
from pipeline.passes.labels import Label
from tokenizer.shards.writer import MaskWriter

#: rows of a row group of a document table
TABLE_ROWS = 1 << 16
PART_TABLE = pa.schema([("end", pa.uint64()), ("id", pa.string()), ("row", pa.uint32()), ("n_bytes", pa.uint32())])


class ShardFiles(Protocol):
    """Where a writer puts its files: the outputs of a task (`TaskOutputs`), or a scratch folder."""

    def path(self, name: str) -> str: ...

    def note(self, name: str, *, rows: int = 0) -> None: ...


class TokensWriter:
    """Writes the tokens of those documents of a part (file of documents) that belong to one split (`train` or `val`).
    The files are SPLIT.tokens (the tokens), SPLIT.parquet (where each document ends) and, if some token does not count
    for the loss, SPLIT.loss (which tokens count)."""

    def __init__(self, out: ShardFiles, split: str, table_rows: int = TABLE_ROWS) -> None:
        self._table_rows = table_rows
        self.out, self.split = out, split
        self.tokens = self.documents = 0
        self.body = open(out.path(f"{split}.tokens"), "wb")  # noqa: SIM115  closed by `close`
        self.table = parquet_writer(out.path(f"{split}.parquet"), PART_TABLE)
        self.pending: list[pa.RecordBatch] = []
        self.mask = MaskWriter(lambda: out.path(f"{split}.loss"))

    def add(self, docs: list[np.ndarray], ids: list[str], rows: np.ndarray, n_bytes: list[int],
            counts: np.ndarray | None = None) -> None:
        ends = np.cumsum([len(d) for d in docs]).astype(np.uint64) + np.uint64(self.tokens)
        self.body.write(np.concatenate(docs).tobytes())
        self.mask.add(counts, int(ends[-1]) - self.tokens)
        self.pending.append(pa.record_batch([pa.array(ends), pa.array(ids, pa.string()), pa.array(rows, pa.uint32()),
                                             pa.array(n_bytes, pa.uint32())], schema=PART_TABLE))
        self.tokens, self.documents = int(ends[-1]), self.documents + len(ids)
        while sum(map(len, self.pending)) >= self._table_rows:    # row groups do not depend on the batch size
            self._flush()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self.pending)
        self.table.write_table(table.slice(0, self._table_rows).combine_chunks())
        self.pending = table.slice(self._table_rows).to_batches()

    def close(self) -> None:
        if self.pending:
            self._flush()
        self.table.close()
        self.body.close()
        if self.mask.close():
            self.out.note(f"{self.split}.loss", rows=self.tokens)
        self.out.note(f"{self.split}.tokens", rows=self.tokens)
        self.out.note(f"{self.split}.parquet", rows=self.documents)


class LabelPiece(NamedTuple):
    """Says where the documents of one label are in an encoded part: byte ranges of the files SPLIT.tokens, SPLIT.tables
    and SPLIT.loss, and the checksums of these bytes. `first` and `stop` count tokens, in SPLIT.tokens and in
    SPLIT.loss. A task that makes the shards of one label reads only these ranges."""

    documents: int
    first: int                    # first token
    stop: int                     # token after the last
    table: int                    # first byte of the document table
    table_stop: int
    sums: tuple[int, int, int]    # of tokens, table and loss; the last is 0 without a loss mask


class GroupedTokensWriter:
    """Writes the tokens of one split, as TokensWriter does, but with the documents grouped by their labels. The labels
    are sorted, and the documents of a label keep their order. SPLIT.tokens and SPLIT.loss have the same format as those
    of TokensWriter. Instead of SPLIT.parquet, there is a file SPLIT.tables: one table (PART_TABLE) for each label, one
    after the other. The documents are first written to scratch files in the order of the part, and `close` copies them
    in the order of the labels. So memory does not depend on the number of labels."""

    def __init__(self, out: ShardFiles, split: str, scratch: str) -> None:
        self._out, self._split, self._scratch = out, split, _ScratchFiles(scratch)
        self._ungrouped = TokensWriter(self._scratch, split)
        self._labels: list[Label] = []
        self._dtype = np.dtype(np.uint16)

    def add(self, docs: list[np.ndarray], ids: list[str], rows: np.ndarray, n_bytes: list[int],
            counts: np.ndarray | None, labels: list[Label]) -> None:
        self._dtype = docs[0].dtype
        self._labels += labels
        self._ungrouped.add(docs, ids, rows, n_bytes, counts)

    def close(self) -> list[tuple[Label, LabelPiece]]:
        """Write the files of the split. Returns the labels in their order, and where their documents are."""
        self._ungrouped.close()
        paths = {kind: self._out.path(f"{self._split}.{kind}") for kind in ("tokens", "tables")}
        mask = self._scratch.path(f"{self._split}.loss")
        if masked := os.path.exists(mask):
            paths["loss"] = self._out.path(f"{self._split}.loss")
        pieces: list[tuple[Label, LabelPiece]] = []
        with ExitStack() as files:
            out = {kind: _Summed(files.enter_context(open(path, "wb"))) for kind, path in paths.items()}
            if self._labels:
                body = np.memmap(self._scratch.path(f"{self._split}.tokens"), self._dtype, "r")
                loss = np.memmap(mask, np.uint8, "r") if masked else None
                with open_parquet(self._scratch.path(f"{self._split}.parquet")) as file:
                    table = file.read()
                pieces = self._grouped(out, table, body, loss)
        for kind in paths:
            self._out.note(f"{self._split}.{kind}", rows=len(self._labels) if kind == "tables" else
                           self._ungrouped.tokens)
        self._scratch.remove()
        return pieces

    def _grouped(self, out: Mapping[str, _Summed], table: pa.Table, body: np.ndarray,
                 loss: np.ndarray | None) -> list[tuple[Label, LabelPiece]]:
        ends = table["end"].to_numpy().astype(np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        rows_of: dict[Label, list[int]] = {}
        for row, label in enumerate(self._labels):
            rows_of.setdefault(label, []).append(row)
        pieces = []
        for label, rows in sorted(rows_of.items()):
            first, begin = out["tokens"].size // self._dtype.itemsize, out["tables"].size
            for file in out.values():
                file.sum = 0
            for row in rows:
                out["tokens"].write(body[starts[row]:ends[row]].tobytes())
                if loss is not None:
                    out["loss"].write(loss[starts[row]:ends[row]].tobytes())
            data = pa.BufferOutputStream()
            own = table.take(rows)
            lengths = (ends - starts)[rows]
            own_ends = pa.array(np.cumsum(lengths).astype(np.uint64))
            write_table(own.set_column(0, PART_TABLE.field("end"), own_ends), data, row_group_size=TABLE_ROWS)
            out["tables"].write(data.getvalue().to_pybytes())
            pieces.append((label, LabelPiece(len(rows), first, first + int(lengths.sum()), begin, out["tables"].size, (
                out["tokens"].sum, out["tables"].sum, out["loss"].sum if loss is not None else 0))))
        return pieces


class _Summed:
    """A file that is being written. `size` is the number of bytes written to it, and `sum` the CRC-32 of the bytes
    written since the caller last set `sum` to 0."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.sum = file, 0, 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size, self.sum = self.size + len(data), zlib.crc32(data, self.sum)


class _ScratchFiles:
    """Gives a TokensWriter paths in the scratch folder of a task, instead of paths of the task's outputs, and can
    remove the files."""

    def __init__(self, folder: str) -> None:
        self._folder, self._names = folder, set[str]()

    def path(self, name: str) -> str:
        self._names.add(name)
        return os.path.join(self._folder, f"ungrouped.{name}")

    def note(self, name: str, *, rows: int = 0) -> None:
        pass

    def remove(self) -> None:
        for name in self._names:
            with suppress(FileNotFoundError):
                os.remove(self.path(name))
