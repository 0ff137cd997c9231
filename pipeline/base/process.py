"""Limits that a process sets for itself. Workers use them, and so do their brokers (which access object storage for
them) and the processes that stages start. This module needs Linux."""

from __future__ import annotations

import os
import resource
import sys
import sysconfig

from pipeline.base import kernel


class ProcessDied(Exception):
    """A process that a stage started for a document was killed by the signal `-returncode` (the convention of
    subprocess). The engine treats this as if its own worker had been killed: it runs the document again alone, and
    quarantines it (puts it aside) if the process is killed again. If the signal came from outside, the document is not
    quarantined."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode


def import_path() -> str:
    """PYTHONPATH for a process that is to import what this one imports: the folders of its import path beside those of
    Python itself."""
    standard = {sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = [os.path.abspath(p) for p in sys.path]
    return os.pathsep.join(p for p in folders if p not in standard and not p.endswith((".zip", "lib-dynload"))
                           and os.path.isdir(p))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as the thread that spawned it ends, however it ends (prctl
    PR_SET_PDEATHSIG). `parent` is the process id of the expected parent; if that process is gone already, exit at
    once."""
    kernel.signal_on_death_of_parent()
    if os.getppid() != parent:      # the parent died before we asked
        os._exit(0)


def no_core() -> None:
    """Disable core dumps, including those piped to a program. For piped dumps the kernel takes a limit of 1 byte as
    "never"."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 1 if hard == resource.RLIM_INFINITY or hard >= 1 else 0
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def status_kb(pid: int | str, fields: tuple[str, ...]) -> int:
    """Sum, in kB, of the lines of /proc/PID/status that begin with `fields` ("VmData:"). Raises OSError when the
    process is gone."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as f:
        return sum(int(line.split()[1]) for line in f if line.startswith(fields))


def data_bytes(pid: int | str = "self") -> int:
    """Bytes of a process that RLIMIT_DATA counts: private writable memory, touched or not."""
    return status_kb(pid, ("VmData:",)) * 1024


def limit_data(limit: int | None) -> None:
    """Make allocations of this process fail beyond `limit` bytes of private memory; None lifts the limit."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = hard if limit is None else limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
