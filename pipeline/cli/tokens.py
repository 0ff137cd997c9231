"""`tokenmill tokenizer …` and `tokenmill shards …`: train and evaluate tokenizers; inspect, export and import token
shards."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.base.files import replacing, sha256
from pipeline.base.humanize import plural, size
from pipeline.base.visible import json_text, visible
from pipeline.cli.errors import BadUsage, UserError, writing
from pipeline.cli.options import CharsOpt, JsonOpt, LimitOpt, QuietOpt, StoreOpt
from pipeline.cli.texts import texts

if TYPE_CHECKING:
    from tokenizer.load import Tokenizer
    from tokenizer.shards.reader import ShardSet

ShardsArg = Annotated[Path, typer.Argument(metavar="SHARDS", help="A shard set: STORE/shards/NAME/split=train.")]
FilesArg = Annotated[list[Path], typer.Argument(
    metavar="FILES...", help="Parquet or text files, or folders of them, say STORE/datasets/NAME.")]

#: seconds between two lines of progress
PROGRESS_S = 10.0


class Kind(StrEnum):
    """Kinds of tokenizers, as in a recipe."""

    bpe = "bpe"
    sentencepiece = "sentencepiece"


class Model(StrEnum):
    """Models of SentencePiece, as in a recipe."""

    unigram = "unigram"
    bpe = "bpe"


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


def register(app: typer.Typer) -> None:
    tokenizer = typer.Typer(help="Train and judge tokenizers.", no_args_is_help=True, rich_markup_mode=None)
    tokenizer.command("train")(train)
    tokenizer.command("eval")(evaluate)
    app.add_typer(tokenizer, name="tokenizer")
    shards = typer.Typer(help="Look into token shards, export and import them.", no_args_is_help=True,
                         rich_markup_mode=None)
    for name, command in (("verify", verify), ("head", head), ("stats", stats), ("find", find), ("export", export),
                          ("import", import_files)):
        shards.command(name)(command)
    app.add_typer(shards, name="shards")


def train(files: FilesArg,
          out: Annotated[Path, typer.Option("--out", metavar="FILE",
                                            help="tokenizer.json (bpe), or a .model (sentencepiece).")],
          vocab: Annotated[int, typer.Option(min=257, metavar="N", help="Number of tokens, 257 or more.")] = 32000,
          kind: Annotated[Kind, typer.Option(help="Byte-level BPE, or SentencePiece.")] = Kind.bpe,
          model: Annotated[Model, typer.Option(
              help="Algorithm of SentencePiece, for --kind sentencepiece.")] = Model.unigram,
          json_lines: JsonOpt = False) -> None:
    """Train a tokenizer on texts.

    The tokenizer is a byte-level BPE or a SentencePiece model. Equal texts give equal files.

    \b
    Examples:
      tokenmill tokenizer train store/datasets/deduped --vocab 32000 --out tokenizer.json
      tokenmill tokenizer train texts/ --kind sentencepiece --model unigram --vocab 8000 --out spm.model
    """
    from tokenizer.load import load_tokenizer
    from tokenizer.train import train_bpe, train_sentencepiece

    suffix = ".json" if kind is Kind.bpe else ".model"
    if out.suffix != suffix:
        raise BadUsage(f"--out {out}: a tokenizer of kind {kind.value} is a {suffix} file")
    if model is Model.bpe and kind is Kind.bpe:
        raise BadUsage("--model is SentencePiece's; leave it out, or add --kind sentencepiece")
    with writing(out), replacing(out) as part:       # whoever loads it meanwhile gets the old or the new file
        if kind is Kind.bpe:
            train_bpe(texts(files), vocab, part)
        else:
            train_sentencepiece(texts(files), vocab, part, model.value)
    tokenizer = load_tokenizer(out)
    if json_lines:
        typer.echo(json.dumps({"path": str(out), "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos,
                               "sha256": tokenizer.sha256}))
    else:
        typer.echo(f"{out}: {tokenizer.vocab_size:,} tokens")


def evaluate(tokenizer: Annotated[Path, typer.Argument(metavar="TOKENIZER",
                                                       help="tokenizer.json, a .model, or a folder with one.")],
             files: FilesArg, json_lines: JsonOpt = False) -> None:
    """Judge a tokenizer on texts.

    Prints, for each of FILES, bytes per token, tokens per word, the share of words split into several tokens, and the
    number of texts that encoding and decoding changes.

    \b
    Example:
      tokenmill tokenizer eval tokenizer.json store/datasets/clean store/datasets/reference
    """
    from tokenizer.evaluate import evaluate as judge
    from tokenizer.load import load_tokenizer

    scores = judge(load_tokenizer(tokenizer), ((str(p), t) for p in files for t in texts([p])))
    rows = {name: score.to_json() for name, score in scores.items()}
    if json_lines:
        for name, row in rows.items():
            typer.echo(json.dumps({"group": name, **row}))
        return
    rows = {visible(name): row for name, row in rows.items()}
    width = max(map(len, rows))
    typer.echo(f"{'':<{width}}  {'texts':>9} {'bytes/token':>12} {'tokens/word':>12} {'continued':>10} {'broken':>7}")
    for name, row in rows.items():
        typer.echo(f"{name:<{width}}  {row['texts']:>9,} {row['bytes_per_token']:>12.3f} {row['fertility']:>12.3f} "
                   f"{row['continued_words']:>10.1%} {row['broken']:>7,}")


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


def verify(shards: ShardsArg, json_lines: JsonOpt = False) -> None:
    """Check a shard set against its manifest.

    Checks checksums, counts and boundaries. The exit code is 1 when something is wrong.

    \b
    Example:
      tokenmill shards verify store/shards/web/split=train
    """
    from tokenizer.shards.verify import verify as check

    opened(shards)
    problems = check(shards)
    if json_lines:
        typer.echo(json.dumps({"shards": str(shards), "sound": not problems, "problems": problems}))
    else:
        for problem in problems:
            typer.echo(visible(problem))
    if problems:
        raise UserError(f"{shards}: {len(problems)} problem{'s' * (len(problems) > 1)}; restore the files from a copy, "
                        f"or run `tokenmill store verify --repair` and the recipe again")
    if not json_lines:
        typer.echo(f"{shards}: sound")


def stats(shards: ShardsArg, json_lines: JsonOpt = False) -> None:
    """Count the documents and tokens in a shard set.

    Targets are the tokens that count in the training loss. In post-training records, only the tokens of the answers
    count.

    \b
    Example:
      tokenmill shards stats store/shards/web/split=train
    """
    shard_set = opened(shards)
    manifest = shard_set.manifest
    row = {"stream": manifest.stream, "split": manifest.split, "shards": len(manifest.shards),
           "documents": manifest.documents, "tokens": manifest.tokens, "targets": shard_set.targets(),
           "text_bytes": manifest.text_bytes, "dtype": manifest.dtype, "vocab_size": manifest.vocab_size,
           "eos": manifest.eos, "tokenizer": manifest.tokenizer, "sha256": manifest.sha256,
           "tokens_per_document": round(manifest.tokens / max(manifest.documents, 1), 1),
           "bytes_per_token": round(manifest.text_bytes / max(manifest.tokens - manifest.documents, 1), 3)}
    typer.echo(json.dumps(row) if json_lines else
               "\n".join(f"{k:20} {v:,}" if isinstance(v, int) else visible(f"{k:20} {v}") for k, v in row.items()))


def head(shards: ShardsArg,
         tokenizer: Annotated[Path | None, typer.Option(
             "--tokenizer", metavar="FILE", help="Tokenizer to decode with (default: the one of the store).")] = None,
         limit: LimitOpt = 3, chars: CharsOpt = 300, json_lines: JsonOpt = False) -> None:
    """Show the first documents of a shard set.

    The documents are decoded, and personal data is masked.

    \b
    Example:
      tokenmill shards head store/shards/web/split=train -n 1
    """
    from stages.scrub.pii import scrub_text
    from tokenizer.load import load_tokenizer

    shard_set = opened(shards)
    coder = load_tokenizer(tokenizer or _tokenizer_beside(shards, shard_set.manifest.tokenizer))
    if coder.sha256 != shard_set.manifest.tokenizer:
        raise BadUsage(f"--tokenizer {tokenizer}: the shards were made with another one (sha256 "
                       f"{shard_set.manifest.tokenizer[:12]}…)")
    start = count = 0
    while start < shard_set.tokens and (count < limit or not limit):
        [span, *_] = shard_set.documents(start, start + 1)
        text = scrub_text(coder.decode(shard_set.read(span.start, span.stop - 1)))
        tokens, counts = span.stop - span.start, shard_set.counts(span.start, span.stop)
        targets = tokens if counts is None else int(counts.sum())
        row = {"id": span.id, "start": span.start, "stop": span.stop, "tokens": tokens, "targets": targets,
               "text": text[:chars] if chars else text}
        learned = "" if targets == tokens else f", {targets:,} learned"
        typer.echo(json_text(row) if json_lines else
                   visible(f"── {row['id']}  {tokens:,} tokens{learned}\n{row['text']}"))
        start, count = span.stop, count + 1


def _tokenizer_beside(shards: Path, sha256: str) -> Path:
    """Return the path of the tokenizer with this hash, which a run has published next to the shard sets of its store.
    Raises BadUsage when there is none."""
    for folder in shards.absolute().parents:
        for path in sorted(folder.glob(f"tokenizer-{sha256[:12]}.*")):
            return path
        if folder.name == "shards":
            break
    raise BadUsage(f"the tokenizer {sha256[:12]}… of {shards} is not in its store; name it by --tokenizer")


def find(shards: ShardsArg,
         id: Annotated[str, typer.Argument(metavar="ID", help="Document id, or its beginning.")],
         json_lines: JsonOpt = False) -> None:
    """Find where a document stands in a shard set.

    Prints the range of the document's tokens in the set's stream of tokens. The exit code is 1 when the set does not
    hold the document.

    \b
    Example:
      tokenmill shards find store/shards/web/split=train 3f2a91c0
    """
    from tokenizer.shards.find import places

    hits = 0
    for row in places(opened(shards), id):
        typer.echo(json.dumps(row) if json_lines else
                   visible(f"{row['id']}  tokens {row['start']:,} to {row['stop']:,}  {row['file']}"))
        hits += 1
    if not hits:
        raise UserError(f"{shards}: no document {id}; it may be in the other split, or have been dropped")


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
    from pipeline.recipe.model import checked_name
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
    target = shards / f"tokenizer-{tokenizer.sha256[:12]}.{'json' if tokenizer.kind == 'json' else 'model'}"
    if not target.exists():
        with replacing(target) as part:
            shutil.copyfile(tokenizer.path, part)
            if sha256(part) != tokenizer.sha256:
                raise UserError(f"--tokenizer {tokenizer.path}: changed during the import; copy the file with sha256 "
                                f"{tokenizer.sha256} to {target}")
