"""Makes an excerpt of a dropped document in which the places that made a rule drop it are marked."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from stages.catalog import STAGES, stage_class
from stages.scrub.pii import scrub_text

#: characters of a text that are searched, characters that are shown before the first place and in all
SEARCHED, BEFORE, SHOWN = 1 << 16, 90, 320


def match(stage: str, reason: str, text: str, meta: str | None = None) -> dict[str, list[list[str]]]:
    """{"match": [[kind, text], …]} with an excerpt around the first place that the stage names for its reason. The
    kinds are "text", "mark" (a place) and "cut". {} where the stage names none. The text is scrubbed before it is
    searched, because a cut could halve an address."""
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
    """Why the barrier removed a document: {"kept": id of the document it duplicates, "similarity"}, from the document's
    `meta`. None when the barrier has noted nothing there. A field of the source that has the step's name is no
    verdict."""
    verdict = json.loads(meta or "{}").get(barrier) if barrier and meta and "kept" in meta else None
    if not isinstance(verdict, dict) or not isinstance(verdict.get("kept"), str):
        return None
    return verdict if isinstance(verdict.get("similarity", ""), int | float | None) else None


@cache
def _finder(stage: str) -> Any:
    """`Stage.matches` of a registered step; None for any other."""
    return getattr(stage_class(stage), "matches", None) if stage in STAGES else None


def excerpt(text: str, spans: list[tuple[int, int]]) -> list[list[str]]:
    """The text around the first span, on one line, with the spans in it marked. It begins where the text does if the
    span is near."""
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
    """Text with one space for every run of white space, also at its ends, where a mark begins or ends."""
    words = " ".join(text.split())
    return (" " if text[:1].isspace() else "") + words + (" " if words and text[-1:].isspace() else "")
