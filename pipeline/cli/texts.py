"""Reads the texts that a command line names: Parquet, JSON Lines and text files, and folders of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.cli.errors import BadUsage, reading
from stages.catalog import reader_class
from stages.document import Document
from stages.read.reader import Slice

#: readers for the files of a folder, in order of preference. The first that accepts any file of the folder reads all
#: files that it accepts, and the others are ignored.
FOLDER_READERS = ("parquet", "jsonl", "text")


def texts(paths: Sequence[Path], column: str = "text") -> Iterator[str]:
    """Yield the texts in the given files and folders. In Parquet files they are in the column `column`, in JSON Lines
    under the key `column`; a text file holds one text."""
    for file in files(paths):
        yield from (doc.text for doc in documents(file, column))


def documents(file: Path, column: str = "text", keep: Sequence[str] = ()) -> Iterator[Document]:
    """Yield the documents of one file. The text of a document is in the column `column`; the values of the columns
    `keep` are put into its `meta`. Rows without a text are skipped. A text file is one document; `column` and `keep` do
    not apply to it.

    Raises BadUsage when a Parquet file lacks one of these columns, when a file has rows but none with a text, or when
    the file cannot be read to its end.
    """
    lower = file.name.lower()
    name = next((name for name in FOLDER_READERS[:-1] if lower.endswith(reader_class(name).suffixes)), "text")
    cls = reader_class(name)
    reader = cls() if name == "text" else cls(text=column, keep=tuple(keep))
    missing, count = 0, 0
    with reading(file):
        try:
            for doc in reader.read(str(file), Slice("", file.name)):
                if isinstance(doc, Document):
                    count += 1
                    yield doc
                elif doc.fatal:
                    raise BadUsage(f"{file} is no {name} file that can be read to its end: {doc.reason} ({doc.detail})")
                else:
                    missing += doc.reason == "missing_text"
        except ValueError as e:                                   # the Parquet file has no such column
            raise BadUsage(str(e).replace("with `text:`, and fix `keep:`", "on the command line")) from None
    if missing and not count:
        raise BadUsage(f"{file}: no line of it has a text at '{column}'; say which key holds it")


def files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files with texts that the paths name. A folder stands for all Parquet files below it. If it has none,
    it stands for its JSON Lines files, and if it has none of these, for its text files. They are sorted by path. Files
    and folders below it whose names begin with . or _ are left out. Raises BadUsage when a path does not exist, or is a
    folder without such files."""
    for path in paths:
        if not path.exists():
            raise BadUsage(f"no such file: {path}")
        if not path.is_dir():
            yield path
            continue
        below = sorted(p for p in path.rglob("*") if p.is_file()
                       and not any(part.startswith((".", "_")) for part in p.relative_to(path).parts))
        suffixes = [reader_class(name).suffixes for name in FOLDER_READERS]
        chosen = next(filter(None, ([p for p in below if p.name.lower().endswith(s)] for s in suffixes)), [])
        if not chosen:
            raise BadUsage(f"{path} holds neither Parquet files nor JSON Lines nor texts "
                           f"({', '.join(suffixes[-1][:5])})")
        yield from chosen
