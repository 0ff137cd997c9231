"""Reads and writes small JSON files of a store that are created once and never changed. The first line of such a file
is the sha256 of all bytes after that line."""

from __future__ import annotations

import hashlib
import json
from typing import Any


class Unsound(ValueError):
    """Raised when the bytes of a file are not the bytes that were written. The message says what is wrong with them."""


class OtherFormat(ValueError):
    """Raised when a file was written by another version of Tokenmill, in another format."""


def sealed(document: dict[str, Any], format: int) -> bytes:
    """Return the bytes of a file that holds this document and its checksum."""
    body = compact_json({"format": format, **document})
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def opened(data: bytes, format: int) -> dict[str, Any]:
    """Return the JSON document in the bytes of a file, after checking their checksum. Raises Unsound when the bytes are
    damaged, and OtherFormat when the document does not have this format number."""
    head, _, body = data.partition(b"\n")
    if head != hashlib.sha256(body).hexdigest().encode():
        raise Unsound("is damaged: its checksum does not match")
    try:
        document = json.loads(body)
    except ValueError:
        raise Unsound("is not JSON") from None
    if not isinstance(document, dict) or document.get("format") != format:
        raise OtherFormat
    return document


def compact_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
