"""From parts to shards: encode each part once, then cut the stream at fixed token offsets.

`EncodePart` turns one part of a dataset into tokens per split; `AssembleShard` writes the documents that start in one
range of the stream. The stream is the concatenation of the parts in plan order, that is of the documents in (relative
path, ordinal) order, so its bytes depend neither on the partition size nor on who did what. A planner calls, in turn,
`encode_drafts`, `assemble_drafts`, `publish_shards`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.task import Counters, Cursor, Inputs, Out
from pipeline.store.fs import Store
from stages.barrier import FileRef, PartRef, TaskDraft, TaskResult
from stages.stage import library_versions
from stages.text.prf import below
from tokenizer.encode import encode_documents
from tokenizer.load import Tokenizer, load_tokenizer
from tokenizer.shards.layout import MANIFEST, SHARD_BYTES, Manifest, Shard, file_name, token_dtype
from tokenizer.shards.writer import ShardWriter

ENCODE = "pipeline.tasks.encode:EncodePart"
ASSEMBLE = "pipeline.tasks.encode:AssembleShard"
SPLITS = ("train", "val")
#: documents, and bytes of their text, encoded at a time; a longer document is a batch of its own
BATCH, BATCH_BYTES = 256, 8 << 20
#: rows of a part's document table read at a time while a shard is assembled, and of its row groups
TABLE_BATCH, TABLE_ROWS = 4096, 1 << 16
#: what decides about the ids of a text beside the tokenizer's file
LIBRARIES = ("tokenizers", "fastokens", "sentencepiece")

#: what a dedup calls a cluster: the id of its first document
CLUSTER = re.compile("[0-9a-f]{32}")

PART_TABLE = pa.schema([("end", pa.uint64()), ("id", pa.string()), ("row", pa.uint32()), ("n_bytes", pa.uint32())])

_loaded: dict[tuple[str, int], Tokenizer] = {}


# -- reading documents -------------------------------------------------------------------------------------------
class Where:
    """Which documents of a dataset belong to a stream: {source: [names], language: [codes], signals: {name: {min,
    max}}}.

    A range holds min <= value < max, so that buckets tile; a signal that was not computed is in no range.
    """

    def __init__(self, spec: Mapping[str, Any] | None) -> None:
        spec = dict(spec or {})
        given = {k: spec.pop(k) for k in ("source", "language") if k in spec}
        self.equal = {k: [v] if isinstance(v, str) else list(v) for k, v in given.items()}
        self.ranges = {k: (v.get("min"), v.get("max")) for k, v in spec.pop("signals", {}).items()}
        if spec:
            raise ValueError(f"where: unknown keys {sorted(spec)}; known are source, language, signals")

    def mask(self, batch: pa.RecordBatch) -> np.ndarray:
        """Which rows of a batch are taken, bool (rows,)."""
        keep = np.ones(len(batch), bool)
        for column, values in self.equal.items():
            keep &= np.asarray(pc.is_in(batch.column(column), pa.array(values, pa.string())).to_numpy(False), bool)
        for name, (low, high) in self.ranges.items():
            signals = batch.column("signals")
            if signals.type.get_field_index(name) < 0:
                known = ", ".join(f.name for f in signals.type)
                raise ValueError(f"where.signals: the dataset has no signal '{name}'; it has {known}")
            value = pc.struct_field(signals, name).to_numpy(zero_copy_only=False).astype(float)
            keep &= ~np.isnan(value)
            keep &= value >= low if low is not None else True
            keep &= value < high if high is not None else True
        return keep


@dataclass
class Rows:
    """Some rows of a part that passed a `where`, in order."""

    batch: pa.RecordBatch
    rows: np.ndarray              # their row numbers in the part, int64
    seen: int                     # rows of the part read for them

    @property
    def ids(self) -> list[str]:
        return self.batch.column("id").to_pylist()

    def column(self, name: str) -> list[Any]:
        if name == "bytes":       # UTF-8 length of the text
            return pc.struct_field(self.batch.column("signals"), "bytes").cast(pa.int64()).to_pylist()
        return self.batch.column(name).to_pylist()


def rows_of(path: str, where: Where, columns: Sequence[str], batch: int = BATCH) -> Iterator[Rows]:
    """The rows of a part that `where` takes, at most `batch` of them and BATCH_BYTES of text (or one longer document)
    at a time. The column `bytes` is there without the texts. Memory: one row group of what is read."""
    need = {"id", *columns, *where.equal} - {"bytes"}
    if where.ranges:
        need |= {"signals"}
    elif "bytes" in columns:
        need |= {"signals.bytes"}
    first = 0
    with pq.ParquetFile(path) as file:
        # a batch that crosses row groups would keep all of them in memory
        for group in range(file.num_row_groups):
            for block in file.iter_batches(batch, row_groups=[group], columns=sorted(need)):
                for got in _cut(block):
                    keep = where.mask(got)
                    rows = np.flatnonzero(keep)
                    yield Rows(got if keep.all() else got.filter(pa.array(keep)), rows + first, len(got))
                    first += len(got)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in runs of rows with at most BATCH_BYTES of text, or of one row."""
    if "text" not in batch.schema.names:
        yield batch
        return
    ends = np.cumsum(pc.binary_length(batch.column("text")).to_numpy(zero_copy_only=False).astype(np.int64))
    start = 0
    while start < len(ends):
        taken = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, taken + BATCH_BYTES, "right")))
        yield batch.slice(start, stop - start)
        start = stop


