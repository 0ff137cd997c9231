"""Writes numbers for people, most of them with at most three significant digits. The notation of numbers in recipes is
in `pipeline.base.quantities`."""

from __future__ import annotations


def digits(value: float) -> str:
    """Format a number for people. Numbers below 99.95 get at most three significant digits (0.012, 1.23, 45.6). Larger
    numbers are written as whole numbers with all digits (789, 1,234). A number that rounds to less than 0.0001 or to
    1e15 or more gets an exponent (1e-5, 1.5e20)."""
    if 99.95 <= abs(value) < 999.5e12:
        return f"{value:,.0f}"
    mantissa, e, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def count(n: float) -> str:
    """Format a count, for example 1,234, 12.3k or 4.56M."""
    for unit, one, least in (("T", 1e12, 1e12), ("B", 1e9, 1e9), ("M", 1e6, 999.5e3), ("k", 1e3, 1e4)):
        if abs(n) >= least:
            return digits(n / one) + unit
    return f"{n:,.0f}" if float(n).is_integer() or abs(n) >= 100 else digits(n)


def size(n: float) -> str:
    """Format a number of bytes in decimal units, for example 512 B, 12.3 kB or 4.56 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 999.5:
            return f"{digits(n)} {unit}"
        n /= 1000
    return f"{digits(n)} TB"


def duration(seconds: float) -> str:
    """Format a duration, for example 0 s, 12 ms, 3.4 s, 56 s, 7.8 min or 9.1 h."""
    if seconds < 1:
        return "0 s" if seconds == 0 else f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 else "<1 ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def percent(share: float) -> str:
    """Format a share as a percentage, for example 0%, <0.01%, 0.04%, 12.3%, 99.98%, >99.99% or 100%. Only the exact
    shares 0 and 1 are written as 0% and 100%."""
    if share in (0, 1):
        return f"{share:.0%}"
    if 0 < share < 0.0001:
        return "<0.01%"
    if 0.9999 < share < 1:
        return ">99.99%"
    return f"{share:.2%}" if share < 0.0095 or 0.9995 <= share < 1 else f"{share:.1%}"


def plural(n: int, one: str, more: str = "") -> str:
    """Format a count with its noun: '1 document', '1,234 documents', '2 copies'."""
    return f"{n:,} {one if n == 1 else more or one + 's'}"
