"""Puts the figures of two reports side by side. Every number in report.json is a figure, identified by the path of its
keys. An item of a list is identified by the names in it (such as phase and stream, or stage and reason), not by its
position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

#: the keys by whose values the items of a list are told apart
IDENTITY = ("phase", "pass", "barrier", "node", "dataset", "name", "step", "stage", "reason", "stream", "source",
            "signal", "language", "domain", "key", "side")
#: sections without figures, and lists without them further down: samples of documents, and what repeats other figures
SECTIONS = frozenset({"version", "run", "recipe", "about", "made", "names", "samples", "graph", "warnings"})
LISTS = frozenset({"samples", "quarantine_samples", "pairs", "largest", "listed", "alarms"})
#: figures that differ between two runs of the same work on the same machine
MEASURED = frozenset({"cpu_s", "wall_s", "max_rss_mb", "docs_per_core_s", "docs_per_cpu_s", "seconds", "tokens_per_s"})
#: mappings of counts, in which a missing key means 0
COUNTS = frozenset({"kept", "reasons", "quarantined", "languages", "lengths", "dropped_languages", "dropped_lengths",
                    "dropped_licences", "scores", "pii", "dropped_pii", "skipped", "bad", "looked_at", "removed",
                    "similarity", "sources"})
#: texts that are compared like figures: hashes of outputs and of the order of samples
HASHES = frozenset({"content", "order"})

Path = tuple[str, ...]


def compare_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all figures of two reports, in the order of the second one: [{path, before, after, difference, relative,
    measured}].

    `before` or `after` is None if the report does not have the figure. A count that is missing is 0, however, if both
    reports have the section. `relative` is the difference divided by the figure before, or None if this figure is 0 or
    missing. `measured` marks measurements such as times.
    """
    first, second = dict(figures(before)), dict(figures(after))
    heads = [{path[:depth] for path in side for depth in (2, 3)} | _heads(report)
             for side, report in ((first, before), (second, after))]
    rows = []
    for path in dict.fromkeys([*second, *first]):
        values = [side.get(path) for side in (first, second)]
        # a version that did not count something left it out of the figures of its datasets
        if _counts(path) and all(path[:3 if path[0] == "datasets" else 2] in head for head in heads):
            values = [0 if value is None else value for value in values]
        rows.append(_row(path, *values))
    return rows


def _heads(report: Mapping[str, Any]) -> set[Path]:
    """Return the first two and the first three keys of all paths in a report, also of mappings without figures."""
    heads = {(key, str(name)): inside for key, section in report.items() if isinstance(section, Mapping)
             for name, inside in section.items()}
    return {*heads, *((*head, str(key)) for head, inside in heads.items() if isinstance(inside, Mapping)
                      for key in inside)}


def _counts(path: Path) -> bool:
    """Return whether a figure is a count, so that a missing figure means 0. The keys in its path tell this. A count is
    in the section `licences`, in a mapping whose name is in COUNTS, or under `dropped` in the `bins` of a signal.
    (Elsewhere, `dropped` is not a mapping of counts.)"""
    return path[0] == "licences" or not COUNTS.isdisjoint(path[2:-1]) or path[-3:-1] == ("bins", "dropped")


def _row(path: Path, before: Any, after: Any) -> dict[str, Any]:
    numbers = [value for value in (before, after) if isinstance(value, (int, float))]
    difference = after - before if len(numbers) == 2 else None
    measured = path[-1] in MEASURED or (path[0], path[-1]) == ("stages", "share")
    return {"path": list(path), "before": before, "after": after, "difference": difference,
            "relative": difference / abs(before) if difference is not None and before else None, "measured": measured}


def other_tokenizer(rows: list[dict[str, Any]]) -> bool:
    """Return whether two runs made their tokens with different tokenizers, from the figures of their reports. False if
    one of the runs has no tokenizer."""
    return any(row["path"][0] == "lineage" and row["path"][1].startswith("tokenizer:") and row["path"][-1] == "content"
               and None not in (row["before"], row["after"]) and row["before"] != row["after"] for row in rows)


def figures(value: Any, path: Path = ()) -> Iterator[tuple[Path, int | float | str]]:
    """Yield (path, number) for every figure in `value`. Hashes (the keys HASHES) are yielded as strings."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            # a source may be called `samples`: names are the keys of the second level
            if not (key in SECTIONS if not path else len(path) > 1 and key in LISTS and isinstance(inside, list)):
                yield from figures(inside, (*path, str(key)))
    elif isinstance(value, list):
        occurrences: Counter[Path] = Counter()
        for item in value:
            if names := _identity(item):
                occurrences[names] += 1
                # a step may occur twice in a pass
                suffix = f"#{occurrences[names]}" if occurrences[names] > 1 else ""
                yield from figures(item, (*path, *names[:-1], names[-1] + suffix))
    elif (isinstance(value, (int, float)) and not isinstance(value, bool)) or (
            isinstance(value, str) and path and path[-1] in HASHES):
        yield path, value


def _identity(item: Any) -> Path:
    if not isinstance(item, Mapping):
        return ()
    return tuple(str(item[key]) for key in IDENTITY if isinstance(item.get(key), str))
