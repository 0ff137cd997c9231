"""Compares the recipes of two runs (each run's recipe.yaml), key by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pipeline.base.redact import MASK, redact, redact_json
from stages.scrub.pii import scrub_value


def compare_recipes(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the keys that were added, removed or changed, as [{key, change, before, after}], in the order of the
    second recipe. `before` or `after` is None where the key is missing. Secrets and personal data are masked.

    Keys are written as in the option `--set`: `datasets.clean.steps.language.min`. Steps and phases are matched by
    name, so that a step added before others does not change their keys. If the steps that both lists have are in
    another order, the key of the list counts as changed.
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
    name = key.rpartition(".")[2]
    return {"key": key, "change": change, "before": _shown(name, before), "after": _shown(name, after)}


def _shown(name: str, value: Any) -> Any:
    """Return a value of a recipe with secrets masked. `name` is its key, because a name such as `api_key` may be all
    that shows that the value is a secret."""
    if isinstance(value, dict):
        return {key: _shown(key, below) for key, below in value.items()}
    if isinstance(value, list):
        return [_shown(name, item) for item in value]
    if isinstance(value, (str, int)) and redact(str(value)) == str(value) and MASK in redact(f"{name}: {value}"):
        return MASK
    return value


def _by_name(items: list[Any]) -> dict[str, Any] | None:
    """Return the items of a list of steps or phases by name. A second item with the same name gets a number: `where#2`.
    Returns None for a list of anything else, which is compared as a whole."""
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
