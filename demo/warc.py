"""Writes WARC/1.1 files (ISO 28500:2017) with one gzip member per record, as crawlers do. Equal input gives equal
bytes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.fetch import put

#: fixed date: the packages do not say when a page was fetched, and the current time would make every file different
DATE = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Page:
    """A web page: its address, and its body as it was served or saved."""

    url: str
    body: bytes


def write_warc(path: Path, pages: Iterable[Page], description: str) -> int:
    """Write a WARC file that holds a warcinfo record with `description`, and a response record for each page. Returns
    the number of pages."""
    info = f"software: tokenmill demo\r\nformat: WARC File Format 1.1\r\ndescription: {description}\r\n".encode()
    out = [_record("warcinfo", f"{path.name}/info", [("WARC-Filename", path.name)], "application/warc-fields", info)]
    for n, page in enumerate(pages):
        http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n" + f"Content-Length: {len(page.body)}\r\n\r\n".encode()
        headers = [("WARC-Target-URI", page.url), ("WARC-Payload-Digest", _digest(page.body))]
        out.append(_record("response", f"{path.name}/{n}/{page.url}", headers, "application/http;msgtype=response",
                           http + page.body))
    put(path, b"".join(out))
    return len(out) - 1


def _record(kind: str, name: str, headers: list[tuple[str, str]], content_type: str, block: bytes) -> bytes:
    lines = [("WARC-Type", kind), ("WARC-Record-ID", f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, name)}>"),
             ("WARC-Date", DATE), *headers, ("WARC-Block-Digest", _digest(block)), ("Content-Type", content_type),
             ("Content-Length", str(len(block)))]
    head = "WARC/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in lines) + "\r\n"
    return gzip.compress(head.encode() + block + b"\r\n\r\n", compresslevel=6, mtime=0)


def _digest(data: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(data, usedforsecurity=False).digest()).decode()
