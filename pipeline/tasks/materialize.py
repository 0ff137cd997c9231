"""`materialize`: write every sample of a curriculum in order, by a distributed exchange that never holds the data.

Map tasks read the shards once, in file order: a range of super-windows of one stream. `Order.samples_of` says where in
the run each of its windows will be drawn, in all phases and epochs; the windows go to the segment of their output
file. Reduce tasks place the rows of one output file by sample number and write it from front to back. So random access
is paid once, in the exchange, and row n equals the virtual read of sample n in tokens, boundaries and mask.
A planner calls, in turn, `map_drafts`, `reduce_drafts`, `publish_rows`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.task import Counters, Cursor, Inputs, Out
from pipeline.store.dataset import link_committed
from pipeline.store.fs import Store
from stages.barrier import TaskDraft, TaskResult
from stages.mix.curriculum import Curriculum, CurriculumError, Order
from tokenizer.shards.layout import ENDS, MANIFEST, Manifest, ShardError
from tokenizer.shards.rows import MANIFEST as ROWS
from tokenizer.shards.rows import ORIGIN, RowFile, RowManifest, pack_bounds, parquet_schema, unpack_bounds

MAP = "pipeline.tasks.materialize:ScatterWindows"
REDUCE = "pipeline.tasks.materialize:WriteRows"
#: least bytes of tokens a map task reads, and bytes of one output file (what a reduce task holds)
MAP_BYTES, FILE_BYTES = 256 << 20, 128 << 20
#: least mean bytes of a segment: smaller ones cost object storage more requests than they are worth
SEGMENT = 128 << 10
#: bytes of tokens, or of records, at work at a time in a map task, and of records it holds before it spills them
BLOCK_BYTES, SEGMENT_BYTES = 1 << 20, 16 << 20


def record_dtype(sequence: int, itemsize: int) -> np.dtype:
    """What travels through the exchange for one row: its sample number, origin, tokens (L + 1) and boundary bits."""
    return np.dtype([("n", "<u8"), ("origin", f"V{ORIGIN.itemsize}"), ("tokens", f"V{(sequence + 1) * itemsize}"),
                     ("bounds", f"V{-(-sequence // 8)}")])


def rows_per_file(sequence: int, itemsize: int, file_bytes: int) -> int:
    return max(1, file_bytes // ((sequence + 1) * itemsize))


# -- map ---------------------------------------------------------------------------------------------------------
class ScatterWindows:
    """args: curriculum (JSON), stream (index), first, stop (super-windows), shards [{body: $ref, ends: $ref, offset,
    tokens}] of the stream that hold them, file_bytes. Writes an exchange file phaseP.seg for each phase that draws from
    the range, one bucket an output file. Memory: one block of tokens and its records."""

    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        curriculum = Curriculum.from_json(args["curriculum"])
        order, s, longest = Order(curriculum), args["stream"], curriculum.longest
        source = _Source(inputs, args["shards"], np.dtype(curriculum.streams[s].dtype).newbyteorder("<"))
        step = max(1, BLOCK_BYTES // (longest * source.dtype.itemsize))
        rows = 0
        for p, phase in enumerate(curriculum.phases):
            if not order.extents[p][s]:
                continue
            dtype = record_dtype(phase.sequence, source.dtype.itemsize)
            per_file = rows_per_file(phase.sequence, source.dtype.itemsize, args["file_bytes"])
            at = max(1, BLOCK_BYTES // dtype.itemsize)
            # one phase after the other, so that one buffer of records is enough; tokens are read again for each
            with out.segments(f"phase{p}.seg", dtype, -(-phase.samples // per_file), memory=SEGMENT_BYTES) as to:
                for first in range(args["first"], args["stop"], step):
                    stop = min(first + step, args["stop"])
                    found = order.samples_of(s, first, stop, p)
                    if p not in found:
                        continue
                    n, window, epoch = found[p]
                    base = first * longest
                    tokens, flags = source.read(base, stop * longest + 1)
                    for a in range(0, len(n), at):
                        part = slice(a, a + at)
                        records = _records(tokens, flags, window[part] * phase.sequence - base, phase.sequence, dtype)
                        records["n"] = n[part]
                        records["origin"] = _origin(s, epoch[part], window[part]).view(f"V{ORIGIN.itemsize}")
                        to.write((n[part] - phase.start) // per_file, records)
                    rows += len(n)
        return {"rows": rows, "tokens": (args["stop"] - args["first"]) * longest}


def _records(tokens: np.ndarray, flags: np.ndarray, starts: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
    """Records of the windows that begin at `starts` of a block, without sample number and origin."""
    records = np.zeros(len(starts), dtype)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[starts]
    records["tokens"] = np.ascontiguousarray(windows).view(dtype["tokens"])[:, 0]
    bits = pack_bounds(np.lib.stride_tricks.sliding_window_view(flags, length)[starts + 1])
    records["bounds"] = bits.view(dtype["bounds"])[:, 0]
    return records


def _origin(stream: int, epoch: np.ndarray, window: np.ndarray) -> np.ndarray:
    out = np.empty(len(epoch), ORIGIN)
    out["stream"], out["epoch"], out["window"] = stream, epoch, window
    return out


class _Source:
    """Token ranges of the stream, by ranged reads: one request a shard on object storage."""

    def __init__(self, inputs: Inputs, shards: Sequence[Mapping[str, Any]], dtype: np.dtype) -> None:
        self.inputs, self.shards, self.dtype = inputs, shards, dtype
        self._ends: dict[str, np.ndarray] = {}

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, stop), and u8 flags of the same length: 1 at i where a document ends at token start + i."""
        tokens, flags = np.empty(stop - start, self.dtype), np.zeros(stop - start, np.uint8)
        filled = 0
        for shard in self.shards:
            offset = shard["offset"]
            a, b = max(start, offset), min(stop, offset + shard["tokens"])
            if a < b:
                size = self.dtype.itemsize
                data = self.inputs.store.read_range(shard["body"]["$ref"], (a - offset) * size, (b - offset) * size)
                tokens[a - start:b - start] = np.frombuffer(data, self.dtype)
                filled += b - a
            # the end of a shard's last document is the first token of the next one
            if offset < stop and offset + shard["tokens"] >= start:
                ends = self._ends_of(shard)
                i, j = np.searchsorted(ends, np.array([max(0, start - offset), stop - offset], ENDS))
                flags[ends[i:j].astype(np.int64) + (offset - start)] = 1
        if filled != stop - start:
            raise ShardError(f"shards hold {filled} of the tokens [{start}, {stop}) the curriculum reads: they were "
                             f"replaced since; resolve it again")
        return tokens, flags

    def _ends_of(self, shard: Mapping[str, Any]) -> np.ndarray:
        name = shard["ends"]["$ref"]
        if name not in self._ends:
            self._ends[name] = np.memmap(self.inputs.fetch(shard["ends"]), ENDS, "r")
        return self._ends[name]


