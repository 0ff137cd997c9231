"""Determines in which table cells, list items, quotes and pieces of code the chosen blocks of a page are. A block is a
stretch of text between block-level tags. Only the arrays of the page (`page.PageArrays`) are read.

Pages, above all old ones, use tables and lists for layout as often as for data. Blocks in a layout table or list count
as plain blocks. A data table has at least two rows with at least two filled cells. All its cells are short, and it
holds neither tables, lists, headings nor code. A real list has at least two items, all of them short and without
headings.
"""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from stages.extract.html.mill.columns import B_BOX, B_END, B_ROW, B_START, E_NUMBER, E_PARENT, E_TAG
from stages.extract.html.mill.page import PageArrays
from stages.extract.html.mill.tags import NAMES, TAG

#: Columns of the array that `places` returns. They hold numbers of elements (0: none), except P_COLUMN, P_LEVEL,
#: P_DEPTH and P_NUMBER. In order: data table, cell, number of the column, table row; quote, level of the heading;
#: outermost list, number of lists around the block, innermost list item, number of that item (0: a bullet); term or
#: definition of a definition list; preformatted code.
(P_TABLE, P_CELL, P_COLUMN, P_ROW, P_QUOTE, P_LEVEL, P_LIST, P_DEPTH, P_ITEM, P_NUMBER, P_DEFINED, P_PRE) = range(12)
PLACES = 12
#: Longest table cell and longest list item, in bytes, and most blocks in a cell or item. A table or list beyond these
#: limits is layout.
CELL, ITEM, BLOCKS = 1000, 2000, 8
#: most columns of a table
WIDEST = 60

(_TABLE, _CELL, _HEADING, _LIST, _ITEM, _QUOTE, _PRE, _DEFINED) = range(1, 9)
_KINDS = np.zeros(len(NAMES), np.int32)
for _kind, _names in ((_TABLE, "table"), (_CELL, "td th"), (_HEADING, "h1 h2 h3 h4 h5 h6"), (_LIST, "ul ol menu dir"),
                      (_ITEM, "li"), (_QUOTE, "blockquote"), (_PRE, "pre listing"), (_DEFINED, "dt dd")):
    _KINDS[[TAG[_name] for _name in _names.split()]] = _kind
_LEVELS = np.zeros(len(NAMES), np.int32)
_LEVELS[[TAG[f"h{n}"] for n in range(1, 7)]] = np.arange(1, 7)


def places(page: PageArrays, chosen: np.ndarray) -> np.ndarray:
    """Returns, for each chosen block, the table, list, quote and so on that contains it, as int32[blocks, PLACES]. The
    constants P_… name the columns. The rows of other blocks are 0."""
    return _places(page.elements, page.blocks, chosen, _KINDS, _LEVELS, TAG["ol"])


@njit(cache=True, nogil=True)
def _places(elements, blocks, chosen, kinds, levels, ordered):
    n = len(elements)
    # for each element its nearest ancestor of each kind, itself included; for each list the list around it
    at = np.zeros((n, PLACES), np.int32)
    list_of = np.zeros(n, np.int32)
    counted = np.zeros(n, np.int32)         # cells of a row, or the number of a list's next item
    items = np.zeros(n, np.int32)
    is_layout = np.zeros(n, np.bool_)
    for i in range(1, n):
        up = elements[i, E_PARENT]
        for c in range(PLACES):                # numba takes four seconds to compile the assignment of a whole row
            at[i, c] = at[up, c]
        list_of[i] = list_of[up]
        kind = kinds[elements[i, E_TAG]]
        if kind == 0:
            continue
        if kind != _CELL and kind != _QUOTE and kind != _DEFINED and kind != _ITEM:
            is_layout[at[up, P_TABLE]] = True
        if kind == _TABLE:
            at[i, P_TABLE] = i
            at[i, P_CELL] = at[i, P_ITEM] = list_of[i] = 0
        elif kind == _CELL:
            at[i, P_CELL] = i
            at[i, P_COLUMN] = counted[up]
            counted[up] += 1
        elif kind == _HEADING:
            at[i, P_LEVEL] = levels[elements[i, E_TAG]]
            is_layout[list_of[up]] = True
        elif kind == _LIST:
            list_of[i] = i
            at[i, P_ITEM] = 0
            counted[i] = max(elements[i, E_NUMBER], 1)
        elif kind == _ITEM:
            at[i, P_ITEM] = i
            owner = list_of[i]
            items[owner] += 1
            at[i, P_NUMBER] = 0
            if elements[owner, E_TAG] == ordered:
                if elements[i, E_NUMBER] > 0:
                    counted[owner] = elements[i, E_NUMBER]
                at[i, P_NUMBER] = counted[owner]
                counted[owner] += 1
        elif kind == _QUOTE:
            at[i, P_QUOTE] = i
        elif kind == _PRE:
            at[i, P_PRE] = i
        elif kind == _DEFINED:
            at[i, P_DEFINED] = i
    # sizes of the chosen blocks
    size = np.zeros(n, np.int32)
    block_counts = np.zeros(n, np.int32)
    filled = np.zeros(n, np.int32)          # cells of a row
    rows = np.zeros(n, np.int32)            # rows of two cells and more of a table
    for k in range(len(blocks)):
        if not chosen[k]:
            continue
        box = blocks[k, B_BOX]
        table, cell, item = at[box, P_TABLE], at[box, P_CELL], at[box, P_ITEM]
        length = blocks[k, B_END] - blocks[k, B_START]
        if cell:
            row = blocks[k, B_ROW]
            if size[cell] == 0:
                filled[row] += 1
                rows[table] += filled[row] == 2
                is_layout[table] = is_layout[table] or at[cell, P_COLUMN] >= WIDEST
            size[cell] += length
            block_counts[cell] += 1
            is_layout[table] = is_layout[table] or size[cell] > CELL or block_counts[cell] > BLOCKS
        elif item:
            size[item] += length
            block_counts[item] += 1
            if size[item] > ITEM or block_counts[item] > BLOCKS:
                is_layout[list_of[box]] = True
    out = np.zeros((len(blocks), PLACES), np.int32)
    for k in range(len(blocks)):
        if not chosen[k]:
            continue
        box = blocks[k, B_BOX]
        for c in range(PLACES):
            out[k, c] = at[box, c]
        table = at[box, P_TABLE]
        if at[box, P_CELL] and not is_layout[table] and rows[table] >= 2:
            out[k, P_ROW] = blocks[k, B_ROW]
        else:
            out[k, P_TABLE] = out[k, P_CELL] = 0
        # the enclosing lists, innermost first
        item, owner = at[box, P_ITEM], list_of[box]
        out[k, P_ITEM] = out[k, P_NUMBER] = 0
        while owner:
            if not is_layout[owner] and items[owner] > 1:
                if out[k, P_DEPTH] == 0:
                    out[k, P_ITEM] = item
                    out[k, P_NUMBER] = at[item, P_NUMBER]
                out[k, P_DEPTH] += 1
                out[k, P_LIST] = owner
            above = elements[owner, E_PARENT]
            item, owner = at[above, P_ITEM], list_of[above]
        if out[k, P_ITEM] == 0:
            out[k, P_DEPTH] = out[k, P_LIST] = 0
    return out
