"""Defines the reader `code`, which reads source code: one document per file. The text is the whole file, with its
comments, docstrings and licence header. `meta.code_language` is the programming language, found by the file's name and
content (`read.languages`). `meta.licence` is the licence that the beginning of the file names, if any.

Files that are not worth learning from are left out and counted:

- `hidden`: a path component begins with a dot
- `vendored`, `minified`, `generated`: not written by the authors of the project (`read.authored`)
- `data`: encoded bytes, a table of numbers or strings, or XML
- `binary`: NUL bytes
- `long_lines`: a line of more than 1,000 characters, or more than 100 on average. JavaScript and style sheets with such
  lines count as `minified`. Prose, such as Markdown, may have lines of up to 100,000 characters.
- `few_letters`: more than 400 non-blank characters, of which less than a quarter are alphanumeric
- `too_large`: more than `max_bytes` bytes
- `other_type`: the content is no source code, although the file's name may be that of source code

With the setting `repository`, all files of an archive, or of a folder `depth` levels below the source's root, are
joined into one document (`read.repository`).
"""

from __future__ import annotations

from collections.abc import Iterator

from stages.document import BadRecord, Document
from stages.read.authored import BUNDLES, is_data, is_generated, path_reason
from stages.read.files import Files
from stages.read.languages import LANGUAGES, NAMES, language
from stages.read.licence import licence
from stages.read.reader import Slice, skipped
from stages.read.repository import Repository, RepositoryConfig
from stages.read.streams import is_archive
from stages.stage import signal
from stages.text.encoding import decode

#: languages written with one paragraph per line, which StarCoder2's rule of long lines exempts
_PROSE = {"tex", "markdown", "restructuredtext", "smt"}
_LONGEST_PROSE = 100_000
#: The rule `few_letters` applies only to files of more non-blank characters than this.
_FEW = 400
#: byte order marks of UTF-16 and little-endian UTF-32, whose text is full of NULs
_WIDE = (b"\xff\xfe", b"\xfe\xff")


class CodeConfig(RepositoryConfig):
    max_bytes: int = signal(1 << 20, "largest file, bytes; beyond: too_large", gt=0)
    max_line: int = signal(1000, "longest line, characters; beyond: long_lines", gt=0)
    mean_line: int = signal(100, "longest mean line, characters; beyond: long_lines", gt=0)
    vendored: bool = signal(False, "also read hidden files, and copies of other projects")


class Code(Files):
    """Reads source code: one document per file, or per repository."""

    name = "code"
    version = 4
    libraries = ("resiliparse",)
    suffixes = (*LANGUAGES, *NAMES)
    memory_mb = 500

    class Config(CodeConfig):
        pass

    def _from_bytes(self, data: bytes | None, slice: Slice, offset: int, member: str,
                    ordinal: int) -> Document | BadRecord:
        if data is None:                       # a big source file is not damaged, so it is counted, not quarantined
            return skipped("too_large", slice, offset, ordinal, member=member)
        return super()._from_bytes(data, slice, offset, member, ordinal)

    def document(self, doc: Document, data: bytes, path: str) -> str | None:
        if not self.config.vendored and (reason := path_reason(path)):
            return reason
        if b"\x00" in data[:8192] and not data.startswith(_WIDE):
            return "binary"
        text, encoding = decode(data)
        if encoding != "utf-8":
            doc.meta["encoding"] = encoding
        return examine(doc, text, path, self.config)

    # -- repositories ------------------------------------------------------------------------------------------------
    def group(self, path: str) -> str:
        """Returns the folder of the repository that a file belongs to; "./" if the whole source is one repository. The
        result is "" for an archive, for a file outside of any repository, and without the setting `repository`."""
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
        repository = Repository(self.config, slice.source, slice.path)
        for item in super().read(local, slice):
            yield from repository.add(item, item.locator["sub"])
        yield from repository.documents()

    def read_files(self, files: Iterator[tuple[str, Slice]]) -> Iterator[Document | BadRecord]:
        """Yields the documents of several files, each given as (local file, slice of the file to read). The files of
        one repository become one document, or several if they have more than `max_repository` bytes."""
        repository, folder = None, ""
        for local, slice in files:
            group = self.group(slice.path)
            if repository is not None and group != folder:
                yield from repository.documents()
                repository = None
            if not group:
                yield from self.read(local, slice)
                continue
            if repository is None:
                repository, folder = Repository(self.config, slice.source, group,
                                                group.rstrip("./") or slice.source), group
            for item in self.read(local, slice):
                yield from repository.add(item, slice.path.removeprefix(group))
        if repository is not None:
            yield from repository.documents()


def examine(doc: Document, text: str, path: str, config: CodeConfig) -> str | None:
    """Fill in the document `doc` of a source file with the path `path` and the content `text`. Returns None, or the
    reason why no document is made of the file."""
    text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    language_name = language(path, text)
    if not language_name:
        return "other_type"
    if is_generated(path, text):
        return "generated"
    lengths = [len(line) for line in text.split("\n")]
    longest = _LONGEST_PROSE if language_name in _PROSE else config.max_line
    if max(lengths) > longest or (language_name not in _PROSE and sum(lengths) > config.mean_line * len(lengths)):
        return "minified" if path.lower().endswith(BUNDLES) else "long_lines"
    nonblank = len(text) - sum(map(text.count, " \t\n"))
    if nonblank > _FEW and sum(map(str.isalnum, text)) * 4 < nonblank:
        return "few_letters"
    if is_data(text) or "<?xml version=" in text[:100]:
        return "data"
    doc.text, doc.mime = text, "text/plain"
    doc.meta["code_language"] = language_name
    if spdx := licence(text):
        doc.meta["licence"] = spdx
    return None
