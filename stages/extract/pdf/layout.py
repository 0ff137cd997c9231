"""Finds the reading order of a PDF page: columns, and inside a column lines from top to bottom. Tables become rows of
cells.

The input consists of pieces, which are stretches of a line without a wide gap. A page is cut into parts, and these are
cut again, like an XY tree (Nagy and Seth 1984), but along *gutters*. A gutter is a vertical white strip that no piece
crosses, along a run of many lines (after Breuel 2002, "Two geometric algorithms for layout analysis"). If the parts
left and right of a gutter look like text, they are columns, read one after the other. If they look like a table, they
are read line by line. All numbers are integers.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipeline.base.compiled import njit
from stages.extract.pdf.chars import UNIT, PageChars, TextPiece

#: fewest lines on either side of a gutter
_LINES = 3
#: fewest characters per piece, on average, of columns whose lines stand side by side
_TEXT = 18
#: deepest nesting of columns, and most pieces of a page that is laid out; a page with more keeps the order of its
#: content
_DEPTH, _PIECES = 8, 5_000
ITEM = re.compile(r"(?:[•◦▪‣·∙●○■□–—*-]|\(?\d{1,3}[.)]|\(?[a-zA-Z][.)]|\d{1,3}(?:\.\d{1,3})+\.?|\[\d{1,3}\]|\d{1,3})$")


LEADER = re.compile(r"(?: ?[.․·…_]){5,}")


class Line(NamedTuple):
    """A line of text on a PDF page or, if `cells` is not empty, a row of a table. Positions and sizes are in units of
    1/64 point (`chars.UNIT`)."""

    left: int
    top: int
    right: int
    bottom: int
    text: str
    mono: int
    rtl: bool
    cells: tuple[str, ...] = ()
    gap: int = 0          # widest gap within it


Block = list[Line]


class PdfPage(NamedTuple):
    blocks: list[Block]
    height: int           # units; 0: the lines have no positions


def blocks_of(page: PageChars) -> list[Block]:
    """Returns the lines of a page in reading order, in blocks. A block is a list of the lines of one column, or of a
    part of a column. A page of more than `_PIECES` pieces is not laid out: its pieces are one block, in their order in
    the file."""
    pieces = page.pieces
    if len(pieces) > _PIECES:
        return [[Line(*p) for p in pieces]]
    rtl = 2 * sum(len(p.text) for p in pieces if p.rtl) > sum(len(p.text) for p in pieces)
    pieces = _initials(pieces)
    result: list[list[list[TextPiece]]] = []
    _cut(rows_of(pieces), rtl, result, 0)
    return [block for rows in result if (block := _lines(rows, rtl))]


def _initials(pieces: list[TextPiece]) -> list[TextPiece]:
    """Returns the pieces (stretches of a line) of a page after each drop initial was merged into the first line beside
    it. A drop initial is a letter about two lines high or more."""
    heights = sorted(p.bottom - p.top for p in pieces)
    usual = heights[len(heights) // 2] if heights else 0
    large = [p for p in pieces if len(p.text) == 1 and p.text.isalpha() and 5 * (p.bottom - p.top) > 9 * usual]
    for initial in large[:20]:
        beside = [p for p in pieces if initial.right - usual < p.left < initial.right + usual and len(p.text) > 8
                  and initial.top - usual < p.top < initial.bottom - usual // 2 and p.bottom - p.top < 2 * usual]
        if len(beside) >= 2:
            first = min(beside, key=lambda p: p.top)
            merged = first._replace(left=initial.left, text=initial.text + first.text)
            pieces = [merged if p is first else p for p in pieces if p is not initial]
    return pieces


def rows_of(pieces: list[TextPiece]) -> list[list[TextPiece]]:
    """Groups pieces (stretches of a line) that stand side by side into rows, each sorted from left to right. A piece
    joins a row when it overlaps the row's tallest piece by more than half of the smaller of their heights."""
    rows: list[tuple[int, int, list[TextPiece]]] = []
    for piece in sorted(pieces, key=lambda p: (p.top + p.bottom, p.left)):
        middle, best = piece.top + piece.bottom, None
        for k in range(len(rows) - 1, max(-1, len(rows) - 4), -1):
            top, bottom, row = rows[k]
            common = min(bottom, piece.bottom) - max(top, piece.top)
            small = min(bottom - top, piece.bottom - piece.top)
            if 2 * common > small and not any(min(p.right, piece.right) - max(p.left, piece.left) > UNIT and
                                              2 * abs(p.top + p.bottom - middle) > small for p in row[-16:]):
                best = k
                break
        if best is None:
            rows.append((piece.top, piece.bottom, [piece]))
        else:
            top, bottom, row = rows[best]
            row.append(piece)
            if piece.bottom - piece.top > bottom - top:                 # the tallest piece decides what is beside it
                rows[best] = (piece.top, piece.bottom, row)
    return [sorted(row, key=lambda p: (p.left, p.top)) for _, _, row in rows]


