"""Takes token files of another project into a stream, for the sources of a recipe with `read: tokens`.

`ImportTokens` stands where the `EncodePart` tasks of other streams do: its files have the same names and contents, so
that shards are assembled, packed, published and counted in the same way.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeline.base.parquet import open_parquet
from pipeline.base.prf import below
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.part_tokens import TokensWriter
from pipeline.passes.tables import QUARANTINE_SCHEMA, RowWriter
from pipeline.store.dataset import QUARANTINE
from pipeline.store.lists import unfold
from pipeline.store.records import Counters
from pipeline.store.tombstones import TAKEN_DOWN
from stages.barrier import TaskDraft
from stages.document import document_id
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.ids import IdHashes
from tokenizer.imports.imports import FORMATS, ids_of
from tokenizer.imports.source import Coding, ImportSource, TokenFileError

IMPORT = "pipeline.passes.import_tokens:ImportTokens"
SPLITS = ("train", "val")
#: file of an imported source that lists [file, number of its first document in the source]
FILES = "files.json"
#: documents of a source are numbered in 32 bits
MOST = 1 << 32


class ImportTokens:
    """Copies the documents of a source of token files. args: source (its name), format (key of `FORMATS`), files
    ([$file]), tokenizer {sha256, vocab_size, eos}, val {share, seed}, $volatile {tombstones: which documents to leave
    out}.

    Writes the files of EncodePart; a row is the number of a document in the source. The size of texts is unknown and
    counts as 0. Writes files.json, too. One task reads all files of a source, because documents of some formats
    continue in the next file. A file that is not as the format wants it is an error that ends the run: no part of it
    can be trusted. Memory: the tokens of a block, or of one document if that is longer.
    """

    name = "import_tokens"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        folder = Path(inputs.scratch) / "source"
        _link(inputs, folder)
        try:
            tombstones = unfold(inputs.args.get("$volatile", {}).get("tombstones", {}), inputs.store.read)
            return _Import(inputs.args, folder, out, tombstones.get("ids", ())).run()
        except TokenFileError as e:                       # name the user's files instead of the links to them
            raise TokenFileError(str(e).replace(str(folder), inputs.args["files"][0]["root"])) from None


def _link(inputs: TaskInputs, folder: Path) -> None:
    """Make a folder of links to the files of the source, under the paths that they have below the source's root."""
    for arg in inputs.args["files"]:
        link = folder / arg["$file"]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(inputs.fetch(arg)).absolute())


class _Import:
    """One execution of the task ImportTokens. `folder` has the files of the source. Documents whose id is in `gone` are
    left out."""

    def __init__(self, args: Mapping[str, Any], folder: Path, out: TaskOutputs, gone: Iterable[str]) -> None:
        self.args, self.out = args, out
        self.source = ImportSource(folder, Coding(**args["tokenizer"]))
        self.writers = {split: TokensWriter(out, split) for split in SPLITS}
        self.gone, self.left_out = frozenset(gone), 0
        self.hashes = IdHashes(folder.with_name("ids"))
        self.starts: dict[str, int] = {}                  # file → number of its first document in the source
        self.counts = {split: {"docs": 0, "tokens": 0, "targets": 0, "bytes": 0} for split in SPLITS}

    def run(self) -> Counters:
        reader, row = FORMATS[self.args["format"]], 0
        for documents in reader.documents(self.source, reader.files(self.source)):
            self.starts.setdefault(documents.file, row)
            self._add(documents, row)
            row += len(documents.lengths)
        if not row:
            raise TokenFileError(f"{self.source.path}: has no documents; take the source out, or give it files")
        for writer in self.writers.values():
            writer.close()
        self.hashes.check(self._places())
        with open(self.out.path(FILES), "w", encoding="utf-8") as f:
            json.dump(list(self.starts.items()), f)
        RowWriter(self.out.path(QUARANTINE), QUARANTINE_SCHEMA).close()         # nothing is quarantined
        total = {key: sum(counts[key] for counts in self.counts.values()) for key in self.counts["train"]}
        return {**self.counts, "skipped": 0, "near_held_out": 0, "sources": {self.args["source"]: total},
                "quarantined": {TAKEN_DOWN: self.left_out} if self.left_out else {}}

    def _add(self, documents: ImportedDocuments, row: int) -> None:
        """Write documents of which the first has the number `row` in the source."""
        name, val, lengths = self.args["source"], self.args["val"], documents.lengths
        if row + len(lengths) > MOST:
            raise TokenFileError(f"{self.source.folder / documents.file}: the source has more than {MOST:,} documents; "
                                 f"make several sources of it")
        ids = ids_of(self.source, documents, lambda file, number: document_id(name, file, "", number))
        self.hashes.add(ids)
        ends = np.cumsum(lengths)
        tokens = np.split(documents.tokens, ends[:-1])
        targets = None if documents.targets is None else np.split(documents.targets, ends[:-1])
        held_out = np.array([below(val["seed"], "val", id, val["share"]) for id in ids], bool)
        gone = np.array([id in self.gone for id in ids], bool)
        self.left_out += int(gone.sum())
        for split in SPLITS:
            chosen = np.flatnonzero((held_out == (split == "val")) & ~gone).tolist()
            if not chosen:
                continue
            counts = None if targets is None else np.concatenate([targets[i] for i in chosen])
            self.writers[split].add([tokens[i] for i in chosen], [ids[i] for i in chosen],
                                    np.array(chosen, np.int64) + row, [0] * len(chosen), counts)
            of_split, size = self.counts[split], int(lengths[chosen].sum())
            of_split["docs"] += len(chosen)
            of_split["tokens"] += size
            of_split["targets"] += size if counts is None else int(counts.sum())

    def _places(self) -> Iterator[tuple[str, str]]:
        """Yield the id and the place of each document, as `IdHashes.check` takes them."""
        files, starts = list(self.starts), list(self.starts.values())
        for split in SPLITS:
            with open_parquet(self.out.path(f"{split}.parquet")) as table:
                for batch in table.iter_batches(columns=["id", "row"], use_threads=False):
                    for id, row in zip(batch.column("id").to_pylist(), batch.column("row").to_pylist()):
                        file = bisect_right(starts, row) - 1
                        yield id, f"{self.source.folder / files[file]}, document {row - starts[file]:,}"


def import_draft(source: str, format: str, files: Sequence[Mapping[str, Any]], size: int, tokenizer: Mapping[str, Any],
                 share: float, tombstones: Mapping[str, Any] = MappingProxyType({})) -> TaskDraft:
    """Return the ImportTokens task of a source. `files` are its files as arguments ($file), of `size` bytes together,
    `tokenizer` is the result of `fit_tokenizer.tokenizer_info`, and `share` the share of documents held out.
    `tombstones` says which documents to leave out (`Planner.tombstones`)."""
    args = {"source": source, "format": format, "files": list(files), "val": {"share": share, "seed": 0},
            "tokenizer": {key: tokenizer[key] for key in Coding._fields}}
    if tombstones:
        args["$volatile"] = dict(tombstones)
    return TaskDraft(IMPORT, args, size, f"{source}: tokens of {len(files):,} files", memory_mb=1500)
