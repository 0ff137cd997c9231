"""`tokenmill tokenizer …`: train and evaluate tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.base.files import replacing
from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage, writing
from pipeline.cli.options import JsonOpt
from pipeline.cli.texts import documents, files, texts

if TYPE_CHECKING:
    from tokenizer.load import Tokenizer

class TokenizerKind(StrEnum):
    """The values of --kind: the kinds of tokenizers. A recipe may name the same kinds."""

    bpe = "bpe"
    sentencepiece = "sentencepiece"
    bytes = "bytes"


class SentencePieceModel(StrEnum):
    """The values of --model: the algorithms with which SentencePiece makes a vocabulary."""

    unigram = "unigram"
    bpe = "bpe"


class Digits(StrEnum):
    """The values of --digits: how a text's numbers are split before they are encoded."""

    single = "single"
    left3 = "left3"
    right3 = "right3"


class Chat(StrEnum):
    """The values of --chat: templates of dialogues whose special tokens a tokenizer can get."""

    chatml = "chatml"
    llama3 = "llama3"


def register(app: typer.Typer) -> None:
    tokenizer = typer.Typer(help="Train and judge tokenizers.", no_args_is_help=True, rich_markup_mode=None)
    tokenizer.command("train")(train)
    tokenizer.command("eval")(evaluate)
    app.add_typer(tokenizer, name="tokenizer")


def train(
        out: Annotated[
            Path,
            typer.Option("--out", metavar="FILE", help="tokenizer.json (bpe, bytes), or a .model (sentencepiece).")],
        paths: Annotated[list[Path] | None,
                         typer.Argument(metavar="FILES...",
                                        help="Parquet or text files, or folders of them, say STORE/datasets/NAME; none "
                                        "with --kind bytes.")] = None,
        vocab: Annotated[int, typer.Option(min=257, metavar="N", help="Number of tokens, 257 or more.")] = 32000,
        kind: Annotated[TokenizerKind,
                        typer.Option(help="Byte-level BPE, SentencePiece, or the bytes of UTF-8.")] = TokenizerKind.bpe,
        model: Annotated[
            SentencePieceModel,
            typer.Option(help="Algorithm of SentencePiece, for --kind sentencepiece.")] = SentencePieceModel.unigram,
        digits: Annotated[
            Digits | None,
            typer.Option(
                help="How numbers are split: into single digits, or groups of three from the first digit (left3) or "
                "the last (right3). Default: left3; SentencePiece can only do single.")] = None,
        space_runs: Annotated[
            int,
            typer.Option(min=0, max=256, metavar="N", help="Give each run of 2 to N spaces a token of its own.")] = 0,
        fim: Annotated[bool, typer.Option("--fim", help="Add tokens for fill-in-the-middle.")] = False,
        chat: Annotated[Chat | None, typer.Option(help="Add the tokens of a template for dialogues.")] = None,
        special: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME", help="Add a special token of this name; may be repeated.")] = None,
        reserved: Annotated[
            int,
            typer.Option(min=0, max=65536, metavar="N", help="Add N special tokens without a meaning, for later.")] = 0,
        json_lines: JsonOpt = False) -> None:
    """Train a tokenizer on texts.

    The tokenizer is a byte-level BPE, a SentencePiece model, or one whose tokens are the bytes of UTF-8. Equal texts
    give equal files.

    \b
    Examples:
      tokenmill tokenizer train store/datasets/deduped --vocab 32000 --out tokenizer.json
      tokenmill tokenizer train texts/ --kind sentencepiece --model unigram --vocab 8000 --out spm.model
      tokenmill tokenizer train code/ --digits single --space-runs 24 --fim --chat chatml --out tokenizer.json
    """
    from tokenizer.byte_level import byte_level_json
    from tokenizer.load import load_tokenizer
    from tokenizer.train import train_tokenizer

    suffix = ".model" if kind is TokenizerKind.sentencepiece else ".json"
    if out.suffix != suffix:
        raise BadUsage(f"--out {out}: a tokenizer of kind {kind.value} is a {suffix} file")
    if model is SentencePieceModel.bpe and kind is not TokenizerKind.sentencepiece:
        raise BadUsage("--model is SentencePiece's; leave it out, or add --kind sentencepiece")
    if bool(paths) is (kind is TokenizerKind.bytes):
        raise BadUsage("--kind bytes is not trained; leave FILES out" if paths else
                       "FILES are missing; name texts to train on")
    names = {"fim": fim, "chat": chat and chat.value, "tokens": special or [], "reserved": reserved}
    wanted = {"kind": kind.value, "vocab": vocab, "model": model.value, "digits": digits and digits.value,
              "space_runs": space_runs if space_runs > 1 else 0, "special": names if any(names.values()) else None}
    with writing(out), replacing(out) as part:       # whoever loads it meanwhile gets the old or the new file
        if kind is TokenizerKind.bytes:
            part.write_text(byte_level_json(), encoding="utf-8")
        else:
            train_tokenizer(texts(paths or []), wanted, part)
    tokenizer = load_tokenizer(out)
    if json_lines:
        typer.echo(json.dumps({"path": str(out), "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos,
                               "sha256": tokenizer.sha256}))
    else:
        typer.echo(f"{out}: {tokenizer.vocab_size:,} tokens")


