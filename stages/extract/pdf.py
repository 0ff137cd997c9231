"""Text of a PDF by its text layer (PDFium): page by page, lines joined to paragraphs. No OCR."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter
from typing import ClassVar

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from stages.document import Document
from stages.stage import Stage, StageConfig, signal

#: PDFium's mark for a hyphen at a line end that it joined
_HYPHEN = re.compile("[\x02\ufffe]\\s*")
_SOFT = re.compile("\u00ad\\s*")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")
_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st",
                            "\xa0": " ", "\u2002": " ", "\u2003": " ", "\u2009": " ", "\u200b": ""})
_ITEM = re.compile(r"(?:[•◦▪‣·*–—-]|\(?\d{1,3}[.)]|\(?[a-zA-Z][.)]|\d+(?:\.\d+)+)\s")
_DIGITS = re.compile(r"\d+")
_STREAM = re.compile(rb"stream\r?\n")
_TWICE = re.compile(rb"/Fl(?:ateDecode)?\s*/Fl(?:ateDecode)?\b")
_PASSWORD = (pdfium_c.FPDF_ERR_PASSWORD, pdfium_c.FPDF_ERR_SECURITY)
#: shortest part of the usual line length that makes a line look wrapped rather than ended
_WRAPPED = 0.75
_ENDS = (".", "!", "?", ":", ";", "。", "！", "？", "：", "؟", "।")


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
    version = 1
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
        pages: list[str] = []
        bad = left = 0
        left = self.config.max_chars
        for number in range(count):
            text = _page_text(file, number, left)
            if text is None:
                bad += 1
                continue
            left -= len(text)
            if left < 0:
                return "pdf_too_many_chars"
            pages.append(text)
        if bad:
            doc.meta["pdf_bad_pages"] = bad
        if not pages:
            return "pdf_damaged"
        size = sum(map(len, pages))
        doc.signals["pdf_chars_per_page"] = size / len(pages)
        doc.signals["pdf_garbled"] = sum(map(_garbled, pages)) / max(size, 1)
        title = file.get_metadata_value("Title").strip()
        if title:
            doc.meta["title"] = _CONTROL.sub("", title)[:500]
        doc.text = paragraphs(pages)
        return None if doc.text else "pdf_no_text"


def _page_text(file: pdfium.PdfDocument, number: int, cap: int) -> str | None:
    """Text of a page with PDFium's line ends, None if it does not load; cut one character beyond `cap`."""
    try:
        page = file[number]
    except pdfium.PdfiumError:
        return None
    try:
        layer = page.get_textpage()
        try:
            chars = layer.count_chars()
            text = layer.get_text_range(0, min(chars, cap + 1)) if chars > 0 else ""
        finally:
            layer.close()
    except pdfium.PdfiumError:
        return None
    finally:
        page.close()
    # characters outside the basic plane arrive as surrogate pairs, broken fonts leave lone ones
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _garbled(text: str) -> int:
    """Characters that a broken font encoding leaves; the hyphen mark is none."""
    return sum(1 for c in text if c == "\ufffd" or (not c.isprintable() and c not in "\r\n\t \x02\ufffe\xa0\xad\u200b"
                                                    and unicodedata.category(c) in ("Cc", "Co", "Cn")))


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


def paragraphs(pages: list[str]) -> str:
    """Text of the pages as paragraphs, one a line, with a blank line between pages that do not run on."""
    cleaned = [_lines(page) for page in pages]
    furniture = _furniture(cleaned)
    out: list[str] = []
    for lines in cleaned:
        edge = _edge(lines)
        kept = [line for i, line in enumerate(lines) if i not in edge or _DIGITS.sub("#", line) not in furniture]
        if not kept:
            continue
        lengths = sorted(map(len, kept))
        usual = lengths[int(0.9 * (len(lengths) - 1))]
        runs_on = False
        for i, line in enumerate(kept):
            if i == 0 and out:
                runs_on = line[0].islower() and not out[-1].endswith(_ENDS)
                if not runs_on:
                    out.append("")
            if out and runs_on and not _ITEM.match(line):
                out[-1] += ("" if _wide(out[-1][-1]) and _wide(line[0]) else " ") + line
            else:
                out.append(line)
            following = kept[i + 1] if i + 1 < len(kept) else ""
            runs_on = len(line) >= _WRAPPED * usual and (not line.endswith(_ENDS) or following[:1].islower())
    return "\n".join(out).strip()


def _lines(page: str) -> list[str]:
    text = _SOFT.sub("", _HYPHEN.sub("", page)).translate(_LIGATURES)
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return [line for raw in text.split("\n") if (line := " ".join(raw.split()))]


def _furniture(pages: list[list[str]]) -> set[str]:
    """Running heads, feet and page numbers: lines at the edge of at least half of four or more pages, digits aside."""
    if len(pages) < 4:
        return set()
    seen: Counter[str] = Counter()
    for lines in pages:
        seen.update({_DIGITS.sub("#", lines[i]) for i in _edge(lines)})
    return {line for line, n in seen.items() if 2 * n >= len(pages)}


def _edge(lines: list[str]) -> set[int]:
    """Where a page's running head and foot may stand: its first and last line, the next ones too on a full page."""
    n = len(lines)
    return {0, 1, n - 2, n - 1} if n >= 8 else {0, n - 1} if n >= 3 else set()


def _wide(char: str) -> bool:
    """Scripts written without spaces between words."""
    return "\u2e80" <= char <= "\u9fff" or "\uac00" > char >= "\ua000" or "\uf900" <= char <= "\uffef"
