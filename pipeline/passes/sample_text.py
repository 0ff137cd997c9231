"""Draws the text sample for the training of a tokenizer, in many tasks, from a dataset too large for one task.

Three waves of tasks run before the training. (The tasks of a wave may run at the same time.)

* Each `RankTexts` task takes a group of parts (files of documents). It ranks their documents by PRF(seed, id), a
  pseudo-random number, and notes the sizes of the documents.
* The single `CutSample` task merges these lists by rising rank. It stops at the first document that would make the
  sample too large.
* Each `PickTexts` task copies the texts of a group up to that rank.

The sample consists of the documents with the lowest ranks, as many as together have at most `sample` bytes, but at
least one. The sample is written in plan order. It equals the sample that a single `fit_tokenizer.FitTokenizer` task
would draw from the same dataset.

A sample may be balanced. It then consists of strata, such as the documents of one source or language, and each stratum
has a share of the bytes (`pipeline.passes.strata`). The rule above holds for each stratum with the bytes of its share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import open_parquet, parquet_writer
from pipeline.base.prf import prf
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.rows import Selection, rows_of
from pipeline.passes.strata import Cut, Strata
from pipeline.store.records import Counters
from stages.barrier import Done, PartRef, TaskDraft, Wave
from stages.dedup.fragment import SIZES, Sizes, files_of, groups
from stages.dedup.part_texts import texts_at

#: dtype: rank of a document, UTF-8 bytes of its text, and the key of its stratum
RANK = np.dtype([("rank", "<u8"), ("bytes", "<u8"), ("stratum", "<u8")])
#: number of ranges of ranks; the cut reads only the ranges that the sample needs
RANGES = 1024
PICKED = pa.schema([("id", pa.string()), ("text", pa.large_string())])
#: characters of text per row group of picked texts
GROUP_BYTES = 16 << 20


def rank_of(seed: int, id: str) -> int:
    """Returns the rank of a document, a pseudo-random number in [0, 2**64). Samples are drawn in the order of rising
    rank."""
    return prf(seed, "tokenizer", id)


class RankTexts:
    """Ranks the documents of a group of parts (files of documents) by a pseudo-random number, to draw a sample of
    texts. args: parts [$ref of kept.parquet], where (`pipeline.passes.rows.Selection`), sample (bytes), seed and, for a
    balanced sample, strata (settings of Strata).

    Writes the exchange file `ranks.seg` (RANK, one bucket per range of ranks, sorted). It has the documents of the
    group that can be in a sample of `sample` bytes. Also writes `strata.json`, the bytes of each stratum in the group.
    Memory: 150 bytes per document of the group.
    """

    name = "rank_texts"
    version = 4

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        where, seed, ranks, sizes = Selection(args.get("where")), int(args["seed"]), [], []
        strata, keys = Strata(args.get("strata")), []
        for ref in args["parts"]:
            for rows in rows_of(inputs.fetch(ref), where, ("bytes", *strata.columns)):
                ranks += [rank_of(seed, id) for id in rows.ids]
                sizes += rows.column("bytes")
                keys += strata.keys(rows)
        records = np.empty(len(ranks), RANK)
        records["rank"], records["bytes"], records["stratum"] = ranks, sizes, keys
        records.sort(order=["rank", "stratum"])
        Path(out.path("strata.json")).write_text(strata.dumps(records["stratum"], records["bytes"]), encoding="utf-8")
        # of each stratum, keep the documents that fit into a sample of this group alone, and the next one, at which
        # that sample ends; in the sample of all groups, the stratum ends no later
        candidates = np.zeros(len(records), bool)
        for key in np.unique(records["stratum"]):
            places = np.flatnonzero(records["stratum"] == key)
            total = np.cumsum(records["bytes"][places])
            candidates[places[:int(np.searchsorted(total, np.uint64(args["sample"]), "right")) + 1]] = True
        records = records[candidates]
        with out.segments("ranks.seg", RANK, RANGES, key=("rank",)) as writer:
            writer.write((records["rank"] >> np.uint64(54)).astype(np.int64), records)
        return {"documents": len(ranks), "candidates": len(records)}


class CutSample:
    """Finds the rank at which each stratum of a sample of texts ends, and counts the sample's documents and bytes. A
    rank is a pseudo-random number of a document. args: ranks [$ref of ranks.seg], sizes [$ref of strata.json], sample
    (maximum bytes) and, for a balanced sample, strata (settings of Strata). Writes `cuts.json`: {key of a stratum: rank
    of its last document}, without strata of which nothing is in the sample."""

    name = "cut_sample"
    version = 2

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        files = [json.loads(Path(inputs.fetch(ref)).read_text(encoding="utf-8")) for ref in args["sizes"]]
        cut = Cut(Strata(args.get("strata")).shares(files, int(args["sample"])))
        for number in range(RANGES):
            for block in inputs.segments(args["ranks"], number):
                cut.add(block["rank"], block["bytes"], block["stratum"])
            if cut.ended:
                break
        Path(out.path("cuts.json")).write_text(json.dumps(cut.last, sort_keys=True), encoding="utf-8")
        return {"documents": cut.documents, "bytes": cut.bytes}


class PickTexts:
    """Copies those texts of a group of parts (files of documents) that are in a sample. args: parts [$ref of
    kept.parquet], where (selects documents), seed, cuts ($ref of cuts.json) and, for a balanced sample, strata
    (settings of Strata). Writes picked.parquet (PICKED), in the order of the parts."""

    name = "pick_texts"
    version = 3

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        where, seed, strata = Selection(args.get("where")), int(args["seed"]), Strata(args.get("strata"))
        cuts = {int(key): rank for key, rank in
                json.loads(Path(inputs.fetch(args["cuts"])).read_text(encoding="utf-8")).items()}
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
                chosen, rows = _chosen(path, where, seed, strata, cuts)
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


def _chosen(path: str, where: Selection, seed: int, strata: Strata,
            cuts: Mapping[int, int]) -> tuple[list[str], np.ndarray]:
    """Returns (ids, row numbers) of the documents in the sample, among those of the part at `path` that `where`
    selects. A document is in the sample if its rank (`rank_of`) is not above the cut of its stratum. `cuts` maps the
    key of each stratum to this cut."""
    ids: list[str] = []
    rows: list[int] = []
    for batch in rows_of(path, where, strata.columns):
        for id, row, key in zip(batch.ids, batch.rows.tolist(), strata.keys(batch)):
            if rank_of(seed, id) <= cuts.get(key, -1):
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
def sample_waves(parts: Sequence[PartRef], where: Mapping[str, Any], sample: int, seed: int, sizes: Sizes = SIZES,
                 strata: Mapping[str, Any] | None = None) -> list[Wave]:
    """Returns the waves (groups of tasks that can run at the same time) `rank`, `cut` and `pick`. Together they draw a
    sample of at most `sample` bytes of text from the documents of `parts` that `where` selects. For a dataset of at
    most `sizes.group_bytes` the waves have no tasks, because the training task can draw the sample itself."""
    plan = groups(parts, sizes) if sum(p.bytes for p in parts) > sizes.group_bytes else []
    balanced = {"strata": dict(strata)} if strata else {}
    common = {"where": dict(where), "seed": seed, **balanced}

    def ranks(done: Done) -> Iterator[TaskDraft]:
        for group in plan:
            yield TaskDraft("pipeline.passes.sample_text:RankTexts",
                            {"parts": [p.text for p in group.parts], "sample": sample, **common}, group.rows * 40,
                            f"ranks of the texts of {group.size} parts", 500 + group.rows * 200 // 2**20)

    def cut(done: Done) -> list[TaskDraft]:
        files = files_of(done["rank"], "ranks.seg")
        return [TaskDraft("pipeline.passes.sample_text:CutSample",
                          {"ranks": files, "sizes": files_of(done["rank"], "strata.json"), "sample": sample,
                           **balanced},
                          sum(f["bytes"] for f in files), "cut of the sample")] if files else []

    def pick(done: Done) -> Iterator[TaskDraft]:
        for [cuts] in [files_of([end], "cuts.json") for end in done["cut"]]:
            for group in plan:
                yield TaskDraft("pipeline.passes.sample_text:PickTexts",
                                {"parts": [p.text for p in group.parts], "cuts": cuts, **common},
                                group.bytes, f"sampled texts of {group.size} parts")

    return [Wave("rank", ranks), Wave("cut", cut), Wave("pick", pick)]
