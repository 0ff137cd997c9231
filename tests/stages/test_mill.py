"""The HTML engine `mill` with its trained weights: what it chooses, and that it always chooses the same."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest

from benchmarks.mill_gold import features_digest
from stages.document import Document
from stages.extract.html.mill import choice, columns, forest
from stages.extract.html.mill import features as f
from stages.extract.html.mill.engine import ARRAYS, SIGNAL, Mill, MillWeights
from stages.extract.html.mill.page import serialised, walk
from stages.extract.html.mill.render import render
from stages.extract.html.step import Html
from tests.conftest import shared_data

STORY = (
    "The committee met on Tuesday to consider the plans for the new harbour, which have divided the town for years. "
    "Fishermen fear for their moorings, while the council hopes for ferries, visitors and a longer season."
)
PAGE = f"""<html><head><title>A harbour for the town - The Daily Post</title></head><body>
<header class="site-header"><nav class="main-nav"><ul><li><a href="/">Home</a></li><li><a href="/n">News</a></li>
<li><a href="/s">Sport</a></li></ul></nav></header>
<main><article class="post-content entry"><h1>A harbour for the town</h1>
{"".join(f"<p>{n}. {STORY}</p>" for n in range(6))}
<ul><li>Cost: about 4 million, over six years.</li><li>Begin: next spring, if the plans pass.</li></ul></article></main>
<aside class="sidebar related-posts"><h3>Related</h3><a href="/1">Ten beaches</a> <a href="/2">Best boats</a></aside>
<footer class="site-footer"><p>© 2024 The Daily Post. <a href="/p">Privacy</a> <a href="/t">Terms</a></p></footer>
</body></html>"""


@pytest.fixture(scope="module")
def engine() -> Mill:
    return Mill()


def test_an_article_without_what_surrounds_it(engine: Mill) -> None:
    text = engine.text(PAGE)
    assert text is not None
    lines = text.split("\n")
    assert [line[0] for line in lines if STORY[:20] in line] == list("012345")
    assert "- Cost: about 4 million, over six years." in lines
    assert not any(word in text for word in ("Sport", "Privacy", "Best boats"))
    assert engine.markdown(PAGE).split("\n\n")[-1].startswith("- Cost: ")


def test_settings_it_knows_and_those_it_refuses() -> None:
    rows = "".join(f"<tr><td>row {n}</td><td>Of the year {n}, {n}, {n}.</td></tr>" for n in range(1990, 1996))
    page = PAGE.replace("</article>", f"<table>{rows}</table></article>")
    for tables in (True, False):
        doc = Document("1", raw=page.encode(), mime="text/html")
        assert Html(tables=tables).process(doc) is None and STORY in doc.text
        assert ("row 1993 | Of the year 1993" in doc.text) is tables
    with pytest.raises(ValueError, match="fast: the engine 'mill' does not know this setting; name one that"):
        Html(fast=True)
    Html(engine="trafilatura", fast=True)


def arranged(markup: str, chances: list[int], **settings: object) -> tuple[str, int]:
    """Return the text that is chosen from a page whose blocks have these probabilities (in thousandths), and its
    expected F1."""
    page = walk(serialised(markup))
    assert page is not None
    rows = np.empty((len(page.blocks), f.FEATURES), np.int32)
    f.describe(page.elements, len(page.elements), page.blocks, len(page.blocks), page.text, rows)
    chosen, expected = choice.select(page, np.array(chances, np.int32), np.arange(1001)[None], **settings)
    return render(page, chosen), expected


def test_favor_weighs_precision_against_recall() -> None:
    markup = "".join(f"<p>Paragraph {n} of ten {'words ' * 6}</p>" for n in range(4))
    kept = {favor: arranged(markup, [950, 700, 420, 200], favor=favor)[0].count("\n") + 1
            for favor in ("precision", "balanced", "recall")}
    assert kept == {"precision": 2, "balanced": 3, "recall": 4}


def test_the_headline_stands_above_the_text() -> None:
    story = ("<title>A harbour for the town - The Post</title><h1>The Post</h1><h1>A harbour for the town</h1>"
             f"<p>{STORY}")
    assert arranged(story, [0, 0, 0, 990])[0] == f"A harbour for the town\n{STORY}"
    assert arranged(story + "<h2>A harbour for the town</h2>", [0, 0, 0, 990, 0])[0].count("harbour for") == 1
    assert arranged(story + "<h2>A harbour for the town</h2>", [0, 0, 0, 990, 990])[0].startswith("The committee")
    assert arranged(story, [0, 0, 0, 0]) == ("", 0), "a headline alone is no text"
    untitled = story.replace("<title>A harbour for the town - The Post", "<title>T")
    assert arranged(untitled, [0, 0, 0, 990])[0].startswith("A harbour for the town"), "no heading is as the title"


def test_comments_of_readers() -> None:
    """They go below a text even where the model would keep them, stay when asked for, and are the text of a forum."""
    page = (f"<p>{STORY}<div id=comments><p>By Anna <p>I have fished there since 1970, and nobody asked me."
            "<p><a href=x>Reply to this comment of Anna's in the forum</a><form><p>Write what you think of it</form>")
    chances = [990, 700, 700, 700, 0]
    assert arranged(page, chances)[0] == STORY
    assert arranged(page, [990, 0, 0, 0, 0], comments=True)[0] == (
        f"{STORY}\nI have fished there since 1970, and nobody asked me.")
    assert arranged(page.replace(STORY, "Harbour"), chances)[0].count("since 1970") == 1
    below = PAGE.replace("</main>", "</main><ol class=comment-list><li><p>I have fished there since 1970, and nobody "
                         "asked me.</ol>")
    for keep in (True, False):
        doc = Document("1", raw=below.encode(), mime="text/html")
        assert Html(comments=keep).process(doc) is None and STORY in doc.text
        assert ("since 1970" in doc.text) is keep


@pytest.mark.parametrize(("high", "low", "alone", "together"), [(980, 100, 4, 4), (800, 300, 4, 8), (700, 250, 4, 8)])
def test_what_a_block_must_have_depends_on_the_page(high: int, low: int, alone: int, together: int) -> None:
    """Four blocks of one chance and four of another: where the page is uncertain, shifts of all chances keep more."""
    chances = np.arange(1001)
    log_odds = np.log((chances + 0.5) / (1000.5 - chances))
    shifts = np.round(1000 / (1 + np.exp(-log_odds - np.array([[-2.9], [-1.2], [0.0], [1.2], [2.9]])))).astype(np.int64)
    blocks = np.zeros((8, columns.BLOCK_COLUMNS), np.int32)
    blocks[:, columns.B_WORDS] = 50
    page = np.array([high] * 4 + [low] * 4)
    assert choice.choose(blocks, page, chances[None])[0].sum() == alone
    assert choice.choose(blocks, page, shifts)[0].sum() == together


@pytest.mark.parametrize("n", [200, 1000, 6000])
def test_a_book_is_kept_to_its_end(engine: Mill, n: int) -> None:
    book = "".join(f"<p>{k}: {STORY}</p>" for k in range(n))
    for body in (book, f"<article class=content>{book}</article>"):
        title = "The book of harbours"
        text = engine.text(f"<title>{title}</title><nav><a href=/>Home</a></nav><h1>{title}</h1>{body}")
        assert text is not None and text.startswith(f"{title}\n0: {STORY}") and text.endswith(f"{n - 1}: {STORY}")
        assert text.count(STORY) == n


def test_its_expected_f1_is_a_signal_of_the_document() -> None:
    sure, unsure = (Document("1", raw=p.encode(), mime="text/html") for p in (PAGE, "<p>ok<p>Next, last."))
    stage = Html()
    stage.process(sure)
    stage.process(unsure)
    assert 0.85 < sure.signals[SIGNAL] <= 1 and unsure.signals.get(SIGNAL, 0) < sure.signals[SIGNAL]
    assert SIGNAL in stage.signals and SIGNAL not in Html(engine="resiliparse").signals
    other = Document("3", raw=PAGE.encode(), mime="text/html")
    assert Html(engine="resiliparse").process(other) is None and SIGNAL not in other.signals


def test_no_document_pays_for_compiling() -> None:
    """All kernels are compiled before: by `warm` of the stage."""
    code = (
        "from stages.extract.html.step import Html\nfrom pipeline.base import compiled\n"
        "stage = Html(engine='mill')\nstage.setup()\nstage.warm()\n"
        "print(sorted(f.__name__ for f, k in compiled._compiled.items() if '.mill.' in f.__module__ and k.signatures), "
        "any('.mill.' in m for m in compiled._waiting))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for entry in ("scan", "describe", "scores", "second_features", "_places"):
        assert f"'{entry}'" in said
    assert said.endswith("False\n")


@pytest.mark.parametrize("page", ["", "\0", "<p>", "<html></html>", "<script>x</script>", "<title>only</title>"])
def test_pages_without_text(engine: Mill, page: str) -> None:
    assert engine.text(page) == "" == engine.markdown(page)


def test_the_stage_takes_it() -> None:
    doc = Document("1", raw=PAGE.encode(), mime="text/html")
    stage = Html(engine="mill")
    assert stage.process(doc) is None and STORY in doc.text and doc.meta["title"].startswith("A harbour")
    assert stage.process(Document("2", raw=b"<p>" + b"<div>" * 300 + b"x", mime="text/html")) == "html_too_deep"


def test_weights_are_integers_without_code() -> None:
    file = resources.files("stages.extract.html.mill") / "weights.npz"
    with file.open("rb") as opened:
        arrays = dict(np.load(opened, allow_pickle=False))
    assert all(values.dtype.kind in "iu" for values in arrays.values())
    assert len(file.read_bytes()) < 1_000_000
    assert (arrays["token"] > 0).all() and len(np.unique(arrays["token"])) == len(arrays["token"])


def test_weights_were_trained_on_the_features_of_this_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes what the model is shown trains it anew: `python -m benchmarks.train_mill`."""
    with (resources.files("stages.extract.html.mill") / "weights.npz").open("rb") as file:
        trained = dict(np.load(file, allow_pickle=False))["features"].tobytes()
    assert features_digest() == trained, "weights.npz is of other features: train it anew (benchmarks/train_mill.py)"
    describe = f.describe

    def other(*arguments: np.ndarray) -> None:
        describe(*arguments)
        arguments[-1][:, f.NAMES.index("stops")] += 1

    monkeypatch.setattr(f, "describe", other)
    assert features_digest() != trained


