"""The extraction engine `justext`, which runs the algorithm jusText (J. Pomikálek, Removing Boilerplate and Duplicate
Content from Web Corpora, 2011) in time linear in the length of a page.

A page is cut into paragraphs at block elements. The length of a paragraph, its share of text in links and its share of
stop words make it good, bad or undecided. The class of an undecided paragraph follows from its neighbours. The
thresholds are the paper's.

The package jusText must be told the language of a page. Here the language is the one whose stop words occur most often
on the page; of several languages with equal counts, the first in alphabetical order is chosen. In a script that does
not separate words, a paragraph counts as full of stop words, so that only its length and its links decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from justext.core import PARAGRAPH_TAGS
from justext.utils import get_stoplist, get_stoplists
from lxml import etree

from stages.extract.html import private
from stages.extract.html.markdown import write

LENGTH_LOW, LENGTH_HIGH = 70, 200
STOPWORDS_LOW, STOPWORDS_HIGH = 0.30, 0.32
LINK_DENSITY = 0.2
HEADING_DISTANCE = 200
#: elements that the package's preprocessor removes with their content
_REMOVED = ("head", "script", "style", "noscript", "iframe", "embed", "layer", "object", "param", "button", "input",
            "select", "textarea", "template", "svg", etree.Comment, etree.ProcessingInstruction)
#: words of a page that are used to find its language
_WORDS = 20_000
_WHITESPACE = re.compile(r"\s+")
#: Thai, Lao, Burmese, Khmer; kana, Chinese characters
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
                       "\U00020000-\U0003ffff]")


class Paragraph:
    """A stretch of text between block elements. `nodes` lists the places of the pieces of its text in the lxml tree:
    (element, True if the piece is the element's tail, False if it is the element's text)."""

    __slots__ = ("cf_class", "class_type", "heading", "in_links", "nodes", "pieces", "text")

    def __init__(self, heading: bool = False) -> None:
        self.pieces: list[str] = []
        self.nodes: list[tuple[Any, bool]] = []
        self.in_links = 0
        self.heading = heading
        self.text = self.cf_class = self.class_type = ""


def make_paragraphs(root: Any) -> list[Paragraph]:
    """Returns the paragraphs of a page, given as an lxml tree, in their order. A paragraph ends at a block element and
    at two line breaks in a row, as in the package jusText."""
    paragraphs: list[Paragraph] = []
    current = Paragraph()
    links = headings = 0
    br = False

    def start_paragraph() -> None:
        nonlocal current
        if current.pieces:
            current.text = _WHITESPACE.sub(" ", "".join(current.pieces)).strip()
            paragraphs.append(current)
        current = Paragraph(headings > 0)

    def characters(text: str, element: Any, tail: bool) -> None:
        nonlocal br
        if text.isspace():
            return
        text = _WHITESPACE.sub(" ", text)
        current.pieces.append(text)
        current.nodes.append((element, tail))
        if links:
            current.in_links += len(text)
        br = False

    for event, element in etree.iterwalk(root, events=("start", "end")):
        name = element.tag
        heading = len(name) == 2 and name[0] == "h" and name[1] in "123456"
        if event == "start":
            headings += heading
            if name in PARAGRAPH_TAGS or (name == "br" and br):
                start_paragraph()
            else:
                br = name == "br"
                if br:
                    current.pieces.append(" ")
                links += name == "a"
            if element.text:
                characters(element.text, element, False)
            continue
        headings -= heading
        if name in PARAGRAPH_TAGS:
            start_paragraph()
        links -= name == "a"
        if element.tail:
            characters(element.tail, element, True)
    start_paragraph()
    return [p for p in paragraphs if p.text]


@cache
def stop_words() -> dict[str, tuple[str, ...]]:
    """Returns {word: sorted names of the languages whose lists of stop words contain this word}."""
    result: dict[str, list[str]] = {}
    for language in sorted(get_stoplists()):
        for word in sorted({w.lower() for w in get_stoplist(language)}):
            result.setdefault(word, []).append(language)
    return {word: tuple(languages) for word, languages in result.items()}


@cache
def _stoplist(language: str) -> frozenset[str]:
    return frozenset(word.lower() for word in get_stoplist(language))


def language_of(paragraphs: Sequence[Paragraph]) -> str:
    """Returns the name of the language whose stop words occur most often in the paragraphs, 'English' when no stop word
    occurs. Only the first 20,000 words are read. Of several languages with equal counts, the first in alphabetical
    order is returned."""
    table, remaining = stop_words(), _WORDS
    result: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for p in paragraphs:
        page_words = p.text.lower().split()[:remaining]
        words.update(page_words)
        remaining -= len(page_words)
        if remaining <= 0:
            break
    for word, n in words.items():
        for language in table.get(word, ()):
            result[language] += n
    return min(result, key=lambda language: (-result[language], language), default="English")


def classify(paragraphs: Sequence[Paragraph], stoplist: frozenset[str]) -> None:
    """Sets the context-free class (`cf_class`) of each paragraph: good, neargood, short or bad, judged from its own
    text alone. `stoplist` holds the stop words of the page's language."""
    for p in paragraphs:
        text, length = p.text, len(p.text)
        if p.in_links / length > LINK_DENSITY or "\xa9" in text or "&copy" in text:
            p.cf_class = "bad"
        elif length < LENGTH_LOW:
            p.cf_class = "bad" if p.in_links else "short"
        else:
            words = text.split()
            density = sum(word.lower() in stoplist for word in words) / len(words)
            if density < STOPWORDS_HIGH and 3 * len(_UNSPACED.findall(text)) > length:
                density = 1.0
            if density >= STOPWORDS_HIGH:
                p.cf_class = "good" if length > LENGTH_HIGH else "neargood"
            else:
                p.cf_class = "neargood" if density >= STOPWORDS_LOW else "bad"


