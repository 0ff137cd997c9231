"""Makes a corpus of web pages at test time: real English (the documentation topics of Python), with planted duplicates.

Everything is a function of a seed, so no data is committed. There are pages of every kind that a pipeline meets:
articles, near-duplicates, exact copies under another URL, short pages, boilerplate, other languages, and personal data.
"""

from __future__ import annotations

import functools
import gzip
import io
import random
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from pydoc_data.topics import topics


@dataclass(frozen=True)
class Page:
    url: str
    html: str
    kind: str          # article | near | copy | short | braces | german | pii


GERMAN = ("Die Verarbeitung großer Textmengen ist eine Aufgabe, die man sorgfältig planen muss. Jede Seite wird "
          "gelesen, geprüft und nur dann behalten, wenn sie genügend Inhalt hat. Dabei hilft es, die Regeln offen zu "
          "legen. ")


def sentences() -> list[str]:
    """Prose sentences of the documentation topics, in a fixed order."""
    return list(_sentences())


@functools.cache
def _sentences() -> tuple[str, ...]:
    found = []
    for name in sorted(topics):
        text = " ".join(re.sub(r"[*`_|=~^<>{}\[\]+-]", " ", topics[name]).split())
        for sentence in re.split(r"(?<=[.!?]) ", text):
            words = sentence.split()
            if 8 <= len(words) <= 40 and sentence[0].isupper() and sum(w.isalpha() for w in words) > 0.7 * len(words):
                found.append(sentence)
    return tuple(dict.fromkeys(found))


def _html(title: str, paragraphs: list[str]) -> str:
    body = "\n".join(f"<p>{escape(p)}</p>" for p in paragraphs)
    return (f"<!DOCTYPE html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title></head><body>"
            f"<nav><a href=/>Home</a> <a href=/about>About</a></nav><article><h1>{escape(title)}</h1>\n{body}</article>"
            f"<footer>All rights reserved.</footer></body></html>")


def _vary(text: str, rng: random.Random, share: float, pool: list[str]) -> str:
    words = text.split(" ")
    for i in range(len(words)):
        if rng.random() < share:
            words[i] = rng.choice(pool)
    return " ".join(words)


def pages(n: int, seed: int = 0) -> list[Page]:
    """`n` pages: about 70 % articles, 15 % near-duplicates, 5 % exact copies, 10 % that filters should drop."""
    rng = random.Random(seed)
    prose = sentences()
    pool = [w for s in prose[:400] for w in s.split() if w.isalpha() and w.islower()]
    articles: list[list[str]] = []
    out = []
    for i in range(n):
        draw, url = rng.random(), f"https://site{i % 23}.example/page/{i}.html"
        if draw < 0.70 or len(articles) < 5:
            picked = rng.sample(prose, rng.randint(14, 40))
            paragraphs = [" ".join(picked[j:j + 5]) for j in range(0, len(picked), 5)]
            articles.append(paragraphs)
            out.append(Page(url, _html(f"Article {i}", paragraphs), "article"))
        elif draw < 0.85:
            original = rng.choice(articles)
            out.append(Page(url, _html(f"Article {i}", [_vary(p, rng, 0.01, pool) for p in original]), "near"))
        elif draw < 0.90:
            out.append(Page(url, _html("Copy", rng.choice(articles)), "copy"))
        elif draw < 0.93:
            out.append(Page(url, _html("Short", ["Too short to be of any use."]), "short"))
        elif draw < 0.95:
            code = ["int main() { return 0; } " + s for s in rng.sample(prose, 9)]
            out.append(Page(url, _html("Code", code), "braces"))
        elif draw < 0.97:
            out.append(Page(url, _html("Seite", [GERMAN * 3, GERMAN * 2]), "german"))
        else:
            picked = rng.sample(prose, 20)
            picked[3] += f" Write to person{i}@mail.example.org or 8.8.{i % 250}.7."
            articles.append([" ".join(picked)])
            out.append(Page(url, _html(f"Contact {i}", articles[-1]), "pii"))
    return out


def warc(found: list[Page]) -> bytes:
    """Return the pages as a WARC file: first a warcinfo record, then a record for each page, each compressed with gzip
    by itself."""
    out = io.BytesIO()

    def record(kind: str, url: str, body: bytes, content_type: str) -> None:
        number = out.tell()
        head = (f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-{number:012d}>\r\n"
                f"WARC-Date: 2026-01-01T00:00:00Z\r\n" + (f"WARC-Target-URI: {url}\r\n" if url else "")
                + f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n").encode()
        out.write(gzip.compress(head + body + b"\r\n\r\n", mtime=0))

    record("warcinfo", "", b"software: tests\r\n", "application/warc-fields")
    for page in found:
        body = page.html.encode()
        http = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
        record("response", page.url, http.encode() + body, "application/http; msgtype=response")
    return out.getvalue()


def write_warcs(folder: Path, n: int, files: int, seed: int = 0) -> list[Page]:
    """Write `n` pages to `files` WARC files in `folder`. Returns the pages in the order of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = pages(n, seed)
    for i in range(files):
        (folder / f"crawl-{i:02d}.warc.gz").write_bytes(warc(found[i * n // files:(i + 1) * n // files]))
    return found
