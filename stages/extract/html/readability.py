"""The extraction engine `readability`: arc90's algorithm, as trafilatura's copy of readability-lxml implements it, with
limited work. The algorithm scores the blocks around paragraphs, and takes the best block together with the siblings
that belong to it.

Three parts of the algorithm can take very long:

- It examines all siblings of an empty block with an image, so 40,000 such blocks in a row take a quarter of an hour.
- It reads nested blocks once for every level.
- When it removes an element, it joins the texts before and after the element, so these are copied again and again.

The class `Bounded` counts this work and stops at a limit, which lies far above the work on each of 1,864 real pages.
When trafilatura runs readability as a fallback extractor and this limit is reached, trafilatura goes on without it.
"""

from __future__ import annotations

from typing import Any

from lxml import etree, html

from stages.extract.html import private
from stages.extract.html.limits import TooMuchWork
from stages.extract.html.markdown import write

#: most measurements of a text's length in one page; a long text counts as several measurements
MOST = 400_000
#: most sibling elements
SIBLINGS = 10_000
#: characters of HTML below which a result is not an article
_SHORT = 250
#: a text counts as one measurement, plus one for every so many characters
_CHARS_PER_MEASUREMENT = 2_000


class _Work:
    """Replaces the function `readability_lxml.text_length`, which measures the text of an element. Each call counts as
    work, in proportion to the length of the text. Raises TooMuchWork when the work on a page exceeds `MOST`."""

    def __init__(self) -> None:
        self.remaining, self.original = MOST, private.readability_lxml.text_length

    def __call__(self, element: Any) -> int:
        length = self.original(element)
        self.remaining -= 1 + length // _CHARS_PER_MEASUREMENT
        if self.remaining < 0:
            raise TooMuchWork("this page is too tangled for readability")
        return length


work = _Work()


class Bounded(private.readability_lxml.Document):
    """A document of readability-lxml whose method `summary` raises TooMuchWork for a page on which the original would
    run for very long."""

    __slots__ = ()

    def summary(self) -> str:
        work.remaining = MOST
        if any(len(element) > SIBLINGS for element in self.doc.iter()):
            raise TooMuchWork("readability would take long for so many elements in a row")
        return super().summary()

    def transform_misused_divs_into_paragraphs(self) -> None:
        """Turns each `<div>` that contains no block into a paragraph, unless it holds a link and no text of its own
        (outside its elements). In all other `<div>`, wraps text of their own in paragraphs, and removes `<br>`.

        The result is that of the original method, which is slow because it counts from the first child to place each
        paragraph.
        """
        blocks = private.readability_lxml.DIV_TO_P_PREFIXES
        for div in self.doc.findall(".//div"):
            if not any(str(e.tag).startswith(blocks) for e in div.iterdescendants("*")) and (
                    div.find(".//a") is None or div.xpath("text()[normalize-space()]")):
                div.tag = "p"
        for div in self.doc.findall(".//div"):
            if div.text and div.text.strip():
                paragraph = div.makeelement("p")
                paragraph.text, div.text = div.text, None
                div.insert(0, paragraph)
            for child in reversed(list(div)):
                if child.tail and child.tail.strip():
                    paragraph = div.makeelement("p")
                    paragraph.text, child.tail = child.tail, None
                    child.addnext(paragraph)
                if child.tag == "br":
                    child.drop_tree()


class Gentle(Bounded):
    """A variant of `Bounded` that keeps elements whose class or id suggests that they are not main text. It is used for
    a second try when the first one extracts little, as in readability-lxml. (trafilatura's copy of readability-lxml has
    no second try.)"""

    __slots__ = ()

    def remove_unlikely_candidates(self) -> None:
        return


private.readability_lxml.text_length = work


class Readability:
    """The extraction engine `readability` of the step `html`. With `tables=False`, tables are left out. The engine does
    not recognise readers' comments."""

    def __init__(self, *, tables: bool = True, max_depth: int = 255, **_: Any) -> None:
        self.tables = tables
        self.too_deep = etree.XPath("/*" * (max_depth + 1))
        self.parser = html.HTMLParser(encoding="utf-8")

    def text(self, page: str) -> str | None:
        return self._written(page, False)

    def markdown(self, page: str) -> str | None:
        return self._written(page, True)

    def _written(self, page: str, markup: bool) -> str | None:
        summary = ""
        for kind in (Bounded, Gentle):
            tree = private.utils.load_html(page)
            if tree is None:
                return ""
            if self.too_deep(tree):
                return None
            etree.strip_elements(tree, etree.Comment, etree.ProcessingInstruction, with_tail=False)
            try:
                summary = kind(tree).summary()
            except TooMuchWork:
                return None
            if len(summary) >= _SHORT:
                break
        # The summary is XML, where an empty element is `<b/>`. An HTML parser would not read this as closed.
        article = etree.fromstring(summary.encode("utf-8", "surrogatepass"),
                                   etree.XMLParser(recover=True, huge_tree=True, resolve_entities=False))
        if article is None:
            return ""
        if not self.tables:
            etree.strip_elements(article, "table", with_tail=False)
        return write(article, markup=markup)
