"""Tables for the compiled functions of the extraction engine `mill`: HTML tags, kinds of tags, attributes, and classes
of characters. The only words of natural languages in these tables are names that pages give to comment sections."""

from __future__ import annotations

import sys
import unicodedata

import numpy as np

#: Kinds of tags. Text continues across an inline tag and ends at a block tag. The content of a skipped tag is no text
#: of the page. The content of a raw tag is not markup, and is serialised unchanged (HTML §13.3). A void tag has no end
#: tag.
INLINE, BLOCK, SKIP, RAW, VOID, BREAK = range(6)

_INLINE = ("a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark math nobr q rp rt ruby s "
           "samp small span strike strong sub sup time tt u var output meter progress slot mi mo mn ms mrow msup msub "
           "mfrac semantics picture map")
_BLOCK = ("html head title body address article aside blockquote button caption center dd details dialog dir div dl dt "
          "fieldset figcaption figure footer form frameset h1 h2 h3 h4 h5 h6 header hgroup legend li main menu nav "
          "noscript ol optgroup p pre search section summary table tbody td tfoot th thead tr ul listing marquee "
          "mtable mtr mtd")
_SKIP = "svg template select datalist object video audio canvas textarea applet annotation annotation-xml"
_RAW = "script style iframe noembed noframes xmp plaintext"
_VOID = "area base basefont bgsound col embed frame hr img input keygen link meta param source track wbr"

#: tag names in the order of their numbers; 0 is any other tag
NAMES: tuple[str, ...] = ("", *_INLINE.split(), *_BLOCK.split(), *_SKIP.split(), *_RAW.split(), *_VOID.split(), "br")
TAG = {name: n for n, name in enumerate(NAMES)}
KIND = np.array([INLINE] + [kind for kind, names in enumerate((_INLINE, _BLOCK, _SKIP, _RAW, _VOID))
                            for _ in names.split()] + [BREAK], np.uint8)

#: flags of an element, inherited by everything inside it
(IN_A, IN_NAV, IN_FOOTER, IN_ASIDE, IN_HEADER, IN_MAIN, IN_ARTICLE, IN_FORM, IN_TABLE, IN_LIST, IN_BUTTON, IN_HEADING,
 IN_PRE, IN_HIDDEN, IN_ARIA_HIDDEN, IN_NOSCRIPT, IN_QUOTE, IN_FIGURE, IN_DETAILS, IN_DIALOG, IN_TITLE, IN_P, IN_STRONG,
 IN_DL, IN_CODE, IN_COMMENT) = (1 << n for n in range(26))
_FLAGS = {"a": IN_A, "nav": IN_NAV, "footer": IN_FOOTER, "aside": IN_ASIDE, "header": IN_HEADER, "main": IN_MAIN,
          "article": IN_ARTICLE, "form": IN_FORM, "table": IN_TABLE, "ul": IN_LIST, "ol": IN_LIST, "menu": IN_LIST,
          "button": IN_BUTTON, "pre": IN_PRE, "listing": IN_PRE, "noscript": IN_NOSCRIPT, "blockquote": IN_QUOTE,
          "figure": IN_FIGURE, "details": IN_DETAILS, "dialog": IN_DIALOG, "title": IN_TITLE, "p": IN_P, "b": IN_STRONG,
          "strong": IN_STRONG, "dl": IN_DL, "code": IN_CODE, **{f"h{n}": IN_HEADING for n in range(1, 7)}}
FLAGS = np.zeros(len(NAMES), np.int32)
for _name, _flag in _FLAGS.items():
    FLAGS[TAG[_name]] = _flag

#: Markdown marks of inline tags, and the number of the mark of each tag (0: none)
MARKS = ("", "**", "*", "`", "~~", "sup", "sub")
MARK = np.zeros(len(NAMES), np.int32)
for _n, _names in enumerate(("", "b strong", "i em", "code tt kbd samp", "del s strike", "sup", "sub")):
    MARK[[TAG[_name] for _name in _names.split()]] = _n

