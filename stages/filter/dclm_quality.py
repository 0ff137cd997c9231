"""The filter `dclm_quality`: drops documents by DCLM's rules about the document as a whole: its length, symbols,
bullets and stop words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stages.stage import Stage, StageConfig, decision, signal
from stages.text.marks import Span, pattern_spans

if TYPE_CHECKING:
    from stages.document import Document

#: bytes other than ASCII letters and digits
_OTHER = bytes(c for c in range(256) if c > 127 or not chr(c).isalnum())
_BULLETS = ("●", "•", "*", "-")
_ELLIPSES = ("...", ". . .", "…")
_BULLET, _ELLIPSIS = ("|".join(map(re.escape, signs)) for signs in (_BULLETS, _ELLIPSES))
#: what the rules count, by reason
_PLACES = {
    "dclm_symbols": re.compile(f"#|{_ELLIPSIS}"),
    "dclm_bullets": re.compile(rf"^[^\S\n]*(?:{_BULLET})", re.MULTILINE),
    "dclm_ellipses": re.compile(rf"(?:{_ELLIPSIS})(?=[^\S\n]*$)", re.MULTILINE)}


def chunks(doc: Document) -> list[str]:
    """Return the runs of a document's text without white space, in order. They are computed once for a document, and
    all steps use the same list."""
    return doc.view("chunks", str.split)


def word_count(text: str) -> int:
    """Count the words of a text as DCLM does, by `split_words(text, model="fasttext", ignore_punctuation=True)`.

    A word is a token of fastText whose *first* character is a letter or a digit, so `(word` does not count. fastText
    splits only at ASCII white space and NUL. Its token for the end of a line begins with `<`, so it never counts.
    """
    words = text.encode("utf-8", "surrogatepass").replace(b"\0", b" ").split()
    firsts = bytes([word[0] for word in words])
    count = len(firsts.translate(None, _OTHER))
    if not text.isascii():
        count += sum([word.decode("utf-8", "surrogatepass")[0].isalnum() for word in words if word[0] > 127])
    return count


class DclmQuality(Stage):
    """Drop documents that do not read like prose, as DCLM-baseline does before deduplication (arXiv 2406.11794, 4.2).

    Dialect (the code it follows): DCLM at commit c7ed275 with `dclm_baseline_refinedweb.yaml`. DCLM's rules differ from
    Gopher's. The rule on length counts fastText's tokens that begin with a letter or a digit. All other rules count
    runs without white space as words, punctuation included. One symbol ratio counts `#` and ellipses together. White
    space at the ends of a line is removed, and blank lines are ignored. `●`, `•`, `*` and `-` are bullets. Stop words
    count in upper and lower case and at every occurrence. The signals of all rules (numbers stored with the document)
    are computed even if one rule drops the document. A text without any word has only the signal `dclm_words`.
    """

    name = "dclm_quality"
    version = 2
    cost_ms = 0.6
    drops = True
    made_for = ("en",)
    memory_mb = 50
    signals = ("dclm_words", "dclm_mean_word_length", "dclm_symbol_ratio", "dclm_bullet_lines", "dclm_ellipsis_lines",
               "dclm_lines", "dclm_non_alpha_ratio", "dclm_stop_words")

    class Config(StageConfig):
        min_words: int = decision(50, "fewest words", at_least="dclm_words")
        max_words: int = decision(100_000, "most words", at_most="dclm_words")
        min_word_length: float = decision(
            3, "shortest mean word, characters with punctuation", at_least="dclm_mean_word_length")
        max_word_length: float = decision(10, "longest mean word", at_most="dclm_mean_word_length")
        max_symbol_ratio: float = decision(0.1, "most # and ellipses, together, per word", at_most="dclm_symbol_ratio")
        max_bullet_ratio: float = decision(0.9, "largest share of lines that begin with a bullet")
        max_ellipsis_ratio: float = decision(0.3, "largest share of lines that end with an ellipsis")
        max_non_alpha_ratio: float = decision(
            0.2, "largest share of words without a letter", at_most="dclm_non_alpha_ratio")
        min_stop_words: int = decision(2, "fewest stop words, counting every occurrence", at_least="dclm_stop_words")
        stop_words: tuple[str, ...] = signal(("the", "be", "to", "of", "and", "that", "have", "with"),
                                             "stop words, in lower case")

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        doc.signals.update(self.measure(doc))
        return self.verdict(doc)

    def measure(self, doc: Document) -> dict[str, float]:
        text, words = doc.text, chunks(doc)
        signals: dict[str, float] = {"dclm_words": word_count(text)}
        if not words:
            return signals
        lines = [line for part in text.split("\n") if (line := part.strip())]
        symbols = text.count("#") + text.count("...") + text.count(". . .") + text.count("…")
        not_alphabetic = [word for word in words if not word.isalpha()]
        without_letter = sum([not any(map(str.isalpha, word)) for word in not_alphabetic])
        stop = frozenset(self.config.stop_words)
        signals["dclm_mean_word_length"] = sum(map(len, words)) / len(words)
        signals["dclm_symbol_ratio"] = symbols / len(words)
        signals["dclm_bullet_lines"] = sum([line.startswith(_BULLETS) for line in lines])
        signals["dclm_ellipsis_lines"] = sum([line.endswith(_ELLIPSES) for line in lines]) if symbols else 0
        signals["dclm_lines"] = len(lines)
        signals["dclm_non_alpha_ratio"] = without_letter / len(words)
        signals["dclm_stop_words"] = sum(map(stop.__contains__, map(str.lower, words)))
        return signals

    def matches(self, doc: Document, reason: str) -> list[Span]:
        return pattern_spans(_PLACES[reason], doc.text) if reason in _PLACES else []

    def verdict(self, doc: Document) -> str | None:
        limits, signals = self.config, doc.signals
        words = signals["dclm_words"]
        if words < limits.min_words:
            return "dclm_short_doc"
        if words > limits.max_words:
            return "dclm_long_doc"
        mean = signals.get("dclm_mean_word_length")
        if mean is None:
            return "dclm_no_words"
        if mean < limits.min_word_length:
            return "dclm_short_words"
        if mean > limits.max_word_length:
            return "dclm_long_words"
        if signals["dclm_symbol_ratio"] > limits.max_symbol_ratio:
            return "dclm_symbols"
        if signals["dclm_bullet_lines"] > limits.max_bullet_ratio * signals["dclm_lines"]:
            return "dclm_bullets"
        if signals["dclm_ellipsis_lines"] > limits.max_ellipsis_ratio * signals["dclm_lines"]:
            return "dclm_ellipses"
        if signals["dclm_non_alpha_ratio"] > limits.max_non_alpha_ratio:
            return "dclm_non_alpha_words"
        return "dclm_stop_words" if signals["dclm_stop_words"] < limits.min_stop_words else None
