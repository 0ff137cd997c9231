"""Reads MediaWiki XML dumps (pages-articles; .xml, .xml.bz2, .xml.gz, .xml.zst): one document per article.

Dumps are read as streams. Hostile XML does no harm: a document type or an entity ends the reading of the file
(`xml_doctype`), and no external resource is fetched. No documents are made of these pages, which are counted:

- `too_large`: the text exceeds `max_bytes` characters, or another field, such as the title, 4,096. Such a text is not
  kept in memory.
- `namespace`: in none of the namespaces that the setting `namespaces` lists
- `redirect`: a redirect
- `content_model`: in another content model than wikitext
- `empty`: without text

Uncompressed dumps are split between pages. Multistream dumps (.bz2, https://dumps.wikimedia.org/) are split between
their streams of a hundred pages. Other compressed dumps are read in one piece.
"""

from __future__ import annotations

import bz2
import os
import re
from collections.abc import Callable, Iterator
from typing import NoReturn
from urllib.parse import quote
from xml.parsers import expat

from stages.document import BadRecord, Document, document_id
from stages.read.reader import BEYOND, Reader, Slice, Split, bad, check_file, is_machine_fault, locator, skipped
from stages.read.streams import DamagedStream, DecompressedStream
from stages.read.wikitext import HIDDEN, hidden_in, is_redirect, plain
from stages.stage import StageConfig, signal

#: elements that are read, and the longest value of all but the text
_FIELDS = {"title", "ns", "id", "timestamp", "model", "format", "text", "base", "namespace"}
_LONGEST_FIELD = 4096
_BLOCK = 1 << 16
#: longest tag or other piece of XML that is not text, bytes
_TAG = 1 << 20
#: numbers of the namespaces whose links are not shown: media, files, categories
_HIDDEN = ("-2", "6", "14")


class Wiki(Reader):
    """Reads MediaWiki XML dumps: one document per article."""

    name = "wiki"
    collection = True
    version = 3
    suffixes = (".xml", ".xml.bz2", ".xml.gz", ".xml.zst", ".xml.xz")

    class Config(StageConfig):
        namespaces: tuple[int, ...] = signal((0,), "namespaces whose pages are read")
        max_bytes: int = signal(16 << 20, "longest markup of a page, characters; beyond: too_large", gt=0)
        markup: bool = signal(False, "keep the wikitext as it is")

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        size = check_file(local, slice.path)
        pages = _Pages(self.config.max_bytes)
        to_end = slice.stop is None or slice.stop == size
        ordinal, block = slice.ordinal, b""
        try:
            if slice.start:
                pages.begin_after(self._head(local))
            for block in _blocks(local, slice):
                pages.feed(block, False)
                for page in pages.take():
                    yield self._document(page, pages, slice, ordinal)
                    ordinal += 1
            block = b""
            if to_end:
                pages.feed(b"", True)
        except (DamagedStream, expat.ExpatError, _Hostile) as e:
            if getattr(e, "code", None) == expat.errors.codes[expat.errors.XML_ERROR_NO_MEMORY]:
                raise MemoryError(str(e)) from None             # the machine's fault, not the file's
            for page in pages.take():
                yield self._document(page, pages, slice, ordinal)
                ordinal += 1
            reason = getattr(e, "reason", "")
            if not reason:
                cut = getattr(e, "code", None) in (expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS],
                                 expat.errors.codes[expat.errors.XML_ERROR_UNCLOSED_TOKEN]) or not block
                reason = "truncated" if cut else "corrupt_xml"
            yield bad(reason, slice, 0, ordinal, detail=str(e), fatal=True)

    def _head(self, local: str) -> _Pages:
        """Returns a parser that has read the head of a dump: the part before the first page, in which the wiki
        describes itself."""
        pages = _Pages(self.config.max_bytes)
        for block in _blocks(local, Slice("", "")):
            pages.feed(block, False)
            if pages.head_read or pages.page is not None or pages.complete:
                break
        return pages

    def needs(self, slice: Slice | None, size: int, read: Callable[[int, int], bytes]) -> list[tuple[int, int]] | None:
        """Return the byte ranges of a dump in object storage that must be fetched to read a slice (the dump or a piece
        of it), or to split the dump if `slice` is None. The result is None if the whole file must be fetched. A slice
        needs its own bytes and the head of the dump, which is the part before the first page."""
        return None if slice is None or slice.stop is None else [(0, min(size, BEYOND)), (slice.start, slice.stop)]

    def splits(self, local: str, path: str, target: int) -> list[Split] | None:
        """Return the pieces in which a dump can be read, of about `target` bytes of XML. They are cut between pages or,
        for .bz2, between compressed streams that begin with a page. An XML parser reads the whole file once to find the
        cuts.

        Returns None for a dump that must be read in one piece: it has another compression, no such streams, or is
        damaged.
        """
        check_file(local, path)
        with DecompressedStream(local) as stream:
            coding = stream.coding
        try:
            pieces = _Cuts(target).pieces(local, coding) if coding in ("", "bz2") else None
        except (OSError, EOFError, expat.ExpatError, _Hostile) as e:
            if is_machine_fault(e):
                raise
            return None                                         # `read` reports the error
        if coding and pieces is None:
            self.warnings.append(f"{path}: read in one piece, for it is one compressed stream; a multistream dump "
                                 "(-multistream.xml.bz2), or a plain one, can be shared out")
        return pieces

    def _document(self, page: dict[str, str], pages: _Pages, slice: Slice, ordinal: int) -> Document | BadRecord:
        title = page.get("title", "")
        if page.get("ns", "0") not in map(str, self.config.namespaces):
            return skipped("namespace", slice, 0, ordinal, detail=title)
        if "redirect" in page:
            return skipped("redirect", slice, 0, ordinal, detail=title)
        if page.get("model", "wikitext") != "wikitext":
            return skipped("content_model", slice, 0, ordinal, detail=title)
        if "too_large" in page:
            return bad("too_large", slice, 0, ordinal, detail=f"more than {self.config.max_bytes} characters of markup")
        markup, base = page.get("text", ""), pages.base
        if is_redirect(markup):                                 # old dumps have no element for it
            return skipped("redirect", slice, 0, ordinal, detail=title)
        text = markup if self.config.markup else plain(markup, pages.hidden)
        if not text.strip():
            return skipped("empty", slice, 0, ordinal, detail=title)
        meta = {"title": title}
        if "id" in page:
            meta["page_id"] = page["id"]
        url = base.rpartition("/")[0] + "/" + quote(title.replace(" ", "_"), safe="/:()',!*@;~") if base else ""
        return Document(document_id(slice.source, slice.path, "", ordinal), text, source=slice.source, url=url,
                        date=page.get("timestamp"), locator=locator(slice.path, 0, ordinal), meta=meta,
                        mime="text/x-wiki" if self.config.markup else "text/markdown")


