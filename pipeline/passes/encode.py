"""Makes shards (files of tokens for training) from the parts of a dataset (its files of documents).

`EncodePart` turns the documents of one part into tokens, for the splits train and val separately. `AssembleShard`
writes one shard of a split: the documents that start in one range of the token stream. The stream consists of the
encoded parts in plan order, one after the other. This is the order of `from:` for the inputs of the dataset. Within a
source, documents are in the order (relative path of the input file, number of the record in it). The bytes of the
stream therefore depend neither on the partition size nor on which worker ran which task.

`pipeline.plan.tokens` calls `encode_drafts` and `assemble_drafts`. `pipeline.passes.publish_shards` publishes the
shards at the end of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np

from pipeline.base.parquet import open_parquet
from pipeline.base.prf import below
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.labels import Label, ShardLabels
from pipeline.passes.part_tokens import GroupedTokensWriter, LabelPiece, TokensWriter
from pipeline.passes.pieces import add_piece, add_ranges
from pipeline.passes.rows import BATCH, Rows, Selection, rows_of
from pipeline.passes.tables import QUARANTINE_SCHEMA, RowWriter, quarantine_row, to_blame
from pipeline.store.content_keys import task_key
from pipeline.store.dataset import QUARANTINE
from pipeline.store.lists import unfold
from pipeline.store.records import Counters
from stages.barrier import FileRef, PartRef, TaskDraft, TaskResult
from stages.stage import library_versions
from tokenizer.encode import encode_masked
from tokenizer.errors import TokenizerError
from tokenizer.load import Tokenizer, load_tokenizer
from tokenizer.shards.layout import SHARD_BYTES, token_dtype
from tokenizer.shards.writer import ShardWriter

ENCODE = "pipeline.passes.encode:EncodePart"
ASSEMBLE = "pipeline.passes.encode:AssembleShard"
SPLITS = ("train", "val")
#: the stage name of encoding in quarantine entries
STAGE = "encode"
#: file of an encoded part that counts the documents and tokens of each label
LABELS = "labels.json"
#: libraries whose version may change the ids of a text under the same tokenizer file
LIBRARIES = ("tokenizers", "fastokens", "sentencepiece")

_loaded: dict[tuple[str, int], Tokenizer] = {}


# -- one part ----------------------------------------------------------------------------------------------------
class EncodePart:
    """Encodes the documents of one part (file of documents) as tokens. The args are

    * part: $ref of kept.parquet
    * tokenizer ($ref), eos (id of the end-of-text token) and libraries
    * where: selects documents
    * val {share, seed}: which documents are held out
    * by: how documents are labelled (`ShardLabels`), if the stream is split
    * $volatile {quarantined: the commit log's entries under `encode_key`}

    For each split, SPLIT.tokens holds the documents back to back, each ended by EOS, as u8, u16 or u32 (by vocabulary
    size). SPLIT.parquet (PART_TABLE) has, for each document, its end in SPLIT.tokens and its row in the part.
    SPLIT.loss holds a u8 per token. It is 0 for a token outside the `loss_spans` of its document: the model reads the
    token, but does not learn to predict it. If all tokens count, SPLIT.loss is not written.

    With `by`, the documents of a split are grouped by their labels. SPLIT.tables, with a table for each label, replaces
    SPLIT.parquet, and labels.json has {split: [[label, LabelPiece], …]}.

    Whether a document is held out (in val) depends only on the share and on PRF(seed, id), a pseudo-random number. A
    training document that resembles a held-out one, as found by a deduplication, would spoil the evaluation. It goes
    into neither split and is counted (`near_held_out`).

    A document on which the tokenizer crashes or raises an exception goes into quarantine.parquet (QUARANTINE_SCHEMA),
    in the order of the part. Crashes are also recorded in the commit log; exceptions need no record, because they recur
    in every attempt. Memory: one row group and the tokens of one batch.
    """

    name = "encode_part"
    version = 6

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        return _Encoding(inputs, cursor, out).run()


def encode_key(args: Mapping[str, Any]) -> str:
    """Returns a hash of everything that determines the tokens of a text: tokenizer, end-of-text token and libraries. It
    does not depend on the part or stream that the text is in. Under this key, the commit log lists the documents that
    could not be encoded. `args` are those of an EncodePart."""
    return task_key(ENCODE, {k: args[k] for k in ("tokenizer", "eos", "libraries")})


class _Encoding:
    """One execution of the task EncodePart, which encodes the documents of one part (file of documents) as tokens."""

    def __init__(self, inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> None:
        self.inputs, self.cursor, self.out, self.args = inputs, cursor, out, inputs.args
        self.tokenizer = _tokenizer(inputs, self.args["tokenizer"], self.args["eos"])
        self.key = encode_key(self.args)
        quarantined = unfold(self.args.get("$volatile", {}).get("quarantined", []), inputs.store.read)
        self.quarantined = {q["id"]: q for q in quarantined}
        self.labels = ShardLabels(self.args["by"]) if "by" in self.args else None
        self.splits = {name: TokensWriter(out, name) if self.labels is None
                       else GroupedTokensWriter(out, name, out.scratch) for name in SPLITS}
        self.quarantine = RowWriter(out.path(QUARANTINE), QUARANTINE_SCHEMA)
        self.counters: Counters = {name: _zero_counters() for name in SPLITS}
        self.counters.update(skipped=0, near_held_out=0, sources={}, quarantined={})

    def run(self) -> Counters:
        limit = min(BATCH, self.inputs.batch_rows or BATCH)
        columns = ("text", "bytes", "source", "meta", "locator", "loss_spans",
                   *(self.labels.columns if self.labels else ()))
        where = Selection(self.args.get("where"))
        for batch in rows_of(self.inputs.fetch(self.args["part"]), where, columns, limit):
            self.counters["skipped"] += batch.rows_read - len(batch.rows)
            self._batch(batch)
        self.cursor.clear()
        groups = {name: split.close() for name, split in self.splits.items()}
        if self.labels is not None:
            with open(self.out.path(LABELS), "w", encoding="utf-8") as f:
                json.dump(groups, f)
        self.quarantine.close()
        self.out.note(QUARANTINE, rows=self.quarantine.rows)
        return self.counters

    def _batch(self, batch: Rows) -> None:
        ids, metas = batch.ids, batch.column("meta")
        failures: dict[int, tuple[str, str]] = {}           # place in the batch → (reason, detail)
        places: list[int] = []
        for i, row in enumerate(batch.rows.tolist()):
            if row in self.inputs.skip:                 # quarantined under this key, by the log or in this attempt
                reason = self.inputs.skip[row].reason
                self.out.quarantine(row, ids[i], STAGE, self.key, reason)
                failures[i] = (reason, "")
            elif ids[i] in self.quarantined:              # quarantined for another part or stream
                failures[i] = (self.quarantined[ids[i]]["reason"], "")
            elif self.inputs.only is None or row in self.inputs.only:
                if _near_held_out(ids[i], metas[i], self.args["val"]):
                    self.counters["near_held_out"] += 1
                else:
                    places.append(i)
        places, tokens, lengths, counts = self._tokens(batch, places, failures)
        self.cursor.clear()
        if places:
            self._write(batch, places, tokens, lengths, counts)
        for i, (reason, detail) in sorted(failures.items()):
            self.counters["quarantined"][reason] = self.counters["quarantined"].get(reason, 0) + 1
            locator = batch.batch.column("locator")[i].as_py() or {}
            self.quarantine.write(quarantine_row(ids[i], batch.column("source")[i], locator, STAGE, reason, detail))

    def _tokens(self, batch: Rows, places: list[int],
                failures: dict[int, tuple[str, str]]) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray | None]:
        """Encode the documents at the positions `places` of a batch. Returns the positions of those that could be
        encoded, their tokens back to back, the number of tokens of each document, and a loss mask. The mask is a u8 for
        each token, 1 if it counts for the loss; it is None if all count. The documents that could not be encoded are
        added to `failures`."""
        texts, spans, rows = batch.column("text"), batch.column("loss_spans"), batch.rows
        if places:
            self.cursor.set(int(rows[places[0]]), int(rows[places[-1]]), 0)
            try:
                return places, *encode_masked(self.tokenizer, [texts[i] for i in places], [spans[i] for i in places])
            except Exception as e:
                _raise_unless_text_caused(e)
        encoded, pieces = [], []                           # encode one by one, to find the document that fails
        for i in places:
            self.cursor.set(int(rows[i]), int(rows[i]), 0)
            try:
                pieces.append(encode_masked(self.tokenizer, [texts[i]], [spans[i]]))
                encoded.append(i)
            except Exception as e:
                _raise_unless_text_caused(e)
                failures[i] = (f"error:{type(e).__name__}", str(e))
        if not pieces:
            return [], np.empty(0, np.uint16), np.empty(0, np.int64), None
        tokens, lengths, counts = zip(*pieces)
        mask = None if all(c is None for c in counts) else np.concatenate(
            [np.ones(len(t), np.uint8) if c is None else c for t, c in zip(tokens, counts)])
        return encoded, np.concatenate(tokens), np.concatenate(lengths), mask

    def _write(self, batch: Rows, places: list[int], tokens: np.ndarray, lengths: np.ndarray,
               counts: np.ndarray | None) -> None:
        ids, sources, sizes = batch.ids, batch.column("source"), batch.column("bytes")
        ends = np.cumsum(lengths)
        targets = lengths if counts is None else np.add.reduceat(counts, ends - lengths, dtype=np.int64)
        held_out = np.array([_held_out(ids[i], self.args["val"]) for i in places], bool)
        labels: list[Label] | None = self.labels.of(batch) if self.labels else None
        for name in SPLITS:
            which = np.flatnonzero(held_out == (name == "val"))
            if which.size:
                self.splits[name].add([tokens[ends[k] - lengths[k]:ends[k]] for k in which],
                                      [ids[places[k]] for k in which], batch.rows[[places[k] for k in which]],
                                      [sizes[places[k]] for k in which],
                                      None if counts is None else
                                      np.concatenate([counts[ends[k] - lengths[k]:ends[k]] for k in which]),
                                      *(() if labels is None else ([labels[places[k]] for k in which],)))
        for k, i in enumerate(places):
            source = self.counters["sources"].setdefault(sources[i], _zero_counters())
            for into in (source, self.counters["val" if held_out[k] else "train"]):
                into["docs"] += 1
                into["tokens"] += int(lengths[k])
                into["targets"] += int(targets[k])
                into["bytes"] += sizes[i]


def _zero_counters() -> dict[str, int]:
    """Returns counters at zero: documents, their tokens, their tokens that count for the loss, and their UTF-8
    bytes."""
    return {"docs": 0, "tokens": 0, "targets": 0, "bytes": 0}


def _raise_unless_text_caused(error: Exception) -> None:
    """Raise the error again if no text can have caused it. The cause is then a fault of the machine, or a tokenizer
    whose end-of-text token can be spelt in a text.

    A panic of a tokenizer written in Rust is not an Exception and does not reach this function. It ends the child
    process, because it may leave locks held, and the supervisor then finds the text that caused it.
    """
    if isinstance(error, TokenizerError) or not to_blame(error):
        raise error


def _held_out(id: str, val: Mapping[str, Any]) -> bool:
    return below(val["seed"], "val", id, val["share"])


def _near_held_out(id: str, meta: str | None, val: Mapping[str, Any]) -> bool:
    """Whether the document `id` is similar to a held-out one (in val) but is not held out itself. `meta` is its
    metadata, in which a deduplication noted the ids of similar documents, and `val` is {share, seed}."""
    near = json.loads(meta).get("near_duplicates") if meta and '"near_duplicates"' in meta else None
    if not isinstance(near, dict) or _held_out(id, val):
        return False
    return any(_held_out(other, val) for other in near)


def _tokenizer(inputs: TaskInputs, ref: FileRef, eos: int) -> Tokenizer:
    """Returns the tokenizer in the file `ref`, with the end-of-text token `eos`. A warm child (a worker process that is
    used for several tasks) keeps the tokenizers that it has loaded."""
    key = (ref["content"], eos)
    if key not in _loaded:
        _loaded[key] = load_tokenizer(inputs.fetch(ref), eos)
    return _loaded[key]


# -- one shard ---------------------------------------------------------------------------------------------------
class AssembleShard:
    """Assembles one shard (file of tokens for training): writes the documents that start in the token range [start,
    stop) of a stream.

    args: split, index, start, stop, vocab_size, eos, pieces. A piece describes one encoded part (output of
    `EncodePart`); the pieces are in plan order. A piece has

    * tokens and table ($ref)
    * offset: where its first token is in the stream
    * part: the number of the part in the document table
    * row: the row of its first document; 0 if it is missing
    * loss ($ref): its loss mask, if it has one
    * ranges: the places of its documents in the stream (`assemble_drafts`), if the stream gets only some of them. Only
      these ranges are then read.

    Writes body (the tokens), ends (the end of each document), table.parquet (the document table), blocks (checksums of
    the blocks) and shard.json. If some token does not count for the loss, writes loss, too.
    """

    name = "assemble_shard"
    version = 3

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        dtype = token_dtype(args["vocab_size"])
        writer = ShardWriter(out.path("body"), out.path("ends"), out.path("table.parquet"), out.path("blocks"),
                             args["vocab_size"], args["eos"], lambda: out.path("loss"))
        for piece in args["pieces"]:
            if "ranges" in piece:
                add_ranges(writer, args, piece, inputs, dtype)
                continue
            body = np.memmap(inputs.fetch(piece["tokens"]), dtype, "r")
            loss = np.memmap(inputs.fetch(piece["loss"]), "u1", "r") if "loss" in piece else None
            with open_parquet(inputs.fetch(piece["table"])) as table:
                add_piece(writer, args, piece, table, body, loss)
        facts = {"split": args["split"], "index": args["index"], **writer.close()}
        with open(out.path("shard.json"), "w", encoding="utf-8") as f:
            json.dump(facts, f, sort_keys=True)
        out.note("body", rows=writer.tokens)
        out.note("ends", rows=writer.documents)
        out.note("table.parquet", rows=writer.documents)
        return {"docs": writer.documents, "tokens": writer.tokens, "bytes": writer.text_bytes}


# -- for planners ------------------------------------------------------------------------------------------------
def libraries() -> dict[str, str | None]:
    """Returns the versions of the libraries that tokenizers use (None: not installed). The versions are task arguments,
    because another version of a library may tokenize a text differently."""
    versions: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions |= library_versions((name,))
    return versions


def encode_drafts(parts: Sequence[PartRef], tokenizer: Mapping[str, Any], config: Mapping[str, Any],
                  quarantined: Callable[[list[str]], Any] = lambda keys: [],
                  by: Sequence[Mapping[str, Any]] = ()) -> list[TaskDraft]:
    """Returns the EncodePart tasks, one for each part (file of documents), in plan order. `tokenizer` is the result of
    `fit_tokenizer.tokenizer_info`. `config` is the recipe's entry under `shards:` (`where`; `val`, the share held out),
    with the `seed`. `quarantined` returns the commit log's quarantine entries under the given keys
    (`Planner.quarantined`). `by` says how the documents are labelled (`ShardLabels`); it is empty for a stream that is
    not split."""
    common: dict[str, Any] = {
        "tokenizer": tokenizer["ref"], "eos": tokenizer["eos"], "libraries": libraries(),
        "where": dict(config.get("where") or {}),
        "val": {"share": float(config.get("val", 0.005)), "seed": int(config.get("seed", 0))},
        **({"by": list(by), "pieces": 1} if by else {})}          # `pieces`: version of the files of a split stream
    common["$volatile"] = {"quarantined": quarantined([encode_key(common)])}
    return [TaskDraft(ENCODE, {"part": part.text, **common}, part.bytes, f"encode part {part.key[:8]}", memory_mb=700)
            for part in parts]


def assemble_drafts(encoded: Sequence[TaskResult], tokenizer: Mapping[str, Any], shard_bytes: int = SHARD_BYTES,
                    ranges: Mapping[str, Sequence[list[LabelPiece]]] | None = None,
                    stream: str = "", places: Sequence[tuple[int, int]] | None = None) -> list[TaskDraft]:
    """Returns the AssembleShard tasks, one for each shard (file of tokens) of each split. `encoded` are the results of
    the tasks of `encode_drafts`, in plan order. `stream` names the stream in the labels of the tasks.

    `ranges` is given if the stream gets only some of the encoded documents. It says where they are: {split:
    [LabelPieces of the first of `encoded`, LabelPieces of the second, …]}.

    `places` has a pair (part, row) for each of `encoded`: the part that the document table of the shards names for its
    documents, and the row number of its first document. Without `places`, the part is the position in `encoded`, and
    the row is 0.
    """
    step = max(1, shard_bytes // token_dtype(tokenizer["vocab_size"]).itemsize)
    drafts = []
    for split in SPLITS:
        pieces: list[dict[str, Any]] = []
        stops: list[int] = []
        total = 0
        for part, result in enumerate(encoded):
            place = {"part": part} if places is None else dict(zip(("part", "row"), places[part]))
            tokens = result.files[f"{split}.tokens"]
            only = None if ranges is None else ranges[split][part]
            size = tokens["rows"] if only is None else sum(piece.stop - piece.first for piece in only)
            if size:
                table = result.files[f"{split}.parquet" if only is None else f"{split}.tables"]
                loss = {"loss": result.files[f"{split}.loss"]} if f"{split}.loss" in result.files else {}
                pieces.append({"tokens": tokens, "table": table, "offset": total, **place, **loss,
                               **({} if only is None else {"ranges": only})})
                total += size
                stops.append(total)
        first = 0
        for index, start in enumerate(range(0, total, step)):
            stop = start + step
            while stops[first] <= start:
                first += 1
            overlapping = []
            for piece in pieces[first:]:
                if piece["offset"] >= stop:
                    break
                overlapping.append(piece)
            args = {"split": split, "index": index, "start": start, "stop": stop, "pieces": overlapping,
                    "vocab_size": tokenizer["vocab_size"], "eos": tokenizer["eos"]}
            weight = sum(piece["tokens"]["bytes"] for piece in overlapping) if ranges is None else \
                min(step, total - start) * token_dtype(tokenizer["vocab_size"]).itemsize
            drafts.append(TaskDraft(ASSEMBLE, args, weight, f"{stream} {split} shard {index}".lstrip()))
    return drafts
