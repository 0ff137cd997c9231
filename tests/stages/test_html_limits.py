"""What is decided about a page before it is parsed: which of its bytes are read, and that no parser takes long for
them."""

from __future__ import annotations

import os
import random
import re

import pytest

from stages.document import Document
from stages.extract.html import limits
from stages.extract.html.limits import ATTRIBUTES, OPTIONS, TEMPLATES, count_nodes, shorten
from stages.extract.html.step import ENGINES, Html
from tests.stages.texts import crawled_pages

S = "The quick brown fox jumps over the lazy dog, and nobody in the village ever asked it why it did so. "
START = re.compile(rb"<[a-zA-Z]")
ARTICLE = f"<article>{''.join(f'<p>Number {i}: {S * 4}</p>' for i in range(6))}</article>".encode()
CODE = {
    "script": b"<script>var a = '" + b"<p>x</p>" * 400_000 + b"';</SCRIPT >",
    "style": b"<STYLE>" + b"a{} " * 700_000 + b"</style>",
    "comment": b"<!-- " + b"no text " * 400_000 + b"-->", "svg": b"<svg>" + b"<path d='M0 0'/>" * 150_000 + b"</svg>",
    "image": b"<img alt=x src='data:image/png;base64," + b"iVBORw0KGgo" * 250_000 + b"'>",
}


def page(body: bytes, head: bytes = b"<title>A title</title>") -> bytes:
    return b"<!DOCTYPE html><html><head>" + head + b"</head><body>" + body + b"</body></html>"


def run(raw: bytes, **config: object) -> tuple[str | None, Document]:
    doc = Document("id", raw=raw, mime="text/html")
    return Html(**config).process(doc), doc


# -- bytes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", CODE)
@pytest.mark.parametrize("engine", ["mill", "trafilatura"])
def test_what_is_large_by_code_is_read_whole(kind, engine):
    raw = page(ARTICLE[:1500] + CODE[kind] + ARTICLE[1500:])
    assert len(raw) > 2_000_000
    reason, doc = run(raw, engine=engine)
    assert reason is None and doc.text.count(S.strip()) == 24
    assert doc.text == run(page(ARTICLE), engine=engine)[1].text and doc.meta["title"] == "A title"
    assert abs(doc.signals["html_cut_bytes"] - len(CODE[kind])) < 100


def test_what_a_page_says_of_itself_is_no_code():
    told = (b'<script type="application/ld+json">{"author": {"name": "Jane Doe"}}</script>'
            b'<script type="math/tex">x_1</script>')
    short = shorten(page(told + ARTICLE + CODE["script"]), 2_000_000)
    assert told in short and len(short) < 10_000


def test_a_long_page_is_cut_in_front_of_a_tag():
    raw = page(b"".join(f"<p>{i}: größer {S * 6}</p>".encode() for i in range(5_000)))
    short = shorten(raw, 2_000_000)
    assert raw.startswith(short) and 1_999_000 < len(short) <= 2_000_000 and raw[len(short)] == ord("<")
    reason, doc = run(raw)
    assert reason is None and "größer" in doc.text and doc.signals["html_cut_bytes"] == len(raw) - len(short)
    last = int(re.findall(r"(\d+): ", doc.text)[-1])
    assert f"{last}: größer {S.strip()}" in doc.text and 2_500 < last < 5_000
    assert run(page(ARTICLE))[1].signals["html_cut_bytes"] == 0.0


def test_a_long_line_is_cut_between_characters():
    for text in ("ü" * 3_000_000, "語" * 1_000_000, "x" * 3_000_000):
        short = shorten(b"<p>" + text.encode(), 2_000_000)
        assert 1_999_990 < len(short) <= 2_000_000 and short.decode()
    assert len(shorten(b"\x80" * 3_000_000, 2_000_000)) > 1_999_990


def test_pages_up_to_the_limit_are_untouched():
    raw = page(CODE["script"])
    assert shorten(raw, len(raw)) is raw
    assert shorten(raw, len(raw) - 1) == page(b"")


@pytest.mark.parametrize("token", [b"<script>", b"<style", b"<svg>", b"<!--", b"data:", b"data:x ", b"<svg></svg",
                                   b"<!---->", b"<script></script>", b"<", b"x", b"</script", b"<script ld+json>"])
