"""Files that are there whole or not at all: written and synced under another name, then linked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256(path: str | Path) -> str:
    """sha256 of a file, 64 hex characters; read in blocks."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Create a file that survives a power cut once its folder is synced. Raises FileExistsError."""
    with open(path, "xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def link(source: Path, target: Path) -> bool:
    """Hard link; False when `target` exists. An NFS server may link, lose its reply and refuse the repetition, so the
    number of links decides, not the error (open(2))."""
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
