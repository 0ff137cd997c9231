"""Defines the shard format, version 1: the files of a shard set and their names. `tokenizer.shards.writer` writes the
files.

A shard is a file of tokens, with some smaller files about it. A shard set is an immutable list of shards. It holds one
split (train or val) of one stream (the tokens of one source, language or bucket)::

    00000.3f2a91c04d7e.tokens    body: raw little-endian u8, u16 or u32 (by vocabulary size), documents back to back,
                                 each ended by EOS; no header, so that nanotron, OLMo and Megatron read the same
                                 bytes through hard links
    00000.9be1d3307a52.ends      u64 little-endian: exclusive end of each document in this shard, in tokens
    00000.c06e44f81b9d.parquet   document table: end u64, id, part u32, row u32, n_bytes u32
    00000.7c41d20b9e55.crc32     u32 little-endian: one checksum per block (`tokenizer.shards.sums`) of body, ends and
                                 loss, in this order
    00000.51d0aa7e02c4.loss      u8 per token, 0 where the token is not a target; written only if there is such a token
    shards-<sha256[:16]>.json    manifest of one set: magic, version, dtype, tokenizer, vocabulary, EOS, counts, sha256s
    shards.json                  the manifest of the set published last

Names contain the first 12 hex characters of the file's own sha256, so that publishing new data never changes the files
of an older set. The columns `part` and `row` say from where a document was encoded. `part` is an index into the
manifest's list `parts`, which has the keys of the parts (pieces) of the dataset in plan order, and `row` is the row in
that part. Both depend on the partition size of the run, so the `sha256` that identifies a set does not cover them. It
does not cover the block checksums either, because they follow from bytes that it covers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.base.errors import TokenmillError

MAGIC = "tokenmill-shards"
VERSION = 1
MANIFEST = "shards.json"
#: largest number of characters in the name of a stream, which is also the name of a folder
STREAM_CHARS = 200
#: bytes of a full shard's body: 2**29 two-byte tokens are 1 GiB (docs/contracts.md: Shards and order)
SHARD_BYTES = 1 << 30

TABLE = pa.schema([("end", pa.uint64()), ("id", pa.string()), ("part", pa.uint32()), ("row", pa.uint32()),
                   ("n_bytes", pa.uint32())])
SUFFIXES = {"body": "tokens", "ends": "ends", "table": "parquet", "blocks": "crc32", "loss": "loss"}
#: rows per row group of the document table; a lookup reads one row group
TABLE_ROWS = 1 << 16
ENDS = np.dtype("<u8")
#: in the column `row` of a document table: the document was taken down, so no part has it any more
GONE_ROW = (1 << 32) - 1
#: remedy for a file that is damaged or missing, for error messages
REMEDY = "run `tokenmill store verify --repair` on its store, then the recipe again"


class ShardError(TokenmillError, ValueError):
    """Raised if a shard set is damaged or has another sha256 than expected; the message names the file and the
    remedy."""

    permanent = True


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of tokens in shards: the smallest of u8, u16 and u32 that holds all ids of a vocabulary of
    `vocab_size` tokens. All shards with this vocabulary have the same dtype."""
    if not 0 < vocab_size <= 1 << 32:
        raise ShardError(f"a vocabulary of {vocab_size} does not fit into u32 tokens")
    return np.dtype("u1") if vocab_size <= 1 << 8 else np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def file_name(index: int, kind: str, sha256: str) -> str:
    """Return the name of one of a shard's files. `index` is the number of the shard in its set, `sha256` is that of the
    file, and `kind` is body (tokens), ends, table (of documents), blocks (checksums) or loss (mask)."""
    return f"{index:05d}.{sha256[:12]}.{SUFFIXES[kind]}"


@dataclass(frozen=True)
class Shard:
    """One shard of a set: its size and the names and sha256 of its files. The names are relative to the manifest's
    folder."""

    index: int  # its documents start in tokens [index·G, (index+1)·G) of the stream; G: SHARD_BYTES in tokens
    tokens: int
    documents: int
    text_bytes: int               # UTF-8 bytes of the documents' text
    body: str
    ends: str
    table: str
    sha256: str                   # of the body file
    ends_sha256: str
    ids_sha256: str               # over "id n_bytes\\n" of every document
    table_sha256: str             # of the Parquet file; depends on the partition size
    blocks: str                   # name of the file with the block sums of body, ends and loss
    blocks_sha256: str
    loss: str = ""                # name of the file that says which tokens are targets; "": all tokens are
    loss_sha256: str = ""

    def sums(self) -> dict[str, str]:
        """Return the sha256 of each of the shard's files, as {kind: sha256}. Kinds are body (tokens), ends, table (of
        documents), blocks (checksums) and, if the shard has a loss mask, loss."""
        sums = {"body": self.sha256, "ends": self.ends_sha256, "table": self.table_sha256, "blocks": self.blocks_sha256}
        return sums | {"loss": self.loss_sha256} if self.loss or self.loss_sha256 else sums


