"""Decides which documents of a cluster are really near-duplicates, by comparing their sets of word n-grams.

A cluster comes from locality-sensitive hashing (LSH), so its documents are only candidates for removal. If A shares a
band of its MinHash signature with B, and B shares a band with C, all three are in one cluster, even if A and C differ.
A template that thousands of pages share also puts these pages into one cluster, whatever else they contain. If only one
document of each cluster were kept, much text would be lost: in Marin's audit of July 2026, 859,092 documents became 2.

This module goes through the documents of a cluster in order: by the priority of their dataset, then longest first, then
by id, or as the setting `prefer` says. It compares each document with the documents of the cluster that it has kept so
far and that share a band key with the document. It removes the document if, for one of these kept documents, one of the
following holds:

    - Their Jaccard similarity is at least `verify`.
    - The kept document has at least as many n-grams as the other one, and at least the share `containment` of the
      other's n-grams.

It keeps all other documents of the cluster.

The similarity is |A and B| / |A or B|, where A and B are the sets of word n-grams of the two stored texts, as 64-bit
hashes. The n-grams are those of the first `max_chars` characters of a text, simplified. With the setting `boilerplate`,
n-grams that many documents of a source have may be left out of both sets (`stages.dedup.boilerplate`). Without this
setting, anyone can recompute the similarity from the kept and the dropped text, as `stages.dedup.explain` does.

Band keys are computed before personal data is scrubbed, while texts are stored and compared after it. The text behind a
document's band keys and the text that is compared may thus differ, for example in an e-mail address, but both come from
the same page.

Texts are never passed from task to task. For each group of parts (files of documents), one task reads the texts of its
candidates once and writes their shingle sets (hashes of word n-grams) to one file, ordered by cluster. A task `Verify`
reads a bucket of clusters from these files. It reads the sets of many small clusters at once, and a kernel decides
about these clusters. It reads the sets of larger clusters when they are compared, through a cache of limited size. The
rules for both are the same (`stages.dedup.judge`). In a cluster of any size, a document is compared with at most
`max_comparisons` others (a count, not a time limit). A document for which these comparisons find no duplicate is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.dedup.cluster import MEMBER
from stages.dedup.fragment import (
    NEAR,
    VERDICT,
    bucket_of,
    by_part,
    fixed_bytes,
    ids_to_ints,
    read_segments,
    read_side,
    write_segments,
)
from stages.dedup.hashing import mix
from stages.dedup.judge import ClusterJudge
from stages.dedup.part_texts import text_batches
from stages.dedup.sets import distinct_of_texts
from stages.dedup.shingle_sets import ShingleSetReader, ShingleSetWriter
from stages.dedup.signature import MinHashSignature
from stages.dedup.survivor import DEFAULT, in_order, order_field, preference
from stages.task import Counters, Cursor, Inputs, Out


def candidate(bands: int, prefer: Sequence[str] = DEFAULT) -> np.dtype[Any]:
    """Return the dtype of the record of a candidate for removal, which is a document in a cluster. `bands` is the
    number of the document's band keys (hashes of the bands of its MinHash signature). If the preferences `prefer`
    compare dates or signals, the record has the field `order` (`stages.dedup.survivor`).

    The field `root` identifies the cluster: it is the smallest place (part << 32 | row; a part is a file of documents)
    of the cluster's documents. Further fields hold the document's part and row within its group of parts, its id, its
    length in characters, and its band keys. The document's shingle set (hashes of word n-grams) has `count` values, and
    begins at value `offset` of the group's file `shingles.bin`. `sum` is the xxh3-64 of the bytes of the set.
    """
    return np.dtype([("root", "<u8"), ("part", "<u4"), ("row", "<u4"), ("id_hi", "<u8"), ("id_lo", "<u8"),
                     ("chars", "<u4"), ("count", "<u4"), ("offset", "<u8"), ("sum", "<u8"), ("bands", "<u8", (bands,)),
                     *order_field(prefer)])


class Shingles:
    """Task that computes the shingle sets (hashes of word n-grams) of those documents in one group of parts (files of
    documents) that are candidates for removal. Its arguments are:

    - `members`: references to files of MEMBER records, which name the candidates and their clusters
    - `group`: the number of the group, and of its bucket in the files of MEMBER records
    - `parts`: for each part of the group references to its side table and its text
    - `signature`, `signature_key`: config and key of the stage that made the signatures
    - `buckets`: the number of buckets of clusters
    - `texts`: whether shingle sets are needed
    - `chunk`: bytes of shingles that are collected before they are ordered and written

    The task writes the exchange file `candidates.seg`, in buckets of clusters. If `texts` is true, it also writes
    `shingles.bin`, which holds each set as sorted unique uint64, little-endian.
    """

    name = "minhash_shingles"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        stage = MinHashSignature({**args["signature"], **args.get("$volatile", {})})
        dtype = candidate(stage.config.bands, stage.config.prefer)
        members = np.concatenate(read_segments(inputs, args["members"], args["group"], MEMBER))
        sets = ShingleSetWriter(out.path("shingles.bin"), args["chunk"]) if args["texts"] else None
        blocks = []
        for part, members_of_part in by_part(members):
            refs = args["parts"][part]
            records = np.zeros(len(members_of_part), dtype)
            for field in ("root", "part", "row"):
                records[field] = members_of_part[field]
            columns = ["id", "bands", "chars", *(["language"] if stage.config.words == "language" else []),
                       *(["order"] if "order" in (dtype.names or ()) else [])]
            side = read_side(inputs.fetch(refs["side"]), columns, members_of_part["row"])
            records["id_hi"], records["id_lo"] = ids_to_ints(side["id"])
            records["chars"] = side["chars"].to_numpy()
            records["bands"] = fixed_bytes(side["bands"])[1].view("<u8")
            if "order" in columns:
                records["order"] = fixed_bytes(side["order"])[1].view("<u8")
            blocks.append(records)
            if sets is not None:
                languages = side["language"].to_pylist() if "language" in columns else None
                done = 0
                for texts in text_batches(inputs.fetch(refs["text"]), members_of_part["row"]):
                    batch = slice(done, done := done + len(texts.starts))
                    shingles = stage.shingles_of_texts(texts, languages[batch] if languages is not None else None)
                    sets.add(records["root"][batch], *distinct_of_texts(*shingles))
        candidates = np.concatenate(blocks) if blocks else np.zeros(0, dtype)
        if sets is not None:
            candidates["count"], candidates["offset"], candidates["sum"] = sets.close()
        buckets = args["buckets"]
        write_segments(out, "candidates.seg", candidates, bucket_of(mix(candidates["root"]), buckets), buckets,
                       ("root",))
        return {"candidates": len(candidates), "shingles": sets.written if sets is not None else 0}


class Verify:
    """Task that decides, for one bucket of clusters of near-duplicates, which documents are removed. Its arguments are:

    - `candidates`: references to the files `candidates.seg`, one per group of parts
    - `shingles`: for each group a reference to its file of shingle sets, or null if texts are not compared
    - `ranks`: the priority of each group
    - `bucket`: the number of the bucket
    - `bands`: the number of bands of a signature
    - `verify`: the smallest similarity that removes a document; 0: one document of each cluster stays, however similar
      the others are
    - `max_comparisons`: most comparisons for one document
    - `containment`, `prefer`: as in the recipe, if it sets them
    - `boilerplate`: arguments of `Boilerplate`, if the recipe sets it
    - `record`: with `verify` 0, whether the similarity of each removed document to the kept one is noted
    - `$volatile`: arguments that do not change the task's key, here `cache`, the bytes of shingle sets held in memory

    The task writes two exchange files, both in buckets by number of the group. `verdicts.seg` has a VERDICT record for
    every document of every cluster. `near.seg` is about pairs of kept documents that were compared and whose similarity
    is at least RESEMBLING: each document of a pair gets a NEAR record that names the other one, unless many others are
    more similar (`stages.dedup.fragment.most_similar`). Memory holds a block of candidates, the largest cluster, the
    cache of shingle sets, and with `boilerplate` MEMORY_MB more (`stages.dedup.boilerplate`).
    """

    name = "minhash_verify"
    version = 5

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        ranks, judged, prefer = np.asarray(args["ranks"], np.int64), 0, args.get("prefer", DEFAULT)
        counters = {"comparisons": 0, "removed": 0, "kept": 0, "capped": 0, "max_cluster_kept": 0}
        sets = ShingleSetReader(inputs, args["shingles"], args["$volatile"]["cache"])
        with (out.segments("verdicts.seg", VERDICT, len(ranks)) as verdict_writer,
              out.segments("near.seg", NEAR, len(ranks)) as near_writer):
            for block in inputs.segments(args["candidates"], args["bucket"], whole=("root",), numbered=True):
                rank = ranks[block["source"]]
                order = in_order((block["root"],), preference(block, rank, prefer))
                block, rank = block[order], rank[order]
                judge = ClusterJudge(block, block["source"], rank, args, sets, counters, near_writer.write)
                verdict_writer.write(block["source"], judge.verdicts())
                judged += len(block)
        sets.close()
        return {"judged": judged, **counters}
