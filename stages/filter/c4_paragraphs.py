"""The filter `c4_paragraphs`: applies mC4's rule on paragraphs, and drops pages that have fewer than three long
lines."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from stages.stage import Stage, StageConfig, decision, signal

if TYPE_CHECKING:
    from stages.document import Document


class C4Paragraphs(Stage):
    """Drop pages with fewer than three lines of 200 characters or more (mC4, arXiv 2010.11934, section 3.1).

    Dialect (the code it follows): datatrove 0.10.1, `C4ParagraphFilter`. The reason is `too_few_paragraphs`; datatrove
    calls it `< 3 paragraphs`. Lines are split only at "\\n", and the white space of a line counts towards its length.
    """

    name = "c4_paragraphs"
    version = 1
    cost_ms, drops = 0.016, True
    signals = ("c4_paragraph_length",)
    memory_mb = 20

    class Config(StageConfig):
        min_paragraphs: int = signal(3, "fewest lines that are long enough", ge=1)
        min_paragraph_len: int = decision(
            200, "shortest line that counts, characters", ge=1, at_least="c4_paragraph_length")

    def process(self, doc: Document) -> str | None:
        longest = heapq.nlargest(self.config.min_paragraphs, map(len, doc.text.split("\n")))
        # length of the `min_paragraphs`-th longest line; 0 if there are fewer lines
        doc.signals["c4_paragraph_length"] = longest[-1] if len(longest) == self.config.min_paragraphs else 0
        return self.verdict(doc)

    def verdict(self, doc: Document) -> str | None:
        short = doc.signals["c4_paragraph_length"] < self.config.min_paragraph_len
        return "too_few_paragraphs" if short else None
