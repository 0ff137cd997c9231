"""Writes Markdown in which a value is always plain text: a value cannot add a link, heading, HTML, code or table cell.

Names, reasons, paths and error messages may come from documents, which are not trusted. A renderer must show their
characters unchanged.
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
    """Return `value` as one line of Markdown that a renderer shows with unchanged characters. Control and bidirectional
    characters are shown as escapes."""
    text = _ODD.sub(r"\\\1", " ".join(visible(str(value)).split()))
    text = _WWW.sub(lambda m: m[0][:-1] + "\\.", text)
    return _START.sub(lambda m: f"{m[0][:-1]}\\{m[0][-1]}", text)


def code(value: Any) -> str:
    """Return `value` as inline code in Markdown. It must not be used in a table, because a `|` in it would end the
    cell."""
    text = " ".join(visible(str(value)).split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def block(text: str, language: str = "") -> list[str]:
    """Return the lines of a Markdown code block. Its fence is longer than every run of backticks in the text."""
    text = visible(text).rstrip("\n")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", *text.split("\n"), fence]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 1) -> list[str]:
    """Return the lines of a Markdown table; [] if it has no rows. The cells must already be Markdown. The columns from
    index `right` on are aligned right, because they hold numbers."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    rule = [":--" if i < right else "--:" for i in range(len(head))]
    return [f"| {' | '.join(head)} |", f"| {' | '.join(rule)} |", *lines, ""] if lines else []
