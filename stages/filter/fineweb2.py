"""The filter `fineweb2`: drops documents by FineWeb-2's rules. These are FineWeb's and Gopher's rules, with thresholds,
stop words and word splitting for each language."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from stages.document import Document
from stages.filter.fineweb import FineWeb
from stages.filter.fineweb2_limits import LanguageLimits, read_limits, table
from stages.filter.gopher_quality import GopherQuality
from stages.filter.gopher_repetition import GopherRepetition
from stages.stage import Bound, Stage, StageConfig, decision, resource, signal
from stages.text.cache import rules_paths
from stages.text.language_codes import names
from stages.text.languages import installed, split_words, splitter
from stages.text.marks import Span
from stages.text.words import Words, words_of

if TYPE_CHECKING:
    from collections.abc import Iterable


class Change(BaseModel):
    """The thresholds that a recipe changes for one language. Each of them replaces a threshold in FineWeb-2's table.
    Thresholds that are None stay as they are in the table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dup_line_frac: float | None = None
    top_n_grams: tuple[tuple[int, float], ...] | None = None
    dup_n_grams: tuple[tuple[int, float], ...] | None = None
    line_punct_thr: float | None = None
    new_line_ratio: float | None = None
    min_avg_word_length: float | None = None
    max_avg_word_length: float | None = None
    max_non_alpha_words_ratio: float | None = None


