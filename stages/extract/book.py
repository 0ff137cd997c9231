"""Books as text files: what Project Gutenberg puts around them goes, lines broken by a typewriter's width are joined.

A line was broken for the width when the first word of the next one would not have fitted on it. So verse, whose lines
end earlier, tables and title pages keep their lines without anybody knowing what verse is.
"""

from __future__ import annotations

import re
from itertools import pairwise

from stages.document import Document
from stages.stage import Stage, StageConfig, signal

_START = re.compile(r"^[ *]*\*{3} ?START OF (?:THE |THIS )?PROJECT GUTENBERG[^\n]*(?:\n[^\n]{1,100}\*{3})?[ \t]*$"
                    r"|^\*END\*? ?THE SMALL PRINT![^\n]*$|^[* ]*END OF THE SMALL PRINT[^\n]*$",
                    re.IGNORECASE | re.MULTILINE)
_END = re.compile(r"^[ *]*\*{3} ?END OF (?:THE |THIS )?PROJECT GUTENBERG|^[ *]*End of (?:the |this )?Project Gutenberg"
                  r"|^\*{3} ?START: FULL LICENSE", re.IGNORECASE | re.MULTILINE)
_FACT = re.compile(r"^(Title|Author|Translator|Language|Release date|Posting date): *(\S[^\n]{0,300})$",
                   re.IGNORECASE | re.MULTILINE)
_CREDIT = re.compile(r"(?:E-?text |This e-?(?:text|book) was )?(?:produced|prepared|transcribed|scanned) by\b"
                     r"|.{0,80}(?:gutenberg\.(?:org|net)|pgdp\.net|Distributed Proof)", re.IGNORECASE)
_PICTURE = re.compile(r"^ *\[Illustration\][ \t]*$\n?", re.MULTILINE)
#: header and licence are looked for in so many characters at either end
_EDGE = 60_000
#: widths that were a typewriter's, characters
_NARROW, _WIDE = 55, 100


class Book(Stage):
    """Drops `no_text` when nothing is left. Facts of Gutenberg's header go to `meta` (title, author, language …)."""

    name = "book"

    class Config(StageConfig):
        gutenberg: bool = signal(True, "take away header, licence and credits of Project Gutenberg")
        unwrap: bool = signal(True, "join lines where the book is broken at a fixed width")

    def process(self, doc: Document) -> str | None:
        text = doc.text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in doc.text else doc.text
        if self.config.gutenberg:
            text, facts = without_gutenberg(text)
            for name, value in facts.items():
                doc.meta.setdefault(name, value)
        if self.config.unwrap and (width := wrapped_at(text)):
            text = unwrapped(text, width)
            doc.meta["wrapped_at"] = width
        if text != doc.text:
            doc.text = text
        return None if text.strip() else "no_text"


def without_gutenberg(text: str) -> tuple[str, dict[str, str]]:
    """(the book, what the header says of it); the text as it is when it is none of Project Gutenberg's."""
    starts = list(_START.finditer(text, 0, _EDGE))
    if not starts and not _END.search(text, max(0, len(text) - _EDGE)):
        return text, {}
    first = starts[-1].end() if starts else 0
    facts = {m[1].lower().replace(" ", "_"): m[2].strip() for m in reversed(list(_FACT.finditer(text, 0, first)))}
    end = _END.search(text, max(first, len(text) - _EDGE))
    body = text[first:end.start() if end else len(text)].strip("\n")
    blocks = body.split("\n\n", 6)                               # credits stand before the title page
    for i, block in enumerate(blocks[:5]):
        if _CREDIT.match(" ".join(block.split())) and len(block) < 600:
            blocks[i] = ""
    return _PICTURE.sub("", "\n\n".join(blocks)).strip("\n \t") + "\n", facts


def wrapped_at(text: str) -> int:
    """Width in characters at which the lines of a text are broken, 0 for a text that is not."""
    lengths = sorted(len(line.rstrip()) for line in text.split("\n") if line and not line.isspace())
    if len(lengths) < 20:
        return 0
    width = lengths[len(lengths) * 98 // 100]                    # a table or two may be wider
    if not _NARROW <= width <= _WIDE:
        return 0
    breaks = fitting = 0
    for block in re.split(r"\n[ \t]*\n", text):
        n, k = _breaks(block.split("\n"), width)
        breaks, fitting = breaks + n, fitting + k
    return width if breaks and (breaks - fitting) * 2 > breaks else 0


def _breaks(lines: list[str], width: int) -> tuple[int, int]:
    """(line breaks of a block, those where the next word would have fitted)."""
    breaks = fitting = 0
    for line, following in pairwise(lines):
        word = following.lstrip().partition(" ")[0].partition("--")[0]
        breaks += 1
        fitting += len(line.rstrip()) + 1 + len(word) < width * 0.9
    return breaks, fitting


def unwrapped(text: str, width: int) -> str:
    """Blocks whose lines are broken for the width as one line each; all others as they are."""
    out = []
    for block in re.split(r"(\n(?:[ \t]*\n)+)", text):
        lines = block.split("\n")
        breaks, fitting = _breaks(lines, width)
        table = sum(re.search(r"\S {3,}\S|\t|\|", line) is not None for line in lines) * 2 > len(lines)
        if block.isspace() or not breaks or table or fitting * 5 > breaks:
            out.append(block)
            continue
        joined = lines[0].rstrip()
        parts = [joined]
        for line in lines[1:]:
            said = line.strip()
            # a dash or a hyphen between two lines joins two words: well-/known, said--/and, said/--and
            parts.append(said if parts[-1].endswith(("-", "—")) or said.startswith(("--", "—")) else " " + said)
        out.append("".join(parts))
    return "".join(out)
