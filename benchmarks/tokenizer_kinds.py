"""How do kinds of tokenizers compare on text that they were not trained on?

    python benchmarks/tokenizer_kinds.py --udhr udhr-html.zip --sentences DIR --books DIR --html DIR --out FOLDER

trains two tokenizers of 16,000 tokens on the same texts, and evaluates them and the tokenizer of bytes: `bpe`
(byte-level BPE, digits in groups of three from the left) and `unigram` (SentencePiece, single digits, runs of up to 16
spaces as tokens). It prints the table of docs/tokenizers.md, and writes tokenizers.html and tokenizers.json to FOLDER.

These texts are used half for training and half for evaluation:

- files LANGUAGE.txt with a sentence a line (as `lingua` has for tests), of which every second line is for training
- books as *.md.gz, web pages as *.html.gz, and the Python files of the standard library, of which every second file is
  for training

Only for evaluation are the Universal Declaration of Human Rights (package `udhr-html` of npm), which is parallel text,
and generated numbers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sysconfig
import zipfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from pipeline.report.tokenizer_page import render
from tokenizer.evaluate import evaluate, rows_of
from tokenizer.load import byte_tokenizer, load_tokenizer
from tokenizer.train import train_tokenizer

VOCAB = 16_000
#: characters of a file that are used, so that no file outweighs the others
FILE_CHARS = 60_000
#: languages of the declaration that are shown one by one
LANGUAGES = {"en": "eng", "de": "deu_1996", "fr": "fra", "tr": "tur", "fi": "fin", "sw": "swh", "vi": "vie",
             "ru": "rus", "el": "ell_monotonic", "ar": "arb", "hi": "hin", "th": "tha", "ko": "kor", "ja": "jpn",
             "zh": "cmn_hans"}


def declaration(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of the declaration: one text for each language, with a paragraph in each line."""
    with zipfile.ZipFile(path) as archive:
        for language, name in LANGUAGES.items():
            page = archive.read(f"{name}.html").decode("utf-8")
            paragraphs = [unescape(re.sub(r"<[^>]*>", "", part)).strip()
                          for part in re.findall(r"<p\b[^>]*>(.*?)</p>", page, re.DOTALL)]
            yield language, "\n".join(paragraphs)


def corpus(args: argparse.Namespace) -> tuple[list[str], list[tuple[str, str]]]:
    """Return (texts for training, pairs of group and text for evaluation)."""
    train: list[str] = []
    held_out: list[tuple[str, str]] = []
    library = Path(sysconfig.get_paths()["stdlib"])
    kinds = [("books", sorted(args.books.rglob("*.md.gz"))), ("HTML", sorted(args.html.rglob("*.html.gz"))),
             ("Python", sorted(library.glob("*.py")))]
    for group, paths in kinds:
        for number, path in enumerate(paths):
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = data.decode("utf-8", "replace")[:FILE_CHARS]
            if number % 2:
                held_out.append((group, text))
            else:
                train.append(text)
    for path in sorted(args.sentences.glob("*.txt")):
        lines = path.read_text(encoding="utf-8").splitlines()
        train += lines[::2]
        held_out += [("75 languages", line) for line in lines[1::2]]
    held_out += [("numbers", " ".join(str(n * n * 7919 % 10 ** (1 + n % 12)) for n in range(i, i + 100)))
                 for i in range(0, 5000, 100)]
    return train, held_out


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Return the Markdown table: for each group the bytes per token of each tokenizer, its parity and other figures."""
    best = " (the most in **bold**)"
    head = ["text", *(f"bytes/token `{name}`" for name in names), *(f"parity `{name}`" for name in names),
            *(f"split words `{name}`" for name in names[:2])]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for group in dict.fromkeys(row["group"] for row in rows):
        by_name = {row["tokenizer"]: row for row in rows if row["group"] == group}
        most = max(row["bytes_per_token"] for row in by_name.values())
        cells = [group]
        for name in names:
            value = by_name[name]["bytes_per_token"]
            cells.append(f"**{value:.2f}**" if value == most else f"{value:.2f}")
        cells += ["–" if by_name[name]["parity"] is None else f"{by_name[name]['parity']:.2f}" for name in names]
        cells += [f"{by_name[name]['continued_words']:.0%}" for name in names[:2]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\nBytes per token{best}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("udhr", "sentences", "books", "html", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, held_out = corpus(args)
    print(f"{sum(len(text.encode()) for text in train):,} bytes to train on, "
          f"{sum(len(text.encode()) for _, text in held_out):,} bytes to evaluate on", flush=True)
    train_tokenizer(train, {"kind": "bpe", "vocab": VOCAB}, args.out / "bpe.json")
    train_tokenizer(train, {"kind": "sentencepiece", "vocab": VOCAB, "space_runs": 16}, args.out / "unigram.model")
    names = ["bpe", "unigram", "bytes"]
    tokenizers = [load_tokenizer(args.out / "bpe.json"), load_tokenizer(args.out / "unigram.model"), byte_tokenizer()]
    parallel = rows_of(names, evaluate(tokenizers, declaration(args.udhr)))
    rows = [row for row in parallel if row["group"] != "all"]
    rows += [row | {"parity": None} for row in rows_of(names, evaluate(tokenizers, held_out)) if row["group"] != "all"]
    (args.out / "tokenizers.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (args.out / "tokenizers.html").write_text(render(rows), encoding="utf-8")
    print(table(rows, names))
    for name in names:
        mine = [row for row in rows if row["tokenizer"] == name]
        print(name, {key: sum(row[key] for row in mine) for key in ("unknown", "broken")},
              "Rényi", {row["group"]: row["renyi"] for row in mine},
              "MB/CPU-s", {row["group"]: row["mb_per_cpu_s"] for row in mine})


if __name__ == "__main__":
    main()
