"""Operations on local files that commits and publications need: durable creation of files and folders, hard links, and
the exchange of two folders."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.base import files
from pipeline.base.files import UNFINISHED, beside, sync
from pipeline.store.errors import StoreError, cannot_write

#: errors of `os.link` on a file system without hard links (FAT, exFAT, some FUSE and network mounts)
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
#: errors of `renameat2` where folders cannot be exchanged
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM}
#: prefix of the names of witness files. A driver writes one to its store; a worker that cannot find it has not mounted
#: the same store.
WITNESS = ".witness-"
#: folders of a store with a file, or a folder, for each task
LARGE = ("objects", "datasets", "dropped", "quarantine")


def put_absent(target: Path, data: bytes) -> bool:
    """Create the file `target` with `data`, so that it survives a power cut. Returns False when `target` exists
    already."""
    part = beside(target)
    try:
        try:
            make_folder(target.parent)
            files.write_synced(part, data)
        except OSError as e:
            raise cannot_write(target, e) from e
        return link(part, target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def replace(target: Path, data: bytes, durable: bool = False) -> None:
    """Create or replace a file in one step, so that readers see the old file or the new one. With `durable`, the new
    file survives a power cut."""
    _replace(target, lambda part: part.write_bytes(data), durable)


def replace_by(local: str, target: Path) -> None:
    """Move the file `local` to `target`. An existing `target` is replaced in one step, so that readers see the old file
    or the new one."""
    _replace(target, lambda part: shutil.move(local, part))


def _replace(target: Path, make: Callable[[Path], object], durable: bool = False) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(target, durable=durable) as part:
            make(part)
    except OSError as e:
        raise cannot_write(target, e) from e


def move(local: str, target: Path) -> None:
    """Move a finished file to `target`, so that it survives a power cut. If the move fails, a half-written `target` is
    removed."""
    try:
        make_folder(target.parent)
        shutil.move(local, target)
        sync(target)
        sync(target.parent)
    except OSError as e:
        if os.path.exists(local):
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
        raise cannot_write(target, e) from e


def files_below(top: Path) -> Iterator[tuple[str, int]]:
    """Yield (path relative to `top`, bytes) of the regular files below `top`, in the order of their paths. Unfinished
    files are left out. Symbolic links to files are followed, but not symbolic links to folders. Memory holds the names
    of one folder at each level of depth."""
    def walk(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as listing:
            # a folder sorts as its name and a slash, which gives the order of whole paths
            entries = sorted((e.name + "/" if e.is_dir(follow_symlinks=False) else e.name) for e in listing)
            for name in entries:
                if name.endswith("/"):
                    yield from walk(folder / name[:-1], prefix + name)
                elif not name.endswith(UNFINISHED):
                    with contextlib.suppress(FileNotFoundError):
                        info = os.stat(folder / name)
                        if stat.S_ISREG(info.st_mode):
                            yield prefix + name, info.st_size
    yield from walk(top, "")


def leftovers(top: Path, clock: Path) -> list[str]:
    """Return the relative paths of files that dead processes left in the store `top`. These are unfinished files, and
    witness files, by which a driver lets workers check that they see its store.

    A file counts as left when it is more than an hour older than the file `clock`. The caller has just written `clock`
    to the same file system, so that both times come from one clock. The folders objects, datasets, dropped and
    quarantine are not searched, because they may have millions of entries.
    """
    now, paths = clock.stat().st_mtime, []

    def search(folder: Path) -> None:
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if folder != top or entry.name not in LARGE:
                        search(Path(entry.path))
                elif entry.name.endswith(UNFINISHED) or entry.name.startswith(WITNESS):
                    with contextlib.suppress(FileNotFoundError):
                        if entry.stat(follow_symlinks=False).st_mtime < now - 3600:
                            paths.append(Path(entry.path).relative_to(top).as_posix())

    search(top)
    return paths


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, like mkdir -p. Unlike with mkdir -p, the new folders survive a power
    cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def link(source: Path, target: Path, durable: bool = True) -> bool:
    """Make `target` a hard link to `source`. Returns False when `target` exists. With `durable`, the link survives a
    power cut."""
    try:
        if not files.link(source, target):
            return False
    except OSError as e:
        if not os.path.exists(source):               # the caller knows which file is missing
            raise
        if e.errno in _NO_LINKS:
            raise StoreError(f"{target.parent} is on a filesystem without hard links ({e.strerror}), which commits "
                             f"need; choose a --store on ext4, xfs, NFS … or on object storage") from e
        raise cannot_write(target, e) from e
    if durable:
        try:
            sync(target.parent)
        except OSError as e:        # the link was made, but a power cut may undo it
            raise cannot_write(target, e) from e
    return True


def swap_folders(a: Path, b: Path) -> None:
    """Exchange two existing folders of one filesystem in one step (Linux renameat2).

    Where this is not possible (NFS, macOS), `b` is first moved to another name, so for a moment `b` does not exist. If
    the process is killed at that moment, the next publication of the folder repairs it. If one of the folders is
    missing, OSError is raised and nothing changes.
    """
    at_fdcwd, exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        renameat2 = None
    if renameat2 is not None:
        if renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), exchange) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NO_EXCHANGE:
            raise OSError(number, os.strerror(number), str(a), None, str(b))
    aside = a.with_name(f"{a.name}~old")          # the writer of `a` removes leftovers of this name
    os.rename(b, aside)
    try:
        os.rename(a, b)
    except OSError:
        os.rename(aside, b)
        raise
    os.rename(aside, a)
