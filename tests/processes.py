"""Waits for other processes, finds them by /proc, and sends signals to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 300.0, what: str | Callable[[], str] = "it",
          job: subprocess.Popen[Any] | None = None, log: Path | None = None) -> Any:
    """Call `condition` until it returns a true value, and return this value. Meant for what other processes do: a
    thread of this process can be joined, or can set an event.

    Fails after `seconds`, and as soon as the process `job` has ended without it. `what`, or what it returns then, says
    in the message what was waited for. `log` is a file whose end is shown there."""
    began = time.monotonic()
    while True:
        ended = job is not None and job.poll() is not None          # before the condition, which may be its last act
        if found := condition():
            return found
        passed = time.monotonic() - began
        if ended or passed > seconds:
            why = f"before the process ended ({job.returncode})" if job and ended else f"within {seconds:.0f} s"
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"{text} did not come to pass {why}" + (f"\n{log.read_text()[-5000:]}" if log else ""))
        time.sleep(min(max(0.01, passed / 20), 0.2))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or [] if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def stopped(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] == "T"


def named(pid: int, part: str) -> bool:
    try:
        return part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def parents() -> dict[int, int]:
    """Return {pid: pid of the parent} for all living processes."""
    pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()]
    return {pid: int(fields[1]) for pid in pids if (fields := _stat(pid)) and fields[0] not in "ZX"}


def children_of(pid: int) -> list[int]:
    return sorted(p for p, parent in parents().items() if parent == pid)


def descendants(pid: int) -> list[int]:
    table = parents()
    found, todo = [], [pid]
    while todo:
        top = todo.pop()
        mine = [p for p, parent in table.items() if parent == top]
        found += mine
        todo += mine
    return found


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and all its descendants."""
    for p in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(p, signal.SIGKILL)


def marked(mark: str) -> set[int]:
    """Return the pids of living processes that have `mark` in their environment or command line, without this
    process."""
    found = set()
    for pid in parents():
        try:
            said = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in said:
            found.add(pid)
    return found - {os.getpid()}


def signal_all(pids: Iterable[int], signum: int) -> list[int]:
    """Send a signal to processes. Returns the pids of those that existed."""
    got = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            got.append(pid)
    return got
