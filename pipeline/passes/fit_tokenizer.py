"""Makes the tokenizer of a recipe: trains it on a sample of a dataset, or takes it from a file. In both cases it
becomes one file of the store whose name contains its sha256."""

from __future__ import annotations

import heapq
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.engine.task import Cursor, Inputs, Out
from pipeline.passes.encode import libraries
from pipeline.passes.rows import Selection, rows_of
from pipeline.passes.sample_text import picked_texts, rank_of, sample_waves
from pipeline.store.dataset import link_committed
from pipeline.store.fs import Store
from pipeline.store.records import Counters
from stages.barrier import Done, FileRef, PartRef, TaskDraft, TaskResult, Wave
from stages.dedup.fragment import SIZES, Sizes, files_of
from tokenizer.load import Tokenizer, TokenizerError, load_tokenizer
from tokenizer.train import train_bpe, train_sentencepiece

FIT = "pipeline.passes.fit_tokenizer:FitTokenizer"
LOAD = "pipeline.passes.fit_tokenizer:LoadTokenizer"
NO_DOCUMENT = ("tokenizer.train.from: there is no document to train on; see that the sources hold text, and what the "
               "steps left out (tokenmill inspect DATASET --dropped)")


class FitTokenizer:
    """Trains a tokenizer on a sample of texts. The sample is given in one of two ways. Either this task draws the
    sample; the args are then `parts` [$ref of kept.parquet, in plan order], `where` (see
    `pipeline.passes.rows.Selection`), `sample` (bytes of text) and `seed`. Or `pipeline.passes.sample_text` has drawn
    it; the arg is then `picked` [$ref of files of texts]. Further args: `kind` (bpe or sentencepiece), `model` (unigram
    or bpe), `vocab`. Writes tokenizer.json or tokenizer.model.

    The sample consists of the documents with the lowest PRF(seed, id), a pseudo-random number. It ends before the first
    document that would make it larger than `sample` bytes. The sample therefore does not depend on how the dataset is
    cut into parts. The documents are read in plan order, and one thread trains. The parts are read twice: first ids and
    sizes, then texts, which are streamed. Memory: a heap of the sampled ids, and what the training library needs.
    """

    name = "fit_tokenizer"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        counters = {"documents": 0, "bytes": 0}

        def counted(texts: Iterator[str]) -> Iterator[str]:
            for text in texts:
                counters["documents"] += 1
                counters["bytes"] += len(text.encode())
                yield text

        texts = _picked(inputs) if "picked" in args else _drawn(inputs)
        if args["kind"] == "bpe":
            path = out.path("tokenizer.json")
            train_bpe(counted(texts), args["vocab"], path)
        else:
            path = out.path("tokenizer.model")
            train_sentencepiece(counted(texts), args["vocab"], path, args.get("model", "unigram"))
        return {**counters, **_facts(load_tokenizer(path))}


def _picked(inputs: Inputs) -> Iterator[str]:
    """Yields the texts of the tokenizer's sample from the files in which `sample_text.PickTexts` tasks have written
    them."""
    if not any(ref["rows"] for ref in inputs.args["picked"]):
        raise TokenizerError(NO_DOCUMENT)
    return (text for ref in inputs.args["picked"] if ref["rows"] for _, text in picked_texts(inputs.fetch(ref)))


def _drawn(inputs: Inputs) -> Iterator[str]:
    """Draws the tokenizer's sample from all parts (files of documents) of the dataset, and yields the texts."""
    args, where = inputs.args, Selection(inputs.args.get("where"))
    paths = [inputs.fetch(ref) for ref in args["parts"]]
    chosen = _sample(paths, where, int(args["sample"]), int(args["seed"]))
    if not chosen:
        raise TokenizerError(NO_DOCUMENT)
    return (text for path in paths for rows in rows_of(path, where, ("text",))
            for id, text in zip(rows.ids, rows.column("text")) if id in chosen)


class LoadTokenizer:
    """Copies a tokenizer into the store after a trial has shown that it can encode. args: file ($file or $ref of a
    tokenizer.json or a SentencePiece .model), eos (the end-of-text token, or null)."""

    name = "load_tokenizer"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        local = inputs.fetch(inputs.args["file"])
        tokenizer = load_tokenizer(local, inputs.args.get("eos"))
        shutil.copyfile(local, out.path(f"tokenizer.{tokenizer.kind}"))
        return _facts(tokenizer)


