"""MediaWiki XML dumps (pages-articles; .xml, .xml.bz2, .xml.gz, .xml.zst): one document an article.

Streaming, and safe on hostile XML: a document type or an entity ends the file (`xml_doctype`), nothing is fetched, a
page beyond the cap is counted and skipped while it is read. Pages of other namespaces (`namespace`), redirects
(`redirect`), other content models than wikitext (`content_model`) and pages without text (`empty`) are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote
from xml.parsers import expat

from stages.document import BadRecord, Document, document_id
from stages.read.reader import Reader, Slice, bad, check_file, locator, skipped
from stages.read.streams import Damaged, Stream
from stages.read.wikitext import plain
from stages.stage import StageConfig, signal

#: elements of a page that are read, and the longest value of the small ones
_FIELDS = {"title", "ns", "id", "timestamp", "model", "format", "text", "base"}
_SMALL = 4096


class Wiki(Reader):
    name = "wiki"
    version = 2
    suffixes = (".xml", ".xml.bz2", ".xml.gz", ".xml.zst", ".xml.xz")

    class Config(StageConfig):
        namespaces: tuple[int, ...] = signal((0,), "namespaces whose pages are read")
        max_bytes: int = signal(16 << 20, "longest markup of a page, characters; beyond: too_large", gt=0)
        markup: bool = signal(False, "keep the wikitext as it is")

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        check_file(local, slice.path)
        pages = _Pages(self.config.max_bytes)
        ordinal = slice.ordinal
        with Stream(local) as stream:
            try:
                while True:
                    block = stream.read(1 << 16)
                    pages.feed(block)
                    while pages.done:
                        yield self._document(pages.done.pop(0), pages.base, slice, ordinal)
                        ordinal += 1
                    if not block:
                        return
            except (Damaged, expat.ExpatError, _Hostile) as e:
                if getattr(e, "code", None) == expat.errors.codes[expat.errors.XML_ERROR_NO_MEMORY]:
                    raise MemoryError(str(e)) from None         # the machine's fault, not the file's
                while pages.done:
                    yield self._document(pages.done.pop(0), pages.base, slice, ordinal)
                    ordinal += 1
                reason = getattr(e, "reason", "")
                if not reason:
                    cut = e.code in (expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS],
                                     expat.errors.codes[expat.errors.XML_ERROR_UNCLOSED_TOKEN]) or not block
                    reason = "truncated" if cut else "corrupt_xml"
                yield bad(reason, slice, 0, ordinal, detail=str(e), fatal=True)

    def _document(self, page: dict[str, str], base: str, slice: Slice, ordinal: int) -> Document | BadRecord:
        title = page.get("title", "")
        if page.get("ns", "0") not in map(str, self.config.namespaces):
            return skipped("namespace", slice, 0, ordinal, detail=title)
        if "redirect" in page:
            return skipped("redirect", slice, 0, ordinal, detail=title)
        if page.get("model", "wikitext") != "wikitext":
            return skipped("content_model", slice, 0, ordinal, detail=title)
        if "too_large" in page:
            return bad("too_large", slice, 0, ordinal, detail=f"more than {self.config.max_bytes} characters of markup")
        markup = page.get("text", "")
        text = markup if self.config.markup else plain(markup)
        if not text.strip():
            return skipped("empty", slice, 0, ordinal, detail=title)
        meta = {"title": title}
        if "id" in page:
            meta["page_id"] = page["id"]
        url = base.rpartition("/")[0] + "/" + quote(title.replace(" ", "_"), safe="/:()',!*@;~") if base else ""
        return Document(document_id(slice.source, slice.path, "", ordinal), text, source=slice.source, url=url,
                        date=page.get("timestamp"), locator=locator(slice.path, 0, ordinal), meta=meta,
                        mime="text/x-wiki" if self.config.markup else "text/plain")


class _Hostile(Exception):
    reason = "xml_doctype"


class _Pages:
    """Pages of a dump as they are parsed: dicts of the fields of `_FIELDS`, `redirect` and `too_large` as flags."""

    def __init__(self, cap: int) -> None:
        self.cap, self.base = cap, ""
        self.done: list[dict[str, str]] = []
        self.page: dict[str, str] | None = None
        self.path: list[str] = []
        self.held: list[str] = []
        self.size = 0
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler = self._data
        parser.StartDoctypeDeclHandler = self._refuse
        parser.EntityDeclHandler = self._refuse
        parser.ExternalEntityRefHandler = self._refuse
        self.parser = parser

    def feed(self, block: bytes) -> None:
        self.parser.Parse(block, not block)

    def _refuse(self, *_: object) -> None:
        raise _Hostile("a document type or entity declaration, which no dump has")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if len(self.path) > 32:
            raise _Hostile("elements nested deeper than in any dump")
        self.path.append(name)
        if name == "page":
            self.page = {}
        elif name == "redirect" and self.page is not None:
            self.page["redirect"] = attributes.get("title", "")
        self.held, self.size = [], 0

    def _data(self, data: str) -> None:
        if self.path and self.path[-1] in _FIELDS:
            self.size += len(data)
            if self.size <= (self.cap if self.path[-1] == "text" else _SMALL):
                self.held.append(data)
            elif self.page is not None:
                self.page["too_large"] = ""
                self.held = []

    def _end(self, name: str) -> None:
        self.path.pop()
        if name == "page" and self.page is not None:
            self.done.append(self.page)
            self.page = None
        elif name == "base" and self.page is None:
            self.base = "".join(self.held)
        elif name in _FIELDS and self.page is not None:
            value = "".join(self.held)
            # <id> of the page comes before those of its revision and its author; the last revision's text counts
            if name != "id" or self.path[-1:] == ["page"]:
                self.page[name] = value
        self.held, self.size = [], 0
