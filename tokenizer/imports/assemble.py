"""Writes the documents of an import as the shards of a shard set, in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pipeline.base.files import sha256, sync
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.rows import RowPieces, part_of
from tokenizer.shards.layout import Shard, file_name, token_dtype
from tokenizer.shards.packed import PackedShard
from tokenizer.shards.packed import file_name as packed_name
from tokenizer.shards.packing import PackedWriter
from tokenizer.shards.writer import ShardWriter


class Assembly:
    """Writes documents as the shards of a set, to the folder `folder`. Shard i has the documents that begin in tokens
    [i·G, (i+1)·G) of the stream, where G is `shard_bytes` in tokens. So the shards do not depend on how the documents
    are divided among the imported files.

    A file's name contains its sha256, which is known only when the file is complete. The file is then passed to `move`
    with its name. By default it is renamed inside `folder`. A `move` that takes it elsewhere, for instance to object
    storage, keeps `folder` small: it holds the files of one shard at a time.

    With `packs`, the documents are the pieces of rows (`tokenizer.imports.rows`), and the packed rows of each shard are
    written, too. All documents of a row are then in one shard: the shard of its first document."""

    def __init__(self, folder: Path, vocab_size: int, eos: int, shard_bytes: int, packs: bool = False,
                 move: Callable[[Path, str], None] | None = None) -> None:
        self.folder, self.vocab_size, self.eos, self._move = folder, vocab_size, eos, move or renamed
        self.step = max(1, shard_bytes // token_dtype(vocab_size).itemsize)
        self.shards: list[Shard] = []
        self.tokens = 0
        self._index = -1                          # number of the shard that is being written
        self._writer: ShardWriter | None = None
        self.packed: list[PackedShard] = []
        self._packs = packs
        self._packer: PackedWriter | None = None

    def add(self,
            documents: ImportedDocuments,
            ids: Sequence[str],
            part: int,
            chosen: np.ndarray | None = None) -> None:
        """Append documents, or only those for which `chosen` is true. `ids` has an id for each document, and `part` is
        the number of the imported file that they come from."""
        chosen = np.ones(len(ids), bool) if chosen is None else chosen
        rows, targets = documents.first + np.flatnonzero(chosen), documents.targets
        if not len(rows):
            return
        if not chosen.all():
            kept = np.repeat(chosen, documents.lengths)
            targets = None if targets is None else targets[kept]
            documents = documents._replace(tokens=documents.tokens[kept], lengths=documents.lengths[chosen],
                                           targets=targets)
            ids = [id for id, takes in zip(ids, chosen.tolist()) if takes]
        starts = np.cumsum(documents.lengths) - documents.lengths
        self._write(documents, ids, part, rows, (self.tokens + starts) // self.step)

    def add_rows(self, pieces: RowPieces, ids: Sequence[str], part: int) -> None:
        """Append whole rows (training samples): the pieces of each row as documents, and the row as a packed row. `ids`
        has an id for each piece, and `part` is the number of the imported file that the rows come from."""
        documents, counts = pieces.documents, pieces.counts
        firsts = np.cumsum(counts) - counts                # number of the first document of each row
        starts = np.cumsum(documents.lengths) - documents.lengths
        shards = (self.tokens + starts[firsts]) // self.step
        for index in np.unique(shards).tolist():
            first, stop = np.searchsorted(shards, [index, index + 1]).tolist()
            chosen = slice(int(firsts[first]), int(firsts[stop]) if stop < len(counts) else len(starts))
            begin = self._shard(index).tokens - int(starts[chosen.start])
            assert self._packer is not None
            begins = starts[chosen] + begin
            self._packer.add(np.stack([begins, begins + pieces.sizes[chosen]], 1), counts[first:stop])
            part_rows = documents.first + np.arange(chosen.start, chosen.stop)
            whole = part_of(documents, chosen.start, chosen.stop)
            self._write(whole, list(ids[chosen]), part, part_rows, np.full(len(part_rows), index))

    def _write(self, documents: ImportedDocuments, ids: Sequence[str], part: int, rows: np.ndarray,
               shards: np.ndarray) -> None:
        """Append documents to shards. `shards` has the number of the shard for each document; the numbers never
        decrease."""
        ends, targets = np.cumsum(documents.lengths), documents.targets
        starts = ends - documents.lengths
        for index in np.unique(shards).tolist():
            first, stop = np.searchsorted(shards, [index, index + 1]).tolist()
            begin, end = int(starts[first]), int(ends[stop - 1])
            self._shard(index).add(documents.tokens[begin:end], documents.lengths[first:stop], list(ids[first:stop]),
                                   part, rows[first:stop], np.zeros(stop - first, np.int64),
                                   None if targets is None else targets[begin:end])
        self.tokens += int(ends[-1])

    def _shard(self, index: int) -> ShardWriter:
        if self._writer is None or index != self._index:
            self._finish()
            paths = [str(self.folder / kind) for kind in ("body", "ends", "table", "blocks")]
            self._index = index
            self._writer = ShardWriter(paths[0], paths[1], paths[2], paths[3], self.vocab_size, self.eos,
                                       lambda: str(self.folder / "loss"))
            self._packer = PackedWriter(str(self.folder / "packed")) if self._packs else None
        return self._writer

    def _finish(self) -> None:
        """Finish the shard that is being written, if there is one, and give its files their names."""
        if self._writer is None:
            return
        facts = self._writer.close()
        self._writer = None
        sums = {"body": facts["sha256"], "ends": facts["ends_sha256"], "table": sha256(self.folder / "table"),
                "blocks": facts["blocks_sha256"]}
        if facts["loss_sha256"]:
            sums["loss"] = facts["loss_sha256"]
        names = {kind: file_name(self._index, kind, sha) for kind, sha in sums.items()}
        for kind, name in names.items():
            self._move(self.folder / kind, name)
        if self._packer is not None:
            packed = self._packer.close()
            self._move(self.folder / "packed", packed_name(self._index, packed["sha256"]))
            self.packed.append(PackedShard(index=self._index, documents=facts["documents"], longer=0, **packed,
                                           file=packed_name(self._index, packed["sha256"])))
        self.shards.append(Shard(**{**facts, **names}, index=self._index, table_sha256=sums["table"]))

    def close(self) -> tuple[Shard, ...]:
        """Finish the last shard. Returns the entries of all shards for the manifest of the set."""
        self._finish()
        return tuple(self.shards)


def renamed(path: Path, name: str) -> None:
    """Rename a finished file within its folder."""
    sync(path)
    path.rename(path.with_name(name))
