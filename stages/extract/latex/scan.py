"""Converts LaTeX source to text in one pass, after comments have been removed and macros expanded.
`stages.extract.latex.step` says what is kept."""

from __future__ import annotations

import re
import unicodedata

from stages.extract.latex.source import OPTION, OPTIONAL, LatexSource
from stages.extract.latex.words import (
    ACCENTS,
    ALGORITHM,
    BARE,
    BLANKS,
    BLOCKS,
    BOXES,
    DEDENTS,
    DROPPED,
    ENDED,
    HEADINGS,
    LIGATURES,
    LISTS,
    MATH,
    NAMING,
    NOTHING,
    PARAGRAPHS,
    PARTS,
    REFERENCES,
    REGISTERS,
    SIGNS,
    SKIPPED,
    STATEMENTS,
    TABLES,
    UNITS,
    WORDS,
)
from stages.text.placeholders import MARKS, Placeholders

#: longest formula between dollar signs, characters
_INLINE = 4000
_TOKEN = re.compile(r"\\(?:(begin|end)[ \t]*\{([A-Za-z]{1,40}\*?)\}|([A-Za-z@]+)\*?|(.))|(\$\$?)|([{}&~])"
                    r"|(-{2,3}|``|''|[?!]`|,,)|(\n[ \t]*\n\s*)", re.DOTALL)
_LABEL = re.compile(r"[ \t]{0,9}\\(?:label[ \t]*\{[^{}\n]{0,200}\}|nonumber(?![A-Za-z])|notag(?![A-Za-z]))")
_QUOTED = re.compile(r'[ \t]*"([^"\n]{0,20})"')
_UNIT = r"-?[0-9.]{1,12}[ \t]?(?:true[ \t]?)?(?:pt|cm|mm|em|ex|in|bp|sp|pc|dd|cc|mu)(?![A-Za-z])"
_STRETCH = r"(?:[ \t]{1,3}(?:plus|minus)[ \t]{0,3}-?[0-9.]{1,9}[ \t]?(?:fil{1,3}|pt|cm|mm|em|ex|in)(?![A-Za-z]))*"
#: lengths such as \vskip 2cm plus 1fil, assignments such as \unitlength=1mm, and values of registers such as
#: \hsize 6in, \magnification=\magstep1, \count0=1
_LENGTH = re.compile(rf"[ \t]{{0,9}}{_UNIT}{_STRETCH}")
_ASSIGNED = re.compile(rf"[ \t]{{0,9}}=[ \t]{{0,9}}(?:{_UNIT}{_STRETCH}|-?[0-9]{{1,9}}(?=[ \t]{{0,9}}(?:\n|\\|\Z)))")
_VALUE = re.compile(rf"[0-9]{{0,3}}[ \t]{{0,9}}(?:=?[ \t]{{0,9}}{_UNIT}{_STRETCH}|=[ \t]{{0,9}}(?:-?[0-9.]{{1,12}})?"
                    r"(?:\\[A-Za-z@]{1,40}[ \t]?[0-9]{0,4})?)")
_FONT = re.compile(r"[ \t]*\\[A-Za-z@]{1,40}[ \t]*=?[ \t]*[A-Za-z0-9-]{1,40}(?:[ \t]+(?:scaled|at)[ \t]*"
                   r"(?:\\[A-Za-z]{1,20}[0-9]?|[0-9.]{1,9}[ \t]?(?:true)?(?:pt)?))?")
_BOX = re.compile(rf"[ \t]*(?:to|spread)[ \t]*(?:{_UNIT}|-?[0-9.]{{0,9}}\\[A-Za-z]{{1,40}})")
#: \\char92, \\char'134, \\char"5C
_CHAR = re.compile("[ \\t]*(?:\"([0-9A-F]{1,4})|'([0-7]{1,6})|([0-9]{1,5})|`\\\\?([^\\s]))")
#: stand-ins for the end of a line and for one level of a nested list, until the text is put together
BREAK, INDENT = MARKS
_NAMED, _FILE = re.compile(r"[ \t]*\\[A-Za-z@]{1,60}"), re.compile(r"[ \t]+[\w./+-]{1,100}")
_TRIM = re.compile(r"[ \t]*\([lr\d.{}a-z]{1,20}\)")
_SPACE = re.compile(r"\{\}|[ \t]+")