def revise(paragraphs: Sequence[Any], distance: int = HEADING_DISTANCE) -> None:
    """Sets the final class of each paragraph (`class_type`: good or bad) from its own class (`cf_class`) and the
    classes of its neighbours. `distance` is the most characters between a heading and the good paragraph that makes the
    heading good.

    The result is that of `justext.core.revise_paragraph_classification`. This function takes one walk in each
    direction, whereas the package searches the neighbours of every paragraph separately, which takes minutes for 50,000
    short paragraphs.
    """
    for p in paragraphs:
        p.class_type = p.cf_class
    # The package's first step, for headings, is left out: it reads classes that are not set yet, and so changes none.
    # Short paragraphs are decided by the paragraphs at both ends of the undecided block around them.
    classes = [p.class_type for p in paragraphs]
    before = _neighbours(classes)
    after = [*reversed(_neighbours(classes[::-1]))]
    for i, p in enumerate(paragraphs):
        if p.class_type == "short":
            (left, near_left), (right, near_right) = before[i], after[i]
            if left == right:
                p.class_type = left
            else:
                near = near_left if left == "bad" else near_right
                p.class_type = "good" if near == "neargood" else "bad"
    # A near-good paragraph becomes bad only if the nearest paragraphs before and after it are bad. Near-good paragraphs
    # before it are already decided; those after it are skipped.
    following, last = ["bad"] * len(paragraphs), "bad"
    for i in range(len(paragraphs) - 1, -1, -1):
        following[i] = last
        if paragraphs[i].class_type != "neargood":
            last = paragraphs[i].class_type
    last = "bad"
    for i, p in enumerate(paragraphs):
        if p.class_type == "neargood":
            p.class_type = "bad" if last == following[i] == "bad" else "good"
        last = p.class_type
    for i, p in enumerate(paragraphs):
        if p.heading and p.class_type == "bad" and p.cf_class != "bad" and _good_follows(paragraphs, i, distance):
            p.class_type = "good"


def _good_follows(paragraphs: Sequence[Any], i: int, distance: int) -> bool:
    """Whether a good paragraph follows paragraph `i` with at most `distance` characters of other paragraphs between the
    two."""
    characters = 0
    for p in paragraphs[i + 1:i + 2 + distance]:             # each has at least one character
        if characters > distance:
            return False
        if p.class_type == "good":
            return True
        characters += len(p.text)
    return False


def _neighbours(classes: list[str]) -> list[tuple[str, str]]:
    """Returns, for each paragraph, two classes of earlier paragraphs: (the nearest that is good or bad; the nearest
    that is good, bad or near-good). A class is "bad" where there is no such paragraph."""
    out, decided, near = [], "bad", "bad"
    for c in classes:
        out.append((decided, near))
        if c != "short":
            near = c
            if c != "neargood":
                decided = c
    return out


class JusText:
    """The extraction engine `justext` of the step `html`. It keeps prose. It does not recognise tables or readers'
    comments."""

    def __init__(self, *, max_depth: int = 255, **_: Any) -> None:
        self.too_deep = etree.XPath("/*" * (max_depth + 1))

    def _classified(self, page: str) -> tuple[Any, list[Paragraph], list[Paragraph]] | None:
        """Returns (tree, all its paragraphs, the good ones); None when the elements of the page nest too deep."""
        tree = private.utils.load_html(page)
        if tree is None:
            return None, [], []
        if self.too_deep(tree):
            return None
        etree.strip_elements(tree, *_REMOVED, with_tail=False)
        paragraphs = make_paragraphs(tree)
        classify(paragraphs, _stoplist(language_of(paragraphs)))
        revise(paragraphs)
        return tree, paragraphs, [p for p in paragraphs if p.class_type == "good"]

    def text(self, page: str) -> str | None:
        classified = self._classified(page)
        return None if classified is None else "\n".join(p.text for p in classified[2])

    def markdown(self, page: str) -> str | None:
        classified = self._classified(page)
        if classified is None:
            return None
        tree, paragraphs, _ = classified
        for p in paragraphs:
            if p.class_type != "good":
                for element, tail in p.nodes:
                    if tail:
                        element.tail = None
                    else:
                        element.text = None
        return "" if tree is None else write(tree)
