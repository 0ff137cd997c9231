"""Writes the tokens of one part (file of documents), for the task `EncodePart`."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Protocol

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import open_parquet, parquet_writer
from pipeline.passes.labels import Label
from tokenizer.shards.writer import MaskWriter

#: rows of a row group of a document table
TABLE_ROWS = 1 << 16
#: documents that are copied at a time when they are grouped by their labels
COPY_DOCUMENTS = 256

PART_TABLE = pa.schema([("end", pa.uint64()), ("id", pa.string()), ("row", pa.uint32()), ("n_bytes", pa.uint32())])


class ShardFiles(Protocol):
    """Where a writer puts its files: the outputs of a task (`Out`), or a scratch folder."""

    def path(self, name: str) -> str: ...

    def note(self, name: str, *, rows: int = 0) -> None: ...


class TokensWriter:
    """Writes the tokens of one split of one part (file of documents): SPLIT.tokens (the tokens), SPLIT.parquet (where
    each document ends) and SPLIT.loss (which tokens count for the loss)."""

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


class GroupedTokensWriter:
    """Writes the same files as TokensWriter, but groups the documents by their labels. The labels are sorted, and the
    documents of a label keep their order. The documents are first written to scratch files in the order of the part,
    and `close` copies them in the order of the labels. So memory does not depend on the number of labels."""

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

    def close(self) -> list[tuple[Label, int, int]]:
        """Write the files of the split. Returns for each label, in their order, the number of its documents and of its
        tokens."""
        self._ungrouped.close()
        writer, groups = TokensWriter(self._out, self._split), []
        if self._labels:
            body = np.memmap(self._scratch.path(f"{self._split}.tokens"), self._dtype, "r")
            mask = self._scratch.path(f"{self._split}.loss")
            loss = np.memmap(mask, np.uint8, "r") if os.path.exists(mask) else None
            with open_parquet(self._scratch.path(f"{self._split}.parquet")) as file:
                table = file.read()
            ends = table["end"].to_numpy().astype(np.int64)
            starts = np.concatenate([[0], ends[:-1]])
            rows_of: dict[Label, list[int]] = {}
            for row, label in enumerate(self._labels):
                rows_of.setdefault(label, []).append(row)
            for label, members in sorted(rows_of.items()):
                before = writer.tokens
                for first in range(0, len(members), COPY_DOCUMENTS):
                    rows = members[first:first + COPY_DOCUMENTS]
                    batch = table.take(rows)
                    writer.add([body[starts[r]:ends[r]] for r in rows], batch["id"].to_pylist(),
                               batch["row"].to_numpy(), batch["n_bytes"].to_pylist(),
                               None if loss is None else np.concatenate([loss[starts[r]:ends[r]] for r in rows]))
                groups.append((label, len(members), writer.tokens - before))
        writer.close()
        self._scratch.remove()
        return groups


class _ScratchFiles:
    """Files in the scratch folder of a task that are no outputs of the task."""

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