def test_weights_of_other_features_are_refused() -> None:
    with (resources.files("stages.extract.html.mill") / "weights.npz").open("rb") as file:
        arrays = dict(np.load(file, allow_pickle=False))
    arrays["second_feature"] = arrays["second_feature"] + f.FEATURES
    with pytest.raises(ValueError, match="train them anew"):
        MillWeights(arrays)


def test_trees_say_what_a_plain_walk_says(engine: Mill) -> None:
    rng = np.random.default_rng(4)
    rows = rng.integers(-50, 1200, (40, f.FEATURES)).astype(np.int32)
    trees = dict(zip(ARRAYS, engine.model.forests[0]))
    out = np.empty(len(rows), np.int32)
    forest.scores(rows, *engine.model.forests[0], engine.model.odds, out)
    for row, said in zip(rows, out):
        total = 0
        for node in trees["roots"].tolist():
            while node >= 0:
                goes = row[trees["feature"][node]] <= trees["threshold"][node]
                node = int(trees["left" if goes else "right"][node])
            total += int(trees["leaf"][-1 - node])
        at = (max(-forest.REACH, min(forest.REACH, total)) + forest.REACH) // forest.STEP
        assert said == engine.model.odds[at]


DIGEST = """
import hashlib, json, sys
from stages.extract.html.mill.engine import Mill
engine = Mill()
print([hashlib.sha256(engine.text(page).encode()).hexdigest() for page in json.load(sys.stdin)])
"""


def test_same_page_same_text_in_any_process_and_order(engine: Mill) -> None:
    files = sorted(shared_data("html", "wcxb-dev", "html").glob("*"))[:40:2]
    pages = [gzip.decompress(p.read_bytes()).decode("utf-8", "replace") for p in files]
    here = [hashlib.sha256((engine.text(page) or "").encode()).hexdigest() for page in pages]
    there = subprocess.run(
        [sys.executable, "-c", DIGEST],
        input=json.dumps(pages[::-1]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert there.stdout.strip() == str(here[::-1])