def test_shortening_takes_no_time(token):
    import time

    raw, began = token * (5_000_000 // len(token)), time.process_time()
    assert len(shorten(raw, 500_000)) <= 500_000
    assert time.process_time() - began < 2


# -- nodes -----------------------------------------------------------------------------------------------------------
def test_nodes_are_start_tags():
    assert count_nodes(page(ARTICLE), 1000) == 11
    odd = b"<p>a<br/>b<img src=x><x-y z='>' w=\"<b>\">< p>1<2 <!-- <b> --><!x<b> <?php <b> ?></ <b></b><p"
    assert count_nodes(odd, 1000) == 5
    assert count_nodes(b"<script>a < b; '<p><p><p>'</script ><p><SCRIPT><p></SCRIPT><p>", 1000) == 4
    assert count_nodes(b"<!--><p><!---><p><!-- --!><p>", 1000) == 3, "comments end as in the standard"


def test_formatting_that_stays_open_is_opened_anew():
    assert count_nodes(b"<p><b>x</b><i>y</i></p>" * 100, 10**6) == 300
    open_tags = b"".join(b"<b id=%d>" % i for i in range(50))
    assert count_nodes(b"<p>" + open_tags + b"</p><p>x" * 40, 10**6) == 51 + 80 * 50 + 40
    assert count_nodes(b"<p>" + b"<b>" * 50 + b"</p><p>x" * 40, 10**6) == 51 + 80 * 3 + 40, "three equal ones"


@pytest.mark.parametrize("body", [
    b"<p " + b" ".join(b"a%d" % i for i in range(ATTRIBUTES + 1)) + b">" + ARTICLE,
    b"<p " + b" ".join(b"a%d='<b>'" % i for i in range(ATTRIBUTES + 1)) + b">" + ARTICLE,
    b"<select>" + b"<option>x" * (OPTIONS + 1) + b"</select>" + ARTICLE,
    b"<template>" * (TEMPLATES + 1) + ARTICLE,
    b"<p>" + b"".join(b"<b id=%d>" % i for i in range(2000)) + b"</p>" + b"<p>x" * 2000 + ARTICLE,
    b"<div>" + b"".join(b"<font color='>%d'>" % i for i in range(2000)) + b"</div>" + b"<div>x</div>" * 2000,
    b"<svg><script>" + b"".join(b"<b id=%d>" % i for i in range(2000)) + b"</svg>" + b"<p>x" * 2000])
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_what_would_cost_a_parser_much_is_not_parsed(engine, body):
    """Of 40 kB lexbor makes a gigabyte in nine seconds."""
    assert run(page(body), engine=engine)[0] == "html_too_many_nodes"


def test_templates_do_not_end_the_process():
    """lexbor's serialiser is recursive for them: 100,000 were the end of a worker."""
    count_nodes(b"<p>", 1)                   # compiled here, so that the child need not
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, "the process ended, or the page has another reason"
        return
    right = False
    try:
        right = all(run(b"<p>a b c" + b"<template>x" * 90_000, engine=engine)[0] == "html_too_many_nodes"
                    for engine in ("mill", "resiliparse"))
    finally:
        os._exit(not right)


def test_no_character_has_a_thousand_marks():
    """NFC takes the square of their number: 900,000 were the rest of the day."""
    import time

    run(page(ARTICLE), engine="trafilatura")             # compiles
    began = time.process_time()
    text = run(page(ARTICLE + b"<p>a" + "\u0301\u0316".encode() * 200_000 + "b Ł̣́e</p>".encode()),
               engine="trafilatura")[1].text
    assert time.process_time() - began < 15
    assert S.strip() in text and 20 < sum(map(text.count, "\u0301\u0316")) < 40
    assert limits.stream_safe("שָׁלוֹם " * 99 + "กี่") == "שָׁלוֹם " * 99 + "กี่"


def test_cut_pages_are_counted():
    rng = random.Random(5)
    parts = [b"<", b"</", b"<!--", b"-->", b"<p ", b"a='", b'"', b"=", b">", b"<script>", b"</script>", b"<b>", b"</b>",
             b"<svg>", b"<option>", b"x", b"/", b" ", b"<!", b"--!>", b"<template>", b"</template>"]
    for _ in range(1000):
        raw = b"".join(rng.choices(parts, k=rng.randrange(30)))
        assert 0 <= count_nodes(raw, 10**4) <= 10**4


def test_real_pages_are_far_below_the_limit():
    for doc in crawled_pages():
        assert count_nodes(doc.raw, 100_000) < min(30_000, 2 * len(START.findall(doc.raw)) + 50), doc.url
