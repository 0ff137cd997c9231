"""The step `refinedweb_lines`: cuts undesirable lines by RefinedWeb's line-wise corrections, as the paper describes
them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stages.filter.dclm_lines import uppercase
from stages.stage import Stage, StageConfig, decision, signal

if TYPE_CHECKING:
    from stages.document import Document


class RefinedWebLines(Stage):
    """Cut undesirable lines, and drop documents in which such lines hold too many of the words (RefinedWeb, arXiv
    2306.01116, section 3.1 and appendix G.2).

    Dialect: our own reading of the paper, which gives no code and no list. A line is cut when the share of upper case
    among its characters is above `max_uppercase`, when it consists of digits and white space, when it is a counter ("3
    likes"), or when it has fewer than `min_line_words` words (by default, when it is a single word). Lines of up to
    `short_line` words are edited: phrases are removed, in upper or lower case, at the beginning (`at_start`), at the
    end (`at_end`) or in any place (`anywhere`). A line of which nothing is left is cut. Blank lines stay.

    The words (by white space) of every line that was cut *or edited* count towards `max_words_flagged`, as the paper
    says. DCLM, in contrast, counts only the words removed (`dclm_lines`). The paper derived its phrases from English
    pages: give those of your language. Reasons: `refinedweb_words_flagged`, and `refinedweb_no_lines` if no word is
    left. A dropped document keeps its original text.
    """

    name = "refinedweb_lines"
    cost_ms = 0.19
    drops = True
    edits = True
    memory_mb = 50
    signals = ("refinedweb_lines_cut", "refinedweb_lines_edited", "refinedweb_words", "refinedweb_words_flagged",
               "refinedweb_words_left")

    class Config(StageConfig):
        max_uppercase: float = signal(0.5, "cut lines with a larger share of upper-case characters")
        counted: tuple[str, ...] = signal(
            ("like", "likes", "share", "shares", "comment", "comments", "retweet", "retweets", "view", "views",
             "follower", "followers", "reply", "replies", "download", "downloads"),
            "a line that consists of a number and one of these words is a counter")
        min_line_words: int = signal(2, "cut lines of fewer words")
        short_line: int = signal(10, "most words of a line that phrases are cut out of")
        at_start: tuple[str, ...] = signal(("sign-in",), "phrases cut where a short line begins")
        at_end: tuple[str, ...] = signal(("read more...",), "phrases cut where a short line ends")
        anywhere: tuple[str, ...] = signal(("items in cart",), "phrases cut anywhere in a short line")
        max_words_flagged: float = decision(0.05, "drop documents with a larger share of words in lines cut or edited")

    def setup(self) -> None:
        config = self.config
        counted = _any_of(config.counted)
        self._counter = re.compile(rf"\W*\d[\d.,]*\s?[kmb]?\+?\s+{counted}\W*", re.IGNORECASE) if counted else None
        forms = [prefix + phrase + suffix for prefix, phrase, suffix in (
            (r"^\s*", _any_of(config.at_start), ""), ("", _any_of(config.at_end), r"\s*$"),
            ("", _any_of(config.anywhere), "")) if phrase]
        self._phrase = re.compile("|".join(forms), re.IGNORECASE) if forms else None

    def process(self, doc: Document) -> str | None:
        config, kept = self.config, []
        cut = edited = total = flagged = words_left = 0
        for line in doc.text.split("\n"):
            words = line.split()
            total += len(words)
            if words and self._undesirable(line, words):
                cut += 1
                flagged += len(words)
                continue
            if words and self._phrase is not None and len(words) <= config.short_line:
                remainder = self._phrase.sub("", line)
                if remainder != line:
                    flagged += len(words)
                    words = remainder.split()
                    if not words:
                        cut += 1
                        continue
                    edited += 1
                    line = remainder.strip()
            words_left += len(words)
            kept.append(line)
        doc.signals.update({"refinedweb_lines_cut": cut, "refinedweb_lines_edited": edited, "refinedweb_words": total,
                            "refinedweb_words_flagged": flagged, "refinedweb_words_left": words_left})
        reason = self.verdict(doc)
        if reason is None and flagged:
            doc.text = "\n".join(kept).strip()
        return reason

    def _undesirable(self, line: str, words: list[str]) -> bool:
        return (len(words) < self.config.min_line_words or uppercase(line) / len(line) > self.config.max_uppercase
                or all(map(str.isdigit, words))
                or (self._counter is not None and self._counter.fullmatch(line) is not None))

    def verdict(self, doc: Document) -> str | None:
        signals = doc.signals
        if not signals["refinedweb_words_left"]:
            return "refinedweb_no_lines"
        flagged = signals["refinedweb_words_flagged"] / signals["refinedweb_words"]
        return "refinedweb_words_flagged" if flagged > self.config.max_words_flagged else None


def _any_of(phrases: tuple[str, ...]) -> str:
    """Return a regular expression that matches any of the phrases literally; "" if there are no phrases."""
    return f"(?:{'|'.join(map(re.escape, sorted(phrases, key=len, reverse=True)))})" if phrases else ""
