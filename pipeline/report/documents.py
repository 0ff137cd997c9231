"""Makes the report's sections about documents: the sources, the funnel (how many documents of a source remain after
each dataset), the datasets, and the duplicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.report.nodes import NodeFigures
from pipeline.report.samples import drop_samples, masked_address, pair_samples, quarantine_samples
from pipeline.store.fs import Store
from pipeline.store.records import Counters, merge_counters
from stages.cut import cut_name
from stages.stage import Stage

#: the report warns when a deduplication removes more than this share of the documents of a source, or cuts more than
#: this share of their text
ALARM = 0.5
#: most quarantined input files of a source that are named
BAD_FILES = 100
#: kinds of page of a PDF, by how it was read (stages.extract.pdf.step.ROUTES)
PAGES = ("text_layer", "ocr", "empty", "no_text", "unreadable", "cipher")


def readers(name: str, passes: list[NodeFigures]) -> list[NodeFigures]:
    """Return the passes (groups of steps that run together) that read the files of the source `name`. There are several
    if several datasets use the source; they all read the same records."""
    return [p for p in passes if f"index:{name}" in p.deps and name in p.counters.get("read", {})]


def source_section(name: str, info: Mapping[str, Any], passes: list[NodeFigures]) -> dict[str, Any]:
    """Make the report's section about a source. It has the files, bytes and records of the source. `skipped` and `bad`
    count skipped and unreadable records by reason. `lost` counts, by column and reason, values that documents could not
    keep. `bad_files` are the files that are quarantined as a whole or in part, with their unread bytes by reason; at
    most BAD_FILES of them are named."""
    counters: Counters = next((p.counters["read"][name] for p in readers(name, passes)), {})
    files: dict[str, dict[str, int]] = {}
    for node in readers(name, passes):
        files |= node.counters.get("bad_files", {}).get(name, {})
    listed = [{"file": masked_address(file), "reasons": reasons} for file, reasons in sorted(files.items())[:BAD_FILES]]
    return {**info, "records": counters.get("records", 0), "skipped": dict(counters.get("skipped", {})),
            "bad": dict(counters.get("bad", {})), **({"lost": counters["lost"]} if "lost" in counters else {}),
            "bad_files": {"files": len(files), "bytes": sum(sum(r.values()) for r in files.values()), "listed": listed}}


def funnel(sources: Mapping[str, Any], passes: list[NodeFigures],
           tokens: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return, for each source, rows that show how much of the source is left. The first row has the documents and bytes
    that were read. Then each dataset has a row with those that it kept, and each token stream a row with its documents
    and tokens (training and held-out data together).

    `bytes` counts UTF-8 bytes of text. The first row is an exception: if a later step extracts the text, it counts raw
    bytes (HTML, PDF).
    """
    out: dict[str, list[dict[str, Any]]] = {}
    for name in sources:
        rows = [{"step": "read", **p.counters["in"][name]} for p in readers(name, passes)[:1]
                if name in p.counters["in"]]
        for node in passes:
            if node.publishes and any(name in p.counters.get("in", {}) for p in passes if p.dataset == node.dataset):
                rows.append({"step": node.dataset, **node.counters.get("kept", {}).get(name, {"docs": 0, "bytes": 0})})
        for stream, section in tokens.items():
            if name in section["sources"]:
                rows.append({"step": f"tokens ({stream})", **section["sources"][name]})
        out[name] = rows
    return out


def dataset_section(store: Store, passes: list[NodeFigures], stages: Mapping[str, Stage | str]) -> dict[str, Any]:
    """Make the report's section about a dataset, which the `passes` (groups of steps that run together) made. `stages`
    are its steps, as `stages_of` returns them.

    The section has the numbers of kept, dropped and quarantined documents, and the reasons for dropping, with samples.
    It has the languages, lengths and personal data of kept and of dropped documents, and the licences of dropped
    documents. The distributions of scores cover all documents that the scoring stage saw (`pipeline.passes.tally`).
    Everything except the samples comes from counters of the passes.
    """
    last = next(p for p in passes if p.publishes)
    reasons: dict[tuple[str, str], dict[str, Any]] = {}
    quarantined: Counters = {}
    for node in passes:
        merge_counters(quarantined, node.counters.get("quarantined", {}))
        for label, stats in node.counters.get("stages", {}).items():
            stage = label.partition(":")[2]
            for reason, by_source in stats["dropped"].items():
                row = reasons.setdefault((stage, reason), {"stage": stage, "reason": reason, "docs": 0, "sources": {}})
                row["docs"] += sum(by_source.values())
                merge_counters(row["sources"], by_source)
    samples = drop_samples(store, passes, stages)
    for key, row in reasons.items():
        row["samples"] = samples.get(key, [])
        problems = [problem for chosen in row["samples"] if (problem := chosen.pop("unmarked", ""))]
        row |= {"unmarked": problems[0]} if problems else {}
    kept = last.counters.get("kept", {})
    return {
        "docs": sum(s["docs"] for s in kept.values()), "bytes": sum(s["bytes"] for s in kept.values()),
        "parts": last.tasks, "kept": kept,
        "reasons": sorted(reasons.values(), key=lambda r: (-r["docs"], r["stage"], r["reason"])),
        "quarantined": quarantined,
        "quarantine_samples": quarantine_samples(store, passes) if quarantined else [],
        "languages": last.counters.get("languages", {}), "lengths": last.counters.get("lengths", {}),
        "dropped_languages": merged(passes, "dropped_languages"),
        "dropped_lengths": merged(passes, "dropped_lengths"), "scores": merged(passes, "scores"),
        **_of_dropped(passes, sum(row["docs"] for row in reasons.values())),
        "pii": last.counters.get("pii", {}), "pdf": pdf_pages(passes),
        **({"contamination": {name: {"noted": 0, **figures} for name, figures in tallies.items()}}
           if (tallies := merged(passes, "tallies").get("decontaminate")) else {}),
    }


