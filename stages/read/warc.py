"""Reads WARC files (ISO 28500) of web crawls with fastwarc. The files may be uncompressed, or consist of gzip, lz4 or
zstd frames.

Records of the types response and resource become documents with the body of the record in `raw`. Transfer and content
coding of a response are undone. Records of the type conversion (WET files) become documents with text. Headers by which
a server forbids uses (`X-Robots-Tag`, `TDM-Reservation`, `TDM-Policy`) are kept in `meta.http`.

No documents are made of other records. They are counted under these reasons:

- `request`, `metadata`, `warcinfo`, `revisit`, `continuation`, `unknown`: the type of the record
- `http_status`: not 2xx, such as a redirect or an error page
- `not_http`: a response that is no HTTP message
- `not_web`: one of the crawler's own files
- `media`: images, sounds, fonts, styles, scripts
- `empty`: no body
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, BinaryIO

from fastwarc import GzipReader, Lz4Reader, ZstdReader
from fastwarc.warc import ArchiveIterator, WarcRecord

from stages.document import BadRecord, Document, document_id
from stages.read.http import TooLarge, decode_body, media_type, parse_response
from stages.read.reader import BEYOND, Reader, Slice, Split, bad, check_file, is_machine_fault, locator, skipped
from stages.stage import StageConfig, signal

GZIP, LZ4, ZSTD = b"\x1f\x8b", b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd"
#: media that hold no text; all other types go to the extractor, which examines the bytes
_MEDIA = ("image/", "audio/", "video/", "font/", "text/css", "text/javascript", "application/javascript",
          "application/x-javascript", "application/font", "application/vnd.ms-fontobject", "application/x-font")
#: headers that are kept in `meta.http`, for the step `rights`, and most characters of each
_KEPT_HEADERS, _LONGEST_VALUE = ("x-robots-tag", "tdm-reservation", "tdm-policy"), 4000
#: bytes of a member that are inflated to find the length of the record's head
_HEAD = 32 << 10
_WEB_SCHEMES = ("http", "https", "ftp", "file")


class Warc(Reader):
    """Reads WARC files of web crawls: responses as raw pages, conversions (WET files) as text."""

    name = "warc"
    collection = True
    extractor = "html"
    crawl = True
    version = 5
    libraries = ("FastWARC",)
    suffixes = (".warc.gz", ".warc", ".warc.lz4", ".warc.zst", ".warc.wet.gz", ".wet.gz")

    class Config(StageConfig):
        max_bytes: int = signal(64 << 20, "largest body of a record, bytes; beyond: too_large", gt=0)

    # -- reading -------------------------------------------------------------------------------------------------
    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        size = check_file(local, slice.path)
        stop = size if slice.stop is None else min(slice.stop, size)
        with open(local, "rb") as file:
            magic = _peek(file, slice.start, 16)
            plain = _head(file, slice.start, 16) if magic.startswith(GZIP) else magic
            if plain.startswith(b"filedesc:"):
                yield bad("arc_format", slice, slice.start, slice.ordinal, fatal=True,
                          detail="an ARC file, the format before WARC; convert it with `warcio recompress`")
                return
            ordinal = slice.ordinal
            at: int | None = slice.start
            while at is not None:
                at, ordinal = yield from self._stretch(file, slice, at, stop, ordinal)
            if ordinal == slice.ordinal and stop == size:
                yield bad("not_warc", slice, slice.start, ordinal, detail="holds no WARC record", fatal=True)

    def _stretch(self, file: BinaryIO, slice: Slice, start: int, stop: int, ordinal: int,
                 ) -> Generator[Document | BadRecord, None, tuple[int | None, int]]:
        """Yields the records from byte `start` on, up to the first place at which fastwarc stops. Returns (offset at
        which reading continues; number of the next record). The offset is None if nothing more can be read.

        Fastwarc stops at anything that is not a record. It also stops, without an error, at an empty gzip member. Later
        gzip members may be sound, so they are examined one by one to find the next record.
        """
        magic = _peek(file, start, 16)
        stream, offset_of = _open(_Range(file, start, stop), magic)
        gzip, offset, begun, records = isinstance(stream, GzipReader), start, False, None
        while True:
            try:
                records = records or iter(_archive(stream))
                record = next(records, None)
                if record is None:
                    break
                offset, begun = start + offset_of(record), True
                expected = min(record.content_length, self.config.max_bytes + MAX_HTTP_HEAD)
                block = record.reader.read(expected)
            except BaseException as e:
                if not _broken_input(e):
                    raise
                after = _member_end(file, offset, stop)[0] if gzip else None
                if after is not None and begun and start + (stream.frame_start_position() or 0) > offset \
                        and _peek(file, after, 2) == GZIP:
                    return after, ordinal                       # the next stretch begins with the faulty member
                next_offset = _next_record(file, after, stop) if after is not None else None
                coding = "" if "header" in str(e).lower() else _coding(magic)
                yield bad(f"corrupt_{coding or 'warc'}", slice, offset, ordinal, detail=str(e),
                          fatal=next_offset is None)
                return next_offset, ordinal + 1
            if len(block) < expected:
                after = _member_end(file, offset, stop)[0] if gzip else None
                next_offset = _next_record(file, after, stop) if after is not None else None
                yield bad("truncated", slice, offset, ordinal, fatal=next_offset is None,
                          detail="the file ends inside this record" if next_offset is None else "shorter than it says")
                return next_offset, ordinal + 1
            yield self._document(record, block, slice, offset, ordinal)
            ordinal += 1
        if not gzip:
            return None, ordinal
        offset = start + (stream.frame_start_position() or 0)
        after, fault = _member_end(file, offset, stop)
        if after is None:
            if ordinal > slice.ordinal:
                yield bad("corrupt_gzip" if fault else "truncated", slice, offset, ordinal, fatal=True,
                          detail=fault or "the file ends inside a gzip member")
            return None, ordinal
        return _next_record(file, after, stop), ordinal

    def _document(self, record: WarcRecord, block: bytes, slice: Slice, offset: int,
                  ordinal: int) -> Document | BadRecord:
        kind, headers = str(record.record_type), record.headers
        if kind not in ("response", "resource", "conversion"):
            return skipped(kind if kind else "unknown", slice, offset, ordinal)
        url = (headers.get("WARC-Target-URI") or "").strip().removeprefix("<").removesuffix(">")
        if len(block) > self.config.max_bytes:
            return bad("too_large", slice, offset, ordinal, detail=f"{record.content_length} bytes")
        identified = media_type(headers.get("WARC-Identified-Payload-Type"))[0]
        mime, charset = media_type(headers.get("Content-Type"))
        body = block
        if kind == "response":
            message = parse_response(block)
            if message is None:
                return skipped("not_http", slice, offset, ordinal)
            status, http, body = message
            if not 200 <= status < 300:
                return skipped("http_status", slice, offset, ordinal, detail=str(status))
            mime, charset = media_type(http.get("content-type"))
            if (identified or mime).startswith(_MEDIA):
                return skipped("media", slice, offset, ordinal)
            try:
                body = decode_body(body, http, self.config.max_bytes)
            except TooLarge:
                return bad("too_large", slice, offset, ordinal, detail=f"inflates beyond {self.config.max_bytes} bytes")
        elif url.partition(":")[0].lower() not in _WEB_SCHEMES:
            return skipped("not_web", slice, offset, ordinal)          # logs and manifests of the crawler
        elif (identified or mime).startswith(_MEDIA):
            return skipped("media", slice, offset, ordinal)
        if not body:
            return skipped("empty", slice, offset, ordinal)
        meta: dict[str, Any] = {}
        if kind == "response" and (
                directives := {name: http[name][:_LONGEST_VALUE] for name in _KEPT_HEADERS if name in http}):
            meta["http"] = directives
        if record_id := headers.get("WARC-Record-ID"):
            meta["warc_id"] = record_id
        if truncated := headers.get("WARC-Truncated"):
            meta["truncated"] = truncated
        doc = Document(document_id(slice.source, slice.path, "", ordinal), source=slice.source, url=url,
                       date=headers.get("WARC-Date"), mime=identified or mime, charset=charset, meta=meta,
                       locator=locator(slice.path, offset, ordinal))
        if kind == "conversion":
            doc.text = body.decode("utf-8", "replace")
        else:
            doc.raw = body
        return doc

    def needs(self, slice: Slice | None, size: int, read: Callable[[int, int], bytes]) -> list[tuple[int, int]] | None:
        """Return the byte ranges of a file in object storage that must be fetched to read a slice (the file or a piece
        of it), or to split the file if `slice` is None. The result is None if the whole file must be fetched. A slice
        needs its own bytes and the `BEYOND` bytes after them. Splitting needs the whole file, but only the beginning of
        an lz4 or zstd file, which cannot be split."""
        if slice is None:
            return [(0, BEYOND)] if _coding(read(0, 16)) in ("lz4", "zstd") else None
        return None if slice.stop is None else [(slice.start, slice.stop + BEYOND)]

    # -- splitting -----------------------------------------------------------------------------------------------
    def splits(self, local: str, path: str, target: int) -> list[Split] | None:
        """Return the pieces in which a file can be read, of about `target` uncompressed bytes. They are cut between
        gzip members (or between records, if the file is not compressed). Returns None if the file cannot be split.

        Members are found by decompressing the file. A search for their magic bytes would not do, since these also occur
        inside a record that contains a WARC file. The file may be cut before a member if every earlier member held
        exactly one record. A member holds exactly one record if the record's head, Content-Length and line ends add up
        to the length in the gzip trailer. From the first member that fails this test to the end of the file, everything
        is one piece.
        """
        size = check_file(local, path)
        with open(local, "rb") as file:
            magic = _peek(file, 0, 16)
            coding = _coding(magic)
            if coding in ("lz4", "zstd"):
                self.warnings.append(f"{path}: read in one piece; with gzip instead of {coding} it could be split")
                return None
            starts = list(_record_starts(file, bool(coding)))       # (offset, uncompressed bytes before it)
        if len(starts) < 2 or starts[0][0]:             # bytes before the first record may belong to it
            self.warnings.append(f"{path}: read in one piece, for it is not compressed record by record; "
                                 "`fastwarc recompress` would make it so")
            return None
        pieces: list[Split] = []
        first, last = 0, len(starts) - 1
        end = starts[-1][1] + max(size - starts[-1][0], 1)          # the last piece goes to the end of the file
        for i in range(1, len(starts) + 1):
            place = starts[i][1] if i <= last else end
            if i > last or place - starts[first][1] >= target:
                pieces.append(Split(starts[first][0], starts[i][0] if i <= last else size, first, i - first,
                                    place - starts[first][1]))
                first = i
        return pieces


#: bytes allowed for the HTTP head beyond the cap of the body
MAX_HTTP_HEAD = 64 << 10


class _Range(io.RawIOBase):
    """The bytes [start, stop) of a file, as a stream that begins at 0."""

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        self.fd, self.start, self.size, self.at = file.fileno(), start, max(stop - start, 0), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(offset + (0, self.at, self.size)[whence], 0)
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        remaining = max(self.size - self.at, 0)
        data = os.pread(self.fd, remaining if size < 0 or size > remaining else size, self.start + self.at)
        self.at += len(data)
        return data


def _archive(stream: Any) -> ArchiveIterator:
    return ArchiveIterator(stream, parse_http=False, stream_detect=False, strict_mode=False)


def _broken_input(e: BaseException) -> bool:
    """Return whether an error that fastwarc raised is the fault of the file, not of the machine. A panic of fastwarc's
    Rust code is raised as a BaseException and is the file's fault. An error of the operating system, which has an
    errno, is the machine's fault."""
    return not is_machine_fault(e) and (isinstance(e, (OSError, ValueError, EOFError))
                                        or type(e).__name__ == "PanicException")


