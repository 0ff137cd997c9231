"""Text that a training writes beside its checkpoints: whole, or as lines that a kill or a full disk cannot spoil."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TextIO


def replace(path: Path, text: str) -> None:
    """Write a derived file so that readers see the old or the new one, and a full disk leaves the old one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def appending(path: Path) -> TextIO:
    """A file of lines, to append to. What a kill left of a line gets a line of its own."""
    file = open(path, "ab+")  # noqa: SIM115  closed with what is returned
    torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
    if torn:
        file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")
