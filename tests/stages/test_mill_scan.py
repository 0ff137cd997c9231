"""The compiled scanner of the HTML engine `mill`, compared with a plain reading of the same markup, and with pages that
are made to break it."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pytest

from stages.extract.html.mill import choice, columns
from stages.extract.html.mill import features as f
from stages.extract.html.mill.page import PageArrays, serialised, table, walk
from stages.extract.html.mill.render import render
from stages.extract.html.mill.second_pass import SECOND, second_features, structures
from stages.extract.html.mill.tags import BLOCK, BREAK, IN_A, IN_COMMENT, IN_PRE, KIND, NAMES, RAW, SKIP, VOID, fnv
from tests.stages.texts import assert_quick

TOKEN = re.compile(
    r"<!--.*?-->|<!DOCTYPE[^>]*>|<(/?)([^ >]+)((?: [^ >][^ >=]*(?:=\"[^\"]*\")?)*)>|([^<]+)", re.DOTALL
)
STOPS, COMMAS = ".!?…。！？．؟۔।॥։။።។⁈‽", ",;:،؛、，：；՝၊፣"
ENTITIES = {"&lt;": "<", "&gt;": ">", "&nbsp;": " ", "&amp;": "&"}


def kind_of(name: str) -> int:
    if name in NAMES[1:]:
        return int(KIND[NAMES.index(name)])
    return BLOCK if "-" in name else 0


def spaced(char: str) -> bool:
    return char in "\t\n\x0c\r" or unicodedata.category(char) in ("Zs", "Zl", "Zp")


def plainly(markup: str) -> list[tuple[str, str, int, int, int]]:
    """Read the blocks of a serialised page with a regular expression and lists. Returns for each (text, tag of its box,
    characters in links, ends of sentences, commas). Runs of white space in the text become one space, except between
    lines."""
    out: list[tuple[str, str, int, int, int]] = []
    stack: list[str] = []
    runs: list[tuple[str, bool, bool]] = []
    box = ""
    skipped = 0
    at = 0

    def flush() -> None:
        nonlocal runs
        text = "".join(c for c, _, _ in runs).strip(" ")
        if text:
            solid = [(c, a) for c, a, _ in runs if not c.isspace() and c not in "\u2028\u2029"]
            out.append(
                (
                    text.rstrip("\n "), box if box in NAMES else "",
                    sum((3 if c in "漢字" else 1) for c, a in solid if a), sum(c in STOPS for c, _ in solid),
                    sum(c in COMMAS for c, _ in solid))
            )
        runs = []

    while at < len(markup):
        found = TOKEN.match(markup, at)
        assert found, markup[at : at + 80]
        at = found.end()
        closing, name, _, text = found.groups()
        if text is not None:
            if skipped:
                continue
            for char in re.findall(r"&(?:lt|gt|nbsp|amp);|.", text, re.DOTALL):
                char = ENTITIES.get(char, char)
                in_pre = any(n in ("pre", "listing") for n in stack)
                if spaced(char):
                    if in_pre and runs:
                        if char != "\r":
                            runs.append(("\n" if char == "\n" else " ", False, True))
                    elif runs and runs[-1][0] not in (" ", "\n"):
                        runs.append((" ", False, False))
                    continue
                if not any(not c.isspace() for c, _, _ in runs):
                    runs = []
                    box = next((n for n in reversed(stack) if kind_of(n) == BLOCK), "")
                runs.append((char, "a" in stack, False))
        elif name and closing:
            kind = kind_of(name)
            if kind in (VOID, BREAK):
                continue
            if skipped:
                skipped -= 1
                continue
            assert stack and stack[-1] == name
            if kind == BLOCK:
                flush()
            stack.pop()
        elif name:
            kind = kind_of(name)
            if kind == RAW:
                at = markup.index(f"</{name}>", at) + len(name) + 3
            elif kind == BREAK and not skipped and runs:
                while runs and runs[-1][0] == " " and not runs[-1][2]:
                    runs.pop()
                if runs[-1][0] == "\n":
                    flush()
                else:
                    runs.append(("\n", False, False))
            elif kind in (VOID, BREAK):
                continue
            elif skipped or kind == SKIP:
                skipped += 1
                if skipped == 1 and runs and runs[-1][0] not in (" ", "\n"):
                    runs.append((" ", False, False))
            else:
                if kind == BLOCK:
                    flush()
                elif name == "a" and runs and markup[: found.start()].endswith("</a>"):
                    runs.append((" ", False, False))
                stack.append(name)
    flush()
    return out


def as_read(page: PageArrays) -> list[tuple[str, str, int, int, int]]:
    body = page.text.tobytes()
    return [
        (
            body[b[columns.B_START] : b[columns.B_END]].decode().rstrip("\n "),
            NAMES[page.elements[b[columns.B_BOX], columns.E_TAG]], int(b[columns.B_LINKED]), int(b[columns.B_STOPS]),
            int(b[columns.B_COMMAS]))
        for b in page.blocks
    ]


PIECES = [
    "<div>", "</div>", "<p>", "</p>", "<a href=x>", "</a>", "<b>", "</b>", "<br>", "<br/>", "<ul><li>", "</ul>",
    "<li>", "<table><tr><td>", "<td>", "</table>", "<h2>", "</h2>", "<!-- <p>no --> ",
    "<script>if (a<b) '</p>'</script>", "<svg><path/>no</svg>", "<template><p>no</p></template>",
    "<x-card class='priceBox main'>", "</x-card>", "<img alt='a > b'>", "<span hidden>", "</span>", "word",
    " two words. ", "one, two; three", "\n", "&amp;", "&nbsp;", "&lt;p&gt;", "é", "漢字。", "كلمة، كلمة؟", "🙂",
    "Ünïcode", "1,234", "<select><option>no</select>", "<i>", "</i>", "<nav>", "</nav>", "<p style='display: none'>",
    "</body>", "<noscript>", "</noscript>", "<textarea><p></textarea>"]


def test_kernel_reads_what_a_plain_reading_reads() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        markup = serialised("".join(rng.choices(PIECES, k=rng.randrange(1, 120))))
        page = walk(markup)
        assert page is not None
        assert as_read(page) == plainly(markup.decode()), seed


def test_what_a_block_is() -> None:
    page = walk(
        serialised(
            "<title>T &amp; U</title><body>loose <b>bold</b><div>in <a href=x>a link</a><p>par<br>line<br><br>"
            "new</p></div><pre>a\n  b</pre><table><tr><td>1<td>2<tr><td>3<td>4</table><ul><li>x<li>y</ul>"
        )
    )
    assert page is not None
    assert [(t, tag) for t, tag, *_ in as_read(page)] == [
        ("T & U", "title"), ("loose bold", "body"), ("in a link", "div"), ("par\nline", "p"), ("new", "p"),
        ("a\n  b", "pre"), ("1", "td"), ("2", "td"), ("3", "td"), ("4", "td"), ("x", "li"), ("y", "li")]
    assert (
        render(page, np.arange(12) > 0)
        == "loose bold\nin a link\npar\nline\nnew\na\n  b\n1 | 2\n3 | 4\n- x\n- y"
    )


def written(markup: str, *, plain: bool = False, tables: bool = True) -> str:
    page = walk(serialised(markup))
    assert page is not None
    return render(page, np.ones(len(page.blocks), bool), markup=not plain, tables=tables)


def test_markdown() -> None:
    assert written(
        "<h2>Head <i>line</i></h2><p>One.<ul><li>a<ol><li>b<li>c</ol><p>tail<li><p>d<p>e</ul><blockquote><p>q<p>r"
        "</blockquote><table><tr><th>x<th><p>y<tr><td>1<td>2</table><pre>if a:\n  `b`</pre><p>So \\(x^2\\)."
    ) == (
        "## Head *line*\n\nOne.\n\n- a\n  1. b\n  2. c\n  tail\n- d\n  e\n\n> q\n>\n> r\n\n"
        "| x | y |\n| --- | --- |\n| 1 | 2 |\n\n```\nif a:\n  `b`\n```\n\nSo $x^2$."
    )


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("a <b>bold</b> and <em>so</em>", "a **bold** and *so*"),
        ("a <b> bold <i>too</i> </b>b", "a **bold *too*** b"),
        ("<b>a</b> <strong>b</strong><b>c</b>", "**a bc**"),
        ("<b>D</b>rop cap, un<i>believ</i>able", "Drop cap, unbelievable"),
        ("漢<b>字</b>漢", "漢**字**漢"),
        ("run <code>x = `1`</code> or <kbd>Ctrl</kbd>", "run `` x = `1` `` or `Ctrl`"),
        ("<code>a <b>b</b> <i>c</i></code>", "`a b c`"),
        ("H<sub>2</sub>O, x<sup>2n</sup>, it<sup>[1]</sup>, T<sup>™</sup>", "H<sub>2</sub>O, x<sup>2n</sup>, it, T™"),
        ("<b>one<p>two</p>three</b> four", "one\n\ntwo\n\nthree four"),
        ("<b><b>a</b></b> <i></i><i> </i>b <del>c</del>", "**a** b ~~c~~"),
        ("<h3><b>Bold</b> and <code>f()</code></h3>", "### Bold and `f()`"),
        ("<pre><b>x</b> = <i>1</i></pre>", "```\nx = 1\n```"),
    ],
)
def test_emphasis(markup: str, expected: str) -> None:
    assert written(markup) == expected
    assert not set(written(markup.replace("`", ""), plain=True)) & set("*`<~")


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("<ol start=3><li>a<li>b<li value=9>c<li>d</ol>", "3. a\n4. b\n9. c\n10. d"),
        ("<ol start=x9><li>a<li>b</ol>", "1. a\n2. b"),
        ("<ol start=9999999><li>a<li>b</ol>", "1. a\n2. b"),
        ("<ol><li>a<ul><li>b<li>c</ul><li>d</ol>", "1. a\n   - b\n   - c\n2. d"),
        ("<ul><li>a</ul><ul><li>a</ul>", "a\n\na"),                       # a list of one is none
        ("<ul><li><h2>A</h2><p>b<li><h2>C</h2><p>d</ul>", "## A\n\nb\n\n## C\n\nd"),
        (f"<ul><li>{'long ' * 500}<li>x</ul>", "long " * 499 + "long\n\nx"),
        ("<dl><dt>T<dd>M<dd>N<dt>U<dd><p>V</dl><p>x", "T\n: M\n: N\nU\n\nV\n\nx"),
        ("<div><dl><dd>M</dl></div>", "M"),
    ],
)
def test_lists(markup: str, expected: str) -> None:
    assert written(markup) == expected


def test_tables_of_data_and_of_layout() -> None:
    data = "<table><tr><th>a<th>b<th>c<tr><td>1<td><td><p>3<p>x|y<tr><td><td>5</table>"
    assert written(data) == "| a | b | c |\n| --- | --- | --- |\n| 1 |  | 3 x\\|y |\n|  | 5 |  |"
    assert written(data, plain=True) == "a | b | c\n1 | 3 x|y\n5"
    assert written(f"<p>x{data}<p>y", plain=True, tables=False) == "x\ny"
    for inside in ("<h2>h</h2>", "<ul><li>i<li>j</ul>", "<table><tr><td>k</table>", "word " * 300, "<p>l" * 9):
        page = data.replace("<td>5", f"<td>{inside}")
        assert "|" not in written(page).replace("x|y", "") and "a\n\nb\n\nc\n\n" in written(page)
        assert written(page, tables=False) == written(page), "what lays out a page is no table"
    assert written("<table><tr><td>a<td>b</table>") == "a\n\nb"
    assert written("<table><tr><td>a<tr><td>b</table>") == "a\n\nb"


def test_code_is_one_piece_in_its_language() -> None:
    assert written("<pre><div>a</div><div>\n\tb</div></pre>") == "```\na\n    b\n```"
    assert written("<pre>a<br><br>  b</pre>") == "```\na\n\n  b\n```"
    for markup in ("<pre class='brush: Python'>x</pre>", "<div class='highlight-source-python'><pre>x</pre></div>",
                   "<pre><code class='hljs language-python'>x</code></pre>"):
        assert written(markup) == "```python\nx\n```"
    assert written("<pre class='big'>x</pre>") == "```\nx\n```" and written("<pre>") == ""


def test_class_words_weigh_on_the_element_and_all_below() -> None:
    words = table(np.array([fnv(b"price"), fnv(b"side")], np.uint32), np.array([7, -9], np.int32))
    page = walk(serialised("<div class='sideBar price-x'><p id=PRICE>a</p></div>"), words, collect=True)
    assert page is not None
    boxes = page.elements[[int(np.flatnonzero(page.elements[:, 0] == NAMES.index(n))[0]) for n in ("div", "p")]]
    assert boxes[:, columns.E_TOKENS].tolist() == [-2, 7]
    assert boxes[:, columns.E_BEST].tolist() == [7, 7] and boxes[:, columns.E_WORST].tolist() == [-9, -9]
    assert {fnv(b"side"), fnv(b"bar"), fnv(b"price")} <= set(page.words.tolist())


def test_flags_come_from_tags_roles_and_styles() -> None:
    page = walk(serialised("<div role=navigation><a href=x>n</a></div><p style='display:none'>h</p><pre>x</pre>"))
    assert page is not None
    flags = page.blocks[:, columns.B_FLAGS]
    assert flags[0] & IN_A and flags[2] & IN_PRE and not flags[1] & IN_A


HOSTILE = {
    "empty": "",
    "nothing but NULs": "\0" * 10_000,
    "one tag for 250 kB": "<div " + "a" * 250_000,
    "attributes": "<p " + "x=1 " * 25_000 + ">t",
    "names": "".join(f"<t{n}>" for n in range(200)),
    "unclosed": "<b>" * 250 + "x",
    "brackets": "<" * 25_000,
    "comment": "<!--" + "-" * 25_000,
    "entities": "&lt;&amp;&nbsp" * 10_000,
    "quotes": "<a =\"'><p \"=x '>t",
    "foreign script": "<svg><script>x<y</script>t</svg>after",
    "plaintext": "a<plaintext>b</p>",
    "text": "word " * 50_000,
    "breaks": "a<br>" * 12_500,
    "cells": "<table><tr>" + "<td>x" * 7_500,
    "surrogates": "a\ud800b\udfffc",
    "bom": "\ufeff<p>x",
    "class": "<p class='" + "aB" * 50_000 + "'>t",
    "tabs": "<pre>" + "\t" * 25_000 + "x" + "\n \t" * 12_500 + "y",
    "lists": "<ul><li>a<ol>" * 60 + "<li>b" * 12_500,
    "marks": "<p>" + "<b>x</b> <i><code>y</code></i>" * 7_500,
    "empty marks": "x<b></b>" * 12_500,
    "siblings": "".join(f"<p class=c{n}>x" for n in range(12_500)),
}


def all_of(markup: str) -> PageArrays:
    """Return the page, after everything was done with it that `mill` does with a page."""
    page = walk(serialised(markup), collect=True, deepest=255)
    assert page is not None
    blocks = len(page.blocks)
    out, look = np.empty((blocks, f.FEATURES), np.int32), np.empty((blocks, len(SECOND)), np.int32)
    f.describe(page.elements, len(page.elements), page.blocks, blocks, page.text, out)
    second_features(page.elements, len(page.elements), page.blocks, blocks, structures(page.elements, page.blocks),
                    np.full(blocks, 500, np.int32), look)
    for marks in (False, True):
        render(page, np.ones(blocks, bool), markup=marks)
    return page


@pytest.fixture(scope="module")
def compiled() -> None:
    all_of("<p>x")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_page_hurts(name: str, compiled: None) -> None:
    page = assert_quick(lambda: all_of(HOSTILE[name]), 5)
    assert len(page.text) <= len(page.markup) + 16
    assert (page.blocks[:, columns.B_START] <= page.blocks[:, columns.B_END]).all()


def test_deep_pages_are_told_from_flat_ones() -> None:
    assert walk(serialised("<div>" * 253 + "x"), deepest=255) is not None
    assert walk(serialised("<div>" * 254 + "x"), deepest=255) is None
    assert walk(serialised("<div>" * 50_000 + "x"), deepest=255) is None


def test_damaged_markup_never_leaves_the_arrays() -> None:
    """The kernel trusts no serialisation: cut and garbled markup gives some blocks, within bounds."""
    rng = random.Random(5)
    whole = bytearray(serialised("".join(rng.choices(PIECES, k=400))))
    for _ in range(300):
        cut = bytearray(whole[: rng.randrange(len(whole))])
        for _ in range(rng.randrange(6)):
            if cut:
                cut[rng.randrange(len(cut))] = rng.choice(b'<>&/"= \x00\xff\xe3\xf0')
        page = walk(bytes(cut))
        assert page is None or len(page.text) <= len(cut) + 16


def test_a_page_is_the_same_whatever_came_before() -> None:
    markup = serialised("<p>One, two.<div class=x>" + "".join(PIECES))
    first = walk(markup)
    walk(serialised("<table>" + "<td>x" * 1000))
    second = walk(markup)
    assert first is not None and second is not None
    for a, b in zip(first, second):
        assert bytes(a) == bytes(b)


def test_choice_is_the_best_by_trial() -> None:
    """Against all subsets: no choice of blocks has a larger expected F_β, and the expected F1 told is that of the
    choice."""
    rng = np.random.default_rng(3)
    for recall in [250, 1000, 4000] * 15:
        n = 8
        blocks = np.zeros((n, columns.BLOCK_COLUMNS), np.int32)
        blocks[:, columns.B_WORDS] = rng.integers(1, 60, n)
        chances = rng.integers(20, 1000, n).astype(np.int32)
        w, p = blocks[:, columns.B_WORDS].astype(np.int64), chances.astype(np.int64)

        def f1(chosen: np.ndarray, w: np.ndarray = w, p: np.ndarray = p) -> float:
            return 2 * (w * p)[chosen].sum() / (1000 * w[chosen].sum() + (w * p).sum())

        def f_beta(chosen: np.ndarray, w: np.ndarray = w, p: np.ndarray = p, b: float = recall / 1000) -> float:
            return (1 + b) * (w * p)[chosen].sum() / (1000 * w[chosen].sum() + b * (w * p).sum())

        best = max(f_beta(np.array([mask >> k & 1 for k in range(n)], bool)) for mask in range(1, 1 << n))
        chosen, expected = choice.choose(blocks, chances, np.arange(1001)[None], recall)
        assert f_beta(chosen) == pytest.approx(best, abs=0.001) and expected == int(1000 * f1(chosen))


def test_comments_are_told_by_class_words_but_not_by_those_of_the_whole_page() -> None:
    page = walk(serialised("<body class=comments-open><p>a</p><div id=disqus_thread><p>b</p></div>"
                           "<ol class=commentList><li>c</ol><p class=commentary>d"))
    assert page is not None
    assert [bool(b & IN_COMMENT) for b in page.blocks[:, columns.B_FLAGS]] == [False, True, True, False]
