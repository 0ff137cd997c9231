"""`tokenmill shards export`, `import` and `decode`: exchange token shards with other projects, and turn their tokens
back into texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.base.humanize import plural, size
from pipeline.cli.errors import BadUsage, UserError, writing
from pipeline.cli.incomplete import is_url
from pipeline.cli.options import JsonOpt, QuietOpt, StoreOpt, as_typed, check_root, resolve_run
from pipeline.cli.shard_sets import note_export, note_in, opened
from pipeline.cli.stored_files import copies_of, token_files
from pipeline.store.fs import Store

if TYPE_CHECKING:
    from tokenizer.export.target import OpenTarget, Target
    from tokenizer.load import Tokenizer
    from tokenizer.mixture.curriculum import Curriculum
    from tokenizer.shards.reader import ShardSet
    from tokenizer.shards.rows import RowSet

#: seconds between two lines of progress
PROGRESS_S = 10.0


class TokenFormat(StrEnum):
    """The values of --format: the token formats of other projects. The names are those in `FORMATS` of
    `tokenizer.export.export` and `tokenizer.imports.imports`."""

    ds = "ds"
    megatron = "megatron"
    olmo = "olmo"
    nanogpt = "nanogpt"
    parquet = "parquet"
    mds = "mds"
    litdata = "litdata"


FormatOpt = Annotated[TokenFormat, typer.Option(
    metavar="FORMAT", help="ds (datatrove, nanotron), megatron (Megatron-LM), olmo (OLMo-core, dolma), nanogpt (llm.c, "
                           "modded-nanogpt), parquet (a row per document), mds (MosaicML streaming), litdata "
                           "(litdata's TokensLoader).")]


PathArg = Annotated[str, typer.Argument(
    metavar="PATH", help="File of the format, or folder of them, or the URL of a folder.")]
TokenizerOpt = Annotated[Path, typer.Option(
    "--tokenizer", metavar="FILE", help="Tokenizer with which the tokens were made: tokenizer.json, a .model, or a "
                                        "folder with one.")]


def progress_printer(silent: bool) -> Callable[[int, int], None]:
    """Return a function that prints the progress of reading files to stderr. It is called with the number of bytes read
    so far and the total, and prints them with the rate and the time left. It prints at most once in PROGRESS_S seconds,
    and nothing if `silent`."""
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
           out: Annotated[str, typer.Option("--out", metavar="DIR", help="New folder, or URL, for the files.")],
           shards: Annotated[str | None, typer.Argument(
               metavar="[SHARDS]", help="A shard set, or its URL: STORE/shards/NAME/split=train. Not with "
                                        "--order.")] = None,
           order: Annotated[str | None, typer.Option(
               "--order", metavar="RUN", help="Write the samples of this run, in training order, instead of a shard "
                                              "set. `tokenmill materialize RUN` must have written them.")] = None,
           phase: Annotated[str | None, typer.Option(
               "--phase", metavar="PHASE", help="Only the samples of this phase. With --order.")] = None,
           samples: Annotated[str | None, typer.Option(
               "--samples", metavar="A:B", help="Only samples A to B - 1. With --order.")] = None,
           rows: Annotated[bool, typer.Option(
               "--rows", help="Write the packed rows of SHARDS, in the order of the set, instead of its "
                              "documents.")] = False,
           store: StoreOpt = "store",
           drop_loss: Annotated[bool, typer.Option(
               "--drop-loss", help="Leave loss masks out: all tokens then count in the loss.")] = False,
           quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Write a shard set, or the samples of a run, in the format of another project.

    Documents, tokens and their order stay as they are. With --order, each row is a sample of the training. An exported
    file that has the same bytes as a file of the store is a hard link to it, if both are on one disk. Never change such
    a file: the store would change, too.

    \b
    Examples:
      tokenmill shards export store/shards/web/split=train --format ds --out web-ds
      tokenmill shards export --order fineweb-3f2a91c0 --phase stable --format mds --out stable-mds
    """
    from tokenizer.export.export import export as write
    from tokenizer.export.export import export_rows, export_samples

    if (shards is None) == (order is None):
        raise BadUsage("SHARDS, --order: give the shard set or the run to export, one of both")
    if rows and shards is None:
        raise BadUsage("--rows: is for the packed rows of SHARDS; the samples of --order are rows in any case")
    show_progress, what = progress_printer(quiet or json_lines), "sample" if order is not None or rows else "document"
    with contextlib.ExitStack() as stack:
        if shards is not None:
            if option := next((name for name, value in (("--phase", phase), ("--samples", samples)) if value), None):
                raise BadUsage(f"{option}: chooses samples of a run; give the run with --order instead of SHARDS")
            shard_set = stack.enter_context(set_at(shards))
            place = stack.enter_context(exported(out, "--out", partial(note_export, shards, out)))
            result = (export_rows if rows else write)(shard_set, format.value, place, drop_loss, show_progress)
        elif order is not None:
            row_set, curriculum = stack.enter_context(rows_of(order, store))
            first, stop = chosen(curriculum, phase, samples)
            place = stack.enter_context(exported(out, "--out", partial(note_in, *resolve_run(order, store), out)))
            result = export_samples(row_set, curriculum, format.value, place, first, stop, drop_loss, show_progress)
    if json_lines:
        figures = {f"{what}s" if key == "documents" else key: value for key, value in result._asdict().items()}
        typer.echo(json.dumps({"path": out, "format": format.value, **figures}))
    elif not quiet:
        typer.echo(f"{out}: {plural(result.documents, what)} of {result.tokens:,} tokens in "
                   f"{plural(result.files, 'file')} of {size(result.bytes)}, {size(result.linked)} of them hard links")


