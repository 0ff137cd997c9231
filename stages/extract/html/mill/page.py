"""Turns a web page into flat arrays of its elements and blocks of text. The HTML parser lexbor reads the page and
writes it as normalised markup; a compiled function (`scan`) then walks over that markup once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from resiliparse.parse.html import HTMLTree

from stages.extract.html.mill import tags as t
from stages.extract.html.mill.columns import BLOCK_COLUMNS, ELEMENT, MARK_COLUMNS
from stages.extract.html.mill.scan import scan

_NONE = np.frombuffer(b"display:none", np.uint8)
_HIDDEN = np.frombuffer(b"display: none", np.uint8)


class PageArrays(NamedTuple):
    """A web page as arrays. Their columns are named in `stages.extract.html.mill.columns`.

    - `elements`: int32[n, ELEMENT], a row for each element. The first row stands for the document.
    - `blocks`: int32[m, BLOCK_COLUMNS], a row for each block, which is a stretch of text between block-level tags.
    - `text`: the text of all blocks, as bytes (uint8).
    - `marks`: int32[k, MARK_COLUMNS], the positions in `text` where inline marks such as emphasis begin and end.
    - `markup`: the normalised markup of the page.
    - `words`, `words_of`: hashes (uint32) of the words in class, id, itemprop and role attributes, and the number of
      the element that has each word (int32). Both arrays are empty unless `walk` was called with `collect`.
    """

    elements: np.ndarray
    blocks: np.ndarray
    text: np.ndarray
    marks: np.ndarray
    markup: bytes
    words: np.ndarray
    words_of: np.ndarray


def serialised(page: str) -> bytes:
    """Parses a page and returns its tree as normalised markup in UTF-8 (HTML §13.3)."""
    try:
        tree = HTMLTree.parse(page)
    except UnicodeEncodeError:                    # half a surrogate pair is not a character
        tree = HTMLTree.parse(page.encode("utf-8", "replace").decode())
    return tree.document.html.encode("utf-8", "replace") if tree.document is not None else b""


def table(hashes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns an open-addressing hash table from `hashes` (uint32) to `values`, as two arrays (keys, values) for
    `scan.lookup`. No hash may be 0, because 0 marks an empty slot."""
    size = 16
    while size < 3 * len(hashes):
        size *= 2
    keys, slots = np.zeros(size, np.uint32), np.zeros(size, np.int32)
    for h, value in zip(hashes.tolist(), values.tolist()):
        at = h & size - 1
        while keys[at]:
            at = at + 1 & size - 1
        keys[at], slots[at] = h, value
    return keys, slots


NO_WORDS = table(np.zeros(0, np.uint32), np.zeros(0, np.int32))


def walk(markup: bytes, tokens: tuple[np.ndarray, np.ndarray] = NO_WORDS, *, deepest: int = 255,
         collect: bool = False) -> PageArrays | None:
    """Returns the arrays of a page from its normalised markup; None when its elements nest deeper than `deepest`.

    `tokens` holds the learned weights of words in class, id and similar attributes, as a hash table made by `table`.
    With `collect`, `PageArrays.words` holds the hashes of these words on the page.
    """
    most = markup.count(b"<") + 2
    elements = np.empty((most, ELEMENT), np.int32)
    blocks = np.empty((most, BLOCK_COLUMNS), np.int32)
    text = np.empty(len(markup) + 16, np.uint8)
    class_words = np.empty(len(markup) // 2 if collect else 0, np.uint32)
    word_elements = np.empty(len(class_words), np.int32)
    marks = np.empty((2 * most, MARK_COLUMNS), np.int32)
    n, m, size, words, k = scan(np.frombuffer(markup, np.uint8), t.CLASS, t.KIND, t.FLAGS, t.TAG_KEYS, t.TAG_VALUES,
                                t.ATTR_KEYS, t.ATTR_VALUES, t.ROLE_KEYS, t.ROLE_VALUES, *tokens, t.COMMENT_KEYS,
                                t.COMMENT_VALUES, t.MARK, _NONE, _HIDDEN, elements, blocks, text, marks, class_words,
                                word_elements, deepest)
    if n < 0:
        return None
    return PageArrays(elements[:n], blocks[:m], text[:size], marks[:k], markup, class_words[:words],
                      word_elements[:words])
