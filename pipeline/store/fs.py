"""Files of a store or a source root: local disk, or object storage through fsspec. Small on purpose.

The one operation that matters is `put_absent`: create a file with these bytes only if there is none, atomically. It is
the commit primitive (contracts §1); nothing here renames as a commit. Locally everything that a commit may rest on
(`put_absent`, `upload`) is on disk when it returns: the file is synced, and so is every folder it was named in.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import fsspec


class StoreError(Exception):
    """Something is wrong with the store itself; the message names the path and the remedy."""


#: what `os.link` answers on a filesystem that has no hard links (FAT, exFAT, some FUSE and network mounts)
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_REMEDY = {
    errno.EACCES: "give this user write permission there or choose another --store",
    errno.EPERM: "give this user write permission there or choose another --store",
    errno.EROFS: "the filesystem is read-only: choose another --store",
    errno.ENOSPC: "the disk is full: free some space and run again, nothing that was committed is lost",
    errno.EDQUOT: "the disk quota is used up: free some space and run again, nothing that was committed is lost",
    errno.ENOTDIR: "a file stands where the store needs a folder: move it away or choose another --store",
    errno.EEXIST: "a file stands where the store needs a folder: move it away or choose another --store",
}


def cannot_write(path: str | os.PathLike[str], error: OSError) -> StoreError:
    remedy = _REMEDY.get(error.errno or 0, "see that the store can be reached and written, then run again")
    return StoreError(f"cannot write {path}: {error.strerror or error}; {remedy}")


class Store:
    """A root (path or URL) and paths relative to it, always with forward slashes."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = str(root).rstrip("/") or "/"
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
        if self.local is not None:
            return (self.local / path).exists()
        self.fs.invalidate_cache()
        return self.fs.exists(self.at(path))

    def read(self, path: str) -> bytes:
        return (self.local / path).read_bytes() if self.local is not None else self.fs.cat_file(self.at(path))

    def size(self, path: str) -> int | None:
        """Bytes of a file; None when there is none."""
        try:
            if self.local is not None:
                return (self.local / path).stat().st_size
            self.fs.invalidate_cache()
            return self.fs.info(self.at(path))["size"]
        except FileNotFoundError:
            return None

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file: one ranged request on object storage."""
        if self.local is None:
            return self.fs.cat_file(self.at(path), start=start, end=stop) if stop > start else b""
        with open(self.local / path, "rb") as f:
            return os.pread(f.fileno(), stop - start, start)

    def open(self, path: str) -> BinaryIO:
        if self.local is not None:
            return open(self.at(path), "rb")
        return self.fs.open(self.at(path), "rb", block_size=8 << 20)

    def list(self, prefix: str) -> Iterator[str]:
        """Paths of all files below `prefix`, sorted. Leftovers of writers that died are not files."""
        if self.local is not None:
            top = self.local / prefix
            found = (p.relative_to(self.local).as_posix() for p in top.rglob("*") if p.is_file())
            yield from sorted(p for p in found if not p.endswith(".tmp~"))
        else:
            self.fs.invalidate_cache()      # s3fs remembers listings; another driver's commits must be seen
            cut = len(self._prefix) + 1
            try:
                yield from sorted(p[cut:] for p in self.fs.find(self.at(prefix)))
            except FileNotFoundError:
                return

    def fetch(self, path: str, scratch: str) -> str:
        """Path of the file on local disk; a remote one is downloaded into `scratch`."""
        if self.local is not None:
            return self.at(path)
        name = hashlib.blake2b(f"{self.root}\0{path}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
        target = os.path.join(scratch, f"in.{name}{os.path.splitext(path)[1][:16]}")      # readers look at suffixes
        if not os.path.exists(target):
            part = f"{target}.{uuid.uuid4().hex}"
            self.fs.get_file(self.at(path), part)
            os.replace(part, target)
        return target

    # -- writing -------------------------------------------------------------------------------------------------
    def put_absent(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` if and only if it does not exist. True when we created it. Durable on return.

        False can also mean that an object store performed our own request twice; who cares puts a nonce into `data` and
        reads it back. Raises StoreError where the store cannot be written or its filesystem has no hard links.
        """
        if self.local is None:
            try:
                self.fs.pipe_file(self.at(path), data, mode="create")
            except FileExistsError:
                return False
            return True
        target = self.local / path
        part = _beside(target)
        try:
            try:
                make_folder(target.parent)
                with open(part, "xb") as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
            except OSError as e:
                raise cannot_write(target, e) from e
            return _link(part, target)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a derived file (reports, snapshots): readers see the old or the new one, never a half."""
        if self.local is None:
            self.fs.pipe_file(self.at(path), data)
            return
        target = self.local / path
        part = _beside(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            os.replace(part, target)
        except OSError as e:
            raise cannot_write(target, e) from e
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def upload(self, local: str, path: str) -> None:
        """Move a finished scratch file to `path`, a name nobody else uses. Durable on return."""
        if self.local is None:
            self.fs.put_file(local, self.at(path))
            os.unlink(local)
            return
        target = self.local / path
        try:
            make_folder(target.parent)
            shutil.move(local, target)
            sync(target)
            sync(target.parent)
        except OSError as e:
            raise cannot_write(target, e) from e

    def link(self, path: str, to: str) -> bool:
        """Give a file a second name (hard link), or copy it on the server's side; False when `to` exists already.
        Not durable before the folder of `to` is synced."""
        if self.local is None:
            if self.exists(to):
                return False
            self.fs.cp_file(self.at(path), self.at(to))
            return True
        make_folder((self.local / to).parent)
        return _link(self.local / path, self.local / to, durable=False)

    def remove(self, path: str) -> None:
        if self.local is not None:
            (self.local / path).unlink(missing_ok=True)
        elif self.exists(path):
            self.fs.rm_file(self.at(path))

    def check_conditional_put(self) -> None:
        """Refuse a store on which two drivers could both believe they committed (StoreError). Locally a no-op: the
        first commit itself shows whether there are hard links."""
        if self.local is not None:
            return
        if self.root.startswith("hf://"):
            raise StoreError(f"{self.root}: the Hugging Face hub can be a source or where results are published, but "
                             f"not a store: it has no conditional writes; use a local disk or an object store")
        probe = f"log/probe/{uuid.uuid4().hex}"
        try:
            if not self.put_absent(probe, b"1") or self.put_absent(probe, b"2"):
                raise StoreError(f"{self.root} ignores conditional writes (put only if absent), so commits would not "
                                 f"be safe; use a local disk, NFS, S3 or another object store that has If-None-Match")
        except StoreError:
            raise
        except Exception as e:                                # object stores raise their client libraries' own kinds
            raise StoreError(f"cannot write to {self.root}: {type(e).__name__}: {e}; see that the bucket exists and "
                             f"the credentials may write there") from e
        finally:
            with contextlib.suppress(Exception):              # a probe left behind harms nobody
                self.remove(probe)


# -- local files ---------------------------------------------------------------------------------------------------
def _beside(target: Path) -> Path:
    return target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp~"


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """mkdir -p whose new entries survive a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def _link(source: Path, target: Path, durable: bool = True) -> bool:
    """Hard link; False when `target` exists."""
    before = os.stat(source).st_nlink
    try:
        os.link(source, target)
    except FileExistsError:
        # an NFS server may have linked, lost its reply and refused the repetition: the link count tells (open(2))
        if not (os.stat(source).st_nlink > before and os.path.samefile(source, target)):
            return False
    except OSError as e:
        if os.stat(source).st_nlink <= before:
            if e.errno in _NO_LINKS:
                raise StoreError(f"{target.parent} is on a filesystem without hard links ({e.strerror}), which commits "
                                 f"need; choose a --store on ext4, xfs, NFS … or on object storage") from e
            raise cannot_write(target, e) from e
    if durable:
        sync(target.parent)
    return True


def swap_folders(a: Path, b: Path) -> None:
    """Exchange two existing folders of one filesystem in one step (Linux renameat2).

    Where the filesystem cannot (NFS, macOS), `b` is moved aside first and for a moment there is none; a rerun of
    whoever called puts it right.
    """
    at_fdcwd, exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        renameat2 = None
    if renameat2 is not None and renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), exchange) == 0:
        return
    aside = _beside(b)
    os.rename(b, aside)
    os.rename(a, b)
    os.rename(aside, a)
