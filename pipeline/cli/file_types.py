"""Determines the type of a file, and reads its documents with the reader and the step that a recipe would use for this
type (`tokenmill extract`)."""

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
    from stages.read.reader import Reader

#: the type of an archive, whose members may be of any type
ARCHIVE = "archive"
#: seconds after which a message says what is taking so long
PATIENCE = 3.0
#: bytes at the start of a file that decide its type
SNIFFED = 64 << 10
_LATEX = (".tex", ".ltx", ".latex")
_PACKED = (".gz", ".bz2", ".xz", ".zst")


class Extracted(NamedTuple):
    """A record of a file, and what an extraction engine made of it. `file_type` is the type of the file, or of the
    record if the file holds records of several types. `engine` is None if there is no choice of engines for this type.
    `reason` says why the record has no text; it is None if the record has text."""

    file_type: str
    engine: str | None
    record: Document | BadRecord
    reason: str | None

    @property
    def text(self) -> str:
        return getattr(self.record, "text", "") if self.reason is None else ""

    @property
    def meta(self) -> dict[str, Any]:
        return getattr(self.record, "meta", {})


def resolve(file_type: str) -> tuple[type[Reader], str]:
    """Return the reader class for a type of file, and the name of the step that extracts text from the reader's
    documents ("" if the reader itself yields text). A type is the name of a reader, or of a step that declares which
    reader it needs (such as `book`). Raises BadUsage for an unknown type."""
    from pipeline.recipe.errors import nearest
    from stages.catalog import reader_class, readers, stage_class, steps

    if file_type in readers():
        reader = reader_class(file_type)
        return reader, reader.extractor or reader.markup
    if file_type in steps() and (read_by := stage_class(file_type).read_by):
        return reader_class(read_by), file_type
    raise BadUsage(f"--as {file_type}: no reader has this name: {nearest(file_type, _file_types())}")


def _file_types() -> list[str]:
    """Return the types of files that error messages propose for `--as`. These are the names of readers except `sample`,
    and of Tokenmill's own steps that declare which reader they need (such as `book`)."""
    from stages.catalog import STAGES, readers, stage_class

    return [*(name for name in readers() if name != "sample"), *(n for n in STAGES if stage_class(n).read_by)]


def _installed_readers() -> Iterator[tuple[str, type[Reader]]]:
    """Yield (name, class) of the readers that other installed packages add. A reader that cannot be imported is named
    on stderr and left out, so that files of other types can still be read."""
    from stages.catalog import READERS, reader_class, readers

    for name in readers():
        if name not in READERS:
            try:
                yield name, reader_class(name)
            except Exception as e:                        # a third-party package may raise anything
                typer.echo(f"the reader '{name}' of an installed package cannot be loaded: {type(e).__name__}: {e}",
                           err=True)


def has_many(file_type: str) -> bool:
    """Return whether files of this type may hold many documents."""
    return file_type == ARCHIVE or resolve(file_type)[0].collection


def archive_readers() -> list[str]:
    """Return the names of the readers for members of an archive, in the order in which they are tried. A member is read
    by the first reader that accepts it."""
    from stages.catalog import READERS, reader_class

    return [*(name for name in READERS if reader_class(name).in_archives),
            *(name for name, reader in _installed_readers() if reader.in_archives)]


