"""The filter `dclm_repetition`: drops documents that repeat themselves, by DCLM's form of Gopher's repetition rules."""

from __future__ import annotations

from collections import Counter

from stages.document import Document
from stages.stage import Stage, StageConfig, decision
from stages.text.marks import Span, repetition_spans
from stages.text.repeats import number, repeated
from stages.text.segments import segments

_TOP = (2, 3, 4)
_ALL = (5, 6, 7, 8, 9, 10)
_RULES = ("line", "paragraph", "line_chars", "paragraph_chars", *(f"top_{n}_gram" for n in _TOP),
          *(f"dup_{n}_gram" for n in _ALL))


class DclmRepetition(Stage):
    """Drop documents that repeat themselves (Gopher, arXiv 2112.11446, table A1, as in DCLM, arXiv 2406.11794).

    Dialect (the code it follows): DCLM at commit c7ed275, `massive_web_repetition_filters`. *Every* copy of a repeated
    line, paragraph or n-gram counts, including the first. White space at the ends of lines and paragraphs is removed,
    and blank ones are left out. A document of one line passes the rules on lines. Words are those of UAX #29 without
    punctuation (`stages.text.segments`). Shares of characters refer to the characters of all lines, or of all words,
    without the separators between them. If several n-grams are equally frequent, the one with the most characters
    counts as the most frequent. If the most frequent n-gram occurs only once, its share is 0.
    """

    name = "dclm_repetition"
    version = 2
    cost_ms, drops = 0.9, True
    libraries = ("regex",)
    memory_mb = 150
    signals = tuple(f"dclm_rep_{rule}" for rule in _RULES)

    class Config(StageConfig):
        line: float | None = decision(
            0.3, "largest share of lines that occur twice or more; null: no such rule", at_most="dclm_rep_line")
        paragraph: float | None = decision(
            0.3, "the same for paragraphs, which blank lines separate", at_most="dclm_rep_paragraph")
        line_chars: float | None = decision(
            0.2, "largest share of characters in such lines", at_most="dclm_rep_line_chars")
        paragraph_chars: float | None = decision(0.2, "the same for paragraphs", at_most="dclm_rep_paragraph_chars")
        top_2_gram: float | None = decision(
            0.2, "largest share of characters the most frequent word pair covers", at_most="dclm_rep_top_2_gram")
        top_3_gram: float | None = decision(0.18, "the same for 3 words", at_most="dclm_rep_top_3_gram")
        top_4_gram: float | None = decision(0.16, "the same for 4 words", at_most="dclm_rep_top_4_gram")
        dup_5_gram: float | None = decision(
            0.15, "largest share of characters in runs of 5 words that repeat", at_most="dclm_rep_dup_5_gram")
        dup_6_gram: float | None = decision(0.14, "the same for 6 words", at_most="dclm_rep_dup_6_gram")
        dup_7_gram: float | None = decision(0.13, "the same for 7 words", at_most="dclm_rep_dup_7_gram")
        dup_8_gram: float | None = decision(0.12, "the same for 8 words", at_most="dclm_rep_dup_8_gram")
        dup_9_gram: float | None = decision(0.11, "the same for 9 words", at_most="dclm_rep_dup_9_gram")
        dup_10_gram: float | None = decision(0.1, "the same for 10 words", at_most="dclm_rep_dup_10_gram")

    def warm(self) -> None:
        self.measure(Document("", "a b c d e f g h i j k l"))

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        if doc.text.strip():
            doc.signals.update(self.measure(doc))
        return self.verdict(doc)

    def measure(self, doc: Document) -> dict[str, float]:
        signals: dict[str, float] = {}
        for kind, end in (("line", "\n"), ("paragraph", "\n\n")):
            parts = [part for piece in doc.text.split(end) if (part := piece.strip())]
            copies = characters = 0
            if len(set(parts)) < len(parts):
                for part, count in Counter(parts).items():
                    if count > 1:
                        copies += count
                        characters += count * len(part)
            signals[f"dclm_rep_{kind}"] = copies / len(parts)
            signals[f"dclm_rep_{kind}_chars"] = characters / sum(map(len, parts))
        ids, lengths = number(doc.view("segments", segments))
        total = int(lengths[ids].sum())
        repeats = repeated(ids, lengths, _TOP[0], _ALL[-1]).tolist()
        for n, (count, _, longest, covered) in zip(range(_TOP[0], _ALL[-1] + 1), repeats):
            if n in _TOP:
                signals[f"dclm_rep_top_{n}_gram"] = longest * count / total if count > 1 else 0.0
            else:
                signals[f"dclm_rep_dup_{n}_gram"] = covered / total if total else 0.0
        return signals

    def matches(self, doc: Document, reason: str) -> list[Span]:
        return repetition_spans(doc.text, reason, first=True)

    def verdict(self, doc: Document) -> str | None:
        if "dclm_rep_line" not in doc.signals:
            return "empty"
        for rule in _RULES:
            limit, value = getattr(self.config, rule), doc.signals.get(f"dclm_rep_{rule}")
            if limit is not None and value is not None and value > limit:
                return f"dclm_{rule}"
        return None