def _cut(rows: list[list[TextPiece]], rtl: bool, out: list[list[list[TextPiece]]], depth: int) -> None:
    """Cut `rows` into columns, and append each column to `out` as a list of rows. A row is a list of pieces (stretches
    of a line). `rtl` says whether columns are read from right to left. `depth` counts the cuts around this one."""
    if not rows:
        return
    if len(rows) >= _LINES and depth < _DEPTH:
        flat = [p for row in rows for p in row]
        boxes = np.array([p[:4] for p in flat], np.int64)
        number = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        size = int(np.median(boxes[:, 3] - boxes[:, 1]))
        for at, first, last in _gutters(boxes, number, len(rows), max(size * 3 // 4, 1), _LINES).tolist():
            inside = [p for row in rows[first:last + 1] for p in row]
            left, right = [p for p in inside if p.left < at], [p for p in inside if p.left >= at]
            if not _columns(rows[first:last + 1], at):
                continue
            _cut(rows[:first], rtl, out, depth + 1)
            for side in (right, left) if rtl else (left, right):
                _cut(rows_of(side), rtl, out, depth + 1)
            _cut(rows[last + 1:], rtl, out, depth + 1)
            return
    out.append(rows)


def _columns(rows: list[list[TextPiece]], at: int) -> bool:
    """Whether the parts of `rows` left and right of the position `at` are two columns of text and not cells of one
    table.

    Both parts must have at least `_LINES` lines. They are then columns if one of three conditions holds:

    - Their pieces are long, at least `_TEXT` characters on average.
    - Fewer than half of the lines stand side by side.
    - Both have at least twelve lines, and neighbouring lines differ in height by varying amounts. In a table, this
      difference is constant.
    """
    lines, pieces, chars, side_by_side, steps = [0, 0], [0, 0], [0, 0], 0, []
    for row in rows:
        beside = [p for p in row if p.left < at][-1:] + [p for p in row if p.left >= at][:1]
        if len(beside) == 2:
            steps.append(beside[1].bottom - beside[0].bottom)
        lengths_by_side = [[len(p.text) for p in row if (p.left >= at) == right] for right in (False, True)]
        side_by_side += all(lengths_by_side)
        for side, lengths in enumerate(lengths_by_side):
            lines[side] += bool(lengths)
            pieces[side] += len(lengths)
            chars[side] += sum(lengths)
    if min(lines) < _LINES:
        return False
    usual = sorted(steps)[len(steps) // 2] if steps else 0
    level = sum(abs(step - usual) <= UNIT for step in steps)
    return all(c >= _TEXT * n for c, n in zip(chars, pieces)) or 10 * side_by_side < 5 * min(lines) or (
        min(lines) >= 4 * _LINES and 2 * level < side_by_side)


@njit(cache=True, nogil=True)
def _gutters(boxes, row, rows, wide, lines):
    """Returns the best gutters of a page, at most 8, the best first: int64[g, 3] with x, first row, last row. A gutter
    is a white strip, at least `wide` units wide, along a run of rows. No piece (stretch of a line) of these rows
    crosses it. `row` holds the row of each piece.

    A strip is tried at the right edge of every piece. The score of a run of rows is the smaller of two counts: its rows
    with a piece left of the strip, and its rows with a piece right of the strip. For each edge, only the run with the
    highest score is kept, and only if the score is at least `lines`.
    """
    n = boxes.shape[0]
    strips = np.zeros((n, 4), np.int64)
    count = 0
    crossed = np.zeros(rows, np.bool_)
    lefts = np.zeros(rows, np.bool_)
    rights = np.zeros(rows, np.bool_)
    for c in range(n):
        x = boxes[c, 2]
        crossed[:] = False
        lefts[:] = False
        rights[:] = False
        for i in range(n):
            if boxes[i, 2] <= x:
                lefts[row[i]] = True
            elif boxes[i, 0] >= x + wide:
                rights[row[i]] = True
            else:
                crossed[row[i]] = True
        start = 0
        while start < rows:
            if crossed[start]:
                start += 1
                continue
            end = start
            a = 0
            b = 0
            while end < rows and not crossed[end]:
                a += lefts[end]
                b += rights[end]
                end += 1
            score = min(a, b)
            if score >= lines and score > strips[count, 3]:
                strips[count, 0] = x + 1
                strips[count, 1] = start
                strips[count, 2] = end - 1
                strips[count, 3] = score
            start = end
        if strips[count, 3] > 0:
            count += 1
    out = np.zeros((8, 3), np.int64)
    chosen = 0
    for _ in range(count):                     # numba takes three seconds to compile a sort and an assignment of a row
        k = 0                                  # the first of the strips with the highest score
        for q in range(1, count):
            if strips[q, 3] > strips[k, 3]:
                k = q
        strips[k, 3] = 0
        is_duplicate = False
        for q in range(chosen):
            if strips[k, 1] == out[q, 1] and strips[k, 2] == out[q, 2] and abs(strips[k, 0] - out[q, 0]) < 4 * wide:
                is_duplicate = True
        if not is_duplicate:
            for q in range(3):
                out[chosen, q] = strips[k, q]
            chosen += 1
            if chosen == 8:
                break
    return out[:chosen]


# -- rows to lines -----------------------------------------------------------------------------------------------------
def _lines(rows: list[list[TextPiece]], rtl: bool) -> Block:
    out: Block = []
    at = 0
    while at < len(rows):
        end = _run(rows, at)
        edges = _edges(rows[at:end])
        if edges:
            out += _table_lines(rows[at:end], edges, rtl)
        else:
            end = at + max(1, (end - at) // 2)
            out += [_joined_line(row, rtl) for row in rows[at:end]]
        at = end
    return out


def _box(row: list[TextPiece]) -> tuple[int, int, int, int]:
    """Returns the box of a row: (left, top, right, bottom). The box is as wide as all pieces of the row, and as high as
    the piece with the longest text."""
    longest = max(row, key=lambda p: len(p.text))
    return min(p.left for p in row), longest.top, max(p.right for p in row), longest.bottom


def _joined_line(row: list[TextPiece], rtl: bool) -> Line:
    """Joins the pieces (stretches of a line) of a row to one line. In a fixed-pitch font, a gap becomes as many spaces
    as fit into it."""
    mono = _pitch(row)
    if mono:
        text, right = "", row[0].left
        for p in row:
            text += " " * min(200, max(round((p.left - right) / mono), int(bool(text)))) + p.text
            right = p.right
        return Line(*_box(row), text, mono, False)
    right_to_left = 2 * sum(len(p.text) for p in row if p.rtl) > sum(len(p.text) for p in row)
    text, before, widest = "", None, 0
    for p in _read_leftwards(row) if right_to_left else row:
        gap = max(p.left - before.right, before.left - p.right) if before is not None else 0
        text += ("" if not text or gap * 8 < p.bottom - p.top else " ") + p.text
        before, widest = p, max(widest, gap)
    return Line(*_box(row), text, 0, right_to_left, (), widest)


def _read_leftwards(row: list[TextPiece]) -> list[TextPiece]:
    """Returns the pieces (stretches of a line) of a row in the reading order of a right-to-left script. The pieces run
    from right to left, but adjacent pieces in Latin script from left to right."""
    out: list[TextPiece] = []
    words = 0
    for p in row[::-1]:
        words = words + 1 if not p.rtl and any("a" <= c <= "z" for c in p.text.lower()) else 0
        out.insert(len(out) - max(0, words - 1), p)
    return out


def _pitch(row: list[TextPiece]) -> int:
    """Returns the width of a character if a row is set in a fixed-pitch font, else 0. Digits are ignored, because they
    are equally wide in most fonts."""
    pitch = max((p.mono for p in row if p.mono and len({c for c in p.text if not c.isdigit()}) >= 4), default=0)
    return pitch if pitch and all(abs(p.mono - pitch) <= 3 for p in row) else 0


def _run(rows: list[list[TextPiece]], at: int) -> int:
    """Returns the end (an index) of the longest run of rows from index `at` on that could be a table. Each row of the
    run has two or more pieces (stretches of a line), but single rows between them may have one piece. No row is in a
    fixed-pitch font, and no gap between rows exceeds two and a half lines."""
    end, since = at, 0
    for k in range(at, len(rows)):
        row = rows[k]
        if (len(row) < 2 and (k == at or since)) or _pitch(row) or (
                k > at and 2 * (row[0].top - rows[k - 1][0].bottom) > 5 * (row[0].bottom - row[0].top)):
            break
        since = int(len(row) < 2)
        if len(row) >= 2:
            end = k + 1
    return end


def _edges(rows: list[list[TextPiece]]) -> list[int]:
    """Returns the left edges of the columns of a table; an empty list if `rows` are not a table.

    Only rows of two or more pieces are judged. Columns are separated by gaps, vertical strips that are at least half a
    line's height wide. At most one judged row in six may have text in a gap. `rows` are a table if at least three of
    the judged rows, and at least a third of them, have text in two columns.

    A list, a table of contents and numbered lines of code are not tables. In a list, the first piece of every row is a
    list mark.
    """
    full = [row for row in rows if len(row) >= 2]
    if len(full) < 3 or all(ITEM.match(row[0].text) for row in full):
        return []
    # a table of contents is not read as a table
    if 2 * sum(LEADER.search(" ".join(p.text for p in row)) is not None for row in full) > len(full):
        return []
    wide = (full[0][0].bottom - full[0][0].top) // 2
    steps = sorted([(p.left, 1) for row in full for p in row] + [(p.right, -1) for row in full for p in row])
    few, covered, inside = len(full) // 6, 0, False
    edges: list[int] = []
    closed = -(1 << 30)
    for x, step in steps:
        covered += step
        if covered > few and not inside:
            if x - closed >= wide or not edges:
                edges.append(x)
            inside = True
        elif covered <= few and inside:
            closed, inside = x, False
    if not 2 <= len(edges) <= 60:
        return []
    # a column also takes in the few pieces that begin at most two lines' heights left of it
    for k in range(1, len(edges)):
        near = [p.left for row in full for p in row if edges[k] - 4 * wide <= p.left < edges[k]]
        edges[k] = min([*near, edges[k]])
    filled = sum(len({_column(edges, p) for p in row}) >= 2 for row in full)
    numbers = [int(row[0].text) if row[0].text.isdecimal() and len(row[0].text) < 10 else -2 * k
               for k, row in enumerate(full)]
    listing = len(edges) == 2 and all(b == a + 1 for a, b in pairwise(numbers))
    return edges if filled >= 3 and 3 * filled >= len(full) and not listing else []


def _column(edges: list[int], piece: TextPiece) -> int:
    return max((k for k, left in enumerate(edges) if left <= piece.left), default=0)


def _table_lines(rows: list[list[TextPiece]], edges: list[int], rtl: bool) -> Block:
    """Returns the rows of a table as lines with cells. `edges` are the left edges of its columns. A row continues the
    previous row if it lies close below it and consists of a single piece that is not in the first column."""
    out: Block = []
    for row in rows:
        inside: list[list[TextPiece]] = [[] for _ in edges]
        for p in row:
            inside[_column(edges, p)].append(p)
        cells = [_joined_line(cell, rtl).text if cell else "" for cell in inside]
        if rtl:
            cells.reverse()
        if out and len(row) == 1 and not cells[0] and 3 * (row[0].top - out[-1].bottom) < row[0].bottom - row[0].top:
            previous = out.pop()
            cells = [" ".join(filter(None, pair)) for pair in zip(previous.cells, cells)]
            out.append(Line(*_box([TextPiece(*previous[:7]), *row]), "", 0, rtl, tuple(cells)))
        else:
            out.append(Line(*_box(row), "", 0, rtl, tuple(cells)))
    return out
