"""`tokenmill shards …`: commands that look into token shards. `pipeline.cli.formats` has the commands that export and
import them, `pipeline.cli.lookup` those that find documents, and `pipeline.cli.samples` those about the samples of a
training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.base.visible import json_text, visible
from pipeline.cli import formats, lookup, samples
from pipeline.cli.errors import BadUsage, UserError
from pipeline.cli.options import CharsOpt, JsonOpt, LimitOpt
from pipeline.cli.shard_sets import ShardsArg, opened


def register(app: typer.Typer) -> None:
    shards = typer.Typer(help="Look into token shards, export and import them.", no_args_is_help=True,
                         rich_markup_mode=None)
    for name, command in (("verify", verify), ("head", head), ("stats", stats), ("find", lookup.find),
                          ("index", lookup.index), ("explain", samples.explain), ("realised", samples.realised),
                          ("export", formats.export), ("import", formats.import_files), ("decode", formats.decode)):
        shards.command(name)(command)
    app.add_typer(shards, name="shards")


def verify(shards: ShardsArg, json_lines: JsonOpt = False) -> None:
    """Check a shard set against its manifest.

    Checks checksums, counts and the boundaries of documents. The exit code is 1 when something is wrong.

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

    If the documents are packed into rows (`packing: best-fit`), five more figures are printed: the targets of a row,
    the rows, the pieces of documents in them, the documents that are longer than a row, and the share of padding.

    \b
    Example:
      tokenmill shards stats store/shards/web/split=train
    """
    shard_set = opened(shards)
    manifest = shard_set.manifest
    row: dict[str, Any] = {
        "stream": manifest.stream, "split": manifest.split, "shards": len(manifest.shards),
        "documents": manifest.documents, "tokens": manifest.tokens, "targets": shard_set.targets(),
        "text_bytes": manifest.text_bytes, "dtype": manifest.dtype, "vocab_size": manifest.vocab_size,
        "eos": manifest.eos, "tokenizer": manifest.tokenizer, "sha256": manifest.sha256,
        "tokens_per_document": round(manifest.tokens / max(manifest.documents, 1), 1),
        "bytes_per_token": round(manifest.text_bytes / max(manifest.tokens - manifest.documents, 1), 3)}
    packing = shard_set.published_packing()
    if packing is not None:
        packed = {"longest": packing.longest, "rows": packing.rows, "pieces": sum(f.pieces for f in packing.files),
                  "longer": sum(f.longer for f in packing.files), "padding": round(packing.padding, 6)}
        row |= {"packing": packed} if json_lines else {f"packed {name}": value for name, value in packed.items()}
    typer.echo(json.dumps(row) if json_lines else
               "\n".join(f"{k:20} {v:,}" if isinstance(v, int) else visible(f"{k:20} {v}") for k, v in row.items()))


def head(shards: ShardsArg,
         tokenizer: Annotated[Path | None, typer.Option(
             "--tokenizer", metavar="FILE", help="Tokenizer to decode with (default: the one of the store).")] = None,
         at: Annotated[int, typer.Option("--at", min=0, metavar="TOKEN", help="Begin with the document that has this "
                                                                              "token of the stream.")] = 0,
         limit: LimitOpt = 3, chars: CharsOpt = 300, json_lines: JsonOpt = False) -> None:
    """Show documents of a shard set, from its beginning or from a given token on.

    The documents are decoded, and personal data is masked.

    \b
    Examples:
      tokenmill shards head store/shards/web/split=train -n 1
      tokenmill shards head store/shards/web/split=train --at 1000000 -n 1
    """
    from stages.scrub.pii import scrub_text
    from tokenizer.load import load_tokenizer

    shard_set = opened(shards)
    if at and at >= shard_set.tokens:
        raise BadUsage(f"--at {at}: the stream has the tokens 0 to {shard_set.tokens - 1}")
    coder = load_tokenizer(tokenizer or _tokenizer_beside(shards, shard_set.manifest.tokenizer))
    if coder.sha256 != shard_set.manifest.tokenizer:
        raise BadUsage(f"--tokenizer {tokenizer}: the shards were made with another one (sha256 "
                       f"{shard_set.manifest.tokenizer[:12]}…)")
    start, count = at, 0
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
    """Return the path of the tokenizer with this hash in the folder of the shard sets, where a run has published it.
    Raises BadUsage when there is none."""
    for folder in shards.absolute().parents:
        for path in sorted(folder.glob(f"tokenizer-{sha256[:12]}.*")):
            return path
        if folder.name == "shards":
            break
    raise BadUsage(f"the tokenizer {sha256[:12]}… of {shards} is not in its store; name it by --tokenizer")
