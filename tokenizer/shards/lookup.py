"""Reads the lookup index of a shard set, which finds documents by id, URL or domain in a few reads of the file.

The index is the file `lookup-SHA.index` beside the manifest; SHA is the first 16 hex characters of the set's sha256.
`tokenizer.shards.index_writer` writes it. Equal sets with equal URLs give equal bytes::

    header    4096 bytes: the sha256 (hex) of the rest of the header, a newline, JSON, spaces
    columns   id, then url and domain if the documents have URLs; the levels of each column, leaves first

A column is a tree. All numbers are u64, little-endian. A level of the tree is a list of entries (key, value), sorted by
key, and is cut into pages. The header gives the number of entries in a page; the last page of a level may have fewer.

- In the lowest level, the leaves, an entry stands for a document, and its value is the document's number in the set.
  Entries with equal keys are in the order of their documents.
- In every other level, an entry stands for a page of the level below. Its key is the first key of that page, and its
  value is the checksum of that page (blake2b, 8 bytes).
- The highest level is one page, whose checksum is in the header. So every page that is read is verified.

A column of up to 4 · 10¹² documents has at most three levels. A column without entries has none.

The key of an id that is 32 hex digits in lower case is its first 16 digits as a number. The key of any other id, of a
URL or of a domain is the blake2b of the UTF-8 text, 8 bytes. Two texts have the same hash with a probability of 2⁻⁶⁴.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from tokenizer.shards.find import places_of
from tokenizer.shards.index import ShardIndex
from tokenizer.shards.layout import Manifest, ShardError

MAGIC = "tokenmill-lookup"
VERSION = 1
HEADER = 4096
#: number of entries in a page, unless a test asks for fewer
PAGE = 1 << 14
#: size of an entry in bytes
ENTRY = 16
U64 = np.dtype("<u8")
COLUMNS = ("id", "url", "domain")
REMEDY = "remove the file and run `tokenmill shards index` again"
_HEX_ID = re.compile(r"[0-9a-f]{32}")
_HEX = re.compile(r"[0-9a-f]{0,32}")


def name_of(sha256: str) -> str:
    """Return the file name of the lookup index of the shard set with this sha256."""
    return f"lookup-{sha256[:16]}.index"


def key_of(text: str) -> int:
    """Return the key of a URL or domain in the lookup index: a hash of 8 bytes."""
    data = text.encode("utf-8", "surrogateescape")             # bytes of a command line that are no UTF-8
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def key_of_id(id: str) -> int:
    """Return the key of a document's id in the lookup index: the first 16 hex digits as a number if the id is 32 hex
    digits, else a hash."""
    return int(id[:16], 16) if _HEX_ID.fullmatch(id) else key_of(id)


def checksum(page: bytes) -> int:
    """Return the checksum of a page of the lookup index."""
    return int.from_bytes(hashlib.blake2b(page, digest_size=8).digest(), "little")


def sealed(header: dict[str, Any]) -> bytes:
    """Return the bytes of the header of a lookup index: its sha256, a newline and its JSON, filled up with spaces to
    HEADER bytes."""
    body = json.dumps(header, sort_keys=True).encode().ljust(HEADER - 65)
    if len(body) > HEADER - 65:
        raise ValueError(f"a header of {len(body)} bytes is too long")
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


class Lookup:
    """The lookup index of a shard set, open for reading. `file` must be seekable and unbuffered. `where` is its name in
    error messages. Raises ShardError when the file is damaged or belongs to another set."""

    def __init__(self, file: BinaryIO, manifest: Manifest, where: str) -> None:
        self._file, self.where = file, where
        head = file.read(HEADER)
        digest, body = head[:64], head[65:]
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ShardError(f"{where}: its header is damaged: {REMEDY}")
        try:
            self._read_header(json.loads(body), manifest)
        except (KeyError, TypeError, AttributeError) as e:
            raise ShardError(f"{where}: its header is damaged: {REMEDY}") from e

    def _read_header(self, header: dict[str, Any], manifest: Manifest) -> None:
        where = self.where
        if (header.get("magic"), header.get("version")) != (MAGIC, VERSION):
            raise ShardError(f"{where}: not a lookup index that this Tokenmill reads: {REMEDY}")
        if (header["set"], header["documents"]) != (manifest.sha256, manifest.documents):
            raise ShardError(f"{where}: belongs to another shard set: {REMEDY}")
        #: whether all ids are 32 hex digits; ids with the same beginning are then neighbours
        self.has_hex_ids: bool = header["hex_ids"]
        self._entries: int = header["page"]
        self._columns: dict[str, dict[str, Any]] = header["columns"]
        self._documents, size = manifest.documents, self._file.seek(0, io.SEEK_END)
        if not all(_fits(tree["levels"], self._entries, size) for tree in self._columns.values()):
            raise ShardError(f"{where}: truncated, or damaged: {REMEDY}")

    def __contains__(self, column: str) -> bool:
        return column in self._columns

    def numbers(self, column: str, low: int, high: int) -> Iterator[int]:
        """Yield the numbers of the documents whose key in `column` (id, url or domain) is in [low, high]. They are
        sorted by key, and documents with equal keys by number."""
        tree = self._columns[column]
        if tree["levels"]:
            yield from self._below(tree["levels"], len(tree["levels"]) - 1, 0, tree["root"], low, high)

    def _below(self, levels: list[list[int]], level: int, page: int, sum: int, low: int, high: int) -> Iterator[int]:
        entries = self._page(levels[level], page, sum)
        first = int(np.searchsorted(entries[:, 0], np.array(low, U64), "left"))
        stop = int(np.searchsorted(entries[:, 0], np.array(high, U64), "right"))
        if not level:
            numbers = entries[first:stop, 1].tolist()
            if numbers and max(numbers) >= self._documents:
                raise ShardError(f"{self.where}: names a document that the shard set does not have: {REMEDY}")
            yield from numbers
            return
        for child in range(max(first - 1, 0), stop):               # the page before may end with the key `low`
            yield from self._below(levels, level - 1, page * self._entries + child, int(entries[child, 1]), low, high)

    def _page(self, level: list[int], page: int, sum: int) -> np.ndarray:
        """Read page number `page` of a level of the index as an array [entries, 2], and compare it with its checksum
        `sum`."""
        offset, entries = level
        start = offset + page * self._entries * ENTRY
        size = min(self._entries, entries - page * self._entries) * ENTRY
        self._file.seek(start)
        data = self._file.read(size)
        if len(data) != size or checksum(data) != sum:
            raise ShardError(f"{self.where}: damaged at byte {start:,}: {REMEDY}")
        return np.frombuffer(data, U64).reshape(-1, 2)


def _fits(levels: list[list[int]], page: int, size: int) -> bool:
    """Return whether a file of `size` bytes can hold the levels of a column. `levels` are those that the header of a
    lookup index gives, and `page` is the number of entries in a page.

    Without this check, absurd sizes in a hostile index would make a search allocate any amount of memory. Checksums do
    not prevent that, because the author of the index can compute them, too."""
    wanted = None                                 # entries of a level: one for each page of the level below it
    for offset, entries in levels:
        fits = offset >= HEADER and entries > 0 and offset + entries * ENTRY <= size
        if page < 2 or not fits or wanted not in (None, entries):
            return False
        wanted = -(-entries // page)
    return wanted in (None, 1)


def by_id(shards: ShardIndex, lookup: Lookup, id: str) -> Iterator[dict[str, Any]] | None:
    """Find the documents whose id begins with `id` by the lookup index. Yields what `find.places` yields.

    If some ids of the set are not 32 hex digits, the index finds only whole ids. If it then finds no document, None is
    returned, because there may still be an id that begins with `id`."""
    if not lookup.has_hex_ids:
        places = [place for place in places_of(shards, lookup.numbers("id", key_of_id(id), key_of_id(id)))
                 if place["id"] == id]
        return iter(places) if places else None
    if not _HEX.fullmatch(id):
        return iter(())
    numbers = lookup.numbers("id", int(id[:16].ljust(16, "0"), 16), int(id[:16].ljust(16, "f"), 16))
    return (place for place in places_of(shards, numbers) if place["id"].startswith(id))


def by_text(shards: ShardIndex, lookup: Lookup, column: str, text: str) -> Iterator[dict[str, Any]]:
    """Find the documents with the URL or domain `text` by the lookup index. `column` is url or domain. Yields what
    `find.places` yields."""
    return places_of(shards, lookup.numbers(column, key_of(text), key_of(text)))
