"""Writes the blocks of a page that were chosen as its main text, as plain text or Markdown. A block is a stretch of
text between block-level tags."""

from __future__ import annotations

import numpy as np

from stages.extract.html.marks import LANGUAGE, REFERENCE, dollars, fence
from stages.extract.html.mill.columns import (
    B_BOX,
    B_END,
    B_START,
    E_CLASS,
    E_CLASS_END,
    E_PARENT,
    E_TAG,
    M_BLOCK,
)
from stages.extract.html.mill.page import PageArrays
from stages.extract.html.mill.structure import (
    P_COLUMN,
    P_DEFINED,
    P_DEPTH,
    P_ITEM,
    P_LEVEL,
    P_LIST,
    P_NUMBER,
    P_PRE,
    P_QUOTE,
    P_ROW,
    P_TABLE,
    places,
)
from stages.extract.html.mill.tags import MARKS, TAG

#: lists nested deeper than this are written as plain blocks
DEEPEST = 8
#: from this code point on, scripts write without spaces: emphasis may end inside what looks like a word
_WITHOUT_SPACES = 0x0E00
#: groups of blocks: blocks of one group are written without a blank line between them
_Group = tuple[str, int]
#: a block: its number, its row, its surroundings (`structure.places`)
_Block = tuple[int, list[int], list[int]]


def render(page: PageArrays, chosen: np.ndarray, *, markup: bool = False, tables: bool = True) -> str:
    """Returns the text of the chosen blocks (bool[blocks]) of a page in their order, as plain text or, with `markup`,
    as Markdown. A block is a stretch of text between block-level tags. Without `tables`, data tables are left out.

    Plain text has one line for each block and each row of a table, and ` | ` between the cells of a row. Items of lists
    begin with `- `. Code, and blocks with line breaks, keep their lines.

    Markdown has headings, nested lists, tables, fenced code with its language, quotes, emphasis, inline code,
    superscripts and subscripts, and formulas. Formulas were marked in the page by `stages.extract.html.math`. An empty
    line separates blocks. The first row of a table is its head.

    In both forms, tables and lists that serve only for layout (`structure`) are written as plain blocks.
    """
    which = np.flatnonzero(chosen)
    body = page.text.tobytes()
    surroundings = places(page, chosen)[which]
    marks = _marks_of(page, which) if markup else {}
    out: list[tuple[str, _Group]] = []
    open_items: list[tuple[int, int, int]] = []            # open items: element, depth, width of their mark
    blocks = list(zip(which.tolist(), page.blocks[which].tolist(), surroundings.tolist()))
    # rows of a table and blocks of one piece of code are written together
    together = surroundings[:, P_TABLE] + surroundings[:, P_PRE]
    edges = np.flatnonzero((together[1:] != together[:-1]) | (together[1:] == 0)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(blocks)]) if blocks else ():
        k, b, at = blocks[begin]
        if at[P_TABLE]:
            if tables:
                out.append((_table(body, blocks[begin:end], marks, markup), ("", 0)))
            continue
        if at[P_PRE]:
            text = _code(body, blocks[begin:end])
            text = fence(text, _language(page, at[P_PRE])) if markup and text else text
        else:
            text = (_inline(body, b[B_START], b[B_END], marks[k], heading=at[P_LEVEL] > 0) if k in marks else
                    body[b[B_START]:b[B_END]].decode("utf-8", "replace")).strip()
            if "\n" in text:
                text = "\n".join(line.strip() for line in text.split("\n"))
        if not text:
            continue
        group: _Group = ("", 0)
        if markup:
            if at[P_LEVEL]:
                text = f"{'#' * at[P_LEVEL]} {' '.join(text.split())}"
            elif at[P_DEFINED] and at[P_DEFINED] == b[B_BOX]:
                group = ("defined", int(page.elements[b[B_BOX], E_PARENT]))
                if page.elements[b[B_BOX], E_TAG] == TAG["dd"] and out and out[-1][1] == group:
                    text = f": {text}"                     # a definition below its term
        if at[P_ITEM]:
            group = ("list", at[P_LIST])
            text = _in_list(text, at, open_items, markup)
        if at[P_QUOTE] and markup:
            group = ("quote", at[P_QUOTE])
            text = "> " + text.replace("\n", "\n> ")
            if out and out[-1][1] == group:
                text = f">\n{text}"
        out.append((text, group))
    if not markup:
        return "\n".join(text for text, _ in out)
    return dollars(_spaced(out))