@contextlib.contextmanager
def exported(out: str, option: str, note: Callable[[], None] = lambda: None) -> Iterator[Path | OpenTarget]:
    """A context manager for an export of token files to the new folder or URL `out`, the value of the command-line
    option `option`. It yields the path of the folder or, if `out` is a URL, a function that opens the folder of object
    storage for writing.

    `note` is called as soon as `out` may hold exported tokens. A local folder appears only at the end of the export, so
    `note` is called then. In object storage, objects stay even if the process is killed, so `note` is called before the
    first object is written."""
    if is_url(out):
        yield partial(noted, note, out, option)
        return
    with writing(Path(out), option):
        yield Path(out)
    note()


@contextlib.contextmanager
def noted(note: Callable[[], None], url: str, option: str, contents: str) -> Iterator[Target]:
    """A context manager for writing files to a folder of object storage, like `streamed`. In addition, `note` is called
    when the folder is open, before the first file is written."""
    from pipeline.cli.streamed import streamed

    with streamed(url, option, contents) as target:
        note()
        yield target


@contextlib.contextmanager
def set_at(shards: str) -> Iterator[ShardSet]:
    """A context manager for reading the shard set in the folder or at the URL `shards`. It yields the shard set. Raises
    ShardError when there is none."""
    from pipeline.store.streamed_set import StreamedSet

    if is_url(shards):
        check_root(shards, "SHARDS")
        store = Store(shards)
        if store.local is None:
            with copies_of(store) as folder, contextlib.closing(StreamedSet(store, folder)) as shard_set:
                yield shard_set
            return
        shards = str(store.local)
    yield opened(Path(shards))


@contextlib.contextmanager
def rows_of(run: str, root: str) -> Iterator[tuple[RowSet, Curriculum]]:
    """A context manager for reading the training samples of a run that `tokenmill materialize` has written (rows). It
    yields the rows and the run's curriculum. Raises BadUsage when the run has no curriculum or no such rows."""
    from pipeline.store.streamed_set import StreamedRows
    from tokenizer.mixture.curriculum import Curriculum
    from tokenizer.shards.rows import MANIFEST, RowSet

    at, name = resolve_run(run, root)
    folder, path = f"runs/{name}/rows-bytes", f"runs/{name}/curriculum.json"
    for needed, remedy in ((path, "add `curriculum:` to its recipe and run it again"),
                           (f"{folder}/{MANIFEST}", f"run `{as_typed('materialize', name, at)}` first")):
        if not at.exists(needed):
            raise BadUsage(f"--order {run}: {at.at(needed)} does not exist; {remedy}")
    curriculum = Curriculum.loads(at.read(path), path)
    if at.local is not None:
        yield RowSet(at.local / folder), curriculum
        return
    rows = Store(f"{at.root}/{folder}")
    with copies_of(rows) as copies:
        yield StreamedRows(rows, copies), curriculum


def chosen(curriculum: Curriculum, phase: str | None, samples: str | None) -> tuple[int, int]:
    """Return the range [first, stop) of the training samples that are in both --phase and --samples. An option that is
    None does not limit the range. A range that ends after the last sample is cut there. Raises BadUsage for an unknown
    phase, for a text that is no range, and when no sample is left."""
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


