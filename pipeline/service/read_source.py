"""Reads from a source file the bytes from which a document was made. The module runs as a separate process, confined
like a worker, because it parses what strangers have written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pipeline.base import confinement
from pipeline.base.process import die_with_parent, limit_data
from pipeline.service.one_request import answer_request
from stages.catalog import reader_class
from stages.document import BadRecord
from stages.read.reader import Slice
from stages.read.streams import is_archive
from stages.text.encoding import decode

#: memory of the process, and the longest piece of a source that is decoded
MEMORY, LONGEST = 2 << 30, 4 << 20
#: suffixes of compressed files, whose bytes are not those that the reader gets
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".tgz")


def kind_of_place(request: Mapping[str, Any]) -> str:
    """Return what part of its source file a document was made from: `file` (the whole file), `line` (one line), or
    `record` (a part that only the reader can cut out)."""
    locator = request["locator"]
    file = locator["file"].lower()
    if file.endswith(PACKED) or is_archive(file) or locator.get("sub"):
        return "record"
    if not reader_class(request["reader"]).collection:
        return "file"
    return "line" if request["reader"] == "jsonl" and (locator["offset"] or not locator["record"]) else "record"


def read(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source of a document as {what, bytes, text, charset, binary}. The request has the local file `path`
    and the document's place in it, `locator`. `bytes` is the size of the source, and `text` is its decoded beginning.
    `what` says what the source is:

    - `file`: the whole file
    - `line`: a line of the file
    - `record`: the bytes that the reader cut out of the file
    - `read`: the text that the reader made, if no bytes of the file belong to this document alone

    Returns {} when the file does not have the record any more.
    """
    locator, name = request["locator"], request["reader"]
    reader = reader_class(name)(request["config"])
    path, sub, way = request["path"], locator.get("sub") or "", kind_of_place(request)
    if way == "file":
        with open(path, "rb") as f:
            return _shown("file", f.read(LONGEST), os.path.getsize(path))
    if way == "line":
        with open(path, "rb") as f:
            f.seek(locator["offset"])
            line = f.readline(LONGEST)
        return _shown("line", line, len(line)) if line.strip() else {}
    start = locator["offset"] if name == "warc" else 0
    piece = Slice(request["source"], locator["file"], start, None, locator["record"] if start else 0)
    for record in reader.read(path, piece):
        if record.locator.get("record") == locator["record"] and (record.locator.get("sub") or "") == sub:
            if isinstance(record, BadRecord):
                return {}
            if record.raw is not None:
                return _shown("record", record.raw[:LONGEST], len(record.raw), record.charset)
            text = record.text[:LONGEST]
            return {"what": "read", "bytes": len(record.text.encode("utf-8", "replace")), "text": text,
                    "charset": "", "binary": False}
        if record.locator.get("record", 0) > locator["record"]:
            break
    return {}


def _shown(what: str, data: bytes, size: int, charset: str = "") -> dict[str, Any]:
    if data.startswith(b"%PDF-") or b"\x00" in data[:1024]:
        return {"what": what, "bytes": size, "text": "", "charset": "", "binary": True}
    text, used = decode(data, charset)
    return {"what": what, "bytes": size, "text": text, "charset": used, "binary": False}


def main() -> None:
    die_with_parent(os.getppid())
    limit_data(MEMORY)
    answer_request(_read_confined)


def _read_confined(request: Mapping[str, Any]) -> dict[str, Any]:
    confinement.enter(request["secrets"])
    confinement.seal((), ())
    try:
        result = read(request)
    except FileNotFoundError:
        return {"failed": "the file is not there any more"}
    except (OSError, ValueError) as e:
        return {"failed": f"the file cannot be read ({type(e).__name__})"}
    return {**result, "text": result.get("text", "")[:request["chars"]]}


if __name__ == "__main__":
    main()
