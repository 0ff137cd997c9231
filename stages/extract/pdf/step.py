"""Text of a PDF: the text layer by the places of its characters, and OCR where that came to nothing."""

from __future__ import annotations

import ctypes
import hashlib
import re
import zlib
from collections import Counter
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from stages.document import Document
from stages.extract.pdf.chars import PageChars, pieces_of
from stages.extract.pdf.cipher import shifted
from stages.extract.pdf.layout import blocks_of
from stages.extract.pdf.ocr import LIBRARIES, PROGRAMS, Engine, engine, glyphs, page_of, words_of
from stages.extract.pdf.picture import DECODED, dots, draw, pictures, size
from stages.extract.pdf.quality import DEGRADED, FEW, Quality, quality_of
from stages.extract.pdf.text import Page, text_of
from stages.stage import Stage, StageConfig, file_sha256, signal

_CONTROL = re.compile("[\x00-\x1f\x7f\ufffe\uffff]")
_STREAM = re.compile(rb"stream\r?\n")
_TWICE = re.compile(rb"/Fl(?:ateDecode)?\s*/Fl(?:ateDecode)?\b")
_PASSWORD = (pdfium_c.FPDF_ERR_PASSWORD, pdfium_c.FPDF_ERR_SECURITY)
#: confidence below which what OCR reads is nothing: a photograph, another script than its languages have (measured:
#: pages of Cyrillic by `eng` 41 to 56, of Latin by `rus` 24 to 36; in their language from 61, contents with leaders)
_SURE = 58
#: letters of `meta.pdf_routes`
ROUTES = {"t": "text_layer", "o": "ocr", "e": "empty", "s": "no_text", "x": "unreadable", "c": "cipher"}
#: those of pages that nothing could read though something is on them
UNREAD = "sxc"
#: characters of a page that may stand on its head
_LITTLE = 500
#: characters below which a text layer over a picture of half the page is a stamp on it
_STAMP = 200

#: what a font that is not in the file is like must not depend on which fonts this machine has: PDFium's own stand in
_NO_FONTS = pdfium_c.FPDF_SYSFONTINFO(version=1)
pdfium_c.FPDF_SetSystemFontInfo(_NO_FONTS)


class _Read(NamedTuple):
    """A page as it goes into the text. `route`: t text layer, o OCR, e nothing is on it, s no text, and none by OCR,
    c letters that are not those drawn, and none by OCR."""

    page: Page
    quality: Quality
    route: str
    tried: bool = False   # OCR was


