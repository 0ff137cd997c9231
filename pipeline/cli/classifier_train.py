"""`tokenmill classifier train`: trains a quality classifier on labelled documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage, UserError, reading, writing
from pipeline.cli.options import JsonOpt
from pipeline.cli.texts import documents, files, texts

TextOpt = Annotated[str, typer.Option("--text-column", metavar="NAME", help="Column, or key, of the text.")]


def train(out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The model, for `quality: {model: …}`.")],
          positive: Annotated[list[Path] | None, typer.Option(
              "--positive", metavar="PATH", help="Good documents (label hq): Parquet, JSON Lines or text files, or "
                                                 "folders of them.")] = None,
          negative: Annotated[list[Path] | None, typer.Option(
              "--negative", metavar="PATH", help="Other documents (label lq), in the same forms.")] = None,
          labelled: Annotated[list[Path] | None, typer.Option(
              "--labelled", metavar="PATH", help="Documents with a label each: a word, or a number (a grade).")] = None,
          reference: Annotated[list[Path] | None, typer.Option(
              "--reference", metavar="PATH", help="The corpus to be filtered, or a sample of it: a threshold is chosen "
                                                  "on it.")] = None,
          keep: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="SHARE",
                                              help="Share of the reference corpus to keep.")] = 0.1,
          text_column: TextOpt = "text",
          label_column: Annotated[str, typer.Option("--label-column", metavar="NAME",
                                                    help="Column, or key, of the label.")] = "label",
          seed: Annotated[int, typer.Option(min=0, help="Seed of the split, the order of texts and the "
                                             "initial weights.")] = 0,
          held_out: Annotated[float, typer.Option(
              min=0.0, max=0.9, metavar="SHARE", help="Texts to hold out: half calibrate the model, half measure its "
                                                      "accuracy.")] = 0.2,
          most: Annotated[int | None, typer.Option(
              min=2, metavar="N", help="At most this many texts of each label, chosen by hashes of the texts.")] = None,
          dim: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Dimensions of the word vectors.")] = 32,
          epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the texts.")] = 5,
          rate: Annotated[float, typer.Option(metavar="R", help="Learning rate, above 0.")] = 0.1,
          word_ngrams: Annotated[int, typer.Option(
              min=1, max=5, metavar="N", help="Length of the longest word n-gram.")] = 2,
          buckets: Annotated[int, typer.Option(
              min=1, metavar="N", help="Buckets into which word n-grams are hashed.")] = 1 << 18,
          min_count: Annotated[int, typer.Option(min=1, metavar="N",
                                                 help="Least occurrences of a word that gets a vector.")] = 1,
          intended_use: Annotated[str | None, typer.Option(metavar="TEXT", help="For the model card.")] = None,
          license: Annotated[str | None, typer.Option(metavar="TEXT", help="For the model card.")] = None,
          json_lines: JsonOpt = False) -> None:
    """Train a fastText quality classifier, calibrate it and write its model card.

    Writes FILE and, beside it, files with the endings .card.json, .card.md and, if there are enough held-out texts,
    .calibration.json. Equal texts, settings and seed give equal files. The texts on which the model's accuracy is
    measured have no near-duplicates among the texts trained on.

    \b
    Examples:
      tokenmill classifier train --positive store/datasets/reference --negative store/datasets/extracted \\
        --reference store/datasets/extracted --keep 0.1 --out quality.bin
      tokenmill classifier train --labelled annotated.parquet --label-column score --out edu.bin
    """
    from stages.models.classifier import GOOD, REST
    from stages.models.train_quality import FastTextSettings
    from stages.models.train_quality import train as run

    if bool(positive) != bool(negative) or bool(positive) == bool(labelled):
        raise BadUsage("give --positive and --negative, or --labelled")
    if not rate > 0 or rate > 10:
        raise BadUsage(f"--rate {rate:g}: a learning rate is above 0 and at most 10")
    data: list[dict[str, Any]] = []
    labelled_paths = [(GOOD, path) for path in positive or ()] + [(REST, path) for path in negative or ()]
    pairs = (pair for label, path in [*labelled_paths, *((None, path) for path in labelled or ())]
             for pair in _labelled(path, label, text_column, label_column, data))
    settings = FastTextSettings(dim, epochs, rate, word_ngrams, buckets, min_count)
    with writing(out):
        try:
            card = run(pairs, out, seed=seed, settings=settings, held_out=held_out, most=most, keep=keep, data=data,
                       reference=texts(reference, text_column) if reference else None, intended_use=intended_use or "",
                       license=license or "")
        except (ValueError, RuntimeError) as e:
            raise UserError(str(e)) from None
    if json_lines:
        typer.echo(json.dumps({"model": str(out), "card": card}))
        return
    _print_trained(out, card)


def _labelled(path: Path, label: str | None, text_column: str, label_column: str,
              data: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the documents in a file or folder. If `label` is given, all documents have this label.
    Otherwise each row has its label in the column `label_column`, and rows without a label are skipped; a file in which
    no row has a label raises BadUsage. At the end, an entry that describes the file or folder (label, name, number of
    documents, bytes, hash) is added to the list `data`."""
    from stages.stage import file_sha256

    digest, documents_read, size = hashlib.sha256(), 0, 0
    for file in files([path]):
        with reading(file):
            name = file.relative_to(path).as_posix() if path.is_dir() else ""
            digest.update(f"{name} {file_sha256(file)}\n".encode())
        unlabelled = True
        for doc in documents(file, text_column, () if label else (label_column,)):
            own = label or label_of(doc.meta.get(label_column))
            if own is not None:
                documents_read, size, unlabelled = documents_read + 1, size + doc.text_bytes, False
                yield own, doc.text
        if unlabelled and label is None:
            raise BadUsage(f"{file}: no row of it has a label at '{label_column}'; name it with --label-column")
    data.append({"label": label or f"({label_column})", "file": path.resolve().name, "documents": documents_read,
                 "bytes": size, "sha256": digest.hexdigest()})


