"""Puts formulas, code and tables aside while the rest of a text is worked on, and puts them back at the end.

A private-use character and a number stand for each piece meanwhile. The text is cleared of such characters first, so
that no text can forge a stand-in.
"""

from __future__ import annotations

import re

_KEPT = re.compile("\ue000([0-9]{1,9})\ue001")
#: further stand-ins, whose meaning the caller decides
MARKS = ("\ue002", "\ue003")
_STAND_INS = dict.fromkeys(range(0xE000, 0xE004))


def cleared(text: str) -> str:
    """A text without the characters of stand-ins."""
    return text.translate(_STAND_INS)


class Kept:
    """Pieces put aside, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def keep(self, said: str) -> str:
        """The stand-in for a piece until `restored`."""
        self.said.append(said)
        return f"\ue000{len(self.said) - 1}\ue001"

    def restored(self, text: str, depth: int = 1) -> str:
        """A text with its pieces put back; `depth` is how deep pieces are nested."""
        for _ in range(depth):
            text = _KEPT.sub(lambda m: self.said[int(m[1])], text)
        return text