class Extractor:
    """Reads files and runs the step that extracts the texts of their documents.

    `engines` (extraction engines) and `format` (of the text) apply to web pages. `settings` maps names of readers and
    steps to their settings. Raises RecipeError for unknown settings and for values that do not fit.
    """

    def __init__(self, engines: Sequence[str], format: str, settings: dict[str, dict[str, Any]]) -> None:
        self.engines, self.format = engines, format
        self.settings = settings
        self.html = [{"format": format, **settings.get("html", {}), "engine": engine} for engine in engines]
        self.stages: dict[str, list[Any]] = {}
        for name in settings:
            _check(name, settings[name])

    def documents(self, path: str, file: str, file_type: str) -> Iterator[list[Extracted]]:
        """Yield the documents of the file at `path`, which has the type `file_type`; `file` is its name for the user. A
        document is yielded as a list of `Extracted`: one for each engine, or only one if there is no choice of engines
        for its type.

        In an archive, a member is read by the first of `archive_readers` that accepts it. Members that no reader
        accepts come last, with the reason `other_type`. If an archive has LaTeX members, they are joined into a paper,
        which comes first.
        """
        if file_type != ARCHIVE:
            yield from self._read(file_type, path, file)
            return
        from stages.read.streams import DamagedStream, members

        try:
            papers = any(member.name.lower().endswith(_LATEX) for member in members(path, file, (), 0))
        except DamagedStream:
            papers = False                                     # the readers report the damage
        yielded: set[tuple[str, int]] = set()
        left_out: dict[tuple[str, int], list[Extracted]] = {}
        for reader in (["latex"] if papers else []) + archive_readers():
            for versions in self._read(reader, path, file):
                first = versions[0]
                member = first.record.locator.get("sub", ""), first.record.locator.get("record", 0)
                if papers and reader != "latex" and member[0].lower().endswith(_LATEX):
                    continue                                   # LaTeX members are joined into a paper
                if first.reason == "other_type":
                    left_out.setdefault(member, versions)
                elif member not in yielded:
                    yielded.add(member)
                    yield versions
        yield from (versions for member, versions in left_out.items() if member not in yielded)

    def _read(self, file_type: str, path: str, file: str) -> Iterator[list[Extracted]]:
        from stages.document import BadRecord
        from stages.read.reader import Slice

        reader, step = resolve(file_type)
        # a file given by name is wanted, even in a folder of third-party code
        config = {"vendored": True} if "vendored" in reader.Config.model_fields else {}
        config |= {k: v for k, v in self.settings.get(reader.name, {}).items() if k in reader.Config.model_fields}
        for doc in reader(config).read(path, Slice("extract", Path(file).name if file != "-" else "stdin")):
            if isinstance(doc, BadRecord):
                yield [Extracted(file_type, None, doc, doc.reason)]
                continue
            shown, what = file_type, step
            if reader.crawl:
                # a crawl holds PDFs, too, and the declared type of a page is often wrong
                what = "" if doc.raw is None else "pdf" if b"%PDF-" in doc.raw[:1024] else step
                shown = what or "text"
            engines = self.engines if what == "html" and doc.raw is not None else [None]
            copies = [doc, *(copy.deepcopy(doc) for _ in engines[1:])]
            yield [Extracted(shown, engine, d, _processed(stage, d))
                   for engine, d, stage in zip(engines, copies, self._stages(what))]

    def _stages(self, step: str) -> list[Any]:
        from stages.catalog import stage_class

        if not step:
            return [None]
        if step not in self.stages:
            cls = stage_class(step)
            settings = {k: v for k, v in self.settings.get(step, {}).items() if k in cls.Config.model_fields}
            try:
                with patience(f"preparing the step '{step}'; what it compiles is kept for the next time …"):
                    self.stages[step] = [cls(config) for config in (self.html if step == "html" else [settings])]
                    for stage in self.stages[step]:
                        stage.setup()
            except OSError as e:                              # a program or a model is missing
                raise UserError(str(e)) from None
        return self.stages[step]


