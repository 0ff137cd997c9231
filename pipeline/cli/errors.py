"""Errors that a user can mend: they are shown as one line, without a traceback."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

import typer

from pipeline.base.errors import TokenmillError


class UserError(TokenmillError):
    """A command cannot do what it was asked. The message says why and what to do."""


class BadUsage(UserError):
    """The arguments make no sense."""

    exit_code = 2


def report_error(e: BaseException, debug: bool = False) -> int:
    """Print on stderr what went wrong, in one line, with secrets masked. With `debug`, first print the traceback, and
    those of the workers. Returns the exit code."""
    from pipeline.base.redact import redact
    from pipeline.base.visible import visible

    if debug:
        typer.echo(visible(redact("".join(traceback.format_exception(e))).rstrip()), err=True)
    typer.echo(visible(redact(f"error: {in_words(e)}")), err=True)
    return e.exit_code if isinstance(e, TokenmillError) else 1


def in_words(e: BaseException) -> str:
    """One line about an error."""
    from pipeline.store.errors import FULL, cannot_write

    if isinstance(e, (KeyboardInterrupt, SystemExit, TokenmillError)):
        return str(e)
    if isinstance(e, OSError) and e.errno in FULL:
        return str(cannot_write(e.filename or "a file", e))
    text = " ".join(f"{type(e).__name__}: {e}".rstrip(": ").split())
    return f"{text} (unexpected: the same command with --debug shows where it comes from)"


@contextlib.contextmanager
def stoppable(address: str | None = None) -> Iterator[None]:
    """Raises UserError for Ctrl-C in a run, which says what is kept, and for a cluster at `address` that cannot be
    reached."""
    from pipeline.engine.driver.endings import Interrupted

    try:
        yield
    except KeyboardInterrupt as e:                    # Interrupted in a run; Python's own before and after the tasks
        raise UserError(str(e if isinstance(e, Interrupted) else Interrupted(signal.SIGINT))) from None
    except BrokenPipeError:
        raise
    except ConnectionError as e:
        if address is None:
            raise
        message = (str(e).splitlines() or ["refused"])[0]
        raise UserError(f"--address {address}: cannot attach to a Ray cluster there: {message}; see that its head node "
                        f"runs (ray status), or leave --address out to run on this machine") from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an error on reading a user's file into BadUsage."""
    try:
        yield
    except OSError as e:
        raise BadUsage(f"cannot read {path}: {e.strerror or e}") from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes the folder, and turns an error on writing to a place the user chose into UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror or e}; choose another --out") from None