def _spaced(parts: list[tuple[str, _Group]]) -> str:
    """Joins `parts`, which are pairs (text, group), to one Markdown text. A blank line separates parts of different
    groups."""
    out: list[str] = []
    last: _Group = ("", 0)
    for n, (text, group) in enumerate(parts):
        if n:
            out.append("\n" if group[0] and group == last else "\n\n")
        out.append(text)
        last = group
    return "".join(out)


# -- tables, lists, code ---------------------------------------------------------------------------------------------
def _table(body: bytes, blocks: list[_Block], marks: dict[int, list[list[int]]], markup: bool) -> str:
    """Returns the blocks of one table as lines, one for each row, with the cells between bars. In Markdown, cells
    without text stay empty, and columns without any text are left out."""
    rows: dict[int, dict[int, str]] = {}
    for k, b, at in blocks:
        text = " ".join(_inline(body, b[B_START], b[B_END], marks.get(k, [])).split())
        row = rows.setdefault(at[P_ROW], {})
        row[at[P_COLUMN]] = f"{row[at[P_COLUMN]]} {text}" if at[P_COLUMN] in row else text
    if not markup:
        return "\n".join(" | ".join(row.values()) for row in rows.values())
    columns = sorted({c for row in rows.values() for c in row})
    lines = ["| " + " | ".join(row.get(c, "").replace("|", "\\|") for c in columns) + " |" for row in rows.values()]
    return "\n".join([lines[0], "|" + " --- |" * len(columns), *lines[1:]])


def _in_list(text: str, at: list[int], open_items: list[tuple[int, int, int]], markup: bool) -> str:
    """Returns the text of a block in a list item. The first block of an item gets the item's mark, such as `- `. In
    Markdown, further blocks of the item are indented to the text after the mark.

    `open_items` holds the items that may contain the next block, each as (number of the element, depth, width of the
    mark). The function updates this list.
    """
    is_new = all(item != at[P_ITEM] for item, _, _ in open_items)
    depth = at[P_DEPTH]
    while open_items and (open_items[-1][1] >= depth if is_new else open_items[-1][0] != at[P_ITEM]):
        open_items.pop()
    if not markup:
        open_items += [(at[P_ITEM], depth, 0)] if is_new else []
        return f"- {text}" if is_new else text
    indent = " " * sum(width for _, _, width in open_items[:DEEPEST])
    if not is_new:
        return indent + text.replace("\n", f"\n{indent}")
    mark = f"{at[P_NUMBER]}. " if at[P_NUMBER] else "- "
    open_items.append((at[P_ITEM], depth, len(mark)))
    return indent + mark + text.replace("\n", "\n" + indent + " " * len(mark))


def _code(body: bytes, blocks: list[_Block]) -> str:
    """Returns the text of one piece of code, joined from `blocks`."""
    text = "\n".join(body[b[B_START]:b[B_END]].decode("utf-8", "replace") for _, b, _ in blocks)
    return text.expandtabs(4).strip("\n").rstrip()


def _language(page: PageArrays, pre: int) -> str:
    """Returns the programming language of a code block; "" if none is named. The first of these classes that names one
    counts: that of the block, that of the <code> at its beginning, that of the element around the block. `pre` is the
    number of the block's element."""
    for e in (pre, pre + 1, page.elements[pre, E_PARENT]):
        if e == pre + 1 and (e >= len(page.elements) or page.elements[e, E_TAG] != TAG["code"]):
            continue
        start, stop = page.elements[e, E_CLASS], page.elements[e, E_CLASS_END]
        if match := LANGUAGE.search(page.markup[start:stop].decode("utf-8", "replace")):
            return match[1].lower()
    return ""


