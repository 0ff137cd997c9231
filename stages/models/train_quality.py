"""Trains a fastText classifier, calibrates it, judges it on texts that it was not trained on, and writes its card.

`train` writes four files: the model, `.calibration.json` (`stages.scoring.calibration`; it is missing if too few texts
were held out for calibration), `.card.json` and `.card.md` (`stages.models.model_card`). All files depend only on
texts, labels, settings and seed: on one kind of CPU, equal inputs give equal files, whatever the order of the texts.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.base.files import replacing
from pipeline.base.prf import prf
from stages.filter.quality import Quality, grade_of
from stages.models import drift, measure, model_card
from stages.models.classifier import Classifier, companion_path, kind_of
from stages.models.examples import SIDES, Example, Examples, gather, sample
from stages.scoring import calibration
from stages.scoring.models import FastText
from stages.stage import file_sha256, library_versions

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: most labels of a classifier, and most bytes of a label
MOST_LABELS, LONGEST_LABEL = 1000, 100
#: most texts of a reference corpus that are scored; with this many, the share that a threshold keeps is known to 0.3 %
#: (at 95 % confidence)
MOST_REFERENCE = 50_000


@dataclass(frozen=True)
class FastTextSettings:
    """Settings of fastText's training (Joulin et al. 2016). A model takes about `dim` * 4 bytes of memory for each word
    and for each bucket of word n-grams."""

    dim: int = 32
    epochs: int = 5
    rate: float = 0.1
    word_ngrams: int = 2
    buckets: int = 1 << 18
    min_count: int = 1


def train(labelled: Iterable[tuple[str, str]], out: str | os.PathLike[str], *, seed: int = 0,
          settings: FastTextSettings | None = None, held_out: float = 0.2, most: int | None = None,
          reference: Iterable[str] | None = None, keep: float = 0.1, data: Sequence[dict[str, Any]] = (),
          intended_use: str = "", license: str = "") -> dict[str, Any]:
    """Train a fastText classifier on (label, text) pairs. Writes the model to `out`, and the calibration and the card
    beside the model. Returns the card.

    The labels decide the kind of the classifier:

    - Two labels `hq` and `lq`, or two numbers: a binary classifier. Its score is the probability of `hq` or of the
      greater number.
    - Three numbers or more: grades. The score is the expected grade.
    - Any other labels: a classifier that chooses among labels and has no score.

    A share `held_out` of the clusters of near-duplicates is kept from training: half of these clusters to calibrate and
    half to judge the classifier. With a `reference` corpus, the card of a classifier with scores also gives the
    threshold that keeps the best share `keep` of the corpus' texts. The threshold is measured on texts that were not
    trained on, if there are enough such texts. `most` limits the texts per label. `data`, `intended_use` and `license`
    are copied into the card.

    Raises:
        ValueError: there are fewer than two labels or more than MOST_LABELS, two labels are the same number, a label
            has fewer than two training texts, or fastText cannot use a label.
        RuntimeError: fastText failed; the message holds its error output.
    """
    settings = settings or FastTextSettings()
    out = Path(out)
    examples = gather(labelled, seed, held_out, most)
    labels = _labels(examples)
    kind, target = kind_of(labels)
    parts = {side: examples.of(side) for side in SIDES}
    trained = Counter(example.label for example in parts["train"])
    for label in labels:
        if trained[label] < 2:
            raise ValueError(f"a quality classifier needs two texts or more of each label to train on, '{label}' has "
                             f"{trained[label]}; give more texts, or hold out less")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".quality.") as scratch:
        model_file = Path(scratch) / "model.bin"
        _fit(parts["train"], settings, seed, model_file)
        sha256 = file_sha256(model_file)
        classifier = _calibrated(Classifier(FastText(model_file), kind, labels, target), parts["calibrate"], sha256)
        card: dict[str, Any] = {
            "format": model_card.FORMAT,
            "model": {"file": out.name, "sha256": sha256, "bytes": model_file.stat().st_size},
            "kind": kind, "labels": labels, "target": target,
            "calibration": classifier.table and {name: classifier.table[name] for name in ("method", "documents")},
            "intended_use": intended_use, "license": license,
            "data": list(data), "examples": _account(examples, parts),
            "settings": {**asdict(settings), "seed": seed, "held_out": held_out, "most": most},
            "libraries": library_versions(Quality.libraries),
            "features": model_card.features(classifier.model, labels),
            "measured": judge(classifier, parts["test"], seed)}
        test = [example.text for example in parts["test"]]
        profiles = card["profiles"] = {"held_out": drift.profile(test, classifier.scores(test))} if test else {}
        if reference is not None:
            trained_keys = {example.key for example in parts["train"]}
            texts, counts = _not_trained_on(sample(reference, seed, MOST_REFERENCE), trained_keys)
            scores = classifier.scores(texts)
            if scores.score is not None and texts:
                card["threshold"] = counts | _threshold(texts, scores.score, keep)
            profiles["reference"] = drift.profile(texts, scores)
        # the model is written last, so that after an interruption there is no new model without its calibration table;
        # the table of another model is refused
        if classifier.table is not None:
            _write(companion_path(out, "calibration.json"), json.dumps(classifier.table, separators=(",", ":")) + "\n")
        _write(companion_path(out, "card.md"), model_card.markdown(card))
        _write(companion_path(out, "card.json"), json.dumps(card, indent=1, ensure_ascii=False) + "\n")
        os.replace(model_file, out)
    if classifier.table is None:
        companion_path(out, "calibration.json").unlink(missing_ok=True)
    return card


def _labels(examples: Examples) -> list[str]:
    result = {example.label for example in examples.kept}
    for label in result:
        if not label.isprintable() or label.split() != [label] or len(label.encode()) > LONGEST_LABEL:
            raise ValueError(f"label {label[:40]!r}: a label is one word of at most {LONGEST_LABEL} bytes")
    if not 2 <= len(result) <= MOST_LABELS:
        raise ValueError(f"a quality classifier needs two texts or more of two labels to {MOST_LABELS:,}; there are "
                         f"texts of {', '.join(sorted(result)[:5]) or 'none'}")
    numbers = all(grade_of(label) is not None for label in result)
    if numbers and len({float(label) for label in result}) < len(result):
        raise ValueError(f"labels {', '.join(sorted(result)[:20])}: some are the same number written in two ways")
    return sorted(result, key=lambda label: (float(label), label) if numbers else (0.0, label))


def _account(examples: Examples, parts: dict[str, list[Example]]) -> dict[str, Any]:
    """Return, for the card, a description of the examples: counts of the texts used and left out, and a hash over the
    content of all texts used."""
    digest = hashlib.sha256()
    for example in examples.kept:
        digest.update(f"{example.key} {example.label}\n".encode())
    return {"sha256": digest.hexdigest(), "repeated": examples.repeated, "contradicted": examples.contradicted,
            "surplus": dict(sorted(examples.surplus.items())), "clusters": examples.clusters,
            "largest_cluster": examples.largest,
            **{side: dict(sorted(Counter(example.label for example in part).items())) for side, part in parts.items()}}


def _fit(part: list[Example], settings: FastTextSettings, seed: int, model: Path) -> None:
    """Train a fastText model on the examples `part`, and write it to `model`. The training runs in a separate process
    whose allocator hands out zeroed memory.

    With one thread, fastText initialises only the first tenth of its matrix (DenseMatrix::uniform fills 10 blocks, one
    per thread). The other nine tenths keep what was in the memory before, which makes training random, up to NaN. glibc
    fills memory that it allocates with the complement of MALLOC_PERTURB_, so 255 gives zeros.
    """
    lines = model.with_suffix(".txt")
    with open(lines, "w", encoding="utf-8", newline="\n") as file:
        for example in sorted(part, key=lambda example: prf(seed, "classifier/order", example.key)):
            file.write(f"__label__{example.label} {example.line}\n")
    options = {"dim": settings.dim, "epoch": settings.epochs, "lr": settings.rate, "wordNgrams": settings.word_ngrams,
               "bucket": settings.buckets, "minCount": settings.min_count, "thread": 1, "seed": seed, "verbose": 0}
    environment = dict(os.environ, MALLOC_PERTURB_="255", MALLOC_MMAP_THRESHOLD_="131072",
                       PYTHONSAFEPATH="1")                         # nothing is imported from the current folder
    code = ("import json, sys, fasttext; "
            "fasttext.train_supervised(sys.argv[1], **json.loads(sys.argv[2])).save_model(sys.argv[3])")
    process = subprocess.run([sys.executable, "-c", code, str(lines), json.dumps(options), str(model)], env=environment,
                          capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RuntimeError(f"training a fastText classifier failed:\n{process.stderr[-2000:]}")


def _calibrated(classifier: Classifier, part: list[Example], sha256: str) -> Classifier:
    """Return the classifier with a calibration fitted on the examples `part`. If no calibration can be fitted for the
    grades, or for one of the labels (`calibration.fit`), the classifier is returned unchanged. `sha256` is the hash of
    the model file."""
    raw = classifier.raw([example.text for example in part])
    steps_of_one = round(1 / Quality.grid)
    tables: dict[str, Any] = {}
    grade = method = None
    if classifier.kind == "grades" and raw.score is not None:
        low, high = (round(float(classifier.labels[i]) / Quality.grid) for i in (0, -1))
        grades = [float(example.label) / Quality.grid for example in part]
        fitted = calibration.fit(raw.score, grades, low, high, graded=True)
        if fitted is None:
            return classifier
        method, grade = fitted
    else:
        for column, label in enumerate(classifier.labels):
            truths = [steps_of_one * (example.label == label) for example in part]
            fitted = calibration.fit(raw.probabilities[:, column], truths, 0, steps_of_one)
            if fitted is None:
                return classifier
            method, tables[label] = fitted
    return replace(classifier, table={
        "format": calibration.FORMAT, "model_sha256": sha256, "grid": Quality.grid, "method": method,
        "documents": len(part), "labels": tables, "grade": grade})


def judge(classifier: Classifier, part: list[Example], seed: int) -> dict[str, Any]:
    """Measure how well the classifier works on the labelled texts `part`, and return the results for the card. The
    classifier is judged by yes-or-no questions about a text, and each question by itself. With a target label, the only
    question is whether a text has this label. With other labels, there is such a question for each label. With grades,
    there is a question for each grade but the lowest: whether a text has at least that grade. A question with the same
    answer for all texts is left out."""
    raw = classifier.raw([example.text for example in part])
    scores, truth = classifier.calibrated(raw), [example.label for example in part]
    questions: list[tuple[str, Any, Any, NDArray[np.bool_]]] = []
    if classifier.kind == "grades":
        grades = np.array([float(label) for label in truth])
        questions += [(f"grade >= {label}", scores.score, None, grades >= float(label))
                      for label in classifier.labels[1:]]
    else:
        for label in [classifier.target] if classifier.target is not None else classifier.labels:
            column = classifier.labels.index(label)
            questions.append((label, scores.probabilities[:, column], raw.probabilities[:, column],
                              np.array([label_of_text == label for label_of_text in truth], bool)))
    hits = [guess == label_of_text for guess, label_of_text in zip(raw.best(), truth)]
    result: dict[str, Any] = {
        "documents": len(part), "accuracy": round(sum(hits) / len(hits), 4) if hits else None,
        "questions": [_question(*question, calibrated=classifier.table is not None, seed=seed) for question in questions
                      if question[3].any() and not question[3].all()]}
    if classifier.kind == "grades" and part:
        result["mean_absolute_error"] = round(float(np.abs(scores.values() - grades).mean()), 4)
    return result


def _question(name: str, scores: NDArray[np.int64], raw: NDArray[np.int64] | None, good: NDArray[np.bool_],
              calibrated: bool, seed: int) -> dict[str, Any]:
    """Measure how well scores tell good documents from all others, and return the results for the card. `name` is the
    question that the scores answer: a label such as "hq", or "grade >= 3". `good` says for which documents the answer
    is yes. `raw` holds the scores before calibration."""
    values = (scores * Quality.grid).round(10)                         # as the step writes them, for thresholds
    ranking = measure.Ranking(values, good)
    measures = {"roc_auc": ranking.auc, "average_precision": ranking.average_precision}
    resampled = measure.bootstrap(measures, len(good), seed)
    result: dict[str, Any] = {
        "question": name, "good": int(good.sum()), "documents": len(good), "roc_auc": round(ranking.auc(), 4),
        "roc_auc_95": measure.interval(resampled["roc_auc"]),
        "average_precision": round(ranking.average_precision(), 4),
        "average_precision_95": measure.interval(resampled["average_precision"]), "curve": ranking.curve()}
    if raw is not None:
        result["calibration_error"] = round(measure.calibration_error(values, good), 4)
        result["brier"] = round(measure.brier(values, good), 4)
        if calibrated:
            result["calibration_error_before"] = round(measure.calibration_error(raw * Quality.grid, good), 4)
            result["brier_before"] = round(measure.brier(raw * Quality.grid, good), 4)
    return result


def _not_trained_on(sampled: list[tuple[str, str]], trained: set[str]) -> tuple[list[str], dict[str, int]]:
    """Choose those texts of the reference corpus on which the classifier was not trained. `sampled` holds (content key,
    text) pairs, and `trained` the keys of the training texts. Returns (texts, counts for the card).

    A model is more certain about texts on which it was trained, so a threshold chosen by such texts would keep another
    share of new texts. If too few texts are left, all sampled texts are returned.
    """
    unseen = [text for key, text in sampled if key not in trained]
    if len(unseen) < drift.FEWEST_DOCUMENTS:
        return [text for _, text in sampled], {"left_out": 0, "trained_on": len(sampled) - len(unseen)}
    return unseen, {"left_out": len(sampled) - len(unseen), "trained_on": 0}


def _threshold(texts: list[str], scores: NDArray[np.int64], keep: float) -> dict[str, Any]:
    """Find the score threshold that keeps the best share `keep` of a reference corpus, counted in documents. Returns an
    entry for the card: the threshold, and the share of the documents and of the bytes that it really keeps."""
    threshold = measure.threshold_keeping(scores, keep)
    kept = scores >= threshold
    sizes = np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts], np.float64)
    # a threshold above every score is rounded up to the next step of the grid, which no document of the reference
    # reaches
    step = int(np.ceil(threshold))
    return {"min": round(step * Quality.grid, 10), "asked": keep, "documents": len(texts),
            "kept": round(float(kept.mean()), 4), "kept_bytes": round(float(sizes[kept].sum() / sizes.sum()), 4)}


def _write(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
