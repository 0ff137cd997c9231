"""Turns the characters that a PDF page draws into the characters of its text: joins accents to their letters, and puts
lines with right-to-left letters in reading order."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np

#: spacing accents, which TeX's OT1 fonts draw before the letter → the combining accents
_ACCENTS = {0x60: "\u0300", 0xB4: "\u0301", 0x2CA: "\u0301", 0x2CB: "\u0300", 0x5E: "\u0302", 0x2C6: "\u0302",
            0x7E: "\u0303", 0x2DC: "\u0303", 0xAF: "\u0304", 0x2C9: "\u0304", 0x2D8: "\u0306", 0x2D9: "\u0307",
            0xA8: "\u0308", 0xB0: "\u030a", 0x2DA: "\u030a", 0x2DD: "\u030b", 0x2C7: "\u030c", 0xB8: "\u0327",
            0x2DB: "\u0328"}
_BELOW = ("\u0327", "\u0328")
_IS_ACCENT = np.zeros(0x300, np.bool_)
_IS_ACCENT[list(_ACCENTS)] = True
_DOTLESS = {"ı": "i", "ȷ": "j"}
#: for at most so many accents of a page, the letter below is searched for on the whole page
_FAR = 500
#: stands for a space found before a combining mark; only the positions of the letters decide whether it is a real space
_ABOUT = 3
_ALEF, _LAM = "اأإآٱ", "ل"
_MIRRORED = str.maketrans("()[]{}<>«»", ")(][}{><»«")


def accents(code: np.ndarray, inserted: np.ndarray, inked: np.ndarray, loose: np.ndarray, tight: np.ndarray) -> None:
    """Join each accent that is a separate character to its letter, and remove the spaces that PDFium inserted between
    the two. `code` and `inked` are changed in place; a removed character gets code 0. `loose` and `tight` are as
    `stages.extract.pdf.native.read` returns them.

    An accent belongs to a letter if three conditions hold:

    - The middles of the two are at most a third of the letter's width apart.
    - The accent lies above the middle of the letter. A cedilla or ogonek lies below.
    - The accent is no further from the letter than the letter is high.
    """
    far = 0
    for i in np.flatnonzero((code < 0x300) & _IS_ACCENT[np.minimum(code, 0x2FF)] & inked).tolist():
        mark = _ACCENTS[int(code[i])]
        before = [k for k in range(i - 1, max(-1, i - 7), -1) if inked[k]][:3]
        after = [k for k in range(i + 1, min(len(code), i + 7)) if inked[k]][:3]
        base = next((k for k in (*after[:1], *before, *after[1:]) if _carries(k, i, mark, loose, tight)
                     and _composed(code[k], mark)), -1)
        if base < 0 and far < _FAR:  # PDFium places a raised accent elsewhere in the text
            far += 1
            close = np.flatnonzero(inked & _carries(slice(None), i, mark, loose, tight))
            base = next((k for k in close[:3].tolist() if _composed(code[k], mark)), -1)
        if base < 0:
            continue
        code[base], code[i], inked[i] = _composed(code[base], mark), 0, False
        for a, b in ((max(before[:1], default=-1), min(after[:1], default=-1)), (base, i), (i, base)):
            if 0 <= a < b <= a + 8 and not _is_apart(a, b, inked, loose, tight[base, 3] - tight[base, 2]):
                between = np.arange(a + 1, b)
                code[between[inserted[between]]] = 0


def _composed(code: int, mark: str) -> int:
    """Returns the code of the letter `code` with the accent `mark`; 0 if Unicode has no such character."""
    letter = chr(code) if code < 0xD800 else " "
    composed = unicodedata.normalize("NFC", _DOTLESS.get(letter, letter) + mark)
    return ord(composed) if letter.isalpha() and len(composed) == 1 else 0


def _carries(k: Any, i: int, mark: str, loose: np.ndarray, tight: np.ndarray) -> Any:
    """Whether the accent with index `i` lies where an accent of character `k` would be drawn. `mark` is the accent's
    combining character. If `k` is a slice, the result is an array with a value for each character."""
    left, right, bottom, top = loose[k, 0], loose[k, 2], tight[k, 2], tight[k, 3]
    near = (abs((tight[i, 0] + tight[i, 1]) / 2 - (left + right) / 2) <= (right - left) / 3) & (top > bottom)
    if mark in _BELOW:
        return near & (2 * tight[i, 3] <= bottom + top) & (bottom - tight[i, 2] <= top - bottom)
    return near & (2 * tight[i, 2] >= bottom + top) & (tight[i, 2] - top <= top - bottom)


def _is_apart(a: int, b: int, inked: np.ndarray, loose: np.ndarray, high: float) -> bool:
    """Whether the characters with the indexes `a` and `b` are separated by a gap, or stand on different lines. `high`
    is the height of the letter, by which the gap is measured."""
    if not (inked[a] and inked[b]):
        return False
    beside = min(loose[a, 1], loose[b, 1]) > max(loose[a, 3], loose[b, 3])
    return not beside or float(loose[b, 0] - loose[a, 2]) > 0.25 * high or loose[b, 2] < loose[a, 0]


# -- right to left ---------------------------------------------------------------------------------------------------
def is_rtl_code(code: np.ndarray) -> np.ndarray:
    return ((code >= 0x590) & (code <= 0x8FF)) | ((code >= 0xFB1D) & (code <= 0xFEFC))


def logical(text: str, inserted: list[bool], box: list[list[int]]) -> str:
    """Returns, in reading order, the text of a piece (a stretch of a line) that contains right-to-left letters.

    PDFium usually returns right-to-left letters in reading order. In a line that it takes for left-to-right, it leaves
    them in drawing order, from left to right. A piece is in drawing order if most successive right-to-left letters run
    to the right. The main rules of the bidirectional algorithm (Unicode, annex 9) are then applied in reverse.

    PDFium also reverses the letters of a ligature, which share one box. This function restores their order.

    `box` is left, top, right, bottom of each character. `inserted` marks the characters that PDFium inserted, such as
    spaces.
    """
    parts: list[list] = []                    # text, left, right, space before it (1 PDFium's own, 2 in the file), box
    space, early_marks = 0, ""
    for k, c in enumerate(text):
        left, _, right, _ = box[k]
        if c in "\0\r\n":
            continue
        if c.isspace():
            space = max(space, 1 if inserted[k] else 2)
        elif parts and box[k] == parts[-1][4] and right > left:
            parts[-1][0] += c
        elif unicodedata.combining(c):
            if parts and parts[-1][1] <= (left + right) // 2 <= parts[-1][2]:
                parts[-1][0] += c
            else:
                early_marks, space = early_marks + c, _ABOUT if space else 0
        else:
            parts.append([c + early_marks, left, right, space, box[k]])
            space, early_marks = 0, ""
    if early_marks and parts:
        parts[-1][0] += early_marks
    kinds = [_kind(part[0]) for part in parts]
    votes = sum((b[1] > a[1]) - (b[1] < a[1]) for a, b, i, j in zip(parts, parts[1:], kinds, kinds[1:])
                if i == j == "R")
    out: list[str] = []
    for k, part in enumerate(parts):
        group = part[0]
        if len(group) > 1 and ((group[0] in _ALEF and group[1] == _LAM) or group.startswith("هل")):
            bare = [c for c in group if not unicodedata.combining(c)]
            group = "".join(bare[::-1]) + "".join(c for c in group if unicodedata.combining(c))
        if k and _white(parts[k - 1], part, kinds[k - 1] == kinds[k] == "R", votes > 0):
            out.append(" ")
        out.append(group)
    return "".join(_reading_order(out) if votes > 0 else out)


def _white(a: list, b: list, letters: bool, drawn: bool) -> bool:
    """Whether there is a space between two neighbouring characters `a` and `b` of a line. Each is given with its
    combining marks, as a list (text, left, right, space before it, box). `letters` says whether both are right-to-left
    letters, and `drawn` whether the line is in drawing order.

    Between two right-to-left letters, the width of the gap alone decides in two cases:

    - The line is in drawing order, and the file has no space at this place. Spaces that PDFium inserts into such a line
      cannot be trusted.
    - The space stands before a combining mark of `b`.

    In all other cases, there is a space if the file has one or PDFium inserted one. Unless both characters are
    right-to-left letters, a wide gap also counts as a space.
    """
    gap, high = max(b[1] - a[2], a[1] - b[2]), b[4][3] - b[4][1]
    if letters and (b[3] == _ABOUT or (drawn and b[3] < 2)):
        return 8 * gap > high
    return b[3] > 0 or (not letters and 4 * gap > high)


def _kind(text: str) -> str:
    """Returns the direction of a text's first character: R (right to left), L (left to right), N (digit) or - (any
    other character)."""
    kind = unicodedata.bidirectional(text[0])
    return "R" if kind in ("R", "AL") else "L" if kind == "L" else "N" if kind in ("EN", "AN") else "-"


def _reading_order(parts: list[str]) -> list[str]:
    """Returns the parts of a line in reading order. `parts` are its characters and spaces from left to right."""
    kinds = [_kind(part) for part in parts]
    if kinds.count("R") >= kinds.count("L"):
        return _reversed_but_numbers(parts, kinds)
    out, at = list(parts), 0
    while at < len(parts):
        end = at
        if kinds[at] == "R":
            while end + 1 < len(parts) and kinds[end + 1] != "L":
                end += 1
            while kinds[end] != "R":
                end -= 1
            out[at:end + 1] = _reversed_but_numbers(parts[at:end + 1], kinds[at:end + 1])
        at = end + 1
    return out


def _reversed_but_numbers(parts: list[str], kinds: list[str]) -> list[str]:
    """Returns the parts of a line in reverse order, except that numbers and left-to-right words keep their inner order.
    `kinds` holds the direction of each part (`_kind`)."""
    out: list[str] = []
    at = len(parts) - 1
    while at >= 0:
        first = at
        if kinds[at] in "LN":
            k = at
            while k > 0 and kinds[k - 1] != "R" and (parts[k - 1] != " " or "L" in kinds[_word(parts, k - 1):k]):
                k -= 1
                if kinds[k] in "LN":
                    first = k
            out += parts[first:at + 1]
        else:
            out.append(parts[at].translate(_MIRRORED))
        at = first - 1
    return out


def _word(parts: list[str], space: int) -> int:
    """Returns the index of the first part of the word before a space. `space` is the index of the space."""
    k = space
    while k > 0 and parts[k - 1] != " ":
        k -= 1
    return k
