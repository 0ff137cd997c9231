"""Makes untrusted text safe to show in a terminal, a log or a page.

A document, a URL or a file name must not move the cursor, rename the window, write to the viewer's clipboard, or make a
line read differently from its contents. Every character that can do so is shown as an escape: ESC as \\x1b,
RIGHT-TO-LEFT OVERRIDE as \\u202e.
"""

from __future__ import annotations

import json
import re
from typing import Any

#: control characters except tab and line feed; bidirectional marks, embeddings, overrides and isolates; other line
#: separators; surrogates (from file names that are not UTF-8), which no stream can encode
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns `text` with an escape in place of every character that is unsafe to show in a terminal, a log or a page.
    A carriage return before a line feed is dropped, because many files end their lines with both."""
    return _ODD.sub(_escape, text.replace("\r\n", "\n")) if _ODD.search(text) else text


def visible_json(value: Any) -> Any:
    """Returns a JSON value with the unsafe characters escaped in every string, including the keys of objects (see
    `visible`)."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(k) if isinstance(k, str) else k: visible_json(v) for k, v in value.items()}
    return [visible_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def json_text(value: Any, **how: Any) -> str:
    """Returns `value` as JSON that is readable and safe to show. Letters are not escaped. Unsafe characters become JSON
    escapes, so that a parser restores them. `how` are further arguments of `json.dumps`."""
    return _ODD.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(value, ensure_ascii=False, **how))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
