"""Computes the hash of a published dataset, by which two runs can be compared (docs/contracts.md: Identity)."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.store.dataset import iter_batches
from pipeline.store.fs import Store
from pipeline.store.parts import RowDigester
from stages.document import DuplicateId

#: rows that `dataset_hash` keeps in memory, 64 bytes each, before it writes them to temporary files
HASH_ROWS = 1 << 20


def dataset_hash(store: Store, name: str, scratch: str | None = None, *, max_rows: int = HASH_ROWS) -> str:
    """Return a hash of a dataset: sha256 over the digests (hashes) of all its rows, sorted by id.

    The hash does not depend on how rows are spread over parts (files). Memory holds 64 bytes for each of up to
    `max_rows` rows. The digests of further rows are written to temporary files in the folder `scratch` (default: the
    system's). Raises DuplicateId when two rows of the dataset have the same id. Raises ValueError for an id that does
    not have 32 characters.
    """
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        for rows in _sorted_digests(store, name, Path(folder), max_rows):
            digest.update(rows[:, 32:].tobytes())
    return digest.hexdigest()


def _sorted_digests(store: Store, name: str, scratch: Path, max_rows: int) -> Iterator[np.ndarray]:
    """Yield the id and the row digest (hash) of all rows of a dataset, sorted by id. They come in arrays of type uint8
    and shape [n, 64]: 32 bytes of the id, then 32 bytes of the digest."""
    waiting: list[np.ndarray] = []
    count = 0
    spilled: set[int] = set()

    def spill() -> None:
        rows = np.concatenate(waiting)
        waiting.clear()
        prefix = rows[:, 0].astype(np.int64) << 8 | rows[:, 1]          # two hex digits: 256 spill files
        order = np.argsort(prefix, kind="stable")
        rows, prefix = rows[order], prefix[order]
        values, starts = np.unique(prefix, return_index=True)
        for value, part in zip(values.tolist(), np.split(rows, starts[1:])):
            spilled.add(value)
            with open(scratch / str(value), "ab") as f:
                f.write(part.tobytes())

    digester: RowDigester | None = None
    schema: pa.Schema | None = None
    for batch in iter_batches(store, f"datasets/{name}"):
        if batch.num_rows == 0:
            continue
        if digester is None or batch.schema != schema:
            schema, digester = batch.schema, RowDigester(batch.schema)
        ids = batch.column("id").to_pylist()
        odd = next((id for id in ids if len(id) != 32 or not id.isascii()), None)
        if odd is not None:
            raise ValueError(f"datasets/{name}: '{odd}' is not a document id (32 hexadecimal characters)")
        rows = np.empty((len(ids), 64), np.uint8)
        rows[:, :32] = np.frombuffer("".join(ids).encode(), np.uint8).reshape(-1, 32)
        rows[:, 32:] = np.frombuffer(b"".join(digester.digests(batch)), np.uint8).reshape(-1, 32)
        waiting.append(rows)
        count += len(rows)
        if count >= max_rows:
            spill()
            count = 0
    if not spilled:
        yield _by_id(np.concatenate(waiting), name) if waiting else np.empty((0, 64), np.uint8)
        return
    if waiting:
        spill()
    for value in sorted(spilled):
        yield _by_id(np.fromfile(scratch / str(value), np.uint8).reshape(-1, 64), name)


def _by_id(rows: np.ndarray, name: str) -> np.ndarray:
    ids = np.ascontiguousarray(rows[:, :32]).view("S32").ravel()
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    same = np.flatnonzero(ids[1:] == ids[:-1])
    if same.size:
        raise DuplicateId(ids[same[0]].decode(), f"datasets/{name}")
    return rows[order]
