"""Reads Jupyter notebooks as text: Markdown, code in fences, and the text of outputs up to a limit.

Pictures, HTML and widgets are left out of outputs. So is stderr, which holds warnings with local paths, and progress
bars. Only the last line of an error is kept. Markdown loses only pasted pictures, styles and scripts. The versions 2 to
5 of nbformat are read (https://nbformat.readthedocs.io/en/latest/format_description.html).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from stages.document import BadRecord, Document
from stages.read.authored import path_reason
from stages.read.columns import clean
from stages.read.files import Files
from stages.read.jsonl import MAX_DEPTH, is_too_deep
from stages.read.reader import Slice, bad, skipped
from stages.stage import StageConfig, signal
from stages.text.encoding import decode

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,40}[A-Za-z]")
#: the repr of an object without text: <Figure size 640x480 with 1 Axes>
_OBJECT = re.compile(r"<[^\n]{1,300}>|\[<[^\n]{1,300}>\]")
#: pictures that are pasted into Markdown
_PASTED = re.compile(r"!\[[^\]\n]{0,300}\]\((?:data:|attachment:)[^)\s![]{0,4000000}\)")
_PASTED_HTML = re.compile(r"<img\b[^<>]{0,300}\bsrc\s{0,9}=\s{0,9}[\"']?data:[^<>]{0,4000000}>"
                          r"|<(style|script)\b[^<>]{0,1000}>(?:(?!</?(?:style|script)\b).)*</\1>",
                          re.IGNORECASE | re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9+#_. ()-]{1,40}")
#: languages by the names kernels give them
_KERNEL_LANGUAGES = {
    "ir": "r", "rscript": "r", ".net-csharp": "c#", "csharp": "c#", ".net-fsharp": "f#", "fsharp": "f#",
    ".net-powershell": "powershell", "wolfram language": "mathematica", "wolframlanguage": "mathematica",
    "sage": "python", "sagemath": "python", "bash": "shell", "ijavascript": "javascript", "octave": "matlab",
    "gophernotes": "go", "ihaskell": "haskell", "almond": "scala", "c++": "c++", "python": "python",
}
#: the first line of a cell in another language than its notebook's
_CELL_MAGIC = re.compile(r"\s*%%(bash|sh|script|html|javascript|js|latex|markdown|perl|ruby|R|sql|bigquery|cython|svg"
                         r"|julia)\b")
_MAGICS = {"sh": "bash", "script": "bash", "js": "javascript", "r": "r", "bigquery": "sql", "svg": "xml"}


class Notebook(Files):
    """Reads Jupyter notebooks as text, cell by cell.

    Files that are no notebooks are quarantined as `bad_json` or `not_a_notebook`. Other files of which no document is
    made are counted as `too_large`, as `empty` (no cell has text), or as `hidden` or `vendored` by the rules of the
    reader `code`.
    """

    name = "notebook"
    version = 2
    libraries = ("resiliparse",)
    suffixes = (".ipynb",)

    class Config(StageConfig):
        max_bytes: int = signal(8 << 20, "largest file, bytes; beyond: too_large", gt=0)
        max_output: int = signal(1000, "characters kept of a cell's outputs; 0 for none", ge=0)
        max_cells: int = signal(2000, "most cells; beyond: too_large", gt=0)
        vendored: bool = signal(False, "also read hidden files, and copies of other projects")

    def _from_bytes(self, data: bytes | None, slice: Slice, offset: int, member: str,
                    ordinal: int) -> Document | BadRecord:
        if data is None:
            return skipped("too_large", slice, offset, ordinal, member=member)
        try:
            return super()._from_bytes(data, slice, offset, member, ordinal)
        except _NoNotebook as e:
            return bad(e.args[0], slice, offset, ordinal, member=member)

    def document(self, doc: Document, data: bytes, path: str) -> str | None:
        if not self.config.vendored and (reason := path_reason(path)):
            return reason
        source = decode(data)[0]
        try:
            book = json.loads(source)
        except (ValueError, RecursionError):
            raise _NoNotebook("bad_json") from None
        if source.count("[") + source.count("{") > MAX_DEPTH and is_too_deep(book):
            raise _NoNotebook("bad_json")
        cells = _cells(book)
        if len(cells) > self.config.max_cells:
            return "too_large"
        language = _language(book)
        doc.text = clean("\n\n".join(part for cell in cells for part in self._parts(cell, language) if part))
        doc.mime = "text/markdown"
        doc.meta["code_language"] = language
        return None if doc.text.strip() else "empty"

    def _parts(self, cell: dict[str, Any], language: str) -> Iterator[str]:
        kind, source = cell.get("cell_type"), _text(cell.get("source", cell.get("input"))).strip("\n").rstrip()
        if kind in ("markdown", "raw", "html"):
            yield _PASTED_HTML.sub("", _PASTED.sub("", source)).strip()
        elif kind == "heading":
            level = cell.get("level")
            yield "#" * (level if type(level) is int and 0 < level < 7 else 1) + " " + source
        elif kind == "code" and source.strip():
            magic = _CELL_MAGIC.match(source)
            fence_language = _MAGICS.get(magic[1].lower(), magic[1].lower()) if magic else language.replace(" ", "-")
            yield f"{_fence(source)}{fence_language}\n{source}\n{_fence(source)}"
            if out := self._outputs(cell.get("outputs")):
                yield f"Output:\n\n{_fence(out)}\n{out}\n{_fence(out)}"

    def _outputs(self, outputs: Any) -> str:
        parts, remaining = [], self.config.max_output
        for output in outputs if isinstance(outputs, list) else []:
            if remaining <= 0 or not isinstance(output, dict):
                break
            data = output["data"] if isinstance(output.get("data"), dict) else output
            if output.get("name") == "stderr" or output.get("stream") == "stderr" or any(
                    kind.startswith("application/vnd.jupyter.widget") for kind in data):
                continue
            if output.get("output_type") in ("error", "pyerr"):
                text = f"{_text(output.get('ename'))}: {_text(output.get('evalue'))}"
            else:
                text = _text(data.get("text/plain", output.get("text")))
                if not text.strip() or _OBJECT.fullmatch(text.strip()):          # the repr of the object shown
                    text = _text(data.get("text/markdown", data.get("text/latex")))
            text = _ANSI.sub("", text).replace("\r\n", "\n").rstrip()
            text = "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))    # the end of a progress bar
            if not text.strip() or _OBJECT.fullmatch(text.strip()):
                continue
            parts.append(text if len(text) <= remaining else text[:remaining].rstrip() + " …")
            remaining -= len(text)
        return "\n".join(parts).strip("\n")


class _NoNotebook(Exception):
    """Raised for a file that is not a notebook; its argument is the reason."""


def _cells(book: Any) -> list[dict[str, Any]]:
    cells = book.get("cells") if isinstance(book, dict) else None
    if cells is None and isinstance(book, dict) and isinstance(book.get("worksheets"), list):        # nbformat 3
        sheets = [sheet.get("cells") for sheet in book["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for sheet_cells in sheets if isinstance(sheet_cells, list) for cell in sheet_cells]
    if not isinstance(cells, list):
        raise _NoNotebook("not_a_notebook")
    return [cell for cell in cells if isinstance(cell, dict)]


def _text(value: Any) -> str:
    """Return the text of a field of a notebook, which is a string or a list of lines; "" for any other value."""
    if isinstance(value, list):
        return "".join(line for line in value if isinstance(line, str))
    return value if isinstance(value, str) else ""


def _language(book: dict[str, Any]) -> str:
    metadata = book["metadata"] if isinstance(book.get("metadata"), dict) else {}
    for key, name in (("language_info", "name"), ("kernelspec", "language"), ("kernelspec", "name")):
        section = metadata.get(key)
        spelling = section.get(name) if isinstance(section, dict) else None
        if isinstance(spelling, str) and _NAME.fullmatch(spelling):
            spelling = re.sub(r"^(?:i?python)[0-9.]*$", "python", spelling.lower())
            spelling = re.sub(r"^x?c(?:pp|\+\+)[0-9]*$", "c++", re.sub(r"[ -]?v?[0-9]+(?:\.[0-9]+)+$", "", spelling))
            return _KERNEL_LANGUAGES.get(spelling, spelling)
    return "python"


def _fence(text: str) -> str:
    """Return the Markdown fence for a piece of code: at least three backticks, and more than the code has in a row."""
    return "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
