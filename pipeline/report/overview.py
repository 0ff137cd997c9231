"""Prepares the head of the page, its table of sources, and the samples of kept documents beside dropped ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.totals import shared

#: dropped documents shown of a source in a dataset
DROPPED = 2
#: columns of the table of sources that are added up
SUMS = ("files", "bytes", "records", "read", "kept", "kept_bytes", "dropped", "tokens")


def source_rows(document: Mapping[str, Any], shown: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the table of sources: those in `shown`, then one row for all others (its name is None). `share` is
    the share of the documents read that were kept. It is None where nothing was read, or where several final datasets
    have documents of the source."""
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


def beside(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each dataset that dropped something: samples of every source, kept ones beside dropped ones of different
    reasons (the most frequent reasons first). Sources with samples on one side only stay."""
    out = []
    for dataset in document["names"]["datasets"]:
        section, rows = document["datasets"][dataset], []
        for source in document["names"]["sources"]:
            kept = [s for s in document["samples"].get(dataset, ()) if s["source"] == source]
            dropped = [{**first, "stage": reason["stage"], "reason": reason["reason"]} for reason in section["reasons"]
                       if (first := next((s for s in reason["samples"] if s["source"] == source), None))][:DROPPED]
            if kept or dropped:
                rows.append({"source": source, "kept": kept, "dropped": dropped})
        if any(row["dropped"] for row in rows):
            out.append({"dataset": dataset, "rows": rows})
    return out
