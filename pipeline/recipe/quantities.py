"""Numbers as people write them in recipes: 20B tokens, 32MB, 0.5%. Parsed exactly, by decimal arithmetic."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?|\.[0-9]+)\s*([A-Za-z]*)\s*\Z")


def _scaled(value: Any, units: dict[str, int], what: str, example: str) -> int:
    wrong = ValueError(f"{value!r} is not {what}; write e.g. {example}")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    match = _NUMBER.match(str(value)) if len(str(value)) <= 40 else None
    if match is None or match[2].lower() not in units:
        raise wrong
    exact = Fraction(Decimal(match[1].replace("_", ""))) * units[match[2].lower()]
    if exact.denominator != 1 or not 0 < exact < 2**63:
        raise ValueError(f"{value!r} is not a whole number between 1 and 2**63; write e.g. {example}")
    return int(exact)


def parse_count(value: Any) -> int:
    """Tokens, entries, windows: 20B, 0.5M, 64k, 32000 (K = 10^3, M = 10^6, B or G = 10^9, T = 10^12)."""
    return _scaled(value, _COUNT, "a count", "20B, 0.5M or 2048")


def parse_bytes(value: Any) -> int:
    """Bytes: 32MB (10^6), 1GiB (2^30), 500000."""
    return _scaled(value, _BYTES, "a size", "32MB or 1GiB")


def parse_share(value: Any) -> float:
    """A share: '0.5%' → 0.005. A bare number is refused (is 0.5 a half or half a percent?), except 0."""
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
    """A weight of a mixture: any non-negative number; '85%' works too."""
    text = str(value).strip().removesuffix("%")
    match = _NUMBER.match(text) if len(text) <= 40 else None
    if isinstance(value, bool) or not isinstance(value, int | float | str) or match is None or match[2]:
        raise ValueError(f"{value!r} is not a weight; write a number, e.g. 85")
    exact = Decimal(match[1].replace("_", ""))
    return int(exact) if exact == int(exact) else float(exact)


def percent(share: float) -> str:
    """The share as it would be written in a recipe: 0.005 → '0.5%'."""
    text = f"{Decimal(repr(share)) * 100:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"


Count = Annotated[int, BeforeValidator(parse_count)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Share = Annotated[float, BeforeValidator(parse_share), PlainSerializer(percent)]
Weight = Annotated[int | float, BeforeValidator(parse_weight)]
