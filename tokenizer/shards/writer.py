"""Writes one shard (a file of tokens, with its document table and checksums), document by document. Only one row group
of the document table is held in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import parquet_writer
from tokenizer.shards.layout import ENDS, TABLE, TABLE_ROWS, ShardError, token_dtype
from tokenizer.shards.sums import BlockSummer


class MaskWriter:
    """Writes the loss mask of a shard: one u8 per token, 1 if the token is a target, else 0. The file is created at the
    first token that is not a target, so there is no file if all tokens are targets. The function `path` is called at
    that moment, and returns the path of the file."""

    def __init__(self, path: Callable[[], str]) -> None:
        self.tokens = 0
        self._path, self._hash, self.blocks = path, hashlib.sha256(), BlockSummer()
        self._file: BinaryIO | None = None

    def add(self, counts: np.ndarray | None, tokens: int) -> None:
        """Append the flags of the next `tokens` tokens to the loss mask. `counts` says which of the tokens are targets;
        None means that all are."""
        if self._file is None and counts is not None and not counts.all():
            self._file = open(self._path(), "wb")  # noqa: SIM115  closed by `close`
            self._ones(self.tokens)
        if self._file is not None:
            if counts is None:
                self._ones(tokens)
            else:
                self._write((counts != 0).tobytes())
        self.tokens += tokens

    def _ones(self, count: int) -> None:
        for start in range(0, count, 1 << 20):
            self._write(b"\x01" * min(1 << 20, count - start))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._hash.update(data)
        self.blocks.update(data)

    def close(self) -> str:
        """Close the file of the loss mask. Returns its sha256, or "" when all tokens are targets and no file was
        created."""
        if self._file is None:
            return ""
        self._file.close()
        return self._hash.hexdigest()


class ShardWriter:
    """Writes the files of a shard to the given paths. `loss` is a function that returns the path of the loss mask. It
    is called only if a token is not a target. Without `loss`, no mask is written.

    `add` takes several documents at a time; each must already end in EOS. How many are added at a time does not change
    the bytes written."""

    def __init__(self, body: str, ends: str, table: str, blocks: str, vocab_size: int, eos: int,
                 loss: Callable[[], str] | None = None) -> None:
        self.dtype, self.eos = token_dtype(vocab_size), eos
        self._mask = MaskWriter(loss) if loss is not None else None
        self.tokens = self.documents = self.text_bytes = 0
        self._body: BinaryIO = open(body, "wb")  # noqa: SIM115  closed by `close`
        self._ends: BinaryIO = open(ends, "wb")  # noqa: SIM115
        self._table = parquet_writer(table, TABLE, compression_level=3, write_statistics=True)
        self._rows: list[pa.Table] = []
        self._waiting = 0
        self._hash = {name: hashlib.sha256() for name in ("body", "ends", "ids")}
        self._blocks, self._summers = blocks, {name: BlockSummer() for name in ("body", "ends")}

    def add(self, tokens: np.ndarray, lengths: np.ndarray, ids: list[str], part: int, rows: np.ndarray,
            n_bytes: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Append n documents. `tokens` has their tokens back to back. `lengths` (in tokens), `ids`, `rows` and
        `n_bytes` (UTF-8 bytes of the text) have n entries. `part` and `rows` say from where the documents were encoded:
        the index of a part (file) of the dataset, and the row of each document in it. `counts` says for each token
        whether it is a target, u8; None means that all are.

        Raises ShardError when a document has no tokens or does not end in EOS, or when `lengths` do not fit
        `tokens`."""
        lengths = np.asarray(lengths, np.int64)
        if not len(lengths):
            return
        ends_in_batch = np.cumsum(lengths)
        if int(ends_in_batch[-1]) != len(tokens) or lengths.min() < 1:
            raise ShardError(f"{len(tokens)} tokens do not make documents of {int(ends_in_batch[-1])} tokens")
        if (tokens[ends_in_batch - 1] != self.eos).any():
            raise ShardError(f"a document does not end in EOS ({self.eos})")
        self._write("body", self._body, np.ascontiguousarray(tokens, self.dtype).tobytes())
        if self._mask is not None:
            self._mask.add(counts, len(tokens))
        ends = ends_in_batch + self.tokens
        self._write("ends", self._ends, ends.astype(ENDS).tobytes())
        self._hash["ids"].update("".join(f"{id} {size}\n" for id, size in zip(ids, n_bytes)).encode())
        self._rows.append(pa.table([pa.array(ends.astype(np.uint64)), pa.array(ids, pa.string()),
                                    pa.array(np.full(len(ids), part, np.uint32)),
                                    pa.array(np.asarray(rows, np.uint32)), pa.array(np.asarray(n_bytes, np.uint32))],
                                   schema=TABLE))
        self._waiting += len(ids)
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + len(ids)
        self.text_bytes += int(np.sum(n_bytes, dtype=np.int64))
        if self._waiting >= TABLE_ROWS:
            self._flush()

    def _write(self, name: str, file: BinaryIO, data: bytes) -> None:
        file.write(data)
        self._hash[name].update(data)
        self._summers[name].update(data)

    def _flush(self, everything: bool = False) -> None:
        rows = pa.concat_tables(self._rows) if self._rows else TABLE.empty_table()
        while len(rows) >= TABLE_ROWS or (everything and len(rows)):
            self._table.write_table(rows.slice(0, TABLE_ROWS).combine_chunks(), row_group_size=TABLE_ROWS)
            rows = rows.slice(TABLE_ROWS)
        self._rows, self._waiting = ([rows] if len(rows) else []), len(rows)

    def close(self) -> dict[str, Any]:
        """Finish the shard's files. Returns the shard's entry in the manifest (shards.json), i.e. the fields of
        `Shard`, but without `index`, the names of files and the sha256 of the table."""
        self._flush(everything=True)
        self._table.close()
        self._body.close()
        self._ends.close()
        loss_sha256 = self._mask.close() if self._mask is not None else ""
        summers = [*self._summers.values(), *([self._mask.blocks] if self._mask is not None and loss_sha256 else [])]
        sums = b"".join(summer.finish() for summer in summers)
        with open(self._blocks, "wb") as file:
            file.write(sums)
        return {"tokens": self.tokens, "documents": self.documents, "text_bytes": self.text_bytes,
                "sha256": self._hash["body"].hexdigest(), "ends_sha256": self._hash["ends"].hexdigest(),
                "ids_sha256": self._hash["ids"].hexdigest(),
                "blocks_sha256": hashlib.sha256(sums).hexdigest(), "loss_sha256": loss_sha256}
