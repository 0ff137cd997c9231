"""Describes objects of remote storage, as its listings give them, and puts the entries of a page of a listing in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class RemoteObject:
    """An object of remote storage: its path relative to the root, its size in bytes, and its version. The version is a
    string that changes whenever the object's content does; "" if the storage has none."""

    path: str
    size: int
    version: str


def version_of(info: dict[str, Any]) -> str:
    """Return a string that identifies the content of an object: the hash that the Hugging Face hub gives, an etag, or a
    time. An object must have the same version whether it was found by a listing or by a request for this object. So the
    version id of S3 is not used, because listings lack it."""
    lfs = info.get("lfs")
    hub = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    for candidate in (hub, info.get("blob_id"), info.get("ETag"), info.get("etag"), info.get("generation"),
                      info.get("mtime"), info.get("created"), info.get("LastModified"), info.get("last_modified")):
        if candidate:           # some storages give times as datetimes, others as numbers
            return str(candidate.timestamp() if isinstance(candidate, datetime) else candidate).strip('"')
    return ""


def start_of(begin: str, deep: bool, after: str, top: str) -> str | None:
    """Return the key from which to list the objects below `begin`, so that no object after the path `after` is missed.
    The key is `top` and `after` joined. A listing with `deep` False names folders in place of the objects in them; the
    key then ends with the folder that holds `after`. Returns None if the listing must start at its beginning."""
    if not after or after < begin:
        return None
    folder = -1 if deep or not after.startswith(begin) else after.find("/", len(begin))
    return top + (after if folder < 0 else after[:folder])


def merged(objects: Iterable[tuple[str, Any]], folders: Iterable[str], cut: int) -> Iterator[RemoteObject | str]:
    """Merge the objects, given as (key, description), and the folders of one page of a listing. Yield a RemoteObject
    for each object and a path for each folder, in the order of their keys. The first `cut` characters of each key are
    removed. Objects whose keys end with a slash are left out, because some tools create them only to stand for a
    folder."""
    for key, info in sorted([*objects, *((folder, None) for folder in folders)], key=lambda pair: pair[0]):
        if info is None:
            yield key[cut:]
        elif not key.endswith("/"):
            yield RemoteObject(key[cut:], int(info["Size"] if "Size" in info else info["size"]), version_of(info))
