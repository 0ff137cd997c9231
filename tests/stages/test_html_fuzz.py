"""Mutated pages: text or a counted reason from every engine, in bounded time, the same twice. `make fuzz` tries thirty
times as many. A finding is its number: the same page is made of it again."""

from __future__ import annotations

import random
import time
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.document import Document
from stages.extract.html import ENGINES, Html
from tests.conftest import SHARED
from tests.stages.test_html_engines import ARTICLE, synthetic
from tests.stages.test_html_markup import IMAGE, KATEX, MATHJAX, WIKIPEDIA

TOKENS = [b"<", b">", b"</div>", b"<div>", b"<table><tr><td>", b"</table>", b"<ul><li>", b"<pre><code>", b"<b><i>",
          b"<!--", b"-->", b"<![CDATA[", b"]]>", b"<script>", b"</script>", b"<style>", b"<title>", b"<textarea>",
          b"<svg>", b"<math>", b"<template>", b"<noscript>", b"<frameset>", b"<body>", b"<html lang=",
          b"<meta charset=utf-16>", b"<base href='", b"&", b"&#x110000;", b"&#0;", b"&amp", b"\x00", b"\xff\xfe",
          b"\xef\xbb\xbf", b"\xed\xa0\x80", b"style='display:none'", b"class='", b'"', b"<a href=//[>", b"\\(",
          b"\\[", b"\\)", b"<plaintext>", b"<select>", b"<p>" * 300, b"<div>" * 270, b"<font>" * 400, b"<li>x" * 300,
          b"\xe2\x80\xae", b"<br>" * 200]
REASONS = {None, "not_html", "html_too_deep", "html_too_many_nodes", "no_text"}


@cache
def originals() -> list[bytes]:
    formulas = "".join(f"<p>A formula {f} in a text that goes on.</p>" * 3 for f in (IMAGE, KATEX, MATHJAX, WIKIPEDIA))
    own = [ARTICLE, f"<html><body>{formulas}</body></html>".encode(), *synthetic(12)]
    folder = SHARED / "html" / "fundus"
    real = sorted(folder.rglob("*.html*")) if folder.exists() else []
    return own + [p.read_bytes() for p in real if p.suffix == ".html" and p.stat().st_size < 60_000]


def mutated(seed: int) -> bytes:
    draw = random.Random(seed)
    data = bytearray(draw.choice(originals()))
    for _ in range(draw.choice((1, 2, 4, 8, 32))):
        at, size = draw.randrange(len(data) + 1), draw.choice((1, 2, 8, 64, 1024))
        match draw.randrange(6):
            case 0:
                for k in range(at, min(len(data), at + size)):
                    data[k] = draw.randrange(256)
            case 1:
                del data[at:at + size]
            case 2:
                data[at:at] = data[at:at + size] * draw.choice((1, 2, 20))
            case 3:
                data[at:at] = draw.choice(TOKENS)
            case 4:
                other = draw.choice(originals())
                start = draw.randrange(len(other))
                data[at:at + size] = other[start:start + size]
            case _:
                if draw.random() < 0.2:
                    del data[at:]
    return bytes(data[:2_000_000])


@cache
def stage(engine: str, form: str) -> Html:
    return Html(engine=engine, format=form)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32 - 1))
def test_mutated_pages(seed):
    raw = mutated(seed)
    for n, engine in enumerate(sorted(ENGINES)):
        form = ("text", "markdown")[(seed + n) % 2]
        found = []
        for _ in range(2):
            doc = Document("id", raw=raw, mime="text/html")
            began = time.process_time()
            reason = stage(engine, form).process(doc)
            took = time.process_time() - began
            found.append((reason, doc.text, sorted(doc.meta.items())))
        assert found[0] == found[1], (seed, engine, form)
        assert reason in REASONS and bool(doc.text) == (reason is None), (seed, engine, form, reason)
        assert "\x00" not in doc.text and len(doc.text) < 20 * len(raw) + 1000, (seed, engine, form)
        doc.text.encode()
        assert took < 4, (seed, engine, form, took)
