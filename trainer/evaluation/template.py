"""Fills templates with the fields of a row. A template is data, not code: it can only insert fields and apply the
FILTERS below, because task files may come from strangers.

`{field}` inserts a field. A dot leads into an object or list (`{choices.text.0}`). A slash separates alternative names,
of which the first that the row has is used (`{question/context}`). Filters follow after bars
(`{sentence|before:_|strip}`). `{{` and `}}` are braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

#: the most characters that fields insert into a template: far more than a model reads, and few enough for memory
_MOST_CHARACTERS = 1 << 24
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class TemplateError(ValueError):
    """Raised for a template that is malformed, or does not fit a row. The message does not contain the row's texts."""


def _before(text: str, mark: str) -> str:
    return text.partition(mark)[0]


def _after(text: str, mark: str) -> str:
    head, found, tail = text.partition(mark)
    return tail if found else head


def _wikihow(text: str, _: str) -> str:
    """Clean a text of HellaSwag as OLMES does: remove the marks of titles and steps that come from WikiHow."""
    text = re.sub(r"\[[^\[\]\n]*\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ").replace(".. ", ". ")


#: name → function of (text, argument after the colon). `before` and `after` return the whole text if it lacks the mark;
#: `capitalize` makes the first letter a capital and all others small
FILTERS: Mapping[str, Callable[[str, str], str]] = {
    "strip": lambda text, _: text.strip(),
    "capitalize": lambda text, _: text.capitalize(),
    "lower": lambda text, _: text.lower(),
    "spaces": lambda text, _: text.replace("_", " "),
    "before": _before,
    "after": _after,
    "wikihow": _wikihow,
    "no_calculator": lambda text, _: re.sub(r"<<[^<>]*>>", "", text),       # GSM8K's marks <<3*4=12>>
}


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at `path` in `row`. Names in the path are separated by dots; a slash separates alternative
    paths, of which the first that exists counts. Raises KeyError when none exists."""
    for names in path.split("/"):
        value: Any = row
        for name in names.split("."):
            if isinstance(value, Mapping) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                break
        else:
            return value
    raise KeyError(path)


def render(template: str, row: Mapping[str, Any]) -> str:
    """Return `template` with the fields of `row` inserted. Raises TemplateError when the template is malformed, or does
    not fit the row."""
    size = 0

    def insert(match: re.Match[str]) -> str:
        nonlocal size
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] is None:
            raise TemplateError(f"a single {match[0]!r} in the template {template!r}; write it twice")
        path, *filters = match[1].split("|")
        try:
            value = lookup(row, path)
        except KeyError:
            raise TemplateError(f"no field {path!r}; there are {', '.join(map(str, row))}") from None
        if value is None or isinstance(value, (Mapping, list, bytes)):
            raise TemplateError(f"field {path!r} holds {'nothing' if value is None else 'no text'}")
        text = str(value)
        for name, _, argument in (f.partition(":") for f in filters):
            if name not in FILTERS:
                raise TemplateError(f"no filter {name!r} for field {path!r}; there are {', '.join(FILTERS)}")
            text = FILTERS[name](text, argument)
        size += len(text)
        if size > _MOST_CHARACTERS:
            raise TemplateError(f"the template {template[:80]!r} makes a text of more than {_MOST_CHARACTERS:,} "
                                f"characters")
        return text

    return _PART.sub(insert, template)
