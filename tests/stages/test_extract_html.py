"""HTML extraction: every page gives a text or a counted reason, and the same bytes always give the same result,
whatever was extracted before."""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from lxml import etree

from stages.document import Document
from stages.extract.html import fallbacks
from stages.extract.html.private import core, loud
from stages.extract.html.step import ENGINES as ALL
from stages.extract.html.step import LIBRARIES, Html, is_page
from stages.read.reader import Slice
from stages.read.warc import Warc
from stages.text.encoding import canonical, decode
from tests.conftest import shared_data

ENGINES = ["trafilatura", "resiliparse"]
SENTENCE = "The quick brown fox jumps over the lazy dog, and nobody in the village ever asked it why it did so. "
ARTICLE = f"<article><h1>A heading</h1>{''.join(f'<p>Number {i}: {SENTENCE * 3}</p>' for i in range(6))}</article>"


def page(body: str = ARTICLE, head: str = "<title>A title</title>", html: str = "<html lang='en'>") -> bytes:
    return f"<!DOCTYPE html>{html}<head>{head}</head><body>{body}</body></html>".encode()


def run(raw: bytes, mime: str = "text/html", charset: str = "", **config: object) -> tuple[str | None, Document]:
    stage = Html(**config)
    stage.setup()
    doc = Document("id", raw=raw, mime=mime, charset=charset)
    return stage.process(doc), doc


# -- text ------------------------------------------------------------------------------------------------------------
def test_what_the_page_says_about_itself():
    head = ('<title>\n Tom &amp; Jerry </title><link rel=stylesheet href="https://x/c.css">'
            '<link href="https://example.org/a?x=1&amp;y=2" rel="canonical">')
    _, doc = run(page(head=head, html='<html class=x xml:lang="de" lang="de-AT">'))
    assert doc.meta == {"title": "Tom & Jerry", "lang": "de-at"} and doc.url == "https://example.org/a?x=1&y=2"
    doc = Document("id", raw=page(head=head), mime="text/html", url="https://example.org/b")
    assert Html().process(doc) is None
    assert doc.url == "https://example.org/b" and doc.meta["canonical"] == "https://example.org/a?x=1&y=2"


def test_a_document_that_has_text_is_kept_as_it_is():
    doc = Document("id", "text of a WET record")
    assert Html().process(doc) is None and doc.text == "text of a WET record"
    assert Html().process(Document("id")) == "no_text"


# -- reasons ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("reason", "raw", "config"), [
    ("html_too_many_nodes", page("<p>x</p>" * 200), {"max_nodes": 150}),
    ("html_too_deep", page("<div>" * 21_000 + SENTENCE), {}),
    ("no_text", page("<div></div>"), {}), ("no_text", b"<html></html>", {}), ("no_text", b"<html>", {}),
    ("not_html", b"", {}), ("not_html", b"%PDF-1.4 <html>", {}), ("not_html", b"\x89PNG\r\n\x1a\n<html>", {}),
    ("not_html", b'{"html": "<p>"}', {}), ("not_html", b"plain words", {}),
    ("not_html", b"\x1f\x8b\x08 broken gzip", {}), ("not_html", b"<rss version='2'><p>x</p></rss>", {}),
])
def test_reasons(engine, reason, raw, config):
    assert run(raw, engine=engine, **config)[0] == reason


def test_depth_is_counted_exactly():
    assert run(page("<div>" * 100 + ARTICLE), max_depth=110)[0] is None
    assert run(page("<div>" * 100 + ARTICLE), max_depth=100)[0] == "html_too_deep"
    assert run(page("<div>" * 240 + ARTICLE))[0] is None and run(page("<div>" * 260 + ARTICLE))[0] == "html_too_deep"


@pytest.mark.parametrize(("start", "mime", "expected"), [
    ("<!DOCTYPE HTML><html>", "", True), (" \n<p>text</p>", "", True),
    ("<?xml version='1.0'?><html xmlns='x'>", "", True),
    ("<?xml version='1.0'?><rss><p>", "", False), ("<svg><p>", "image/svg+xml", True), ("words <b>bold</b>", "", False),
    ("words <b>bold</b>", "text/html", True), ("<html>", "text/plain", False), ("<feed>", "text/html", False),
    ("<html><p>x", "application/octet-stream", True), ("", "", False), ("\ufeff<html>", "", True)])
