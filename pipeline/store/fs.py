"""Files of a store or a source root: local disk, or object storage through fsspec. Small on purpose.

The one operation that matters is `put_absent`: create a file with these bytes only if there is none, atomically. It is
the commit primitive (contracts §1); nothing here renames as a commit.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import fsspec


class Store:
    """A root (path or URL) and paths relative to it, always with forward slashes."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = str(root).rstrip("/")
        if "://" not in self.root or self.root.startswith("file://"):
            self.local: Path | None = Path(self.root.removeprefix("file://")).absolute()
            self.root = str(self.local)
        else:
            self.local = None
            self.fs, self._prefix = fsspec.core.url_to_fs(self.root)

    def at(self, path: str) -> str:
        """Full path of `path` as fsspec or the operating system knows it."""
        return str(self.local / path) if self.local is not None else f"{self._prefix}/{path}"

    # -- reading -------------------------------------------------------------------------------------------------
    def exists(self, path: str) -> bool:
        return (self.local / path).exists() if self.local is not None else self.fs.exists(self.at(path))

    def read(self, path: str) -> bytes:
        return (self.local / path).read_bytes() if self.local is not None else self.fs.cat_file(self.at(path))

    def open(self, path: str) -> BinaryIO:
        return open(self.at(path), "rb") if self.local is not None else self.fs.open(self.at(path), "rb", block_size=8 << 20)

    def list(self, prefix: str) -> Iterator[str]:
        """Paths of all files below `prefix`, sorted."""
        if self.local is not None:
            top = self.local / prefix
            found = (p.relative_to(self.local).as_posix() for p in top.rglob("*") if p.is_file()) if top.is_dir() else ()
            yield from sorted(found)
        else:
            cut = len(self._prefix) + 1
            yield from sorted(p[cut:] for p in self.fs.find(self.at(prefix)))

    def fetch(self, path: str, scratch: str) -> str:
        """Path of the file on local disk; a remote one is downloaded into `scratch`."""
        if self.local is not None:
            return self.at(path)
        target = os.path.join(scratch, "in." + path.replace("/", "_"))
        if not os.path.exists(target):
            part = f"{target}.{uuid.uuid4().hex}"
            self.fs.get_file(self.at(path), part)
            os.replace(part, target)
        return target

    # -- writing -------------------------------------------------------------------------------------------------
    def put_absent(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` if and only if it does not exist. True when we created it. Durable on return."""
        if self.local is None:
            try:
                self.fs.pipe_file(self.at(path), data, mode="create")
            except FileExistsError:
                return False
            return True
        target = self.local / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.parent / f".{target.name}.{uuid.uuid4().hex}"
        try:
            with open(part, "xb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            try:
                os.link(part, target)
            except FileExistsError:
                return False
            except OSError:
                # an NFS server may have linked and lost the reply: the link count tells (open(2), O_EXCL)
                if os.stat(part).st_nlink != 2:
                    raise
            fd = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            return True
        finally:
            part.unlink(missing_ok=True)

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a derived file (reports, snapshots): readers see the old or the new one, never a half."""
        if self.local is None:
            self.fs.pipe_file(self.at(path), data)
            return
        target = self.local / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.parent / f".{target.name}.{uuid.uuid4().hex}"
        try:
            part.write_bytes(data)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    def upload(self, local: str, path: str) -> None:
        """Move a finished scratch file to `path`, a name nobody else uses."""
        if self.local is None:
            self.fs.put_file(local, self.at(path))
            os.unlink(local)
            return
        target = self.local / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(local, target)

    def remove(self, path: str) -> None:
        if self.local is not None:
            (self.local / path).unlink(missing_ok=True)
        elif self.fs.exists(self.at(path)):
            self.fs.rm_file(self.at(path))
