"""Makes HTML pages from the templates in the folder `templates`. Documents' texts, names and errors may be hostile. So
everything that a template prints is escaped, and control and bidirectional characters are shown as escape sequences.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from pipeline.base import humanize
from pipeline.base.visible import json_text, visible

#: files that pages load, with their media types
STATIC = {"style.css": "text/css", "icon.svg": "image/svg+xml",
          **{f"{name}.js": "text/javascript" for name in ("label", "live", "run", "tune")}}
#: what is shown for a figure that is not known
UNKNOWN = "–"
#: a place on this server: printable ASCII, and neither '//' nor a backslash, by which it could name another host
_OWN_PATH = re.compile(r"/(?:[!-.0-\[\]-~][!-\[\]-~]*)?")


def page(request: Request, template: str, status: int = 200, headers: Mapping[str, str] | None = None,
         **context: Any) -> HTMLResponse:
    """Return the HTTP response with the HTML page that `template` makes from the values in `context`."""
    state = request.state
    settings = request.app.state.settings
    html = environment().get_template(template).render(
        **context, nonce=state.nonce, csrf=getattr(state, "csrf", ""), role=state.role,
        signs_in=settings.tokens, here=place_of(request))
    # encoding to UTF-8 cannot fail: the templates show lone surrogates as escapes
    return HTMLResponse(html, status, headers)


@cache
def environment() -> Environment:
    """Return the Jinja environment of the HTML templates, with the filters and functions that templates may call."""
    # finalize sees what a template prints before it is escaped; Markup is what the templates themselves have made
    templates = Environment(
        loader=PackageLoader("pipeline.service", "templates"), undefined=StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True, finalize=_printed)
    templates.filters |= {
        "number": _figure(humanize.count), "size": _figure(humanize.size), "seconds": _figure(humanize.duration),
        "exact": _figure(lambda n: f"{n:,}"), "value": _figure(lambda n: f"{n:.6g}"),
        "words": lambda text: str(text).replace("_", " "),
        "json": lambda value: json_text(value, indent=2, sort_keys=True), "instant": instant}
    templates.globals |= {
        "path": path, "static": static_path, "sides": sides, "plural": humanize.plural, "UNKNOWN": UNKNOWN}
    return templates


def _printed(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _figure(write: Any) -> Any:
    """Return a template filter that formats a number by calling `write`. The number may come from a damaged file: a
    value that is not a finite number is shown unformatted."""
    def shown(value: Any) -> Any:
        if value is None:
            return UNKNOWN
        sound = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return write(value) if sound else str(value)

    return shown


def instant(value: Any) -> str:
    """Format a time, in seconds since 1970 or as ISO 8601, like `2026-01-31 12:00 UTC`. Any other value is shown
    unchanged."""
    try:
        when = datetime.fromtimestamp(value, UTC) if isinstance(value, (int, float)) else datetime.fromisoformat(value)
        return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, TypeError, OverflowError, OSError):
        return UNKNOWN if value is None else str(value)


# -- places ----------------------------------------------------------------------------------------------------------
def path(*parts: str, **query: str) -> str:
    """Return the URL (path and query) of a page, made from the segments `parts` of its path and the parameters `query`.
    All of them are quoted, so that a segment cannot add another segment or begin the query."""
    way = "/" + "/".join(quote(part, safe="", errors="replace") for part in parts)
    return f"{way}?{query_text(query.items())}" if query else way


def query_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Encode (name, value) pairs as the query of a URL, in ASCII."""
    return urlencode(list(pairs), errors="replace")


def place_of(request: Request) -> str:
    """Return the path and the query of a request's URL as text."""
    query = request.scope["query_string"].decode("latin-1")
    return quote(request.scope["path"], errors="replace") + (f"?{query}" if query else "")


def own_path(text: str) -> str:
    """Return `text` if it is a path on this server, otherwise '/'. After signing in, a user is sent to the returned
    path. Without this check, a link to the sign-in page could send the user to another host."""
    return text if _OWN_PATH.fullmatch(text) else "/"


# -- files -----------------------------------------------------------------------------------------------------------
@cache
def static_file(name: str) -> bytes:
    """Return the bytes of one of the files that pages load, such as a stylesheet. STATIC lists these files."""
    return (files("pipeline.service") / "static" / name).read_bytes()


@cache
def static_path(name: str) -> str:
    """Return the URL of a file that pages load, such as a stylesheet. The URL contains a hash of the file, so that
    browsers may cache the file."""
    return path("static", name, v=hashlib.blake2b(static_file(name), digest_size=6).hexdigest())


# -- what differs ----------------------------------------------------------------------------------------------------
def sides(row: Mapping[str, Any]) -> list[list[tuple[str, bool]]]:
    """Return the two texts of one row of a word diff (as `pipeline.service.documents.difference` returns it): first the
    removed text, then the kept one. Each text is a list of (piece of text, whether the other text lacks this piece)."""
    result = []
    for text, at in ((row["removed"], 1), (row["kept"], 3)):
        runs, place = [], 0
        for piece in row["pieces"]:
            begin, end = piece[at], piece[at + 1]
            if piece[0] != "equal" and begin < end:
                runs += [(text[place:begin], False), (text[begin:end], True)]
                place = end
        runs.append((text[place:], False))
        result.append([run for run in runs if run[0]])
    return result
