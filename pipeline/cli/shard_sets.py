"""Functions for commands with the argument SHARDS, which names a shard set: the folder STORE/shards/NAME/split=SPLIT.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage
from pipeline.store.copies import note_copy
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store

if TYPE_CHECKING:
    from tokenizer.shards.reader import ShardSet

ShardsArg = Annotated[Path, typer.Argument(metavar="SHARDS", help="A shard set: STORE/shards/NAME/split=train.")]


def opened(shards: Path) -> ShardSet:
    """Open the shard set in a folder. Raises BadUsage when the folder is no shard set itself but has subfolders that
    are; the message lists them."""
    from tokenizer.shards.layout import MANIFEST
    from tokenizer.shards.reader import ShardSet

    if shards.is_dir() and not (shards / MANIFEST).exists():
        below = sorted(str(p.parent) for p in shards.glob(f"**/{MANIFEST}"))
        if below:
            raise BadUsage(f"{shards} is no shard set, but holds some: {', '.join(below[:6])}")
    return ShardSet(shards)


def note_export(shards: str, out: str) -> None:
    """Note in the store of a shard set that the folder or URL `out` holds its tokens, so that a takedown can name
    `out`. Nothing is noted if `shards` is not inside a store. If the store cannot be written, a warning is printed, and
    the export continues."""
    place = shards.rstrip("/") if "://" in shards else os.path.abspath(shards)
    root, folder = place[:max(0, place.rfind("/shards/"))], place[place.rfind("/shards/") + 1:]
    if not root or not re.fullmatch(r"shards/[^/]+/split=(train|val)(/[^/]+\.json)?", folder):
        return
    note_in(Store(root), "/".join(folder.split("/")[:3]), out)


def note_in(store: Store, of: str, out: str) -> None:
    """Note in a store that the folder or URL `out` holds tokens of the shard set `of`, so that a takedown can name
    `out`. Does nothing if `store` has no commit log, because it is then only a folder. If the store cannot be read or
    written, a warning is printed."""
    try:
        if next(iter(store.list("log")), None) is not None:
            note_copy(store, "tokens", of, out)
    except (StoreError, OSError) as e:
        typer.echo(visible(f"warning: a takedown will not name {out}, because {store.root} cannot be read or written: "
                           f"{e}"), err=True)
