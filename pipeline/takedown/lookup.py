"""Corrects the document tables of shards after rows were removed from the parts (data files) of datasets.

A document table says, for each document of a shard, from which part and row it was encoded. When rows are removed from
a part, all later rows get lower numbers, and the part gets another key. The tables and manifests of all shard sets with
documents of that part are then written again.

The sha256 of a shard set covers neither tables nor manifest, so it stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.base.files import file_sha256
from pipeline.base.parquet import open_parquet, parquet_writer
from pipeline.base.scratch import Scratch
from pipeline.store.content_keys import content_key
from pipeline.store.fs import Store
from pipeline.takedown.shards import stored_sets
from tokenizer.shards.layout import GONE_ROW, MANIFEST, TABLE_ROWS, Manifest, Shard, file_name


def key_without(key: str, rows: Sequence[int]) -> str:
    """Return the new key of a part (data file of a dataset) after `rows` were removed from it. `key` is the part's key
    before the removal."""
    return content_key("takedown", 1, [key, list(rows)])


def renumber(store: Store, parts: Sequence[Mapping[str, Any]], check_lease: Callable[[], None]) -> None:
    """Correct the document tables of all shard sets of a store after rows were removed from `parts` (data files of
    datasets). Each of `parts` is {path, key, rows}: `key` is the part's key before the removal, and `rows` are the
    removed rows, in ascending order. Parts whose path is not in `datasets/` are ignored.

    A row that follows a removed one gets its new number, and a removed row the number GONE_ROW. The old tables are
    deleted. A set whose tables have the new numbers already is left as it is."""
    removed = {part["key"]: np.array(part["rows"], np.int64) for part in parts if part["path"].startswith("datasets/")}
    replaced: set[str] = set()
    for folder, manifest in list(stored_sets(store)):
        places = {place: removed[key] for place, key in enumerate(manifest.parts) if key in removed}
        if not places:
            continue
        shards = []
        for shard in manifest.shards:
            with Scratch() as scratch:
                changed = _renumbered(store, folder, shard, places, Path(scratch.path))
            if changed != shard:
                replaced.add(f"{folder}/{shard.table}")
            shards.append(changed)
        keys = tuple(key_without(key, removed[key].tolist()) if key in removed else key for key in manifest.parts)
        check_lease()
        _write(store, folder, replace(manifest, shards=tuple(shards), parts=keys))
    named = {f"{folder}/{shard.table}" for folder, manifest in stored_sets(store) for shard in manifest.shards}
    store.remove_all(sorted(replaced - named))


def _renumbered(store: Store, folder: str, shard: Shard, places: Mapping[int, np.ndarray], scratch: Path) -> Shard:
    """Write a new document table of a shard, in which rows have their numbers after the removal. `places` maps the
    position of a changed part in the manifest's list of parts to the rows removed from it. Returns the shard's new
    entry in the manifest, or the old entry if the shard has no document of these parts."""
    target, changed = scratch / "new.parquet", False
    with open_parquet(store.fetch(f"{folder}/{shard.table}", str(scratch))) as table, \
            parquet_writer(target, table.schema_arrow, compression_level=3, write_statistics=True) as writer:
        for group in range(table.num_row_groups):
            batch = table.read_row_group(group, use_threads=False)
            parts, rows = batch["part"].to_numpy(), batch["row"].to_numpy().astype(np.int64)
            for place, gone in places.items():
                here = (parts == place) & (rows != GONE_ROW)
                rows = np.where(here, np.where(np.isin(rows, gone), GONE_ROW, rows - np.searchsorted(gone, rows)), rows)
                changed = changed or bool(here.any())
            batch = batch.set_column(batch.schema.get_field_index("row"), "row", pa.array(rows.astype(np.uint32)))
            writer.write_table(batch, row_group_size=TABLE_ROWS)
    if not changed:
        return shard
    sha256 = file_sha256(target)
    name = file_name(shard.index, "table", sha256)
    store.replace(str(target), f"{folder}/{name}")
    return replace(shard, table=name, table_sha256=sha256)


def _write(store: Store, folder: str, manifest: Manifest) -> None:
    """Write a changed manifest of a shard set to the file whose name contains the set's sha256. If the set is the
    current one of its folder, write the manifest to the current manifest, too."""
    data = manifest.dumps().encode()
    current = f"{folder}/{MANIFEST}"
    if json.loads(store.read(current))["sha256"] == manifest.sha256:
        store.write(current, data, durable=True)
    pinned = f"{folder}/shards-{manifest.sha256[:16]}.json"
    if store.exists(pinned):
        store.write(pinned, data, durable=True)
