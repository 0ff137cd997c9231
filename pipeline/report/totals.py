"""Makes the section `totals` of the report: the figures of each source, and their sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.store.records import Counters, merge_counters


def totals(document: Mapping[str, Any]) -> dict[str, Any]:
    """Make the report's section `totals`: the figures of each source, and their sums. `document` is the report so far;
    its sections names, sources, funnel, datasets and tokens are needed."""
    by_source = {name: _source(name, document) for name in document["names"]["sources"]}
    skipped: Counters = {}
    bad: Counters = {}
    for source in document["sources"].values():
        merge_counters(skipped, source["skipped"], maxima=False)
        merge_counters(bad, source["bad"], maxima=False)
    sections = [*document["datasets"].values(), *document["tokens"].values()]
    return {
        **{key: sum(row[key] for row in by_source.values())
           for key in ("files", "bytes", "records", "read", "kept", "kept_bytes", "dropped", "tokens")},
        "skipped": skipped, "unreadable": bad,
        "bad_files": sum(s["bad_files"]["files"] for s in document["sources"].values()),
        "quarantined": sum(n for section in sections for n in section["quarantined"].values()),
        "steps": steps(document), "by_source": by_source}


def _source(name: str, document: Mapping[str, Any]) -> dict[str, int]:
    """Return the figures of one source, from its files to its tokens. Kept documents are those of the final datasets
    (from which no other dataset is made). A document that two datasets drop counts twice as dropped."""
    info, rows = document["sources"][name], document["funnel"][name]
    kept = [document["datasets"][final]["kept"].get(name, {"docs": 0, "bytes": 0})
            for final in document["names"]["final"]]
    return {"files": info["files"], "bytes": info["bytes"], "records": info["records"],
            "read": rows[0]["docs"] if rows and rows[0]["step"] == "read" else 0,
            "kept": sum(k["docs"] for k in kept), "kept_bytes": sum(k["bytes"] for k in kept),
            "dropped": sum(reason["sources"].get(name, 0) for section in document["datasets"].values()
                           for reason in section["reasons"]),
            "tokens": sum(t["sources"].get(name, {"tokens": 0})["tokens"] for t in document["tokens"].values())}


def shared(document: Mapping[str, Any]) -> frozenset[str]:
    """Return the sources whose documents are in several final datasets (from which no other dataset is made). A
    document may be in more than one of these datasets, so their sum cannot be compared with the number of documents
    read."""
    finals = [{source for source, kept in document["datasets"][name]["kept"].items() if kept["docs"]}
              for name in document["names"]["final"]]
    return frozenset(s for s in document["names"]["sources"] if sum(s in kept for kept in finals) > 1)


def distinct(document: Mapping[str, Any]) -> int:
    """Return a lower bound for the number of different documents in the final datasets (from which no other dataset is
    made). Of each source, only the documents in the final dataset that has most of them are counted."""
    finals = [document["datasets"][name]["kept"] for name in document["names"]["final"]]
    sources = {source for kept in finals for source in kept}
    return sum(max(kept.get(source, {"docs": 0})["docs"] for kept in finals) for source in sources)


def steps(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the funnel over all sources: the documents, bytes or tokens after reading, in each dataset, and in each
    stream (a token sequence made from datasets). Each row adds up the sources that reach it. The rows are in plan
    order, with reading first."""
    out: dict[tuple[int, str], dict[str, Any]] = {}
    for rows in document["funnel"].values():
        for place, row in enumerate(rows):
            # a dataset may be called `read`, too
            into = out.setdefault((min(place, 1), row["step"]), {"step": row["step"], "sources": 0})
            into["sources"] += 1
            for key in ("docs", "bytes", "tokens"):
                if key in row:
                    into[key] = into.get(key, 0) + row[key]
    names = document["names"]
    order = [(0, "read"), *((1, name) for name in names["datasets"]),
             *((1, f"tokens ({stream})") for stream in names["streams"])]
    return [out[key] for key in order if key in out]
