"""Errors in a recipe, each with file, line, key and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.base.errors import TokenmillError

#: a place in a recipe: mapping keys and list positions from the top
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Mark:
    """A place in a recipe. `file` is a file, or the option (`--set` or `--input`) that put the value there. `line` and
    `column` are counted from 1; both are 0 if there is no line."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One error in a recipe, at a place in its text (`mark`) and a key (`path`). `message` says what is wrong and how
    to fix it."""

    mark: Mark
    path: KeyPath
    message: str

    def __str__(self) -> str:
        where = key_path(self.path)
        return f"{self.mark}: {where}: {self.message}" if where else f"{self.mark}: {self.message}"


class RecipeError(TokenmillError):
    """Raised for a recipe that cannot be run. `problems` lists the errors that were found before the check stopped, in
    the order of the file. Errors without a line, such as those in `--set`, come first. The command exits with code 2.
    """

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p.mark.line, p.mark.column, key_path(p.path)))
        super().__init__("\n".join(map(str, self.problems)))


def key_path(path: KeyPath) -> str:
    """Format the path of a key as text, for example 'datasets.clean.steps[1].language.min'."""
    out = ""
    for step in path:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else str(step)
    return out


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for a message about an unknown name: the most similar known name, or all known names."""
    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(names)}" if names else "none is known"


def shown(value: object) -> str:
    """Format a value for a message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
