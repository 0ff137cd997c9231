"""Makes the page of `tokenmill dedup explain --html`. It shows a removed document and the kept one, paragraph beside
paragraph, and marks the words in which they differ. For a document out of which passages were cut, it shows these
passages. The page works offline and holds no script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.base.humanize import plural
from pipeline.base.svg import Element, tag
from pipeline.base.visible import visible
from pipeline.base.word_diff import DiffRow, only, pieces, rows, shortened

STYLE = ("body{font:15px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#222;"
         "background:#fff}h1{font-size:1.3rem}table{border-collapse:collapse;width:100%;table-layout:fixed}"
         "td,th{padding:4px 10px;text-align:left;vertical-align:top;border-bottom:1px solid #ddd;"
         "white-space:pre-wrap;overflow-wrap:anywhere}del{background:#ffd7d5;text-decoration:none}"
         "ins{background:#ccf0d3;text-decoration:none}.same{color:#666}"
         "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#444}"
         "del{background:#6e2b2b}ins{background:#1f5a2e}.same{color:#999}}")


def render(heads: Sequence[str], verdict: str, removed: str, kept: str) -> str:
    """Return the page. `heads` name the removed and the kept document, and `verdict` says how similar they are. Texts
    must be free of personal data."""
    pairs = rows(removed, kept)
    titles = tag("tr", *(tag("th", f"{visible(text)}\n{n:,} words only here", scope="col")
                         for text, n in zip(heads, only(pairs), strict=True)))
    table = tag("table", tag("thead", titles), tag("tbody", *map(_row, shortened(pairs))))
    return _page("A removed document and the kept one", tag("p", visible(verdict)), table)


def render_cuts(head: str, fate: str, steps: Sequence[dict[str, Any]]) -> str:
    """Return the page of a document out of which passages were cut. `head` names it, `fate` says whether it was kept,
    and `steps` are those of `pipeline.report.cuts.explain_cuts`."""
    content = [tag("p", visible(f"{head}\n{fate}"))]
    titles = tag("tr", *(tag("th", text, scope="col") for text in ("passage", "bytes", "beginning", "kept in")))
    for step in steps:
        lines = [tag("tr", *(tag("td", visible(text)) for text in (
            f"{passage['reason']}, from byte {passage['start']:,} on", f"{passage['bytes']:,}",
            passage["beginning"] or "not in the store any more",
            " ".join(str(value) for value in (passage["kept"] or {}).values() if value))))
            for passage in step["listed"]]
        more = step["passages"] - len(lines)
        cut = f"{step['step']} cut {plural(step['passages'], 'passage')}, {step['bytes']:,} bytes"
        content += [tag("h2", visible(cut)),
                    tag("table", tag("thead", titles), tag("tbody", *lines)),
                    *([tag("p", f"{plural(more, 'more passage')} not noted one by one.")] if more else [])]
    return _page("Passages cut out of a document", *content)


def _page(title: str, *content: Element) -> str:
    policy = Element('<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
                     'style-src \'unsafe-inline\'">')
    head = tag("head", Element('<meta charset="utf-8">'), policy,
               Element('<meta name="viewport" content="width=device-width, initial-scale=1">'),
               tag("title", title), tag("style", Element(STYLE)))
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('h1', title), *content), lang='en')}\n"


def _row(row: DiffRow | int) -> Element:
    if isinstance(row, int):
        return tag("tr", tag("td", f"… {row:,} paragraphs the same", colspan=2, class_="same"))
    if row.same:
        return tag("tr", *(tag("td", text, class_="same") for text in row.sides))
    return tag("tr", *(tag("td", *_marked(row, side)) for side in (0, 1)))


def _marked(row: DiffRow, side: int) -> list[str]:
    """Return a paragraph of one of the two texts as HTML. Words that the other text lacks are marked. `row` holds the
    paragraphs of both texts, and `side` is 0 for the left text and 1 for the right one."""
    name, text, end = ("del", "ins")[side], row.sides[side], 0
    if not (row.left and row.right):
        return [tag(name, text)] if text else []
    parts: list[str] = []
    for what, *spans in pieces(row):
        begin, stop = spans[side]
        if what != "equal" and stop > begin:
            parts += [text[end:begin], tag(name, text[begin:stop])]
            end = stop
    return [*parts, text[end:]]