# -- one part ----------------------------------------------------------------------------------------------------
class EncodePart:
    """args: part ($ref of kept.parquet), tokenizer ($ref), eos (id), where, val {share, seed}.

    Writes for each split SPLIT.tokens (documents back to back, each ended by EOS, u16 or u32) and SPLIT.parquet
    (PART_TABLE: ends in this file, row in the part). A document is held out by PRF(seed, cluster of its duplicates, or
    its id), so that near-duplicates stay on one side, in every stream. Memory: one row group and one batch's tokens.
    """

    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        tokenizer = _tokenizer(inputs, args["tokenizer"], args["eos"])
        splits = {name: _PartWriter(out, name) for name in SPLITS}
        counters: Counters = {name: {"docs": 0, "tokens": 0, "bytes": 0} for name in SPLITS}
        counters.update(skipped=0, sources={}, quarantined={})
        limit = min(BATCH, inputs.batch_rows or BATCH)
        columns = ("text", "bytes", "source", "meta")
        for some in rows_of(inputs.fetch(args["part"]), Where(args.get("where")), columns, limit):
            counters["skipped"] += some.seen - len(some.rows)
            _encode(some, tokenizer, args, inputs, cursor, out, splits, counters)
        cursor.clear()
        for split in splits.values():
            split.close()
        return counters


def _encode(some: Rows, tokenizer: Tokenizer, args: Mapping[str, Any], inputs: Inputs, cursor: Cursor, out: Out,
            splits: Mapping[str, _PartWriter], counters: Counters) -> None:
    ids, texts, sources, metas = some.ids, some.column("text"), some.column("source"), some.column("meta")
    sizes = some.column("bytes")
    taken = []
    for i, row in enumerate(some.rows.tolist()):
        if row in inputs.skip:
            reason = inputs.skip[row]["reason"]
            out.quarantine(row, ids[i], "encode", args["tokenizer"]["content"], reason)
            counters["quarantined"][reason] = counters["quarantined"].get(reason, 0) + 1
        elif inputs.only is None or row in inputs.only:
            taken.append(i)
    if not taken:
        return
    cursor.set(int(some.rows[taken[0]]), int(some.rows[taken[-1]]), 0)
    tokens, lengths = encode_documents(tokenizer, [texts[i] for i in taken])
    ends = np.cumsum(lengths)
    held_out = np.array([_held_out(ids[i], metas[i], args["val"]) for i in taken])
    for name in SPLITS:
        mine = np.flatnonzero(held_out == (name == "val"))
        if mine.size:
            splits[name].add([tokens[ends[k] - lengths[k]:ends[k]] for k in mine], [ids[taken[k]] for k in mine],
                             some.rows[[taken[k] for k in mine]], [sizes[taken[k]] for k in mine])
    for k, i in enumerate(taken):
        source = counters["sources"].setdefault(sources[i], {"docs": 0, "tokens": 0, "bytes": 0})
        for into in (source, counters["val" if held_out[k] else "train"]):
            into["docs"] += 1
            into["tokens"] += int(lengths[k])
            into["bytes"] += sizes[i]


