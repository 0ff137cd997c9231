"""Collects the problems of a recipe with their places in its text, and translates pydantic's errors into readable
messages."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pipeline.recipe.errors import KeyPath, Problem, RecipeError, nearest, shown
from pipeline.recipe.marks import Marks


class Checker:
    """Collects the problems of a recipe, with their places in its text, while the parts of the recipe are checked.
    `base` is the folder at which relative paths start, and `allow_custom` tells whether the user's own code may be
    run."""

    def __init__(self, marks: Marks, base: str, allow_custom: bool) -> None:
        self.marks, self.base, self.allow_custom = marks, base, allow_custom
        same = os.path.dirname(os.path.abspath(marks.file)) == os.path.abspath(base)
        self.counts_from = "the recipe's folder" if same else "the current folder"
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def fail(self, path: KeyPath, message: str) -> None:
        mark = self.marks.at(path)
        while path and isinstance(path[-1], int) and path not in self.marks.places:
            path = path[:-1]                                        # `from: web` stands for `from: [web]`
        self.problems.append(Problem(mark, path, message))

    def stop_if_failed(self) -> None:
        if self.problems:
            raise RecipeError(self.problems)

    def validate(self, model: type[BaseModel], data: Any, path: KeyPath) -> BaseModel | None:
        """Return `data` as an instance of `model`. If `data` is invalid, add a problem for each error, at the place of
        the wrong key, and return None."""
        try:
            return model.model_validate(data)
        except ValidationError as e:
            for error in e.errors(include_url=False, include_context=False):
                self.fail((*path, *_data_path(data, error["loc"])), _message(error, model, data))
            return None

    def check_name(self, name: str, allowed: Iterable[str], path: KeyPath, what: str) -> bool:
        """Whether `name` is one of the `allowed` names. If it is not, a problem is added with the message "unknown
        `what` `name`"."""
        allowed = list(allowed)
        if name not in allowed:
            self.fail(path, f"unknown {what} '{name}': {nearest(name, allowed)}")
        return name in allowed


def _data_path(data: Any, loc: tuple[Any, ...]) -> KeyPath:
    """Turn `loc`, the location of an error in pydantic's form, into the path of a key in `data`. Entries of `loc` that
    are no keys of the data (union members, '[key]', the config of a step) are left out."""
    path: list[str | int] = []
    for entry in loc:
        if entry == "[key]":
            continue
        inside = entry in data if isinstance(data, dict) else isinstance(data, list) and entry in range(len(data))
        if inside:
            data = data[entry]
        elif entry == loc[-1]:                                      # a missing key, or one item of a single value
            if isinstance(data, dict):
                path.append(entry)
            break
        else:
            continue
        path.append(entry)
    return tuple(path)


def _message(error: Any, model: type[BaseModel], data: Any) -> str:
    kind, loc, value = error["type"], error["loc"], error.get("input")
    if kind == "extra_forbidden":
        return f"unknown key '{loc[-1]}': {nearest(str(loc[-1]), _keys(model, loc[:-1]))}"
    if kind == "missing":
        return f"missing key '{loc[-1]}'; add `{loc[-1]}: …`{_purpose(model, loc)}"
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if loc == ("version",) and kind == "literal_error":
        return f"version {value!r} is not 1, the version of recipes this Tokenmill reads"
    if kind == "literal_error":
        listed = error["msg"].removeprefix("Input should be ").replace(" or ", ", ").split(",")
        choices = [word.strip().strip("'") for word in listed]
        return f"{value!r} is not one of {', '.join(choices)}{_did_you_mean(value, choices)}"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"must be a mapping (`key: value` lines), got {shown(value)}"
    if kind == "list_type":
        return f"must be a list (lines that begin with '- '), got {shown(value)}"
    if kind == "too_short":
        return "must not be empty"
    message = error["msg"].replace("Input should be", "must be").replace("Input ", "")
    return f"{message[0].lower()}{message[1:]}, got {shown(value)}"


def _did_you_mean(value: Any, choices: list[str]) -> str:
    hint = nearest(str(value), choices)
    return f"; {hint}" if hint.startswith("did") else ""


def _purpose(model: type[BaseModel], loc: tuple[Any, ...]) -> str:
    inner = _model_at(model, loc[:-1])
    field = inner.model_fields.get(str(loc[-1])) if inner else None
    return f" ({field.description})" if field is not None and field.description else ""


def _keys(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """Return the keys that may stand at a place of a recipe, for a message about an unknown key. `loc` is the place in
    pydantic's form, below `model`."""
    inner = _model_at(model, loc)
    return [f.alias or name for name, f in inner.model_fields.items()] if inner else []


def _model_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel] | None:
    here: Any = model
    for entry in loc:
        here = _plain_type(here)
        if isinstance(here, type) and issubclass(here, BaseModel):
            fields = {f.alias or name: f for name, f in here.model_fields.items()}
            if entry not in fields:
                return None
            here = fields[entry].annotation
        elif get_origin(here) in (dict, list, tuple):
            here = get_args(here)[-1 if get_origin(here) is dict else 0]
    here = _plain_type(here)
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _plain_type(annotation: Any) -> Any:
    """Return the type inside a type annotation: `int` for `Annotated[int, …]` and for `int | None`. Of several types,
    the first is returned."""
    while get_origin(annotation) in (Annotated, Union, types.UnionType):
        options = [a for a in get_args(annotation) if a is not type(None)]
        annotation = options[0]
    return annotation
