"""What a file is, and its documents as the reader and the step of a recipe make them."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from pipeline.cli.errors import BadUsage, UserError

if TYPE_CHECKING:
    from stages.document import BadRecord, Document

#: kind of file → the reader, and the step that makes text of what it reads, as a recipe names them
KINDS: dict[str, tuple[str, str | None]] = {
    "html": ("html", "html"), "pdf": ("pdf", "pdf"), "warc": ("warc", "html"), "wiki": ("wiki", None),
    "latex": ("latex", "latex"), "book": ("text", "book"), "notebook": ("notebook", None), "code": ("code", None),
    "code_table": ("code_table", None), "sft": ("sft", None), "preference": ("preference", None),
    "jsonl": ("jsonl", None), "parquet": ("parquet", None), "text": ("text", None)}
#: a file of files of any kind
ARCHIVE = "archive"
#: kinds whose files hold many documents
COLLECTIONS = ("warc", "wiki", "code_table", "sft", "preference", "jsonl", "parquet", ARCHIVE)
#: readers that are asked for the members of an archive, the first that takes it first
ARCHIVED = ("html", "pdf", "notebook", "text", "code")
#: seconds after which one is told what takes them
PATIENCE = 3.0
#: bytes a file is told by
SNIFFED = 64 << 10
_LATEX = (".tex", ".ltx", ".latex")
_PACKED = (".gz", ".bz2", ".xz", ".zst")


class Made(NamedTuple):
    """A document of a file as an engine makes it: what it is, the engine (None where they make no difference), the
    reason why it has no text (None: it has)."""

    kind: str
    engine: str | None
    doc: Document | BadRecord
    reason: str | None


class Maker:
    """Reads files and runs the step that makes text of what is in them.

    `engines` and `format` are those of web pages, `settings` further ones by name of reader or step. Raises RecipeError
    for settings that do not fit.
    """

    def __init__(self, engines: Sequence[str], format: str, settings: dict[str, dict[str, Any]]) -> None:
        self.engines, self.format = engines, format
        self.settings = settings
        self.html = [{"format": format, **settings.get("html", {}), "engine": engine} for engine in engines]
        self.stages: dict[str, list[Any]] = {}
        for name in settings:
            _check(name, settings[name])

    def documents(self, path: str, file: str, kind: str) -> Iterator[list[Made]]:
        """Documents of the file at `path`, which is called `file` and of this kind. Each as all engines make it, or
        once where they make no difference. Of an archive each reader gives those with its suffixes."""
        if kind != ARCHIVE:
            yield from self._read(kind, path, file)
            return
        from stages.read.streams import Damaged, members

        try:
            papers = any(member.name.lower().endswith(_LATEX) for member in members(path, file, (), 0))
        except Damaged:
            papers = False                                     # the readers say so
        seen: set[tuple[str, int]] = set()
        left_out: dict[tuple[str, int], list[Made]] = {}
        for each in ("latex", *ARCHIVED) if papers else ARCHIVED:
            for found in self._read(each, path, file):
                member = found[0].doc.locator.get("sub", ""), found[0].doc.locator.get("record", 0)
                if papers and each != "latex" and member[0].lower().endswith(_LATEX):
                    continue                                   # joined, they are a paper
                if found[0].reason == "other_type":
                    left_out.setdefault(member, found)
                elif member not in seen:
                    seen.add(member)
                    yield found
        yield from (found for member, found in left_out.items() if member not in seen)

    def _read(self, kind: str, path: str, file: str) -> Iterator[list[Made]]:
        from stages.catalog import reader_class
        from stages.document import BadRecord
        from stages.read.reader import Slice

        name, step = KINDS[kind]
        reader = reader_class(name)
        # a file that is given by name is meant, wherever it lies
        config = {"vendored": True} if "vendored" in reader.Config.model_fields else {}
        config |= {k: v for k, v in self.settings.get(name, {}).items() if k in reader.Config.model_fields}
        for doc in reader(config).read(path, Slice("extract", Path(file).name if file != "-" else "stdin")):
            if isinstance(doc, BadRecord):
                yield [Made(kind, None, doc, doc.reason)]
                continue
            what = step
            if kind == "warc":
                # a crawl holds PDFs, too, and what its pages are declared to be is often wrong
                what = "html" if doc.raw is None or b"%PDF-" not in doc.raw[:1024] else "pdf"
            engines = self.engines if what == "html" and doc.raw is not None else [None]
            copies = [doc, *(copy.deepcopy(doc) for _ in engines[1:])]
            shown = kind
            if kind == "warc":
                shown = "text" if doc.raw is None else what or kind
            yield [Made(shown, engine, d, _processed(stage, d))
                   for engine, d, stage in zip(engines, copies, self._stages(what))]

    def _stages(self, step: str | None) -> list[Any]:
        from stages.catalog import stage_class

        if step is None:
            return [None]
        if step not in self.stages:
            found = stage_class(step)
            given = {k: v for k, v in self.settings.get(step, {}).items() if k in found.Config.model_fields}
            try:
                with patience(f"preparing the step '{step}'; what it compiles is kept for the next time …"):
                    self.stages[step] = [found(config) for config in (self.html if step == "html" else [given])]
                    for stage in self.stages[step]:
                        stage.setup()
            except OSError as e:                              # a program or a model is not there
                raise UserError(str(e)) from None
        return self.stages[step]


@contextlib.contextmanager
def patience(said: str) -> Iterator[None]:
    """Says on stderr what takes so long, when it does."""
    timer = threading.Timer(PATIENCE, typer.echo, (said,), {"err": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _processed(stage: Any, doc: Document) -> str | None:
    try:
        return None if stage is None else stage.process(doc)
    except Exception as e:                                    # a run would quarantine it, and so do we
        return f"error: {type(e).__name__}: {e}"


def settings_of(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`pdf.ocr=tesseract` … as {name of a reader or step: {key: value}}. Raises BadUsage, RecipeError."""
    from pipeline.recipe.errors import nearest
    from pipeline.recipe.marks import parse_yaml

    names = {name for both in KINDS.values() for name in both if name}
    out: dict[str, dict[str, Any]] = {}
    for one in given:
        key, equals, text = one.partition("=")
        name, dot, field = (part.strip() for part in key.partition("."))
        if not (equals and dot and name and field):
            raise BadUsage(f"--set {one}: write --set NAME.KEY=VALUE, e.g. --set pdf.ocr=tesseract")
        if name not in names:
            raise BadUsage(f"--set {one}: there is no reader or step '{name}': {nearest(name, names)}")
        if (name, field) in (("html", "engine"), ("html", "format")):
            raise BadUsage(f"--set {one}: give it by --{field}")
        out.setdefault(name, {})[field] = parse_yaml(text, f"--set {one}")[0]
    return out


