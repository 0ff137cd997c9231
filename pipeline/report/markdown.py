"""Writes Markdown in which a value can only be text: no link, heading, HTML, code or table cell of its own.

Names, reasons, paths and error messages may come from documents. A renderer must show them letter by letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.base.visible import visible

#: characters that mean something to CommonMark, GitHub's tables and links, mentions and mathematics
_ODD = re.compile(r"([\\`*_{}\[\]()<>#|~&$@!:^])")
#: what means something only at the beginning of a line, and `www.`, which GitHub makes a link
_START = re.compile(r"^(?:[-+=]|\d+[.)](?=\s|$))")
_WWW = re.compile(r"(?i)\bwww\.")


def plain(value: Any) -> str:
    """`value` as one line of Markdown that renders as the same letters. Control and bidirectional characters are
    shown as escapes."""
    text = _ODD.sub(r"\\\1", " ".join(visible(str(value)).split()))
    text = _WWW.sub(lambda m: m[0][:-1] + "\\.", text)
    return _START.sub(lambda m: f"{m[0][:-1]}\\{m[0][-1]}", text)


def code(value: Any) -> str:
    """`value` as code in a line. It must not stand in a table: a `|` would end the cell."""
    text = " ".join(visible(str(value)).split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def block(text: str, language: str = "") -> list[str]:
    """The lines of a block of code. Its fence is longer than every run of backticks in the text."""
    text = visible(text).rstrip("\n")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", *text.split("\n"), fence]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 1) -> list[str]:
    """The lines of a table whose cells are Markdown already. The columns from number `right` on hold numbers. No line
    where there are no rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    rule = [":--" if i < right else "--:" for i in range(len(head))]
    return [f"| {' | '.join(head)} |", f"| {' | '.join(rule)} |", *lines, ""] if lines else []
