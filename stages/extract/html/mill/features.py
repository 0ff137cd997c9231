"""Computes the features by which the extraction engine `mill` judges a block of a page. A block is a stretch of text
between block-level tags. The features are integers, computed only from the arrays of the page (`page.PageArrays`)."""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit
from stages.extract.html.mill import columns as s
from stages.extract.html.mill import tags as t

E_TAG, E_PARENT, E_BOX, E_FLAGS, E_SIGNATURE = s.E_TAG, s.E_PARENT, s.E_BOX, s.E_FLAGS, s.E_SIGNATURE
E_TOKENS, E_BEST, E_WORST, E_UNITS, E_LINKED = s.E_TOKENS, s.E_BEST, s.E_WORST, s.E_UNITS, s.E_LINKED
E_BLOCKS, E_STOPS, E_PROSE, E_COMMAS, E_LAST = s.E_BLOCKS, s.E_STOPS, s.E_PROSE, s.E_COMMAS, s.E_LAST
B_START, B_END, B_BOX, B_FLAGS, B_UNITS, B_LINKED = s.B_START, s.B_END, s.B_BOX, s.B_FLAGS, s.B_UNITS, s.B_LINKED
B_WORDS, B_DIGITS, B_UPPER, B_STOPS, B_COMMAS = s.B_WORDS, s.B_DIGITS, s.B_UPPER, s.B_STOPS, s.B_COMMAS
B_PUNCTUATION, B_CURRENCY, B_ANCHORS, B_STRONG = s.B_PUNCTUATION, s.B_CURRENCY, s.B_ANCHORS, s.B_STRONG
B_BREAKS, B_IMAGES, B_INPUTS, B_FIRST, B_LAST = s.B_BREAKS, s.B_IMAGES, s.B_INPUTS, s.B_FIRST, s.B_LAST
B_ROW, B_ITEM, B_LEADS, B_TITLED = s.B_ROW, s.B_ITEM, s.B_LEADS, s.B_TITLED
IN_TITLE, IN_HEADING, IN_ARTICLE, IN_MAIN = t.IN_TITLE, t.IN_HEADING, t.IN_ARTICLE, t.IN_MAIN
IN_FORM, IN_TABLE, IN_LIST = t.IN_FORM, t.IN_TABLE, t.IN_LIST
H1, TABLE, FORM, LI, ARTICLE = (t.TAG[n] for n in ("h1", "table", "form", "li", "article"))

#: how many ancestors of a block's element are described, and how many neighbouring blocks on each side
ABOVE = 5
BESIDE = 3
_OWN = ["tag", "units", "linked", "words", "digits", "upper", "stops", "commas", "punctuation", "currency", "anchors",
        "strong", "breaks", "images", "inputs", "first", "last", "leads", "titled", "heading", "same_box",
        "units_word", "tokens", "best", "worst", "path2", "depth", "order", "at", "row_cells", "is_item",
        "in_dominant", "level", "headline", "from_headline", "from_heading", "under_heading", "duplicates",
        "chain_tokens", "prose_before", "prose_after"]
_FLAG_NAMES = ["a", "nav", "footer", "aside", "header", "main", "article", "form", "table", "list", "button",
               "heading", "pre", "hidden", "aria_hidden", "noscript", "quote", "figure", "details", "dialog", "title",
               "p", "strong", "dl", "code", "comment"]
_ABOVE = ["tag", "units", "linked", "blocks", "stops", "prose", "commas", "tokens", "alike", "share", "last_of"]
_BESIDE = ["tag", "units", "linked", "stops", "same", "heading"]
_PAGE = ["units", "blocks", "linked", "prose", "articles", "mains", "forms", "tables", "items", "headlines",
         "currency", "digits", "dates_like", "dominant_share", "dominant_linked", "alike_most", "long_blocks"]
NAMES: tuple[str, ...] = tuple(
    _OWN + [f"in_{f}" for f in _FLAG_NAMES] + [f"up{n}_{f}" for n in range(ABOVE) for f in _ABOVE]
    + [f"{side}{n}_{f}" for side in ("before", "after") for n in range(1, BESIDE + 1) for f in _BESIDE]
    + [f"page_{f}" for f in _PAGE])
FEATURES = len(NAMES)
#: most slots of a table that are tried for one key
PROBES = 1000
N_OWN, N_FLAGS, N_ABOVE, N_BESIDE = len(_OWN), len(_FLAG_NAMES), len(_ABOVE), len(_BESIDE)


