"""Handles the signals that ask a training to stop. Code that cannot send a signal calls `request_stop` instead."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

PR_SET_PDEATHSIG = 1
KERNEL = ctypes.CDLL(None) if sys.platform == "linux" else None
#: numbers of the signals that have arrived, including those passed to `request_stop`
_caught: list[int] = []


def stopping() -> list[signal.Signals]:
    """Return the signals that ask for an orderly end: SIGINT (Ctrl-C), SIGTERM, SIGUSR1 (Slurm's warning) and SIGHUP
    (the terminal was closed). SIGHUP is left out when it is ignored, as under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hangup]


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the system to send this process the signal `number` when its parent process ends for any reason. A child
    process calls this before exec. It works only on Linux; elsewhere it does nothing."""
    if KERNEL is not None:
        KERNEL.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def request_stop(number: int) -> None:
    """Ask the training in this process to end, as if signal `number` had arrived. It is called by launchers that cannot
    send a signal."""
    _caught.append(number)


@contextmanager
def interruptions() -> Iterator[Callable[[], int]]:
    """Record the signals that `stopping` lists, instead of letting them kill the process, until the context ends.
    Yields a function that returns the number of the first recorded signal, or 0 if there is none. The training calls it
    after every step; if a signal was recorded, the training writes a checkpoint and ends.

    A SIGINT that follows another signal raises KeyboardInterrupt at once. Python handles signals only in the main
    thread. In other threads, the function reports only calls of `request_stop`.
    """
    def note(number: int, _frame: Any) -> None:
        if _caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not _caught and os.environ.get("RANK", "0") == "0":  # only once: Slurm and torchrun send two to each rank
            # os.write, because `print` raises if the signal has interrupted another print. An OSError is ignored,
            # because the same Ctrl-C may have ended the process that reads stderr (`| tee`)
            with suppress(OSError):
                os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())
        _caught.append(number)

    main = threading.current_thread() is threading.main_thread()
    old = {n: signal.signal(n, note) for n in stopping() if main}
    try:
        yield lambda: _caught[0] if _caught else 0
    finally:
        _caught.clear()  # cleared here and not on entry: a request may arrive while a training is still being set up
        for number, handler in old.items():
            signal.signal(number, handler)
