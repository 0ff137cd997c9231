"""Resiliparse's main-content extraction (Bevendorff et al., ECIR 2018; Lexbor's parser): by far the fastest."""

from __future__ import annotations

from typing import Any

from lxml import html
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from stages.extract.markdown import write

#: resiliparse's cost grows with the square of the depth: 2 s of CPU for 10,000 elements inside one another, 37 s for
#: 40,000. A page with no more tags than this (two an element) cannot hurt; its depth is not looked at, for that takes
#: a parse of its own
_HARMLESS = 20_000


class Engine:
    """An engine of `stages.extract.html`. Markdown has its headings, lists and code; rows of tables are lines of it."""

    def __init__(self, *, comments: bool = False, max_depth: int = 255, **_: Any) -> None:
        self.comments = comments
        # an element this many levels down: a selector, so that the search stays in C
        self.too_deep = " > ".join(["*"] * (max_depth + 1))

    def text(self, page: str) -> str | None:
        return self._found(page, True)

    def markdown(self, page: str) -> str | None:
        found = self._found(page, "minimal_html")
        if not found:
            return found
        # it sets the cells of a row apart by tabs
        tree = html.document_fromstring(f"<body>{found}".replace("\t\t", " | "), parser=html.HTMLParser())
        return write(tree, lines=True)

    def _found(self, page: str, form: bool | str) -> str | None:
        if page.count("<") > _HARMLESS and HTMLTree.parse(page).document.query_selector(self.too_deep) is not None:
            return None
        return extract_plain_text(page, preserve_formatting=form, main_content=True, list_bullets=False, links=False,
                                  alt_texts=False, comments=self.comments)
