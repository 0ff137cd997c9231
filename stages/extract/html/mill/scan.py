"""Writes the elements and the blocks of text of a page to flat arrays, in one pass over the page's markup.

The markup is HTML as the parser lexbor serialises it (HTML §13.3): every element is closed, attributes are quoted, text
is escaped, and the content of raw elements such as `script` is not escaped. So one walk suffices and no parser is
needed. The serialised form is ambiguous on some pages, which have elements inside a `script` in SVG or MathML. Such a
page is misread, but always in the same way, and never beyond the bounds of an array.
"""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from stages.extract.html.mill import columns as c
from stages.extract.html.mill import tags as t
from stages.extract.html.mill.markup import (
    F_CLASS,
    F_CLASS_END,
    F_FLAGS,
    F_NUMBER,
    F_SIGNATURE,
    FNV,
    TAG_FACTS,
    after_markup,
    after_raw,
    attributes,
    character,
    lookup,
    past_attributes,
)

E_TAG, E_PARENT, E_BOX, E_FLAGS, E_SIGNATURE = c.E_TAG, c.E_PARENT, c.E_BOX, c.E_FLAGS, c.E_SIGNATURE
E_TOKENS, E_BEST, E_WORST, E_CLASS, E_CLASS_END, E_NUMBER = (
    c.E_TOKENS, c.E_BEST, c.E_WORST, c.E_CLASS, c.E_CLASS_END, c.E_NUMBER)
B_START, B_END, B_BOX, B_FLAGS, B_UNITS, B_LINKED = c.B_START, c.B_END, c.B_BOX, c.B_FLAGS, c.B_UNITS, c.B_LINKED
B_WORDS, B_DIGITS, B_UPPER, B_STOPS, B_COMMAS = c.B_WORDS, c.B_DIGITS, c.B_UPPER, c.B_STOPS, c.B_COMMAS
B_PUNCTUATION, B_CURRENCY, B_ANCHORS, B_STRONG = c.B_PUNCTUATION, c.B_CURRENCY, c.B_ANCHORS, c.B_STRONG
B_BREAKS, B_IMAGES, B_INPUTS, B_FIRST, B_LAST = c.B_BREAKS, c.B_IMAGES, c.B_INPUTS, c.B_FIRST, c.B_LAST
B_ROW, B_ITEM, B_LEADS = c.B_ROW, c.B_ITEM, c.B_LEADS
ELEMENT, BLOCK_COLUMNS, M_BLOCK, M_AT, M_MARK = c.ELEMENT, c.BLOCK_COLUMNS, c.M_BLOCK, c.M_AT, c.M_MARK

INLINE, BLOCK, SKIP, RAW, VOID, BREAK = t.INLINE, t.BLOCK, t.SKIP, t.RAW, t.VOID, t.BREAK
IN_A, IN_PRE, IN_STRONG = t.IN_A, t.IN_PRE, t.IN_STRONG
LETTER, UPPER, DIGIT, STOP, COMMA, PUNCTUATION = t.LETTER, t.UPPER, t.DIGIT, t.STOP, t.COMMA, t.PUNCTUATION
CURRENCY, SPACE, WIDE, OTHER = t.CURRENCY, t.SPACE, t.WIDE, t.OTHER
TR, LI, OL, IMG, INPUT, BUTTON, HTML, BODY = (t.TAG[n] for n in ("tr", "li", "ol", "img", "input", "button", "html",
                                                                  "body"))


