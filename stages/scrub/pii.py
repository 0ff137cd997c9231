"""Personal data in text: e-mail and IP addresses are replaced.

`scrub_text` is for everything that is shown or sampled (reports, quarantine, dropped documents); `Pii` is the step of a
recipe. Both use the same patterns and the same replacements.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from stages.stage import Stage, StageConfig, signal

if TYPE_CHECKING:
    from stages.document import Document

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_EMAIL = re.compile(rf"\b{_ATOM}+(?:\.{_ATOM}+)*@(?:(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z0-9]"
                    rf"(?:[A-Za-z0-9-]*[A-Za-z0-9])?|\[(?:{_OCTET}\.){{3}}(?:{_OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)])")
#: what an e-mail address can be made of; a run of these without @ holds none
_EMAIL_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+/=?^_`{|}~-.@[]:")
_EMAIL_END = re.compile(r"[^A-Za-z0-9!#$%&'*+/=?^_`{|}~.@\[\]:-]")
#: an address has at most 320 characters (RFC 3696, erratum 1690); in longer runs only so much beside an @ is looked at
_EMAIL_LONGEST = 320
_RUN_LONGEST = 4096
_IPV4 = re.compile(rf"(?:{_OCTET}\.){{3}}{_OCTET}")
_IPV4_HINT = re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
_IPV6 = re.compile(r"(?<![0-9A-Fa-f:.])(?:[0-9A-Fa-f]{1,4}:|:(?=:)){2,7}:?(?:[0-9A-Fa-f]{1,4})?"
                   r"(?![0-9A-Fa-f:]|\.[0-9])")

EMAILS = ("email@example.com", "firstname.lastname@example.org")
#: datatrove's: addresses that did not answer when the list was drawn up
IPV4S = ("22.214.171.124", "126.96.36.199", "188.8.131.52", "184.108.40.206", "220.127.116.11", "18.104.22.168")
#: documentation addresses (RFC 3849)
IPV6S = ("2001:db8::1", "2001:db8::2")


class Pii(Stage):
    """Replace e-mail addresses and public IP addresses by fixed ones (FineWeb, arXiv 2406.17557, section 3.8).

    Dialect: datatrove 0.10.1 (`PIIFormatter`), equal in every byte for a formatter that sees the document first: the
    replacements go round in a circle that begins anew with each document, where datatrove's goes on through all
    documents of a process, so that its text depends on the documents before. Never drops a document.
    """

    name = "pii"
    version = 1
    scrubs = True
    memory_mb = 20
    signals = ("pii_emails", "pii_ips")

    class Config(StageConfig):
        emails: bool = signal(True, "replace e-mail addresses")
        ips: bool = signal(True, "replace IPv4 addresses")
        ipv6: bool = signal(False, "replace IPv6 addresses, too (datatrove does not)")
        public_only: bool = signal(True, "leave addresses of private and reserved networks alone")

    def process(self, doc: Document) -> str | None:
        config, text = self.config, doc.text
        emails = ips = 0
        if config.emails:
            text, emails = replace_emails(text)
        if config.ips:
            text, ips = replace_ipv4(text, config.public_only)
        if config.ipv6:
            text, more = replace_ipv6(text, config.public_only)
            ips += more
        doc.signals["pii_emails"], doc.signals["pii_ips"] = emails, ips
        if emails or ips:
            doc.text = text
        return None


def scrub_text(text: str) -> str:
    """`text` with e-mail addresses and public IP addresses (v4 and v6) replaced: for anything that is shown."""
    return replace_ipv6(replace_ipv4(replace_emails(text)[0])[0])[0]


def replace_emails(text: str) -> tuple[str, int]:
    """(text with e-mail addresses replaced, how many)."""
    if "@" not in text:
        return text, 0
    return _replace(text, (match.span() for first, last in _email_windows(text)
                           for match in _EMAIL.finditer(text, first, last)), EMAILS)


def replace_ipv4(text: str, public_only: bool = True) -> tuple[str, int]:
    """(text with IPv4 addresses replaced, how many)."""
    if text.count(".") < 3 or not _IPV4_HINT.search(text):
        return text, 0
    return _replace(text, (match.span() for match in _IPV4.finditer(text) if _is_address(match.group(), public_only)),
                    IPV4S)


def replace_ipv6(text: str, public_only: bool = True) -> tuple[str, int]:
    """(text with IPv6 addresses replaced, how many)."""
    if text.count(":") < 2:
        return text, 0
    return _replace(text, (match.span() for match in _IPV6.finditer(text) if _is_address(match.group(), public_only)),
                    IPV6S)


def _email_windows(text: str) -> Iterator[tuple[int, int]]:
    """Stretches that may hold an address: the runs of address characters round each @.

    The pattern alone takes quadratic time on a long run, which a hostile page can have; the runs cost linear time.
    """
    done = 0
    at = text.find("@")
    while at >= 0:
        first = at
        while first > done and text[first - 1] in _EMAIL_CHARACTERS:
            first -= 1
        end = _EMAIL_END.search(text, at)
        last = end.start() if end else len(text)
        if last - first <= _RUN_LONGEST:
            yield first, last
            done = last
        else:
            window = max(first, done, at - _EMAIL_LONGEST), min(last, at + _EMAIL_LONGEST)
            yield window
            done = window[1]
        at = text.find("@", done)


def _replace(text: str, spans: Iterator[tuple[int, int]], replacements: tuple[str, ...]) -> tuple[str, int]:
    pieces: list[str] = []
    start = count = 0
    for first, last in spans:
        pieces += text[start:first], replacements[count % len(replacements)]
        start = last
        count += 1
    return ("".join(pieces) + text[start:], count) if count else (text, 0)


def _is_address(candidate: str, public_only: bool) -> bool:
    make: Callable[[str], ipaddress.IPv4Address | ipaddress.IPv6Address] = ipaddress.ip_address
    try:
        address = make(candidate)
    except ValueError:
        return False
    return address.is_global if public_only else True
