"""Replaces the parts of a documentation page that are generated from the code."""

from __future__ import annotations

import re


def replace_generated(page: str, place: re.Pattern[str], text: str, what: str) -> str:
    """Returns the text `page` with the one match of the pattern `place` replaced by `text`. Raises ValueError unless
    there is exactly one match, because the page would otherwise keep an old text. `what` names the text in the error
    message."""
    new, count = place.subn(lambda _: text, page)
    if count != 1:
        raise ValueError(f"the page has {count} places for {what}, not one")
    return new
