"""Parses HTTP messages as crawlers stored them: splits head and body, and undoes transfer and content coding (RFC 9112
§6–7, RFC 9110 §8.4).

Heads are often wrong in real archives. They declare `Transfer-Encoding: chunked` or `Content-Encoding: gzip` for a body
that the crawler had already decoded. Chunk sizes may be broken, and bodies may be cut off in the middle. The parser
tolerates such errors and reads as much as it can. The parser's work is limited: no loop runs over more than the
message, and no body is inflated to more than `cap` bytes.
"""

from __future__ import annotations

import io
import re
import zlib

from fastwarc.stream_io import BrotliReader, ZstdReader

_HEAD_END = re.compile(rb"\r\n\r\n|\n\n|\n\r\n")
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)?[ \t]+(\d{3})")
_CHUNK = re.compile(rb"[ \t]*([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_REPEATABLE = ("x-robots-tag",)
#: a longer head is cut off here, and its response has no body
MAX_HEAD = 64 << 10
#: A body of more gzip members is an attack: an empty member takes 20 bytes, and each costs a new decompressor.
MAX_MEMBERS = 1000
_BLOCK = 16 << 10


class TooLarge(ValueError):
    """Raised for an HTTP body that inflates to more bytes than are allowed, or that has more gzip members than any
    server makes."""


def parse_response(block: bytes) -> tuple[int, dict[str, str], bytes] | None:
    """Return (status, headers by lower-case name, body) of an HTTP response; None when `block` is no HTTP response. If
    several headers have one name, the first counts. Only `x-robots-tag` headers are joined by newlines, because each
    may address other robots."""
    first = _STATUS.match(block)
    if first is None:
        return None
    end = _HEAD_END.search(block, 0, MAX_HEAD)
    head, body = (block[:end.start()], block[end.end():]) if end else (block[:MAX_HEAD], b"")
    headers: dict[str, str] = {}
    for line in head.split(b"\n")[1:]:
        before, colon, behind = line.partition(b":")
        if colon:
            name, value = before.strip().lower().decode("latin-1"), behind.strip().decode("latin-1")
            if name in _REPEATABLE and name in headers:
                headers[name] += f"\n{value}"
            else:
                headers.setdefault(name, value)
    return int(first[1]), headers, body


def media_type(content_type: str | None) -> tuple[str, str]:
    """Return (media type, charset) of a Content-Type value, such as ('text/html', 'utf-8'). A part that is missing is
    an empty string."""
    mime, _, parameters = (content_type or "").partition(";")
    match = re.search(r"charset\s*=\s*[\"']?\s*([^\s\"';,]+)", parameters, re.IGNORECASE)
    return mime.strip().lower(), match[1].lower() if match else ""


def decode_body(body: bytes, headers: dict[str, str], cap: int) -> bytes:
    """Return an HTTP body after its transfer coding and its content codings (at most the last three) are undone. Raises
    `TooLarge` if the result has more than `cap` bytes.

    If the headers declare a coding that the body does not have, the coding is ignored, since the crawler has already
    undone it.
    """
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = unchunk(body)
    codings = [c.strip().lower() for c in headers.get("content-encoding", "").split(",")]
    for coding in reversed([c for c in codings if c and c != "identity"][-3:]):
        body = _decoded(body, coding, cap)
    if len(body) > cap:
        raise TooLarge
    return body


def unchunk(body: bytes) -> bytes:
    """Return an HTTP body after its chunked transfer coding is undone, up to the first broken chunk. A body that does
    not begin with a chunk is returned unchanged."""
    out, at = [], 0
    while (size := _CHUNK.match(body, at)) is not None:
        length = int(size[1], 16)
        if length == 0:
            break
        out.append(body[size.end():size.end() + length])
        at = size.end() + length
        if body[at:at + 2] == b"\r\n":
            at += 2
        elif body[at:at + 1] == b"\n":
            at += 1
        else:
            break
    return b"".join(out) if out or _CHUNK.match(body) else body


def _decoded(body: bytes, coding: str, cap: int) -> bytes:
    if coding in ("gzip", "x-gzip", "deflate"):
        # 47: gzip or zlib header as found; -15: raw deflate, which many servers send as 'deflate'
        for wbits in (47,) if coding != "deflate" else (47, -15):
            inflated = inflate(body, wbits, cap)
            if inflated is not None:
                return inflated
        return body
    if coding in ("br", "zstd"):
        reader = (BrotliReader if coding == "br" else ZstdReader)(io.BytesIO(body))
        out = bytearray()
        try:
            while piece := reader.read(1 << 16):
                out += piece
                if len(out) > cap:
                    raise TooLarge
        except OSError:
            pass                            # broken or not coded at all: keep what there is
        return bytes(out) or body
    return body


def inflate(data: bytes, wbits: int, cap: int) -> bytes | None:
    """Return `data` inflated, up to the first error in it; None if no byte precedes the error. `wbits` selects the
    format, as in zlib. Raises `TooLarge` if the result has more than `cap` bytes, or the data more than `MAX_MEMBERS`
    gzip members.

    The decompressor gets its input in small blocks. At each call and for each gzip member, it copies all input that it
    has not read yet, so large blocks would be copied many times.
    """
    out, at = bytearray(), 0
    for _ in range(MAX_MEMBERS):
        engine = zlib.decompressobj(wbits)
        while not engine.eof and (block := engine.unconsumed_tail or data[at:at + _BLOCK]):
            at += 0 if engine.unconsumed_tail else len(block)
            try:
                out += engine.decompress(block, 1 << 16)
            except zlib.error:
                return bytes(out) or None
            if len(out) > cap:
                raise TooLarge
        if not engine.eof:
            out += engine.flush()
            return bytes(out) or None
        at -= len(engine.unused_data)
        if wbits != 47 or at >= len(data):                      # gzip members follow one another
            return bytes(out) or None
    raise TooLarge
