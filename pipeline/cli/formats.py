"""`tokenmill shards export` and `tokenmill shards import`: token shards in the formats of other projects."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.base.files import replacing, sha256
from pipeline.base.humanize import plural, size
from pipeline.cli.errors import BadUsage, UserError, writing
from pipeline.cli.options import JsonOpt, QuietOpt, StoreOpt
from pipeline.cli.shard_sets import ShardsArg, opened

if TYPE_CHECKING:
    from tokenizer.load import Tokenizer

#: seconds between two lines of progress
PROGRESS_S = 10.0


class Format(StrEnum):
    """Formats of other projects, the keys of `FORMATS` in `tokenizer.export.export` and `tokenizer.imports.imports`."""

    ds = "ds"
    megatron = "megatron"
    olmo = "olmo"
    nanogpt = "nanogpt"
    parquet = "parquet"
    mds = "mds"
    litdata = "litdata"


FormatOpt = Annotated[Format, typer.Option(
    metavar="FORMAT", help="ds (datatrove, nanotron), megatron (Megatron-LM), olmo (OLMo-core, dolma), nanogpt (llm.c, "
                           "modded-nanogpt), parquet (a row per document), mds (MosaicML streaming), litdata "
                           "(litdata's TokensLoader).")]


def progress_printer(silent: bool) -> Callable[[int, int], None]:
    """Return a function that gets the bytes read and the bytes to read. It prints them to stderr every PROGRESS_S
    seconds, with the rate and the time left, unless it is `silent`."""
    began = reported = time.monotonic()

    def show_progress(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if silent or now - reported < PROGRESS_S:
            return
        reported = now
        rate = done / max(now - began, 1e-3)
        typer.echo(f"{size(done)} of {size(total)}, {size(rate)}/s, about {(total - done) / max(rate, 1):.0f} s left",
                   err=True)

    return show_progress


def export(shards: ShardsArg,
           format: FormatOpt,
           out: Annotated[str, typer.Option("--out", metavar="DIR", help="New folder for the files.")],
           drop_loss: Annotated[bool, typer.Option(
               "--drop-loss", help="Leave loss masks out: all tokens then count in the loss.")] = False,
           quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Write a shard set in the format of another project.

    Documents, tokens and their order stay as they are. A file whose bytes are those of a file of the shard set is a
    hard link to it if both are on one disk. Never change such a file: the shard set would change, too.

    \b
    Example:
      tokenmill shards export store/shards/web/split=train --format ds --out web-ds
    """
    from tokenizer.export.export import export as write

    if "://" in out:
        raise BadUsage(f"--out {out}: an export is written to a folder of this machine; copy it from there")
    shard_set = opened(shards)
    with writing(Path(out)):
        result = write(shard_set, format.value, Path(out), drop_loss, progress_printer(quiet or json_lines))
    if json_lines:
        typer.echo(json.dumps({"path": out, "format": format.value, **result._asdict()}))
    elif not quiet:
        typer.echo(f"{out}: {plural(result.documents, 'document')} of {result.tokens:,} tokens in "
                   f"{plural(result.files, 'file')} of {size(result.bytes)}, {size(result.linked)} of them hard links")


def import_files(path: Annotated[str, typer.Argument(metavar="PATH", help="File of the format, or folder of them.")],
                 format: FormatOpt,
                 tokenizer: Annotated[Path, typer.Option(
                     "--tokenizer", metavar="FILE", help="Tokenizer with which the tokens were made: tokenizer.json, a "
                                                         ".model, or a folder with one.")],
                 store: StoreOpt,
                 name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the new stream.")],
                 quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Turn token files of another project into a shard set.

    The set is STORE/shards/NAME/split=train. Documents, tokens, loss masks and their order stay as they are; each
    document must end in the EOS of the tokenizer.

    \b
    Example:
      tokenmill shards import web-ds --format ds --tokenizer tokenizer.json --store store --name web
    """
    from pipeline.recipe.values import checked_name
    from stages.document import document_id
    from tokenizer.imports.imports import import_tokens
    from tokenizer.imports.source import Coding
    from tokenizer.load import load_tokenizer

    for place in (path, store):
        if "://" in place:
            raise BadUsage(f"{place}: an import reads and writes on this machine; copy the files")
    try:
        checked_name(name)
    except ValueError as e:
        raise BadUsage(f"--name: {e}") from None
    coder = load_tokenizer(tokenizer)
    shards = Path(store) / "shards"
    with writing(shards / name, "--store"):
        coding = Coding(coder.sha256, coder.vocab_size, coder.eos)
        result = import_tokens(Path(path), format.value, coding, shards, name,
                               lambda file, number: document_id(name, file, "", number),
                               progress_printer(quiet or json_lines))
        keep_tokenizer(shards, coder)
    if json_lines:
        typer.echo(json.dumps({**result._asdict(), "path": str(result.path), "format": format.value}))
    elif not quiet:
        typer.echo(f"{result.path}: {plural(result.documents, 'document')} of {result.tokens:,} tokens in "
                   f"{plural(result.shards, 'shard')}")


def keep_tokenizer(shards: Path, tokenizer: Tokenizer) -> None:
    """Copy a tokenizer's file into the folder `shards` of a store, under the name that a run would give it. Commands
    that decode shards look for it there."""
    from tokenizer.load import file_contents

    target = shards / f"tokenizer-{tokenizer.sha256[:12]}.{'json' if tokenizer.kind == 'json' else 'model'}"
    if not target.exists():
        with replacing(target) as part:
            part.write_bytes(file_contents(Path(tokenizer.path), tokenizer.eos_token))
            if sha256(part) != tokenizer.sha256:
                raise UserError(f"--tokenizer {tokenizer.path}: changed during the import; copy the file with sha256 "
                                f"{tokenizer.sha256} to {target}")
