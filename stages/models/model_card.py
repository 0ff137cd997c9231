"""Makes a classifier's model card, as JSON and as a page: what the classifier was trained on, how well it performs, and
which words decide its scores.

The card holds no text of a document. It shows only single words that consist of letters and occur at least ten times in
the training texts; pairs of words are known only by their hashes. The card therefore shows no numbers and no addresses,
and hardly ever the name of a private person.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from stages.scoring.models import FastText

FORMAT = "tokenmill-classifier-card/1"
#: most words that are shown for a label, and how often a word must occur in the training texts to be shown
MOST_WORDS, FEWEST_OCCURRENCES = 25, 10


def read(path: str | Path) -> dict[str, Any]:
    """Read the card of a classifier (a JSON file that says how it was trained and how well it performs).

    Raises:
        ValueError: the file is not a card; the message says what to do.
    """
    try:
        card = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no model card: {e}") from None
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise ValueError(f"{path} is no model card; `tokenmill classifier train` writes one beside its model")
    return card


def features(model: FastText, labels: list[str]) -> dict[str, list[list[Any]]]:
    """Return, for each label of a classifier, the words that speak most for this label, as [word, strength, number of
    occurrences in training]. The strongest word comes first, and there are at most MOST_WORDS. Only words of letters
    that occur at least FEWEST_OCCURRENCES times and have a strength above 0 are returned.

    The strength of a word is a product of two factors. One is what an occurrence of the word adds to the logit of the
    label, minus the mean of what it adds to the other labels. The other is ln(1 + number of occurrences), which weakens
    rare words. The model memorises a word that it has seen only twice, so such a word says little about other texts.
    """
    words, counts, vectors, outputs, order = model.matrices()
    eligible = [i for i, (word, count) in enumerate(zip(words, counts))
                if count >= FEWEST_OCCURRENCES and word.isalpha()]
    if not eligible:
        return {label: [] for label in labels}
    logits = vectors[eligible].astype(np.float64) @ outputs.astype(np.float64).T           # [words, labels]
    weight = np.log1p(np.array(counts, np.float64)[eligible])
    result = {}
    for label in labels:
        column = order.index(label)
        others = (logits.sum(axis=1) - logits[:, column]) / (len(order) - 1)
        strength = (logits[:, column] - others) * weight
        best = np.argsort(-strength, kind="stable")[:MOST_WORDS]
        result[label] = [[words[eligible[i]], round(float(strength[i]), 3), int(counts[eligible[i]])] for i in best
                         if strength[i] > 0]
    return result


def decimal(score: float) -> str:
    """Format a score without an exponent, so that YAML reads it as a number (YAML reads 1e-06 as a string)."""
    return f"{score:.6f}".rstrip("0").rstrip(".")


def markdown(card: dict[str, Any]) -> str:
    """Return the card of a classifier as a Markdown page."""
    name, examples = card["model"]["file"], card["examples"]
    labels, settings = ", ".join(f"`{_cell(label)}`" for label in _first_names(card["labels"])), card["settings"]
    kind = {"binary": f"binary, for `{card['target']}`", "grades": "grades; the score is the expected one",
            "labels": "a choice of labels"}[card["kind"]]
    out = [f"# Model card: {name}", "",
           f"fastText classifier ({kind}; labels {labels}), {card['model']['bytes']:,} bytes, "
           f"sha256 `{card['model']['sha256']}`.", "",
           f"**Intended use.** {card['intended_use'] or 'Not stated by whoever trained it.'}", "",
           f"**Licence.** {card['license'] or 'Not stated; that of the training texts may bind the model.'}", "",
           "## Data", ""]
    if card["data"]:
        out += ["| label | file | documents | bytes | sha256 |", "|---|---|---|---|---|"]
        out += [f"| {_cell(file['label'])} | {_cell(file['file'])} | {file['documents']:,} | {file['bytes']:,} | "
                f"`{file['sha256'][:16]}…` |" for file in card["data"]]
        out.append("")
    out += ["| texts | " + " | ".join(_cell(label) for label in card["labels"]) + " |",
            "|---" * (len(card["labels"]) + 1) + "|"]
    for side, use in (("train", "trained on"), ("calibrate", "calibrated on"), ("test", "judged on")):
        out.append(f"| {use} | " + " | ".join(f"{examples[side].get(label, 0):,}" for label in card["labels"]) + " |")
    surplus = sum(examples["surplus"].values())
    out += ["", f"Left out: {examples['repeated']:,} repeated texts, {examples['contradicted']:,} under more than one "
            "label" + (f", {surplus:,} beyond the {settings['most']:,} wanted of a label" if surplus else "")
            + f". {examples['clusters']:,} clusters of near-duplicates (the largest: {examples['largest_cluster']:,} "
            f"texts) stand on one side of the split each. Hash of all examples: `{examples['sha256'][:16]}…`.", "",
            "## Training", "",
            ", ".join(f"{key} {'none' if value is None else value}" for key, value in settings.items()) + "; "
            + ", ".join(f"{library} {version}" for library, version in card["libraries"].items()) + ".", ""]
    out += _measured(card) + _threshold(card) + _features(card) + _profiles(card)
    return "\n".join(out).rstrip() + "\n"


def _measured(card: dict[str, Any]) -> list[str]:
    measured, calibration = card["measured"], card["calibration"]
    out, graded = ["## Judged on held-out texts", ""], "mean_absolute_error" in measured
    if not measured["questions"]:
        return [*out, f"{measured['documents']} held-out texts: too few to judge by.", ""]
    out += [f"{measured['documents']:,} texts, {measured['accuracy']:.1%} given the right label"
            + (f", expected grade off by {measured['mean_absolute_error']:.2f}" if graded else "")
            + ". Intervals hold 95 % of 1,000 bootstrap samples.", "",
            "| question | good / all | ROC-AUC | average precision | calibration error | Brier |",
            "|---|---|---|---|---|---|"]
    for question in measured["questions"]:
        cells = [_cell(question["question"]), f"{question['good']:,} / {question['documents']:,}"]
        cells += [f"{question[key]:.3f} {_interval(question[key + '_95'])}" for key in ("roc_auc", "average_precision")]
        for key in ("calibration_error", "brier"):
            before = key + "_before"
            uncalibrated = f" (before calibration {question[before]:.3f})" if before in question else ""
            cells.append(f"{question[key]:.3f}{uncalibrated}" if key in question else "–")
        out.append("| " + " | ".join(cells) + " |")
    how = "none: too few held-out texts; scores are fastText's own"
    if calibration:
        how = f"{calibration['method']} on {calibration['documents']:,} texts that are in neither of the other parts"
    out += ["", f"Calibration: {how}.", ""]
    question = measured["questions"][-1 if card["kind"] != "grades" else len(measured["questions"]) // 2]
    out += [f"Precision and recall, {_cell(question['question'])}:", "",
            "| threshold | precision | recall | F1 | kept |", "|---|---|---|---|---|"]
    for point in question["curve"]:
        numbers = " | ".join(f"{point[key]:.3f}" for key in ("precision", "recall", "f1"))
        out.append(f"| {decimal(point['threshold'])} | {numbers} | {point['kept']:.1%} |")
    return [*out, ""]


def _threshold(card: dict[str, Any]) -> list[str]:
    threshold = card.get("threshold")
    return [] if not threshold else [
        "## Threshold", "",
        f"`min: {decimal(threshold['min'])}` keeps {threshold['kept']:.1%} of the {threshold['documents']:,} documents "
        f"of the reference corpus (asked for: {threshold['asked']:.1%}) with {threshold['kept_bytes']:.1%} of its "
        "bytes. "
        + (f"{threshold['left_out']:,} more were trained on and do not count." if threshold["left_out"] else "")
        + (f"{threshold['trained_on']:,} of them were trained on: of new documents it keeps another share."
           if threshold["trained_on"] else ""), ""]


def _features(card: dict[str, Any]) -> list[str]:
    words_by_label = {label: words for label, words in card["features"].items() if words}
    if not words_by_label:
        return []
    out = ["## What it goes by", "",
           f"Words seen {FEWEST_OCCURRENCES} times or more, the strongest first; pairs of words count, too, but have "
           "no names.", ""]
    for label in _first_names(list(words_by_label)):
        out += [f"- {_cell(label)}: " + ", ".join(_cell(word) for word, _, _ in words_by_label[label])]
    return [*out, ""]


def _profiles(card: dict[str, Any]) -> list[str]:
    if not card["profiles"]:
        return []
    out = ["## What `classifier check` compares with", "",
           "| corpus | documents | scores 10 / 50 / 90 % | characters 10 / 50 / 90 % | languages |",
           "|---|---|---|---|---|"]
    for corpus, profile in card["profiles"].items():
        languages = profile.get("languages", {})
        documents = profile["documents"]
        top_languages = [f"{name or 'none'} {count / documents:.0%}" for name, count in list(languages.items())[:3]]
        out.append(f"| {corpus} | {documents:,} | {_tenths(profile.get('scores'))} | {_tenths(profile['lengths'])} | "
                   f"{', '.join(top_languages) or '–'} |")
    return [*out, ""]


def _tenths(distribution: dict[str, Any] | None) -> str:
    """Format, for a table of the card, the three values of a distribution below which 10, 50 and 90 % of it lie."""
    if not distribution or not distribution["at"]:
        return "–"
    points, below = distribution["at"], distribution["below"]
    values = [points[min(len(points) - 1, int(np.searchsorted(below, share)))] for share in (0.1, 0.5, 0.9)]
    return " / ".join(f"{value:,.6g}" for value in values)


def _interval(pair: list[float] | None) -> str:
    return "" if pair is None or any(math.isnan(bound) for bound in pair) else f"[{pair[0]:.3f}, {pair[1]:.3f}]"


def _first_names(names: list[str], most: int = 30) -> list[str]:
    """Return the first `most` names, for display. If there are more names, a last entry says how many were left out."""
    return names if len(names) <= most else [*names[:most], f"… {len(names) - most} more"]


def _cell(text: str) -> str:
    """Return the text escaped for a cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ").replace("`", "'")
