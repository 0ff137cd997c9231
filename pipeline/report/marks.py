"""Makes an excerpt of a dropped document, and marks the passages in it that made a rule drop the document."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from stages.catalog import UnknownName, stage_class, steps
from stages.document import Document
from stages.scrub.pii import scrub_text
from stages.stage import Stage, role_of
from stages.text.marks import Span

#: numbers of characters: searched in a text, shown before the first passage, shown in all
SEARCHED, BEFORE, SHOWN = 1 << 16, 90, 320


def stages_of(recipe: Mapping[str, Any], dataset: str, *, files: bool = False) -> dict[str, Stage]:
    """Return the registered steps of a dataset by name, with their settings in the recipe. Of steps with one name, the
    first is taken. Steps from a file of the user's own are left out. So are steps whose settings this machine does not
    accept, or whose libraries or models it does not have.

    Without `files`, steps are also left out for which the recipe names a file, such as a list of words. `files` must
    not be set for a recipe that was read from a store. Whoever can write to the store could name any file of this
    machine in the recipe. The marks in their own documents would then tell them which words the file holds.
    """
    sections = recipe.get("datasets")
    section = sections.get(dataset) if isinstance(sections, dict) else None
    listed = section.get("steps") if isinstance(section, dict) else None
    out: dict[str, Stage] = {}
    for step in listed if isinstance(listed, list) else ():           # the file may be damaged
        name, config = next(iter(step.items())) if isinstance(step, dict) and step else ("", None)
        if isinstance(name, str) and name in steps() and name not in out and isinstance(config, dict | None):
            with contextlib.suppress(OSError, ValueError, ImportError, UnknownName):
                stage = stage_class(name)(config or {})
                if files or not any(value is not None and role_of(type(stage.config), field) == "resource"
                                    for field, value in stage.config):
                    out[name] = stage
    return out


def passages(stage: Stage, reason: str, text: str, language: str) -> list[Span]:
    """Return the passages of a text that gave it the reason for which the stage dropped it; [] if the stage cannot name
    one, or if this machine lacks what the stage needs to find one."""
    try:
        return stage.matches(Document("", text, language=language), reason)
    except (OSError, ValueError, ImportError):             # a list, a model or a library
        return []


def pieces(text: str, spans: list[Span]) -> list[tuple[bool, str]]:
    """Cut a text into pieces, at the ends of `spans`, which are in order. Each piece comes with whether it is in a
    span."""
    out: list[tuple[bool, str]] = []
    at = 0
    for first, last in spans:
        if first >= at:
            out += [(False, text[at:first]), (True, text[first:last])]
            at = last
    return [piece for piece in (*out, (False, text[at:])) if piece[1]]


def match(stage: Stage | None, reason: str, row: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return an excerpt around the first passage that gave a document the reason for which the stage dropped it, as
    {"match": [[kind, text], …]}. The kinds are "text", "mark" (such a passage) and "cut" (left-out text). `row` has the
    document's text, language and meta.

    Returns {} if the stage cannot name a passage, or if this machine lacks what it needs to find one. Also returns {}
    if `meta` has a barrier's note: the stage is a barrier, and removed the document as a duplicate.

    Personal data is removed from the text before the search. In a finished excerpt, an address may be cut in half and
    would not be recognised.
    """
    if stage is None or verdict(row["meta"], stage.name) is not None:
        return {}
    text = row["text"]
    head = text[:SEARCHED]
    if len(text) > SEARCHED:
        head = head[:max(head.rfind(" "), head.rfind("\n"), 0)]
    head = scrub_text(head)
    spans = passages(stage, reason, head, row["language"] or "")
    return {"match": excerpt(head, spans)} if spans else {}


def verdict(meta: str | None, barrier: str) -> dict[str, Any] | None:
    """Return why the barrier (a deduplication step) removed a document, as the barrier noted in the document's `meta`:
    {"kept": id of the document it duplicates, "similarity"}. Returns None if `meta` has no such note. A metadata field
    of the source with the same name as the step is not mistaken for a note."""
    verdict = json.loads(meta or "{}").get(barrier) if barrier and meta and "kept" in meta else None
    if not isinstance(verdict, dict) or not isinstance(verdict.get("kept"), str):
        return None
    return verdict if isinstance(verdict.get("similarity", ""), int | float | None) else None


def excerpt(text: str, spans: list[tuple[int, int]]) -> list[list[str]]:
    """Return an excerpt around the first of the `spans` (start, end) of a text, on one line: [[kind, text], …]. The
    kinds are "text", "mark" (a span) and "cut" (left-out text). If the first span is near the beginning of the text,
    the excerpt starts at the beginning."""
    begin = max(0, spans[0][0] - BEFORE) if spans[0][0] > SHOWN - BEFORE else 0
    if begin and (space := re.search(r"\s", text[begin:spans[0][0]])):
        begin += space.end()
    end = min(len(text), begin + SHOWN)
    out: list[list[str]] = [["cut", ""]] if begin else []
    at = begin
    for first, last in spans:
        if first >= end:
            break
        out += [["text", text[at:first]], ["mark", text[first:min(last, end)]]]
        at = min(last, end)
    out.append(["text", text[at:end]])
    if end < len(text):
        out.append(["cut", ""])
    lines = [[kind, " ".join(part.split()) if kind != "text" else _line(part)] for kind, part in out]
    return [entry for entry in lines if entry[0] == "cut" or entry[1]]


def _line(text: str) -> str:
    """Return the text with one space for every run of white space. Space at its ends is kept, because there it
    separates the text from a mark."""
    words = " ".join(text.split())
    return (" " if text[:1].isspace() else "") + words + (" " if words and text[-1:].isspace() else "")
