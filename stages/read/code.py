"""Source code: one document a file, its programming language in `meta.code_language` (by name and content,
`read.languages`), its licence in `meta.licence` where its head names one. The text is the file: comments, docstrings
and licence header stay.

Files that are no source text worth learning from are counted: `hidden` (a path component begins with a dot),
`vendored`, `minified`, `generated`, `data` (rules of `read.authored`), `binary`, `long_lines` (a line beyond 1,000
characters, or more than 100 on average; not in prose, which has a line a paragraph), `few_letters` (less than a quarter
alphanumeric), `too_large`, `other_type` (a name that may be code, a content that is not).

With `repository` files make one document: those of an archive, and those of a folder `depth` levels below the source's
(`read.repository`).
"""

from __future__ import annotations

from collections.abc import Iterator

from stages.document import BadRecord, Document
from stages.read.authored import BUNDLES, encoded, generated, left_out
from stages.read.files import Files
from stages.read.languages import LANGUAGES, NAMES, language
from stages.read.licence import licence
from stages.read.reader import Slice, skipped
from stages.read.repository import Repository, RepositoryConfig
from stages.read.streams import is_archive
from stages.stage import signal
from stages.text.encoding import decode

#: languages that people write a paragraph a line in (those StarCoder2's rule of long lines leaves alone)
_PROSE = {"tex", "markdown", "restructuredtext", "smt"}
_LONGEST_PROSE = 100_000
#: characters but for blanks of which a quarter must be alphanumeric: in a few lines there may be more signs
_FEW = 400
#: begins of UTF-16 and UTF-32, whose text is full of NULs
_WIDE = (b"\xff\xfe", b"\xfe\xff")


class CodeConfig(RepositoryConfig):
    max_bytes: int = signal(1 << 20, "largest file, bytes; beyond: too_large", gt=0)
    max_line: int = signal(1000, "longest line, characters; beyond: long_lines", gt=0)
    mean_line: int = signal(100, "longest mean line, characters; beyond: long_lines", gt=0)
    vendored: bool = signal(False, "read vendored and hidden paths too")


class Code(Files):
    """Source code: one document a file, or a repository."""

    name = "code"
    version = 4
    libraries = ("resiliparse",)
    suffixes = (*LANGUAGES, *NAMES)
    memory_mb = 500

    class Config(CodeConfig):
        pass

    def _one(self, data: bytes | None, slice: Slice, offset: int, member: str, ordinal: int) -> Document | BadRecord:
        if data is None:                                      # a big source file is common and no defect: no quarantine
            return skipped("too_large", slice, offset, ordinal, member=member)
        return super()._one(data, slice, offset, member, ordinal)

    def document(self, doc: Document, data: bytes, path: str) -> str | None:
        if not self.config.vendored and (reason := left_out(path)):
            return reason
        if b"\x00" in data[:8192] and not data.startswith(_WIDE):
            return "binary"
        text, encoding = decode(data)
        if encoding != "utf-8":
            doc.meta["encoding"] = encoding
        return examine(doc, text, path, self.config)

    # -- repositories ------------------------------------------------------------------------------------------------
    def group(self, path: str) -> str:
        """The folder that is the repository of a file, "./" for the source's; "" for one on its own."""
        if not self.config.repository or is_archive(path):
            return ""
        if not self.config.depth:
            return "./"
        folders = path.split("/")[:-1]
        return "/".join([*folders[:self.config.depth], ""]) if len(folders) >= self.config.depth else ""

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        if not (self.config.repository and is_archive(slice.path)):
            yield from super().read(local, slice)
            return
        whole = Repository(self.config, slice.source, slice.path)
        for item in super().read(local, slice):
            yield from whole.add(item, item.locator["sub"])
        yield from whole.documents()

    def read_files(self, files: Iterator[tuple[str, Slice]]) -> Iterator[Document | BadRecord]:
        """Files one after the other; those of a repository's folder as one document."""
        whole, folder = None, ""
        for local, slice in files:
            now = self.group(slice.path)
            if whole is not None and now != folder:
                yield from whole.documents()
                whole = None
            if not now:
                yield from self.read(local, slice)
                continue
            if whole is None:
                whole, folder = Repository(self.config, slice.source, now, now.rstrip("./") or slice.source), now
            for item in self.read(local, slice):
                yield from whole.add(item, slice.path.removeprefix(now))
        if whole is not None:
            yield from whole.documents()


def examine(doc: Document, text: str, path: str, config: CodeConfig) -> str | None:
    """Fill in the document of a source file; a reason instead of None says that it is none."""
    text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    found = language(path, text)
    if not found:
        return "other_type"
    if generated(path, text):
        return "generated"
    lengths = [len(line) for line in text.split("\n")]
    longest = _LONGEST_PROSE if found in _PROSE else config.max_line
    if max(lengths) > longest or (found not in _PROSE and sum(lengths) > config.mean_line * len(lengths)):
        return "minified" if path.lower().endswith(BUNDLES) else "long_lines"
    solid = len(text) - sum(map(text.count, " \t\n"))
    if solid > _FEW and sum(map(str.isalnum, text)) * 4 < solid:
        return "few_letters"
    if encoded(text) or "<?xml version=" in text[:100]:
        return "data"
    doc.text, doc.mime = text, "text/plain"
    doc.meta["code_language"] = found
    if said := licence(text):
        doc.meta["licence"] = said
    return None
