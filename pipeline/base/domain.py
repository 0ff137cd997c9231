"""Finds the domain of a URL."""

from __future__ import annotations

import re

#: characters of a domain name (RFC 1035); a longer host is no domain
LONGEST = 253
_HOST = re.compile(r"[a-z][a-z0-9+.-]*://(?:[^/?#@\\]*@)?([^/?#:@\\]+)", re.IGNORECASE)


def ascii_domain(host: str) -> str:
    """Return a host in the form that DNS uses: xn--bcher-kva.example for bücher.example. A host without such a form
    stays as it is."""
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host


def domain_of(url: str | None) -> str:
    """Return the host of a URL in lower case, without a port, a leading "www." or a dot at the end. Returns "" if the
    URL has no host, or a host of more than LONGEST characters."""
    match = _HOST.match(url or "")
    host = match[1].lower().rstrip(".").removeprefix("www.") if match else ""
    return host if len(host) <= LONGEST else ""
