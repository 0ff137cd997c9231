"""Lists the input files of a source: their paths relative to the root of the source, sizes and etags."""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.errors import TokenmillError
from pipeline.base.files import file_sha256, state
from pipeline.plan.file_list import FileList, Listed
from pipeline.plan.objects import ListingJournal, Listings, fixed_prefix, list_objects, matching, root_folder


class InputError(TokenmillError):
    """Raised when the inputs of a recipe cannot be used. For example, a pattern matches no file, a folder cannot be
    read, a dataset would hold the same documents twice, or token files were made with another tokenizer. The message
    names the place and the remedy."""

    exit_code = 2


def common_root(roots: list[str]) -> str:
    """Return the deepest folder that contains all `roots`, which are paths or URLs of folders."""
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*(root.split("/") for root in roots)))
    return "/".join(names[0] for names in shared) or "/"


#: errors of a link whose target is missing, or is the link itself
_NOWHERE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
#: A file that was last changed this many seconds ago gets a different time when it is changed again. File systems store
#: times in steps of up to two seconds; the rest of the margin is for clocks that differ.
SETTLED_S = 60.0


def list_source(name: str, patterns: list[str], *, base: str = ".", root: str | None = None,
                suffixes: tuple[str, ...] = (), verify: bool = False, warnings: list[str] | None = None,
                listings: Listings | None = None, journal: ListingJournal | None = None,
                follow_symlinks: bool = False, clock: Clock = SYSTEM) -> FileList:
    """List the files of source `name`, sorted by relative path.

    A pattern is a file, a directory or a glob, in which `**` matches any number of directories. Relative patterns start
    at `base` (the recipe's folder). A directory means all files below it that end in one of `suffixes` (all files if
    there are none).

    With `verify`, the contents of local files are hashed; otherwise, size and time are trusted. `listings` holds the
    buckets that were listed before. `journal` continues the listing of a bucket that an earlier run did not finish.
    Warnings about skipped files are added to `warnings`. A file that this user may not read is listed with the reason
    in `bad`. Raises InputError, for example when a pattern matches no file.

    Paths are relative to `root`. By default, `root` is the deepest directory that contains the directories of all
    patterns. The directory of a pattern is the directory that it names, or that of the file that it names. For a glob,
    it is the last one before the first wildcard. The same files thus yield the same documents from a disk and from a
    bucket.

    Symbolic links are followed, but never around a loop. A link that leads out of the folders of the patterns is
    followed only with `follow_symlinks`: in a downloaded folder, it may lead to any file of this machine. A link that a
    pattern names before its first wildcard is always followed.
    """
    patterns = [p.removeprefix("file://") for p in patterns]
    if _in_object_storage(name, patterns):
        if verify:
            raise InputError(f"source '{name}': --verify-inputs hashes local files only; object stores have etags of "
                             f"their own, which always count")
        return _remote(name, patterns, root, suffixes, {} if listings is None else listings, journal)
    full, dirs, top = _on_disk(patterns, base, root)
    links = _Links(None if follow_symlinks else dirs)
    return FileList(top, _local(name, dict(zip(full, patterns)), top, suffixes, verify, links,
                                [] if warnings is None else warnings, clock))


def check_patterns(name: str, patterns: list[str], *, base: str = ".", root: str | None = None,
                suffixes: tuple[str, ...] = (), follow_symlinks: bool = False) -> None:
    """Raise InputError if one of the `patterns` of the source `name` matches no file. The arguments are those of
    `list_source`. The search for each pattern ends at the first file, so that a source of millions of files is checked
    at once."""
    patterns = [p.removeprefix("file://") for p in patterns]
    if _in_object_storage(name, patterns):
        for pattern in patterns:
            folder, rows = matching(pattern.rstrip("/"))
            if not any(_fits(path, pattern, folder, suffixes) for path, _, _ in rows):
                raise _no_object(name, pattern)
        return
    full, dirs, top = _on_disk(patterns, base, root)
    for pattern, written in zip(full, patterns):
        links = _Links(None if follow_symlinks else dirs)
        next(_local(name, {pattern: written}, top, suffixes, False, links, [], SYSTEM))


def _in_object_storage(name: str, patterns: list[str]) -> bool:
    remote = ["://" in p for p in patterns]
    if any(remote) and not all(remote):
        raise InputError(f"source '{name}': local and remote paths in one source; make two sources of them")
    return any(remote)