def label_of(value: Any) -> str | None:
    """Return a value of a table's label column as text, or None for a value that is missing, empty, or neither text nor
    number. The values 3, 3.0 and "3" become the same label; true becomes "1" and false "0"."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value) if isinstance(value, (int, str)) and value != "" else None


def _print_trained(out: Path, card: dict[str, Any]) -> None:
    from stages.models.classifier import companion_path
    from stages.models.model_card import decimal

    examples, measured, line = card["examples"], card["measured"], [f"model: {out.name}"]
    typer.echo(visible(f"{out}: trained on " + ", ".join(f"{n:,} {label}" for label, n in examples["train"].items())))
    for name, n in (("repeated", examples["repeated"]), ("under two labels", examples["contradicted"]),
                    ("beyond --most", sum(examples["surplus"].values()))):
        if n:
            typer.echo(f"  left out: {n:,} texts {name}")
    if measured["documents"]:
        typer.echo(f"  {measured['accuracy']:.1%} of {measured['documents']:,} held-out texts judged right")
    for question in measured["questions"][:10]:
        pair = question["roc_auc_95"]
        typer.echo(visible(f"  {question['question']}: ROC-AUC {question['roc_auc']:.3f} "
                           f"[{pair[0]:.3f}, {pair[1]:.3f}], average precision {question['average_precision']:.3f}"
                           + (f", calibration error {question['calibration_error']:.3f}"
                              if "calibration_error" in question else "")))
    if card["calibration"]:
        line.append(f"calibration: {companion_path(out, 'calibration.json').name}")
    if card["kind"] == "grades":
        line.append("grade: true")
    elif card["target"] != "hq":
        line.append(f"label: '{card['target'] or card['labels'][0]}'")
    if threshold := card.get("threshold"):
        few = f"; {threshold['trained_on']:,} of them were trained on: give more" if threshold["trained_on"] else ""
        typer.echo(f"  min {decimal(threshold['min'])} keeps {threshold['kept']:.1%} of {threshold['documents']:,} "
                   f"reference documents{few}")
        line.append(f"min: {decimal(threshold['min'])}")
    typer.echo(f"  card: {companion_path(out, 'card.md')}")
    typer.echo(visible(f"  step: quality: {{{', '.join(line)}}}"))