@contextlib.contextmanager
def patience(message: str) -> Iterator[None]:
    """A context manager that prints `message` on stderr when the code inside it takes longer than PATIENCE seconds."""
    timer = threading.Timer(PATIENCE, typer.echo, (message,), {"err": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _processed(stage: Any, doc: Document) -> str | None:
    try:
        return None if stage is None else stage.process(doc)
    except Exception as e:                                    # a run would quarantine the document
        return f"error: {type(e).__name__}: {e}"


def settings_of(options: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse the values of --set, such as `pdf.ocr=tesseract`, into {name of a reader or step: {key: value}}. Raises
    BadUsage for another form, for an unknown name, and for `html.engine` and `html.format`, which have options of their
    own. Raises RecipeError for a value that is not YAML."""
    from pipeline.recipe.errors import nearest
    from pipeline.recipe.marks import parse_yaml
    from stages.catalog import STAGES, readers, stage_class, steps

    out: dict[str, dict[str, Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        name, dot, field = (part.strip() for part in key.partition("."))
        if not (equals and dot and name and field):
            raise BadUsage(f"--set {option}: write --set NAME.KEY=VALUE, e.g. --set pdf.ocr=tesseract")
        if name not in readers() and not (name in steps() and _makes_text(stage_class(name))):
            raise BadUsage(f"--set {option}: there is no reader or step '{name}': "
                           f"{nearest(name, [*_file_types(), *(n for n in STAGES if _makes_text(stage_class(n)))])}")
        if (name, field) in (("html", "engine"), ("html", "format")):
            raise BadUsage(f"--set {option}: give it by --{field}")
        out.setdefault(name, {})[field] = parse_yaml(text, f"--set {option}")[0]
    return out


def _makes_text(step: Any) -> bool:
    """Return whether `step`, the class of a step, extracts text from what a reader yields."""
    return step.extracts or bool(step.read_by)


def _check(name: str, settings: dict[str, Any]) -> None:
    """Raise RecipeError for settings that neither the reader nor the step of this name has, and for values that do not
    fit the settings."""
    from pipeline.recipe.marks import Marks
    from pipeline.recipe.problems import Checker
    from stages.catalog import reader_class, readers, stage_class, steps

    checker = Checker(Marks("--set"), ".", False)
    both = ((stage_class, steps()), (reader_class, readers()))
    configs = [find(name).Config for find, names in both if name in names]
    allowed = {field for config in configs for field in config.model_fields}
    for field in settings:
        checker.check_name(field, allowed, (name, field), "key")
    checker.stop_if_failed()
    for config in configs:
        checker.validate(config, {k: v for k, v in settings.items() if k in config.model_fields}, (name,))
    checker.stop_if_failed()


# -- what a file is ----------------------------------------------------------------------------------------------------
def file_type_of(path: str, file: str) -> str:
    """Return the type of a file. An archive is recognised by its name. The type of another file is decided by its first
    bytes (for example %PDF-), its suffix and its text; the first of these that is conclusive counts."""
    from stages.catalog import reader_class
    from stages.read.streams import DamagedStream, DecompressedStream, is_archive
    from stages.text.encoding import decode

    if is_archive(file):
        return ARCHIVE
    try:
        with DecompressedStream(path) as stream:
            begin = stream.read(SNIFFED)
    except DamagedStream:
        begin = b""                                           # the reader reports the damage
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
    unpacked = name.removesuffix(next((s for s in _PACKED if name.endswith(s)), ""))
    if unpacked.endswith(_LATEX):
        return "latex"
    for reader in ("html", "notebook", "code"):
        if unpacked.endswith(reader_class(reader).suffixes):
            return reader
    if name.endswith(reader_class("jsonl").suffixes):
        return _lines(path)
    if name.endswith(reader_class("text").suffixes):
        return "book" if _gutenberg(text) else "text"
    added = next((name for name, reader in _installed_readers() if unpacked.endswith(reader.suffixes)), None)
    return added or _looks_like(text, path)


def _looks_like(text: str, path: str) -> str:
    """Guess the type of a text file from the beginning of its text. This is used for files whose names do not show
    their type."""
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
    """Return the first object in a file of JSON lines or in a JSON array, or None when there is none."""
    from stages.catalog import reader_class
    from stages.read.reader import Slice

    row = next((row for _, _, row in reader_class("jsonl")().rows(path, Slice("", "")) if row is not None), None)
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
        return "parquet"                                      # the reader reports what is wrong
    if set(schema.names) >= {"content", "max_stars_repo_path"}:           # The Stack
        return "code_table"
    return _records(set(schema.names), {f.name for f in schema if pa.types.is_nested(f.type)}) or "parquet"


def _records(keys: set[str], lists: set[str]) -> str | None:
    """Return the name of the reader of post-training records, "sft" or "preference", for records with these keys.
    `lists` are the keys whose values are lists. Returns None if the keys fit neither reader."""
    from stages.read.records import Preference, Sft

    sft, preference = Sft.Config(), Preference.Config()
    if keys & set(preference.chosen) and (keys & {*preference.prompt, *preference.rejected}):
        return "preference"
    if lists & set(sft.messages):
        return "sft"
    return "sft" if "text" not in keys and keys & set(sft.instruction) and keys & set(sft.output) else None