def import_files(path: PathArg, format: FormatOpt, tokenizer: TokenizerOpt, store: StoreOpt,
                 name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the new stream.")],
                 val: Annotated[float, typer.Option(
                     "--val", min=0, max=0.5, metavar="SHARE", help="Share of documents held out for validation, in "
                                                                    "the set split=val; not with --sequence.")] = 0,
                 sequence: Annotated[int, typer.Option(
                     "--sequence", min=0, metavar="L", help="The files have rows of L + 1 tokens (training samples), "
                                                            "as `shards export --order` and `--rows` write them, "
                                                            "instead of documents.")] = 0,
                 quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Turn token files of another project into a shard set.

    The set is STORE/shards/NAME/split=train. Documents, tokens, loss masks and their order stay as they are; each
    document must end in the EOS of the tokenizer.

    \b
    Example:
      tokenmill shards import web-ds --format ds --tokenizer tokenizer.json --store store --name web
    """
    from pipeline.base.prf import below
    from pipeline.recipe.values import checked_name
    from pipeline.store.lease import LeaseHeld
    from pipeline.store.log import Log
    from stages.document import document_id
    from tokenizer.imports.imports import import_tokens
    from tokenizer.imports.source import Coding
    from tokenizer.load import load_tokenizer

    try:
        checked_name(name)
    except ValueError as e:
        raise BadUsage(f"--name: {e}") from None
    if sequence and val:
        raise BadUsage("--val: does not hold out rows (--sequence); leave it out, and evaluate on another set")
    check_root(store)
    coder, at = load_tokenizer(tokenizer), Store(store)
    place = f"{at.root}/shards/{name}/split=train"
    with contextlib.ExitStack() as stack:
        if at.local is not None:
            stack.enter_context(writing(at.local / "shards" / name, "--store"))
        # a run that writes shards of this name at the same moment would replace those of the import: one of both waits
        try:
            stack.enter_context(contextlib.closing(Log.open(at, run=f"import of {name}")))
        except LeaseHeld as e:
            raise LeaseHeld(f"{str(e).partition(';')[0]}; wait until it has ended, or import into another "
                            f"--store") from None
        source, stored = stack.enter_context(token_files(path, "PATH"))
        result = import_tokens(source, format.value, Coding(coder.sha256, coder.vocab_size, coder.eos), Path(place),
                               name, lambda file, number: document_id(name, file, "", number),
                               progress_printer(quiet or json_lines),
                               is_held_out=(lambda id: below(0, "val", id, val)) if val else None, sequence=sequence,
                               stored=stored, place=partial(new_stream, at, name, coder, val))
    if json_lines:
        typer.echo(json.dumps({**result._asdict(), "path": place, "format": format.value}))
    elif not quiet:
        typer.echo(f"{place}: {plural(result.documents, 'document')} of {result.tokens:,} tokens in "
                   f"{plural(result.shards, 'shard')}" + (f", and {plural(result.held_out, 'document')} held out" if val
                                                         else f", in {plural(result.rows, 'row')}" if sequence
                                                         else ""))


def decode(path: PathArg, format: FormatOpt, tokenizer: TokenizerOpt,
           out: Annotated[str, typer.Option("--out", metavar="DIR", help="New folder, or URL, for the texts.")],
           quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Turn token files of another project back into texts, as JSON Lines.

    A recipe reads them with `read: jsonl`, so that its filters and its tokenizer see the documents again. Each document
    must end in the EOS of the tokenizer.

    \b
    Example:
      tokenmill shards decode old-megatron --format megatron --tokenizer old/tokenizer.json --out old-texts
    """
    from tokenizer.imports.decode import decode_tokens
    from tokenizer.imports.source import Coding
    from tokenizer.load import load_tokenizer

    coder = load_tokenizer(tokenizer)
    with contextlib.ExitStack() as stack:
        source, stored = stack.enter_context(token_files(path, "PATH"))
        place = stack.enter_context(exported(out, "--out"))
        result = decode_tokens(source, format.value, Coding(coder.sha256, coder.vocab_size, coder.eos), coder.decode,
                               place, progress_printer(quiet or json_lines), unknown=coder.unknown, stored=stored)
    if json_lines:
        typer.echo(json.dumps({"path": out, "format": format.value, **result._asdict()}))
    elif not quiet:
        typer.echo(f"{out}: {plural(result.documents, 'document')} of {result.tokens:,} tokens in "
                   f"{plural(result.files, 'file')} of {size(result.bytes)}, {result.damaged:,} of them with bytes "
                   f"that are no UTF-8")


@contextlib.contextmanager
def new_stream(store: Store, name: str, tokenizer: Tokenizer, val: float, contents: str) -> Iterator[Target]:
    """A context manager for writing the shard sets of the new stream `name`. The sets become visible at the end, after
    the file of their tokenizer, so a killed import leaves no set without its tokenizer. In object storage, the objects
    of a killed import stay. A later import with the same `contents` and `val` (share of held-out documents) completes
    them."""
    from pipeline.cli.streamed import streamed
    from tokenizer.export.target import FolderTarget, appearing

    option = f"--name {name}"
    with contextlib.ExitStack() as stack:
        if store.local is None:
            target = stack.enter_context(streamed(f"{store.root}/shards/{name}", option, f"{contents}:{val}"))
        else:
            target = FolderTarget(stack.enter_context(appearing(store.local / "shards" / name, option)))
        yield target
        keep_tokenizer(store, tokenizer)


def keep_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    """Copy a tokenizer's file into the folder `shards` of a store, under the name that a run would give it. Commands
    that decode shards look for it there. Raises UserError if the file has changed since the tokenizer was loaded."""
    from tokenizer.load import file_contents

    target = f"shards/tokenizer-{tokenizer.sha256[:12]}.{'json' if tokenizer.kind == 'json' else 'model'}"
    if not store.exists(target):
        data = file_contents(Path(tokenizer.path), tokenizer.eos_token)
        if hashlib.sha256(data).hexdigest() != tokenizer.sha256:
            raise UserError(f"--tokenizer {tokenizer.path}: changed during the import; copy the file with sha256 "
                            f"{tokenizer.sha256} to {store.at(target)}")
        store.write(target, data, durable=True)
