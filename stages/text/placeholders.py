"""Protects the formulas, code and tables of a text while the rest of the text is processed. Before that, they are
replaced by placeholders. Afterwards, the placeholders are replaced by the originals.

A placeholder is a number between two private-use characters. These characters must first be removed from the text
(`without_stand_ins`), so that no text can contain a forged placeholder.
"""

from __future__ import annotations

import re

_PLACEHOLDER = re.compile("\ue000([0-9]{1,9})\ue001")
#: further private-use characters that `without_stand_ins` removes; the caller decides what they stand for
MARKS = ("\ue002", "\ue003")
_STAND_INS = dict.fromkeys(range(0xE000, 0xE004))


def without_stand_ins(text: str) -> str:
    """Return the text without the private-use characters of which placeholders consist, and without the further
    private-use characters MARKS."""
    return text.translate(_STAND_INS)


class Placeholders:
    """Replaces pieces of a text (formulas, code) by placeholders, and later puts the pieces back into the text.
    `pieces` holds the replaced pieces; the number of a placeholder is the index of its piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def keep(self, piece: str) -> str:
        """Store a piece of a text (a formula, for instance) and return the placeholder that stands for it. The method
        `restored` later puts the piece back."""
        self.pieces.append(piece)
        return f"\ue000{len(self.pieces) - 1}\ue001"

    def restored(self, text: str, depth: int = 1) -> str:
        """Return the text with each placeholder replaced by its piece. A piece may itself contain placeholders: `depth`
        is the number of levels that are replaced."""
        for _ in range(depth):
            text = _PLACEHOLDER.sub(lambda m: self.pieces[int(m[1])], text)
        return text