def _held_out(id: str, meta: str | None, val: Mapping[str, Any]) -> bool:
    cluster = json.loads(meta).get("cluster") if meta and '"cluster"' in meta else None
    if not (isinstance(cluster, str) and CLUSTER.fullmatch(cluster)):       # none, or metadata that came with the text
        cluster = None
    return below(val["seed"], "val", cluster or id, val["share"])


def _tokenizer(inputs: Inputs, ref: FileRef, eos: int) -> Tokenizer:
    """A warm child keeps the tokenizers it has loaded."""
    key = (ref["content"], eos)
    if key not in _loaded:
        _loaded[key] = load_tokenizer(inputs.fetch(ref), eos)
    return _loaded[key]


class _PartWriter:
    """SPLIT.tokens and SPLIT.parquet of one part."""

    def __init__(self, out: Out, split: str) -> None:
        self.out, self.split = out, split
        self.tokens = self.documents = 0
        self.body = open(out.path(f"{split}.tokens"), "wb")  # noqa: SIM115  closed by `close`
        self.table = pq.ParquetWriter(out.path(f"{split}.parquet"), PART_TABLE, compression="zstd")
        self.pending: list[pa.RecordBatch] = []

    def add(self, docs: list[np.ndarray], ids: list[str], rows: np.ndarray, n_bytes: list[int]) -> None:
        ends = np.cumsum([len(d) for d in docs]).astype(np.uint64) + np.uint64(self.tokens)
        self.body.write(np.concatenate(docs).tobytes())
        self.pending.append(pa.record_batch([pa.array(ends), pa.array(ids, pa.string()), pa.array(rows, pa.uint32()),
                                             pa.array(n_bytes, pa.uint32())], schema=PART_TABLE))
        self.tokens, self.documents = int(ends[-1]), self.documents + len(ids)
        while sum(map(len, self.pending)) >= TABLE_ROWS:    # row groups do not show how documents came in batches
            self._flush()

    def _flush(self) -> None:
        held = pa.Table.from_batches(self.pending)
        self.table.write_table(held.slice(0, TABLE_ROWS).combine_chunks())
        self.pending = held.slice(TABLE_ROWS).to_batches()

    def close(self) -> None:
        if self.pending:
            self._flush()
        self.table.close()
        self.body.close()
        self.out.note(f"{self.split}.tokens", rows=self.tokens)
        self.out.note(f"{self.split}.parquet", rows=self.documents)


# -- one shard ---------------------------------------------------------------------------------------------------
class AssembleShard:
    """args: split, index, start, stop (tokens of the stream), vocab_size, eos, pieces [{tokens: $ref, table: $ref,
    offset, part}] in plan order. Writes the documents that start in [start, stop): body, ends, table.parquet,
    shard.json."""

    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        dtype = token_dtype(args["vocab_size"])
        writer = ShardWriter(out.path("body"), out.path("ends"), out.path("table.parquet"), args["vocab_size"],
                             args["eos"])
        for piece in args["pieces"]:
            body = np.memmap(inputs.fetch(piece["tokens"]), dtype, "r")
            begin = 0
            with pq.ParquetFile(inputs.fetch(piece["table"])) as table:
                for batch in table.iter_batches(TABLE_BATCH):
                    ends = batch.column("end").to_numpy().astype(np.int64)
                    starts = np.concatenate([[begin], ends[:-1]])
                    begin = int(ends[-1])
                    # starts increase: the documents of this shard are one run of rows
                    a, b = np.searchsorted(starts + piece["offset"], (args["start"], args["stop"]))
                    if a < b:
                        got = batch.slice(a, b - a)
                        writer.add(body[starts[a]:ends[b - 1]], ends[a:b] - starts[a:b], got.column("id").to_pylist(),
                                   piece["part"], got.column("row").to_numpy(), got.column("n_bytes").to_numpy())
        facts = {"split": args["split"], "index": args["index"], **writer.close()}
        with open(out.path("shard.json"), "w", encoding="utf-8") as f:
            json.dump(facts, f, sort_keys=True)
        out.note("body", rows=writer.tokens)
        out.note("ends", rows=writer.documents)
        out.note("table.parquet", rows=writer.documents)
        return {"docs": writer.documents, "tokens": writer.tokens, "bytes": writer.text_bytes}


# -- what a planner calls ----------------------------------------------------------------------------------------
def libraries() -> dict[str, str | None]:
    """Versions of LIBRARIES (None: not installed), for task arguments: another version may cut a text otherwise."""
    found: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found |= library_versions((name,))
    return found


