"""Lists the files of a source, by path relative to the source root, with size and etag."""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.base.files import file_sha256
from pipeline.store.remote import Remote, connect, version_of
from pipeline.store.retry import patiently


class InputError(TokenmillError):
    """A source has no readable file. The message names the source, the pattern and the remedy."""

    exit_code = 2


@dataclass(frozen=True, order=True)
class SourceFile:
    """One input file. `path` is relative to `root` with forward slashes; `etag` is mtime_ns, an object store's etag or
    version id, or 'sha256:…' when inputs are verified by content. `bad` is the reason why the file is not read; it is
    part of the file's identity, so that the file is read once the reason is gone."""

    path: str
    root: str
    size: int
    etag: str
    bad: str = ""

    def arg(self, **range: int | None) -> dict[str, Any]:
        """The file (or a range of it) as a task argument; the root never enters a key."""
        doc: dict[str, Any] = {"$file": self.path, "root": self.root, "size": self.size, "etag": self.etag}
        if self.bad:
            doc["bad"] = self.bad
        return {**doc, **{k: v for k, v in range.items() if v is not None}}


def fixed_prefix(pattern: str) -> str:
    """The directory part of a glob pattern before its first wildcard: the source root."""
    fixed = takewhile(lambda part: not glob.has_magic(part), pattern.split("/")[:-1])
    return "/".join(fixed) or ("/" if pattern.startswith("/") else ".")


def common_root(roots: list[str]) -> str:
    """The longest directory path that contains all `roots`."""
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*(root.split("/") for root in roots)))
    return "/".join(names[0] for names in shared) or "/"


#: errors of a link whose target is missing, or is the link itself
_NOWHERE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
#: objects found during one plan, by address, so that a bucket is listed once
Listings = dict[str, list[tuple[str, int, str]]]


def list_source(name: str, patterns: list[str], *, base: str = ".", root: str | None = None,
                suffixes: tuple[str, ...] = (), verify: bool = False, warnings: list[str] | None = None,
                listings: Listings | None = None, follow_symlinks: bool = False) -> list[SourceFile]:
    """Files of source `name`, sorted by relative path.

    A pattern is a file, a directory or a glob with `**`; relative patterns start at `base` (the recipe's folder). A
    directory stands for its files with one of `suffixes` (any file if there are none), recursively. Paths are relative
    to `root`. By default that is the directory itself, or the directory before the first wildcard; a disk and a bucket
    thus give the same documents. Symbolic links are followed, but never around a loop. A link that leads out of the
    folders of the patterns is followed only with `follow_symlinks`: in a downloaded folder it may lead to any file of
    this machine. A link that a pattern itself names is trusted. Warnings about skipped files are added to `warnings`.
    `verify` hashes the contents instead of trusting size and time.
    """
    patterns = [p.removeprefix("file://") for p in patterns]
    remote = [p for p in patterns if "://" in p]
    if remote and verify:
        raise InputError(f"source '{name}': --verify-inputs hashes local files only; object stores have etags of their "
                         f"own, which always count")
    if remote and len(remote) != len(patterns):
        raise InputError(f"source '{name}': local and remote paths in one source; make two sources of them")
    if remote:
        listed = _remote(name, patterns, root, suffixes, {} if listings is None else listings)
    else:
        listed = _local(name, patterns, base, root, suffixes, [] if warnings is None else warnings, follow_symlinks)
    files = []
    for rel, full_root, size, etag in sorted(set(listed)):
        path, reason = os.path.join(full_root, rel), ""
        if not remote and not os.access(path, os.R_OK):
            reason = "no_permission"
        elif verify and not remote:
            etag = "sha256:" + file_sha256(path)
        files.append(SourceFile(rel, full_root, size, etag, reason))
    return files


