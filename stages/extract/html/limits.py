"""Bounds a web page before it is parsed: `shorten` limits the bytes that are read, and `count_nodes` counts the
elements that a parser would create.

Real pages above two megabytes are large because of scripts, styles, drawings and inline images, not because of text, so
these are removed first. A page that is still too long is cut, as crawls cut pages (Common Crawl: at 1 MiB until 2025,
at 5 MiB since). The result depends on the bytes of the page alone.

Elements are counted as an HTML5 parser creates them. In every block, such a parser reopens the formatting elements that
were left open, such as `<b id=1><b id=2>…` (HTML §13.2.4.3). A page of 40 kB can thus become a tree of a gigabyte.
Parsers also compare each attribute of a tag with those before it, and each option of a list with the others. Attributes
and options are therefore limited, too. One walk over the bytes counts all of them.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

import numpy as np

from pipeline.base.compiled import njit

#: content that is not text: how it begins → how it ends
_ENDS = {b"<script": re.compile(rb"</script\b[^>]{0,100}>", re.IGNORECASE),
         b"<style": re.compile(rb"</style\b[^>]{0,100}>", re.IGNORECASE),
         b"<svg": re.compile(rb"</svg\b[^>]{0,100}>", re.IGNORECASE),
         b"<!--": re.compile(rb"-->"), b"data:": re.compile(rb"(?=[\"'()<>\s])")}
_BEGINS = re.compile(rb"<script\b|<style\b|<svg\b|<!--|data:", re.IGNORECASE)
#: scripts that are kept because they hold text: metadata of the page, formulas
_TEXT_SCRIPT = re.compile(rb"[^>]{0,300}(?:ld\+json|math/tex)", re.IGNORECASE)
#: Limits of the search for scripts, styles and other stretches that are not text: most such
#: stretches in one page, and most bytes searched, as a multiple of the bytes that may be kept
_STRETCHES, _REACH = 50_000, 10
#: data URIs of fewer bytes stay
_SHORT = 1_000


class TooMuchWork(ValueError):
    """Raised when an extractor would take too long for a page. Work is limited by a count of operations, never by
    time."""


def shorten(data: bytes, most: int) -> bytes:
    """Returns a page shortened to at most `most` bytes. A page within this limit is returned unchanged.

    A longer page first loses scripts (except JSON-LD and TeX), styles, comments, drawings and long data URIs; only its
    first 10 * `most` bytes are read. If it is still longer than `most` bytes, its end is cut off, if possible in front
    of a tag.
    """
    if len(data) <= most:
        return data
    data = _without_code(data[:_REACH * most])
    if len(data) <= most:
        return data
    at = data.rfind(b"<", most // 2, most + 1)
    if at < 0:
        at = most
        while at > most - 4 and data[at] & 0xC0 == 0x80:          # inside a UTF-8 character
            at -= 1
    return data[:at]


def _without_code(data: bytes) -> bytes:
    out: list[bytes] = []
    at = stretches = 0
    endless: set[bytes] = set()                            # beginnings whose end does not occur in the rest of the page
    for begin in _BEGINS.finditer(data):
        if begin.start() < at:
            continue
        if (stretches := stretches + 1) > _STRETCHES:
            break
        kind = begin[0].lower()
        if kind in endless or (kind == b"<script" and _TEXT_SCRIPT.match(data, begin.end())):
            continue
        end = _ENDS[kind].search(data, begin.end())
        if end is None:
            endless.add(kind)
            continue
        if kind != b"data:" or end.start() - begin.start() >= _SHORT:
            out.append(data[at:begin.start()])
            at = end.end()
    return b"".join([*out, data[at:]])


#: most marks (accents, vowel points) on one character; no script uses more than ten
_MARKS = 30


@cache
def _many_marks() -> re.Pattern[str]:
    marks = "".join(c for c in map(chr, range(0x300, 0x1f000)) if unicodedata.combining(c))
    return re.compile(f"[{marks}]{{{_MARKS + 1},}}")


def stream_safe(text: str) -> str:
    """Returns the text with at most `_MARKS` combining marks (accents, vowel points) on one character. Further marks
    are removed, because the time for Unicode normalisation grows with the square of the number of marks on a character
    (UAX #15, stream-safe text)."""
    return text if text.isascii() else _many_marks().sub(lambda m: m[0][:_MARKS], text)


#: most attributes of one tag and most options of a page, since more cost a parser seconds
ATTRIBUTES, OPTIONS = 10_000, 10_000
#: most nested templates: lexbor serialises them by recursion, and 100,000 end the process
TEMPLATES = 100
#: formatting elements, reopened in every block until closed; a second `a` or `nobr` closes the first
_FORMATTING = ("b", "big", "code", "em", "font", "i", "s", "small", "strike", "strong", "tt", "u")
#: tags that do not begin a block, so that nothing is reopened
_INLINE = ("a", "br", "img", "span", "sub", "sup", "wbr")


def _fnv(name: str) -> int:
    """Returns the 32-bit FNV-1a hash of a name, as the compiled function `_nodes` computes it."""
    h = 2166136261
    for byte in name.encode():
        h = (h ^ byte) * 16777619 & 0xFFFFFFFF
    return h


_NAMES = np.array([_fnv(name) for name in _FORMATTING + _INLINE], np.uint32)
_KINDS = len(_FORMATTING)
_SCRIPT, _OPTION, _SVG, _MATH, _TEMPLATE = (np.uint32(_fnv(name)) for name in (
    "script", "option", "svg", "math", "template"))
_END_OF_SCRIPT = np.frombuffer(b"/script", np.uint8)


def count_nodes(page: bytes, most: int) -> int:
    """Counts the elements that an HTML5 parser makes of a page in UTF-8. In each new block, the parser reopens the
    formatting elements (such as `<b>`) that were left open, and these count again.

    The count stops soon after it exceeds `most`. The result also exceeds `most` for a page with more than `ATTRIBUTES`
    attributes in one tag, `OPTIONS` options or `TEMPLATES` nested templates.
    """
    return int(_nodes(np.frombuffer(page, np.uint8), most, _NAMES, _END_OF_SCRIPT))


@njit(cache=True, nogil=True)
def _nodes(page, most, names, end_of_script):
    n, i = len(page), 0
    elements = options = foreign = templates = opened = 0
    kinds, tags = np.empty(most + 1, np.int8), np.empty(most + 1, np.uint32)     # open formatting elements
    while i < n:
        if page[i] != 60:                                                   # <
            i += 1
            continue
        i += 1
        if i >= n:
            break
        c = page[i]
        if c == 33 and i + 2 < n and page[i + 1] == 45 and page[i + 2] == 45:    # a comment; `<!-->` ends one, too
            i += 3
            if i < n and page[i] == 62:
                continue
            if i + 1 < n and page[i] == 45 and page[i + 1] == 62:
                continue
            while i < n and not (page[i] == 62 and ((page[i - 1] == 45 and page[i - 2] == 45) or (
                    page[i - 1] == 33 and page[i - 2] == 45 and page[i - 3] == 45))):
                i += 1
            continue
        end = c == 47
        if end:
            i += 1
            if i >= n:
                break
            c = page[i]
        if not (65 <= c <= 90 or 97 <= c <= 122):
            if end or c == 33 or c == 63:                                        # a bogus comment
                while i < n and page[i] != 62:
                    i += 1
            continue
        begin = i
        name = np.uint32(2166136261)
        while i < n and page[i] > 32 and page[i] != 47 and page[i] != 62:
            low = page[i] + 32 if 65 <= page[i] <= 90 else page[i]
            name = np.uint32((name ^ np.uint32(low)) * np.uint32(16777619))
            i += 1
        attributes = 0
        while i < n and page[i] != 62:
            if page[i] <= 32 or page[i] == 47:
                i += 1
                continue
            attributes += 1
            i += 1                                                          # an attribute may begin with =
            while i < n and page[i] > 32 and page[i] != 47 and page[i] != 62 and page[i] != 61:
                i += 1
            at = i
            while at < n and page[at] <= 32:
                at += 1
            if at < n and page[at] == 61:
                i = at + 1
                while i < n and page[i] <= 32:
                    i += 1
                if i < n and (page[i] == 34 or page[i] == 39):
                    quote = page[i]
                    i += 1
                    while i < n and page[i] != quote:
                        i += 1
                    i += 1
                else:
                    while i < n and page[i] > 32 and page[i] != 62:
                        i += 1
        if attributes > ATTRIBUTES:
            return most + 1
        kind = -1
        for k in range(len(names)):
            if names[k] == name:
                kind = k
        elements += (0 if end else 1) + (opened if kind < 0 or (end and kind >= _KINDS) else 0)
        if name == _OPTION and not end:
            options += 1
            if options > OPTIONS:
                return most + 1
        if elements > most:
            return elements
        if name == _TEMPLATE:
            templates = max(0, templates - 1) if end else templates + 1
            if templates > TEMPLATES:
                return most + 1
        if name in (_SVG, _MATH):
            foreign = max(0, foreign - 1) if end else foreign + 1
        elif name == _SCRIPT and not end and foreign == 0:
            i = _after_script(page, i, end_of_script)
            continue
        if kind >= _KINDS:
            continue
        if kind >= 0 and end:
            for k in range(opened - 1, -1, -1):
                if kinds[k] == kind:
                    for later in range(k + 1, opened):
                        kinds[later - 1], tags[later - 1] = kinds[later], tags[later]
                    opened -= 1
                    break
        elif kind >= 0:
            tag, equal = np.uint32(2166136261), 0
            for k in range(begin, min(i, n)):
                tag = np.uint32((tag ^ np.uint32(page[k])) * np.uint32(16777619))
            for k in range(opened):
                equal += tags[k] == tag
            if equal < 3:  # of equal elements, three stay open (HTML's Noah's Ark clause)
                kinds[opened], tags[opened] = kind, tag
                opened += 1
    return elements


@njit(cache=True, nogil=True)
def _after_script(page, i, end_of_script):
    """Returns the position of the next `</script` from position `i` on, or the length of the page if there is none."""
    n, size = len(page), len(end_of_script)
    while i + size < n:
        if page[i] == 60:
            k = 0
            while k < size and (page[i + 1 + k] | (32 if k else 0)) == end_of_script[k]:
                k += 1
            if k == size:
                return i
        i += 1
    return n
