"""Writes the elements and the blocks of text of a page to flat arrays, in one pass over the page's markup.

The markup is HTML as the parser lexbor serialises it (HTML §13.3): every element is closed, attributes are quoted, text
is escaped, and the content of raw elements such as `script` is not escaped. So one walk suffices and no parser is
needed. The serialised form is ambiguous on some pages, which have elements inside a `script` in SVG or MathML. Such a
page is misread, but always in the same way, and never beyond the bounds of an array.

All functions of the walk are in one file. numba's cache notices only changes in the file of the calling function. After
a change to a function in another file, the old version of that function would still run.
"""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from stages.extract.html.mill import columns as c
from stages.extract.html.mill import tags as t

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
IN_A, IN_PRE, IN_STRONG, IN_HIDDEN, IN_ARIA_HIDDEN = t.IN_A, t.IN_PRE, t.IN_STRONG, t.IN_HIDDEN, t.IN_ARIA_HIDDEN
LETTER, UPPER, DIGIT, STOP, COMMA, PUNCTUATION = t.LETTER, t.UPPER, t.DIGIT, t.STOP, t.COMMA, t.PUNCTUATION
CURRENCY, SPACE, WIDE, OTHER = t.CURRENCY, t.SPACE, t.WIDE, t.OTHER
ATTR_CLASS, ATTR_ROLE, ATTR_STYLE = t.ATTR_CLASS, t.ATTR_ROLE, t.ATTR_STYLE
ATTR_HIDDEN, ATTR_ARIA_HIDDEN, ATTR_ID, ATTR_ITEMPROP = t.ATTR_HIDDEN, t.ATTR_ARIA_HIDDEN, t.ATTR_ID, t.ATTR_ITEMPROP
ATTR_NUMBER = t.ATTR_NUMBER
TR, LI, OL, IMG, INPUT, BUTTON, HTML, BODY = (t.TAG[n] for n in ("tr", "li", "ol", "img", "input", "button", "html",
                                                                  "body"))
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
    n_el = 1
    top = n_bl = n_text = n_words = skipping = images = inputs = row = item = 0
    leads = 0                       # breaks since the last block
    indent = tabs = 0               # of the line of code that no block has begun in
    pending = False                 # a space is due before the next character
    open_block = in_word = False
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
