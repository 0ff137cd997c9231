"""Runs datatrove's blocks (its processing classes) as steps and readers of a recipe.

``- datatrove: {block: filters.GopherQualityFilter, min_doc_words: 20}`` runs any of datatrove's filters, formatters and
extractors that process one document at a time. ``{read: datatrove, block: readers.CSVReader, path: …}`` reads files
through one of datatrove's readers. A recipe is refused if it names a block that sees more than one document, keeps
state between documents or reads a clock. The error message says why, and in most cases what to use instead.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from pydantic import model_validator

from stages.document import BadRecord, Document, document_id
from stages.read.reader import Reader, Slice, bad, check_file, is_machine_fault, locator
from stages.stage import Stage, StageConfig, signal
from stages.text.encoding import decode

#: packages of blocks that see the whole dataset or write it, and what to use
_REFUSED_PACKAGES = {
    "dedup": "it compares documents with each other; use the steps `exact` or `minhash`",
    "decont": "its index is built from other data; use a dataset of its own and the step `minhash` with priority",
    "stats": "it sums over documents; signals are stored beside every text and summed up in the report",
    "tokens": "use `tokenizer:` and `shards:` of the recipe",
    "writers": "datasets are written by the engine; datatrove's ParquetReader reads STORE/datasets/NAME",
    "inference": "it runs a server beside the pipeline; read its output as a source",
    "media": "documents hold text; fetch the bytes first and read them as a source",
    "readers": "a reader is a source: `{read: datatrove, block: readers.…, path: …}`",
}
_REFUSED_BLOCKS = {
    "filters.LambdaFilter": "it takes a Python function; write it as a stage and name it `module:Class`",
    "filters.SamplerFilter": "it draws numbers in the order documents reach a process, so the sample depends on the "
                             "number of workers",
    "filters.LanguageFilter": "it decides on a score whose last digits depend on the machine, with a model no key has; "
                              "use the step `language`, which rounds and stores the score",
    "filters.FastTextClassifierFilter": "it decides on a score whose last digits depend on the machine; use the step "
                                        "`quality` with the same model",
    "filters.UnigramLogProbFilter": "it decides on a score whose last digits depend on the machine, with frequencies "
                                    "that are in no key; use the step `language` or `quality`",
    "readers.HuggingFaceDatasetReader": "it streams a whole set; download its Parquet files and use `read: parquet`",
}
#: arguments that no recipe may set, and why
_REFUSED_ARGUMENTS = {
    "exclusion_writer": "dropped documents are kept beside the dataset anyway",
    "timeout": "no clock decides about text; hanging documents are quarantined by the engine",
    "adapter": "it is a Python function", "limit": "set it on the source", "skip": "set it on the source",
    "data_folder": "it is the source's path", "paths_file": "it is the source's path",
    "glob_pattern": "it is part of the source's path", "recursive": "it is part of the source's path",
    "add_file_path": "the locator says where a document comes from",
    "shuffle_files": "order is planned", "file_progress": "the engine shows progress",
    "doc_progress": "the engine shows progress",
}
_LIBRARIES = {
    "extractors.Trafilatura": ("trafilatura", "justext", "lxml"), "filters.GopherRepetitionFilter": ("spacy",),
    "filters.GopherQualityFilter": ("spacy",), "filters.C4QualityFilter": ("spacy",),
    "filters.FineWebQualityFilter": ("spacy",), "filters.URLFilter": ("tldextract",),
    "formatters.FTFYFormatter": ("ftfy",),
}
_SNAKE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class BlockConfig(StageConfig):
    """Settings of a step or reader that runs a block (a processing class of datatrove). The setting `block` names the
    class. All other settings are arguments of the constructor of that class."""

    block: str = signal(..., "datatrove's name below datatrove.pipeline, e.g. filters.GopherQualityFilter")
    args: dict[str, Any] = signal({}, "arguments of its constructor; written beside `block`")

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        arguments = {key: value for key, value in data.items() if key not in ("block", "args")}
        named = {key: data[key] for key in ("block", "args") if key in data}
        return {**named, "args": {**named.get("args", {}), **arguments}} if arguments else named

    @model_validator(mode="after")
    def _refuse(self) -> BlockConfig:
        block = self.block
        package, _, name = block.rpartition(".")
        kinds = self.kinds()
        if block in _REFUSED_BLOCKS:
            raise ValueError(f"datatrove's {block} cannot run here: {_REFUSED_BLOCKS[block]}")
        if package.split(".")[0] in _REFUSED_PACKAGES and package not in kinds:
            raise ValueError(f"datatrove's {block} cannot run here: {_REFUSED_PACKAGES[package.split('.')[0]]}")
        if package not in kinds or not name.isidentifier():
            raise ValueError(f"'{block}' names no block of datatrove that can stand here; there are blocks in "
                             f"{', '.join(kinds)}, for example {_EXAMPLE[kinds[0]]}")
        for argument in self.args:
            if argument in _REFUSED_ARGUMENTS:
                raise ValueError(f"{argument}: not to be set for {block}: {_REFUSED_ARGUMENTS[argument]}")
        if block == "filters.C4BadWordsFilter" and self.args.get("keep_fraction"):
            raise ValueError(f"keep_fraction: not to be set for {block}: it draws numbers in the order documents reach "
                             "a process, so the sample depends on the number of workers")
        if block == "extractors.Trafilatura" and self.args.get("deduplicate"):
            raise ValueError(f"deduplicate: not to be set for {block}: it remembers pages, so the text of one depends "
                             "on those the process has seen before")
        return self

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        return ("filters", "formatters", "extractors")


_EXAMPLE = {"filters": "filters.GopherQualityFilter", "readers": "readers.CSVReader"}


class Datatrove(Stage):
    """Run one of datatrove's filters, formatters or extractors (called blocks) on one document at a time.

    The reason for a drop is the one that the filter gives, or else the filter's class name in snake_case. Metadata that
    a filter sets goes to `meta`, except for `language`, which becomes the document's language. A document in which an
    extractor finds no text is dropped as `no_text`.

    Two defaults of datatrove are changed, because they make the text of a document depend on other documents.
    Formatters that use several replacements in turn start with the first one in each document. Trafilatura runs without
    `deduplicate`.

    Blocks that decide by the unrounded floats of a model are refused. Use the steps `language` and `quality`, which
    round their scores and store them. If a package that a block needs is missing, set-up fails with a message that
    names the package.
    """

    name = "datatrove"
    version = 1
    cost_ms, leaves, edits = 5.0, 0.9, True
    does = "runs a block"
    Config = BlockConfig
    memory_mb = 900

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        block = self.config.block
        self.kind = block.partition(".")[0]
        self.extracts = self.kind == "extractors"
        self.scrubs = block == "formatters.PIIFormatter"
        self.libraries = ("datatrove", *_LIBRARIES.get(block, ()))
        self._block: Any = None

    def setup(self) -> None:
        args = dict(self.config.args)
        if self.config.block == "extractors.Trafilatura":
            args["deduplicate"] = False
        self._block = _class(self.config.block)(**args)

    def process(self, doc: Document) -> str | None:
        if self._block is None:
            self.setup()
        if self.kind == "filters":
            return self._filter(doc)
        if self.kind == "formatters":
            for part in vars(self._block).values():
                if hasattr(part, "_replace_i"):
                    part._replace_i = 0
            doc.text = self._block.format(doc.text)
            return None
        page = doc.text if doc.raw is None else decode(doc.raw, doc.charset)[0]
        doc.text = self._block.extract(page) or ""
        return None if doc.text else "no_text"

    def _filter(self, doc: Document) -> str | None:
        from datatrove.data import Document as DatatroveDocument

        fields = {"url": doc.url, "language": doc.language, "date": doc.date, "source": doc.source}
        metadata = {**doc.meta, **{name: value for name, value in fields.items() if value}}
        their_document = DatatroveDocument(text=doc.text, id=doc.id, metadata=dict(metadata))
        result = self._block.filter(their_document)
        keep, reason = result if isinstance(result, tuple) else (result, None)
        doc.text = their_document.text if keep else doc.text
        for name, value in their_document.metadata.items():
            if name in metadata and metadata[name] == value:
                continue
            value = value.item() if hasattr(value, "item") else value
            if name == "language":
                doc.language = value
            else:
                doc.meta[name] = value
        return None if keep else reason or _SNAKE.sub("_", self.config.block.rpartition(".")[2]).lower()


class ReaderConfig(BlockConfig):
    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        return ("readers",)


class DatatroveReader(Reader):
    """Reads a file with one of datatrove's disk readers (CSVReader, JsonlReader, ParquetReader, IpcReader, WarcReader).

    The metadata of a record becomes the document's `meta`. Strings under `url`, `date` and `language` become the URL,
    date and language of the document instead. The fields `cluster` and `near_duplicates` are renamed to `their_cluster`
    and `their_near_duplicates`, because Tokenmill's deduplication writes the original names. An id that the record has
    in its file becomes `meta.id`.

    WarcReader gives pages, not text: a page goes to `raw`, from which the step `html` or another extractor makes the
    text. datatrove skips broken lines and records without text. It only logs them, if at all, so this reader cannot
    count them. If Tokenmill has its own reader for a format, prefer that reader.
    """

    name = "datatrove"
    collection = True
    version = 2
    libraries = ("datatrove",)
    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".csv", ".csv.gz", ".warc", ".warc.gz", ".parquet", ".arrow")
    Config = ReaderConfig

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        check_file(local, slice.path)
        block, ordinal = self.config.block, 0
        cls = _class(block)
        folder, file = os.path.split(os.path.abspath(local))
        reader = cls(folder, **self.config.args)
        reader.add_file_path = False  # it would put this machine's path into the data
        try:
            for their_document in reader.read_file(file):
                yield _document(their_document, slice, ordinal, self.lost, pages="Warc" in block)
                ordinal += 1
        except Exception as e:
            if is_machine_fault(e) or isinstance(e, ImportError) or getattr(e, "filename", None) is not None:
                raise                                   # memory, disk or a library failed: the file is not to blame
            yield bad("unreadable", slice, 0, ordinal, detail=f"{type(e).__name__}: {e}", fatal=True)


def _document(their_document: Any, slice: Slice, ordinal: int, lost: dict[str, dict[str, int]],
              pages: bool) -> Document:
    """Convert a document of datatrove to one of ours. With `pages`, its text is a web page and goes to `raw`. The
    metadata fields `cluster` and `near_duplicates` are renamed to `their_cluster` and `their_near_duplicates`. `lost`
    counts the values that a renamed field overwrites, as {new name: {reason: count}}."""
    meta = dict(their_document.metadata)
    meta.pop("file_path", None)
    for name in ("cluster", "near_duplicates"):         # our deduplication sets these names, and training uses them
        if name in meta:
            if (new_name := f"their_{name}") in meta:
                lost[new_name] = {"name_taken": lost.get(new_name, {}).get("name_taken", 0) + 1}
            meta[new_name] = meta.pop(name)
    if not str(their_document.id).startswith(f"{os.path.basename(slice.path)}/"):
        meta["id"] = their_document.id
    # readers of typed files return dates and bytes, which JSON lacks
    meta = json.loads(json.dumps(meta, default=str))
    url, language, date = (str(meta.pop(name)) if isinstance(meta.get(name), str) else None
                           for name in ("url", "language", "date"))
    return Document(document_id(slice.source, slice.path, "", ordinal), "" if pages else their_document.text,
                    source=slice.source, raw=their_document.text.encode("utf-8", "surrogatepass") if pages else None,
                    mime="text/html" if pages else "", charset="utf-8" if pages else "", meta=meta,
                    locator=locator(slice.path, 0, ordinal),
                    url=url or "", language=language or "", date=date)


def _class(block: str) -> Any:
    """Import the class of datatrove that `block` names, such as `filters.GopherQualityFilter`. Raises
    ModuleNotFoundError if a package that the class needs is missing, and ValueError if there is no such class."""
    package, _, name = block.rpartition(".")
    try:
        module = importlib.import_module(f"datatrove.pipeline.{package}")
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"datatrove: {e.name} is not installed: `pip install 'datatrove[processing]'`") from e
    block_class = getattr(module, name, None)
    if not isinstance(block_class, type):
        available = ", ".join(sorted(n for n in dir(module) if isinstance(getattr(module, n), type)))
        raise ValueError(f"datatrove has no block {block}; there are {available}")
    return block_class
