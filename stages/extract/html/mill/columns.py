"""Columns of the arrays `mill` makes of a page (int32)."""

from __future__ import annotations

#: Of elements: tag, parent, nearest block element, flags (tags.IN_*), hash of tag and class; weights of class words
#: (its own, best and worst on the path from the root); sums over all blocks inside; the offset of the class attribute
#: in the markup; the number at which a list begins or that an item declares (0: none).
(E_TAG, E_PARENT, E_BOX, E_FLAGS, E_SIGNATURE, E_TOKENS, E_BEST, E_WORST, E_UNITS, E_LINKED, E_BLOCKS, E_STOPS,
 E_PROSE, E_COMMAS, E_LAST, E_CLASS, E_CLASS_END, E_NUMBER) = range(18)
ELEMENT = 18
#: of blocks. Units: characters without spaces, Han and Kana counted threefold
(B_START, B_END, B_BOX, B_FLAGS, B_UNITS, B_LINKED, B_WORDS, B_DIGITS, B_UPPER, B_STOPS, B_COMMAS, B_PUNCTUATION,
 B_CURRENCY, B_ANCHORS, B_STRONG, B_BREAKS, B_IMAGES, B_INPUTS, B_FIRST, B_LAST, B_ROW, B_ITEM, B_LEADS,
 B_TITLED) = range(24)
BLOCK_COLUMNS = 24
#: of marks: number of the block, place in the text, tags.MARK (below zero: the end of one)
M_BLOCK, M_AT, M_MARK = range(3)
MARK_COLUMNS = 3
