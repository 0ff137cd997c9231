"""Reads the word lists of several languages from one file. Because they are in one file, a single sha256 shows whether
any of the lists has changed.

An archive (`.tgz`, `.tar.gz`, `.zip`) holds one file per language, named after the language: `de.json` is an array of
strings, `de` and `de.txt` have one entry per line. The npm package naughty-words (`tokenmill fetch badwords`) and the
repository of LDNOOBW, "List of Dirty, Naughty, Obscene, and Otherwise Bad Words" (28 languages, CC-BY-4.0), have this
form. A `.json` file holds {language: [entry, …]}, or an array for all languages. Any other file is text for all
languages, with one entry per line; a line that starts with # is a comment.
"""

from __future__ import annotations

import gzip
import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

#: the key of entries for every language
ANY = ""
#: name of an archive's file that holds a list: a language (BCP 47), with or without suffix
_NAMED = re.compile(r"([a-z]{2,3}(?:[-_][A-Za-z0-9]+)*)(\.json|\.txt)?")
#: most members of an archive, and most bytes of all of them
_MEMBERS, _BYTES = 10_000, 256 << 20


def read_lists(path: str | Path, *, max_files: int = _MEMBERS,
               max_bytes: int = _BYTES) -> dict[str, tuple[str, ...]]:
    """Read word lists from a file or an archive. Returns {language: entries}. Languages are named as in the file.
    Entries are in the order of the file, and each entry comes once.

    Raises:
        ValueError: the file, or a member of the archive, holds no list, or the archive exceeds `max_files` or
            `max_bytes`. The message names file and member.
    """
    path = Path(path)
    name = path.name.lower()
    lists: dict[str, tuple[str, ...]] = {}
    if name.endswith((".tgz", ".tar.gz", ".zip")):
        try:
            total = 0
            for count, (member, size, read) in enumerate((_zip if name.endswith(".zip") else _tar)(path), 1):
                total += size
                if count > max_files or total > max_bytes:
                    raise ValueError(f"{path} holds more than {max_files:,} files or {max_bytes >> 20} MiB: lists of "
                                     "words do not; take them out of it")
                named = _NAMED.fullmatch(member.rpartition("/")[2])
                if named is not None:
                    data = read()
                    entries = _json(data, f"{path}: {member}") if named[2] == ".json" else _lines(data)
                    if not isinstance(entries, list):
                        raise ValueError(f"{path}: {member} holds no array of strings")
                    lists[named[1]] = _entries(entries, f"{path}: {member}")
        except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError) as e:
            raise ValueError(f"{path} is no archive that can be read: {e}") from None
    elif name.endswith(".json"):
        content = _json(path.read_bytes(), str(path))
        if isinstance(content, list):
            content = {ANY: content}
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds neither an array of strings nor an object of such by language")
        lists = {language: _entries(entries, f"{path}: '{language}'") for language, entries in content.items()}
    else:
        data = path.read_bytes()
        # A recipe's key covers the content of a file, not its name, so a renamed file must not give other entries.
        if (suffix := _suffix_of_content(data)) is not None:
            raise ValueError(f"{path} is no text with one entry a line; rename it to *.{suffix}, if that is what it is")
        lists[ANY] = _entries(_lines(data), str(path))
    if not any(lists.values()):
        raise ValueError(f"{path} holds no list of words; an archive has a file a language (en.json, de.txt), a JSON "
                         "file an object of arrays, a text file one entry a line")
    return lists


def _entries(strings: Any, where: str) -> tuple[str, ...]:
    if not isinstance(strings, list) or not all(isinstance(entry, str) for entry in strings):
        raise ValueError(f"{where} holds no array of strings")
    return tuple(dict.fromkeys(entry.strip() for entry in strings if entry.strip()))


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where} is no JSON: {e}") from None


def _lines(data: bytes) -> list[str]:
    return [line for line in data.decode("utf-8-sig", "replace").splitlines() if not line.startswith("#")]


def _suffix_of_content(data: bytes) -> str | None:
    """Return the suffix that a file should have by its content: tar.gz, zip or json. The result is None for lines of
    text."""
    if data.startswith(b"\x1f\x8b"):
        return "tar.gz"
    if data.startswith(b"PK\3\4"):
        return "zip"
    try:
        return "json" if isinstance(json.loads(data.decode("utf-8-sig")), dict | list) else None
    except (ValueError, RecursionError):
        return None


#: (path in the archive, bytes, function that reads it) of each member; the path is empty if the member is no file
Members = Iterator[tuple[str, int, Callable[[], bytes]]]


def _zip(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            yield "" if info.is_dir() else info.filename, info.file_size, partial(archive.read, info)


def _tar(path: Path) -> Members:
    with tarfile.open(path, "r:gz") as archive:
        for info in archive:
            yield info.name if info.isreg() else "", info.size, partial(_read, archive, info)


def _read(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(info)
    assert stream is not None                            # a regular file has one
    return stream.read()
