"""What personal data a text holds, and where: the finders of all kinds, one after the other.

A finder looks at a text in which everything found before is blotted out by NULs, which none of them takes for anything,
and at the stretches of it that hold what its values are made of (`stages.scrub.clues`).
E-mail and IP addresses come first, once (datatrove's dialect). The others are asked again as long as they find
something: where one value is gone, another may stand alone. So a text that was scrubbed holds nothing more to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stages.scrub.clues import Clues

Finder = Callable[[Clues], Iterable[tuple[int, int, str]]]
#: how often the finders are asked about one text: after that many a hostile one is left as it is
ROUNDS = 5


class Match(NamedTuple):
    """A value of personal data: text[start:end], in characters; `kind` as the config calls it, `rule` what it is of
    that kind (the country of an id, the service of a key; "" where there is nothing to say)."""

    start: int
    end: int
    kind: str
    rule: str


def find(text: str, once: Iterable[tuple[str, Finder]], others: Iterable[tuple[str, Finder]]) -> list[Match]:
    """The values in `text`, in order; they do not overlap."""
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
    """`found`, and of `more` what overlaps none of it, in order. Neither overlaps itself."""
    kept, at = list(found), 0
    for match in more:
        while at < len(found) and found[at].end <= match.start:
            at += 1
        if at == len(found) or found[at].start >= match.end:
            kept.append(match)
    return sorted(kept)


def _apart(found: list[Match]) -> list[Match]:
    """In order, without what overlaps one that begins earlier, or is longer."""
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