def encode_drafts(parts: Sequence[PartRef], tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> list[TaskDraft]:
    """One task a part, in plan order. `tokenizer`: `fit_tokenizer.tokenizer_info`. `config`: the recipe's entry under
    `shards:` (`where`, `val`: share held out) and `seed`."""
    common = {"tokenizer": tokenizer["ref"], "eos": tokenizer["eos"], "libraries": libraries(),
              "where": dict(config.get("where") or {}),
              "val": {"share": float(config.get("val", 0.005)), "seed": int(config.get("seed", 0))}}
    return [TaskDraft(ENCODE, {"part": part.text, **common}, part.bytes, f"encode part {part.key[:8]}", memory_mb=700)
            for part in parts]


def assemble_drafts(encoded: Sequence[TaskResult], tokenizer: Mapping[str, Any],
                    shard_bytes: int = SHARD_BYTES) -> list[TaskDraft]:
    """One task a shard of either split, from the results of `encode_drafts` in plan order."""
    step = max(1, shard_bytes // token_dtype(tokenizer["vocab_size"]).itemsize)
    drafts = []
    for split in SPLITS:
        pieces, total = [], 0
        for part, result in enumerate(encoded):
            tokens = result.files[f"{split}.tokens"]
            if tokens["rows"]:
                table = result.files[f"{split}.parquet"]
                pieces.append({"tokens": tokens, "table": table, "offset": total, "part": part})
                total += tokens["rows"]
        first = 0
        for index, start in enumerate(range(0, total, step)):
            stop = start + step
            while pieces[first]["offset"] + pieces[first]["tokens"]["rows"] <= start:
                first += 1
            mine = []
            for piece in pieces[first:]:
                if piece["offset"] >= stop:
                    break
                mine.append(piece)
            args = {"split": split, "index": index, "start": start, "stop": stop, "pieces": mine,
                    "vocab_size": tokenizer["vocab_size"], "eos": tokenizer["eos"]}
            drafts.append(TaskDraft(ASSEMBLE, args, sum(p["tokens"]["bytes"] for p in mine), f"{split} shard {index}"))
    return drafts


def publish_shards(store: Store, name: str, assembled: Sequence[TaskResult], parts: Sequence[PartRef],
                   tokenizer: Mapping[str, Any], source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Link finished shards under shards/NAME/split=…/ and write their manifests, the pinned one before the current.

    Returns {name, tokenizer (sha256), dtype, train: {path, sha256, tokens, documents, bytes}, val: the same or None},
    as `stages.mix.curriculum.resolve` wants it. Publishing the same results again changes nothing.
    """
    shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    for result in assembled:
        facts = json.loads(store.read(result.files["shard.json"]["$ref"]))
        if not facts["documents"]:          # a document longer than a shard leaves the next one empty
            continue
        split = facts.pop("split")
        sums = {"body": facts["sha256"], "ends": facts["ends_sha256"],
                "table": result.files["table.parquet"]["content"]}
        names = {kind: file_name(facts["index"], kind, sha) for kind, sha in sums.items()}
        for kind, file in (("body", "body"), ("ends", "ends"), ("table", "table.parquet")):
            store.link(result.files[file]["$ref"], f"shards/{name}/split={split}/{names[kind]}")
        shards[split].append(Shard(**facts, **names, table_sha256=sums["table"]))
    info: dict[str, Any] = {"name": name, "tokenizer": tokenizer["sha256"],
                            "dtype": token_dtype(tokenizer["vocab_size"]).name}
    for split in SPLITS:
        mine = tuple(sorted(shards[split], key=lambda s: s.index))
        tokens, documents = sum(s.tokens for s in mine), sum(s.documents for s in mine)
        text_bytes = sum(s.text_bytes for s in mine)
        made = Manifest(name, split, info["dtype"], tokenizer["sha256"], tokenizer["vocab_size"], tokenizer["eos"],
                        tokens, documents, text_bytes, mine, tuple(p.key for p in parts), source=dict(source or {}))
        made = replace(made, sha256=made.identity())
        folder = f"shards/{name}/split={split}"
        for file in (f"shards-{made.sha256[:16]}.json", MANIFEST):
            store.write(f"{folder}/{file}", made.dumps().encode())
        info[split] = {"path": folder, "sha256": made.sha256, "tokens": tokens, "documents": documents,
                       "bytes": text_bytes} if tokens or split == "train" else None
    return info