def _check(name: str, given: dict[str, Any]) -> None:
    """Raises RecipeError for keys that neither the reader nor the step of this name has, or values that do not fit."""
    from pipeline.recipe.checker import Checker
    from pipeline.recipe.marks import Marks
    from stages.catalog import reader_class, readers, stage_class, steps

    checker = Checker(Marks("--set"), ".", False)
    found = ((stage_class, steps()), (reader_class, readers()))
    configs = [find(name).Config for find, names in found if name in names]
    known = {field for config in configs for field in config.model_fields}
    for field in given:
        checker.known(field, known, (name, field), "key")
    checker.stop_if_failed()
    for config in configs:
        checker.validate(config, {k: v for k, v in given.items() if k in config.model_fields}, (name,))
    checker.stop_if_failed()


# -- what a file is ----------------------------------------------------------------------------------------------------
def kind_of(path: str, file: str) -> str:
    """Kind of a file: by what it begins with where that leaves no doubt, then by its suffix, then by its looks."""
    from stages.catalog import reader_class
    from stages.read.streams import Damaged, Stream, is_archive
    from stages.text.encoding import decode

    if is_archive(file):
        return ARCHIVE
    try:
        with Stream(path) as stream:
            begin = stream.read(SNIFFED)
    except Damaged:
        begin = b""                                           # its reader says so
    name = Path(file).name.lower()
    text = decode(begin)[0]
    if b"%PDF-" in begin[:1024]:
        return "pdf"
    if begin.startswith((b"WARC/", b"filedesc:")) or name.endswith(reader_class("warc").suffixes):
        return "warc"
    if begin.startswith(b"PAR1") or name.endswith(reader_class("parquet").suffixes):
        return _table(path)
    if "<mediawiki" in text[:4096]:
        return "wiki"
    bare = name.removesuffix(next((s for s in _PACKED if name.endswith(s)), ""))
    if bare.endswith(_LATEX):
        return "latex"
    for kind in ("html", "notebook", "code"):
        if bare.endswith(reader_class(kind).suffixes):
            return kind
    if name.endswith(reader_class("jsonl").suffixes):
        return _lines(path)
    if name.endswith(reader_class("text").suffixes):
        return "book" if _gutenberg(text) else "text"
    return _looks_like(text, path)


def _looks_like(text: str, path: str) -> str:
    """Kind of a text that has no suffix."""
    from stages.extract.html.step import is_page

    if is_page(text, ""):
        return "html"
    if "\\documentclass" in text or "\\begin{document}" in text:
        return "latex"
    if text.lstrip().startswith("{") and '"cell_type"' in text:
        return "notebook"
    if text.lstrip()[:1] in ("{", "[") and _first_row(path) is not None:
        return _lines(path)
    return "book" if _gutenberg(text) else "text"


def _gutenberg(text: str) -> bool:
    return "PROJECT GUTENBERG" in text[:20_000].upper()


def _first_row(path: str) -> dict[str, Any] | None:
    """The first object of JSON lines, or of an array; None when there is none."""
    from stages.catalog import reader_class
    from stages.read.reader import Slice

    found = (row for _, _, row in reader_class("jsonl")().rows(path, Slice("", "")) if row is not None)
    row = next(found, None)
    return row if isinstance(row, dict) else None


def _lines(path: str) -> str:
    row = _first_row(path) or {}
    return _records({k for k, v in row.items() if v is not None},
                    {k for k, v in row.items() if isinstance(v, list)}) or "jsonl"


def _table(path: str) -> str:
    import pyarrow as pa

    from pipeline.base.parquet import open_parquet

    try:
        with open_parquet(path) as file:
            schema = file.schema_arrow
    except (pa.ArrowException, OSError):
        return "parquet"                                      # its reader says what is wrong
    if set(schema.names) >= {"content", "max_stars_repo_path"}:           # The Stack
        return "code_table"
    return _records(set(schema.names), {f.name for f in schema if pa.types.is_nested(f.type)}) or "parquet"


def _records(keys: set[str], lists: set[str]) -> str | None:
    """Which set of post-training records has these keys, and lists under those, if any."""
    from stages.read.records import Preference, Sft

    sft, preference = Sft.Config(), Preference.Config()
    if keys & set(preference.chosen) and (keys & {*preference.prompt, *preference.rejected}):
        return "preference"
    if lists & set(sft.messages):
        return "sft"
    return "sft" if "text" not in keys and keys & set(sft.instruction) and keys & set(sft.output) else None
