"""Main text of a web page."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from stages.document import Document
from stages.extract.encoding import decode
from stages.stage import Stage, StageConfig, signal

#: first bytes of what is certainly no page, whatever the server called it
_BINARY = (b"%PDF-", b"\x89PNG", b"GIF8", b"\xff\xd8\xff", b"PK\x03\x04", b"\x1f\x8b", b"RIFF", b"\x00\x00\x01\x00",
           b"ID3", b"OggS", b"\x7fELF", b"MZ", b"Rar!", b"7z\xbc\xaf", b"BZh", b"\xfd7zXZ", b"wOFF", b"wOF2")
#: tags that make an undeclared text a page (WHATWG MIME sniffing §7.1, and what pages without <html> begin with)
_PAGE = re.compile(rb"<(?:!doctype\s+html|html|head|body|script|iframe|h1|div|font|table|style|title|p|br|b|a|meta)"
                   rb"[\s>/]", re.IGNORECASE)
_START_TAG = re.compile(r"<[a-zA-Z]")


class Html(Stage):
    name = "html"
    version = 1
    libraries = ("trafilatura", "justext", "lxml", "resiliparse", "htmldate", "courlan")
    extracts = True
    memory_mb = 600
    signals: ClassVar[tuple[str, ...]] = ()

    class Config(StageConfig):
        engine: Literal["trafilatura", "resiliparse"] = signal("trafilatura", "what finds the main text")
        favor: Literal["balanced", "precision", "recall"] = signal("balanced", "trafilatura: what to prefer in doubt")
        fast: bool = signal(True, "trafilatura: no comparison with readability and justext")

    def process(self, doc: Document) -> str | None:
        if doc.raw is None:
            return None if doc.text else "no_text"
        page, _ = decode(doc.raw, doc.charset)
        if self.config.engine == "trafilatura":
            from trafilatura import extract
            text = extract(page, fast=self.config.fast, favor_precision=self.config.favor == "precision",
                           favor_recall=self.config.favor == "recall", include_comments=False)
        else:
            from resiliparse.extract.html2text import extract_plain_text
            text = extract_plain_text(page, main_content=True, list_bullets=False, links=False, alt_texts=False)
        doc.text = text or ""
        return None if doc.text else "no_text"
