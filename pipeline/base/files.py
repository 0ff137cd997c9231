"""Writes files so that each exists whole or not at all. A file is written under a temporary name, synced, and then
linked or moved to its final name."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.base.clock import SYSTEM

#: ending of files that are being written
UNFINISHED = ".tmp~"


def sha256(path: str | Path) -> str:
    """Return the sha256 of a file as 64 hexadecimal digits. The file is read in blocks."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def file_sha256(path: str | Path) -> str:
    """Returns the sha256 of a file or a folder as 64 hexadecimal digits. The sha256 of a folder covers the names and
    hashes of all files below it, except files and folders whose names begin with a dot."""
    if Path(path).is_dir():
        digest = hashlib.sha256()
        inside = ((p.relative_to(path).as_posix(), p) for p in Path(path).rglob("*") if p.is_file())
        for name, file in sorted((name, p) for name, p in inside if not f"/{name}".count("/.")):
            digest.update(f"{name}\0{file_sha256(file)}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()
    return sha256(path)


def state(info: os.stat_result) -> str:
    """Returns a value that identifies the current version of a local file: its inode, size, mtime and ctime. The value
    changes when the file is written or replaced. Only two changes within one tick of the file system's clock may give
    the same value. The ctime is included because a program can set the mtime of a file, but not the ctime."""
    return f"{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"


def sync(path: Path) -> None:
    """Make the contents of a file, or the names in a folder, survive a power cut (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def beside(target: Path) -> Path:
    """Returns a new hidden path in the folder of `target`. It ends in UNFINISHED and not in the suffix of `target`. A
    search by suffix thus skips files that are being written, and files that a killed writer left behind."""
    return target.with_name(f".{target.name}.{SYSTEM.new_id()}{UNFINISHED}")


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A context manager for replacing the file `path` in one step. It yields a temporary path in the folder of `path`,
    which must exist. The body writes a file to the temporary path. When the body ends, that file replaces `path`; when
    the body raises, the old file stays. Readers see either the old or the new file, and never a part of it. With
    `durable` this holds even after a power cut."""
    part = beside(path)
    try:
        yield part
        if durable:
            sync(part)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):          # an error here would hide the body's, or deny its success
            part.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes) -> None:
    """Create the file `path` with the contents `data` and sync it to disk. It survives a power cut once its folder is
    synced as well. Raises FileExistsError if `path` exists."""
    with open(path, "xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def link(source: Path, target: Path) -> bool:
    """Make `target` a hard link to `source`. Returns False when `target` exists already.

    An NFS server may create the link, lose its reply, and refuse the repeated request (open(2)). A refused request
    therefore counts as a success if it has raised the link count of `source`, unless `target` is another file."""
    before = os.stat(source).st_nlink
    try:
        os.link(source, target)
    except OSError as e:
        exists = isinstance(e, FileExistsError)
        if os.stat(source).st_nlink > before and (not exists or os.path.samefile(source, target)):
            return True
        if exists:
            return False
        raise
    return True