def _of_dropped(passes: list[NodeFigures], dropped: int) -> dict[str, Counters]:
    """Return the licences and the personal data of the `dropped` documents. The result is {} if an older version, which
    did not count them, judged some of the documents: sums over the others would look like those of all."""
    licences = merged(passes, "dropped_licences")
    counted = sum(docs for by in licences.values() for docs in by.values())
    return {"dropped_licences": licences, "dropped_pii": merged(passes, "dropped_pii")} if counted == dropped else {}


def merged(passes: Iterable[NodeFigures], name: str) -> Counters:
    """Return the sums of one kind of counters (such as "kept" or "dropped_bytes"), which `name` selects, over the
    passes (groups of steps that run together)."""
    out: Counters = {}
    for node in passes:
        merge_counters(out, node.counters.get(name, {}))
    return out


def pdf_pages(passes: list[NodeFigures]) -> dict[str, Any] | None:
    """Return counts of the PDFs that these passes read, kept or dropped; None when no PDF was read. `pages` counts
    pages by the way in which they were read (PAGES). `confidence` counts pages with text by confidence in tenths.
    `unread` counts documents with pages that are not blank but could not be read."""
    tally = merged(passes, "tallies").get("pdf")
    if tally is None:
        return None
    return {"docs": tally["docs"], "unread": tally["unread"], "confidence": dict(sorted(tally["confidence"].items())),
            "pages": {name: tally["pages"].get(name, 0) for name in PAGES}}


def duplicate_section(store: Store, barrier: NodeFigures, nodes: list[NodeFigures]) -> dict[str, Any]:
    """Make the report's section about a deduplication. It has the documents compared, removals by reason and source,
    similarity of the removed documents to the kept ones, and a few pairs. It lists the sources that lost more than the
    share ALARM of their documents. If the deduplication cuts passages out of documents, `cut` counts them, and names
    the sources that lost more than the share ALARM of their text.

    For near-duplicates (minhash), `candidates` is the number of documents that share a band of hashes with another
    document. Documents that share a band, directly or through others, form a cluster. `clusters` is the number of
    clusters, and `max_cluster` the number of documents in the largest cluster.
    """
    step = barrier.steps[0]
    appliers = [n for n in nodes if barrier.name in n.deps]
    removed: Counters = {}
    looked_at: dict[str, int] = {}
    for node in appliers:
        for source, counts in node.counters.get("in", {}).items():
            looked_at[source] = looked_at.get(source, 0) + counts["docs"]
        merge_counters(removed, node.counters.get("stages", {}).get(f"barrier:{step}", {}).get("dropped", {}))
    removed_by_source: dict[str, int] = {}
    for by_source in removed.values():
        merge_counters(removed_by_source, by_source)
    inside = barrier.counters.get("clusters", {})
    return {"barrier": barrier.name, "step": step, "dataset": barrier.dataset, "looked_at": looked_at,
            "removed": removed,
            **{k: inside[k] for k in ("candidates", "clusters", "max_cluster") if k in inside},
            **({"cut": _cuts(step, appliers)} if any(cut_name(step) in node.steps for node in appliers) else {}),
            "similarity": merged(appliers, "similarity").get(step, {}),
            "pairs": pair_samples(store, step, appliers, nodes),
            "alarms": [{"source": s, "removed": n, "of": looked_at[s]} for s, n in sorted(removed_by_source.items())
                       if n > ALARM * looked_at[s]]}


def _cuts(step: str, appliers: list[NodeFigures]) -> dict[str, Any]:
    """Count the passages that the deduplication `step` cut out of documents, and list the sources that lost more than
    the share ALARM of their text. `appliers` are the passes that carried out the cuts."""
    cuts = {"docs": 0, "cuts": {}, "bytes": {}, "sources": {}, **merged(appliers, "tallies").get(cut_name(step), {})}
    sizes = {source: counts["bytes"] for source, counts in merged(appliers, "in").items()}
    return {**cuts, "alarms": [{"source": source, "cut": cut, "of": sizes[source]}
                               for source, cut in sorted(cuts["sources"].items()) if cut > ALARM * sizes[source]]}