def _facts(tokenizer: Tokenizer) -> Counters:
    return {"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos}


def _sample(paths: Sequence[str], where: Selection, size: int, seed: int) -> dict[str, int]:
    """Draws a sample of documents, and returns {id: bytes of text}. The documents are taken by rising PRF (a
    pseudo-random number for each id), as long as they have at most `size` bytes in all. At least one document is
    taken."""
    heap: list[tuple[int, str, int]] = []            # a heap, highest PRF first
    total = 0
    # the document with the lowest PRF that did not fit. The documents below it only get more, so no document with a
    # higher PRF can ever fit
    beyond: tuple[int, str, int] | None = None
    for path in paths:
        for rows in rows_of(path, where, ("bytes",)):
            for id, n in zip(rows.ids, rows.column("bytes")):
                entry = (-rank_of(seed, id), id, n)
                if beyond is not None and entry <= beyond:
                    continue
                heapq.heappush(heap, entry)
                total += n
                while total > size and len(heap) > 1:
                    beyond = heapq.heappop(heap)
                    total -= beyond[2]
    return {id: n for _, id, n in heap}


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
    return [*sample_waves(parts, where, int(train["sample"]), seed, sizes), Wave("fit", fit)]


def tokenizer_draft(train: Mapping[str, Any], parts: Sequence[PartRef], seed: int = 0,
                    picked: Sequence[FileRef] = ()) -> TaskDraft:
    """Returns the task that trains the tokenizer. The task reads the sampled texts in the files `picked`. If there are
    none, it draws a sample from the parts (files of documents) itself."""
    sample, weight = int(train["sample"]), sum(p.bytes for p in parts)
    args = {"kind": train["kind"], "model": train.get("model", "unigram"), "vocab": int(train["vocab"]),
            "libraries": libraries()}
    if picked:
        args["picked"] = list(picked)
        weight = sum(f["bytes"] for f in picked)
    else:
        args |= {"parts": [p.text for p in parts], "where": dict(train.get("where") or {}), "sample": sample,
                 "seed": seed}
    # SentencePiece holds its sentences in memory, BPE its distinct words; both grow with the sample
    return TaskDraft(FIT, args, weight, f"tokenizer: {train['kind']} {train['vocab']}",
                     memory_mb=1000 + min(sum(p.bytes for p in parts), sample) * 6 // 10**6)


def load_draft(path: str, eos: str | None = None, copy_folder: str | None = None) -> TaskDraft:
    """Returns the task for `tokenizer: {load: path}` of a recipe. `path` is a file or a folder that the driver (the
    process that plans a run) can read. If the workers cannot read `path`, pass `copy_folder`, a folder of the store
    that holds a copy of the tokenizer; the task then reads this copy."""
    tokenizer = load_tokenizer(path, eos)
    folder, name = os.path.split(os.path.abspath(tokenizer.path))
    stat = os.stat(tokenizer.path)
    file: dict[str, Any] = {"$file": name, "root": folder, "size": stat.st_size, "etag": tokenizer.sha256}
    if copy_folder is not None:
        file = {"$ref": f"{copy_folder}/{name}", "content": tokenizer.sha256, "bytes": stat.st_size,
                "sha256": tokenizer.sha256}
    return TaskDraft(LOAD, {"file": file, "eos": tokenizer.eos_token}, stat.st_size, f"tokenizer: {name}")


def tokenizer_info(result: TaskResult, eos: str | None = None) -> dict[str, Any]:
    """Returns facts about a finished tokenizer: sha256, vocab_size, eos (the id of the end-of-text token), path (where
    it is published, relative to the store), ref (for task arguments), eos_token (as the recipe names it, or None)."""
    [(name, ref)] = [(n, r) for n, r in result.files.items() if n.startswith("tokenizer.")]
    return {"sha256": ref["content"], "vocab_size": result.counters["vocab_size"], "eos": result.counters["eos"],
            "path": f"shards/tokenizer-{ref['content'][:12]}.{name.partition('.')[2]}", "ref": ref, "eos_token": eos}


def publish_tokenizer(store: Store, info: Mapping[str, Any]) -> str:
    """Publish the tokenizer: link its file into the folder of the shards. Returns the path in the store."""
    ref: FileRef = info["ref"]
    link_committed(store, ref["$ref"], info["path"])
    return info["path"]
