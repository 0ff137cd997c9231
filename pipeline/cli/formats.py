"""`tokenmill shards export` and `tokenmill shards import`: token shards in the formats of other projects."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.base.files import replacing, sha256
from pipeline.base.humanize import plural, size
from pipeline.cli.errors import BadUsage, UserError, writing
from pipeline.cli.options import JsonOpt, QuietOpt, StoreOpt, as_typed, resolve_run
from pipeline.cli.shard_sets import opened

if TYPE_CHECKING:
    from tokenizer.load import Tokenizer
    from tokenizer.mixture.curriculum import Curriculum
    from tokenizer.shards.rows import RowSet

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


def export(format: FormatOpt,
           out: Annotated[str, typer.Option("--out", metavar="DIR", help="New folder for the files.")],
           shards: Annotated[Path | None, typer.Argument(
               metavar="[SHARDS]", help="A shard set: STORE/shards/NAME/split=train. Not with --order.")] = None,
           order: Annotated[str | None, typer.Option(
               "--order", metavar="RUN", help="Write the samples of this run, in training order, instead of a shard "
                                              "set. Needs its rows: materialize RUN.")] = None,
           phase: Annotated[str | None, typer.Option(
               "--phase", metavar="PHASE", help="Only the samples of this phase. With --order.")] = None,
           samples: Annotated[str | None, typer.Option(
               "--samples", metavar="A:B", help="Only samples A to B - 1. With --order.")] = None,
           store: StoreOpt = "store",
           drop_loss: Annotated[bool, typer.Option(
               "--drop-loss", help="Leave loss masks out: all tokens then count in the loss.")] = False,
           quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Write a shard set, or the samples of a run, in the format of another project.

    Documents, tokens and their order stay as they are. With --order, each row is a sample of the training. A file whose
    bytes are those of a file of the store is a hard link to it if both are on one disk. Never change such a file: the
    store would change, too.

    \b
    Examples:
      tokenmill shards export store/shards/web/split=train --format ds --out web-ds
      tokenmill shards export --order fineweb-3f2a91c0 --phase stable --format mds --out stable-mds
    """
    from tokenizer.export.export import export as write
    from tokenizer.export.export import export_samples

    if "://" in out:
        raise BadUsage(f"--out {out}: an export is written to a folder of this machine; copy it from there")
    if (shards is None) == (order is None):
        raise BadUsage("SHARDS, --order: give the shard set or the run to export, one of both")
    show_progress, what = progress_printer(quiet or json_lines), "document" if order is None else "sample"
    if shards is not None:
        if option := next((option for option, value in (("--phase", phase), ("--samples", samples)) if value), None):
            raise BadUsage(f"{option}: chooses samples of a run; give the run with --order instead of SHARDS")
        shard_set = opened(shards)
        with writing(Path(out)):
            result = write(shard_set, format.value, Path(out), drop_loss, show_progress)
    elif order is not None:
        rows, curriculum = rows_of(order, store)
        first, stop = chosen(curriculum, phase, samples)
        with writing(Path(out)):
            result = export_samples(rows, curriculum, format.value, Path(out), first, stop, drop_loss, show_progress)
    if json_lines:
        figures = {f"{what}s" if key == "documents" else key: value for key, value in result._asdict().items()}
        typer.echo(json.dumps({"path": out, "format": format.value, **figures}))
    elif not quiet:
        typer.echo(f"{out}: {plural(result.documents, what)} of {result.tokens:,} tokens in "
                   f"{plural(result.files, 'file')} of {size(result.bytes)}, {size(result.linked)} of them hard links")


def rows_of(run: str, root: str) -> tuple[RowSet, Curriculum]:
    """Open the materialised rows of a run, and its curriculum. Raises BadUsage when the run has none."""
    from tokenizer.mixture.curriculum import Curriculum
    from tokenizer.shards.rows import MANIFEST, RowSet

    at, name = resolve_run(run, root)
    if at.local is None:
        raise BadUsage(f"--order {run}: is read on this machine; copy runs/{name} of the store")
    folder, path = f"runs/{name}/rows-bytes", f"runs/{name}/curriculum.json"
    for needed, remedy in ((path, "add `curriculum:` to its recipe and run it again"),
                           (f"{folder}/{MANIFEST}", f"run `{as_typed('materialize', name, at)}` first")):
        if not at.exists(needed):
            raise BadUsage(f"--order {run}: {at.at(needed)} does not exist; {remedy}")
    return RowSet(at.local / folder), Curriculum.loads(at.read(path), path)


