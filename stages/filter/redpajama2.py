"""The step `redpajama2`: computes RedPajama-v2's quality signals, which are numbers about a document."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from stages.filter.dclm_lines import digits, uppercase
from stages.stage import Stage, StageConfig, resource, signal
from stages.text.language_codes import short
from stages.text.repeats import number, repeated
from stages.text.wordlists import ANY, read_lists

if TYPE_CHECKING:
    from stages.document import Document

_TOP, _DUPLICATED = (2, 3, 4), (5, 6, 7, 8, 9, 10)
_RAW_WORD = re.compile(r"\w+|[^\w\s]+")                    # like nltk's WordPunctTokenizer
_SENTENCE = re.compile(r"\b[^.!?]+[.!?]*")
_LATIN = re.compile("[a-zA-Z]")
_LOREM = re.compile("lorem ipsum", re.IGNORECASE)
_TERMINAL, _ELLIPSES = (".", "!", "?", "”"), ("...", "…")
_BULLETS = tuple("\u2022\u2023\u25b6\u25c0\u25e6\u25a0\u25a1\u25aa\u25ab\u2013")
_ASCII_PUNCTUATION = string.punctuation.encode()
_ASCII_LOWER = bytes(range(128)).lower() + bytes(range(128, 256))
_LN2 = 0.6931471805599453


class RedPajama2(Stage):
    """Store RedPajama-v2's quality signals (numbers about a document; arXiv 2411.12372, appendix) under RedPajama's
    names, and keep every document.

    Dialect (the code it follows): RedPajama-Data at commit 855a8e0, `app/src/core/quality_signals`. There are two kinds
    of words. Raw words are runs of letters, digits and `_`, and runs of other marks. Normalised words are the runs
    without white space in the normalised text: lower case, NFD, no ASCII punctuation. Lines end at "\\n", which counts
    towards their length. Shares are rounded to 8 places. Every copy of a duplicated n-gram counts, but a word that is
    in several copies counts once. If several n-grams are the most frequent, the first of them counts. If the most
    frequent n-gram occurs only once, its signal is 0.

    Signals of lines (`rps_lines_…`) are means over the lines of a document, which is how the rules of the data set's
    card use them (the sum divided by `ccnet_nlines`). Signals that cannot be computed (no word, no line, no list given)
    are null; `rps_doc_stop_word_fraction` and `rps_doc_ldnoobw_words` need lists. Two kinds of RedPajama's signals are
    left out: `rps_doc_ut1_blacklist` (use the setting `blacklists` of the step `url`), and the signals of models
    (perplexity, importance weights, classifiers), for most of which there are other steps.
    """

    name = "redpajama2"
    version = 2
    cost_ms = 1.7
    memory_mb = 100
    signals = ("ccnet_length", "ccnet_nlines", "rps_doc_curly_bracket", "rps_doc_ldnoobw_words", "rps_doc_lorem_ipsum",
               "rps_doc_stop_word_fraction", "rps_doc_num_sentences", "rps_doc_word_count", "rps_doc_mean_word_length",
               "rps_doc_symbol_to_word_ratio", "rps_doc_frac_lines_end_with_ellipsis", "rps_doc_frac_no_alph_words",
               "rps_doc_frac_unique_words", "rps_doc_unigram_entropy", "rps_doc_frac_all_caps_words",
               *(f"rps_doc_frac_chars_top_{n}gram" for n in _TOP),
               *(f"rps_doc_frac_chars_dupe_{n}grams" for n in _DUPLICATED),
               "rps_lines_javascript_counts", "rps_lines_ending_with_terminal_punctution_mark", "rps_lines_num_words",
               "rps_lines_uppercase_letter_fraction", "rps_lines_numerical_chars_fraction",
               "rps_lines_start_with_bulletpoint")
    scores = ("rps_doc_word_count", "rps_doc_frac_unique_words", "rps_doc_unigram_entropy",
              "rps_doc_frac_chars_dupe_10grams", "rps_doc_frac_no_alph_words",
              "rps_lines_ending_with_terminal_punctution_mark")

    class Config(StageConfig):
        stop_words: str | None = resource(None, "stop words by language, as {language: [word, …]} in JSON (RedPajama "
                                                "has those of stopwords-json), or one a line")
        bad_words: str | None = resource(None, "LDNOOBW's bad words: archive, JSON by language, or one a line")
        default_language: str = signal("en", "language of documents that carry none")

    def setup(self) -> None:
        self._stop = _lists(self.config.stop_words)
        self._bad = {language: (words, sorted({1 + entry.count(" ") for entry in words}))
                     for language, words in _lists(self.config.bad_words).items()}
        repeated(*number(["a", "b", "a", "b"]), _TOP[0], _DUPLICATED[-1])

    def process(self, doc: Document) -> None:
        self.forget(doc)
        doc.signals.update(self.measure(doc))

    def verdict(self, doc: Document) -> None:
        """Return None: this step drops no document."""

    def measure(self, doc: Document) -> dict[str, float]:
        text = doc.text
        raw = text.split("\n")
        if not raw[-1]:
            raw.pop()
        normalised = _normalised(text)
        lines = [line.split() for line in normalised.split("\n")[:len(raw)]]
        words = list(chain.from_iterable(lines))
        language = short(doc.language or self.config.default_language)
        signals = {"ccnet_length": len(text), "ccnet_nlines": len(raw),
               "rps_doc_curly_bracket": _share(text.count("{") + text.count("}"), len(text)),
               "rps_doc_lorem_ipsum": _lorem_ipsum(normalised, words),
               "rps_doc_num_sentences": len(_SENTENCE.findall(text)), "rps_doc_word_count": len(words)}
        bad_words = self._bad.get(language, self._bad.get(ANY))
        if bad_words is not None:
            signals["rps_doc_ldnoobw_words"] = _bad_words(words, *bad_words)
        signals.update(self._of_raw_words(text, words, self._stop.get(language, self._stop.get(ANY))))
        signals.update(_of_words(words))
        if raw:
            signals.update(_of_lines(text, raw, lines))
        return signals

    @staticmethod
    def _of_raw_words(text: str, words: list[str], stop: frozenset[str] | None) -> dict[str, float]:
        raw_words = _RAW_WORD.findall(text)
        total, counts = len(raw_words), Counter(raw_words)
        signals: dict[str, float] = {}
        if stop is not None:
            signals["rps_doc_stop_word_fraction"] = (
                _share(sum([count for word, count in counts.items() if word in stop]), total) if words else 0.0)
        if total:
            symbols = text.count("#") + text.count("...") + text.count("…")
            latin = sum([n for word, n in counts.items() if word[0] in string.ascii_letters or _LATIN.search(word)])
            signals["rps_doc_symbol_to_word_ratio"] = _share(symbols, total)
            signals["rps_doc_frac_no_alph_words"] = round(1.0 - latin / total, 8)
            capitals = sum([n for word, n in counts.items() if word.isupper()])
            signals["rps_doc_frac_all_caps_words"] = _share(capitals, total)
        return signals


def _of_words(words: list[str]) -> dict[str, float]:
    """Return those of RedPajama-v2's signals that are computed from the normalised words of a text (lower case, no
    punctuation)."""
    ids, lengths = number(words)
    total, characters = len(words), int(lengths[ids].sum())
    signals: dict[str, float] = {}
    repeats = repeated(ids, lengths, _TOP[0], _DUPLICATED[-1]).tolist()
    for size, (count, length, _, covered) in enumerate(repeats, _TOP[0]):
        if size in _TOP:
            signals[f"rps_doc_frac_chars_top_{size}gram"] = _share(length * count, characters) if count > 1 else 0.0
        else:
            signals[f"rps_doc_frac_chars_dupe_{size}grams"] = _share(covered, characters)
    if total:
        frequencies = np.bincount(np.bincount(ids)).tolist()      # [n]: number of words that occur n times
        entropy = _ln(total) - sum([words * n * _ln(n) for n, words in enumerate(frequencies) if words]) / total
        signals["rps_doc_mean_word_length"] = _share(characters, total)
        signals["rps_doc_frac_unique_words"] = _share(len(lengths), total)
        signals["rps_doc_unigram_entropy"] = round(max(entropy, 0.0), 8)
    return signals


def _of_lines(text: str, raw: list[str], lines: list[list[str]]) -> dict[str, float]:
    """Return RedPajama-v2's signals about lines, each as a mean over the lines of a text. `raw` holds the lines without
    their line breaks, and `lines` the normalised words of each line."""
    breaks = text.count("\n")
    ellipses = "..." in text or "…" in text
    upper = numeric = 0.0
    for i, line in enumerate(raw):
        if line:
            upper += _share(uppercase(line), len(line) + (i < breaks))       # the line break counts, if there is one
    for words in lines:
        if words and (numerals := _numeric("".join(words))):
            numeric += _share(numerals, sum(map(len, words)) + len(words) - 1)
    sums = {"rps_lines_javascript_counts": sum([line.count("javascript") for line in lines]),
            "rps_lines_ending_with_terminal_punctution_mark": sum([line.rstrip().endswith(_TERMINAL) for line in raw]),
            "rps_lines_num_words": sum(map(len, lines)), "rps_lines_uppercase_letter_fraction": upper,
            "rps_lines_numerical_chars_fraction": numeric,
            "rps_lines_start_with_bulletpoint": sum([line.lstrip().startswith(_BULLETS) for line in raw]),
            "rps_doc_frac_lines_end_with_ellipsis":
                sum([line.rstrip().endswith(_ELLIPSES) for line in raw]) if ellipses else 0}
    return {name: round(value / len(raw), 8) for name, value in sums.items()}


def _normalised(text: str) -> str:
    """Normalise a text as RedPajama does: lower case, NFD, no ASCII punctuation. RedPajama also replaces line breaks by
    spaces. That is left out here, because texts are later split at any white space."""
    cleaned = text.encode("utf-8", "surrogatepass").translate(_ASCII_LOWER, _ASCII_PUNCTUATION)
    if text.isascii():
        return cleaned.decode()
    return unicodedata.normalize("NFD", cleaned.decode("utf-8", "surrogatepass").lower())


def _lorem_ipsum(normalised: str, words: list[str]) -> float:
    if "lorem" not in normalised or "lorem ipsum" not in (spaced := " ".join(words)):
        return 0.0
    return _share(len(_LOREM.findall(spaced)), len(spaced))


def _bad_words(words: Sequence[str], entries: frozenset[str], sizes: Sequence[int]) -> int:
    """Return how many entries of a list of bad words occur in a text, given by its words. An entry may have several
    words. Every occurrence counts, even inside another one. `sizes` holds the numbers of words that entries have."""
    total = 0
    for size in sizes:
        shifted = [words[offset:] for offset in range(size)]
        total += sum(map(entries.__contains__, words if size == 1 else map(" ".join, zip(*shifted, strict=False))))
    return total


def _lists(path: str | None) -> dict[str, frozenset[str]]:
    return {} if path is None else {short(language): frozenset(words) for language, words in read_lists(path).items()}


def _numeric(line: str) -> int:
    return digits(line) if line.isascii() else sum(map(str.isnumeric, line))


def _share(part: float, total: int) -> float:
    return round(part / total, 8) if total else 0.0


@lru_cache(maxsize=1 << 16)
def _ln(number: int) -> float:
    """Return the natural logarithm of a number, to about 1e-15. The function uses only + - * /, because the last digit
    of `math.log` differs between libraries."""
    mantissa, exponent = math.frexp(number)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = 2 * mantissa, exponent - 1
    ratio = (mantissa - 1) / (mantissa + 1)
    square, term, total = ratio * ratio, ratio, 0.0
    for divisor in range(1, 27, 2):
        total += term / divisor
        term *= square
    return 2 * total + exponent * _LN2
