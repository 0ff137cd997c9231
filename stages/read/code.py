"""Source-code trees: one document a file, its programming language in `meta.code_language`, its licence in
`meta.licence` where its head names one. Comments and docstrings stay.

Files that are no source text worth learning from are counted, by rules of The Stack, StarCoder and StarCoder2 (arXiv
2211.15533 §3, 2305.06161 §3.1, 2402.19173 §2.1): `hidden` (a path component begins with a dot), `vendored` (copies of
other people's packages), `binary`, `long_lines` (minified or data: a line beyond 1,000 characters, or more than 100 on
average), `generated` (its name, or one of its first five lines, says so), `few_letters` (less than a quarter
alphanumeric), `data` (encoded bytes: a run beyond 1,024 characters, or half of the file), `too_large`.

With `repository` an archive is a repository and makes one document: its files in order of their paths, each after
`header` (StarCoder2's `<file_sep>`), cut between files into pieces of at most `max_repository` bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from stages.document import BadRecord, Document, document_id
from stages.extract.encoding import decode
from stages.read.files import Files
from stages.read.licence import licence
from stages.read.reader import Slice, locator, skipped
from stages.read.streams import is_archive
from stages.stage import StageConfig, signal

#: file name endings by language (names of GitHub Linguist, lower case)
_SUFFIXES: dict[str, str] = {
    "python": ".py .pyi", "cython": ".pyx", "c": ".c .h", "c++": ".cc .cpp .cxx .hh .hpp .hxx", "cuda": ".cu .cuh",
    "rust": ".rs", "go": ".go", "java": ".java", "kotlin": ".kt .kts", "scala": ".scala", "groovy": ".groovy",
    "clojure": ".clj", "c#": ".cs", "f#": ".fs", "visual basic": ".vb", "javascript": ".js .mjs .cjs .jsx",
    "typescript": ".ts .tsx", "vue": ".vue", "svelte": ".svelte", "ruby": ".rb", "php": ".php", "perl": ".pl .pm",
    "lua": ".lua", "r": ".r", "julia": ".jl", "objective-c": ".m", "objective-c++": ".mm", "swift": ".swift",
    "dart": ".dart", "haskell": ".hs", "ocaml": ".ml .mli", "elixir": ".ex .exs", "erlang": ".erl .hrl",
    "elm": ".elm", "common lisp": ".lisp", "emacs lisp": ".el", "scheme": ".scm", "racket": ".rkt",
    "fortran": ".f .f90 .f95", "ada": ".adb .ads", "pascal": ".pas", "d": ".d", "nim": ".nim", "zig": ".zig",
    "verilog": ".v", "systemverilog": ".sv", "vhdl": ".vhd", "assembly": ".asm .s", "shell": ".sh .bash .zsh",
    "fish": ".fish", "powershell": ".ps1", "batchfile": ".bat", "tcl": ".tcl", "awk": ".awk", "sql": ".sql",
    "css": ".css", "scss": ".scss", "less": ".less", "tex": ".tex .sty", "cmake": ".cmake cmakelists.txt",
    "gradle": ".gradle", "protocol buffer": ".proto", "thrift": ".thrift", "graphql": ".graphql", "hcl": ".tf",
    "nix": ".nix", "solidity": ".sol", "glsl": ".glsl", "hlsl": ".hlsl", "wgsl": ".wgsl", "coq": ".coq",
    "lean": ".lean", "agda": ".agda", "isabelle": ".thy", "tla": ".tla", "yaml": ".yaml .yml", "toml": ".toml",
    "makefile": "makefile", "dockerfile": "dockerfile",
}
LANGUAGES = {suffix: language for language, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
_VENDORED = {"node_modules", "bower_components", "vendor", "vendors", "third_party", "third-party", "thirdparty",
             "site-packages", "dist-packages", "__pycache__", "dist", "_vendor", "_vendored_packages", "godeps", "pods",
             "carthage", "extern", "externals", "venv"}
_COPIED = re.compile(r"(?:jquery|bootstrap|angular|lodash|underscore|d3|react)(?:[.-][\w.-]{0,60})?\.(?:js|css)")
_GENERATED = re.compile(r"auto-?generated|(?:automatically|machine) generated|generated (?:by|from|automatically)"
                        r"|@generated|this (?:file|code) (?:is|was) generated|do not edit", re.IGNORECASE)
#: names that generators give
_GENERATED_NAME = re.compile(r".*(?:_pb2(?:_grpc)?\.pyi?|\.pb(?:\.gw)?\.(?:go|cc|h)|\.g\.dart|\.freezed\.dart"
                             r"|\.designer\.(?:cs|vb)|\.generated\.\w+|-lock\.ya?ml)|zz_generated.*", re.DOTALL)
#: encoded bytes: base64, lists of hexadecimal numbers, escapes (StarCoder2)
_ENCODED = re.compile(r"[A-Za-z0-9+/=]{64,}|(?:\b(?:0x|\\x)?[0-9a-fA-F]{2}(?:,\s{0,9}|\b\s{0,9})){8,}"
                      r"|(?:\\u[0-9a-fA-F]{4}){8,}|(?:\\x[0-9a-fA-F]{2}){8,}")
_LONGEST_ENCODED = 1024
#: bytes of text held while the files of a repository are put in order; what comes after: too_large
_HELD = 64 << 20


class Code(Files):
    name = "code"
    version = 2
    libraries = ("resiliparse",)
    suffixes = tuple(LANGUAGES)
    memory_mb = 500

    class Config(StageConfig):
        max_bytes: int = signal(1 << 20, "largest file, bytes; beyond: too_large", gt=0)
        max_line: int = signal(1000, "longest line, characters; beyond: long_lines", gt=0)
        mean_line: int = signal(100, "longest mean line, characters; beyond: long_lines", gt=0)
        vendored: bool = signal(False, "read vendored and hidden paths too")
        repository: bool = signal(False, "an archive is a repository: one document of all its files")
        header: str = signal("<file_sep>{path}\n", "what stands before each file of a repository; {path} is its path")
        max_repository: int = signal(8 << 20, "longest document of a repository, bytes; cut between files", gt=0)
        max_files: int = signal(20_000, "most files of a repository; beyond: too_large", gt=0)

    def _one(self, data: bytes | None, slice: Slice, offset: int, member: str, ordinal: int) -> Document | BadRecord:
        if data is None:                                      # a big source file is common and no defect: no quarantine
            return skipped("too_large", slice, offset, ordinal, member=member)
        return super()._one(data, slice, offset, member, ordinal)

    @staticmethod
    def place(path: str) -> str | None:
        """Why a file is left out for where it stands, or None."""
        place = PurePosixPath(path)
        if any(part.startswith(".") and part not in (".", "..") for part in place.parts):
            return "hidden"
        name = place.name.lower()
        if any(part.lower() in _VENDORED for part in place.parts[:-1]) or ".min." in name or _COPIED.fullmatch(name):
            return "vendored"
        return None

    def document(self, doc: Document, data: bytes, path: str) -> str | None:
        place = PurePosixPath(path)
        if not self.config.vendored and (reason := self.place(path)):
            return reason
        if b"\x00" in data[:8192]:
            return "binary"
        text, encoding = decode(data)
        text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
        lengths = [len(line) for line in text.split("\n")]
        if max(lengths) > self.config.max_line or sum(lengths) > self.config.mean_line * len(lengths):
            return "long_lines"
        if _GENERATED_NAME.fullmatch(place.name.lower()) or _GENERATED.search("\n".join(text.split("\n", 5)[:5])):
            return "generated"
        if sum(map(str.isalnum, text)) * 4 < len(text):
            return "few_letters"
        runs = [m.end() - m.start() for m in _ENCODED.finditer(text)]
        if runs and (max(runs) > _LONGEST_ENCODED or sum(runs) * 2 > len(text)):
            return "data"
        name = place.name.lower()
        doc.text, doc.mime = text, "text/plain"
        doc.meta["code_language"] = LANGUAGES.get(name) or LANGUAGES.get(place.suffix.lower(), "")
        if encoding != "utf-8":
            doc.meta["encoding"] = encoding
        if found := licence(text):
            doc.meta["licence"] = found
        return None

    # -- repositories ------------------------------------------------------------------------------------------------
    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        if not (self.config.repository and is_archive(slice.path)):
            yield from super().read(local, slice)
            return
        files: list[Document] = []
        held = 0
        for item in super().read(local, slice):
            if isinstance(item, BadRecord):
                yield item
            elif len(files) == self.config.max_files or held > _HELD:
                yield skipped("too_large", slice, item.locator["offset"], item.locator["record"],
                              member=item.locator["sub"])
            else:
                files.append(item)
                held += item.text_bytes
        yield from self._repository(sorted(files, key=lambda f: (f.locator["sub"], f.locator["record"])), slice)

    def _repository(self, files: list[Document], slice: Slice) -> Iterator[Document]:
        """Documents of a repository's files, which are in order."""
        roots = {f.locator["sub"].partition("/")[0] for f in files}
        root = roots.pop() + "/" if len(roots) == 1 and all("/" in f.locator["sub"] for f in files) else ""
        piece: list[tuple[str, Document]] = []
        size = ordinal = 0
        for file in files:
            head = self.config.header.replace("{path}", file.locator["sub"].removeprefix(root))
            more = len(head.encode("utf-8", "surrogatepass")) + file.text_bytes + 1
            if piece and size + more > self.config.max_repository:
                yield _joined(piece, slice, root.rstrip("/"), ordinal)
                piece, size, ordinal = [], 0, ordinal + 1
            piece.append((head, file))
            size += more
        if piece:
            yield _joined(piece, slice, root.rstrip("/"), ordinal)


def _joined(piece: list[tuple[str, Document]], slice: Slice, root: str, ordinal: int) -> Document:
    languages: Counter[str] = Counter()
    for _, file in piece:
        languages[file.meta["code_language"]] += file.text_bytes
    text = "".join(head + file.text + ("" if file.text.endswith("\n") else "\n") for head, file in piece)
    name = re.sub(r"\.(?:zip|tar|tgz|tar\.(?:gz|bz2|xz))$", "", PurePosixPath(slice.path).name, flags=re.IGNORECASE)
    meta = {"repository": root or name, "files": len(piece),
            "code_language": min(languages, key=lambda language: (-languages[language], language))}
    if found := sorted({file.meta["licence"] for _, file in piece if "licence" in file.meta}):
        meta["licence"] = " AND ".join(f"({x})" if " OR " in x else x for x in found)
    id = document_id(slice.source, slice.path, "<repository>", ordinal)
    return Document(id, text, source=slice.source, meta=meta, mime="text/plain",
                    locator=locator(slice.path, piece[0][1].locator["offset"], ordinal))
