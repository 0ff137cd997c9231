"""Groups the characters of a PDF page into pieces, which are stretches of one line without a wide gap. Each piece has
its text and its box (bounding rectangle).

Coordinates are integers in units of 1/64 point (`UNIT`), and y points downwards. The page is turned so that most of its
text is upright. PDFium's floats are rounded to these units before any rule reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeline.base.compiled import njit
from stages.extract.pdf.glyphs import accents, is_rtl_code, logical

UNIT = 64
#: largest coordinate, units: a hostile file may place a character anywhere
_FAR = 1 << 24
#: what PDFium returns for a hyphen at the end of a line that continues in the next
HYPHEN = "\x02"


class TextPiece(NamedTuple):
    """A stretch of one line of a PDF page without a wide gap: its text in reading order, with single spaces between
    words, and its box in units of 1/64 point (`UNIT`)."""

    left: int
    top: int
    right: int
    bottom: int
    text: str
    mono: int             # width of every character if the font has a fixed pitch, units; else 0
    rtl: bool             # most letters are written from right to left


class PageChars(NamedTuple):
    pieces: list[TextPiece]
    width: int            # width of the turned page, units
    height: int
    chars: int            # characters that are not spaces
    spaces: int           # spaces, including those PDFium inserted
    garbled: int          # U+FFFD, private and control characters, which fonts without a usable encoding yield
    across: int           # characters left out because they run across the page's main direction


def pieces_of(layer: Any, count: int, page: tuple[float, float, float, float]) -> PageChars:
    """Groups the first `count` characters of a loaded text page (`layer`, a pypdfium2 handle) into pieces, in the order
    of the page's content. A piece is a stretch of one line without a wide gap. `page` is the box of the page in points:
    left, bottom, right, top."""
    from stages.extract.pdf.native import read

    code, inserted, angle, loose, tight = read(layer, count)
    turn = np.rint(np.nan_to_num(angle) / (np.pi / 2)).astype(np.int64) % 4
    hyphen = (code == 2) | (code == 0xFFFE)
    inked = ~inserted & ((code > 32) & (code != 0xA0) | hyphen)
    turns = np.bincount(turn[inked], minlength=4)
    main = int(turns.argmax())
    along = turn == main
    if main == 0:
        accents(code, inserted, inked, loose, tight)
        if _downwards(code, inked & along, loose):
            main, along = 1, turn <= 1                  # Latin words in vertical lines are turned
    code[inked & ~along] = 0
    inked &= along
    box, width, height = _boxes(loose, tight, turn, main, page)
    starts, ends, edges, mono = _pieces(code, inserted, inked, box)
    text = _text(code)
    rtl = is_rtl_code(code)
    rtl_counts = np.add.reduceat(rtl, starts).tolist() if rtl.any() and len(starts) else [0] * len(starts)
    places, pitches = edges.tolist(), mono.tolist()
    out: list[TextPiece] = []
    for k, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        content = text[start:end]
        if rtl_counts[k]:
            content = logical(content, inserted[start:end].tolist(), box[start:end].tolist())
        content = " ".join(content.replace("\0", "").split())
        if content:
            left, top, right, bottom = places[k]
            out.append(TextPiece(left, top, right, bottom, content, pitches[k],
                                 bool(rtl_counts[k]) and is_rtl(content)))
    control = (code < 32) & (code > 0) & ~hyphen & (code != 9) & (code != 10) & (code != 13)
    garbled = control | (code == 0xFFFD) | ((code >= 0xE000) & (code <= 0xF8FF)) | ((code >= 0x7F) & (code < 0xA0))
    spaces = (code == 32) | (code == 0xA0) | (code == 13)
    return PageChars(out, width, height, int(turns.sum()), int(spaces.sum()), int(garbled.sum()),
                     int(turns.sum() - inked.sum()))


def _downwards(code: np.ndarray, inked: np.ndarray, loose: np.ndarray) -> bool:
    """Whether upright characters of a page follow one another from top to bottom, as in Japanese and Chinese books.
    `inked` marks the characters to judge, and `loose` holds their boxes (`native.read`)."""
    wide = np.flatnonzero(inked & (code >= 0x3040) & (code < 0xA000))
    if len(wide) < 20:
        return False
    x, y = (loose[wide, 0] + loose[wide, 2]) / 2, (loose[wide, 1] + loose[wide, 3]) / 2
    near = np.diff(wide) == 1
    down, right, size = -np.diff(y), np.diff(x), (loose[wide[:-1], 1] - loose[wide[:-1], 3])
    falls = near & (abs(right) < size / 3) & (down > size / 2) & (down < 2 * size)
    goes = near & (abs(down) < size / 3) & (right > size / 2) & (right < 2 * size)
    return int(falls.sum()) > max(10, 2 * int(goes.sum()))


def _boxes(loose: np.ndarray, tight: np.ndarray, turn: np.ndarray, main: int,
           page: tuple[float, float, float, float]) -> tuple[np.ndarray, int, int]:
    """Turns a page so that its main direction is upright, with the upper left corner at (0, 0). Returns (boxes of its
    characters: int64[n, 4], left, top, right, bottom; width of the turned page; its height).

    The box of a character is as high as its font and as wide as its advance. The box of the character's ink is used
    instead in three cases: the first box does not overlap the ink vertically, it is much higher than the ink, or the
    text is turned by a quarter.

    `loose` and `tight` are as `native.read` returns them. `turn` holds the quarter turns of each character, `main`
    those of the page's main direction.
    """
    ink = np.stack([tight[:, 0], tight[:, 3], tight[:, 1], tight[:, 2]], 1)         # left, top, right, bottom; y up
    box = loose.astype(np.float64)
    tall, inky = box[:, 1] - box[:, 3], ink[:, 1] - ink[:, 3]
    wrong = ~((tall > 0) & (box[:, 2] >= box[:, 0]) & (tall <= 6 * np.maximum(inky, 2.0))
              & (box[:, 3] <= ink[:, 1]) & (box[:, 1] >= ink[:, 3]))
    wrong |= turn % 2 == 1  # PDFium's loose box of turned text is not the font's box
    box[wrong] = ink[wrong]
    grid = np.nan_to_num(np.vstack([box, page]), nan=0.0, posinf=_FAR, neginf=-_FAR)
    grid = np.clip(np.rint(grid * UNIT), -_FAR, _FAR).astype(np.int64)
    x0, y1, x1, y0 = grid[:-1].T
    left, bottom, right, top = grid[-1].tolist()
    turned = {0: (x0 - left, top - y1, x1 - left, top - y0), 1: (top - y1, right - x1, top - y0, right - x0),
              2: (right - x1, y0 - bottom, right - x0, y1 - bottom),
              3: (y0 - bottom, x0 - left, y1 - bottom, x1 - left)}
    size = (max(1, right - left), max(1, top - bottom))
    return np.stack(turned[main], 1), *(size if main % 2 == 0 else size[::-1])


def _text(code: np.ndarray) -> str:
    """Returns a string with one character for each UTF-16 code. The two codes of a surrogate pair become the character
    that they encode, followed by a NUL."""
    joined = code.copy()
    joined[joined == 0xFFFE] = 2
    high = np.flatnonzero((code[:-1] >= 0xD800) & (code[:-1] < 0xDC00) & (code[1:] >= 0xDC00) & (code[1:] < 0xE000))
    joined[high] = 0x10000 + ((code[high] - 0xD800) << 10) + (code[high + 1] - 0xDC00)
    joined[high + 1] = 0
    joined[((joined >= 0xD800) & (joined < 0xE000)) | (joined > 0x10FFFF)] = 0xFFFD
    return joined.astype("<u4").tobytes().decode("utf-32-le")


def is_rtl(text: str) -> bool:
    if text.isascii():
        return False
    letters = rtl = 0
    for c in text:
        if c.isalpha():
            letters += 1
            rtl += "\u0590" <= c <= "\u08ff" or "\ufb1d" <= c <= "\ufeff"
    return 2 * rtl > letters


@njit(cache=True, nogil=True)
def _pieces(code, inserted, inked, box):
    """Group the characters into pieces (stretches of one line without a wide gap). Returns four arrays with an entry
    for each piece: the index of its first character, the index after its last character, its box, and the width of its
    characters if all are equally wide (else 0).

    A piece ends at the end of a line, and before a character that

    - overlaps the previous one by less than 40 % of the smaller of their heights,
    - follows after a gap wider than a character is high, or
    - jumps back to the left, into the stretch that the piece already covers.
    """
    n = code.shape[0]
    starts = np.zeros(n + 1, np.int64)
    ends = np.zeros(n + 1, np.int64)
    edges = np.zeros((n + 1, 4), np.int64)
    mono = np.zeros(n + 1, np.int64)
    count = 0
    open_ = False
    last = -1
    pitch = 0
    wide = 0
    for i in range(n):
        if code[i] == 10 or code[i] == 13:
            if open_:
                ends[count] = i
                count += 1
                open_ = False
            continue
        if not inked[i]:
            continue
        left, top, right, bottom = box[i, 0], box[i, 1], box[i, 2], box[i, 3]
        if open_:
            high = min(bottom - top, box[last, 3] - box[last, 1])
            common = min(bottom, box[last, 3]) - max(top, box[last, 1])
            tall = max(bottom - top, box[last, 3] - box[last, 1])
            gap = max(left - box[last, 2], box[last, 0] - right)
            back = left < box[last, 0] - tall and code[i] < 0x590 and right > edges[count, 0] and gap < 0
            if 10 * common < 4 * high or gap > tall or back:
                ends[count] = last + 1
                count += 1
                open_ = False
        if not open_:
            open_ = True
            starts[count] = i
            edges[count, 0], edges[count, 1], edges[count, 2], edges[count, 3] = left, top, right, bottom
            pitch = right - left
            wide = 0
        else:
            edges[count, 0] = min(edges[count, 0], left)
            edges[count, 1] = min(edges[count, 1], top)
            edges[count, 2] = max(edges[count, 2], right)
            edges[count, 3] = max(edges[count, 3], bottom)
        if abs(right - left - pitch) > 2 or code[i] >= 0x2E80:
            pitch = -1000
        wide += 1
        mono[count] = pitch if pitch > 0 else 0
        last = i
    if open_:
        ends[count] = n
        count += 1
    # A piece takes the height that most of its characters share, so that a footnote mark does not raise it.
    for k in range(count):
        votes, total, equal, top, bottom = 0, 0, 0, 0, 0
        for i in range(starts[k], ends[k]):
            if inked[i]:
                total += 1
                if votes == 0:
                    top, bottom = box[i, 1], box[i, 3]
                near = abs(box[i, 1] - top) <= 16 and abs(box[i, 3] - bottom) <= 16
                votes += 1 if near else -1
        for i in range(starts[k], ends[k]):
            equal += inked[i] and abs(box[i, 1] - top) <= 16 and abs(box[i, 3] - bottom) <= 16
        if 2 * equal > total:
            edges[k, 1], edges[k, 3] = top, bottom
    return starts[:count], ends[:count], edges[:count], mono[:count]
