r"""Prepares a LaTeX source for its conversion to text, as TeX does before typesetting: removes comments, replaces
verbatim pieces with stand-ins, and expands macros.

Only macros that the source itself defines (\newcommand, \def, \let, \DeclareMathOperator, \newenvironment …) are
expanded, with their arguments and in the order of the source. Macros inside formulas are expanded, too, so that
formulas can be read without the preamble. A macro that programs TeX (\csname, \@…, boxes) is not expanded.

Counts limit all work: macros, arguments of a macro (nine, as in TeX), length of a body, nesting of expansions, and
characters that expansion reads and writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from stages.extract.latex.words import KNOWN, LISTINGS, SIGNS

#: most macros, longest body in characters, and deepest expansion of macros inside bodies and arguments of macros
MACROS, _BODY, _DEPTH = 2000, 4000, 12
#: The expansion of a text may read and write at most _WORK characters plus _TIMES the text's length, where each use of
#: a macro counts as _USE further characters. A character takes about 1 µs.
_WORK, _TIMES, _USE = 1 << 20, 1, 30
#: longest verbatim piece within a line and longest URL, characters
_VERB, _URL = 400, 2000

# -- comments and verbatim text ----------------------------------------------------------------------------------------
_NEW_LISTING = re.compile(r"\\(?:lstnewenvironment|DefineVerbatimEnvironment|newtcblisting|newverbatim)[ \t]*"
                          r"\{([A-Za-z]{1,40})\}|\\newminted(?:\[([A-Za-z]{1,40})\])?\{([A-Za-z]{1,40})\}")
_SHORT_VERB = re.compile(r"\\(?:MakeShortVerb|DefineShortVerb)\*?(?:\[[^\]\n]{0,80}\])?[ \t]*\{?\\([|\"!/+@<>;:?*])")
_CONDITIONAL = re.compile(r"\\(?:(fi|else)|if(?!f(?![A-Za-z])|thenelse)[A-Za-z@]*)(?![A-Za-z@])")
_OPTION = re.compile(r"[ \t]*\[((?:[^\[\]]|\[[^\[\]]{0,200}\]){0,1000})\]")
_LANGUAGE = re.compile(r"language[ \t]*=[ \t]*\{?(?:\[[^\]]{0,40}\])?[ \t]*([A-Za-z+#-]{1,30})", re.IGNORECASE)


def set_aside(text: str, keep: Callable[[str], str]) -> str:
    r"""Returns the text without comments (`%`, the environment `comment`, \iffalse) and with stand-ins for verbatim
    pieces: listings, \verb and URLs. Their content must not be read as commands. `keep` stores such a piece and returns
    its stand-in."""
    names = {*LISTINGS, *(n for m in _NEW_LISTING.findall(text) for n in (m[0], m[1] or (m[2] and f"{m[2]}code")) if n)}
    short = _SHORT_VERB.findall(text)[:4]                # marks that let a source write |…| for \verb|…|
    token = re.compile(
        (rf"([{''.join(map(re.escape, short))}])(?!\s)|" if short else r"(\Z(?!\Z))|") +
        r"\\begin[ \t]*\{(" + "|".join(sorted(names)) + r"|comment|filecontents)(\*?)\}"
        r"|\\(?:(verb\*?|Verb|lstinline|mintinline)|(url|path|nolinkurl|href)|(iffalse|ExplSyntaxOn))(?![A-Za-z])"
        r"|\\.|%[^\n]*(?:\n[ \t]*(?!\n))?", re.DOTALL)
    parts: list[str] = []
    missing_ends: set[str] = set()                      # ends that do not occur in the rest of the text
    at = 0
    while (m := token.search(text, at)) is not None:
        parts.append(text[at:m.start()])
        at, replacement = m.end(), m[0]
        mark, name, star, verb, url, false = m.groups()
        if name:
            end = f"\\end{{{name}{star}}}"
            stop = text.find(end, at) if end not in missing_ends else -1
            if stop < 0:
                missing_ends.add(end)
            else:
                replacement = "" if name in ("comment", "filecontents") else _listing(name, text[at:stop], keep)
                at = stop + len(end)
        elif verb or mark:
            replacement, at = _verb(verb or "", text, at - bool(mark), keep) or (replacement, at)
        elif url:
            replacement, at = _url(url, text, at, keep) or (replacement, at)
        elif false == "ExplSyntaxOn":                   # code that programs LaTeX3
            stop = text.find("\\ExplSyntaxOff", at)
            replacement, at = "", len(text) if stop < 0 else stop + 14
        elif false and "fi" not in missing_ends:
            stop = _end_of_false(text, at)
            if stop < 0:
                missing_ends.add("fi")
            else:
                replacement, at = "", stop
        elif replacement.startswith("%"):
            replacement = ""
        parts.append(replacement)
    return "".join((*parts, text[at:]))


def _listing(name: str, body: str, keep: Callable[[str], str]) -> str:
    option = _OPTION.match(body)
    head = option[1] if option else ""
    body = body[option.end():] if option else body
    language = match[1].lower() if (match := _LANGUAGE.search(head)) else ""
    if name == "minted" and (m := re.match(r"[ \t]*\{([A-Za-z0-9+#-]{1,30})\}", body)):
        language, body = m[1].lower(), body[m.end():]
    return "\n\n" + keep(f"```{language}\n" + body.strip("\n").rstrip() + "\n```") + "\n\n"


def _verb(word: str, text: str, at: int, keep: Callable[[str], str]) -> tuple[str, int] | None:
    """Returns (stand-in for a piece of verbatim text, such as \\verb|…|; position after the piece); None if the piece
    is not well formed. `word` is the command, `at` the position after it."""
    if word == "mintinline" and (m := re.compile(r"\{[A-Za-z0-9+#-]{1,30}\}").match(text, at)):
        at = m.end()
    if word in ("lstinline", "Verb", "mintinline") and (m := _OPTION.match(text, at)):
        at = m.end()
    mark = text[at:at + 1]
    if not mark or mark.isalnum() or mark.isspace():
        return None
    stop = text.find("}" if mark == "{" else mark, at + 1, at + _VERB)
    if stop < 0 or "\n" in text[at:stop]:
        return None
    return keep(text[at + 1:stop]), stop + 1


def _url(word: str, text: str, at: int, keep: Callable[[str], str]) -> tuple[str, int] | None:
    m = re.compile(rf"[ \t]*\{{([^{{}}\n]{{0,{_URL}}})\}}").match(text, at)
    if m is None:
        return None
    # of \href{address}{text}, only the text is kept
    return ("" if word == "href" else keep(re.sub(r"\\([%#&_~{}$])", r"\1", m[1]).strip())), m.end()


def _end_of_false(text: str, at: int) -> int:
    r"""Returns the position after the \fi or \else that ends an \iffalse; -1 if nothing ends it. Blanks after the \fi
    or \else, with at most one line break, are skipped, and so are conditionals inside. `at` is the position after
    \iffalse."""
    depth = 1
    while (m := _CONDITIONAL.search(text, at)) is not None:
        at = m.end()
        depth += (not m[1]) - (m[1] == "fi")
        if depth == 0 or (depth == 1 and m[1] == "else"):
            return _behind_blanks(text, at)
    return -1


# -- macros ------------------------------------------------------------------------------------------------------------
def braces(text: str) -> dict[int, int]:
    """Returns {position of an opening brace: position of the matching closing brace} for a text. Escaped and unmatched
    braces are left out."""
    result: dict[int, int] = {}
    open_: list[int] = []
    for m in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if m[0] == "{":
            open_.append(m.start())
        elif m[0] == "}" and open_:
            result[open_.pop()] = m.start()
    return result


class _Macro(NamedTuple):
    arguments: int
    default: str | None           # default of the first argument, if it is optional
    body: str
    end: str = ""                 # replacement of an environment's \end


_NAME = r"(?:\{[ \t]*\\([A-Za-z@]{1,60}|[^A-Za-z\s])[ \t]*\}|\\([A-Za-z@]{1,60}|[^A-Za-z\s]))"
_COMMAND = re.compile(rf"\*?\s{{0,9}}{_NAME}\s{{0,9}}(?:\[[ \t]*([0-9])[ \t]*\])?\s{{0,9}}(?:\[([^\[\]]{{0,400}})\])?"
                      r"\s{0,9}(?=\{|\\)")
_XPARSE = re.compile(rf"\s{{0,9}}{_NAME}\s{{0,9}}\{{([^{{}}]{{0,40}})\}}\s{{0,9}}(?=\{{)")
_DEF = re.compile(r"[ \t]*\\([A-Za-z@]{1,60}|[^A-Za-z\s])([^{}\n\\]{0,40})(?=\{)")
_LET = re.compile(r"[ \t]*\\([A-Za-z@]{1,60})[ \t]*=?[ \t]*(\\(?:[A-Za-z@]{1,60}|[^A-Za-z\s])|[^\s\\{}])")
_OPERATOR = re.compile(rf"(\*?)[ \t]*{_NAME}\s{{0,9}}(?=\{{)")
_ENVIRONMENT = re.compile(r"\*?[ \t]*\{([A-Za-z]{1,40}\*?)\}\s{0,9}(?:\[[ \t]*([0-9])[ \t]*\])?"
                          r"\s{0,9}(?:\[([^\[\]]{0,400})\])?\s{0,9}(?=\{)")
_DEFINES = {**dict.fromkeys(("newcommand", "renewcommand", "providecommand", "DeclareRobustCommand", "newrobustcmd"),
                            "command"),
            **dict.fromkeys(("DeclareDocumentCommand", "NewDocumentCommand", "RenewDocumentCommand"), "xparse"),
            **dict.fromkeys(("def", "gdef", "edef", "xdef", "define", "redefine"), "def"), "let": "let",
            "DeclareMathOperator": "operator", "DeclarePairedDelimiter": "delimiter",
            **dict.fromkeys(("newenvironment", "renewenvironment"), "environment")}
#: bodies that program TeX; macros with such a body cannot be expanded by replacing text
_PROGRAM = re.compile(r"\\(?:@|csname|expandafter|futurelet|if(?!f(?![A-Za-z])|thenelse)|(?:g|e|x)?def(?![A-Za-z])|"
                      r"(?:let|catcode|everypar|write|output|global|noexpand|the|number|loop|halign|vtop|vbox|vcenter|"
                      r"setbox|advance|begingroup|endgroup|bgroup|egroup|afterassignment|aftergroup|list|trivlist|"
                      r"futurenonspacelet|newcommand|renewcommand|newif|read|openout)(?![A-Za-z]))|##")
#: bodies that only draw a sign; if the sign has a name in SIGNS, that name is used
_DRAWS = re.compile(r"\\(?:kern|lower|raise|hbox|mathellipsis|mkern|rlap|llap|ooalign)(?![A-Za-z])")
_CONTROL = re.compile(r"\\(?:([A-Za-z@]+)|(.))", re.DOTALL)
_IN_BRACES = re.compile(r"[ \t]*\{([A-Za-z]{1,40}\*?)\}")
_ARGUMENT = re.compile("(?:\ue000[0-9]{1,9}\ue001|"
                       r"\\(?:[A-Za-z@]+|.)|([^\s\\{}&$%#]))", re.DOTALL)
_BLANKS = re.compile(r"[ \t]{0,99}(?:\n[ \t]{0,99})?")
_WORD_END = re.compile(r"\\[A-Za-z@]+$")


class Expansion:
    """Expands the macros that a LaTeX source defines. The method `run` returns the source without the definitions, with
    each use of a macro replaced with the macro's body."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.macros: dict[str, _Macro] = {}
        self.environments: dict[str, _Macro] = {}
        self.work = _WORK + _TIMES * len(text)

    def run(self) -> str:
        return self._expand(self.text, (), 0)

    def _expand(self, text: str, active: tuple[str, ...], depth: int) -> str:
        """Returns `text` with its macros expanded. `text` is part of the expansion of the macros in `active`, which are
        therefore not expanded again. `depth` is the nesting of expansions."""
        if depth and ((not self.macros and not self.environments) or "\\" not in text):
            return text
        closing = braces(text)
        self.work -= len(text) if depth else 0
        out: list[str] = []
        at = 0
        while (m := _CONTROL.search(text, at)) is not None:
            word, end = m[1] or m[2], m.end()
            stop = -1
            if m[1] and word in _DEFINES and not depth:
                if (stop := self._define(_DEFINES[word], text, end, closing)) >= 0:
                    out.append(text[at:m.start()])
            elif word in ("begin", "end"):
                if self.environments and (e := _IN_BRACES.match(text, end)):
                    macro = self.environments.get(e[1])
                    if macro is not None and e[1] not in active:
                        if word == "end":
                            macro = _Macro(0, None, macro.end)
                        stop = self._use(macro, e[1], text, at, m.start(), e.end(), closing, active, depth, out)
            elif word in self.macros and word not in active:
                stop = self._use(self.macros[word], word, text, at, m.start(), end, closing, active, depth, out)
            if stop < 0:
                out.append(text[at:end])
                stop = end
            at = stop
        out.append(text[at:])
        return "".join(out)

    # -- uses --------------------------------------------------------------------------------------------------------
    def _use(self, macro: _Macro, name: str, text: str, at: int, begin: int, end: int, closing: dict[int, int],
             active: tuple[str, ...], depth: int, out: list[str]) -> int:
        """Expand one use of a macro in `text`. The use begins at `begin`, and the macro's name ends at `end`. `out`
        already holds the text up to `at`. Appends to `out` the text from `at` to the use, and the expansion.

        Returns the position after the use; -1, with `out` unchanged, if the use cannot be expanded.
        """
        if depth >= _DEPTH or self.work <= 0:
            return -1
        if (parsed := self._arguments(macro, text, end, closing)) is None:
            return -1
        arguments, stop = parsed
        if len(macro.body) + sum(len(argument) * macro.body.count(f"#{i + 1}")
                                 for i, argument in enumerate(arguments)) > self.work:
            return -1
        arguments = [self._expand(argument, active, depth + 1) for argument in arguments]
        body = _filled(macro.body, arguments)
        self.work -= len(body) + _USE
        body = self._expand(body, (*active, name), depth + 1)
        out.append(text[at:begin])
        if body[:1].isalpha() and _WORD_END.search("".join(out[-2:])[-70:]):
            out.append(" ")
        if not macro.arguments and text.startswith("{}", stop):
            stop += 2
        # A command must not merge with the letters after it: \half x → \frac12 x, \R^n → \mathbb R^n.
        out.append(body + " " if text[stop:stop + 1].isalpha() and _WORD_END.search(body) else body)
        return stop

    def _arguments(self, macro: _Macro, text: str, at: int,
                   closing: dict[int, int]) -> tuple[list[str], int] | None:
        """Returns (arguments of one use of a macro; position after the last argument); None if some are missing. `at`
        is the position after the macro's name."""
        arguments: list[str] = []
        if macro.default is not None:
            option = _OPTION.match(text, at)
            arguments.append(option[1] if option else macro.default)
            at = option.end() if option else at
        while len(arguments) < macro.arguments:
            if (argument := self._argument(text, at, closing)) is None:
                return None
            arguments.append(argument[0])
            at = argument[1]
        return arguments, at

    def _argument(self, text: str, at: int, closing: dict[int, int]) -> tuple[str, int] | None:
        """Returns (next argument from position `at` on; position after the argument); None if there is no argument. An
        argument is a group in braces, a command or a character."""
        at = _behind_blanks(text, at)
        if text.startswith("{", at):
            if at not in closing:
                return None
            self.work -= closing[at] - at                   # counted even if the macro cannot be expanded
            return text[at + 1:closing[at]], closing[at] + 1
        m = _ARGUMENT.match(text, at)
        return (m[0], m.end()) if m else None

    # -- definitions -------------------------------------------------------------------------------------------------
    def _define(self, kind: str, text: str, at: int, closing: dict[int, int]) -> int:
        """Read and store the definition of a macro or environment. Returns the position after the definition, or -1 if
        the definition cannot be read. `kind` is a value of `_DEFINES`; `at` is the position after the defining
        command."""
        if self.work <= 0:
            return -1
        if kind == "let":
            m = _LET.match(text, at)
            if m is None:
                return -1
            copied = self.macros.get(m[2][1:])
            self._add(m[1], copied or _Macro(0, None, m[2]))
            return m.end()
        if kind == "environment":
            return self._define_environment(text, at, closing)
        if kind == "delimiter":
            m = re.compile(rf"[ \t]*{_NAME}\s{{0,9}}(?=\{{)").match(text, at)
        else:
            m = {"command": _COMMAND, "xparse": _XPARSE, "def": _DEF, "operator": _OPERATOR}[kind].match(text, at)
        if m is None or (body := self._argument(text, m.end(), closing)) is None:
            return -1
        inner, stop = body
        if kind == "operator":
            self._add(m[2] or m[3], _Macro(0, None, f"\\operatorname{m[1]}{{{inner}}}"))
        elif kind == "delimiter":
            if (right := self._argument(text, stop, closing)) is None:
                return -1
            self._add(m[1] or m[2], _Macro(1, None, f"{inner} #1 {right[0]}"))
            stop = right[1]
        elif kind == "def":
            parameters = m[2].replace(" ", "")
            n = len(parameters) // 2
            if parameters == "".join(f"#{i + 1}" for i in range(n)):
                self._add(m[1], _Macro(n, None, inner))
            else:                                           # arguments delimited by other signs
                self.macros.pop(m[1], None)
        elif kind == "xparse":
            spec = m[3].replace(" ", "")
            if spec == "m" * len(spec):
                self._add(m[1] or m[2], _Macro(len(spec), None, inner))
        else:
            self._add(m[1] or m[2], _Macro(int(m[3] or 0), m[4], inner))
        return stop

    def _define_environment(self, text: str, at: int, closing: dict[int, int]) -> int:
        if (m := _ENVIRONMENT.match(text, at)) is None or (begin := self._argument(text, m.end(), closing)) is None \
                or (end := self._argument(text, begin[1], closing)) is None:
            return -1
        if m[1] not in KNOWN and len(self.environments) < MACROS and not _PROGRAM.search(begin[0] + end[0]) \
                and len(begin[0]) + len(end[0]) <= _BODY:
            self.environments[m[1]] = _Macro(int(m[2] or 0), m[3], begin[0], end[0])
        return end[1]

    def _add(self, name: str, macro: _Macro) -> None:
        """Store a macro under `name`, in place of an older one.

        - A macro of a name in KNOWN is ignored, because the conversion knows this command. So is a macro of a name in
          SIGNS whose body composes the character from others.
        - A macro whose body programs TeX (conditionals, for instance), or that exceeds a limit, is not stored. The
          older macro of its name is removed.
        """
        body = macro.body
        if name in KNOWN or (name in SIGNS and _DRAWS.search(body)):
            return
        if len(body) > _BODY or _PROGRAM.search(body) or len(self.macros) >= MACROS or macro.body == f"\\{name}":
            self.macros.pop(name, None)
            return
        body = body.removesuffix("\\xspace").rstrip() if body.endswith("\\xspace") else body
        self.macros[name] = macro._replace(body=body.strip() if not macro.arguments else body)


def _behind_blanks(text: str, at: int) -> int:
    """Returns the position after the blanks at `at`, which may include one line break."""
    match = _BLANKS.match(text, at)
    return at if match is None else match.end()


def _filled(body: str, arguments: list[str]) -> str:
    """Returns the body of a macro with arguments in place of #1 to #9. A space is inserted where a command would merge
    with a letter: \\mathbf#1 with the argument x becomes \\mathbf x."""
    if "#" not in body:
        return body
    out = ""
    for i, part in enumerate(re.split(r"#([1-9])", body)):
        part = part if i % 2 == 0 else arguments[int(part) - 1] if int(part) <= len(arguments) else ""
        out += f" {part}" if part[:1].isalpha() and _WORD_END.search(out[-70:]) else part
    return out

