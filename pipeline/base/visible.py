"""What strangers wrote, as a terminal, a log or a page may have it.

A document, a URL or the name of a file must not move the cursor, rename the window, write the clipboard of the person
who looks at it, or make a line read otherwise than it stands. Every character that does so is shown by its escape: ESC
as \\x1b, RIGHT-TO-LEFT OVERRIDE as \\u202e.
"""

from __future__ import annotations

import json
import re
from typing import Any

#: control characters but tab and line feed; bidirectional marks, embeddings, overrides and isolates; what else ends a
#: line; surrogates, of names that are no UTF-8, which no stream can encode
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with such characters as escapes. A carriage return that ends a line goes without a trace: many files have
    them."""
    return _ODD.sub(_escape, text.replace("\r\n", "\n")) if _ODD.search(text) else text


def visible_json(value: Any) -> Any:
    """JSON with `visible` applied to every string in it, keys of objects too."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(k) if isinstance(k, str) else k: visible_json(v) for k, v in value.items()}
    return [visible_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def json_text(value: Any, **how: Any) -> str:
    """`value` as JSON that people can read: letters as they are, such characters escaped as JSON has it, so that who
    parses it gets them back."""
    return _ODD.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(value, ensure_ascii=False, **how))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
