"""Compares two recipes by key, as a run keeps them in its recipe.yaml."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pipeline.base.redact import redact_json
from stages.scrub.pii import scrub_value


def compare_recipes(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """The keys that were added, removed or changed, as [{key, change, before, after}], in the order of the second
    recipe. `before` and `after` are None where the key is missing. Secrets and personal data are masked.

    Keys are written as for `--set`: `datasets.clean.steps.language.min`. Steps and phases are matched by name, so that
    a step in front does not change the keys behind it. An order of common steps that differs is a change of the list's
    own key.
    """
    return [scrub_value(redact_json(row)) for row in _compare(before, after, "")]


def _compare(before: Any, after: Any, key: str) -> Iterator[dict[str, Any]]:
    if isinstance(before, list) and isinstance(after, list):
        first, second = _by_name(before), _by_name(after)
        if first is not None and second is not None:
            common = [[name for name in names if name in first and name in second] for names in (first, second)]
            if common[0] != common[1]:
                yield _row(key, "changed", *common)
            before, after = first, second
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _keys(before, after, key)
    elif before != after or type(before) is not type(after):
        yield _row(key, "changed", before, after)


def _keys(before: dict[str, Any], after: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    for name in [*after, *(name for name in before if name not in after)]:
        path = f"{key}.{name}" if key else str(name)
        if name not in before:
            yield _row(path, "added", None, after[name])
        elif name not in after:
            yield _row(path, "removed", before[name], None)
        else:
            yield from _compare(before[name], after[name], path)


def _row(key: str, change: str, before: Any, after: Any) -> dict[str, Any]:
    return {"key": key, "change": change, "before": before, "after": after}


def _by_name(items: list[Any]) -> dict[str, Any] | None:
    """The items of a list of steps or phases by name. A name that comes again gets a number: `where#2`. None for
    another list, which is compared whole."""
    out: dict[str, Any] = {}
    occurrences: Counter[str] = Counter()
    for item in items:
        if not isinstance(item, dict) or not ("name" in item or len(item) == 1):
            return None
        name = str(item["name"] if "name" in item else next(iter(item)))
        occurrences[name] += 1
        value = item if "name" in item else item[name]
        out[name if occurrences[name] == 1 else f"{name}#{occurrences[name]}"] = value if value is not None else {}
    return out
