"""Finds personal data in a text by the finders of all kinds, one after the other.

A finder is a function that searches for one kind of data. It gets a text in which everything found before is replaced
by NULs, which no finder takes for part of a value. It searches only the stretches that can hold its values
(`stages.scrub.clues`). The finders of e-mail and IP addresses come first and run once, as in datatrove; so does the
finder of telephone numbers that begin with a plus. The other finders are repeated as long as they find something, at
most ROUNDS times: when one value has been removed, the value next to it may no longer look like part of a longer one. A
second scrubbing of an ordinary text therefore finds nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stages.scrub.clues import Clues

Finder = Callable[[Clues], Iterable[tuple[int, int, str]]]
#: most rounds of the other finders on one text; a hostile text may hold values that would take more, and these stay
ROUNDS = 5


class Match(NamedTuple):
    """A value of personal data, text[start:end] in characters. `kind` is named as in the config of the step `pii`.
    `rule` is more specific (the country of an id, the service of a key), or ""."""

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
    """All matches of `found`, and those of `more` that do not overlap any of them, in order. Neither list may contain
    overlaps."""
    kept, at = list(found), 0
    for match in more:
        while at < len(found) and found[at].end <= match.start:
            at += 1
        if at == len(found) or found[at].start >= match.end:
            kept.append(match)
    return sorted(kept)


def _apart(found: list[Match]) -> list[Match]:
    """The matches in order, without overlaps. Of two matches that overlap, the one that begins first stays; if both
    begin at the same place, the longer one."""
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
