"""Reads the shard sets of a store (the token shards of one stream and split), and lists the published datasets from
which they were made."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.store.dataset import MANIFEST as DATASET_MANIFEST
from pipeline.store.dataset import iter_batches
from pipeline.store.dataset import manifest as dataset_manifest
from pipeline.store.fs import Store
from tokenizer.shards.index import ShardIndex
from tokenizer.shards.layout import MANIFEST, Manifest, ShardError

#: columns of a dropped document that `add_dropped` adds
DROPPED = ("url", "locator", "source", "language", "meta", "stage", "reason")


class StoredSet(ShardIndex):
    """A shard set in the folder `folder` of a store. If `sha256` is given, it is the set with that hash, also when
    another one has been published in the folder since. Raises ShardError when there is no such set."""

    def __init__(self, store: Store, folder: str, sha256: str = "") -> None:
        pinned = f"{folder}/shards-{sha256[:16]}.json"
        path = pinned if sha256 and store.exists(pinned) else f"{folder}/{MANIFEST}"
        try:
            manifest = Manifest.from_json(json.loads(store.read(path)), store.at(path))
        except FileNotFoundError:
            raise ShardError(f"{store.at(path)}: no shard set there; run the recipe that writes it") from None
        if sha256 and manifest.sha256 != sha256:
            raise ShardError(f"{store.at(path)}: holds another shard set than the run has read; restore the shards of "
                             f"the run, or name a later run")
        super().__init__(manifest)
        self._store, self._folder = store, folder

    @contextlib.contextmanager
    def table(self, shard: int) -> Iterator[pq.ParquetFile]:
        with self._store.parquet(f"{self._folder}/{self.manifest.shards[shard].table}") as table:
            yield table


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
    """Look up documents that are in no published dataset among the dropped ones. Adds to each the dataset that dropped
    it, its url, locator, source, language, stage and reason, `verdict` ("dropped") and, if it was dropped as a
    duplicate, `kept` (the id of the document that is kept in its place). Returns how many were not found."""
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
