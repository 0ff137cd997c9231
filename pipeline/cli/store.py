"""`tokenmill store verify` compares the files of a store with their recorded hashes. `tokenmill store gc` removes
results that no run names."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from pipeline.base.visible import visible
from pipeline.cli.errors import UserError
from pipeline.cli.options import JsonOpt, QuietOpt, StoreOpt, TakeoverOpt, check_root
from pipeline.store.fs import Store

#: seconds between two lines of progress
PROGRESS_S = 10.0


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Look after a store: verify its bytes, remove what no run names.")
    group.command("verify")(verify)
    group.command("gc")(gc)
    app.add_typer(group, name="store")


def verify(store: StoreOpt,
           repair: Annotated[bool, typer.Option("--repair", help="Retire records of damaged files and remove damaged "
                                                                 "copies; the next run recreates them.")] = False,
           takeover: TakeoverOpt = False, quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Read the files of a store, and compare them with the hashes in the store's records.

    The command reads the files that tasks wrote, lists of task arguments, published folders, shard sets, and the log
    with its snapshots. It reads neither runs/, which each run writes anew, nor checkpoints, which
    `tokenmill train verify --checkpoint` reads. It continues where an interrupted verification stopped. The exit code
    is 1 when a file is damaged and was not repaired.

    \b
    Examples:
      tokenmill store verify --store corpus
      tokenmill store verify --repair --store corpus && tokenmill run recipe.yaml --store corpus
    """
    from pipeline.store.log import Log
    from pipeline.store.verify import Repaired, Verified, verify_store
    from pipeline.store.verify import repair as mend

    check_root(store)
    at = Store(store)
    began = reported = time.monotonic()

    def show_progress(done: Verified, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if quiet or json_lines or now - reported < PROGRESS_S:
            return
        reported = now
        rate = done.bytes / max(now - began, 1e-3)
        remaining = f", about {max(0, total - done.bytes) / max(rate, 1):.0f} s left" if done.bytes < total else ""
        typer.echo(f"{done.files:,} files, {done.bytes / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s, "
                   f"{len(done.damaged)} damaged{remaining}", err=True)

    log = Log.open(at, run="store verify", takeover=takeover) if repair else Log.read(at)
    try:
        done = verify_store(at, log, show_progress)
        mended = mend(at, log, done.damaged) if isinstance(log, Log) else Repaired(0, 0, 0, [], [])
    finally:
        if isinstance(log, Log):
            log.close()
    if json_lines:
        typer.echo(json.dumps({"files": done.files, "bytes": done.bytes, "damaged": done.damaged,
                               **mended._asdict()}))
    elif not quiet:
        for path, why in sorted(done.damaged.items()):
            typer.echo(visible(f"{path} {why}"))
        typer.echo(f"{done.files:,} files, {done.bytes:,} bytes read: {len(done.damaged)} damaged or gone")
    if done.damaged and not repair:
        raise UserError(f"{store}: {len(done.damaged)} files are damaged or gone; run `tokenmill store verify --repair "
                        f"--store {store}`, then the recipe again")
    if mended.lost:
        raise UserError(f"{store}: {mended.lost[0]} is damaged, and neither segments nor other packs of the log hold "
                        f"what it held; restore it from a copy, or start a new --store")
    if mended.imported:
        raise UserError(f"{store}: {mended.imported[0]} is damaged and was imported, so no run can write it again; "
                        f"restore it from a copy, or import the files again under another --name")
    if done.damaged and not (quiet or json_lines):
        typer.echo(f"{mended.restored} files of the log restored, {mended.retired} records retired, {mended.removed} "
                   f"copies removed: run the recipe again to make them anew", file=sys.stderr)


def gc(store: StoreOpt,
       dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
       takeover: TakeoverOpt = False, json_lines: JsonOpt = False) -> None:
    """Remove results that no run names, and files of the store's log that a snapshot replaces.

    A result that no run names comes from a recipe that was changed, or from a run whose folder was deleted. Published
    datasets and shards are kept. A run that needs a removed result computes it again. A segment (file) of the
    log is removed if a snapshot holds its records; the snapshot is verified first.

    \b
    Examples:
      tokenmill store gc --dry-run --store corpus
      rm -r corpus/runs/old-1234abcd && tokenmill store gc --store corpus
    """
    from pipeline.store.garbage import packed_segments, remove_packed_segments, remove_unnamed, unnamed
    from pipeline.store.log import Log

    check_root(store)
    at = Store(store)
    if dry_run:
        view = Log.read(at)
        what, _ = unnamed(at, view)
        segments = len(packed_segments(at, view.segments + 1))
    else:
        with Log.open(at, run="store gc", takeover=takeover) as log:
            what = remove_unnamed(at, log)
            segments = remove_packed_segments(log)
    if json_lines:
        typer.echo(json.dumps({"records": what.records, "files": what.files, "bytes": what.bytes,
                               "segments": segments, "removed": not dry_run}))
    else:
        typer.echo(f"{what.records:,} records, {what.files:,} files, {what.bytes:,} bytes, {segments:,} segments of "
                   f"the log {'would be' if dry_run else 'were'} removed")
