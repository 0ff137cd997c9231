"""Runs the first entry of a queue as its driver, and cancels it within a function: `python -m
tests.service.cancelled_driver STORE FUNCTION`. Writes `not-cancelled` to the store if the function ends all the
same."""

from __future__ import annotations

import pkgutil
import sys
import time
from functools import partial
from typing import Any

from pipeline.cli.options import BackendName
from pipeline.cli.queued import work
from pipeline.cluster import cancellation
from pipeline.cluster.attempts import ask_to_stop
from pipeline.cluster.queue import Queue
from pipeline.store.fs import Store

LONG_S = 300.0


def main() -> int:
    store, (place, _, name) = Store(sys.argv[1]), sys.argv[2].rpartition(".")
    run = Queue(store).entry(1).run

    def long(*_: Any, **__: Any) -> None:
        ask_to_stop(store, run, 1)
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            time.sleep(0.1)
        store.write("not-cancelled", b"")

    setattr(pkgutil.resolve_name(place), name, long)
    cancellation.watching = partial(cancellation.watching, poll_s=0.05)  # type: ignore[assignment]
    return work(store, "1/2", BackendName.inline, 1, None, False, False)


if __name__ == "__main__":
    sys.exit(main())
