"""Finds the places in a text that made a rule drop the document, so that reports can mark these places in examples.

The marks can differ slightly from what a filter counted: the functions of this module cut words at white space, while
some rules cut them differently. No filter uses the functions for its decision.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence

#: (first character, one past the last)
Span = tuple[int, int]
#: most places that are returned
MOST = 200
_WORD = re.compile(r"\S+")
#: the reasons of rules on repetition: dup_line_frac, dclm_paragraph, top_2_gram, duplicated_5_n_grams …
_REPETITION = re.compile(r"(?:dup|dclm)_(?P<part>line|para)|(?:dup|duplicated|(?P<top>top))_(?P<n>\d+)_")


def pattern_spans(pattern: re.Pattern[str], text: str) -> list[Span]:
    """Return the spans (first character, one past the last) of the first MOST matches of a pattern in the text. Empty
    matches are left out."""
    out: list[Span] = []
    for match in pattern.finditer(text):
        if match.end() > match.start():
            out.append(match.span())
        if len(out) == MOST:
            break
    return out


def pattern_spans_without(pattern: re.Pattern[str], left_out: re.Pattern[str], text: str) -> list[Span]:
    """Return the spans (first character, one past the last) in a text of the matches of `pattern` in what is left of
    it without the characters that `left_out` matches. A span also covers the characters left out inside a match."""
    places = [i for i, character in enumerate(text) if not left_out.match(character)]
    spans = pattern_spans(pattern, "".join(text[i] for i in places))
    return [(places[begin], places[end - 1] + 1) for begin, end in spans]


def same_length_lower(text: str) -> str:
    """Return a text in lower case in which every character stays at its position. The letter `İ` is therefore kept,
    because `str.lower` makes two characters of it."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(
        small if len(small := character.lower()) == 1 else character for character in text)


def repetition_spans(text: str, reason: str, *, first: bool = False) -> list[Span]:
    """Return the spans (first character, one past the last) of the repetitions for which a rule of Gopher, or DCLM's
    form of it, dropped a text. `reason` is the reason with which the text was dropped, such as `dup_line_frac`; it
    names the rule. With `first`, the first of several equal lines, paragraphs or n-grams also counts as a
    repetition."""
    rule = _REPETITION.search(reason)
    if rule is None:
        return []
    if rule["n"] is not None:
        return repeated_words(text, int(rule["n"]), top=rule["top"] is not None, first=first)
    return copies(text, "\n" if rule["part"] == "line" else "\n\n", first=first)


def copies(text: str, separator: str = "\n", *, first: bool = False) -> list[Span]:
    """Return the spans (first character, one past the last) of the lines that are copies of an earlier line, at most
    MOST. With `first`, the first of several equal lines is also returned. White space at the ends of a line makes no
    difference. With another `separator`, paragraphs are compared instead of lines."""
    parts: list[tuple[str, int]] = []
    at = 0
    for part in text.split(separator):
        plain = part.strip()
        if plain:
            parts.append((plain, at + part.index(plain)))
        at += len(part) + len(separator)
    places = _copied([plain for plain, _ in parts], first)
    return [(parts[i][1], parts[i][1] + len(parts[i][0])) for i in places][:MOST]


def repeated_words(text: str, n: int, *, top: bool, first: bool = False) -> list[Span]:
    """Return the spans (first character, one past the last) of repeated runs of `n` words, at most MOST. Spans that
    overlap or follow each other are joined.

    With `top`, these are all occurrences of the most frequent run; none if it occurs only once. Without `top`, they are
    all runs that repeat an earlier run. `first` then adds the first of several equal runs.
    """
    words = [match.span() for match in _WORD.finditer(text)]
    runs = [tuple(text[a:b] for a, b in words[i:i + n]) for i in range(len(words) - n + 1)]
    if top:
        [(run, count)] = Counter(runs).most_common(1) or [((), 0)]
        places = [i for i, candidate in enumerate(runs) if candidate == run] if count > 1 else []
    else:
        places = _copied(runs, first)
    return merged_spans([(words[i][0], words[i + n - 1][1]) for i in places])[:MOST]


def _copied(items: Sequence[Hashable], first: bool) -> list[int]:
    """Return the positions of the items that repeat an earlier item. With `first`, the position of the first of several
    equal items is also returned."""
    counts, seen = Counter(items), set()
    out = []
    for place, item in enumerate(items):
        if counts[item] > 1 and (first or item in seen):
            out.append(place)
        seen.add(item)
    return out


def merged_spans(spans: list[Span]) -> list[Span]:
    """Return spans of a text in order. Spans that overlap, touch, or are one character apart are joined."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out
