"""Masks personal data in rows of published datasets before people see them, in a terminal or in the service's pages."""

from __future__ import annotations

import json
import re
from typing import Any

from pipeline.base.redact import redact
from stages.scrub.pii import EMAILS, scrub_text, scrub_value

#: characters after an excerpt that are scrubbed together with it, because an address that is cut in half would not be
#: recognised
MARGIN = 400
#: scheme, user name and password of a URL
_USER = re.compile(r"^((?:[a-zA-Z][a-zA-Z0-9+.-]*:)?//)[^/?#\s]*@")
#: the start of a URL that is masked already, up to the placeholder that has replaced its host
_MASKED = re.compile(rf"^(?:[a-zA-Z][a-zA-Z0-9+.-]*:)?//{re.escape(EMAILS[0])}")


def mask_url(url: str) -> str:
    """Return a URL without user name and password, with the keys and signatures in its query and all personal data
    masked. The user name goes first: together with the host, it would look like an e-mail address. A URL that is masked
    already stays as it is."""
    masked = _MASKED.match(url)
    start = masked.end() if masked else 0
    return url[:start] + scrub_text(redact(_USER.sub(r"\1", url[start:])))


def mask(row: dict[str, Any], chars: int = 0) -> None:
    """Mask the personal data in a row of a published dataset, so that the row can be shown to people.

    The row is changed in place. Its text is masked and cut to `chars` characters (0: the whole text is kept).
    `row["chars"]` becomes the length of the whole text before it was masked. The fields url, detail, file, locator,
    language, date and meta are also masked, where the row has them.
    """
    if row.get("text"):
        text = row["text"]
        row["text"] = scrub_text(text[:chars + MARGIN])[:chars] if chars else scrub_text(text)
        row["chars"] = len(text)
    if row.get("url"):
        row["url"] = mask_url(row["url"])
    for name in ("detail", "file", "locator", "language", "date"):
        if row.get(name):
            row[name] = scrub_value(row[name])
    if row.get("meta"):     # JSON in a string: scrubbing the string could break the JSON
        row["meta"] = json.dumps(scrub_value(json.loads(row["meta"]), keys=True), sort_keys=True, ensure_ascii=False)
