"""Writes the schema of report.json into a page of the documentation, between two comments that mark the place: `python
-m pipeline.report.reference docs/report.md`.

`make docs` runs this module, and a test checks that the page is up to date.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.base.generated import replace_generated
from pipeline.report.schema import Report

BETWEEN = re.compile(r"(?<=<!-- schema: `make docs` writes it -->\n).*?(?=<!-- end of schema -->)", re.S)
WORDS = {bool: "true or false", int: "integer", float: "number", str: "string", Any: "any", types.NoneType: "null"}


def models(top: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the model `top` and all models that are types of fields in it, directly or through other models. They are
    in the order in which they first occur."""
    out = [top]
    for model in out:                                           # grows while it is walked
        for field in model.model_fields.values():
            out += [m for m in dict.fromkeys(_models_in(field.annotation)) if m not in out]
    return out


def _models_in(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for inner in typing.get_args(kind) for model in _models_in(inner)]


def type_words(kind: Any) -> str:
    """Return a type in the words of the documentation: `list of [Step](#step)`, `name → integer`, `string or null`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_words, inner))
    if origin is list:
        return f"list of {type_words(inner[0])}"
    if origin is dict:
        return f"name → {type_words(inner[1])}"
    if origin is typing.Literal:
        return " or ".join(f"`{value!r}`" for value in inner)
    if kind in WORDS:
        return WORDS[kind]
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def table(model: type[BaseModel]) -> str:
    """Return the section of the page about one model: its heading, its docstring, and a table with a row for each
    field."""
    lines = [f"### {model.__name__}", "", " ".join((model.__doc__ or "").split()), "",
             "| field | type | unit | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
        lines.append(f"| `{field.alias or name}` | {type_words(field.annotation)} | {unit} | {field.description} |")
    return "\n".join([*lines, ""])


def rewrite(page: str) -> str:
    """Return the text of a page with its schema section replaced by the current schema. Raises ValueError unless the
    page has the two comments that enclose the section exactly once."""
    text = "\n".join(table(model) for model in models(Report))
    return replace_generated(page, BETWEEN, f"\n{text}\n", "the schema")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
