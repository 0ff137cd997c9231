"""Finds what differs between two texts, paragraph by paragraph and word by word."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: number of equal paragraphs shown before and after different ones
AROUND = 1
#: sequences of more items are compared without their most frequent items (difflib's `autojunk`), to save time
LONG = 2_000
#: if two texts have more pairs of equal words, paragraphs that differ are not matched with each other, to save time
PAIRS = 5_000_000
#: characters of scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, kana, Han
_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")
_WORD_OR_MARK = re.compile(rf"{_WORD.pattern}|[^\w\s]")


class DiffRow(NamedTuple):
    """Corresponding paragraphs of two texts, `left` and `right`. If a paragraph occurs in only one of the texts, the
    other field is "". `word` is a pattern that matches what is compared: words, and in Markdown also punctuation marks.
    White space and line breaks are ignored."""

    left: str
    right: str
    word: re.Pattern[str] = _WORD

    @property
    def sides(self) -> tuple[str, str]:
        return self.left, self.right

    @property
    def same(self) -> bool:
        return bool(self.left and self.right) and self.word.findall(self.left) == self.word.findall(self.right)


def rows(left: str, right: str, marks: bool = False) -> list[DiffRow]:
    """Pair the paragraphs of both texts, from top to bottom. Two paragraphs correspond if they are equal, or if at
    least half of the words of one occur in the other in the same order. A paragraph that is split into pieces in the
    other text is therefore paired with all of them. With `marks`, the texts are Markdown, and punctuation is compared,
    too."""
    word = _WORD_OR_MARK if marks else _WORD
    sides = [[line.rstrip() for line in text.splitlines() if line.strip()] for text in (left, right)]
    keys = [[" ".join(line.split()) for line in side] for side in sides]
    out: list[DiffRow] = []
    for what, a0, a1, b0, b1 in _matcher(*keys).get_opcodes():
        if what == "equal":
            out += (DiffRow(a, b, word) for a, b in zip(sides[0][a0:a1], sides[1][b0:b1]))
        else:
            out += (DiffRow(a, b, word) for a, b in _related(sides[0][a0:a1], sides[1][b0:b1]))
    return out


def _matcher(a: Sequence[str], b: Sequence[str]) -> difflib.SequenceMatcher[str]:
    return difflib.SequenceMatcher(None, a, b, autojunk=max(len(a), len(b)) > LONG)


def _related(left: list[str], right: list[str]) -> Iterator[tuple[str, str]]:
    """Pair the paragraphs of two texts that have no paragraph in common. Yields (left, right) for corresponding
    paragraphs. For a paragraph without a counterpart, `left` or `right` is ""."""
    position = [0, 0]
    for a0, a1, b0, b1 in _links(left, right):
        yield from ((line, "") for line in left[position[0]:a0])
        yield from (("", line) for line in right[position[1]:b0])
        yield "\n".join(left[a0:a1]), "\n".join(right[b0:b1])
        position = [a1, b1]
    yield from ((line, "") for line in left[position[0]:])
    yield from (("", line) for line in right[position[1]:])


def _links(left: list[str], right: list[str]) -> list[list[int]]:
    """Find paragraphs of two texts that differ but correspond. `left` and `right` list the paragraphs of the texts.
    Returns [a0, a1, b0, b1] for each group of paragraphs left[a0:a1] that corresponds to right[b0:b1]. The groups are
    in order and do not overlap."""
    words = [[(word, i) for i, line in enumerate(side) for word in _WORD.findall(line)] for side in (left, right)]
    counts = [Counter(word for word, _ in side) for side in words]
    if sum(n * counts[1][word] for word, n in counts[0].items()) > PAIRS:
        return []
    left_lines, right_lines = ([i for _, i in side] for side in words)
    shared: Counter[tuple[int, int]] = Counter()
    for a, b, size in _matcher(*([word for word, _ in side] for side in words)).get_matching_blocks():
        shared.update((left_lines[a + k], right_lines[b + k]) for k in range(size))
    lengths = Counter(left_lines), Counter(right_lines)
    links: list[list[int]] = []
    for i, j in sorted(pair for pair, n in shared.items() if 2 * n >= min(lengths[0][pair[0]], lengths[1][pair[1]])):
        if links and (i < links[-1][1] or j < links[-1][3]):
            links[-1][1], links[-1][3] = max(links[-1][1], i + 1), max(links[-1][3], j + 1)
        else:
            links.append([i, i + 1, j, j + 1])
    return links


def pieces(row: DiffRow) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Divide a row (a pair of paragraphs, left and right) into runs of words. Returns (operation, (begin, end) on the
    left, (begin, end) on the right) for each run. The operation is "equal", "delete", "insert" or "replace".
    Positions count characters of a paragraph, and `end` is exclusive. A run without words on one of the sides has (0,
    0) there."""
    spans = [[m.span() for m in row.word.finditer(text)] for text in row.sides]
    words = [[text[a:b] for a, b in side] for text, side in zip(row.sides, spans)]

    def characters(side: int, begin: int, end: int) -> tuple[int, int]:
        if begin == end:
            return 0, 0
        return spans[side][begin][0], spans[side][end - 1][1]

    return [(what, characters(0, a0, a1), characters(1, b0, b1))
            for what, a0, a1, b0, b1 in _matcher(*words).get_opcodes()]


def only(pairs: list[DiffRow]) -> tuple[int, int]:
    """Returns the number of words that only the left text has, and the number that only the right text has."""
    counts = [0, 0]
    for row in pairs:
        if not row.same:
            for what, *sides in pieces(row):
                for i, (begin, end) in enumerate(sides if what != "equal" else ()):
                    counts[i] += words(row.sides[i][begin:end])
    return counts[0], counts[1]


def words(text: str) -> int:
    return len(_WORD.findall(text))


def shortened(pairs: list[DiffRow]) -> Iterator[DiffRow | int]:
    """Yield the rows (pairs of paragraphs) of a comparison without the middle of long stretches of equal rows. The
    AROUND rows next to a row that differs are kept. In place of the rows left out, their number is yielded. A stretch
    is not shortened if only one row could be left out."""
    start = 0
    while start < len(pairs):
        end = start
        while end < len(pairs) and pairs[end].same:
            end += 1
        before, after = AROUND if start else 0, AROUND if end < len(pairs) else 0
        left_out = end - start - before - after
        if left_out > 1:
            yield from pairs[start:start + before]
            yield left_out
            yield from pairs[end - after:end]
        else:
            yield from pairs[start:end]
        if end < len(pairs):
            yield pairs[end]
        start = end + 1
