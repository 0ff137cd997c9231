"""The engine gives exactly the text of the package trafilatura, which runs in a process of its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from lxml import etree
from lxml.html import document_fromstring

from stages.extract.html import private, xpath_rules
from stages.extract.html.private import settings, xpaths
from stages.extract.html.step import Html
from stages.extract.html.trafilatura import Trafilatura
from stages.text.encoding import decode
from tests.stages.texts import crawled_pages

PLAIN = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from trafilatura import extract
pages, modes = json.load(open(sys.argv[1]))
for favor, fast, comments in modes:
    for page in pages:
        text = extract(page, fast=fast, favor_precision=favor == "precision", favor_recall=favor == "recall",
                       include_comments=comments)
        print(json.dumps(text or ""))
"""
MODES = [("balanced", False, False), ("balanced", True, False), ("precision", False, False), ("recall", True, True)]


def compare(pages: list[str], tmp_path, modes=MODES) -> int:
    (tmp_path / "pages.json").write_text(json.dumps([pages, modes]))
    plain = subprocess.run([sys.executable, "-c", PLAIN, str(tmp_path / "pages.json")], capture_output=True, text=True,
                           check=True).stdout.splitlines()
    ours = []
    for favor, fast, comments in modes:
        engine = Trafilatura(favor=favor, fast=fast, comments=comments)
        ours += [engine.text(page) for page in pages]
    assert len(plain) == len(ours)
    for n, (expected, found) in enumerate(zip(plain, ours)):
        assert found == json.loads(expected), f"page {n % len(pages)} in mode {modes[n // len(pages)]}"
    return sum(map(bool, ours))


def crawled(every: int = 1) -> list[str]:
    return [decode(doc.raw, doc.charset)[0] for doc in crawled_pages()[::every]]


def test_rules_are_in_place():
    assert xpath_rules.install(), "trafilatura has changed: derive the rules anew or the pages cost twice the time"
    assert xpath_rules.install(), "installing twice is harmless"


def test_equal_output_on_a_sample_of_real_pages(tmp_path):
    assert compare(crawled(5), tmp_path) > 100


@pytest.mark.slow
def test_equal_output_on_real_pages(tmp_path):
    assert compare(crawled(), tmp_path, MODES[:2]) > 280


VOCABULARY = """article post-content entry-content story main-content Content content sidebar comment-list Comments
cookie-banner reply-3 hidden hide-print teaser Teaser caption share-bar nav mvp-post-add-box infinite-scroll menu
elementor-share-buttons footer author fulltext page-content main post text cell primary ad- commentary related"""
WORDS = VOCABULARY.split()
TAGS = ["div", "section", "article", "main", "p", "span", "ul", "aside", "details", "ol", "footer"]
EXTRAS = ["", "<h1>Head</h1>", "<a href=/x>link</a>", "<br><br>text", "<select><option>o</select>"]


def made_up_page(rng: random.Random) -> str:
    """Return a page with random ids, classes, roles and styles from the vocabulary of the rules."""
    parts = []
    for _ in range(rng.randrange(3, 25)):
        word = (rng.choice((*WORDS, " ad ", "")) for _ in range(9)).__next__
        attributes = [f'{rng.choice(["id", "class"])}="{word()} {word()}"', f'class="{word()}"', f'id="{word()}"',
                      f'role="{word()}"', f'style="{rng.choice(["display:none", "color:red", "x-hidden"])}"',
                      'aria-hidden="true"', 'itemprop="articleBody"', 'data-component="MostPopularStories"',
                      "data-lp-replacement-content"]
        chosen = " ".join(rng.sample(attributes, rng.choice((0, 1, 1, 2, 3))))
        text = "".join(f"<p>Sentence {rng.randrange(99)} of a page, with a comma. </p>" * rng.randrange(4)
                       + rng.choice(EXTRAS) for _ in range(rng.randrange(4)))
        tag = rng.choice(TAGS)
        parts.append(f"<{tag} {chosen}>{text}" + (f"</{tag}>tail" if rng.random() < 0.7 else ""))
    return f"<html><head><title>t</title></head><body>{''.join(parts)}</body></html>"


def test_equal_output_on_made_up_pages(tmp_path):
    rng = random.Random(0)
    assert compare([made_up_page(rng) for _ in range(60)], tmp_path) > 100


def test_rules_against_the_expressions_they_stand_for():
    """The cleaning rule against its XPath, evaluated by lxml: same elements in the same order."""
    rule = xpath_rules._basic()
    assert isinstance(settings.BASIC_CLEAN_XPATH, etree.XPath)
    for page in crawled(10):
        tree = document_fromstring(page.encode())
        assert rule(tree) == settings.BASIC_CLEAN_XPATH(tree)


@pytest.mark.parametrize("change", ["version", "expressions"])
def test_another_trafilatura_is_left_alone(monkeypatch, change):
    monkeypatch.setattr(xpaths, "BODY_XPATH", [etree.XPath(".//p")])
    expected = xpath_rules.FINGERPRINT
    if change == "version":
        monkeypatch.setattr(private, "version", "9.9.9")
        expected = xpath_rules.fingerprint()
    assert xpath_rules.install(expected) is False
    assert isinstance(xpaths.BODY_XPATH[0], etree.XPath)


def test_memory_of_a_rule_is_bounded():
    memo = xpath_rules.Memo(len)
    for n in range(xpath_rules.MEMO + 5):
        assert memo[str(n)] == len(str(n))
    assert len(memo) == 5


def test_long_values_are_not_remembered():
    """The bound is in entries: without it, a hundred thousand attributes of a megabyte each would stay."""
    memo = xpath_rules.Memo(len)
    assert [memo["x" * n] for n in (256, 257, 10**6, 257)] == [256, 257, 10**6, 257]
    assert list(memo) == ["x" * 256]


def test_the_package_itself_is_untouched():
    """Everybody else in the process, a datatrove block for one, gets trafilatura as its authors wrote it."""
    import trafilatura
    from trafilatura import core, external, utils
    from trafilatura import xpaths as theirs

    Trafilatura().text(made_up_page(random.Random(0)))
    assert trafilatura is not private and isinstance(theirs.BODY_XPATH[0], etree.XPath)
    assert not hasattr(core, "Exception") and external.try_justext.__module__ == "trafilatura.external"
    assert external.ReadabilityDocument.__module__ == "trafilatura.readability_lxml"
    assert type(utils.INVALID_XML_CHARS) is type(xpath_rules._InvalidChars(utils.INVALID_XML_CHARS).pattern)


def test_a_recipe_hears_that_another_trafilatura_is_slower(monkeypatch):
    assert Html(engine="trafilatura").warnings() == []
    monkeypatch.setattr("stages.extract.html.step.metadata.version", lambda name: "2.4.0")
    assert "trafilatura==2.3.1" in Html(engine="trafilatura").warnings()[0]
    assert Html().warnings() == []
