r"""Writes an lxml tree as plain text or as Markdown, for the extraction engines that return a tree.

The tree may be HTML or the TEI-like format of trafilatura. Headings, lists, quotes, tables, code, emphasis and formulas
are kept. A link becomes its text, and images are left out. Nothing is escaped, since the text is read by models and not
by a renderer. Formulas arrive as `\(…\)` and `\[…\]` (stages.extract.html.math) and are written as `$…$` and `$$…$$`.
"""

from __future__ import annotations

import re
from typing import Any

from lxml import etree

from stages.extract.html.marks import LANGUAGE, REFERENCE, dollars, fence

#: quotes and lists nested deeper than this are written as plain blocks, because every level indents all text inside it
DEEPEST = 8
#: columns of a table; a wider one is not written as a table
COLUMNS = 60
_SKIPPED = frozenset({
    "script", "style", "template", "svg", "iframe", "object", "embed", "canvas", "audio", "video",
    "map", "title", "meta", "link", "base", "select", "option", "datalist", "button", "input", "textarea",
    "img", "picture", "source", "graphic", "annotation", "annotation-xml",
})
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "dialog",
    "dir", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hgroup", "hr",
    "html", "legend", "li", "main", "menu", "nav", "ol", "p", "pre", "section", "summary", "table", "tbody",
    "td", "tfoot", "th", "thead", "tr", "ul", "ab", "doc", "comments", "row", "cell", "item", "list", "quote",
})
_MARKS = {"b": "**", "strong": "**", "i": "*", "em": "*", "code": "`", "tt": "`", "kbd": "`", "samp": "`", "del": "~~",
          "s": "~~", "strike": "~~", "sup": "^", "sub": "_"}
_RENDS = {"#b": "**", "#i": "*", "#t": "`", "#sup": "^", "#sub": "_"}
_OF_TABLES = frozenset({"caption", "colgroup", "col", "thead", "tbody", "tfoot", "tr", "row", "td", "th", "cell"})
_HEADING = re.compile(r"h[1-6]")
#: stands for a line break; no text of a tree contains it
_BREAK = "\x00"


def write(root: Any, *, markup: bool = True, lines: bool = False) -> str:
    """Returns the text of a tree: Markdown with a blank line between blocks or, without `markup`, plain text with a
    line break between blocks. With `lines`, a line feed in the text counts as a line break; HTML treats it as a space.

    The function recurses as deep as the tree. This is safe, because libxml2 builds no tree of more than 255 levels.
    """
    writer = _Writer(markup, 0, lines)
    writer.walk(root)
    return ("\n\n" if markup else "\n").join(writer.end()).strip()


def _strays(table: Any) -> bool:
    """Whether a table holds text or elements outside its cells."""
    for part in table.iter("table", "thead", "tbody", "tfoot", "tr", "row"):
        if (part.text or "").strip():
            return True
        for child in part:
            if (child.tail or "").strip() or (isinstance(child.tag, str) and child.tag not in _OF_TABLES):
                return True
    return False


