"""The step `pdf`, which extracts the text of a PDF: from the text layer (the characters that the file stores, with
their positions), or by OCR where the text layer is missing or unusable."""

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
from stages.extract.pdf.cipher import is_shifted
from stages.extract.pdf.layout import PdfPage, blocks_of
from stages.extract.pdf.ocr import LIBRARIES, PROGRAMS, OcrEngine, engine, glyphs, page_of, words_of
from stages.extract.pdf.picture import DECODED, dots, draw, pictures, size
from stages.extract.pdf.quality import DEGRADED, FEW, TextQuality, quality_of
from stages.extract.pdf.text import text_of
from stages.stage import Stage, StageConfig, file_sha256, signal

_CONTROL = re.compile("[\x00-\x1f\x7f\ufffe\uffff]")
_STREAM = re.compile(rb"stream\r?\n")
_TWICE = re.compile(rb"/Fl(?:ateDecode)?\s*/Fl(?:ateDecode)?\b")
_PASSWORD = (pdfium_c.FPDF_ERR_PASSWORD, pdfium_c.FPDF_ERR_SECURITY)
#: OCR text of this confidence or less is discarded: it comes from a photograph, or from a script that the OCR languages
#: lack. Measured: Cyrillic pages read with `eng` have 41 to 56, Latin pages read with `rus` 24 to 36. Pages read with
#: their own language have 61 or more; the lowest are tables of contents with dot leaders.
_SURE = 58
#: letters of `meta.pdf_routes` → names of the routes in the report
ROUTES = {"t": "text_layer", "o": "ocr", "e": "empty", "s": "no_text", "x": "unreadable", "c": "cipher"}
#: routes of pages that nothing could read though something is on them
UNREAD = "sxc"
#: a page with fewer characters that OCR is unsure of may be upside down
_LITTLE = 500
#: a text layer with fewer characters, over a picture of half the page, is only a stamp on it
_STAMP = 200

#: Fonts that are not embedded in the file must look the same on every machine, so PDFium's own fonts replace them.
_NO_FONTS = pdfium_c.FPDF_SYSFONTINFO(version=1)
pdfium_c.FPDF_SetSystemFontInfo(_NO_FONTS)


class _PageRead(NamedTuple):
    """A page after it was read. `route` says how:

    - t: by its text layer
    - o: by OCR
    - e: the page is empty
    - s: the page shows something but gave no text, even if OCR was not tried
    - c: the text layer has other letters than the page shows, and OCR did not help
    """

    page: PdfPage
    quality: TextQuality
    route: str
    ocr_tried: bool = False


