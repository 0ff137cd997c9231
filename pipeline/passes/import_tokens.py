"""Takes token files of another project into a stream, for the sources of a recipe with `read: tokens`.

In such a stream, `ImportTokens` tasks take the place of `EncodePart` tasks. They write files with the same names and
formats, so that shards are assembled, packed, published and counted in the same way.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
from pipeline.store.records import Counters
from pipeline.store.tombstones import TAKEN_DOWN, gone_documents
from stages.barrier import TaskDraft, TaskResult
from stages.document import document_id
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.ids import IdHashes
from tokenizer.imports.imports import FORMATS, ids_of
from tokenizer.imports.rows import blocks_of
from tokenizer.imports.source import Coding, ImportSource, TokenFileError

IMPORT = "pipeline.passes.import_tokens:ImportTokens"
CHECK = "pipeline.passes.import_tokens:CheckIds"
SPLITS = ("train", "val")
#: outputs of an import: a list of [file, number of its first document], and the sorted hashes of ids
FILES, IDS = "files.json", "ids"
#: documents are numbered in 32 bits
MOST = 1 << 32


class ImportTokens:
    """Copies the documents of token files. The args are

    * source: its name
    * format (key of `FORMATS`) and files ([$file])
    * tokenizer {sha256, vocab_size, eos}
    * val {share, seed}
    * sequence: tokens of a row, if the files hold rows of equal length instead of documents
    * $volatile {tombstones: which documents to leave out}

    Writes the files that EncodePart writes, and two more. `files.json` lists the token files, each with the number of
    its first document. `ids` holds hashes of the documents' ids, which `CheckIds` compares; it is empty if the token
    files give no ids. In SPLIT.parquet, `row` is the number of a document in the token files, and the size of its text,
    which is unknown, is 0.

    If a file does not have the given format, the run ends with an error, because no part of the file can be trusted.
    Memory: the tokens of a block, or of one document if that is longer.
    """

    name = "import_tokens"
    version = 2

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        return _Import(inputs, out).run()


class _Import:
    """One execution of the task ImportTokens. Documents with a tombstone are left out."""

    def __init__(self, inputs: TaskInputs, out: TaskOutputs) -> None:
        self.args, self.out = inputs.args, out
        self.files = {arg["$file"]: arg for arg in self.args["files"]}
        self.source = ImportSource(Path(self.args["files"][0]["root"]), Coding(**self.args["tokenizer"]),
                                   names=self.files, find=lambda name: inputs.fetch(self.files[name]),
                                   sequence=self.args.get("sequence", 0))
        self.writers = {split: TokensWriter(out, split) for split in SPLITS}
        self.hashes = IdHashes(Path(out.path(IDS)))
        self.gone = gone_documents(self.args.get("$volatile", {}).get("tombstones", {}), inputs.fetch)
        self.left_out = 0
        self.starts: dict[str, int] = {}                  # file → number of its first document
        self.masked: bool | None = None                   # whether the files have loss masks
        self.counts = {split: {"docs": 0, "tokens": 0, "targets": 0, "bytes": 0} for split in SPLITS}

    def run(self) -> Counters:
        reader, row = FORMATS[self.args["format"]], 0
        try:
            of_source = set(reader.files(self.source))
            names = [name for name in self.files if name in of_source]
            for documents, rows in blocks_of(self.source, reader, names):
                self.masked = documents.targets is not None if rows is None else rows.masked
                self.starts.setdefault(documents.file, row)
                self._add(documents, row)
                row += len(documents.lengths)
        except TokenFileError as e:
            root = self.args["files"][0]["root"]
            raise TokenFileError(str(e).replace(str(Path(root)), root)) from None           # s3:/ is s3://
        for writer in self.writers.values():
            writer.close()
        self.hashes.sort()
        with open(self.out.path(FILES), "w", encoding="utf-8") as f:
            json.dump(list(self.starts.items()), f)
        RowWriter(self.out.path(QUARANTINE), QUARANTINE_SCHEMA).close()         # nothing is quarantined
        total = {key: sum(counts[key] for counts in self.counts.values()) for key in self.counts["train"]}
        return {**self.counts, "skipped": 0, "near_held_out": 0, "sources": {self.args["source"]: total},
                "quarantined": {TAKEN_DOWN: self.left_out} if self.left_out else {}, "masked": self.masked}

    def _add(self, documents: ImportedDocuments, row: int) -> None:
        """Write some documents of a token file to the files of the splits train and val, without those that have a
        tombstone. `row` is the number of the first document; the others follow."""
        name, val, lengths = self.args["source"], self.args["val"], documents.lengths
        if row + len(lengths) > MOST:
            raise TokenFileError(f"{self.source.folder / documents.file}: has more than {MOST:,} documents; divide it")
        ids = ids_of(self.source, documents, lambda file, number: document_id(name, file, "", number))
        if documents.ids is not None:                     # ids that are made from places always differ
            self.hashes.add(ids)
        ends = np.cumsum(lengths)
        tokens = np.split(documents.tokens, ends[:-1])
        targets = None if documents.targets is None else np.split(documents.targets, ends[:-1])
        held_out = np.array([below(val["seed"], "val", id, val["share"]) for id in ids], bool)
        gone = np.array([self.gone.cover(id, None) for id in ids], bool) if self.gone else np.zeros(len(ids), bool)
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


class CheckIds:
    """Checks that no two documents of a source have the same id; if two have, the run ends with an error. args: root
    (of the source) and parts [{ids, files, train, val: $ref}]. The parts are the files ids, files.json and
    SPLIT.parquet of ImportTokens tasks. The task needs almost no memory, and 8 bytes of disk for each document."""

    name = "check_ids"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        hashes = IdHashes(Path(inputs.scratch) / "ids")
        for part in inputs.args["parts"]:
            hashes.add_file(Path(inputs.fetch(part["ids"])))
        count = hashes.count
        hashes.check(_places(inputs))
        return {"ids": count}


def _places(inputs: TaskInputs) -> Iterator[tuple[str, str]]:
    """Yield (id, place) for each document of the tasks' files. The place is a text for error messages, "ROOT/FILE,
    document N"."""
    for part in inputs.args["parts"]:
        files = json.loads(Path(inputs.fetch(part["files"])).read_text(encoding="utf-8"))
        starts = [start for _, start in files]
        for split in SPLITS:
            with open_parquet(inputs.fetch(part[split])) as table:
                for batch in table.iter_batches(columns=["id", "row"], use_threads=False):
                    for id, row in zip(batch.column("id").to_pylist(), batch.column("row").to_pylist()):
                        file, start = files[bisect_right(starts, row) - 1]
                        yield id, f"{inputs.args['root']}/{file}, document {row - start:,}"