def _local(name: str, patterns: list[str], base: str, root: str | None, suffixes: tuple[str, ...],
           warnings: list[str], follow_symlinks: bool) -> list[tuple[str, str, int, str]]:
    full = [os.path.abspath(os.path.join(base, os.path.expanduser(p))) for p in patterns]
    dirs = [p if os.path.isdir(p) else fixed_prefix(p) for p in full]
    top = os.path.abspath(os.path.join(base, os.path.expanduser(root))) if root else common_root(dirs)
    files: list[tuple[str, str, int, str]] = []
    skipped: list[str] = []
    links = _Links(None if follow_symlinks else dirs)
    for pattern, given in zip(full, patterns):
        try:
            if os.path.isdir(pattern):
                paths = [p for p in _matching(pattern, ["**"], (), True, links)
                         if not suffixes or p.lower().endswith(suffixes)]
            elif glob.has_magic(pattern) and not os.path.exists(pattern):
                prefix = fixed_prefix(pattern)
                parts = os.path.relpath(pattern, prefix).split("/")
                paths = list(_matching(prefix, parts, (), False, links)) if os.path.isdir(prefix) else []
            else:
                paths = [pattern] if os.path.lexists(pattern) else []
                if paths and not os.path.isfile(pattern):
                    raise InputError(f"source '{name}': '{given}' is a link to nothing, or no regular file; fix "
                                     f"`path:`")
        except OSError as e:
            raise InputError(f"source '{name}': cannot read '{e.filename}': {e.strerror}; give this user permission, "
                             f"or leave it out of `path:`") from e
        count = len(files)
        for p in paths:
            try:
                info = os.stat(p)
            except OSError as e:
                if e.errno not in _NOWHERE:
                    raise InputError(f"source '{name}': cannot read '{p}': {e.strerror}") from e
                skipped.append(p)
                continue
            if stat.S_ISDIR(info.st_mode):
                continue                                     # a folder: globs match folders too
            if not stat.S_ISREG(info.st_mode):
                skipped.append(p)
                continue
            rel = os.path.relpath(p, top)
            if rel == ".." or rel.startswith("../"):
                raise InputError(f"source '{name}': '{p}' is outside its root '{top}'; set `root:` to one above it")
            files.append((rel.replace(os.sep, "/"), top, info.st_size, str(info.st_mtime_ns)))
        if len(files) == count:
            raise InputError(f"source '{name}': no file matches '{given}' (looked in {os.path.dirname(pattern)}); "
                             + (f"{_named(links.leading_out, top)} leads out of it: allow that with "
                                f"`follow_symlinks: true`" if links.leading_out else
                                "check `path:` of the source, or pass --input"))
    if skipped:
        warnings.append(f"source '{name}': {len(skipped)} skipped for being links to nothing, or no regular "
                        f"files: {_named(skipped, top)}; fix or remove them")
    if links.leading_out:
        warnings.append(f"source '{name}': {len(links.leading_out)} skipped for being links that lead out of its "
                        f"folder: {_named(links.leading_out, top)}; `follow_symlinks: true` at the source follows them")
    return files


def _named(paths: Iterable[str], top: str) -> str:
    """The first three paths, relative to `top`, for a message."""
    first = sorted(paths)[:4]
    return ", ".join(repr(os.path.relpath(p, top)) for p in first[:3]) + (" …" if len(first) > 3 else "")


class _Links:
    """Decides which symbolic links are followed: those that end inside `folders`, or all if that is None."""

    def __init__(self, folders: list[str] | None) -> None:
        self._inside = None if folders is None else [os.path.join(os.path.realpath(f), "") for f in folders]
        self.leading_out: set[str] = set()

    def followed(self, path: str) -> bool:
        if self._inside is None or not os.path.exists(path):         # a broken link is reported where it is opened
            return True
        end = os.path.join(os.path.realpath(path), "")
        if any(end.startswith(folder) for folder in self._inside):
            return True
        self.leading_out.add(path)
        return False


