"""Chooses the report's samples. For each reason, these are a few documents that were dropped, quarantined or removed as
duplicates. Of each large source, these are a few documents that were kept.

A sample shows an excerpt of its text. The documents chosen are those with the smallest ids among the first SAMPLE_PARTS
parts (files of documents) of a pass (group of steps that run together). Ids are hashes, so this is like a random
choice, but each report of the same data shows the same samples.

Personal data is removed from everything shown (text, URL, path, error). A step may have removed it already, but the
recipe of a dataset may also have no such step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import islice
from typing import Any

from pipeline.report.marks import match, verdict
from pipeline.report.nodes import NodeFigures, batches, take
from pipeline.store.dataset import QUARANTINE
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo
from stages.scrub.pii import scrub_part
from stages.scrub.rows import MARGIN, mask_url
from stages.stage import Stage

#: samples per reason; characters of an excerpt; parts of a pass that are searched
SAMPLES, EXCERPT, SAMPLE_PARTS = 3, 320, 64
#: kept samples of a source in a dataset; most sources of a dataset with samples
KEPT, KEPT_SOURCES = 2, 12
#: pairs of near-duplicates shown for each deduplication; pairs tried, because a pair can only be shown if its kept
#: document is in one of the parts that are searched
PAIRS, PAIRS_TRIED = 4, 64
#: most characters and most words of two texts that are compared; words shown before the point where the texts differ
PARTING_CHARS, PARTING_WORDS, PARTING_BEFORE = 1 << 15, 1500, 8
#: an excerpt is made from this many characters of a text, because the text may begin with much white space
_SEARCHED_CHARS = 4096

_TURNED = str.maketrans("0123456789abcdef", "fedcba9876543210")
Place = tuple[str, int, int]                        # (id, number of its file, row)


def excerpt(text: str) -> str:
    """Return the start of a text on one line, without personal data. It ends in … if the text is longer."""
    # scrubbed with what follows: an address or a number that is cut in half would not be recognised
    shown, searched = (" ".join(text[:chars].split()) for chars in (_SEARCHED_CHARS, _SEARCHED_CHARS + MARGIN))
    line = scrub_part(searched, 0, len(shown))
    return line[:EXCERPT].rstrip() + " …" if len(line) > EXCERPT or len(text) > _SEARCHED_CHARS else line


def masked_address(address: str | None) -> str:
    """Return a URL or a path without secrets and personal data (`mask_url`). E-mail addresses are also recognised if
    '@' is written as %40 in the URL."""
    return mask_url((address or "").replace("%40", "@"))[:EXCERPT]


def _searched(node: NodeFigures, name: str) -> list[FileInfo]:
    """Return the first SAMPLE_PARTS files with this name that the node's tasks wrote. Samples are chosen only from
    them."""
    return list(islice(node.files(name), SAMPLE_PARTS))


def smallest(store: Store, files: list[FileInfo], by: list[str], n: int) -> dict[tuple[str, ...], list[Place]]:
    """Find, for each combination of values in the columns `by`, the `n` documents with the smallest ids. Returns
    {values: [(id, number of the file, row), …]}, sorted by id."""
    best: dict[tuple[str, ...], list[tuple[str, Place]]] = {}
    for number, info in enumerate(files):
        row = 0
        for batch in batches(store, info, ["id", *by]):
            for id, *key in zip(*(batch.column(c).to_pylist() for c in ("id", *by))):
                heap = best.setdefault(tuple(key), [])
                # heapq removes the smallest item, but here the largest id must be removed, so the hex digits are
                # inverted
                turned = id.translate(_TURNED)
                if len(heap) < n:
                    heapq.heappush(heap, (turned, (id, number, row)))
                elif turned > heap[0][0]:
                    heapq.heapreplace(heap, (turned, (id, number, row)))
                row += 1
    return {key: [place for _, place in sorted(heap, reverse=True)] for key, heap in best.items()}


def rows_at(store: Store, files: list[FileInfo], places: Iterable[Place],
            columns: list[str]) -> dict[Place, dict[str, Any]]:
    """Read the rows at these places, each given as (id, number of the file, row). Returns {place: {column: value}}."""
    by_file: dict[int, list[int]] = {}
    for _, number, row in places:
        by_file.setdefault(number, []).append(row)
    return {(values["id"], number, row): values for number, rows in sorted(by_file.items())
            for row, values in take(store, files[number], rows, columns).items()}


def drop_samples(store: Store, passes: list[NodeFigures],
                 stages: Mapping[str, Stage | str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Choose, for each stage and reason, at most SAMPLES documents that these passes dropped, those with the smallest
    ids. `stages` are the dataset's, as `stages_of` returns them. Returns {(stage, reason): samples}. A sample is what
    `sample` returns, with the passages that gave the reason if the stage can name them (`match`)."""
    out: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for node in passes:
        files = _searched(node, "dropped.parquet")
        chosen = smallest(store, files, ["stage", "reason"], SAMPLES)
        rows = rows_at(store, files, (p for places in chosen.values() for p in places),
                       ["id", "url", "source", "text", "meta", "locator", "language"])
        for (stage, reason), places in chosen.items():
            samples = [(rows[place], sample(rows[place], stage)) for place in places]
            out.setdefault((stage, reason), []).extend(
                {**chosen, **match(stages.get(stage), reason, row, chosen["url"])} for row, chosen in samples)
    return {key: sorted(samples, key=lambda s: s["id"])[:SAMPLES] for key, samples in out.items()}


