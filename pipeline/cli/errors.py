"""Errors that a user can fix, and how they are shown: as one line, without a traceback. The exit code of a command is
decided in `pipeline.cli.app.run_command`.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

import typer

from pipeline.base.errors import TokenmillError


class UserError(TokenmillError):
    """Raised when a command cannot do what the user asked for. The error's message says why, and what to do."""


class BadUsage(UserError):
    """Raised when the command line, or something that it names (such as a file or a run), cannot be used. The error's
    message says why, and the exit code is 2."""

    exit_code = 2


def report_error(e: BaseException, debug: bool = False) -> int:
    """Print an error on stderr, with secrets masked: one line, or for a recipe one line for each of its problems. With
    `debug`, first print the traceback, including those of worker processes. Returns the exit code."""
    from pipeline.base.redact import redact
    from pipeline.base.visible import visible

    if debug:
        typer.echo(visible(redact("".join(traceback.format_exception(e))).rstrip()), err=True)
    typer.echo(visible(redact(f"error: {in_words(e)}")), err=True)
    return e.exit_code if isinstance(e, TokenmillError) else 1


def in_words(e: BaseException) -> str:
    """Describe an error for a user: in one line, or for a recipe in one line for each of its problems. An error that is
    no TokenmillError is marked as unexpected, because it is a bug of Tokenmill. A full disk is no bug, and not
    marked."""
    from pipeline.store.errors import FULL, cannot_write

    if isinstance(e, (KeyboardInterrupt, SystemExit, TokenmillError)):
        return str(e)
    if isinstance(e, OSError) and e.errno in FULL:
        return str(cannot_write(e.filename or "a file", e))
    text = " ".join(f"{type(e).__name__}: {e}".rstrip(": ").split())
    return f"{text} (unexpected: the same command with --debug shows where it comes from)"


@contextlib.contextmanager
def stoppable(address: str | None = None) -> Iterator[None]:
    """A context manager for code that runs a recipe. It turns Ctrl-C into a UserError that says which results are kept.
    A failed connection to the cluster at `address` becomes a UserError that says what to do."""
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
    """A context manager for reading a user's file. It turns an OSError into BadUsage."""
    try:
        yield
    except OSError as e:
        raise BadUsage(f"cannot read {path}: {e.strerror or e}") from None


@contextlib.contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """A context manager for writing the file `path`, which the user chose by `option`. It creates the file's folder,
    and turns an OSError into a UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror or e}; choose another {option}") from None
