"""Finds the running heads, running feet and page numbers of a document: text at the edges of its pages that is not part
of the body.

Text at an edge is removed if it repeats from page to page, or counts the pages. Most other text stays, even if it looks
like a running head. A running head in the text does little harm, while a missing line of text breaks a sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from stages.extract.pdf.layout import Line, PdfPage

_DIGITS = re.compile(r"\d+")
_NUMBER = re.compile(r"[-–—\s(\[|]*(?:(?:page|seite|p\.|pg\.?) ?)?(?:\d{1,5}|[ivxlc]{1,7})"
                     r"(?:\s?(?:/|of|von|de)\s?\d{1,5})?[-–—\s)\]|.]*", re.IGNORECASE)
_ROMAN = re.compile(r"(?=.)c{0,3}(xc|xl|l?x{0,3})(ix|iv|v?i{0,3})", re.IGNORECASE)
_VALUES = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
#: notices that hosts print on pages they deliver
_STAMP = re.compile(r"downloaded (?:from|by|on)|download date|this content downloaded|digitized by", re.IGNORECASE)
#: matches text that is typical of the foot of a page and rare in the last line of a text: an address, a copyright, a
#: volume, bars
_FOOT = re.compile(r"https?:|www\.|©|\bdoi\b|\bvol(?:ume|\.)? ?\d|\bissn\b| \| | • ", re.IGNORECASE)
#: running heads and feet lie within this share of the page's height from its top or bottom
_EDGE = 0.13
#: On pages with wide margins they lie within this share. Beyond _EDGE, only page numbers that count the pages and text
#: repeated on half of the pages are removed.
_DEEP = 0.22
#: lines less than this far apart in height are at the same place on their pages, units: 4 points
_NEAR = 256


class _Row(NamedTuple):
    top: bool             # at the top of its page
    lines: list[Line]
    text: str             # text of all its lines
    key: str              # the text with # for numbers that may be page numbers
    height: int           # height on the page, in steps of _NEAR
    numbers: list[tuple[bool, int]]       # (roman, value) at its ends
    deep: bool            # further from the edge than _EDGE
    short: bool           # in the usual size or a smaller one, at most 110 characters
    apart: bool           # short, and more than two lines from the next row
    sparse: bool          # short, with a gap of a sixth of the page's height within it


def furniture(pages: list[PdfPage]) -> list[set[int]]:
    """Returns, for each page, the set of the id() of the lines to remove: running heads, running feet and page numbers.

    A row is one or several lines at the same height. Only the three outermost rows near each edge of a page are judged.

    A row that repeats is removed. Its text, apart from numbers, must occur at the same height on at least three pages
    and on a quarter of all pages (FinePDFs: 25 %). Two pages are enough in a document of four pages or more where at
    least half of the pages have a repeated row or a page number at this height.

    Other rows are removed from the edge inwards, up to the first row that stays. They are removed if they are one of
    these:

    - a row that is only a number, such as `- 12 -` or `Page 3 of 9`
    - a short row that begins or ends with the page's number: a number that differs from the page's index by the same
      amount on at least three pages and, if it is an Arabic number, on a tenth of all pages
    - a notice that hosts print ("downloaded from")
    - in a document of fewer than four pages: a short row with a number at an end and a wide gap inside
    - in such a document: a last row that looks like a foot (an address, a copyright), more than two lines below the
      text

    Rows further than `_EDGE` from the edge of the page are more likely text. Such a row is removed only if all rows
    outside it are removed, and if one of two things holds: it repeats on at least three pages and on half of all pages,
    or it is nothing but the page's number.
    """
    edges = [_edge(page) for page in pages]
    places: Counter[tuple[bool, str, int]] = Counter()
    offsets: Counter[tuple[bool, int]] = Counter()
    for at, rows in enumerate(edges):
        places.update({(row.top, row.key, row.height) for row in rows})
        offsets.update({(roman, value - at) for row in rows for roman, value in row.numbers})

    def times(row: _Row) -> int:
        return sum(places[row.top, row.key, row.height + step] for step in (-1, 0, 1))

    least = max(3, (len(pages) + 3) // 4)
    slots: Counter[tuple[bool, int]] = Counter()
    for rows in edges:
        slots.update({(row.top, row.height) for row in rows if times(row) > 1 or _NUMBER.fullmatch(row.text)})
    out = []
    for at, rows in enumerate(edges):
        drop: set[int] = set()
        outermost = {True: True, False: True}
        for row in rows:
            repeats, popular = times(row), sum(slots[row.top, row.height + step] for step in (-1, 0, 1))
            counted = row.short and any(offsets[roman, value - at] >= (3 if roman else max(3, len(pages) // 10))
                                        for roman, value in row.numbers)
            if row.deep:
                removed = outermost[row.top] and ((counted and _NUMBER.fullmatch(row.text) is not None)
                                                  or 2 * repeats >= max(6, len(pages)))
            else:
                removed = repeats >= least or (repeats > 1 and 2 * popular >= len(pages) > 3)
            if not (removed or row.deep) and outermost[row.top]:
                alone = len(pages) < 4 and ((row.sparse and row.numbers) or (
                    row.apart and not row.top and _FOOT.search(row.text)))
                removed = bool(_NUMBER.fullmatch(row.text) or _STAMP.match(row.text) or counted or alone)
            if removed:
                drop.update(map(id, row.lines))
            outermost[row.top] &= removed
        out.append(drop)
    return out


def _key(text: str) -> str:
    """Returns a key that is equal for rows of text that differ only in the page number. The key is the text with # in
    place of its first number, its last two numbers and all roman numerals. A row with more than two numbers and no
    letters is data, so its text is returned unchanged."""
    numbers = list(_DIGITS.finditer(text))
    if len(numbers) > 2 and not any(map(str.isalpha, text)):
        return text
    for number in reversed([*numbers[:1], *numbers[1:][-2:]]):
        text = text[:number.start()] + "#" + text[number.end():]
    return " ".join("#" if _ROMAN.fullmatch(word) else word for word in text.split())


def _numbers(text: str) -> list[tuple[bool, int]]:
    """Returns the numbers at the beginning and at the end of a row of text, each as (whether the number is a roman
    numeral, value)."""
    words, out = text.split(), []
    for word in {words[0], words[-1]} if words else ():
        word = word.strip("-–—()[]|.,:•/").lower()
        if word.isdecimal() and len(word) <= 5:
            out.append((False, int(word)))
        elif word and _ROMAN.fullmatch(word):
            values = [_VALUES[c] for c in word] + [0]
            out.append((True, sum(-a if a < b else a for a, b in pairwise(values))))
    return sorted(out)


def _edge(page: PdfPage) -> list[_Row]:
    """Returns the rows (lines at the same height) that may be running heads or feet of a page: up to three rows at the
    top of the page, then up to three at its bottom. Both begin with the outermost row. Rows of tables are left out."""
    lines = sorted((line for block in page.blocks for line in block), key=lambda line: line.top + line.bottom)
    if not page.height or len(lines) < 3:
        return []
    heights = sorted(line.bottom - line.top for line in lines)
    usual = heights[len(heights) // 2]
    out = []
    for top, ordered in ((True, lines), (False, lines[::-1])):
        rows: list[list[Line]] = []
        for line in ordered[:24]:
            if rows and abs(line.top + line.bottom - rows[-1][0].top - rows[-1][0].bottom) < usual:
                rows[-1].append(line)
            elif len(rows) < 4:
                rows.append([line])
            else:
                break
        for row, after in pairwise([*rows, []] if len(rows) < 4 else rows):
            depth = max(line.bottom if top else page.height - line.top for line in row)
            if depth > _DEEP * page.height:
                break
            if any(line.cells for line in row):
                continue
            row = sorted(row, key=lambda line: line.left)
            first, text = row[0], " ".join(line.text for line in row)
            gap = max(after[0].top - first.bottom, first.top - after[0].bottom) if after else 0
            white = max([line.gap for line in row] + [b.left - a.right for a, b in pairwise(row)])
            short = all(10 * (line.bottom - line.top) <= 13 * usual for line in row) and len(text) <= 110
            out.append(_Row(top, row, text, _key(text), first.top // _NEAR, _numbers(text),
                            depth > _EDGE * page.height, short,
                            short and len(lines) >= 8 and gap > 2 * usual,
                            short and len(lines) >= 8 and 2 * gap > usual and 6 * white > page.height))
    return out