@dataclass(frozen=True)
class Manifest:
    """The contents of `shards.json`, which describes a shard set: its shards and how to read them."""

    stream: str
    split: str                    # train | val
    dtype: str                    # uint8 | uint16 | uint32
    tokenizer: str                # sha256 of the tokenizer's file
    vocab_size: int
    eos: int
    tokens: int
    documents: int
    text_bytes: int
    shards: tuple[Shard, ...]
    parts: tuple[str, ...] = ()   # content keys of the parts that the table's column `part` refers to by index
    sha256: str = ""
    magic: str = MAGIC
    version: int = VERSION
    source: dict[str, Any] = field(default_factory=dict)      # for human readers: what the documents are from

    @property
    def imported(self) -> bool:
        """Whether `tokenmill shards import` wrote the set. Such a set cannot be made again by running the recipe if it
        is lost."""
        return "format" in self.source

    @property
    def has_rows(self) -> bool:
        """Whether the set was imported from rows (training samples of one length). Its packed rows are these rows, and
        each of its documents is a piece of a document in one row."""
        return "rows" in self.source

    @property
    def has_texts(self) -> bool:
        """Whether the documents come from datasets, so that their texts are in the store. The documents of imported
        token files have no texts."""
        return not self.imported and "tokens" not in self.source

    @classmethod
    def of(cls, stream: str, split: str, tokenizer: str, vocab_size: int, eos: int, shards: tuple[Shard, ...],
           parts: tuple[str, ...] = (), source: Mapping[str, Any] | None = None) -> Manifest:
        """Return the manifest of a set of shards. The counts are added up over the shards, and the sha256 is
        computed."""
        manifest = cls(stream, split, token_dtype(vocab_size).name, tokenizer, vocab_size, eos,
                       sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards),
                       sum(shard.text_bytes for shard in shards), shards, parts, source=dict(source or {}))
        return replace(manifest, sha256=manifest.identity())

    def identity(self) -> str:
        """Return the sha256 that identifies the shard set. It covers what defines the documents: tokens, boundaries,
        ids, text sizes and loss masks. It also covers the names of stream and split, and what is needed to read the
        tokens, such as dtype, tokenizer and EOS."""
        doc = {"magic": self.magic, "version": self.version, "stream": self.stream, "split": self.split,
               "dtype": self.dtype, "tokenizer": self.tokenizer, "vocab_size": self.vocab_size, "eos": self.eos,
               "shards": [[s.index, s.tokens, s.documents, s.sha256, s.ends_sha256, s.ids_sha256,
                           *([s.loss_sha256] if s.loss_sha256 else [])] for s in self.shards]}
        return hashlib.sha256(json.dumps(doc, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def dumps(self) -> str:
        doc = asdict(self)
        for shard in doc["shards"]:  # without masks these keys are left out, so that such a manifest keeps its bytes
            if not shard["loss"]:
                del shard["loss"], shard["loss_sha256"]
        return json.dumps(doc, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def loads(cls, data: bytes | str, where: str) -> Manifest:
        """Parse the contents of a `shards.json`, and check it like `from_json`."""
        try:
            doc = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ShardError(f"{where}: not JSON ({e}): {REMEDY}") from e
        return cls.from_json(doc, where)

    @classmethod
    def from_json(cls, doc: Mapping[str, Any], where: str) -> Manifest:
        """Build the manifest of a shard set from parsed JSON, and check it. `where` is the file that error messages
        name. Raises a ShardError that says what is wrong."""
        if not isinstance(doc, Mapping) or doc.get("magic") != MAGIC:
            raise ShardError(f"{where}: not a shard set of Tokenmill (magic {MAGIC!r} is missing)")
        if doc.get("version") != VERSION:
            raise ShardError(f"{where}: version {doc.get('version')!r}; this Tokenmill reads {VERSION}")
        try:
            _check_fields(cls, doc, where)
            for number, shard in enumerate(doc["shards"]):
                _check_fields(Shard, shard, where, f"shards[{number}].")
            shards = tuple(Shard(**shard) for shard in doc["shards"])
            manifest = cls(**{**doc, "shards": shards, "parts": tuple(doc["parts"])})
        except (TypeError, KeyError) as e:
            raise ShardError(f"{where}: damaged ({e}): {REMEDY}") from e
        if not 0 < manifest.vocab_size <= 1 << 32 or manifest.eos >= manifest.vocab_size:
            raise ShardError(f"{where}: eos {manifest.eos} is no token of a vocabulary of {manifest.vocab_size}: "
                             f"{REMEDY}")
        if manifest.identity() != manifest.sha256:
            raise ShardError(f"{where}: its sha256 does not follow from its contents: edited by hand? {REMEDY}")
        # an older Tokenmill wrote tokens of u16 for vocabularies of at most 256 tokens
        if manifest.dtype not in (token_dtype(manifest.vocab_size).name,
                                  *(["uint16"] if manifest.vocab_size <= 1 << 8 else [])):
            raise ShardError(f"{where}: dtype {manifest.dtype} does not fit a vocabulary of {manifest.vocab_size}")
        for count in ("tokens", "documents", "text_bytes"):
            if getattr(manifest, count) != sum(getattr(info, count) for info in manifest.shards):
                raise ShardError(f"{where}: shards do not add up to {getattr(manifest, count)} {count}")
        for info in manifest.shards:  # names must follow from sums, so that a manifest cannot name another file (../x)
            for kind, sha in info.sums().items():
                if getattr(info, kind) != file_name(info.index, kind, sha):
                    raise ShardError(f"{where}: {getattr(info, kind)!r} is no name of shard {info.index}'s {kind}: "
                                     f"{REMEDY}")
        return manifest


def is_count(value: object) -> bool:
    """Return whether a value from a JSON file is a whole number from 0 to the largest int64."""
    return type(value) is int and 0 <= value < 1 << 63


def _all(entries: object, kind: type) -> bool:
    return isinstance(entries, list) and all(isinstance(entry, kind) for entry in entries)


#: type of a field of a manifest → whether a value from a JSON file fits
_FITS: dict[object, Callable[[Any], bool]] = {
    "int": is_count, "str": lambda value: isinstance(value, str),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "dict[str, str]": lambda value: isinstance(value, dict) and _all(list(value.values()), str),
    "tuple[str, ...]": lambda value: _all(value, str), "tuple[Shard, ...]": lambda value: _all(value, dict),
    "tuple[RowFile, ...]": lambda value: _all(value, dict)}


def wrong_type(kind: type[Any], doc: Mapping[str, Any], key: str = "") -> str:
    """Return a message "KEY is VALUE" about the first value of the JSON object `doc` whose type does not fit the field
    of the dataclass `kind`; "" if there is none. `key` is put before the name of the field.

    A right sha256 does not make this check needless, because the author of a hostile manifest can compute its sha256,
    too."""
    return next((f"{key}{spec.name} is {str(doc[spec.name])[:80]!r}" for spec in fields(kind)
                 if spec.name in doc and not _FITS[spec.type](doc[spec.name])), "")


def _check_fields(kind: type[Manifest | Shard], doc: Mapping[str, Any], where: str, key: str = "") -> None:
    """Raise ShardError when the mapping `doc` does not have exactly the fields of the dataclass `kind`, or when a value
    has another type. `doc` is a manifest, or the entry of a shard in it. In the message, `where` names the file, and
    `key` is put before the name of a field."""
    required = {spec.name: spec.default is MISSING and spec.default_factory is MISSING for spec in fields(kind)}
    differences = [f"lacks {name!r}" for name, needed in required.items() if needed and name not in doc]
    differences += [f"has {name!r}" for name in doc if name not in required]
    if differences:
        owner = " of a shard" if kind is Shard else ""
        raise ShardError(f"{where}: written by another version of Tokenmill ({', '.join(differences)}{owner}); run the "
                         f"recipe again")
    if wrong := wrong_type(kind, doc, key):
        raise ShardError(f"{where}: damaged ({wrong}): {REMEDY}")
