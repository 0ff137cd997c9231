"""Errors of a store. Their messages name the path or URL and the remedy, and never hold credentials."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator

from pipeline.base.errors import TokenmillError

#: why a file is damaged: it is missing, or its bytes differ from those that its record describes
GONE = "is missing, although the log names it"
OTHER_BYTES = "is damaged: its bytes differ from its record"
#: error numbers (errno) of a full disk and of an exhausted quota
FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDY = {
    errno.EACCES: "give this user write permission there or choose another --store",
    errno.EPERM: "give this user write permission there or choose another --store",
    errno.EROFS: "the filesystem is read-only: choose another --store",
    errno.ENOSPC: "the disk is full: free some space and run again, nothing that was committed is lost",
    errno.EDQUOT: "the disk quota is used up: free some space and run again, nothing that was committed is lost",
    errno.ENOTDIR: "a file stands where the store needs a folder: move it away or choose another --store",
    errno.EEXIST: "a file stands where the store needs a folder: move it away or choose another --store",
}


class StoreError(TokenmillError):
    """Raised when something is wrong with a store or with its storage. The message names the path and the remedy."""


class EnvironmentFailure(StoreError):
    """Raised for a temporary fault of the machine or of the storage service. Examples are a full disk and an endpoint
    that does not answer. A task that meets the fault is not to blame: it runs again, and the attempt does not count
    against the scheduler's `max_attempts`."""


class DamagedFile(StoreError):
    """Raised when a file of the store does not match its record: the file is missing, truncated, or has other bytes.

    `path` is relative to the store. When a task fails with this error, the driver (the process that schedules tasks)
    withdraws the record, and the task that wrote the file runs again.
    """

    def __init__(self, path: str, why: str) -> None:
        remedy = remedy_of([path])
        super().__init__(f"{path} {why}; {remedy}")
        self.path, self.why = path, why


def remedy_of(paths: Iterable[str]) -> str:
    """Return the advice that ends an error message about damaged files: which commands repair them.

    For files in objects/, runs/ and log/ and for manifests (lists of the files of a folder), it is enough to run the
    recipe again. A run checks the bytes of the objects it reads, and writes its manifests again.

    A run checks only the sizes of the copies of objects in published datasets and shards. If such a copy is damaged,
    `tokenmill store verify --repair` must come first.
    """
    if all(path.startswith(("objects/", "runs/", "log/")) or path.rpartition("/")[2] in (".manifest", "shards.json")
           for path in paths):
        return "run the recipe again to replace it, or check all files with `tokenmill store verify`"
    return "run `tokenmill store verify --repair`, then the recipe again to replace it"


class ChangedFile(StoreError):
    """Raised when a remote file has changed: its version is not the one that was expected."""


def cannot_write(path: str | os.PathLike[str], error: OSError) -> StoreError:
    remedy = _REMEDY.get(error.errno or 0, "see that the store can be reached and written, then run again")
    kind = EnvironmentFailure if error.errno in FULL else StoreError
    return kind(f"cannot write {path}: {error.strerror or error}; {remedy}")


@contextlib.contextmanager
def disk_full(folder: str) -> Iterator[None]:
    """A context manager for code that writes files in `folder`. It turns the OSError of a full disk or an exhausted
    quota into an EnvironmentFailure that names the folder. Other errors pass unchanged."""
    try:
        yield
    except OSError as e:
        if e.errno not in FULL:
            raise
        what = "the disk is full" if e.errno == errno.ENOSPC else "the disk quota is used up"
        raise EnvironmentFailure(
            f"no space left for temporary files in {folder}: {what}; free some space there, set TMPDIR to a larger "
            f"disk, or make TOKENMILL_CACHE_SIZE smaller. What was committed is kept: run again") from e
