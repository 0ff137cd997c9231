"""Identifies the driver that holds the lease (the right to append to the commit log of a store), checks whether this
driver is alive, and waits until the lease is free. `pipeline.store.log` takes the lease, and raises Fenced when another
driver has taken it over."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Mapping
from typing import Any, TypedDict

from pipeline.base.clock import Clock
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store

#: four heartbeats: if a driver's process cannot be checked, and its heartbeat stays the same for this many seconds, the
#: driver is considered dead
PATIENCE_S = 20.0

log = logging.getLogger("tokenmill")


class LeaseHeld(StoreError):
    """Raised when a living driver (a process that schedules a run) holds the lease of the store, the right to append to
    its commit log."""


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
    commit log). From this description, another process on the same machine can tell whether the holder is alive.

    The process id alone is not enough. It is unique only within one boot and one pid namespace (containers share the
    boot id of their host). It may also be reused: two processes with the same id differ in their start time.
    """
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
    """Whether the process that `holder` describes is alive. None when this process cannot tell. That is the case if the
    holder ran on another machine, in another boot or in another pid namespace, or if this machine has no boot id."""
    here = identity("")
    there = (holder.get("host"), holder.get("boot"), holder.get("space"))
    if not here["boot"] or there != (here["host"], here["boot"], here["space"]):
        return None
    pid = holder.get("pid")
    return isinstance(pid, int) and _started(pid) == holder.get("started") != ""


def heartbeat_name(epoch: int) -> str:
    return f"log/heartbeat/{epoch:08d}.json"


def heartbeat(store: Store, epoch: int) -> dict[str, Any]:
    """Return the last heartbeat of the driver (process that schedules a run) whose term in the log is `epoch`; {} when
    the heartbeat cannot be read."""
    try:
        beat: dict[str, Any] = json.loads(store.read(heartbeat_name(epoch)))
        return beat
    except (OSError, ValueError):
        return {}


def wait_until_free(store: Store, holder: Holder, epoch: int, clock: Clock) -> None:
    """Wait until the lease is free: until the driver (process that schedules a run) whose term in the log is `epoch`
    has closed the log or is dead. Raises LeaseHeld when that driver is alive.

    A driver on another machine or in another container cannot be checked. In this case its heartbeat is watched for up
    to PATIENCE_S seconds. If the heartbeat stays the same, the driver counts as dead. If it says that the log is
    closed, the lease is free. If it changes in another way, the driver is alive.
    """
    first = heartbeat(store, epoch)
    if first.get("closed") or alive(holder) is False:
        return
    if alive(holder) is None:
        log.warning("%s was last held by run '%s' on host %s, which this machine cannot check: waiting up to %.0f s "
                    "for a sign of life (--takeover does not wait)", store.root, holder["run"], holder["host"],
                    PATIENCE_S)
        # count heartbeats that were read, not seconds: while this machine is suspended it reads none
        step = min(1.0, PATIENCE_S / 10)
        for _ in range(math.ceil(PATIENCE_S / step)):
            clock.sleep(step)
            now = heartbeat(store, epoch)
            if now.get("closed"):
                return
            if now != first:
                break
        else:
            return
    raise LeaseHeld(f"{store.root} is in use by run '{holder['run']}' (host {holder['host']}, process "
                    f"{holder['pid']}), which is alive; wait for it, stop it, or take the store over with --takeover "
                    f"(that run then exits 1)")