class Scan:
    """Converts a LaTeX source to text in one pass. Comments and macro definitions must have been removed from the
    source. `theorems` maps the names of environments that the source defines to their headings."""

    def __init__(self, text: str, theorems: dict[str, str], captions: bool, placeholders: Placeholders) -> None:
        self.text, self.theorems, self.captions, self.placeholders = text, theorems, captions, placeholders
        self.source = LatexSource(text)
        self.closing = self.source.closing
        self.out: list[str] = []
        self.after: dict[int, str] = {}                         # position of a closing brace → text to put there
        self.lists: list[tuple[bool, int]] = []                 # open lists: (numbered, items so far)
        self.tables = self.tabbing = 0
        self.indent, self.lines = -1, 0  # indent of pseudo-code (-1 outside it) and its lines so far

    def run(self) -> tuple[str, str]:
        """Returns (the text of the document, its title)."""
        text, title = self.text, self._title()
        at, stop = self.source.body()
        if title:
            self.out.append(f"# {title}\n\n")
        while (m := _TOKEN.search(text, at, stop)) is not None:
            self.out.append(text[at:m.start()])
            at = max(m.end(), self._token(m))
        self.out.append(text[at:stop])
        text = _tidy("".join(self.out)).strip()
        for _ in range(4):  # drop headings whose content was left out, such as References
            before, _, last = text.rpartition("\n\n")
            if before and last.startswith("#") and "\n" not in last:
                text = before
        return text, title

    def _title(self) -> str:
        inner = self.source.title()
        if not inner or "\\title" in inner:  # a title with \title in it is dropped, to avoid recursion
            return ""
        return " ".join(Scan(inner, {}, False, self.placeholders).run()[0].split())

    def _token(self, m: re.Match[str]) -> int:
        """Write the text for one token of the source (a command, a brace, a blank line …), the match `m`. Returns the
        position at which the scan continues."""
        verb, name, word, sign, dollar, brace, ligature, blank = m.groups()
        write = self.out.append
        if verb == "begin":
            return self._begin(m, name)
        if verb == "end":
            self._end(name)
        elif word:
            return self._command(m, word)
        elif sign:
            return self._sign(m, sign)
        elif dollar:
            return self._dollar(m)
        elif brace == "}":
            write(self.after.pop(m.start(), ""))
        elif brace == "&":
            write(" | " if self.tables else "&")
        elif brace == "~":
            write(" ")
        elif ligature:
            write(LIGATURES[ligature])
        elif blank:
            write("\n\n")
        return m.end()

    # -- formulas ----------------------------------------------------------------------------------------------------
    def _formula(self, start: int, stop: int, block: bool) -> int:
        formula = _LABEL.sub("", self.text[start:stop])
        formula = re.sub(r"\n\s*\n", "\n", formula)
        self.out.append(f"\n\n{self.placeholders.keep(formula.strip())}\n\n" if block else
                        self.placeholders.keep(formula))
        return stop

    def _dollar(self, m: re.Match[str]) -> int:
        mark = m[0]
        end = re.compile(r"(?:\\.|[^\\$\n]|\n(?![ \t]*\n))*" + re.escape(mark), re.DOTALL).match(
            self.text, m.end(), m.end() + (_INLINE if mark == "$" else 4 * _INLINE))
        if end is None:
            self.out.append(mark)
            return m.end()
        return self._formula(m.start(), end.end(), mark == "$$")

    def _sign(self, m: re.Match[str], sign: str) -> int:
        write, end = self.out.append, m.end()
        if self.tabbing and sign in "=>+-<'`":
            write(" ")
        elif sign in "[(":
            close = self.source.display_end("]" if sign == "[" else ")", end)
            if 0 <= close - end <= 4 * _INLINE:
                return self._formula(m.start(), close + 2, sign == "[")
        elif sign == "\\":
            option = OPTIONAL.match(self.text, end)
            write(BREAK)
            return self.source.past_blanks(option.end() if option else end)
        elif sign in ACCENTS:
            return self._accent(end, ACCENTS[sign], BARE.get(sign, ""))
        elif sign in "%&_#${}":
            write(sign)
        elif sign in BLANKS:
            write(BREAK if sign == ";" and self.indent >= 0 else " ")
        return end

    def _accent(self, at: int, combining: str, bare: str = "") -> int:
        """Write the letter at position `at` with an accent, the character `combining`. `bare` is written if the accent
        has no letter. Returns the position after the letter."""
        m = re.compile(r"[ \t]*(?:\{[ \t]*(\\?[A-Za-z]?)[ \t]*\}|(\\[ij](?![A-Za-z])|[A-Za-z]))").match(self.text, at)
        if m is None:
            return at
        letter = (m[1] if m[1] is not None else m[2]).lstrip("\\")
        self.out.append(unicodedata.normalize("NFC", letter + combining) if letter else bare)
        return m.end()

    # -- environments ------------------------------------------------------------------------------------------------
    def _begin(self, m: re.Match[str], name: str) -> int:
        bare, write, at = name.rstrip("*"), self.out.append, m.end()
        end = self.source.end_of(name, at)
        if bare in MATH and end >= 0:
            return self._formula(m.start(), end + len(f"\\end{{{name}}}"), bare != "math")
        if bare in SKIPPED:
            return end + len(f"\\end{{{name}}}") if end >= 0 else at
        option = OPTIONAL.match(self.text, at)
        at = option.end() if option else at
        if (columns := _columns(name)) is not None:
            self.tables += 1
            write("\n\n")
            return self.source.past_blanks(self.source.past(at, columns))
        at = self.source.past(at, BOXES.get(bare, 0))
        if bare in LISTS:
            self.lists.append((LISTS[bare], 0))
        elif bare == "tabbing":
            self.tabbing = 1
        elif bare in ("algorithmic", "algorithm2e"):
            self.indent, self.lines = 0, 0
        elif (bare == "frame" or bare in BLOCKS) and self.text.startswith("{", at) and at in self.closing:
            write("\n\n### " if bare == "frame" else "\n\n")
            self.after[self.closing[at]] = "\n\n"
            return at
        elif bare == "abstract":
            write("\n\n## Abstract\n\n")
            return at
        elif bare in self.theorems or bare in STATEMENTS:
            return self._statement(self.theorems.get(bare, bare.capitalize()), option, at)
        write("\n\n")
        return at

    def _statement(self, kind: str, option: re.Match[str] | None, at: int) -> int:
        """Write the head of a theorem, a proof or another statement, such as `Theorem.`, `Theorem (Main).` or `Proof of
        Theorem 1.` Returns the position after the head."""
        note = option[1].strip() if option else ""
        if not note:
            self.out.append(f"\n\n{kind}. ")
            return self.source.past_blanks(at)
        if "\\begin" not in note and "[" not in note:           # a note with statements in it is not scanned
            note = " ".join(Scan(note, {}, False, self.placeholders).run()[0].split())
        self.out.append(f"\n\n{note if note.lower().startswith(kind.lower()) else f'{kind} ({note})'}. ")
        return self.source.past_blanks(at)

    def _end(self, name: str) -> None:
        bare = name.rstrip("*")
        if bare in LISTS and self.lists:
            self.lists.pop()
        elif _columns(name) is not None:
            self.tables = max(0, self.tables - 1)
        elif bare == "tabbing":
            self.tabbing = 0
        elif bare in ("algorithmic", "algorithm2e"):
            self.indent = -1
        self.out.append("\n\n")

    # -- commands ----------------------------------------------------------------------------------------------------
    def _command(self, m: re.Match[str], word: str) -> int:
        write, at = self.out.append, m.end()
        if self.indent >= 0 and word.lower() in ALGORITHM:
            return self._algorithm(word.lower(), at)
        if word in SIGNS:
            write(SIGNS[word])
            after = _SPACE.match(self.text, at)
            return after.end() if after else at
        if word in ACCENTS:
            return self._accent(at, ACCENTS[word])
        if word in ("item", "itemitem"):
            return self._item(word, at)
        if word not in NOTHING and word not in REGISTERS:
            at = self.source.past_options(at)
        brace = self.source.group(at)
        if word in HEADINGS:
            return self._heading(word, at, brace)
        if word in ENDED and brace < 0 and 0 <= (end := self.source.mark(ENDED[word], at)) - at < 20_000:
            return end + len(ENDED[word]) + 1
        if word in PARTS:
            write(f"\n\n{PARTS[word]}\n\n")
            if brace >= 0:
                ended = self.text[self.closing[brace] - 1] in ".:"
                self.after[self.closing[brace]] = "\n\n" if PARTS[word] else " " if ended else ". "
        elif word in ("paragraph", "subparagraph") and brace >= 0:
            write("\n\n")
            self.after[self.closing[brace]] = " "
        elif word in PARAGRAPHS and brace >= 0:
            if word == "caption" and not self.captions:
                return self.closing[brace] + 1
            write("\n\n")
            self.after[self.closing[brace]] = "\n\n"
        elif word in ("footnote", "footnotetext", "footcite", "tablenotetext") and brace >= 0:
            text = self.source.group(self.closing[brace] + 1) if self.closing[brace] - brace < 9 else -1
            write(" (")                                         # plain TeX: \footnote{*}{text}
            self.after[self.closing[brace if text < 0 else text]] = ")"
            return at if text < 0 else text
        elif word in UNITS and brace >= 0:                      # \ensuremath{x} and quantities are formulas
            end = self.source.past(at, UNITS[word])
            inner = self.text[brace + 1:end - 1] if UNITS[word] == 1 else self.text[m.start():end]
            write(inner if word == "num" else self.placeholders.keep(f"${inner}$"))
            return end
        else:
            return self._other_command(word, at, brace)
        return at

    def _other_command(self, word: str, at: int, brace: int) -> int:
        """Handle a command that is a reference, a setting or a space, or that is unknown. `word` is its name, `at` the
        position after it, and `brace` the position of the brace of its argument (-1 if there is none). Returns the
        position at which the scan continues."""
        write = self.out.append
        if word in REFERENCES:
            if brace >= 0:
                labels = self.text[brace + 1:min(self.closing[brace], brace + OPTION)].replace(",", " ").split()
                write(f"[{', '.join(labels)}]")
            return self.source.past(at, 1)
        elif word in DROPPED:
            return self._dropped(word, at)
        elif word in REGISTERS:
            return value.end() if (value := _VALUE.match(self.text, at)) else at
        elif word in NOTHING:
            return self.source.past_blanks(at) if self.tables else at
        elif word in ("hbox", "vbox", "vtop") and (box := _BOX.match(self.text, at)) is not None:
            return box.end()
        elif word == "char" and (char := _CHAR.match(self.text, at)) is not None:
            code = ord(char[4]) if char[4] else int(char[1] or char[2] or char[3],
                                                    16 if char[1] else 8 if char[2] else 10)
            write(chr(code) if 0x20 <= code < 0x7f or 0xa0 < code < 0xd800 else "")
            return char.end()
        elif word == "font" and (font := _FONT.match(self.text, at)) is not None:
            return font.end()
        elif word in ("par", "roster") or word in self.source.marks:
            if word == "roster":
                self.lists.append((False, 0))
            elif word == "endroster":
                del self.lists[-1:]
            write("\n\n")
        elif word in WORDS:
            write(WORDS[word])
        elif brace < 0 and (assigned := _ASSIGNED.match(self.text, at)) is not None:
            return assigned.end()
        return at                                   # any other command is dropped, and its arguments stay as text

    def _item(self, word: str, at: int) -> int:
        write, option = self.out.append, OPTIONAL.match(self.text, at) or _QUOTED.match(self.text, at)
        numbered, items = self.lists[-1] if self.lists else (False, 1)
        self.lists[-1:] = [(numbered, items + 1)] if self.lists else []
        self._strip_output(" ~\t\n")
        write("\n\n" if not items and len(self.lists) == 1 else BREAK)
        write(INDENT * (min(len(self.lists) - 1, 8) if word == "item" else 1)
              + (f"{items + 1}. " if numbered else "- "))
        if not self.lists and (brace := self.source.group(at)) >= 0 and self.closing[brace] - brace < 20:
            self.after[self.closing[brace]] = " "               # plain TeX: \item{(a)} text
        write(option[1].strip() + " " if option else "")
        return self.source.past_blanks(option.end() if option else at)

    def _heading(self, word: str, at: int, brace: int) -> int:
        """Write the beginning of a heading: \\section{…}, AMS-TeX's \\heading … \\endheading or plain TeX's
        \\beginsection, whose heading is the rest of the line. Returns the position at which the scan continues."""
        if brace >= 0:
            self.after[self.closing[brace]] = "\n\n"
        elif word != "beginsection" and not 0 <= self.source.mark(f"end{word}", at) - at < 2000:
            return at
        self.out.append("\n\n" + "#" * HEADINGS[word] + " ")
        return at

    def _dropped(self, word: str, at: int) -> int:
        """Returns the position after a command that is dropped with its arguments. `at` is the position after its name,
        `word`."""
        if word == "label":
            self._strip_output()
        elif word in ("vskip", "hskip", "kern"):
            length = _LENGTH.match(self.text, at) or _NAMED.match(self.text, at)
            return length.end() if length else at
        elif word in NAMING and (name := _NAMED.match(self.text, at)) is not None:
            return self.source.past(name.end(), DROPPED[word] - 1)
        elif word == "input" and self.source.group(at) < 0 and (name := _FILE.match(self.text, at)) is not None:
            return name.end()
        elif word == "cmidrule" and (trim := _TRIM.match(self.text, at)) is not None:
            at = trim.end()
        return self.source.past(at, DROPPED[word])

    def _algorithm(self, word: str, at: int) -> int:
        """Begin a line of pseudo-code for a command, `word`, of the packages algorithmic or algpseudocode. Returns the
        position at which the scan continues."""
        write, (before, after, more) = self.out.append, ALGORITHM[word]
        self.indent = max(0, self.indent - (word in DEDENTS))
        self._strip_output(" ~\t\n")
        write((BREAK if self.lines else "\n\n") + INDENT * min(self.indent, 12) + before)
        self.lines += 1
        self.indent += more
        at = self.source.past_options(at)
        brace = self.source.group(at)
        if brace < 0 or not after + before:
            return self.source.past_blanks(at)
        second = self.source.group(self.closing[brace] + 1) if word in ("function", "procedure") else -1
        self.after[self.closing[brace]] = "(" if second >= 0 else after
        if second >= 0:
            self.after[self.closing[second]] = ")"
        return at

    def _strip_output(self, blanks: str = " ~\t") -> None:
        """Remove the blanks at the end of the output."""
        while self.out and len(self.out[-1]) < OPTION and not self.out[-1].strip(blanks):
            self.out.pop()
        if self.out:
            self.out[-1] = self.out[-1].rstrip(blanks)


def _columns(name: str) -> int | None:
    """Returns the number of arguments after the \\begin of a table environment; None for any other environment."""
    bare = name.rstrip("*")
    return TABLES.get(name, TABLES.get(bare, 1 if bare.endswith(("tabular", "longtable")) else None))


def _tidy(text: str) -> str:
    """Return the text with each paragraph on one line, since TeX ignores single line breaks, and one empty line between
    paragraphs. Empty headings are dropped."""
    # each pattern sees only runs that the previous ones shortened, so the time is linear for any text
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r" ?\n ?", "\n", re.sub(r"[ \t]+", " ", text)))
    text = re.sub(r" +", " ", re.sub(r"(?<!\n)\n(?!\n)", " ", text))
    text = re.sub(f"[ \n]*{BREAK}[ {BREAK}]*", "\n", re.sub(f"{BREAK}[ {BREAK}]+", BREAK, text))
    text = re.sub(r"^#+ *$", "", text.replace(INDENT, "  "), flags=re.MULTILINE)
    text = re.sub(r"^[ |]+\n", "", text, flags=re.MULTILINE)      # rows of tables that held only pictures
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" ?\n", "\n", text))
