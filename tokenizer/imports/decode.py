"""Turns files with tokens of another project back into texts, as JSON Lines. The texts can then be filtered, or encoded
with another tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenizer.export.target import OpenTarget, contents_of, opened
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.imports import FORMATS, ids_of, states_of
from tokenizer.imports.source import OTHER, Coding, ImportSource, StoredFiles, TokenFileError, WrongTokenizer

#: size in bytes at which a file of texts is full, and the next one begins
FILE_BYTES = 1 << 28
#: what a decoder writes for bytes that are not valid UTF-8
REPLACEMENT = "\ufffd"


class FirstTexts:
    """Checks whether the given tokenizer made the tokens of a source, by the texts of the first documents. Another
    tokenizer decodes many of the tokens to bytes that are not valid UTF-8, or to its unknown token. Sound documents
    have few such places."""

    DOCUMENTS = 64                # number of documents that are checked
    SHARE, FEWEST = 0.1, 1000     # largest unreadable share of characters or tokens; fewest that are judged

    def __init__(self, unknown: int | None) -> None:
        self.unknown, self.documents = unknown, 0
        self.chars = self.replaced = self.tokens = self.unknown_tokens = 0

    def add(self, place: object, tokens: np.ndarray, text: str) -> None:
        """Count a document: its tokens and the text decoded from them. Does nothing after the first DOCUMENTS
        documents. The error names `place`, the file of the document.

        Raises WrongTokenizer if more than the share SHARE of the counted characters are U+FFFD, or of the counted
        tokens the unknown token. At least FEWEST characters or tokens must have been counted."""
        if self.documents >= self.DOCUMENTS:
            return
        self.documents += 1
        self.chars, self.replaced = self.chars + len(text), self.replaced + text.count(REPLACEMENT)
        self.tokens += len(tokens)
        self.unknown_tokens += 0 if self.unknown is None else int(np.count_nonzero(tokens == self.unknown))
        for bad, all, what in ((self.replaced, self.chars, "characters are no text (U+FFFD)"),
                               (self.unknown_tokens, self.tokens, "tokens are the unknown token")):
            if all >= self.FEWEST and bad > self.SHARE * all:
                raise WrongTokenizer(f"{place}: {bad:,} of the first {all:,} {what}: another tokenizer has made "
                                     f"them; {OTHER}")


class Decoded(NamedTuple):
    """Counts of what `decode_tokens` has written."""

    files: int
    bytes: int
    documents: int
    tokens: int
    damaged: int                  # documents with U+FFFD, which stands for bytes that are not valid UTF-8


def decode_tokens(path: Path, format: str, coding: Coding, decode: Callable[[np.ndarray], str], out: Path | OpenTarget,
                  progress: Callable[[int, int], None] = lambda done, total: None, file_bytes: int = FILE_BYTES,
                  unknown: int | None = None, stored: StoredFiles | None = None) -> Decoded:
    """Write the texts of the documents in a file or folder `path` to `out`, in their order, as files 00000.jsonl and so
    on. A new file begins after `file_bytes` bytes.

    `out` is a new folder. It can also be a function that opens another place, such as object storage. With `stored`,
    the files are read from object storage, and `path` is used only in messages. `decode` is the tokenizer's function
    that turns tokens into a text. `unknown` is the tokenizer's unknown token, or None if it has none. `progress` gets
    the number of bytes read so far and of all bytes to read.

    A line has the keys `id` and `text`. The text is without the document's EOS. The id is the one in the files, or
    FILE#NUMBER if they have no ids.

    Raises TokenFileError when a file does not have the format `format`, when another tokenizer seems to have made it,
    or when there are no documents. Also raises it when a loss mask says that some tokens are no targets, which texts
    cannot express. `out` then stays as it was."""
    done = total = 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    reader, source = FORMATS[format], ImportSource(path, coding, read, stored=stored)
    documents = tokens = damaged = 0
    names = reader.files(source)
    total = source.size(names)
    with opened(out, contents_of(format, *coding, file_bytes, states_of(source, reader, names))) as target:
        lines = lines_of(source, reader.documents(source, names), decode, FirstTexts(unknown))
        line = next(lines, None)
        while line is not None:
            with target.create(f"{target.files:05d}.jsonl") as file:
                size = 0
                while line is not None and size < file_bytes:
                    text, count, is_damaged = line
                    size += file.write(text)
                    documents, tokens, damaged = documents + 1, tokens + count, damaged + is_damaged
                    line = next(lines, None)
        if not documents:
            raise TokenFileError(f"{path}: has no documents, so there is nothing to decode")
    return Decoded(target.files, target.bytes, documents, tokens, damaged)


def lines_of(source: ImportSource, blocks: Iterator[ImportedDocuments],
             decode: Callable[[np.ndarray], str], first: FirstTexts) -> Iterator[tuple[bytes, int, bool]]:
    """Yield (line of JSON, number of tokens, whether the text seems damaged) for each document. A text seems damaged if
    it contains U+FFFD, which the tokenizer writes in place of bytes that are not valid UTF-8. `first` checks the first
    texts. Raises TokenFileError when a loss mask says that some tokens are no targets."""
    for documents in blocks:
        if documents.targets is not None and not documents.targets.all():
            raise TokenFileError(f"{source.folder / documents.file}: has a loss mask, which texts cannot carry; remove "
                                 f"the masks, or import the files as shards")
        ends = np.cumsum(documents.lengths)
        ids = ids_of(source, documents, lambda file, number: f"{file}#{number}")
        for id, begin, end in zip(ids, (ends - documents.lengths).tolist(), ends.tolist()):
            text = decode(documents.tokens[begin:end - 1])
            first.add(source.folder / documents.file, documents.tokens[begin:end - 1], text)
            line = json.dumps({"id": id, "text": text}, ensure_ascii=False) + "\n"
            yield line.encode(), end - begin, REPLACEMENT in text
