"""Lists the objects of a bucket that match a pattern, in bounded memory, and continues a listing that was interrupted.

S3 and Google Cloud Storage answer in pages, in the order of the keys, starting after any given key. Listed objects go
to a temporary database. Every `CHUNK` objects are also written to a file of the store:

    listing/PATTERN/N.json    {"version", "pattern", "after", "at", "objects": [[path, size, version] …]}

`after` is the last path of the previous file. A later run that finds such files for one of its patterns continues the
listing after the last path in them. When all sources of a run are listed, the run removes all such files, also those of
other recipes.

Patterns on the Hugging Face hub and on the web are listed in memory, by fsspec.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise, takewhile
from typing import Any, TypeAlias

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.humanize import duration
from pipeline.store.fs import Store
from pipeline.store.listing import RemoteObject, version_of
from pipeline.store.remote import Remote, connect
from pipeline.store.retry import patiently
from pipeline.store.temp import Spilled

logger = logging.getLogger("tokenmill")

FOLDER = "listing"
#: objects of a file of the journal: ten pages of S3, about 1 MB
CHUNK = 10_000
#: A file of the journal that is older than this many seconds is not used. A listing that is continued misses objects
#: that were added since, if they come before the path where it continues; the next run lists them. If a listed object
#: has changed since, the task that reads it ends the run.
CONTINUED_S = 3600.0
VERSION = 1

#: path, size in bytes, version
Row: TypeAlias = tuple[str, int, str]
#: objects found during one plan as (URL, size, version), by pattern, so that a bucket is listed once
Listings: TypeAlias = dict[str, Sequence[Row]]


class ListingJournal:
    """Records in a folder of the store which objects of a bucket have been listed so far, so that a later run can
    continue. `check_lease` raises when another driver has taken over the store."""

    def __init__(self, store: Store, check_lease: Callable[[], None] = lambda: None, clock: Clock = SYSTEM,
                 chunk: int = CHUNK) -> None:
        self._store, self._check_lease, self._clock, self._chunk = store, check_lease, clock, chunk

    def listed(self, pattern: str, scan: Callable[[str], Iterable[Row]]) -> Iterator[Row]:
        """Yield the objects that match `pattern` in the order of their paths, first those that an interrupted run
        recorded. `scan(after)` lists the objects whose paths come after the path `after`."""
        folder = f"{FOLDER}/{hashlib.sha256(pattern.encode()).hexdigest()[:16]}"
        number, after, oldest = 0, "", self._clock.wall()
        while (part := self._read(f"{folder}/{number:06d}.json", pattern, after)) is not None:
            yield from map(_row, part["objects"])
            number, after, oldest = number + 1, part["objects"][-1][0], min(oldest, part["at"])
        if number:
            logger.warning("%s: its listing goes on where a run was interrupted, after '%s'; what comes "
                           "before was listed up to %s ago. Stop and remove %s to list it again", pattern, after,
                           duration(self._clock.wall() - oldest),
                           f"{self._store.root}/{folder}")
        rows, sorted_so_far = iter(scan(after)), True
        while chunk := list(islice(rows, self._chunk)):
            sorted_so_far &= _ascending(after, [path for path, _, _ in chunk])
            if len(chunk) == self._chunk and sorted_so_far:
                self._check_lease()
                self._store.write(f"{folder}/{number:06d}.json", json.dumps(
                    {"version": VERSION, "pattern": pattern, "after": after, "at": self._clock.wall(),
                     "objects": chunk}).encode())
            yield from chunk
            number, after = number + 1, chunk[-1][0]

    def _read(self, path: str, pattern: str, after: str) -> dict[str, Any] | None:
        """Return the contents of one file of the journal. Returns None when the file is missing, damaged or too old, or
        when it does not continue the previous file, whose last path is `after`."""
        try:
            part = json.loads(self._store.read(path))
        except FileNotFoundError:
            return None
        except ValueError:
            part = {}
        expected = {"version": VERSION, "pattern": pattern, "after": after}
        with contextlib.suppress(LookupError, TypeError, ValueError):         # a damaged file
            rows = [_row(row)[0] for row in part["objects"]]
            if expected == {k: part[k] for k in expected} and rows and _ascending(after, rows) \
                    and abs(self._clock.wall() - part["at"]) <= CONTINUED_S:
                return dict(part)
        return None

    def remove(self) -> None:
        """Remove the journal, so that the next run lists the sources again. Called when every source is listed. The
        journals of other recipes are removed, too, because their runs may never be started again."""
        paths = list(self._store.list(FOLDER))
        if paths:
            self._check_lease()
            self._store.remove_all(paths)


def _ascending(after: str, paths: list[str]) -> bool:
    """Whether `paths` are sorted and all come after the path `after`. Only a storage that lists objects in this order
    can continue a listing from a given path."""
    return all(a < b for a, b in pairwise([after, *paths]))


def _row(values: list[Any]) -> Row:
    path, size, version = values
    return path, size, version


def list_objects(pattern: str, listings: Listings, journal: ListingJournal | None) -> tuple[str, Sequence[Row]]:
    """Return the root folder of a pattern, and the objects of a bucket that match it, as (URL, size, version). The
    paths of documents are relative to this folder. Objects that were listed before are taken from `listings`, to which
    new listings are added. `journal` continues a listing that an earlier run did not finish."""
    if pattern not in listings:
        listings[pattern] = _listing(*matching(pattern, journal))
    folder, objects = fixed_prefix(pattern), listings[pattern]
    one = len(objects) == 1 and objects[0][0] == pattern
    return folder if one or glob.has_magic(pattern) else pattern, objects


def matching(pattern: str, journal: ListingJournal | None = None) -> tuple[str, Iterable[Row]]:
    """Return the root folder of a pattern, and the objects that match it, as (path relative to the folder, size,
    version). On S3 and Google Cloud Storage the objects are listed lazily: whoever takes only a few of them causes only
    a few requests."""
    folder = fixed_prefix(pattern)
    if glob.has_magic(pattern):
        return folder, _matching(folder, pattern, journal)
    name = pattern[len(folder) + 1:] if folder.count("/") >= 2 else ""
    one = _reached(folder).head(name) if name else None
    if one is not None:
        return folder, [(name, one.size, one.version)]
    remote = _reached(pattern)
    return pattern, _journalled(remote, pattern, journal, lambda after: (
        (e.path, e.size, e.version) for e in remote.list("", after)))


def root_folder(pattern: str) -> str:
    """Return the root folder of a pattern. This looks up at most one object, and lists none."""
    return fixed_prefix(pattern) if glob.has_magic(pattern) else matching(pattern)[0]


def fixed_prefix(pattern: str) -> str:
    """Return the directories of a glob pattern that come before its first wildcard. The paths of the files that it
    matches are relative to this directory."""
    fixed = takewhile(lambda part: not glob.has_magic(part), pattern.split("/")[:-1])
    return "/".join(fixed) or ("/" if pattern.startswith("/") else ".")


def _listing(folder: str, rows: Iterable[Row]) -> Spilled[Row]:
    return Spilled(rows, encode=lambda row: row, decode=lambda row: (f"{folder}/{row[0]}", row[1], row[2]))


def _journalled(remote: Remote, pattern: str, journal: ListingJournal | None,
                scan: Callable[[str], Iterable[Row]]) -> Iterable[Row]:
    # S3's directory buckets (NAME--x-s3) do not list in the order of the keys
    if journal is None or not remote.by_pages or pattern.split("/")[2].endswith("--x-s3"):
        return scan("")
    return journal.listed(pattern, scan)


def _reached(root: str) -> Remote:
    remote = connect(root)
    remote.reach()
    return remote


# -- wildcards -------------------------------------------------------------------------------------------------------
def _matching(folder: str, pattern: str, journal: ListingJournal | None) -> Iterable[Row]:
    """Return the objects below `folder` that match a pattern with wildcards, by the rules of fsspec. As in a shell, a
    wildcard does not match a name with a leading dot, unless a component of the pattern begins with a dot. `journal`
    continues a listing that an earlier run did not finish."""
    from fsspec.utils import glob_translate

    remote = _reached(folder)
    relative = pattern[len(folder) + 1:]
    dotted = any(part.startswith(".") for part in pattern.split("/"))
    fits = re.compile(glob_translate(relative)).match

    def visible(path: str) -> bool:
        return dotted or not any(part.startswith(".") for part in path.split("/"))

    def scan(after: str) -> Iterator[Row]:
        if not remote.by_pages:
            yield from _in_memory(remote, pattern, relative, visible)
            return
        for entry in walk(remote, "", relative.split("/"), visible, after):
            if entry.path > after and fits(entry.path) and visible(entry.path):
                yield entry.path, entry.size, entry.version

    return _journalled(remote, pattern, journal, scan)


def _in_memory(remote: Remote, pattern: str, relative: str, visible: Callable[[str], bool]) -> Iterator[Row]:
    full, cut = remote.at(relative), len(remote.prefix) + 1
    infos = patiently("list", pattern, lambda: remote.fs.glob(full, detail=True))
    for path, info in sorted(infos.items()):
        if info["type"] == "file" and visible(path[cut:]):
            yield path[cut:], int(info["size"] or 0), version_of(info)


def walk(remote: Remote, begin: str, parts: list[str], visible: Callable[[str], bool],
         after: str = "") -> Iterator[RemoteObject]:
    """Yield the objects of the storage `remote` below the folder `begin` that may match the components `parts` of a
    pattern, in the order of their paths. `begin` is empty or ends in a slash. Objects that come before the path `after`
    may be left out. Folders whose names do not match, or for which `visible` is false, are not listed."""
    from fsspec.utils import glob_translate

    if begin < after and not after.startswith(begin):        # all of it comes before
        return
    part, later = parts[0], parts[1:]
    if not glob.has_magic(part):
        if later:
            yield from walk(remote, f"{begin}{part}/", later, visible, after)
        elif (entry := remote.head(begin + part)) is not None:
            yield entry
        return
    deep = part == "**"
    start = begin if deep else begin + re.split(r"[*?[]", part)[0]
    fits = re.compile(glob_translate(part)).match
    for entry_or_folder in remote.scan(start, deep=deep, after=after):
        if not isinstance(entry_or_folder, str):
            if deep or not later:
                yield entry_or_folder
        elif later and fits(entry_or_folder[len(begin):-1]) and visible(entry_or_folder[:-1]):
            yield from walk(remote, entry_or_folder, later, visible, after)
