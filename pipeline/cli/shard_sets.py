"""The argument SHARDS of commands that read a shard set: the folder STORE/shards/NAME/split=SPLIT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.errors import BadUsage

if TYPE_CHECKING:
    from tokenizer.shards.reader import ShardSet

ShardsArg = Annotated[Path, typer.Argument(metavar="SHARDS", help="A shard set: STORE/shards/NAME/split=train.")]


def opened(shards: Path) -> ShardSet:
    """Open the shard set in a folder. Raises BadUsage when the folder is no shard set itself but has shard sets below
    it; the message lists them."""
    from tokenizer.shards.layout import MANIFEST
    from tokenizer.shards.reader import ShardSet

    if shards.is_dir() and not (shards / MANIFEST).exists():
        below = sorted(str(p.parent) for p in shards.glob(f"**/{MANIFEST}"))
        if below:
            raise BadUsage(f"{shards} is no shard set, but holds some: {', '.join(below[:6])}")
    return ShardSet(shards)
