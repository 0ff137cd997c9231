"""Makes an excerpt of a dropped document in which the passages that made a rule drop it are marked."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from stages.catalog import STAGES, stage_class
from stages.scrub.pii import scrub_text

#: numbers of characters: searched in a text, shown before the first passage, shown in all
SEARCHED, BEFORE, SHOWN = 1 << 16, 90, 320


def match(stage: str, reason: str, text: str, meta: str | None = None) -> dict[str, list[list[str]]]:
    """Return {"match": [[kind, text], …]}: an excerpt around the first passage that gave a document the reason for
    which the stage dropped it. The kinds are "text", "mark" (such a passage) and "cut" (left-out text). Returns {} if
    the stage cannot name a passage, or if it is a barrier that removed the document as a duplicate (`meta` then has the
    barrier's note).

    Personal data is removed from the text before the search. In a finished excerpt, an address may be cut in half and
    would not be recognised."""
    finder = _finder(stage)
    if finder is None or verdict(meta, stage) is not None:
        return {}
    head = text[:SEARCHED]
    if len(text) > SEARCHED:
        head = head[:max(head.rfind(" "), head.rfind("\n"), 0)]
    head = scrub_text(head)
    spans = finder(head, reason)
    return {"match": excerpt(head, spans)} if spans else {}


def verdict(meta: str | None, barrier: str) -> dict[str, Any] | None:
    """Return why the barrier (a deduplication step) removed a document, as the barrier noted in the document's `meta`:
    {"kept": id of the document it duplicates, "similarity"}. Returns None if `meta` has no such note. A metadata field
    of the source with the same name as the step is not mistaken for a note."""
    verdict = json.loads(meta or "{}").get(barrier) if barrier and meta and "kept" in meta else None
    if not isinstance(verdict, dict) or not isinstance(verdict.get("kept"), str):
        return None
    return verdict if isinstance(verdict.get("similarity", ""), int | float | None) else None


@cache
def _finder(stage: str) -> Any:
    """Return the method `matches` of a registered step, which finds the passages that made it drop a text. None for a
    step that is not registered or has no such method."""
    return getattr(stage_class(stage), "matches", None) if stage in STAGES else None


def excerpt(text: str, spans: list[tuple[int, int]]) -> list[list[str]]:
    """Return an excerpt around the first of the `spans` (start, end) of a text, on one line, with all spans in the
    excerpt marked: [[kind, text], …] with the kinds "text", "mark" and "cut". If the first span is near the beginning
    of the text, the excerpt starts at the beginning."""
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
