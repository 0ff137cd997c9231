"""What several models of a recipe share: the base class, names, and the types of single values."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from pipeline.base.quantities import parse_bytes, parse_count, parse_share, parse_weight, percent


class RecipeModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def checked_name(value: str) -> str:
    """Return the name of a source, dataset, phase or the like. Raises ValueError unless it has at most 64 letters,
    digits, '_', '-' and '.', and begins with a letter or digit; names become names of folders."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError(f"'{value}' is not a name; names become folders: at most 64 letters, digits, '_', '-', '.', "
                         "beginning with a letter or digit")
    return value


def listed(value: Any) -> Any:
    """Turn a single text into a list with this text, so that a recipe may write `from: web` for `from: [web]`."""
    return [value] if isinstance(value, str) else value


def empty(value: Any) -> Any:
    """Turn None into {}, so that a key of a recipe without a value counts as left out."""
    return {} if value is None else value


Count = Annotated[int, BeforeValidator(parse_count)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Share = Annotated[float, BeforeValidator(parse_share), PlainSerializer(percent)]
Weight = Annotated[int | float, BeforeValidator(parse_weight)]
Name = Annotated[str, AfterValidator(checked_name)]
Names = Annotated[list[str], BeforeValidator(listed), Field(min_length=1)]
#: column → value, or values of which a document must have one
Where = Annotated[dict[Literal["source", "language"], Names], BeforeValidator(empty)]
Settings = Annotated[dict[str, Any], BeforeValidator(empty)]