class FineWeb2(Stage):
    """Drop documents as FineWeb-2 does, by the rules of the language they are in (arXiv 2506.20920, section 3.4).

    Dialect (the code it follows): `fineweb-2-pipeline.py` at its release, run by datatrove 0.10.1. The rules of these
    steps are applied in this order, and a document is dropped for the reason that the step gives:

    - `gopher_repetition`: without the rules on paragraphs and on the characters of copied lines.
    - `fineweb`: without the rule on short lines, and with a limit of 0.1 for copied characters.
    - `gopher_quality`: with 50 to 100,000 words and two stop words.

    C4's rules are *not* applied. The signals of all rules (numbers stored with the document) are computed even if one
    rule drops the document. Texts are split into words as datatrove splits texts in the language
    (`stages.text.languages`).

    `doc.language` may name the language in any form (`fr`, `fra_Latn`); put the step `language` before this one. A
    document in a language without thresholds is dropped as `no_thresholds`. The step has thresholds for forty languages
    (`stages.filter.fineweb2_limits`). Of these, Chinese, Hindi, Japanese, Korean, Thai and Vietnamese need an
    additional package that splits texts into words. Documents in these six languages are judged only if the setting
    `languages` names the language; otherwise they are dropped as `no_thresholds`, too.
    """

    name = "fineweb2"
    version = 2
    cost_ms = 1.5
    leaves = 0.8
    drops = True
    memory_mb = 400
    signals = (*GopherRepetition.signals, *FineWeb.signals, *GopherQuality.signals)

    class Config(StageConfig):
        thresholds: str | None = resource(
            None, "YAML file in place of the table: one of FineWeb-2's configs/fra_Latn.yml, or several under the "
                  "names of their languages (fra_Latn: {…})")
        languages: tuple[str, ...] | None = signal(
            None, "languages judged, named as in the table; null: all whose words need no further package")
        change: dict[str, Change] = decision({}, "thresholds that replace those of a language, e.g. {fra_Latn: "
                                                 "{new_line_ratio: 0.2}}")
        short_line_thr: float = decision(
            999, "largest share of short lines (FineWeb-2 has no such rule)", at_most="fineweb_short_line_ratio")
        char_duplicates_ratio: float = decision(
            0.1, "largest share of characters in copied lines", at_most="fineweb_char_dup_ratio")
        min_doc_words: int | None = decision(50, "fewest words", at_least="gopher_words")
        max_doc_words: int | None = decision(100_000, "most words", at_most="gopher_words")
        min_stop_words: int | None = decision(2, "fewest different stop words", at_least="gopher_stop_words")

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self._limits_config: Any = None
        self._limits: dict[str, LanguageLimits] = {}
        self._built: dict[str, tuple[GopherRepetition, FineWeb, GopherQuality]] = {}
        needed = packages(self.config.languages or ())
        self.libraries = ("datatrove", "spacy", *(name for name in needed.values() if installed(name)))
        if needed:
            self.memory_mb = 1500                       # datatrove, spaCy, dictionaries

    def bounds(self) -> list[Bound]:
        # for these three rules 0 means no rule, as null does; for all others 0 is a limit
        off = {"min_doc_words", "max_doc_words", "min_stop_words"}
        return [bound for bound in super().bounds() if bound.value or bound.key not in off]

    def reads(self) -> dict[str, str]:
        return {"language": "languages"}

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        base = super().key(roles)
        if self.config.thresholds is None or "resource" not in roles:
            return base
        # a file of one language is named after it, so the language belongs to the key
        keyed = "\n".join([base, *read_limits(self.config.thresholds)])
        return hashlib.blake2b(keyed.encode(), digest_size=16).hexdigest()

    def problems(self) -> dict[str, str]:
        try:
            thresholds = read_limits(self.config.thresholds) if self.config.thresholds else table()
        except OSError:
            return {}
        except ValueError as e:
            return {"thresholds": str(e)}
        for language, package in packages(self.config.languages or ()).items():
            if not installed(package):
                return {"languages": f"the words of {language} are found by the package {package}, which is not "
                                     f"installed: `pip install {package}`"}
        for field in ("languages", "change"):
            missing = [name for name in getattr(self.config, field) or () if name not in thresholds]
            if missing:
                where = self.config.thresholds or "the table of the step"
                return {field: f"no thresholds for {', '.join(missing)} in {where}; it has {_excerpt(thresholds)}"}
        if not self.limits():
            return {"languages": f"the words of {_excerpt(thresholds)} are found by packages: name the languages here, "
                                 "and install what they need"}
        return {}

    def setup(self) -> None:
        for field, message in self.problems().items():
            raise ValueError(f"fineweb2: {field}: {message}")
        # Export the rules of word splitting and compile the numba functions now, so that this time does not count as
        # the first document's. The rules of a language are loaded with its first document.
        rules_paths(sorted({by.rules for name in self.limits() if (by := splitter(name)) and by.rules}))
        for name in packages(self.limits()) or list(self.limits())[:1]:
            self.measure(Document("", "It is a test, and so on. a b c d e f g h i j k l"), name)

    def limits(self) -> dict[str, LanguageLimits]:
        """Return {language: its thresholds} for the languages whose documents are judged. The setting `change` has been
        applied to the thresholds."""
        if self._limits_config is not self.config:              # a replay of stored signals sets another config
            thresholds = read_limits(self.config.thresholds) if self.config.thresholds else table()
            judged = self.config.languages
            if judged is None:
                judged = [name for name in thresholds if (by := splitter(name)) is not None and not by.needs]
            self._limits_config, self._limits, self._built = self.config, {}, {}
            for name in judged:
                change = self.config.change.get(name)
                changes = {} if change is None else {key: value for key, value in change if value is not None}
                self._limits[name] = thresholds[name].model_copy(update=changes)
        return self._limits

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        name = self._language(doc)
        if name is None:
            return "no_thresholds"
        if not doc.text:
            return "empty"
        doc.signals.update(self.measure(doc, name))
        return self.verdict(doc)

    def measure(self, doc: Document, name: str) -> dict[str, float]:
        view = Document(doc.id, doc.text)
        view.view("words", lambda text: _split(text, name))
        repetition, lines, quality = self.rules(name)
        signals = repetition.measure(view)
        if len(view.words):
            signals |= lines.measure(view)
        return signals | quality.measure(view)

    def matches(self, doc: Document, reason: str) -> list[Span]:
        every = (rules().matches(doc, reason) for rules in (GopherRepetition, FineWeb, GopherQuality))
        return next(filter(None, every), [])

    def verdict(self, doc: Document) -> str | None:
        name = self._language(doc)
        if name is None:
            return "no_thresholds"
        if "gopher_rep_dup_line_frac" not in doc.signals:
            return "empty"
        repetition, lines, quality = self.rules(name)
        return repetition.verdict(doc) or lines.verdict(doc) or quality.verdict(doc)

    def _language(self, doc: Document) -> str | None:
        """Return the name that the document's language has in `limits`, or None if documents in the language are not
        judged or the document has no language."""
        return _matching_label(tuple(self.limits()), doc.language) if doc.language else None

    def rules(self, name: str) -> tuple[GopherRepetition, FineWeb, GopherQuality]:
        """Return the three filters that judge documents in the language `name`, with its thresholds: those on
        repetition, on lines and on quality."""
        limits = self.limits()[name]
        if name not in self._built:
            config = self.config
            no_shares = {f"top_{n}_gram": None for n in (2, 3, 4)} | {f"dup_{n}_gram": None for n in range(5, 11)}
            shares = {f"top_{n}_gram": share for n, share in limits.top_n_grams} | {
                f"dup_{n}_gram": share for n, share in limits.dup_n_grams}
            self._built[name] = (
                GopherRepetition(**no_shares | shares, dup_line_frac=limits.dup_line_frac, dup_para_frac=None,
                                 dup_line_char_frac=None, dup_para_char_frac=None),
                FineWeb(short_line_thr=config.short_line_thr, char_duplicates_ratio=config.char_duplicates_ratio,
                        line_punct_thr=limits.line_punct_thr, new_line_ratio=limits.new_line_ratio),
                GopherQuality(min_doc_words=config.min_doc_words, max_doc_words=config.max_doc_words,
                              min_avg_word_length=limits.min_avg_word_length,
                              max_avg_word_length=limits.max_avg_word_length,
                              max_non_alpha_words_ratio=limits.max_non_alpha_words_ratio,
                              stop_words=limits.stopwords, min_stop_words=config.min_stop_words))
        return self._built[name]


@lru_cache(maxsize=4096)
def _matching_label(labels: tuple[str, ...], label: str) -> str | None:
    """Return the one of `labels` that names the same language as `label`, or None if there is none. A language has
    several labels, such as `fr` and `fra_Latn`."""
    return label if label in labels else next((name for name in labels if names(name, label)), None)


def _split(text: str, name: str) -> Words:
    """Split a text into words as datatrove does for texts in the language `name`."""
    word_splitter = splitter(name)
    if word_splitter is not None and word_splitter.rules is not None:
        return words_of(text, word_splitter.rules)
    return Words.of(split_words(name)(text))


def packages(languages: Iterable[str]) -> dict[str, str]:
    """Return {language: name of a Python distribution} for those of the given languages whose texts can be split into
    words only with an additional package."""
    result = {name: splitter(name) for name in languages}
    return {name: s.needs for name, s in result.items() if s is not None and s.needs}


def _excerpt(labels: Iterable[str]) -> str:
    """Return a text for a message that lists the first 50 labels in alphabetical order, and says how many more there
    are."""
    listed = sorted(labels)
    return ", ".join(listed[:50]) + (f" and {len(listed) - 50} more" if len(listed) > 50 else "")
