"""Prepares two parts of the report's page: the table of sources, and samples of kept documents beside dropped ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.totals import shared

#: dropped documents shown of a source in a dataset
DROPPED = 2
#: columns of the table of sources that are added up
SUMS = ("files", "bytes", "records", "read", "kept", "kept_bytes", "dropped", "tokens")


def source_rows(document: Mapping[str, Any], shown: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of the table of sources: one for each source in `shown`, then one for all other sources together
    (its name is None). `share` says which share of the documents that were read was kept. It is None if nothing was
    read. It is also None if several final datasets (from which no other dataset is made) kept documents of the source,
    because documents may then be counted twice."""
    rows, several = _source_rows(document["totals"], shown), shared(document)
    for row in rows:
        of = several & {row["name"]} if row["name"] is not None else several - set(shown)
        row["share"] = row["kept"] / row["read"] if row["read"] and not of else None
    return rows


def _source_rows(totals: Mapping[str, Any], shown: Sequence[str]) -> list[dict[str, Any]]:
    by_source = totals["by_source"]
    rows: list[dict[str, Any]] = [{"name": name, **by_source[name]} for name in shown]
    others = [row for name, row in by_source.items() if name not in set(shown)]
    if others:
        rows.append({"name": None, "sources": len(others), **{key: sum(row[key] for row in others) for key in SUMS}})
    return rows


def beside(document: Mapping[str, Any], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, for each dataset that dropped documents, samples of kept and dropped documents by source. The dropped
    documents of a source all have different reasons, the most frequent reasons first. A source is listed even if it has
    only kept or only dropped samples. `lost` is the number of documents of the source that the dataset dropped, which
    needs the whole report; `document` is the report with fewer rows."""
    out = []
    for dataset in document["names"]["datasets"]:
        section, rows = document["datasets"][dataset], []
        for source in document["names"]["sources"]:
            kept = [s for s in document["samples"].get(dataset, ()) if s["source"] == source]
            dropped = [{**first, "stage": reason["stage"], "reason": reason["reason"]} for reason in section["reasons"]
                       if (first := next((s for s in reason["samples"] if s["source"] == source), None))][:DROPPED]
            if kept or dropped:
                lost = sum(reason["sources"].get(source, 0) for reason in report["datasets"][dataset]["reasons"])
                rows.append({"source": source, "kept": kept, "dropped": dropped, "lost": lost})
        if any(row["dropped"] for row in rows):
            out.append({"dataset": dataset, "rows": rows})
    return out
