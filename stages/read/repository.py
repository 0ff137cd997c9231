"""Joins the source files of a repository into one document. The files are in the order of their paths, and a `header`
stands before each (StarCoder2's `<file_sep>`, arXiv 2402.19173 §2.9). A document of more than `max_repository` bytes is
cut between files into pieces of at most that size; a larger file forms a piece alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from stages.document import BadRecord, Document, document_id
from stages.read.reader import Skipped, locator
from stages.stage import StageConfig, signal

#: most bytes of text held while the files of a repository are sorted; further files are `too_large`
_MOST_BYTES = 64 << 20
_ENDING = re.compile(r"\.(?:zip|tar|tgz|tar\.(?:gz|bz2|xz))$", re.IGNORECASE)


class RepositoryConfig(StageConfig):
    repository: bool = signal(False, "join all files of a repository (an archive or a folder) into one document")
    depth: int = signal(1, "folders of a path that name its repository: 1 for NAME/…, 2 for OWNER/NAME/…; 0: the "
                           "source is one repository", ge=0)
    header: str = signal("<file_sep>{path}\n", "text before each file; {path} stands for its path in the repository")
    max_repository: int = signal(8 << 20, "longest document of a repository, bytes; cut between files", gt=0)
    max_files: int = signal(20_000, "most files of a repository; beyond: too_large", gt=0)


class Repository:
    """Collects the source files of one repository and joins them to documents. `path`, relative to the root of the
    source, is the archive, folder or table that contains the files. `name` is the name of the repository:

    - In a folder: the path of the folder, or the source's name if the whole source is one repository.
    - In an archive: "". The name is then the folder that all files of the archive are in, or else the archive's own
      name.
    - In a table: its name in the table. `record` is the number of the repository's first row.
    """

    def __init__(self, config: RepositoryConfig, source: str, path: str, name: str = "", record: int = 0) -> None:
        self.config, self.source, self.path, self.name, self.record = config, source, path, name, record
        self.files: list[tuple[str, int, Document]] = []
        self.text_bytes = 0

    def add(self, item: Document | BadRecord, path: str) -> Iterator[BadRecord]:
        """Add the file `item`, whose path in the repository is `path`. A `BadRecord` is not added but yielded
        unchanged. If the repository exceeds its limits of files or bytes, a `Skipped` is yielded instead of the
        file."""
        if isinstance(item, BadRecord):
            yield item
        elif len(self.files) == self.config.max_files or self.text_bytes > _MOST_BYTES:
            yield Skipped("too_large", id=item.id, locator=item.locator)
        else:
            self.files.append((path, len(self.files), item))
            self.text_bytes += item.text_bytes

    def documents(self) -> Iterator[Document]:
        files = sorted(self.files, key=lambda f: f[:2])
        roots = {path.partition("/")[0] for path, _, _ in files}
        root = ""
        if len(roots) == 1 and _ENDING.search(self.path) and all("/" in path for path, _, _ in files):
            root = roots.pop() + "/"                             # archives often hold their files in NAME-1.0/
        piece: list[tuple[str, Document]] = []
        size = ordinal = 0
        name = self.name or root.rstrip("/") or _ENDING.sub("", PurePosixPath(self.path).name)
        for path, _, file in files:
            head = self.config.header.replace("{path}", path.removeprefix(root))
            file_bytes = len(head.encode("utf-8", "surrogatepass")) + file.text_bytes + 1
            if piece and size + file_bytes > self.config.max_repository:
                yield self._joined(piece, name, ordinal)
                piece, size, ordinal = [], 0, ordinal + 1
            piece.append((head, file))
            size += file_bytes
        if piece:
            yield self._joined(piece, name, ordinal)

    def _joined(self, piece: list[tuple[str, Document]], name: str, ordinal: int) -> Document:
        languages: Counter[str] = Counter()
        for _, file in piece:
            languages[file.meta["code_language"]] += file.text_bytes
        text = "".join(head + file.text + ("" if file.text.endswith("\n") else "\n") for head, file in piece)
        meta = {"repository": name, "files": len(piece),
                "code_language": min(languages, key=lambda language: (-languages[language], language))}
        if licences := sorted({file.meta["licence"] for _, file in piece if "licence" in file.meta}):
            meta["licence"] = " AND ".join(f"({x})" if " OR " in x else x for x in licences)
        first = piece[0][1].locator
        return Document(document_id(self.source, self.path, f"<repository>{self.record or ''}", ordinal), text,
                        source=self.source, meta=meta, mime="text/plain",
                        locator=locator(first["file"], first["offset"], self.record + ordinal))
