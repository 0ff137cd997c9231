"""Pages of lines to one text: running heads and feet go, lines become paragraphs, words cut at line ends are mended."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from stages.extract.pdf_chars import HYPHEN
from stages.extract.pdf_layout import ITEM, Block, Line

_SPELLED = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st", "\xa0": " ",
                          "\u2002": " ", "\u2003": " ", "\u2009": " ", "\u200b": "", "\xad": HYPHEN, "\ufeff": ""})
_CONTROL = re.compile("[\x00\x01\x03-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")
_DIGITS = re.compile(r"\d+")
_LEADER = re.compile(r"(?: ?[.․·…_]){5,}")
_NUMBER = re.compile(r"[-–—\s(\[|]*(?:(?:page|seite|p\.|pg\.?) ?)?(?:\d{1,5}|[ivxlc]{1,7})"
                     r"(?:\s?(?:/|of|von|de)\s?\d{1,5})?[-–—\s)\]|.]*", re.IGNORECASE)
#: what hosts print on pages they hand out
_STAMP = re.compile(r"downloaded (?:from|by|on)|this content downloaded|digitized by", re.IGNORECASE)
_TAIL, _HEAD, _LONGEST = re.compile(r"\w+$"), re.compile(r"\w+"), 60
_WORD = re.compile(r"\w+(?:-\w+)*")
_ENDS = (".", "!", "?", ":", ";", "。", "！", "？", "：", "؟", "।")
#: share of the page's height at its top and bottom in which running heads and feet stand
_EDGE = 0.13


class Page(NamedTuple):
    blocks: list[Block]
    height: int           # units; 0: lines without places


def text_of(pages: list[Page]) -> str:
    """The text: a paragraph, line of a table or line of code in each line, a blank line where a wide gap, another size
    or a table begins or ends, and between columns and pages unless a sentence runs on."""
    pages = [Page([[_clean(line) for line in block] for block in page.blocks], page.height) for page in pages]
    out: list[str] = []
    for page, drop in zip(pages, furniture(pages)):
        for block in page.blocks:
            kept = [line for line in block if id(line) not in drop and (line.cells or line.text)]
            _append(out, _paragraphs(kept))
    text = "\n".join(out).strip("\n")
    return _mend(text)


def _clean(line: Line) -> Line:
    def clean(text: str) -> str:
        text = _LEADER.sub(" ...", _CONTROL.sub("", text.translate(_SPELLED)))
        return text if line.mono else " ".join(text.split())

    return line._replace(text=clean(line.text), cells=tuple(map(clean, line.cells)))


# -- running heads and feet ------------------------------------------------------------------------------------------
def furniture(pages: list[Page]) -> list[set[int]]:
    """id() of the lines of every page that are heads, feet and page numbers.

    A line near the upper or lower edge goes when its text, digits aside, stands there on at least three pages and a
    quarter of them (FinePDFs: 25 %), or on two while most pages have such a line at that height. From the outermost row
    inwards, three rows at most, page numbers go, and rows of little text spread over much width; in a document of less
    than four pages, where nothing can repeat, also a short last row that a gap of more than two lines sets apart.
    """
    edges = [_edge(page) for page in pages]
    pairs: Counter[tuple[bool, str]] = Counter()
    for edge in edges:
        pairs.update({(top, _DIGITS.sub("#", line.text)) for top, row in edge for line in row.lines})
    least = max(3, (len(pages) + 3) // 4)
    slots: Counter[tuple[bool, int]] = Counter()
    for edge in edges:
        slots.update({(top, line.top // 128) for top, row in edge for line in row.lines
                      if pairs[top, _DIGITS.sub("#", line.text)] > 1 or _NUMBER.fullmatch(line.text)})
    out = []
    for edge in edges:
        drop: set[int] = set()
        outermost = {True: True, False: True}
        for top, row in edge:
            gone = []
            for line in row.lines:
                n = pairs[top, _DIGITS.sub("#", line.text)]
                gone.append(n >= least or (n > 1 and 2 * slots[top, line.top // 128] >= len(pages) > 3) or (
                    outermost[top] and (bool(_NUMBER.fullmatch(line.text) or _STAMP.match(line.text)) or row.sparse
                                        or (row.apart and not top and len(pages) < 4))))
            drop.update(id(line) for line, go in zip(row.lines, gone) if go)
            outermost[top] &= all(gone)
        out.append(drop)
    return out


class _Row(NamedTuple):
    lines: list[Line]
    sparse: bool          # its text would need but half the width it stands over
    apart: bool           # short, and a gap of more than two lines to the next row


def _edge(page: Page) -> list[tuple[bool, _Row]]:
    """(at the top, row) of the up to three outermost rows near each edge, from the outside inwards."""
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
            first = row[0]
            if not all(line.bottom <= _EDGE * page.height if top else line.top >= (1 - _EDGE) * page.height
                       for line in row):
                break
            if any(line.cells for line in row):
                continue
            gap = max(after[0].top - first.bottom, first.top - after[0].bottom) if after else 0
            short = all(10 * (line.bottom - line.top) <= 13 * usual and len(line.text) <= 110 for line in row)
            width = max(line.right for line in row) - min(line.left for line in row)
            halves = sum(1 + _wide(c) for line in row for c in line.text)        # of an em, less a tenth
            sparse = short and 2 * gap > usual and len(lines) >= 8 and 3 * width > page.height and \
                9 * halves * (first.bottom - first.top) < 12 * width and not any(line.mono for line in row)
            out.append((top, _Row(row, sparse, short and len(lines) >= 8 and gap > 2 * usual)))
    return out


# -- lines to paragraphs ---------------------------------------------------------------------------------------------
def _paragraphs(lines: Block) -> list[str]:
    """Lines of a block joined to paragraphs; an empty string stands for a blank line."""
    if not lines:
        return []
    plain = [line for line in lines if not line.cells]
    left = min((line.left for line in lines), default=0)
    right, flush = _right_edge(plain)
    pitches = sorted(b.top - a.top for a, b in pairwise(lines) if b.top > a.top)
    pitch = pitches[len(pitches) // 3] if pitches else 0
    out: list[str] = []
    before: Line | None = None
    start = lines[0]
    for line in lines:
        if line.cells:
            if before is None or not before.cells or len(before.cells) != len(line.cells):
                out += [""] * bool(out) + [_row(line.cells), "|" + " --- |" * len(line.cells)]
            else:
                out.append(_row(line.cells))
        elif before is not None and not before.cells and _runs_on(before, line, start, pitch, left, right, flush):
            out[-1] = _join(out[-1], line.text)
            before = line
            continue
        else:
            text = " " * min(80, round((line.left - left) / line.mono)) + line.text if line.mono else line.text
            apart = before is not None and (before.cells or line.top - before.top > 3 * pitch // 2
                                            or not _same_size(before, line))
            out += [""] * bool(apart) + [text]
        before = start = line
    return out


def _right_edge(lines: Block) -> tuple[int, bool]:
    """(where lines end, whether several do): the furthest edge that two lines share, else the furthest."""
    ends = sorted(((line.right, line.bottom - line.top) for line in lines), reverse=True)
    for (a, high), (b, _) in pairwise(ends):
        if a - b <= high // 10:
            return a, True
    return (ends[0][0] if ends else 0), False


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace(HYPHEN, "-") for cell in cells) + " |"


def _same_size(a: Line, b: Line) -> bool:
    return 5 * abs((a.bottom - a.top) - (b.bottom - b.top)) <= max(a.bottom - a.top, b.bottom - b.top)


def _runs_on(a: Line, b: Line, start: Line, pitch: int, left: int, right: int, flush: bool) -> bool:
    """Whether `b` goes on with the paragraph that `a` ends and `start` began: its first word had no room after `a`."""
    if a.text.endswith(HYPHEN):
        return True
    if a.mono or b.mono or not _same_size(a, b):
        return False
    high = max(a.bottom - a.top, b.bottom - b.top)
    if b.top <= a.top or (b.top - a.top) * 10 > max(pitch, high) * 14:
        return False
    first = b.text.split(" ", 1)[0]
    if ITEM.match(first) and " " in b.text and not (first[0].isalpha() and len(first) == 1):
        return False
    item = bool(ITEM.match(start.text.split(" ", 1)[0]))
    if not b.rtl and b.left > a.left + high * 3 // 4 and not (item and a is start):
        return False
    if not b.rtl and item and b.left < a.left - high // 2 and a is not start:
        return False
    wide = (b.right - b.left) // max(1, len(b.text))
    room = (a.left - left) if a.rtl else right - a.right
    if a.text.endswith(_ENDS) and not b.text[0].islower() and not (flush and room < high // 2):
        return False
    return room < wide * ((1 if _wide(first[0]) else len(first)) + 1) + high // 4


def _wide(char: str) -> bool:
    """Scripts written without spaces between words."""
    return "\u2e80" <= char <= "\u9fff" or "\uac00" > char >= "\ua000" or "\uf900" <= char <= "\uffef"


def _join(text: str, more: str) -> str:
    if text.endswith(HYPHEN):
        return text + more.lstrip()
    if text.endswith("-") and len(text) > 1 and text[-2].isalpha() and more[:1].islower():
        return text[:-1] + HYPHEN + more
    return text + ("" if _wide(text[-1]) and _wide(more[0]) else " ") + more


def _append(out: list[str], block: list[str]) -> None:
    """Puts a block behind the others: behind a blank line, or in the same paragraph where a sentence runs on."""
    if not block:
        return
    if out and out[-1] and not block[0].startswith(("|", " ")) and not out[-1].startswith("|") and (
            out[-1].endswith(HYPHEN) or (block[0][0].islower() and not out[-1].endswith(_ENDS)
                                         and not ITEM.match(block[0].split(" ", 1)[0]))):
        out[-1] = _join(out[-1], block[0])
        out += block[1:]
    else:
        out += [""] * bool(out) + block


def _mend(text: str) -> str:
    """Words cut at line ends put together, as the rest of the document spells them: with a hyphen when only that
    occurs; where neither does, as one word, unless a digit stands at the hyphen."""
    first, *rest = text.split(HYPHEN)
    if not rest:
        return text
    known = Counter(word.lower() for word in _WORD.findall(text))
    out = [first]
    for part in rest:
        part = part.removeprefix(" ")
        a, b = _TAIL.search(out[-1][-_LONGEST:]), _HEAD.match(part[:_LONGEST])
        cut = a is not None and b is not None and not a[0][-1].isdigit() and not b[0][0].isdigit() and bool(
            known[(a[0] + b[0]).lower()] or not known[f"{a[0]}-{b[0]}".lower()])
        out += [part] if cut else ["-" if a else "- ", part]
    return "".join(out)