def local_root(patterns: list[str], base: str, root: str | None) -> str:
    """Return the folder to which the paths of a source on disk are relative (see `list_source`)."""
    return _on_disk([p.removeprefix("file://") for p in patterns], base, root)[2]


def remote_root(patterns: list[str], root: str | None) -> str:
    """Return the URL to which the paths of a source on object storage are relative (see `list_source`)."""
    return (root or common_root([root_folder(pattern.rstrip("/")) for pattern in patterns])).rstrip("/")


def _on_disk(patterns: list[str], base: str, root: str | None) -> tuple[list[str], list[str], str]:
    """Return (absolute patterns, the folder of each pattern, the root of the source) for a source on disk. Relative
    patterns start at the folder `base`. Without `root`, the root is the deepest folder that contains all folders of
    patterns."""
    full = [os.path.abspath(os.path.join(base, os.path.expanduser(p))) for p in patterns]
    dirs = [p if os.path.isdir(p) else fixed_prefix(p) for p in full]
    return full, dirs, os.path.abspath(os.path.join(base, os.path.expanduser(root))) if root else common_root(dirs)


def _local(name: str, patterns: Mapping[str, str], top: str, suffixes: tuple[str, ...], verify: bool, links: _Links,
           warnings: list[str], clock: Clock) -> Iterator[Listed]:
    """Yield the files of the source `name` that are on disk, in no particular order, with paths relative to `top`.
    `patterns` maps each absolute pattern to the form in which the recipe writes it. Files that are skipped are named in
    `warnings`. The other arguments are those of `list_source`."""
    skipped: list[str] = []
    for pattern, written in patterns.items():
        matched = False
        for match in _paths(name, pattern, written, suffixes, links):
            try:
                info = os.stat(match)
            except OSError as e:
                if e.errno not in _NOWHERE:
                    raise InputError(f"source '{name}': cannot read '{match}': {e.strerror}") from e
                skipped.append(match)
                continue
            if stat.S_ISDIR(info.st_mode):
                continue                                     # a folder: globs match folders too
            if not stat.S_ISREG(info.st_mode):
                skipped.append(match)
                continue
            rel = os.path.relpath(match, top)
            if rel == ".." or rel.startswith("../"):
                raise InputError(f"source '{name}': '{match}' is outside its root '{top}'; set `root:` to one above it")
            matched = True
            path = os.path.join(top, rel)
            bad = "" if os.access(path, os.R_OK) else "no_permission"
            etag, hashed = _hashed(path, info, clock) if verify and not bad else (str(info.st_mtime_ns), "")
            yield rel.replace(os.sep, "/"), info.st_size, etag, bad, hashed
        if not matched:
            raise InputError(f"source '{name}': no file matches '{written}' (looked in {os.path.dirname(pattern)}); "
                             + (f"the link {_named(links.leading_out, top)} leads out of it; allow such links with "
                                f"`follow_symlinks: true`" if links.leading_out else
                                "check `path:` of the source, or pass --input"))
    if skipped:
        warnings.append(f"source '{name}': {len(skipped)} skipped, which are broken links or not regular files: "
                        f"{_named(skipped, top)}; fix or remove them")
    if links.leading_out:
        warnings.append(f"source '{name}': {len(links.leading_out)} skipped, which are links that lead out of its "
                        f"folder: {_named(links.leading_out, top)}; `follow_symlinks: true` at the source follows them")


def _hashed(path: str, info: os.stat_result, clock: Clock) -> tuple[str, str]:
    """Return (etag, state) of a file. The etag is the hash of its content. The state is that of the file when it was
    hashed (`pipeline.base.files.state`). While the file has this state, its content is unchanged.

    The state is "" if it cannot show this. One case is that the file changed during hashing. The other is that its last
    change was less than SETTLED_S ago: another change in the same tick of the clock would leave the state the same.
    """
    settled = clock.wall() - max(info.st_mtime, info.st_ctime) > SETTLED_S
    etag = "sha256:" + file_sha256(path)
    return etag, state(info) if settled and state(os.stat(path)) == state(info) else ""


