"""Draws a sample of the records of input files, for a cost forecast (`pipeline.forecast.sample`)."""

from __future__ import annotations

import heapq
from typing import Any

import pyarrow as pa

from pipeline.base.parquet import parquet_writer
from pipeline.base.prf import prf
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.storable import checked
from pipeline.recipe.code import planned_reader
from pipeline.store.records import Counters
from stages.read.reader import Slice
from stages.read.sample import SCHEMA, payload, to_row

#: rows are written in groups of about this many bytes
GROUP_BYTES = 8 << 20


class DrawSample:
    """Draws a sample of the records of one source. The args are

    * source, reader {name, key, config} and files [$file]
    * seed of the random choice
    * share: wanted part of all records, 0 … 1
    * least: minimum number of records drawn
    * most: maximum bytes drawn
    * read_most: number of bytes after which the task stops reading

    Each record has a rank, PRF(seed, id), which is a pseudo-random number. The records with the lowest ranks are drawn:
    about the given share of all records, but at least `least` of them. If they have more than `most` bytes together,
    fewer are drawn, but at least one.

    Writes drawn.parquet (stages.read.sample.SCHEMA, in the order of the files). The counters are the records and bytes
    read; `covered`, the bytes of the stored files that were read; `drawn`, the number of records drawn; and `complete`
    {"below": r}: every record read with a rank below r was drawn.
    """

    name = "draw_sample"
    version = 2
    sets_up = True

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        reader = planned_reader(inputs.store, args["reader"])
        inputs.confine(())
        draw = Draw(int(args["share"] * 2**64), args["least"], args["most"])
        covered = read = 0
        files: list[dict[str, Any]] = args["files"]
        for together in [files] if reader.in_units else [[file] for file in files]:
            pieces = [(inputs.fetch(file), Slice(args["source"], file["$file"])) for file in together]
            size_stored, before = sum(file["size"] for file in together), read
            complete = True
            for record in checked(reader, reader.read_files(iter(pieces))):
                size = payload(record)
                draw.add(record, prf(args["seed"], "sample", record.id), size)
                read += size
                if read > args["read_most"]:
                    offset = record.locator.get("offset") or 0
                    guess = (read - before) / max(reader.expansion(together[0]["$file"]), 1e-9)
                    covered += min(size_stored, offset if offset else int(guess))
                    complete = False
                    break
            if not complete:
                break
            covered += size_stored
        _write(out, draw.rows())
        return {"records": draw.records, "bytes": read, "covered": covered, "drawn": len(draw.heap),
                "complete": {"below": draw.below}}


class Draw:
    """Keeps the records with the lowest ranks (pseudo-random numbers) while records are read. It keeps all records with
    a rank below `limit`, and at least `least` records. If the kept records exceed `most` bytes, those with the highest
    ranks are dropped, but one record always stays."""

    def __init__(self, limit: int, least: int, most: int) -> None:
        self.limit, self.least, self.most = limit, least, most
        self.heap: list[tuple[int, int, int, dict[str, Any]]] = []       # (-rank, place, bytes, row)
        self.bytes = self.records = 0
        self.below = 1 << 64                                             # all records below this rank are in the heap

    def add(self, record: Any, rank: int, size: int) -> None:
        self.records += 1
        if rank >= self.below:
            return
        heap = self.heap
        heapq.heappush(heap, (-rank, self.records, size, to_row(record, rank)))
        self.bytes += size
        while len(heap) > 1 and (self.bytes > self.most or (len(heap) > self.least and -heap[0][0] >= self.limit)):
            top, _, dropped_bytes, _ = heapq.heappop(heap)
            self.bytes, self.below = self.bytes - dropped_bytes, min(self.below, -top)

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns (bytes, row) for the records drawn, in the order in which the records were read."""
        return [(size, row) for _, _, size, row in sorted(self.heap, key=lambda item: item[1])]


def _write(out: TaskOutputs, drawn: list[tuple[int, dict[str, Any]]]) -> None:
    with parquet_writer(out.path("drawn.parquet"), SCHEMA) as writer:
        rows, size = [], 0
        for n, row in drawn:
            rows.append(row)
            size += n
            if size > GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                rows, size = [], 0
        writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    out.note("drawn.parquet", rows=len(drawn))
