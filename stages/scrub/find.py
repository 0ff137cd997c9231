"""Finds personal data in a text by the finders of all kinds, one after the other.

A finder gets a text in which everything found before is replaced by NULs, which no finder takes for part of a value. It
searches only the stretches that can hold its values (`stages.scrub.clues`). The finders of e-mail and IP addresses come
first and run once (datatrove's dialect). The other finders are repeated as long as they find something, since removing
one value may leave another standing alone. A scrubbed text therefore holds nothing more to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stages.scrub.clues import Clues

Finder = Callable[[Clues], Iterable[tuple[int, int, str]]]
#: most rounds of the other finders on one text; what a hostile text holds beyond stays
ROUNDS = 5


class Match(NamedTuple):
    """A value of personal data, text[start:end] in characters. `kind` is named as in the config; `rule` tells more (the
    country of an id, the service of a key) or is ""."""

    start: int
    end: int
    kind: str
    rule: str


def find(text: str, once: Iterable[tuple[str, Finder]], others: Iterable[tuple[str, Finder]]) -> list[Match]:
    """The values found in `text`, in order, without overlaps. The finders `once` run once; `others` are repeated as
    long as they find something."""
    result: list[Match] = []
    clues = Clues(text)
    for kind, finder in once:
        new = [Match(start, end, kind, rule) for start, end, rule in finder(clues)]
        if new:
            clues = Clues(_blotted(clues.text, new))
            result += new
    others = tuple(others)
    for _ in range(ROUNDS if others and not clues.none else 0):
        before = len(result)
        for kind, finder in others:
            new = _apart([Match(start, end, kind, rule) for start, end, rule in finder(clues)])
            if new:
                clues = Clues(_blotted(clues.text, new))
                result += new
        if len(result) == before:
            break
    return sorted(result)


def apart(found: list[Match], more: list[Match]) -> list[Match]:
    """`found` and those of `more` that overlap none of it, in order. Neither list may contain overlaps."""
    kept, at = list(found), 0
    for match in more:
        while at < len(found) and found[at].end <= match.start:
            at += 1
        if at == len(found) or found[at].start >= match.end:
            kept.append(match)
    return sorted(kept)


def _apart(found: list[Match]) -> list[Match]:
    """The matches in order, without those that overlap one that begins earlier, or at the same place and is longer."""
    kept: list[Match] = []
    for match in sorted(found, key=lambda m: (m.start, -m.end, m.rule)):
        if not kept or match.start >= kept[-1].end:
            kept.append(match)
    return kept


def _blotted(text: str, found: list[Match]) -> str:
    pieces: list[str] = []
    place = 0
    for start, end, *_ in found:
        pieces += text[place:start], "\0" * (end - start)
        place = end
    return "".join(pieces) + text[place:]
