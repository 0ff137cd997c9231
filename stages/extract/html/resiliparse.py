"""The extraction engine `resiliparse`, the fastest of the engines: it extracts the main text by the library Resiliparse
(Bevendorff et al., ECIR 2018), which uses the parser Lexbor."""

from __future__ import annotations

from typing import Any, Literal

from lxml import html
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from stages.extract.html.markdown import write

#: resiliparse takes no noticeable time for a page of at most this many tags, however they are nested
_HARMLESS = 5_000
#: Limit for (number of tags) × (depth of nesting), which corresponds to 2 s of CPU time. The time of resiliparse grows
#: with the square of the depth (2 s for 10,000 nested elements) and with tags times depth (6 s for 240 levels around
#: 90,000 elements).
_WORK = 6_000_000


class Resiliparse:
    """The extraction engine `resiliparse` of the step `html`. Its Markdown has headings, lists and code; each row of a
    table becomes a line of text."""

    def __init__(self, *, comments: bool = False, max_depth: int = 255, **_: Any) -> None:
        self.comments, self.max_depth = comments, max_depth

    def text(self, page: str) -> str | None:
        return self._extracted(page, True)

    def markdown(self, page: str) -> str | None:
        markup = self._extracted(page, "minimal_html")
        if not markup:
            return markup
        # resiliparse separates the cells of a row by tabs
        tree = html.document_fromstring(f"<body>{markup}".replace("\t\t", " | "), parser=html.HTMLParser())
        return write(tree, lines=True)

    def _extracted(self, page: str, form: bool | Literal["minimal_html"]) -> str | None:
        tree, tags = HTMLTree.parse(page), page.count("<")
        if tags > _HARMLESS:
            # search for an element `deepest + 1` levels down; the selector is evaluated in C
            deepest = min(self.max_depth, max(_WORK // tags, 30))
            if tree.document is not None and tree.document.query_selector(" > ".join(["*"] * (deepest + 1))):
                return None
        return extract_plain_text(tree, preserve_formatting=form, main_content=True, list_bullets=False, links=False,
                                  alt_texts=False, comments=self.comments)
