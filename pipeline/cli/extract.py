"""`tokenmill extract`: the text of single files as the readers and stages of a recipe make it; engines side by side."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.errors import BadUsage, UserError, reading
from pipeline.cli.options import JsonOpt
from pipeline.cli.show import plain

if TYPE_CHECKING:
    from rich.console import Console

    from stages.document import BadRecord, Document

#: readers of one document a file
KINDS = ("html", "pdf", "code", "text")
#: equal lines shown around what differs
AROUND = 2
#: bytes a file is told by
SNIFFED = 64 << 10
#: what to do about a file without text, by reason
REMEDIES = {
    "not_pdf": "it does not begin like a PDF",
    "not_html": "it does not begin like a web page",
    "no_text": "this engine finds no main text; try another --engine",
    "html_too_deep": "its elements nest too deep, or it is too tangled; try --engine resiliparse",
    "pdf_no_text": "it has no text layer (a scan): it needs OCR",
    "pdf_encrypted": "take its password off first",
    "pdf_damaged": "it cannot be opened; try to repair it or fetch it again",
    "binary": "it is no text; give it the suffix of what it is",
    "empty": "there is nothing in it",
    "too_large": "it is larger than a reader takes (max_bytes of the source)",
    "truncated": "the compressed file ends too early; fetch it again",
}


class Format(StrEnum):
    """What is printed."""

    text = "text"
    markdown = "markdown"
    json = "json"


def register(app: typer.Typer) -> None:
    app.command("extract")(extract)


def extract(files: Annotated[list[str], typer.Argument(metavar="FILES...", help="Web pages, PDFs, source code, texts, "
                                                                                "plain or compressed; - is stdin.")],
            engine: Annotated[str, typer.Option("--engine", metavar="NAME[,NAME]", help="What finds the text of a web "
                              "page; with two, what their texts differ in.")] = "trafilatura",
            format: Annotated[Format, typer.Option(help="Plain text, or Markdown of web pages, or JSON lines.")]
            = Format.text,
            json_lines: JsonOpt = False) -> None:
    """Extract the text of files: web pages, PDFs, source code and texts, told by their content and suffix.

    That is what the readers and stages of a recipe make of them. A file without text is named on stderr, with the
    reason it would be dropped for. With two engines, their texts are shown side by side on a terminal, and as a
    unified diff elsewhere.

    \b
    Examples:
      tokenmill extract page.html
      tokenmill extract --engine resiliparse --format markdown pages/*.html
      tokenmill extract --engine trafilatura,readability page.html
      curl -s https://example.org/ | tokenmill extract --json -
    """
    names = engines(engine)
    markdown = format is Format.markdown
    as_json = json_lines or format is Format.json
    if files.count("-") > 1:
        raise BadUsage("- stands for stdin, which can be read only once")
    makers = [Maker(name, "markdown" if markdown else "text") for name in names]
    failed = 0
    for file in files:
        with on_disk(file) as path, reading(Path(file)):
            results = [list(makers[0].documents(path, file))]
            if any(kind == "html" for kind, _, _ in results[0]):       # anything else is the same with every engine
                results += [list(maker.documents(path, file)) for maker in makers[1:]]
        failed += any((reason or "").startswith("error: ") for found in results for _, _, reason in found)
        if len(results) == 2 and not as_json:
            compare(file, names, results)
            continue
        for name, found in zip(names, results):
            for kind, doc, reason in found:
                show(file, name if kind == "html" else None, kind, doc, reason, as_json)
    if failed:
        raise UserError(f"{failed} of {len(files)} files could not be extracted; a run puts such documents into "
                        f"quarantine")


def engines(given: str) -> list[str]:
    """Names of one or two engines. Raises BadUsage."""
    from stages.extract.html import ENGINES

    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name not in ENGINES:
            near = difflib.get_close_matches(name, ENGINES, n=1)
            raise BadUsage(f"--engine {given}: there is no engine '{name}'"
                           + (f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(sorted(ENGINES))}"))
    if len(names) > 2 or len(set(names)) < len(names):
        raise BadUsage(f"--engine {given}: give one engine, or two different ones to compare")
    return names


@contextlib.contextmanager
def on_disk(file: str) -> Iterator[str]:
    """Path of a file; what comes by stdin is put into one, for readers read files."""
    if file != "-":
        yield file
        return
    with tempfile.NamedTemporaryFile(prefix="tokenmill-", suffix=".stdin") as spool:
        while block := sys.stdin.buffer.read(1 << 20):
            spool.write(block)
        spool.flush()
        yield spool.name


class Maker:
    """Reads files and runs the stage that makes text of what is in them."""

    def __init__(self, engine: str, format: str) -> None:
        self.configs: dict[str, dict[str, Any]] = {"html": {"engine": engine, "format": format}, "pdf": {}}
        self.stages: dict[str, Any] = {}

    def documents(self, path: str, file: str) -> Iterator[tuple[str, Document | BadRecord, str | None]]:
        """(kind, document, reason it has no text) of each document of a file: one, or those of an archive."""
        from stages.read.streams import is_archive

        if not is_archive(file):
            yield from self._read(kind_of(path, file), path, file)
            return
        for kind in KINDS:                                   # each reader takes the members with its suffixes
            yield from (found for found in self._read(kind, path, file) if found[2] != "other_type")

    def _read(self, kind: str, path: str, file: str) -> Iterator[tuple[str, Document | BadRecord, str | None]]:
        from stages.catalog import reader_class, stage_class
        from stages.document import BadRecord
        from stages.read.reader import Slice

        # a file that is given by name is meant, wherever it lies
        reader = reader_class(kind)({"vendored": True} if kind == "code" else {})
        if kind in self.configs and kind not in self.stages:
            self.stages[kind] = stage_class(kind)(self.configs[kind])
            self.stages[kind].setup()
        name = Path(file).name if file != "-" else "stdin"
        for doc in reader.read(path, Slice("extract", name)):
            if isinstance(doc, BadRecord):
                yield kind, doc, doc.reason
                continue
            reason = None
            if kind in self.stages:
                try:
                    reason = self.stages[kind].process(doc)
                except Exception as e:                        # a run would quarantine it, and so do we
                    reason = f"error: {type(e).__name__}: {e}"
            yield kind, doc, reason


def kind_of(path: str, file: str) -> str:
    """Name of the reader of a file: by what it begins with, then by its suffix, then by what it looks like."""
    from stages.catalog import reader_class
    from stages.extract.encoding import decode
    from stages.extract.html import is_page
    from stages.read.streams import Damaged, Stream

    if Path(path).is_dir():
        raise IsADirectoryError(21, "Is a directory; give the files in it")
    try:
        with Stream(path) as stream:
            begin = stream.read(SNIFFED)
    except Damaged:
        begin = b""                                           # its reader says so
    if b"%PDF-" in begin[:1024]:
        return "pdf"
    name = Path(file).name.lower()
    for kind in KINDS:
        if name.endswith(reader_class(kind).suffixes):
            return kind
    return "html" if is_page(decode(begin)[0], "") else "text"


def show(file: str, engine: str | None, kind: str, doc: Any, reason: str | None, as_json: bool) -> None:
    """Print a document, or why there is none."""
    member = doc.locator.get("sub") or ""
    place = f"{file}:{member}" if member else file
    if as_json:
        row = {"file": file, "member": member, "kind": kind, "engine": engine, "reason": reason,
               "text": None if reason else doc.text, "url": getattr(doc, "url", ""), "meta": getattr(doc, "meta", {}),
               "signals": getattr(doc, "signals", {})}
        typer.echo(json.dumps(row, ensure_ascii=False))
    elif reason:
        typer.echo(plain(f"{place}: {no_text(reason, doc)}"), err=True)
    else:
        typer.echo(plain(doc.text))


def no_text(reason: str, doc: Document | BadRecord) -> str:
    """Why there is no text, and what to do about it."""
    said = REMEDIES.get(reason) or getattr(doc, "detail", "")
    return f"no text: {reason}" + (f" ({said})" if said else "")


# -- two engines -------------------------------------------------------------------------------------------------------
def compare(file: str, names: list[str], results: list[list[tuple[str, Any, str | None]]]) -> None:
    """Show what two engines make of the pages of a file."""
    a, b = names
    for (kind, doc, reason), (_, other, why_not) in zip(*results):
        if kind != "html":
            show(file, None, kind, doc, reason, False)
            continue
        member = doc.locator.get("sub") or ""
        place = f"{file}:{member}" if member else file
        for name, r, d in ((a, reason, doc), (b, why_not, other)):
            if r:
                typer.echo(plain(f"{place}: {name}: {no_text(r, d)}"), err=True)
        texts = ["" if r else plain(d.text) for r, d in ((reason, doc), (why_not, other))]
        if texts[0] == texts[1]:
            typer.echo(plain(f"{place}: {a} and {b} find the same text, {len(texts[0]):,} characters"), err=True)
        elif sys.stdout.isatty():
            from rich.console import Console

            side_by_side(place, names, texts, Console())
        else:
            lines = [text.splitlines() for text in texts]
            for line in difflib.unified_diff(*lines, f"{place} ({a})", f"{place} ({b})", lineterm=""):
                typer.echo(line)


def side_by_side(place: str, names: Sequence[str], texts: list[str], console: Console) -> None:
    """Two texts in two columns: what only one of them has in colour, longer stretches of equal lines left out."""
    from rich.table import Table
    from rich.text import Text

    left, right = (text.splitlines() for text in texts)
    table = Table(title=Text(plain(place)), expand=True, show_lines=False)
    for name, text in zip(names, texts):
        table.add_column(Text(f"{name}  {len(text):,} characters"), ratio=1, overflow="fold")
    blocks = difflib.SequenceMatcher(None, left, right).get_opcodes()
    for n, (what, a0, a1, b0, b1) in enumerate(blocks):
        if what != "equal":
            for i in range(max(a1 - a0, b1 - b0)):
                table.add_row(*_changed(left[a0 + i] if a0 + i < a1 else "", right[b0 + i] if b0 + i < b1 else ""))
            continue
        begin = AROUND if n else 0
        end = AROUND if n < len(blocks) - 1 else 0
        shown = list(range(a1 - a0))
        if len(shown) > begin + end + 1:
            for i in shown[:begin]:
                table.add_row(Text(left[a0 + i]), Text(right[b0 + i]), style="dim")
            table.add_row(*[Text(f"… {len(shown) - begin - end:,} equal lines", style="italic dim")] * 2)
            shown = shown[len(shown) - end:]
        for i in shown:
            table.add_row(Text(left[a0 + i]), Text(right[b0 + i]), style="dim")
    console.print(table)


def _changed(a: str, b: str) -> tuple[Any, Any]:
    """Two lines with the words that only one of them has in colour: red on the left, green on the right."""
    from rich.text import Text

    words = a.split(" "), b.split(" ")
    out = Text(), Text()
    if not a or not b or max(map(len, words)) > 2_000:
        out[0].append(a, "red")
        out[1].append(b, "green")
        return out
    for what, a0, a1, b0, b1 in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for text, part, style in ((out[0], words[0][a0:a1], "bold red"), (out[1], words[1][b0:b1], "bold green")):
            if part:
                text.append(" ".join(part) + " ", "" if what == "equal" else style)
    return out
