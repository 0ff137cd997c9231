"""The filter `fineweb`: drops documents that look like lists, menus or boilerplate, by FineWeb's own rules about
lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.filter.gopher_repetition import duplicates
from stages.stage import Bound, Stage, StageConfig, decision, signal
from stages.text.characters import TERMINAL_PUNCTUATION
from stages.text.marks import Span, copies
from stages.text.words import load_rules, warm

if TYPE_CHECKING:
    from stages.document import Document


class FineWeb(Stage):
    """Drop documents that look like lists, menus or boilerplate by their lines (FineWeb, arXiv 2406.17557, 3.6).

    Dialect (the code it follows): datatrove 0.10.1. Lines are split at "\\n" alone, and blank lines do not count. The
    punctuation marks that end a sentence are those of all scripts. Words are those of spaCy's English tokenisation.
    """

    name = "fineweb"
    version = 3
    cost_ms = 0.26
    leaves = 0.9
    drops = True
    made_for = ("en",)
    libraries = ("spacy",)
    memory_mb = 150
    signals = ("fineweb_line_punct_ratio", "fineweb_short_line_ratio", "fineweb_char_dup_ratio", "fineweb_list_ratio")

    class Config(StageConfig):
        line_punct_thr: float = decision(
            0.12, "smallest share of lines that end with terminal punctuation", at_least="fineweb_line_punct_ratio")
        line_punct_exclude_zero: bool = decision(
            False, "keep documents in which no line ends with terminal punctuation")
        short_line_thr: float = decision(0.67, "largest share of short lines", at_most="fineweb_short_line_ratio")
        short_line_length: int = signal(30, "longest short line, characters")
        char_duplicates_ratio: float = decision(
            0.01, "largest share of characters in copied lines", at_most="fineweb_char_dup_ratio")
        new_line_ratio: float = decision(0.3, "most line breaks per word", at_most="fineweb_list_ratio")

    def setup(self) -> None:
        load_rules()

    def warm(self) -> None:
        warm()

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        measured = self.measure(doc)
        if not measured:
            return "empty"
        doc.signals.update(measured)
        return self.verdict(doc)

    def measure(self, doc: Document) -> dict[str, float]:
        text = doc.text
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            return {}
        short, breaks = self.config.short_line_length, text.count("\n")
        return {"fineweb_line_punct_ratio": sum(line[-1] in TERMINAL_PUNCTUATION for line in lines) / len(lines),
                "fineweb_short_line_ratio": sum(len(line) <= short for line in lines) / len(lines),
                "fineweb_char_dup_ratio": duplicates(lines)[1] / (len(text) - breaks),
                "fineweb_list_ratio": breaks / len(doc.words)}

    def bounds(self) -> list[Bound]:
        # with `line_punct_exclude_zero` a document without such lines passes below the threshold
        return [bound for bound in super().bounds()
                if bound.key != "line_punct_thr" or not self.config.line_punct_exclude_zero]

    def matches(self, doc: Document, reason: str) -> list[Span]:
        return copies(doc.text) if reason == "char_dup_ratio" else []

    def verdict(self, doc: Document) -> str | None:
        limits, signals = self.config, doc.signals
        ended = signals.get("fineweb_line_punct_ratio")
        if ended is None:                        # no lines
            return "empty"
        if ended < limits.line_punct_thr and not (ended == 0 and limits.line_punct_exclude_zero):
            return "line_punct_ratio"
        if signals["fineweb_short_line_ratio"] > limits.short_line_thr:
            return "short_line_ratio"
        if signals["fineweb_char_dup_ratio"] > limits.char_duplicates_ratio:
            return "char_dup_ratio"
        if signals["fineweb_list_ratio"] > limits.new_line_ratio:
            return "list_ratio"
        return None
