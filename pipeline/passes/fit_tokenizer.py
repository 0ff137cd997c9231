"""Makes the tokenizer of a recipe: trains it on a sample of a dataset, or takes it from a file. In both cases, the
tokenizer becomes one file of the store. The name of this file contains its sha256."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.files import file_sha256
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.encode import libraries
from pipeline.passes.rows import Selection, rows_of
from pipeline.passes.sample_text import picked_texts, rank_of, sample_waves
from pipeline.passes.strata import Cut, Strata
from pipeline.store.dataset import link_committed
from pipeline.store.fs import Store
from pipeline.store.records import Counters
from stages.barrier import Done, FileRef, PartRef, TaskDraft, TaskResult, Wave
from stages.dedup.fragment import SIZES, Sizes, files_of
from tokenizer.byte_level import byte_level_json
from tokenizer.errors import TokenizerError
from tokenizer.load import Tokenizer, file_contents, load_tokenizer
from tokenizer.tiktoken import pattern_of
from tokenizer.train import train_tokenizer

FIT = "pipeline.passes.fit_tokenizer:FitTokenizer"
LOAD = "pipeline.passes.fit_tokenizer:LoadTokenizer"
BYTES = "pipeline.passes.fit_tokenizer:ByteTokenizer"
NO_DOCUMENT = ("tokenizer.train.from: there is no document to train on; see that the sources hold text, and what the "
               "steps left out (tokenmill inspect DATASET --dropped)")


class FitTokenizer:
    """Trains a tokenizer on a sample of texts, and writes tokenizer.json or tokenizer.model. The args are the settings
    of `tokenizer.train.train_tokenizer` and those of the sample. If this task draws the sample, these are

    * parts [$ref of kept.parquet, in plan order]
    * where: selects documents (`pipeline.passes.rows.Selection`)
    * sample (bytes of text) and seed
    * strata (settings of `pipeline.passes.strata.Strata`), if the sample is balanced

    If `pipeline.passes.sample_text` has drawn the sample, there is only `picked` [$ref of files of texts].

    The sample consists of the documents with the lowest PRF(seed, id), a pseudo-random number. It ends before the first
    document that would make it larger than `sample` bytes, but has at least one document. In a balanced sample, this
    rule holds for the share of each stratum. The sample does not depend on how the dataset is cut into parts.

    The documents are read in plan order, and one thread trains. The parts are read twice: first ids and sizes, then
    texts, which are streamed. Memory: a heap of the sampled ids, and what the training library needs.
    """

    name = "fit_tokenizer"
    version = 3

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        counters = {"documents": 0, "bytes": 0}

        def counted(texts: Iterator[str]) -> Iterator[str]:
            for text in texts:
                counters["documents"] += 1
                counters["bytes"] += len(text.encode())
                yield text

        texts = _picked(inputs) if "picked" in args else _drawn(inputs)
        path = out.path("tokenizer.json" if args["kind"] == "bpe" else "tokenizer.model")
        train_tokenizer(counted(texts), args, path)
        return {**counters, **_facts(load_tokenizer(path))}


def _picked(inputs: TaskInputs) -> Iterator[str]:
    """Yields the texts of the tokenizer's sample from the files in which `sample_text.PickTexts` tasks have written
    them."""
    if not any(ref["rows"] for ref in inputs.args["picked"]):
        raise TokenizerError(NO_DOCUMENT)
    return (text for ref in inputs.args["picked"] if ref["rows"] for _, text in picked_texts(inputs.fetch(ref)))


def _drawn(inputs: TaskInputs) -> Iterator[str]:
    """Draws the tokenizer's sample from all parts (files of documents) of the dataset, and yields the texts."""
    args, where = inputs.args, Selection(inputs.args.get("where"))
    paths = [inputs.fetch(ref) for ref in args["parts"]]
    chosen = _sample(paths, where, int(args["sample"]), int(args["seed"]), Strata(args.get("strata")))
    if not chosen:
        raise TokenizerError(NO_DOCUMENT)
    return (text for path in paths for rows in rows_of(path, where, ("text",))
            for id, text in zip(rows.ids, rows.column("text")) if id in chosen)


