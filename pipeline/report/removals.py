"""Counts the documents that the deduplications of a dataset removed (`tokenmill dedup stats`). The counts are exact,
over all documents.

The report of a run shows the same figures from a sample of the parts (`pipeline.report.clusters`). This module reads
every part of the published folders once, without texts. A temporary database on disk holds the kept document of each
removed one, so memory does not grow with the number of documents. Only domains are counted in memory.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.base.domain import domain_of
from pipeline.plan.changes import latest_run, run_recipe_of
from pipeline.report.clusters import difference
from pipeline.report.marks import verdict
from pipeline.report.samples import masked_address, sample
from pipeline.store.dataset import iter_batches, published_folders
from pipeline.store.fs import Store
from pipeline.store.temp import MOST_KEYS, scratch_database

#: a domain raises an alarm if it had at least LEAST documents and lost more than the share MUCH of them
LEAST, MUCH = 20, 0.5
#: removed documents that are shown of a group of duplicates
MEMBERS = 2
COLUMNS = ["id", "source", "language", "url", "stage", "reason", "meta"]
TEXTS = ["id", "url", "source", "language", "text", "stage", "reason", "meta", "locator"]


def removal_stats(store: Store, dataset: str, step: str | None = None, *, most: int = 20,
                  groups: int = 5) -> dict[str, Any]:
    """Count the documents of `dataset` that deduplications removed; with `step`, only those that this step removed.

    The result is {dataset, kept, removed, by_reason, by_language, pairs, unknown, domains, alarms, groups, sizes,
    largest}. The figures are numbers of documents. Of `by_language`, `pairs`, `domains` and `alarms`, at most `most`
    entries are returned, and of `largest`, at most `groups`.

    * `pairs` counts removed documents by their source and the source of the kept document.
    * `unknown` counts removed documents whose kept document is neither in the dataset nor in one that it was compared
      with.
    * `domains` lists the domains that lost the most documents.
    * `alarms` lists domains that had at least LEAST documents and lost more than half of them. Such a loss often means
      that the site's boilerplate makes different pages look alike.
    * `groups` is the number of groups (a kept document with its removed duplicates). `sizes` counts them by log2 of
      their number of documents.
    * `largest` describes the largest groups, with the words in which the texts differ.
    """
    reasons: Counter[tuple[str, str]] = Counter()
    languages: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    db = scratch_database()
    db.execute("CREATE TABLE removed (kept TEXT, source TEXT, docs INTEGER, PRIMARY KEY (kept, source)) WITHOUT ROWID")
    for batch in _removed(store, dataset, step, COLUMNS):
        reasons.update((row["stage"], row["reason"]) for row, _ in batch)
        languages.update(row["language"] or "" for row, _ in batch)
        lost.update(domain_of(row["url"]) for row, _ in batch)
        db.executemany("INSERT INTO removed VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET docs = docs + 1",
                       [(kept, row["source"] or "") for row, kept in batch])
    lost.pop("", None)
    old = [f"datasets/{name}" for name in compared_with(store, dataset)[0]]
    pairs, kept_docs, left = _pairs(db, store, dataset, old, lost)
    total = sum(reasons.values())
    sizes: Counter[int] = Counter()
    for (docs,) in db.execute("SELECT sum(docs) FROM removed GROUP BY kept"):
        sizes[(docs + 1).bit_length() - 1] += 1
    largest = db.execute("SELECT kept, sum(docs) AS n FROM removed GROUP BY kept ORDER BY n DESC, kept LIMIT ?",
                         (groups,)).fetchall()
    alarms = [d for d, n in lost.items() if n + left[d] >= LEAST and n > MUCH * (n + left[d])]
    return {
        "dataset": dataset, "kept": kept_docs, "removed": total,
        "by_reason": [{"stage": stage, "reason": reason, "docs": n} for (stage, reason), n in reasons.most_common()],
        "by_language": dict(languages.most_common(most)),
        "pairs": [{"removed": one, "kept": other, "docs": n} for (one, other), n in
                  sorted(pairs.items(), key=lambda p: (-p[1], p[0]))[:most]],
        "unknown": total - sum(pairs.values()),
        "domains": [_domain(d, lost, left) for d in heapq.nsmallest(most, lost, key=lambda d: (-lost[d], d))],
        "alarms": [_domain(d, lost, left) for d in heapq.nsmallest(most, alarms, key=lambda d: (-lost[d], d))],
        "groups": sum(sizes.values()), "sizes": {str(b): n for b, n in sorted(sizes.items())},
        "largest": _largest(store, dataset, old, step, largest)}


def compared_with(store: Store, dataset: str) -> tuple[list[str], list[str]]:
    """Return ([datasets of the store], [folders]) with which the documents of `dataset` were compared by the setting
    `against` of its deduplications. The setting is read from the recipe of the latest run."""
    run = latest_run(store)
    steps = run_recipe_of(store, run).get("datasets", {}).get(dataset, {}).get("steps", []) if run else []
    settings = [config for step in steps if isinstance(step, dict) for config in step.values()]
    names = dict.fromkeys(name for config in settings if isinstance(config, dict)
                          for name in config.get("against") or ())
    published = set(published_folders(store)) if names else set()
    return ([name for name in names if f"datasets/{name}" in published],
            [name for name in names if f"datasets/{name}" not in published])


def _domain(domain: str, lost: Counter[str], left: Counter[str]) -> dict[str, Any]:
    return {"domain": masked_address(domain), "removed": lost[domain], "of": lost[domain] + left[domain]}


def _removed(store: Store, dataset: str, step: str | None,
             columns: list[str]) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Yield the documents of `dataset` that deduplications removed, in batches of (row, id of the document that was
    kept instead). With `step`, only those that this deduplication removed. A row has the given `columns`."""
    for batch in iter_batches(store, f"dropped/{dataset}", columns):
        rows = []
        for row in batch.to_pylist():
            if step in (None, row["stage"]) and (stated := verdict(row["meta"], row["stage"])) is not None:
                rows.append((row, stated["kept"]))
        if rows:
            yield rows


