"""The tokenizer of a recipe: trained on a sample of a dataset, or taken from a file. Either way it becomes one
content-addressed file of the store, named by its sha256."""

from __future__ import annotations

import heapq
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.engine.task import Cursor, Inputs, Out
from pipeline.passes.encode import libraries
from pipeline.passes.rows import Taken, rows_of
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
    """Trains a tokenizer. args: either parts [$ref of kept.parquet, in plan order], where (see
    `pipeline.passes.rows.Taken`), sample (bytes of text) and seed, or picked [$ref of the texts of the sample, see
    `pipeline.passes.sample_text`]; kind bpe | sentencepiece, model unigram | bpe, vocab. Writes tokenizer.json or
    tokenizer.model.

    The sample consists of the documents with the lowest PRF(seed, id), and ends before the first one that would make it
    larger than `sample` bytes. It therefore does not depend on how the dataset is cut into parts. The documents are
    read in plan order, and one thread trains. The parts are read twice: first ids and sizes, then texts, which are
    streamed. Memory: a heap of the sampled ids, and what the training library needs.
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
    """Texts of the sample that `sample_text.PickTexts` tasks have drawn."""
    if not any(ref["rows"] for ref in inputs.args["picked"]):
        raise TokenizerError(NO_DOCUMENT)
    return (text for ref in inputs.args["picked"] if ref["rows"] for _, text in picked_texts(inputs.fetch(ref)))


def _drawn(inputs: Inputs) -> Iterator[str]:
    """Texts of the sample, drawn here from all parts."""
    args, where = inputs.args, Taken(inputs.args.get("where"))
    paths = [inputs.fetch(ref) for ref in args["parts"]]
    chosen = _sample(paths, where, int(args["sample"]), int(args["seed"]))
    if not chosen:
        raise TokenizerError(NO_DOCUMENT)
    return (text for path in paths for rows in rows_of(path, where, ("text",))
            for id, text in zip(rows.ids, rows.column("text")) if id in chosen)


class LoadTokenizer:
    """Copies a tokenizer into the store once a trial has shown that it can encode. args: file ($file of a
    tokenizer.json or a SentencePiece .model), eos (token or null)."""

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


def _sample(paths: Sequence[str], where: Taken, size: int, seed: int) -> dict[str, int]:
    """Returns {id: bytes} of the longest run of documents by rising PRF that has at most `size` bytes (at least one
    document)."""
    heap: list[tuple[int, str, int]] = []            # a heap, highest PRF first
    total = 0
    # lowest PRF that did not fit. The sample only gets fuller, so no document with this PRF or a higher one can ever
    # fit
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
    """Make the waves of tasks for `tokenizer: {train: …}` of a recipe (kind, model, vocab, sample, where) over the
    parts of `from`. The last wave, `fit`, is one task. It draws its sample from the parts, or reads the texts that the
    waves before it have picked."""
    def fit(done: Done) -> list[TaskDraft]:
        return [tokenizer_draft(train, parts, seed, files_of(done["pick"], "picked.parquet"))]

    where = dict(train.get("where") or {})
    return [*sample_waves(parts, where, int(train["sample"]), seed, sizes), Wave("fit", fit)]


def tokenizer_draft(train: Mapping[str, Any], parts: Sequence[PartRef], seed: int = 0,
                    picked: Sequence[FileRef] = ()) -> TaskDraft:
    """Make the task that trains, on a sample it draws from the parts itself or on the texts of `picked`."""
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


def load_draft(path: str, eos: str | None = None, kept: str | None = None) -> TaskDraft:
    """Make the task for `tokenizer: {load: path}`; `path` is a file or a folder that the driver can read. `kept`: the
    folder of the store with a copy, for workers that cannot read `path`."""
    tokenizer = load_tokenizer(path, eos)
    folder, name = os.path.split(os.path.abspath(tokenizer.path))
    stat = os.stat(tokenizer.path)
    file: dict[str, Any] = {"$file": name, "root": folder, "size": stat.st_size, "etag": tokenizer.sha256}
    if kept is not None:
        file = {"$ref": f"{kept}/{name}", "content": tokenizer.sha256, "bytes": stat.st_size,
                "sha256": tokenizer.sha256}
    return TaskDraft(LOAD, {"file": file, "eos": tokenizer.eos_token}, stat.st_size, f"tokenizer: {name}")


def tokenizer_info(result: TaskResult, eos: str | None = None) -> dict[str, Any]:
    """Facts about a finished tokenizer: sha256, vocab_size, eos (id), path (published, relative to the store), ref (for
    task arguments), eos_token (as the recipe names it, or None)."""
    [(name, ref)] = [(n, r) for n, r in result.files.items() if n.startswith("tokenizer.")]
    return {"sha256": ref["content"], "vocab_size": result.counters["vocab_size"], "eos": result.counters["eos"],
            "path": f"shards/tokenizer-{ref['content'][:12]}.{name.partition('.')[2]}", "ref": ref, "eos_token": eos}


def publish_tokenizer(store: Store, info: Mapping[str, Any]) -> str:
    """Link the tokenizer beside the shards; returns its path in the store."""
    ref: FileRef = info["ref"]
    link_committed(store, ref["$ref"], info["path"])
    return info["path"]
