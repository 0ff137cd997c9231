"""Limits that a process sets for itself, on Linux. Processes that run tasks use them, and so do brokers (processes that
access object storage for a confined process) and programs that stages start.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import sysconfig
from collections.abc import Iterator

from pipeline.base import kernel


class ProcessDied(Exception):
    """Raised when a process that a stage started for a document was killed by a signal. `returncode` is minus the
    number of the signal, as in `subprocess`.

    The engine acts as if the signal had killed the process that runs the task. Unless the signal came from outside, it
    runs the document again alone, and quarantines the document if that process is killed, too."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode


def import_path() -> str:
    """Returns the PYTHONPATH with which another Python process imports the same modules as this one. It holds the
    folders of this process's import path, except those of the Python installation itself."""
    standard = {sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = [os.path.abspath(p) for p in sys.path]
    return os.pathsep.join(p for p in folders if p not in standard and not p.endswith((".zip", "lib-dynload"))
                           and os.path.isdir(p))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as the thread that spawned it ends, in whatever way (prctl
    PR_SET_PDEATHSIG). `parent` is the process id of the expected parent. If that process has ended already, this one
    exits at once."""
    kernel.signal_on_death_of_parent()
    if os.getppid() != parent:      # the parent died before we asked
        os._exit(0)


def no_core() -> None:
    """Disable core dumps, including those that the kernel pipes to a program. The limit is 1 byte where the hard limit
    allows it. For piped dumps the kernel ignores a limit of 0, but takes 1 as "no dump"."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 1 if hard == resource.RLIM_INFINITY or hard >= 1 else 0
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def status_kb(pid: int | str, fields: tuple[str, ...]) -> int:
    """Return the sum, in kB, of the values in /proc/PID/status whose lines begin with one of `fields` (for example
    "VmData:"). Raises OSError when the process is gone."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as f:
        return sum(int(line.split()[1]) for line in f if line.startswith(fields))


def data_bytes(pid: int | str = "self") -> int:
    """Returns the size in bytes of the memory of a process that RLIMIT_DATA limits: its private writable memory,
    whether used yet or only reserved."""
    return status_kb(pid, ("VmData:",)) * 1024


def limit_data(limit: int | None) -> None:
    """Limit the private memory of this process to `limit` bytes, so that larger allocations fail. None lifts the
    limit."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = hard if limit is None else limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def limited_memory(memory: int) -> Iterator[None]:
    """A context manager within which this process can allocate at most `memory` further bytes; beyond that, MemoryError
    is raised.

    A hostile file may claim a small size in its metadata and unpack to far more. Only a limit of the operating system
    protects against that. On systems without /proc there is no limit."""
    try:
        limit = 1024 * status_kb("self", ("VmSize:",)) + memory
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