def import_draft(source: str, config: Mapping[str, Any], files: Sequence[Mapping[str, Any]], size: int,
                 tokenizer: Mapping[str, Any], share: float, tombstones: Mapping[str, Any] = MappingProxyType({}),
                 memory_mb: int = 0) -> TaskDraft:
    """Return an ImportTokens task. `config` is the config of the source (`stages.read.tokens`). `files` are the files
    that it reads, as arguments ($file), and have `size` bytes together. `tokenizer` is the result of
    `fit_tokenizer.tokenizer_info`, and `share` is the share of documents held out. `tombstones` says which documents to
    leave out (`Planner.tombstones`); reading them takes `memory_mb` MB of memory."""
    args = {"source": source, "format": config["format"], "files": list(files), "val": {"share": share, "seed": 0},
            "tokenizer": {key: tokenizer[key] for key in Coding._fields}}
    if config["sequence"]:
        args["sequence"] = config["sequence"]
    if tombstones:
        args["$volatile"] = dict(tombstones)
    return TaskDraft(IMPORT, args, size, f"{source}: tokens of {files[0]['$file']}", memory_mb=1500 + memory_mb)


def check_draft(source: str, root: str, imported: Sequence[TaskResult]) -> TaskDraft:
    """Return the task that checks whether two documents of a source have the same id (`CheckIds`). `root` is the folder
    of the source's files, and `imported` are the results of its ImportTokens tasks."""
    parts = [{"ids": r.files[IDS], "files": r.files[FILES], **{split: r.files[f"{split}.parquet"] for split in SPLITS}}
             for r in imported]
    size = sum(part["ids"]["bytes"] for part in parts)
    return TaskDraft(CHECK, {"root": root, "parts": parts}, size, f"{source}: ids of documents")
