"""Reads the shard sets of a store (the token shards of one stream and split), and lists the published datasets from
which they were made."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.store.dataset import MANIFEST as DATASET_MANIFEST
from pipeline.store.dataset import iter_batches
from pipeline.store.dataset import manifest as dataset_manifest
from pipeline.store.fs import Store
from tokenizer.shards.index import ShardIndex
from tokenizer.shards.layout import MANIFEST, Manifest, ShardError
from tokenizer.shards.packed import NUMBERS, PackedRows, PackedShard, Packing

#: columns of a dropped document that `add_dropped` adds
DROPPED = ("url", "locator", "source", "language", "meta", "stage", "reason")


class NoSet(ShardError):
    """Raised when a store does not have a shard set (token files of one stream and split) that is wanted, or does not
    have it any more."""


class StoredSet(ShardIndex):
    """The shard set (token files of one stream and split) that `manifest` describes, in the folder `folder` of a store.

    `packing` says what the training samples are: None for windows of consecutive tokens, or the sha256 of packed rows
    (samples made of whole documents). Raises NoSet when the store does not have these rows.

    All files are opened by `read`, `numbers` and `table`, which a subclass may override.
    """

    def __init__(self, store: Store, folder: str, manifest: Manifest, packing: str | None = None) -> None:
        super().__init__(manifest)
        self.store, self.folder = store, folder
        if packing is not None:
            path = f"{folder}/packed-{packing[:16]}.json"
            try:
                rows = Packing.loads(self.read(path), store.at(path))
            except FileNotFoundError:
                rows = None
            if rows is None or rows.sha256 != packing:
                raise NoSet(f"{store.at(path)}: does not hold the packed rows that the run has read; restore the "
                            f"shards of the run, or name a later run")
            rows.check_set(manifest, store.at(path))
            self.packed = PackedRows(rows, self.offsets, self.numbers, folder)

    def read(self, path: str) -> bytes:
        """Read a small file of the store whole. Raises FileNotFoundError when there is no such file."""
        return self.store.read(path)

    def numbers(self, file: PackedShard, first: int, stop: int) -> np.ndarray:
        """Return the numbers [first, stop) of a file of packed rows (training samples made of whole documents), as u64.
        They say which tokens of a shard each row has (`tokenizer.shards.packing`)."""
        path, width = f"{self.folder}/{file.file}", NUMBERS.itemsize
        return np.frombuffer(self.store.read_range(path, first * width, stop * width), NUMBERS)

    @contextlib.contextmanager
    def table(self, shard: int) -> Iterator[pq.ParquetFile]:
        with self.store.parquet(f"{self.folder}/{self.manifest.shards[shard].table}") as table:
            yield table


def manifest_of(store: Store, folder: str, sha256: str = "",
                read: Callable[[Store, str], bytes] = Store.read) -> Manifest:
    """Return the manifest of a shard set in the folder `folder` of a store. With `sha256`, it is the manifest of the
    set with this hash, even if another set was published in the folder afterwards. Without `sha256`, it is the manifest
    of the set that was published last. Raises NoSet when the set is not there, and ShardError when the manifest is
    damaged."""
    pinned = f"{folder}/shards-{sha256[:16]}.json"
    path = pinned if sha256 and store.exists(pinned) else f"{folder}/{MANIFEST}"
    try:
        manifest = Manifest.loads(read(store, path), store.at(path))
    except FileNotFoundError:
        raise NoSet(f"{store.at(path)}: no shard set there; run the recipe that writes it") from None
    if sha256 and manifest.sha256 != sha256:
        raise NoSet(f"{store.at(path)}: holds another shard set than the run has read; restore the shards of the run, "
                    f"or name a later run")
    return manifest


def dataset_parts(store: Store) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the published datasets of a store as (name, {key of a part: its path}), sorted by name."""
    if store.local is not None:
        names = sorted(path.parent.name for path in store.local.glob(f"datasets/*/{DATASET_MANIFEST}"))
    else:
        names = sorted({path.split("/")[1] for path in store.list("datasets") if path.endswith(f"/{DATASET_MANIFEST}")})
    for name in names:
        table = dataset_manifest(store, name)
        yield name, {key: f"datasets/{name}/{part}" for key, part in zip(table["key"].to_pylist(),
                                                                        table["part"].to_pylist(), strict=True)}


def add_dropped(store: Store, documents: Sequence[dict[str, Any]]) -> int:
    """Search the dropped documents of a store for `documents`, which are in no published dataset. Add to each document
    that is found:

    * the dataset that dropped it, and its url, locator, source, language, stage and reason;
    * `verdict`, which is "dropped";
    * if it was dropped as a duplicate, `kept`, the id of the document that was kept in its place.

    Returns how many documents were not found.
    """
    wanted = {document["id"]: document for document in documents}
    for name in sorted({path.split("/")[1] for path in store.list("dropped") if path.endswith(f"/{DATASET_MANIFEST}")}):
        for batch in iter_batches(store, f"dropped/{name}", ["id", *DROPPED]):
            if not wanted:
                return 0
            for row in batch.filter(pc.is_in(batch.column("id"), pa.array(list(wanted), pa.string()))).to_pylist():
                document = wanted.pop(row.pop("id"))
                verdict = json.loads(row["meta"] or "{}").get(row["stage"])
                document |= {**row, "dataset": name, "verdict": "dropped",
                             "kept": verdict.get("kept") if isinstance(verdict, dict) else None}
    return len(wanted)
