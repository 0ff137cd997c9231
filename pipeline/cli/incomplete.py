"""Marks folders of object storage as incomplete while a command writes them, so that no command reads them, and names
these folders in messages. The mark is an object, MARK.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pipeline.base.errors import TokenmillError
from pipeline.cli.errors import BadUsage
from pipeline.cli.options import check_root
from pipeline.store.fs import Store

#: name of the object that marks a folder as incomplete while its objects are uploaded
MARK = "INCOMPLETE"


def is_url(place: str | Path) -> bool:
    return "://" in str(place)


def unused_store(url: str, option: str) -> Store:
    """Open the folder of object storage at `url` for writing, and return it as a store. Raises BadUsage if the folder
    has objects but no MARK, the object that marks a folder as incomplete."""
    check_root(url, option)
    store = Store(url)
    here = list(store.list(""))
    if here and MARK not in here:
        raise BadUsage(f"{option} {url}: has {here[0]}: the folder is not empty; name a new folder, or remove it first")
    return store


def claim(store: Store, option: str, own: bytes) -> set[str]:
    """Mark a folder of object storage as incomplete by creating the object MARK with the contents `own`, whose first
    word identifies what is being written. Returns the other objects in the folder; a new folder has none.

    A MARK with the same first word means that an earlier command with the same contents was killed. This command then
    takes the folder over, and the objects that are there are returned. Raises BadUsage when the folder has a MARK with
    another first word, or objects without a MARK."""
    if store.put_absent(MARK, own):
        if all(path == MARK for path in store.list("")):
            return set()
        store.remove(MARK)
        raise BadUsage(f"{option} {store.root}: another command has written there; name a new folder")
    if store.read(MARK).split(b" ")[0] != own.split(b" ")[0]:
        raise claimed(store, option)
    store.write(MARK, own)
    return {*store.list("")} - {MARK}


def claimed(store: Store, option: str) -> BadUsage:
    return BadUsage(f"{option} {store.root}: has {MARK}: another command writes there, or was killed; name a new "
                    f"folder, or remove it first")


def removal_order(path: str) -> tuple[bool, bool, str]:
    """Return a sort key that puts the paths of an incomplete folder into the order in which its objects are removed.
    The indices come first, because without them nothing reads the other files. Within both groups, files of the
    training set (split=train) come first."""
    name = path.rpartition("/")[2]
    return name not in ("index.json", "shards.json"), "split=train" not in path, path


@contextlib.contextmanager
def naming(folder: str, url: str) -> Iterator[None]:
    """A context manager that replaces `folder` by `url` in the messages of TokenmillErrors that are raised in the
    `with` block."""
    try:
        yield
    except TokenmillError as e:
        e.args = tuple(arg.replace(folder, url) if isinstance(arg, str) else arg for arg in e.args)
        raise
