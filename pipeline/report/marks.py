"""Makes an excerpt of a dropped document in which the passages that made a rule drop it are marked, and marks the parts
of its URL that made a rule drop it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.catalog import UnknownName, stage_class, steps
from stages.document import Document
from stages.scrub.pii import scrub_part, scrub_text
from stages.scrub.rows import MARGIN
from stages.stage import Stage, role_of
from stages.text.marks import Span

#: numbers of characters: searched in a text, shown before the first passage, shown in all
SEARCHED, BEFORE, SHOWN = 1 << 16, 90, 320
#: what a step raises if its settings, a list, a model or a library do not let it look for passages
_UNFIT = (OSError, ValueError, ImportError, UnknownName)
#: a URL in which a placeholder for personal data has replaced the host: its marks would be of the placeholder
_MASKED_HOST = re.compile(r"[^/?#]*//[^/?#]*@")
#: why nothing is marked for a step for which the recipe names a file
_NAMES_FILE = "the recipe names a file for this step, and a report written again from the store reads no such file"


def stages_of(recipe: Mapping[str, Any], dataset: str, *, files: bool = False) -> dict[str, Stage | str]:
    """Return the registered steps of a dataset that can mark passages, by name, with their settings in the recipe. Of
    steps with one name the first counts. Steps from a file of the user's own are left out. If a step cannot mark
    anything here, because of its settings, or because this machine lacks its libraries or models, the result has a
    sentence that says why, instead of the step.

    Without `files`, this is also so for a step for which the recipe names a file, such as a list of words. `files` must
    not be set for a recipe that was read from a store: whoever can write to the store could name any file of this
    machine, and would learn from the marks in their own documents which words it holds."""
    sections = recipe.get("datasets")
    section = sections.get(dataset) if isinstance(sections, dict) else None
    listed = section.get("steps") if isinstance(section, dict) else None
    out: dict[str, Stage | str] = {}
    for step in listed if isinstance(listed, list) else ():           # the file may be damaged
        name, config = next(iter(step.items())) if isinstance(step, dict) and step else ("", None)
        if isinstance(name, str) and name in steps() and name not in out and isinstance(config, dict | None):
            try:
                kind = stage_class(name)
                if kind.matches is not Stage.matches or kind.url_matches is not Stage.url_matches:
                    # no step is made of settings that name a file: it might read the file, and its error might quote it
                    out[name] = kind(config or {}) if files or not _names_file(kind, config or {}) else _NAMES_FILE
            except _UNFIT as e:
                out[name] = _problem(e)
    return out


def _names_file(kind: type[Stage], config: Mapping[str, Any]) -> bool:
    # also the empty path: it is the working directory, all of whose files a step may read to hash them
    return any(value is not None and key in kind.Config.model_fields and role_of(kind.Config, key) == "resource"
               for key, value in config.items())


def _problem(error: Exception) -> str:
    return scrub_text(_line(str(error)))[:SHOWN]


@dataclass(frozen=True)
class MarkedPassages:
    """The passages of a document for which a stage dropped it: places in its text, and in its URL. If the stage could
    not look for them, `problem` says why."""

    text: list[Span] = field(default_factory=list)
    url: list[Span] = field(default_factory=list)
    problem: str = ""


def find_marks(stage: Stage | str | None, reason: str, text: str, language: str, url: str) -> MarkedPassages:
    """Return the passages of a text and of its URL for which the stage dropped the document. `stage` is as in the
    result of `stages_of`; None if the step can mark nothing. Personal data is masked in the text and the URL."""
    if not isinstance(stage, Stage):
        return MarkedPassages(problem=stage or "")
    try:
        document = Document("", text, language=language)
        return MarkedPassages(stage.matches(document, reason),
                              [] if _MASKED_HOST.match(url) else stage.url_matches(url, reason))
    except _UNFIT as e:
        return MarkedPassages(problem=_problem(e))


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


def match(stage: Stage | str | None, reason: str, row: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the passages for which the stage dropped a document, as fields of its sample. `row` has the document's
    text, language and meta; `url` is its URL without personal data. `match` is an excerpt of the text around the first
    such passage, and `url_match` the URL, both as [[kind, text], …]. The kinds are "text", "mark" (such a passage) and
    "cut" (left-out text). A field is left out if it would have no mark. `unmarked` says why the stage could not look
    for passages.

    Returns {} if the stage is a barrier that removed the document as a duplicate (`meta` then has the barrier's note).

    Personal data is removed from the text before the search, together with what follows the searched part. An address
    that is cut in half would not be recognised."""
    if isinstance(stage, Stage) and verdict(row["meta"], stage.name) is not None:
        return {}
    text = row["text"]
    head = text[:SEARCHED]
    if len(text) > SEARCHED:
        head = head[:max(head.rfind(" "), head.rfind("\n"), 0)]
    head = scrub_part(text[:SEARCHED + MARGIN], 0, len(head))
    marks = find_marks(stage, reason, head, row["language"] or "", url)
    return {**({"match": excerpt(head, marks.text)} if marks.text else {}),
            **({"url_match": [["mark" if marked else "text", piece] for marked, piece in pieces(url, marks.url)]}
               if marks.url else {}),
            **({"unmarked": marks.problem} if marks.problem else {})}


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
