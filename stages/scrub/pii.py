"""Personal data in text: e-mail and IP addresses are replaced.

`scrub_text` and `scrub_value` are for everything that is shown or sampled (reports, quarantine, dropped documents);
`Pii` is the step of a recipe. They use the same patterns and the same replacements. All take time in proportion to the
text, whatever it holds: what a hostile page is made of never decides whether it survives a limit.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from stages.stage import Stage, StageConfig, signal

if TYPE_CHECKING:
    from stages.document import Document

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
#: datatrove's pattern in two halves, each tried once for an @: backwards (`_local`) and forwards from it
_DOMAIN = re.compile(rf"@(?:(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
                     rf"|\[(?:{_OCTET}\.){{3}}(?:{_OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)])")
_LOCAL_START = re.compile(rf"\b{_ATOM}")
_ATOMS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+/=?^_`{|}~-")
#: an address has at most 320 characters (RFC 3696, erratum 1690): so far its domain is looked for
_EMAIL_LONGEST = 320
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
    documents of a process, so that its text depends on the documents before. A domain ends after 319 characters.

    The strings of `meta` (title, canonical address …) are treated like the text; the signals count the text's. `url`
    stays as it is: it is the identity of the page, which deduplication goes by. Never drops a document.
    `loss_spans` move with the text; the circle then begins anew at each of their borders, too.
    """

    name = "pii"
    version = 3
    scrubs = True
    memory_mb = 20
    signals = ("pii_emails", "pii_ips")

    class Config(StageConfig):
        emails: bool = signal(True, "replace e-mail addresses")
        ips: bool = signal(True, "replace IPv4 addresses")
        ipv6: bool = signal(False, "replace IPv6 addresses, too (datatrove does not)")
        public_only: bool = signal(True, "leave addresses of private and reserved networks alone")

    def process(self, doc: Document) -> str | None:
        text, emails, ips = self._scrubbed(doc.text)
        doc.signals["pii_emails"], doc.signals["pii_ips"] = emails, ips
        if emails or ips:
            if doc.loss_spans is not None:
                text, doc.loss_spans = self._with_spans(doc.text, doc.loss_spans, (emails, ips))
            doc.text = text
        if doc.meta:
            doc.meta = scrub_value(doc.meta, lambda value: self._scrubbed(value)[0])
        return None

    def _with_spans(self, text: str, spans: list[dict[str, int]],
                    found: tuple[int, int]) -> tuple[str, list[dict[str, int]]]:
        """The text scrubbed piece by piece, cut where what counts for the loss begins or ends, and the spans where they
        are now. ValueError, which quarantines the document, when something to replace lies across such a place: then
        the pieces do not hold what was `found` in the whole."""
        data = text.encode("utf-8", "surrogatepass")
        cuts = [0, *(cut for span in spans for cut in (span["start"], span["end"])), len(data)]
        pieces = [self._scrubbed(data[a:b].decode("utf-8", "surrogatepass")) for a, b in pairwise(cuts)]
        if found != (sum(emails for _, emails, _ in pieces), sum(ips for _, _, ips in pieces)):
            raise ValueError("personal data lies across the border of a loss span")
        at = list(accumulate(len(piece.encode("utf-8", "surrogatepass")) for piece, _, _ in pieces))
        moved = [{"start": at[i], "end": at[i + 1]} for i in range(0, len(at) - 1, 2)]
        return "".join(piece for piece, _, _ in pieces), moved

    def _scrubbed(self, text: str) -> tuple[str, int, int]:
        """(text as the config wants it, e-mail addresses, IP addresses)."""
        config = self.config
        emails = ips = more = 0
        if config.emails:
            text, emails = replace_emails(text)
        if config.ips:
            text, ips = replace_ipv4(text, config.public_only)
        if config.ipv6:
            text, more = replace_ipv6(text, config.public_only)
        return text, emails, ips + more


def scrub_text(text: str) -> str:
    """`text` with e-mail addresses and public IP addresses (v4 and v6) replaced: for anything that is shown."""
    return replace_ipv6(replace_ipv4(replace_emails(text)[0])[0])[0]


def scrub_value(value: Any, scrub: Callable[[str], str] = scrub_text, *, keys: bool = False) -> Any:
    """`value` (what JSON holds) with every string in it scrubbed, however deep; the keys of objects stay unless they
    are asked for (`keys`; of two that become one, the later one's value stays)."""
    found = [value]
    todo: list[list[Any] | dict[Any, Any]] = [found]    # no recursion: records may be nested deeper than Python allows
    while todo:
        inside = todo.pop()
        for key, item in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
            if isinstance(item, str):
                inside[key] = scrub(item)
            elif isinstance(item, (dict, list, tuple)):
                copy: list[Any] | dict[Any, Any] = list(item) if not isinstance(item, dict) else {
                    scrub(k) if keys and isinstance(k, str) else k: v for k, v in item.items()}
                inside[key] = copy
                todo.append(copy)
    return found[0]


def replace_emails(text: str) -> tuple[str, int]:
    """(text with e-mail addresses replaced, how many)."""
    if "@" not in text:
        return text, 0
    return _replace(text, _emails(text), EMAILS)


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


def _emails(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the addresses: what datatrove's pattern finds, without its quadratic search.

    An address holds one @, which no local part contains: from each @ the domain is matched forwards, then the local
    part is sought backwards, no further than the @ before. So no character is looked at more than twice.
    """
    done = 0
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at, at + _EMAIL_LONGEST)
        first = _local(text, done, at) if domain else -1
        if domain and first >= 0:
            done = domain.end()
            yield first, done
        else:
            done = at + 1
        at = text.find("@", done)


def _local(text: str, start: int, at: int) -> int:
    """Where the longest local part that ends before `at` begins, at or after `start`; -1: there is none."""
    if at <= start or text[at - 1] not in _ATOMS:
        return -1
    first = at - 1
    while first > start and ((c := text[first - 1]) in _ATOMS or (c == "." and text[first] != ".")):
        first -= 1
    # it begins at a boundary between a letter, digit or _ (of any script) and something else
    begin = _LOCAL_START.search(text, first, at)
    return begin.start() if begin else -1


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
