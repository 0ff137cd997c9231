"""Reads token files of another project: documents that it has already turned into tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stages.document import BadRecord, Document, document_id
from stages.read.reader import Reader, Slice, bad, locator, skipped
from stages.stage import SettingsError, StageConfig, resource, signal
from tokenizer.imports.decode import FirstTexts
from tokenizer.imports.imports import FORMATS, ids_of
from tokenizer.imports.rows import blocks_of
from tokenizer.imports.source import Coding, ImportSource, TokenFileError, WrongTokenizer

if TYPE_CHECKING:
    from tokenizer.imports.documents import ImportedDocuments
    from tokenizer.load import Tokenizer

#: stands for a tokenizer where only the names of files are read
NO_CODING = Coding("", 1 << 32, 0)


class Tokens(Reader):
    """Reads token files of another project. Their formats are those of `tokenmill shards import`, the keys of
    `tokenizer.imports.imports.FORMATS`.

    Without `decode`, the tokens are used as they are: the recipe names the source under `shards:`, and the task
    `ImportTokens` reads it. No dataset can read the source, since steps work on texts.

    With `decode: true`, each document is turned back into text by the tokenizer with which the tokens were made, so
    that datasets can filter, deduplicate and tokenise it anew. The EOS at its end is left out; other special tokens are
    spelled out. Bytes that are no UTF-8 become U+FFFD. An id in the files is kept as `meta.id`. In the locator (place
    in the input), `record` is the number of the document in its file.

    If a document cannot be read, the rest of its file is left out and quarantined (`corrupt_tokens`). A file with a
    loss mask is treated in the same way, because a text cannot carry the mask. The run ends if another tokenizer has
    made the tokens. One of these signs is enough:

    - The files name the hash of another tokenizer.
    - Most documents do not end in this tokenizer's EOS.
    - Many tokens are outside its vocabulary.
    - Much of the first texts is unreadable.

    With `sequence` = L, the files have rows (training samples) of L + 1 tokens, or of L tokens in the formats `olmo`
    and `nanogpt`. Each piece of a document in a row becomes a document. A piece ends where the files say that a
    document ends; in files that do not say it, at each EOS. The end of a row always ends a piece. A piece without EOS
    at its end gets one, which does not count for the loss. Padding that a loss mask shows becomes no document.
    """

    name = "tokens"
    version = 2
    collection = True
    in_units = True
    libraries = ("tokenizers",)
    memory_mb = 1500

    class Config(StageConfig):
        format: Literal["ds", "megatron", "olmo", "nanogpt", "parquet", "mds", "litdata"] = signal(
            ..., "format of the files, as for `tokenmill shards import`")
        tokenizer: str = resource(
            "", "tokenizer with which the tokens were made; without `decode` it must be that of the recipe. '' to "
                "trust that it is")
        decode: bool = signal(False, "turn the tokens back into texts, for datasets")
        eos: str = signal("", "with `decode`: the token that ends documents; '' for the one that the tokenizer's files "
                              "declare")
        sequence: int = signal(
            0, "L, for files with rows (training samples) of L + 1 tokens, or of L tokens in olmo and nanogpt, instead "
               "of documents. Each piece of a document in a row becomes a document; a row in which no document ends "
               "becomes one", added=True, ge=0, lt=1 << 28)
        max_bytes: int = signal(64 << 20, "with `decode`: longest text, bytes; beyond: too_large", gt=0)

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.holds_tokens = not self.config.decode
        if self.config.decode and not self.config.tokenizer:
            raise SettingsError("`decode` needs the tokenizer with which the tokens were made; add `tokenizer:`")
        if self.config.eos and not self.config.decode:
            raise SettingsError("`eos` is for `decode: true`; set `eos` under `tokenizer:` of the recipe, or add "
                                "`decode: true`")

    def expansion(self, path: str) -> float:
        return 2.0 if self.config.decode else 1.0

    def group(self, path: str) -> str:
        """All files of a task form one group, because `units` has decided which files are read together."""
        return "files of one task" if self.config.decode else ""

    def units(self, root: str, paths: Sequence[str], find: Callable[[str], str]) -> list[list[str]]:
        format = FORMATS[self.config.format]
        source = ImportSource(Path(root), NO_CODING, names=paths, find=find, sequence=self.config.sequence)
        units = [[name, *format.beside(source, name)] for name in format.files(source)]
        return [[name for unit in units for name in unit]] if format.continues else units

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        yield from self.read_files(iter([(local, slice)]))

    def read_files(self, files: Iterator[tuple[str, Slice]]) -> Iterator[Document | BadRecord]:
        slices: dict[str, Slice] = {}
        places: dict[str, str] = {}
        for local, piece in files:
            slices[piece.path], places[piece.path] = piece, local
        coder = _tokenizer(self.config.tokenizer, self.config.eos)
        format, coding = FORMATS[self.config.format], Coding(coder.sha256, coder.vocab_size, coder.eos)
        source = ImportSource(Path(), coding, names=places, find=places.__getitem__, sequence=self.config.sequence)
        with_tokens = set(format.files(source))
        names = [name for name in slices if name in with_tokens]
        first = FirstTexts(coder.unknown)
        for together in [names] if format.continues else [[name] for name in names]:
            place, number = together[0], 0
            try:
                for documents, _ in blocks_of(source, format, together):
                    place, number = documents.file, documents.first
                    yield from self._decoded(source, documents, slices[place], coder, first)
                    number += len(documents.lengths)
            except WrongTokenizer as e:
                raise WrongTokenizer(f"source '{slices[place].source}' (`tokenizer: {self.config.tokenizer}`): "
                                     f"{e}") from None
            except TokenFileError as e:
                yield bad("corrupt_tokens", slices[place], 0, number, detail=str(e), fatal=True)

    def _decoded(self, source: ImportSource, documents: ImportedDocuments, slice: Slice,
                 coder: Tokenizer, first: FirstTexts) -> Iterator[Document | BadRecord]:
        ends, targets = np.cumsum(documents.lengths), documents.targets
        if targets is not None and source.sequence:       # the EOS of a piece may be none of the files
            targets = np.delete(targets, ends - 1)
        if targets is not None and not targets.all():
            raise TokenFileError(f"{documents.file}: has a loss mask, which texts cannot carry; remove the masks, or "
                                 f"name the source under `shards:` without `decode`")
        ids_of(source, documents, lambda file, number: "")                           # raises if an id is too long
        for i, (begin, end) in enumerate(zip((ends - documents.lengths).tolist(), ends.tolist())):
            record = documents.first + i
            text = coder.decode(documents.tokens[begin:end - 1])
            first.add(documents.file, documents.tokens[begin:end - 1], text)
            if (size := len(text.encode("utf-8", "surrogatepass"))) > self.config.max_bytes:
                yield bad("too_large", slice, 0, record, detail=f"{size} bytes")
            elif not text or text.isspace():
                yield skipped("empty", slice, 0, record)
            else:
                id = document_id(slice.source, slice.path, "", record)
                yield Document(id, text, source=slice.source, locator=locator(slice.path, 0, record),
                               meta={} if documents.ids is None else {"id": documents.ids[i]})


@lru_cache(maxsize=1)
def _tokenizer(path: str, eos: str) -> Tokenizer:
    from tokenizer.load import load_tokenizer

    return load_tokenizer(path, eos or None)
