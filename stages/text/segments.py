"""Words by Unicode's default word boundaries (UAX #29), punctuation left out: what DCLM's repetition rules count.

Dialect: DCLM's `split_words(text, model="uniseg", ignore_punctuation=True)`: the segments of uniseg 0.10.1 whose first
character is a letter, a digit or another number. "can't", "3.14", "a.b" and "x_1" are one word each, an ideograph is a
word of its own. Properties of characters are those of the `regex` package (uniseg's tables are of Unicode 16).

Boundaries stand at white space whatever is on its sides, so a text is cut there first and a bounded cache
chunk → words answers what real text repeats. What the cache holds never changes a result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

#: chunks held before the cache is begun anew, and the longest worth holding
CAPACITY, CACHED_LONGEST = 300_000, 64
#: two letters that extend what stands before them, were it a space, and a space that does not end a word
_JOINING = ("\uff9e", "\uff9f", "\u202f")

_cache: dict[str, tuple[str, ...]] = {}


@cache
def _segment() -> Any:
    """Pattern of one segment, from rules WB3 to WB13b; `findall` gives them all."""
    import regex

    joined = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    hebrew, letter, digit, kana, low = (
        rf"[{chars}]{joined}" for chars in (r"\p{WB=Hebrew_Letter}", r"\p{WB=ALetter}\p{WB=Hebrew_Letter}",
                                           r"\p{WB=Numeric}", r"\p{WB=Katakana}", r"\p{WB=ExtendNumLet}"))
    quote, double = rf"\p{{WB=Single_Quote}}{joined}", rf"\p{{WB=Double_Quote}}{joined}"
    between = rf"[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{joined}"
    point = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{joined}"
    # the double quote first: no Hebrew letter may be taken without looking for it
    run = (rf"(?:{hebrew}{double}(?={hebrew})|{letter}(?:{between}(?={letter}))?"
           rf"|{digit}(?:{point}(?={digit}))?)++")
    core = rf"(?:{run}|(?:{kana})++)"
    word = rf"(?:(?:{low})*{core}(?:(?:{low})++{core})*(?:{low})*(?:(?<={hebrew}){quote})?|(?:{low})++)"
    piece = rf"(?:{word}|\r\n|[\p{{WB=Newline}}\r\n]|\p{{WB=WSegSpace}}++{joined}|.{joined})"
    return regex.compile(rf"{piece}(?:(?<=\u200d)(?=\p{{Extended_Pictographic}}){piece})*+", regex.DOTALL)


def _words(text: str) -> tuple[str, ...]:
    return tuple(part for part in _segment().findall(text) if part[0].isalnum())


def segments(text: str) -> list[str]:
    """The words of a text, in order."""
    if not text.isascii() and any(c in text for c in _JOINING):
        return list(_words(text))
    known = _cache
    out: list[str] = []
    if len(known) > CAPACITY:
        known.clear()
    for chunk in text.split():
        found = known.get(chunk)
        if found is None:
            found = (chunk,) if chunk.isascii() and chunk.isalnum() else _words(chunk)
            if len(chunk) <= CACHED_LONGEST:
                known[chunk] = found
        out += found
    return out