def test_sniffing(start, mime, expected):
    assert is_page(start, mime) is expected


# -- hostile pages ---------------------------------------------------------------------------------------------------
BOMBS = {
    "10 MB on one line": b"<html><body><p>" + b"x" * 10_000_000,
    "data URI": page(f"<img src='data:image/png;base64,{base64.b64encode(bytes(4_000_000)).decode()}'>{ARTICLE}"),
    "script": page(f"<script>var a = '{'x' * 5_000_000}';</script>{ARTICLE}"),
    "svg": page("<svg>" + "<path d='M0 0 L1 1'/>" * 20_000 + f"</svg>{ARTICLE}"),
    "attributes": page("<p " + " ".join(f"a{i}='{i}'" for i in range(20_000)) + f">{ARTICLE}"),
    "unclosed tags": page("<b><i><a href=x>" * 5_000 + ARTICLE),
    "open brackets": b"<html>" + b"<" * 300_000, "entities": page("&amp;" * 300_000 + ARTICLE),
    "comments": page("<!--" * 50_000 + ARTICLE), "nul": page("\x00" * 1000 + ARTICLE),
    "links": page("".join(f"<li><a href='/{i}'>item {i}</a>" for i in range(30_000))),
    "tables": page("<table><tr><td>" * 90 + ARTICLE), "cdata": b"<html><![CDATA[" * 10_000,
    "title": page(head="<title>" * 50_000), "link": page(head="<link rel=canonical " * 20_000),
    "html lang": b"<html " * 50_000, "surrogates": page("&#xD800;&#x110000;&#0;" * 100 + ARTICLE),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_end_as_text_or_reason(engine, bomb):
    reason, doc = run(BOMBS[bomb], engine=engine, max_nodes=50_000)
    assert reason in (None, "html_too_many_nodes", "html_too_deep", "no_text", "not_html")
    assert bool(doc.text) == (reason is None)
    doc.text.encode()
    if bomb in ("data URI", "script", "svg", "nul"):
        assert SENTENCE.strip() in doc.text


@pytest.mark.parametrize("engine", ENGINES)
def test_random_and_cut_pages(engine):
    rng = random.Random(0)
    stage = Html(engine=engine)
    whole = page(ARTICLE + "<table><tr><td>a<td>b</table><ul><li>x<li>y</ul><pre>code</pre>")
    for _ in range(100):
        raw = bytearray(whole[:rng.randrange(1, len(whole))])
        for _ in range(rng.randrange(0, 30)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        doc = Document("id", raw=bytes(raw), mime="text/html")
        reason = stage.process(doc)
        assert bool(doc.text) == (reason is None)
        doc.text.encode()


# -- encodings -------------------------------------------------------------------------------------------------------
RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю. " * 20
GERMAN = "Größere Übungen für Männer heißen süß und öde. " * 20
JAPANESE = "日本語の文章はこのように書かれています。" * 20


@pytest.mark.parametrize(("text", "encoding", "declared"), [
    (RUSSIAN, "utf-8", "utf-8"), (RUSSIAN, "utf-8", "windows-1251"), (RUSSIAN, "utf-8", ""),
    (RUSSIAN, "cp1251", "windows-1251"), (RUSSIAN, "cp1251", ""), (RUSSIAN, "cp1251", "utf-8"),
    (RUSSIAN, "koi8-r", "koi8-r"), (RUSSIAN, "koi8-r", "nonsense"),
    (GERMAN, "cp1252", "iso-8859-1"), (GERMAN, "cp1252", ""), (GERMAN, "cp1252", "utf-8"), (GERMAN, "utf-16", ""),
    (GERMAN, "utf-8-sig", "windows-1252"), (JAPANESE, "shift_jis", ""), (JAPANESE, "shift_jis", "x-sjis"),
    (JAPANESE, "euc_jp", ""), (JAPANESE, "iso2022_jp", "iso-2022-jp"), (JAPANESE, "euc_jp", "utf-8"),
    (JAPANESE, "utf-8", "shift_jis"), ("中文网页的内容" * 60, "gb18030", "gb2312"),
    ("한국어 문장입니다. " * 50, "cp949", "euc-kr"),
])
def test_decoding(text, encoding, declared):
    assert decode(text.encode(encoding), declared)[0] == text


def test_meta_charset_and_a_wrong_one():
    raw = f"<html><head><meta charset=koi8-r></head><body>{RUSSIAN}</body></html>".encode("koi8-r")
    assert RUSSIAN in decode(raw)[0] and decode(raw) == decode(raw, "utf-8")
    raw = f"<html><meta charset=shift_jis><p>{GERMAN}".encode()
    assert GERMAN in decode(raw, "big5")[0], "valid UTF-8 wins over every declaration"


def test_broken_utf8_loses_only_the_broken_places():
    raw = bytearray((RUSSIAN * 3).encode())
    raw[100] = 0xFF
    text, encoding = decode(bytes(raw))
    assert encoding == "utf-8" and 1 <= text.count("\ufffd") <= 3 and len(text) > len(RUSSIAN) * 3 - 5
    reason, doc = run(page(f"<p>{GERMAN}</p>" * 3)[:-3] + b"\xff\xfe\xe2")
    assert reason is None and GERMAN.strip() in doc.text


def test_decode_never_fails():
    rng = random.Random(0)
    labels = ["", "utf-16", "utf-7", "hz", "idna", "rot13", "base64", "iso-2022-jp", "x" * 99]
    for mark in (b"", b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b"\x1b$B"):
        for label in labels:
            raw = mark + rng.randbytes(rng.randrange(3000))
            text, name = decode(raw, label)
            text.encode()
            assert decode(raw, "") == decode(raw, "") and name


def test_labels_mean_what_browsers_take_them_for():
    assert [canonical(x) for x in ("ISO-8859-1", "gb2312", "Shift_JIS", "utf8", "ks_c_5601-1987", "rot13", "")] == [
        "cp1252", "gb18030", "cp932", "utf-8", "cp949", "", ""]


# -- keys, and machines that are too small ---------------------------------------------------------------------------
def test_key_carries_engine_versions_and_settings():
    assert Html().key() == Html(engine="mill").key() != Html(engine="resiliparse").key()
    assert set(LIBRARIES) == set(ALL) and Html.extracts
    assert "trafilatura" in Html(engine="trafilatura").libraries
    assert "trafilatura" not in Html().libraries, "another version of it makes no page of mill's stale"


def test_the_libraries_of_an_engine_are_those_it_imports():
    """What an engine loads of the distributions that extract, in a process of its own, is in its key."""
    script = """
import os, sys
from stages.extract.html.step import Html
for engine in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        Html(engine=engine).setup()
        names = {m.partition(".")[0].removeprefix("tokenmill_") for m in sys.modules}
        print(engine, *names & {"trafilatura", "justext", "lxml", "resiliparse"}, flush=True)
        os._exit(0)
"""
    engines = [engine for engine in ALL if "trafilatura" not in LIBRARIES[engine]]     # other keys hold them all
    ran = subprocess.run([sys.executable, "-c", script, *engines], capture_output=True, text=True, check=True)
    loaded = {engine: set(names) for engine, *names in map(str.split, ran.stdout.splitlines())}
    assert loaded.keys() == set(engines) >= {"mill", "resiliparse"}
    assert all(loaded[engine] <= set(Html(engine=engine).libraries) for engine in engines)


@pytest.mark.parametrize(("module", "name"), [
    ("utils", "fromstring"), ("external", "ReadabilityDocument"), ("baseline", "json"), ("core", "_recall_retry"),
    ("core", "justext_rescue")])
def test_no_memory_is_no_missing_text(module, name, monkeypatch):
    """Wherever the extractor runs out of memory: the machine is too small, the page is not without text."""
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(core, "html2txt", lambda tree: "x" * 10**6)          # so much more on the page: look again
    raw = page("<div><p>x y z</p></div>", "<script type='application/ld+json'>{\"articleBody\": \"x\"}</script>")
    stage = Html(engine="trafilatura", comments=True)
    stage.setup()
    monkeypatch.setattr(importlib.import_module(f"tokenmill_trafilatura.{module}"), name,
                        SimpleNamespace(loads=full) if name == "json" else full)
    ask = (lambda: fallbacks.summary.original(etree.HTML("<p>x"))) if module == "external" else \
        (lambda: stage.process(Document("0", raw=raw, mime="text/html")))
    with pytest.raises(MemoryError):
        ask()


def test_libxml2_without_memory():
    def parse(code: int) -> None:
        raise etree.XMLSyntaxError("unknown error", code, 0, 0)

    with pytest.raises(MemoryError, match="libxml2"):
        loud(parse)(etree.ErrorTypes.ERR_NO_MEMORY)
    with pytest.raises(etree.XMLSyntaxError):
        loud(parse)(etree.ErrorTypes.ERR_DOCUMENT_EMPTY)


def test_a_page_in_too_little_memory():
    """libxml2 itself without memory: a MemoryError or the text of a machine that has enough, nothing between."""
    script = """
import os, resource
from stages.document import Document
from stages.extract.html.step import Html
stage = Html(engine="trafilatura", fast=True)
stage.process(Document("0", raw=b"<html><p>warm up", mime="text/html"))
raw = ("<html><body>" + "<div class=c><p>Some words of <b>a</b> page.</p></div>" * 19_000).encode()
for room in (4, 12, 30):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20),) * 2)
    try:
        doc = Document("0", raw=raw, mime="text/html")
        print(stage.process(doc), len(doc.text), flush=True)
    except MemoryError:
        print("memory", flush=True)
    os._exit(0)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert ran.stdout.split() == ["memory"] * 3, (ran.stdout, ran.stderr[-500:])


# -- real data -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def archived() -> list[Document]:
    """All pages of all real archives. For a file without a page, the reader must give a reason."""
    docs: list[Document] = []
    for path in sorted(p for p in shared_data("warc").rglob("*") if p.is_file()):
        items = list(Warc().read(str(path), Slice("web", path.name)))
        assert items, path
        assert all(isinstance(i, Document) or re.fullmatch(r"[a-z_]+", i.reason) for i in items), path
        docs += [i for i in items if isinstance(i, Document)]
    return docs


SLOWER = [pytest.param(e, marks=pytest.mark.slow) for e in sorted(ALL) if e != "mill"]


@pytest.mark.parametrize("engine", ["mill", *SLOWER])
def test_every_page_of_the_archives_is_text_or_reason(engine, archived):
    stage, seen = Html(engine=engine), Counter()
    for doc in archived:
        given, doc.text = doc.raw is None and doc.text, doc.text if doc.raw is None else ""
        reason = stage.process(doc)
        seen[reason or "text"] += 1
        assert bool(doc.text) == (reason is None) and (not given or doc.text == given)
    assert set(seen) <= {"text", "not_html", "no_text"} and seen["text"] > 100 and seen["not_html"] < 70, seen


@pytest.mark.slow
@pytest.mark.parametrize("engine", sorted(ALL))
def test_every_page_with_gold_has_text(engine):
    stages = [Html(engine=engine, format=form) for form in ("text", "markdown")]
    pages = sorted(shared_data("html").rglob("*.html.gz"))
    without = Counter()
    for n, path in enumerate(pages):
        doc = Document("id", raw=gzip.decompress(path.read_bytes()), mime="text/html")
        reason = stages[n % 2].process(doc)
        assert bool(doc.text) == (reason is None)
        without[reason] += 1
    assert len(pages) > 370 and without[None] > {"justext": 280, "readability": 300}.get(engine, 365), without


WORD = re.compile(r"\w+")


def word_f1(found: str, gold: str) -> float:
    a, b = (Counter(WORD.findall(t.lower())) for t in (found, gold))
    common = (a & b).total()
    return 2 * common / (a.total() + b.total()) if common else 0.0


@pytest.mark.parametrize(("engine", "least"), [("mill", 0.88), ("trafilatura", 0.84), ("resiliparse", 0.77)])
def test_quality_against_gold(engine, least):
    stage, scores, pages = Html(engine=engine), [], shared_data("html", "wcxb-dev", "html")
    for path in sorted(shared_data("html", "wcxb-dev", "gold").glob("*.json.gz"))[::4]:
        truth = json.loads(gzip.decompress(path.read_bytes()))["ground_truth"]["main_content"]
        raw = gzip.decompress((pages / path.name.replace(".json", ".html")).read_bytes())
        doc = Document("id", raw=raw, mime="text/html")
        stage.process(doc)
        scores.append(word_f1(doc.text, truth))
    assert sum(scores) / len(scores) >= least
