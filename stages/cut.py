"""Cuts passages out of documents: the stage that carries out the cuts that a barrier has decided.

A barrier is a step that needs all documents at once, such as deduplication. The tasks of a barrier write no documents.
They write removal slices, which name the bytes to cut (`stages.barrier`). The pass after the barrier reads these
slices, and this stage runs first in the pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stages.stage import Stage, StageConfig, decision, signal

if TYPE_CHECKING:
    from stages.document import Document

#: a passage of a text to be cut: {start, end: bytes of the UTF-8 text, reason, match}. `match` says where else the
#: passage stands, such as the id of the document that keeps it; it may be None
Passage = dict[str, Any]
#: a stretch of a text, {start, end}, in UTF-8 bytes
Stretch = dict[str, Any]

#: cuts of a document that are noted in its metadata one by one; further cuts are only counted
MOST_NOTED = 32
#: entries of the metadata that list places of the text as {start, end} in bytes, which have to move when text is cut:
#: `pii` is the list that the step `pii` writes with `audit: true`
PLACES = ("pii",)
#: reason for which a document is dropped when too little of its text remains
TOO_SHORT = "too_short"


class CutConfig(StageConfig):
    """The settings of every barrier that cuts passages (`Barrier.edits`). They decide whether a document from which
    passages were cut is too short to keep."""

    min_chars: int = decision(200, "fewest characters that must be left of a document from which passages were cut, or "
                                   "it is dropped; without any text it always is", ge=0)
    min_words: int = decision(0, "fewest words that must be left of a document from which passages were cut, or it is "
                                 "dropped; words by English rules, as in datatrove", ge=0)


def cut_name(step: str) -> str:
    """Return the name of the stage that carries out the cuts of the barrier step `step`. The stage runs in the pass
    after the barrier. Reports and `dropped/` show this name, and it is the key under which the stage writes to
    `meta`."""
    return f"{step}_cut"


def cut_settings(step: str, config: Any) -> dict[str, Any]:
    """Return the config of the stage `CutPassages` that carries out the cuts of the barrier step `step`, whose own
    config (a CutConfig) is `config`."""
    return {"step": step, **{name: getattr(config, name) for name in CutConfig.model_fields}}


class CutPassages(Stage):
    """Cut the passages that a barrier names out of documents, and drop documents of which too little is left.

    A passage whose ends lie inside a character is shortened to whole characters, so no character is ever cut in two.
    Bytes that two passages share count for the passage that begins first. The positions in `loss_spans` (the parts of a
    text that training learns from) are moved to fit the new text.

    A document that was cut gets three signals: the number of bytes cut, and the numbers of characters (without white
    space at the ends) and of words that are left. Its metadata gets an entry with the numbers of cuts and of bytes for
    each reason. The entry also lists the first MOST_NOTED passages, by their positions in the text before the cuts.
    Documents without a cut pass unchanged, however short they are.
    """

    name = "cut"
    version = 1
    cost_ms, leaves = 0.05, 0.95                   # for an input of which half of the documents are cut
    drops = edits = True
    libraries = ("spacy",)                         # for the number of words

    class Config(CutConfig):
        step: str = signal("", "name of the barrier's step")

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        step = self.config.step
        self._entry = cut_name(step)
        self._bytes, self._chars, self._words = self.signals = (
            f"{step}_cut_bytes", f"{step}_left_chars", f"{step}_left_words")

    def setup(self) -> None:
        from stages.text.words import warm  # planner and report import this module, and need no words

        warm()

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        doc.meta.pop(self._entry, None)
        data = doc.utf8 if doc.cuts else b""
        passages = whole_passages(data, doc.cuts or ())
        if not passages:
            return None
        self._note(doc, passages)
        cut_out(doc, data, passages)
        doc.signals[self._bytes] = sum(passage["end"] - passage["start"] for passage in passages)
        doc.signals[self._chars], doc.signals[self._words] = len(doc.text.strip()), len(doc.words)
        return self.verdict(doc)

    def verdict(self, doc: Document) -> str | None:
        chars = doc.signals.get(self._chars)
        if chars is None:                                             # the document was not cut
            return None
        short = chars < max(self.config.min_chars, 1) or doc.signals[self._words] < self.config.min_words
        return TOO_SHORT if short else None

    def counts(self, doc: Document) -> dict[str, Any] | None:
        entry = doc.meta.get(self._entry)
        if entry is None or self._bytes not in doc.signals:
            return None
        return {"docs": 1, "cuts": entry["cuts"], "bytes": entry["bytes"],
                "sources": {doc.source: sum(entry["bytes"].values())}}

    def _note(self, doc: Document, passages: Sequence[Passage]) -> None:
        cuts: dict[str, int] = {}
        size: dict[str, int] = {}
        for passage in passages:
            reason = passage["reason"]
            cuts[reason] = cuts.get(reason, 0) + 1
            size[reason] = size.get(reason, 0) + passage["end"] - passage["start"]
        noted = [{name: value for name, value in passage.items() if value is not None}
                 for passage in passages[:MOST_NOTED]]
        doc.meta[self._entry] = {"cuts": cuts, "bytes": size, "passages": noted}


def cut_out(doc: Document, data: bytes, passages: Sequence[Stretch]) -> None:
    """Cut passages out of a document, whose text is `data` in UTF-8. The positions in its `loss_spans` and in the lists
    that PLACES names in its metadata are moved to fit the new text. The passages consist of whole characters, are in
    order and do not overlap."""
    if doc.loss_spans is not None:
        doc.loss_spans = moved(doc.loss_spans, passages)
    for name in PLACES:
        if _are_places(doc.meta.get(name)):
            doc.meta[name] = moved(doc.meta[name], passages)
    doc.text = without(data, passages).decode("utf-8", "surrogatepass")


def whole_passages(data: bytes, passages: Iterable[Passage]) -> list[Passage]:
    """Prepare the passages of a UTF-8 text to be cut out. Returns them in order, shortened to whole characters. Of
    overlapping passages, the later one loses the bytes that they share. Passages that become empty are left out."""
    result: list[Passage] = []
    cut_until = 0
    for passage in sorted(passages, key=lambda passage: (passage["start"], passage["end"])):
        start, end = max(passage["start"], cut_until), min(passage["end"], len(data))
        while start < end and _inside(data, start):
            start += 1
        while start < end and _inside(data, end):
            end -= 1
        if start < end:
            result.append({**passage, "start": start, "end": end})
            cut_until = end
    return result


def _inside(data: bytes, place: int) -> bool:
    """Return whether a position in a UTF-8 text lies inside a character, that is, whether the byte there continues a
    character."""
    return place < len(data) and data[place] & 0xC0 == 0x80


def without(data: bytes, passages: Sequence[Stretch]) -> bytes:
    """Return a text (UTF-8) without its passages. The passages are in order and do not overlap."""
    starts = [0, *(passage["end"] for passage in passages)]
    ends = [*(passage["start"] for passage in passages), len(data)]
    return b"".join(data[start:end] for start, end in zip(starts, ends))


def moved(stretches: Sequence[Stretch], passages: Sequence[Stretch]) -> list[Stretch]:
    """Return the positions that stretches of a text have after passages have been cut from the text. A stretch shrinks
    by the bytes that are cut from it. A stretch that is cut entirely is left out. The passages are in order and do not
    overlap."""
    result: list[Stretch] = []
    places = [place for stretch in stretches for place in (stretch["start"], stretch["end"])]
    order = sorted(range(len(places)), key=places.__getitem__)
    removed = number = 0                          # bytes of the passages that end before the place, and their number
    for i in order:
        place = places[i]
        while number < len(passages) and passages[number]["end"] <= place:
            removed += passages[number]["end"] - passages[number]["start"]
            number += 1
        inside = place - passages[number]["start"] if number < len(passages) else 0
        places[i] = place - removed - max(inside, 0)
    for stretch, start, end in zip(stretches, places[::2], places[1::2]):
        if start < end:
            result.append({**stretch, "start": start, "end": end})
    return result


def _are_places(value: Any) -> bool:
    """Return whether an entry of a document's metadata is a list of places ({start, end}). Metadata that came with the
    input may hold anything else under the entry's name."""
    return isinstance(value, list) and all(
        isinstance(item, dict) and all(type(item.get(end)) is int for end in ("start", "end")) for item in value)
