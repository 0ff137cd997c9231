"""The step `dclm_lines`: cuts lines and phrases as DCLM's line modifiers do. These are DCLM's version of RefinedWeb's
line-wise corrections."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stages.filter.dclm_quality import word_count
from stages.stage import Stage, StageConfig, decision, signal

if TYPE_CHECKING:
    from stages.document import Document

_UPPER, _DIGITS = bytes(range(65, 91)), bytes(range(48, 58))
_COUNTED = ("likes", "shares", "comments", "retweets", "reposts", "quotes", "bookmarks", "upvotes", "downvotes",
            "downloads", "views", "followers")
_COUNTER = re.compile(rf"^\W*\d(?:,|\.|\d)*(?:K|k|M|m|B|b)?\s+(?:{'|'.join(_COUNTED)})\W*$")


def uppercase(line: str) -> int:
    """Return the number of upper-case characters of a line."""
    if line.isascii():
        return len(line) - len(line.encode().translate(None, _UPPER))
    return sum(map(str.isupper, line))


def digits(line: str) -> int:
    """Return the number of digits of a line."""
    if line.isascii():
        return len(line) - len(line.encode().translate(None, _DIGITS))
    return sum(map(str.isdigit, line))


class DclmLines(Stage):
    """Cut lines that are not prose, and drop documents that thereby lose too many words (DCLM-baseline, arXiv
    2406.11794, after RefinedWeb, arXiv 2306.01116, G.2).

    Dialect (the code it follows): DCLM at commit c7ed275 with `dclm_baseline_refinedweb.yaml`. First the step cuts
    lines, in this order: lines mostly in upper case, lines of digits, counters ("3 likes"), and lines of fewer than
    `min_line_words` words. Then it cuts phrases, in upper or lower case, out of lines of up to `short_line` words:
    "items in cart" anywhere, "Read more..." at the end, "Sign-in" at the beginning. Phrases are regular expressions, so
    each dot in "Read more..." matches any character.

    After each kind of cut, except that by `min_line_words`, white space is removed from both ends of the text. An empty
    line is kept, and a line of white space is cut. The words of a document are counted as the step `dclm_quality`
    counts them for its rule on length. Reasons: `dclm_words_cut` (lost more than `max_words_cut` of the words),
    `dclm_no_lines` (no text is left), `dclm_no_words` (the text had no words). A dropped document keeps its original
    text.
    """

    name = "dclm_lines"
    cost_ms = 0.75
    drops = True
    edits = True
    memory_mb = 50
    signals = ("dclm_lines_cut", "dclm_lines_left", "dclm_lines_words", "dclm_lines_words_cut")

    class Config(StageConfig):
        max_uppercase: float = signal(0.5, "cut lines with a larger share of upper-case characters")
        max_digits: float = signal(0.999999, "cut lines with a larger share of digits")
        counters: bool = signal(True, "cut lines that count likes, shares, views …")
        min_line_words: int = signal(2, "cut lines of fewer words (runs without white space)", ge=0)
        short_line: int = signal(10, "most words of a line that phrases are cut out of", ge=0)
        anywhere: tuple[str, ...] = signal(("items in cart",), "regular expressions cut out of short lines")
        at_end: tuple[str, ...] = signal(("Read more...",), "regular expressions cut out at the end of short lines")
        at_start: tuple[str, ...] = signal(("Sign-in",), "regular expressions cut out at the beginning of short lines")
        max_words_cut: float = decision(0.05, "drop documents that lose a larger share of their words")

    def setup(self) -> None:
        config = self.config
        self._phrases = []
        for field, prefix, suffix in (("anywhere", r"\s?(?:", ")"), ("at_end", r"\s?(?:", ")$"),
                                     ("at_start", "^(?:", r")\s?")):
            phrases = getattr(config, field)
            if phrases:
                try:
                    self._phrases.append(re.compile(f"{prefix}{'|'.join(phrases)}{suffix}", re.IGNORECASE))
                except re.error as e:
                    raise ValueError(f"dclm_lines: {field}: not a regular expression ({e}); escape what is meant "
                                     "literally with \\") from None

    def process(self, doc: Document) -> str | None:
        text, signals = self._edited(doc.text), doc.signals
        total = word_count(doc.text)
        signals["dclm_lines_cut"] = doc.text.count("\n") - text.count("\n") + (not text and bool(doc.text))
        signals["dclm_lines_left"] = text.count("\n") + 1 if text else 0
        signals["dclm_lines_words"] = total
        signals["dclm_lines_words_cut"] = total - word_count(text) if text != doc.text else 0
        reason = self.verdict(doc)
        if reason is None and text != doc.text:
            doc.text = text
        return reason

    def verdict(self, doc: Document) -> str | None:
        signals = doc.signals
        if not signals["dclm_lines_left"]:
            return "dclm_no_lines"
        if not signals["dclm_lines_words"]:
            return "dclm_no_words"
        cut = signals["dclm_lines_words_cut"] / signals["dclm_lines_words"]
        return "dclm_words_cut" if cut > self.config.max_words_cut else None

    def _edited(self, text: str) -> str:
        """Return a text after all cuts of lines and phrases; "" if nothing is left."""
        config, lines = self.config, text.split("\n")
        limit = config.max_uppercase
        lines = _stripped([line for line in lines if not line or uppercase(line) / len(line) <= limit])
        limit = config.max_digits
        lines = _stripped([line for line in lines if not line or digits(line) / len(line) <= limit])
        if config.counters and any(map(text.lower().__contains__, _COUNTED)):
            lines = _stripped([line for line in lines if not _COUNTER.search(line.lower())])
        lines = [line for line in lines if not line or not self._fewer(line, config.min_line_words)]
        for phrase in self._phrases:
            lines = _stripped([edited for line in lines if (edited := self._without(line, phrase)) is not None])
        return "\n".join(lines)

    def _without(self, line: str, phrase: re.Pattern[str]) -> str | None:
        """Return a line without a phrase, if the line has at most `short_line` words. A longer line and an empty one
        are returned unchanged. The result is None if nothing but white space is left of the line."""
        if not self._fewer(line, self.config.short_line + 1):
            return line
        edited = phrase.sub("", line)
        return None if line and (not edited or edited.isspace()) else edited

    @staticmethod
    def _fewer(line: str, words: int) -> bool:
        """Return whether a line has fewer than `words` words. For speed, no more than `words` words are split off."""
        return len(line.split(None, words)) < words


def _stripped(lines: list[str]) -> list[str]:
    """Return the lines of a text after white space is removed from both ends of the text. Blank lines at the beginning
    and the end are removed, and so is white space before the first and after the last remaining line."""
    first, last = 0, len(lines)
    while first < last and not lines[first].strip():
        first += 1
    while last > first and not lines[last - 1].strip():
        last -= 1
    lines = lines[first:last]
    if lines:
        lines[0] = lines[0].lstrip()
        lines[-1] = lines[-1].rstrip()
    return lines
