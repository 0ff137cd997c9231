"""Scratch folders on local disk. They are removed in the end, even if the process that owns them is killed.

Every process that owns a scratch folder (a driver or a worker) holds a lock on it for as long as the process runs. The
next process that makes a scratch folder in the same place removes all folders there whose lock no process holds. Locks
work across containers that share a disk, where process ids mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from pipeline.base.clock import SYSTEM


def user_folder(base: str | None = None) -> Path:
    """Create and return the folder `BASE/tokenmill-UID`, which is private to this user. `base` is by default the
    system's folder for temporary files.

    Raises PermissionError when another user owns the folder or may write to it: its contents (compiled code) must be
    trusted.
    """
    folder = Path(base or tempfile.gettempdir(), f"tokenmill-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise PermissionError(f"{folder} is not private to this user; remove it or set TMPDIR to another place")
    return folder


class Scratch:
    """A temporary folder of this process, below `user_folder`. It is removed by `close` or at the end of a `with`
    block. If this process is killed, the next process that makes such a folder removes it."""

    def __init__(self, base: str | None = None) -> None:
        top = user_folder(base)
        with open(top / ".lock", "w") as f:     # keeps others from sweeping a folder before it is locked
            fcntl.flock(f, fcntl.LOCK_EX)
            self._sweep(top)
            self.path = tempfile.mkdtemp(prefix="scratch-", dir=top)
            self._lock = os.open(Path(self.path, ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @staticmethod
    def _sweep(top: Path) -> None:
        for folder in top.glob("scratch-*"):
            try:
                fd = os.open(folder / ".lock", os.O_RDWR)
            except OSError:
                continue                        # already removed
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                pass                            # its owner is alive
            finally:
                os.close(fd)
        for folder in top.glob("numba-*"):      # kernels compiled from code that has not run for a month
            with contextlib.suppress(OSError):
                if SYSTEM.wall() - folder.stat().st_mtime > 30 * 86400:
                    shutil.rmtree(folder, ignore_errors=True)

    def folder(self) -> str:
        """Create a new folder in this scratch folder and return its path."""
        return tempfile.mkdtemp(dir=self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
