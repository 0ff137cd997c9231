r"""Reads papers in LaTeX: one document per paper. The files of a paper are joined as TeX would read them. The step
`latex` then turns the LaTeX source into plain text.

A paper is a `.tex` file, such a file compressed as `.gz`, or an archive of its files, as arXiv distributes them. An
archive of such archives (arXiv's monthly `.tar`) holds many papers. `sub` in the locator of a document names the
member.

The reader starts from the main file of a paper (`main_file`). Files that it reads by \input, \include, \subfile or
\import are inserted in place. So are the paper's own packages (\usepackage of a `.sty` beside it), for their macros.
Figures, bibliographies and all other files are left out. A paper that consists only of PDF or PostScript is counted as
`no_tex`.

There are limits for the number of files, the bytes of one file and of all files together, the depth of \input, and the
characters of the joined source.
"""

from __future__ import annotations

import io
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping

from stages.document import BadRecord, Document, document_id
from stages.read.files import Files
from stages.read.reader import Slice, bad, locator, skipped
from stages.read.streams import DamagedStream, coding_of, members
from stages.stage import StageConfig, signal
from stages.text.encoding import decode

_SOURCES = (".tex", ".ltx", ".latex")
#: endings of files that may hold macros or text
_TEXTS = (*_SOURCES, ".sty", ".cls", ".txt", ".def", ".inc", ".tikz")
_PAPERS, _FIGURES = (".gz", ".tgz", ".tar"), (".ps.gz", ".eps.gz", ".svg.gz", ".bib.gz")
#: most levels of files that read further files, most files of a paper, and most characters of a package
_DEPTH, _FILES, _PACKAGE = 8, 2000, 200 << 10
_CLASS = re.compile(r"^[^%\n]{0,200}\\document(?:class|style)(?![A-Za-z])", re.MULTILINE)
_BODY = re.compile(r"^[^%\n]{0,200}\\(?:begin[ \t]*\{document\}|topmatter|bye)(?![A-Za-z])", re.MULTILINE)
_READS = re.compile(
    r"(?<!\\)(?P<comment>%[^\n]*)|\\(?:(?P<include>include|subfile|subfileinclude)[ \t]*\{(?P<a>[^{}\n%]{1,200})\}"
    r"|input(?:[ \t]*\{(?P<b>[^{}\n%]{1,200})\}|[ \t]+(?P<c>[\w./+-]{1,200}))"
    r"|(?:sub)?import\*?[ \t]*\{(?P<d>[^{}\n%]{0,200})\}[ \t]*\{(?P<e>[^{}\n%]{1,200})\}"
    r"|usepackage[ \t]*(?:\[[^\]]{0,400}\])?[ \t]*\{(?P<p>[^{}%]{1,400})\}|(?P<stop>endinput))(?![A-Za-z])?")


