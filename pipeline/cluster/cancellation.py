"""Cancellation of a run: the process that schedules the run checks every few seconds whether the store holds a request
to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from pipeline.cluster.attempts import asked_to_stop
from pipeline.store.fs import Store

POLL_S = 2.0             # seconds between two checks for a request
GRACE_S = 60.0           # seconds for which running tasks may go on after a cancel


@contextlib.contextmanager
def watching(store: Store, run: str, attempt: int, stop: Callable[[], None],
             poll_s: float = POLL_S) -> Iterator[None]:
    """A context manager that watches for a request to stop this attempt (start) of the run (`attempts.ask_to_stop`).
    When a request comes, `stop` is called once, from another thread."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            with contextlib.suppress(Exception):      # a store that fails now may answer next time
                if asked_to_stop(store, run, attempt):
                    stop()
                    return
            ended.wait(poll_s)

    thread = threading.Thread(target=poll, name="cancellation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=poll_s)


def interrupted(store: Store, run: str, attempt: int) -> contextlib.AbstractContextManager[None]:
    """A context manager for work outside the scheduler, such as planning. While the context is active, a request to
    stop this attempt (start) of the run sends SIGTERM to this process. The context does nothing in a process that has
    no handler for SIGTERM, because such a process would end without cleaning up."""
    if not callable(signal.getsignal(signal.SIGTERM)):
        return contextlib.nullcontext()
    return watching(store, run, attempt, lambda: os.kill(os.getpid(), signal.SIGTERM))
