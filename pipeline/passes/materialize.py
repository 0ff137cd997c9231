"""Implements `materialize`, which writes every training sample of a curriculum into files, in the order of training.

A curriculum is the list of the phases of a training; each phase draws windows (samples of `sequence` tokens) from
streams. The samples move between two kinds of tasks through exchange files, so that no machine ever holds all the data:

* A map task reads the shards of one stream for a range of super-windows (`longest` consecutive tokens each), in file
  order and once for each phase. `Order.samples_of` gives the samples that draw each window, over all phases and epochs.
  The task writes the window into the bucket of each output file that has such a sample.
* A reduce task collects the samples of one output file, places them by sample number and writes the file from front to
  back.

Random access thus happens only once, in the exchange. Row n of the output equals sample n as read from the shards:
tokens, document boundaries and loss mask. A planner calls `map_drafts`, `reduce_drafts` and `publish_rows`, in this
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import parquet_writer
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.window_source import BLOCK_BYTES, memory_mb, source_of
from pipeline.store.dataset import link_committed
from pipeline.store.fs import Store
from pipeline.store.records import Counters
from stages.barrier import TaskDraft, TaskResult
from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Order, Stream
from tokenizer.shards.layout import MANIFEST, Manifest, ShardError
from tokenizer.shards.packed import Packing
from tokenizer.shards.rows import MANIFEST as ROWS
from tokenizer.shards.rows import (
    ORIGIN,
    RowFile,
    RowManifest,
    pack_bits,
    parquet_schema,
    unpack_bounds,
    unpack_loss,
)

MAP = "pipeline.passes.materialize:ScatterWindows"
REDUCE = "pipeline.passes.materialize:WriteRows"
#: minimum bytes of tokens a map task reads, and bytes of one output file (which a reduce task holds in memory)
MAP_BYTES, FILE_BYTES = 256 << 20, 128 << 20
#: minimum mean size of a segment in bytes: with smaller segments, requests to object storage cost too much
SEGMENT = 128 << 10
#: bytes of records that a map task holds before it spills
SEGMENT_BYTES = 16 << 20


def record_dtype(sequence: int, itemsize: int, masked: bool = False) -> np.dtype:
    """Returns the dtype of one record of the exchange, which is one sample of L = `sequence` tokens of `itemsize`
    bytes. Its fields are the sample number, the origin (stream, epoch, window), L + 1 tokens, and L bits that mark the
    document boundaries. With `masked`, it also has L bits that mark the tokens that count for the loss."""
    bits = f"V{-(-sequence // 8)}"
    return np.dtype([("n", "<u8"), ("origin", f"V{ORIGIN.itemsize}"), ("tokens", f"V{(sequence + 1) * itemsize}"),
                     ("bounds", bits), *([("loss", bits)] if masked else [])])


def rows_per_file(sequence: int, itemsize: int, file_bytes: int) -> int:
    return max(1, file_bytes // ((sequence + 1) * itemsize))


# -- map ---------------------------------------------------------------------------------------------------------
class ScatterWindows:
    """A map task: writes the windows (training samples) in a range of super-windows of one stream into exchange files,
    from which the reduce tasks collect them. A super-window is a stretch of `longest` tokens of the stream. The args
    are

    * curriculum (JSON), and stream (its index in the curriculum)
    * first, stop: the range of super-windows
    * shards: the shards that hold the range, each as {body, ends, blocks: $ref; offset, tokens, documents}. A shard
      with a loss mask also has loss ($ref), and one of packed rows has packed.
    * file_bytes: the bytes of tokens in an output file of a reduce task
    * masked: true if samples may have a loss mask

    Writes an exchange file phaseP.seg for each phase P that draws from the range. It has one bucket for each output
    file. Memory: one block of tokens and its records.
    """

    name = "scatter_windows"
    version = 2

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        curriculum = Curriculum.from_json(args["curriculum"])
        order, stream, longest = Order(curriculum), args["stream"], curriculum.longest
        source = source_of(inputs, args["shards"], curriculum, stream)
        rows, masked = 0, args.get("masked", False)
        for number, phase in enumerate(curriculum.phases):
            if not order.extents[number][stream]:
                continue
            dtype = record_dtype(phase.sequence, source.dtype.itemsize, masked)
            per_file = rows_per_file(phase.sequence, source.dtype.itemsize, args["file_bytes"])
            chunk = max(1, BLOCK_BYTES // dtype.itemsize)
            # one phase after the other, so one buffer of records is enough; the tokens are read again for each phase
            files = -(-phase.samples // per_file)
            with out.segments(f"phase{number}.seg", dtype, files, memory=SEGMENT_BYTES) as writer:
                for first in range(args["first"], args["stop"], source.step):
                    stop = min(first + source.step, args["stop"])
                    drawn = order.samples_of(stream, first, stop, number)
                    if number not in drawn:
                        continue
                    n, window, epoch = drawn[number]
                    tokens, flags, counts = source.supers(first, stop)
                    for start in range(0, len(n), chunk):
                        part = slice(start, start + chunk)
                        records = _records(tokens, {"bounds": flags, **({"loss": counts} if masked else {})},
                                           source.starts(window[part], first, phase.sequence), phase.sequence, dtype)
                        records["n"] = n[part]
                        records["origin"] = _origin(stream, epoch[part], window[part]).view(f"V{ORIGIN.itemsize}")
                        writer.write((n[part] - phase.start) // per_file, records)
                    rows += len(n)
        return {"rows": rows, "tokens": (args["stop"] - args["first"]) * longest, **({"masked": 1} if masked else {})}


def _records(tokens: np.ndarray, flags: Mapping[str, np.ndarray], starts: np.ndarray, length: int,
             dtype: np.dtype) -> np.ndarray:
    """Returns the exchange records of the windows (samples of L = `length` tokens) that begin at the offsets `starts`
    of a block of tokens. The caller fills in sample number and origin.

    `flags` maps a field of the record to one flag (u8, 0 or 1) for each token of the block. In the record, the flags of
    a window become the bits of the field: bit p - 1 is the flag of the token at position p, for p from 1 to L.
    """
    records = np.zeros(len(starts), dtype)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[starts]
    records["tokens"] = np.ascontiguousarray(windows).view(dtype["tokens"])[:, 0]
    for name, flag in flags.items():
        bits = pack_bits(np.lib.stride_tricks.sliding_window_view(flag, length)[starts + 1])
        records[name] = bits.view(dtype[name])[:, 0]
    return records


def _origin(stream: int, epoch: np.ndarray, window: np.ndarray) -> np.ndarray:
    out = np.empty(len(epoch), ORIGIN)
    out["stream"], out["epoch"], out["window"] = stream, epoch, window
    return out


# -- reduce ------------------------------------------------------------------------------------------------------
class WriteRows:
    """A reduce task: collects the training samples of one output file and writes the file. The args are

    * segments [$ref of phaseP.seg], and bucket (of this output file)
    * first (number of the file's first sample), and rows (number of samples)
    * sequence (tokens per sample), and dtype (of a token)
    * streams [names]
    * format: bytes or parquet
    * masked: true if samples may have a loss mask

    With format bytes, the output consists of three files with one record per sample: tokens, bounds (where documents
    begin) and origin (stream, epoch, window). A file loss is added if some token does not count for the loss. With
    format parquet, the output is rows.parquet. Memory: one output file and one segment.
    """

    name = "write_rows"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        rows, length = args["rows"], args["sequence"]
        token = np.dtype(args["dtype"]).newbyteorder("<")
        dtype = record_dtype(length, token.itemsize, args.get("masked", False))
        columns = {kind: np.empty(rows, dtype[kind]) for kind in dtype.names or () if kind != "n"}
        deliveries = np.zeros(rows, np.uint8)
        for ref in args["segments"]:
            records = np.asarray(inputs.segment(ref, args["bucket"])).view(dtype)
            places = records["n"].astype(np.int64) - args["first"]
            if len(places) and (places.min() < 0 or places.max() >= rows):
                raise ShardError(f"{ref['$ref']}: a row outside [{args['first']}, {args['first'] + rows})")
            for kind, array in columns.items():
                array[places] = records[kind]
            np.add.at(deliveries, places, 1)
        if (deliveries != 1).any():
            bad = int(np.flatnonzero(deliveries != 1)[0])
            raise ShardError(f"sample {args['first'] + bad} was delivered {int(deliveries[bad])} times instead of once")
        if args["format"] == "bytes":
            if "loss" in columns and not _masked(columns["loss"], length).any():
                del columns["loss"]
            for kind, array in columns.items():
                array.tofile(out.path(kind))
                out.note(kind, rows=rows)
        else:
            _write_parquet(out.path("rows.parquet"), args, token, columns)
            out.note("rows.parquet", rows=rows)
        return {"rows": rows, "tokens": rows * length}


def _masked(loss: np.ndarray, length: int) -> np.ndarray:
    """Returns for each row (training sample) whether any of its `length` target tokens does not count for the loss, as
    bool (rows,). `loss` has one bit per token: 1 if it counts."""
    all_ones = pack_bits(np.ones((1, length), np.uint8))
    return (_bits(loss) != all_ones).any(1)


def _write_parquet(path: str, args: Mapping[str, Any], token: np.dtype, fields: Mapping[str, np.ndarray]) -> None:
    rows, length = args["rows"], args["sequence"]
    width = length + 1
    tokens, origin = fields["tokens"].view(token).reshape(rows, width), fields["origin"].view(ORIGIN)
    schema = parquet_schema(token, "loss" in fields)
    names = args["streams"]
    step = max(1, BLOCK_BYTES // (width * token.itemsize))
    with parquet_writer(path, schema, use_dictionary=["stream"], write_statistics=["sample"]) as writer:
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            ends = [unpack_bounds(row, length) for row in _bits(fields["bounds"][start:stop])]
            columns = [pa.array(np.arange(args["first"] + start, args["first"] + stop, dtype=np.uint64)),
                       pa.array([names[s] for s in origin["stream"][start:stop].tolist()], pa.string()),
                       pa.array(origin["epoch"][start:stop]), pa.array(origin["window"][start:stop]),
                       pa.ListArray.from_arrays(pa.array(np.arange(stop - start + 1, dtype=np.int32) * width),
                                                pa.array(tokens[start:stop].ravel())),
                       pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, ends)]).astype(np.int32)),
                                                pa.array(np.concatenate(ends).astype(np.uint32)))]
            if "loss" in fields:
                loss = fields["loss"][start:stop]
                masks = [unpack_loss(row, length) if partly else None
                         for row, partly in zip(_bits(loss), _masked(loss, length))]
                columns.append(pa.array(masks, pa.list_(pa.bool_())))
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _bits(packed: np.ndarray) -> np.ndarray:
    """Returns a field of bits (document boundaries or loss mask) of many rows, 8 bits in a byte, as u8 (rows, ceil(L /
    8)). L is the number of tokens of a row. `packed` holds the same bytes in numpy's raw type V, as exchange files do.
    """
    return packed.view(np.uint8).reshape(len(packed), -1)


# -- for planners ------------------------------------------------------------------------------------------------
def map_drafts(store: Store, curriculum: Curriculum, map_bytes: int | None = None,
               file_bytes: int = FILE_BYTES) -> list[TaskDraft]:
    """Returns the map tasks, each of which reads `map_bytes` of tokens from the shards. The default is at least
    MAP_BYTES, and so large that a task writes on average at least SEGMENT bytes for each output file. A task needs
    scratch space for the bytes it reads.

    Raises CurriculumError if the hash of the order in the curriculum differs: this version of Tokenmill would order the
    samples in another way. Raises ShardError if a shard set that the curriculum names is missing or was replaced.
    """
    order = Order(curriculum)
    if order.hash() != curriculum.order:
        raise CurriculumError("curriculum: this version of Tokenmill would order the samples in another way; run the "
                              "recipe again")
    used = [number for number, _ in enumerate(curriculum.streams) if any(row[number] for row in order.extents)]
    read = sum(order.supers[number] * curriculum.longest * np.dtype(curriculum.streams[number].dtype).itemsize
               for number in used)
    # a training of E epochs writes E times the bytes into E times the files. So a segment has map_bytes · file_bytes /
    # read bytes on average, whatever E is
    map_bytes = map_bytes or max(MAP_BYTES, -(-read // file_bytes) * SEGMENT)
    drafts, document = [], curriculum.to_json()
    sets = {number: _shards(store, curriculum.streams[number]) for number in used}
    # rows of all streams go to the same files, so all get room for a mask if one stream has one; padding needs one, too
    masked = {"masked": True} if any("loss" in shard or "packed" in shard
                                     for shards in sets.values() for shard in shards) else {}
    for number, shards in sets.items():
        stream = curriculum.streams[number]
        step = max(1, map_bytes // (curriculum.longest * np.dtype(stream.dtype).itemsize))
        for first in range(0, order.supers[number], step):
            stop = min(first + step, order.supers[number])
            first_token, last_token = first * curriculum.longest, stop * curriculum.longest + 1
            if stream.packing is None:
                overlapping = [x for x in shards
                               if x["offset"] < last_token and x["offset"] + x["tokens"] >= first_token]
            else:
                overlapping = [x for x in shards if x["packed"]["before"] < stop
                               and x["packed"]["before"] + x["packed"]["facts"]["rows"] > first]
            args = {"curriculum": document, "stream": number, "first": first, "stop": stop, "shards": overlapping,
                    "file_bytes": file_bytes, **masked}
            drafts.append(TaskDraft(MAP, args, (last_token - first_token) * np.dtype(stream.dtype).itemsize,
                                    f"scatter {stream.name} [{first}, {stop})", memory_mb(curriculum, number)))
    return drafts


def _ref(folder: str, name: str, sha256: str) -> dict[str, Any]:
    return {"$ref": f"{folder}/{name}", "content": sha256, "sha256": sha256}


def _shards(store: Store, stream: Stream) -> list[dict[str, Any]]:
    folder, sha256 = stream.train, stream.sha256
    path = f"{folder}/shards-{sha256[:16]}.json"
    if not store.exists(path):
        raise ShardError(f"{path}: the shard set that the curriculum names is not in the store; run the recipe again")
    manifest = Manifest.loads(store.read(path), path)
    if manifest.sha256 != sha256:
        raise ShardError(f"{folder}/{MANIFEST}: holds another shard set than the curriculum names; run the recipe "
                         f"again")
    out, offset = [], 0
    for shard in manifest.shards:
        kinds = ("body", "ends", "blocks", *(["loss"] if shard.loss else []))
        out.append({**{kind: _ref(folder, getattr(shard, kind), shard.sums()[kind]) for kind in kinds},
                    "offset": offset, "tokens": shard.tokens, "documents": shard.documents})
        offset += shard.tokens
    if stream.packing is not None:
        path, before = f"{folder}/packed-{stream.packing[:16]}.json", 0
        packing = Packing.loads(store.read_checked(path, stream.packing), path)
        packing.check_set(manifest, path)
        for entry, file in zip(out, packing.files):
            entry["packed"] = {"ref": _ref(folder, file.file, file.sha256), "facts": asdict(file), "before": before}
            before += file.rows
    return out


def reduce_drafts(curriculum: Curriculum, mapped: Sequence[TaskResult], format: str,
                  file_bytes: int = FILE_BYTES) -> list[TaskDraft]:
    """Returns the reduce tasks, which write the training samples of a curriculum into files. Each task writes one file
    of about `file_bytes` bytes of tokens; the tasks are in order of sample number. `mapped` are the results of the
    tasks of `map_drafts`. `format` is bytes or parquet."""
    if format not in ("bytes", "parquet"):
        raise ValueError(f"format: '{format}' is neither bytes nor parquet")
    dtype, names = _dtype(curriculum), [s.name for s in curriculum.streams]
    masked = {"masked": True} if any(r.counters.get("masked") for r in mapped) else {}
    drafts = []
    for number, phase in enumerate(curriculum.phases):
        per_file = rows_per_file(phase.sequence, dtype.itemsize, file_bytes)
        segments = [r.files[f"phase{number}.seg"] for r in mapped if f"phase{number}.seg" in r.files]
        for bucket, first in enumerate(range(0, phase.samples, per_file)):
            rows = min(per_file, phase.samples - first)
            args = {"segments": segments, "bucket": bucket, "first": phase.start + first, "rows": rows,
                    "sequence": phase.sequence, "dtype": dtype.name, "streams": names,
                    "format": format, **masked}
            size = rows * record_dtype(phase.sequence, dtype.itemsize, bool(masked)).itemsize
            drafts.append(TaskDraft(REDUCE, args, size, f"rows of {phase.name} from {phase.start + first}",
                                    memory_mb=300 + 3 * size // 10**6))
    return drafts


def _dtype(curriculum: Curriculum) -> np.dtype:
    [name] = {s.dtype for s in curriculum.streams}
    return np.dtype(name)


def publish_rows(store: Store, folder: str, curriculum: Curriculum, drafts: Sequence[TaskDraft],
                 written: Sequence[TaskResult], check_lease: Callable[[], None] = lambda: None) -> RowManifest:
    """Link the files of training samples under `folder` (for example runs/RUN/rows), write the manifest rows.json last,
    and return it. `drafts` are the tasks of `reduce_drafts`, and `written` are the results of these tasks in the same
    order. `check_lease` (`Log.check_lease`) is called before rows.json is written; it raises if another driver has
    taken over the store."""
    index = {phase.start: p for p, phase in enumerate(curriculum.phases)}
    files, phase, number = [], -1, 0
    for draft, result in zip(drafts, written, strict=True):
        args = draft.args
        number += 1
        if args["first"] in index:
            phase, number = index[args["first"]], 0
        names, sums = {}, {}
        for file, ref in sorted(result.files.items()):
            kind = file.removeprefix("rows.")
            sums[kind] = ref["content"]
            names[kind] = f"p{phase}-{number:05d}.{sums[kind][:12]}.{kind}"
            link_committed(store, ref["$ref"], f"{folder}/{names[kind]}")
        files.append(RowFile(phase, args["first"], args["rows"], args["sequence"], names, sums))
    manifest = RowManifest(drafts[0].args["format"], _dtype(curriculum).name, curriculum.order,
                           tuple(s.name for s in curriculum.streams), curriculum.samples, tuple(files))
    check_lease()
    store.write(f"{folder}/{ROWS}", manifest.dumps().encode())
    return manifest