class LatexPapers(Files):
    """Reads papers in LaTeX: one document per paper, joined from the paper's files.

    `meta.files` is the number of joined files, if it is more than one.
    """

    name = "latex"
    version = 2
    markup = "latex"
    in_archives = False                      # an archive is one paper
    libraries = ("resiliparse",)
    suffixes = (*_SOURCES, ".tex.gz", ".gz", ".tar.gz", ".tgz", ".tar", ".zip")
    memory_mb = 900

    class Config(StageConfig):
        max_bytes: int = signal(16 << 20, "largest file that is read, bytes, and longest joined source, characters",
                                gt=0)
        max_paper: int = signal(256 << 20, "largest paper, bytes inflated; beyond: too_large", gt=0)
        packages: bool = signal(True, "read a paper's own packages, for their macros")

    @property
    def most(self) -> int:
        return self.config.max_paper

    def _from_bytes(self, data: bytes | None, slice: Slice, offset: int, member: str,
                    ordinal: int) -> Document | BadRecord:
        return self._paper(data, slice, offset, member, member or slice.path)

    def _archive(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        """Yields the document of an archive that holds one paper, or a document for each member of an archive of
        archives."""
        files: dict[str, bytes] = {}
        total_bytes = count = offset = 0
        is_collection = False
        try:
            for member in members(local, slice.path, (*_TEXTS, *_PAPERS), self.config.max_paper):
                count, offset = count + 1, member.offset
                lower = member.name.lower()
                if lower.endswith((".gz", ".tgz", ".tar")) and not lower.endswith(_FIGURES):
                    is_collection = True
                    yield bad(member.reason, slice, offset, 0, member=member.name) if member.data is None else \
                        self._from_bytes(member.data, slice, offset, member.name, 0)
                elif member.reason == "other_type" and lower.endswith((".pdf", ".ps")) and "/" in lower \
                        and is_collection:
                    yield skipped("no_tex", slice, offset, 0, member=member.name)
                elif member.data is not None and not lower.endswith(_FIGURES) and len(files) < _FILES \
                        and total_bytes + len(member.data) <= self.config.max_paper:
                    files[_clean(member.name)] = member.data        # of equal names, tar unpacks the last
                    total_bytes += len(member.data)
        except DamagedStream as e:
            yield bad(e.reason, slice, offset, count, detail=e.detail, fatal=True)
            return
        if files or not is_collection:
            yield self._joined(files, slice, 0, "")

    def _paper(self, data: bytes | None, slice: Slice, offset: int, member: str, path: str) -> Document | BadRecord:
        """Return the document of a paper that consists of one file: a LaTeX source or a tar archive, compressed or not.
        `data` is the content, or None if it is too large. Returns a `BadRecord` if no document is made of the paper."""
        try:
            if data is not None and coding_of(data[:10]) == "gzip":
                data = _inflated(data, self.config.max_paper)
            if data is None:
                return bad("too_large", slice, offset, 0, member=member, detail=f"beyond {self.config.max_paper} bytes")
            if data[257:262] == b"ustar":
                return self._joined(_untarred(data), slice, offset, member)
        except DamagedStream as e:
            return bad(e.reason, slice, offset, 0, member=member, detail=e.detail)
        if data.startswith((b"%PDF", b"%!PS")) or b"\0" in data[:4096]:
            return skipped("no_tex", slice, offset, 0, member=member)
        return self._joined({posixpath.basename(path).removesuffix(".gz"): data}, slice, offset, member, alone=True)

    def _joined(self, files: Mapping[str, bytes], slice: Slice, offset: int, member: str, *,
                alone: bool = False) -> Document | BadRecord:
        texts = {name: _text(data) for name, data in files.items()
                 if len(data) <= self.config.max_bytes and (alone or name.lower().endswith(_TEXTS))}
        main = next(iter(texts), None) if alone else main_file(texts)
        if main is None or not texts[main].strip():
            reason = "empty" if alone else "too_large" if len(texts) < sum(
                n.lower().endswith(_SOURCES) for n in files) else "no_tex"
            return skipped(reason, slice, offset, 0, member=member)
        text, file_count = join(texts, main, self.config.max_bytes, packages=self.config.packages)
        doc = Document(document_id(slice.source, slice.path, member, 0), text, source=slice.source, mime="text/x-tex",
                       locator=locator(slice.path, offset, 0, member))
        if file_count > 1:
            doc.meta["files"] = file_count
        return doc


def main_file(texts: Mapping[str, str]) -> str | None:
    r"""Return the name of a paper's main file, from which TeX starts; None if no file is a source. `texts` maps names
    of files to their contents. Files in .txt count as sources only if there are no others.

    A file with a \documentclass is preferred to others. Among equal files, these criteria decide one after the other:

    1. The file has a body (\begin{document}, for instance).
    2. No other file reads it.
    3. It is nearest to the root.
    4. It is the longest.
    5. Its name is the first in alphabetical order.
    """
    sources = {name: text for name, text in texts.items() if name.lower().endswith(_SOURCES)} or \
        {name: text for name, text in texts.items() if name.lower().endswith(".txt")}
    if not sources:
        return None
    read = {path for name, text in sources.items() for m in _READS.finditer(text) if m["p"] is None
            for path in [_resolved(_target(m), name, sources)] if path not in (None, name)}

    def rank(name: str) -> tuple[bool, bool, bool, int, int, str]:
        text = sources[name]
        return (_CLASS.search(text) is None, _BODY.search(text) is None, name in read, name.count("/"), -len(text),
                name)

    return min(sources, key=rank)


def join(texts: Mapping[str, str], main: str, longest: int, *, packages: bool = True) -> tuple[str, int]:
    """Return (source of the file `main`, in which the files that it reads are inserted in place; number of files
    joined). The source is cut off after `longest` characters. `texts` maps names of files to their contents. With
    `packages`, the paper's own packages of at most _PACKAGE characters are inserted, too."""
    out: list[str] = []
    joined = [main]
    remaining = longest
    stack: list[tuple[str, int, str]] = [(texts[main], 0, main)]
    body = texts[main].find("\\begin{document}")
    reading = [main]
    while stack:
        text, at, name = stack.pop()
        m = _READS.search(text, at)
        while m is not None and m["comment"] is not None:
            m = _READS.search(text, m.end())
        target = _target(m) if m is not None else ""
        piece = text[at:m.start() if m else len(text)][:remaining]
        out.append(piece)
        remaining -= len(piece)
        if m is None or m["stop"]:
            reading.pop()
            continue
        stack.append((text, m.end(), name))
        if m["p"] is not None:
            out.append(m[0])
            inserted = [path for word in m["p"].split(",")
                        if packages and (path := _resolved(f"{word.strip()}.sty", name, texts)) is not None
                        and len(texts[path]) <= _PACKAGE] if name != main or m.start() < body or body < 0 else []
        else:
            inserted = [path] if (path := _resolved(target, name, texts)) is not None else []
            out += [] if inserted else [m[0]]
        for path in reversed(inserted):
            if len(stack) <= _DEPTH and len(joined) < _FILES and path not in reading and remaining > 0:
                joined.append(path)
                stack.append((f"\n{texts[path]}\n", 0, path))
                reading.append(path)
    return "".join(out), len(joined)


def _target(m: re.Match[str]) -> str:
    """Return the path of the file that a command, the match `m`, reads."""
    if m["e"]:
        return posixpath.join((m["d"] or "").strip(), m["e"].strip())
    return (m["a"] or m["b"] or m["c"] or "").strip()


def _resolved(target: str, reader: str, texts: Mapping[str, str]) -> str | None:
    """Return the name of the file that \\input{target} in the file `reader` refers to; None if there is no such
    file."""
    target = target.strip('"')
    for base in dict.fromkeys(("", posixpath.dirname(reader), reader.rpartition("/")[0].partition("/")[0])):
        path = _clean(posixpath.join(base, target))
        for name in (path, f"{path}.tex", f"{path}.ltx"):
            if target and name in texts:
                return name
    return None


def _clean(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")


def _text(data: bytes) -> str:
    return decode(data)[0].replace("\r\n", "\n").replace("\r", "\n")


def _inflated(data: bytes, cap: int) -> bytes | None:
    """Return the content of a gzip file; None when it has more than `cap` bytes. Raises DamagedStream if the file is
    corrupt or ends too early."""
    try:
        with_header = zlib.decompressobj(31)
        out = with_header.decompress(data, cap + 1)
        if len(out) > cap:
            return None
        if not with_header.eof:
            raise DamagedStream("truncated", "a gzip file ends too early")
        return out
    except zlib.error as e:
        raise DamagedStream("corrupt_gzip", str(e)) from None


def _untarred(data: bytes) -> dict[str, bytes]:
    """Return {name: content} of the regular files in a tar archive whose names end like those of LaTeX sources or
    macros. If several files have one name, the last counts. Raises DamagedStream if the archive is corrupt."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for info in archive:
                if len(files) >= _FILES:
                    break
                if (info.isreg() and info.name.lower().endswith(_TEXTS)
                        and (member := archive.extractfile(info)) is not None):      # None only for non-files
                    files[_clean(info.name)] = member.read()
    except (tarfile.TarError, EOFError, OSError, ValueError) as e:
        raise DamagedStream("corrupt_tar", str(e)) from None
    return files
