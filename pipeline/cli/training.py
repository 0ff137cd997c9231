"""`tokenmill train …` is `python -m trainer …`; it is here so that one command does everything."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    app.command("train", add_help_option=False,
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)


def train(ctx: typer.Context) -> None:
    """Train on a run's shards: `tokenmill train run RUN`, `tokenmill train --help`."""
    from trainer.__main__ import main

    raise typer.Exit(main(list(ctx.args)) or 0)