@njit(cache=True, nogil=True)
def weigh(elements, el, hashes, n_hash, token_keys, token_values, comment_keys, comment_values, class_words,
          word_elements, n_words):
    """Write the learned weights of an element's class words (words in its class, id, itemprop and role attributes) to
    row `el` of `elements`: the sum of the weights, and the highest and the lowest weight on the path from the root.
    Each word counts once. A flag in the row is set if a word stands for readers' comments.

    `hashes` holds the hashes of the `n_hash` words. Hashes and `el` are appended to `class_words` and `word_elements`,
    which hold `n_words` entries. Returns the new `n_words`.
    """
    above = elements[el, E_PARENT]
    total = best = worst = np.int32(0)
    for k in range(n_hash):
        twice = False
        for m in range(k):
            twice = twice or hashes[m] == hashes[k]
        if twice:
            continue
        weight = lookup(token_keys, token_values, hashes[k])
        total += weight
        best = max(best, weight)
        worst = min(worst, weight)
        if elements[el, E_TAG] not in (HTML, BODY):          # here the words only say that a page may have comments
            elements[el, E_FLAGS] |= lookup(comment_keys, comment_values, hashes[k])
        if n_words < len(class_words):
            class_words[n_words] = hashes[k]
            word_elements[n_words] = el
            n_words += 1
    elements[el, E_TOKENS] = total
    elements[el, E_BEST] = max(best, elements[above, E_BEST])
    elements[el, E_WORST] = min(worst, elements[above, E_WORST])
    return n_words


@njit(cache=True, nogil=True)
def count(blocks, k, char_class, code, flags, in_word):
    """Count a character in row `k` of `blocks`. `char_class` is its class (`tags.LETTER` and others), `code` its code
    point, and `flags` are the flags of the element around it. `in_word` says whether the character may continue a word.
    Returns whether the next character may continue one."""
    blocks[k, B_LAST] = char_class
    units = 1
    if char_class in (STOP, COMMA, PUNCTUATION, CURRENCY, OTHER):
        in_word = False
        if char_class == STOP:
            blocks[k, B_STOPS] += 1
        elif char_class == COMMA:
            blocks[k, B_COMMAS] += 1
        elif char_class == CURRENCY:
            blocks[k, B_CURRENCY] += 1
        elif char_class == PUNCTUATION or code < 65535:
            blocks[k, B_PUNCTUATION] += 1
    else:
        if char_class == WIDE:
            units = 3
        elif char_class == UPPER:
            blocks[k, B_UPPER] += 1
        elif char_class == DIGIT:
            blocks[k, B_DIGITS] += 1
        if not in_word or char_class == WIDE:
            blocks[k, B_WORDS] += 1
        in_word = True
    blocks[k, B_UNITS] += units
    if flags & IN_A:
        blocks[k, B_LINKED] += units
    if flags & IN_STRONG:
        blocks[k, B_STRONG] += units
    return in_word