def _paths(name: str, pattern: str, written: str, suffixes: tuple[str, ...], links: _Links) -> Iterator[str]:
    """Yield the paths of the files that a pattern names or matches, in no particular order. `written` is the form in
    which the recipe of the source `name` writes the pattern. Of a folder, only files with one of `suffixes` are
    yielded. `links` decides which symbolic links are followed."""
    try:
        if os.path.isdir(pattern):
            for path in _matching(pattern, ["**"], (), True, links):
                if not suffixes or path.lower().endswith(suffixes):
                    yield path
        elif glob.has_magic(pattern) and not os.path.exists(pattern):
            prefix = fixed_prefix(pattern)
            if os.path.isdir(prefix):
                yield from _matching(prefix, os.path.relpath(pattern, prefix).split("/"), (), False, links)
        elif os.path.lexists(pattern):
            if not os.path.isfile(pattern):
                raise InputError(f"source '{name}': '{written}' is a broken link or not a regular file; fix `path:`")
            yield pattern
    except OSError as e:
        raise InputError(f"source '{name}': cannot read '{e.filename}': {e.strerror}; give this user permission, or "
                         f"leave it out of `path:`") from e


def _named(paths: Iterable[str], top: str) -> str:
    """Return the first three paths, relative to `top`, as text for a message."""
    first = sorted(paths)[:4]
    return ", ".join(repr(os.path.relpath(p, top)) for p in first[:3]) + (" …" if len(first) > 3 else "")


class _Links:
    """Decides which symbolic links are followed: those whose target is inside `folders`, or all if `folders` is None.
    Links that are not followed are collected in `leading_out`."""

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
    """Yield the paths below `folder` that match the components `parts` of a pattern, as `glob.glob` does, but in no
    particular order. Links that `links` excludes are not followed. `above` holds device and inode of the folders around
    `folder`, so that no folder is entered again from inside itself. With `hidden`, names with a leading dot match, too.
    """
    info = os.stat(folder)
    here = (info.st_dev, info.st_ino)
    if here in above:
        return
    part, later = parts[0], parts[1:]
    if not glob.has_magic(part):
        path = os.path.join(folder, part)
        if os.path.islink(path) and not links.followed(path):
            return
        if later and os.path.isdir(path):
            yield from _matching(path, later, above, hidden, links)
        elif not later and os.path.lexists(path):
            yield path
        return
    if part == "**" and later:
        yield from _matching(folder, later, above, hidden, links)
    fits = re.compile(fnmatch.translate(part)).match
    with os.scandir(folder) as entries:              # read as it is walked: a folder may hold millions of files
        for entry in entries:
            if entry.name.startswith(".") and not hidden and not part.startswith("."):
                continue
            path = os.path.join(folder, entry.name)
            if not (part == "**" or fits(entry.name)) or (entry.is_symlink() and not links.followed(path)):
                continue
            if part == "**":
                if _is_folder(entry):
                    yield from _matching(path, parts, (*above, here), hidden, links)
                elif not later:
                    yield path
            elif not later:
                yield path
            elif _is_folder(entry):
                yield from _matching(path, later, (*above, here), hidden, links)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as e:
        if e.errno not in _NOWHERE:
            raise
        return False


def _remote(name: str, patterns: list[str], root: str | None, suffixes: tuple[str, ...], listings: Listings,
            journal: ListingJournal | None) -> FileList:
    places = {p.split("://")[0] + "://" + p.split("://")[1].split("/")[0] for p in patterns}
    if len(places) > 1 or any(glob.has_magic(p) for p in places):
        raise InputError(f"source '{name}': its paths lie in different buckets ({', '.join(patterns)}); "
                         f"make a source of each")
    listed = {p: list_objects(p.rstrip("/"), listings, journal) for p in patterns}
    top = (root or common_root([folder for folder, _ in listed.values()])).rstrip("/")

    def files() -> Iterator[Listed]:
        for pattern, (folder, objects) in listed.items():
            none = True
            for url, size, etag in objects:
                if not _fits(url, pattern, folder, suffixes):
                    continue
                none = False
                if not url.startswith(top + "/"):
                    raise InputError(f"source '{name}': '{url}' is outside its root '{top}'; set `root:` to one above "
                                     f"it")
                yield url[len(top) + 1:], size, etag, "", ""
            if none:
                raise _no_object(name, pattern)

    return FileList(top, files())


def _fits(path: str, pattern: str, folder: str, suffixes: tuple[str, ...]) -> bool:
    """Whether an object of a bucket that `pattern` matches is to be read. If the pattern names a folder, only objects
    with one of the reader's `suffixes` are read. An object that the user has named, directly or by a glob, is read with
    any suffix."""
    return not suffixes or folder != pattern.rstrip("/") or path.lower().endswith(suffixes)


def _no_object(name: str, pattern: str) -> InputError:
    return InputError(f"source '{name}': no object matches '{pattern}'; check `path:` of the source, or pass --input")
