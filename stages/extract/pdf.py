"""Text of a PDF: the text layer by the places of its characters, and OCR where that came to nothing."""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
import zlib
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from stages.document import Document
from stages.extract.ocr import DPI, PIXELS, Engine, engine, page_of, words_of
from stages.extract.pdf_chars import PageChars, pieces_of
from stages.extract.pdf_layout import blocks_of
from stages.extract.pdf_quality import DEGRADED, FEW, Quality, quality_of
from stages.extract.pdf_text import Page, text_of
from stages.stage import Stage, StageConfig, file_sha256, signal

_CONTROL = re.compile("[\x00-\x1f\x7f\ufffe\uffff]")
_STREAM = re.compile(rb"stream\r?\n")
_TWICE = re.compile(rb"/Fl(?:ateDecode)?\s*/Fl(?:ateDecode)?\b")
_PASSWORD = (pdfium_c.FPDF_ERR_PASSWORD, pdfium_c.FPDF_ERR_SECURITY)
#: confidence of OCR below which a picture is tried upside down
_SURE = 60
#: longest side of a page, points (ISO 32000-1, annex C: 14,400)
_SIDE = 14_400
#: objects of a page that are looked at for a picture that covers it
_OBJECTS = 2_000


class _Read(NamedTuple):
    """A page as it goes into the text. `route`: t text layer, o OCR, e nothing is on it, s no text, and none by OCR."""

    page: Page
    quality: Quality
    route: str
    tried: bool = False   # OCR was


class Pdf(Stage):
    """Takes `raw`, makes `text`. Reasons: `not_pdf`, `pdf_too_large` (bytes stored or inflated), `pdf_encrypted`,
    `pdf_damaged`, `pdf_too_many_pages`, `pdf_too_many_chars`, `pdf_no_text` (scanned, mostly: a case for OCR),
    `pdf_ocr_absent` (the same, OCR is asked for and its engine not at hand; `meta.pdf_ocr` says what to install).

    The text layer is read by the places of its characters: columns one after the other, tables as rows of cells between
    bars, code in fixed pitch with its indents, running heads, feet and page numbers left out, words cut at line ends
    mended, lines joined to paragraphs, ligatures spelled out. Text across the page's main direction is left out.

    `ocr: tesseract` or `rapidocr` reads, by outcome, the pages whose text layer is missing (less than 16 characters,
    less than 200 over a picture of half the page) or degraded (confidence below 50), and keeps what it is surer of. At
    most `ocr_pages` a document; a page that exceeds its CPU seconds or memory sends the document to quarantine.

    Kept in meta, a character a page: `pdf_routes` (t text layer, o OCR, e empty, s no text though something is on it,
    x does not load) and `pdf_confidence` (0 to 9). Signals: `pdf_pages`; `pdf_chars_per_page`, mean; `pdf_garbled`, the
    share of characters that are U+FFFD, private or control (a broken font encoding); `pdf_spaces`, the share that are
    spaces; `pdf_wordlike`, the share of words that look like words (1 where there are none); `pdf_confidence`, mean, 0
    to 1; `pdf_ocr`, the share of pages read by OCR. PDFium may crash on a damaged file; the engine then quarantines it.
    """

    name = "pdf"
    version = 2
    #: every rule here is in integers, but PDFium decides in floating point where words and lines end, and draws pages
    #: in it, and OCR is a neural network: the output may depend on the machine
    exact = False
    libraries = ("pypdfium2",)
    extracts = True
    memory_mb = 800
    signals: ClassVar[tuple[str, ...]] = ("pdf_pages", "pdf_chars_per_page", "pdf_garbled", "pdf_spaces",
                                          "pdf_wordlike", "pdf_confidence", "pdf_ocr")

    class Config(StageConfig):
        max_bytes: int = signal(128 << 20, "largest file, bytes", gt=0)
        max_inflated: int = signal(1 << 30, "most bytes its streams may inflate to", gt=0)
        max_pages: int = signal(5_000, "most pages", gt=0)
        max_chars: int = signal(20_000_000, "most characters of text", gt=0)
        ocr: Literal["none", "tesseract", "rapidocr"] = signal("none", "what reads pages without usable text")
        ocr_languages: str = signal("eng", "tesseract's names of languages, joined by +",
                                    pattern=r"^[A-Za-z]\w*(\+[A-Za-z]\w*)*$")
        ocr_pages: int = signal(50, "most pages of a document read by OCR", gt=0)
        ocr_cpu_s: int = signal(20, "CPU seconds of OCR a page may take", gt=0)
        ocr_memory_mb: int = signal(2_000, "memory OCR may take, MB", gt=0)

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self._engine = engine(self.config.ocr, self.config.ocr_languages) if self.config.ocr != "none" else ""
        if isinstance(self._engine, Engine):
            self.libraries = (*Pdf.libraries, *self._engine.libraries)
            self.memory_mb = Pdf.memory_mb + self.config.ocr_memory_mb

    def resource_files(self) -> dict[str, str]:
        """The engine's program and models."""
        return dict(self._engine.files) if isinstance(self._engine, Engine) else {}

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        """With OCR also over the engine's program and models, and over whether they are there."""
        found = super().key(roles)
        if self.config.ocr == "none" or "resource" not in roles:
            return found
        files = sorted((name, file_sha256(path)) for name, path in self.resource_files().items())
        told = repr((found, isinstance(self._engine, Engine), files)).encode()
        return hashlib.blake2b(told, digest_size=16).hexdigest()

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
        missing = quality.chars < FEW or (quality.chars < 200 and _pictured(page))
        if not missing and quality.confidence >= DEGRADED:
            return _Read(Page(blocks_of(chars), chars.height), quality, "t")
        route = "t" if quality.chars else "s" if pdfium_c.FPDFPage_CountObjects(page.raw) > 0 else "e"
        tried = False
        if isinstance(self._engine, Engine) and route != "e" and tries < self.config.ocr_pages:
            image, dpi = drawn(page)
            if tried := inked(image):
                seen, sure = self._see(self._engine, image, dpi)
                if seen.chars > 2 * quality.chars if missing else sure > quality.confidence:
                    told = quality_of(seen)._replace(confidence=sure)
                    return _Read(Page(blocks_of(seen), seen.height), told, "o", tried)
            elif route == "s":
                route = "e"
        return _Read(Page(blocks_of(chars), chars.height), quality, route, tried)

    def _see(self, engine: Engine, image: np.ndarray, dpi: int) -> tuple[PageChars, int]:
        """What OCR reads in a picture, and how surely (0 to 99). One that it is not sure of may stand on its head."""
        found = []
        for picture in (image, image[::-1, ::-1]):
            words = words_of(engine, picture, self.config.ocr_cpu_s, self.config.ocr_memory_mb)
            found.append(page_of(words, image.shape[1], image.shape[0], dpi))
            if found[-1][1] >= _SURE or not words:
                break
        return max(found, key=lambda page: page[1])

    def _finish(self, doc: Document, file: pdfium.PdfDocument, reads: list[_Read | None]) -> str | None:
        good = [read for read in reads if read is not None]
        if len(good) < len(reads):
            doc.meta["pdf_bad_pages"] = len(reads) - len(good)
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
        if isinstance(self._engine, str) and self._engine and "s" in routes:
            doc.meta["pdf_ocr"] = self._engine
        title = file.get_metadata_value("Title").strip()
        if title:
            doc.meta["title"] = _CONTROL.sub("", title)[:500]
        doc.text = text_of([read.page for read in good])
        if doc.text:
            return None
        return "pdf_ocr_absent" if "pdf_ocr" in doc.meta else "pdf_no_text"