# -- emphasis --------------------------------------------------------------------------------------------------------
#: a mark (0: none) and the pieces of text it is set around
_Part = tuple[int, list[str]]
CODE = MARKS.index("`")


def _marks_of(page: PageArrays, which: np.ndarray) -> dict[int, list[list[int]]]:
    """Returns {number of a block: its inline marks, such as emphasis} for the blocks whose numbers are in `which`.
    Blocks without marks are left out."""
    of = page.marks[:, M_BLOCK]
    starts, stops = np.searchsorted(of, which), np.searchsorted(of, which, "right")
    return {k: page.marks[a:b, 1:].tolist() for k, a, b in zip(which.tolist(), starts.tolist(), stops.tolist())
            if b > a}


def _inline(body: bytes, start: int, stop: int, marks: list[list[int]], heading: bool = False) -> str:
    """Returns the text of a block with Markdown marks for emphasis, inline code and the like. A mark is ignored if it
    begins or ends in another block, lies inside code or inside a mark of its own kind, or is bold inside a heading."""
    if not marks:
        return body[start:stop].decode("utf-8", "replace")
    levels: list[tuple[int, list[_Part]]] = [(0, [])]
    at = start
    for place, mark in marks:
        levels[-1][1].append((0, [body[at:place].decode("utf-8", "replace")]))
        at = place
        if mark > 0:
            levels.append((mark, []))
        elif len(levels) > 1 and levels[-1][0] == -mark:
            text = _written(levels.pop()[1])
            ignored = (heading and mark == -1) or any(m in (-mark, CODE) for m, _ in levels)
            _join(levels[-1][1], 0 if ignored else -mark, text)
    levels[-1][1].append((0, [body[at:stop].decode("utf-8", "replace")]))
    while len(levels) > 1:
        text = _written(levels.pop()[1])
        levels[-1][1].append((0, [text]))
    return _written(levels[0][1])


def _join(parts: list[_Part], mark: int, text: str) -> None:
    """Append `text` with its mark to `parts`. The mark encloses the words but not the spaces around them. Neighbouring
    texts with the same mark get one pair of marks."""
    core = text.strip()
    if not mark or not core or (mark == CODE and "\n" in core):
        parts.append((0, [text]))
        return
    before, after = text[:len(text) - len(text.lstrip())], text[len(text.rstrip()):]
    gap = [before]
    while parts and not parts[-1][0] and not any(piece.strip() for piece in parts[-1][1]):
        gap = parts.pop()[1] + gap
    if parts and parts[-1][0] == mark and mark <= CODE:
        parts[-1][1].extend((*gap, core))
    else:
        parts += [(0, gap), (mark, [core])]
    parts.append((0, [after]))


def _written(parts: list[_Part]) -> str:
    """Returns the text of `parts` with their marks. Emphasis that covers only a part of a word is dropped."""
    texts = ["".join(pieces) for _, pieces in parts]
    after = [" "] * len(parts)                              # the character after each part
    for n in range(len(parts) - 2, -1, -1):
        after[n] = texts[n + 1][:1] or after[n + 1]
    out: list[str] = []
    before = " "
    for n, (mark, _) in enumerate(parts):
        text, sign = texts[n], MARKS[mark]
        if mark == CODE:
            out.append(f"`{text}`" if "`" not in text else f"`` {text} ``")
        elif mark > CODE + 1:
            if sign != "sup" or not REFERENCE.fullmatch(text):            # the number of a footnote
                out.append(f"<{sign}>{text}</{sign}>" if text[0].isalnum() or len(text) > 1 else text)
        elif mark and not (_letter(before) and _letter(text[0])) and not (_letter(after[n]) and _letter(text[-1])):
            out.append(f"{sign}{text}{sign}")
        else:
            out.append(text)
        before = text[-1:] or before
    return "".join(out)


def _letter(char: str) -> bool:
    return char.isalnum() and ord(char) < _WITHOUT_SPACES
