"""Finds personal data of all kinds in a text, by running the finders (functions that each search for one kind of data).

A value that one finder has found is replaced by NULs before the next finder searches the text. No finder accepts NULs
as part of a value. Most finders search only the stretches that can hold their values (`stages.scrub.clues`).

The finders of e-mail addresses, IP addresses and telephone numbers that begin with a plus come first and run once, as
in datatrove those of e-mail and IP addresses do. The other finders are repeated as long as they find something, at most
ROUNDS times. This is needed because a value beside another value looks like part of a longer one, and is accepted only
when the other value has been removed. A second scrubbing of an ordinary text therefore finds nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stages.scrub.clues import Clues

Finder = Callable[[Clues], Iterable[tuple[int, int, str]]]
#: most rounds of the repeated finders on one text. A hostile text may hold values that more rounds would find; they
#: stay in the text.
ROUNDS = 5


class Match(NamedTuple):
    """A value of personal data that was found at text[start:end], in characters. `kind` is the kind of data, as in the
    settings of the step `pii` (`emails`, `ids` …). `rule` is more specific (the country of an id, the service of a
    key), or ""."""

    start: int
    end: int
    kind: str
    rule: str


def find(text: str, single_pass: Iterable[tuple[str, Finder]], repeated: Iterable[tuple[str, Finder]]) -> list[Match]:
    """Find personal data in `text`, and return the matches in order, without overlaps. A finder is a function that
    searches for one kind of data. `single_pass` and `repeated` hold (kind of data, finder). The finders in
    `single_pass` run once. Those in `repeated` run again as long as one of them finds something, at most ROUNDS
    times."""
    result: list[Match] = []
    clues = Clues(text)
    for kind, finder in single_pass:
        new = [Match(start, end, kind, rule) for start, end, rule in finder(clues)]
        if new:
            clues = Clues(_blanked(clues.text, new))
            result += new
    repeated = tuple(repeated)
    for _ in range(ROUNDS if repeated and not clues.none else 0):
        count = len(result)
        for kind, finder in repeated:
            new = _without_overlaps([Match(start, end, kind, rule) for start, end, rule in finder(clues)])
            if new:
                clues = Clues(_blanked(clues.text, new))
                result += new
        if len(result) == count:
            break
    return sorted(result)


def merged(matches: list[Match], others: list[Match]) -> list[Match]:
    """Return all of `matches`, and those of `others` that overlap none of `matches`, in the order of the text. The
    matches within each of the two lists must be in order and must not overlap."""
    result, place = list(matches), 0
    for match in others:
        while place < len(matches) and matches[place].end <= match.start:
            place += 1
        if place == len(matches) or matches[place].start >= match.end:
            result.append(match)
    return sorted(result)


def _without_overlaps(matches: list[Match]) -> list[Match]:
    """Return matches in the order of the text, without overlaps. Of two matches that overlap, the one that begins first
    stays. If both begin at one position, the longer one stays."""
    result: list[Match] = []
    for match in sorted(matches, key=lambda m: (m.start, -m.end, m.rule)):
        if not result or match.start >= result[-1].end:
            result.append(match)
    return result


def _blanked(text: str, matches: list[Match]) -> str:
    """Return `text` with every character of the matches replaced by NUL, so that no finder finds them again."""
    pieces: list[str] = []
    place = 0
    for start, end, *_ in matches:
        pieces += text[place:start], "\0" * (end - start)
        place = end
    return "".join(pieces) + text[place:]