def kept_samples(store: Store, last: NodeFigures) -> list[dict[str, Any]]:
    """Choose a few documents that the last pass of a dataset kept, from each of the sources with the most kept
    documents."""
    files = _searched(last, "kept.parquet")
    kept = last.counters.get("kept", {})
    sources = sorted(kept, key=lambda name: (-kept[name]["docs"], name))[:KEPT_SOURCES]
    chosen = smallest(store, files, ["source"], KEPT)
    places = [place for name in sources for place in chosen.get((name,), ())]
    rows = rows_at(store, files, places, ["id", "url", "source", "text", "meta", "locator"])
    return [sample(rows[place]) for place in places]


def sample(row: dict[str, Any], stage: str = "") -> dict[str, Any]:
    """Return the fields of a document that the report shows: id, url, file (with the entry inside it, for an archive),
    source, number of characters, excerpt. `stage` is the step that dropped the document. If this was a deduplication,
    the sample also has the id of the kept document and the similarity. Other fields of `meta` are not shown, because
    personal data is not removed from the titles and links in them."""
    removal, place = verdict(row["meta"], stage), row["locator"] or {}
    file = ":".join(filter(None, (place.get("file"), place.get("sub"))))
    return {"id": row["id"], "url": masked_address(row["url"]), "file": masked_address(file), "source": row["source"],
            "chars": len(row["text"]), "excerpt": excerpt(row["text"]),
            **({"kept": removal["kept"], "similarity": removal["similarity"]} if removal else {})}


def quarantine_samples(store: Store, passes: list[NodeFigures]) -> list[dict[str, Any]]:
    """Choose a few quarantined records for each (stage, reason), with their file, record number and error message."""
    columns = ["id", "source", "file", "record", "stage", "reason", "detail"]
    by_reason: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for node in passes:
        files = _searched(node, QUARANTINE)
        chosen = smallest(store, files, ["stage", "reason"], SAMPLES)
        rows = rows_at(store, files, (p for places in chosen.values() for p in places), columns)
        for key, places in chosen.items():
            stage, reason = key
            by_reason.setdefault((stage, reason), []).extend(rows[place] for place in places)
    return [{**row, "file": masked_address(row["file"]), "detail": excerpt(row["detail"] or "")}
            for _, rows in sorted(by_reason.items()) for row in sorted(rows, key=lambda r: r["id"])[:SAMPLES]]


