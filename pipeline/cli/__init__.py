"""The `tokenmill` command. Exit codes: 0 done, 1 failed, 2 bad usage or recipe."""

from __future__ import annotations

import sys

import typer

app = typer.Typer(name="tokenmill", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="From raw web pages, PDFs, code and books to training tokens, and a trainer for them.")


def fail(message: str, code: int = 1) -> None:
    """Say what is wrong on stderr and leave."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def _commands() -> None:
    from pipeline.cli import data, runs, tokens, training

    for module in (runs, data, tokens, training):
        module.register(app)


def main() -> None:
    """Entry point: known errors become one clear line, anything else keeps its traceback."""
    _commands()
    from pipeline.cli.errors import known_errors, usage_errors

    try:
        app(standalone_mode=True)
    except known_errors() as e:
        typer.echo(f"error: {e}", err=True)
        sys.exit(2 if isinstance(e, usage_errors()) else 1)
