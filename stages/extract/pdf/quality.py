"""Estimates how far the extracted text of a PDF page can be trusted. Only the text itself is used: no dictionary, no
model and no picture of the page.

The estimate decides which pages are read by OCR. It judges the text because pages that do not look like scans can have
bad text, too. When OCR was chosen by the look of the page, 28.7 % of a crawl had degraded text (measured by the project
Marin, "pdf-extraction-routing").
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from stages.extract.pdf.chars import PageChars

#: a page of lower confidence is degraded
DEGRADED = 50
#: fewest characters that make a text layer
FEW = 16
#: fewest words by which a page is judged
_WORDS = 20
_EDGES = re.compile(r"^[^\w]+|[^\w]+$")
_LETTERS = re.compile(r"[^\W\d_]+(?:['’·-][^\W\d_]+)*\.?")
_VOWEL = re.compile("[aeiouyà-æè-ïò-öø-ýāăąēĕėęěĩīĭįıōŏőœũūŭůűųạ-ỹ]", re.IGNORECASE)
#: Unicode categories of combining marks, and of format characters that join letters
_ATTACHED = ("Mn", "Mc", "Me", "Cf")
_LATIN = re.compile("[a-zÀ-ɏḀ-ỿ]+", re.IGNORECASE)


class TextQuality(NamedTuple):
    chars: int            # characters that are not spaces
    spaces: int
    garbled: int          # U+FFFD, private, control
    words: int            # that could be judged
    wordlike: int         # of those, the ones that look like words
    confidence: int       # 0 to 99


def quality_of(page: PageChars) -> TextQuality:
    """Counts the characters and words of a page's text, and estimates how far the text can be trusted: its
    `confidence`, an integer from 0 to 99.

    A stretch of text between spaces is judged if it has at least two letters, and neither `/` nor `@`. It looks like a
    word if it meets four conditions:

    - It consists of letters, with hyphens and apostrophes inside. Combining marks, frequent in Indic scripts, belong to
      their letters.
    - It is in lower case or in capitals, or has a capital at the beginning or one inside (McDonald, iPhone).
    - It has at most 30 characters.
    - It has a vowel if it consists of four or more Latin letters.

    Confidence starts at 99 and is lowered by these rules. It is 0 for a page of fewer than 16 characters.

    1. It falls in proportion to the share of garbled characters, to 0 for a tenth.
    2. It falls in proportion to the share of words that look like words, if this is below six in ten. This rule needs
       at least 20 judged words.
    3. It is multiplied by four tenths if one of the four signs below shows that letters or spaces were lost.

    Rules 2 and 3 do not apply to a page of which more than half is in scripts without spaces between words, such as
    Chinese. The signs are:

    - Fewer than 3 % of the characters are spaces (200 characters or more).
    - Many letters stand alone, separated by spaces: more than 40, and more than two for each judged word.
    - Fewer than 22 % of the Latin letters (100 or more) are vowels. Languages have 33 to 50 %; a font whose encoding is
      lost leaves "7KLV LV QRW".
    - More than half of the Latin letters (100 or more) are not ASCII. Of all languages, Vietnamese has the most, 28 %;
      Cyrillic, Greek or Arabic text whose encoding is lost becomes letters like "Ïðèâåò".
    """
    words = wordlike = wide = single = letters = vowels = beyond_ascii = 0
    for piece in page.pieces:
        for chunk in piece.text.split():
            if len(chunk) > 100:
                words += any(map(str.isalpha, chunk))
                continue
            kind, latin, latin_vowels, latin_beyond_ascii = _judge_chunk(chunk)
            letters += latin
            beyond_ascii += latin_beyond_ascii
            vowels += latin_vowels
            words += kind >= _WORD
            wordlike += kind == _LIKE
            wide += len(chunk) if kind == _WIDE else 0
            single += kind == _SINGLE
    chars, spaces, garbled = page.chars, page.spaces, page.garbled
    joined = 2 * wide > chars
    share = max(0, 1000 - 10_000 * garbled // max(1, chars)) if chars >= FEW else 0
    if words >= _WORDS and not joined:
        share = share * min(1000, 10_000 * wordlike // (6 * words)) // 1000
    if not joined and ((chars >= 200 and words and 100 * spaces < 3 * (chars + spaces)) or single > max(40, 2 * words)
                       or (letters >= 100 and (100 * vowels < 22 * letters or 2 * beyond_ascii > letters))):
        share = share * 4 // 10
    return TextQuality(chars, spaces, garbled, words, wordlike, share * 99 // 1000)


_NONE, _SINGLE, _WIDE, _WORD, _LIKE = range(5)


@lru_cache(maxsize=1 << 16)
def _judge_chunk(chunk: str) -> tuple[int, int, int, int]:
    """Judges a chunk, which is a stretch of text between spaces. Returns its kind and three numbers: Latin letters,
    vowels, and Latin letters outside ASCII. Kinds run from `_NONE` (no letters) to `_LIKE` (looks like a word)."""
    if not chunk.isascii():
        if _is_wide(chunk):
            return _WIDE, 0, 0, 0
        chunk = "".join(c for c in chunk if unicodedata.category(c) not in _ATTACHED)
    chunk = _EDGES.sub("", chunk.replace("\x02", ""))
    count = sum(map(str.isalpha, chunk))
    if count < 2 or "/" in chunk or "@" in chunk:
        return (_SINGLE if count else _NONE), 0, 0, 0
    latin_letters = "".join(_LATIN.findall(chunk))
    latin, vowels, beyond_ascii = len(latin_letters), len(_VOWEL.findall(chunk)), sum(c > "\x7f" for c in latin_letters)
    like = len(chunk) <= 30 and _LETTERS.fullmatch(chunk) is not None and not (latin == len(chunk) >= 4 and not vowels)
    if like and not chunk.islower():
        turns = sum(a.islower() and b.isupper() for a, b in pairwise(chunk))
        turns += sum(a.isupper() and b.islower() for a, b in pairwise(chunk[1:]))
        like = turns <= 2
    return (_LIKE if like else _WORD), latin, vowels, beyond_ascii


def _is_wide(chunk: str) -> bool:
    """Whether more than half of the characters in a chunk of text are of scripts without spaces between words, such as
    Chinese or Thai."""
    wide = sum("\u0e00" <= c <= "\u0eff" or "\u1000" <= c <= "\u109f" or "\u1780" <= c <= "\u17ff"
               or "\u2e80" <= c <= "\u9fff" or "\uf900" <= c <= "\ufaff" or "\uff66" <= c <= "\uff9f" for c in chunk)
    return 2 * wide > len(chunk)
