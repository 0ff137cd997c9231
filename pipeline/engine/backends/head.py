"""Watches whether the head node of a Ray cluster can be reached, by connecting to its port. The module does not use
Ray."""

from __future__ import annotations

import logging
import socket
import threading

CHECK_S = 5.0            # seconds between two checks
MISSES = 2               # failed checks in a row until the user is warned

log = logging.getLogger("tokenmill")


def watch_head(address: str, every_s: float = CHECK_S) -> threading.Event:
    """Watch HOST:PORT (the head node of a Ray cluster) in a thread, and log an error when it stops answering. About a
    minute later Ray itself ends this process without an explanation, so the log must explain it. To end the watch, set
    the returned event."""
    closed = threading.Event()
    threading.Thread(target=_watch, args=(address, closed, every_s), name="head", daemon=True).start()
    return closed


def _watch(address: str, closed: threading.Event, every_s: float) -> None:
    host, _, port = address.rpartition(":")
    missed = 0
    while not closed.wait(every_s):
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=every_s).close()
            missed = 0
        except OSError as e:
            missed += 1
            if missed == MISSES:
                log.error("the head of the cluster (%s) does not answer (%s); unless it comes back within a minute, "
                          "this run ends. What was committed is kept: run again, on any cluster", address, e)