def _peek(file: BinaryIO, offset: int, size: int) -> bytes:
    return os.pread(file.fileno(), size, offset)        # does not move the position of another reader


def _coding(magic: bytes) -> str:
    return ("gzip" if magic.startswith(GZIP) else "lz4" if magic.startswith(LZ4)
            else "zstd" if magic.startswith(ZSTD) else "")


def _open(stream: io.RawIOBase, magic: bytes) -> tuple[Any, Any]:
    """Returns (stream for fastwarc, function that returns the offset of a record) for a file that begins with the bytes
    `magic`. In a compressed file, the offset is that of the frame in which the record begins."""
    coding = _coding(magic)
    if not coding:
        return stream, lambda record: record.stream_pos
    reader = {"gzip": GzipReader, "lz4": Lz4Reader, "zstd": ZstdReader}[coding](stream)
    return reader, lambda record: reader.frame_start_position() or 0


def _head(file: BinaryIO, offset: int, size: int = _HEAD) -> bytes:
    """Returns the first `size` bytes of the gzip member at `offset` after decompression; b"" if there is no gzip member
    at this offset."""
    engine, out = zlib.decompressobj(31), b""
    try:
        while len(out) < size and not engine.eof and (block := engine.unconsumed_tail or _peek(file, offset, 4096)):
            offset += 0 if engine.unconsumed_tail else len(block)
            out += engine.decompress(block, size - len(out))
    except zlib.error:
        pass
    return out


