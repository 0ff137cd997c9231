"""Runs one of the other PDF engines over some files, in their environment (`peer-pdf.txt`), for `pdf_extraction.py`.

    python benchmarks/peer_pdf.py pdfminer.six|pdfplumber|pypdf OUT.json FILES...

OUT.json: {file: {"pages": [text of a page], "cpu": seconds of this process}}. A file that fails has "error" and no
page.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable


def pdfminer(data: bytes) -> list[str]:
    from pdfminer.high_level import extract_text

    return extract_text(io.BytesIO(data)).split("\f")[:-1]


def pdfplumber(data: bytes) -> list[str]:
    import pdfplumber

    with pdfplumber.open(io.BytesIO(data)) as file:
        return [page.extract_text() or "" for page in file.pages]


def pypdf(data: bytes) -> list[str]:
    from pypdf import PdfReader

    return [page.extract_text() for page in PdfReader(io.BytesIO(data)).pages]


ENGINES: dict[str, Callable[[bytes], list[str]]] = {"pdfminer.six": pdfminer, "pdfplumber": pdfplumber, "pypdf": pypdf}


def main(engine: str, out: str, files: list[str]) -> None:
    found = {}
    for file in files:
        with open(file, "rb") as f:
            data = f.read()
        begun = time.process_time()
        try:
            found[file] = {"pages": ENGINES[engine](data), "cpu": time.process_time() - begun}
        except Exception as e:  # whatever an engine raises is recorded: the benchmark shows what it cannot read
            found[file] = {"pages": [], "cpu": time.process_time() - begun, "error": type(e).__name__}
    with open(out, "w", encoding="utf-8") as f:
        json.dump(found, f)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