class _Hostile(Exception):
    reason = "xml_doctype"


class _Xml:
    """An XML parser for dumps of wikis. It raises an error for doctypes and entities, which no dump has. It also raises
    one for a tag that does not end, which would be scanned again for every block of the file."""

    def __init__(self) -> None:
        self.fed = 0
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        self.parser.StartDoctypeDeclHandler = self.parser.EntityDeclHandler = _refuse
        self.parser.ExternalEntityRefHandler = _refuse

    def feed(self, block: bytes, last: bool) -> None:
        self.parser.Parse(block, last)
        self.fed += len(block)
        if self.fed - self.parser.CurrentByteIndex > _TAG:
            raise _Hostile(f"a tag of more than {_TAG} bytes, which no dump has")


def _refuse(*_: object) -> NoReturn:
    raise _Hostile("a document type or entity declaration, which no dump has")


class _Pages(_Xml):
    """Parses the pages of a wiki's dump. A page is a dict with fields such as `title` and `text` (`_FIELDS`). The keys
    `redirect` and `too_large` are present only in pages that are redirects or too large."""

    def __init__(self, cap: int) -> None:
        super().__init__()
        self.cap, self.base = cap, ""
        self.complete: list[dict[str, str]] = []
        self.page: dict[str, str] | None = None
        self.path: list[str] = []
        self.chunks: list[str] = []
        self.size = 0
        self.names: list[str] = []                              # of namespaces whose links are not shown
        self.key, self.hidden = "", HIDDEN
        self.head_read = False                                  # the head of the dump has been read
        self.parser.StartElementHandler, self.parser.EndElementHandler = self._start, self._end
        self.parser.CharacterDataHandler = self._data

    def begin_after(self, head: _Pages) -> None:
        """Prepare to parse a piece of a dump that begins with a page. The wiki's URL and the names of its namespaces
        are taken from `head`, a parser that has read the head of the dump."""
        self.feed(b"<mediawiki>", False)
        self.base, self.hidden = head.base, head.hidden

    def take(self) -> list[dict[str, str]]:
        """Returns the pages that were parsed completely since the last call, and removes them from the parser."""
        pages, self.complete = self.complete, []
        return pages

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if len(self.path) > 32:
            raise _Hostile("elements nested deeper than in any dump")
        self.path.append(name)
        if name == "page":
            self.page = {}
        elif name == "redirect" and self.page is not None:
            self.page["redirect"] = attributes.get("title", "")
        elif name == "namespace":
            self.key = attributes.get("key", "")
        self.chunks, self.size = [], 0

    def _data(self, data: str) -> None:
        if self.path and self.path[-1] in _FIELDS:
            self.size += len(data)
            if self.size <= (self.cap if self.path[-1] == "text" else _LONGEST_FIELD):
                self.chunks.append(data)
            elif self.page is not None:
                self.page["too_large"] = ""
                self.chunks = []

    def _end(self, name: str) -> None:
        self.path.pop()
        if name == "page" and self.page is not None:
            self.complete.append(self.page)
            self.page = None
        elif name == "base" and self.page is None:
            self.base = "".join(self.chunks)
        elif name == "namespace" and self.page is None and self.key in _HIDDEN and len(self.names) < 9:
            self.names.append("".join(self.chunks).strip())
            self.hidden = hidden_in(self.names)
        elif name == "siteinfo":
            self.head_read = True
        elif name in _FIELDS and self.page is not None:
            value = "".join(self.chunks)
            # <id> of the page comes before those of its revision and its author; the last revision's text counts
            if name != "id" or self.path[-1:] == ["page"]:
                self.page[name] = value
        self.chunks, self.size = [], 0