@njit(cache=True, nogil=True)
def scan(page, classes, kinds, tag_flags, tag_keys, tag_values, attr_keys, attr_values, role_keys, role_values,
         token_keys, token_values, comment_keys, comment_values, mark_of, none_word, hidden_word, elements, blocks,
         text, marks, class_words, word_elements, deepest):
    """Walk over the markup of a page (`page`, uint8) and fill the arrays `elements`, `blocks`, `text` and `marks`. The
    module `columns` names their columns.

    `token_keys` and `token_values` are a hash table of the learned weights of class words (words in class, id, itemprop
    and role attributes). `class_words` and `word_elements` receive the hash and the element of each class word. Returns
    the numbers of (elements, blocks, bytes of text, class words, marks); the first is -1 when elements nest deeper than
    `deepest`.

    The arrays that `page.walk` passes are long enough for any page, since each element, block and line break takes a
    `<`, an element has at most two marks, and text is never longer than its source.
    """
    n = len(page)
    stack = np.zeros(deepest + 2, np.int32)
    names = np.zeros(deepest + 2, np.uint32)
    for k in range(ELEMENT):
        elements[0, k] = 0
    n_el = np.int64(1)
    n_bl = n_words = np.int64(0)
    top = n_text = skipping = images = inputs = 0
    row: int | np.int64 = 0
    item: int | np.int64 = 0
    leads = 0                       # breaks since the last block
    indent = tabs = 0               # of the line of code that no block has begun in
    pending = False                 # a space is due before the next character
    open_block = False
    in_word: bool | np.bool = np.bool_(False)
    hashes = np.zeros(48, np.uint32)
    tag_facts = np.zeros(TAG_FACTS, np.int64)
    n_marks = 0
    i = np.int64(0)
    while i < n:
        char = page[i]
        if char == 60:                                                     # <
            if i + 1 < n and page[i + 1] == 33:                            # <!
                i = after_markup(page, i)
                continue
            tag_start = i
            closing = i + 1 < n and page[i + 1] == 47
            j = i + 2 if closing else i + 1
            tag_hash = np.uint32(FNV)
            dash = False
            while j < n and page[j] != 62 and page[j] != 32:
                tag_hash = np.uint32((tag_hash ^ np.uint32(page[j])) * np.uint32(16777619))
                dash = dash or page[j] == 45
                j += 1
            tag = lookup(tag_keys, tag_values, tag_hash)
            kind = kinds[tag]
            if tag == 0 and dash:
                kind = BLOCK
            if closing:
                while j < n and page[j] != 62:
                    j += 1
                i = j + 1
                if kind in (VOID, BREAK):
                    continue
                if skipping:
                    skipping -= 1
                    continue
                level = top
                while level > 0 and top - level < 8 and names[level] != tag_hash:
                    level -= 1
                if level == 0 or names[level] != tag_hash:
                    continue
                while top >= level:
                    if open_block and elements[stack[top], E_BOX] == stack[top]:
                        blocks[n_bl, B_END] = n_text
                        n_bl += 1
                        open_block = pending = in_word = False
                    if tag == TR:
                        row = 0
                    if tag == LI:
                        item = 0
                    mark = mark_of[elements[stack[top], E_TAG]]
                    if mark:
                        marks[n_marks, M_BLOCK] = n_bl
                        marks[n_marks, M_AT] = n_text
                        marks[n_marks, M_MARK] = -mark
                        n_marks += 1
                    top -= 1
                continue
            # -- a start tag
            if skipping or kind in (RAW, VOID, BREAK):
                j = past_attributes(page, j)
            else:
                tag_facts[F_SIGNATURE] = tag_hash
                j, n_hash = attributes(page, j, attr_keys, attr_values, role_keys, role_values, none_word, hidden_word,
                                       tag_facts, hashes)
            i = j + 1
            if kind == RAW:
                i = after_raw(page, i, tag_hash)
                continue
            if kind == VOID:
                if tag == IMG:
                    images += 1
                elif tag == INPUT:
                    inputs += 1
                continue
            if kind == BREAK:
                if skipping:
                    continue
                if open_block:
                    if text[n_text - 1] == 10 and not elements[stack[top], E_FLAGS] & IN_PRE:
                        blocks[n_bl, B_END] = n_text
                        n_bl += 1
                        open_block = False
                    else:
                        text[n_text] = 10
                        n_text += 1
                        blocks[n_bl, B_BREAKS] += 1
                    pending = in_word = False
                else:
                    leads += 1
                continue
            if skipping:
                skipping += 1
                continue
            if kind == SKIP:
                skipping = 1
                pending = True
                in_word = False
                continue
            # -- an element
            if top >= deepest:
                return -1, 0, 0, 0, 0
            if kind == BLOCK and open_block:
                blocks[n_bl, B_END] = n_text
                n_bl += 1
                open_block = pending = in_word = False
            above = stack[top]
            top += 1
            stack[top] = n_el
            names[top] = tag_hash
            for k in range(ELEMENT):
                elements[n_el, k] = 0
            elements[n_el, E_TAG] = tag
            elements[n_el, E_PARENT] = above
            elements[n_el, E_BOX] = n_el if kind == BLOCK else elements[above, E_BOX]
            elements[n_el, E_FLAGS] = elements[above, E_FLAGS] | np.int32(tag_facts[F_FLAGS]) | tag_flags[tag]
            elements[n_el, E_SIGNATURE] = np.int32(np.uint32(tag_facts[F_SIGNATURE]))
            elements[n_el, E_CLASS] = tag_facts[F_CLASS]
            elements[n_el, E_CLASS_END] = tag_facts[F_CLASS_END]
            if tag in (OL, LI):
                elements[n_el, E_NUMBER] = tag_facts[F_NUMBER]
            n_words = weigh(elements, n_el, hashes, n_hash, token_keys, token_values, comment_keys, comment_values,
                            class_words, word_elements, n_words)
            if mark_of[tag]:
                marks[n_marks, M_BLOCK] = n_bl
                marks[n_marks, M_AT] = n_text
                marks[n_marks, M_MARK] = mark_of[tag]
                n_marks += 1
            if tag == TR:
                row = n_el
            elif tag == LI:
                item = n_el
            elif tag == BUTTON:
                inputs += 1
            if tag_flags[tag] & IN_A and open_block:
                blocks[n_bl, B_ANCHORS] += 1
                if tag_start >= 4 and page[tag_start - 1] == 62 and page[tag_start - 2] == 97 \
                        and page[tag_start - 3] == 47 and page[tag_start - 4] == 60:
                    pending = True                              # adjacent links are separate words
            n_el += 1
            continue
        # -- a run of characters
        if skipping:
            i += 1
            continue
        element = stack[top]
        flags = elements[element, E_FLAGS]
        if in_word and not pending:                     # the most frequent case: the rest of a word of ASCII letters
            j = i
            upper = 0
            while i < n and page[i] < 128 and (classes[page[i]] == LETTER or classes[page[i]] == UPPER):
                upper += classes[page[i]] == UPPER
                text[n_text] = page[i]
                n_text += 1
                i += 1
            if i > j:
                blocks[n_bl, B_LAST] = classes[page[i - 1]]
                blocks[n_bl, B_UPPER] += upper
                blocks[n_bl, B_UNITS] += i - j
                if flags & IN_A:
                    blocks[n_bl, B_LINKED] += i - j
                if flags & IN_STRONG:
                    blocks[n_bl, B_STRONG] += i - j
                continue
        code, size = character(page, i)
        char_class = classes[code]
        if char_class == SPACE:
            i += size
            in_word = False
            if not flags & IN_PRE:
                pending = True
            elif not open_block:
                tabs = 0 if code == 10 else tabs + (code == 9)
                indent = 0 if code == 10 else indent + (code != 9)
            elif code != 13:
                text[n_text] = code if code in (9, 10) else 32
                n_text += 1
                pending = False
            continue
        if not open_block:
            box = elements[element, E_BOX]
            for k in range(BLOCK_COLUMNS):
                blocks[n_bl, k] = 0
            blocks[n_bl, B_START] = n_text
            blocks[n_bl, B_BOX] = box
            blocks[n_bl, B_FLAGS] = elements[element, E_FLAGS]
            blocks[n_bl, B_IMAGES] = images
            blocks[n_bl, B_INPUTS] = inputs
            blocks[n_bl, B_FIRST] = char_class
            blocks[n_bl, B_ROW] = row
            blocks[n_bl, B_ITEM] = item
            blocks[n_bl, B_LEADS] = leads
            blocks[n_bl, B_ANCHORS] = 1 if flags & IN_A else 0
            images = inputs = leads = 0
            open_block = True
            pending = in_word = False
            if flags & IN_PRE:
                for k in range(tabs + indent):
                    text[n_text + k] = 9 if k < tabs else 32
                n_text += tabs + indent
            indent = tabs = 0
        if pending:
            if n_text > blocks[n_bl, B_START] and text[n_text - 1] != 10:
                text[n_text] = 32
                n_text += 1
            pending = False
        if char == 38:
            text[n_text] = np.uint8(code)
            n_text += 1
        else:
            for k in range(size):
                text[n_text + k] = page[i + k]
            n_text += size
        i += size
        in_word = count(blocks, n_bl, char_class, code, flags, in_word)
    if open_block:
        blocks[n_bl, B_END] = n_text
        n_bl += 1
    return n_el, n_bl, n_text, n_words, n_marks
