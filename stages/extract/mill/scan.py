"""One pass over the serialised tree of a page: elements and blocks of text as flat arrays.

The input is what lexbor serialises (HTML §13.3): every element closed, attributes quoted, text escaped, raw text raw.
So no parser is needed here, only a walk; where a page makes the serialisation ambiguous (elements inside a foreign
`script`) the walk goes wrong for that page in the same way every time, and never out of bounds.
"""

from __future__ import annotations

import numpy as np

from stages.extract.mill import tags as t
from stages.text.compiled import njit

#: columns of `elements` (int32)
(E_TAG, E_PARENT, E_BOX, E_FLAGS, E_SIGNATURE, E_TOKENS, E_BEST, E_WORST, E_UNITS, E_LINKED, E_BLOCKS, E_STOPS,
 E_PROSE, E_COMMAS, E_LAST) = range(15)
ELEMENT = 15
#: columns of `blocks` (int32). Units: characters without spaces, Han and Kana counted threefold
(B_START, B_END, B_BOX, B_FLAGS, B_UNITS, B_LINKED, B_WORDS, B_DIGITS, B_UPPER, B_STOPS, B_COMMAS, B_PUNCTUATION,
 B_CURRENCY, B_ANCHORS, B_STRONG, B_BREAKS, B_IMAGES, B_INPUTS, B_FIRST, B_LAST, B_ROW, B_ITEM, B_LEADS,
 B_TITLED) = range(24)
BLOCK_COLUMNS = 24

INLINE, BLOCK, SKIP, RAW, VOID, BREAK = t.INLINE, t.BLOCK, t.SKIP, t.RAW, t.VOID, t.BREAK
IN_A, IN_PRE, IN_STRONG, IN_HIDDEN, IN_ARIA_HIDDEN = t.IN_A, t.IN_PRE, t.IN_STRONG, t.IN_HIDDEN, t.IN_ARIA_HIDDEN
UPPER, DIGIT, STOP, COMMA, PUNCTUATION = t.UPPER, t.DIGIT, t.STOP, t.COMMA, t.PUNCTUATION
CURRENCY, SPACE, WIDE, OTHER = t.CURRENCY, t.SPACE, t.WIDE, t.OTHER
ATTR_CLASS, ATTR_ROLE, ATTR_STYLE = t.ATTR_CLASS, t.ATTR_ROLE, t.ATTR_STYLE
ATTR_HIDDEN, ATTR_ARIA_HIDDEN, ATTR_ID, ATTR_ITEMPROP = t.ATTR_HIDDEN, t.ATTR_ARIA_HIDDEN, t.ATTR_ID, t.ATTR_ITEMPROP
TR, LI, P, IMG, INPUT, BUTTON, TITLE = (t.TAG[n] for n in ("tr", "li", "p", "img", "input", "button", "title"))
#: the longest run of text kept in one block, bytes; tokens of a class longer than this are no words
LONGEST_TOKEN = 40


@njit(cache=True, nogil=True)
def lookup(keys, values, h):
    """Value of a hash in an open-addressing table, 0 when it is not there."""
    mask = len(keys) - 1
    at = np.int64(h) & mask
    while keys[at] != 0:
        if keys[at] == h:
            return values[at]
        at = (at + 1) & mask
    return values[0] * 0


@njit(cache=True, nogil=True)
def words_of(page, start, stop, kind, hashes, count):
    """Hashes (FNV-1a of lower-case ASCII words, cut at anything but letters and at camelCase) of an attribute's value.

    `kind` keeps roles apart from classes. Returns the new count; no more than `len(hashes)` are kept."""
    h = np.uint32(2166136261)
    size = 0
    was_lower = False
    for i in range(start, stop + 1):
        c = page[i] if i < stop else np.uint8(32)
        upper = 65 <= c <= 90
        letter = upper or 97 <= c <= 122
        if size and (not letter or (upper and was_lower)):
            if 2 <= size <= LONGEST_TOKEN and count < len(hashes):
                hashes[count] = h ^ np.uint32(kind)
                count += 1
            h = np.uint32(2166136261)
            size = 0
        if letter:
            low = c + 32 if upper else c
            h = np.uint32((h ^ np.uint32(low)) * np.uint32(16777619))
            size += 1
        was_lower = letter and not upper
    return count


