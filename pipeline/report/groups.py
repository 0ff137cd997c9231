"""Draws groups of duplicates for the page: charts of the sizes of groups, and a table of the pairs of sources between
which duplicates were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from pipeline.report.charts import bars

#: most sources in the table of pairs; if there are more sources, the pairs with the most documents are listed instead
TABLE = 8


def cluster_cards(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of the template `clusters.html.j2`, for every deduplication that removed documents."""
    out = []
    for section in document.get("clusters", []):
        if not section["groups"]:
            continue
        charts = [("groups: a kept document and those removed for it", _sizes(section["sizes"], "groups"))]
        if section.get("components"):
            charts.append(("connected by shared bands, before texts were compared",
                           _sizes(section["components"], "clusters of candidates")))
        largest = [{**group, "removed": [{**r, "words": words(r["diff"])} for r in group["removed"]]}
                   for group in section["largest"]]
        out.append({**section, "charts": charts, "largest": largest, "table": _table(document, section["pairs"])})
    return out


def _sizes(sizes: Mapping[str, int], word: str) -> Markup:
    low, high = min(map(int, sizes)), max(map(int, sizes))
    values = []
    for b in range(low, high + 1):
        name = f"{2 ** b:,}–{2 ** (b + 1) - 1:,}"
        groups = sizes.get(str(b), 0)
        values.append((name, groups, f"{2 ** b:,} to {2 ** (b + 1) - 1:,} documents: {groups:,} {word}"))
    label = f"{word} by size: " + ", ".join(title for _, _, title in values)
    return Markup(bars(values, 5, label=label))


def _table(document: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return a table of removed documents: the rows are their sources, the columns the sources of the kept documents
    that they duplicate. Returns None if there is only one source, or if there are more than TABLE sources."""
    there = {p[side] for p in pairs for side in ("removed", "kept")}
    if not 1 < len(there) <= TABLE:
        return None
    names = [s for s in document["names"]["sources"] if s in there]
    docs = {(p["removed"], p["kept"]): p["docs"] for p in pairs}
    most = max(docs.values())
    return {"names": names, "rows": [{"name": r, "cells": [
        {"docs": docs.get((r, k), 0), "weight": round(docs.get((r, k), 0) / most, 3)} for k in names]} for r in names]}


def words(diff: Sequence[Sequence[str]] | None) -> Markup:
    """Return a difference between two texts as HTML. Words only in the kept text are struck out, and words only in the
    removed text are highlighted."""
    if diff is None:
        return Markup("")
    out = []
    for kind, text in diff:
        if kind == "both":
            out.append(escape(text))
        elif kind == "cut":
            out.append(Markup('<span class="dim">…</span>'))
        else:
            label = "only in the kept text" if kind == "kept" else "only in the removed text"
            out.append(Markup('<mark class="{}" title="{}">{}</mark>').format(f"only-{kind}", label, text))
    return Markup(" ").join(out)

