"""Carries out a takedown, step by step. The docstring of the package describes the steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import asdict
from itertools import chain
from typing import Any

import pyarrow as pa

from pipeline.base.errors import TokenmillError
from pipeline.base.files import file_sha256
from pipeline.base.scratch import Scratch
from pipeline.cluster.attempts import utc_now
from pipeline.store.cache import cache_for
from pipeline.store.copies import noted_copies
from pipeline.store.dataset import PartToPublish, publish_again, published_folders, published_parts, remove_earlier
from pipeline.store.fs import Store
from pipeline.store.garbage import NODES, collect_garbage
from pipeline.store.log import Log, attempt_name
from pipeline.store.parts import copy_without
from pipeline.store.records import PartRecord
from pipeline.store.tombstones import Takedown, Tombstones, sealed_json, takedowns, text_hash, unfinished
from pipeline.store.view import LogView
from pipeline.takedown.lookup import key_without, renumber
from pipeline.takedown.reports import redact, texts_of
from pipeline.takedown.search import Matches, find, grouped_names_one_of, names_one_of, rows_of
from pipeline.takedown.shards import curricula, documents_in, overwrite, seen, stored_sets

#: tasks that copy tokens of shards for an export; their files do not name documents
EXPORTING = ("scatter_windows", "write_rows")
LABELS = "labels"
#: folder of rewritten parts until they are published; garbage collection removes what an interrupted takedown leaves
REWRITTEN = "objects/takedown"


class NothingToTakeDown(TokenmillError):
    """Raised when no document of the store matches the list of a takedown, or when all that match are gone already."""

    exit_code = 2


def survey(store: Store, log: LogView, wanted: Tombstones, only: bool) -> tuple[Matches, dict[str, Any]]:
    """Find the documents that a takedown would remove, and where they are. `wanted` is the list of ids, URLs and
    domains; with `only`, documents similar to these stay.

    Returns the documents and a dict of places: {records, parts, shards, labels, exports, outside}. `outside` are the
    folders outside the store that may hold the documents, too; a takedown does not change them. Raises
    NothingToTakeDown when there are no such documents, or when all are gone already."""
    matches = find(store, log, wanted, only)
    if not matches.ids:
        entries = wanted.ids | wanted.urls | wanted.domains
        before = {entry for old in takedowns(store) for entry in (*old.ids, *old.urls, *old.domains)}
        if entries <= before:
            raise NothingToTakeDown(f"{store.root}: all {len(entries):,} entries were taken out before; runs leave "
                                    f"them out")
        raise NothingToTakeDown(f"{store.root}: no document matches any of the {len(entries):,} entries; check that "
                                f"ids are whole, and URLs as the column `url` of the datasets has them")
    gone = {id: takedown.number for takedown in takedowns(store) for id in takedown.documents}
    if matches.ids <= gone.keys():
        numbers = ", ".join(map(str, sorted({gone[id] for id in matches.ids})))
        raise NothingToTakeDown(f"{store.root}: all {len(matches.ids):,} matching documents are gone already (takedown "
                                f"{numbers})")
    matches.ids -= gone.keys()
    matches.twins -= gone.keys()
    ids = pa.array(sorted(matches.ids), pa.string())
    sets = [{"folder": folder, "sha256": manifest.sha256, "documents": sum(map(len, spans.values()))}
            for folder, manifest in stored_sets(store) if (spans := documents_in(store, folder, manifest, ids))]
    return matches, {
        "records": [{"node": record.node, "key": record.key}
                    for record in _records(store, log, matches.ids, bool(sets))],
        "parts": [{"path": part.path, "key": part.key, "rows": rows} for folder in published_folders(store)
                  for part in published_parts(store, folder) if (rows := rows_of(store, part.path, matches.ids))],
        "shards": sets, "labels": list(_labels(store, matches.ids)), "exports": _exports(store, sets),
        "outside": [asdict(copy) for copy in noted_copies(store)]}


def begin(store: Store, log: Log, wanted: Tombstones, reason: str, only: bool) -> tuple[Takedown, Matches]:
    """Find the documents of a new takedown, and write its tombstones (`takedowns/N.json`). After this, `carry_out` can
    be called, again and again after crashes, until it has finished. Returns the takedown and the documents."""
    matches, holds = survey(store, log, wanted, only)
    number = max((takedown.number for takedown in takedowns(store)), default=0) + 1
    takedown = Takedown(number, reason, utc_now(), tuple(sorted(wanted.ids)), tuple(sorted(wanted.urls)),
                        tuple(sorted(wanted.domains)), tuple(sorted(matches.ids)), tuple(sorted(matches.twins)),
                        () if only else tuple(sorted({text_hash(text) for text, _ in texts_of(
                            store, log, frozenset(matches.ids))})), holds, tuple(seen(store, frozenset(matches.ids))))
    log.check_lease()
    if not store.put_absent(takedown.path, sealed_json(asdict(takedown))):
        raise TokenmillError(f"{store.at(takedown.path)} exists already; another takedown runs in this store")
    return takedown, matches


def complete(store: Store, log: Log) -> list[Takedown]:
    """Carry out all takedowns of the store that were interrupted, and return them."""
    interrupted = unfinished(store)
    for takedown in interrupted:
        carry_out(store, log, takedown)
    return interrupted


def carry_out(store: Store, log: Log, takedown: Takedown) -> dict[str, Any]:
    """Remove the documents of a takedown from the store. Each step looks at what the store holds now, so after a crash
    all steps may be done again. Reports come first: quotations in them are recognised by means of the texts, which
    later steps remove. Returns what `takedowns/N.done.json` says."""
    ids = frozenset(takedown.documents)
    collect_garbage(log)                         # also the texts that interrupted runs have left
    reports = redact(store, takedown.tombstones(), chain.from_iterable(texts_of(store, log, ids)))
    store.remove_all(_labels(store, ids))
    _rewrite_published(store, log, ids)
    store.remove_all(path for folder in takedown.holds["exports"] for path in list(store.list(folder)))
    renumber(store, takedown.holds["parts"], log.check_lease)
    sets = overwrite(store, ids, takedown.number, log.check_lease)
    records = list(_records(store, log, ids, bool(takedown.holds["shards"])))
    log.retire_unnamed(((record.key, record.attempt) for record in records), f"takedown {takedown.number}")
    log.check_lease()
    store.remove_all(list(store.list(NODES)))
    collect_garbage(log)
    _clear_cache(store)
    done = {"number": takedown.number, "at": utc_now(), "reports": reports, "shards": [asdict(one) for one in sets]}
    log.check_lease()
    store.put_absent(takedown.done_path, sealed_json(done))
    return done


def _records(store: Store, log: LogView, ids: Set[str], exports: bool) -> Iterator[PartRecord]:
    """Yield the commit records of those tasks whose files hold one of the documents `ids`. With `exports`, also yield
    the records of all tasks that copied tokens of shards for an export (`tokenmill materialize`)."""
    for record in log.records():
        files = [info.path for name, info in record.files.items() if name.endswith(".parquet")]
        if ((exports and record.task in EXPORTING) or any(names_one_of(store, path, ids) for path in files)
                or grouped_names_one_of(store, record, ids)):
            yield record


def _rewrite_published(store: Store, log: Log, ids: frozenset[str]) -> None:
    """Publish again, without the documents `ids`, all folders that have parts (data files) with one of them. Parts
    without such a document stay the same files. Shards name a row by the key of its part and the row's number. These
    numbers change in a part that is written again, so the part gets another key (`key_without`)."""
    serial = 0
    for folder in published_folders(store):
        parts, written = [], []
        with Scratch() as scratch:
            for part in published_parts(store, folder):
                if rows := rows_of(store, part.path, ids):
                    serial += 1
                    path = f"{REWRITTEN}/{attempt_name(log.epoch, serial)}.parquet"
                    part = _without(store, part._replace(key=key_without(part.key, rows)), ids, path, scratch.folder())
                    written.append(part.path)
                parts.append(part)
        if written:
            publish_again(store, folder, parts, log.check_lease)
            store.remove_all(written)
        else:
            remove_earlier(store, folder)


def _without(store: Store, part: PartToPublish, ids: frozenset[str], path: str, scratch: str) -> PartToPublish:
    """Write a part of a published folder to `path`, without the documents `ids`. Returns the new part."""
    target = f"{scratch}/part.parquet"
    rows, text_bytes, content = copy_without(store.fetch(part.path, scratch), target, ids)
    sha256 = file_sha256(target)
    content = content or sha256
    with open(target, "rb") as file:
        size = file.seek(0, 2)
    store.upload(target, path)
    return part._replace(path=path, rows=rows, bytes=size, text_bytes=text_bytes, sha256=sha256, content=content)


def _labels(store: Store, ids: frozenset[str] | set[str]) -> Iterator[str]:
    """Yield the paths of the labels that people gave to documents with these ids."""
    for path in store.list(LABELS):
        try:
            label = json.loads(store.read(path).partition(b"\n")[2])
        except ValueError:
            continue                             # damaged; it holds no text
        if isinstance(label, dict) and label.get("document") in ids:
            yield path


def _exports(store: Store, sets: list[dict[str, Any]]) -> list[str]:
    """Return those folders of training samples under runs/ that `tokenmill materialize` has made from one of the shard
    sets `sets`. The command may have written samples to other places, too; the store does not know these."""
    named = {(one["folder"], one["sha256"]) for one in sets}
    runs = {path.split("/")[1] for path, curriculum in curricula(store)
            if any({(s.train, s.sha256), (s.val, s.val_sha256)} & named for s in curriculum.streams)}
    return sorted({"/".join(path.split("/")[:3]) for path in store.list("runs")
                   if path.split("/")[1] in runs and path.split("/")[2].startswith("rows-")})


def _clear_cache(store: Store) -> None:
    """Empty this machine's cache of remote files, which may hold files that were removed from the store."""
    if store.local is None:
        with Scratch() as scratch:
            if (cache := cache_for(store.remote, scratch.path)) is not None:
                cache.evict(0)
