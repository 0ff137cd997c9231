"""`tokenmill classifier …`: trains a classifier, checks data for drift, and scores texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.files import replacing
from pipeline.base.visible import visible
from pipeline.cli.classifier_train import TextOpt, label_of, train
from pipeline.cli.errors import BadUsage, reading, writing
from pipeline.cli.options import JsonOpt
from pipeline.cli.texts import documents, files

if TYPE_CHECKING:
    from stages.models.classifier import Classifier
    from stages.stage import Stage

ModelArg = Annotated[Path, typer.Argument(metavar="MODEL", help="A model of `tokenmill classifier train`.")]
DataArg = Annotated[list[Path], typer.Argument(
    metavar="DATA...", help="Parquet, JSON Lines or text files, or folders of them, say STORE/datasets/NAME.")]
#: documents scored at a time; rows per row group of a Parquet file of scores
_AT_ONCE, _ROWS = 256, 65_536


def register(app: typer.Typer) -> None:
    classifier = typer.Typer(help="Train and use quality classifiers.", no_args_is_help=True, rich_markup_mode=None)
    for name, command in (("train", train), ("check", check), ("score", score)):
        classifier.command(name)(command)
    app.add_typer(classifier, name="classifier")


def check(model: ModelArg, data: DataArg,
          against: Annotated[str | None, typer.Option(metavar="PROFILE", help="Profile of the model card to "
                                                      "compare with: 'reference' (texts of `train --reference`) or "
                                                      "'held_out'; default: the first of these in the card.")] = None,
          label_column: Annotated[str | None, typer.Option(
              "--label-column", metavar="NAME", help="Column with the right label of each document (a label "
                                                     "of the model, or 1 and 0), to measure the model's accuracy, "
                                                     "too.")] = None,
          text_column: TextOpt = "text", limit: Annotated[int, typer.Option(
              "-n", "--limit", min=0, metavar="N", help="Documents to read, from the first on; 0 reads all.")] = 0,
          json_lines: JsonOpt = False) -> None:
    """Check whether documents still look like those on which the threshold of a model was chosen.

    Compares scores, lengths and languages of the documents with those in the model's card. The exit code is 1 when they
    differ too much (drift).

    \b
    Example:
      tokenmill classifier check quality.bin store/datasets/extracted
    """
    from stages.models import drift
    from stages.models.examples import Example, content_key
    from stages.models.train_quality import judge

    card, loaded = _opened(model)
    profiles = card["profiles"]
    against = against or next((name for name in ("reference", "held_out") if name in profiles), "")
    if against not in profiles:
        raise BadUsage(f"the card of {model} has no profile '{against}'; it has: {', '.join(profiles) or 'none'}")
    pairs = list(islice(_rows(data, text_column, label_column), limit or None))
    if not pairs:
        raise BadUsage(f"no document in {', '.join(map(str, data))}")
    checked_texts = [text for _, text in pairs]
    scores = loaded.scores(checked_texts)
    result = {"model": str(model), "against": against, **drift.compare(profiles[against], checked_texts, scores)}
    if threshold := card.get("threshold"):
        kept_share = float((scores.values() >= threshold["min"]).mean())
        result["kept"] = {"min": threshold["min"], "was": threshold["kept"], "is": round(kept_share, 4)}
    if label_column:
        same = _same_labels(card)
        part = [Example(content_key(text), same[label], text) for label, text in pairs if label in same]
        if not part:
            raise BadUsage(f"no row has a label of the model ({', '.join(card['labels'][:20])}) at '{label_column}'; "
                           f"there is: {', '.join(sorted({label for label, _ in pairs})[:5])}")
        result["measured"] = judge(loaded, part, card["settings"]["seed"])
    if json_lines:
        typer.echo(json.dumps(result))
    else:
        _print_checked(result, card)
    if result["verdict"] == "drift":
        raise typer.Exit(1)


def _same_labels(card: dict[str, Any]) -> dict[str, str]:
    """Return {label in the user's data: label of the model}, from the model's card. Equal labels match. If the model
    has two labels, the data may also use 1 for the label whose probability is the model's score, and 0 for the other
    label."""
    labels = {label: label for label in card["labels"]}
    if card["kind"] == "binary":
        [other] = set(card["labels"]) - {card["target"]}
        return {"1": card["target"], "0": other} | labels
    return labels


def _rows(paths: list[Path], text_column: str, label_column: str | None) -> Iterator[tuple[str, str]]:
    for file in files(paths):
        for doc in documents(file, text_column, (label_column,) if label_column else ()):
            yield (label_of(doc.meta.get(label_column)) or "") if label_column else "", doc.text


def _print_checked(result: dict[str, Any], card: dict[str, Any]) -> None:
    from stages.models.model_card import decimal

    typer.echo(f"{result['documents']:,} documents against the card's profile '{result['against']}' of "
               f"{card['profiles'][result['against']]['documents']:,}")
    for name in ("scores", "lengths", "languages", "labels"):
        if name not in result:
            continue
        part = result[name]
        line = f"  {name:9} {part['verdict']:7}  stability index {part['index']:.3f} (chance: {part['noise']:.3f})"
        if "distance" in part:
            line += f", Kolmogorov-Smirnov {part['distance']:.3f} (chance: below {part['critical']:.3f})"
        if "moved" in part and part["verdict"] != "same":
            line += "; " + ", ".join(f"{n or 'none'} {a:.1%} -> {b:.1%}" for n, a, b in part["moved"][:3])
        typer.echo(visible(line))
    if kept_share := result.get("kept"):
        typer.echo(f"  min {decimal(kept_share['min'])} keeps {kept_share['is']:.1%}; it kept "
                   f"{kept_share['was']:.1%} of the reference corpus")
    old = {question["question"]: question for question in card["measured"]["questions"]}
    for question in result.get("measured", {}).get("questions", ()):
        low, high = question["roc_auc_95"]
        was = f"; on the card {old[question['question']]['roc_auc']:.3f}" if question["question"] in old else ""
        typer.echo(visible(f"  {question['question']}: ROC-AUC {question['roc_auc']:.3f} [{low:.3f}, {high:.3f}]{was}"))
    advice = {"same": "no drift", "watch": "something has moved: watch it",
              "drift": "drift: choose the threshold again on this data (--reference), or train again",
              "too_few": "too few documents to say anything"}
    typer.echo(advice[result["verdict"]])


def score(model: Annotated[Path, typer.Argument(metavar="MODEL", help="A fastText model, or the folder of a "
                                                                      "transformer for the step `encoder`.")],
          data: DataArg,
          out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Scores by document id: .jsonl or "
                                                                                 ".parquet.")] = None,
          label: Annotated[str | None, typer.Option(
              metavar="LABEL", help="Label whose probability is the score (default: that in the model card).")] = None,
          raw: Annotated[bool, typer.Option("--raw", help="Do not calibrate the scores of the model.")] = False,
          text_column: TextOpt = "text", limit: Annotated[int, typer.Option(
              "-n", "--limit", min=0, metavar="N", help="Documents to read, from the first on; 0 reads all.")] = 0,
          json_lines: JsonOpt = False) -> None:
    """Score documents, and print the distribution of the scores.

    The scores are those that the step `quality` gives in a recipe (or `encoder`, for a transformer). They are
    calibrated if there is a calibration file beside the model; --raw turns this off.

    \b
    Example:
      tokenmill classifier score quality.bin store/datasets/extracted --out scores.parquet
    """
    import numpy as np

    if out is not None and out.suffix not in (".jsonl", ".parquet"):
        raise BadUsage(f"--out {out}: name a file that ends in .jsonl or .parquet")
    stage, name = _scorer(model, label, raw)
    scores: list[float] = []
    bytes_read = 0

    def scored() -> Iterator[tuple[str, float]]:
        nonlocal bytes_read
        docs = islice((doc for file in files(data) for doc in documents(file, text_column)), limit or None)
        while batch := list(islice(docs, _AT_ONCE)):
            stage.process_batch(batch)
            for doc in batch:
                bytes_read += doc.text_bytes
                scores.append(doc.signals[name])
                yield doc.id, doc.signals[name]
        if not scores:
            raise BadUsage(f"no document in {', '.join(map(str, data))}")

    if out is None:
        for _ in scored():
            pass
    else:
        with writing(out), replacing(out) as part:        # on an error, the file that was there before stays
            _write_scores(part, out.suffix, scored())
    values = np.array(scores)
    tenths = {f"{p}%": round(float(v), 6) for p, v in zip((1, 10, 25, 50, 75, 90, 99), np.quantile(
        values, (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99), method="inverted_cdf"))}
    summary = {"documents": len(scores), "bytes": bytes_read, "mean": round(float(values.mean()), 6),
               "quantiles": tenths}
    if json_lines:
        typer.echo(json.dumps(summary))
        return
    typer.echo(f"{len(scores):,} documents, {bytes_read:,} bytes, mean score {summary['mean']:.6g}")
    typer.echo("  " + "  ".join(f"{p} {v:.6g}" for p, v in tenths.items()))
    if out is not None:
        typer.echo(f"  scores: {out}")


def _scorer(model: Path, label: str | None, raw: bool) -> tuple[Stage, str]:
    """Return a stage (the code of a step) that is ready to score documents with `model`, and the name of the signal
    (number) that the stage adds to a document."""
    from stages.catalog import stage_class
    from stages.filter.quality import Quality
    from stages.models.classifier import companion_path

    config: dict[str, Any] = {"model": str(model)} | ({"label": label} if label else {})
    with reading(model):
        if model.is_dir():
            stage: Stage = stage_class("encoder")(config)
        else:
            if companion_path(model, "card.json").exists():
                card = _card(model)
                config |= {"grade": True} if card["kind"] == "grades" and not label else {}
                if "label" not in config and card["kind"] == "labels":
                    raise BadUsage(f"{model} tells {', '.join(card['labels'][:20])} apart; say which with --label")
                config.setdefault("label", card["target"] or card["labels"][0])
            if not raw and companion_path(model, "calibration.json").exists():
                config["calibration"] = str(companion_path(model, "calibration.json"))
            stage = Quality(config)
        try:
            stage.setup()
        except ValueError as e:
            raise BadUsage(str(e)) from None
    return stage, stage.signals[0]


def _write_scores(out: Path, suffix: str, scored: Iterator[tuple[str, float]]) -> None:
    import pyarrow as pa

    from pipeline.base.parquet import parquet_writer

    if suffix == ".jsonl":
        with open(out, "w", encoding="utf-8") as f:
            f.writelines(json.dumps({"id": id, "score": value}) + "\n" for id, value in scored)
        return
    schema = pa.schema([("id", pa.string()), ("score", pa.float64())])
    with parquet_writer(out, schema) as writer:
        while rows := list(islice(scored, _ROWS)):
            writer.write_table(pa.table({"id": [r[0] for r in rows], "score": [r[1] for r in rows]}, schema))


def _card(model: Path) -> dict[str, Any]:
    from stages.models import model_card
    from stages.models.classifier import companion_path
    from stages.stage import file_sha256

    path = companion_path(model, "card.json")
    if not path.exists():
        raise BadUsage(f"{model} has no card ({path}); `tokenmill classifier train` writes one")
    try:
        card = model_card.read(path)
    except ValueError as e:
        raise BadUsage(str(e)) from None
    with reading(model):
        if card["model"]["sha256"] != file_sha256(model):
            raise BadUsage(f"{path} is the card of another model; take the one that was made with {model.name}")
    return card


def _opened(model: Path) -> tuple[dict[str, Any], Classifier]:
    """Open the file of a fastText model. Returns the model's card, and the classifier with its calibration table.
    Raises BadUsage when the card is missing or belongs to another model. If the card says that the model is calibrated,
    the same holds for the calibration file."""
    from stages.models.classifier import Classifier, companion_path
    from stages.scoring import calibration
    from stages.scoring.models import FastText

    card, table = _card(model), None
    try:
        if card["calibration"]:
            table = calibration.read(companion_path(model, "calibration.json"), card["model"]["sha256"])
    except (calibration.CalibrationError, OSError) as e:
        raise BadUsage(f"{e}; the card says the model is calibrated: keep the file beside it") from None
    return card, Classifier(FastText(model), card["kind"], card["labels"], card["target"], table)
