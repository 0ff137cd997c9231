"""Assembles the `tokenmill` command, and turns errors into one clear line and an exit code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import typer
from typer.core import TyperGroup

from pipeline.base.redact import mask_record
from pipeline.cli import (
    buckets,
    classifier,
    cluster,
    data,
    dedup,
    doctor,
    extract,
    inspect,
    lm,
    runs,
    serve,
    shards,
    steps,
    store,
    takedown,
    tokenizers,
)
from pipeline.cli.training import forward

#: The class of the usage errors that `standalone_mode=False` raises, click's ClickException. It is looked up among the
#: base classes of typer.BadParameter, because Typer may bring its own copy of click.
ClickException: type[typer.BadParameter] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
STOPPED = 130                      # the exit code that Typer gives a KeyboardInterrupt


@cache
def command_group() -> TyperGroup:
    """Return the command `tokenmill` with all its subcommands, as Click runs it."""
    app = typer.Typer(name="tokenmill", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                      rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
                      help="From raw web pages, PDFs, code and books to training tokens, and a trainer for them.")
    app.callback()(settings)
    for module in (runs, cluster, serve, doctor, steps, inspect, dedup, data, classifier, lm, buckets, extract, store,
                   takedown, tokenizers, shards):
        module.register(app)
    app.command("train", add_help_option=False,
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def settings(ctx: typer.Context,
             debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors; may stand anywhere.")] =
             False) -> None:
    ctx.obj = debug


def train(ctx: typer.Context) -> None:
    """Train on the token shards of a run. This command does what `python -m trainer` does.

    \b
    Examples:
      tokenmill train run store/runs/RUN --ranks 2
      tokenmill train --help
    """
    raise typer.Exit(forward(list(ctx.args)))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line, given without the program's name, and return its exit code. An error is printed on stderr
    without a traceback (`report_error`); with --debug, its traceback is printed first. A usage error, such as an
    unknown option, is printed as Click formats it. Secrets are masked in errors, tracebacks and log messages."""
    arguments, debug = take_debug(arguments)
    logging.getLogger("tokenmill").addFilter(mask_record)
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the terminal cannot print are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = command_group().main(arguments, prog_name="tokenmill", standalone_mode=False)
        sys.stdout.flush()
        if code == STOPPED:
            typer.echo("stopped", err=True)
            return 1
        return code if isinstance(code, int) else 0
    except ClickException as e:
        e.message = e.message.replace("Value error, ", "")         # pydantic, which Typer uses, begins reasons with it
        e.show()
        return e.exit_code
    except typer.Abort:
        typer.echo("stopped", err=True)
        return 1
    except BrokenPipeError:                   # the reader is done, as in `| head`
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:
        from pipeline.cli.errors import report_error

        return report_error(e, debug)


def take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Take the option --debug out of a command line. Returns the command line with --debug at the front, where the
    command group `tokenmill` expects it, and whether it was given. Users may write it anywhere except after `--`. The
    command line of `train` is not changed, because the trainer parses it."""
    end = next((i for i, a in enumerate(arguments) if a == "--"), len(arguments))
    if list(arguments[:1]) == ["train"]:
        end = 0
    others = [a for a in arguments[:end] if a != "--debug"]
    debug = len(others) < end
    return [*(["--debug"] if debug else []), *others, *arguments[end:]], debug