class Pdf(Stage):
    """The text of a PDF, from its text layer and, where that fails, by OCR.

    Takes `raw`, makes `text`. Reasons: `not_pdf`, `pdf_too_large` (bytes stored or inflated), `pdf_encrypted`,
    `pdf_damaged`, `pdf_too_many_pages`, `pdf_too_many_chars`, `pdf_no_text` (scanned, mostly: a case for OCR),
    `pdf_cipher` (its fonts give other letters than they draw, on every page that has text).

    The text layer is read by the places of its characters: columns one after the other, tables as rows of cells between
    bars, code in fixed pitch with its indents, running heads, feet and page numbers left out, words cut at line ends
    mended, lines joined to paragraphs, ligatures spelled out. Text across the page's main direction is left out.

    `ocr: tesseract` or `rapidocr` reads, by outcome, the pages whose text layer is missing (less than 16 characters,
    less than 200 over a picture of half the page), degraded (confidence below 50) or of shifted letters, and keeps what
    it is surer of. At most `ocr_pages` a document; pages are not read whose pictures have too many pixels, or more
    letters than a budget is enough for. A page that exceeds its CPU
    seconds or memory, which are not those of the worker, sends the document to quarantine. An engine or language that
    is not installed ends the run before it begins.

    A page of shifted letters (`pdf_cipher.shifted`) that OCR does not read gives no text.

    Kept in meta, a character a page: `pdf_routes` (t text layer, o OCR, e empty, s no text though something is on it,
    x does not load, c shifted letters) and `pdf_confidence` (0 to 9). Signals: `pdf_pages`; `pdf_chars_per_page`,
    mean; `pdf_garbled`, the share of characters that are U+FFFD, private or control (a broken font encoding);
    `pdf_spaces`, the share that are spaces; `pdf_wordlike`, the share of words that look like words (1 where there
    are none); `pdf_confidence`, mean, 0 to 1; `pdf_ocr`, the share of pages read by OCR; `pdf_unread`, the share of
    pages that nothing could read though something is on them (s, x, c). PDFium may crash on a damaged file; the
    engine then quarantines it.
    """

    name = "pdf"
    version = 4
    cost_ms, leaves = 2.5, 0.05
    #: every rule here is in integers, but PDFium decides in floating point where words and lines end, and draws pages
    #: in it, and OCR is a neural network: the output may depend on the machine
    exact = False
    libraries: tuple[str, ...] = ("pypdfium2",)
    extracts = True
    memory_mb = 800
    signals: tuple[str, ...] = ("pdf_pages", "pdf_chars_per_page", "pdf_garbled", "pdf_spaces",
                                "pdf_wordlike", "pdf_confidence", "pdf_ocr", "pdf_unread")
    scores: ClassVar[tuple[str, ...]] = ()              # pages are what the report shows: `counts`

    class Config(StageConfig):
        max_bytes: int = signal(128 << 20, "largest file, bytes", gt=0)
        max_inflated: int = signal(1 << 30, "most bytes its streams may inflate to", gt=0)
        max_pages: int = signal(5_000, "most pages", gt=0)
        max_chars: int = signal(20_000_000, "most characters of text", gt=0)
        ocr: Literal["none", "tesseract", "rapidocr"] = signal("none", "what reads pages without usable text")
        ocr_languages: str = signal("eng", "tesseract's names of languages, joined by +: deu+eng, script/Cyrillic",
                                    pattern=r"^(script/)?[A-Za-z]\w*(\+(script/)?[A-Za-z]\w*)*$")
        ocr_pages: int = signal(50, "most pages of a document read by OCR", gt=0)
        # four times what a page of as many letters as are read (`ocr.GLYPHS`) takes; beside other work it takes twice
        ocr_cpu_s: int = signal(60, "CPU seconds of OCR a page may take, drawing included", gt=0)
        ocr_memory_mb: int = signal(1_200, "memory OCR of a page may take, MB, drawing included", gt=0)

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.libraries = (*Pdf.libraries, *LIBRARIES[self.config.ocr])
        if self.config.ocr != "none":
            self.memory_mb = Pdf.memory_mb + self.config.ocr_memory_mb

    @cached_property
    def _engine(self) -> Engine | None:
        if self.config.ocr == "none":
            return None
        glyphs(_specimen())                              # compiles it here, not in every process that draws
        return engine(self.config.ocr, self.config.ocr_languages)

    def resource_files(self) -> dict[str, str]:
        """The engine's program, its libraries and models. Raises MissingEngine."""
        return dict(self._engine.files) if self._engine else {}

    def problems(self) -> dict[str, str]:
        if self.config.ocr == "rapidocr" and self.config.ocr_languages != "eng":
            return {"ocr_languages": "rapidocr has one model, of English and Chinese; take `ocr: tesseract`"}
        return {}

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        """With OCR also over the engine's program, libraries and models."""
        files = sorted((name, file_sha256(path)) for name, path in self.resource_files().items())
        found = super().key(roles)
        if not files or "resource" not in roles:
            return found
        return hashlib.blake2b(repr((found, files)).encode(), digest_size=16).hexdigest()

    def setup(self) -> None:
        """Sees that the engine reads: one that does not here would cost every scan, and none is to blame."""
        for field, message in self.problems().items():
            raise ValueError(f"pdf: {field}: {message}")
        if self._engine:
            words_of(self._engine, _specimen, self.config.ocr_cpu_s, self.config.ocr_memory_mb)

    def programs(self) -> tuple[str, ...]:
        return PROGRAMS[self.config.ocr]

    def process(self, doc: Document) -> str | None:
        data = doc.raw
        if data is None:
            return None if doc.text else "pdf_no_text"
        if b"%PDF-" not in data[:1024]:
            return "not_pdf"
        if len(data) > self.config.max_bytes or inflates_beyond(data, self.config.max_inflated):
            return "pdf_too_large"
        try:
            file = pdfium.PdfDocument(data)
        except pdfium.PdfiumError as e:
            return "pdf_encrypted" if e.err_code in _PASSWORD else "pdf_damaged"
        try:
            return self._extract(doc, file)
        finally:
            file.close()

    def _extract(self, doc: Document, file: pdfium.PdfDocument) -> str | None:
        count = len(file)
        doc.signals["pdf_pages"] = float(count)
        if count > self.config.max_pages:
            return "pdf_too_many_pages"
        reads: list[_Read | None] = []
        chars = tries = 0
        for number in range(count):
            try:
                page = file[number]
            except pdfium.PdfiumError:
                reads.append(None)
                continue
            try:
                found = self._read(page, self.config.max_chars - chars, tries)
            except pdfium.PdfiumError:
                found = None
            finally:
                page.close()
            if found is not None:
                chars += found.quality.chars
                tries += found.tried
                if chars > self.config.max_chars:
                    return "pdf_too_many_chars"
            reads.append(found)
        return self._finish(doc, file, reads)

    def _read(self, page: pdfium.PdfPage, cap: int, tries: int) -> _Read | None:
        """One page: its text layer, or OCR where that is missing or degraded, fewer than `ocr_pages` were tried, and it
        reads more surely."""
        layer = page.get_textpage()
        try:
            chars = pieces_of(layer.raw, min(max(layer.count_chars(), 0), cap + 1), page.get_bbox())
        finally:
            layer.close()
        quality = quality_of(chars)
        cipher = shifted([piece.text for piece in chars.pieces])
        if cipher:
            quality = quality._replace(confidence=0)
        covered, pixels = pictures(page) if quality.chars < _STAMP or quality.confidence < DEGRADED else (False, 0)
        missing = quality.chars < FEW or (quality.chars < _STAMP and covered)
        if not missing and quality.confidence >= DEGRADED:
            return _Read(Page(blocks_of(chars), chars.height), quality, "t")
        route = "t" if quality.chars else "s" if pdfium_c.FPDFPage_CountObjects(page.raw) > 0 else "e"
        tried = False
        dpi = dots(page) if pixels <= DECODED and tries < self.config.ocr_pages else 0
        if self._engine and dpi and route != "e":
            seen = self._see(self._engine, page, dpi)
            if tried := seen is not None:
                told = quality_of(seen[0])._replace(confidence=seen[1])
                more = told.chars > 2 * quality.chars if missing else seen[1] > quality.confidence
                if more and seen[1] > _SURE:
                    return _Read(Page(blocks_of(seen[0]), seen[0].height), told, "o", tried)
            elif route == "s":
                route = "e"
        if cipher:
            return _Read(Page([], chars.height), quality, "c", tried)
        return _Read(Page(blocks_of(chars), chars.height), quality, route, tried)

    def _see(self, engine: Engine, page: pdfium.PdfPage, dpi: int) -> tuple[PageChars, int] | None:
        """What OCR reads of a page, and how surely (0 to 99); None of a blank one. A page of little text that it is not
        sure of may stand on its head: engines tell that only from more."""
        best: tuple[PageChars, int] | None = None
        for turn in (0, 180):
            words = words_of(engine, partial(draw, page, dpi, turn), self.config.ocr_cpu_s, self.config.ocr_memory_mb)
            if words is None:
                break
            found = page_of(words, *size(page, dpi), dpi)
            best = found if best is None or found[1] > best[1] else best
            if found[1] > _SURE or not 0 < found[0].chars < _LITTLE:
                break
        return best

    def _finish(self, doc: Document, file: pdfium.PdfDocument, reads: list[_Read | None]) -> str | None:
        good = [read for read in reads if read is not None]
        if not good:
            return "pdf_damaged"
        routes = "".join("x" if read is None else read.route for read in reads)
        doc.meta["pdf_routes"] = routes
        doc.meta["pdf_confidence"] = "".join("0" if read is None else str(read.quality.confidence // 10)
                                             for read in reads)
        chars, spaces, garbled, words, wordlike = (sum(read.quality[k] for read in good) for k in range(5))
        doc.signals["pdf_chars_per_page"] = chars / len(good)
        doc.signals["pdf_garbled"] = garbled / max(chars, 1)
        doc.signals["pdf_spaces"] = spaces / max(chars + spaces, 1)
        doc.signals["pdf_wordlike"] = wordlike / words if words else 1.0
        doc.signals["pdf_confidence"] = sum(read.quality.confidence for read in good) / (99 * len(good))
        doc.signals["pdf_ocr"] = routes.count("o") / len(reads)
        doc.signals["pdf_unread"] = sum(map(routes.count, UNREAD)) / len(reads)
        if title := title_of(file):
            doc.meta["title"] = title
        doc.text = text_of([read.page for read in good])
        return None if doc.text else "pdf_cipher" if "c" in routes else "pdf_no_text"

    def counts(self, doc: Document) -> dict[str, Any] | None:
        """{docs, unread: documents with pages that nothing could read though something is on them, pages: {route: n},
        confidence: {tenth: pages with text}}."""
        routes = doc.meta.get("pdf_routes")
        if not isinstance(routes, str):
            return None
        sure = (c for c, route in zip(doc.meta.get("pdf_confidence", ""), routes) if route in "to" and c.isdecimal())
        return {"docs": 1, "unread": int(any(route in routes for route in UNREAD)), "confidence": dict(Counter(sure)),
                "pages": dict(Counter(ROUTES[route] for route in routes if route in ROUTES))}


def title_of(file: pdfium.PdfDocument) -> str:
    """The title the file gives itself, at most 500 characters; "" without. Halves of surrogate pairs go."""
    size = pdfium_c.FPDF_GetMetaText(file.raw, b"Title", None, 0)
    buffer = ctypes.create_string_buffer(size)
    pdfium_c.FPDF_GetMetaText(file.raw, b"Title", buffer, size)
    return _CONTROL.sub("", buffer.raw[:max(0, size - 2)].decode("utf-16-le", "ignore").strip())[:500]


def _specimen() -> np.ndarray:
    """A picture with something on it."""
    image = np.full((100, 100), 255, np.uint8)
    image[40:60, 20:80] = 0
    return image


def inflates_beyond(data: bytes, cap: int) -> bool:
    """Whether the Flate streams of a PDF inflate to more than `cap` bytes in all, found by inflating them into nothing.

    Deflate shrinks at most 1,032 to 1, so most files need no look. A stream deflated twice is a bomb by itself.
    """
    if _TWICE.search(data):
        return True
    if len(data) * 1032 <= cap:
        return False
    total = 0
    for start in _STREAM.finditer(data):
        at = start.end()
        if at + 2 > len(data) or data[at] & 0x0F != 8 or (data[at] << 8 | data[at + 1]) % 31:
            continue
        engine = zlib.decompressobj()
        try:
            block = engine.decompress(data[at:at + (1 << 16)], 1 << 20)
            at += 1 << 16
            while True:
                total += len(block)
                if total > cap:
                    return True
                if engine.eof or not (engine.unconsumed_tail or at < len(data)):
                    break
                if not engine.unconsumed_tail:
                    block = engine.decompress(data[at:at + (1 << 16)], 1 << 20)
                    at += 1 << 16
                else:
                    block = engine.decompress(engine.unconsumed_tail, 1 << 20)
        except zlib.error:
            continue
    return False