def pair_samples(store: Store, barrier: str, appliers: list[NodeFigures],
                 nodes: list[NodeFigures]) -> list[dict[str, Any]]:
    """Choose at most PAIRS pairs of a document that a deduplication removed and the kept document that it resembles.
    `barrier` is the name of the deduplication's step, and `appliers` are the passes (groups of steps) that left the
    removed documents out.

    Pairs of an earlier pass come first. Within a pass, pairs with a similarity of 1 come last, and pairs are otherwise
    in the order of the removed documents' ids. The excerpts of a pair start near the first difference (`parting`). The
    similarity is None if it was not computed (`verify: 0`)."""
    out: list[dict[str, Any]] = []
    columns = ["id", "url", "source", "text", "meta", "locator"]
    for node in appliers:
        dropped = _searched(node, "dropped.parquet")
        places = smallest(store, dropped, ["stage"], PAIRS_TRIED).get((barrier,), [])
        verdicts = {place: v for place, row in rows_at(store, dropped, places, ["id", "meta"]).items()
                    if (v := verdict(row["meta"], barrier)) is not None}
        kept = list(islice(text_files(node, nodes), SAMPLE_PARTS))
        discarded = [*dropped, *_searched(node, QUARANTINE)]
        partners = {v["kept"] for v in verdicts.values()}
        partner_places = find(store, kept, partners - find(store, discarded, partners).keys())
        order = sorted((v["similarity"] is not None and v["similarity"] >= 1, place)
                       for place, v in verdicts.items() if v["kept"] in partner_places)[:PAIRS]
        for _, place in order:
            partner = partner_places[verdicts[place]["kept"]]
            [removed] = rows_at(store, dropped, [place], columns).values()
            [twin] = rows_at(store, kept, [partner], columns).values()
            first, second = parting(removed["text"], twin["text"])
            out.append({"similarity": verdicts[place]["similarity"], "removed": {**sample(removed), "excerpt": first},
                        "kept": {**sample(twin), "excerpt": second}})
    return out[:PAIRS]


def text_files(node: NodeFigures, nodes: list[NodeFigures]) -> Iterator[FileInfo]:
    """Yield the files with the texts of the documents that a pass (a group of steps that run together) kept. If the
    pass wrote no texts, but only lists of the rows that are gone (row sets), the files of the passes before it are
    yielded."""
    if "gone.parquet" not in node.writes:
        yield from node.files("kept.parquet")
        return
    for before in nodes:
        if before.kind == "pass" and before.name in node.deps:
            yield from text_files(before, nodes)


def parting(first: str, second: str) -> tuple[str, str]:
    """Return excerpts of two similar texts, without personal data. They start a few words before the first difference
    that comes after a stretch of at least PARTING_BEFORE common words. If the texts are equal, or have no such stretch,
    the excerpts start at the beginning."""
    # scrubbed first, because an excerpt that starts within a phone number would show the rest of it
    a, b = (scrub_part(text[:PARTING_CHARS + MARGIN], 0, PARTING_CHARS).split()[:PARTING_WORDS]
            for text in (first, second))
    if a == b:
        return excerpt(first), excerpt(second)
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()[:-1]
    ends = [(m.a + m.size, m.b + m.size) for m in blocks if m.size >= PARTING_BEFORE]
    at, to = next(((x, y) for x, y in ends if x < len(a) and y < len(b)), (0, 0))

    def shortened(words: list[str], start: int) -> str:
        return ("… " if start > PARTING_BEFORE else "") + excerpt(" ".join(words[max(0, start - PARTING_BEFORE):]))

    return shortened(a, at), shortened(b, to)


def find(store: Store, files: list[FileInfo], ids: set[str]) -> dict[str, Place]:
    """Find the documents with the given ids in these files. Returns {id: (id, number of the file, row)}, without the
    ids that are in none of the files."""
    places: dict[str, Place] = {}
    for number, info in enumerate(files):
        row = 0
        for batch in batches(store, info, ["id"]):
            for id in batch.column("id").to_pylist():
                if id in ids:
                    places[id] = (id, number, row)
                row += 1
    return places
