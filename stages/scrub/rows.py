"""Masks personal data in rows of published datasets before people see them, in a terminal or in the service's pages."""

from __future__ import annotations

import json
from typing import Any

from stages.scrub.pii import scrub_text, scrub_value

#: characters after an excerpt that are scrubbed together with it, because an address that is cut in half would not be
#: recognised
MARGIN = 400


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
    for name in ("url", "detail", "file", "locator", "language", "date"):
        if row.get(name):
            row[name] = scrub_value(row[name])
    if row.get("meta"):     # JSON in a string: scrubbing the string could break the JSON
        row["meta"] = json.dumps(scrub_value(json.loads(row["meta"]), keys=True), sort_keys=True, ensure_ascii=False)
