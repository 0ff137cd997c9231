"""`tokenmill lm …`: makes n-gram models for the step `perplexity`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.base.files import replacing
from pipeline.cli.errors import BadUsage, UserError, reading, writing
from pipeline.cli.options import JsonOpt
from pipeline.cli.texts import documents, files

NormalizeOpt = Annotated[str, typer.Option(
    "--normalize", metavar="DIALECT", help="Normalisation of a text before it is cut into pieces: ccnet, datatrove or "
                                           "none.")]
PiecesOpt = Annotated[Path | None, typer.Option("--sentencepiece", metavar="FILE",
                                                help="SentencePiece model that cuts texts.")]
OutOpt = Annotated[Path, typer.Option("--out", metavar="FILE", help="The model, for `perplexity: {model: …}`.")]


def register(app: typer.Typer) -> None:
    lm = typer.Typer(help="Train and compile n-gram models, for perplexity.", no_args_is_help=True,
                     rich_markup_mode=None)
    for name, command in (("train", train), ("compile", compile_model)):
        lm.command(name)(command)
    app.add_typer(lm, name="lm")


def train(data: Annotated[list[Path], typer.Argument(
              metavar="DATA...", help="Parquet, JSON Lines or text files, or folders of them, say "
                                      "STORE/datasets/wiki.")],
          out: OutOpt,
          pieces: PiecesOpt = None,
          vocab: Annotated[int, typer.Option(
              min=16, max=1 << 20, metavar="N",
              help="Pieces of the SentencePiece model that is trained if --sentencepiece is not given.")] = 65536,
          language: Annotated[str | None, typer.Option(metavar="CODE",
                                                       help="Take only documents of this language.")] = None,
          order: Annotated[int, typer.Option(
              min=1, max=10, metavar="N", help="Length of the longest n-gram, in pieces.")] = 5,
          tokens: Annotated[int, typer.Option(
              min=1000, metavar="N", help="Most pieces to train on; each takes up to 250 bytes.")] = 20_000_000,
          normalize: NormalizeOpt = "ccnet",
          arpa: Annotated[Path | None, typer.Option("--arpa", metavar="FILE",
                                                    help="Write the model as ARPA, too, for other programs.")] = None,
          text_column: Annotated[str, typer.Option("--text-column", metavar="NAME",
                                                   help="Column, or key, of the text.")] = "text",
          json_lines: JsonOpt = False) -> None:
    """Train an n-gram model of SentencePiece pieces (modified Kneser-Ney), as CCNet does on Wikipedia.

    Equal texts and settings give equal files. Every fiftieth document is held out from training. The model is applied
    to the first thousand of these held-out documents. The command prints two perplexities: 30 % of the documents lie
    below the first one, and 60 % below the second.

    \b
    Examples:
      tokenmill lm train store/datasets/wiki --language de --out de.lm
      tokenmill lm train books/ --sentencepiece en.sp.model --out en.lm --arpa en.arpa
    """
    from stages.text.ccnet import TextModel, train_model, train_pieces
    from stages.text.kneser_ney import save, save_arpa

    _check_dialect(normalize)

    def texts(held_out: bool = False) -> Iterator[str]:
        number = 0
        for file in files(data):
            for doc in documents(file, text_column, ("language",) if language else ()):
                if language is None or doc.meta.get("language") == language:
                    number += 1
                    if (number % 50 == 0) == held_out:
                        yield doc.text

    try:
        pieces_model = _bytes(pieces) if pieces is not None else train_pieces(texts(), vocab, normalize)
        estimate = train_model(texts(), pieces_model, normalize=normalize, order=order, most=tokens)
    except ValueError as e:
        if next(texts(), None) is None:
            raise BadUsage(f"no document{f' of language {language}' if language else ''} in "
                           f"{', '.join(map(str, data))}") from None
        raise UserError(str(e)) from None
    _write(out, lambda path: save(estimate, path, normalize=normalize, pieces=pieces_model))
    if arpa is not None:
        _write(arpa, lambda path: save_arpa(estimate, path))
    model = TextModel(out)
    perplexities = sorted(model.perplexity(text) for _, text in zip(range(1000), texts(held_out=True)) if text)
    summary: dict[str, Any] = {
        "model": str(out), "bytes": out.stat().st_size, "tokens": estimate.tokens,
        "ngrams": [len(grams.word) for grams in estimate.orders], "fallback_orders": estimate.fallback,
        "held_out": {"texts": len(perplexities), "perplexity_p30": _quantile(perplexities, 0.3),
                     "perplexity_p60": _quantile(perplexities, 0.6)}}
    if json_lines:
        typer.echo(json.dumps(summary))
        return
    typer.echo(f"{out}: {summary['tokens']:,} pieces, n-grams by order "
               f"{', '.join(f'{n:,}' for n in summary['ngrams'])}; {summary['bytes'] / 1e6:.1f} MB")
    if estimate.fallback:
        typer.echo(f"orders {', '.join(map(str, estimate.fallback))} were smoothed by fixed discounts: too little text")
    if perplexities:
        typer.echo(f"held-out texts: {len(perplexities):,}; 30 % have a perplexity below "
                   f"{summary['held_out']['perplexity_p30']}, 60 % below {summary['held_out']['perplexity_p60']}")


def compile_model(arpa: Annotated[Path, typer.Argument(metavar="ARPA", help="ARPA file, also as .gz.")],
                  out: OutOpt,
                  pieces: PiecesOpt = None,
                  normalize: NormalizeOpt = "ccnet",
                  json_lines: JsonOpt = False) -> None:
    """Compile an n-gram model in ARPA format into a model for the step `perplexity`.

    KenLM's lmplz, SRILM and `tokenmill lm train --arpa` write ARPA files. Worker processes that use the compiled model
    share one copy of the model in memory.

    \b
    Example:
      tokenmill lm compile en.arpa.gz --sentencepiece en.sp.model --out en.lm
    """
    from stages.text.arpa import compile_arpa
    from stages.text.ccnet import processor
    from stages.text.ngram_lm import BadModel

    _check_dialect(normalize)
    if not arpa.is_file():
        raise BadUsage(f"no such file: {arpa}")
    pieces_model = _bytes(pieces) if pieces is not None else b""
    counts: list[int] = []

    def write(path: Path) -> None:
        counts.extend(compile_arpa(arpa, path, normalize=normalize, pieces=pieces_model))
        if pieces_model:
            processor(pieces_model, str(pieces))          # raises for a file that is no SentencePiece model

    try:
        _write(out, write)
    except BadModel as e:
        raise BadUsage(str(e)) from None
    if json_lines:
        typer.echo(json.dumps({"model": str(out), "ngrams": counts, "sentencepiece": pieces is not None}))
        return
    typer.echo(f"{out}: n-grams by order {', '.join(f'{n:,}' for n in counts)}; {out.stat().st_size / 1e6:.1f} MB")
    if not pieces_model:
        typer.echo("without --sentencepiece the step `perplexity` cannot use it: nothing cuts texts into its words")


def _check_dialect(normalize: str) -> None:
    from pipeline.recipe.errors import nearest
    from stages.text.ccnet import NORMALIZE

    if normalize not in NORMALIZE:
        raise BadUsage(f"--normalize {normalize}: {nearest(normalize, NORMALIZE)}")


def _bytes(path: Path) -> bytes:
    with reading(path):
        return path.read_bytes()


def _write(out: Path, write: Any) -> None:
    """Write the file `out` atomically: `write` writes a temporary file, which is then renamed to `out`."""
    with writing(out), replacing(out) as part:
        write(part)


def _quantile(values: list[float], share: float) -> float | None:
    return values[int(share * len(values))] if values else None
