"""Access to the files of a store or of a source, on a local disk or on object storage (through fsspec).

Commits rest on one operation, `put_absent`: it creates a file with given bytes, atomically, and only if the file does
not exist. No commit is made by renaming a file. A commit may depend on a file, so on a local disk `put_absent` and
`upload` make it durable: before they return, they sync the file and every folder that got a new entry.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.files import replacing, sync
from pipeline.base.files import sha256 as sha256_of
from pipeline.base.parquet import open_parquet, read_table
from pipeline.store import disk
from pipeline.store.disk import make_folder, swap_folders
from pipeline.store.errors import (
    GONE,
    OTHER_BYTES,
    ChangedFile,
    DamagedFile,
    EnvironmentFailure,
    StoreError,
    cannot_write,
)
from pipeline.store.listing import RemoteObject
from pipeline.store.remote import REQUESTS, Range, connect, in_parallel

__all__ = ["EnvironmentFailure", "Needs", "Store", "StoreError", "cannot_write", "make_folder", "swap_folders", "sync"]

T = TypeVar("T")
S = TypeVar("S")
#: a function that chooses which bytes of a remote file to download. It is called with the size of the file and with
#: read(start, stop), which reads some of its bytes, and returns byte ranges, or None for the whole file.
Needs = Callable[[int, Callable[[int, int], bytes]], list[Range] | None]


class Store:
    """Access to the files below a root, which is a local folder or a URL. Methods take paths relative to the root, with
    forward slashes. `local` is the root as a Path; it is None when the root is on object storage. Raises StoreError for
    a URL that has nothing behind `://`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = str(root).rstrip("/") or "/"
        if "://" in str(root) and self.root.endswith(":"):             # without its slashes it would be a folder `s3:`
            raise StoreError(f"{root}: names no bucket or folder; write it as {self.root}//BUCKET/FOLDER")
        if "://" not in self.root or self.root.startswith("file://"):
            self.local: Path | None = Path(self.root.removeprefix("file://")).absolute()
            self.root = str(self.local)
        else:
            self.local = None
            self.remote = connect(self.root)
            self.fs = self.remote.fs

    def at(self, path: str) -> str:
        """Return `path` with the root before it, in the form that the operating system (local disk) or fsspec (object
        storage) expects."""
        return str(self.local / path) if self.local is not None else self.remote.at(path)

    # -- reading -------------------------------------------------------------------------------------------------
    def exists(self, path: str) -> bool:
        if self.local is not None:
            return (self.local / path).exists()
        return self.remote.head(path) is not None

    def read(self, path: str) -> bytes:
        return (self.local / path).read_bytes() if self.local is not None else self.remote.read(path)

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None when the file does not exist."""
        if self.local is None:
            entry = self.remote.head(path)
            return None if entry is None else entry.size
        try:
            return (self.local / path).stat().st_size
        except FileNotFoundError:
            return None

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop) of a file. On object storage this takes one request."""
        if self.local is None:
            return self.remote.read_range(path, start, stop)
        with open(self.local / path, "rb") as f:
            return os.pread(f.fileno(), stop - start, start)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading and seeking. A remote file is read ahead in large blocks."""
        return open(self.at(path), "rb") if self.local is not None else self.remote.open(path)  # type: ignore

    @contextlib.contextmanager
    def parquet(self, path: str, sha256: str = "") -> Iterator[pq.ParquetFile]:
        """Open a Parquet file, as a context manager. If `sha256` is given (the hash that was recorded for the file),
        the whole file is first compared with this hash. Raises DamagedFile when the file does not match the hash or, if
        none is given, when Arrow cannot read it.

        Read the file with `use_threads=False`. Otherwise an Arrow thread may release a buffer of a Python file while
        the interpreter exits, which aborts the process.
        """
        if sha256:                                     # page checksums do not cover headers and footer
            with (contextlib.nullcontext("") if self.local is not None else tempfile.TemporaryDirectory() as scratch,
                  open_parquet(self.checked(path, sha256, scratch)) as file):      # a local file needs no copy
                yield file
            return
        with _unreadable(path), self.open(path) as f, open_parquet(f) as file:
            yield file

    def table(self, path: str) -> pa.Table:
        """Read a small Parquet file whole. Raises FileNotFoundError when the file does not exist, and DamagedFile when
        it cannot be read."""
        data = self.read(path)
        with _unreadable(path):
            return read_table(io.BytesIO(data))

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Yield the sorted paths of all files below `prefix` that come after the path `after`. On S3 and Google Cloud
        Storage, earlier paths are not even requested. On a disk, unfinished files, which dead writers may have left,
        are left out."""
        return (entry.path for entry in self.entries(prefix, after))

    def entries(self, prefix: str, after: str = "") -> Iterator[RemoteObject]:
        """Yield all files below `prefix` that come after the path `after`, with their sizes, sorted by path. Memory
        holds one page of the listing (S3, Google Cloud Storage), the names of one folder at each level of depth (disk),
        or the whole listing (other storage)."""
        if self.local is None:
            yield from self.remote.list(prefix, after)
            return
        begin = prefix.strip("/") + "/" if prefix.strip("/") else ""
        for path, size in disk.files_below(self.local / prefix):
            if begin + path > after:
                yield RemoteObject(begin + path, size, "")

    def fetch(self, path: str, scratch: str, *, size: int | None = None, version: str | None = None,
              needs: Needs | None = None) -> str:
        """Return the path, on local disk, of a file with the content of `path`. For a local file this is its own path.
        A remote file is downloaded, through this machine's cache, to the folder `scratch`. The caller must not write to
        the returned file.

        If the function `needs` is given, only the byte ranges that it chooses are sure to be present, and other ranges
        may be holes.

        `size` and `version` (from `entries`) are those that the file is expected to have. Raises ChangedFile when a
        downloaded file is shorter than `size`. If `version` is given, a downloaded file must have exactly this size and
        version. A file that is never overwritten needs no `version`.
        """
        if self.local is not None:
            return self.at(path)
        return self.remote.fetch(path, scratch, size, version, needs)

    def download(self, path: str, local: str) -> None:
        """Copy a file to the new file `local` of this machine, without using this machine's cache. Raises
        FileNotFoundError when the file does not exist."""
        if self.local is not None:
            shutil.copyfile(self.local / path, local)
            return
        entry = self.remote.head(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.at(path))
        self.remote.download(path, local, entry.size)

    def checked(self, path: str, sha256: str, scratch: str, *, size: int | None = None) -> str:
        """Return the path, on local disk, of a file with the content of `path`, after its hash was compared with
        `sha256`. Raises DamagedFile when the file is missing or has other bytes. `scratch` and `size` are those of
        `fetch`.

        A process hashes a local file only once, as long as its size and times do not change. If the local copy of a
        remote file is damaged, it is removed, also from this machine's cache. The file is then downloaded again, and
        DamagedFile is raised only if the second copy is damaged, too.
        """
        for last in (False, True):
            try:
                local = self.fetch(path, scratch, size=size)
                if matches(local, sha256):
                    return local
            except (FileNotFoundError, ChangedFile) as e:
                raise DamagedFile(path, GONE if self.size(path) is None else
                                  "has another size than its record says") from e
            if self.local is not None or last:
                break
            self.remote.forget(path, scratch, size)
        raise DamagedFile(path, OTHER_BYTES)

    def read_checked(self, path: str, sha256: str) -> bytes:
        """Read a small file whole, and compare its hash with `sha256`. Raises DamagedFile when the file is missing or
        has other bytes."""
        try:
            data = self.read(path)
        except FileNotFoundError as e:
            raise DamagedFile(path, GONE) from e
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedFile(path, OTHER_BYTES)
        return data

    # -- writing -------------------------------------------------------------------------------------------------
    def put_absent(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` if and only if it does not exist. Returns True when this call created the file. The
        file is durable on return.

        On object storage, the result True means no more than that the file holds exactly `data`. The reason is that a
        client library may repeat a request that has taken effect, and the storage refuses the repetition. So `data`
        should contain a nonce (a random id), which no other call writes.

        Raises StoreError when the store cannot be written or its file system has no hard links.
        """
        if self.local is None:
            return self.remote.put_absent(path, data)
        return disk.put_absent(self.local / path, data)

    def write(self, path: str, data: bytes, durable: bool = False) -> None:
        """Create or replace a file. Readers see the old file or the new one, never a mixture. With `durable`, the new
        file survives a power cut (on object storage it always does)."""
        if self.local is None:
            self.remote.write(path, data)
        else:
            disk.replace(self.local / path, data, durable)

    def upload(self, local: str, path: str) -> None:
        """Move the finished local file `local` to `path`, a name that no other process uses. The new file is durable on
        return."""
        if self.local is None:
            self.remote.upload(local, path)
            os.unlink(local)
        else:
            disk.move(local, self.local / path)

    @contextlib.contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        """A context manager for writing the new file `path`, a name that no other process uses, from front to back. The
        file appears whole and durable when the body ends, and not at all when the body raises. On S3, its bytes are
        sent while the body writes; no copy of the file is kept on this machine."""
        if self.local is None:
            with self.remote.writer(path) as file:
                yield file
            return
        make_folder((self.local / path).parent)
        with replacing(self.local / path) as part, open(part, "wb") as file:
            yield file

    def replace(self, local: str, path: str) -> None:
        """Move the finished local file `local` to `path`, and replace an existing file of that name. Readers see the
        old file or the new one, never a mixture."""
        if self.local is None:
            self.remote.upload(local, path)
            os.unlink(local)
        else:
            disk.replace_by(local, self.local / path)

    def link(self, path: str, to: str, *, anew: bool = False) -> bool:
        """Give the file `path` a second name `to`: a hard link, or on object storage a copy that the server makes.
        Returns whether this was done; it is not done when `to` exists already.

        With `anew`, an existing `to` is replaced in one step unless it is the same file. On object storage, a file of
        the same size counts as the same. The new name is durable only after the folder of `to` is synced.
        """
        if self.local is None:
            if self.exists(to) and not (anew and self.size(to) != self.size(path)):
                return False
            self.remote.copy(path, to)
            return True
        make_folder((self.local / to).parent)
        if disk.link(self.local / path, self.local / to, durable=False):
            return True
        if not anew or os.path.samefile(self.local / path, self.local / to):
            return False
        with replacing(self.local / to, durable=False) as part:
            os.link(self.local / path, part)
        return True

    def relative(self, full: str) -> str:
        """Return a full path, such as `at` returns, as a path relative to the root. A path outside the root is returned
        unchanged."""
        root = str(self.local) if self.local is not None else self.remote.at("").rstrip("/")
        return full.removeprefix(root).lstrip("/") if full == root or full.startswith(f"{root}/") else full

    def copy_all(self, pairs: Iterable[tuple[str, str]]) -> int:
        """Copy files of an object storage, many at a time: for each pair (path, to), the server copies `path` to `to`.
        Existing files are replaced. `pairs` is read lazily. Returns the number of copies. If a file is missing,
        FileNotFoundError names its URL; copies that have begun are finished first."""
        return sum(1 for _ in in_parallel(lambda pair: self.remote.copy(*pair), pairs, REQUESTS))

    def remove(self, path: str) -> None:
        if self.local is not None:
            (self.local / path).unlink(missing_ok=True)
        else:
            self.remote.remove(path)

    def remove_all(self, paths: Iterable[str]) -> int:
        """Remove files (on object storage many at a time) and return the number of paths, including those of missing
        files. `paths` is read lazily."""
        return sum(1 for _ in self.map(self.remove, paths))

    def map(self, call: Callable[[S], T], items: Iterable[S], most: int = REQUESTS) -> Iterator[T]:
        """Yield `call(item)` for each item, in order. On a disk the calls run one after the other. On object storage,
        where each call waits for a request, up to `most` calls run at a time."""
        return map(call, items) if self.local is not None else in_parallel(call, items, most)

    def check_conditional_put(self) -> None:
        """Raise StoreError if this storage has no conditional writes, that is, cannot refuse to create a file that
        exists. On such storage two processes could both believe that they have committed. Does nothing on a local disk:
        there, `put_absent` raises StoreError at the first commit if it cannot work."""
        if self.local is not None:
            return
        if self.root.startswith("hf://"):
            raise StoreError(f"{self.root}: the Hugging Face hub can be a source or where results are published, but "
                             f"not a store: it has no conditional writes; use a local disk or an object store")
        if self.remote.looks_first:
            raise StoreError(f"{self.root}: this kind of storage cannot create a file in one step only if it does not "
                             f"exist, so two drivers might both commit; use a local disk, NFS, S3 or Google Cloud "
                             f"Storage")
        probe = f"log/probe/{self.remote.clock.new_id()}"
        try:
            if not self.put_absent(probe, b"1") or self.put_absent(probe, b"2"):
                raise StoreError(f"{self.root} ignores conditional writes (put only if absent), so commits would not "
                                 f"be safe; use a local disk, NFS, S3 or another object store that has If-None-Match")
        finally:
            with contextlib.suppress(Exception):              # a leftover probe does no harm
                self.remove(probe)


@contextlib.contextmanager
def _unreadable(path: str) -> Iterator[None]:
    """A context manager that turns Arrow's errors about a damaged Parquet file into DamagedFile."""
    try:
        yield
    except (pa.ArrowException, OSError) as e:
        # Arrow's own read errors are OSErrors without a number; others come from the system or the network
        if isinstance(e, MemoryError) or (isinstance(e, OSError) and (type(e) is not OSError or e.errno is not None)):
            raise
        raise DamagedFile(path, f"cannot be read ({str(e).partition(chr(10))[0]})") from e


def matches(local: str, sha256: str) -> bool:
    """Whether the file `local` on this machine's disk has the hash `sha256`. Raises FileNotFoundError when it does not
    exist."""
    info = os.stat(local)
    return _sha256(local, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns) == sha256


@functools.lru_cache(4096)
def _sha256(path: str, *identity: int) -> str:
    """Return the sha256 of a file. `identity` (inode, size and times) is part of the key of the function's cache. A
    file that many tasks of a process read is therefore hashed only once, and hashed again when it changes."""
    return sha256_of(path)
