"""Splits a text into words at Unicode's default word boundaries (UAX #29), and leaves punctuation out, for DCLM's
repetition rules.

The words are those of DCLM's `split_words(text, model="uniseg", ignore_punctuation=True)`. A word is a segment of
uniseg 0.10.1 whose first character is a letter, a digit or another number. "can't", "3.14", "a.b" and "x_1" are one
word each, and each ideograph is a word. Properties of characters are those of the `regex` package (uniseg's tables are
of Unicode 16).

White space is always a boundary, so a text is first cut at white space into chunks. The same chunks occur again and
again in real text, so a cache of limited size holds the words of chunks. The content of the cache never changes a
result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

#: most chunks in the cache before it is emptied, and the longest chunk that is cached
CAPACITY, CACHED_LONGEST = 300_000, 64
#: Exceptions at white space: U+FF9E and U+FF9F belong to the segment before them, even to a space, and the space U+202F
#: does not end a word. A text with one of them is not cut into chunks.
_JOINING = ("\uff9e", "\uff9f", "\u202f")

_cache: dict[str, tuple[str, ...]] = {}


@cache
def _segment() -> Any:
    """Return the regular expression that matches one segment of a text by Unicode's word-boundary rules WB3 to WB13b.
    The method `findall` of the expression returns all segments of a text."""
    import regex

    joined = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    hebrew, letter, digit, kana, low = (
        rf"[{chars}]{joined}" for chars in (r"\p{WB=Hebrew_Letter}", r"\p{WB=ALetter}\p{WB=Hebrew_Letter}",
                                           r"\p{WB=Numeric}", r"\p{WB=Katakana}", r"\p{WB=ExtendNumLet}"))
    quote, double = rf"\p{{WB=Single_Quote}}{joined}", rf"\p{{WB=Double_Quote}}{joined}"
    between = rf"[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{joined}"
    point = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{joined}"
    # The alternative with the double quote comes first. Otherwise `letter` would match the Hebrew letter alone.
    run = (rf"(?:{hebrew}{double}(?={hebrew})|{letter}(?:{between}(?={letter}))?"
           rf"|{digit}(?:{point}(?={digit}))?)++")
    core = rf"(?:{run}|(?:{kana})++)"
    word = rf"(?:(?:{low})*{core}(?:(?:{low})++{core})*(?:{low})*(?:(?<={hebrew}){quote})?|(?:{low})++)"
    piece = rf"(?:{word}|\r\n|[\p{{WB=Newline}}\r\n]|\p{{WB=WSegSpace}}++{joined}|.{joined})"
    return regex.compile(rf"{piece}(?:(?<=\u200d)(?=\p{{Extended_Pictographic}}){piece})*+", regex.DOTALL)


def _words(text: str) -> tuple[str, ...]:
    return tuple(part for part in _segment().findall(text) if part[0].isalnum())


def segments(text: str) -> list[str]:
    """Return the words of a text, in order. Words are the text's segments between Unicode's word boundaries (UAX #29),
    without those that are punctuation or white space."""
    if not text.isascii() and any(c in text for c in _JOINING):
        return list(_words(text))
    cache = _cache
    out: list[str] = []
    if len(cache) > CAPACITY:
        cache.clear()
    for chunk in text.split():
        words = cache.get(chunk)
        if words is None:
            words = (chunk,) if chunk.isascii() and chunk.isalnum() else _words(chunk)
            if len(chunk) <= CACHED_LONGEST:
                cache[chunk] = words
        out += words
    return out
