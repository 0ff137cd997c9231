"""Turns the results of items into the measures of a task.

An accuracy has three baselines beside it. `chance` is the mean of one over the number of answers. `constant` is the
share of the most frequent position of the right answer: the accuracy of a model that always names this position.
`permuted` is the mean accuracy when the labels of the answers are permuted at random. A `permuted` far from `chance`
would mean that the scoring itself is wrong.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.evaluation.items import Item
from trainer.evaluation.programs import Outcome
from trainer.evaluation.scoring import Likelihood
from trainer.evaluation.task_file import NORMS, EvalTask, GenerateConfig, Norm

#: number of random permutations of the labels over which `permuted` is a mean
PERMUTATIONS = 20
#: a number in a text, with separators of thousands; after a digit or letter, a minus is no sign
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class ItemResult:
    """What was computed for an item (a question of a benchmark). Fields that the task does not need are empty or None.

        cloze      likelihood of each answer after the question, or of the right answer only
        sizes      (bytes, characters) of each answer in `cloze`, without whitespace around it
        prior      likelihood of each answer after the task's text `prior`, without the question
        letters    likelihood of each answer's letter
        generated  the answer that the model generated, normalised; or the rest of a program that it wrote
        expected   the right answer, normalised like `generated`; None for a program
        outcome    the result of the program's tests
    """

    item: Item
    cloze: Sequence[Likelihood] = ()
    sizes: Sequence[tuple[int, int]] = ()
    prior: Sequence[Likelihood] = ()
    letters: Sequence[Likelihood] = ()
    generated: str | None = None
    expected: str | None = None
    outcome: Outcome | None = None

    @property
    def right(self) -> bool:
        """Whether the generated answer equals the right one, or the generated program passes its tests."""
        return self.generated == self.expected if self.outcome is None else self.outcome == "passed"

    @property
    def gold(self) -> int:
        """The index of the right answer in `cloze`."""
        return self.item.gold if len(self.cloze) == len(self.item.choices) else 0

    def scores(self, norm: Norm) -> list[float]:
        """Return the score of each answer in the cloze form: its log-likelihood, divided by its length or corrected as
        `norm` says. The model's choice is the answer with the highest score."""
        if norm == "prior":
            return [own.nats - prior.nats for own, prior in zip(self.cloze, self.prior)]
        return [own.nats / {"raw": 1, "per_byte": size, "per_char": chars, "per_token": own.tokens}[norm]
                for own, (size, chars) in zip(self.cloze, self.sizes)]


@dataclass(frozen=True)
class Measure:
    """One measure of a task: its mean over items (questions), the standard error of this mean (None for a single item),
    and baselines if it is an accuracy."""

    value: float
    stderr: float | None
    baselines: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "stderr": self.stderr, **self.baselines}


def mean(values: Sequence[float]) -> Measure:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Measure(float(np.mean(values)), error)


def accuracy(scores: Sequence[Sequence[float]], gold: Sequence[int]) -> Measure:
    """Return the share of items in which the right answer has the highest score, with its baselines. Of equal scores,
    the first counts as the highest. `scores` has a list for each item, and `gold` the index of the right answer in each
    list."""
    chosen = np.array([int(np.argmax(s)) for s in scores])
    result = mean([float(c) for c in chosen == np.array(gold)])
    sizes = np.array([len(s) for s in scores])
    rng = np.random.default_rng(0)
    permuted = [np.mean(chosen == (rng.random(len(sizes)) * sizes).astype(int)) for _ in range(PERMUTATIONS)]
    return Measure(result.value, result.stderr, {
        "chance": float(np.mean(1 / sizes)), "constant": max(Counter(gold).values()) / len(gold),
        "permuted": float(np.mean(permuted))})


def measures(task: EvalTask, results: Sequence[ItemResult]) -> dict[str, Measure]:
    """Return the measures of a task, by name, from the results of its items (questions). `results` must not be
    empty."""
    out: dict[str, Measure] = {}
    forms, gold = task.file.forms, [r.item.gold for r in results]
    if "bpb" in forms:
        out["bpb"] = mean([-r.cloze[r.gold].nats / math.log(2) / r.sizes[r.gold][0] for r in results])
    if "cf" in forms:
        for norm in NORMS:
            if norm != "prior" or task.file.prior is not None:
                out[f"cf.{norm}"] = accuracy([r.scores(norm) for r in results], gold)
    if "mcf" in forms:
        out["mcf"] = accuracy([[letter.nats for letter in r.letters] for r in results], gold)
    if "pairs" in forms:
        out["pairs"] = accuracy([r.scores("raw") for r in results], gold)
    if "word" in forms:
        out["word"] = mean([float(r.cloze[r.gold].greedy) for r in results])
        out["word.log_likelihood"] = mean([r.cloze[r.gold].nats for r in results])
    if "fg" in forms:
        out["fg"] = mean([float(r.right) for r in results])
    if "code" in forms:
        out["code"] = mean([float(r.right) for r in results])
    return out


def normalised(text: str, config: GenerateConfig) -> str:
    """Return the answer that the generated `text` gives, in a form that is the same for equal answers. With `extract:
    number`, it is the last number in the text, or "" if there is none. Separators of thousands, and zeros at the end of
    decimals, are removed. With `extract: text`, it is the text in lower case without articles, punctuation and
    superfluous spaces (as in SQuAD's evaluation)."""
    if config.extract == "number":
        numbers = _NUMBER.findall(text)
        if not numbers:
            return ""
        number = numbers[-1].replace(",", "")
        return number.rstrip("0").rstrip(".") if "." in number else number
    words = re.sub(r"[^\w\s]", "", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))