def chosen(curriculum: Curriculum, phase: str | None, samples: str | None) -> tuple[int, int]:
    """Return the range [first, stop) of samples that --phase and --samples choose."""
    first, stop = 0, curriculum.samples
    if phase is not None:
        names = {spec.name: spec for spec in curriculum.phases}
        if phase not in names:
            raise BadUsage(f"--phase {phase}: the curriculum has no such phase, but {', '.join(names)}")
        first, stop = names[phase].start, names[phase].stop
    if samples is not None:
        if not (bounds := re.fullmatch(r"(\d{1,18}):(\d{1,18})", samples, re.ASCII)):
            raise BadUsage(f"--samples {samples}: is no range A:B of numbers, such as 0:1000")
        first, stop = max(first, int(bounds[1])), min(stop, int(bounds[2]))
        if first >= stop:
            raise BadUsage(f"--samples {samples}: no such samples; the run has {curriculum.samples:,}"
                           + (f", and phase {phase} those from {names[phase].start} to {names[phase].stop}"
                              if phase is not None else ""))
    return first, stop


def import_files(path: Annotated[str, typer.Argument(metavar="PATH", help="File of the format, or folder of them.")],
                 format: FormatOpt,
                 tokenizer: Annotated[Path, typer.Option(
                     "--tokenizer", metavar="FILE", help="Tokenizer with which the tokens were made: tokenizer.json, a "
                                                         ".model, or a folder with one.")],
                 store: StoreOpt,
                 name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the new stream.")],
                 val: Annotated[float, typer.Option(
                     "--val", min=0, max=0.5, metavar="SHARE", help="Share of documents held out for validation, in "
                                                                    "the set split=val.")] = 0,
                 quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Turn token files of another project into a shard set.

    The set is STORE/shards/NAME/split=train. Documents, tokens, loss masks and their order stay as they are; each
    document must end in the EOS of the tokenizer.

    \b
    Example:
      tokenmill shards import web-ds --format ds --tokenizer tokenizer.json --store store --name web
    """
    from pipeline.base.prf import below
    from pipeline.recipe.model import checked_name
    from pipeline.store.fs import Store
    from pipeline.store.log import Log
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
    # a run that writes shards of this name at the same moment would replace those of the import, so one of both waits
    with writing(shards / name, "--store"), contextlib.closing(Log.open(Store(store), run=f"import of {name}")):
        coding = Coding(coder.sha256, coder.vocab_size, coder.eos)
        result = import_tokens(Path(path), format.value, coding, shards, name,
                               lambda file, number: document_id(name, file, "", number),
                               progress_printer(quiet or json_lines),
                               is_held_out=(lambda id: below(0, "val", id, val)) if val else None)
        keep_tokenizer(shards, coder)
    if json_lines:
        typer.echo(json.dumps({**result._asdict(), "path": str(result.path), "format": format.value}))
    elif not quiet:
        typer.echo(f"{result.path}: {plural(result.documents, 'document')} of {result.tokens:,} tokens in "
                   f"{plural(result.shards, 'shard')}" + (f", and {plural(result.held_out, 'document')} held out" if val
                                                         else ""))


def keep_tokenizer(shards: Path, tokenizer: Tokenizer) -> None:
    """Copy a tokenizer's file into the folder `shards` of a store, under the name that a run would give it. Commands
    that decode shards look for it there."""
    target = shards / f"tokenizer-{tokenizer.sha256[:12]}.{'json' if tokenizer.kind == 'json' else 'model'}"
    if not target.exists():
        with replacing(target) as part:
            shutil.copyfile(tokenizer.path, part)
            if sha256(part) != tokenizer.sha256:
                raise UserError(f"--tokenizer {tokenizer.path}: changed during the import; copy the file with sha256 "
                                f"{tokenizer.sha256} to {target}")
