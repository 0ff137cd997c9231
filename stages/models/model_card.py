"""A classifier's card, as JSON and as a page: what it was trained on, how well it performs, and which words decide its
scores.

The card holds no text of a document. It shows only single words (pairs of words are hashed and have no names), and only
words of letters that occur at least ten times in the training texts, so that it shows no address, number or name of one
person.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from stages.scoring.models import FastText

FORMAT = "tokenmill-classifier-card/1"
#: words shown for a label, and times a word must occur in the training texts to be shown
SHOWN, SEEN = 25, 10


def read(path: str | Path) -> dict[str, Any]:
    """The card of a model.

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
    """For each label the words that speak most for it: [word, strength, times seen], the strongest first.

    The strength of a word is what one occurrence adds to the logit of the label, minus the mean of what it adds to the
    other labels, times ln(1 + times seen). The last factor lowers rare words: the model memorises a word that it has
    seen only twice, so such a word says little about other texts.
    """
    words, counts, vectors, outputs, order = model.matrices()
    at = [i for i, (word, n) in enumerate(zip(words, counts)) if n >= SEEN and word.isalpha()]
    if not at:
        return {label: [] for label in labels}
    logits = vectors[at].astype(np.float64) @ outputs.astype(np.float64).T           # [words, labels]
    weight = np.log1p(np.array(counts, np.float64)[at])
    result = {}
    for label in labels:
        column = order.index(label)
        others = (logits.sum(axis=1) - logits[:, column]) / (len(order) - 1)
        strength = (logits[:, column] - others) * weight
        best = np.argsort(-strength, kind="stable")[:SHOWN]
        result[label] = [[words[at[i]], round(float(strength[i]), 3), int(counts[at[i]])] for i in best
                        if strength[i] > 0]
    return result


def decimal(score: float) -> str:
    """A score with all its digits, written so that YAML reads a number (it reads 1e-06 as a string)."""
    return f"{score:.6f}".rstrip("0").rstrip(".")


def markdown(card: dict[str, Any]) -> str:
    """The card as a page."""
    name = card["model"]["file"]
    kind = {"binary": f"binary, for `{card['target']}`", "grades": "grades; the score is the expected one",
            "labels": "a choice of labels"}[card["kind"]]
    out = [f"# Model card: {name}", "",
           f"fastText classifier ({kind}; labels {', '.join(f'`{_cell(v)}`' for v in _few(card['labels']))}), "
           f"{card['model']['bytes']:,} bytes, sha256 `{card['model']['sha256']}`.", "",
           f"**Intended use.** {card['intended_use'] or 'Not stated by whoever trained it.'}", "",
           f"**Licence.** {card['license'] or 'Not stated; that of the training texts may bind the model.'}", "",
           "## Data", ""]
    if card["data"]:
        out += ["| label | file | documents | bytes | sha256 |", "|---|---|---|---|---|"]
        out += [f"| {_cell(d['label'])} | {_cell(d['file'])} | {d['documents']:,} | {d['bytes']:,} | "
                f"`{d['sha256'][:16]}…` |" for d in card["data"]]
        out.append("")
    e = card["examples"]
    out += ["| texts | " + " | ".join(_cell(v) for v in card["labels"]) + " |",
            "|---" * (len(card["labels"]) + 1) + "|"]
    for side, said in (("train", "trained on"), ("calibrate", "calibrated on"), ("test", "judged on")):
        out.append(f"| {said} | " + " | ".join(f"{e[side].get(v, 0):,}" for v in card["labels"]) + " |")
    surplus = sum(e["surplus"].values())
    out += ["", f"Left out: {e['repeated']:,} repeated texts, {e['contradicted']:,} under more than one label"
            + (f", {surplus:,} beyond the {card['settings']['most']:,} wanted of a label" if surplus else "")
            + f". {e['clusters']:,} clusters of near-duplicates (the largest: {e['largest_cluster']:,} texts) stand on "
            f"one side of the split each. Hash of all examples: `{e['sha256'][:16]}…`.", "",
            "## Training", "",
            ", ".join(f"{k} {'none' if v is None else v}" for k, v in card["settings"].items()) + "; "
            + ", ".join(f"{k} {v}" for k, v in card["libraries"].items()) + ".", ""]
    out += _measured(card) + _threshold(card) + _features(card) + _profiles(card)
    return "\n".join(out).rstrip() + "\n"


