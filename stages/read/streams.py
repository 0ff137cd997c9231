"""Reads compressed files as streams, lines or JSON elements, and the members of archives. Size limits apply to the
bytes that were really read, since the sizes that a file states may be wrong. Damage in a file raises `DamagedStream`,
so that callers can count it."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from stages.read.reader import is_machine_fault

_BLOCK = 1 << 20
_MAGIC = ((b"\x1f\x8b", "gzip"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))
#: a text may begin with "BZh", but in bzip2 the block size and the mark of a block or of the end follow
_BZ2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
#: JSON strings, with the closing quote in a group (empty where it has not come yet), and brackets, braces and commas
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[\]{},]', re.DOTALL)
#: errors that the decompressors of the standard library and of pyarrow raise on damaged input. Some of these errors may
#: also be the fault of the machine; `is_machine_fault` tells whether they are
_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException)
#: an archive that inflates to more than this is a bomb
MAX_ARCHIVE_BYTES = 64 << 30


class DamagedStream(Exception):
    """Raised for a file that ends too early, is corrupt, or exceeds a limit. `reason` is in snake_case, such as
    `truncated`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def coding_of(magic: bytes) -> str:
    """Return the name of the compression of a file, such as "gzip", given the first 10 bytes of the file; "" if it is
    not compressed."""
    return "bz2" if _BZ2.match(magic) else next((n for start, n in _MAGIC if magic.startswith(start)), "")