def evaluate(paths: Annotated[list[Path], typer.Argument(
                 metavar="TOKENIZER... FILES...",
                 help="First the tokenizers: tokenizer.json, .model and .tiktoken files, folders with one, or the word "
                      "bytes. Then the texts: Parquet, JSON Lines or text files, or folders of them.")],
             by: Annotated[str, typer.Option(
                 metavar="COLUMNS", help="Columns whose values make a group: language, source, or language,source; or "
                                         "path, for the FILES as they are named.")] = "path",
             html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with charts.")] = None,
             json_lines: JsonOpt = False) -> None:
    """Measure how well tokenizers encode texts.

    Prints a line for each group of texts and each tokenizer. It has the bytes per token, the tokens per word, and the
    share of words split into several tokens. Parity is the number of tokens per text against English, for translations.
    Then follow the Rényi efficiency, the unknown tokens, the texts that encoding and decoding changes, and the speed.

    \b
    Examples:
      tokenmill tokenizer eval tokenizer.json store/datasets/clean store/datasets/reference
      tokenmill tokenizer eval a.json b.model bytes store/datasets/clean --by language --html tokenizers.html
    """
    from pipeline.report.tokenizer_page import render
    from tokenizer.evaluate import evaluate as judge
    from tokenizer.evaluate import rows_of

    tokenizers, rest = _tokenizers(paths)
    columns = by.split(",")
    if columns != ["path"] and not set(columns) <= {"language", "source"}:
        raise BadUsage(f"--by {by}: texts are grouped by path, language, source or language,source; give one of these")
    with writing(html) if html else nullcontext():
        rows = rows_of([name for name, _ in tokenizers], judge([t for _, t in tokenizers], _grouped(rest, columns)))
        if html:
            with replacing(html) as part:
                part.write_text(render(rows), encoding="utf-8")
    if json_lines:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    width = max(len(visible(row["group"])) for row in rows)
    wide = max(max(len(visible(row["tokenizer"])) for row in rows), 9)
    typer.echo(f"{'':<{width}}  {'tokenizer':<{wide}} {'texts':>9} {'bytes/token':>12} {'tokens/word':>12} "
               f"{'continued':>10} {'parity':>7} {'Rényi':>6} {'unknown':>8} {'broken':>7} {'MB/CPU-s':>9}")
    for row in rows:
        parity, speed = row["parity"], row["mb_per_cpu_s"]
        typer.echo(f"{visible(row['group']):<{width}}  {visible(row['tokenizer']):<{wide}} {row['texts']:>9,} "
                   f"{row['bytes_per_token']:>12.3f} {row['fertility']:>12.3f} {row['continued_words']:>10.1%} "
                   f"{'–' if parity is None else f'{parity:.2f}':>7} {row['renyi']:>6.3f} {row['unknown']:>8,} "
                   f"{row['broken']:>7,} {'–' if speed is None else f'{speed:.1f}':>9}")


def _tokenizers(paths: list[Path]) -> tuple[list[tuple[str, Tokenizer]], list[Path]]:
    """Divide `paths` into tokenizers and texts, and load the tokenizers. The first path is a tokenizer, and so are the
    paths after it, up to the first one that is none. Returns (names and tokenizers, paths of the texts). Raises
    BadUsage when there are no texts, or when a tokenizer is named twice."""
    from tokenizer.load import byte_tokenizer, load_tokenizer

    first = next((i for i, path in enumerate(paths) if i and not _is_tokenizer(path)), len(paths))
    if first == len(paths):
        raise BadUsage("the texts are missing: name files or folders after the tokenizers")
    names = [str(path) for path in paths[:first]]
    if len(set(names)) < len(names):
        raise BadUsage(f"{max(names, key=names.count)}: named twice")
    return [(str(path), byte_tokenizer() if str(path) == "bytes" else load_tokenizer(path))
            for path in paths[:first]], paths[first:]


def _is_tokenizer(path: Path) -> bool:
    if path.is_dir():
        return (path / "tokenizer.json").is_file() or any(path.glob("*.model")) or any(path.glob("*.tiktoken"))
    return path.suffix in (".json", ".model", ".tiktoken") or (str(path) == "bytes" and not path.exists())


def _grouped(paths: list[Path], columns: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (group, text) of each text in the files and folders. The group of a text is its values in `columns`, or its
    path if `columns` is ["path"]. Raises BadUsage for a file without one of the columns, such as a text file."""
    if columns == ["path"]:
        yield from ((str(path), text) for path in paths for text in texts([path]))
        return
    for file in files(paths):
        for doc in documents(file, keep=columns):
            if missing := [name for name in columns if name not in doc.meta]:
                raise BadUsage(f"{file}: has no column '{missing[0]}' to group by; take --by path")
            yield " · ".join(str(doc.meta[name] or "–") for name in columns), doc.text
