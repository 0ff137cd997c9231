"""Turns files with tokens of another project into a shard set, document by document and with the tokens unchanged.

The tokens are copied, never linked: a shard set does not change, but a file of another project may be written again in
place. The text of the documents is unknown, so their sizes in bytes are 0. The id of a document is the one that the
files give it, or is made from the name of its file and its number in it. In the document table, `part` is the number of
the file in the manifest's `source`, and `row` is the number of the document in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenizer.export.target import OpenTarget, Target, contents_of, opened
from tokenizer.imports.assemble import Assembly
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.ds import DsReader
from tokenizer.imports.format import ImportFormat
from tokenizer.imports.ids import IdHashes, places_in
from tokenizer.imports.litdata import LitDataReader
from tokenizer.imports.mds import MdsReader
from tokenizer.imports.megatron import MegatronReader
from tokenizer.imports.nanogpt import NanoGptReader
from tokenizer.imports.olmo import OlmoReader
from tokenizer.imports.parquet import ParquetReader
from tokenizer.imports.rows import RowPieces, blocks_of
from tokenizer.imports.source import LIMITS, Coding, ImportLimits, ImportSource, StoredFiles, TokenFileError
from tokenizer.shards.layout import MANIFEST, SHARD_BYTES, Manifest
from tokenizer.shards.packed import MANIFEST as PACKED
from tokenizer.shards.packed import Packing

#: largest number of characters in a document's id. Many ids are in memory while the table of a shard is written
LONGEST_ID = 1 << 12
FORMATS: Mapping[str, ImportFormat] = {
    "ds": DsReader(), "megatron": MegatronReader(), "olmo": OlmoReader(), "nanogpt": NanoGptReader(),
    "parquet": ParquetReader(), "mds": MdsReader(), "litdata": LitDataReader()}


class Imported(NamedTuple):
    """Counts of what an import has written. All but `held_out` count only the documents for training."""

    path: Path                    # folder of the shard set
    sha256: str
    shards: int
    documents: int
    tokens: int
    held_out: int                 # documents of the set split=val
    rows: int = 0                 # rows of the files, if these have rows instead of documents


def import_tokens(path: Path, format: str, coding: Coding, out: Path, name: str, make_id: Callable[[str, int], str],
                  progress: Callable[[int, int], None] = lambda done, total: None, shard_bytes: int = SHARD_BYTES,
                  is_held_out: Callable[[str], bool] | None = None, sequence: int = 0, limits: ImportLimits = LIMITS,
                  stored: StoredFiles | None = None, place: OpenTarget | None = None) -> Imported:
    """Write the documents in a file or folder `path` as the shard set split=train of the stream `name`, in the new
    folder `out`. Returns counts of what was written.

    With `stored`, the files are read from object storage, and `path` is used only in messages. With `place`, the set is
    written to the place that this function opens, for instance in object storage, and `out` is used only for the path
    in the result. `place` gets a hash: if it is equal, so are the files that are written, provided that `make_id` and
    `is_held_out` are the same.

    If the files have no ids, `make_id` makes the id of a document from the name of its file and its number in the file.
    Documents for whose ids `is_held_out` returns True go to the set split=val instead. `progress` gets the number of
    bytes read so far and of all bytes to read.

    With `sequence` = L, the files have rows (training samples) of L + 1 tokens instead of documents. The rows become
    packed rows of the set, and none is held out.

    Raises TokenFileError when a file does not fit the format, when two documents have the same id, or when there are no
    documents for training. Raises ExportError when `out` exists and is not an empty folder. After an error, nothing is
    left in `out`."""
    done = total = 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    reader, source = FORMATS[format], ImportSource(path, coding, read, sequence=sequence, limits=limits, stored=stored)
    if sequence:
        check_keeps_rows(format, path)
    parts: dict[str, int] = {}                    # file → its number
    names = reader.files(source)
    total = source.size(names)
    contents = contents_of(format, *coding, name, shard_bytes, sequence, states_of(source, reader, names))
    with opened(place or out, contents, f"--name {name}") as target:
        assemblies = {}
        for split in ("train", "val") if is_held_out else ("train",):
            (target.work / f"split={split}").mkdir()
            assemblies[split] = Assembly(target.work / f"split={split}", coding.vocab_size, coding.eos, shard_bytes,
                                         packs=bool(sequence), move=partial(moved, target, f"split={split}"))
        hashes, of_rows = IdHashes(target.work / "ids"), RowCounts(sequence)
        for documents, rows in blocks_of(source, reader, names):
            ids, part = ids_of(source, documents, make_id), parts.setdefault(documents.file, len(parts))
            hashes.add(ids)
            if rows is not None:
                assemblies["train"].add_rows(rows, ids, part)
                of_rows.add(part, rows)
                continue
            held_out = np.array([is_held_out(id) for id in ids] if is_held_out else [False] * len(ids), bool)
            for split, assembly in assemblies.items():
                assembly.add(documents, ids, part, held_out == (split == "val"))
        if not assemblies["train"].tokens:
            raise TokenFileError(f"{path}: has no documents{' for training' if parts else ''}, so there is nothing to "
                                 f"import")
        manifests = {split: Manifest.of(name, split, coding.sha256, coding.vocab_size, coding.eos, assembly.close(),
                                        source={"format": format, "files": list(parts), **of_rows.facts()})
                     for split, assembly in assemblies.items()}
        tables = (f"split={split}/{shard.table}" for split, manifest in manifests.items() for shard in manifest.shards)
        hashes.check(places_in(map(target.open, tables), [str(source.folder / file) for file in parts]))
        write_manifests(target, manifests, Packing(manifests["train"].sha256, sequence, tuple(
            assemblies["train"].packed)) if sequence else None)
    train = manifests["train"]
    return Imported(out / "split=train", train.sha256, len(train.shards), train.documents, train.tokens,
                    manifests["val"].documents if "val" in manifests else 0, sum(of_rows.counts))


def states_of(source: ImportSource, reader: ImportFormat, names: list[str]) -> list[tuple[str, str]]:
    """Return the files that an import reads, as (name, state). The state is a value that changes when the file is
    written again."""
    return [(file, source.state(file)) for name in names for file in (name, *reader.beside(source, name))]


def moved(target: Target, folder: str, local: Path, name: str) -> None:
    target.move(local, f"{folder}/{name}")


def write_manifests(target: Target, manifests: Mapping[str, Manifest], packing: Packing | None) -> None:
    """Write the manifests of shard sets whose other files are complete. The manifest of the set split=train is written
    last, because other programs take its existence for the end of the import."""
    texts = [] if packing is None else [(f"split=train/{file}", packing.dumps()) for file in (packing.name, PACKED)]
    for split, manifest in reversed([*manifests.items()]):
        texts += [(f"split={split}/{file}", manifest.dumps())
                  for file in (f"shards-{manifest.sha256[:16]}.json", MANIFEST)]
    for path, text in texts:
        with target.create(path) as file:
            file.write(text.encode())


class RowCounts:
    """Collects what the manifest (shards.json) of an import of rows (training samples) records about them, under
    `source`. With this, an export can write the same files again."""

    def __init__(self, sequence: int) -> None:
        self.sequence, self.masked, self.with_ids = sequence, False, False
        self.counts: list[int] = []               # rows of each file

    def add(self, part: int, rows: RowPieces) -> None:
        """Count rows (training samples) of file number `part`, and note whether they have ids and loss masks (which say
        which tokens count in the loss)."""
        self.counts += [0] * (part + 1 - len(self.counts))
        self.counts[part] += len(rows.counts)
        self.masked, self.with_ids = self.masked or rows.masked, rows.documents.ids is not None

    def facts(self) -> dict[str, Any]:
        return {"rows": {"sequence": self.sequence, "files": self.counts, "masked": self.masked,
                         "ids": self.with_ids}} if self.sequence else {}


def check_keeps_rows(name: str, path: Path) -> None:
    """Raise TokenFileError if files of the format `name` do not hold whole rows, that is, training samples of L + 1
    tokens."""
    if not FORMATS[name].keeps_rows:
        keeping = ", ".join(other for other in FORMATS if FORMATS[other].keeps_rows)
        raise TokenFileError(f"{path}: --format {name} has the first L tokens of a row of L + 1, so the last target of "
                             f"each row is lost, and --sequence cannot give it back; export the rows as {keeping}")


def ids_of(source: ImportSource, documents: ImportedDocuments, make_id: Callable[[str, int], str]) -> list[str]:
    """Return the ids of documents: those in their file or, if the file has none, ids that `make_id` makes. Raises
    TokenFileError if an id is too long."""
    file, first = documents.file, documents.first
    ids = documents.ids or [make_id(file, number) for number in range(first, first + len(documents.lengths))]
    if max(map(len, ids)) > LONGEST_ID:
        raise TokenFileError(f"{source.folder / file}: an id of a document from number {first:,} on has more than "
                             f"{LONGEST_ID:,} characters: no ids, or damaged; remove the column")
    return ids
