"""Defines Classifier: a trained fastText model with its kind (binary, grades or labels), its labels and its
calibration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.filter.quality import Quality, grade_of
from stages.scoring import calibration
from stages.scoring.models import FastText

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: default labels of a binary classifier, for good texts and for others
GOOD, REST = "hq", "lq"


@dataclass(frozen=True)
class Scores:
    """The results of a classifier for n texts, as integers: probabilities and grades are divided by `Quality.grid`, the
    step to which the recipe step `quality` rounds scores. `probabilities`, int64[n, labels], holds the probability of
    each of the classifier's labels. `score`, int64[n], is the probability of the target label or the expected grade. It
    is None if the classifier only chooses among labels."""

    labels: list[str]
    probabilities: NDArray[np.int64]
    score: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.probabilities)

    def values(self) -> NDArray[np.float64] | None:
        """Return the score of each text as the step `quality` writes it: a probability (0 … 1) or a grade, not an
        integer. Returns None if the classifier only chooses among labels."""
        return None if self.score is None else (self.score * np.float64(Quality.grid)).round(10)

    def best(self) -> list[str]:
        """Return the most probable label of each text."""
        return [self.labels[i] for i in self.probabilities.argmax(axis=1)] if len(self) else []


@dataclass(frozen=True)
class Classifier:
    """A fastText model with what is needed to use its predictions. `labels` are sorted, as numbers if they are grades
    and otherwise by the alphabet. `kind` is "binary", "grades" or "labels". `target` is the label for good texts of a
    binary classifier, otherwise None. `table` is the content of the calibration file; None if there is no such file."""

    model: FastText
    kind: str
    labels: list[str]
    target: str | None
    table: dict[str, Any] | None = None

    def raw(self, texts: Sequence[str]) -> Scores:
        """Return the scores of texts by fastText's probabilities, without calibration."""
        probabilities = np.zeros((len(texts), len(self.labels)), np.int64)
        grades = np.zeros(len(texts), np.int64)
        columns = {label: column for column, label in enumerate(self.labels)}
        for row, text in enumerate(texts):
            predictions = self.model.predict(text, k=-1)
            for label, probability in predictions:
                probabilities[row, columns[label]] = round(min(1.0, probability) / Quality.grid)
            if self.kind == "grades":
                grades[row] = Quality.expected(predictions, self.labels)
        return self._scores(probabilities, grades)

    def scores(self, texts: Sequence[str]) -> Scores:
        """Return the scores of texts, calibrated if the classifier has a calibration. The recipe step `quality` gives a
        text the same score."""
        return self.calibrated(self.raw(texts))

    def calibrated(self, raw: Scores) -> Scores:
        if self.table is None:
            return raw
        if self.kind == "grades" and raw.score is not None:
            grade = calibration.Table(self.table["grade"])
            return Scores(raw.labels, raw.probabilities, np.array([grade(int(score)) for score in raw.score], np.int64))
        columns = [[table(int(probability)) for probability in raw.probabilities[:, i]] for i, table in enumerate(
            calibration.Table(self.table["labels"][label]) for label in raw.labels)]
        return self._scores(np.array(columns, np.int64).T.reshape(raw.probabilities.shape), None)

    def _scores(self, probabilities: NDArray[np.int64], grades: NDArray[np.int64] | None) -> Scores:
        if self.kind == "grades":
            return Scores(self.labels, probabilities, grades)
        return Scores(self.labels, probabilities,
                      None if self.target is None else probabilities[:, self.labels.index(self.target)])


def kind_of(labels: Sequence[str]) -> tuple[str, str | None]:
    """Return (kind, target label) of a classifier with these labels.

    - GOOD and REST: the kind is "binary", and the target is GOOD.
    - Two numbers: the kind is "binary", and the target is the greater one.
    - More than two numbers: the kind is "grades", and the target is None.
    - All other labels: the kind is "labels", and the target is None.
    """
    if sorted(labels) == sorted((GOOD, REST)):
        return "binary", GOOD
    if all(grade_of(label) is not None for label in labels):
        return ("binary", max(labels, key=float)) if len(labels) == 2 else ("grades", None)
    return "labels", None


def companion_path(model: str | os.PathLike[str], ending: str) -> Path:
    """Return the path of a file that belongs to a model, such as its card. The path is that of the model with its
    ending replaced: for the model quality.bin and the ending "card.json", it is quality.card.json."""
    return Path(model).with_suffix("." + ending)
