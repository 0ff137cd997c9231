"""Parses numbers as people write them: 20B, 0.5M, 32MB, 0.5%. The recipe, the curriculum and the trainer use the same
notation.

A number consists of digits, and optionally a fraction and an exponent. It has no sign. Thousands may be separated by
`_` or commas (1_000, 1,000,000). A unit may follow, in upper or lower case. The arithmetic is exact: 2.01M is 2010000.
A count or size that is not whole is refused, not rounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
#: longest text accepted as a number, in characters
LONGEST = 40
# a comma or `_` must be followed by three digits: 1,5M (a decimal comma) is refused, not read as 15M
NUMBER = re.compile(r"\s*((?:[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:_[0-9]{3})+)|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
                    r"|\.[0-9]+)\s*([A-Za-z]*)\s*\Z")


def parse_number(value: Any) -> tuple[Fraction, str] | None:
    """Returns the exact number in `value` and its unit in lower case. Returns None if `value` is neither a number nor a
    text that denotes one. A bool, a number that is negative or not finite, and a text of more than LONGEST characters
    also give None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = str(value)
    match = NUMBER.match(text) if len(text) <= LONGEST else None
    return None if match is None else (Fraction(match[1].replace("_", "").replace(",", "")), match[2].lower())


def parse_whole(value: Any, units: Mapping[str, int], what: str, example: str, least: int = 1) -> int:
    """Returns the whole number that `value` denotes. `units` maps the allowed units to factors. Raises ValueError if
    `value` is not a number with an allowed unit, or if the number is not whole, less than `least`, or 2**63 or more.
    `what` and `example` are parts of the error message: "… is not WHAT; write e.g. EXAMPLE"."""
    number = parse_number(value)
    if number is None or number[1] not in units:
        raise ValueError(f"{value!r} is not {what}; write e.g. {example}")
    exact = number[0] * units[number[1]]
    if exact.denominator != 1 or not least <= exact < 2**63:
        raise ValueError(f"{value!r} is not a whole number between {least} and 2**63; write e.g. {example}")
    return int(exact)


def parse_count(value: Any, least: int = 1) -> int:
    """Parses a count of tokens, entries or windows: 20B, 0.5M, 64k, 32000 (K = 10^3, M = 10^6, B or G = 10^9, T =
    10^12)."""
    return parse_whole(value, _COUNTS, "a count", "20B, 0.5M or 2048", least)



def parse_bytes(value: Any) -> int:
    """Parses a size in bytes: 32MB (MB = 10^6), 1GiB (GiB = 2^30), 500000."""
    return parse_whole(value, _BYTES, "a size", "32MB or 1GiB")


def parse_share(value: Any) -> float:
    """Parses a share: '0.5%' → 0.005. Raises ValueError for more than 100%, and for a number without a percent sign,
    because 0.5 could mean a half or half a percent. Only 0 needs no percent sign."""
    if not isinstance(value, bool) and value in (0, "0"):
        return 0.0
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a share; write it with a percent sign, e.g. 0.5%")
    share = Fraction(Decimal(match[1])) / 100
    if share > 1:
        raise ValueError(f"{value!r} is more than 100%")
    return float(share)


def parse_weight(value: Any) -> int | float:
    """Parses a weight in a mixture: any non-negative number. A percent sign is ignored ('85%' is 85).
    Raises ValueError for anything else, such as a number with a unit."""
    number = parse_number(value.strip().removesuffix("%") if isinstance(value, str) else value)
    if number is None or number[1]:
        raise ValueError(f"{value!r} is not a weight; write a number, e.g. 85")
    return int(number[0]) if number[0].denominator == 1 else float(number[0])


def percent(share: float) -> str:
    """Writes a share as in a recipe: 0.005 → '0.5%'."""
    text = f"{Decimal(repr(share)) * 100:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"
