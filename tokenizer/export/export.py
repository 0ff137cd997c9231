"""Writes a shard set, document by document, or the samples of a training in their order, in the format of another
project. Tokens stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizer.export.ds import DsWriter
from tokenizer.export.format import ExportFormat
from tokenizer.export.litdata import LitDataWriter
from tokenizer.export.mds import MdsWriter
from tokenizer.export.megatron import MegatronWriter
from tokenizer.export.nanogpt import NanoGptWriter
from tokenizer.export.olmo import OlmoWriter
from tokenizer.export.packed import PackedSamples
from tokenizer.export.parquet import ParquetWriter
from tokenizer.export.samples import ExportSamples, TrainingSamples
from tokenizer.export.source import ExportError, ExportSource
from tokenizer.export.target import OpenTarget, contents_of, opened
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.rows import RowSet

FORMATS: Mapping[str, ExportFormat] = {
    "ds": DsWriter(), "megatron": MegatronWriter(), "olmo": OlmoWriter(), "nanogpt": NanoGptWriter(),
    "parquet": ParquetWriter(), "mds": MdsWriter(), "litdata": LitDataWriter()}


class Exported(NamedTuple):
    """What an export has written: the numbers of files, bytes, documents or samples, and tokens."""

    files: int
    bytes: int
    linked: int                   # bytes of the files that are hard links to files of the shard set
    documents: int                # or the samples of an export in training order
    tokens: int


def export(shards: ShardSet, name: str, out: Path | OpenTarget, drop_loss: bool = False,
           progress: Callable[[int, int], None] = lambda done, total: None) -> Exported:
    """Write the documents of a shard set in the format `name`.

    `out` is a new folder for the files. It can also be a function that opens another place for them, such as object
    storage. With `drop_loss`, loss masks are left out, so that all tokens count in the loss. `progress` gets the number
    of bytes read so far and of all bytes to read.

    Raises ExportError if the format cannot hold the set, and ShardError if a file of the set is damaged. After an
    error, the folder `out` is as it was before."""
    done = 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, source.bytes())

    source, format = ExportSource(shards, drop_loss, read), FORMATS[name]
    if not source.numbers:
        raise ExportError(f"{shards.folder}: the shard set has no documents, so there is nothing to export")
    if source.masked:
        check_holds_loss(name, shards.folder)
    with opened(out, contents_of(name, source.masked, shards.manifest.dumps())) as target:
        format.write(source, target)
    return Exported(target.files, target.bytes, target.linked, shards.manifest.documents, shards.manifest.tokens)


def export_samples(rows: RowSet, curriculum: Curriculum, name: str, out: Path | OpenTarget, first: int, stop: int,
                   drop_loss: bool = False,
                   progress: Callable[[int, int], None] = lambda done, total: None) -> Exported:
    """Write samples [first, stop) of a training in the format `name`. `rows` are the materialised rows of the training
    (its samples, written to files), and `curriculum` is its curriculum. The other arguments and the errors are
    those of `export`."""
    done = 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, samples.tokens * samples.dtype.itemsize)

    samples = TrainingSamples(rows, curriculum, first, stop, drop_loss, read)
    return write_samples(samples, name, out)


def export_rows(shards: ShardSet, name: str, out: Path | OpenTarget, drop_loss: bool = False,
                progress: Callable[[int, int], None] = lambda done, total: None) -> Exported:
    """Write the packed rows of a shard set (training samples of whole documents) in the format `name`, in the order of
    the set. The other arguments and the errors are those of `export`."""
    done = 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, samples.tokens * samples.dtype.itemsize)

    samples = PackedSamples(shards, drop_loss, read)
    return write_samples(samples, name, out)


def write_samples(samples: ExportSamples, name: str, out: Path | OpenTarget) -> Exported:
    if samples.masked:
        check_holds_loss(name, samples.folder)
    contents = contents_of(name, samples.masked, samples.version, *samples.streams, samples.tokenizer.sha256)
    with opened(out, contents) as target:
        FORMATS[name].write_samples(samples, target)
    return Exported(target.files, target.bytes, target.linked, len(samples), samples.tokens)


def check_holds_loss(name: str, folder: Path) -> None:
    """Raise ExportError if the format `name` has no place for loss masks, which say which tokens count in the loss.
    `folder` is where the tokens with such masks are, for the message."""
    if not FORMATS[name].holds_loss:
        holding = ", ".join(other for other in FORMATS if FORMATS[other].holds_loss)
        raise ExportError(f"{folder}: the tokens have loss masks, which --format {name} cannot hold; choose one of "
                          f"{holding}, or add --drop-loss, with which all tokens count in the loss")
