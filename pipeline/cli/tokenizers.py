"""`tokenmill tokenizer …`: train and evaluate tokenizers."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeline.base.files import replacing
from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage, writing
from pipeline.cli.options import JsonOpt
from pipeline.cli.texts import texts

FilesArg = Annotated[list[Path], typer.Argument(
    metavar="FILES...", help="Parquet or text files, or folders of them, say STORE/datasets/NAME.")]



class Kind(StrEnum):
    """Kinds of tokenizers, as in a recipe."""

    bpe = "bpe"
    sentencepiece = "sentencepiece"


class Model(StrEnum):
    """Models of SentencePiece, as in a recipe."""

    unigram = "unigram"
    bpe = "bpe"


def register(app: typer.Typer) -> None:
    tokenizer = typer.Typer(help="Train and judge tokenizers.", no_args_is_help=True, rich_markup_mode=None)
    tokenizer.command("train")(train)
    tokenizer.command("eval")(evaluate)
    app.add_typer(tokenizer, name="tokenizer")


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
