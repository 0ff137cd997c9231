"""trafilatura as a function `page → text`: one parse, no metadata, no memory from page to page."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from lxml import etree
from trafilatura import core, external, htmlprocessing, main_extractor, readability_lxml, utils, xml
from trafilatura.core import trafilatura_sequence
from trafilatura.settings import Extractor
from trafilatura.utils import load_html, normalize_unicode
from trafilatura.xml import xmltotxt

from stages.extract.html import readability, shortcuts
from stages.extract.html.limits import TooMuchWork, stream_safe
from stages.extract.html.markdown import write
from stages.extract.html.metadata import unescape

baseline = importlib.import_module("trafilatura.baseline")     # the package has a function of that name
#: every kind of exception but the lack of memory
_SURVIVABLE = (etree.LxmlError, *(kind for kind in vars(builtins).values() if isinstance(kind, type)
                                  and issubclass(kind, Exception) and kind not in (Exception, MemoryError)))


#: libxml2 builds no more levels
DEEPEST = 255
#: tags of a page whose tables cannot cost much
_FEW = 5_000
#: cells trafilatura may add to the tables of a page to make them rectangular, and elements it may look at again for
#: each pair of tables around them: a second of CPU. A table of 10,000 rows and 20 columns is far below.
CELLS, LOOKS = 400_000, 10_000_000
#: tags times levels: it reads for every block all that is in it, so 240 of them around 60,000 links take minutes
LEVELS = 6_000_000
#: most columns a cell spans for it
_SPAN = 100
#: paragraphs in a paragraph, whose texts trafilatura adds up one by one
PARAGRAPHS = 8_000
#: elements in one item of a list, which trafilatura counts anew for each of them
IN_AN_ITEM = 10_000
#: characters copied to join the text behind elements that are left out to the text before: half a second
JOINED = 500_000_000


class _Deletion:
    """`trafilatura.xml.delete_element` with a count of the characters it copies: the text behind an element is joined
    to the text before it, and 100,000 buttons in a row would make 10 GB of that."""

    def __init__(self) -> None:
        self.left, self.delete = JOINED, xml.delete_element

    def __call__(self, element: Any, keep_tail: bool = True) -> None:
        if keep_tail and element.tail and (parent := element.getparent()) is not None:
            before = element.getprevious()
            self.left -= len((parent.text if before is None else before.tail) or "")
            if self.left < 0:
                raise TooMuchWork("this page is too tangled for trafilatura")
        self.delete(element, keep_tail)


deletion = _Deletion()


def many_paragraphs(tree: Any) -> bool:
    """Whether a paragraph holds more than `PARAGRAPHS` others, as no page of sense does."""
    inside: dict[Any, int] = {}
    for p in tree.iter("p"):
        outer = next(p.iterancestors("p"), None)
        if outer is not None:
            inside[outer] = inside.get(outer, 0) + 1
    return max(inside.values(), default=0) > PARAGRAPHS


def crowded_items(tree: Any) -> bool:
    """Whether an item of a list holds more than `IN_AN_ITEM` elements side by side."""
    return any(len(item) > IN_AN_ITEM for item in tree.iter("li", "dd", "dt"))


def tangled_tables(tree: Any) -> bool:
    """Whether trafilatura would take long for the tables of a page, by a count: it pads rows to the widest, and reads
    for every table all that is in the tables inside it."""
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
    return nested > 1 and nested * nested // 2 * sum(1 for _ in tree.iter()) > LOOKS


def _loud(parse: Callable[..., Any]) -> Callable[..., Any]:
    """A parse function of lxml that says MemoryError when libxml2 runs out of memory, not XMLSyntaxError."""
    @wraps(parse)
    def parsed(*args: Any, **kw: Any) -> Any:
        try:
            return parse(*args, **kw)
        except etree.XMLSyntaxError as e:
            if e.code == etree.ErrorTypes.ERR_NO_MEMORY:
                raise MemoryError("libxml2 has no memory left") from None
            raise

    return parsed


def raise_memory_errors() -> None:
    """Let no handler of trafilatura swallow the lack of memory, once per process.

    Its `except Exception` make a page without text, or with another text, of what a larger machine extracts: the text
    would depend on the machine. The name is looked up in the module when something is raised, so it is given another
    meaning there.
    """
    for module in (baseline, core, external, readability_lxml, utils):
        if not hasattr(module, "Exception"):
            module.Exception = _SURVIVABLE  # type: ignore[attr-defined]
            for name in ("fromstring", "fragment_fromstring"):
                if hasattr(module, name):
                    setattr(module, name, _loud(getattr(module, name)))


class Engine:
    """`trafilatura.extract(page, …)` without its detours.

    Parameters as in `stages.extract.html.step.Html.Config`. Calls the cascade itself (`trafilatura_sequence`) instead
    of `extract`: the tree is parsed once and not copied, and its depth can be looked at before the work begins.
    """

    def __init__(self, *, favor: str = "balanced", fast: bool = False, tables: bool = True, comments: bool = False,
                 max_depth: int = 255, **_: Any) -> None:
        shortcuts.install()
        readability.install()
        raise_memory_errors()
        for module in (baseline, core, external, htmlprocessing, main_extractor):
            if hasattr(module, "delete_element"):
                module.delete_element = deletion
        xml.unescape = baseline.unescape = unescape         # `html.unescape` raises for references of 5,000 digits
        self.options, self.formatted = (
            Extractor(output_format="txt", fast=fast, precision=favor == "precision", recall=favor == "recall",
                      comments=comments, formatting=formatting, links=False, images=False, tables=tables, dedup=False)
            for formatting in (False, True))
        # an element this many steps below the root: evaluated step by step in C, it stops where the tree ends
        self.too_deep = etree.XPath("/*" * (max_depth + 1))

    def text(self, page: str) -> str | None:
        """Main text of a page ("" when it has none), None when its elements nest too deep."""
        found = self._found(page, self.options)
        if not found:
            return None if found is None else ""
        body, comments = found
        return normalize_unicode(stream_safe(f"{xmltotxt(body, False)}\n{xmltotxt(comments, False)}".strip()))

    def markdown(self, page: str) -> str | None:
        """The same as Markdown, by the writer of all engines: trafilatura's own escapes what it takes for markup."""
        found = self._found(page, self.formatted)
        if not found:
            return None if found is None else ""
        return normalize_unicode(stream_safe("\n\n".join(filter(None, map(write, found)))))

    def _found(self, page: str, options: Any) -> tuple[Any, ...] | None:
        """(main text, comments) as trees, () when there is no text, None when elements nest too deep."""
        tree = load_html(page)
        if tree is None:
            return ()
        if self.too_deep(tree) or (page.count("<") > _FEW and (tangled_tables(tree) or many_paragraphs(tree)
                                                               or crowded_items(tree))):
            return None
        if (tags := page.count("<")) * DEEPEST > LEVELS and etree.XPath("/*" * (LEVELS // tags + 1))(tree):
            return None
        deletion.left = JOINED
        try:
            body, text, comments, said = trafilatura_sequence(tree, options)
        except TooMuchWork:
            return None
        except (TypeError, ValueError):                     # what `extract` takes for "no text"
            return ()
        if len(text) < options.min_output_size and len(said) < options.min_output_comm_size:
            return ()
        return body, comments
