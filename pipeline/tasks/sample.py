"""Draw a sample of the records of an input file, for a bill (`pipeline.plan.sample`)."""

from __future__ import annotations

import heapq
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.task import Counters, Cursor, Inputs, Out
from stages.catalog import reader_class
from stages.read.reader import Slice
from stages.read.sample import SCHEMA, payload, to_row
from stages.text.prf import prf

#: rows are written in groups of about this many bytes
GROUP_BYTES = 8 << 20


class DrawSample:
    """args: source, reader {name, key, config}, file ($file), seed, share (of all records, 0 … 1), least (records to
    draw at least), most (bytes to draw at most), read_most (bytes of records to read at most).

    Draws the records with the lowest PRF(seed, id): those below `share`, and at least `least`. Writes drawn.parquet
    (stages.read.sample.SCHEMA, in file order). Counters: records and bytes read, `covered` (bytes of the stored file
    that were read), and `complete` {"below": r}: every record read whose rank is below r was drawn.
    """

    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        entry, limit = args["reader"], int(args["share"] * 2**64)
        reader = reader_class(entry["name"])(entry["$volatile"]["config"])
        heap: list[tuple[int, int, int, dict[str, Any]]] = []       # highest rank first: (-rank, place, bytes, row)
        held = read = records = 0
        below, covered = 1 << 64, args["file"]["size"]
        piece = Slice(args["source"], args["file"]["$file"])
        for place, record in enumerate(reader.read(inputs.fetch(args["file"]), piece)):
            rank, size = prf(args["seed"], "sample", record.id), payload(record)
            records, read = records + 1, read + size
            if rank < below:
                heapq.heappush(heap, (-rank, place, size, to_row(record, rank)))
                held += size
                while len(heap) > 1 and (held > args["most"] or (len(heap) > args["least"] and -heap[0][0] >= limit)):
                    top, _, gone, _ = heapq.heappop(heap)
                    held, below = held - gone, min(below, -top)
            if read > args["read_most"]:
                offset = record.locator.get("offset") or 0
                guess = read / max(reader.expansion(piece.path), 1e-9)
                covered = min(covered, offset if offset else int(guess))
                break
        _write(out, sorted(heap, key=lambda item: item[1]))
        return {"records": records, "bytes": read, "covered": covered, "drawn": len(heap),
                "complete": {"below": below}}


def _write(out: Out, drawn: list[tuple[int, int, int, dict[str, Any]]]) -> None:
    with pq.ParquetWriter(out.path("drawn.parquet"), SCHEMA, compression="zstd") as writer:
        rows, size = [], 0
        for _, _, n, row in drawn:
            rows.append(row)
            size += n
            if size > GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                rows, size = [], 0
        writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    out.note("drawn.parquet", rows=len(drawn))
