"""The extraction engine `mill`: a trained model decides for each block of a web page whether it is main text. A block
is a stretch of text between block-level tags."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np

from stages.extract.html.mill import choice, forest
from stages.extract.html.mill import features as f
from stages.extract.html.mill.page import PageArrays, serialised, table, walk
from stages.extract.html.mill.render import render
from stages.extract.html.mill.second_pass import SECOND, second_features, structures

#: the signal: the expected F1 of the extracted words
SIGNAL = "html_expected_f1"
ARRAYS = ("roots", "feature", "threshold", "left", "right", "leaf")


class MillWeights:
    """The trained weights of the engine `mill`, as arrays:

    - `tokens`: weights of the words in class and id attributes
    - `forests`: the decision trees of the first and the second pass over a page
    - `odds`: a table that maps log odds to probabilities
    - `shifts`: lowered and raised probabilities (see `choice.choose`)

    benchmarks/train_mill.py writes these arrays to a file. All numbers are integers, so that extraction gives the same
    result on every machine. The constructor raises ValueError if the weights were trained for other features.
    """

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.tokens = table(arrays["token"], arrays["token_weight"])
        self.forests = [tuple(np.ascontiguousarray(arrays[f"{look}_{name}"], np.int32) for name in ARRAYS)
                        for look in ("first", "second")]
        self.odds = arrays["odds"].astype(np.int32)
        self.shifts = arrays["shifts"].astype(np.int64)
        for look, width in zip(self.forests, (f.FEATURES, f.FEATURES + len(SECOND))):
            if look[1].max(initial=0) >= width:
                raise ValueError("the weights of mill are of other features than this code: train them anew "
                                 "(benchmarks/train_mill.py)")

    @classmethod
    def load(cls, path: Any = None) -> MillWeights:
        """Returns the model in the file `path`, or the model that the package contains if `path` is None."""
        with (path or resources.files("stages.extract.html.mill") / "weights.npz").open("rb") as file:
            return cls(dict(np.load(file, allow_pickle=False)))

    def chances(self, page: PageArrays) -> np.ndarray:
        """Returns the probability that each block of a page is main text: int32[blocks], in 1/1000."""
        n, m = len(page.elements), len(page.blocks)
        rows = np.empty((m, f.FEATURES + len(SECOND)), np.int32)
        f.describe(page.elements, n, page.blocks, m, page.text, rows)
        chances = np.empty(m, np.int32)
        forest.scores(rows, *self.forests[0], self.odds, chances)
        second = np.empty((m, len(SECOND)), np.int32)
        second_features(page.elements, n, page.blocks, m, structures(page.elements, page.blocks), chances, second)
        rows[:, f.FEATURES:] = second
        forest.scores(rows, *self.forests[1], self.odds, chances)
        return chances


class Mill:
    """The extraction engine `mill` of the step `html`. `favor` weighs precision against recall (a key of
    `choice.FAVORS`). With `comments`, readers' comments are extracted, too. With `tables=False`, tables of data are
    left out, but not the cells of tables that serve for layout."""

    def __init__(self, *, favor: str = "balanced", tables: bool = True, comments: bool = False, max_depth: int = 255,
                 model: MillWeights | None = None, **_: Any) -> None:
        self.model = model or MillWeights.load()
        self.favor, self.tables, self.comments, self.max_depth = favor, tables, comments, max_depth
        #: the expected F1 of the words of the last page
        self.signals: dict[str, float] = {}
        self.markdown("<p>A page.")     # compiles the kernels, so that this time does not count as the first document's

    def text(self, page: str) -> str | None:
        """Returns the main text of a page; "" when the page has none; None when its elements nest deeper than
        `max_depth`."""
        return self._extracted(page, markup=False)

    def markdown(self, page: str) -> str | None:
        """Returns the main text of a page as the method `text` does, but written as Markdown."""
        return self._extracted(page, markup=True)

    def _extracted(self, page: str, *, markup: bool) -> str | None:
        arrays = walk(serialised(page), self.model.tokens, deepest=self.max_depth)
        self.signals = {}
        if arrays is None:
            return None
        if not len(arrays.blocks):
            return ""
        chosen, expected = choice.select(arrays, self.model.chances(arrays), self.model.shifts, favor=self.favor,
                                         comments=self.comments)
        self.signals = {SIGNAL: expected / 1000}
        return render(arrays, chosen, markup=markup, tables=self.tables)