def _blocks(local: str, slice: Slice) -> Iterator[bytes]:
    """Yield the decompressed XML of a dump, or of one piece of a dump (from `Wiki.splits`), in blocks. Raises
    `DamagedStream` if the file is damaged."""
    if slice.stop is None:
        with DecompressedStream(local) as stream:
            while block := stream.read(_BLOCK):
                yield block
        return
    with open(local, "rb") as file:
        coded = file.read(3) == b"BZh"
        file.seek(slice.start)
        remaining, inflate = slice.stop - slice.start, bz2.BZ2Decompressor()
        while remaining and (block := file.read(min(_BLOCK, remaining))):
            remaining -= len(block)
            while coded and block:
                if inflate.eof:
                    inflate = bz2.BZ2Decompressor()
                try:
                    yield inflate.decompress(block)
                except OSError as e:                            # the file was sound when it was cut
                    raise DamagedStream("corrupt_bz2", str(e)) from None
                block = inflate.unused_data
            if not coded:
                yield block


class _Cuts(_Xml):
    """Finds the places at which a wiki's dump can be cut into pieces of about `target` bytes of XML."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self.target = target
        self.depth = self.pages = 0
        # whether a page stands inside another element than the root; whether the head of the dump, <siteinfo>, was read
        self.nested = self.head_read = False
        self.starts: list[int] = []                             # offsets in the XML of the pages of this block
        self.parser.StartElementHandler, self.parser.EndElementHandler = self._start, self._end

    def _start(self, name: str, _: object) -> None:
        if name == "page":
            self.nested |= self.depth != 1
            self.starts.append(self.parser.CurrentByteIndex)
        self.depth += 1
        if self.depth > 33:
            raise _Hostile("elements nested deeper than in any dump")

    def _end(self, name: str) -> None:
        self.depth -= 1
        self.head_read |= name == "siteinfo"

    def pieces(self, local: str, coding: str) -> list[Split] | None:
        size = os.stat(local).st_size
        cuts = [(0, 0, 0)]                                      # offset in the file, in the XML, pages before
        with open(local, "rb") as file:
            xml_at = file_at = 0                                # bytes of the XML, of the file
            inflate = bz2.BZ2Decompressor()
            while block := file.read(_BLOCK):
                while block:
                    if coding and inflate.eof:
                        if not cuts[1:] and not self.pages and not (self.head_read and file_at <= BEYOND):
                            return None                         # the first stream must be small and hold the head
                        inflate = bz2.BZ2Decompressor()
                        if self.depth == 1 and self.pages and xml_at - cuts[-1][1] >= self.target:
                            cuts.append((file_at, xml_at, self.pages))
                    xml = inflate.decompress(block) if coding else block
                    if xml_at == 0 and xml and not _UTF8.match(xml):
                        return None
                    self.feed(xml, False)
                    unused = inflate.unused_data if coding else b""
                    file_at, xml_at, block = file_at + len(block) - len(unused), xml_at + len(xml), unused
                    if self.nested or (self.starts and not self.head_read):
                        return None
                    for start in self.starts:
                        if not coding and start - cuts[-1][1] >= self.target:
                            cuts.append((start, start, self.pages))
                        self.pages += 1
                    self.starts = []
                if not coding and file_at == len(xml) and not self.head_read:
                    return None                                 # a head beyond the first block
            self.feed(b"", True)
        if len(cuts) == 1 or (coding and not inflate.eof):
            return None
        ends = [*cuts[1:], (size, xml_at, self.pages)]
        return [Split(a[0], b[0], a[2], b[2] - a[2], b[1] - a[1]) for a, b in zip(cuts, ends)]


#: the beginning of a dump in UTF-8: pieces have no XML declaration, so other encodings cannot be cut
_UTF8 = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:mediawiki\b|\?xml\b(?:(?!encoding)[^>]){0,200}"
                   rb"(?:encoding=[\"'](?i:utf-8)[\"'][^>]{0,100})?>)")