class ByteTokenizer:
    """Writes the tokenizer of `tokenizer: {kind: bytes}` to tokenizer.json; each of the 256 bytes is a token. No args.
    """

    name = "byte_tokenizer"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        path = Path(out.path("tokenizer.json"))
        path.write_text(byte_level_json(), encoding="utf-8")
        return _facts(load_tokenizer(path))


class LoadTokenizer:
    """Copies a tokenizer into the store, after checking that it can be loaded. A .tiktoken file becomes a
    tokenizer.json with the same ids. The args are

    * file: a tokenizer.json, SentencePiece .model or .tiktoken file: an input file ($file) or one of the store ($ref)
    * eos: the end-of-text token, or null
    * pattern: only for a .tiktoken file, how it splits text
    """

    name = "load_tokenizer"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        local = inputs.fetch(inputs.args["file"])
        eos, pattern = inputs.args.get("eos"), inputs.args.get("pattern")
        tokenizer = load_tokenizer(local, eos, pattern)
        Path(out.path(f"tokenizer.{tokenizer.kind}")).write_bytes(file_contents(Path(local), eos, pattern))
        return _facts(tokenizer)


def _facts(tokenizer: Tokenizer) -> Counters:
    return {"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos}


def _sample(paths: Sequence[str], where: Selection, size: int, seed: int,
            strata: Strata | None = None) -> dict[str, int]:
    """Draws a sample of about `size` bytes of text, and returns {id: bytes of text}. The documents are those in the
    Parquet files `paths` that `where` selects. They have a rank, PRF(seed, id), which is a pseudo-random number. In
    each stratum (the documents of one source or language), they are taken by rising rank, until the next one would
    exceed the stratum's share of bytes. At least one document is taken."""
    strata = strata or Strata(None)
    candidates: dict[int, _Candidates] = {}
    totals: dict[str, int] = {}
    for path in paths:
        for rows in rows_of(path, where, ("bytes", *strata.columns)):
            for id, n, key in zip(rows.ids, rows.column("bytes"), strata.keys(rows)):
                candidates.setdefault(key, _Candidates(size)).add(rank_of(seed, id), id, n)
                totals[str(key)] = totals.get(str(key), 0) + n
    entries = sorted((-rank, key, id, n) for key, stratum in candidates.items() for rank, id, n in stratum.heap)
    cut = Cut(strata.shares([strata.sizes(totals)], size))
    chosen = cut.add(np.array([e[0] for e in entries], np.uint64), np.array([e[3] for e in entries], np.uint64),
                     np.array([e[1] for e in entries], np.uint64))
    return {entries[i][2]: entries[i][3] for i in np.flatnonzero(chosen)}


class _Candidates:
    """The documents of a stratum (such as one source or language) that can be in a sample of `size` bytes. They are
    those with the lowest ranks (pseudo-random numbers) that fit into `size` bytes, and the next one, at which the
    sample ends."""

    def __init__(self, size: int) -> None:
        self.heap: list[tuple[int, str, int]] = []            # highest rank first
        self._size, self._total = size, 0

    def add(self, rank: int, id: str, n: int) -> None:
        heapq.heappush(self.heap, (-rank, id, n))
        self._total += n
        while self._total - self.heap[0][2] > self._size:
            self._total -= heapq.heappop(self.heap)[2]


# -- for planners ------------------------------------------------------------------------------------------------
def tokenizer_waves(train: Mapping[str, Any], parts: Sequence[PartRef], seed: int = 0,
                    sizes: Sizes = SIZES) -> list[Wave]:
    """Returns the waves (groups of tasks that can run at the same time) that make the tokenizer for `tokenizer: {train:
    …}` of a recipe. `train` holds kind, model, vocab, sample and where; `parts` are the files of the dataset. The last
    wave, `fit`, is one task. It draws the sample from the parts, or reads the texts that the earlier waves have
    picked."""
    def fit(done: Done) -> list[TaskDraft]:
        return [tokenizer_draft(train, parts, seed, files_of(done["pick"], "picked.parquet"))]

    where = dict(train.get("where") or {})
    size, strata = _size(train["sample"])
    return [*sample_waves(parts, where, size, seed, sizes, strata), Wave("fit", fit)]


def _size(sample: int | Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Returns the bytes of a tokenizer's sample, and the settings of its strata. `sample` is as in a recipe: a number
    of bytes, or a mapping with `bytes` and the settings."""
    if not isinstance(sample, Mapping):
        return int(sample), {}
    return int(sample["bytes"]), {key: value for key, value in sample.items() if key != "bytes"}


def tokenizer_draft(train: Mapping[str, Any], parts: Sequence[PartRef], seed: int = 0,
                    picked: Sequence[FileRef] = ()) -> TaskDraft:
    """Returns the task that trains the tokenizer by the settings `train` (`tokenizer: {train: …}` of a recipe). The
    task reads the sampled texts in the files `picked`. If there are none, it draws a sample from the parts (files of
    documents) itself, with the random `seed`."""
    (sample, strata), weight = _size(train["sample"]), sum(p.bytes for p in parts)
    args = {"kind": train["kind"], "model": train.get("model", "unigram"), "vocab": int(train["vocab"]),
            "libraries": libraries()} | {key: train[key] for key in ("digits", "space_runs", "special") if key in train}
    if picked:
        args["picked"] = list(picked)
        weight = sum(f["bytes"] for f in picked)
    else:
        args |= {"parts": [p.text for p in parts], "where": dict(train.get("where") or {}), "sample": sample,
                 "seed": seed, **({"strata": strata} if strata else {})}
    # SentencePiece holds its sentences in memory, BPE its distinct words; both grow with the sample
    return TaskDraft(FIT, args, weight, f"tokenizer: {train['kind']} {train['vocab']}",
                     memory_mb=1000 + min(sum(p.bytes for p in parts), sample) * 6 // 10**6)


def byte_draft() -> TaskDraft:
    """Returns the task for `tokenizer: {kind: bytes}` of a recipe."""
    return TaskDraft(BYTES, {}, 0, "tokenizer: bytes")


def load_draft(path: str, eos: str | None = None, copy_folder: str | None = None,
               pattern: str | None = None) -> TaskDraft:
    """Returns the task for `tokenizer: {load: path}` of a recipe. `path` is a file or a folder that the driver (the
    process that plans a run) can read. If the workers cannot read `path`, pass `copy_folder`, a folder of the store
    that holds a copy of the tokenizer; the task then reads this copy. `pattern` is how a .tiktoken file splits text; it
    is needed unless the name of the file tells it."""
    tokenizer = load_tokenizer(path, eos, pattern)
    splitting = {"pattern": pattern_of(tokenizer.path, pattern)} if tokenizer.path.endswith(".tiktoken") else {}
    folder, name = os.path.split(os.path.abspath(tokenizer.path))
    stat, sha256 = os.stat(tokenizer.path), file_sha256(tokenizer.path)
    file: dict[str, Any] = {"$file": name, "root": folder, "size": stat.st_size, "etag": sha256}
    if copy_folder is not None:
        file = {"$ref": f"{copy_folder}/{name}", "content": sha256, "bytes": stat.st_size, "sha256": sha256}
    # Qwen's 2.6 MB of ranks take 550 MB while they become a tokenizer.json
    memory_mb = 500 + (stat.st_size * 800 // 10**6 if splitting else 0)
    return TaskDraft(LOAD, {"file": file, "eos": tokenizer.eos_token, **splitting}, stat.st_size, f"tokenizer: {name}",
                     memory_mb)


def tokenizer_info(result: TaskResult, eos: str | None = None) -> dict[str, Any]:
    """Returns facts about the tokenizer that the task of `result` has made:

    * sha256, vocab_size, and eos (the id of the end-of-text token)
    * path: where it is published, relative to the store
    * ref, for task arguments
    * eos_token: the argument `eos`, which is the end-of-text token that the recipe names, or None
    """
    [(name, ref)] = [(n, r) for n, r in result.files.items() if n.startswith("tokenizer.")]
    return {"sha256": ref["content"], "vocab_size": result.counters["vocab_size"], "eos": result.counters["eos"],
            "path": f"shards/tokenizer-{ref['content'][:12]}.{name.partition('.')[2]}", "ref": ref, "eos_token": eos}


def publish_tokenizer(store: Store, info: Mapping[str, Any]) -> str:
    """Publish the tokenizer that `info` (`tokenizer_info`) describes: link its file into the folder of the shards.
    Returns its path in the store."""
    ref: FileRef = info["ref"]
    link_committed(store, ref["$ref"], info["path"])
    return info["path"]