class Pdf(Stage):
    """Extracts the text of a PDF from its text layer (the characters that the file stores), or by OCR where the text
    layer is missing or unusable.

    Reads the file from `raw` and writes `text`. Reasons for dropping a document:

    - `not_pdf`, `pdf_encrypted`, `pdf_damaged`
    - `pdf_too_large`: bytes of the file, or bytes after decompression
    - `pdf_too_many_pages`, `pdf_too_many_chars`
    - `pdf_no_text`: no page gave text; most such files are scans, which need OCR
    - `pdf_cipher`: no page gave text, and some pages have shifted letters (see below)

    The text layer is read by the positions of its characters: columns one after the other, tables as rows of cells
    between bars, fixed-pitch code with its indents. Running heads, feet and page numbers are left out. Words cut at
    line ends are mended, lines are joined to paragraphs, and ligatures are spelled out. Text that runs in another
    direction than most of the page is left out.

    With `ocr: tesseract` or `ocr: rapidocr`, OCR reads the pages whose text layer is

    - missing: fewer than 16 characters, or fewer than 200 over a picture of half the page
    - degraded: confidence below 50
    - made of shifted letters: other letters than those drawn (`stages.extract.pdf.cipher`). Without OCR, such a page
      gives no text.

    OCR text is used only if its confidence exceeds 58. It must also have a higher confidence than the text layer. If
    the text layer is missing, the OCR text must instead be more than twice as long as the few characters there.

    OCR reads at most `ocr_pages` pages of a document, and no page with too many letters or with pictures of too many
    pixels. If the OCR of a page exceeds its limits of CPU seconds or memory, the document is quarantined. An engine or
    language that is not installed stops the run before it begins.

    `meta.pdf_routes` and `meta.pdf_confidence` have one character per page: how the page was read (t text layer, o OCR,
    e empty page, s no text on a page that shows something, x page that does not load, c shifted letters), and its
    confidence (0 to 9). `meta.title` is the title that the file states, if any. The signals are:

    - `pdf_pages`: number of pages; `pdf_chars_per_page`: mean number of characters of the pages that load
    - `pdf_garbled`: share of characters that are U+FFFD, private or control characters (a broken font encoding)
    - `pdf_spaces`: share of characters that are spaces
    - `pdf_wordlike`: share of words that look like words (1 where there are none)
    - `pdf_confidence`: mean over the pages that load, 0 to 1
    - `pdf_ocr`: share of pages read by OCR
    - `pdf_unread`: share of pages that show something but gave no text (s, x, c)

    PDFium may crash on a damaged file; the document is then quarantined.
    """

    name = "pdf"
    version = 4
    cost_ms, leaves = 2.5, 0.05
    #: Every rule here is in integers. But PDFium finds words and lines and draws pages in floating point, and OCR is a
    #: neural network, so the output may depend on the machine.
    exact = False
    libraries: tuple[str, ...] = ("pypdfium2",)
    extracts = True
    memory_mb = 800
    signals: tuple[str, ...] = ("pdf_pages", "pdf_chars_per_page", "pdf_garbled", "pdf_spaces",
                                "pdf_wordlike", "pdf_confidence", "pdf_ocr", "pdf_unread")
    scores: ClassVar[tuple[str, ...]] = ()              # the report shows pages instead (`counts`)

    class Config(StageConfig):
        max_bytes: int = signal(128 << 20, "largest file, bytes; beyond: pdf_too_large", gt=0)
        max_inflated: int = signal(1 << 30, "most bytes after decompression; beyond: pdf_too_large", gt=0)
        max_pages: int = signal(5_000, "most pages; beyond: pdf_too_many_pages", gt=0)
        max_chars: int = signal(20_000_000, "most characters of text; beyond: pdf_too_many_chars", gt=0)
        ocr: Literal["none", "tesseract", "rapidocr"] = signal("none", "OCR engine for pages without usable text")
        ocr_languages: str = signal("eng", "tesseract's names of languages, joined by +: deu+eng, script/Cyrillic",
                                    pattern=r"^(script/)?[A-Za-z]\w*(\+(script/)?[A-Za-z]\w*)*$")
        ocr_pages: int = signal(50, "most pages of a document read by OCR", gt=0)
        # Four times the CPU time of a page with the most letters that are read (`ocr.GLYPHS`). On a busy machine such a
        # page takes twice as long.
        ocr_cpu_s: int = signal(60, "most CPU seconds for drawing one page and reading it by OCR", gt=0)
        ocr_memory_mb: int = signal(1_200, "most memory for drawing one page and reading it by OCR, MB", gt=0)

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.libraries = (*Pdf.libraries, *LIBRARIES[self.config.ocr])
        if self.config.ocr != "none":
            self.memory_mb = Pdf.memory_mb + self.config.ocr_memory_mb

    @cached_property
    def _engine(self) -> OcrEngine | None:
        if self.config.ocr == "none":
            return None
        glyphs(_specimen())                              # compiles it here, not in every process that draws
        return engine(self.config.ocr, self.config.ocr_languages)

    def resource_files(self) -> dict[str, str]:
        """Returns {name: path} of the OCR engine's program, libraries and models; {} without OCR. Raises MissingEngine
        if the OCR engine is not installed."""
        return dict(self._engine.files) if self._engine else {}

    def problems(self) -> dict[str, str]:
        if self.config.ocr == "rapidocr" and self.config.ocr_languages != "eng":
            return {"ocr_languages": "rapidocr has one model, of English and Chinese; take `ocr: tesseract`"}
        return {}

    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        """Returns the step's key, a hash of everything that determines its results. With OCR the key also covers the
        contents of the engine's program, libraries and models."""
        files = sorted((name, file_sha256(path)) for name, path in self.resource_files().items())
        base_key = super().key(roles)
        if not files or "resource" not in roles:
            return base_key
        return hashlib.blake2b(repr((base_key, files)).encode(), digest_size=16).hexdigest()

    def setup(self) -> None:
        """Check that the OCR engine works on this machine. Without this check, a machine with a broken OCR engine would
        quarantine every scanned document."""
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
        reads: list[_PageRead | None] = []
        chars = tries = 0
        for number in range(count):
            try:
                page = file[number]
            except pdfium.PdfiumError:
                reads.append(None)
                continue
            try:
                read = self._read(page, self.config.max_chars - chars, tries)
            except pdfium.PdfiumError:
                read = None
            finally:
                page.close()
            if read is not None:
                chars += read.quality.chars
                tries += read.ocr_tried
                if chars > self.config.max_chars:
                    return "pdf_too_many_chars"
            reads.append(read)
        return self._finish(doc, file, reads)

    def _read(self, page: pdfium.PdfPage, cap: int, tries: int) -> _PageRead | None:
        """Read one page. Its text layer is used if it is neither missing nor degraded. Otherwise OCR is tried, unless
        it was tried on `ocr_pages` earlier pages of the document (`tries` is their number). OCR's text is used if it is
        better than the text layer. `cap` is the number of characters that may still be added to the document."""
        layer = page.get_textpage()
        try:
            chars = pieces_of(layer.raw, min(max(layer.count_chars(), 0), cap + 1), page.get_bbox())
        finally:
            layer.close()
        quality = quality_of(chars)
        cipher = is_shifted([piece.text for piece in chars.pieces])
        if cipher:
            quality = quality._replace(confidence=0)
        covered, pixels = pictures(page) if quality.chars < _STAMP or quality.confidence < DEGRADED else (False, 0)
        missing = quality.chars < FEW or (quality.chars < _STAMP and covered)
        if not missing and quality.confidence >= DEGRADED:
            return _PageRead(PdfPage(blocks_of(chars), chars.height), quality, "t")
        route = "t" if quality.chars else "s" if pdfium_c.FPDFPage_CountObjects(page.raw) > 0 else "e"
        ocr_tried = False
        dpi = dots(page) if pixels <= DECODED and tries < self.config.ocr_pages else 0
        if self._engine and dpi and route != "e":
            ocr = self._read_by_ocr(self._engine, page, dpi)
            if ocr_tried := ocr is not None:
                ocr_quality = quality_of(ocr[0])._replace(confidence=ocr[1])
                is_better = ocr_quality.chars > 2 * quality.chars if missing else ocr[1] > quality.confidence
                if is_better and ocr[1] > _SURE:
                    return _PageRead(PdfPage(blocks_of(ocr[0]), ocr[0].height), ocr_quality, "o", ocr_tried)
            elif route == "s":
                route = "e"
        if cipher:
            return _PageRead(PdfPage([], chars.height), quality, "c", ocr_tried)
        return _PageRead(PdfPage(blocks_of(chars), chars.height), quality, route, ocr_tried)

    def _read_by_ocr(self, engine: OcrEngine, page: pdfium.PdfPage, dpi: int) -> tuple[PageChars, int] | None:
        """Reads a page by OCR. Returns (words and their positions, in the form of a text layer; confidence, 0 to 99);
        None for a blank page. A page of little text and low confidence is also read upside down, since OCR engines
        detect the orientation only of longer text."""
        best: tuple[PageChars, int] | None = None
        for turn in (0, 180):
            words = words_of(engine, partial(draw, page, dpi, turn), self.config.ocr_cpu_s, self.config.ocr_memory_mb)
            if words is None:
                break
            result = page_of(words, *size(page, dpi), dpi)
            best = result if best is None or result[1] > best[1] else best
            if result[1] > _SURE or not 0 < result[0].chars < _LITTLE:
                break
        return best

    def _finish(self, doc: Document, file: pdfium.PdfDocument, reads: list[_PageRead | None]) -> str | None:
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
        """Returns the numbers of one document that the report of a run adds up over all documents; None when the step
        has not read the document.

        - `docs`: 1
        - `unread`: 1 if a page that shows something gave no text, else 0
        - `pages`: {how a page was read: number of pages}
        - `confidence`: {confidence, "0" to "9": number of pages with text}
        """
        routes = doc.meta.get("pdf_routes")
        if not isinstance(routes, str):
            return None
        sure = (c for c, route in zip(doc.meta.get("pdf_confidence", ""), routes) if route in "to" and c.isdecimal())
        return {"docs": 1, "unread": int(any(route in routes for route in UNREAD)), "confidence": dict(Counter(sure)),
                "pages": dict(Counter(ROUTES[route] for route in routes if route in ROUTES))}


def title_of(file: pdfium.PdfDocument) -> str:
    """Returns the title in the metadata of a PDF, at most 500 characters; "" if there is none. Halves of surrogate
    pairs are removed."""
    size = pdfium_c.FPDF_GetMetaText(file.raw, b"Title", None, 0)
    buffer = ctypes.create_string_buffer(size)
    pdfium_c.FPDF_GetMetaText(file.raw, b"Title", buffer, size)
    return _CONTROL.sub("", buffer.raw[:max(0, size - 2)].decode("utf-16-le", "ignore").strip())[:500]


def _specimen() -> np.ndarray:
    """Returns a picture with a dark area, to test whether the OCR engine works."""
    image = np.full((100, 100), 255, np.uint8)
    image[40:60, 20:80] = 0
    return image


def inflates_beyond(data: bytes, cap: int) -> bool:
    """Whether the Flate streams of a PDF inflate to more than `cap` bytes in all. The function inflates the streams to
    count their bytes, and discards them.

    Deflate shrinks data by a factor of at most 1,032, so a small file needs no check. A file with a stream that is
    deflated twice always counts as too large.
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
