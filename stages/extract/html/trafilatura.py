"""The extraction engine `trafilatura`, which runs the library trafilatura. It parses each page only once, extracts no
metadata, and keeps no state between pages."""

from __future__ import annotations

from typing import Any

from lxml import etree

from stages.extract.html import private, readability, xpath_rules
from stages.extract.html.limits import TooMuchWork, stream_safe
from stages.extract.html.markdown import write
from stages.extract.html.metadata import unescape

#: libxml2 builds no deeper tree
DEEPEST = 255
#: pages with fewer tags cannot have expensive tables
_FEW = 5_000
#: Limits for the tables of a page, each of which corresponds to a second of CPU time. trafilatura pads all rows of a
#: table to the same width; CELLS limits the number of cells before padding plus the number after it. A table of 10,000
#: rows and 20 columns just stays within. REREAD limits the elements that trafilatura reads again for all
#: pairs of nested tables.
CELLS, REREAD = 400_000, 10_000_000
#: most tags times levels: trafilatura reads all content of every block, so 240 blocks around 60,000 links take minutes
LEVELS = 6_000_000
#: most columns that trafilatura lets one cell span
_SPAN = 100
#: most paragraphs nested in one paragraph; trafilatura joins their texts one by one
PARAGRAPHS = 8_000
#: most elements in one list item; trafilatura counts them again for each of them
IN_AN_ITEM = 10_000
#: Most characters copied in one page when elements are deleted, which joins the text after each to the text before it.
#: Copying so many takes half a second.
JOINED = 500_000_000


class _Deletion:
    """Replaces the function `trafilatura.xml.delete_element`. Deleting an element joins the text after it to the text
    before it, so deleting 100,000 buttons in a row would copy 10 GB. Raises TooMuchWork when more than `JOINED`
    characters have been copied in a page."""

    def __init__(self) -> None:
        self.remaining, self.delete = JOINED, private.xml.delete_element

    def __call__(self, element: Any, keep_tail: bool = True) -> None:
        if keep_tail and element.tail and (parent := element.getparent()) is not None:
            before = element.getprevious()
            self.remaining -= len((parent.text if before is None else before.tail) or "")
            if self.remaining < 0:
                raise TooMuchWork("this page is too tangled for trafilatura")
        self.delete(element, keep_tail)


deletion = _Deletion()


def many_paragraphs(tree: Any) -> bool:
    """Whether more than `PARAGRAPHS` paragraphs are nested in one paragraph, which does not occur in sensible pages."""
    inside: dict[Any, int] = {}
    for p in tree.iter("p"):
        outer = next(p.iterancestors("p"), None)
        if outer is not None:
            inside[outer] = inside.get(outer, 0) + 1
    return max(inside.values(), default=0) > PARAGRAPHS


def crowded_items(tree: Any) -> bool:
    """Whether a list item holds more than `IN_AN_ITEM` elements side by side."""
    return any(len(item) > IN_AN_ITEM for item in tree.iter("li", "dd", "dt"))


def tangled_tables(tree: Any) -> bool:
    """Whether the tables of a page would take trafilatura too long. trafilatura pads all rows of a table to the width
    of the widest row, so the number of cells after padding is limited. It also rereads nested tables for every table
    around them, so the depth of nesting is limited."""
    rows: dict[Any, int] = {}
    widths: dict[Any, int] = {}
    cells = 0
    for row in tree.iter("tr"):
        width = 0
        for cell in row:
            span = cell.get("colspan", "1") if isinstance(cell.tag, str) else "0"
            width += min(int(span), _SPAN) if span.isdecimal() and len(span) < 9 else 1
        cells += width
        table = row.getparent()
        rows[table] = rows.get(table, 0) + 1
        widths[table] = max(widths.get(table, 0), min(width, _SPAN))
    if cells + sum(n * widths[table] for table, n in rows.items()) > CELLS:
        return True
    nested = max((sum(1 for _ in table.iterancestors("table")) for table in tree.iter("table")), default=0)
    return nested > 1 and nested * nested // 2 * sum(1 for _ in tree.iter()) > REREAD


for _module in (private.baseline, private.core, private.external, private.htmlprocessing, private.main_extractor):
    if hasattr(_module, "delete_element"):
        _module.delete_element = deletion
private.external.ReadabilityDocument = readability.Bounded      # trafilatura's fallback is bounded, too
private.xml.unescape = private.baseline.unescape = unescape    # `html.unescape` raises for references of 5,000 digits
xpath_rules.install()


class Trafilatura:
    """The extraction engine `trafilatura` of the step `html`. It extracts the same text as `trafilatura.extract(page,
    …)`, but parses the page only once.

    The parameters are settings of the step (`stages.extract.html.step.Html.Config`). The engine calls
    `trafilatura_sequence`, the function that runs the extractors inside `extract`. The page is therefore parsed once,
    its tree is not copied, and the depth of the tree can be checked before the work begins.
    """

    def __init__(self, *, favor: str = "balanced", fast: bool = False, tables: bool = True, comments: bool = False,
                 max_depth: int = 255, **_: Any) -> None:
        self.options, self.formatted = (
            private.settings.Extractor(
                output_format="txt", fast=fast, precision=favor == "precision", recall=favor == "recall",
                comments=comments, formatting=formatting, links=False, images=False, tables=tables, dedup=False)
            for formatting in (False, True))
        # finds an element this many steps below the root; evaluated step by step in C, it stops where the tree ends
        self.too_deep = etree.XPath("/*" * (max_depth + 1))

    def text(self, page: str) -> str | None:
        """Returns the main text of a page; "" when the page has none; None when its elements nest too deep or the page
        would take too much work."""
        trees = self._extracted(page, self.options)
        if not trees:
            return None if trees is None else ""
        body, comments = trees
        text = "\n".join(private.xml.xmltotxt(tree, False) for tree in (body, comments)).strip()
        return str(private.utils.normalize_unicode(stream_safe(text)))

    def markdown(self, page: str) -> str | None:
        """Returns the main text of a page as the method `text` does, but written as Markdown. The Markdown is written
        by `stages.extract.html.markdown`, because trafilatura's own writer escapes characters that look like markup."""
        trees = self._extracted(page, self.formatted)
        if not trees:
            return None if trees is None else ""
        return str(private.utils.normalize_unicode(stream_safe("\n\n".join(filter(None, map(write, trees))))))

    def _extracted(self, page: str, options: Any) -> tuple[Any, ...] | None:
        """Returns (main text, comments) as trees; () when there is no text; None when the elements of the page nest too
        deep or the page would take too much work."""
        tree = private.utils.load_html(page)
        if tree is None:
            return ()
        if self.too_deep(tree) or (page.count("<") > _FEW and (tangled_tables(tree) or many_paragraphs(tree)
                                                               or crowded_items(tree))):
            return None
        if (tags := page.count("<")) * DEEPEST > LEVELS and etree.XPath("/*" * (LEVELS // tags + 1))(tree):
            return None
        deletion.remaining = JOINED
        try:
            body, text, comments, notes = private.core.trafilatura_sequence(tree, options)
        except TooMuchWork:
            return None
        except (TypeError, ValueError):                     # what `extract` treats as "no text"
            return ()
        if len(text) < options.min_output_size and len(notes) < options.min_output_comm_size:
            return ()
        return body, comments
