"""Writes the Markdown that all extraction engines have in common: formulas, and code in fences that name its
programming language."""

from __future__ import annotations

import re

#: the language of a piece of code, from the `class` of its element
LANGUAGE = re.compile(r"(?:^|\s)(?:language-|lang-|highlight-source-|brush:\s*)([A-Za-z0-9+#_-]{1,20})")
#: a reference to a footnote
REFERENCE = re.compile(r"\s*\[[\w ]{1,12}\]\s*")


def dollars(text: str) -> str:
    r"""Returns the text with its formulas marked by dollar signs: `\(…\)` becomes `$…$`, and `\[…\]` becomes `$$…$$`.
    Text outside formulas is not changed."""
    for start, stop, mark in (("\\(", "\\)", "$"), ("\\[", "\\]", "$$")):
        if start not in text:
            continue
        out, at = [], 0
        while (begin := text.find(start, at)) >= 0 and (end := text.find(stop, begin + 2)) >= 0:
            formula = text[begin + 2:end].strip()
            out += [text[at:begin], mark, formula, mark] if formula else [text[at:begin]]
            at = end + 2
        text = "".join(out) + text[at:]
    return text


def fence(text: str, language: str = "") -> str:
    """Returns a block of code in a Markdown fence that is longer than any fence inside the code."""
    ticks = max((len(run) for run in re.findall("`{3,}", text)), default=2) + 1
    return f"{'`' * ticks}{language}\n{text}\n{'`' * ticks}"