def _pairs(db: sqlite3.Connection, store: Store, dataset: str, old: Sequence[str],
           lost: Counter[str]) -> tuple[Counter[tuple[str, str]], int, Counter[str]]:
    """Return three counts: the removed documents by (their source, source of the document kept instead), the documents
    of the dataset, and its documents from each domain in `lost`. `db` holds the removed documents. The documents kept
    instead are looked up in the dataset, and in the published folders `old`, with which it was compared."""
    pairs: Counter[tuple[str, str]] = Counter()
    left: Counter[str] = Counter()
    docs, own = 0, f"datasets/{dataset}"
    columns = ["id", "source", "url"]
    for place, batch in ((name, batch) for name in (own, *old) for batch in iter_batches(store, name, columns)):
        if place == own:
            docs += batch.num_rows
            left.update(d for d in map(domain_of, batch.column("url").to_pylist()) if d in lost)
        origin = dict(zip(batch.column("id").to_pylist(), batch.column("source").to_pylist(), strict=True))
        ids = list(origin)
        for first in range(0, len(ids), MOST_KEYS):
            chunk = ids[first:first + MOST_KEYS]
            for kept, source, n in db.execute(f"SELECT kept, source, docs FROM removed WHERE kept IN "
                                              f"({', '.join('?' * len(chunk))})", chunk):
                pairs[source, origin[kept] or ""] += n
    return pairs, docs, left


def _largest(store: Store, dataset: str, old: Sequence[str], step: str | None,
             groups: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Describe groups of duplicates for `largest` of `removal_stats`. `groups` lists (id of the kept document, number
    of documents in the group). A description has the kept document, and the removed documents with the smallest ids,
    each with the words in which it differs from the kept text."""
    if not groups:
        return []
    wanted = dict(groups)
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for batch in _removed(store, dataset, step, TEXTS):
        for row, kept in batch:
            if kept in wanted:
                members[kept] = heapq.nsmallest(MEMBERS, [*members[kept], row], key=lambda r: r["id"])
    columns = ["id", "url", "source", "text", "meta", "locator"]
    twins = {row["id"]: row for folder in (f"datasets/{dataset}", *old)
             for batch in iter_batches(store, folder, columns) for row in batch.to_pylist() if row["id"] in wanted}
    entries = []
    for kept, docs in groups:
        twin = twins.get(kept)
        removed = [{**sample(row, row["stage"]), "diff": difference(twin["text"], row["text"]) if twin else None}
                   for row in members[kept]]
        entries.append({"kept_id": kept, "size": docs + 1, "kept": sample(twin) if twin else None, "removed": removed})
    return entries
