"""Finds the places in a text that made a rule drop the document, so that reports can mark them in examples.

The marks can differ slightly from what a filter counted: these functions cut words at white space, while some rules cut
them differently. No filter uses the functions for its decision.
"""

from __future__ import annotations

import re
from collections import Counter

#: (first character, one past the last)
Span = tuple[int, int]
#: most places that are returned
MOST = 200
_WORD = re.compile(r"\S+")


def pattern_spans(pattern: re.Pattern[str], text: str) -> list[Span]:
    """Return the spans of the first MOST matches of a pattern in the text. Empty matches are left out."""
    out: list[Span] = []
    for match in pattern.finditer(text):
        if match.end() > match.start():
            out.append(match.span())
        if len(out) == MOST:
            break
    return out


def copies(text: str, separator: str = "\n") -> list[Span]:
    """Return the spans of the lines that, without white space at their ends, are copies of an earlier line, MOST at
    most. With another `separator`, paragraphs are compared instead of lines."""
    out: list[Span] = []
    earlier: set[str] = set()
    at = 0
    for part in text.split(separator):
        plain = part.strip()
        if plain in earlier:
            begin = at + part.index(plain)
            out.append((begin, begin + len(plain)))
        elif plain:
            earlier.add(plain)
        at += len(part) + len(separator)
    return out[:MOST]


def repeated_words(text: str, n: int, *, top: bool) -> list[Span]:
    """Return the spans of repeated runs of `n` words, MOST at most. With `top`, these are all occurrences of the most
    frequent run (none if it occurs only once); without, all runs that repeat an earlier run. Spans that overlap or
    follow each other are joined."""
    words = [match.span() for match in _WORD.finditer(text)]
    runs = [tuple(text[a:b] for a, b in words[i:i + n]) for i in range(len(words) - n + 1)]
    if top:
        [(run, count)] = Counter(runs).most_common(1) or [((), 0)]
        places = [i for i, candidate in enumerate(runs) if candidate == run] if count > 1 else []
    else:
        before: set[tuple[str, ...]] = set()
        places = [i for i, run in enumerate(runs) if run in before or before.add(run)]    # type: ignore[func-returns-value]
    return merged_spans([(words[i][0], words[i + n - 1][1]) for i in places])[:MOST]


def merged_spans(spans: list[Span]) -> list[Span]:
    """Return the spans in order. Spans that overlap, touch, or are one character apart are joined."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out
