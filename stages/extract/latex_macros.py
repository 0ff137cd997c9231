"""Comments and macros of LaTeX: what TeX does with a source before it sees text. Everything is bounded by counts."""

from __future__ import annotations

import re

from stages.extract.latex_words import LISTINGS, SIGNS

#: macros taken, rounds of expansion inside macros, longest body, and what expansion may add to a text, characters
MACROS, _ROUNDS, _BODY, _GROWTH = 500, 4, 2000, 1 << 20

_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)%[^\n]*(?:\n[ \t]*(?!\n))?")
_VERBATIM = re.compile(r"\\begin\{(" + "|".join(LISTINGS) + r")\}|\\end\{(" + "|".join(LISTINGS) + r")\}")
_DEFINITION = re.compile(
    r"\\(?:(?:re)?new|provide)command\*?[ \t]*(?:\{[ \t]*\\([A-Za-z]{1,60})[ \t]*\}|\\([A-Za-z]{1,60}))[ \t]{0,9}"
    r"(\[[^\]\n]{0,20}\])?[ \t]{0,9}(?:\[[^\]\n]{0,200}\])?\s{0,9}(?=\{)"
    r"|\\[egx]?def[ \t]*\\([A-Za-z]{1,60})([^{}\n]{0,40})(?=\{)"
    r"|\\(DeclareMathOperator)\*?[ \t]*\{[ \t]*\\([A-Za-z]{1,60})[ \t]*\}[ \t]*(?=\{)")
_NAME = re.compile(r"\\([A-Za-z]+)(\{\})?")


def without_comments(text: str) -> str:
    """Without what follows a % on its line, and that line's end, as TeX reads it; listings stay."""
    parts, at, inside = [], 0, ""
    for m in _VERBATIM.finditer(text):
        if not inside and m[1]:
            # a commented \begin{verbatim} begins nothing
            if re.search(r"(?<!\\)%", _line_before(text, m.start())):
                continue
            parts.append(_COMMENT.sub(r"\1", text[at:m.start()]))
            at, inside = m.start(), m[1]
        elif inside and m[2] == inside:
            parts.append(text[at:m.end()])
            at, inside = m.end(), ""
    parts.append(_COMMENT.sub(r"\1", text[at:]))
    return "".join(parts)


def _line_before(text: str, at: int) -> str:
    """What stands on the line before a place, as far as 1,000 characters."""
    first = max(0, at - 1000)
    return text[max(first, text.rfind("\n", first, at) + 1):at]


# -- macros ------------------------------------------------------------------------------------------------------------
def braces(text: str) -> dict[int, int]:
    """Place of the closing brace of each opening one that has one; escaped braces are none."""
    found: dict[int, int] = {}
    open_: list[int] = []
    for m in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if m[0] == "{":
            open_.append(m.start())
        elif m[0] == "}" and open_:
            found[open_.pop()] = m.start()
    return found


def definitions(text: str) -> tuple[str, dict[str, str]]:
    """The text without definitions of macros, and {name: body} of those without arguments."""
    closing = braces(text)
    parts, macros, at = [], {}, 0
    for m in _DEFINITION.finditer(text):
        if m.start() < at or m.end() not in closing:            # inside another one, or never closed
            continue
        end = closing[m.end()]
        body = text[m.end() + 1:end]
        name = m[1] or m[2] or m[4] or m[7]
        arguments = (m[3] or "").strip("[] ") not in ("", "0") or (m[5] or "").strip() or "#" in body
        if not arguments and len(body) <= _BODY and len(macros) < MACROS:
            macros[name] = f"\\operatorname{{{body}}}" if m[6] else body.strip().removesuffix("\\xspace").strip()
        parts.append(text[at:m.start()])
        at = end + 1
    return "".join((*parts, text[at:])), macros


def expanded(text: str, macros: dict[str, str]) -> str:
    """The text with macros replaced, as far as rounds and growth allow; what names itself stays."""
    macros = {k: v for k, v in macros.items() if k not in SIGNS and k not in ("begin", "end", "item")}
    for _ in range(_ROUNDS):
        bodies = {name: _within(name, body, macros) for name, body in macros.items()}
        if bodies == macros:
            break
        macros = bodies
    budget = _GROWTH

    def replace(m: re.Match[str]) -> str:
        nonlocal budget
        body = macros.get(m[1])
        if body is None or len(body) > budget:
            return m[0]
        budget -= len(body)
        # \\half x → \\frac12 x, and \\R^n → \\mathbb R^n: a word must not grow into what follows
        after = text[m.end():m.end() + 1]
        return body + " " if after.isalpha() and re.search(r"\\[A-Za-z]+$", body) else body

    return _NAME.sub(replace, text) if macros else text


def _within(name: str, body: str, macros: dict[str, str]) -> str:
    """The body of a macro with the other macros in it replaced once, as far as it may grow."""
    room = _BODY - len(body)

    def replace(m: re.Match[str]) -> str:
        nonlocal room
        new = macros.get(m[1]) if m[1] != name else None
        if new is None or len(new) > room:
            return m[0]
        room -= len(new)
        return new

    return _NAME.sub(replace, body)
