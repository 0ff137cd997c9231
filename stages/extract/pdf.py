"""Text of a PDF by its text layer (PDFium): page by page, lines joined to paragraphs. No OCR."""

from __future__ import annotations

import re
import zlib
from typing import ClassVar

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from stages.document import Document
from stages.extract.pdf_chars import PageChars, pieces_of
from stages.extract.pdf_layout import blocks_of
from stages.extract.pdf_text import Page, text_of
from stages.stage import Stage, StageConfig, signal

_CONTROL = re.compile("[\x00-\x1f\x7f\ufffe\uffff]")
_STREAM = re.compile(rb"stream\r?\n")
_TWICE = re.compile(rb"/Fl(?:ateDecode)?\s*/Fl(?:ateDecode)?\b")
_PASSWORD = (pdfium_c.FPDF_ERR_PASSWORD, pdfium_c.FPDF_ERR_SECURITY)

class Pdf(Stage):
    """Takes `raw`, makes `text`. Reasons: `not_pdf`, `pdf_too_large` (bytes stored or inflated), `pdf_encrypted`,
    `pdf_damaged`, `pdf_too_many_pages`, `pdf_too_many_chars`, `pdf_no_text` (scanned, mostly: a case for OCR).

    Ligatures are spelled out, hyphens at line ends removed, wrapped lines joined (a line of at least three quarters of
    the page's usual length that does not end a sentence, or is followed by a small letter), lines that repeat at the
    top or bottom of most pages dropped. A page that does not load is counted in `meta.pdf_bad_pages`. PDFium may crash
    on a damaged file; the engine then quarantines the document.

    Signals: `pdf_pages`; `pdf_chars_per_page`, mean; `pdf_garbled`, the share of characters that are U+FFFD, private or
    control (a broken font encoding; FinePDFs routes such files to OCR).
    """

    name = "pdf"
    version = 2
    #: PDFium lays characters out in floating point: where a line or a word ends may depend on the machine
    exact = False
    libraries = ("pypdfium2",)
    extracts = True
    memory_mb = 800
    signals: ClassVar[tuple[str, ...]] = ("pdf_pages", "pdf_chars_per_page", "pdf_garbled")

    class Config(StageConfig):
        max_bytes: int = signal(128 << 20, "largest file, bytes", gt=0)
        max_inflated: int = signal(1 << 30, "most bytes its streams may inflate to", gt=0)
        max_pages: int = signal(5_000, "most pages", gt=0)
        max_chars: int = signal(20_000_000, "most characters of text", gt=0)

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
        pages: list[Page] = []
        bad = chars = garbled = 0
        for number in range(count):
            found = _page(file, number, self.config.max_chars - chars)
            if found is None:
                bad += 1
                continue
            chars += found.chars
            garbled += found.garbled
            if chars > self.config.max_chars:
                return "pdf_too_many_chars"
            pages.append(Page(blocks_of(found), found.height))
        if bad:
            doc.meta["pdf_bad_pages"] = bad
        if not pages:
            return "pdf_damaged"
        doc.signals["pdf_chars_per_page"] = chars / len(pages)
        doc.signals["pdf_garbled"] = garbled / max(chars, 1)
        title = file.get_metadata_value("Title").strip()
        if title:
            doc.meta["title"] = _CONTROL.sub("", title)[:500]
        doc.text = text_of(pages)
        return None if doc.text else "pdf_no_text"


def _page(file: pdfium.PdfDocument, number: int, cap: int) -> PageChars | None:
    """Characters of a page, at most one beyond `cap`; None if it does not load."""
    try:
        page = file[number]
    except pdfium.PdfiumError:
        return None
    try:
        layer = page.get_textpage()
        try:
            return pieces_of(layer.raw, min(max(layer.count_chars(), 0), cap + 1), page.get_bbox())
        finally:
            layer.close()
    except pdfium.PdfiumError:
        return None
    finally:
        page.close()


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
