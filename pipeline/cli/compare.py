"""Compares the texts that two extraction engines take from one page (`tokenmill extract --engine A,B`). The texts are
compared paragraph by paragraph, and words that only one of the engines took are marked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from pipeline.base.visible import visible
from pipeline.base.word_diff import DiffRow, only, pieces, rows, shortened, words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: least width of a terminal, in columns, for two texts side by side
WIDE = 80


def compare(place: str, names: Sequence[str], texts: tuple[str, str], marks: bool = False) -> None:
    """Print the differences between the texts that two extraction engines found in one page. A terminal with colours
    and at least WIDE columns shows the texts side by side; otherwise they are printed in one column. If the texts are
    equal, only a line on stderr says so. `place` names the page, and `names` are the names of the two engines. `marks`
    says that the texts are Markdown. Control characters are made visible."""
    place, left, right = visible(place).replace("\n", " "), visible(texts[0]), visible(texts[1])
    pairs = rows(left, right, marks=marks)
    if all(row.same for row in pairs):
        typer.echo(f"{place}: {names[0]} and {names[1]} find the same text, {words(left):,} words", err=True)
        return
    heads = [f"{name}  {words(text):,} words, {n:,} only here"
             for name, text, n in zip(names, (left, right), only(pairs))]
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        if console.width >= WIDE and not (console.no_color or console.is_dumb_terminal):
            side_by_side(place, heads, pairs, console)
            return
    typer.echo(f"--- {place}  {heads[0]}\n+++ {place}  {heads[1]}")
    for line in stacked(pairs):
        typer.echo(line)


def _left_out(n: int) -> str:
    return f"… {n:,} paragraphs the same"


def stacked(pairs: list[DiffRow]) -> Iterator[str]:
    """Yield lines that show how two texts differ, in one column, for a terminal or a file. Of long runs of equal
    paragraphs, only the number is given. The first character of a line says which text contains the line: `-` only the
    first, `+` only the second, a blank both. `~` marks a paragraph that differs between the texts, with [-words-] of
    the first and {+words+} of the second."""
    for row in shortened(pairs):
        if isinstance(row, int):
            yield f"  {_left_out(row)}"
            continue
        mark, text = (" ", row.left) if row.same else ("-", row.left) if not row.right else \
            ("+", row.right) if not row.left else ("~", _merged(row))
        yield from (f"{mark} {line}" for line in text.split("\n"))


def _merged(row: DiffRow) -> str:
    """Return a paragraph that differs between two texts as one text that contains both versions, in the format of `git
    diff --word-diff`."""
    out: list[str] = []
    ends = [0, 0]
    for what, *spans in pieces(row):
        spaced = [any(map(str.isspace, row.sides[side][ends[side]:begin]))
                  for side, (begin, end) in enumerate(spans) if end]
        for side, (begin, end) in enumerate(spans):
            if end > begin and (side or what != "equal"):
                text = " ".join(row.sides[side][begin:end].split())
                out.append(" " * bool(out and any(spaced)))
                out.append(text if what == "equal" else f"{{+{text}+}}" if side else f"[-{text}-]")
            ends[side] = end or ends[side]
    return "".join(out)


def side_by_side(place: str, heads: Sequence[str], pairs: list[DiffRow], console: Console) -> None:
    """Print two texts next to each other, paragraph by paragraph. `heads` are the titles of the two columns. Text that
    both have is dim, and text that only one of the two has is coloured."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(place), expand=True, show_lines=False)
    for head in heads:
        table.add_column(Text(head), ratio=1, overflow="fold")
    for row in shortened(pairs):
        if isinstance(row, int):
            table.add_row(*[Text(_left_out(row), "italic dim")] * 2)
        elif row.same:
            table.add_row(Text(row.left, "dim"), Text(row.right, "dim"))
        else:
            table.add_row(*_marked(row))
    console.print(table)


def _marked(row: DiffRow) -> tuple[Text, Text]:
    from rich.text import Text

    sides = Text(row.left), Text(row.right)
    if not (row.left and row.right):
        return Text(row.left, "bold red"), Text(row.right, "bold green")
    for what, *spans in pieces(row):
        for side, span, style in zip(sides, spans, ("bold red", "bold green")):
            if what != "equal":
                side.stylize(style, *span)
    return sides
