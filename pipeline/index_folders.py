"""Makes folders that hold indexes of deduplications (`stages.dedup.index`): copies of the indexes of a store, and
merged indexes. Also cuts documents that a takedown has removed from a store out of such folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.base.errors import TokenmillError
from pipeline.base.files import file_sha256
from pipeline.base.parquet import write_table
from pipeline.base.scratch import Scratch
from pipeline.engine.shuffle.exchange import read_segment
from pipeline.engine.shuffle.segment_writer import SegmentWriter
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from pipeline.store.index_folder import (
    NoIndex,
    file_ref,
    overlap,
    read_index,
    refs_of,
    steps_in,
    with_files,
    write_index,
)
from pipeline.store.tombstones import Tombstones, text_hash
from stages.dedup.fragment import SIZES, bucket_of, id_texts, joined
from stages.dedup.index import HASH, KEY, ROWS, DedupIndex, differing, document_dtype, fine_buckets
from stages.dedup.index_texts import packed, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: path of a file of an index below its folder
_NUMBERED = re.compile(r"[^/]+/\d+\.(keys\.seg|documents\.seg|texts\.bin|ids\.parquet)")
_ID = re.compile("[0-9a-f]{32}")


class FolderTaken(TokenmillError):
    """Raised when the folder into which an index is to be written holds files already."""

    exit_code = 2


def new_folder(root: str) -> Store:
    """Return the folder at `root`, into which indexes are to be written. Raises FolderTaken if it is not empty."""
    folder = Store(root)
    if next(iter(folder.list("")), None) is not None:
        raise FolderTaken(f"{root} holds files already; name a new folder")
    return folder


def export_indexes(store: Store, indexes: Sequence[DedupIndex], folder: Store) -> None:
    """Copy indexes of deduplications from a store into a folder, one index for each step. Each file is compared with
    its hash before it is copied. Raises DamagedFile if a file differs or is missing."""
    copied = []
    for index in indexes:
        names = _FileNames(index.step)

        def copy(kind: str, ref: Any, names: _FileNames = names) -> dict[str, Any]:
            return _copy(store, ref["$ref"], ref, folder, names.next(kind))

        copied.append(with_files(index, copy))
    for index in copied:                         # an interrupted copy must not look like an index
        write_index(folder, index)


def merge_folders(roots: Sequence[str], folder: Store) -> list[DedupIndex]:
    """Merge the indexes in the folders `roots` into new indexes in `folder`, which hold the documents of all of them,
    and return these. Of similar documents in several folders, those of the folder that comes first in `roots` have
    priority.

    Raises NoIndex if a folder has no index, or if the folders differ in their steps or settings. Also raises it if two
    of them are known to hold the same documents (`overlap`)."""
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


def indexes_in(root: str) -> list[DedupIndex]:
    """Return the indexes of deduplications in the folder `root`. Raises NoIndex if the folder has none, or if a file
    index.json is damaged."""
    steps = steps_in(Store(root))
    if not steps:
        raise NoIndex(f"{root} holds no index; name a folder that `tokenmill dedup index` or `merge` has made")
    return [read_index(root, step) for step in steps]


def forget(root: str, gone: Tombstones) -> dict[str, int]:
    """Cut documents that were taken down out of the indexes in the folder `root`. They are found by their ids in
    `gone`, and in an index of `minhash` also by their texts. Returns the number of removed records by step: records of
    documents (minhash), or of hashes (exact).

    Files with such a document are written again under new names, then index.json, and then the old files are removed.
    If the function is interrupted, call it again. Raises NoIndex if the folder has no index, or a damaged one."""
    folder, removed = Store(root), {}
    for index in indexes_in(root):
        numbers = [int(path.split("/")[1].split(".")[0]) for path in _files_in(folder, index.step)]
        names = _FileNames(index.step, max(numbers, default=0) + 1)
        try:
            index, removed[index.step] = _without(index, gone, folder, names)
        except (DamagedFile, LookupError, ValueError) as e:
            raise NoIndex(f"{root}/{index.step} is damaged ({e}); make the index again with `tokenmill dedup index`"
                          ) from e
        if removed[index.step]:
            write_index(folder, with_files(index, lambda _, ref: {k: v for k, v in ref.items() if k != "root"}))
        named = {ref["$file"] for ref in refs_of(index)}
        folder.remove_all([path for path in _files_in(folder, index.step) if path not in named])
    return removed


def _files_in(folder: Store, step: str) -> list[str]:
    """Return the paths of the files of a step's index in a folder, including those that an interrupted `forget` has
    left."""
    return [path for path in folder.list(f"{step}/") if _NUMBERED.fullmatch(path)]


def _without(index: DedupIndex, gone: Tombstones, folder: Store, names: _FileNames) -> tuple[DedupIndex, int]:
    """Write those files of an index again that have a document listed in `gone`, without these documents. Returns (the
    index with the new files, number of removed records). The remaining documents keep their numbers."""
    hexadecimal = sorted(id for id in gone.ids if _ID.fullmatch(id))
    ids = np.sort(joined(np.array([(int(id[:16], 16), int(id[16:], 16)) for id in hexadecimal],
                                  [("hi", "<u8"), ("lo", "<u8")])))
    groups, documents = [], [np.zeros(0, np.uint64)]
    for number, group in enumerate(index.groups):
        changed, rows = _group_without(group, ids, gone.texts, index.settings, folder, names)
        groups.append(changed)
        documents.append(np.uint64(number << 32) | rows.astype(np.uint64))
    removed, keys, fewer = np.concatenate(documents), {}, []
    for name, about in index.keys.items():
        files = [_keys_without(ref, about["buckets"], removed, ids, index.step, folder, names)
                 for ref in about["files"]]
        keys[name] = {**about, "files": [ref for ref, _ in files]}
        fewer.append(sum(count for _, count in files))
    exact = index.step == "exact"                     # it counts the hashes of its first property as its documents
    left = index.documents - (fewer[0] if exact and fewer else len(removed))
    return replace(index, keys=keys, groups=groups, documents=max(0, left)), sum(fewer) if exact else len(removed)


def _group_without(group: dict[str, Any], ids: NDArray[np.bytes_], hashes: Set[str], settings: Mapping[str, Any],
                   folder: Store, names: _FileNames) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Write the files of a group of documents of an index again, without some documents: those that have one of the
    sorted `ids`, or whose text has one of the `hashes`. In their places, the new files of records and texts have zeros
    and empty texts; the new file of ids leaves them out. If the group has no such document, nothing is written. Returns
    (the group with its new files, the numbers of the removed documents)."""
    dtype, about, texts = document_dtype(settings["prefer"]), group["documents"], group["texts"]
    buckets = max(1, -(-about["rows"] // ROWS))
    records = np.concatenate([_records(about, bucket, dtype) for bucket in range(buckets)])
    live = records["size"] > 0                        # the others have been cut out before
    lost = live & np.isin(_joined_ids(records), ids)
    with Scratch() as scratch:
        path = os.path.join(scratch.folder(), "texts.bin")
        with open(path, "wb") as file:
            _texts_without(texts, records, np.flatnonzero(live), lost, hashes, settings["max_chars"], file)
        rows = np.flatnonzero(lost)
        if not len(rows):
            return group, rows
        changed = {"texts": _moved(path, texts, names.next("texts.bin"), folder, file_sha256(path), texts["rows"])}
        records[lost] = np.zeros((), dtype)
        path = os.path.join(scratch.folder(), "documents.seg")
        with SegmentWriter(path, dtype, buckets) as out:
            out.write(np.arange(len(records)) // ROWS, records)
        changed["documents"] = _moved(path, about, names.next("documents.seg"), folder, out.content, out.rows)
        path = os.path.join(scratch.folder(), "ids.parquet")
        left = records[live & ~lost]
        write_table(pa.table({"id": pa.array(id_texts(left["id_hi"], left["id_lo"]), pa.string())}), path,
                    write_statistics=False)
        changed["ids"] = _moved(path, group["ids"], names.next("ids.parquet"), folder, file_sha256(path), len(left))
    return {**group, **changed}, rows


def _texts_without(ref: dict[str, Any], records: NDArray[Any], live: NDArray[np.int64], lost: NDArray[np.bool_],
                   hashes: Set[str], max_chars: int, file: BinaryIO) -> None:
    """Write the texts of a group of documents to `file`, without the texts of the documents that the array `lost`
    marks. Documents whose text has one of `hashes` are marked in `lost` and left out, too. `live` are the numbers of
    the records that have a text. The place of each text in the new file is written to its record."""
    with Scratch() as scratch:
        source = Store(ref["root"]).checked(ref["$file"], ref["sha256"], scratch.folder(), size=ref["bytes"])
        places = records["offset"][live]
        edges = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist(), len(live)] if len(live) else [0]
        with open(source, "rb") as old:
            for start, stop in pairwise(edges):       # the documents of a block
                here = live[start:stop]
                offset, size = int(records["offset"][here[0]]), int(records["size"][here[0]])
                if offset + size > ref["bytes"]:
                    raise ValueError(f"{ref['$file']} is shorter than another file says")
                old.seek(offset)
                block = old.read(size)
                strings, numbers = unpacked(block, max_chars), 2 * records["number"][here].astype(np.int64)
                if hashes:
                    lost[here] |= [text_hash(strings[number + 1].decode()) in hashes for number in numbers.tolist()]
                for number in numbers[lost[here]].tolist():
                    strings[number] = strings[number + 1] = b""
                block = packed(strings) if lost[here].any() else block
                records["offset"][here], records["size"][here] = file.tell(), len(block)
                records["sum"][here] = xxhash.xxh3_64_intdigest(block)
                file.write(block)


def _keys_without(ref: dict[str, Any], buckets: int, documents: NDArray[np.uint64], ids: NDArray[np.bytes_], step: str,
                  folder: Store, names: _FileNames) -> tuple[dict[str, Any], int]:
    """Write a file of an index's keys again, without the records of removed documents. In an index of `exact`, these
    records have one of `ids`. In an index of `minhash`, they have one of the document numbers `documents`. If the file
    has no such record, nothing is written. Returns (the reference to the file, the number of records removed)."""
    kept = []
    for bucket in range(buckets):
        records = _records(ref, bucket, HASH if step == "exact" else KEY)
        kept.append(records[~(np.isin(_joined_ids(records), ids) if step == "exact" else
                              np.isin(records["document"], documents))])
    fewer = ref["rows"] - sum(map(len, kept))
    if not fewer:
        return ref, 0
    with Scratch() as scratch:
        path = os.path.join(scratch.folder(), "keys.seg")
        with SegmentWriter(path, kept[0].dtype, buckets, key=["hi", "lo"] if step == "exact" else ["key", "document"]
                           ) as out:
            for bucket, records in enumerate(kept):
                out.write(np.full(len(records), bucket), records)
        return _moved(path, ref, names.next("keys.seg"), folder, out.content, out.rows), fewer


def _joined_ids(records: NDArray[Any]) -> NDArray[np.bytes_]:
    """Return the document id of each record, as an array of values of 16 bytes."""
    own = np.empty(len(records), [("hi", "<u8"), ("lo", "<u8")])
    own["hi"], own["lo"] = records["id_hi"], records["id_lo"]
    return joined(own)


def _moved(path: str, ref: dict[str, Any], name: str, folder: Store, content: str, rows: int) -> dict[str, Any]:
    """Move the temporary file `path` into the folder of an index, as the file `name`, and return the reference to it.
    `ref` is the reference (as `file_ref` makes it) to the file of the index that the new file replaces."""
    new = {"bytes": os.path.getsize(path), "sha256": file_sha256(path), "content": content, "rows": rows}
    folder.replace(path, name)
    return {**file_ref(name, new), "root": ref["root"]}


class _FileNames:
    """Makes names for the files of an index: STEP/NUMBER.KIND, with numbers that count up from `first`."""

    def __init__(self, step: str, first: int = 0) -> None:
        self._step, self._count = step, first

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
    """Merge several indexes of one deduplication step, which have equal settings, into a new index in `folder`. Returns
    the new index."""
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
    """Merge the key files that several indexes have for the property `name` of documents, and write the new files to
    `folder`. In indexes of the step `exact`, only the first index's record of a hash stays. Returns the entry of the
    property in the new index: references to the files, and the number of buckets of each file."""
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
    """Yield records of the files with keys of one index, each time with the reference to the file that they are from.
    The possible keys are divided into `ranges` equal ranges; records of the range `number` are yielded. Raises NoIndex
    if a file is damaged, or has records of another type than `dtype`."""
    buckets, all_buckets = keys["buckets"], keys["buckets"] * len(keys["files"])
    for bucket in range(number * all_buckets // ranges, -(-(number + 1) * all_buckets // ranges)):
        ref = keys["files"][bucket // buckets]
        stored = _records(ref, bucket % buckets, dtype)
        yield ref, stored[bucket_of(stored[field], ranges) == number]


def _records(ref: dict[str, Any], bucket: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the records in one bucket of a file of an index. Raises NoIndex if the file is damaged, or if its records
    are of another type than `dtype`."""
    try:
        records = read_segment(Store(ref["root"]), {**ref, "$ref": ref["$file"]}, bucket)
    except DamagedFile as e:
        raise _no_file(ref, e.why) from e
    except (ValueError, TypeError, LookupError, OverflowError) as e:
        raise _no_file(ref, str(e)) from e
    if records.dtype != dtype:
        raise _no_file(ref, f"it holds other records ({records.dtype})")
    return records


def _no_file(ref: dict[str, Any], why: str) -> NoIndex:
    return NoIndex(f"{ref['$file']} (below {ref['root']}) is no file of this index: {why}; make the index again with "
                   f"`tokenmill dedup index`")
