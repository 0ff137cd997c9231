"""The tombstones of a store: the entries about documents that `tokenmill takedown` has removed. Every later run leaves
these documents out.

    takedowns/00000001.json         what was asked for and found. Exists before anything is removed
    takedowns/00000001.done.json    what was removed. Exists when the takedown is complete

Both files are created once and never changed. The first line of a file is the sha256 of the rest, which is JSON. A file
holds ids of documents, hashes of URLs and texts, and names of domains, but no text and no URL of a document.

A takedown without its second file has not finished, and the store may still hold some of its documents. A run refuses
such a store, so that no result is built on these documents (`finished_tombstones`).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from struct import Struct
from typing import Any, Protocol

import numpy as np

from pipeline.base.domain import ascii_domain, domain_of
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store
from pipeline.store.lists import FOLDER as LISTS

FOLDER = "takedowns"
FORMAT = 1
#: reason under which a run counts the documents that it leaves out
TAKEN_DOWN = "taken_down"
#: bytes of a hash in a packed list: among 10^12 documents and 10^9 tombstones, two have an equal one with a probability
#: of 10^-17
_KEY_BYTES = 16
_RANGE = Struct("<QQ")
_FILE = re.compile(rf"{FOLDER}/(\d{{8}})\.json")


class UnfinishedTakedown(StoreError):
    """Raised when a takedown of the store was interrupted, so that the store may still hold documents that it was to
    remove."""

    exit_code = 2


class DamagedTakedown(StoreError):
    """Raised when a file of a takedown is damaged, or was written by another version of Tokenmill."""


def url_hash(url: str) -> str:
    """Return the hash by which a tombstone (the entry of a takedown) names a URL."""
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()


def text_hash(text: str) -> str:
    """Return the hash by which a tombstone (the entry of a takedown) names a text. Every run of white space counts as
    one space, and white space at the ends does not count."""
    return url_hash(" ".join(text.split()))


class Names(Protocol):
    """A set of strings that can only be asked for its size and whether it contains a string. `PackedNames` and
    `frozenset` are such sets."""

    def __len__(self) -> int: ...

    def __contains__(self, value: object, /) -> bool: ...


class PackedNames:
    """A set of strings of which only hashes are kept, in a file that is mapped into memory. Processes on one machine
    share the file's pages, and a lookup reads one or two of them.

    `keys` are the hashes (the first 16 bytes of each string's sha256), sorted and joined. Hashes with the same first
    bits form a bucket. `starts` holds, as little-endian uint64, the position of the first hash of each bucket and, at
    the end, the number of all hashes.
    """

    def __init__(self, starts: memoryview, keys: memoryview) -> None:
        self._starts, self._keys = starts, keys
        self._bits = (len(starts) // 8 - 1).bit_length() - 1

    def __len__(self) -> int:
        return len(self._keys) // _KEY_BYTES

    def __contains__(self, value: object, /) -> bool:
        key = _key(str(value))
        start, stop = _RANGE.unpack_from(self._starts, 8 * (int.from_bytes(key[:4], "big") >> 32 - self._bits))
        return key in bytes(self._keys[_KEY_BYTES * start:_KEY_BYTES * stop])

    @staticmethod
    def pack(values: Iterable[str]) -> tuple[bytes, bytes]:
        """Return the arguments `starts` and `keys` of the class `PackedNames` for a set of strings, as bytes. `values`
        are distinct strings."""
        keys = sorted(map(_key, values))
        bits = min(max(len(keys).bit_length() - 3, 0), 32)             # four to eight hashes in a bucket
        first = np.array([int.from_bytes(key[:4], "big") >> 32 - bits for key in keys], np.int64)
        return np.searchsorted(first, np.arange(2**bits + 1)).astype("<u8").tobytes(), b"".join(keys)


def _key(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()[:_KEY_BYTES]


@dataclass(frozen=True)
class GoneDocuments:
    """Says which documents takedowns have removed ("gone"). These are the documents with one of the `ids`, from one of
    the `domains`, or with a URL or text that has one of the hashes. A domain covers its subdomains, too. The hashes of
    texts are needed because a document may come back under another id, such as from a source with another name."""

    ids: Names = frozenset()
    urls: Names = frozenset()
    domains: Names = frozenset()
    texts: Names = frozenset()

    def __bool__(self) -> bool:
        return any(map(len, vars(self).values()))

    def cover(self, id: str, url: str | None, text: str = "") -> bool:
        """Whether a takedown has removed the document with this id, URL and text."""
        return id in self.ids or bool(self.matches(url)) or bool(self.texts and text and text_hash(text) in self.texts)

    def matches(self, url: str | None) -> list[str]:
        """Return the entries of takedowns that cover the URL: its hash if `urls` has it, its host if `domains` has it,
        and the parent domains of the host that `domains` has."""
        if not url or not (self.urls or self.domains):
            return []
        entries = [hashed] if self.urls and (hashed := url_hash(url)) in self.urls else []
        if self.domains and (host := ascii_domain(domain_of(url))):
            labels = host.split(".")
            entries += [name for n in range(len(labels)) if (name := ".".join(labels[n:])) in self.domains]
        return entries


@dataclass(frozen=True)
class Tombstones(GoneDocuments):
    """The tombstones of a store (the entries of its takedowns), as sets in memory."""

    ids: frozenset[str] = frozenset()
    urls: frozenset[str] = frozenset()
    domains: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()

    def __or__(self, other: Tombstones) -> Tombstones:
        return Tombstones(self.ids | other.ids, self.urls | other.urls, self.domains | other.domains,
                          self.texts | other.texts)

    def packed(self, put: Callable[[str, bytes], Any] | None) -> dict[str, Any]:
        """Write the tombstones (the entries of takedowns) to a file of the store, in the form of `PackedNames`.
        `put(path, bytes)` must create the file if it does not exist; without `put`, nothing is written. Returns a
        reference to the file, as an argument for tasks, which pass it to `gone_documents`."""
        packed = [column for values in vars(self).values() for column in PackedNames.pack(values)]
        data = b"".join(packed)
        sha256 = hashlib.sha256(data).hexdigest()
        path = f"{LISTS}/{sha256}.tombstones"
        if put is not None:
            put(path, data)
        return {"$ref": path, "sha256": sha256, "content": sha256, "bytes": len(data),
                "columns": list(map(len, packed))}


def gone_documents(packed: Mapping[str, Any], fetch: Callable[[Mapping[str, Any]], str]) -> GoneDocuments:
    """Read tombstones (the entries of takedowns) from the file that `Tombstones.packed` wrote. `packed` is the
    reference that it returned, or empty if there are no tombstones. `fetch` returns the path of a checked local copy of
    a file of the store (`TaskInputs.fetch`)."""
    if not packed:
        return GoneDocuments()
    with open(fetch(packed), "rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    ends = list(accumulate(packed["columns"]))
    columns = [data[end - size:end] for end, size in zip(ends, packed["columns"], strict=True)]
    return GoneDocuments(*map(PackedNames, columns[::2], columns[1::2]))


@dataclass(frozen=True)
class Takedown:
    """What a takedown was asked to remove, and what it found before it removed anything.

    `ids`, `urls` (hashes) and `domains` are what the user asked to remove. `documents` are the ids of all documents
    that were found, and `texts` the hashes of their texts. `twins` are the ids of found documents that are only
    near-duplicates of documents that the user named. `holds` says which files of the store held the documents, and
    `seen` which runs and checkpoints have read them.
    """

    number: int
    reason: str
    at: str
    ids: tuple[str, ...]
    urls: tuple[str, ...]
    domains: tuple[str, ...]
    documents: tuple[str, ...]
    twins: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    holds: dict[str, Any] = field(default_factory=dict)
    seen: tuple[dict[str, Any], ...] = ()

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.number:08d}.json"

    @property
    def done_path(self) -> str:
        return f"{FOLDER}/{self.number:08d}.done.json"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Takedown:
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                                  for name, value in document.items()}
        return cls(**fields)

    def tombstones(self) -> Tombstones:
        return Tombstones(frozenset(self.ids) | frozenset(self.documents), frozenset(self.urls),
                          frozenset(self.domains), frozenset(self.texts))


def sealed_json(document: Mapping[str, Any]) -> bytes:
    body = json.dumps({"format": FORMAT, **document}, sort_keys=True, indent=1).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def opened_json(store: Store, path: str) -> dict[str, Any]:
    """Read a JSON file of a takedown. Raises DamagedTakedown when its bytes are not those that were written, or when
    another version of Tokenmill wrote it."""
    head, _, body = store.read(path).partition(b"\n")
    if head != hashlib.sha256(body).hexdigest().encode():
        raise DamagedTakedown(f"{store.at(path)} is damaged; restore it from a copy, because runs must know which "
                              f"documents are gone")
    document: dict[str, Any] = json.loads(body)
    if document.pop("format", None) != FORMAT:
        raise DamagedTakedown(f"{store.at(path)} was written by another version of Tokenmill; use that version")
    return document


def takedowns(store: Store) -> list[Takedown]:
    """Return all takedowns of a store, the earliest first."""
    paths = sorted(path for path in store.list(FOLDER) if _FILE.fullmatch(path))
    return [Takedown.from_json(opened_json(store, path)) for path in paths]


def unfinished(store: Store) -> list[Takedown]:
    """Return the takedowns of a store that were interrupted, the earliest first."""
    return [takedown for takedown in takedowns(store) if not store.exists(takedown.done_path)]


def finished_tombstones(store: Store) -> Tombstones:
    """Return the tombstones (the entries of takedowns) of a store. Raises UnfinishedTakedown if a takedown has not
    finished. The caller must hold the lease of the store's log (the right to write to it). Otherwise a takedown that
    another process is carrying out at the moment would count as interrupted."""
    result = Tombstones()
    for takedown in takedowns(store):
        if not store.exists(takedown.done_path):
            raise UnfinishedTakedown(f"{store.at(takedown.path)}: this takedown was interrupted, so the store may "
                                     f"still hold its documents; complete it with `tokenmill takedown --complete "
                                     f"--store {store.root}`")
        result |= takedown.tombstones()
    return result
