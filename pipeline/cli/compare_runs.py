"""`tokenmill report --compare`: prints how two runs differ, or writes it as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from pipeline.base.files import replacing
from pipeline.base.humanize import plural
from pipeline.base.visible import json_text, visible
from pipeline.cli import options as opt
from pipeline.store.errors import cannot_write

#: most rows of a table, and characters of an excerpt, in the terminal
ROWS, EXCERPT = 12, 200
MARKS = {"added": "+", "removed": "-", "changed": "~"}


def compare(before: str, after: str, root: str, examples: int, html: Path | None, json_lines: bool) -> None:
    """Compare two runs, each given by its name or folder. Print the result as text or JSON; with `html`, also write it
    as a page to this file."""
    from pipeline.report.compare import FinishedRun, compare_runs
    from pipeline.report.compare_html import render

    (first, one), (second, two) = (opt.resolve_run(run, root) for run in (before, after))
    was = FinishedRun.open(first, one)
    document = compare_runs(was, FinishedRun.open(second, two, was.get if first.root == second.root else None),
                            examples)
    if html is not None:
        try:
            with replacing(html) as part:
                part.write_bytes(render(document).encode())
        except OSError as e:
            raise cannot_write(html, e) from e
    if json_lines:
        typer.echo(json_text(document))
        return
    for line in lines(document):
        typer.echo(visible(line))
    if html is not None:
        typer.echo(visible(f"\npage: {html}"))


def lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the comparison as text for people."""
    from pipeline.report.compare_html import by_difference, datasets, overview, sections

    for side in ("before", "after"):
        run = document[side]
        yield f"{side:6} {run['run']}  in {run['store']}, recipe {run['recipe'][:16]}"
    yield from (f"note: {note}" for note in document["notes"])
    if document["equal"]:
        yield "the two runs say the same: nothing differs but measured times"
        return
    yield from _recipe(document["recipe"])
    different, equal = by_difference(overview(document))
    yield from _table("documents and tokens", different, 4 * ROWS)
    yield f"  {len(equal):,} are equal"
    for name, section in datasets(document):
        yield from _documents(name, section)
    for section in sections(document, ROWS, brief=True):
        yield from _table(section["title"].lower(), section["rows"], ROWS)
        more = f"{section['left_out']:,} more differ (--json, --html), " if section["left_out"] else ""
        yield f"  {more}{section['equal']:,} are equal"


def _recipe(rows: list[dict[str, Any]]) -> Iterator[str]:
    from pipeline.report.compare_html import value

    yield f"\nrecipe: {plural(len(rows), 'key')} {'differs' if len(rows) == 1 else 'differ'}"
    for row in rows:
        sides = [value(row[side]) for side, without in (("before", "added"), ("after", "removed"))
                 if row["change"] != without]
        yield f"{MARKS[row['change']]} {row['key']}: {' → '.join(sides)}"


def _table(title: str, rows: list[dict[str, Any]], most: int) -> Iterator[str]:
    from pipeline.report.compare_html import change, cut, figure

    shown = cut(rows, most)
    cells = []
    for row in shown:
        name, what = row.get("name", " · ".join(row["path"][1:-1])), row.get("what", row["path"][-1])
        cells.append([f"{name}  {what.replace('_', ' ')}".strip(), figure(row, "before"), figure(row, "after"),
                      change(row)])
    widths = [max((len(row[i]) for row in cells), default=0) for i in range(4)]
    yield f"\n{title}"
    yield from (f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in cells)
    if len(rows) > len(shown):
        yield f"  and {len(rows) - len(shown):,} more that differ less: --json has them"


def _documents(name: str, section: dict[str, Any]) -> Iterator[str]:
    from pipeline.report.compare_html import decided, fate

    changes = {kind: n for kind, n in section["changes"].items() if n}
    yield f"\n{name}: {plural(section['same'], 'document')} the same" + "".join(
        f", {n:,} {kind.replace('_', ' ')}" for kind, n in changes.items())
    for group in section["groups"][:ROWS]:
        sources = ", ".join(f"{source} {n:,}" for source, n in group["sources"].items())
        yield f"  {group['docs']:,} {fate(group['before'])} → {fate(group['after'])}  ({sources})"
    if len(section["groups"]) > ROWS:
        yield f"  and {len(section['groups']) - ROWS:,} more kinds: --json has them"
    for kind, examples in section["examples"].items():
        for example in examples:
            sides = example["before"], example["after"]
            shown = next(side for side in reversed(sides) if side)
            why = "; ".join(filter(None, map(decided, sides)))
            yield (f"  ── {kind.replace('_', ' ')}  {example['id']}  {example['source']}  "
                   f"{shown['url'] or shown['file']}")
            yield f"     {fate(sides[0])} → {fate(sides[1])}" + (f" ({why})" if why else "")
            texts = [side["excerpt"] for side in sides if side] if kind == "changed_text" else [shown["excerpt"]]
            yield from (f"     {text[:EXCERPT]}" for text in texts if text)
