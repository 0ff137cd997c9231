"""A cache of remote files on local disk, of bounded size, that all tasks of a machine share.

    FOLDER/KEY              a file, read-only; its mtime says when it was last used
    FOLDER/KEY.BYTES.part   a download in progress, locked by the process that downloads
    FOLDER/.total           bytes the cache takes, or slightly more; guarded by .lock

A key identifies one version of a file (root, path, size, etag, ranges), so no entry is ever outdated. A task that uses
a file has a hard link to it in its own scratch folder. So the task keeps the file even if the cache evicts it. The link
of a killed task vanishes, too, because a scratch folder whose owner is dead is removed (`pipeline.base.scratch`).

When the cache would grow beyond its cap, files not in use (those with a single link) are evicted, least recently used
first. A file that does not fit is downloaded only for the task that needs it. The disk therefore holds at most the cap
plus the files in use.

FOLDER is `TOKENMILL_CACHE`, by default `tokenmill-UID/cache` below the system's folder for temporary files. The cap is
`TOKENMILL_CACHE_SIZE` (e.g. `20GB`; 0 for no cache), by default a fifth of the disk that holds FOLDER. Each key
includes the boot id of the machine, so files from before a restart are not used: a power cut may have truncated them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.store.errors import FULL, ChangedFile, EnvironmentFailure, StoreError

if TYPE_CHECKING:
    from pipeline.store.fs import Needs
    from pipeline.store.remote import Range, Remote

#: An eviction frees space until the cache takes no more than this share of its cap, including the file that is to be
#: added. So not every download has to scan the cache for files to evict.
LEAVE = 0.9
SHARE = 0.2                 # the cap as a share of the disk when no size is set
#: a file is fetched whole if the needed ranges cover more than this share of it
WORTHWHILE = 0.8

_PART = re.compile(r"[0-9a-f]{32}\.(\d+)\.part")
_KEY = re.compile(r"[0-9a-f]{32}")


def fetch(remote: Remote, path: str, scratch: str, size: int | None, version: str | None, needs: Needs | None) -> str:
    """Return the path, in the folder `scratch`, of a local copy of a remote file. The copy comes from this machine's
    cache or is downloaded. If the function `needs` is given, only the byte ranges that it chooses are sure to be
    present.

    Raises FileNotFoundError when the file does not exist. Raises ChangedFile when a downloaded file is shorter than
    `size`. If `version` is given, a downloaded file must have exactly this size and version.
    """
    if size is None:
        entry = remote.head(path)
        if entry is None:
            raise FileNotFoundError(2, "no such object", remote.url(path))
        size = entry.size
    ranges: list[Range] | None = None

    def key() -> str:
        return _key(remote, path, size, version, ranges)

    def target() -> str:
        return os.path.join(scratch, f"in.{key()}{_suffix(path)}")

    def make(local: str) -> None:
        remote.download(path, local, size, ranges)
        if version and ((now := remote.head(path)) is None or (now.size, now.version) != (size, version)):
            os.unlink(local)
            raise ChangedFile(f"{remote.url(path)} has changed since it was listed")

    if os.path.exists(target()):
        return target()
    cache = cache_for(remote, scratch)
    if cache is not None and cache.take(key(), target()):
        return target()
    if needs is not None:
        ranges = joined(needs(size, lambda a, b: remote.read_range(path, a, b)), size)
        if ranges is not None and sum(b - a for a, b in ranges) > WORTHWHILE * size:
            ranges = None
    space = size if ranges is None else sum(b - a for a, b in ranges)
    if os.path.exists(target()):
        return target()
    if cache is None:
        part = target() + ".part"
        make(part)
        os.replace(part, target())
    else:
        cache.put(key(), space, target(), make)
    return target()


def forget(remote: Remote, path: str, scratch: str, size: int | None) -> None:
    """Remove this machine's copies of a remote file: the one in the folder `scratch`, and the one in the cache. Copies
    of byte ranges, and copies that `fetch` made with a `version`, are not found."""
    if size is None and (entry := remote.head(path)) is not None:
        size = entry.size
    key = _key(remote, path, size or 0, None, None)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(scratch, f"in.{key}{_suffix(path)}"))
    if (cache := cache_for(remote, scratch)) is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(cache.folder / key)


def _key(remote: Remote, path: str, size: int, version: str | None, ranges: list[Range] | None) -> str:
    """Return the key under which the cache holds a version of a remote file, or some byte ranges of that version. The
    key is the name of the file in the cache."""
    parts = (_boot(), _endpoint(remote), remote.root, path, str(size), version or "", repr(ranges))
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _suffix(path: str) -> str:
    """Return the suffix of a remote file's name, such as ".parquet". The local copy gets the same suffix, because
    readers recognise the type of a file by it."""
    return os.path.splitext(path)[1][:16]


def joined(ranges: Sequence[Range] | None, size: int) -> list[Range] | None:
    """Return the byte ranges in order, clipped to a file of `size` bytes. Ranges that overlap, or have only a small gap
    between them, are joined. Returns None if `ranges` is None, which means the whole file."""
    if ranges is None:
        return None
    done: list[Range] = []
    for a, b in sorted((max(0, a), min(b, size)) for a, b in ranges):
        if a >= b:
            continue
        if done and a <= done[-1][1] + (64 << 10):                      # a request costs more than reading 64 KiB
            done[-1] = (done[-1][0], max(b, done[-1][1]))
        else:
            done.append((a, b))
    return done


def cache_for(remote: Remote, scratch: str) -> Cache | None:
    """Return this machine's cache of remote files, for tasks whose scratch folder is `scratch`. Returns None when the
    cache is switched off, or when the remote files are in the memory of this process anyway. Also returns None when the
    cache is on another disk than `scratch`, which makes hard links impossible."""
    if remote.root.startswith("memory://"):
        return None
    settings = os.environ.get("TOKENMILL_CACHE", ""), os.environ.get("TOKENMILL_CACHE_SIZE", "")
    if not (cache := _cache(*settings)).folder.is_dir():                    # the folder was deleted
        _cache.cache_clear()
        cache = _cache(*settings)
    return cache if cache.cap and os.stat(cache.folder).st_dev == os.stat(scratch).st_dev else None


@functools.cache
def _cache(folder: str, size: str) -> Cache:
    from pipeline.base.quantities import parse_bytes
    from pipeline.base.scratch import user_folder

    place = Path(folder) if folder else user_folder() / "cache"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        cap = 0 if size == "0" else parse_bytes(size) if size else int(SHARE * shutil.disk_usage(place).total)
    except OSError as e:
        raise StoreError(f"cannot make the cache of remote files at {place}: {e.strerror}; set TOKENMILL_CACHE to a "
                         f"folder that can be written") from e
    except ValueError as e:
        raise StoreError(f"TOKENMILL_CACHE_SIZE={size}: {e}; write it like 20GB, or 0 for no cache") from None
    return Cache(place, cap)


@functools.cache
def _boot() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f.read().strip()
    return ""


def _endpoint(remote: Remote) -> str:
    """Return the endpoint (server address) of the storage; "" for the default endpoint. It is part of a cache key,
    because the same URL at different endpoints means different files."""
    return str(getattr(remote.fs, "endpoint_url", None) or os.environ.get("AWS_ENDPOINT_URL_S3")
               or os.environ.get("AWS_ENDPOINT_URL", ""))


class Cache:
    """A cache of remote files in `folder`, of at most `cap` bytes. The docstring of the module describes the files in
    the folder. Any number of processes may use the cache, and any of them may be killed at any moment."""

    def __init__(self, folder: Path, cap: int) -> None:
        self.folder, self.cap = folder, cap

    def take(self, key: str, target: str) -> bool:
        """Make `target` a hard link to the file that the cache holds under `key`. Returns False when the cache does not
        hold it."""
        try:
            os.utime(self.folder / key)
            os.link(self.folder / key, target)
        except FileNotFoundError:
            return False
        return True

    def put(self, key: str, size: int, target: str, make: Callable[[str], None]) -> None:
        """Make `target` a hard link to the file that the cache holds under `key`. If the cache lacks the file,
        `make(path)` downloads it into the cache first; `size` is the disk space that this takes. When several tasks
        need the file at the same time, one task downloads it and the others wait. A file that does not fit into the
        cache is downloaded to `target` alone."""
        part = self.folder / f"{key}.{size}.part"
        full = False
        while not self.take(key, target):
            fd = self._open(part)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if not _same_file(fd, part):            # another process has finished the download, or given up
                    continue
                try:
                    if not self._reserve(size, part):
                        make(target)
                        return
                    make(str(part))
                    if not _same_file(fd, part):                        # the cache was deleted during the download
                        continue
                    os.link(part, target)                               # before the file can be evicted
                    os.replace(part, self.folder / key)
                    os.fchmod(fd, 0o400)            # done last, because a `part` of a dead process must stay writable
                    return
                finally:
                    if _same_file(fd, part):
                        os.unlink(part)
            except EnvironmentFailure as e:
                # the disk is full though the cache is within its cap, because others use the disk, too: empty the cache
                # and try once more
                if full or not (isinstance(e.__cause__, OSError) and e.__cause__.errno in FULL and self.evict(0)):
                    raise
                full = True
            finally:
                os.close(fd)

    def _open(self, path: Path) -> int:
        """Open a file of the cache for reading and writing, and return its descriptor. The file and the folder of the
        cache are created when they are missing, since the folder may be deleted at any time."""
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def _reserve(self, size: int, part: Path) -> bool:
        """Reserve `size` bytes of the cache for the unfinished download `part`. Files that no task uses are evicted if
        necessary. Returns False when the download does not fit even after that."""
        if size > self.cap:
            return False
        with self._locked():
            total = self._total()
            if total + size > self.cap:
                total = self._evict(max(0, int(LEAVE * self.cap) - size), part)
            fits = total + size <= self.cap
            (self.folder / ".total").write_text(str(total + size if fits else total))
            return fits

    def evict(self, leave: int) -> int:
        """Evict files that no task uses until the cache holds at most `leave` bytes. Returns the number of bytes
        removed."""
        with self._locked():
            before = sum(size for _, size, _, _ in self._files())
            remaining = self._evict(leave, None)
            (self.folder / ".total").write_text(str(remaining))
            return before - remaining

    def _evict(self, leave: int, part: Path | None) -> int:
        """Evict files that no task uses until the cache holds at most `leave` bytes. Returns the number of bytes that
        remain in the cache. The unfinished download `part` is counted neither in `leave` nor in the result. The caller
        holds the lock of the cache."""
        files = sorted((f for f in self._files() if f[0] != str(part)), key=lambda f: f[2])
        total = sum(size for _, size, _, _ in files)
        for path, size, _, used in files:
            if total <= leave:
                break
            if not used:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
        return total

    def _files(self) -> Iterator[tuple[str, int, int, bool]]:
        """Yield (path, bytes on disk or reserved, time of last use in ns, whether a task uses it) for every file of the
        cache. Downloads of dead processes are removed."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if (part := _PART.fullmatch(entry.name)) is not None:
                        if not _abandoned(entry.path):
                            yield entry.path, max(int(part[1]), info.st_blocks * 512), info.st_mtime_ns, True
                    elif _KEY.fullmatch(entry.name):
                        yield entry.path, info.st_blocks * 512, info.st_mtime_ns, info.st_nlink > 1

    def _total(self) -> int:
        try:
            return int((self.folder / ".total").read_text())
        except (OSError, ValueError):
            return self.cap                                          # an unknown total makes `_reserve` scan the cache

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = self._open(self.folder / ".lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _same_file(fd: int, path: str | Path) -> bool:
    """Whether `path` names the file that is open as `fd`, and not another file that has replaced it."""
    try:
        here, there = os.fstat(fd), os.stat(path)
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _abandoned(part: str) -> bool:
    """Remove the unfinished download `part` if the process that wrote it has died. Returns False when the process is
    still working on the download."""
    fd = os.open(part, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _same_file(fd, part):
            os.unlink(part)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
