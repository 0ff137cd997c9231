"""The step `decontaminate`: drops documents that hold items of evaluation sets, or cuts the items out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import model_validator

from stages.cut import cut_out, whole_passages, without
from stages.decontaminate.index import LENGTHS, EvaluationIndex, ItemPart, index_file
from stages.decontaminate.scan import words_of
from stages.decontaminate.sets import Part, SetError
from stages.stage import Bound, Stage, StageConfig, decision, resource, signal
from stages.text.marks import MOST, Span

if TYPE_CHECKING:
    from stages.document import Document

#: Dialect idf: most words in a row, inside a match, that begin no 5-gram of the entry; share of an entry's weight that
#: must match. Entries of up to STRICT words must match whole; from there to EASY words, the share falls to SHARE, as in
#: decon.
MISSES, SHARE, STRICT, EASY = 11, 0.8, 20, 50
#: most hits that are noted in `meta`, those of the longest items; all hits count
NOTED = 50


class Hit(NamedTuple):
    """A text of an evaluation set, found in a document. `entry` is the number of the text in the index, and `words` its
    number of words. It was found in bytes [start, end) of the document's text. `share` is the share of its n-grams that
    were found there (dialect idf: the share of their weight)."""

    start: int
    end: int
    entry: int
    words: int
    share: float


class Decontaminate(Stage):
    """Drop documents that hold items of evaluation sets, or cut the items out of their text.

    The setting `sets` names files or folders (JSON Lines or Parquet). The setting `fields` says which fields of their
    rows to use, for example `{piqa: {question: goal, answer: sol1}}`. Sets that `fields` does not name have their
    questions in the field `question`. Case, white space and punctuation make no difference, and all numbers are equal
    (`stages.decontaminate.scan`).

    In dialect `ngram`, a sequence of 13 words that a document shares with a question, answer or passage is a hit, as
    for GPT-3 (arXiv 2005.14165, appendix C).

    Dialect `idf` compares sequences of 5 words (5-grams). A 5-gram weighs more, the fewer items have it. A stretch of
    text is a hit if it has enough of an item's 5-grams by weight: 100 % for items of up to 20 words, 80 % for items of
    50 words or more, and a share in between for the others. Within the stretch, at most 11 words in a row may begin
    none of the shared 5-grams. These numbers are taken from AllenAI's tool decon, but the results differ from decon's,
    as docs/filters.md explains.

    A question too short for n-grams (fewer than 13 words; idf: fewer than 8) is a hit only if the document has all of
    it. A question of fewer than 5 words must also fill whole sentences or lines. Items of fewer than `min_words` words,
    such as "Fire", are only noted: no document is dropped or cut because of them. Answers and passages too short for
    n-grams are never looked for. N-grams that occur in many items do not count. With `common` (a file with a sample of
    the corpus, with texts in the field `text`), n-grams that occur in 10 or more documents of the sample do not count
    either.

    `meta.contamination` lists up to 50 hits: the set, the row's number in it (from 0), the part of the row, the item's
    number of words, the position of the hit in bytes of the text before any cut, and the matched share. If this list
    lacks an item that was found, `meta.contaminated_rows` has the rows of all items found, by set, part and number of
    words of the item.

    Three signals (numbers stored with the document) are written. `contaminated_items` is the number of different texts
    (questions, answers, passages) found. `contaminated_words` is the number of words of the longest of these texts, or
    0. `contaminated_share` is the share of the document's bytes in hits. With action `cut`, it is the share that is
    cut, or 1 if only white space would be left. Reasons: `contaminated` (action drop), `contaminated_all` (action cut,
    when nothing is left).
    """

    name = "decontaminate"
    version = 4
    cost_ms = 0.1
    drops = True
    edits = True
    leaves = 0.99
    memory_mb = 100
    signals = ("contaminated_items", "contaminated_words", "contaminated_share")

    class Config(StageConfig):
        sets: dict[str, str] = resource(..., "evaluation sets: name → file or folder (JSON Lines, Parquet)",
                                        min_length=1)
        fields: dict[str, dict[Part, str]] = signal(
            {}, "set → which fields of its rows are question, answer and passage; a dot leads into an object")
        dialect: Literal["ngram", "idf"] = signal("ngram", "13-grams as GPT-3, or weighted 5-grams as decon")
        action: Literal["drop", "cut"] = signal("drop", "drop the document, or cut the matched words")
        min_words: int = decision(3, "fewest words of an item that drops or cuts; shorter ones are noted", ge=1)
        common: str | None = resource(None, "sample of the corpus: n-grams in 10 or more of its documents do not count")

        @model_validator(mode="after")
        def _of_sets(self) -> Decontaminate.Config:
            for name, fields in self.fields.items():
                if name not in self.sets:
                    raise ValueError(f"fields: {name} is no set; there are: {', '.join(self.sets)}")
                if not fields:
                    raise ValueError(f"fields: {name} names no field; write, for example, {{question: FIELD}}")
            return self

    def _index(self) -> EvaluationIndex:
        config = self.config
        fields: dict[str, Mapping[Part, str]] = {
            name: config.fields.get(name, {"question": "question"}) for name in config.sets}
        return EvaluationIndex(index_file(config.sets, fields, config.dialect, config.common))

    def problems(self) -> dict[str, str]:
        try:
            self._index()
        except SetError as error:
            return {error.field: str(error)}
        except FileNotFoundError:                         # a missing file is reported as such
            return {}
        return {}

    def warnings(self) -> list[str]:
        try:
            index = self._index()
        except (SetError, FileNotFoundError):
            return []
        sets, least = index.sets, self.config.min_words
        short = [f"{name} {count:,} of {sets[name]['rows']:,}" for name, count in index.short_questions(least).items()
                 if count]
        common = [f"{name} {about['common']:,} of {about['rows']:,}" for name, about in sets.items() if about["common"]]
        return [f"questions of fewer than {least} words are noted in meta.contamination, and the document stays whole "
                f"({', '.join(short)}); with min_words: 1 they count as all others"] * bool(short) + \
               [f"questions that consist of numbers or common n-grams alone are not looked for ({', '.join(common)}); "
                f"the other dialect may find them"] * bool(common)

    def setup(self) -> None:
        self._loaded = self._index()

    def process(self, doc: Document) -> str | None:
        doc.meta.pop("contamination", None)
        doc.meta.pop("contaminated_rows", None)
        data, cuts = doc.utf8, self.config.action == "cut"
        hits = self.find(data)
        passages = whole_passages(data, [{"start": hit.start, "end": hit.end} for hit in hits
                                         if not cuts or hit.words >= self.config.min_words])
        covered = sum(passage["end"] - passage["start"] for passage in passages)
        doc.signals["contaminated_items"] = len({hit.entry for hit in hits})
        doc.signals["contaminated_words"] = max((hit.words for hit in hits), default=0)
        doc.signals["contaminated_share"] = covered / len(data) if passages else 0.0
        if hits:
            self._note(doc, hits)
        if not cuts:
            return self.verdict(doc)
        if passages:
            if not without(data, passages).decode("utf-8", "surrogatepass").strip():
                doc.signals["contaminated_share"] = 1.0
                return "contaminated_all"
            cut_out(doc, data, passages)
        return None

    def _note(self, doc: Document, hits: list[Hit]) -> None:
        """Write the hits of a document, and the items of evaluation sets to which they belong, to `meta.contamination`
        and `meta.contaminated_rows` of the document."""
        members = {entry: self._loaded.members(entry) for entry in {hit.entry for hit in hits}}
        noted: list[dict[str, Any]] = [
            {"set": member.set, "row": member.row, "part": member.part, "words": hit.words, "start": hit.start,
             "end": hit.end, "share": hit.share}
            for hit in nlargest(NOTED, hits, key=lambda hit: hit.words)
            for member in members[hit.entry][:NOTED]][:NOTED]
        doc.meta["contamination"] = sorted(noted, key=lambda hit: (hit["start"], hit["end"]))
        items: dict[ItemPart, int] = {}                # words of the longest text, if a part of a row has several
        for entry, each in members.items():
            for member in each:
                items[member] = max(items.get(member, 0), int(self._loaded.words[entry]))
        if items.keys() - {ItemPart(hit["set"], hit["row"], hit["part"]) for hit in noted}:
            rows: dict[str, dict[str, dict[str, list[int]]]] = {}
            for (name, row, part), words in sorted(items.items()):
                rows.setdefault(name, {}).setdefault(part, {}).setdefault(str(words), []).append(row)
            doc.meta["contaminated_rows"] = rows

    def verdict(self, doc: Document) -> str | None:
        words = doc.signals["contaminated_words"]
        if words and self.config.action == "cut":        # the signals do not say what another `min_words` would leave
            raise NotImplementedError
        return "contaminated" if words >= self.config.min_words else None

    def bounds(self) -> list[Bound]:
        return [Bound("contaminated_words", "min_words", "below", float(self.config.min_words))
                ] if self.config.action == "drop" else []

    def matches(self, doc: Document, reason: str) -> list[Span]:
        if not hasattr(self, "_loaded"):
            self.setup()
        data = doc.utf8
        deciding = [hit for hit in self.find(data) if hit.words >= self.config.min_words][:MOST]
        passages = whole_passages(data, [{"start": hit.start, "end": hit.end} for hit in deciding])
        spans = []
        at = chars = 0
        for passage in passages:
            begin = chars + len(data[at:passage["start"]].decode("utf-8", "surrogatepass"))
            at = passage["end"]
            chars = begin + len(data[passage["start"]:at].decode("utf-8", "surrogatepass"))
            spans.append((begin, chars))
        return spans

    def counts(self, doc: Document) -> dict[str, Any] | None:
        """Return what the report sums over documents, by evaluation set. `dropped` or `cut` is 1 if items of the set
        caused the drop or the cut. `noted` is 1 if all items of the set in the document have fewer than `min_words`
        words. `items` holds a 1 for each item that caused the drop or the cut, by part and row."""
        outcome = "dropped" if self.config.action == "drop" or doc.signals["contaminated_share"] == 1.0 else "cut"
        items: Iterable[tuple[str, str, int, int]] = (
            ((name, part, row, int(words)) for name, parts in doc.meta["contaminated_rows"].items()
             for part, by_words in parts.items() for words, rows in by_words.items() for row in rows)
            if "contaminated_rows" in doc.meta else
            ((hit["set"], hit["part"], hit["row"], hit["words"]) for hit in doc.meta.get("contamination", ())))
        deciding: dict[str, dict[str, dict[str, int]]] = {}
        for name, part, row, words in items:
            parts = deciding.setdefault(name, {})
            if words >= self.config.min_words:
                parts.setdefault(part, {})[str(row)] = 1
        return {name: {"dropped": 0, "cut": 0, "noted": 0, outcome if parts else "noted": 1, "items": parts}
                for name, parts in sorted(deciding.items())} or None

    def find(self, data: bytes) -> list[Hit]:
        """Return all hits in a text (UTF-8), that is, the items of evaluation sets that it holds, in the order of the
        text."""
        index, words = self._loaded, words_of(data)
        matches = index.hits(words)
        if not len(matches):
            return []
        first, length, gram = matches.T
        which, entry = index.entries(gram)
        first, length, gram = first[which], length[which], gram[which]
        whole = index.whole[entry] == 1
        fits = (whole == (length == index.words[entry])) | ~whole
        fits &= whole | (length == LENGTHS[self.config.dialect])
        first, length, gram, entry = first[fits], length[fits], gram[fits], entry[fits]
        order = np.lexsort((first, entry))
        first, length, gram, entry = first[order], length[order], gram[order], entry[order]
        gap = np.maximum(length if self.config.dialect == "ngram" else MISSES + 1, index.stretches[entry])
        breaks = np.flatnonzero((np.diff(entry) != 0) | (np.diff(first) > gap[:-1])) + 1
        hits = [self._hit(int(entry[a]), first[a:b], int(length[a]), gram[a:b], words.starts, words.ends)
                for a, b in zip([0, *breaks.tolist()], [*breaks.tolist(), len(entry)]) if a < b]
        return sorted(hit for hit in hits if hit is not None)

    def _hit(self, entry: int, first: np.ndarray, length: int, gram: np.ndarray, starts: np.ndarray, ends: np.ndarray
             ) -> Hit | None:
        """Return the hit for a run of n-grams of one entry (a text of an evaluation set) that was found in a document,
        or None if the match is too weak. `first` holds the number of the first word of each n-gram, and `length` is the
        number of words of an n-gram."""
        index, different = self._loaded, np.unique(gram)
        if self.config.dialect == "ngram":
            share = len(different) / int(index.grams[entry])
        else:
            share = index.weight(different) / int(index.totals[entry])
            if share < needed(int(index.words[entry])):
                return None
        return Hit(int(starts[first[0]]), int(ends[first[-1] + length - 1]), entry, int(index.words[entry]),
                   round(share, 3))


def needed(words: int) -> float:
    """Return the share of an item's n-grams, by weight, that a document must have for a hit in dialect idf. `words` is
    the item's number of words."""
    return 1 - (1 - SHARE) * min(max((words - STRICT) / (EASY - STRICT), 0.0), 1.0)
