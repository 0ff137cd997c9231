"""Identifies the driver that holds the lease (the right to append to the commit log of a store), and checks whether
this driver is alive. `pipeline.store.log` takes the lease, and raises Fenced when another driver has taken it over."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TypedDict


class Holder(TypedDict):
    """Identifies the driver (process that schedules a run) that holds the lease, the right to append to the commit log.
    The driver writes these fields to the log when it takes the lease, and to its heartbeat file."""

    host: str
    boot: str
    space: str          # pid namespace
    pid: int
    started: str
    run: str


def identity(run: str, pid: int | None = None) -> Holder:
    """Describe this process (or its child `pid`) as the holder of the lease of a store (the right to append to its
    commit log), so that another process on the same machine can check whether it is alive. The process id alone is not
    enough. A process id is unique only within one boot and one pid namespace (containers share the boot id of their
    host). It may also be reused: two processes with the same id differ in their start time."""
    pid = os.getpid() if pid is None else pid
    return {"host": socket.gethostname(), "boot": _read("/proc/sys/kernel/random/boot_id"), "space": _pid_space(),
            "pid": pid, "started": _started(pid), "run": run}


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as f:
            return f.read().strip()
    except OSError:
        return ""


def _pid_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" when the process does not exist or is a
    zombie."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def alive(holder: Mapping[str, object]) -> bool | None:
    """Whether the process that `holder` describes is alive. None when this process cannot check, because the holder ran
    on another machine, in another boot or in another pid namespace."""
    here = identity("")
    there = (holder.get("host"), holder.get("boot"), holder.get("space"))
    if not here["boot"] or there != (here["host"], here["boot"], here["space"]):
        return None
    pid = holder.get("pid")
    return isinstance(pid, int) and _started(pid) == holder.get("started") != ""
