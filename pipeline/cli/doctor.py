"""`tokenmill doctor`: checks whether this machine, or this cluster, can run a recipe."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pipeline.cli.options import AddressOpt, InsecureOpt, JsonOpt, check_root

COLOR = {"green": "green", "yellow": "yellow", "red": "red"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(address: AddressOpt = None,
           store: Annotated[str | None, typer.Option("--store", envvar="TOKENMILL_STORE",
                                                     help="Check this store as well.")] = None,
           insecure_local: InsecureOpt = False, json_lines: JsonOpt = False) -> None:
    """Check this machine, or every node of a cluster, before a run.

    Checks open files, shared memory, disk space and inodes, memory, clocks, models and GPUs, and whether results can be
    committed to a store. On a cluster it also checks that all nodes run the same code and versions, and that the
    cluster demands a token. The exit code is 1 when a check fails (is red).

    \b
    Examples:
      tokenmill doctor --store store
      tokenmill doctor --address auto --store s3://bucket/store
    """
    from pipeline.cluster.connect import gcs_of
    from pipeline.cluster.doctor import diagnose

    if store is not None:
        check_root(store)
    if address is not None:
        address = gcs_of(address)
    document = diagnose(store, address, insecure_local)
    if json_lines:
        typer.echo(json.dumps(document))
    else:
        show(document)
    raise typer.Exit(1 if document["worst"] == "red" else 0)


def show(document: dict[str, Any]) -> None:
    """Print the results of the checks of a machine or cluster, one line for each check. If a check has a remedy, it is
    printed on the next line."""
    places = list(dict.fromkeys(c["where"] for c in document["checks"]))
    width = max(len(c["name"]) for c in document["checks"]) + 2
    for place in places:
        typer.echo(place)
        for check in (c for c in document["checks"] if c["where"] == place):
            level = typer.style(f"{check['level']:<8}", fg=COLOR[check["level"]])
            typer.echo(f"  {level}{check['name']:<{width}}{check['said']}")
            if check["remedy"]:
                typer.echo(f"  {'':<8}{'':<{width}}→ {check['remedy']}")
    counts = [f"{n} {level}" for level in ("red", "yellow", "green")
              if (n := sum(c["level"] == level for c in document["checks"]))]
    typer.echo(", ".join(counts))
