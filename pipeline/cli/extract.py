"""`tokenmill extract`: prints the text that the readers and steps of a recipe extract from single files, or compares
the texts of two engines."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.visible import json_text, visible
from pipeline.cli.errors import BadUsage, UserError, reading
from pipeline.cli.file_types import Extracted, Extractor, file_type_of, has_many, resolve, settings_of
from pipeline.cli.options import JsonOpt

if TYPE_CHECKING:
    from stages.document import BadRecord, Document

#: most documents without text that are named for each reason and file; the others are only counted
MOST_NAMED = 5
#: what to do about a file without text, by reason
REMEDIES = {
    "not_pdf": "it does not begin like a PDF",
    "not_html": "it does not begin like a web page",
    "no_text": "it has no main text; try another --engine",
    "html_too_deep": "its elements nest too deep, or it is too tangled; try another --engine",
    "pdf_cipher": "its fonts give other letters than they draw; read it with --set pdf.ocr=tesseract",
    "pdf_no_text": "it has no text layer (a scan); read it with --set pdf.ocr=tesseract",
    "pdf_encrypted": "take its password off first",
    "pdf_damaged": "it cannot be opened; try to repair it or fetch it again",
    "binary": "it is not text; if there is a reader for it, name the reader with --as",
    "empty": "there is nothing in it",
    "too_large": "it is larger than its reader takes; see max_bytes (--set NAME.max_bytes=…)",
    "truncated": "the compressed file ends too early; fetch it again",
    "missing_turns": "no known format of records has its keys; name them (--set sft.messages=…), or give another --as",
    "missing_text": "there is no text under its key; name the key with --set jsonl.text=KEY",
    "bad_json": "this is no JSON object on a line",
}


class OutputFormat(StrEnum):
    """The values of --format: how the texts of files are printed."""

    text = "text"
    markdown = "markdown"
    json = "json"


def register(app: typer.Typer) -> None:
    app.command("extract")(extract)


def extract(files: Annotated[list[str], typer.Argument(metavar="FILES...", help="Files, folders or globs; plain, "
                                                       "compressed or archives. - is stdin.")],
            engine: Annotated[str, typer.Option("--engine", metavar="NAME[,NAME]", help="Extractor of a web page's "
                              "text; with two, their texts are compared.")] = "mill",
            format: Annotated[OutputFormat, typer.Option(help="Plain text, or Markdown of web pages, or JSON lines.")]
            = OutputFormat.text,
            file_type: Annotated[str | None, typer.Option(
                "--as", metavar="TYPE", help="Type of the files (default: detected from content and suffix): a reader "
                                             "(`tokenmill readers` lists them), or book.")] = None,
            set: Annotated[list[str] | None, typer.Option("--set", metavar="NAME.KEY=VALUE", help="A setting of a "
                           "reader or step, e.g. pdf.ocr=tesseract; repeatable.")] = None,
            limit: Annotated[int, typer.Option("-n", "--limit", min=0, metavar="N", help="How many documents of each "
                             "file; 0 shows all.")] = 0,
            json_texts: JsonOpt = False) -> None:
    """Extract the text of files.

    Reads web pages, PDFs, crawls (WARC), code, notebooks, LaTeX, books, wiki dumps, JSON lines, tables and records of
    fine-tuning, as the readers and steps of a recipe do. A document without text is named on stderr, with the reason
    for which a run would drop it. With two engines, the differences of their texts are shown paragraph by paragraph.

    \b
    Examples:
      tokenmill extract page.html
      tokenmill extract --engine resiliparse --format markdown pages/*.html
      tokenmill extract --engine mill,trafilatura page.html
      tokenmill extract --set pdf.ocr=tesseract scan.pdf
      tokenmill extract --as book novel.txt
      tokenmill extract -n 3 crawl.warc.gz
      curl -s https://example.org/ | tokenmill extract --json -
    """
    from stages.read.streams import is_archive

    extractor = Extractor(engines(engine), "markdown" if format is OutputFormat.markdown else "text",
                          settings_of(set or []))
    if file_type is not None:
        resolve(file_type)
    as_json = json_texts or format is OutputFormat.json
    paths = listed(files)
    failed = 0
    for file in paths:
        try:
            with on_disk(file) as path:
                with reading(Path(file)):
                    what = file_type or file_type_of(path, file)
                collection = has_many(what) or is_archive(file)
                documents = guarded(file, extractor.documents(path, file, what))
                failed += shown(file, documents, collection, extractor, len(paths) > 1 or collection, limit, as_json)
        except UserError as e:
            if len(paths) == 1:
                raise
            typer.echo(visible(f"error: {e}"), err=True)            # the other files are still to come
            failed += 1
    if failed:
        raise UserError(f"{failed} of {len(paths)} files could not be extracted")


def engines(option: str) -> list[str]:
    """Return the names of the one or two extraction engines in `--engine A,B`. Raises BadUsage for unknown names, more
    than two, or the same one twice."""
    from pipeline.recipe.errors import nearest
    from stages.extract.html.step import ENGINES

    names = [name.strip() for name in option.split(",")]
    for name in names:
        if name not in ENGINES:
            raise BadUsage(f"--engine {option}: there is no engine '{name}'; {nearest(name, ENGINES)}")
    if len(names) > 2 or len(set(names)) < len(names):
        raise BadUsage(f"--engine {option}: give one engine, or two different ones to compare")
    return names


# -- files -------------------------------------------------------------------------------------------------------------
def listed(arguments: Sequence[str]) -> list[str]:
    """Return the paths of the files that the arguments name. The files of a folder or glob come in the order of their
    names; hidden files in folders are left out. Raises BadUsage for a URL, for an argument that matches no file, and if
    - (stdin) is named twice."""
    if arguments.count("-") > 1:
        raise BadUsage("- stands for stdin, which can be read only once")
    out: list[str] = []
    for name in arguments:
        if name == "-" or (os.path.exists(name) and not os.path.isdir(name)):
            out.append(name)
        elif "://" in name:
            raise BadUsage(f"{name}: files on this machine are read; fetch it first, e.g. curl -s {name} | "
                           f"tokenmill extract -")
        elif os.path.isdir(name):
            below = [os.path.join(folder, file) for folder, _, inside in os.walk(name) for file in inside
                     if not any(part.startswith(".") for part in Path(folder, file).relative_to(name).parts)]
            if not below:
                raise BadUsage(f"{name}: there is no file in this folder")
            out += sorted(below)
        else:
            below = [p for p in glob.glob(name, recursive=True) if not os.path.isdir(p)]
            if not below:
                raise BadUsage(f"cannot read {name}: " + ("no file matches" if glob.has_magic(name)
                                                          else "no such file or folder"))
            out += sorted(below)
    return out


@contextlib.contextmanager
def on_disk(file: str) -> Iterator[str]:
    """A context manager that yields a path from which `file` can be read twice: to find its type, and to extract its
    text. Input from stdin or a pipe is copied to a temporary file."""
    with reading(Path(file)):
        piped = file == "-" or stat.S_ISFIFO(os.stat(file).st_mode)
    if not piped:
        yield file
        return
    with tempfile.NamedTemporaryFile(prefix="tokenmill-", suffix=".stdin") as spool:
        if file == "-":
            shutil.copyfileobj(sys.stdin.buffer, spool, 1 << 20)
        else:
            with open(file, "rb") as pipe:
                shutil.copyfileobj(pipe, spool, 1 << 20)
        spool.flush()
        yield spool.name


def guarded(file: str, documents: Iterator[list[Extracted]]) -> Iterator[list[Extracted]]:
    """Yield from `documents`, the documents of `file`. If their reader raises an OSError or ValueError, raise a
    UserError instead, which is shown as one line."""
    try:
        with reading(Path(file)):
            yield from documents
    except ValueError as e:                                   # for example, a table without the column
        raise UserError(f"{e} (--set NAME.KEY=VALUE)") from None


# -- what is shown -----------------------------------------------------------------------------------------------------
def shown(file: str, documents: Iterator[list[Extracted]], collection: bool, extractor: Extractor, many: bool,
          limit: int, as_json: bool) -> bool:
    """Print the documents of a file, or compare their texts if there are two engines. Returns whether a step failed on
    one of the documents. `collection`: the file may hold many documents. `many`: each document gets a heading, because
    the command may print several."""
    from pipeline.cli.compare import compare
    from stages.read.reader import Skipped

    with_text, failed = 0, False
    ocr = extractor.settings.get("pdf", {}).get("ocr", "none") != "none"
    without: Counter[str] = Counter()
    for versions in documents:
        first = versions[0]
        failed = failed or any((v.reason or "").startswith("error: ") for v in versions)
        drop_reason = first.reason if all(v.reason for v in versions) else None
        if drop_reason:
            without[drop_reason] += 1
            named = as_json or without[drop_reason] <= MOST_NAMED
            if collection and (isinstance(first.record, Skipped) or not named):
                continue
        place = place_of(file, first.record, collection)
        if as_json:
            for version in versions:
                typer.echo(json_text(row(file, version)))
        else:
            for version in versions:
                if version.reason:
                    name = f"{version.engine}: " if len(versions) > 1 else ""
                    typer.echo(visible(f"{place}: {name}{no_text(version, ocr)}").replace("\n", " "), err=True)
                else:
                    note(place, version, ocr)
            if len(versions) == 2 and not drop_reason:
                compare(place, extractor.engines, (first.text, versions[1].text), marks=extractor.format == "markdown")
            elif not drop_reason:
                if many:
                    typer.echo(f"==> {visible(place).replace(chr(10), ' ')} ({first.file_type}) <==")
                typer.echo(text_of(first), nl=not first.text.endswith("\n"))
        with_text += not drop_reason
        if limit and with_text == limit:
            return failed
    if collection and (without or not with_text):
        counts = ", ".join(f"{n:,} {reason}" for reason, n in sorted(without.items()))
        typer.echo(visible(f"{file}: {with_text:,} documents with text" + (f"; without: {counts}" if counts else "")),
                   err=True)
    return failed


def place_of(file: str, doc: Document | BadRecord, collection: bool) -> str:
    """Return text that says where a document is, for messages. It begins with the name of the file. For a document in
    an archive, the name of the archive's member is added. For a document in another file that may hold many, the record
    number, the member and the URL are added."""
    from stages.read.streams import is_archive

    member, url = doc.locator.get("sub") or "", getattr(doc, "url", "")
    if not collection:
        return file
    if is_archive(file):
        return f"{file}:{member}" if member else file
    return " ".join(filter(None, (file, f"record {doc.locator.get('record', 0)}", member, url)))


def row(file: str, version: Extracted) -> dict[str, Any]:
    """Return a document and its extracted text as a dict, for one line of JSON output."""
    record, reason = version.record, version.reason
    locator = record.locator
    out = {"file": file, "member": locator.get("sub") or "", "record": locator.get("record", 0),
           "kind": version.file_type, "engine": version.engine, "reason": reason,
           "detail": getattr(record, "detail", ""), "text": None if reason else version.text}
    for name, default in (("url", ""), ("date", None), ("language", ""), ("meta", {}), ("signals", {}),
                          ("loss_spans", None)):
        out[name] = getattr(record, name, default)
    return out


def text_of(version: Extracted) -> str:
    """Return the text of a document for printing. On a terminal, the parts of a fine-tuning record that do not count in
    the training loss are dim."""
    spans = getattr(version.record, "loss_spans", None)
    if not spans or not sys.stdout.isatty():
        return visible(version.text)
    data, position, out = version.text.encode("utf-8", "surrogatepass"), 0, []
    for span in [*spans, {"start": len(data), "end": len(data)}]:
        for part, dim in ((data[position:span["start"]], True), (data[span["start"]:span["end"]], False)):
            out.append(typer.style(visible(part.decode("utf-8", "surrogatepass")), dim=dim) if part else "")
        position = span["end"]
    return "".join(out)


def no_text(version: Extracted, ocr: bool) -> str:
    """Return a message that says why no text was extracted from a document, and what to do about it. `ocr` says that
    OCR was already used for PDFs."""
    remedy = REMEDIES.get(version.reason or "") or getattr(version.record, "detail", "")
    if (version.reason or "").startswith("error: "):
        remedy = "a run puts this document into quarantine"
    if version.reason in ("pdf_no_text", "pdf_cipher") and ocr:
        remedy = "OCR found none, either"
    if version.reason == "no_text" and version.engine is None:
        remedy = "there is nothing but markup in it"
    return f"no text: {version.reason}" + (f" ({remedy})" if remedy else "")


def note(place: str, version: Extracted, ocr: bool) -> None:
    """Print a note on stderr that says which pages of a PDF have no text, and what to do about it. Prints nothing when
    all pages have text."""
    pages = [str(n) for n, route in enumerate(version.meta.get("pdf_routes", ""), 1) if route in "sc"]
    if pages:
        which = ", ".join(pages[:8]) + (" …" if len(pages) > 8 else "")
        why = ("OCR found none, or had read the pages that ocr_pages allows" if ocr else
               "read them with --set pdf.ocr=tesseract")
        typer.echo(visible(f"{place}: {len(pages)} of {len(version.meta['pdf_routes'])} pages without text ({which}): "
                         f"{why}").replace("\n", " "), err=True)
