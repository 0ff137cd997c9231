"""Finds the parts of a LaTeX source: its body and title, the ends of environments and formulas, and the arguments of
commands. Comments and macro definitions must have been removed from the source."""

from __future__ import annotations

import re
from bisect import bisect_left

from stages.extract.latex.macros import braces

#: longest optional argument, characters
OPTION = 400
OPTIONAL = re.compile(rf"[ \t]*\[([^\[\]]{{0,{OPTION}}})\]")
_GROUP = re.compile(r"\s{0,9}\{")
_REST = re.compile(r"[ \t]*(?:\n[ \t]*(?!\n))?")
_END = re.compile(r"\\end[ \t]*\{([A-Za-z]{1,40}\*?)\}")
#: where a source without \begin{document} begins and ends, and the \end… words that close AMS-TeX commands without
#: braces
_BEGINS = re.compile(r"\\(?:topmatter|document)(?![A-Za-z])")
_ENDS = re.compile(r"\\(?:bye|enddocument|end)(?![A-Za-z])(?![ \t]*\{)")
_MARK = re.compile(r"\\(end[a-z]{3,14})(?![A-Za-z])")
_TITLE = re.compile(r"\\(?:icml)?title[ \t]{0,9}(?:\[[^\[\]]{0,200}\])?\s{0,9}(?=\{)")
_AMS_TITLE = re.compile(r"\\title(?![A-Za-z])([^\n]{0,400}(?:\n[^\n]{1,400}){0,5}?)\\endtitle")


class LatexSource:
    """A LaTeX source, and where its parts are. `closing` maps the position of an opening brace to that of its closing
    brace. `marks` maps an AMS-TeX word that ends a command, such as `endproclaim`, to its positions."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.closing = braces(text)
        self.marks = _positions(_MARK, text)
        self._ends = _positions(_END, text)                     # environment → positions of its \end
        self._displays = _positions(re.compile(r"\\([\])])"), text)

    def body(self) -> tuple[int, int]:
        """Returns where the text of the document begins and ends."""
        if (m := re.search(r"\\begin[ \t]*\{document\}", self.text)) is not None:
            return m.end(), self._ends.get("document", [len(self.text)])[-1]
        at = m.end() if (m := _BEGINS.search(self.text)) is not None else 0
        return at, max((m.start() for m in _ENDS.finditer(self.text, at)), default=len(self.text))

    def title(self) -> str:
        """Returns the source of the document's title without its footnotes; "" if there is no title."""
        m = _TITLE.search(self.text)
        if m is not None and m.end() in self.closing and self.closing[m.end()] - m.end() < 1000:
            inner = self.text[m.end() + 1:self.closing[m.end()]]
        else:
            m = _AMS_TITLE.search(self.text)
            inner = m[1] if m else ""
        return re.sub(r"\\(?:thanks|footnote)\s*\{.*", "", inner, flags=re.DOTALL)

    def end_of(self, environment: str, at: int) -> int:
        """Returns the position of the next \\end of an environment from position `at` on, or -1 if none follows."""
        return _next(self._ends, environment, at)

    def mark(self, word: str, at: int) -> int:
        """Returns the position of the next \\`word`, one of `marks`, from position `at` on, or -1 if none follows."""
        return _next(self.marks, word, at)

    def display_end(self, sign: str, at: int) -> int:
        """Returns the position of the next \\] or \\) (`sign`) from position `at` on, or -1 if none follows."""
        return _next(self._displays, sign, at)

    def group(self, at: int) -> int:
        """Returns the position of the opening brace of the next argument from position `at` on, or -1 if none
        follows."""
        m = _GROUP.match(self.text, at)
        return m.end() - 1 if m is not None and m.end() - 1 in self.closing else -1

    def past(self, at: int, n: int) -> int:
        """Returns the position after the next `n` arguments from position `at` on."""
        for _ in range(n):
            if (brace := self.group(at)) < 0:
                break
            at = self.closing[brace] + 1
        return at

    def past_options(self, at: int) -> int:
        """Returns the position after the optional arguments at `at`, which are at most three."""
        for _ in range(3):
            if not self.text.startswith("[", at) or (m := OPTIONAL.match(self.text, at)) is None:
                break
            at = m.end()
        return at

    def past_blanks(self, at: int) -> int:
        """Returns the position after the blanks at `at`, which may include one line break. A blank line is not
        skipped."""
        match = _REST.match(self.text, at)
        return at if match is None else match.end()


def _positions(pattern: re.Pattern[str], text: str) -> dict[str, list[int]]:
    """Returns {text of the first group: positions of the matches}."""
    positions: dict[str, list[int]] = {}
    for m in pattern.finditer(text):
        positions.setdefault(m[1], []).append(m.start())
    return positions


def _next(positions: dict[str, list[int]], name: str, at: int) -> int:
    places = positions.get(name, [])
    k = bisect_left(places, at)
    return places[k] if k < len(places) else -1