def _measured(card: dict[str, Any]) -> list[str]:
    m, c = card["measured"], card["calibration"]
    out = ["## Judged on held-out texts", ""]
    if not m["questions"]:
        return [*out, f"{m['documents']} held-out texts: too few to judge by.", ""]
    out += [f"{m['documents']:,} texts, {m['accuracy']:.1%} given the right label"
            + (f", expected grade off by {m['mean_absolute_error']:.2f}" if "mean_absolute_error" in m else "")
            + ". Intervals hold 95 % of 1,000 bootstrap samples.", "",
            "| question | good / all | ROC-AUC | average precision | calibration error | Brier |",
            "|---|---|---|---|---|---|"]
    for q in m["questions"]:
        cells = [_cell(q["question"]), f"{q['good']:,} / {q['documents']:,}"]
        cells += [f"{q[k]:.3f} {_interval(q[k + '_95'])}" for k in ("roc_auc", "average_precision")]
        for k in ("calibration_error", "brier"):
            before = f" (before calibration {q[k + '_before']:.3f})" if k + "_before" in q else ""
            cells.append(f"{q[k]:.3f}{before}" if k in q else "–")
        out.append("| " + " | ".join(cells) + " |")
    how = f"{c['method']} on {c['documents']:,} texts that are in neither of the other parts" if c else \
        "none: too few held-out texts; scores are fastText's own"
    out += ["", f"Calibration: {how}.", ""]
    q = m["questions"][-1 if card["kind"] != "grades" else len(m["questions"]) // 2]
    out += [f"Precision and recall, {_cell(q['question'])}:", "", "| threshold | precision | recall | F1 | kept |",
            "|---|---|---|---|---|"]
    for p in q["curve"]:
        numbers = " | ".join(f"{p[k]:.3f}" for k in ("precision", "recall", "f1"))
        out.append(f"| {decimal(p['threshold'])} | {numbers} | {p['kept']:.1%} |")
    return [*out, ""]


def _threshold(card: dict[str, Any]) -> list[str]:
    t = card.get("threshold")
    return [] if not t else [
        "## Threshold", "", f"`min: {decimal(t['min'])}` keeps {t['kept']:.1%} of the {t['documents']:,} documents of "
        f"the reference corpus (asked for: {t['asked']:.1%}) with {t['kept_bytes']:.1%} of its bytes. "
        + (f"{t['left_out']:,} more were trained on and do not count." if t["left_out"] else "")
        + (f"{t['trained_on']:,} of them were trained on: of new documents it keeps another share."
           if t["trained_on"] else ""), ""]


def _features(card: dict[str, Any]) -> list[str]:
    shown = {label: words for label, words in card["features"].items() if words}
    if not shown:
        return []
    out = ["## What it goes by", "",
           f"Words seen {SEEN} times or more, the strongest first; pairs of words count, too, but have no names.", ""]
    for label in _few(list(shown)):
        out += [f"- {_cell(label)}: " + ", ".join(_cell(word) for word, _, _ in shown[label])]
    return [*out, ""]


def _profiles(card: dict[str, Any]) -> list[str]:
    if not card["profiles"]:
        return []
    out = ["## What `classifier check` compares with", "",
           "| corpus | documents | scores 10 / 50 / 90 % | characters 10 / 50 / 90 % | languages |",
           "|---|---|---|---|---|"]
    for name, p in card["profiles"].items():
        languages = p.get("languages", {})
        most = ", ".join(f"{k or 'none'} {v / p['documents']:.0%}" for k, v in list(languages.items())[:3]) or "–"
        out.append(f"| {name} | {p['documents']:,} | {_tenths(p.get('scores'))} | {_tenths(p['lengths'])} | {most} |")
    return [*out, ""]


def _tenths(d: dict[str, Any] | None) -> str:
    if not d or not d["at"]:
        return "–"
    at = [d["at"][min(len(d["at"]) - 1, int(np.searchsorted(d["below"], share)))] for share in (0.1, 0.5, 0.9)]
    return " / ".join(f"{v:,.6g}" for v in at)


def _interval(pair: list[float] | None) -> str:
    return "" if pair is None or any(math.isnan(v) for v in pair) else f"[{pair[0]:.3f}, {pair[1]:.3f}]"


def _few(names: list[str], most: int = 30) -> list[str]:
    return names if len(names) <= most else [*names[:most], f"… {len(names) - most} more"]


def _cell(text: str) -> str:
    """Text escaped for a cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ").replace("`", "'")