# -- reduce ------------------------------------------------------------------------------------------------------
class WriteRows:
    """args: segments [$ref of phaseP.seg], bucket, first (sample number), rows, sequence, dtype, streams [names],
    format bytes | parquet. Writes tokens, bounds, origin or rows.parquet. Memory: one output file and one segment."""

    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        rows, length = args["rows"], args["sequence"]
        token = np.dtype(args["dtype"]).newbyteorder("<")
        dtype = record_dtype(length, token.itemsize)
        tokens, bounds = np.empty(rows, dtype["tokens"]), np.empty(rows, dtype["bounds"])
        origin, seen = np.empty(rows, dtype["origin"]), np.zeros(rows, np.uint8)
        for ref in args["segments"]:
            records = np.asarray(inputs.segment(ref, args["bucket"])).view(dtype)
            at = records["n"].astype(np.int64) - args["first"]
            if len(at) and (at.min() < 0 or at.max() >= rows):
                raise ShardError(f"{ref['$ref']}: a row outside [{args['first']}, {args['first'] + rows})")
            tokens[at], bounds[at], origin[at] = records["tokens"], records["bounds"], records["origin"]
            np.add.at(seen, at, 1)
        if (seen != 1).any():
            bad = int(np.flatnonzero(seen != 1)[0])
            raise ShardError(f"sample {args['first'] + bad} was delivered {int(seen[bad])} times instead of once")
        if args["format"] == "bytes":
            for kind, array in (("tokens", tokens), ("bounds", bounds), ("origin", origin)):
                array.tofile(out.path(kind))
                out.note(kind, rows=rows)
        else:
            _write_parquet(out.path("rows.parquet"), args, tokens.view(token).reshape(rows, length + 1),
                           bounds.view(np.uint8).reshape(rows, -1), origin.view(ORIGIN))
            out.note("rows.parquet", rows=rows)
        return {"rows": rows, "tokens": rows * length}


