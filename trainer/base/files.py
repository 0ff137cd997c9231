"""Text that a training writes beside its checkpoints: whole, or as lines that a kill or a full disk cannot spoil."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pipeline.base.files import replacing
from trainer.base.config import ConfigError

#: flag of a process in /proc: it has begun to end (Linux' PF_EXITING)
EXITING = 0x4


def replace(path: Path, text: str) -> None:
    """Write a derived file so that readers see the old or the new one, and a full disk leaves the old one."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def appending(path: Path) -> TextIO:
    """A file of lines, to append to. What a kill left of a line gets a line of its own."""
    file = open(path, "ab+")  # noqa: SIM115  closed with what is returned
    torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
    if torn:
        file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within it `folder`/trainer.pid names this process as the one that trains there. Raises ConfigError while another
    process of this machine does: both would write the same metrics, and the slower one fail at its next checkpoint
    (as one of another machine does). No lock: a dead node's would keep the next start out on a shared disk."""
    path, mine = folder / "trainer.pid", _process(os.getpid())
    held = path.read_text(encoding="ascii", errors="replace") if path.is_file() else ""
    pid = held.partition(" ")[0]
    if pid.isdecimal() and held == _process(int(pid)) != mine:
        raise ConfigError(f"{folder}: process {pid} of this machine trains there; stop it (kill {pid}: it writes a "
                          f"checkpoint), or name another folder with --out")
    with suppress(OSError):                      # the metrics, opened next, say what is wrong with the folder
        folder.mkdir(parents=True, exist_ok=True)
        replace(path, mine)
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text(encoding="ascii") == mine:
                path.unlink()


def _process(pid: int) -> str:
    """What no other process has, or will have: its number, when it began (in ticks since boot), and which boot. Empty
    when it does not run, or no more: it is giving back its memory, or waits for a parent that never asks how it ended
    (in a container no process may). Empty, too, where there is no /proc."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if stat[0] not in "ZX" and not int(stat[6]) & EXITING:
            return f"{pid} {stat[19]} {Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
    return ""
