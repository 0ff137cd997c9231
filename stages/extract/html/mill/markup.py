"""Reads the pieces of a page's markup: tags with their attributes, raw elements, comments and characters.

The markup is HTML as the parser lexbor serialises it (HTML §13.3): every element is closed, attributes are quoted, text
is escaped, and the content of raw elements such as `script` is not escaped.
"""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from stages.extract.html.mill.tags import (
    ATTR_ARIA_HIDDEN,
    ATTR_CLASS,
    ATTR_HIDDEN,
    ATTR_ID,
    ATTR_ITEMPROP,
    ATTR_NUMBER,
    ATTR_ROLE,
    ATTR_STYLE,
    IN_ARIA_HIDDEN,
    IN_HIDDEN,
)

#: FNV-1a's start; longest class token that counts as a word; most digits of a list number
FNV, LONGEST_TOKEN, DIGITS = 2166136261, 40, 6
#: columns of the array in which `attributes` stores facts about a tag
F_FLAGS, F_SIGNATURE, F_CLASS, F_CLASS_END, F_NUMBER = range(5)
TAG_FACTS = 5


@njit(cache=True, nogil=True)
def lookup(keys, values, h):
    """Returns the value of the hash `h` in an open-addressing hash table, 0 when the table does not contain `h`."""
    mask = len(keys) - 1
    at = np.int64(h) & mask
    while keys[at] != 0:
        if keys[at] == h:
            return values[at]
        at = (at + 1) & mask
    return values[0] * 0


@njit(cache=True, nogil=True)
def words_of(page, start, stop, kind, hashes, count):
    """Append the hashes of the words in an attribute's value, page[start:stop], to `hashes`, of which `count` are set.
    Return the new number of hashes.

    A word is a run of 2 to `LONGEST_TOKEN` ASCII letters, and camelCase is cut into words. The hash is FNV-1a of the
    lower-case letters, combined with `kind` (the kind of attribute), so that a class and a role with the same name have
    different hashes. When `hashes` is full, further words are ignored.
    """
    h = np.uint32(FNV)
    size = 0
    was_lower: bool | np.bool = False
    for i in range(start, stop + 1):
        c = page[i] if i < stop else np.uint8(32)
        upper = 65 <= c <= 90
        letter = upper or 97 <= c <= 122
        if size and (not letter or (upper and was_lower)):
            if 2 <= size <= LONGEST_TOKEN and count < len(hashes):
                hashes[count] = h ^ np.uint32(kind)
                count += 1
            h = np.uint32(FNV)
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
    """Returns the FNV-1a hash of page[start:stop], continued from the hash `h`."""
    for i in range(start, stop):
        h = np.uint32((h ^ np.uint32(page[i])) * np.uint32(16777619))
    return h


@njit(cache=True, nogil=True)
def after_raw(page, i, h):
    """Returns the position after the raw element (such as `script`) whose content includes position `i`: the position
    after the next end tag whose name has the hash `h`."""
    n = len(page)
    while i < n:
        if page[i] == 60 and i + 1 < n and page[i + 1] == 47:
            j = i + 2
            while j < n and page[j] != 62 and j - i < 16:
                j += 1
            if hash_of(page, i + 2, j, np.uint32(FNV)) == h:
                return j + 1
        i += 1
    return n


@njit(cache=True, nogil=True)
def character(page, i):
    """Returns (code point, number of bytes) of the character at position `i` of a page in UTF-8. The function decodes
    only the entities that the serialiser writes: `&lt;`, `&gt;`, `&amp;` and `&nbsp;`, which becomes a space. The code
    point 65535 stands for any character beyond the BMP."""
    c = page[i]
    available = len(page) - i
    if c < 0x80:
        if c == 38 and available >= 4 and page[i + 2] == 116 and page[i + 3] == 59:
            if page[i + 1] == 108:
                return np.int32(60), 4
            if page[i + 1] == 103:
                return np.int32(62), 4
        if c == 38 and available >= 5 and page[i + 1] == 97 and page[i + 2] == 109 and page[i + 3] == 112 \
                and page[i + 4] == 59:
            return np.int32(38), 5
        if c == 38 and available >= 6 and page[i + 1] == 110 and page[i + 2] == 98 and page[i + 3] == 115 \
                and page[i + 4] == 112 and page[i + 5] == 59:
            return np.int32(32), 6
        return np.int32(c), 1
    if c >= 0xF0 and available >= 4:
        return np.int32(65535), 4
    if c >= 0xE0 and available >= 3:
        return np.int32(((c & 15) << 12) | ((page[i + 1] & 63) << 6) | (page[i + 2] & 63)), 3
    if c >= 0xC0 and available >= 2:
        return np.int32(((c & 31) << 6) | (page[i + 1] & 63)), 2
    return np.int32(c), 1


