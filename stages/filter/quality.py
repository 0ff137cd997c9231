"""The filter `quality`: scores documents by a fastText classifier, and drops those with a low score.
`stages.models.train_quality` trains such a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.scoring.models import FastText, labels_of
from stages.stage import Bound, Stage, StageConfig, decision, file_sha256, resource
from stages.stage import signal as setting

if TYPE_CHECKING:
    from stages.document import Document
    from stages.scoring.calibration import Table


class Quality(Stage):
    """Score documents by a fastText classifier and keep the good ones (DCLM-baseline, arXiv 2406.11794, section 4.4).

    The score is the probability of the label in the setting `label`, rounded to 6 digits before it is used. DCLM keeps
    the best tenth; with DCLM's model, the threshold for this share was 0.018112. A threshold fits only one model and
    corpus, so choose your own by `tokenmill classifier train --reference` or by the report's histogram of the score.

    With `grade`, the labels of the model are grades, that is, numbers (FineWeb-Edu's 0 … 5), and the score is the mean
    grade, weighted by the probabilities of the labels.

    With `calibration`, fastText's score becomes a calibrated probability: a table of integers fitted on held-out
    documents (`stages.scoring.calibration`) is applied to the rounded score, in integer arithmetic. Calibration never
    reverses the order of two documents.
    """

    name = "quality"
    version = 2
    cost_ms = 0.5
    leaves = 0.5
    drops = True
    exact = False
    grid = 1e-6
    libraries = ("fasttext-numpy2",)
    signals = ("quality_score",)

    class Config(StageConfig):
        model: str = resource(..., "fastText classifier, e.g. one made by `tokenmill classifier train`")
        calibration: str | None = resource(None, "the file MODEL.calibration.json made with it; null: the score as "
                                                 "fastText gives it")
        label: str = setting("hq", "the label whose probability is the score, without __label__")
        grade: bool = setting(False, "labels are numbers, and the score is the grade to expect; `label` does not count")
        signal: str = setting("quality_score", "name of the signal, where a dataset is scored by several models",
                              pattern=r"^[a-z][a-z0-9_]{0,62}$")
        min: float = decision(0.5, "keep documents that score at least this")

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.signals = (self.config.signal,)
        size = Path(self.config.model).stat().st_size if Path(self.config.model).is_file() else 0
        self.memory_mb = 150 + 2 * (size >> 20)  # fastText reads the model into memory and needs buffers besides

    def problems(self) -> dict[str, str]:
        from stages.scoring import calibration

        result: dict[str, str] = {}
        labels = labels_of(self.config.model)
        if labels is not None:
            result |= self._label_problem(labels)
        if self.config.calibration is not None:
            try:
                calibration.read(self.config.calibration, file_sha256(self.config.model))
            except OSError:
                pass                                                # not on this machine: `setup` raises the error
            except calibration.CalibrationError as e:
                result["calibration"] = str(e)
        return result

    def _label_problem(self, labels: frozenset[str]) -> dict[str, str]:
        model, label = self.config.model, self.config.label
        if self.config.grade:
            not_grades = sorted(name for name in labels if grade_of(name) is None)
            return {"grade": f"{model} has labels that are no numbers: {', '.join(not_grades[:5])}; leave out `grade`, "
                             f"and name a label"} if not_grades else {}
        return {"label": f"{model} has no label '{label}'; it has {', '.join(sorted(labels))}"} \
            if label not in labels else {}

    def setup(self) -> None:
        self._model = FastText(self.config.model)
        self._labels = self._model.labels()
        for field, message in self._label_problem(frozenset(self._labels)).items():
            raise ValueError(f"quality: {field}: {message}")
        self._table = self._read_table()

    def _read_table(self) -> Table | None:
        from stages.scoring import calibration

        if self.config.calibration is None:
            return None
        content = calibration.read(self.config.calibration, file_sha256(self.config.model))
        knots = content.get("grade") if self.config.grade else content["labels"].get(self.config.label)
        if knots is None or content.get("grid") != self.grid:
            target = "grades" if self.config.grade else f"label '{self.config.label}'"
            raise calibration.CalibrationError(f"{self.config.calibration} holds no table for {target} on the grid "
                                               f"{self.grid:g}; leave out `calibration`, or train again")
        return calibration.Table(knots)

    def score(self, text: str) -> float:
        """Return the score of a text, after calibration if there is one. It is a multiple of `grid`, the step to which
        scores are rounded. If fastText knows no word of the text, the score before calibration is 0 (with `grade`, the
        lowest grade)."""
        step = self.raw(text)
        return round((step if self._table is None else self._table(step)) * self.grid, 10)

    def raw(self, text: str) -> int:
        """Return the score of a text before calibration, as an integer: the score divided by `grid`, the step to which
        scores are rounded."""
        predictions = self._model.predict(text, k=-1)
        if self.config.grade:
            return self.expected(predictions, self._labels)
        # fastText adds 1e-5 before the logarithm, so its probability can exceed 1
        return round(min(1.0, dict(predictions).get(self.config.label, 0.0)) / self.grid)

    @classmethod
    def expected(cls, predictions: list[tuple[str, float]], labels: Sequence[str]) -> int:
        """Return the mean grade of a text, as an integer: the mean divided by `grid`, the step to which scores are
        rounded. `predictions` holds (label, probability) for each label; the probabilities are the weights of the mean.
        Without predictions, the mean is the lowest grade."""
        total = sum(p for _, p in predictions)
        grade = sum(float(label) * p for label, p in predictions) / total if total else min(map(float, labels))
        return round(grade / cls.grid)

    def process(self, doc: Document) -> str | None:
        doc.signals[self.config.signal] = self.score(doc.text)
        return self.verdict(doc)

    def bounds(self) -> list[Bound]:
        return [Bound(self.config.signal, "min", "min", self.config.min)]

    def verdict(self, doc: Document) -> str | None:
        return None if doc.signals[self.config.signal] >= self.config.min else "quality"


def grade_of(label: str) -> float | None:
    """Return the grade that a label of a classifier stands for, as a number. Returns None if the label is no number, or
    a number that cannot be a grade (`nan`, or an absolute value of a million or more)."""
    try:
        value = float(label)
    except ValueError:
        return None
    return value if abs(value) < 1e6 else None