@njit(cache=True, nogil=True)
def count_alike(keys, n):
    """Returns, for each of the first `n` keys (int64), how many of these `n` keys are equal to it: int32[n]. Keys are
    counted in an open-addressing hash table.

    A search in this table ends after PROBES slots, since a hostile page may choose keys that collide. A key whose
    search ends in this way counts as occurring once.
    """
    size = 16
    while size < 2 * n:
        size *= 2
    slots = np.full(size, -1, np.int32)
    counts = np.zeros(size, np.int32)
    where = np.zeros(n, np.int32)
    for i in range(n):
        h = np.uint64(keys[i]) * np.uint64(0x9E3779B97F4A7C15)
        at = np.int64(h >> np.uint64(20)) & (size - 1)
        probes = 0
        while slots[at] >= 0 and keys[slots[at]] != keys[i] and probes < PROBES:
            at = (at + 1) & (size - 1)
            probes += 1
        if probes == PROBES:
            where[i] = -1
            continue
        if slots[at] < 0:
            slots[at] = i
        counts[at] += 1
        where[i] = at
    alike = np.zeros(n, np.int32)
    for i in range(n):
        alike[i] = counts[where[i]] if where[i] >= 0 else 1
    return alike


@njit(cache=True, nogil=True)
def prose(b):
    """Whether a block, given as a row of `PageArrays.blocks`, reads like sentences: it is not short, less than a third
    of it is in links, and it has a sentence end or two commas."""
    return b[B_UNITS] >= 40 and b[B_LINKED] * 3 < b[B_UNITS] and (b[B_STOPS] > 0 or b[B_COMMAS] >= 2)


@njit(cache=True, nogil=True)
def word_hashes(text, start, stop, out):
    """Write the FNV-1a hash of each word of text[start:stop] to `out` until it is full, and return how many were
    written. A word is a run of ASCII letters, digits and bytes above 127; ASCII letters are lower-cased."""
    n = 0
    h = np.uint32(2166136261)
    size = 0
    for i in range(start, stop + 1):
        c = text[i] if i < stop else np.uint8(32)
        if 65 <= c <= 90:
            c = np.uint8(c + 32)
        if c >= 128 or 97 <= c <= 122 or 48 <= c <= 57:
            h = np.uint32((h ^ np.uint32(c)) * np.uint32(16777619))
            size += 1
        elif size:
            if n < len(out):
                out[n] = h
                n += 1
            h = np.uint32(2166136261)
            size = 0
    return n


