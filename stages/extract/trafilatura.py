"""trafilatura as a function `page → text`: one parse, no metadata, no memory from page to page."""

from __future__ import annotations

from lxml import etree
from trafilatura.core import trafilatura_sequence
from trafilatura.settings import Extractor
from trafilatura.utils import load_html, normalize_unicode
from trafilatura.xml import xmltotxt

from stages.extract import shortcuts


class Engine:
    """`trafilatura.extract(page, …)` without its detours.

    Parameters as in `stages.extract.html.Html.Config`. Calls the cascade itself (`trafilatura_sequence`) instead of
    `extract`: the tree is parsed once and not copied, and its depth can be looked at before the work begins.
    """

    def __init__(self, *, favor: str = "balanced", fast: bool = False, tables: bool = True, comments: bool = False,
                 max_depth: int = 255) -> None:
        shortcuts.install()
        self.options = Extractor(output_format="txt", fast=fast, precision=favor == "precision",
                                 recall=favor == "recall", comments=comments, formatting=False, links=False,
                                 images=False, tables=tables, dedup=False)
        # an element this many steps below the root: evaluated step by step in C, it stops where the tree ends
        self.too_deep = etree.XPath("/*" * (max_depth + 1))

    def text(self, page: str) -> str | None:
        """Main text of a page ("" when it has none), None when its elements nest too deep."""
        tree = load_html(page)
        if tree is None:
            return ""
        if self.too_deep(tree):
            return None
        try:
            body, text, comments, said = trafilatura_sequence(tree, self.options)
        except (TypeError, ValueError):                     # what `extract` takes for "no text"
            return ""
        if len(text) < self.options.min_output_size and len(said) < self.options.min_output_comm_size:
            return ""
        found = f"{xmltotxt(body, False)}\n{xmltotxt(comments, False)}".strip()
        return normalize_unicode(found)