@njit(cache=True, nogil=True)
def contains(page, start, stop, word):
    for i in range(start, stop - len(word) + 1):
        j = 0
        while j < len(word) and page[i + j] == word[j]:
            j += 1
        if j == len(word):
            return True
    return False


@njit(cache=True, nogil=True)
def hash_of(page, start, stop, h):
    """FNV-1a of a stretch of the page, begun with `h`."""
    for i in range(start, stop):
        h = np.uint32((h ^ np.uint32(page[i])) * np.uint32(16777619))
    return h


@njit(cache=True, nogil=True)
def after_raw(page, i, h):
    """Where what follows a raw element begins: after the next end tag whose name has the hash `h`."""
    n = len(page)
    while i < n:
        if page[i] == 60 and i + 1 < n and page[i + 1] == 47:
            j = i + 2
            while j < n and page[j] != 62 and j - i < 16:
                j += 1
            if hash_of(page, i + 2, j, np.uint32(2166136261)) == h:
                return j + 1
        i += 1
    return n


@njit(cache=True, nogil=True)
def character(page, i):
    """(code point, bytes) of the character at `i`. Of entities those the serialiser writes; 65535: beyond the BMP."""
    c = page[i]
    left = len(page) - i
    if c < 0x80:
        if c == 38 and left >= 4 and page[i + 2] == 116 and page[i + 3] == 59:
            if page[i + 1] == 108:
                return np.int32(60), 4
            if page[i + 1] == 103:
                return np.int32(62), 4
        if c == 38 and left >= 5 and page[i + 1] == 97 and page[i + 2] == 109 and page[i + 3] == 112 \
                and page[i + 4] == 59:
            return np.int32(38), 5
        if c == 38 and left >= 6 and page[i + 1] == 110 and page[i + 2] == 98 and page[i + 3] == 115 \
                and page[i + 4] == 112 and page[i + 5] == 59:
            return np.int32(32), 6
        return np.int32(c), 1
    if c >= 0xF0 and left >= 4:
        return np.int32(65535), 4
    if c >= 0xE0 and left >= 3:
        return np.int32(((c & 15) << 12) | ((page[i + 1] & 63) << 6) | (page[i + 2] & 63)), 3
    if c >= 0xC0 and left >= 2:
        return np.int32(((c & 31) << 6) | (page[i + 1] & 63)), 2
    return np.int32(c), 1


