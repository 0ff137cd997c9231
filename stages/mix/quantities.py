"""Whole numbers as people write them: 16384, 0.5M, 20B. One language for the recipe, the curriculum and the trainer.

A number is digits, with `_` or commas between thousands (1_000, 1,000,000), a fraction and an exponent; a unit may
follow, in either case. The arithmetic is exact: 2.01M is 2010000, and what is no whole number is refused, not rounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
#: what is longer than this is no number a person wrote
LONGEST = 40
# a comma stands before three digits, so that 1,5M (a decimal comma) is refused and not read as 15M
NUMBER = re.compile(r"\s*((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?|\.[0-9]+)"
                    r"\s*([A-Za-z]*)\s*\Z")


def parse_number(value: Any) -> tuple[Fraction, str] | None:
    """A number, exactly, and the unit behind it in lower case; None when `value` is neither number nor text of one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = str(value)
    match = NUMBER.match(text) if len(text) <= LONGEST else None
    return None if match is None else (Fraction(match[1].replace("_", "").replace(",", "")), match[2].lower())


def parse_whole(value: Any, units: Mapping[str, int], what: str, example: str, least: int = 1) -> int:
    """`value` in `units`, from `least` to 2**63 - 1. Raises ValueError, which says what and how to write it."""
    found = parse_number(value)
    if found is None or found[1] not in units:
        raise ValueError(f"{value!r} is not {what}; write e.g. {example}")
    exact = found[0] * units[found[1]]
    if exact.denominator != 1 or not least <= exact < 2**63:
        raise ValueError(f"{value!r} is not a whole number between {least} and 2**63; write e.g. {example}")
    return int(exact)


def parse_count(value: Any, least: int = 1) -> int:
    """Tokens, entries, windows: 20B, 0.5M, 64k, 32000 (K = 10^3, M = 10^6, B or G = 10^9, T = 10^12)."""
    return parse_whole(value, COUNT_UNITS, "a count", "20B, 0.5M or 2048", least)
