"""Numbers as people write them in recipes: 20B tokens, 32MB, 0.5%. Parsed exactly, by decimal arithmetic."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from stages.mix.quantities import parse_count, parse_number, parse_whole

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(value: Any) -> int:
    """Bytes: 32MB (10^6), 1GiB (2^30), 500000."""
    return parse_whole(value, _BYTES, "a size", "32MB or 1GiB")


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
    found = parse_number(value.strip().removesuffix("%") if isinstance(value, str) else value)
    if found is None or found[1]:
        raise ValueError(f"{value!r} is not a weight; write a number, e.g. 85")
    return int(found[0]) if found[0].denominator == 1 else float(found[0])


def percent(share: float) -> str:
    """The share as it would be written in a recipe: 0.005 → '0.5%'."""
    text = f"{Decimal(repr(share)) * 100:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"


Count = Annotated[int, BeforeValidator(parse_count)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Share = Annotated[float, BeforeValidator(parse_share), PlainSerializer(percent)]
Weight = Annotated[int | float, BeforeValidator(parse_weight)]
