"""Splits texts into the units that the step `repeats` compares: lines, paragraphs or sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from stages.text.characters import TERMINAL_PUNCTUATION

Unit = Literal["paragraph", "line", "sentence"]

#: blank lines, which end a paragraph
_BLANK = re.compile(r"\n[^\S\n]*\n\s*")
#: A run of end marks, with closing quotes, brackets and white space behind it, or blank lines. A match takes the run as
#: a whole (`++`): otherwise a text of a million dots would take hours.
_END_MARKS = "".join(map(re.escape, sorted(TERMINAL_PUNCTUATION)))
_PAUSE = re.compile(rf"([{_END_MARKS}]++)[\"'”’»)\]」』）】]*+(\s*+)|{_BLANK.pattern}")



class Stretch(NamedTuple):
    """A run of consecutive units of a text. `compared` is the form in which the run is compared with others. `start`
    and `end` are its position in the UTF-8 text, in bytes."""

    compared: str
    start: int
    end: int


def pieces(text: str, unit: Unit) -> list[str]:
    """Cut a text into units (lines, paragraphs or sentences). Each piece is one unit with the white space after it, so
    the pieces joined give the text."""
    if unit == "line":
        return re.findall(r"[^\n]*\n|[^\n]+", text)
    if unit == "paragraph":
        ends = [match.end() for match in _BLANK.finditer(text)]
    else:
        ends = [match.end() for match in _PAUSE.finditer(text) if _ends_sentence(*match.groups())]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)]) if start < end]


def _ends_sentence(marks: str | None, space: str | None) -> bool:
    """Return whether a sentence ends at a place in a text. `marks` holds the end marks there (`.`, `。` …), and is None
    at a blank line; `space` is the white space after the marks. After an ASCII mark, white space must follow, so that
    "3.14" ends no sentence. Chinese puts no space between sentences."""
    return marks is None or bool(space) or not marks[-1].isascii()


def stretches(text: str, unit: Unit, span: int, normalise: bool) -> Iterator[Stretch]:
    """Yield every run of `span` consecutive units of a text, in order. Units of white space only are left out. Units
    are compared without white space at their ends. With `normalise`, they are also compared in lower case, and every
    run of white space counts as one space."""
    cut = pieces(text, unit)
    ends = list(accumulate(map(len, cut) if text.isascii() else (len(piece.encode()) for piece in cut)))
    units = [(compared, start, end) for piece, start, end in zip(cut, [0, *ends], ends)
             if (compared := same_text(piece) if normalise else piece.strip())]
    if span == 1:
        yield from map(Stretch._make, units)
        return
    between = " " if normalise else "\n"            # a line break at the end of a unit counts as a space, too
    for first in range(len(units) - span + 1):
        run = units[first:first + span]
        yield Stretch(between.join(compared for compared, _, _ in run), run[0][1], run[-1][2])


def same_text(text: str) -> str:
    """Return a text in the form in which texts are compared: in lower case, with one space for each run of white space,
    and without white space at the ends."""
    return " ".join(text.lower().split())
