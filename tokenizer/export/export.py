"""Writes a shard set in the format of another project, document by document and with its tokens unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizer.export.ds import DsWriter
from tokenizer.export.format import Format
from tokenizer.export.litdata import LitDataWriter
from tokenizer.export.mds import MdsWriter
from tokenizer.export.megatron import MegatronWriter
from tokenizer.export.nanogpt import NanoGptWriter
from tokenizer.export.olmo import OlmoWriter
from tokenizer.export.parquet import ParquetWriter
from tokenizer.export.source import ExportError, Source
from tokenizer.export.target import Target, appearing
from tokenizer.shards.reader import ShardSet

FORMATS: Mapping[str, Format] = {
    "ds": DsWriter(), "megatron": MegatronWriter(), "olmo": OlmoWriter(), "nanogpt": NanoGptWriter(),
    "parquet": ParquetWriter(), "mds": MdsWriter(), "litdata": LitDataWriter()}


class Exported(NamedTuple):
    """What an export has written."""

    files: int
    bytes: int
    linked: int                   # bytes of the files that are hard links to files of the shard set
    documents: int
    tokens: int


def export(shards: ShardSet, name: str, out: Path, drop_loss: bool = False,
           progress: Callable[[int, int], None] = lambda done, total: None) -> Exported:
    """Write a shard set to the new folder `out` in the format `name`. With `drop_loss`, loss masks are left out.
    `progress` gets the bytes read and the bytes to read. Raises ExportError if the format cannot hold the set, and
    ShardError if a file of the set is damaged; then `out` does not exist."""
    done = 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, source.bytes())

    source, format = Source(shards, drop_loss, read), FORMATS[name]
    if not source.numbers:
        raise ExportError(f"{shards.folder}: the shard set has no documents, so there is nothing to export")
    if source.masked and not format.holds_loss:
        holding = ", ".join(other for other in FORMATS if FORMATS[other].holds_loss)
        raise ExportError(f"{shards.folder}: the set has loss masks, which --format {name} cannot hold; choose one of "
                          f"{holding}, or add --drop-loss, with which all tokens count in the loss")
    with appearing(out, f"--out {out}") as folder:
        target = Target(folder)
        format.write(source, target)
    return Exported(target.files, target.bytes, target.linked, shards.manifest.documents, shards.manifest.tokens)
