"""Finds the documents that a takedown removes. These are the documents that its list of ids, URLs and domains names.
Unless only these are wanted, the documents that deduplication found similar to one of them are removed, too. To find
them, all Parquet files of the store with a column of document ids are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from pipeline.base.parquet import read_table
from pipeline.passes.encode import LABELS
from pipeline.passes.part_tokens import LabelPiece
from pipeline.store.dataset import published_folders, published_parts
from pipeline.store.fs import Store
from pipeline.store.records import PartRecord
from pipeline.store.tombstones import Tombstones
from pipeline.store.view import LogView
from pipeline.takedown.shards import stored_sets

#: rows read at a time
ROWS = 1 << 12
#: least similarity of a near-duplicate; a step without a threshold (`minhash` with `verify: record`) notes any
SIMILAR = 0.5


class SearchedFile(NamedTuple):
    """A Parquet file of a store that may name documents by id. `record` is the log record of the task that wrote the
    file; None for a file of a published folder or a shard set."""

    path: str
    sha256: str
    record: PartRecord | None


@dataclass
class Matches:
    """The documents that a list of entries (ids, URLs, domains) finds in a store.

    - `ids` are the ids of all documents that the takedown removes
    - `twins` are those of `ids` that no entry names; deduplication found them similar to another removed document
    - `unverified` are documents that deduplication paired with a removed one without finding the two texts similar;
      they are not removed
    - `matched` are the entries that name at least one document
    """

    ids: set[str] = field(default_factory=set)
    twins: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)
    matched: set[str] = field(default_factory=set)


def document_files(store: Store, log: LogView) -> Iterator[SearchedFile]:
    """Yield the Parquet files of a store that may name documents: those of tasks, of published folders, and the
    document tables of shard sets. Of several files with the same bytes, only the first is yielded."""
    seen: set[str] = set()

    def candidates() -> Iterator[SearchedFile]:
        for record in log.records():
            for name, info in record.files.items():
                if name.endswith(".parquet"):
                    yield SearchedFile(info.path, info.sha256, record)
        for folder in published_folders(store):
            for part in published_parts(store, folder):
                yield SearchedFile(part.path, part.sha256, None)
        for folder, manifest in stored_sets(store):
            for shard in manifest.shards:
                yield SearchedFile(f"{folder}/{shard.table}", shard.table_sha256, None)

    for file in candidates():
        if file.sha256 not in seen:
            seen.add(file.sha256)
            yield file


def find(store: Store, log: LogView, wanted: Tombstones, only: bool) -> Matches:
    """Find the documents that `wanted` names. Unless `only` is set, also find all documents that deduplication found
    similar to one of them, directly or through other documents."""
    matches = Matches()
    for file in document_files(store, log):
        for batch in _rows(store, file.path, ("id",), ("url",)):
            _match(batch, wanted, matches)
    while not only and matches.ids:
        before = len(matches.ids)
        for file in document_files(store, log):
            if file.path.startswith("dropped/") or file.path.endswith(".dropped.parquet"):
                for batch in _rows(store, file.path, ("id", "meta", "stage", "reason")):
                    _add_twins(batch, matches)
        if len(matches.ids) == before:
            break
    matches.unverified -= matches.ids
    return matches


def names_one_of(store: Store, path: str, ids: Set[str]) -> bool:
    """Whether a Parquet file has a document with one of these ids."""
    return any(not ids.isdisjoint(batch.column("id").to_pylist()) for batch in _rows(store, path, ("id",)))


def grouped_names_one_of(store: Store, record: PartRecord, ids: Set[str]) -> bool:
    """Whether a task that encodes documents for shards split by labels has encoded one with one of these ids. Such a
    task writes several document tables into one file, of which `labels.json` gives the byte ranges (`LabelPiece`)."""
    if (labels := record.files.get(LABELS)) is None:
        return False
    try:
        for split, pieces in json.loads(store.read(labels.path)).items():
            for piece in (LabelPiece(*fields) for _, fields in pieces):
                data = store.read_range(record.files[f"{split}.tables"].path, piece.table, piece.table_stop)
                if not ids.isdisjoint(read_table(pa.BufferReader(data), ["id"])["id"].to_pylist()):
                    return True
    except FileNotFoundError:                # removed by another step of the takedown, or lost; a new run makes it anew
        return False
    return False


def _rows(store: Store, path: str, needed: tuple[str, ...],
          optional: tuple[str, ...] = ()) -> Iterator[pa.RecordBatch]:
    """Yield the columns `needed` of a Parquet file, and those of the columns `optional` that it has. All of them hold
    strings. Yields nothing if the file lacks a needed column, or if another step of the takedown has removed the
    file."""
    try:
        with store.parquet(path) as file:
            present = string_columns(file.schema_arrow)
            if present.issuperset(needed):
                columns = [*needed, *(name for name in optional if name in present)]
                yield from file.iter_batches(ROWS, columns=columns, use_threads=False)
    except FileNotFoundError:
        return


def rows_of(store: Store, path: str, ids: Set[str]) -> list[int]:
    """Return the numbers of the rows of a Parquet file that have one of these ids."""
    rows: list[int] = []
    before = 0
    for batch in _rows(store, path, ("id",)):
        rows += [before + row for row, id in enumerate(batch.column("id").to_pylist()) if id in ids]
        before += batch.num_rows
    return rows


def string_columns(schema: pa.Schema) -> set[str]:
    """Return the names of the columns that hold strings. This leaves out the columns `text` and `url` in a side table
    of `exact`, which hold hashes as bytes."""
    return {field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)}


def _match(batch: pa.RecordBatch, wanted: Tombstones, matches: Matches) -> None:
    ids = batch.column("id")
    if wanted.ids:
        hits = wanted.ids.intersection(ids.to_pylist())
        matches.ids.update(hits)
        matches.matched.update(hits)
    if "url" in batch.schema.names and (wanted.urls or wanted.domains):
        for row, url in enumerate(batch.column("url").to_pylist()):
            if entries := wanted.matches(url):
                matches.ids.add(ids[row].as_py())
                matches.matched.update(entries)


def _add_twins(batch: pa.RecordBatch, matches: Matches) -> None:
    """Add to `matches` the documents that deduplication found similar to a document that is to be removed. `batch`
    holds dropped documents. The metadata of a dropped document names the document that was kept in its place; these two
    are a pair.

    If one of a pair is to be removed, and deduplication found the two texts similar, the other is added to `ids` and
    `twins`. Otherwise the two may have nothing in common, and the other is only added to `unverified`. Pairs that
    `exact` found by a key of `meta` count as not similar: their noted similarity is 1, but no texts were compared.
    """
    columns = (batch.column(name).to_pylist() for name in ("id", "meta", "stage", "reason"))
    for id, meta, stage, reason in zip(*columns, strict=True):
        verdict = json.loads(meta).get(stage) if meta and '"kept"' in meta else None
        if not isinstance(verdict, dict) or not isinstance(verdict.get("kept"), str):
            continue
        pair = {id, verdict["kept"]}
        if not pair & matches.ids or pair <= matches.ids:
            continue
        is_similar = (verdict.get("similarity") or 0) >= SIMILAR or reason == "minhash_contained"
        if reason == "exact_meta" or not is_similar:
            matches.unverified |= pair - matches.ids
        else:
            matches.twins |= pair - matches.ids
            matches.ids |= pair
