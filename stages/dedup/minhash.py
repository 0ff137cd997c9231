"""Removes near-duplicates by MinHash-LSH with verification: the recipe step `minhash`.

    - {minhash: {verify: 0.75}}                          # ours: LSH finds candidates, word 5-grams decide
    - {minhash: {recall: 0.99, containment: 0.8}}        # finds 99 % of the pairs, and texts inside longer ones
    - {minhash: {shingles: characters, ngram: 24}}       # NeMo's shingles
    - {minhash: {dialect: datatrove, verify: null}}      # FineWeb's: of every LSH cluster only one document is kept
    - {minhash: {dialect: datatrove, hash: xxhash, words: language, verify: null}}            # FineWeb-2's

`stages.dedup.signature` computes the signatures, document by document, and stores their band keys in side tables.
`MinHash` then compares all documents, in waves of tasks (the tasks of a wave may run at the same time). A part is a
file of documents. A group is several parts that one task reads. A removal slice lists the documents that are dropped
from one part. Each entry below names a wave, what one of its tasks reads, what the task writes, and its class:

    bands     side tables          → band keys by range, combined within the group    stages.dedup.lsh:BandMap
    links     ranges of band keys  → edges between the documents that share a key     stages.dedup.lsh:BandReduce
    clusters  edges                → connected components                             stages.dedup.cluster:Clusters
              (above 30 M edges by rounds of tasks: waves spread, star, star …)       stages.dedup.stars
    shingles  texts of candidates  → their shingle sets, by cluster                   stages.dedup.verify:Shingles
    verify    clusters             → removed documents, the kept ones, similarities   stages.dedup.verify:Verify
    slices    verdicts of a group  → a removal slice for parts with candidates        stages.dedup.minhash:MinHashSlices

Two documents of Jaccard similarity s share at least one band with probability 1 - (1 - s^rows)^bands. With the default
of 14 bands of 8 rows, this is .77 at s = .75, .92 at .8, and .99 at .85 (FineWeb, arXiv 2406.17557). With `recall`,
`stages.dedup.curve` chooses bands and rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import field_validator, model_validator

from stages.barrier import COUNT, Done, FileRef, PartRef, TaskDraft, Wave, write_slice
from stages.dedup import curve
from stages.dedup.boilerplate import COPIES, MEMORY_MB, boilerplate_limits
from stages.dedup.cluster import cluster_waves
from stages.dedup.fragment import (
    CONTAINED,
    NEAR,
    SIMILAR,
    SIZES,
    VERDICT,
    by_part,
    files_of,
    groups,
    read_segments,
    slice_table,
    slices_of,
)
from stages.dedup.index import DedupIndex, IndexedBarrier, against_setting, as_list, check_preference
from stages.dedup.lsh import BAND
from stages.dedup.minhash_index import IndexPlan, hit_bytes, lookup_tasks, route_tasks, verify_args
from stages.dedup.signature import MinHashSignature, SignatureConfig, load_tokenizer, signals_read
from stages.dedup.survivor import DEFAULT
from stages.stage import SettingsError, decision, keyed_settings
from stages.task import Counters, Cursor, Inputs, Out


def _number(value: Any) -> Any:
    """Return the number that a string spells; any other value is returned unchanged. For YAML, a number such as 99e-2
    is a string."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _verifies(config: MinHash.Config) -> bool:
    """Return whether the step, with the settings `config`, compares texts before it removes a document."""
    return isinstance(config.verify, float) and config.verify > 0


