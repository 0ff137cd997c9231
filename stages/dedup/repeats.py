"""Cuts repeated passages: one copy of each passage stays, in one document, and all other copies are cut. The module has
the recipe step `repeats`, and the stage that computes its hashes.

    - repeats                                   # paragraphs
    - {repeats: {unit: line}}
    - {repeats: {unit: sentence, span: 3}}      # runs of three sentences, as C4 did

Of equal passages, the one in the first dataset of `priority:` stays. If that dataset has several of them, the one in
the document with the smallest id stays, and within a document the one that comes first.

A part is a file of documents. An earlier pass has stored the hashes of a part's passages, and their positions in the
texts, in a side table beside the part. Tasks then work in three waves; the tasks of a wave may run at the same time.
Each entry below names a wave, what one of its tasks reads, and what the task writes.

    map     a group of parts     → one record per hash: the group's first passage with that hash
    reduce  a range of hashes    → survivors: the passage that stays for each hash that occurs more than once, sent to
                                   the groups that have such passages
    slices  survivors by group   → one removal slice (here, a list of passages to cut) for each part

No task holds all passages of a group in memory: records are sorted on disk. A footer that a million documents share
costs a few records per group of parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pipeline.base.parquet import open_parquet
from stages.barrier import CUT_SCHEMA, PASSAGE, Barrier, Done, FileRef, PartRef, TaskDraft, Wave, write_slice
from stages.cut import CutConfig
from stages.dedup.fragment import (
    Sizes,
    bucket_of,
    files_of,
    groups,
    id_text,
    ids_to_ints,
    joined,
    no_twins,
    read_segments,
    runs,
    slices_of,
)
from stages.dedup.units import Unit, stretches
from stages.document import storable_text
from stages.stage import Stage, StageConfig, signal
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.document import Document

#: the first of the passages with a hash, and the number of these passages
HASHED = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("id_hi", "<u8"), ("id_lo", "<u8"), ("start", "<u4"), ("n", "<u4")])
#: the passage that survives for a hash that occurs more than once
SURVIVOR = np.dtype([("key", "S16"), ("id_hi", "<u8"), ("id_lo", "<u8"), ("start", "<u4")])
#: a passage in a side table
_PLACED = np.dtype([*HASHED.descr, ("row", "<u4"), ("end", "<u4")])
#: a passage has a larger share of the text than a document's hash, so groups are smaller than for other deduplications
SIZES = Sizes(group_bytes=1 << 30)
#: passages that a map task holds, and documents that are read at a time
HELD, DOCUMENTS = 1 << 20, 1024


class PassageConfig(StageConfig):
    unit: Unit = signal("paragraph", "what is compared: paragraphs (between blank lines), lines or sentences")
    span: int = signal(1, "number of consecutive units that form one passage; every run of so many units is compared",
                       ge=1, le=16)
    min_unit_chars: int = signal(30, "shorter passages are never cut", ge=1)
    normalise: bool = signal(True, "passages that differ only in white space and case are equal")


class PassageHash(Stage):
    """Compute the xxh3_128 hashes of a document's passages, by which the step `repeats` finds equal passages. The stage
    also stores the position of each passage in the UTF-8 text (its first byte, and the byte after its last)."""

    name = "passage_hash"
    version = 1
    cost_ms = 0.07
    side = pa.schema([("hashes", pa.binary()), ("starts", pa.binary()), ("ends", pa.binary())])
    Config = PassageConfig

    def process(self, doc: Document) -> str | None:
        config = self.config
        every = stretches(storable_text(doc.text), config.unit, config.span, config.normalise)
        passages = [passage for passage in every if len(passage.compared) >= config.min_unit_chars]
        if passages and passages[-1].end >= 2**32:
            raise ValueError("the text has 4 GiB or more")
        doc.side[self.name] = {
            "hashes": b"".join([xxhash.xxh3_128_digest(passage.compared.encode()) for passage in passages]),
            "starts": np.array([passage.start for passage in passages], "<u4").tobytes(),
            "ends": np.array([passage.end for passage in passages], "<u4").tobytes()}
        return None


class RepeatedPassages(Barrier):
    """Cut passages (paragraphs, lines or sentences) that occur in another document, or earlier in the same one.

    Of equal passages, the one in the first dataset of `priority:` stays. If that dataset has several of them, the one
    in the document with the smallest id stays, and within a document the one that comes first. With `span: n`, every
    run of n consecutive units is a passage, and all units of a passage that does not stay are cut.

    A document that the cuts make too short (`min_chars`, `min_words`) is dropped. If a dropped document holds the copy
    of a passage that should stay, the passage is left in no document. Texts are compared in the form that all steps
    before this one (such as `pii`) have given them.
    """

    name = "repeats"
    version = 1
    edits = True
    cost_ms = 0.03
    sizes = SIZES

    class Config(PassageConfig, CutConfig):
        pass

    def prepare(self) -> tuple[str, dict[str, Any]]:
        return "stages.dedup.repeats:PassageHash", self.config.model_dump(mode="json", include=set(
            PassageConfig.model_fields))

    def waves(self, parts: Sequence[PartRef]) -> list[Wave]:
        plan = groups(parts, self.sizes)
        sides = [group.sides(self.name) for group in plan]    # a part without a side table is refused here
        side_bytes = [sum(side["bytes"] for side in group) for group in sides]
        ranges = self.sizes.buckets(2 * sum(side_bytes), len(plan))    # a record is twice as long as a row of the table

        def maps(done: Done) -> Iterator[TaskDraft]:
            for group, side, size in zip(plan, sides, side_bytes):
                yield TaskDraft("stages.dedup.repeats:RepeatsMap", {"sides": side, "buckets": ranges}, size,
                                f"{group.dataset}: passages of {group.size} parts", 700)

        def reduces(done: Done) -> Iterator[TaskDraft]:
            hashed, ranks = files_of(done["map"], "passages.seg"), [group.rank for group in plan]
            for bucket in range(ranges if plan else 0):
                yield TaskDraft("stages.dedup.repeats:RepeatsReduce",
                                {"maps": hashed, "ranks": ranks, "bucket": bucket},
                                sum(file["bytes"] for file in hashed) // ranges,
                                f"equal passages, range {bucket + 1}/{ranges}", 900)

        def slices(done: Done) -> Iterator[TaskDraft]:
            survivors = files_of(done["reduce"], "survivors.seg")
            repeated = any(task.counters["repeated"] for task in done["reduce"])
            most = sum(file["bytes"] for file in survivors)
            for number, (group, side, size) in enumerate(zip(plan, sides, side_bytes) if repeated else ()):
                yield TaskDraft("stages.dedup.repeats:RepeatsSlices",
                                {"sides": side, "group": number, "dataset": group.dataset, "survivors": survivors,
                                 "reason": f"repeated_{self.config.unit}"},
                                size, f"{group.dataset}: cuts of {group.size} parts",
                                700 + 3 * min(size, most) // 2**20)

        return [Wave("map", maps), Wave("reduce", reduces), Wave("slices", slices)]

    def slices(self, parts: Sequence[PartRef], results: Done) -> Iterable[FileRef | None]:
        return slices_of(groups(parts, self.sizes), results["slices"])


class RepeatsMap:
    """Task that chooses, in one group of parts (files of documents), the first passage for each hash.

    Arguments: `sides` (references to the side tables of the group's parts, which hold the hashes), `buckets` (number of
    ranges of hashes). The task writes the exchange file `passages.seg` (HASHED records, in buckets by range of hashes).
    A hash has one record, or several if the group has more than HELD passages.
    """

    name = "repeats_map"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        documents = passages = held = 0
        rows: list[NDArray[Any]] = []
        with out.segments("passages.seg", HASHED, inputs.args["buckets"], key=("hi", "lo")) as writer:
            def write() -> None:
                records = _first(np.concatenate(rows)) if rows else np.zeros(0, HASHED)
                writer.write(bucket_of(records["hi"], inputs.args["buckets"]), records)
                rows.clear()

            for side in inputs.args["sides"]:
                for count, block in _passages(inputs.fetch(side)):
                    rows.append(block)
                    documents, passages, held = documents + count, passages + len(block), held + len(block)
                    if held >= HELD:
                        write()
                        held = 0
            write()
        return {"documents": documents, "passages": passages}


class RepeatsReduce:
    """Task that chooses, for each hash of one range that occurs more than once, the passage that stays.

    Arguments: `maps` (references to the files `passages.seg`, one per group of parts; a part is a file of documents),
    `ranks` (priority of each group), `bucket` (number of the range).

    The task writes the exchange file `survivors.seg`: SURVIVOR records, in buckets by number of the group, in ascending
    order of hash. A record goes to every group that has the hash. The task counts hashes, repeated hashes, passages
    that do not stay, and how often the most frequent hash occurs.
    """

    name = "repeats_reduce"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        ranks = np.asarray(args["ranks"], np.int64)
        counters = {"hashes": 0, "repeated": 0, "removed": 0, "max_repeats": 0}
        with out.segments("survivors.seg", SURVIVOR, len(args["maps"])) as writer:
            for block in inputs.segments(args["maps"], args["bucket"], whole=("hi", "lo"), numbered=True):
                block = block[np.lexsort((block["start"], block["id_lo"], block["id_hi"], ranks[block["source"]],
                                          block["lo"], block["hi"]))]
                no_twins(block, "start")
                starts, sizes = runs(block)
                count = np.add.reduceat(block["n"].astype(np.int64), starts)
                run = np.repeat(np.arange(len(starts)), sizes)
                repeated = np.flatnonzero(count[run] > 1)
                # one record for each group that has the hash
                run, source = np.divmod(np.unique(run[repeated] * len(args["maps"]) + block["source"][repeated]),
                                        len(args["maps"]))
                records = np.empty(len(run), SURVIVOR)
                survivors = block[starts[run]]
                records["key"] = joined(survivors)
                for field in ("id_hi", "id_lo", "start"):
                    records[field] = survivors[field]
                writer.write(source, records)
                counters["hashes"] += len(starts)
                counters["repeated"] += int((count > 1).sum())
                counters["removed"] += int((count - 1).sum())
                counters["max_repeats"] = max(counters["max_repeats"], int(count.max()))
        return counters


class RepeatsSlices:
    """Task that writes the removal slices (here, lists of passages to cut) of one group of parts (files of documents).

    Arguments: `sides` (references to the side tables of the group's parts, which hold hashes of the passages), `group`
    (number of the group), `dataset` (its name), `survivors` (references to the files `survivors.seg`), `reason` (why a
    passage is cut, as reports name it). The task writes `slice.PART.parquet` for every part with a document to cut.
    """

    name = "repeats_slices"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        segments = read_segments(inputs, args["survivors"], args["group"], SURVIVOR)   # ranges of hashes, in order
        survivors = np.concatenate(segments) if segments else np.zeros(0, SURVIVOR)
        cut = 0
        for part, side in enumerate(args["sides"]):
            blocks = [_repeated(block, survivors) for _, block in _passages(inputs.fetch(side))]
            passages = np.concatenate([rows for rows, _ in blocks]) if blocks else np.zeros(0, _PLACED)
            if len(passages):
                write_slice(out, f"slice.{part}.parquet", _slice(
                    passages, np.concatenate([kept for _, kept in blocks]), args["reason"]))
                cut += len(passages)
        return {"cut": {args["dataset"]: {args["reason"]: cut}}}


# -- side tables and passages as records -----------------------------------------------------------------------------
def _passages(path: str) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the contents of a side table in blocks of rows. A block is (number of documents, _PLACED records of the
    passages of these documents)."""
    with open_parquet(path) as file:
        for batch in file.iter_batches(DOCUMENTS, use_threads=False):
            counts = pc.divide(pc.binary_length(batch.column("starts")), 4).to_numpy(zero_copy_only=False)
            records = np.zeros(int(counts.sum()), _PLACED)
            hashes, starts, ends = (b"".join(batch.column(name).to_pylist()) for name in ("hashes", "starts", "ends"))
            halves = np.frombuffer(hashes, ">u8").reshape(-1, 2)
            records["hi"], records["lo"], records["n"] = halves[:, 0], halves[:, 1], 1
            records["start"], records["end"] = np.frombuffer(starts, "<u4"), np.frombuffer(ends, "<u4")
            records["row"] = np.repeat(batch.column("row").to_numpy(), counts)
            for name, half in zip(("id_hi", "id_lo"), ids_to_ints(batch.column("id"))):
                records[name] = np.repeat(half, counts)
            yield batch.num_rows, records


def _first(rows: NDArray[Any]) -> NDArray[Any]:
    """Return one HASHED record for each hash that occurs in `rows`, in ascending order of hash. It names the first
    passage with the hash (in the document with the smallest id), and says how many passages have the hash. All passages
    must have the same priority."""
    rows = rows[np.lexsort((rows["start"], rows["id_lo"], rows["id_hi"], rows["lo"], rows["hi"]))]
    no_twins(rows, "start")
    starts, sizes = runs(rows)
    first = np.empty(len(starts), HASHED)
    for field in HASHED.names or ():
        first[field] = rows[field][starts]
    first["n"] = sizes
    return first


def _repeated(rows: NDArray[Any], survivors: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (those of the passages `rows` that are to be cut, the survivor of each of these). A survivor is the equal
    passage that stays. `survivors` is sorted by hash."""
    if not len(survivors) or not len(rows):
        return rows[:0], survivors[:0]
    keys = joined(rows)
    places = np.minimum(np.searchsorted(survivors["key"], keys), len(survivors) - 1)
    kept = survivors[places]
    same = (kept["id_hi"] == rows["id_hi"]) & (kept["id_lo"] == rows["id_lo"]) & (kept["start"] == rows["start"])
    cut = (kept["key"] == keys) & ~same
    return rows[cut], kept[cut]


def _slice(rows: NDArray[Any], kept: NDArray[Any], reason: str) -> pa.Table:
    """Return the removal slice of a part. `rows` are the passages to cut, sorted by document and by their position in
    it. `kept` holds for each of them its survivor: the equal passage that stays. Passages of a document that touch or
    overlap become one passage if their survivors are in one document."""
    new = np.ones(len(rows), bool)
    new[1:] = ((rows["row"][1:] != rows["row"][:-1]) | (rows["start"][1:] > rows["end"][:-1])
               | (kept["id_hi"][1:] != kept["id_hi"][:-1]) | (kept["id_lo"][1:] != kept["id_lo"][:-1]))
    first = np.flatnonzero(new)
    last = np.r_[first[1:], len(rows)] - 1
    documents = np.flatnonzero(np.r_[True, np.diff(rows["row"][first]) != 0])        # of the joined passages
    passages = pa.StructArray.from_arrays([
        pa.array(rows["start"][first], pa.uint64()), pa.array(rows["end"][last], pa.uint64()),
        pa.array([reason] * len(first), pa.string()),
        pa.array([id_text(k["id_hi"], k["id_lo"]) for k in kept[first]], pa.string())], fields=list(PASSAGE))
    cuts = pa.ListArray.from_arrays(pa.array(np.r_[documents, len(first)], pa.int32()), passages)
    nothing = {name: pa.nulls(len(documents), CUT_SCHEMA.field(name).type) for name in CUT_SCHEMA.names}
    return pa.table({**nothing, "row": pa.array(rows["row"][first][documents], pa.uint32()),
                     "reason": pa.array([""] * len(documents), pa.string()), "cuts": cuts}, schema=CUT_SCHEMA)
