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
#: most lines of each part of the summary, which has about 30 in all: notes, keys of the recipe, reasons of one dataset,
#: datasets with their reasons, and figures
NOTES, KEYS, REASONS, CHANGED, TOTALS = 2, 4, 3, 8, 6
MARKS = {"added": "+", "removed": "-", "changed": "~"}


def compare(before: str, after: str, root: str, examples: int, html: Path | None, json_lines: bool,
            full: bool = False) -> None:
    """Compare two runs, each given by its name or folder, and print the differences: a summary by default, the whole
    comparison with `full`, JSON with `json_lines`. With `html`, also write the comparison as a page to this file."""
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
    for line in lines(document) if full else summary(document):
        typer.echo(visible(line))
    if html is not None:
        typer.echo(visible(f"\npage: {html}"))


def summary(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a summary of how two runs differ, about 30 of them. They show changed keys of the recipe,
    numbers of documents whose outcome changed, and totals. `document` is the comparison of the runs as JSON."""
    from pipeline.report.compare_html import by_difference, datasets, fate, overview, without_retokenised

    yield from _head(document, NOTES)
    if document["equal"]:
        return
    yield from _recipe(document["recipe"], KEYS)
    yield "\ndocuments that end differently"
    shown: list[str] = []
    same = []
    for name, section in datasets(document):
        changes = _changes(section)
        if not changes:
            same.append(name)
            continue
        shown.append(f"  {name}: {', '.join(changes)}")
        groups = section["groups"]
        shown += [f"    {group['docs']:,} {fate(group['before'])} → {fate(group['after'])}"
                  for group in groups[:REASONS]]
        if len(groups) > REASONS:
            shown.append(f"    {sum(group['docs'] for group in groups[REASONS:]):,} in other ways")
    yield from shown[:CHANGED]
    if len(shown) > CHANGED:
        yield f"    and {len(shown) - CHANGED:,} more lines"
    if same:
        yield f"  none of {', '.join(same)}"
    different, _ = by_difference([row for row in overview(document) if " · " not in row["name"]])
    different, _ = without_retokenised(document, different)
    yield from _table("totals", different, TOTALS, more=False)
    yield "\n--full shows examples and all figures that differ; --html FILE makes a page of them"


def _head(document: dict[str, Any], most: int) -> Iterator[str]:
    for side in ("before", "after"):
        run = document[side]
        yield f"{side:6} {run['run']}  in {run['store']}, recipe {run['recipe'][:16]}"
    yield from (f"note: {note}" for note in document["notes"][:most])
    if len(document["notes"]) > most:
        yield f"and {plural(len(document['notes']) - most, 'more note')}: --full has them"
    if document["equal"]:
        yield "the two runs have the same results; only measured times differ"


def lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield all lines about how two runs differ, as `tokenmill report --compare --full` prints them. `document` is the
    comparison of the runs as JSON."""
    from pipeline.report.compare_html import by_difference, datasets, overview, sections, without_retokenised

    yield from _head(document, len(document["notes"]))
    if document["equal"]:
        return
    yield from _recipe(document["recipe"], len(document["recipe"]))
    different, equal = by_difference(overview(document))
    different, retokenised = without_retokenised(document, different)
    yield from _table("documents and tokens", different, 4 * ROWS)
    if retokenised:
        yield from _table("tokens of as many documents, by another tokenizer", retokenised, 4 * ROWS)
    yield f"  {len(equal):,} are equal"
    for name, section in datasets(document):
        yield from _documents(name, section)
    for section in sections(document, ROWS, brief=True):
        yield from _table(section["title"].lower(), section["rows"], ROWS)
        more = f"{section['left_out']:,} more differ (--json, --html), " if section["left_out"] else ""
        yield f"  {more}{section['equal']:,} are equal"


def _recipe(rows: list[dict[str, Any]], most: int) -> Iterator[str]:
    from pipeline.report.compare_html import value

    yield f"\nrecipe: {plural(len(rows), 'key')} {'differs' if len(rows) == 1 else 'differ'}"
    for row in rows[:most]:
        sides = [value(row[side]) for side, without in (("before", "added"), ("after", "removed"))
                 if row["change"] != without]
        yield f"{MARKS[row['change']]} {row['key']}: {' → '.join(sides)}"
    if len(rows) > most:
        yield f"  and {len(rows) - most:,} more: --full has them"


def _table(title: str, rows: list[dict[str, Any]], most: int, more: bool = True) -> Iterator[str]:
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
    if more and len(rows) > len(shown):
        yield f"  and {len(rows) - len(shown):,} more that differ less: --json has them"


def _changes(section: dict[str, Any]) -> list[str]:
    """Return a text for each kind of change between two runs, such as '12 kept with another text'. The number is that
    of the documents of a dataset whose outcome changed in this way. `section` is the dataset's part of the
    comparison."""
    words = {"other_reason": "dropped for another reason", "changed_text": "kept with another text"}
    return [f"{n:,} {words.get(kind, kind.replace('_', ' '))}" for kind, n in section["changes"].items() if n]


def _documents(name: str, section: dict[str, Any]) -> Iterator[str]:
    from pipeline.report.compare_html import decided, fate

    same = f"{plural(section['same'], 'document')} kept or dropped as before"
    yield f"\n{name}: {', '.join([same, *_changes(section)])}"
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