class MinHash(IndexedBarrier):
    """Remove near-duplicates, within and across the datasets of `from:`, in favour of documents of the first dataset in
    `priority:`.

    A cluster is a set of documents that share bands of their MinHash signatures, directly or through others. One
    document of each cluster always stays: the longest of those from the first dataset in `priority:`, and of equally
    long ones the one with the smallest id. Any other document is removed only when its word n-gram Jaccard similarity
    with a kept document that shares a band with it is at least `verify` (see `stages.dedup.verify`). A document is
    compared with at most `max_comparisons` kept documents. The setting `prefer` lets other properties than priority and
    length decide which document stays.

    With `verify: 0` or null, only one document of a cluster stays, and no texts are compared, as in FineWeb. (datatrove
    removes the same number of documents, but keeps an arbitrary one of each cluster.) `verify: record` removes the same
    documents as `verify: 0`, and stores how similar each removed document is to the kept one.

    With `containment`, a document is also removed if at least this share of its n-grams occurs in a kept document that
    shares a band with it and has at least as many n-grams. A text is thus never removed because it contains a shorter
    one.

    With `boilerplate: 0.05`, the shingles that many documents of one input have are left out when texts are compared.
    These are shingles that, within a cluster, more than 10 documents have, and more than 5 % of all documents of the
    input. They are not left out if less than a tenth of one of the two texts would remain.

    The setting `recall` is a probability, and replaces `bands` and `rows`. These are then chosen so that two documents
    of similarity `verify` share a band with at least this probability. With `containment`, this also holds for two
    equally long texts of which one contains that share of the other. `tokenmill plan` prints the probabilities for
    other similarities.

    In dialect tokenmill, texts of all languages are split into words alike: at white space, and in scripts without
    spaces at every character. In dialect datatrove, they are split by spaCy's English rules. With `words: language`, as
    in FineWeb-2, they are split by spaCy's rules for the document's language, or as in dialect tokenmill if spaCy has
    none. Dialect datasketch has the words of tokenmill, and the signatures of datasketch.

    Counters for the report, by wave: bands {documents, signed}; links {collisions, max_bucket, bucket_sizes}; clusters
    {candidates, clusters, max_cluster, cluster_sizes}; verify {comparisons, removed, kept, capped}; slices {removed:
    {dataset: {reason: documents}}, clustered: {dataset: documents}}. The histograms `bucket_sizes` and `cluster_sizes`
    have a bin b for 2**b <= documents < 2**(b + 1).
    """

    name = "minhash"
    version = 1
    cost_ms, leaves = 0.02, 0.8
    signals = (COUNT,)
    sizes = SIZES

    class Config(SignatureConfig):
        verify: float | Literal["record"] | None = decision(
            0.75, "smallest Jaccard similarity with a kept document at which a document is removed; 0 or null: not "
                  "checked; record: not checked, but stored")
        containment: float | None = decision(
            None, "smallest share of a document's n-grams that must be in a kept document with at least as many n-grams"
                  " for the document to be removed, too", gt=0, le=1, added=True)
        recall: float | None = decision(
            None, "chooses bands and rows so that at least this share of the pairs of similarity `verify` is compared",
            gt=0, lt=1, added=True)
        boilerplate: float | None = decision(
            None, f"shingles that more than this share of the documents of an input have, and more than {COPIES} "
                  "documents, are left out when texts are compared, if a tenth of each text is left",
            gt=0.001, lt=1, added=True)
        max_comparisons: int = decision(128, "most kept documents that one document is compared with; those that share "
                                             "the most bands come first", ge=1)
        against: tuple[str, ...] = against_setting()

        _listed = field_validator("against", mode="before")(as_list)

        @model_validator(mode="before")
        @classmethod
        def _bands_of_a_recall(cls, given: Any) -> Any:
            if not isinstance(given, dict):
                return given
            recall = _number(given.get("recall"))
            if not isinstance(recall, float) or not 0 < recall < 1:
                return given
            least, inside = _number(given.get("verify", 0.75)), _number(given.get("containment"))
            if not isinstance(least, (int, float)) or not 0 < least <= 1:
                raise ValueError("recall is that of pairs of similarity `verify`; set verify: 0.75, or remove recall")
            if isinstance(inside, float) and 0 < inside <= 1:
                least = min(least, inside / (2 - inside))      # the similarity of equally long texts
            bands, rows = curve.shape(recall, least)
            if {"bands": bands, "rows": rows} | {k: given[k] for k in ("bands", "rows") if k in given} != {
                    "bands": bands, "rows": rows}:
                raise ValueError(f"recall: {recall} chooses bands: {bands} and rows: {rows}; remove bands and rows, or "
                                 "remove recall")
            return {**given, "bands": bands, "rows": rows}

        @model_validator(mode="after")
        def _what_is_verified(self) -> MinHash.Config:
            if isinstance(self.verify, float) and not 0 <= self.verify <= 1:
                raise ValueError("verify is a similarity from 0 to 1")
            if self.containment is not None and not _verifies(self):
                raise ValueError("containment needs verify: texts are not compared otherwise; set verify: 0.75 or "
                                 "remove containment")
            return self

        @model_validator(mode="after")
        def _boilerplate_of_compared_texts(self) -> MinHash.Config:
            if self.boilerplate is not None and not _verifies(self):
                raise ValueError("boilerplate needs verify: texts are not compared otherwise; set verify: 0.75 or "
                                 "remove boilerplate")
            if self.boilerplate is not None and self.containment is not None:
                raise ValueError("boilerplate leaves shingles out, of which containment is a share; remove one of the "
                                 "two")
            if self.boilerplate is not None and self.against:
                raise ValueError("boilerplate is counted in the documents of a run, and old documents are not among "
                                 "them; remove boilerplate or against")
            return self

        @model_validator(mode="after")
        def _old_documents_stay(self) -> MinHash.Config:
            check_preference(self.against, self.prefer)
            if self.against and not _verifies(self):
                raise ValueError("against needs verify: without it one document of each cluster stays, and a new one "
                                 "would join clusters of old ones; set verify: 0.75 or remove against")
            return self

    def reads(self) -> dict[str, str]:
        return signals_read(self.config)

    def problems(self) -> dict[str, str]:
        if self.config.tokenizer is not None and os.path.exists(self.config.tokenizer):
            try:
                load_tokenizer(self.config.tokenizer)
            except SettingsError as e:
                return {"tokenizer": str(e)}
        return {}

    def facts(self) -> list[str]:
        threshold = self.config.verify if isinstance(self.config.verify, float) and self.config.verify else 0.75
        return curve.facts(threshold, self.config.bands, self.config.rows)

    def prepare(self) -> tuple[str, dict[str, Any]]:
        return "stages.dedup.signature:MinHashSignature", self._signature()

    @property
    def no_index(self) -> str:
        if not _verifies(self.config):
            return "it compares no texts; set verify: 0.75 in the recipe, and run it again"
        return "" if self.config.boilerplate is None else (
            "its boilerplate depends on all documents of a run; remove boilerplate from the recipe, and run it again")

    def _signature(self) -> dict[str, Any]:
        return {k: v for k, v in keyed_settings(self.config).items() if k in SignatureConfig.model_fields}

    def waves(self, parts: Sequence[PartRef], against: Sequence[DedupIndex] = ()) -> list[Wave]:
        sizes, plan = self.sizes, groups(parts, self.sizes)
        config = self.config
        verify = 0.0 if config.verify == "record" else float(config.verify or 0.0)
        texts = verify > 0 or config.verify == "record"
        signature = {k: v for k, v in self._signature().items() if k != "tokenizer"}   # `stage_key` covers its content
        # settings with their default are left out, so that results from before these settings are reused
        judging = {**({"containment": config.containment} if config.containment else {}),
                   **({"record": True} if config.verify == "record" else {}),
                   **({"boilerplate": boilerplate_limits(config.boilerplate, plan)} if config.boilerplate else {}),
                   **({"prefer": list(config.prefer)} if config.prefer != DEFAULT else {})}
        stage_key = MinHashSignature(self._signature()).key()
        records = sum(group.rows for group in plan) * config.bands
        ranges = sizes.buckets(records * BAND.itemsize, len(plan))
        firsts = [group.first for group in plan]
        for group in plan:
            group.sides(self.name)                        # a part without a side table is refused before anything runs

        def bands(done: Done) -> Iterator[TaskDraft]:
            for group in plan:
                side = group.sides(self.name)
                yield TaskDraft("stages.dedup.lsh:BandMap", {"sides": side, "buckets": ranges},
                                sum(s["bytes"] for s in side), f"{group.dataset}: band keys of {len(side)} parts",
                                500 + group.rows * config.bands * 75 // 2**20)

        def links(done: Done) -> Iterator[TaskDraft]:
            maps = files_of(done["bands"], "bands.seg")
            for b in range(ranges if plan else 0):
                yield TaskDraft("stages.dedup.lsh:BandReduce", {"maps": maps, "firsts": firsts, "bucket": b},
                                records * BAND.itemsize // ranges,
                                f"documents that share a band, range {b + 1}/{ranges}", 900)

        def shingles(done: Done) -> Iterator[TaskDraft]:
            members, buckets = files_of(done["clusters"], "members.seg"), judges(done)
            for number, group in enumerate(plan if members else ()):
                args = {"members": members, "group": number, "texts": texts,
                        "parts": [{"side": s, "text": p.text} for s, p in zip(group.sides(self.name), group.parts)],
                        "signature": signature, "signature_key": stage_key, "buckets": buckets,
                        "chunk": sizes.shingle_chunk_bytes,
                        **({"$volatile": {"tokenizer": config.tokenizer}} if config.tokenizer else {})}
                yield TaskDraft("stages.dedup.verify:Shingles", args, group.bytes,
                                f"{group.dataset}: shingles of the candidates of {group.size} parts", 1200)

        def judged(done: Done) -> Iterator[TaskDraft]:
            buckets = judges(done)
            shared = {"candidates": files_of(done["shingles"], "candidates.seg"),
                      "shingles": [r.files.get("shingles.bin") for r in done["shingles"]],
                      "ranks": [group.rank for group in plan], "bands": config.bands, "verify": verify, **judging,
                      "max_comparisons": config.max_comparisons, "$volatile": {"cache": sizes.shingle_cache_bytes}}
            size = sum(f["bytes"] for f in [*shared["candidates"], *(s for s in shared["shingles"] if s)])
            task = "stages.dedup.verify:Verify"
            if against:
                task = "stages.dedup.against:VerifyAgainst"
                shared |= verify_args(done, against, shared["ranks"], signature, stage_key)
                shared["$volatile"] |= {"tokenizer": config.tokenizer} if config.tokenizer else {}
            for b in range(buckets if shared["candidates"] else 0):
                yield TaskDraft(task, {**shared, "bucket": b}, size // buckets,
                                f"clusters {b + 1}/{buckets}", 1500 + (MEMORY_MB if config.boilerplate else 0))

        def slices(done: Done) -> Iterator[TaskDraft]:
            # shared by all groups, so that the store writes the lists once
            verdicts, near = (files_of(done["verify"], name) for name in ("verdicts.seg", "near.seg"))
            for number, group in enumerate(plan if verdicts else ()):
                yield TaskDraft("stages.dedup.minhash:MinHashSlices",
                                {"verdicts": verdicts, "near": near, "group": number, "dataset": group.dataset},
                                1 << 20, f"{group.dataset}: removals of {group.size} parts")

        def judges(done: Done) -> int:
            """Return the number of buckets into which the clusters are divided. One task compares the documents of one
            bucket. The number is estimated from the number of candidates for removal and the bytes of an average
            document's shingles (hashes of word n-grams)."""
            rows, size = sum(group.rows for group in plan), sum(group.bytes for group in plan)
            candidates = sum(r.counters["candidates"] for r in done["clusters"])
            shingle_bytes = candidates * size * 3 // max(rows, 1) if texts else 0
            touched = hit_bytes(done) if against else 0
            return sizes.buckets(candidates * (80 + 8 * config.bands) + shingle_bytes + touched, len(plan))

        lookup, routes = [], []
        if against:
            lookup = [Wave("lookup", lambda done: lookup_tasks(done, against, firsts, ranges))]
            routes = [Wave("routes", lambda done: route_tasks(done, plan, judges(done)))]
        return [Wave("bands", bands), Wave("links", links), *lookup,
                *cluster_waves(firsts, sizes, ("links", "lookup") if against else ("links",)),
                Wave("shingles", shingles), *routes, Wave("verify", judged), Wave("slices", slices)]

    def index_waves(self, parts: Sequence[PartRef], slices: Sequence[FileRef | None], done: Done) -> list[Wave]:
        return self._index_plan(parts).waves(slices)

    def index(self, parts: Sequence[PartRef], done: Done, ranks: int) -> DedupIndex:
        return self._index_plan(parts).index(done, self.index_settings(), ranks)

    def _index_plan(self, parts: Sequence[PartRef]) -> IndexPlan:
        return IndexPlan(self.name, self.config, groups(parts, self.sizes), self.sizes)

    def slices(self, parts: Sequence[PartRef], results: Done) -> Iterable[FileRef | None]:
        return slices_of(groups(parts, self.sizes), results["slices"])


#: why a document was dropped, as reports name it
REASONS = {SIMILAR: "minhash", CONTAINED: "minhash_contained"}


class MinHashSlices:
    """Task that writes the removal slices (lists of rows to drop) of one group of parts (files of documents).

    Arguments: `verdicts` and `near` (references to the files that `stages.dedup.verify:Verify` wrote), `group` (number
    of the group, and of its bucket in these files), `dataset`. The task writes `slice.PART.parquet` for every part with
    documents in clusters.
    """

    name = "minhash_slices"
    version = 2

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        all_verdicts = np.concatenate(read_segments(inputs, args["verdicts"], args["group"], VERDICT))
        near = dict(by_part(np.concatenate(read_segments(inputs, args["near"], args["group"], NEAR))))
        for part, verdicts in by_part(all_verdicts):
            why = [REASONS.get(removed, "") for removed in verdicts["removed"].tolist()]
            sliced = slice_table(verdicts["row"], verdicts["removed"] > 0, why, verdicts, near.get(part))
            write_slice(out, f"slice.{part}.parquet", sliced)
        removed = {reason: int((all_verdicts["removed"] == code).sum()) for code, reason in REASONS.items()}
        removed = {reason: n for reason, n in removed.items() if n or reason == "minhash"}
        return {"removed": {args["dataset"]: removed}, "clustered": {args["dataset"]: len(all_verdicts)}}
