"""Cleans books that are plain text files. Removes Project Gutenberg's header and licence, transcribers' notes and page
numbers. Rejoins words that were hyphenated at line ends, and writes each paragraph on one line.

Old text files break lines at a fixed width of 55 to 100 characters. A line break counts as caused by this width when
the first word of the next line would not have fitted on the line. Verse and title pages break their lines earlier.
Blocks with many such early breaks keep their lines, and so do tables. A hyphen at a line end is removed when the rest
of the book spells the word more often without the hyphen than with it.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from stages.document import Document
from stages.stage import Stage, StageConfig, signal

#: where a header ends, in the wordings used since 1993; the projects of Australia, Canada and others have their own
_START = re.compile(r"^[ *]*\*{3} ?START OF (?:THE |THIS )?PROJECT GUTENBERG[^\n]*(?:\n[^\n]{1,100}\*{3})?[ \t]*$"
                    r"|^\*END\*? ?THE SMALL PRINT![^\n]*$|^[* ]*END OF THE SMALL PRINT[^\n]*$"
                    r"|^To contact Project Gutenberg (?:of )?Australia[^\n]*$", re.IGNORECASE | re.MULTILINE)
_END = re.compile(r"^[ *]*\*{3} ?END OF (?:THE |THIS )?PROJECT GUTENBERG"
                  r"|^[ *]*(?:The )?(?:End|Ende|Fin|Fine|Fim|Einde|Loppu|Slut)\b[^\n]{0,40}\bProje[ck]t[ -]Gutenberg"
                  r"|^\*{3} ?START: FULL LICENSE", re.IGNORECASE | re.MULTILINE)
#: the first line of books older than the headers; it may also stand above a header
_FIRST = re.compile(r"\s*\**(?:This is )?the [^\n]{0,30}?Project Gutenberg(?:'s)? (?:e-?text|e-?book)[^\n]*\n",
                    re.IGNORECASE)
_FACT = re.compile(r"^(Title|Author|Translator|Language|Release date|Posting date): *(\S[^\n]{0,300})$",
                   re.IGNORECASE | re.MULTILINE)
_CREDIT = re.compile(r"(?:E-?text |This e-?(?:text|book) was )?(?:produced|prepared|transcribed|scanned) by\b"
                     r"|.{0,80}(?:gutenberg\.(?:org|net)|pgdp\.net|Distributed Proof)", re.IGNORECASE)
_PICTURE = re.compile(r"^ *\[Illustration\][ \t]*$\n?", re.MULTILINE)
#: transcribers' notes: in brackets, in a box of signs, or below a heading at either end
_NOTE = re.compile(r"^[ \t]*\[Transcriber['’]?s?['’]? ?Notes?\b[^\[\]]{0,4000}\][ \t]*$\n?"
                   r"|^[ \t]*\+[-=]{9,}\+[ \t]*\n(?:[ \t]*\|[^\n]*\n){0,3}"
                   r"[ \t]*\|[^\n]{0,60}Transcriber['’]?s?['’]? Note[^\n]*\n"
                   r"(?:[ \t]*\|[^\n]*\n){0,60}[ \t]*\+[-=]{9,}\+[ \t]*$\n?", re.IGNORECASE | re.MULTILINE)
_NOTES = re.compile(r"[ \t*_]*Transcriber['’]?s?['’]? Notes?\b[:.\-— \t*_]{0,9}", re.IGNORECASE)
#: page numbers between words, and on lines of their own
_PAGE = re.compile(r"[ \t]?[\[{](?:Pg|Page|p\.|pp\.|Seite|S\.|Página|Pagina|Side|Sid\.)[ \t]?"
                   r"([0-9]{1,4}|[ivxlc]{1,7})[\]}](?:\n(?=\n))?", re.IGNORECASE)
_BRACED = re.compile(r"[ \t]?\{([0-9]{1,4})\}")
_NUMBER_LINE = re.compile(r"(?<=\n)[ \t]*(?:[-–—[(][ \t]?)?([0-9]{1,4})(?:[ \t]?[-–—\])])?[ \t]*\n")
_CUT = re.compile(r"([^\W\d_]+)[-¬\xad]$")
_BEGINNING = re.compile(r"[^\W\d_]+")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_FULL_STOPS = (".", "!", "?", '"', "'", "”", "’", "»")
#: with fewer numbers than this, a regular sequence may be chance
_PAGES = 8
#: header and licence are searched for in this many characters at either end
_EDGE = 60_000
#: widths of a typewriter's lines, characters
_NARROW, _WIDE = 55, 100


class Book(Stage):
    """Cleans a plain-text book.

    The setting `gutenberg` removes transcribers' notes and the header, licence and credits of Project Gutenberg. Facts
    in the header (title, author, translator, language, dates) go to `meta`, but replace nothing that `meta` already
    holds.

    The setting `unwrap` removes page numbers. If the file breaks its lines at a fixed width, `unwrap` also joins the
    lines of each paragraph, and stores the width, in characters, in `meta.wrapped_at`.

    Both settings are on by default. A book of which nothing is left is dropped as `no_text`.
    """

    name = "book"
    read_by = "text"
    version = 2
    cost_ms, edits = 0.8, True
    does = "extracts"

    class Config(StageConfig):
        gutenberg: bool = signal(True, "remove header, licence and credits of Project Gutenberg")
        unwrap: bool = signal(True, "join the lines of a paragraph that are broken at a fixed width")

    def process(self, doc: Document) -> str | None:
        text = doc.text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in doc.text else doc.text
        if self.config.gutenberg:
            text, facts = without_gutenberg(text)
            for name, value in facts.items():
                doc.meta.setdefault(name, value)
            text = without_notes(text)
        if self.config.unwrap:
            text = without_pages(text)
            if width := wrapped_at(text):
                text = unwrapped(text, width)
                doc.meta["wrapped_at"] = width
        if text != doc.text:
            doc.text = text
        return None if text.strip() else "no_text"


def without_gutenberg(text: str) -> tuple[str, dict[str, str]]:
    """Removes Project Gutenberg's header, licence and credits from a book, and its lines `[Illustration]`. Returns
    (remaining text; facts that the header states, by name, such as `title`).

    A book without a header, credits or end mark of Project Gutenberg is returned unchanged, without facts.
    """
    starts = list(_START.finditer(text, 0, _EDGE))
    first_line = _FIRST.match(text)
    blocks = text.strip("\n").split("\n\n", 1)
    credited = len(blocks) == 2 and blocks[1].startswith("\n") and len(blocks[0]) < 600 and _CREDIT.match(
        " ".join(blocks[0].split()))                             # marks of books whose header was already cut off
    if not (starts or first_line or credited) and not _END.search(text, max(0, len(text) - _EDGE)):
        return text, {}
    first = starts[-1].end() if starts else first_line.end() if first_line else 0
    facts = {m[1].lower().replace(" ", "_"): m[2].strip() for m in reversed(list(_FACT.finditer(text, 0, first)))}
    end = _END.search(text, max(first, len(text) - _EDGE))
    body = text[first:end.start() if end else len(text)].strip("\n")
    blocks = body.split("\n\n", 6)                               # credits above the title page
    for i, block in enumerate(blocks[:5]):
        if _CREDIT.match(" ".join(block.split())) and len(block) < 600:
            blocks[i] = ""
    return re.sub(r"\A(?:[ \t]*\n)+", "", _PICTURE.sub("", "\n\n".join(blocks))).rstrip() + "\n", facts


def without_notes(text: str) -> str:
    """Returns the text of a book without transcribers' notes."""
    if not _NOTES.search(text):
        return text
    text = _NOTE.sub("", text)
    blocks = re.split(r"(\n(?:[ \t]*\n)+)", text)
    place, size = 0, len(text)
    for i in range(0, len(blocks), 2):
        note = _NOTES.match(blocks[i].lstrip("\n"))
        if note and place > size * 9 // 10:                      # the last section
            return "".join(blocks[:i]).rstrip() + "\n"
        if note and place < min(size // 10, _EDGE):
            if note.end() == len(blocks[i].strip("\n")) and i + 2 < len(blocks):
                blocks[i + 2] = ""                               # a heading, and what stands below it
            blocks[i] = ""
        place += len(blocks[i]) + (len(blocks[i + 1]) if i + 1 < len(blocks) else 0)
    return "".join(blocks).lstrip("\n")


def without_pages(text: str) -> str:
    """Returns the text of a book without its page numbers. Form feeds become line breaks.

    Page numbers stand in brackets or braces (`[Pg 12]`, `{12}`), or on lines of their own. They must form a rising
    sequence (`_counting`). Chapters, verses and sonnets also have numbers on lines of their own, but these seldom
    interrupt a sentence. Such lines are therefore removed only if more than a third of them interrupt one.
    """
    text = text.replace("\f", "\n")
    for pattern in (_PAGE, _BRACED):
        if _counting([int(m[1]) for m in pattern.finditer(text) if m[1].isdecimal()]):
            text = pattern.sub("", text)
    lines = list(_NUMBER_LINE.finditer(text))
    if _counting(numbers := [int(m[1]) for m in lines]):
        within = sum(_goes_on(text, m) for m in lines)
        if within * 3 > len(numbers):
            parts, at = [], 0
            for m in lines:
                before = text[at:m.start()]
                at = m.end()
                if _goes_on(text, m):                            # its sentence is one paragraph again
                    before = before.rstrip() + "\n"
                    at += len(text[at:at + 9]) - len(text[at:at + 9].lstrip("\n"))
                parts.append(before)
            text = "".join((*parts, text[at:]))
    return text


def _counting(numbers: list[int]) -> bool:
    """Whether numbers look like page numbers: there are at least `_PAGES`, and at least nine in ten are larger than the
    one before, by at most 4."""
    return len(numbers) >= _PAGES and sum(0 < b - a < 5 for a, b in pairwise(numbers)) * 10 >= 9 * (len(numbers) - 1)


def _goes_on(text: str, m: re.Match[str]) -> bool:
    """Whether a sentence continues from the text before `m` to the text after it. `m` matches a line that holds only a
    number."""
    before, behind = text[max(0, m.start() - 200):m.start()].rstrip(), text[m.end():m.end() + 9].lstrip()
    return before[-1:] not in ("", ".", "!", "?", ":", '"', "”", "'", "’", ")", "]") and behind[:1].islower()


def wrapped_at(text: str) -> int:
    """Returns the width, in characters, at which the lines of a text are broken; 0 if there is no fixed width of 55 to
    100 characters. A text with fewer than 20 lines (blank ones not counted) is not judged, and gives 0."""
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
    """Counts line breaks inside the paragraphs of a block (the lines between two blank lines). Returns (all such
    breaks; breaks that a width of `width` characters did not cause). The width did not cause a break if the next word
    would have fitted within nine tenths of the width."""
    breaks = fitting = 0
    base = _indent(lines)
    for line, following in pairwise(lines):
        if _begins(line, following, base):
            continue
        word = following.lstrip().partition(" ")[0].partition("--")[0]
        breaks += 1
        fitting += len(line.rstrip()) + 1 + len(word) < width * 0.9
    return breaks, fitting


def _indent(lines: list[str]) -> int:
    """Returns the smallest number of leading blanks in the lines of a block, except the first line; 0 for a single
    line."""
    return min((len(line) - len(line.lstrip()) for line in lines[1:]), default=0)


def _begins(before: str, line: str, base: int) -> bool:
    """Whether `line` begins a new paragraph although no blank line precedes it. The line before, `before`, must end a
    sentence. `line` must be indented by at least two blanks more than `base`, the smallest indent in the block
    (`_indent`)."""
    return len(line) - len(line.lstrip()) > base + 1 and before.rstrip()[-1:] in _FULL_STOPS


def unwrapped(text: str, width: int) -> str:
    """Returns the text with each paragraph on one line. A block (the lines between two blank lines) keeps its lines if
    it is a table, or if more than a fifth of its lines end early, as in verse. A line ends early if the next word would
    have fitted within `width` characters (`_breaks`)."""
    words = Counter(_WORD.findall(text.lower()))
    out = []
    for block in re.split(r"(\n(?:[ \t]*\n)+)", text):
        lines = block.split("\n")
        breaks, fitting = _breaks(lines, width)
        table = sum(re.search(r"\S {3,}\S|\t|\|", line) is not None for line in lines) * 2 > len(lines)
        if block.isspace() or not breaks or table or fitting * 5 > breaks:
            out.append(block)
            continue
        base = _indent(lines)
        parts = [" ".join(lines[0].split())]
        for before, line in pairwise(lines):
            content, last = " ".join(line.split()), parts[-1]
            if _begins(before, line, base) or not any(map(str.isalnum, line)) or not any(map(str.isalnum, before)):
                parts.append("\n" + content)                    # a paragraph of its own, or a line of signs
            elif (cut := _CUT.search(last)) and (continuation := _BEGINNING.match(content)):
                joined, hyphenated = (cut[1] + continuation[0]).lower(), f"{cut[1]}-{continuation[0]}".lower()
                if last[-1] != "-" or words[joined] > words[hyphenated]:
                    parts[-1] = last[:-1]                        # a word that was cut: exam-/ple
                parts.append(content)
            # a dash or a hyphen between two lines joins two words: well-/known, said--/and, said/--and
            else:
                parts.append(content if last.endswith(("-", "—")) or content.startswith(("--", "—")) else " " + content)
        out.append("".join(parts))
    return "".join(out)
