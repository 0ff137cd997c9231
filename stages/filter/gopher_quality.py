"""The filter `gopher_quality`: drops documents that do not read like prose, by Gopher's rules about words, symbols,
bullets and stop words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stages.stage import Bound, Stage, StageConfig, decision, signal
from stages.text.marks import Span, pattern_spans
from stages.text.words import load_rules, warm

if TYPE_CHECKING:
    from stages.document import Document


#: what the rules count, by reason
_PLACES = {
    "gopher_too_many_hashes": re.compile("#"),
    "gopher_too_many_ellipsis": re.compile(r"\.\.\.|…"),
    "gopher_too_many_bullets": re.compile(r"^[^\S\n]*[•-]", re.MULTILINE),
    "gopher_too_many_end_ellipsis": re.compile(r"(?:\.\.\.|…)(?=[^\S\n]*$)", re.MULTILINE)}


class GopherQuality(Stage):
    """Drop documents that do not read like prose (Gopher, arXiv 2112.11446, section A1.1).

    Dialect (the code it follows): datatrove 0.10.1. Words are those of spaCy's English tokenisation. A word made only
    of symbols does not count towards the number of words or their mean length. The ratio of symbols to words is tested
    for `#` and for ellipses separately. A line begins with a bullet if `•` or `-` is its first character other than
    white space. Each stop word counts once, and only with the capital and small letters with which it is listed. A
    setting of null or 0 switches its rule off. A text without any word is dropped as `gopher_short_doc` even if
    `min_doc_words` is null (datatrove divides by zero for such a text).
    """

    name = "gopher_quality"
    version = 3
    cost_ms = 0.29
    leaves = 0.8
    drops = True
    made_for = ("en",)
    libraries = ("spacy",)
    memory_mb = 150
    signals = ("gopher_words", "gopher_mean_word_length", "gopher_hash_ratio", "gopher_ellipsis_ratio",
               "gopher_bullet_lines_ratio", "gopher_ellipsis_lines_ratio", "gopher_alpha_words_ratio",
               "gopher_stop_words")

    class Config(StageConfig):
        min_doc_words: int | None = decision(50, "fewest words; null: no such rule", at_least="gopher_words")
        max_doc_words: int | None = decision(100_000, "most words", at_most="gopher_words")
        min_avg_word_length: float | None = decision(
            3, "shortest mean word, characters", at_least="gopher_mean_word_length")
        max_avg_word_length: float | None = decision(
            10, "longest mean word, characters", at_most="gopher_mean_word_length")
        max_symbol_word_ratio: float | None = decision(
            0.1, "most `#` per word, and most ellipses per word",
            at_most=("gopher_hash_ratio", "gopher_ellipsis_ratio"))
        max_bullet_lines_ratio: float | None = decision(
            0.9, "largest share of lines that begin with a bullet", at_most="gopher_bullet_lines_ratio")
        max_ellipsis_lines_ratio: float | None = decision(
            0.3, "largest share of lines that end with an ellipsis", at_most="gopher_ellipsis_lines_ratio")
        max_non_alpha_words_ratio: float | None = decision(
            0.8, "smallest share of words with a letter (a lower limit, although datatrove's name has max in it)",
            at_least="gopher_alpha_words_ratio")
        min_stop_words: int | None = decision(2, "fewest different stop words", at_least="gopher_stop_words")
        stop_words: tuple[str, ...] = signal(("the", "be", "to", "of", "and", "that", "have", "with"),
                                             "stop words of the language")

    def setup(self) -> None:
        load_rules()

    def warm(self) -> None:
        warm()

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        doc.signals.update(self.measure(doc))
        return self.verdict(doc)

    def measure(self, doc: Document) -> dict[str, float]:
        text, words = doc.text, doc.words
        signals: dict[str, float] = {"gopher_words": words.plain}
        if not words:
            return signals
        if words.plain:
            signals["gopher_mean_word_length"] = words.mean_length
        dots, characters = text.count("..."), text.count("…")
        signals["gopher_hash_ratio"] = text.count("#") / len(words)
        signals["gopher_ellipsis_ratio"] = (dots + characters) / len(words)
        lines = doc.lines
        bullets = ellipses = 0
        if "•" in text or "-" in text:
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        if dots or characters:
            ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        signals["gopher_bullet_lines_ratio"] = bullets / len(lines)
        signals["gopher_ellipsis_lines_ratio"] = ellipses / len(lines)
        signals["gopher_alpha_words_ratio"] = words.with_letter / len(words)
        signals["gopher_stop_words"] = words.distinct(dict.fromkeys(self.config.stop_words))
        return signals

    def bounds(self) -> list[Bound]:
        return [bound for bound in super().bounds() if bound.value]          # 0 switches a rule off, as null does

    def matches(self, doc: Document, reason: str) -> list[Span]:
        return pattern_spans(_PLACES[reason], doc.text) if reason in _PLACES else []

    def verdict(self, doc: Document) -> str | None:
        limits, signals = self.config, doc.signals
        if "gopher_hash_ratio" not in signals:  # no words
            return "gopher_short_doc"
        for reason, name, low, high in (
                ("gopher_short_doc", "gopher_words", limits.min_doc_words, None),
                ("gopher_long_doc", "gopher_words", None, limits.max_doc_words),
                ("gopher_below_avg_threshold", "gopher_mean_word_length", limits.min_avg_word_length, None),
                ("gopher_above_avg_threshold", "gopher_mean_word_length", None, limits.max_avg_word_length),
                ("gopher_too_many_hashes", "gopher_hash_ratio", None, limits.max_symbol_word_ratio),
                ("gopher_too_many_ellipsis", "gopher_ellipsis_ratio", None, limits.max_symbol_word_ratio),
                ("gopher_too_many_bullets", "gopher_bullet_lines_ratio", None, limits.max_bullet_lines_ratio),
                ("gopher_too_many_end_ellipsis", "gopher_ellipsis_lines_ratio", None, limits.max_ellipsis_lines_ratio),
                ("gopher_below_alpha_threshold", "gopher_alpha_words_ratio", limits.max_non_alpha_words_ratio, None),
                ("gopher_enough_stop_words", "gopher_stop_words", limits.min_stop_words, None)):
            value = signals.get(name)
            if value is not None and ((low and value < low) or (high and value > high)):
                return reason
        return None
