"""Normalises texts before the search for near-duplicates, exactly as datatrove's `simplify_text` does.

The steps run in datatrove's order, which matters: lower case → numbers to "0" → punctuation to spaces → white space to
single spaces → canonical decomposition without nonspacing marks (TextNormConfig defaults of datatrove.utils.text).
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

import regex

from stages.text.characters import PUNCTUATION, nonspacing_marks

# regex, not re: the decimal digits of all scripts, in the Unicode version datatrove uses
_NUMBER = regex.compile(r"\p{Nd}+([.,،٫⎖⎗⎘]{1}\p{Nd}+)?", regex.VERBOSE | regex.UNICODE)
_NUMBER_ASCII = re.compile(r"[0-9]+(?:[.,][0-9]+)?")
# joining the runs of all other characters equals turning punctuation into spaces and collapsing white space
_RUN = re.compile(rf"[^\s{re.escape(PUNCTUATION)}]+")


# the first nonspacing mark is U+0300, so a scan for one range finds the few stretches that can hold marks
_HIGH = re.compile("[\u0300-\U0010ffff]+")


@cache
def _marks() -> dict[int, None]:
    """Return a table for `str.translate` that deletes nonspacing marks (accents, for instance)."""
    return {code: None for first, last in nonspacing_marks() for code in range(first, last + 1)}


def simplify(text: str) -> str:
    """Simplify a text before its MinHash signature is computed: lower case, numbers as 0, no punctuation, no accents,
    single spaces.

    >>> simplify("Café, 3.14  and\\nMORE…")
    'cafe 0 and more'
    """
    text = text.lower()
    if text.isascii():
        return " ".join(_RUN.findall(_NUMBER_ASCII.sub("0", text)))
    text = " ".join(_RUN.findall(_NUMBER.sub("0", text)))
    if not text.isascii():
        marks = _marks()
        text = _HIGH.sub(lambda run: run.group().translate(marks), unicodedata.normalize("NFD", text))
    # a mark standing alone leaves a space behind, which may now be the first or the last character
    return text.strip()
