"""Draws the text sample for the training of a tokenizer, in many tasks, from a dataset too large for one task.

Three waves of tasks run before the training. (The tasks of a wave may run at the same time.) First, each `RankTexts`
task takes a group of parts (files of documents), ranks their documents by PRF(seed, id), a pseudo-random number, and
notes the sizes of the documents. Then the single `CutSample` task merges these lists by rising rank, up to the first
document that would make the sample too large; it reads little beyond that document. Last, each `PickTexts` task copies
the texts of a group up to that rank.

The sample consists of the documents with the lowest ranks, as many as together have at most `sample` bytes, but at
least one. The sample is written in plan order. It equals the sample that a single `fit_tokenizer.FitTokenizer` task
would draw from the same dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import open_parquet, parquet_writer
from pipeline.base.prf import prf
from pipeline.engine.task import Cursor, Inputs, Out
from pipeline.passes.rows import Selection, rows_of
from pipeline.store.records import Counters
from stages.barrier import Done, PartRef, TaskDraft, Wave
from stages.dedup.fragment import SIZES, Sizes, files_of, groups
from stages.dedup.verify import texts_at

#: dtype: rank of a document, UTF-8 bytes of its text
RANK = np.dtype([("rank", "<u8"), ("bytes", "<u8")])
#: number of ranges of ranks; the cut reads only the ranges that the sample needs
RANGES = 1024
PICKED = pa.schema([("id", pa.string()), ("text", pa.large_string())])
#: bytes of text per row group of picked texts
GROUP_BYTES = 16 << 20


def rank_of(seed: int, id: str) -> int:
    """Returns the rank of a document, a pseudo-random number in [0, 2**64). Samples are drawn in the order of rising
    rank."""
    return prf(seed, "tokenizer", id)


class RankTexts:
    """Ranks the documents of a group of parts (files of documents) by a pseudo-random number, to draw a sample of
    texts. args: parts [$ref of kept.parquet], where (see `pipeline.passes.rows.Selection`), sample (bytes), seed.

    Writes the exchange file `ranks.seg` (RANK, one bucket per range of ranks, sorted) with the documents of the group
    that can be in a sample of `sample` bytes. Memory: 100 bytes per document of the group.
    """

    name = "rank_texts"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        where, seed, ranks, sizes = Selection(args.get("where")), int(args["seed"]), [], []
        for ref in args["parts"]:
            for rows in rows_of(inputs.fetch(ref), where, ("bytes",)):
                ranks += [rank_of(seed, id) for id in rows.ids]
                sizes += rows.column("bytes")
        records = np.empty(len(ranks), RANK)
        records["rank"], records["bytes"] = ranks, sizes
        records.sort(order="rank")
        # if a document does not fit into a sample of this group alone, no later one fits into any sample
        records = records[:int(np.searchsorted(np.cumsum(records["bytes"]), np.uint64(args["sample"]), "right")) + 1]
        with out.segments("ranks.seg", RANK, RANGES, key=("rank",)) as writer:
            writer.write((records["rank"] >> np.uint64(54)).astype(np.int64), records)
        return {"documents": len(ranks), "candidates": len(records)}


class CutSample:
    """Finds the rank at which a sample of texts ends, and counts its documents and bytes. A rank is a pseudo-random
    number of a document. args: ranks [$ref of ranks.seg], sample (maximum bytes). The counter `max_rank` is the rank of
    the last document of the sample, or -1 if the sample is empty."""

    name = "cut_sample"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        size, counters = np.uint64(args["sample"]), {"documents": 0, "bytes": 0, "max_rank": -1}
        for number in range(RANGES):
            for block in inputs.segments(args["ranks"], number):
                total = np.cumsum(block["bytes"]) + np.uint64(counters["bytes"])
                n = int(np.searchsorted(total, size, "right"))
                if n == 0 and not counters["documents"]:
                    n = 1                                # the sample has at least one document, however long
                if n:
                    counters = {"documents": counters["documents"] + n, "bytes": int(total[n - 1]),
                                "max_rank": int(block["rank"][n - 1])}
                if n < len(block):
                    return counters
        return counters


class PickTexts:
    """Copies those texts of a group of parts (files of documents) that are in a sample. args: parts [$ref of
    kept.parquet], where (selects documents), seed, last (rank of the last document of the sample). Writes
    picked.parquet (PICKED), in the order of the parts."""

    name = "pick_texts"
    version = 2

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        where, seed, last = Selection(args.get("where")), int(args["seed"]), int(args["last"])
        counters = {"documents": 0, "bytes": 0}
        ids: list[str] = []
        texts: list[str] = []
        chars = 0
        with parquet_writer(out.path("picked.parquet"), PICKED) as writer:
            def flush() -> None:
                nonlocal chars
                writer.write_table(pa.table([pa.array(ids, pa.string()), pa.array(texts, pa.large_string())],
                                            schema=PICKED))
                ids.clear()
                texts.clear()
                chars = 0

            for ref in args["parts"]:
                path = inputs.fetch(ref)
                chosen, rows = _chosen(path, where, seed, last)
                for id, text in zip(chosen, texts_at(path, rows)):
                    ids.append(id)
                    texts.append(text)
                    chars += len(text)
                    counters["documents"] += 1
                    counters["bytes"] += len(text.encode())
                    if chars > GROUP_BYTES:
                        flush()
            flush()
        out.note("picked.parquet", rows=counters["documents"])
        return counters


def _chosen(path: str, where: Selection, seed: int, last: int) -> tuple[list[str], np.ndarray]:
    """Returns (ids, row numbers) of the documents of a part that are in the sample, whose last document has the rank
    `last`."""
    ids: list[str] = []
    rows: list[int] = []
    for batch in rows_of(path, where, ()):
        for id, row in zip(batch.ids, batch.rows.tolist()):
            if rank_of(seed, id) <= last:
                ids.append(id)
                rows.append(row)
    return ids, np.array(rows, np.int64)


def picked_texts(path: str) -> Iterator[tuple[str, str]]:
    """Yields (id, text) of the documents in a picked.parquet, a file of sampled texts. Memory: a row group."""
    with open_parquet(path) as file:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(256, row_groups=[group]):
                yield from zip(batch.column("id").to_pylist(), batch.column("text").to_pylist())


# -- for planners ------------------------------------------------------------------------------------------------
def sample_waves(parts: Sequence[PartRef], where: Mapping[str, Any], sample: int, seed: int,
                 sizes: Sizes = SIZES) -> list[Wave]:
    """Returns the waves `rank`, `cut` and `pick` (groups of tasks that can run at the same time), which draw a sample
    of texts. For a dataset of at most `sizes.group_bytes` the waves have no tasks, because the training task can draw
    the sample itself."""
    plan = groups(parts, sizes) if sum(p.bytes for p in parts) > sizes.group_bytes else []
    common = {"where": dict(where), "seed": seed}

    def ranks(done: Done) -> Iterator[TaskDraft]:
        for group in plan:
            yield TaskDraft("pipeline.passes.sample_text:RankTexts",
                            {"parts": [p.text for p in group.parts], "sample": sample, **common}, group.rows * 40,
                            f"ranks of the texts of {group.size} parts", 500 + group.rows * 200 // 2**20)

    def cut(done: Done) -> list[TaskDraft]:
        files = files_of(done["rank"], "ranks.seg")
        return [TaskDraft("pipeline.passes.sample_text:CutSample", {"ranks": files, "sample": sample},
                          sum(f["bytes"] for f in files), "cut of the sample")] if files else []

    def pick(done: Done) -> Iterator[TaskDraft]:
        for end in done["cut"]:
            for group in plan:
                yield TaskDraft("pipeline.passes.sample_text:PickTexts",
                                {"parts": [p.text for p in group.parts], "last": end.counters["max_rank"], **common},
                                group.bytes, f"sampled texts of {group.size} parts")

    return [Wave("rank", ranks), Wave("cut", cut), Wave("pick", pick)]
