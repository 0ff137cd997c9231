"""Finds the places in a text for which a rule dropped it, so that reports can mark them in examples.

Verdicts never use these functions. Words are cut at white space, which is not always how the rules cut them.
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
    """Return the matches of a pattern, without empty ones."""
    out: list[Span] = []
    for match in pattern.finditer(text):
        if match.end() > match.start():
            out.append(match.span())
        if len(out) == MOST:
            break
    return out


def copies(text: str, separator: str = "\n") -> list[Span]:
    """The lines that are copies of an earlier line; or the paragraphs, with another separator."""
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
    """Return runs of `n` words: all occurrences of the most frequent run (`top`), or those that repeat an earlier
    run."""
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
    """Spans in order, those that overlap or touch as one."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out