@njit(cache=True, nogil=True)
def scan(page, classes, kinds, tag_flags, tag_keys, tag_values, attr_keys, attr_values, role_keys, role_values,
         token_keys, token_values, none_word, hidden_word, elements, blocks, text, seen, seen_of, deepest):
    """Walk over `page` (uint8) and fill `elements`, `blocks`, `text`; see the columns above.

    `token_keys`, `token_values`: learned weights of class words. `seen`, `seen_of` get each word's hash and element.
    Returns (elements, blocks, bytes of text, tokens); elements = -1 when they nest deeper than `deepest`. The arrays
    are long enough for any page: an element, a block and a break need a `<` each, text is never longer than its source.
    """
    n = len(page)
    stack = np.zeros(deepest + 2, np.int32)
    names = np.zeros(deepest + 2, np.uint32)
    elements[0, :] = 0
    n_el = 1
    top = n_bl = n_text = n_seen = skipping = images = inputs = row = item = 0
    leads = 0                       # breaks since the last block
    pending = False                 # a space is due before the next character
    open_block = in_word = False
    hashes = np.zeros(48, np.uint32)
    i = 0
    while i < n:
        c = page[i]
        if c == 60:                                                        # <
            if i + 1 < n and page[i + 1] == 33:                            # <!
                if i + 3 < n and page[i + 2] == 45 and page[i + 3] == 45:
                    j = i + 4
                    while j + 2 < n and not (page[j] == 45 and page[j + 1] == 45 and page[j + 2] == 62):
                        j += 1
                    i = j + 3
                else:
                    j = i + 2
                    while j < n and page[j] != 62:
                        j += 1
                    i = j + 1
                continue
            opened = i
            closing = i + 1 < n and page[i + 1] == 47
            j = i + 2 if closing else i + 1
            h = np.uint32(2166136261)
            dash = False
            while j < n and page[j] != 62 and page[j] != 32:
                h = np.uint32((h ^ np.uint32(page[j])) * np.uint32(16777619))
                dash = dash or page[j] == 45
                j += 1
            tag = lookup(tag_keys, tag_values, h)
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
                while level > 0 and top - level < 8 and names[level] != h:
                    level -= 1
                if level == 0 or names[level] != h:
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
                    top -= 1
                continue
            # -- a start tag: its attributes
            flags = np.int32(0)
            signature = h
            n_hash = 0
            while j < n and page[j] != 62:
                j += 1                                                     # the space before a name
                first = True
                a = np.uint32(2166136261)
                while j < n and page[j] != 62 and page[j] != 32 and (first or page[j] != 61):
                    a = np.uint32((a ^ np.uint32(page[j])) * np.uint32(16777619))
                    first = False
                    j += 1
                start = j
                stop = j
                if j + 1 < n and page[j] == 61 and page[j + 1] == 34:
                    start = j + 2
                    j = start
                    while j < n and page[j] != 34:
                        j += 1
                    stop = j
                    j += 1
                if skipping:
                    continue
                what = lookup(attr_keys, attr_values, a)
                if what == 0:
                    continue
                if what == ATTR_CLASS:
                    signature = hash_of(page, start, stop, signature)
                    n_hash = words_of(page, start, stop, 0, hashes, n_hash)
                elif what == ATTR_ID:
                    n_hash = words_of(page, start, stop, 0, hashes, n_hash)
                elif what == ATTR_ITEMPROP:
                    n_hash = words_of(page, start, stop, 1, hashes, n_hash)
                elif what == ATTR_ROLE:
                    flags |= lookup(role_keys, role_values, hash_of(page, start, stop, np.uint32(2166136261)))
                    n_hash = words_of(page, start, stop, 2, hashes, n_hash)
                elif what == ATTR_HIDDEN:
                    flags |= IN_HIDDEN
                elif what == ATTR_ARIA_HIDDEN:
                    if stop - start == 4:
                        flags |= IN_ARIA_HIDDEN
                elif what == ATTR_STYLE and (contains(page, start, stop, none_word)
                                             or contains(page, start, stop, hidden_word)):
                    flags |= IN_HIDDEN
            i = j + 1
            if kind == RAW:
                i = after_raw(page, i, h)
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
                    if text[n_text - 1] == 10:
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
                return -1, 0, 0, 0
            if kind == BLOCK and open_block:
                blocks[n_bl, B_END] = n_text
                n_bl += 1
                open_block = pending = in_word = False
            above = stack[top]
            top += 1
            stack[top] = n_el
            names[top] = h
            for k in range(ELEMENT):
                elements[n_el, k] = 0
            elements[n_el, E_TAG] = tag
            elements[n_el, E_PARENT] = above
            elements[n_el, E_BOX] = n_el if kind == BLOCK else elements[above, E_BOX]
            elements[n_el, E_FLAGS] = elements[above, E_FLAGS] | flags | tag_flags[tag]
            elements[n_el, E_SIGNATURE] = np.int32(signature)
            own = best = worst = np.int32(0)
            for k in range(n_hash):
                twice = False
                for m in range(k):
                    twice = twice or hashes[m] == hashes[k]
                if twice:
                    continue
                weight = lookup(token_keys, token_values, hashes[k])
                own += weight
                best = max(best, weight)
                worst = min(worst, weight)
                if n_seen < len(seen):
                    seen[n_seen] = hashes[k]
                    seen_of[n_seen] = n_el
                    n_seen += 1
            elements[n_el, E_TOKENS] = own
            elements[n_el, E_BEST] = max(best, elements[above, E_BEST])
            elements[n_el, E_WORST] = min(worst, elements[above, E_WORST])
            if tag == TR:
                row = n_el
            elif tag == LI:
                item = n_el
            elif tag == BUTTON:
                inputs += 1
            if tag_flags[tag] & IN_A and open_block:
                blocks[n_bl, B_ANCHORS] += 1
                if opened >= 4 and page[opened - 1] == 62 and page[opened - 2] == 97 and page[opened - 3] == 47 \
                        and page[opened - 4] == 60:
                    pending = True                              # links side by side are words of their own
            n_el += 1
            continue
        # -- a run of characters
        if skipping:
            i += 1
            continue
        el = stack[top]
        flags = elements[el, E_FLAGS]
        code, size = character(page, i)
        what = classes[code]
        if what == SPACE:
            i += size
            in_word = False
            if flags & IN_PRE and open_block:
                if code == 10:
                    text[n_text] = 10
                    n_text += 1
                elif code != 13:
                    text[n_text] = 32
                    n_text += 1
                pending = False
            else:
                pending = True
            continue
        if not open_block:
            box = elements[el, E_BOX]
            for k in range(BLOCK_COLUMNS):
                blocks[n_bl, k] = 0
            blocks[n_bl, B_START] = n_text
            blocks[n_bl, B_BOX] = box
            blocks[n_bl, B_FLAGS] = elements[el, E_FLAGS]
            blocks[n_bl, B_IMAGES] = images
            blocks[n_bl, B_INPUTS] = inputs
            blocks[n_bl, B_FIRST] = what
            blocks[n_bl, B_ROW] = row
            blocks[n_bl, B_ITEM] = item
            blocks[n_bl, B_LEADS] = leads
            blocks[n_bl, B_ANCHORS] = 1 if flags & IN_A else 0
            images = inputs = leads = 0
            open_block = True
            pending = in_word = False
        if pending:
            if n_text > blocks[n_bl, B_START] and text[n_text - 1] != 10:
                text[n_text] = 32
                n_text += 1
            pending = False
        if c == 38:
            text[n_text] = np.uint8(code)
            n_text += 1
        else:
            for k in range(size):
                text[n_text + k] = page[i + k]
            n_text += size
        i += size
        blocks[n_bl, B_LAST] = what
        if what == STOP:
            blocks[n_bl, B_STOPS] += 1
        elif what == COMMA:
            blocks[n_bl, B_COMMAS] += 1
        elif what == PUNCTUATION or (what == OTHER and code < 65535):
            blocks[n_bl, B_PUNCTUATION] += 1
        elif what == CURRENCY:
            blocks[n_bl, B_CURRENCY] += 1
        if what in (STOP, COMMA, PUNCTUATION, CURRENCY, OTHER):
            units = 1
            in_word = False
        else:
            units = 3 if what == WIDE else 1
            if what == UPPER:
                blocks[n_bl, B_UPPER] += 1
            elif what == DIGIT:
                blocks[n_bl, B_DIGITS] += 1
            if not in_word or what == WIDE:
                blocks[n_bl, B_WORDS] += 1
            in_word = True
        blocks[n_bl, B_UNITS] += units
        if flags & IN_A:
            blocks[n_bl, B_LINKED] += units
        if flags & IN_STRONG:
            blocks[n_bl, B_STRONG] += units
    if open_block:
        blocks[n_bl, B_END] = n_text
        n_bl += 1
    return n_el, n_bl, n_text, n_seen
