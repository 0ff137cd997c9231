"""Cuts the long tables of a report to their most important rows, so that the report's page stays small enough to be
mailed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: largest report.html
LARGEST = 1_000_000
#: most rows of a table. The page is made with the first limit, and again with the next one while it is too large
ROWS = (40, 20, 10, 5)
#: characters of the recipe and quarantined files of a source that are shown for each row of the limit
RECIPE_CHARS, BAD_FILES = 600, 0.25
#: a larger drawing of the loss curve is left out
LARGEST_CURVE = 400_000


def trimmed(document: Mapping[str, Any], rows: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the report with at most `rows` rows in every table, and the number of rows that each table lost: {table:
    rows}.

    These rows stay:

    - sources, datasets and drop reasons with the most documents
    - token streams with the most tokens
    - nodes of the plan and passes that cost most

    The order of the rows does not change. Sums over a table that was cut must be computed from the whole report.
    """
    cut: dict[str, int] = {}

    def top(table: str, items: list[Any], weight: Callable[[Any], float], most: int = rows) -> list[Any]:
        if len(items) <= most:
            return items
        cut[table] = len(items) - most
        chosen = sorted(range(len(items)), key=lambda i: (-weight(items[i]), i))[:most]
        return [items[i] for i in sorted(chosen)]

    names, totals = document["names"], document["totals"]["by_source"]
    datasets = top("datasets", names["datasets"], lambda name: document["datasets"][name]["docs"])
    names_shown = {
        "sources": top("sources", names["sources"], lambda name: totals[name]["read"]), "datasets": datasets,
        "final": [name for name in names["final"] if name in datasets],
        "streams": top("streams", names["streams"], lambda name: document["tokens"][name]["tokens"])}
    passes = top("passes", [p for p in document["passes"] if p["tasks"]], lambda p: p["cpu_s"])
    return {
        **document, "names": names_shown,
        "sources": {name: _source(document["sources"][name], rows) for name in names_shown["sources"]},
        "datasets": {name: _dataset(section, rows) for name, section in document["datasets"].items()},
        "tokens": {name: _split(section, rows) for name, section in document["tokens"].items()},
        "duplicates": top("duplicates", document["duplicates"], lambda dup: sum(
            n for by in dup["removed"].values() for n in by.values())),
        "passes": passes,
        "lineage": top("lineage", [n for n in document["lineage"] if n["tasks"]], lambda n: n["cpu_s"]),
        "warnings": top("warnings", document["warnings"], lambda _: 0),
        "made": {**document["made"], "recipe": _recipe(document["made"]["recipe"], rows, cut)},
        "training": _training(document["training"], names_shown["streams"], cut),
    }, cut


def _source(section: dict[str, Any], rows: int) -> dict[str, Any]:
    files = section["bad_files"]
    return {**section, "bad_files": {**files, "listed": files["listed"][:max(1, int(rows * BAD_FILES))]}}


def _dataset(section: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the section of a dataset with at most `rows` drop reasons, `rows` reasons for quarantine and `rows`
    scores. All further reasons are combined into one row, so that the documents of all rows still add up to the total.
    The scores that stay are those of the most documents."""
    reasons, scores = section["reasons"], section["scores"]
    if len(reasons) > rows:
        others = reasons[rows:]
        reasons = [*reasons[:rows], {"stage": "others", "reason": f"{len(others)} more reasons", "samples": [],
                                     "docs": sum(r["docs"] for r in others), "sources": {}}]
    if len(scores) > rows:
        most = sorted(scores, key=lambda name: (-sum(scores[name].values()), name))[:rows]
        scores = {name: scores[name] for name in sorted(most)}
    quarantined = section["quarantined"]
    if len(quarantined) > rows:
        ordered = sorted(quarantined.items(), key=lambda item: (-item[1], item[0]))
        quarantined = {**dict(ordered[:rows]), f"{len(ordered) - rows} more reasons": sum(n for _, n in ordered[rows:])}
    return {**section, "reasons": reasons, "scores": scores, "quarantined": quarantined}


def _split(section: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the section of an entry of `shards:` with only the `rows` streams that have the most tokens, largest
    first. Two rows may be added, so that all rows still add up to the tokens of the entry. One has the sums of the
    other streams, and one the tokens of streams that no phase reads."""
    if "streams" not in section:
        return section
    ordered = sorted(section["streams"].items(), key=lambda item: (-item[1]["tokens"], item[0]))
    shown = dict(ordered if len(ordered) <= rows else ordered[:rows])
    if others := [figures for _, figures in ordered[len(shown):]]:
        shown[f"{len(others)} more streams"] = {key: sum(figures[key] for figures in others) for key in others[0]}
    unread = {key: section[key] - sum(figures[key] for _, figures in ordered) for key in ("tokens", "val_tokens")}
    if any(unread.values()):
        shown["streams of no phase"] = {**unread, "read": 0}
    return {**section, "streams": shown}


def _recipe(text: str | None, rows: int, cut: dict[str, int]) -> str | None:
    """Return the beginning of the recipe's text, cut at the end of a line. The number of lines that are left out is
    added to `cut`."""
    if text is None or len(text) <= rows * RECIPE_CHARS:
        return text
    head = text[:rows * RECIPE_CHARS].rpartition("\n")[0]
    cut["recipe"] = text.count("\n") - head.count("\n") - 1
    return head


def _training(section: dict[str, Any] | None, streams: list[str], cut: dict[str, int]) -> dict[str, Any] | None:
    if section is None:
        return None
    curve = section["curve"]
    if curve is not None and len(curve) > LARGEST_CURVE:
        curve, cut["curve"] = None, 1
    if (section.get("task_curves") or "") and len(section["task_curves"]) > LARGEST_CURVE:
        section, cut["task_curves"] = {**section, "task_curves": None}, 1
    by_stream = {k: v for k, v in (section["streams"] or {}).items() if k in streams or "streams" not in cut}
    return {**section, "curve": curve, "streams": by_stream}