class DecompressedStream:
    """A file that is decompressed while it is read. Its first bytes show which compression it has. If the file is
    damaged, `read` returns all bytes before the damage, and only then raises `DamagedStream`."""

    def __init__(self, local: str) -> None:
        self._file = open(local, "rb")  # noqa: SIM115 - closed by close()
        self.coding = coding_of(self._file.peek(10)[:10])
        if self.coding == "zstd":
            self._stream: Any = pa.CompressedInputStream(pa.PythonFile(self._file, "r"), "zstd")
            self._read = self._stream.read
        else:
            open_as: dict[str, Any] = {"bz2": bz2.BZ2File, "xz": lzma.LZMAFile}
            self._stream = (gzip.GzipFile(fileobj=self._file) if self.coding == "gzip"
                            else open_as[self.coding](self._file) if self.coding else self._file)
            # read1 runs one step of the decompressor, so that an error does not lose the bytes of earlier steps
            self._read = self._stream.read1

    def read(self, size: int = _BLOCK) -> bytes:
        try:
            return self._read(size)
        except _ERRORS as e:
            if is_machine_fault(e):
                raise
            cut = isinstance(e, EOFError) or "ended before" in str(e) or "truncated" in str(e).lower()
            raise DamagedStream("truncated" if cut else f"corrupt_{self.coding or 'file'}", str(e)) from None

    def read_all(self, cap: int) -> bytes | None:
        """Return all decompressed bytes of the file, or None if there are more than `cap`."""
        blocks, size = [], 0
        while block := self.read():
            blocks.append(block)
            size += len(block)
            if size > cap:
                return None
        return b"".join(blocks)

    def seek(self, offset: int) -> None:
        """Move to a byte of a file that is not compressed."""
        self._file.seek(offset)

    def close(self) -> None:
        if self._stream is not self._file:
            self._stream.close()
        self._file.close()

    def __enter__(self) -> DecompressedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(stream: DecompressedStream, cap: int, length: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Yield (offset in the decompressed stream, line without its line end) for each line of a stream. A line of more
    than `cap` bytes is replaced with None.

    Reading stops after `length` bytes. Memory is bounded by `cap` and one block. If the file is damaged,
    `DamagedStream` is raised after the last whole line before the damage. A line that the damage cuts is not yielded.
    """
    at = 0                                  # offset of the line that `blocks` begins
    blocks: list[bytes] = []                # the line's blocks so far; empty once the line is too long
    size, remaining = 0, length             # the line's bytes so far; bytes left to read
    while remaining is None or remaining > 0:
        block = stream.read(_BLOCK if remaining is None else min(_BLOCK, remaining))
        if not block:
            break
        if remaining is not None:
            remaining -= len(block)
        *lines, tail = block.split(b"\n")
        for line in lines:
            size += len(line)
            yield at, (b"".join((*blocks, line)) if size <= cap else None)
            at, blocks, size = at + size + 1, [], 0
        size += len(tail)
        if size <= cap:
            blocks.append(tail)
        else:
            blocks = []
    if size:
        yield at, (b"".join(blocks) if size <= cap else None)


def is_array(local: str) -> bool:
    """Return whether a file is one JSON array. The result is False for JSON Lines whose first line is an array."""
    with DecompressedStream(local) as stream:
        try:
            begin = stream.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()
        except DamagedStream:
            return False
    line, _, after = begin.partition(b"\n")
    try:
        return line[:1] == b"[" and not (after.strip() and isinstance(json.loads(line), list))
    except (ValueError, RecursionError):
        return True


def read_elements(stream: DecompressedStream, cap: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the decompressed stream, JSON text) for each element of a JSON array, which is the content of
    the stream.

    Elements are found by brackets, commas and strings alone, so an element that is not valid JSON does not affect other
    elements. Memory is bounded by `cap`, the bytes of the longest element, and a block. Raises `DamagedStream` if the
    array does not end, if something follows the array, or if an element is longer than `cap` bytes.
    """
    buffer, base, scanned, depth, ended = b"", 0, 0, 0, False    # `buffer` begins with the element, at byte `base`
    while block := stream.read():
        buffer += block
        begin = 0
        while not ended and (token := _TOKEN.search(buffer, scanned)) is not None and token[1] != b"":
            scanned = token.end()
            if token[0] in b"[{":
                depth += 1
                begin = scanned if depth == 1 else begin
            elif token[0] in b"]},":
                depth -= token[0] != b","
                if depth == (token[0] == b","):
                    ended = ended or depth == 0
                    element = buffer[begin:token.start()]
                    if len(element) > cap:
                        raise DamagedStream("line_too_long", f"an element of more than {cap} bytes")
                    if token[0] == b"," or element.strip():
                        yield base + begin, element
                    begin = scanned
        scanned = len(buffer) if token is None else token.start()  # a string cut by the block is scanned again
        if len(buffer) - begin > cap and not ended:
            raise DamagedStream("line_too_long", f"an element of more than {cap} bytes")
        buffer, base, scanned = buffer[begin:], base + begin, scanned - begin
        if ended and buffer.strip():
            raise DamagedStream("bad_json", "there is something after the array")
    if not ended:
        raise DamagedStream("truncated", "the array does not end")


@dataclass(frozen=True)
class Member:
    """One file in a zip or tar archive: its name, its offset in the archive, and its bytes (`data`) or the reason why
    they were not read."""

    name: str
    offset: int
    data: bytes | None
    reason: str = ""


def is_archive(path: str) -> bool:
    return path.lower().endswith((".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"))


def members(local: str, path: str, suffixes: tuple[str, ...], cap: int, *,
            total_cap: int = MAX_ARCHIVE_BYTES) -> Iterator[Member]:
    """Yield the regular files of a zip or tar archive in the order of the archive. Files whose names end in one of
    `suffixes` are yielded with their data.

    A member of more than `cap` bytes has no data and the reason `too_large`. A member with another ending has no data
    and the reason `other_type`. In a zip archive, a member may also have the reason `encrypted` or `corrupt_zip`.
    Raises `DamagedStream` where the archive cannot be read any further, and where its members have more than
    `total_cap` bytes together.
    """
    read = _zip if path.lower().endswith(".zip") else _tar
    yield from read(local, suffixes, cap, total_cap)


def _zip(local: str, suffixes: tuple[str, ...], cap: int, total_cap: int) -> Iterator[Member]:
    try:
        archive = zipfile.ZipFile(local)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as e:
        for error in (e, e.__context__):                    # zipfile also says "not a zip file" for an I/O error
            if error is not None and is_machine_fault(error):
                raise error from None
        raise DamagedStream("corrupt_zip", str(e)) from None
    total = 0                                           # bytes inflated; entries may share stored bytes
    with archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if not info.filename.lower().endswith(suffixes):
                yield Member(info.filename, info.header_offset, None, "other_type")
                continue
            if info.flag_bits & 1:
                yield Member(info.filename, info.header_offset, None, "encrypted")
                continue
            try:
                with archive.open(info) as f:           # the size in the directory may be false
                    data = f.read(cap + 1)
            except (*_ERRORS, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as e:
                if is_machine_fault(e):
                    raise
                yield Member(info.filename, info.header_offset, None, "corrupt_zip")
                continue
            total += len(data)
            if total > total_cap:
                raise DamagedStream("too_large", f"inflates beyond {total_cap} bytes")
            yield Member(info.filename, info.header_offset, *((data,) if len(data) <= cap else (None, "too_large")))


class _LimitedStream:
    """A stream for tarfile that raises DamagedStream when a tar archive has more than `total_cap` bytes after
    decompression."""

    def __init__(self, stream: DecompressedStream, total_cap: int) -> None:
        self.stream, self.total_cap, self.total, self.buffer = stream, total_cap, 0, b""

    def read(self, size: int) -> bytes:
        while len(self.buffer) < size and (block := self.stream.read()):
            self.buffer += block
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        self.total += len(data)
        if self.total > self.total_cap:
            raise DamagedStream("too_large", f"inflates beyond {self.total_cap} bytes")
        return data


def _tar(local: str, suffixes: tuple[str, ...], cap: int, total_cap: int) -> Iterator[Member]:
    with DecompressedStream(local) as stream:
        try:
            limited = _LimitedStream(stream, total_cap)
            archive = tarfile.open(fileobj=limited, mode="r|")  # type: ignore[call-overload] # noqa: SIM115
            for info in archive:
                if not info.isreg():
                    continue
                if not info.name.lower().endswith(suffixes):
                    yield Member(info.name, info.offset, None, "other_type")
                elif info.size > cap:
                    yield Member(info.name, info.offset, None, "too_large")
                else:
                    data = archive.extractfile(info).read()
                    if len(data) < info.size:
                        raise DamagedStream("truncated", info.name)
                    yield Member(info.name, info.offset, data)
        except (tarfile.TarError, *_ERRORS, ValueError) as e:
            if is_machine_fault(e):
                raise
            raise DamagedStream("corrupt_tar", str(e)) from None