#: roles and attribute values equivalent to a tag (WAI-ARIA landmarks)
_ROLES = {"navigation": IN_NAV, "contentinfo": IN_FOOTER, "complementary": IN_ASIDE, "banner": IN_HEADER,
          "main": IN_MAIN, "article": IN_ARTICLE, "search": IN_FORM, "form": IN_FORM, "button": IN_BUTTON,
          "dialog": IN_DIALOG,
          "alertdialog": IN_DIALOG, "menu": IN_NAV, "menubar": IN_NAV, "heading": IN_HEADING}


def fnv(name: bytes) -> int:
    """Returns the 32-bit FNV-1a hash of a name, as the compiled functions of `scan` compute it."""
    h = 2166136261
    for byte in name:
        h = (h ^ byte) * 16777619 & 0xFFFFFFFF
    return h


def _slots(words: dict[str, int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns an open-addressing hash table with `size` slots from the hash of each word to its value, as two arrays
    (keys, values). The key 0 marks an empty slot."""
    keys, values = np.zeros(size, np.uint32), np.zeros(size, np.int32)
    for word, value in words.items():
        at = fnv(word.encode()) & size - 1
        while keys[at]:
            at = at + 1 & size - 1
        keys[at], values[at] = fnv(word.encode()), value
    return keys, values


TAG_KEYS, TAG_VALUES = _slots({name: n for name, n in TAG.items() if name}, 1024)
ROLE_KEYS, ROLE_VALUES = _slots(_ROLES, 64)
#: class and id words that enclose readers' comments
COMMENT_KEYS, COMMENT_VALUES = _slots(dict.fromkeys(
    ("comment", "comments", "commentlist", "commentarea", "commenttext", "commentbody", "kommentar", "kommentare",
     "commentaires", "comentarios", "disqus", "respond"), IN_COMMENT), 128)
#: attributes that are read
(ATTR_CLASS, ATTR_ID, ATTR_ROLE, ATTR_ITEMPROP, ATTR_STYLE, ATTR_HIDDEN, ATTR_ARIA_HIDDEN, ATTR_NUMBER) = range(1, 9)
ATTR_KEYS, ATTR_VALUES = _slots({"class": ATTR_CLASS, "id": ATTR_ID, "role": ATTR_ROLE, "itemprop": ATTR_ITEMPROP,
                                 "style": ATTR_STYLE, "hidden": ATTR_HIDDEN, "aria-hidden": ATTR_ARIA_HIDDEN,
                                 "start": ATTR_NUMBER, "value": ATTR_NUMBER}, 64)

#: classes of characters
OTHER, LETTER, UPPER, DIGIT, STOP, COMMA, PUNCTUATION, CURRENCY, SPACE, WIDE = range(10)


def _classes() -> np.ndarray:
    """Returns the class (LETTER, DIGIT and so on) of each character of the BMP, by its Unicode category. Sentence ends
    are listed by hand, because `unicodedata` lacks the property Sentence_Terminal. The list has the main sentence ends
    of living scripts, and the ellipsis."""
    by_category = {"Lu": UPPER, "Lt": UPPER, "Nd": DIGIT, "Nl": DIGIT, "No": DIGIT, "Sc": CURRENCY, "Zs": SPACE,
                   "Zl": SPACE, "Zp": SPACE}
    table = np.zeros(65536, np.uint8)
    for code in range(65536):
        category = unicodedata.category(chr(code))
        table[code] = by_category.get(category, LETTER if category[0] in "LM" else
                                      PUNCTUATION if category[0] in "PS" else OTHER)
        if table[code] == LETTER and (0x2E80 <= code < 0xAC00 or 0xF900 <= code < 0xFB00):
            table[code] = WIDE                   # Han, Kana: one character counts as a word of three letters
    for char in ".!?\u2026\u3002\uff01\uff1f\uff0e\u061f\u06d4\u0964\u0965\u0589\u104b\u1362\u17d4\u2048\u203d":
        table[ord(char)] = STOP
    for char in ",;:\u060c\u061b\u3001\uff0c\uff1a\uff1b\u055d\u104a\u1363":
        table[ord(char)] = COMMA
    table[[9, 10, 12, 13]] = SPACE
    return table


CLASS = _classes()
#: The tables depend on this file and on the interpreter's Unicode version.
UNICODE = f"{unicodedata.unidata_version}/{sys.version_info[0]}.{sys.version_info[1]}"
