"""Access to object storage below one URL, through fsspec: S3, Google Cloud Storage, the Hugging Face hub, or any other
storage that fsspec supports.

Every request goes through `retry.patiently`, which repeats it after a temporary error.

Large objects are downloaded in parallel pieces, each of which is retried on its own. A measured request takes some 30
ms until its first byte, and a connection then transfers some 60 MB/s. So a piece of 8 MiB spends four fifths of its
time on the transfer, and eight pieces at a time fill a link of 3 Gb/s.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.redact import redact
from pipeline.base.scratch import Scratch
from pipeline.store import cache
from pipeline.store.errors import ChangedFile, StoreError, disk_full
from pipeline.store.listing import RemoteObject, version_of
from pipeline.store.range_file import RangeFile
from pipeline.store.retry import answer, comes_back, error_text, patiently

if TYPE_CHECKING:
    from pipeline.store.fs import Needs

#: bytes of one request of a download, and requests of a download that run at a time (their product is held in memory)
PIECE, DOWNLOADS = 8 << 20, 8
#: copies, deletions and small requests that run at a time
REQUESTS = 32

#: seconds to wait for a server to accept the first connection
PROBE_S = 5.0

#: the bytes [start, stop) of a file
Range = tuple[int, int]
T = TypeVar("T")
S = TypeVar("S")


class Remote:
    """Access to the objects below the URL `root`. Paths are relative to `root`, with forward slashes.

    The methods that read or copy an object, except `head`, raise FileNotFoundError if it does not exist. All methods
    raise StoreError for other failures, and EnvironmentFailure, a kind of StoreError, when all retries of a request
    have failed.
    """

    #: keyword arguments of the fsspec filesystem
    options: dict[str, Any] = {}  # noqa: RUF012
    #: tries of a request; None means the default of `retry`
    tries: int | None = None
    #: the clock that waits between two tries
    clock: Clock = SYSTEM
    #: whether `scan` is implemented: listings then take the memory of one page, and can begin after any path
    by_pages = False

    def __init__(self, root: str) -> None:
        # imported late: it takes a tenth of the start of a child or command, and most use no object storage
        from fsspec.core import url_to_fs

        self.root = root
        protocol, _, location = root.partition("://")
        if "@" in location.partition("/")[0]:
            raise StoreError(f"{redact(root)}: credentials do not belong into an address, which logs and manifests "
                             f"repeat; give them by environment variables or a profile (docs/storage.md)")
        try:
            self.fs, self.prefix = url_to_fs(root, **self.options)
        except ImportError as e:
            extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf"}.get(protocol)
            remedy = f"pip install 'tokenmill[{extra}]'" if extra else str(e)
            raise StoreError(f"{root}: the package for {protocol}:// is not installed; {remedy}") from e
        except ValueError as e:
            raise StoreError(f"{root}: {e}; addresses begin with s3://, gs:// or hf://, everything else is a "
                             f"folder") from e

    def reach(self) -> None:
        """Check, within a few seconds, that the server behind an http(s) or hf:// address accepts a connection. Raises
        StoreError when the server does not. Without this check, an unreachable address would be reported only after a
        minute of retries."""
        url = urlsplit(self.root)
        if url.scheme == "hf":
            url = urlsplit(str(getattr(self.fs, "endpoint", "")))
        if url.scheme not in ("http", "https") or not url.hostname or _proxied(url):
            return
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((url.hostname, port), timeout=PROBE_S).close()
        except OSError as e:
            raise StoreError(f"cannot reach {url.hostname}:{port} for {redact(self.root)}: {e.strerror or e}; see that "
                             f"the address is right and this machine has a network (behind a proxy: https_proxy), or "
                             f"download the files and name them") from e

    def at(self, path: str) -> str:
        """Return the full path of an object as fsspec expects it."""
        return f"{self.prefix}/{path}" if path else self.prefix

    def url(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _ask(self, what: str, path: str, call: Callable[[], T]) -> T:
        return patiently(what, self.url(path), call, self.tries, self.clock)

    # -- reading -------------------------------------------------------------------------------------------------
    def head(self, path: str) -> RemoteObject | None:
        """Return the current size and version of an object; None when it does not exist."""
        def ask() -> dict[str, Any]:
            self.fs.invalidate_cache()                  # no cached listing: another driver's commits must be seen
            try:
                info: dict[str, Any] = self.fs.info(self.at(path))
                return info
            except FileNotFoundError as e:
                cause = e.__cause__
                if isinstance(cause, StoreError) or (isinstance(cause, Exception) and comes_back(cause)):
                    raise cause from None         # fsspec reports a failing web server as a missing file
                raise
        try:
            info = self._ask("read", path, ask)
        except FileNotFoundError:
            return None
        return None if info["type"] == "directory" else self._entry(path, info)

    def _entry(self, path: str, info: dict[str, Any]) -> RemoteObject:
        if info.get("size") is None:
            raise StoreError(f"{self.url(path)}: the server does not tell its size; download it and name the file")
        return RemoteObject(path, int(info["size"]), version_of(info))

    def read(self, path: str) -> bytes:
        data: bytes = self._ask("read", path, lambda: self.fs.cat_file(self.at(path)))
        return data

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop) of an object in one request. Returns fewer bytes when the object ends before
        `stop`."""
        if stop <= start:
            return b""

        def get() -> bytes:
            try:
                data: bytes = self.fs.cat_file(self.at(path), start=start, end=stop)
                return data
            except Exception as e:
                if answer(e)[0] == 416:                 # the object ends before `start`
                    return b""
                raise
        return self._ask("read", path, get)

    def scan(self, begin: str, *, deep: bool = True, after: str = "") -> Iterator[RemoteObject | str]:
        """Yield the objects whose paths begin with `begin`, in the order of their paths. With `deep` False, a folder is
        yielded in place of the objects in it, as a path that ends with a slash. Objects and folders that come before
        the path `after` are left out; the folder that holds `after` is yielded."""
        raise NotImplementedError

    def list(self, prefix: str, after: str = "") -> Iterator[RemoteObject]:
        """Yield all objects below `prefix` that come after the path `after`, in the order of their paths."""
        if self.by_pages:
            for entry in self.scan(f"{prefix}/" if prefix else "", after=after):
                if isinstance(entry, RemoteObject) and entry.path > after:
                    yield entry
            return

        def find() -> dict[str, Any]:
            self.fs.invalidate_cache()
            infos: dict[str, Any] = self.fs.find(self.at(prefix), detail=True)
            return infos
        try:
            infos = self._ask("list", prefix, find)
        except FileNotFoundError:
            return
        cut = len(self.prefix) + 1
        for full, info in sorted(infos.items()):
            if info["type"] == "file" and full[cut:] > after:
                yield self._entry(full[cut:], info)

    def open(self, path: str) -> io.RawIOBase:
        entry = self.head(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url(path))
        return RangeFile(entry.size, lambda a, b: self.read_range(path, a, b))

    def download(self, path: str, local: str, size: int, ranges: Sequence[Range] | None = None) -> None:
        """Download an object of `size` bytes to the new file `local`. If `ranges` is given, only these byte ranges are
        downloaded, and the other bytes of the file are holes. Raises ChangedFile when the object is shorter than
        expected. No file is left after an error."""
        pieces = [(a, min(a + PIECE, b)) for start, b in ([(0, size)] if ranges is None else ranges)
                  for a in range(start, b, PIECE)]

        def fetch(piece: Range) -> None:
            data = self.read_range(path, *piece)
            if len(data) != piece[1] - piece[0]:
                raise ChangedFile(f"{self.url(path)} has no {size} bytes any more: at {piece[0]} there are {len(data)} "
                                  f"instead of {piece[1] - piece[0]}; see what became of it and run again")
            view = memoryview(data)
            offset = piece[0]
            while view:
                wrote = os.pwrite(fd, view, offset)
                view, offset = view[wrote:], offset + wrote

        fd = os.open(local, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with disk_full(os.path.dirname(local)):
                os.ftruncate(fd, size)
                for _ in in_parallel(fetch, pieces, DOWNLOADS):
                    pass
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(local)
            raise
        finally:
            os.close(fd)

    def fetch(self, path: str, scratch: str, size: int | None, version: str | None, needs: Needs | None) -> str:
        """Return the path, in the folder `scratch`, of a local copy of an object. The copy comes from this machine's
        cache or is downloaded. `Store.fetch` describes the arguments."""
        return cache.fetch(self, path, scratch, size, version, needs)

    def forget(self, path: str, scratch: str, size: int | None) -> None:
        """Remove this machine's local copies of a damaged object: the file that `fetch` returned, and the copy in the
        cache."""
        cache.forget(self, path, scratch, size)

    # -- writing -------------------------------------------------------------------------------------------------
    def put_absent(self, path: str, data: bytes) -> bool:
        """Create an object if it does not exist (a conditional PUT). Returns True when the object then holds exactly
        `data`, which should contain a nonce (a random id). The content is compared, because a refusal does not prove
        that another process created the object. After a broken connection, a client library repeats its request; the
        storage refuses the repetition if the first try has succeeded."""
        def create() -> None:
            try:
                self._create(path, data)
            except FileExistsError:
                raise
            except Exception as e:
                if answer(e)[0] == 412:
                    raise FileExistsError(errno.EEXIST, "there is one", self.url(path)) from e
                raise
        try:
            self._ask("write", path, create)
        except FileExistsError:
            return self.read(path) == data
        except FileNotFoundError as e:
            raise self._no_place(path, e) from e
        return True

    @property
    def looks_first(self) -> bool:
        """Whether `put_absent` takes two steps: it checks whether the object exists, and then writes it. Between the
        two steps, another process may write the object. fsspec works like this for storage without conditional writes.
        A trial with a single writer cannot detect it."""
        from fsspec import AbstractFileSystem

        return getattr(self.fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file

    def _create(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(self.at(path), data, mode="create")

    def write(self, path: str, data: bytes) -> None:
        """Create or replace an object."""
        try:
            self._ask("write", path, lambda: self.fs.pipe_file(self.at(path), data))
        except FileNotFoundError as e:
            raise self._no_place(path, e) from e

    def upload(self, local: str, path: str) -> None:
        """Upload the file `local` as the object `path`, a name that no other process uses."""
        try:
            self._ask("write", path, lambda: self.fs.put_file(local, self.at(path)))
        except FileNotFoundError as e:
            raise (e if not os.path.exists(local) else self._no_place(path, e)) from e

    @contextlib.contextmanager
    def writer(self, path: str, size: int = 0) -> Iterator[BinaryIO]:
        """A context manager for writing the object `path`, a name that no other process uses, from front to back. The
        object appears whole when the body ends, and not at all when the body raises. `size` is its size in bytes, if it
        is known. Here the bytes go to a temporary file of this machine, which is then uploaded; S3 sends them while the
        body writes."""
        with Scratch() as scratch:
            local = os.path.join(scratch.path, "object")
            with disk_full(scratch.path), open(local, "wb") as file:
                yield file
            self.upload(local, path)

    def _no_place(self, path: str, error: Exception) -> StoreError:
        return StoreError(f"cannot write {redact(self.url(path))}: {error_text(error)}; see that the bucket exists")

    def _no_bucket(self, path: str, error: Exception) -> StoreError:
        return StoreError(f"cannot list {redact(self.url(path))}: {error_text(error)}; see that the bucket exists")

    def copy(self, path: str, to: str) -> None:
        """Let the server copy an object from `path` to `to`. Raises FileNotFoundError, with the object's URL, when
        `path` does not exist."""
        try:
            self._ask("copy", path, lambda: self.fs.cp_file(self.at(path), self.at(to)))
        except FileNotFoundError as e:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url(path)) from e

    def remove(self, path: str) -> None:
        """Remove an object if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._ask("remove", path, lambda: self.fs.rm_file(self.at(path)))


def _proxied(url: SplitResult) -> bool:
    return url.scheme in getproxies() and not proxy_bypass(url.hostname or "")


#: the function that `connect_through` was given; `connect` then calls it instead of connecting itself
_through: Callable[[str], Remote] | None = None


def connect_through(make: Callable[[str], Remote]) -> None:
    """From now on, let `connect` return the result of `make`. A confined child process, which has neither credentials
    nor sockets, uses this to reach object storage through its broker (`pipeline.store.broker`)."""
    global _through
    _through = make


def connect(root: str) -> Remote:
    """Return the access to the objects below the URL `root`. Its class depends on the kind of storage that the URL
    names."""
    if _through is not None:
        return _through(root)
    if root.startswith(("s3://", "s3a://")):
        from pipeline.store.s3 import S3

        return S3(root)
    if root.startswith("memory://"):
        return InMemory(root)
    if root.startswith(("http://", "https://")):
        from pipeline.store.web import Direct, direct

        return Direct(root) if direct() else Remote(root)
    if root.startswith(("gs://", "gcs://")):
        from pipeline.store.gcs import Gcs

        return Gcs(root)
    return Remote(root)


class InMemory(Remote):
    """Objects in the memory of this process, for tests and notebooks. To create an object only if it does not exist,
    fsspec first checks and then creates it. A lock makes the two steps atomic among the threads of this process."""

    _creating = threading.Lock()

    def _create(self, path: str, data: bytes) -> None:
        with self._creating:
            super()._create(path, data)

    @contextlib.contextmanager
    def writer(self, path: str, size: int = 0) -> Iterator[BinaryIO]:
        file = io.BytesIO()
        yield file
        self.write(path, file.getvalue())


def in_parallel(call: Callable[[S], T], items: Iterable[S], threads: int) -> Iterator[T]:
    """Yield `call(item)` for each item, in order, with up to `threads` calls at a time. `items` is read lazily, in the
    caller's thread. When a call fails, its error is raised after the running calls have finished, and calls that have
    not begun are cancelled."""
    window: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="storage") as pool:
        try:
            for item in items:
                window.append(pool.submit(call, item))
                if len(window) >= 2 * threads:
                    yield window.popleft().result()
            while window:
                yield window.popleft().result()
        finally:
            for waiting in window:
                waiting.cancel()
