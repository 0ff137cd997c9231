"""Finds e-mail and IPv4 addresses in texts as datatrove 0.10.1 does (`PIIFormatter`), and IPv6 addresses. The time is
proportional to the length of the text."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator

from stages.scrub.clues import Clues

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
#: datatrove's pattern in two halves, each tried once per @: the domain forwards, the local part backwards (`_local`)
_DOMAIN = re.compile(rf"@(?:(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
                     rf"|\[(?:{_OCTET}\.){{3}}(?:{_OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)])")
_LOCAL_START = re.compile(rf"\b{_ATOM}")
_ATOMS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+/=?^_`{|}~-")
#: an address has at most 320 characters (RFC 3696, erratum 1690), so the domain is searched no further
_EMAIL_LONGEST = 320
_IPV4 = re.compile(rf"(?:{_OCTET}\.){{3}}{_OCTET}")
#: every IPv4 or IPv6 address contains a match of its hint. A hint begins with a punctuation mark, for which a text can
#: be searched quickly.
_IPV4_HINT = re.compile(r"\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
_IPV6_HINT = re.compile(r":[0-9A-Fa-f]{0,4}:")
_IPV6 = re.compile(r"(?<![0-9A-Fa-f:.])(?:[0-9A-Fa-f]{1,4}:|:(?=:)){2,7}:?(?:[0-9A-Fa-f]{1,4})?"
                   r"(?![0-9A-Fa-f:]|\.[0-9])")
_HEX = frozenset("0123456789ABCDEFabcdef:")
_HEX_RUN = re.compile(r"[0-9A-Fa-f:]*")


def emails(clues: Clues) -> Iterator[tuple[int, int, str]]:
    """Find e-mail addresses in the text of `clues`, as datatrove's pattern does, but without its quadratic search.
    Yields (start, end, "email").

    An address holds exactly one @, after its local part. From each @ the domain is matched forwards. Then the local
    part is matched backwards from the @, at most to the end of the previous address or to the previous @. No character
    is therefore read more than twice.
    """
    text, read_until = clues.text, 0
    sign = text.find("@")
    while sign >= 0:
        domain = _DOMAIN.match(text, sign, sign + _EMAIL_LONGEST)
        start = _local(text, read_until, sign) if domain else -1
        if domain and start >= 0:
            read_until = domain.end()
            yield start, read_until, "email"
        else:
            read_until = sign + 1
        sign = text.find("@", read_until)


def _local(text: str, start: int, sign: int) -> int:
    """Return the position at which the local part of an e-mail address (the part before the @) begins; -1 if there is
    none. `sign` is the position of the @. The local part is taken as long as possible, but does not begin before
    `start`."""
    if sign <= start or text[sign - 1] not in _ATOMS:
        return -1
    first = sign - 1
    while first > start and ((c := text[first - 1]) in _ATOMS or (c == "." and text[first] != ".")):
        first -= 1
    # a local part begins at a border between a letter, digit or _ (of any script) and another character
    begin = _LOCAL_START.search(text, first, sign)
    return begin.start() if begin else -1


def ipv4(clues: Clues, public_only: bool = True) -> Iterator[tuple[int, int, str]]:
    """Find IPv4 addresses in the text of `clues`. Yields (start, end, "ipv4"). With `public_only`, private and reserved
    addresses are left out."""
    if not _IPV4_HINT.search(clues.text):
        return
    for match in _IPV4.finditer(clues.text):
        if _is_address(match.group(), public_only):
            yield *match.span(), "ipv4"


def ipv6(clues: Clues, public_only: bool = True) -> Iterator[tuple[int, int, str]]:
    """Find IPv6 addresses in the text of `clues`. Yields (start, end, "ipv6"). With `public_only`, private and reserved
    addresses are left out."""
    text, read_until = clues.text, 0
    while hint := _IPV6_HINT.search(text, read_until):
        start = hint.start()
        while start > read_until and text[start - 1] in _HEX:
            start -= 1
        read_until = _HEX_RUN.match(text, hint.start()).end()               # type: ignore[union-attr]
        for match in _IPV6.finditer(text, start, read_until + 2):           # the pattern looks two characters ahead
            if _is_address(match.group(), public_only):
                yield *match.span(), "ipv6"


def _is_address(candidate: str, public_only: bool) -> bool:
    make: Callable[[str], ipaddress.IPv4Address | ipaddress.IPv6Address] = ipaddress.ip_address
    try:
        address = make(candidate)
    except ValueError:
        return False
    return address.is_global if public_only else True
