"""Small JSON files of a store that are created once and never changed. The first line is the sha256 of the rest."""

from __future__ import annotations

import hashlib
import json
from typing import Any


class Unsound(ValueError):
    """The bytes are not those that were written. The message says in what."""


class OtherFormat(ValueError):
    """Another version of Tokenmill wrote the file."""


def sealed(document: dict[str, Any], format: int) -> bytes:
    """The bytes of a file with this document."""
    body = compact_json({"format": format, **document})
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def opened(data: bytes, format: int) -> dict[str, Any]:
    """The document in the bytes of a file. Raises Unsound and OtherFormat."""
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
