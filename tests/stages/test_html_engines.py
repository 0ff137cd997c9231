"""Every HTML engine gives the same bytes for the same bytes, does bounded work, and gives the same text as the package
that it follows.

After an intended change of an engine's output, raise the stage's `version` and run `python -m
tests.stages.test_html_engines --write`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import justext as package
import pytest
from justext.core import html_to_dom, preprocessor, revise_paragraph_classification

from stages.document import Document
from stages.extract.html import justext, readability
from stages.extract.html.step import ENGINES, Html
from stages.stage import library_versions
from tests.stages.texts import assert_quick, crawled_pages

S = "The quick brown fox jumps over the lazy dog, and nobody in the village ever asked it why it did so. "
#: engines whose own work is bounded; pages are parsed by libxml2 in all but one
NAMES = sorted(ENGINES)


def page(body: str, head: str = "<title>T</title>") -> bytes:
    return f"<!DOCTYPE html><html lang=en><head>{head}</head><body>{body}</body></html>".encode()


def run(raw: bytes, **config: object) -> tuple[str | None, str]:
    doc = Document("id", raw=raw, mime="text/html")
    return Html(**config).process(doc), doc.text


ARTICLE = page("<nav><a href=/a>Menu</a></nav><article><h1>A heading</h1>"
               + "".join(f"<p>Number {i}: {S * 4}</p>" for i in range(4))
               + "</article><footer><a href=/b>Imprint</a></footer>")


# -- same bytes in, same bytes out -----------------------------------------------------------------------------------
def synthetic(n: int) -> list[bytes]:
    """Return `n` pages of many kinds. Each depends only on its number."""
    out = []
    for i in range(n):
        rng = random.Random(i)
        words = [w.strip(",.") for w in S.lower().split()] + ["der", "und", "les", "がある", "не", "что", "table", "42"]
        body = []
        for _ in range(rng.randrange(3, 14)):
            text = " ".join(rng.choices(words, k=rng.randrange(2, 90)))
            tag = rng.choice(["p", "p", "p", "div", "li", "td", "h2", "pre", "blockquote", "span", "section"])
            text = text.replace("dog", "<a href=/x>dog</a>") if rng.random() < 0.3 else text
            whole = f"<{tag} class='{rng.choice(['post', 'nav', 'comment', 'content', 'x'])}'>{text}</{tag}>"
            table = f"<table><tr>{whole * 2}</tr><tr>{whole * 2}</table>"
            body.append({"li": f"<ul>{whole * 3}</ul>", "td": table}.get(tag, whole))
        out.append(page("".join(body)))
    return out


MODES = {**{name: {"engine": name} for name in ENGINES}, "mill without tables": {"tables": False},
         **{f"trafilatura {name}": {"engine": "trafilatura", **config} for name, config in (
             ("fast", {"fast": True}), ("precision", {"favor": "precision"}), ("recall", {"favor": "recall"}),
             ("comments", {"comments": True, "tables": False}))}}


def answers(shuffled: bool = False) -> dict[str, str]:
    """Return a hash of what each mode and format makes of the synthetic pages: reasons, texts and metadata.

    With `shuffled`, the modes run in reverse order, and every other page is extracted after one that was read before.
    """
    pages, out = [*synthetic(14), ARTICLE], {}
    for mode, config in sorted(MODES.items(), reverse=shuffled):
        for form in ("text", "markdown"):
            stage, told = Html(format=form, **config), {}
            for i in random.Random(mode).sample(range(len(pages)), len(pages)) if shuffled else range(len(pages)):
                for raw in (*pages[:i % 2 if shuffled else 0], pages[i]):
                    doc = Document("id", raw=raw, mime="text/html")
                    told[i] = stage.process(doc), doc.text, doc.meta
            said = json.dumps(sorted(told.items()), sort_keys=True)
            out[f"{mode} {form}"] = hashlib.sha256(said.encode()).hexdigest()
    return out


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    return answers()


@pytest.mark.slow
def test_the_same_in_another_process_in_any_order_and_after_anything(here):
    code = "import json; from tests.stages import test_html_engines as t; print(json.dumps(t.answers(shuffled=True)))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONHASHSEED": "1"}).stdout
    assert json.loads(there) == here


@pytest.mark.slow
@pytest.mark.parametrize("engine", NAMES)
def test_the_same_on_real_pages(engine):
    docs = crawled_pages()[::4]
    found = []
    for order in (docs, docs[::-1]):
        stage, told = Html(engine=engine, format="markdown"), {}
        for doc in order:
            doc.text = ""
            told[doc.id] = (stage.process(doc), doc.text)
        found.append(told)
    assert found[0] == found[1] and sum(bool(t) for _, t in found[0].values()) > 25


# -- bounded ---------------------------------------------------------------------------------------------------------
BOMBS = {
    "images": page("<div><img src=x></div>" * 10_000 + f"<p>{S * 5}</p>"),
    "short paragraphs": page("<p>ab</p>" * 12_500),
    "50,000 tags": page("<div>" * 50_000 + S),
    "long and nested": page("<div class=content>" * 200 + f"<p>{S * 3}</p>" * 1_250),
    "quotes": page("<blockquote>" * 200 + f"<p>{S}</p>" * 750),
    "lists": page("<ul><li>" * 120 + f"<p>{S}</p>" * 750),
    "emphasis": page("<p>" + "<b><i>" * 120 + S * 1_250),
    "rows": page("<table>" + "<tr><td>a</td><td>b c</td></tr>" * 6_250 + "</table>"),
    "columns": page("<table><tr>" + "<td>x</td>" * 2_500 + "</tr>" + "<tr><td>y</td></tr>" * 5_000 + "</table>"),
    "spans": page("<table>" + "<tr><td colspan=100>x</td></tr>" * 11_250 + f"</table><p>{S * 5}"),
    "tables in tables": page("<table><tr><td>" * 80 + "<p>x</p>" * 10_000),
    "data URI": page(f"<img src='data:image/png;base64,{'A' * 475_000}'><p>{S * 5}</p>"),
    "script": page(f"<script>var a = '{'x+y ' * 110_000}';</script><p>{S * 5}</p>"),
    "svg": page("<svg>" + "<path d='M0 0 L1 1'/>" * 11_250 + f"</svg><p>{S * 5}</p>"),
    "formulas": page(r"<p>\(" * 15_000 + "<math>" * 5_000 + "<script type='math/tex'>x" * 750),
    "one line": page("<p>" + "x" * 475_000),
    # text behind what is left out is joined to the text before, 25,000 times
    "buttons": page("<div>" + "<button></button>x " * 25_000 + f"</div><p>{S * 5}</p>"),
    "images in text": page("<div>" + "<img src=x>x " * 25_000 + f"</div><p>{S * 5}</p>"),
    "lists in an item": page("<ul><li>" + "<ul><b> </b></ul>x " * 12_500 + f"</ul><p>{S * 5}</p>"),
    "fewer lists in an item": page("<ul><li>" + "<ul><b> </b></ul>x " * 2_500 + f"</ul><p>{S * 5}</p>"),
    "paragraphs in one": page("<p><span>" + "<p>some</p>x " * 25_000),
    "kinds": page(f"<p>{S * 5}</p><script type='application/ld+json'>DiscussionForumPosting" + '"@type":[' * 50_000),
    # what a parser, or resiliparse, looks at again at every level
    "links far down": page("<div>" * 240 + "<a href=/x>l</a> " * 15_000),
    "19,900 levels": page("<div>w " * 19_900 + S),
    "unclosed links": page("<a><div>" * 9_900 + S),
    "headings in headings": page("<h1><div>" * 120 + S * 4_750),
}


#: found to be a danger here; the rest is tried by `make slow`
WORST = {"images", "short paragraphs", "50,000 tags", "formulas", "spans", "tables in tables", "buttons"}


@pytest.mark.parametrize("bomb", [pytest.param(b, marks=() if b in WORST else pytest.mark.slow) for b in BOMBS])
@pytest.mark.parametrize("engine", NAMES)
def test_half_a_megabyte_takes_half_a_second(engine, bomb):
    assert len(BOMBS[bomb]) <= 525_000
    # the engines' own bounds: most of these pages are told by their number of nodes before they meet one
    stage = Html(engine=engine, format="markdown" if engine != "trafilatura" else "text", max_nodes=100_000)
    stage.process(Document("warm", raw=ARTICLE, mime="text/html"))
    doc = Document("id", raw=BOMBS[bomb], mime="text/html")
    # five times the promise: what has no bound takes far longer
    reason = assert_quick(lambda: stage.process(doc), 2.5)
    assert reason in (None, "html_too_deep", "no_text") and bool(doc.text) == (reason is None)
    assert len(doc.text) < 1_000_000, "indentation must not multiply the text"


def test_readability_gives_up_at_a_count():
    assert run(BOMBS["images"], engine="readability", max_nodes=100_000)[0] == "html_too_deep", "too many in a row"
    assert run(page("<div><img src=x></div>" * 9_000 + f"<p>{S * 5}</p>"), engine="readability")[0] == "html_too_deep"
    assert readability.work.remaining < 0
    reason, text = run(ARTICLE, engine="readability")
    assert reason is None and S.strip() in text and readability.work.remaining > readability.MOST - 1000
    text = run(BOMBS["images"], engine="trafilatura", max_nodes=100_000)[1]
    assert S.strip() in text, "it goes without the second opinion"


@pytest.mark.parametrize("form", ["text", "markdown"])
@pytest.mark.parametrize("engine", NAMES)
def test_a_reference_of_five_thousand_digits_is_none(engine, form):
    """Found by fuzzing: Python refuses to read the number, and the page was quarantined."""
    odd = f"&#{'9' * 5000}; &amp;#{'9' * 5000}; "
    told = f'<script type="application/ld+json">{{"articleBody": "{odd}{S * 3}"}}</script>'
    for raw in (page(f"<article><p>{odd}{S * 9}</p><p>{S * 9}</p></article>"), page(f"<p>{odd}", told)):
        reason, text = run(raw, engine=engine, format=form)
        assert reason in (None, "no_text") and bool(text) == (reason is None)


# -- what the engines say --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["text", "markdown"])
@pytest.mark.parametrize("engine", NAMES)
def test_article_without_its_surroundings(engine, form):
    reason, text = run(ARTICLE, engine=engine, format=form)
    assert reason is None and text.count(S.strip()) == 16 and text == text.strip()
    assert "Menu" not in text and "Imprint" not in text
    assert ("# A heading" in text.split("\n")) == (form == "markdown")


def test_justext_is_the_packages():
    """The same paragraphs with the same classes, as the package finds them in English pages."""
    english = frozenset(package.get_stoplist("English"))
    compared = 0
    for raw in [*synthetic(30), ARTICLE]:
        text = raw.decode()
        theirs = package.justext(text, english)
        tree = preprocessor(html_to_dom(text))
        ours = justext.make_paragraphs(tree)
        justext.classify(ours, frozenset(w.lower() for w in english))
        justext.revise(ours)
        mine = [(p.text, p.class_type) for p in ours if not justext._UNSPACED.search(p.text)]
        assert mine == [(p.text, p.class_type) for p in theirs if not justext._UNSPACED.search(p.text)]
        compared += len(mine)
    assert compared > 100


def test_neighbours_decide_as_in_the_package():
    rng = random.Random(0)
    for _ in range(200):
        ours = [SimpleNamespace(cf_class=rng.choice(["good", "neargood", "short", "short", "bad", "bad"]),
                                class_type="", heading=rng.random() < 0.3, text="x" * rng.randrange(1, 120))
                for _ in range(rng.randrange(0, 25))]
        theirs = [SimpleNamespace(**vars(p)) for p in ours]
        justext.revise(ours, 150)
        revise_paragraph_classification(theirs, 150)
        assert [p.class_type for p in ours] == [p.class_type for p in theirs], ours


def test_language_is_that_of_most_stop_words():
    def language(text: str) -> str:
        p = justext.Paragraph()
        p.text = text
        return justext.language_of([p])

    assert language(S * 3) == "English" and language("") == "English"
    assert language("Der Hund und die Katze sind in dem Haus, weil es nicht mehr regnet und sie da sind.") == "German"
    assert language("Это было не так, как он и сам думал, но что же теперь с этим делать, если не ждать?") == "Russian"


# -- vectors ---------------------------------------------------------------------------------------------------------
GOLDEN = Path(__file__).with_name("html_engines.json")
LIBRARIES = tuple(sorted({name for engine in ENGINES for name in Html(engine=engine).libraries}))


def test_engines_say_what_they_said(here):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if golden["libraries"] != library_versions(LIBRARIES):
        pytest.skip(f"the vectors are of {golden['libraries']}")
    assert {k for k, v in here.items() if golden["vectors"].get(k) != v} == set(), "bump the version, --write them"


def test_key_carries_engine_and_format():
    keys = {Html(engine=e, format=f).key() for e in NAMES for f in ("text", "markdown")}
    assert len(keys) == 2 * len(NAMES) and Html().key() == Html(engine="mill", format="text").key()


if __name__ == "__main__" and "--write" in sys.argv:
    made = {"libraries": library_versions(LIBRARIES), "vectors": answers()}
    GOLDEN.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
