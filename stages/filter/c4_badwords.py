"""The filter `c4_badwords`: applies C4's rule on bad words, and drops pages that hold at least one bad word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.base.prf import prf
from stages.filter.badwords import LISTS, default_lists
from stages.stage import Stage, StageConfig, decision, resource, signal
from stages.text.badwords import language_of
from stages.text.marks import Span, pattern_spans, same_length_lower
from stages.text.trie import trie_pattern
from stages.text.wordlists import ANY, read_lists

if TYPE_CHECKING:
    from stages.document import Document

#: entries left out of every list: each alone would drop more than a tenth of the Japanese or Chinese documents
ALLOWED = frozenset({"sm", "グロ", "女の子", "性"})
#: languages written without spaces: an entry counts wherever it occurs
UNSPACED = frozenset({"ja", "th", "zh"})


class C4BadWords(Stage):
    """Drop pages that hold a bad word from the list of their language (C4, arXiv 1910.10683, section 2.2; mC4,
    2010.11934). A random share `keep_fraction` of these pages is kept all the same.

    Dialect (the code it follows): datatrove 0.10.1, `C4BadWordsFilter`. The text, in lower case, is searched for the
    entries of the list as they are written there. An entry counts only if no word character stands before or after it
    (except in Japanese, Thai and Chinese). Four entries of the lists are not searched for (`ALLOWED`). The reason is
    `document_removed_with_badwords`.

    The step differs from datatrove in three points:

    - Draw: datatrove draws the pages to keep by one random generator, in the order in which documents reach a process.
      Here the draw depends on the document's id. A sample is therefore the same for any number of workers, and a larger
      sample contains a smaller one.
    - Languages without a list: datatrove stops, or keeps the document if a setting says so. This step keeps the
      document, and its signals (numbers stored with it) are null. The document's language may be given by any name
      (`en`, `eng_Latn`).
    - Lists: those of `tokenmill fetch badwords` are a later version of LDNOOBW than the commits that datatrove
      downloads.

    This rule loses pages on medicine, law and minorities, because a single word is enough (arXiv 2104.08758). The step
    `badwords` drops documents by their share of bad words instead.
    """

    name = "c4_badwords"
    version = 2
    cost_ms, drops = 0.1, True
    signals = ("c4_badwords", "c4_badwords_draw")
    memory_mb = 40

    class Config(StageConfig):
        lists: str | None = resource(None, f"file of lists by language; null: {LISTS}, see `tokenmill fetch badwords`")
        default_language: str = signal("en", "language of documents that have none")
        seed: int = signal(0, "seed of the draw of documents")
        keep_fraction: float = decision(0.0, "share of the documents with bad words that is kept", ge=0, le=1)

    def resource_files(self) -> dict[str, str]:
        return {"lists": self.config.lists or str(default_lists())}

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        if self.config.lists is None and "resource" in roles:
            # the key covers the content of the default lists, as it does for a named file
            return C4BadWords(self.config.model_copy(update={"lists": str(default_lists())})).key(roles)
        return super().key(roles)

    def setup(self) -> None:
        self._lists = read_lists(self.config.lists or default_lists())
        self._patterns: dict[str, re.Pattern[str] | None] = {}

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        language = doc.language or self.config.default_language
        pattern = self._pattern(language)
        if pattern is None:
            return None
        has_bad_word = pattern.search(doc.text.lower()) is not None
        doc.signals["c4_badwords"] = float(has_bad_word)
        if has_bad_word:
            doc.signals["c4_badwords_draw"] = prf(self.config.seed, "c4_badwords", doc.id) / 2**64
        return self.verdict(doc)

    def matches(self, doc: Document, reason: str) -> list[Span]:
        if not hasattr(self, "_lists"):
            self.setup()
        pattern = self._pattern(doc.language or self.config.default_language)
        return pattern_spans(pattern, same_length_lower(doc.text)) if pattern is not None else []

    def verdict(self, doc: Document) -> str | None:
        draw = doc.signals.get("c4_badwords_draw")
        return None if draw is None or draw < self.config.keep_fraction else "document_removed_with_badwords"

    def _pattern(self, label: str) -> re.Pattern[str] | None:
        """Return a pattern that finds the bad words of a language, or None if there is no list for it. `label` names
        the language as a document does."""
        if label not in self._patterns:
            code = label if label in self._lists else language_of(label)
            entries = self._lists.get(code) or self._lists.get(ANY)
            self._patterns[label] = None if not entries else pattern_of(entries, code)
        return self._patterns[label]


def pattern_of(entries: Iterable[str], language: str) -> re.Pattern[str] | None:
    """Return a pattern that finds the entries of a list of bad words in a text in the given language. Entries in
    ALLOWED are left out. The result is None if no entry remains."""
    words = sorted(set(entries) - ALLOWED)
    if not words:
        return None
    pattern = trie_pattern(words)
    # matches in the same texts as datatrove's `(?:\W|^)(…)(?:\W|$)`
    return re.compile(pattern if language in UNSPACED else rf"(?<!\w){pattern}(?!\w)")
