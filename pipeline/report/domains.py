"""Makes the report's section about domains: the hosts (of URLs) with the most documents in a dataset, and how many of
their documents the dataset keeps."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from pipeline.base.domain import domain_of
from pipeline.report.nodes import NodeFigures
from pipeline.report.sampled import ROWS, extent, strata
from pipeline.report.samples import masked_address
from pipeline.store.fs import Store

#: domains that are listed of a dataset
TOP = 30


def domain_section(store: Store, passes: list[NodeFigures], *, most_rows: int = ROWS) -> dict[str, Any]:
    """Make the report's section about the domains (hosts of URLs) of a dataset: {read, domains, without, top}. `read`
    says how many documents were read, `domains` is the number of different domains among them, and `without` the number
    of documents without a domain. `top` lists the TOP domains with the most documents: {domain, kept, dropped}. If not
    all documents were read, `without`, `kept` and `dropped` are estimates for all documents. About `most_rows` rows of
    each kind (kept or dropped documents) are read."""
    counts: dict[bool, dict[str, float]] = {True: defaultdict(float), False: defaultdict(float)}
    parts = strata(passes, most_rows=most_rows)
    for part in parts:
        by_scale: dict[float, Counter[str]] = defaultdict(Counter)   # key: number of documents that a row stands for
        for batch, scale in part.rows(store, ["url"]):
            by_scale[scale].update(map(domain_of, batch.column("url").to_pylist()))
        for scale, by in by_scale.items():
            for domain, docs in by.items():
                counts[part.kept][domain] += docs * scale
    without = sum(by.pop("", 0.0) for by in counts.values())
    every = {d: counts[True].get(d, 0.0) + counts[False].get(d, 0.0) for d in counts[True] | counts[False]}
    ordered = sorted(every, key=lambda d: (-every[d], d))
    top = [{"domain": masked_address(domain), "kept": round(counts[True].get(domain, 0.0)),
            "dropped": round(counts[False].get(domain, 0.0))} for domain in ordered[:TOP]]
    return {"read": extent(parts), "domains": len(every), "without": round(without), "top": top}
