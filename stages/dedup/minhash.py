"""Near-duplicate removal by MinHash-LSH with verification: the recipe step `minhash` and the stage for its signatures.

    - {minhash: {verify: 0.75}}                          # ours: LSH finds candidates, word 5-grams decide
    - {minhash: {dialect: datatrove, verify: null}}      # FineWeb's: all but one document of every LSH cluster go

Signatures ride in the pass before the barrier; then, as waves of tasks over groups of parts (see `fragment`):

    bands     side tables          → band keys by range, combined within the group    stages.dedup.lsh:BandMap
    links     ranges of band keys  → edges between the documents under one key        stages.dedup.lsh:BandReduce
    clusters  edges                → connected components (one task)                  stages.dedup.cluster:Clusters
    shingles  texts of candidates  → their shingle sets, by cluster                   stages.dedup.verify:Shingles
    verify    clusters             → who is removed, for whom, how similar            stages.dedup.verify:Verify
    slices    verdicts of a group  → one removal slice for each part                  stages.dedup.minhash:MinHashSlices

Two documents of Jaccard similarity s meet in a band with probability 1 - (1 - s^rows)^bands: .77 at .75, .92 at .8,
.99 at .85 with the default 14 x 8 (FineWeb, arXiv 2406.17557).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from stages.barrier import Barrier, FileRef, PartRef, TaskDraft, TaskResult, Wave
from stages.dedup.fragment import (
    VERDICT,
    buckets_for,
    by_part,
    groups,
    read_segments,
    slice_table,
    slices_of,
    write_slice,
)
from stages.dedup.hashing import Permutations, band_keys, word_shingles
from stages.stage import Stage, StageConfig, decision, signal
from stages.text.ngrams import shingle_sha1, shingle_xxhash
from stages.text.normalize import simplify
from stages.text.words import words_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.document import Document


class SignatureConfig(StageConfig):
    bands: int = signal(14, "bands of the signature; more find more candidates", ge=1, le=256)
    rows: int = signal(8, "hashes in a band; more demand more similarity", ge=1, le=64)
    ngram: int = signal(5, "words in a shingle", ge=1, le=64)
    seed: int = signal(1, "seed of the hash functions", ge=0, lt=2**32)
    max_chars: int = signal(500_000, "characters of a text that are looked at: more saturate a signature", ge=1)
    dialect: Literal["tokenmill", "datatrove"] = signal("tokenmill", "whose words and hashes (stages.dedup.hashing)")
    hash: Literal["sha1", "xxhash"] = signal("sha1", "shingle hash of dialect datatrove (FineWeb-2: xxhash)")


class MinHashSignature(Stage):
    """Band keys of a document (Broder 1997; one 64-bit key a band), for the side table of `minhash`.

    `bands` holds the keys as little-endian uint64, and nothing for a text of fewer than `ngram` words, which has no
    near-duplicates (`exact` finds its duplicates); `chars` counts the characters of the whole text, `words` the words
    looked at.
    """

    name = "minhash_signature"
    version = 1
    side = pa.schema([("bands", pa.binary()), ("chars", pa.uint32()), ("words", pa.uint32())])
    Config = SignatureConfig

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        c = self.config
        # `simplify` goes by the Unicode version of regex (\p{Nd})
        self.libraries = ("regex", "spacy") if c.dialect == "datatrove" else ("regex",)
        self._permute = Permutations(c.bands * c.rows, c.seed, c.dialect)

    def shingles(self, text: str) -> tuple[NDArray[np.uint64], int]:
        """(hash of every word n-gram in order, number of words) of the first `max_chars` characters of a text."""
        plain = simplify(text[:self.config.max_chars])
        if self.config.dialect == "tokenmill":
            return word_shingles(plain, self.config.ngram)
        words = words_of(plain)
        hashed = shingle_sha1 if self.config.hash == "sha1" else shingle_xxhash
        return hashed(words, self.config.ngram), len(words)

    def signature(self, text: str) -> NDArray[np.uint64] | None:
        """uint64[bands * rows], None for a text without shingles."""
        shingles, _ = self.shingles(text)
        return self._permute(shingles) if len(shingles) else None

    def process(self, doc: Document) -> str | None:
        shingles, words = self.shingles(doc.text)
        keys = b""
        if len(shingles):
            keys = band_keys(self._permute(shingles), self.config.bands, self.config.rows).astype("<u8").tobytes()
        doc.side[self.name] = {"bands": keys, "chars": len(doc.text), "words": words}
        return None


class MinHash(Barrier):
    """Remove near-duplicates, within and across the datasets of `from:`, keeping those of the first in `priority:`.

    Of a cluster the document of the best dataset stays, among them the longest, then the smallest id; every other goes
    only when its word n-gram Jaccard similarity with a kept document that shares a band with it is at least `verify`
    (see `stages.dedup.verify`). `verify: 0` or null removes all others unseen, as datatrove does for FineWeb; there the
    survivor of a cluster is arbitrary, the number removed is the same.

    Counters for the report, by wave: bands {documents, signed}; links {collisions, max_bucket, bucket_sizes}; clusters
    {candidates, clusters, max_cluster, cluster_sizes}; verify {comparisons, removed, kept, capped}; slices {removed:
    {dataset: {reason: documents}}, clustered: {dataset: documents}}. Keys of histograms are log2 bins.
    """

    name = "minhash"
    version = 1

    class Config(SignatureConfig):
        verify: float | None = decision(0.75, "smallest Jaccard similarity with a kept document that removes one; 0 or "
                                              "null: no check", ge=0, le=1)
        max_comparisons: int = decision(128, "kept documents a document is compared with at most; those that share "
                                             "most bands first", ge=1)

    def prepare(self) -> tuple[str, dict[str, Any]]:
        return "stages.dedup.minhash:MinHashSignature", self._signature()

    def _signature(self) -> dict[str, Any]:
        return {k: v for k, v in self.config.model_dump(mode="json").items() if k in SignatureConfig.model_fields}

    def waves(self, parts: list[PartRef]) -> list[Wave]:
        plan = groups(parts)
        c = self.config
        verify = float(c.verify or 0.0)
        stage_key = MinHashSignature(self._signature()).key()
        records = sum(g.rows for g in plan) * c.bands
        ranges = buckets_for(records * 20)
        firsts = [g.first for g in plan]
        sides = [g.sides(self.name) for g in plan]

        def bands(done: Mapping[str, list[TaskResult]]) -> list[TaskDraft]:
            return [TaskDraft("stages.dedup.lsh:BandMap", {"sides": side, "buckets": ranges},
                              sum(s["bytes"] for s in side), f"{g.dataset}: band keys of {len(side)} parts",
                              500 + g.rows * c.bands * 75 // 2**20) for g, side in zip(plan, sides)]

        def links(done: Mapping[str, list[TaskResult]]) -> list[TaskDraft]:
            maps = [r.files["bands.seg"] for r in done["bands"]]
            return [TaskDraft("stages.dedup.lsh:BandReduce", {"maps": maps, "firsts": firsts, "bucket": b},
                              records * 20 // ranges, f"documents that share a band, range {b + 1}/{ranges}",
                              500 + records * 85 // ranges // 2**20) for b in range(ranges if plan else 0)]

        def clusters(done: Mapping[str, list[TaskResult]]) -> list[TaskDraft]:
            files = [r.files["links.seg"] for r in [*done["bands"], *done["links"]]]
            linked = sum(r.counters["linked"] for r in [*done["bands"], *done["links"]])
            args = {"links": files, "firsts": firsts + [0] * len(done["links"]), "groups": firsts}
            return [TaskDraft("stages.dedup.cluster:Clusters", args, sum(f["bytes"] for f in files), "clusters",
                              700 + linked * 60 // 2**20)] if linked else []

        def shingles(done: Mapping[str, list[TaskResult]]) -> list[TaskDraft]:
            drafts = []
            for number in touched(done):
                group = plan[number]
                args = {"members": done["clusters"][0].files["members.seg"], "group": number, "texts": verify > 0,
                        "parts": [{"side": s, "text": p.text} for s, p in zip(sides[number], group.parts)],
                        "signature": self._signature(), "signature_key": stage_key, "buckets": judges(done)}
                label = f"{group.dataset}: shingles of the candidates of {len(group.parts)} parts"
                drafts.append(TaskDraft("stages.dedup.verify:Shingles", args, group.bytes, label, 1200))
            return drafts

        def judged(done: Mapping[str, list[TaskResult]]) -> list[TaskDraft]:
            numbers = touched(done)
            shared = {"candidates": [r.files["candidates.seg"] for r in done["shingles"]],
                      "shingles": [r.files.get("shingles.bin") for r in done["shingles"]],
                      "groups": numbers, "ranks": [plan[n].rank for n in numbers], "of": len(plan), "bands": c.bands,
                      "verify": verify, "max_comparisons": c.max_comparisons}
            size = sum(f["bytes"] for f in [*shared["candidates"], *(s for s in shared["shingles"] if s)])
            return [TaskDraft("stages.dedup.verify:Verify", {**shared, "bucket": b}, size // judges(done),
                              f"clusters {b + 1}/{judges(done)}", 1500) for b in range(judges(done) if numbers else 0)]

        def slices(done: Mapping[str, list[TaskResult]]) -> list[TaskDraft]:
            verdicts = [r.files["verdicts.seg"] for r in done["verify"]]
            return [TaskDraft("stages.dedup.minhash:MinHashSlices",
                              {"verdicts": verdicts, "group": n, "dataset": plan[n].dataset}, 1 << 20,
                              f"{plan[n].dataset}: removals of {len(plan[n].parts)} parts") for n in touched(done)]

        def judges(done: Mapping[str, list[TaskResult]]) -> int:
            """Buckets of clusters: by the records, and the bytes of shingles an average document would have."""
            rows, size = sum(g.rows for g in plan), sum(g.bytes for g in plan)
            some = sum(r.counters["candidates"] for r in done["clusters"])
            return buckets_for(some * (80 + 8 * c.bands) + (some * size * 3 // max(rows, 1) if verify else 0))

        return [Wave("bands", bands), Wave("links", links), Wave("clusters", clusters), Wave("shingles", shingles),
                Wave("verify", judged), Wave("slices", slices)]

    def slices(self, parts: list[PartRef], results: Mapping[str, list[TaskResult]]) -> list[FileRef | None]:
        return slices_of(groups(parts), touched(results), results["slices"])


def touched(done: Mapping[str, list[TaskResult]]) -> list[int]:
    """Numbers of the groups that have candidates."""
    return sorted(int(g) for r in done["clusters"] for g in r.counters["candidates_by_group"])


class MinHashSlices:
    """args: verdicts [$ref], group (its bucket), dataset. Writes `slice.PART.parquet` for every touched part."""

    version = 1

    @staticmethod
    def run(inputs: Any, cursor: Any, out: Any) -> dict[str, Any]:
        args = inputs.args
        every = np.concatenate(read_segments(inputs, args["verdicts"], args["group"], VERDICT))
        for part, verdicts in by_part(every):
            write_slice(out, part, slice_table(verdicts["row"], verdicts["removed"] > 0, "minhash", verdicts))
        gone = int((every["removed"] > 0).sum())
        return {"removed": {args["dataset"]: {"minhash": gone}}, "clustered": {args["dataset"]: len(every)}}