class _Writer:
    """Writes the blocks (paragraphs, lists, tables …) inside one element, such as a quote or a list item. Inline text
    is collected in the list `run` until a block begins or ends."""

    def __init__(self, markup: bool, depth: int, lines: bool = False) -> None:
        self.markup, self.depth, self.lines = markup, depth, lines
        self.out: list[str] = []
        self.run: list[str] = []
        self.open: set[str] = set()                       # open marks; # stands for a heading
        self.closed = (0, "")                             # position in `run` where the last mark was closed, that mark

    def end(self) -> list[str]:
        self.flush()
        return self.out

    def take(self) -> list[str]:
        """Return the blocks written so far, and remove them from the writer."""
        blocks, self.out = self.end(), []
        return blocks

    def flush(self) -> None:
        lines = (" ".join(part.split()) for part in "".join(self.run).split(_BREAK))
        text = "\n".join(line for line in lines if line)
        if text:
            self.out.append(dollars(text) if self.markup else text)
        self.run.clear()
        self.closed = (0, "")

    def walk(self, element: Any) -> None:
        """Write the content of an element."""
        if element.text:
            self.run.append(element.text.replace("\n", _BREAK) if self.lines else element.text)
        for child in element:
            if isinstance(child.tag, str):
                self.child(child, child.tag.rpartition("}")[2].lower())
            if child.tail:
                self.run.append(child.tail.replace("\n", _BREAK) if self.lines else child.tail)

    def child(self, e: Any, tag: str) -> None:
        rend = e.get("rend", "")
        if tag in _SKIPPED or (tag == "head" and not rend and e.getparent().tag == "html"):
            return
        if tag in ("br", "lb"):
            self.run.append(_BREAK)
        elif _HEADING.fullmatch(tag) or tag == "head":
            self.heading(e, tag if tag != "head" else rend)
        elif tag == "pre" or (tag == "code" and self.is_block(e)):
            self.code(e)
        elif tag in ("ul", "ol", "menu", "dir", "list"):
            self.list(e, tag == "ol" or rend == "ol")
        elif tag == "table":
            self.table(e)
        elif tag in ("blockquote", "quote") and self.markup and self.depth < DEEPEST:
            self.flush()
            inner = self.inside(e)
            if inner:
                self.out.append("\n".join(f"> {line}".rstrip() for line in "\n\n".join(inner).split("\n")))
        elif tag == "dd" and self.markup:
            self.flush()
            meaning = self.inside(e)
            self.out += [": " + block if n == 0 else block for n, block in enumerate(meaning)]
        elif tag in _BLOCKS:
            self.flush()
            self.walk(e)
            self.flush()
        else:
            self.inline(e, _RENDS.get(rend, "") if tag == "hi" else _MARKS.get(tag, ""))

    def inside(self, e: Any) -> list[str]:
        """Returns the blocks inside an element that nests text one level deeper, such as a quote, a list item or a
        table cell."""
        inner = _Writer(self.markup, self.depth + 1, self.lines)
        inner.walk(e)
        return inner.end()

    def heading(self, e: Any, name: str) -> None:
        self.flush()
        if "#" in self.open:                               # a heading inside a heading is part of it
            self.walk(e)
            self.flush()
            return
        level = int(name[1]) if _HEADING.fullmatch(name) else 2
        inner = _Writer(self.markup, self.depth, self.lines)
        inner.open = {"#", "**"}                           # a bold heading is a heading
        inner.walk(e)
        text = " ".join(" ".join(inner.end()).split())
        if text:
            self.out.append(f"{'#' * level} {text}" if self.markup else text)

    def inline(self, e: Any, mark: str) -> None:
        """Write an inline element with its Markdown mark, such as `**`. Only the content is written, without the mark,
        in plain text, inside code, inside the same mark, and when the element is empty or contains a block."""
        blocks, begin = len(self.out), len(self.run)
        set_mark = bool(mark) and self.markup and mark not in self.open and "`" not in self.open
        if not set_mark:
            self.walk(e)
            return
        self.open.add(mark)
        self.walk(e)
        self.open.discard(mark)
        if len(self.out) != blocks:
            return
        text = "".join(self.run[begin:])
        core = text.strip(" \t\n\r\f\x00\xa0")
        if not core:
            return
        if mark in "^_":
            if mark == "^" and REFERENCE.fullmatch(core):
                core = ""                                  # the number of a footnote
            else:
                core = f"<su{'p' if mark == '^' else 'b'}>{core}</su{'p' if mark == '^' else 'b'}>"
        elif mark == "`":
            core = f"`{core}`" if "`" not in core else f"`` {core} ``"
        else:
            core = f"{mark}{core}{mark}"
        del self.run[begin:]
        end, last = self.closed
        if mark in ("**", "*", "~~") and mark == last and end <= begin \
                and not "".join(self.run[end:begin]).strip(" \t\n\r\f"):
            self.run[end - 2] = self.run[end - 2][:-len(mark)]     # **a** **b** is **a b**
            core = core[len(mark):]
        self.run += [" " if text[:1].isspace() else "", core, " " if text[-1:].isspace() else ""]
        self.closed = (len(self.run), mark)

    # -- code ---------------------------------------------------------------------------------------------------------
    @staticmethod
    def is_block(e: Any) -> bool:
        return "\n" in (e.text or "").strip() or next(e.iter("lb", "br"), None) is not None

    def code(self, e: Any) -> None:
        self.flush()
        parts: list[str] = []
        for event, node in etree.iterwalk(e, events=("start", "end", "comment", "pi")):
            if event == "start":
                if node.tag in ("lb", "br"):
                    parts.append("\n")
                if node.text:
                    parts.append(node.text)
            elif node is not e and node.tail:
                parts.append(node.tail)
        text = "".join(parts).replace("\r\n", "\n").expandtabs(4).strip("\n").rstrip()
        if not text.strip():
            return
        if not self.markup:
            self.out.append(text)
            return
        for node in (e, *e.iter("code"), e.getparent()):
            if node is not None and (match := LANGUAGE.search(node.get("class") or "")):
                self.out.append(fence(text, match[1].lower()))
                return
        self.out.append(fence(text))

    # -- lists and tables ---------------------------------------------------------------------------------------------
    def list(self, e: Any, numbered: bool) -> None:
        self.flush()
        if self.depth >= DEEPEST:
            self.walk(e)
            self.flush()
            return
        items: list[str] = []
        number = 1
        start = e.get("start") or ""
        if numbered and start.isdecimal() and len(start) < 7:
            number = int(start)
        loose = _Writer(self.markup, self.depth + 1, self.lines)     # anything may occur in a list between its items
        loose.run.append(e.text or "")
        contents: list[list[str]] = []
        for child in e:
            if isinstance(child.tag, str):
                if child.tag in ("li", "item", "dt", "dd"):
                    contents += [loose.take(), self.inside(child)]
                else:
                    loose.child(child, child.tag.rpartition("}")[2].lower())
            loose.run.append(child.tail or "")
        for blocks in (*contents, loose.take()):
            if blocks:
                mark = f"{number}. " if numbered and self.markup else "- "
                indent = " " * len(mark)
                lines = "\n".join(blocks).split("\n")
                items.append("\n".join([mark + lines[0], *(indent + line if line else "" for line in lines[1:])]))
                number += 1
        if items:
            self.out.append("\n".join(items))

    def table(self, e: Any) -> None:
        """Write a table of data as rows of cells, and any other table (for layout) as the blocks in its cells.

        A table holds data if it has at least two rows, 2 to `COLUMNS` columns, and text only in its cells. It must
        contain no tables, lists, headings or code. Rows × columns must not exceed four times the number of cells plus
        200, because short rows are padded with empty cells.
        """
        self.flush()
        rows = [[c for c in row if c.tag in ("td", "th", "cell")] for row in e.iter("tr", "row")]
        rows = [row for row in rows if row]
        width = max(map(len, rows), default=0)
        cells = sum(map(len, rows))
        nested = next((n for n in e.iter("table", "pre", "ul", "ol", "list", "h1", "h2", "h3", "h4", "h5", "h6", "head")
                       if n is not e), None)
        if not 2 <= width <= COLUMNS or nested is not None or len(rows) < 2 or width * len(rows) > 4 * cells + 200 \
                or _strays(e):
            self.walk(e)
            self.flush()
            return
        caption = next(e.iter("caption"), None)
        if caption is not None:
            self.out += self.inside(caption)
        table = []
        for row in rows:
            inner = [" ".join(" ".join(self.inside(cell)).split()) for cell in row]
            if any(inner):
                table.append([cell.replace("|", "\\|") if self.markup else cell for cell in inner])
        if not table:
            return
        if not self.markup:
            self.out.append("\n".join(" | ".join(row) for row in table))
            return
        table = [row + [""] * (width - len(row)) for row in table]
        table.insert(1, ["---"] * width)
        self.out.append("\n".join(f"| {' | '.join(row)} |" for row in table))
