"""The filter `badwords`: counts the bad words in a document, and drops the document if they make up a large share of
its words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from stages.scoring.models import MissingModel, folders
from stages.stage import Stage, StageConfig, decision, resource, signal
from stages.text.badwords import BadWords, count_lists, language_of
from stages.text.marks import MOST, Span
from stages.text.wordlists import read_lists

if TYPE_CHECKING:
    from stages.document import Document

#: the lists of LDNOOBW as packaged in the npm registry
LISTS = "naughty-words-1.2.0.tgz"


class Badwords(Stage):
    """Count the words of a document that are in a list of bad words of its language, and drop documents with a large
    share of bad words.

    The lists are LDNOOBW's for 28 languages (`tokenmill fetch badwords`) or in a file of your own
    (`stages.text.wordlists` names the formats of files). `stages.text.badwords` explains how words are recognised in
    each language.

    C4 (arXiv 1910.10683) drops a page for a single bad word, and so loses pages on medicine and law and pages by
    minorities (Dodge et al., arXiv 2104.08758). The step `c4_badwords` follows C4. In this step the share of bad words
    decides, as in ROOTS (arXiv 2303.03915) and Data-Juicer's flagged_words_filter. The counts are stored as signals
    (numbers beside the document), so thresholds can be changed without reading the texts again.

    A document whose language has no list is kept; its signals are then null.
    """

    name = "badwords"
    version = 2
    cost_ms, drops = 0.1, True
    libraries = ("regex",)
    signals = ("badwords", "badwords_distinct", "badwords_rate")
    memory_mb = 40

    class Config(StageConfig):
        lists: str | None = resource(None, f"file of lists; null: {LISTS}, see `tokenmill fetch badwords`")
        default_language: str = signal("en", "language of documents that have none")
        max_rate: float | None = decision(0.01, "largest share of words that are bad; null: no such rule", ge=0)
        min_distinct: int = decision(2, "different bad words that a document must hold for the share to count")
        max_count: int | None = decision(
            None, "most bad words, however long the document; 0 drops for one", ge=0, at_most="badwords")

    def resource_files(self) -> dict[str, str]:
        return {"lists": self.config.lists or str(default_lists())}

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        if self.config.lists is None and "resource" in roles:
            return Badwords(self.config.model_copy(update={"lists": str(default_lists())})).key(roles)
        return super().key(roles)

    def setup(self) -> None:
        self._lists = read_lists(self.config.lists or default_lists())
        self._counters: dict[str, BadWords | None] = {}

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        words = self._counter(doc)
        if words is None:
            return None
        counts, size = words.count(doc.text)
        total = counts.total()
        doc.signals["badwords"] = total
        doc.signals["badwords_distinct"] = len(counts)
        doc.signals["badwords_rate"] = total / max(size, 1.0)
        return self.verdict(doc)

    def _counter(self, doc: Document) -> BadWords | None:
        """Return the object that counts the bad words of the document's language, or None if there is no list for the
        language."""
        language = language_of(doc.language or self.config.default_language)
        if language not in self._counters:
            self._counters[language] = count_lists(self._lists, language)
        return self._counters[language]

    def matches(self, doc: Document, reason: str) -> list[Span]:
        if not hasattr(self, "_lists"):
            self.setup()
        words = self._counter(doc)
        return words.places(doc.text)[:MOST] if words is not None else []

    def verdict(self, doc: Document) -> str | None:
        config, signals = self.config, doc.signals
        total = signals.get("badwords")
        if total is None:
            return None
        if config.max_count is not None and total > config.max_count:
            return "badwords_count"
        if (config.max_rate is not None and signals["badwords_rate"] > config.max_rate
                and signals["badwords_distinct"] >= config.min_distinct):
            return "badwords_rate"
        return None


def default_lists() -> Path:
    """Return the path of the file of bad-word lists that is used when the recipe names no file.

    Raises:
        MissingModel: the file is missing. The message says where the file should be and how to get it.
    """
    path = next((folder / LISTS for folder in folders() if (folder / LISTS).is_file()), None)
    if path is None:
        raise MissingModel(f"the lists of bad words are missing (looked for "
                           f"{', '.join(os.fspath(folder / LISTS) for folder in folders())}); get them with `tokenmill "
                           f"fetch badwords`, or name a file: {{badwords: {{lists: path/to/{LISTS}}}}}")
    return path