@njit(cache=True, nogil=True)
def per_mille(part, total):
    return np.int32(np.int64(part) * 1000 // total) if total > 0 else np.int32(0)


@njit(cache=True, nogil=True)
def describe(elements, n_el, blocks, n_bl, text, out):
    """Write the features of each block (stretch of text between block-level tags) to `out` (int32[blocks, FEATURES]),
    in the order of `NAMES`. Also fill the columns of `elements` that hold sums over the blocks inside an element, and
    the column B_TITLED of `blocks` (the share of a block's words that occur in the page's title, in 1/1000)."""
    if n_bl == 0:
        return
    depth = np.zeros(n_el, np.int32)
    chain = np.zeros(n_el, np.int32)
    keys = np.zeros(n_el, np.int64)
    paths = np.zeros(n_el, np.int64)
    for i in range(1, n_el):
        up = elements[i, E_PARENT]
        depth[i] = depth[up] + 1
        chain[i] = min(max(chain[up] + elements[i, E_TOKENS], -2000), 2000)
        keys[i] = (np.int64(up) << 32) ^ (np.int64(elements[i, E_SIGNATURE]) & 0xFFFFFFFF)
        paths[i] = (np.int64(elements[up, E_SIGNATURE]) << 32) ^ (np.int64(elements[i, E_SIGNATURE]) & 0xFFFFFFFF)
    siblings = count_alike(keys, n_el)
    path2 = count_alike(paths, n_el)
    page_units = page_linked = page_prose = page_currency = page_digits = page_dates = page_long = np.int64(0)
    titled = np.zeros(64, np.uint32)
    n_title = 0
    words = np.zeros(64, np.uint32)
    for k in range(n_bl):
        b = blocks[k]
        if b[B_FLAGS] & IN_TITLE:
            if n_title == 0:
                n_title = word_hashes(text, b[B_START], b[B_END], titled)
            continue
        box = b[B_BOX]
        elements[box, E_UNITS] += b[B_UNITS]
        elements[box, E_LINKED] += b[B_LINKED]
        elements[box, E_BLOCKS] += 1
        elements[box, E_STOPS] += b[B_STOPS]
        elements[box, E_COMMAS] += b[B_COMMAS]
        elements[box, E_LAST] = k
        if prose(b):
            elements[box, E_PROSE] += b[B_UNITS]
            page_prose += b[B_UNITS]
        page_units += b[B_UNITS]
        page_linked += b[B_LINKED]
        page_currency += b[B_CURRENCY]
        page_digits += b[B_DIGITS]
        page_long += b[B_UNITS] >= 200
        page_dates += b[B_UNITS] <= 30 and 3 <= b[B_DIGITS] <= 12 and b[B_PUNCTUATION] + b[B_COMMAS] + b[B_STOPS] >= 1
    for i in range(n_el - 1, 0, -1):
        up = elements[i, E_PARENT]
        for column in (E_UNITS, E_LINKED, E_BLOCKS, E_STOPS, E_PROSE, E_COMMAS):
            elements[up, column] += elements[i, column]
        elements[up, E_LAST] = max(elements[up, E_LAST], elements[i, E_LAST])
    articles = forms = tables = headlines = alike_most = 0
    mains = items = np.int64(0)
    for i in range(1, n_el):
        tag = elements[i, E_TAG]
        if tag == ARTICLE and elements[i, E_UNITS] > 0:
            articles += 1
        forms += tag == FORM
        tables += tag == TABLE
        items += tag == LI
        headlines += tag == H1
        if elements[i, E_FLAGS] & IN_MAIN and not elements[elements[i, E_PARENT], E_FLAGS] & IN_MAIN:
            mains += elements[i, E_UNITS]
        if elements[i, E_UNITS] >= 60:
            alike_most = max(alike_most, path2[i])
    # The dominant element is the innermost one that holds at least six tenths of the page's prose.
    heir = np.zeros(n_el, np.int32)
    for i in range(1, n_el):
        up = elements[i, E_PARENT]
        if heir[up] == 0 or elements[i, E_PROSE] > elements[heir[up], E_PROSE]:
            heir[up] = i
    dominant = 0
    while heir[dominant] and elements[heir[dominant], E_PROSE] * 10 >= elements[0, E_PROSE] * 6 \
            and elements[heir[dominant], E_PROSE] > 0:
        dominant = heir[dominant]
    inside = np.zeros(n_el, np.bool_)
    inside[dominant] = True
    for i in range(dominant + 1, n_el):
        inside[i] = inside[elements[i, E_PARENT]]
    # texts that occur more than once on the page
    text_hashes = np.zeros(n_bl, np.int64)
    for k in range(n_bl):
        h = np.uint64(14695981039346656037)
        for i in range(blocks[k, B_START], blocks[k, B_END]):
            h = (h ^ np.uint64(text[i])) * np.uint64(1099511628211)
        text_hashes[k] = np.int64(h)
    duplicates = count_alike(text_hashes, n_bl)
    first_h1 = -1
    for k in range(n_bl):
        box = blocks[k, B_BOX]
        if first_h1 < 0 and elements[box, E_TAG] == H1:
            first_h1 = k
    units = prose_before = np.int64(0)
    heading_at = -1
    cell = 0
    for k in range(n_bl):
        b = blocks[k]
        row = out[k]
        box = b[B_BOX]
        tag = elements[box, E_TAG]
        for i in range(len(row)):
            row[i] = 0
        if n_title and b[B_UNITS] < 400:
            n = word_hashes(text, b[B_START], b[B_END], words)
            hits = np.int64(0)
            for i in range(n):
                for j in range(n_title):
                    if words[i] == titled[j]:
                        hits += 1
                        break
            blocks[k, B_TITLED] = per_mille(hits, n)
        cell = cell + 1 if k and b[B_ROW] and b[B_ROW] == blocks[k - 1, B_ROW] else 0
        heading = b[B_FLAGS] & IN_HEADING != 0
        if heading:
            heading_at = k
        row[0] = tag
        row[1] = b[B_UNITS]
        row[2] = per_mille(b[B_LINKED], b[B_UNITS])
        row[3] = b[B_WORDS]
        row[4] = per_mille(b[B_DIGITS], b[B_UNITS])
        row[5] = per_mille(b[B_UPPER], b[B_UNITS])
        row[6] = b[B_STOPS]
        row[7] = b[B_COMMAS]
        row[8] = per_mille(b[B_PUNCTUATION], b[B_UNITS])
        row[9] = b[B_CURRENCY]
        row[10] = b[B_ANCHORS]
        row[11] = per_mille(b[B_STRONG], b[B_UNITS])
        row[12] = b[B_BREAKS]
        row[13] = b[B_IMAGES]
        row[14] = b[B_INPUTS]
        row[15] = b[B_FIRST]
        row[16] = b[B_LAST]
        row[17] = b[B_LEADS]
        row[18] = b[B_TITLED]
        row[19] = heading
        row[20] = k > 0 and blocks[k - 1, B_BOX] == box
        row[21] = b[B_UNITS] // max(b[B_WORDS], 1)
        row[22] = elements[box, E_TOKENS]
        row[23] = elements[box, E_BEST]
        row[24] = elements[box, E_WORST]
        row[25] = path2[box]
        row[26] = depth[box]
        row[27] = per_mille(k, n_bl)
        row[28] = per_mille(units, page_units)
        row[29] = cell
        row[30] = b[B_ITEM] > 0
        row[31] = inside[box]
        row[32] = depth[box] - depth[dominant] if inside[box] else -1
        row[33] = k - first_h1 if first_h1 >= 0 else -10000
        row[34] = b[B_TITLED] >= 600 and b[B_UNITS] > 8
        row[35] = k - heading_at if heading_at >= 0 else -1
        row[36] = elements[blocks[heading_at, B_BOX], E_TOKENS] if heading_at >= 0 else 0
        row[37] = duplicates[k]
        row[38] = chain[box]
        row[39] = per_mille(prose_before, page_prose)
        is_prose = prose(b)
        if is_prose:
            prose_before += b[B_UNITS]
        row[40] = per_mille(page_prose - prose_before, page_prose)
        units += b[B_UNITS]
        at = N_OWN
        for i in range(N_FLAGS):
            row[at + i] = (b[B_FLAGS] >> i) & 1
        at += N_FLAGS
        up = box
        for _ in range(ABOVE):
            up = elements[elements[up, E_PARENT], E_BOX]
            e = elements[up]
            row[at] = e[E_TAG]
            row[at + 1] = e[E_UNITS]
            row[at + 2] = per_mille(e[E_LINKED], e[E_UNITS])
            row[at + 3] = e[E_BLOCKS]
            row[at + 4] = per_mille(e[E_STOPS], e[E_UNITS])
            row[at + 5] = per_mille(e[E_PROSE], e[E_UNITS])
            row[at + 6] = per_mille(e[E_COMMAS], e[E_UNITS])
            row[at + 7] = e[E_TOKENS]
            row[at + 8] = siblings[up]
            row[at + 9] = per_mille(e[E_UNITS], page_units)
            row[at + 10] = e[E_LAST] - k
            at += N_ABOVE
        for side in range(2):
            for d in range(1, BESIDE + 1):
                neighbour = k + d if side else k - d
                if 0 <= neighbour < n_bl:
                    beside = blocks[neighbour]
                    row[at] = elements[beside[B_BOX], E_TAG]
                    row[at + 1] = beside[B_UNITS]
                    row[at + 2] = per_mille(beside[B_LINKED], beside[B_UNITS])
                    row[at + 3] = beside[B_STOPS]
                    row[at + 4] = elements[beside[B_BOX], E_SIGNATURE] == elements[box, E_SIGNATURE]
                    row[at + 5] = beside[B_FLAGS] & IN_HEADING != 0
                else:
                    row[at] = -1
                    row[at + 1] = -1
                at += N_BESIDE
        row[at] = page_units
        row[at + 1] = n_bl
        row[at + 2] = per_mille(page_linked, page_units)
        row[at + 3] = per_mille(page_prose, page_units)
        row[at + 4] = articles
        row[at + 5] = per_mille(mains, page_units)
        row[at + 6] = forms
        row[at + 7] = tables
        row[at + 8] = per_mille(items, n_bl)
        row[at + 9] = headlines
        row[at + 10] = per_mille(page_currency, n_bl)
        row[at + 11] = per_mille(page_digits, page_units)
        row[at + 12] = per_mille(page_dates, n_bl)
        row[at + 13] = per_mille(elements[dominant, E_PROSE], page_prose)
        row[at + 14] = per_mille(elements[dominant, E_LINKED], elements[dominant, E_UNITS])
        row[at + 15] = alike_most
        row[at + 16] = per_mille(page_long, n_bl)
