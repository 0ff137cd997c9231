"""Finds and loads fastText models, and predicts the labels of texts with them.

The language model lid.176.ftz (917 kB, https://fasttext.cc/docs/en/language-identification.html, CC-BY-SA 3.0) is
searched for in the folder TOKENMILL_MODELS, then in ~/.cache/tokenmill. `tokenmill fetch lid176` puts it into the
folder TOKENMILL_MODELS, or into ~/.cache/tokenmill if this variable is not set.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.errors import TokenmillError

if TYPE_CHECKING:
    from stages.scoring.word_sums import WordSums

LID176 = "lid.176.ftz"
#: largest model, bytes, that is loaded only to check settings
MOST_CHECKED_BYTES = 64 << 20


class MissingModel(TokenmillError, FileNotFoundError):
    """Raised when a model file is missing and must be fetched first. The message says how to fetch it."""

    exit_code = 2

    permanent = True


def lid176() -> Path:
    """Return the path of lid.176.ftz, fastText's model for identifying languages.

    Raises:
        MissingModel: the file is missing; the message says where it was searched for and how to get it.
    """
    path = default_lid176()
    if path is not None:
        return path
    places = ", ".join(str(folder / LID176) for folder in folders())
    raise MissingModel(f"the language model is missing (looked for {places}); get it with `tokenmill fetch "
                       f"lid176`, or name a file: {{language: {{model: path/to/{LID176}}}}}")


def default_lid176() -> Path | None:
    """Return the path of lid.176.ftz, fastText's model for identifying languages; None if it is not installed."""
    return next((folder / LID176 for folder in folders() if (folder / LID176).is_file()), None)


def folders() -> list[Path]:
    return [*(Path(folder) for folder in (os.environ.get("TOKENMILL_MODELS"),) if folder),
            Path.home() / ".cache" / "tokenmill"]


def labels_of(path: str | Path | None) -> frozenset[str] | None:
    """Return the labels of a fastText model, so that settings can be checked against them before anything runs. The
    result is None if the file is missing or is no model. It is also None if the file has more than MOST_CHECKED_BYTES
    bytes, because loading would take seconds."""
    try:
        info = os.stat(path or "")
        return None if info.st_size > MOST_CHECKED_BYTES else _labels(
            str(path), info.st_ino, info.st_size, info.st_mtime_ns)
    except (OSError, ValueError, ImportError):
        return None


@lru_cache(maxsize=8)
def _labels(path: str, *_file: int) -> frozenset[str]:
    return frozenset(FastText(path).labels())


def load(path: str | Path) -> WordSums | FastText:
    """Load a fastText classifier for a caller that needs only the most probable label of a text. Returns a `WordSums`,
    which is fast, or, if `WordSums` cannot read the model, a `FastText`, which runs fastText's own library."""
    from stages.scoring.word_sums import UnknownFormat, WordSums

    try:
        return WordSums(path)
    except UnknownFormat:
        return FastText(path)


class FastText:
    """A fastText classifier that runs fastText's own library. Prediction does not change the model, so threads may
    share one object."""

    def __init__(self, path: str | Path) -> None:
        # not fasttext.load_model: that prints a warning of its own to stderr
        from fasttext.FastText import _FastText

        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such fastText model")
        self._model: Any = _FastText(str(path)).f

    def labels(self) -> list[str]:
        return [label.removeprefix("__label__") for label in self._model.getLabels("strict")[0]]

    def matrices(self) -> tuple[list[str], list[int], Any, Any, list[str]]:
        """Return the vocabulary and the vectors of a model that is not quantised: (words, count of each word, vectors
        of the words, vectors of the labels, labels). Vectors are float32[words, dim] and float32[labels, dim]. Row i
        belongs to word i or to label i. The call copies the whole input matrix of the model."""
        import numpy as np

        words, counts = self._model.getVocab("strict")
        vectors = np.array(self._model.getInputMatrix())[:len(words)].copy()
        outputs = np.array(self._model.getOutputMatrix())
        return list(words), [int(count) for count in counts], vectors, outputs, self.labels()

    def predict(self, text: str, k: int = 1) -> list[tuple[str, float]]:
        """Return the k most probable labels of a text (k = -1: all labels), as a list of (label, probability), the most
        probable first. Line breaks in the text count as spaces. The result is [] if the model knows no word of it."""
        line = text.replace("\n", " ") + "\n"
        predictions = self._model.predict(line, k, 0.0, "strict")
        return [(label.removeprefix("__label__"), score) for score, label in predictions]