def _pictured(page: pdfium.PdfPage) -> bool:
    """Whether a picture covers half of the page: text over it is a stamp, or a poor hidden layer."""
    left, bottom, right, top = page.get_bbox()
    sides = [ctypes.c_float() for _ in range(4)]
    for k in range(min(pdfium_c.FPDFPage_CountObjects(page.raw), _OBJECTS)):
        thing = pdfium_c.FPDFPage_GetObject(page.raw, k)
        if pdfium_c.FPDFPageObj_GetType(thing) == pdfium_c.FPDF_PAGEOBJ_IMAGE and \
                pdfium_c.FPDFPageObj_GetBounds(thing, *sides):
            x0, y0, x1, y1 = (side.value for side in sides)
            wide, high = min(x1, right) - max(x0, left), min(y1, top) - max(y0, bottom)
            if wide > 0 and high > 0 and 2 * wide * high >= (right - left) * (top - bottom):
                return True
    return False


def drawn(page: pdfium.PdfPage) -> tuple[np.ndarray, int]:
    """A picture (height, width) uint8 of a page as it is shown, and its dots to the inch: DPI, or less (PIXELS). A page
    larger than PDF allows is blank."""
    width, height = page.get_size()
    if not (0 < width <= _SIDE and 0 < height <= _SIDE):
        return np.full((1, 1), 255, np.uint8), DPI
    dpi = max(1, min(DPI, math.isqrt(int(PIXELS * 72 * 72 / max(1.0, width * height)))))
    return page.render(scale=dpi / 72, grayscale=True).to_numpy().copy(), dpi


def inked(image: np.ndarray) -> bool:
    """Whether there is anything on it: more than one dark dot in 50,000."""
    return 50_000 * int((image < 128).sum()) > image.size


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
