"""Makes the report's section about groups of duplicates: their sizes, the largest with the differences between the
texts, and the pairs of sources between which duplicates were found.

A group is a kept document with the documents that were removed because of it. Groups are put together from the rows of
the removed documents (`pipeline.report.sampled`). Where not all of these rows are read, sizes are those within the rows
that are.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from pipeline.report import sampled
from pipeline.report.marks import verdict
from pipeline.report.nodes import Node, batches
from pipeline.report.sampled import Stratum
from pipeline.report.samples import Place, rows_at, sample
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo
from stages.scrub.pii import scrub_text

#: groups that are shown of a barrier, removed documents that are shown of a group
LARGEST, MEMBERS = 4, 2
#: pairs of sources that are listed
PAIRS = 40
#: at most this many characters and words of two texts are compared; words shown around a difference and in all
CHARS, WORDS, AROUND, SHOWN = 1 << 15, 1500, 6, 160

COLUMNS = ["id", "url", "source", "text", "meta", "locator"]


def cluster_section(store: Store, barrier: Node, nodes: list[Node]) -> dict[str, Any]:
    """The section of a deduplication: {barrier, step, read, groups, sizes, largest, pairs, unknown}.

    `sizes` counts groups by log2 of their documents, `components` those of the graph of candidates (near-duplicates
    only; from counters, so always of all documents). `pairs` counts removed documents by their source and that of the
    kept document; `unknown` are those whose kept document is in none of the parts read, or was dropped by a later step.
    """
    step = barrier.steps[0]
    appliers = [n for n in nodes if barrier.name in n.deps]
    removed = _removed(appliers, step)
    groups: Counter[str] = Counter()
    sources: Counter[tuple[str, str]] = Counter()
    read = 0
    for _, _, _, source, kept in _rows(store, removed, step):
        groups[kept] += 1
        sources[source, kept] += 1
        read += 1
    total = sum(n for node in appliers for by in node.counters.get("stages", {}).get(f"barrier:{step}", {}).get(
        "dropped", {}).values() for n in by.values())
    kept_files = [info for node in appliers for info in _texts(node, nodes)]
    largest = heapq.nsmallest(LARGEST, groups.items(), key=lambda group: (-group[1], group[0]))
    places, origin = _look_up(store, kept_files, {kept for _, kept in sources}, {kept for kept, _ in largest})
    pairs: Counter[tuple[str, str]] = Counter()
    for (source, kept), docs in sources.items():
        if kept in origin:
            pairs[source, origin[kept]] += docs
    sizes = Counter((docs + 1).bit_length() - 1 for docs in groups.values())
    components = barrier.counters.get("clusters", {}).get("cluster_sizes")
    return {
        "barrier": barrier.name, "step": step, "read": {"docs": read, "of": total, "exact": read == total},
        "groups": len(groups), "sizes": {str(b): n for b, n in sorted(sizes.items())},
        **({"components": components} if components else {}),
        "largest": [_group(store, step, kept, docs + 1, removed, kept_files, places.get(kept))
                    for kept, docs in largest],
        "pairs": [{"removed": one, "kept": other, "docs": docs} for (one, other), docs in
                  sorted(pairs.items(), key=lambda p: (-p[1], p[0]))[:PAIRS]],
        "unknown": read - sum(pairs.values())}


def _removed(appliers: list[Node], step: str) -> list[FileInfo]:
    """The files, among those read, that hold documents which the barrier removed."""
    files = [record.files["dropped.parquet"] for node in appliers for record in node.choose(sampled.PARTS)
             if record.counters.get("stages", {}).get(f"barrier:{step}", {}).get("dropped")]
    return [info for info in files if info.rows]


def _rows(store: Store, files: list[FileInfo], step: str) -> Iterator[tuple[int, int, str, str, str]]:
    """(number of the file, row, id, source, id of the kept document) of documents that the barrier removed."""
    quota = Stratum(False, 0, tuple(files)).quota
    for number, info in enumerate(files):
        row = 0
        for batch in batches(store, info, ["id", "source", "stage", "meta"]):
            columns = (batch.column(name).to_pylist() for name in ("id", "source", "stage", "meta"))
            for id, source, stage, meta in zip(*columns, strict=True):
                if stage == step and (found := verdict(meta, step)) is not None:
                    yield number, row, id, source, found["kept"]
                row += 1
                if row >= quota:
                    break
            if row >= quota:
                break


def _texts(node: Node, nodes: list[Node]) -> list[FileInfo]:
    """The files that are read of the documents that a pass kept. For a pass that wrote row sets, those of the passes
    before it."""
    if "gone.parquet" not in node.writes:
        return [info for record in node.choose(sampled.PARTS) if (info := record.files["kept.parquet"]).rows]
    return [info for before in nodes if before.kind == "pass" and before.name in node.deps
            for info in _texts(before, nodes)]


def _look_up(store: Store, files: list[FileInfo], ids: set[str],
             placed: set[str]) -> tuple[dict[str, Place], dict[str, str]]:
    """The places of the documents `placed`, and the sources of the documents `ids`, as far as `files` have them."""
    places: dict[str, Place] = {}
    origin: dict[str, str] = {}
    quota = Stratum(True, 0, tuple(files)).quota
    for number, info in enumerate(files):
        row = 0
        for batch in batches(store, info, ["id", "source"]):
            for id, source in zip(batch.column("id").to_pylist(), batch.column("source").to_pylist(), strict=True):
                if id in ids:
                    origin[id] = source
                    if id in placed:
                        places[id] = (id, number, row)
                row += 1
            if row >= quota:
                break
    return places, origin


def _group(store: Store, step: str, kept: str, size: int, removed: list[FileInfo], kept_files: list[FileInfo],
           place: Place | None) -> dict[str, Any]:
    """A group with its kept document, if it was found, and its removed documents with the smallest ids, each with its
    difference from the kept one."""
    members = heapq.nsmallest(MEMBERS, ((id, number, row) for number, row, id, _, of in _rows(store, removed, step)
                                        if of == kept))
    rows = rows_at(store, removed, members, COLUMNS)
    twin = next(iter(rows_at(store, kept_files, [place], COLUMNS).values())) if place else None
    shown = []
    for member in members:
        row = rows[member]
        found = sample(row, step)
        found["similarity"] = (json.loads(row["meta"])[step] or {}).get("similarity")
        shown.append({**found, "diff": difference(twin["text"], row["text"]) if twin else None})
    return {"kept_id": kept, "size": size, "kept": sample(twin) if twin else None, "removed": shown}


def difference(kept: str, removed: str) -> list[list[str]]:
    """The words in which a removed text differs from the kept one: a list of [kind, words] with the kinds "both",
    "kept" (only there), "removed" (only there) and "cut" (words that are left out). The texts are scrubbed before they
    are compared. For equal texts there is one entry, the beginning."""
    a, b = (_words(text) for text in (kept, removed))
    if a == b:
        return [["both", " ".join(a[:SHOWN // 2])], *([["cut", ""]] if len(a) > SHOWN // 2 else [])]
    out: list[list[str]] = []
    left = SHOWN
    codes = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    for place, (kind, i, j, k, m) in enumerate(codes):
        if left <= 0:
            out.append(["cut", ""])
            break
        if kind == "equal":
            head, tail = (0 if place == 0 else AROUND), (0 if place == len(codes) - 1 else AROUND)
            if j - i <= head + tail:
                out.append(["both", " ".join(a[i:j])])
            else:
                out += [["both", " ".join(a[i:i + head])], ["cut", ""],
                        ["both", " ".join(a[j - tail:j] if tail else [])]]
            left -= min(j - i, head + tail)
            continue
        for word, some in (("kept", a[i:j]), ("removed", b[k:m])):
            if some:
                out.append([word, " ".join(some[:SHOWN // 4])])
                if len(some) > SHOWN // 4:
                    out.append(["cut", ""])
                left -= min(len(some), SHOWN // 4)
    return [entry for entry in out if entry[0] == "cut" or entry[1]]


def _words(text: str) -> list[str]:
    head = text[:CHARS]
    if len(text) > CHARS:
        head = head.rpartition(" ")[0]              # the last word may be half an address, which scrubbing would miss
    return [word[:80] for word in scrub_text(head).split()[:WORDS]]
