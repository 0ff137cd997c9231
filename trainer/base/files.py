"""Writes the small text files beside a training's checkpoints. A file is either replaced as a whole, or lines are
appended to it. A kill or a full disk damages at most the line that is being appended. `alone` keeps two processes from
training in the same folder."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pipeline.base.files import replacing
from trainer.base.config import ConfigError

#: flag of a process in /proc that has begun to exit (Linux' PF_EXITING)
EXITING = 0x4
#: file in the folder of a training with the identity of the process that trains
PID = "trainer.pid"


def replace(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, and make its folder if it is missing. Readers see either the old or the
    new content. If the disk is full, the old content stays. The file is not synced (fsync), because a training must not
    wait for a busy disk at every line of metrics; use it only for files that can be made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=False) as part:
        part.write_text(text, encoding="utf-8")


def appending(path: Path) -> TextIO:
    """Open a text file for appending lines. If a kill has cut off the last line, a line feed is written first, so that
    the next line does not continue the cut one."""
    file = open(path, "ab+")  # noqa: SIM115  the caller closes it
    torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
    if torn:
        file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Mark `folder` as in use by this process until the context ends. The mark is the file trainer.pid in the folder,
    with the identity of the process.

    Raises ConfigError if another process of this machine already trains in the folder. Both would write the same
    metrics, and the slower one would fail at its next checkpoint. A process on another machine is not noticed. The mark
    is not a file lock, because on a shared disk the lock of a dead node would block the next start.
    """
    path, identity = folder / PID, _process(os.getpid())
    pid = training_process(folder)
    if pid not in (None, os.getpid()):
        raise ConfigError(f"{folder}: process {pid} of this machine trains there; stop it (kill {pid}: it writes a "
                          f"checkpoint), or name another folder with --out")
    with suppress(OSError):  # if the folder cannot be written, the metrics file, opened next, reports it
        folder.mkdir(parents=True, exist_ok=True)
        replace(path, identity)
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text(encoding="ascii") == identity:
                path.unlink()


def training_process(folder: Path) -> int | None:
    """Return the pid of the process on this machine that trains in `folder`. Returns None if there is no such process,
    or if the system (without /proc) cannot tell."""
    with suppress(OSError):
        held = (folder / PID).read_text(encoding="ascii", errors="replace")
        pid = held.partition(" ")[0]
        if pid.isdecimal() and held == _process(int(pid)):
            return int(pid)
    return None


def _process(pid: int) -> str:
    """Return text that identifies the process `pid`: its pid, its start (in ticks since boot) and the boot id. No other
    process ever has the same text.

    The text is empty if the process does not run, is exiting, or is a zombie (a process that has ended, but whose
    parent has not waited for it). The text is also empty on systems without /proc.
    """
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if stat[0] not in "ZX" and not int(stat[6]) & EXITING:
            return f"{pid} {stat[19]} {Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
    return ""
