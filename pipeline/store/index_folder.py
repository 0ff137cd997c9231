"""Indexes of deduplications in folders of their own, outside a store (`tokenmill dedup index`).

    FOLDER/STEP/index.json     describes the index of one step. The first line is the sha256 of the rest of the file;
                               the rest is a `DedupIndex` as JSON, which refers to each other file by
                               {"$file": path below FOLDER, "size", "etag": "sha256:…", "bytes", "content", "rows"}
    FOLDER/STEP/NUMBER.NAME    the other files of the index

The file index.json is written last, so a folder without it holds no index. The other files are never changed. When
documents are cut out of an index (`tokenmill dedup forget`), the files that hold them are replaced by files with new
numbers. A task verifies the bytes of these files that it reads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.store.fs import Store
from stages.dedup.index import DedupIndex

FORMAT = 1
MANIFEST = "index.json"
#: most priorities of the documents of an index; each input of its datasets has one
_RANKS = 1 << 20


class NoIndex(TokenmillError):
    """Raised when a folder holds no index for a deduplication step, or a damaged one."""

    exit_code = 2


def with_files(index: DedupIndex, change: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> DedupIndex:
    """Return a copy of a deduplication's index in which every reference to a file is replaced. `change` gets the kind
    of the file (such as "texts.bin") and the old reference, and returns the new reference."""
    keys = {name: {**keys, "files": [change("keys.seg", ref) for ref in keys["files"]]}
            for name, keys in index.keys.items()}
    groups = [{"rank": group["rank"], "documents": change("documents.seg", group["documents"]),
               "texts": change("texts.bin", group["texts"]), "ids": change("ids.parquet", group["ids"])}
              for group in index.groups]
    return DedupIndex(index.step, index.settings, index.ranks, keys, groups, index.documents)


def refs_of(index: DedupIndex) -> list[Mapping[str, Any]]:
    """Return the references to all files of a deduplication's index."""
    return [ref for keys in index.keys.values() for ref in keys["files"]] + [
        group[part] for group in index.groups for part in ("documents", "texts", "ids")]


def file_ref(path: str, ref: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reference to the file `path` of an index's folder. The size, hashes and number of rows are taken from
    `ref`, another reference to the same contents."""
    return {"$file": path, "size": ref["bytes"], "etag": f"sha256:{ref['sha256']}", "sha256": ref["sha256"],
            "bytes": ref["bytes"], "content": ref["content"], "rows": ref["rows"]}


def steps_in(folder: Store) -> list[str]:
    """Return the names of the deduplication steps for which a folder holds indexes, sorted."""
    return sorted(path.split("/")[0] for path in folder.list("") if path.count("/") == 1
                  and path.endswith(f"/{MANIFEST}"))


def overlap(a: DedupIndex, b: DedupIndex) -> bool:
    """Return whether two indexes of the same deduplication step share a file, and therefore documents. They do if they
    are the same index, or if one was merged from the other. Merged indexes of the step `exact` have new files, so for
    this step the function recognises only that two indexes are equal."""
    def files(index: DedupIndex) -> set[str]:
        refs = [group["documents"] for group in index.groups] or [
            ref for keys in index.keys.values() for ref in keys["files"]]
        return {ref["content"] for ref in refs if ref["rows"]}

    return not files(a).isdisjoint(files(b))


def write_index(folder: Store, index: DedupIndex) -> None:
    """Write index.json, the file that describes a deduplication's index. The other files of the index must lie in the
    folder already."""
    body = json.dumps({"format": FORMAT, **index.to_json()}, sort_keys=True, indent=1).encode()
    folder.write(f"{index.step}/{MANIFEST}", hashlib.sha256(body).hexdigest().encode() + b"\n" + body, durable=True)


def _check_numbers(index: DedupIndex) -> None:
    """Check the numbers in the description of a deduplication's index. Raises ValueError if one of them is not an
    integer, or is outside its limits."""
    at_least = [(index.ranks, 0), (index.documents, 0), *((keys["buckets"], 1) for keys in index.keys.values()),
                *((group["rank"], 0) for group in index.groups), *((ref[name], 0) for ref in refs_of(index)
                                                                   for name in ("size", "bytes", "rows"))]
    if any(type(number) is not int or number < least for number, least in at_least):
        raise ValueError("a number is none, or too small")
    if index.ranks > _RANKS or any(group["rank"] >= index.ranks for group in index.groups):
        raise ValueError("a priority is too large")


def read_index(root: str, step: str) -> DedupIndex:
    """Return the index that a folder holds for a deduplication step. The references to its files get the folder as
    `root`. Raises NoIndex if there is none, or if its index.json is damaged, does not describe an index, or is of
    another version. The other files are not read here."""
    folder = Store(root)
    try:
        data = folder.read(f"{step}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError) as e:
        there = ", ".join(steps_in(folder)) if folder.local is None or folder.local.is_dir() else ""
        raise NoIndex(f"{root} holds no index for the step '{step}'"
                      + (f", only for {there}" if there else "")
                      + "; make one with `tokenmill dedup index`") from e
    head, _, body = data.partition(b"\n")
    if head != hashlib.sha256(body).hexdigest().encode():
        raise NoIndex(f"{folder.at(f'{step}/{MANIFEST}')} is damaged; make the index again with `tokenmill dedup "
                      f"index`")
    try:
        document = json.loads(body)
        written = document.pop("format", None)
        index = with_files(DedupIndex(**document), lambda _, ref: {**ref, "root": root}) if written == FORMAT else None
        if index is not None:
            _check_numbers(index)
        paths = [ref["$file"] for ref in refs_of(index)] if index else []
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise NoIndex(f"{folder.at(f'{step}/{MANIFEST}')} does not describe an index; make the index again with "
                      f"`tokenmill dedup index`") from e
    if index is None:
        raise NoIndex(f"{folder.at(f'{step}/{MANIFEST}')} was written by another version of Tokenmill; make the index "
                      f"again with `tokenmill dedup index`")
    for path in paths:
        if not re.fullmatch(rf"{re.escape(step)}/\d+\.[\w.]+", path):
            raise NoIndex(f"{folder.at(f'{step}/{MANIFEST}')} names {path!r}, which is no file of this index; make the "
                          f"index again with `tokenmill dedup index`")
    return index
