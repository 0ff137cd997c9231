"""Defines what the modules of the report's schema share: the functions that declare a field, the base class of all
parts, and the excerpt of a document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def fact(meaning: str, unit: str = "", **how: Any) -> Any:
    """Declare a field of the report, with its meaning and its unit for the documentation."""
    return Field(description=meaning, json_schema_extra={"unit": unit}, **how)


def maybe(meaning: str, unit: str = "") -> Any:
    """Declare a field of the report that is left out if it has no value."""
    return fact(meaning, unit, default=None)


class ReportPart(BaseModel):
    """Base class of all parts of the report. Types are checked without conversion, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Counts = dict[str, int]
#: name → name → number, e.g. source → language → documents
Nested = dict[str, Counts]


class Excerpt(ReportPart):
    """A document, shown by an excerpt of its text. Personal data is masked."""

    id: str = fact("id of the document")
    url: str = fact("URL of the document, may be empty")
    file: str = fact("input file of the document; of an archive, with the entry after `:`")
    source: str = fact("source of the document")
    chars: int = fact("length of the document's whole text", "characters")
    excerpt: str = fact("the beginning of the document's text")
    kept: str | None = maybe("id of the kept document that this document resembles; left out if no deduplication "
                             "removed this document")
    match: list[list[str]] | None = maybe("an excerpt around the passage for which the rule dropped the document, as a "
                                          "list of [kind, text]. The kind is `mark` (such a passage), `text` (other "
                                          "text) or `cut` (omitted text); left out if the step names no passage")
    url_match: list[list[str]] | None = maybe("the URL, with the parts marked for which the rule dropped the document, "
                                              "as a list of [kind, text] like `match`; left out if the step names no "
                                              "part of it")
    similarity: float | None = maybe("similarity of this document to the document `kept`, 0 to 1; null if the texts "
                                     "were not compared; left out if no deduplication removed this document")
