"""Reads folders of files, one document per file: web pages, PDFs, texts. Files may be compressed, or members of
archives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from stages.document import BadRecord, Document, document_id
from stages.read.reader import Reader, Slice, bad, check_file, locator, skipped
from stages.read.streams import DamagedStream, DecompressedStream, is_archive, members
from stages.stage import StageConfig, signal
from stages.text.encoding import decode


class Files(Reader):
    """Base class of readers that make one document of each file. The method `document` of a subclass makes it from the
    file's bytes.

    From a `.zip` or `.tar` (.gz, .bz2, .xz) archive, a document is made of each member with one of the reader's
    suffixes. `sub` in the document's locator (place in the input) names the member. Other members are counted as
    `other_type`, encrypted members as `encrypted`.
    """

    in_archives = True
    #: endings of archive members that are read; if empty, `suffixes`
    member_suffixes: ClassVar[tuple[str, ...]] = ()

    class Config(StageConfig):
        max_bytes: int = signal(64 << 20, "largest file or archive member, bytes inflated; beyond: too_large", gt=0)

    @property
    def most(self) -> int:
        """Return the size in bytes, after decompression, of the largest file that is read. Larger files are counted as
        `too_large`."""
        return self.config.max_bytes

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        if check_file(local, slice.path) == 0:
            yield skipped("empty", slice, 0, 0)
        elif is_archive(slice.path):
            yield from self._archive(local, slice)
        else:
            try:
                with DecompressedStream(local) as stream:
                    data = stream.read_all(self.most)
            except DamagedStream as e:
                yield bad(e.reason, slice, 0, 0, detail=e.detail, fatal=True)
                return
            yield self._from_bytes(data, slice, 0, "", 0)

    def _archive(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        occurrences: Counter[str] = Counter()            # by name; the second member with a name gets ordinal 1
        offset = 0
        try:
            for member in members(local, slice.path, self.member_suffixes or self.suffixes, self.most):
                ordinal, offset = occurrences[member.name], member.offset
                occurrences[member.name] += 1
                if member.reason == "other_type":
                    yield skipped("other_type", slice, offset, ordinal, member=member.name)
                elif member.reason and member.reason != "too_large":
                    yield bad(member.reason, slice, offset, ordinal, member=member.name)
                else:
                    yield self._from_bytes(member.data, slice, offset, member.name, ordinal)
        except DamagedStream as e:
            yield bad(e.reason, slice, offset, sum(occurrences.values()), detail=e.detail, fatal=True)

    def _from_bytes(self, data: bytes | None, slice: Slice, offset: int, member: str,
                    ordinal: int) -> Document | BadRecord:
        """Return the document of one file or archive member, or a `BadRecord` if no document is made of it. `data`
        holds its bytes, or is None if it is too large to read."""
        if data is None:
            return bad("too_large", slice, offset, ordinal, member=member,
                       detail=f"beyond {self.most} bytes")
        doc = Document(document_id(slice.source, slice.path, member, ordinal), source=slice.source,
                       locator=locator(slice.path, offset, ordinal, member))
        reason = self.document(doc, data, member or slice.path) if data.strip() else "empty"
        return doc if reason is None else skipped(reason, slice, offset, ordinal, member=member)

    def document(self, doc: Document, data: bytes, path: str) -> str | None:
        """Fill in the document `doc` of a file with the bytes `data`. Returns None, or the reason why no document is
        made of the file."""
        raise NotImplementedError


class HtmlFiles(Files):
    """Saved web pages (.html, .htm, .xhtml, .html.gz, .htm.gz), from which the step `html` extracts the text."""

    name = "html"
    extractor = "html"
    suffixes = (".html", ".htm", ".xhtml", ".html.gz", ".htm.gz")
    member_suffixes = (".html", ".htm", ".xhtml")

    def document(self, doc: Document, data: bytes, path: str) -> str | None:
        doc.raw, doc.mime = data, "text/html"
        return None


class PdfFiles(Files):
    """PDF files, from which the step `pdf` extracts the text."""

    name = "pdf"
    extractor = "pdf"
    suffixes = (".pdf",)

    def document(self, doc: Document, data: bytes, path: str) -> str | None:
        doc.raw, doc.mime = data, "application/pdf"
        return None


class TextFiles(Files):
    """Texts and Markdown (.txt, .text, .md, .markdown, .rst; compressed: .txt.gz, .txt.bz2, .txt.xz, .txt.zst, .md.gz,
    .md.zst): the content of the file is the text, in any encoding.

    Line ends become "\\n". `meta.encoding` is the encoding of the bytes when it is not UTF-8. A file with a NUL among
    its first 8,192 bytes is counted as `binary`, unless it begins with a byte order mark of UTF-16.
    """

    name = "text"
    libraries = ("resiliparse",)
    suffixes = (".txt", ".text", ".md", ".markdown", ".rst", ".txt.gz", ".md.gz", ".txt.bz2", ".txt.xz", ".txt.zst",
                ".md.zst")
    member_suffixes = (".txt", ".text", ".md", ".markdown", ".rst")

    def document(self, doc: Document, data: bytes, path: str) -> str | None:
        if b"\x00" in data[:8192] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
            return "binary"
        text, encoding = decode(data)
        if encoding != "utf-8":
            doc.meta["encoding"] = encoding
        markdown = path.lower().removesuffix(".gz").removesuffix(".zst").endswith((".md", ".markdown"))
        doc.mime = "text/markdown" if markdown else "text/plain"
        doc.text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
        return None
