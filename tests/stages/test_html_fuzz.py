"""Randomly changed pages: every engine gives a text or a counted reason in both formats, in bounded time and memory,
and always the same.

CI tries 120 pages, `make fuzz` 10,000, in a process with the limits of a worker. A failing page is named by its number,
from which it can be made again (`mutated(seed)`).
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import settings

from tests.conftest import real_files
from tests.stages.fuzzing import Worker, mutate
from tests.stages.test_html_engines import ARTICLE, synthetic
from tests.stages.test_html_markup import IMAGE, KATEX, MATHJAX, TEXTS, WIKIPEDIA

TOKENS = [b"<", b">", b"</div>", b"<div>", b"<table><tr><td>", b"</table>", b"<ul><li>", b"<pre><code>", b"<b><i>",
          b"<!--", b"-->", b"<![CDATA[", b"]]>", b"<script>", b"</script>", b"<style>", b"<title>", b"<textarea>",
          b"<svg>", b"<math>", b"</math>", b"<template>", b"<noscript>", b"<frameset>", b"<body>", b"<html lang=",
          b"<meta charset=utf-16>", b"<base href='", b"&", b"&#x110000;", b"&#0;", b"&amp", b"\x00", b"\xff\xfe",
          b"\xef\xbb\xbf", b"\xed\xa0\x80", b"style='display:none'", b"class='", b'"', b"<a href=//[>", b"\\(",
          b"\\[", b"\\)", b"<plaintext>", b"<select>", b"<p>" * 300, b"<div>" * 270, b"<font>" * 400, b"<li>x" * 300,
          b"\xe2\x80\xae", b"<br>" * 200, b"&#" + b"9" * 5000, b'<script type="application/ld+json">{"author":[',
          b"<meta name=author content='", b'<span class="katex-html">', b"<table>" * 90,
          b"colspan=99999 rowspan=9999 ", b"".join(b"<b id=%d>" % i for i in range(300)), b"</p>" * 300, b"<h1>",
          b"<caption>", b"<dd>", b"<blockquote>"]
REASONS = {None, "not_html", "html_too_deep", "html_too_many_nodes", "no_text"}
CPU_S, MEMORY = 4.0, 3 << 30
PAGES = 120 if settings.default.max_examples <= 100 else 10_000           # hypothesis' profile `fuzz`
#: the first ones are tried with the fast tests
FEW = 12

CODE = """
import hashlib, itertools, time
from stages.document import Document
from stages.extract.html.step import ENGINES, Html

stages = {(engine, form): Html(engine=engine, format=form) for engine in sorted(ENGINES)
          for form in ("text", "markdown")}
for stage in stages.values():
    stage.setup()
    stage.warm()                         # no page pays for compiling


def answer(data):
    told = []
    for (engine, form), stage in stages.items():
        said, cpu = [], 0.0
        # every engine in one format; every tenth page in both, and twice
        for _ in range(2 if data[-1] % 10 == 0 else int((len(data) + (form == "text")) % 2)):
            doc, begun = Document("id", raw=data[:-1], mime="text/html"), time.process_time()
            reason = stage.process(doc)
            cpu = max(cpu, time.process_time() - begun)
            text = doc.text.encode()
            said.append((reason, hashlib.sha256(text).hexdigest(), json.dumps([doc.meta, doc.signals], sort_keys=True)))
        if said:
            told.append({"engine": engine, "format": form, "reason": reason, "bytes": len(text), "cpu": cpu,
                         "same": said[0] == said[-1], "nul": b"\\x00" in text})
    return told
"""


@cache
def originals() -> list[bytes]:
    formulas = "".join(f"<p>A formula {f} in a text that goes on.</p>" * 3 for f in (IMAGE, KATEX, MATHJAX, WIKIPEDIA))
    own = [ARTICLE, f"<html><body>{formulas}</body></html>".encode(), *synthetic(12)]
    for language, encoding in (("japanese", "shift_jis"), ("russian", "koi8-r"), ("german", "utf-16")):
        text = f"<p>{TEXTS[language] * 4}</p>" * 6
        own.append(f"<html><head><title>x</title></head><body>{text}</body></html>".encode(encoding))
    real = real_files("*.html.gz", "html")
    pages = (gzip.decompress(p.read_bytes()) for p in real if p.stat().st_size < 25_000)
    return own + [page for page in pages if len(page) < 100_000]


def mutated(seed: int) -> bytes:
    draw = random.Random(seed)
    data = bytearray(draw.choice(originals()))
    for _ in range(draw.choice((1, 2, 4, 8, 32))):
        mutate(draw, data, originals(), TOKENS, (1, 2, 20))
    return bytes(data[:2_000_000])


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    process = Worker(CODE, MEMORY)
    yield process
    process.close()


def findings(worker: Worker, seeds: range) -> list[tuple[int, object]]:
    """Return (seed, answer) for each of these pages with a wrong answer."""
    wrong = []
    for seed in seeds:
        data = mutated(seed)
        for told in worker.ask(data + bytes([seed % 256])):
            good = (told["reason"] in REASONS and (told["bytes"] > 0) == (told["reason"] is None) and told["same"]
                    and not told["nul"] and told["bytes"] < 20 * len(data) + 1000 and told["cpu"] < CPU_S)
            if not good:
                wrong.append((seed, told))
    return wrong


def test_some_mutated_pages(worker):
    assert findings(worker, range(FEW)) == []


@pytest.mark.slow
@pytest.mark.hypothesis
def test_mutated_pages(worker):
    assert findings(worker, range(FEW, PAGES)) == []
    assert worker.peak() < 1 << 30, "bytes"


def test_the_same_seed_makes_the_same_page():
    assert mutated(7) == mutated(7) != mutated(8)
