"""Reads archives of blocked hosts and URLs, sorted by category, in the layout of the University of Toulouse's UT1.

`blacklists.tar.gz` holds a folder for each category, such as `blacklists/gambling/`, with two files. `domains` lists
hosts; each entry also blocks the subdomains of its host. `urls` lists URLs without scheme; each entry also blocks all
URLs below it. Some categories are symbolic links to other categories. You can also use an archive of your own in this
layout. The licence of UT1 is CC-BY-SA 4.0: https://dsi.ut-capitole.fr/blacklists/
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from stages.stage import file_sha256
from stages.text.cache import cache_dir, cached
from stages.text.hashlist import LabelledList, entry, write_labelled
from stages.text.marks import Span

_SCHEME = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*:)?//")
_SCHEME_BYTES = re.compile(_SCHEME.pattern.encode())
_KINDS = ("domains", "urls")
#: most labels of a host and most folders of a path that are looked up
_MOST_LABELS, _MOST_FOLDERS = 12, 32
#: most members of an archive, and most bytes of all (UT1's has some 200, and 150 MB)
_MEMBERS, _BYTES = 100_000, 4 << 30


class Blacklists:
    """Finds out whether a host or URL is in the lists of blocked sites of an archive, in some of its categories
    (`gambling`, say)."""

    def __init__(self, archive: Path, categories: tuple[str, ...]) -> None:
        """Prepare the lists of blocked sites of some categories. Raises ValueError, which names the archive, if the
        archive lacks a category or cannot be read."""
        digest = hashlib.sha256("\n".join(categories).encode()).hexdigest()
        name, folder = f"{file_sha256(archive)[:32]}.{digest[:16]}", cache_dir() / "lists"
        self._lists = [LabelledList(cached(folder / f"{name}.{kind}.npy",
                                       partial(_write, archive, categories, kind)))
                       for kind in _KINDS]

    def category(self, url: str) -> int:
        """Return the number of the category that blocks a URL or its host; 0 if no category does. Categories are
        numbered from 1, in the order in which they were given. If several block the URL, the lowest number is
        returned."""
        host, path = split(url)
        domains, urls = self._lists
        result = [label for name in host_and_parents(host) if (label := domains.label(name))]
        if len(urls):
            result += [label for name in url_and_folders(host, path) if (label := urls.label(name))]
        return min(result, default=0)

    def place(self, url: str, category: int) -> Span | None:
        """Return the part of a URL that is in the lists of a category, as (first character, one past the last); None
        if no part is."""
        begin, end, path_begin = _parts(url)
        host, path = split(url)
        domains, urls = self._lists
        for name in host_and_parents(host):
            if domains.label(name) == category:
                return begin + len(host) - len(name), begin + len(host)
        begin += 4 if host.startswith("www.") else 0
        for name in url_and_folders(host, path):
            if urls.label(name) == category:
                in_path = len(name) - len(host.removeprefix("www."))
                return begin, path_begin + in_path if in_path > 0 else end
        return None


def split(url: str) -> tuple[str, str]:
    """Split a URL into (host in lower case, path with query). Scheme, user, port, fragment, and full stops at the end
    of the host are left out."""
    begin, end, path_begin = _parts(url)
    return url[begin:end].lower().rstrip("."), url[path_begin:].partition("#")[0]


def host_span(url: str) -> Span:
    """Return where the host of a URL is: (first character, one past the last)."""
    return _parts(url)[:2]


def _parts(url: str) -> tuple[int, int, int]:
    """Return where the host of a URL begins and ends, and where the path begins."""
    scheme = _SCHEME.match(url)
    begin = scheme.end() if scheme else 0
    path_begin = min((place for mark in "/?#" if (place := url.find(mark, begin)) >= 0), default=len(url))
    begin = max(begin, url.rfind("@", begin, path_begin) + 1)
    port = -1 if url.startswith("[", begin) else url.find(":", begin, path_begin)
    return begin, port if port >= 0 else path_begin, path_begin


def host_and_parents(host: str) -> list[str]:
    """Return a host and its parent domains, the host first. Top-level domains and names of more than _MOST_LABELS
    labels are left out. An IP address has no parents."""
    labels = host.split(".")
    if len(labels) < 2 or labels[-1].isdigit():
        return [host] if host else []
    return [".".join(labels[depth:]) for depth in range(max(0, len(labels) - _MOST_LABELS), len(labels) - 1)]


def url_and_folders(host: str, path: str) -> list[str]:
    """Return all entries in a list of blocked URLs that would block a given URL. These are the URL itself, with and
    without its query, and every folder that contains it. Only the first _MOST_FOLDERS parts of the path are considered.
    "www." at the beginning of the host is left out. For a.com/x/y?z, the entries are a.com/x/y?z, a.com/x/y and
    a.com/x."""
    full = host.removeprefix("www.") + path
    without_query = full.partition("?")[0]
    steps = without_query.split("/")[:_MOST_FOLDERS]
    return list(dict.fromkeys([full.rstrip("/"), *("/".join(steps[:depth]).rstrip("/")
                                                    for depth in range(len(steps), 1, -1))]))


def categories_of(archive: Path, *, max_files: int = _MEMBERS, max_bytes: int = _BYTES) -> tuple[str, ...]:
    """Return the names of the categories of blocked sites in an archive. Raises ValueError, which names the archive, if
    the archive cannot be read or holds more than `max_files` files or more than `max_bytes` bytes."""
    return tuple(sorted(_members(archive, max_files, max_bytes)))


def _domain(line: bytes) -> bytes:
    return entry(line).lower().lstrip(b".")


def _url(line: bytes) -> bytes:
    host, slash, path = _SCHEME_BYTES.sub(b"", entry(line), count=1).removeprefix(b"www.").partition(b"/")
    return (host.lower() + slash + path).rstrip(b"/")


def _members(archive: Path, max_files: int = _MEMBERS, max_bytes: int = _BYTES) -> dict[str, dict[str, str]]:
    """Return where the lists of blocked sites are in an archive, as {category: {`domains` or `urls`: name of the
    archive member with this list}}. If a category is a symbolic link to another category, both have the same
    members."""
    try:
        with tarfile.open(archive) as tar:
            files: dict[str, dict[str, str]] = {}
            links: dict[str, str] = {}
            total = 0
            for count, member in enumerate(tar, 1):
                total += member.size
                if count > max_files or total > max_bytes:
                    raise ValueError(f"{archive} holds more than {max_files:,} files or {max_bytes >> 30} GiB: take "
                                     "what is needed of it into one of your own")
                parts = tuple(part for part in member.name.split("/") if part not in ("", "."))
                if member.isreg() and len(parts) >= 2 and parts[-1] in _KINDS:
                    files.setdefault(parts[-2], {})[parts[-1]] = member.name
                elif member.issym() and parts:
                    links[parts[-1]] = member.linkname.rstrip("/").rpartition("/")[2]
    except (tarfile.TarError, EOFError, OSError) as e:
        raise ValueError(f"{archive} is no archive that can be read: {e}; UT1's is blacklists.tar.gz") from None
    return {**{link: files[target] for link, target in links.items() if target in files}, **files}


def _write(archive: Path, categories: tuple[str, ...], kind: str, path: Path) -> None:
    """Write the blocked sites of some categories to one file, `path`: the hash of each entry, with the number of its
    category. The entries come from the categories' lists `kind` (`domains` or `urls`) in the archive."""
    members = _members(archive)
    missing = [name for name in categories if name not in members]
    if missing:
        raise ValueError(f"{archive} has no category '{missing[0]}'; it has {', '.join(sorted(members)) or 'none'}")
    labels: dict[str, int] = {}
    for label, name in enumerate(categories, 1):
        if kind in members[name]:
            labels.setdefault(members[name][kind], label)
    with tarfile.open(archive) as tar:
        write_labelled(_lists(tar, labels), path, _domain if kind == "domains" else _url)


def _lists(tar: tarfile.TarFile, labels: dict[str, int]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield (category number, lines of the member) for each member of the archive `tar` that is in `labels`, {name of
    the member: category number}. Members come in the order of the archive, so that it is read only once."""
    for member in tar:
        label = labels.get(member.name)
        if label is not None and member.isreg():
            lines = tar.extractfile(member)
            assert lines is not None                       # never None for a regular file
            yield label, iter(lines)
