"""Makes folders with indexes of deduplications (`stages.dedup.index`): copies of those of a store, and merged ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from pipeline.base.errors import TokenmillError
from pipeline.base.files import file_sha256
from pipeline.base.scratch import Scratch
from pipeline.engine.shuffle.exchange import SegmentWriter, read_segment
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from pipeline.store.index_folder import NoIndex, file_ref, overlap, read_index, steps_in, with_files, write_index
from stages.dedup.fragment import SIZES, bucket_of
from stages.dedup.index import HASH, KEY, DedupIndex, differing, fine_buckets


class FolderTaken(TokenmillError):
    """Raised when a folder for an index holds files already."""

    exit_code = 2


def new_folder(root: str) -> Store:
    """Return the folder at `root`, into which indexes are to be written. Raises FolderTaken if it is not empty."""
    folder = Store(root)
    if next(iter(folder.list("")), None) is not None:
        raise FolderTaken(f"{root} holds files already, and an index is never changed; name another folder")
    return folder


def export_indexes(store: Store, indexes: Sequence[DedupIndex], folder: Store) -> None:
    """Copy indexes of a store into a folder, one for each step. Each file is compared with its hash before it is
    copied. Raises DamagedFile if one differs or is missing."""
    copied = []
    for index in indexes:
        names = _FileNames(index.step)

        def copy(kind: str, ref: Any, names: _FileNames = names) -> dict[str, Any]:
            return _copy(store, ref["$ref"], ref, folder, names.next(kind))

        copied.append(with_files(index, copy))
    for index in copied:                         # an interrupted copy must not look like an index
        write_index(folder, index)


def merge_folders(roots: Sequence[str], folder: Store) -> list[DedupIndex]:
    """Write indexes into a folder that hold the documents of all indexes in the folders `roots`, the first of which
    comes first in priority. Returns the new indexes. Raises NoIndex if a folder has no index, if the folders differ in
    their steps or settings, or if two of them are known to hold the same documents (`overlap`)."""
    steps = steps_in(Store(roots[0]))
    by_step = {step: [read_index(root, step) for root in roots] for step in steps}
    for root in roots:
        if steps_in(Store(root)) != steps or not steps:
            raise NoIndex(f"{root} has indexes for {', '.join(steps_in(Store(root))) or 'no step'}, and {roots[0]} for "
                          f"{', '.join(steps) or 'no step'}; merge folders with the same steps")
    for step, indexes in by_step.items():
        for root, index in zip(roots, indexes):
            if other := differing(index.settings, indexes[0].settings):
                raise NoIndex(f"{root}/{step} was made with {other} (in {roots[0]}/{step}); merge indexes of equal "
                              f"settings")
        for (first, one), (second, two) in combinations(zip(roots, indexes), 2):
            if overlap(one, two):
                raise NoIndex(f"{second}/{step} holds documents that {first}/{step} holds, too; name one of the two")
    merged = [_merge(indexes, folder) for indexes in by_step.values()]
    for index in merged:
        write_index(folder, index)
    return merged


class _FileNames:
    """Gives names to the files of an index."""

    def __init__(self, step: str) -> None:
        self._step, self._count = step, 0

    def next(self, kind: str) -> str:
        self._count += 1
        return f"{self._step}/{self._count - 1:05}.{kind}"


def _copy(store: Store, path: str, ref: Any, folder: Store, name: str) -> dict[str, Any]:
    with Scratch() as scratch:
        source = store.checked(path, ref["sha256"], scratch.folder(), size=ref["bytes"])
        target = os.path.join(scratch.folder(), "copy")
        with open(source, "rb") as read, open(target, "wb") as write:
            while block := read.read(1 << 22):
                write.write(block)
        folder.replace(target, name)
    return file_ref(name, ref)


def _merge(indexes: Sequence[DedupIndex], folder: Store) -> DedupIndex:
    """Merge indexes of one step with equal settings."""
    first = indexes[0]
    names = _FileNames(first.step)
    keys = {name: _merge_keys(indexes, name, folder, names) for name in first.keys}
    groups, rank = [], 0
    for index in indexes:
        def copy(kind: str, ref: Any) -> dict[str, Any]:
            return _copy(Store(ref["root"]), ref["$file"], ref, folder, names.next(kind))

        for group in index.groups:
            groups.append({"rank": rank + group["rank"],
                           **{part: copy(kind, group[part]) for part, kind in (
                               ("documents", "documents.seg"), ("texts", "texts.bin"), ("ids", "ids.parquet"))}})
        rank += index.ranks
    counted = sum(index.documents for index in indexes)
    if not groups:
        counted = sum(ref["rows"] for ref in next(iter(keys.values()))["files"])
    return DedupIndex(first.step, first.settings, rank, keys, groups, counted)


def _merge_keys(indexes: Sequence[DedupIndex], name: str, folder: Store, names: _FileNames) -> dict[str, Any]:
    """Write the files of keys of one property of a merged index. Of equal hashes (in an index of `exact`), the first
    index has the document that stays."""
    dtype, key = (HASH, ["hi", "lo"]) if indexes[0].step == "exact" else (KEY, ["key", "document"])
    parts = [index.keys[name] for index in indexes]
    rows = sum(ref["rows"] for keys in parts for ref in keys["files"])
    ranges = SIZES.buckets(rows * dtype.itemsize, 1) if rows else 1
    buckets = fine_buckets(rows, dtype, ranges)
    field, groups = key[0], np.cumsum([0, *(len(index.groups) for index in indexes)]).tolist()
    files = []
    for number in range(ranges):
        blocks = [np.zeros(0, dtype)]
        for keys, before, after in zip(parts, groups, groups[1:]):
            for ref, block in _range(keys, number, ranges, field, dtype):
                if dtype == KEY:
                    if len(block) and int(block["document"].max()) >> 32 >= after - before:
                        raise _no_file(ref, "it names a group of documents that the index does not have")
                    block = block.copy()
                    block["document"] += np.uint64(before << 32)
                blocks.append(block)
        records = np.concatenate(blocks)
        records = records[np.argsort(records, order=key, kind="stable")]
        if dtype == HASH:
            new = np.ones(len(records), bool)
            new[1:] = (records["hi"][1:] != records["hi"][:-1]) | (records["lo"][1:] != records["lo"][:-1])
            records = records[new]
        with Scratch() as scratch:
            path = os.path.join(scratch.folder(), "keys.seg")
            with SegmentWriter(path, dtype, buckets, key=key) as out:
                out.write(bucket_of(records[field], ranges * buckets) - number * buckets, records)
            ref = {"bytes": os.path.getsize(path), "sha256": file_sha256(path), "content": out.content,
                   "rows": out.rows}
            target = names.next("keys.seg")
            folder.replace(path, target)
        files.append(file_ref(target, ref))
    return {"files": files, "buckets": buckets}


def _range(keys: dict[str, Any], number: int, ranges: int, field: str,
           dtype: np.dtype[Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the records of range `number` of `ranges` from the files of keys of one index, each time with the
    reference to their file. Raises NoIndex if a file is damaged, or holds other records than `dtype`."""
    buckets, all_buckets = keys["buckets"], keys["buckets"] * len(keys["files"])
    for bucket in range(number * all_buckets // ranges, -(-(number + 1) * all_buckets // ranges)):
        ref = keys["files"][bucket // buckets]
        try:
            stored = read_segment(Store(ref["root"]), {**ref, "$ref": ref["$file"]}, bucket % buckets)
        except DamagedFile as e:
            raise _no_file(ref, e.why) from e
        except (ValueError, TypeError, LookupError, OverflowError) as e:
            raise _no_file(ref, str(e)) from e
        if stored.dtype != dtype:
            raise _no_file(ref, f"it holds other records ({stored.dtype})")
        yield ref, stored[bucket_of(stored[field], ranges) == number]


def _no_file(ref: dict[str, Any], why: str) -> NoIndex:
    return NoIndex(f"{ref['$file']} (below {ref['root']}) is no file of this index: {why}; make the index again with "
                   f"`tokenmill dedup index`")
