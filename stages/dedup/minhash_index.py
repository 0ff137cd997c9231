"""Plans the tasks by which `minhash` makes an index of the documents that it keeps, and the tasks by which it looks up
new documents in indexes. `stages.dedup.index` explains indexes, and `stages.dedup.against` the waves of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stages.barrier import Done, FileRef, TaskDraft, Wave
from stages.dedup.fragment import PartGroup, Sizes, files_of
from stages.dedup.index import KEY, DedupIndex, fine_buckets, key_files

#: bytes that a pair of a new and an old document with a common band key takes in exchange files, about
HIT_BYTES = 100


class IndexPlan:
    """The plan by which tasks make an index. `step` and `config` are the name and the settings of the deduplication,
    and `plan` holds its groups of parts (files of documents)."""

    def __init__(self, step: str, config: Any, plan: Sequence[PartGroup], sizes: Sizes) -> None:
        self.step, self.config, self.plan = step, config, plan
        rows = sum(group.rows for group in plan) * config.bands
        self.ranges = sizes.buckets(rows * KEY.itemsize, len(plan))
        self.buckets = fine_buckets(rows, KEY, self.ranges)

    def waves(self, slices: Sequence[FileRef | None]) -> list[Wave]:
        """Return the waves (groups of tasks that may run at the same time) that make the index. `slices` are the
        removal slices of the parts (rows to drop)."""
        config = self.config

        def documents(done: Done) -> Iterator[TaskDraft]:
            for group in self.plan:
                removals = slices[group.first:group.first + group.size]
                refs = [{"side": side, "text": part.text, "removed": removed} for side, part, removed in zip(
                    group.sides(self.step), group.parts, removals, strict=True)]
                args = {"parts": refs, "bands": config.bands, "prefer": list(config.prefer), "ranges": self.ranges,
                        "max_chars": config.max_chars, "languages": config.words == "language"}
                yield TaskDraft("stages.dedup.index_texts:IndexDocuments", args, group.bytes,
                                f"{group.dataset}: index of {group.size} parts",
                                700 + group.rows * (config.bands * 50 + 200) // 2**20)

        def keys(done: Done) -> Iterator[TaskDraft]:
            files = files_of(done["index_documents"], "bands.seg")
            size = sum(f["bytes"] for f in files) // self.ranges
            for b in range(self.ranges if files else 0):
                args = {"files": files, "bucket": b, "ranges": self.ranges, "buckets": self.buckets}
                yield TaskDraft("stages.dedup.index_texts:IndexKeys", args, size,
                                f"index of band keys, range {b + 1}/{self.ranges}", 700)

        return [Wave("index_documents", documents), Wave("index_keys", keys)]

    def index(self, done: Done, settings: dict[str, Any], ranks: int) -> DedupIndex:
        """Return the index that the waves have made. `done` holds the results of the waves, `settings` those settings
        and versions that a reader of the index must share, and `ranks` the number of priorities of the documents."""
        written = done["index_documents"]
        groups = [{"rank": group.rank, "documents": task.files["documents.seg"], "texts": task.files["texts.bin"],
                   "ids": task.files["ids.parquet"]} for group, task in zip(self.plan, written, strict=True)]
        return DedupIndex(self.step, settings, ranks, {"bands": key_files(done["index_keys"], self.buckets)}, groups,
                          sum(task.counters["documents"] for task in written))


def lookup_tasks(done: Done, against: Sequence[DedupIndex], firsts: list[int], ranges: int) -> Iterator[TaskDraft]:
    """Yield the tasks that look up the band keys of new documents in the indexes `against`: one for each of the
    `ranges` ranges of keys. `firsts` holds the number of the first part of each group of new documents."""
    args: dict[str, Any] = {"maps": files_of(done["bands"], "bands.seg"), "firsts": firsts,
                            "indexes": [index.keys["bands"] for index in against],
                            "$volatile": {"groups": [len(index.groups) for index in against]}}
    for b in range(ranges if firsts else 0):
        yield TaskDraft("stages.dedup.against:BandLookup", {**args, "bucket": b},
                        sum(ref["bytes"] for ref in args["maps"]) // ranges,
                        f"old band keys, range {b + 1}/{ranges}", 900)


def hit_bytes(done: Done) -> int:
    """Estimate the bytes of all HIT records, which pair new documents with old ones that share a band key."""
    return sum(task.counters["hits"] for task in done["lookup"]) * HIT_BYTES


def route_tasks(done: Done, plan: Sequence[PartGroup], buckets: int) -> Iterator[TaskDraft]:
    """Yield the tasks that send old documents to the clusters of the new documents with which they share keys. `plan`
    holds the groups of new documents, one for each task, and `buckets` is the number of buckets of clusters."""
    args = {"members": files_of(done["clusters"], "members.seg"), "buckets": buckets,
            "hits": files_of(done["lookup"], "hits.seg")}
    for number, group in enumerate(plan if args["members"] else ()):
        yield TaskDraft("stages.dedup.against:Routes", {**args, "group": number}, hit_bytes(done) // len(plan),
                        f"{group.dataset}: old documents like those of {group.size} parts", 900)


def verify_args(done: Done, against: Sequence[DedupIndex], ranks: Sequence[int], signature: dict[str, Any],
                signature_key: str) -> dict[str, Any]:
    """Return the arguments of `stages.dedup.against:VerifyAgainst` that differ from those of `Verify` or come in
    addition. `ranks` holds the priority of each group of new documents. In the result, old documents have the first
    priorities, and those of new documents follow."""
    before = [sum(index.ranks for index in against[:number]) for number in range(len(against) + 1)]
    return {"touched": files_of(done["routes"], "touched.seg"), "signature": signature, "signature_key": signature_key,
            "ranks": [before[-1] + rank for rank in ranks],
            "indexes": [{"rank": rank, "groups": index.groups} for rank, index in zip(before, against)]}