@njit(cache=True, nogil=True)
def past_attributes(page, j):
    """Returns the position of the `>` that ends a start tag. The tag's name ends at position `j`. In serialised HTML,
    any earlier `>` is inside the value of an attribute."""
    n = len(page)
    while j < n and page[j] != 62:
        if page[j] == 34 and page[j - 1] == 61:
            j += 1
            while j < n and page[j] != 34:
                j += 1
        j += 1
    return j


@njit(cache=True, nogil=True)
def list_number(page, start, stop):
    """Returns the number that page[start:stop] spells, an integer from 0 to 999,999; 0 if the text is no such
    number."""
    number: int | np.int64 = 0
    for i in range(start, stop):
        if not 48 <= page[i] <= 57 or i - start >= DIGITS:
            return 0
        number = number * 10 + (np.int64(page[i]) - 48)
    return number


@njit(cache=True, nogil=True)
def attributes(page, j, attr_keys, attr_values, role_keys, role_values, none_word, hidden_word, tag_facts, hashes):
    """Read the attributes of a start tag whose name ends at position `j` of `page`.

    The function writes the tag's flags, signature (hash of tag and classes), position of the class attribute and list
    number to `tag_facts` (int64[TAG_FACTS], columns F_…). At the call, column F_SIGNATURE must hold the hash of the
    tag's name. The hashes of class words (words in class, id, itemprop and role attributes) go to `hashes`. Returns
    (position of the `>` that ends the start tag, number of class words).
    """
    n = len(page)
    n_hash = np.int64(0)
    flags = np.int32(0)
    tag_facts[F_CLASS] = tag_facts[F_CLASS_END] = tag_facts[F_NUMBER] = 0
    while j < n and page[j] != 62:
        j += 1                                                             # the space before a name
        first = True
        a = np.uint32(FNV)
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
        attribute = lookup(attr_keys, attr_values, a)
        if attribute == 0:
            continue
        if attribute == ATTR_CLASS:
            tag_facts[F_SIGNATURE] = hash_of(page, start, stop, np.uint32(tag_facts[F_SIGNATURE]))
            tag_facts[F_CLASS] = start
            tag_facts[F_CLASS_END] = stop
        elif attribute == ATTR_ROLE:
            flags |= lookup(role_keys, role_values, hash_of(page, start, stop, np.uint32(FNV)))
        elif attribute == ATTR_HIDDEN:
            flags |= IN_HIDDEN
        elif attribute == ATTR_ARIA_HIDDEN:
            if stop - start == 4:
                flags |= IN_ARIA_HIDDEN
        elif attribute == ATTR_NUMBER:
            tag_facts[F_NUMBER] = list_number(page, start, stop)
        elif attribute == ATTR_STYLE and (contains(page, start, stop, none_word)
                                          or contains(page, start, stop, hidden_word)):
            flags |= IN_HIDDEN
        if attribute in (ATTR_CLASS, ATTR_ID, ATTR_ITEMPROP, ATTR_ROLE):
            kind = np.int64(1) if attribute == ATTR_ITEMPROP else np.int64(2) if attribute == ATTR_ROLE else np.int64(0)
            n_hash = words_of(page, start, stop, kind, hashes, n_hash)
    tag_facts[F_FLAGS] = flags
    return j, n_hash


@njit(cache=True, nogil=True)
def after_markup(page, i):
    """Returns the position after a comment, a doctype or other markup with `<!` that begins at position `i`."""
    n = len(page)
    j = i + 2
    if i + 3 < n and page[i + 2] == 45 and page[i + 3] == 45:
        j = i + 4
        while j + 2 < n and not (page[j] == 45 and page[j + 1] == 45 and page[j + 2] == 62):
            j += 1
        return j + 3
    while j < n and page[j] != 62:
        j += 1
    return j + 1
