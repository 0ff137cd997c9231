"""Names the columns of the int32 arrays in which the extraction engine `mill` holds a page: its elements, blocks
(stretches of text between block-level tags) and inline marks."""

from __future__ import annotations

#: Columns of an element, in order: number of its tag, its parent, the nearest block element (itself or around it),
#: flags (tags.IN_*), hash of tag and class; sum of the weights of its class words, highest and lowest weight of a word
#: on the path from the root; sums over all blocks inside it, and the last of these blocks; where its class attribute
#: begins and ends in the markup; the number at which a list begins or that an item declares (0: none).
(E_TAG, E_PARENT, E_BOX, E_FLAGS, E_SIGNATURE, E_TOKENS, E_BEST, E_WORST, E_UNITS, E_LINKED, E_BLOCKS, E_STOPS,
 E_PROSE, E_COMMAS, E_LAST, E_CLASS, E_CLASS_END, E_NUMBER) = range(18)
ELEMENT = 18
#: Columns of a block. Units are characters without spaces, with Han and kana characters counted three times.
(B_START, B_END, B_BOX, B_FLAGS, B_UNITS, B_LINKED, B_WORDS, B_DIGITS, B_UPPER, B_STOPS, B_COMMAS, B_PUNCTUATION,
 B_CURRENCY, B_ANCHORS, B_STRONG, B_BREAKS, B_IMAGES, B_INPUTS, B_FIRST, B_LAST, B_ROW, B_ITEM, B_LEADS,
 B_TITLED) = range(24)
BLOCK_COLUMNS = 24
#: Columns of an inline mark: number of its block, position in the text, number in tags.MARKS (negative: the mark ends)
M_BLOCK, M_AT, M_MARK = range(3)
MARK_COLUMNS = 3