def _record_starts(file: BinaryIO, gzip: bool) -> Iterator[tuple[int, int]]:
    """Yields (offset of a record, number of uncompressed bytes before the record) for each record of a WARC file. It
    stops at damage and, in a gzip file, at the first member that does not contain exactly one record."""
    file.seek(0, os.SEEK_END)
    full = _Range(file, 0, file.tell())
    stream: Any = GzipReader(full) if gzip else full
    last_start, length, before = -1, 0, 0
    try:
        for record in _archive(stream):
            start = stream.frame_start_position() or 0 if gzip else record.stream_pos
            if last_start >= 0:
                if start == last_start:
                    return                                          # a second record in one member
                if gzip:
                    member_bytes = int.from_bytes(_peek(file, start - 4, 4), "little")  # ISIZE of the member before
                    if not 0 <= member_bytes - length <= 4:
                        return
                    before += member_bytes
                else:
                    before = start
            last_start = start
            if gzip:
                head = _head(file, start)
                ends = [e for e in (head.find(b"\r\n\r\n"), head.find(b"\n\n")) if e >= 0]
                if not head.startswith(b"WARC/") or not ends:
                    return
                length = min(ends) + (4 if head.find(b"\r\n\r\n") == min(ends) else 2) + record.content_length
            yield last_start, before
    except BaseException as e:
        if not _broken_input(e):
            raise                                                   # what is readable before the damage is indexed


def _member_end(file: BinaryIO, offset: int, stop: int) -> tuple[int | None, str]:
    """Returns (offset of the end of the gzip member at `offset`, ""). Returns (None, message of the error) for a faulty
    member, and (None, "") for a member that is cut off."""
    engine, at = zlib.decompressobj(31), offset
    try:
        while not engine.eof:
            block = engine.unconsumed_tail
            if not block:
                block = _peek(file, at, min(1 << 16, stop - at))
                at += len(block)
                if not block:
                    return None, ""
            engine.decompress(block, 1 << 20)
    except zlib.error as e:
        return None, str(e)
    return at - len(engine.unused_data), ""


def _next_record(file: BinaryIO, at: int, stop: int) -> int | None:
    """Return the offset of the first gzip member from `at` on that begins with a WARC record; None if there is no such
    member. `at` must be the offset at which a gzip member ends."""
    offset: int | None = at
    while offset is not None and offset < stop:
        if _head(file, offset, 5) == b"WARC/":
            return offset
        offset = _member_end(file, offset, stop)[0]
    return None