def _write_parquet(path: str, args: Mapping[str, Any], tokens: np.ndarray, bounds: np.ndarray,
                   origin: np.ndarray) -> None:
    rows, width = tokens.shape
    schema = parquet_schema(tokens.dtype)
    names = args["streams"]
    step = max(1, BLOCK_BYTES // (width * tokens.itemsize))
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["stream"],
                          write_statistics=["sample"]) as to:
        for a in range(0, rows, step):
            b = min(a + step, rows)
            ends = [unpack_bounds(row, width - 1) for row in bounds[a:b]]
            lists = [pa.ListArray.from_arrays(pa.array(np.arange(b - a + 1, dtype=np.int32) * width),
                                              pa.array(tokens[a:b].ravel())),
                     pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, ends)]).astype(np.int32)),
                                              pa.array(np.concatenate(ends).astype(np.uint32)))]
            to.write_batch(pa.record_batch([
                pa.array(np.arange(args["first"] + a, args["first"] + b, dtype=np.uint64)),
                pa.array([names[s] for s in origin["stream"][a:b].tolist()], pa.string()),
                pa.array(origin["epoch"][a:b]), pa.array(origin["window"][a:b]), *lists], schema=schema))


# -- what a planner calls ----------------------------------------------------------------------------------------
def map_drafts(store: Store, curriculum: Curriculum, map_bytes: int | None = None,
               file_bytes: int = FILE_BYTES) -> list[TaskDraft]:
    """Tasks that read the shards, `map_bytes` of tokens each (default: so many that the segments a task leaves for each
    output file have SEGMENT bytes; what it reads passes through its scratch). Raises CurriculumError when the
    curriculum's order hash is not what this version makes, ShardError when a pinned shard set is not there."""
    order = Order(curriculum)
    if order.hash() != curriculum.order:
        raise CurriculumError("curriculum: its order hash is not the one this Tokenmill makes: resolve it again")
    used = [s for s, _ in enumerate(curriculum.streams) if any(row[s] for row in order.extents)]
    read = sum(order.supers[s] * curriculum.longest * np.dtype(curriculum.streams[s].dtype).itemsize for s in used)
    # a window goes to each of its epochs' files: read / files is a file's share of it, whatever the epochs
    map_bytes = map_bytes or max(MAP_BYTES, -(-read // file_bytes) * SEGMENT)
    drafts, said = [], curriculum.to_json()
    for s in used:
        stream = curriculum.streams[s]
        shards = _shards(store, stream.train, stream.sha256)
        step = max(1, map_bytes // (curriculum.longest * np.dtype(stream.dtype).itemsize))
        for first in range(0, order.supers[s], step):
            stop = min(first + step, order.supers[s])
            a, b = first * curriculum.longest, stop * curriculum.longest + 1
            mine = [x for x in shards if x["offset"] < b and x["offset"] + x["tokens"] >= a]
            args = {"curriculum": said, "stream": s, "first": first, "stop": stop, "shards": mine,
                    "file_bytes": file_bytes}
            drafts.append(TaskDraft(MAP, args, (b - a) * np.dtype(stream.dtype).itemsize,
                                    f"scatter {stream.name} [{first}, {stop})"))
    return drafts


def _shards(store: Store, folder: str, sha256: str) -> list[dict[str, Any]]:
    path = f"{folder}/shards-{sha256[:16]}.json"
    if not store.exists(path):
        raise ShardError(f"{path}: the shard set the curriculum pins is not in the store: encode it again")
    manifest = Manifest.from_json(json.loads(store.read(path)), path)
    if manifest.sha256 != sha256:
        raise ShardError(f"{folder}/{MANIFEST}: holds another shard set than the curriculum pins: resolve it again")
    out, offset = [], 0
    if any(shard.loss for shard in manifest.shards):
        raise ShardError(f"{folder}: only spans of its documents count, which materialised rows do not say: "
                         f"train from the shards themselves, without materialising")
    for shard in manifest.shards:
        out.append({"body": {"$ref": f"{folder}/{shard.body}", "content": shard.sha256},
                    "ends": {"$ref": f"{folder}/{shard.ends}", "content": shard.ends_sha256}, "offset": offset,
                    "tokens": shard.tokens})
        offset += shard.tokens
    return out


def reduce_drafts(curriculum: Curriculum, mapped: Sequence[TaskResult], format: str,
                  file_bytes: int = FILE_BYTES) -> list[TaskDraft]:
    """Tasks that write the rows, one an output file, in order of sample number. `format`: bytes | parquet."""
    if format not in ("bytes", "parquet"):
        raise ValueError(f"format: '{format}' is neither bytes nor parquet")
    dtype, names = _dtype(curriculum), [s.name for s in curriculum.streams]
    drafts = []
    for p, phase in enumerate(curriculum.phases):
        per_file = rows_per_file(phase.sequence, dtype.itemsize, file_bytes)
        segments = [r.files[f"phase{p}.seg"] for r in mapped if f"phase{p}.seg" in r.files]
        for bucket, first in enumerate(range(0, phase.samples, per_file)):
            rows = min(per_file, phase.samples - first)
            args = {"segments": segments, "bucket": bucket, "first": phase.start + first, "rows": rows,
                    "sequence": phase.sequence, "dtype": dtype.name, "streams": names,
                    "format": format}
            size = rows * record_dtype(phase.sequence, dtype.itemsize).itemsize
            drafts.append(TaskDraft(REDUCE, args, size, f"rows of {phase.name} from {phase.start + first}",
                                    memory_mb=300 + 3 * size // 10**6))
    return drafts


def _dtype(curriculum: Curriculum) -> np.dtype:
    [name] = {s.dtype for s in curriculum.streams}
    return np.dtype(name)


def publish_rows(store: Store, folder: str, curriculum: Curriculum, drafts: Sequence[TaskDraft],
                 written: Sequence[TaskResult], verify: Callable[[], None] = lambda: None) -> RowManifest:
    """Link the rows under `folder` (say runs/RUN/rows) and write its rows.json, last. `written` answers `drafts`;
    `verify` (`Log.verify`) is asked before rows.json is written."""
    index = {phase.start: p for p, phase in enumerate(curriculum.phases)}
    files, phase, number = [], -1, 0
    for draft, result in zip(drafts, written, strict=True):
        a = draft.args
        number += 1
        if a["first"] in index:
            phase, number = index[a["first"]], 0
        names, sums = {}, {}
        for file, ref in sorted(result.files.items()):
            kind = file.removeprefix("rows.")
            sums[kind] = ref["content"]
            names[kind] = f"p{phase}-{number:05d}.{sums[kind][:12]}.{kind}"
            link_committed(store, ref["$ref"], f"{folder}/{names[kind]}")
        files.append(RowFile(phase, a["first"], a["rows"], a["sequence"], names, sums))
    made = RowManifest(drafts[0].args["format"], _dtype(curriculum).name, curriculum.order,
                       tuple(s.name for s in curriculum.streams), curriculum.samples, tuple(files))
    verify()
    store.write(f"{folder}/{ROWS}", made.dumps().encode())
    return made
