"""Makes the report's section about training, from the files that the trainer wrote to runs/RUN/train."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html import escape
from typing import Any

from pipeline.store.fs import Store
from stages.scrub.pii import scrub_text

#: elements of the trainer's plot; any other element in the file is left out
ELEMENTS = {"svg", "g", "rect", "line", "polyline", "circle", "path", "text", "title"}
NUMBERS = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "width", "height", "points", "viewBox", "d"}
CLASSES = {"bg", "grid", "axis", "phase", "band", "name", "title", "raw", "loss", "held", "dot", "rate", "entropy"}
#: maximum bytes of a plot that is embedded
LARGEST = 1 << 20
SAMPLE_CHARS = 1000

KEYS = ("parameters", "parameters_without_embeddings", "steps", "tokens", "seconds", "tokens_per_s", "train_loss_last",
        "heldout_loss_before", "heldout_loss", "unigram_entropy", "ratio", "gap", "streams", "sample_skipped")


def training(store: Store, run: str) -> dict[str, Any] | None:
    """Return the results of a training. They are the losses, the speed and a sample of generated text
    (train/summary.json), and the loss curve as SVG (train/loss.svg). If checkpoints were scored on tasks, the latest
    scores and the curves of scores are included (train/tasks.jsonl and tasks.svg). Returns None when there is no
    summary.json, because no model has been trained on the run."""
    folder = f"runs/{run}/train"
    if not store.exists(f"{folder}/summary.json"):
        return None
    summary = json.loads(store.read(f"{folder}/summary.json"))
    curve = None
    if store.exists(f"{folder}/loss.svg"):
        curve = sanitised(store.read(f"{folder}/loss.svg"))
    scores: dict[str, Any] = {}
    if store.exists(f"{folder}/tasks.jsonl") and (tasks := latest_scores(store.read(f"{folder}/tasks.jsonl"))):
        scores = {"tasks": tasks}
        if store.exists(f"{folder}/tasks.svg"):
            scores["task_curves"] = sanitised(store.read(f"{folder}/tasks.svg"), "Scores on tasks over tokens")
    sample = summary.get("sample")
    return {**{k: summary.get(k) for k in KEYS}, "curve": curve,
            "sample": scrub_text(sample[:SAMPLE_CHARS]) if sample else None, **scores}


def latest_scores(data: bytes) -> list[dict[str, Any]]:
    """Return, for each task, the scores of the last checkpoint that was scored on this task. `data` is the content of
    tasks.jsonl. Lines that are no scores are left out."""
    latest: dict[str, list[dict[str, Any]]] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
            score: dict[str, Any] = {"task": str(row["task"]), "measure": str(row["measure"]), "step": int(row["step"]),
                     **{key: None if row.get(key) is None else float(row[key])
                        for key in ("value", "stderr", "chance")}}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if score["value"] is None:
            continue
        known = latest.setdefault(score["task"], [])
        if known and known[0]["step"] < score["step"]:
            known.clear()
        if not known or known[0]["step"] == score["step"]:
            known.append(score)
    return [score for _, scores in sorted(latest.items()) for score in scores]


def sanitised(data: bytes, title: str = "Loss and learning rate over tokens, with the phases of the run") -> str | None:
    """Return a plot of the trainer as SVG that is safe to embed in a page, with an accessible `title`. None when `data`
    is not an SVG of the expected form. Only known elements, numeric attributes and known classes (with the prefix `t-`)
    are kept. The styles of the plot therefore cannot affect the page, and a script cannot get in if somebody has
    replaced the file."""
    if len(data) > LARGEST or b"<!" in data:  # refuse DOCTYPE and entities, which could expand without limit
        return None
    try:
        root = ET.fromstring(data)
    except ET.ParseError:
        return None
    if _name(root) != "svg" or not _numeric(root.get("viewBox", "")):
        return None
    return _element(root, f' role="img" aria-label="{title}"')


def _name(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _numeric(value: str) -> bool:
    return bool(value) and all(c in "0123456789+-.,eE% MLHVCSQTAZmlhvcsqtaz" for c in value)


def _element(element: ET.Element, more: str = "") -> str:
    name = _name(element)
    if name not in ELEMENTS:
        return ""
    attributes = [f'{k}="{v}"' for k, v in element.attrib.items() if k in NUMBERS and _numeric(v)
            and not (name == "svg" and k in ("width", "height"))]
    if element.get("class") in CLASSES:
        attributes.append(f'class="t-{element.get("class")}"')
    if element.get("text-anchor") in ("start", "middle", "end"):
        attributes.append(f'text-anchor="{element.get("text-anchor")}"')
    inside = escape(element.text or "") if name in ("text", "title") else ""
    return f"<{name} {' '.join(attributes)}{more}>{inside}{''.join(_element(child) for child in element)}</{name}>"