def _matching(folder: str, parts: list[str], above: tuple[tuple[int, int], ...], hidden: bool,
              links: _Links) -> Iterator[str]:
    """Yields the paths below `folder` that match the components `parts` of a pattern, as in `glob.glob`. It does not
    enter a folder that it is already inside (`above`: device and inode of each), nor follow links that `links`
    excludes. `hidden`: names with a leading dot match, too."""
    info = os.stat(folder)
    here = (info.st_dev, info.st_ino)
    if here in above:
        return
    part, rest = parts[0], parts[1:]
    if not glob.has_magic(part):
        path = os.path.join(folder, part)
        if os.path.islink(path) and not links.followed(path):
            return
        if rest and os.path.isdir(path):
            yield from _matching(path, rest, above, hidden, links)
        elif not rest and os.path.lexists(path):
            yield path
        return
    if part == "**" and rest:
        yield from _matching(folder, rest, above, hidden, links)
    fits = re.compile(fnmatch.translate(part)).match
    with os.scandir(folder) as entries:
        names = sorted((e.name, e.is_symlink(), _is_folder(e)) for e in entries)
    for entry, is_link, is_folder in names:
        if entry.startswith(".") and not hidden and not part.startswith("."):
            continue
        path = os.path.join(folder, entry)
        if not (part == "**" or fits(entry)) or (is_link and not links.followed(path)):
            continue
        if part == "**":
            if is_folder:
                yield from _matching(path, parts, (*above, here), hidden, links)
            elif not rest:
                yield path
        elif not rest:
            yield path
        elif is_folder:
            yield from _matching(path, rest, (*above, here), hidden, links)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as e:
        if e.errno not in _NOWHERE:
            raise
        return False


def _remote(name: str, patterns: list[str], root: str | None, suffixes: tuple[str, ...],
            listings: Listings) -> list[tuple[str, str, int, str]]:
    places = {p.split("://")[0] + "://" + p.split("://")[1].split("/")[0] for p in patterns}
    if len(places) > 1 or any(glob.has_magic(p) for p in places):
        raise InputError(f"source '{name}': its paths lie in different buckets ({', '.join(patterns)}); "
                         f"make a source of each")
    dirs, listed = [], []
    for pattern in patterns:
        folder, entries = _listed(pattern.rstrip("/"), listings)
        if folder == pattern.rstrip("/") and suffixes:
            entries = [e for e in entries if e[0].lower().endswith(suffixes)]
        if not entries:
            raise InputError(f"source '{name}': no object matches '{pattern}'; check `path:` of the source, or pass "
                             f"--input")
        dirs.append(folder)
        listed += entries
    top = (root or common_root(dirs)).rstrip("/")
    files = []
    for url, size, etag in listed:
        if not url.startswith(top + "/"):
            raise InputError(f"source '{name}': '{url}' is outside its root '{top}'; set `root:` to one above it")
        files.append((url[len(top) + 1:], top, size, etag))
    return files


def _listed(pattern: str, listings: Listings) -> tuple[str, list[tuple[str, int, str]]]:
    """Returns the folder that relative paths count from, and the objects of a pattern as (URL, size, version)."""
    folder = fixed_prefix(pattern)
    if glob.has_magic(pattern):
        if pattern not in listings:
            listings[pattern] = _glob(folder, pattern)
        return folder, listings[pattern]
    if pattern not in listings:
        name = pattern[len(folder) + 1:] if folder.count("/") >= 2 else ""
        one = _reached(folder).head(name) if name else None
        below = [one] if one else _reached(pattern).list("")
        listings[pattern] = [(f"{folder if one else pattern}/{e.path}", e.size, e.version) for e in below]
    alone = [url for url, _, _ in listings[pattern]] == [pattern]
    return folder if alone else pattern, listings[pattern]


def _reached(root: str) -> Remote:
    remote = connect(root)
    remote.reach()
    return remote


def _glob(folder: str, pattern: str) -> list[tuple[str, int, str]]:
    remote = _reached(folder)
    cut = len(remote.prefix) + 1
    dotted = any(part.startswith(".") for part in pattern.split("/"))
    full = remote.at(pattern[len(folder) + 1:])
    infos = patiently("list", pattern, lambda: remote.fs.glob(full, detail=True))
    entries = []
    for path, info in sorted(infos.items()):
        rel = path[cut:]
        # as on a disk, a wildcard does not match a name with a leading dot
        if info["type"] == "file" and (dotted or not any(part.startswith(".") for part in rel.split("/"))):
            entries.append((f"{folder}/{rel}", int(info["size"] or 0), version_of(info)))
    return entries
