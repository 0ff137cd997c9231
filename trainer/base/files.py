"""Writes text files beside a training's checkpoints, whole or line by line, so that neither a kill nor a full disk can
spoil them."""

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


def replace(path: Path, text: str) -> None:
    """Write a derived file, and make its folder if it is missing. Readers see either the old or the new content; a full
    disk leaves the old content. The file is not synced, since a training must not wait for a busy disk at every line of
    metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=False) as part:
        part.write_text(text, encoding="utf-8")


def appending(path: Path) -> TextIO:
    """Open a file of lines for appending. If a kill cut off its last line, a line feed is written first, so that the
    next line does not continue it."""
    file = open(path, "ab+")  # noqa: SIM115  closed with what is returned
    torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
    if torn:
        file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Name this process in `folder`/trainer.pid, within the context, as the process that trains in the folder.

    Raises ConfigError while another process of this machine trains there: both would write the same metrics, and the
    slower process would fail at its next checkpoint. A process of another machine is not noticed; the slower of the two
    then fails at its next checkpoint. The file is not a file lock, since on a shared disk the lock of a dead node would
    block the next start."""
    path, mine = folder / "trainer.pid", _process(os.getpid())
    held = path.read_text(encoding="ascii", errors="replace") if path.is_file() else ""
    pid = held.partition(" ")[0]
    if pid.isdecimal() and held == _process(int(pid)) != mine:
        raise ConfigError(f"{folder}: process {pid} of this machine trains there; stop it (kill {pid}: it writes a "
                          f"checkpoint), or name another folder with --out")
    with suppress(OSError):  # if the folder cannot be written, the metrics file, opened next, reports it
        folder.mkdir(parents=True, exist_ok=True)
        replace(path, mine)
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text(encoding="ascii") == mine:
                path.unlink()


def _process(pid: int) -> str:
    """Return an identity that no other process ever shares: the process's number, its start (in ticks since boot) and
    the boot id.

    The identity is empty for a process that does not run or is ending. An ending process is freeing its memory, or is a
    zombie whose parent never waits for it (in some containers no process does). It is also empty where there is no
    /proc."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if stat[0] not in "ZX" and not int(stat[6]) & EXITING:
            return f"{pid} {stat[19]} {Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
    return ""
