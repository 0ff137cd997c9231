"""Checks a shard set completely: checksums and counts in the manifest, EOS at the end of every document, token ids
within the vocabulary, and agreement of document tables and document ends."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from pipeline.base.files import sha256 as sha256_of
from pipeline.base.parquet import open_parquet
from tokenizer.shards.layout import ENDS, REMEDY, TABLE, TABLE_ROWS, ShardError
from tokenizer.shards.packed import PackedRows, Packing
from tokenizer.shards.packing import pieces_of
from tokenizer.shards.reader import ShardSet

_BLOCK = 1 << 22


def verify(path: str | Path, sha256: str | None = None) -> list[str]:
    """Return the faults of the shard set at `path`, one line each; [] when it is intact. Every byte is read.
    Raises ShardError when the manifest cannot be read or does not have the given `sha256`."""
    shards = ShardSet(path, sha256)
    problems: list[str] = []
    for number, info in enumerate(shards.manifest.shards):
        for name, expected in ((getattr(info, kind), sha) for kind, sha in info.sums().items()):
            try:
                if sha256_of(shards.folder / name) != expected:
                    problems.append(f"{name}: sha256 differs from the manifest: damaged or replaced")
            except OSError as e:
                problems.append(f"{name}: cannot be read ({e.strerror})")
        try:
            if info.loss and (size := (shards.folder / info.loss).stat().st_size) != info.tokens:
                problems.append(f"{info.loss}: {size} bytes instead of {info.tokens}, one for each token")
            problems += _documents(shards, number)
        except (ShardError, OSError, ValueError) as e:
            problems.append(f"{info.body}: {e}")
    return problems + _packings(shards)


def _packings(shards: ShardSet) -> list[str]:
    """Return the faults of the packed rows (training samples of whole documents) of a shard set, one line each. All
    manifests packed-*.json in the folder of the set are read. If one belongs to another set, only its own sha256 is
    checked."""
    problems: list[str] = []
    for path in sorted(shards.folder.glob("packed-*.json")):
        try:
            packing = Packing.loads(path.read_bytes(), path.name)
            if path.name != packing.name:
                problems.append(f"{path.name}: sha256 is not the one in its name: damaged: {REMEDY}")
                continue
            if packing.shards != shards.sha256:
                continue
            packed = shards.packed_rows(packing.sha256)
            problems += [fault for number in range(len(packing.files)) if (fault := _rows(shards, packed, number))]
        except (ShardError, OSError, ValueError) as e:
            problems.append(str(e) if str(e).startswith(path.name) else f"{path.name}: {e}")
    return problems


def _rows(shards: ShardSet, packed: PackedRows, number: int) -> str | None:
    """Compare the packed rows (training samples of whole documents) of shard number `number` with the documents of the
    shard. Returns a message if the rows do not consist of exactly the pieces into which the documents are cut, else
    None. Raises ShardError for pieces that are impossible: empty, outside the shard, or more tokens in a row than
    fit."""
    file, info = packed.packing.files[number], shards.manifest.shards[number]
    ends = np.fromfile(shards.folder / info.ends, ENDS).astype(np.int64)
    begins, stops = pieces_of(np.concatenate(([0], ends[:-1])), ends, packed.longest)
    pieces = packed.pieces(packed.firsts[number], packed.firsts[number + 1])[0] if file.rows else np.empty((0, 2))
    pieces = pieces[np.argsort(pieces[:, 0])] - shards.offsets[number]
    if shards.manifest.has_rows:                        # a document is a piece, and an added EOS if its row cut it
        is_cut = pieces[:, 1] == ends - 1 if len(pieces) == len(ends) else 0
        begins, stops = np.concatenate(([0], ends[:-1])), ends - is_cut
    return None if np.array_equal(pieces, np.stack([begins, stops], 1)) else \
        f"{file.file}: these are not the pieces of the documents in {info.ends}"


def _documents(shards: ShardSet, shard: int) -> list[str]:
    """Return the faults of the document ends, tokens and document table of shard number `shard`, one line each."""
    info = shards.manifest.shards[shard]
    body = shards.body(shard)
    ends = np.memmap(shards.folder / info.ends, ENDS, "r")
    problems: list[str] = []
    if len(ends) != info.documents:
        return [f"{info.ends}: {len(ends)} documents, the manifest says {info.documents}"]
    if len(ends) and int(ends[-1]) != info.tokens:
        return [f"{info.ends}: the last document ends at {int(ends[-1])}, the body at {info.tokens}"]
    previous_end = 0
    for begin in range(0, len(ends), TABLE_ROWS):
        block = ends[begin:begin + TABLE_ROWS].astype(np.int64)
        if (np.diff(block, prepend=previous_end) < 1).any():
            return [f"{info.ends}: ends do not increase near document {begin}"]
        if (body[block - 1] != shards.eos).any():
            document = begin + int(np.flatnonzero(body[block - 1] != shards.eos)[0])
            problems.append(f"{info.body}: document {document} does not end in EOS ({shards.eos})")
            break
        previous_end = int(block[-1])
    for begin in range(0, info.tokens, _BLOCK):
        block = body[begin:begin + _BLOCK]
        if int(block.max()) >= shards.vocab_size:
            problems.append(f"{info.body}: token id {int(block.max())} is outside the vocabulary of "
                            f"{shards.vocab_size}")
            break
    return problems + _table(shards, shard, ends)


def _table(shards: ShardSet, shard: int, ends: np.ndarray) -> list[str]:
    """Return the faults of the document table of shard number `shard`, one line each. `ends` are the ends of the
    documents, which the table must repeat."""
    info = shards.manifest.shards[shard]
    ids = hashlib.sha256()
    row = text_bytes = 0
    with open_parquet(shards.folder / info.table) as table:
        if table.schema_arrow.names != TABLE.names:
            return [f"{info.table}: columns {table.schema_arrow.names}, expected {TABLE.names}"]
        for batch in table.iter_batches(TABLE_ROWS):
            if not np.array_equal(batch.column("end").to_numpy(), ends[row:row + len(batch)]):
                return [f"{info.table}: `end` differs from {info.ends} near document {row}"]
            n_bytes = batch.column("n_bytes").to_pylist()
            ids.update("".join(f"{id} {n}\n" for id, n in zip(batch.column("id").to_pylist(), n_bytes)).encode())
            row, text_bytes = row + len(batch), text_bytes + sum(n_bytes)
    problems = []
    if row != info.documents or text_bytes != info.text_bytes:
        problems.append(f"{info.table}: {row} documents of {text_bytes} bytes, the manifest says {info.documents} of "
                        f"{info.text_bytes}")
    if ids.hexdigest() != info.ids_sha256:
        problems.append(f"{info.table}: document ids differ from the manifest")
    return problems
