"""Changes thresholds of steps in the text of a recipe, and leaves all other text unchanged: comments, order, spelling.

Only the characters of a value are replaced. A missing key is added to its step. The lines of a step that is left out
become comments; in a list in brackets, the step is removed. The new text is then parsed and compared with the old data
plus the changes. If they differ (for example because several steps share an alias), RecipeError is raised, so that a
wrong text is never written.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import yaml

from pipeline.recipe.errors import KeyPath, Problem, RecipeError
from pipeline.recipe.marks import Marks, dump_yaml, parse_yaml


def edit_recipe(text: str, file: str, dataset: str, thresholds: Mapping[int, Mapping[str, Any]],
                off: frozenset[int] = frozenset()) -> str:
    """Return the text of a recipe with other thresholds for some steps of a dataset. `thresholds` maps the number of a
    step, counted from 0, to its new settings, and `off` holds the numbers of the steps to leave out. Raises RecipeError
    if the dataset has no such step, or the text cannot be changed in this way."""
    data, marks = parse_yaml(text, file)
    steps = _value_at(data, ("datasets", dataset, "steps"))
    path: KeyPath = ("datasets", dataset, "steps")
    if not isinstance(steps, list) or not all(0 <= number < len(steps) for number in {*thresholds, *off}):
        raise _refused(marks, path, f"the dataset '{dataset}' of this text has no such step; give the run's recipe")
    expected = copy.deepcopy(data)
    new_steps = _value_at(expected, path)
    for number, config in thresholds.items():
        if number not in off and config:
            new_steps[number] = _with(new_steps[number], config)
    expected["datasets"][dataset]["steps"] = [step for number, step in enumerate(new_steps) if number not in off]
    changes = [change for number in sorted({*thresholds, *off}, reverse=True)
               for change in _changes(text, dataset, number, thresholds.get(number, {}), off, marks)]
    result = text
    for start, stop, new in sorted(changes, reverse=True):
        result = result[:start] + new + result[stop:]
    try:
        after, _ = parse_yaml(result, file)
    except RecipeError:
        after = None
    if after != expected:
        raise _refused(marks, path, "this text is written in a way that cannot be changed line by line (an alias, or a "
                                    "step over several lines of a list in brackets); change it by hand")
    return result


def _with(step: Any, config: Mapping[str, Any]) -> Any:
    if isinstance(step, str):
        return {step: dict(config)}
    [(name, old)] = step.items()
    return {name: {**(old or {}), **config}}


def _value_at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _refused(marks: Marks, path: KeyPath, message: str) -> RecipeError:
    return RecipeError([Problem(marks.at(path), path, message)])


def _changes(text: str, dataset: str, number: int, config: Mapping[str, Any], off: frozenset[int],
             marks: Marks) -> list[tuple[int, int, str]]:
    """Return the changes of the text that give step `number` of a dataset the settings `config`, or leave the step out
    if it is in `off`. Each change is a stretch of the text and its replacement: (start, stop, new text)."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    steps = _value(_value(_value(root, "datasets"), dataset), "steps")
    if not isinstance(steps, yaml.SequenceNode):
        raise _refused(marks, ("datasets", dataset, "steps"), "the steps are no list in this text; change it by hand")
    item = steps.value[number]
    if number in off:
        return _left_out(text, steps, number, off)
    if isinstance(item, yaml.ScalarNode):                                      # - name
        flow = f"{{{text[item.start_mark.index:item.end_mark.index]}: {_flow(dict(config))}}}"
        block = f"{text[item.start_mark.index:item.end_mark.index]}: {_flow(dict(config))}"
        return [(item.start_mark.index, item.end_mark.index, flow if steps.flow_style else block)]
    [(name, settings)] = item.value
    if not isinstance(settings, yaml.MappingNode):                             # - name:
        at = settings.start_mark.index if settings.value else name.end_mark.index + 1
        return [(at, settings.end_mark.index if settings.value else at, f" {_flow(dict(config))}")]
    changes = []
    missing = {}
    for key, value in config.items():
        node = _value(settings, key)
        if node is None:
            missing[key] = value
        else:
            stop = node.end_mark.index
            if not isinstance(node, yaml.ScalarNode) and not node.flow_style:   # a block ends with its last line
                stop = node.start_mark.index + len(text[node.start_mark.index:stop].rstrip())
            changes.append((node.start_mark.index, stop, _flow(value) if stop > node.start_mark.index
                            else f" {_flow(value)}"))
    if missing:
        changes.append(_added(settings, missing))
    return changes


def _value(node: Any, key: str) -> Any:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)


def _added(settings: yaml.MappingNode, missing: Mapping[str, Any]) -> tuple[int, int, str]:
    if settings.flow_style:
        at = settings.end_mark.index - 1
        entries = ", ".join(f"{key}: {_flow(value)}" for key, value in missing.items())
        return at, at, f", {entries}" if settings.value else entries
    first = settings.value[0][0]                # inserted before the first key: the last value may end in any way
    lines = "".join(f"{key}: {_flow(value)}\n{' ' * first.start_mark.column}" for key, value in missing.items())
    return first.start_mark.index, first.start_mark.index, lines


def _left_out(text: str, steps: yaml.SequenceNode, number: int, off: frozenset[int]) -> list[tuple[int, int, str]]:
    """Return the changes of the text, as (start, stop, new text), that leave out step `number`. In a list with dashes
    the step becomes a comment; from a list in brackets it is removed."""
    items = steps.value
    start, stop = items[number].start_mark.index, items[number].end_mark.index
    if steps.flow_style:
        if any(before not in off for before in range(number)):
            return [(items[number - 1].end_mark.index, stop, "")]
        return [(start, items[number + 1].start_mark.index if number + 1 < len(items) else stop, "")]
    first = text.rfind("\n", 0, start) + 1
    stop = start + len(text[start:stop].rstrip())
    end = text.find("\n", stop)
    end = len(text) if end < 0 else end
    lines = text[first:end].split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    commented = [f"{' ' * indent}# {line[indent:]}" if line.strip() else line for line in lines]
    if number + 1 == len(items) <= len(off):                       # nothing is left: an empty list
        commented.append(f"{' ' * indent}[]")
    return [(first, end, "\n".join(commented))]


def _flow(value: Any) -> str:
    """Format a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        written = dump_yaml(value).removesuffix("...\n").strip()
        plain = written.isidentifier() or (written and written.replace("_", "").replace("-", "").isalnum())
        return written if plain or (written[:1] in "'\"" and "\n" not in written) else json.dumps(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else dump_yaml(value).split("\n")[0]
