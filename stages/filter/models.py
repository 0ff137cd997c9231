"""fastText models: where they are found, and how they are asked.

The language model lid.176.ftz (917 kB, https://fasttext.cc/docs/en/language-identification.html, CC-BY-SA 3.0) is
looked for in the folder TOKENMILL_MODELS, else in ~/.cache/tokenmill; `tokenmill fetch lid176` puts it there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LID176 = "lid.176.ftz"


class MissingModel(FileNotFoundError):
    """A model that has to be fetched first; the message says how."""


def lid176() -> Path:
    """Path of the language model.

    Raises:
        MissingModel: it is in none of the places; says where it was looked for and how to get it.
    """
    folders = [Path(folder) for folder in (os.environ.get("TOKENMILL_MODELS"),) if folder]
    folders.append(Path.home() / ".cache" / "tokenmill")
    for folder in folders:
        if (folder / LID176).is_file():
            return folder / LID176
    places = ", ".join(str(folder / LID176) for folder in folders)
    raise MissingModel(f"the language model is missing (looked for {places}); get it with `tokenmill fetch "
                            f"lid176`, or name a file: {{language: {{model: path/to/{LID176}}}}}")


class FastText:
    """A fastText classifier. Prediction only reads the model, so threads may share one."""

    def __init__(self, path: str | Path) -> None:
        # not fasttext.load_model: that prints a warning of its own to stderr
        from fasttext.FastText import _FastText

        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such fastText model")
        self._model: Any = _FastText(str(path)).f

    def labels(self) -> list[str]:
        return [label.removeprefix("__label__") for label in self._model.getLabels("strict")[0]]

    def predict(self, text: str, k: int = 1) -> list[tuple[str, float]]:
        """The k most probable (label, probability) of a text taken as one line; [] when no word of it is known."""
        line = text.replace("\n", " ") + "\n"
        found = self._model.predict(line, k, 0.0, "strict")
        return [(label.removeprefix("__label__"), score) for score, label in found]
