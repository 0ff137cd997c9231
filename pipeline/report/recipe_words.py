"""Describes a recipe in words: each step by the docstring of its class, each threshold by the description of its
setting.

The recipe is read from the report (`made.recipe`), in which secrets and personal data are masked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.recipe.errors import RecipeError
from pipeline.recipe.marks import parse_yaml
from stages.catalog import UnknownName, stage_class, steps
from stages.stage import role_of

#: most items of a list and characters of a value that are written
ITEMS, CHARS = 12, 200
_HUB = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@[^/]+)?(?:/|$)")


@dataclass(frozen=True)
class StepWords:
    """A step of a dataset, described in words: its name, what it does, and its settings as (meaning, value). `does` is
    '' for a step that is not part of this installation. All thresholds are listed, but of the other settings only those
    that differ from the default."""

    name: str
    does: str
    settings: tuple[tuple[str, str], ...]
    scrubs: bool


def recipe_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of a report as plain values; {} if the report has no readable recipe."""
    try:
        data = parse_yaml(document["made"]["recipe"] or "", "recipe.yaml")[0]
    except RecipeError:
        return {}
    return data if isinstance(data, dict) else {}


def steps_of(recipe: Mapping[str, Any], dataset: str) -> list[StepWords]:
    """Return the steps of a dataset in order, each described in words."""
    section = recipe.get("datasets", {}).get(dataset) or {}
    return [_words(*next(iter(step.items()))) for step in section.get("steps") or () if step]


def _words(name: str, config: Mapping[str, Any] | None) -> StepWords:
    config = config or {}
    if name not in steps():                                # the user's own class is not imported for a report
        return StepWords(name, "", tuple((key, _value(v)) for key, v in config.items() if _is_set(v)), False)
    try:
        cls = stage_class(name)
    except (UnknownName, ImportError, AttributeError):
        return StepWords(name, "", tuple((key, _value(v)) for key, v in config.items() if _is_set(v)), False)
    settings = []
    for key, value in config.items():
        field = cls.Config.model_fields.get(key)
        default = field.get_default(call_default_factory=True) if field is not None else None
        # a threshold is always listed, another setting only if it was changed
        if _is_set(value) and (field is None or role_of(cls.Config, key) == "decision" or value != _plain(default)):
            meaning = (field.description if field is not None else None) or key
            settings.append((" ".join(meaning.split()), _value(value)))
    return StepWords(name, first_sentence(cls.__doc__ or ""), tuple(settings), bool(cls.scrubs))


def _is_set(value: Any) -> bool:
    return value is not None and value != "" and value != [] and value != {}


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line and without its full stop."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    match = re.match(r".+?[.](?= [A-Z`]|$)", paragraph)
    return (match[0] if match else paragraph).rstrip(".")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        omitted = len(value) - ITEMS
        return ", ".join(map(_value, value[:ITEMS])) + (f" and {omitted} more" if omitted > 0 else "")
    if isinstance(value, dict):
        omitted = len(value) - ITEMS
        pairs = [f"{key} {_value(v)}" for key, v in list(value.items())[:ITEMS]]
        return ", ".join(pairs) + (f" and {omitted} more" if omitted > 0 else "")
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= CHARS else text[:CHARS] + " …"


def inputs_of(recipe: Mapping[str, Any], dataset: str) -> list[str]:
    """Return the sources and datasets that a dataset is made from."""
    inputs = (recipe.get("datasets", {}).get(dataset) or {}).get("from") or []
    return [inputs] if isinstance(inputs, str) else list(inputs)


def unscrubbed(recipe: Mapping[str, Any], final: list[str]) -> list[str]:
    """Return the sources whose documents reach a dataset of `final` without a step that removes personal data, in the
    order of the recipe."""
    bare: set[str] = set()
    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited or any(step.scrubs for step in steps_of(recipe, name)):
            return
        visited.add(name)
        for before in inputs_of(recipe, name):
            if before in recipe.get("sources", {}):
                bare.add(before)
            else:
                visit(before)

    for name in final:
        visit(name)
    return [name for name in recipe.get("sources", {}) if name in bare]


def hub_datasets(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield the datasets of the Hugging Face hub that the sources of a recipe read, as USER/NAME, each once."""
    yielded = set()
    for source in recipe.get("sources", {}).values():
        paths = source.get("path") or []
        for path in [paths] if isinstance(paths, str) else paths:
            if (match := _HUB.match(path)) and match[1] not in yielded:
                yielded.add(match[1])
                yield match[1]
