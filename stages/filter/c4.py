"""The filter `c4`: applies C4's rules. It cuts lines that are not sentences, and drops pages without enough text
left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stages.stage import Stage, StageConfig, decision, signal
from stages.text import marks
from stages.text.words import count_sentences, warm

if TYPE_CHECKING:
    from stages.document import Document

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_END = (".", "?", "!", '"', "'")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_PHRASES = {"lorem_ipsum": re.compile("lorem ipsum", re.IGNORECASE), "curly_bracket": re.compile("{")}
_ANY = ("lorem ipsum", "javascript", *_POLICY)


class C4(Stage):
    """Cut lines out of documents, and drop documents, as C4 does (arXiv 1910.10683, section 2.2).

    Dialect (the code it follows): datatrove 0.10.1, whose C4 filter has no rule on bad words. A line is cut when it
    holds a word of more than 1,000 characters, has fewer than 3 words, or contains "javascript" or a phrase about
    cookies or policies. With `filter_no_terminal_punct`, a line that does not end a sentence is also cut; this rule is
    off by default, as in FineWeb.

    A document is dropped when a line holds "lorem ipsum" or a "{". Lines that the rules on words and punctuation have
    cut do not count for this, nor does a "{" in a line with "javascript". A document is also dropped when the lines
    kept have fewer than 5 sentences (spaCy's sentencizer). A dropped document keeps its original text. A setting of
    null switches its rule off.

    Two signals (numbers stored with the document) are written: `c4_sentences`, the number of sentences kept, and
    `c4_lines_kept`, the share of all lines (blank ones included) that are kept. Both are null for a document dropped
    for "lorem ipsum" or "{".
    """

    name = "c4"
    version = 4
    cost_ms = 0.43
    leaves = 0.85
    drops = True
    edits = True
    made_for = ("en",)
    libraries = ("spacy",)
    memory_mb = 150
    signals = ("c4_sentences", "c4_lines_kept")

    class Config(StageConfig):
        remove_citations: bool = signal(True, "delete [1], [edit], [citation needed]")
        filter_no_terminal_punct: bool = signal(False, "cut lines that end without . ? ! \" ' or with an ellipsis")
        min_num_sentences: int | None = decision(5, "fewest sentences left", at_least="c4_sentences")
        min_words_per_line: int | None = signal(3, "fewest words (by white space) of a line")
        max_word_length: int | None = signal(1000, "longest word of a line, characters")
        filter_lorem_ipsum: bool = signal(True, "drop documents that hold the phrase")
        filter_javascript: bool = signal(True, "cut lines that mention javascript")
        filter_curly_bracket: bool = signal(True, "drop documents that hold {")
        filter_policy: bool = signal(True, "cut lines with phrases about cookies and terms of use")

    def setup(self) -> None:
        warm()

    def process(self, doc: Document) -> str | None:
        self.forget(doc)
        config = self.config
        longest, fewest = config.max_word_length, config.min_words_per_line or 0
        # lines are searched for phrases only if the text holds one, or if removing a citation could form one
        text, lower = doc.text, doc.lower
        cited = config.remove_citations and "[" in text
        phrases = cited or "{" in text or any(phrase in lower for phrase in _ANY)
        kept: list[str] = []
        sentences = 0
        for line, words, line_sentences in self._lines(doc):
            if longest is not None and len(line) > longest and any(len(word) > longest for word in line.split()):
                continue
            if cited and "[" in line:
                line, original = _CITATION.sub("", line), line
                line_sentences = line_sentences if line == original else -1
            if config.filter_no_terminal_punct and (not line.endswith(_END) or line.endswith("...")):
                continue
            if words < fewest:
                continue
            if phrases:
                lower = line.lower()
                if config.filter_lorem_ipsum and "lorem ipsum" in lower:
                    return "lorem_ipsum"
                if config.filter_javascript and "javascript" in lower:
                    continue
                if config.filter_curly_bracket and "{" in line:
                    return "curly_bracket"
                if (config.filter_policy and ("use" in lower or "policy" in lower)
                        and any(phrase in lower for phrase in _POLICY)):
                    continue
            sentences += line_sentences if line_sentences >= 0 else count_sentences(line)
            kept.append(line)
        total = len(doc.lines)
        doc.signals["c4_sentences"] = sentences
        doc.signals["c4_lines_kept"] = len(kept) / total if total else 0.0
        reason = self.verdict(doc)
        if reason is None:
            doc.text = "\n".join(kept).strip()
        return reason

    def _lines(self, doc: Document) -> Iterator[tuple[str, int, int]]:
        """Yield (the line without white space at its ends, its number of words, its number of sentences or -1 if these
        are not counted yet) for each line of a document. Blank lines are left out if the setting `min_words_per_line`
        is 1 or more."""
        if (self.config.min_words_per_line or 0) < 1:            # blank lines count, too
            for line in doc.lines:
                line = line.strip()
                yield line, len(line.split()), -1
            return
        # in ASCII texts, byte positions are character positions
        is_ascii = doc.text.isascii()
        text, data = doc.text, b"" if is_ascii else doc.utf8
        for start, end, words, sentences in doc.words.lines.tolist():
            yield text[start:end] if is_ascii else data[start:end].decode("utf-8", "surrogatepass"), words, sentences

    def matches(self, doc: Document, reason: str) -> list[marks.Span]:
        return marks.pattern_spans(_PHRASES[reason], doc.text) if reason in _PHRASES else []

    def verdict(self, doc: Document) -> str | None:
        """Decide from the stored number of sentences whether a document is dropped. Returns the reason, or None to keep
        it. The rules on phrases are not applied here, because they have no threshold that could change."""
        fewest, sentences = self.config.min_num_sentences, doc.signals.get("c4_sentences")
        return "too_few_sentences" if fewest is not None and sentences is not None and sentences < fewest else None
