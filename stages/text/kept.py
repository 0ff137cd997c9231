"""Replaces the formulas, code and tables of a text by placeholders while the rest is processed, and restores them.

A placeholder is a number between two private-use characters. The text must be cleared of these characters first
(`cleared`), so that no text can contain a forged placeholder.
"""

from __future__ import annotations

import re

_KEPT = re.compile("\ue000([0-9]{1,9})\ue001")
#: further stand-ins, whose meaning the caller decides
MARKS = ("\ue002", "\ue003")
_STAND_INS = dict.fromkeys(range(0xE000, 0xE004))


def cleared(text: str) -> str:
    """Return the text without the characters that placeholders are made of."""
    return text.translate(_STAND_INS)


class Kept:
    """The pieces of a text that placeholders stand for, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def keep(self, said: str) -> str:
        """Store a piece and return its placeholder. `restored` puts the piece back."""
        self.said.append(said)
        return f"\ue000{len(self.said) - 1}\ue001"

    def restored(self, text: str, depth: int = 1) -> str:
        """Return the text with each placeholder replaced by its piece. Pieces may contain placeholders: `depth` is the
        number of levels to replace."""
        for _ in range(depth):
            text = _KEPT.sub(lambda m: self.said[int(m[1])], text)
        return text
