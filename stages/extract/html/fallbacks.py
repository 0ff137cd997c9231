"""Holds faster versions of readability and justext, with the same results. These are trafilatura's fallback extractors:
trafilatura compares their results with its own, and returns the better one.

readability runs only on pages where trafilatura could prefer readability's result. justext reads the tree itself
instead of SAX events. `stages.extract.html.xpath_rules` installs both, for the only version of trafilatura that it
supports.
"""

from __future__ import annotations

import re
from copy import copy
from typing import Any

from justext.core import PARAGRAPH_TAGS
from lxml import etree
from lxml.html import HtmlElement

from stages.extract.html.justext import revise
from stages.extract.html.private import core, external, utils

# -- justext ---------------------------------------------------------------------------------------------------------
_WHITESPACE = re.compile(r"\s{2,}|[^\S ]")


def _normalize(text: str) -> str:
    """Normalises white space with the same result as justext's function normalize_whitespace. It is faster, because it
    leaves single spaces alone instead of replacing each by itself."""
    return _WHITESPACE.sub(lambda m: "\n" if "\n" in m[0] or "\r" in m[0] else " ", text)


class _Paragraph:
    __slots__ = ("cf_class", "class_type", "heading", "in_links", "in_select", "nodes", "text")

    def __init__(self, in_select: bool) -> None:
        self.nodes: list[str] = []
        self.in_links, self.in_select = 0, in_select
        self.text = self.cf_class = self.class_type = ""
        self.heading = False

    @property
    def is_boilerplate(self) -> bool:
        return self.class_type != "good"


def make_paragraphs(root: Any) -> list[_Paragraph]:
    """Cuts a page into the same paragraphs as justext's class ParagraphMaker. It is faster, because it reads the tree
    without SAX events and builds no XPath string for each paragraph."""
    paragraphs: list[_Paragraph] = []
    current = _Paragraph(False)
    link = br = False
    selects = 0

    def start_paragraph() -> None:
        nonlocal current
        if current.nodes:
            current.text = _normalize("".join(current.nodes).strip())
            paragraphs.append(current)
        current = _Paragraph(selects > 0)

    def characters(text: str) -> None:
        nonlocal br
        if text.isspace():
            return
        text = _normalize(text)
        current.nodes.append(text)
        if link:
            current.in_links += len(text)
        br = False

    for event, element in etree.iterwalk(root, events=("start", "end", "comment", "pi")):
        if event == "start":
            name = element.tag.rpartition("}")[2]
            selects += "select" in name
            if name in PARAGRAPH_TAGS or (name == "br" and br):
                start_paragraph()
            else:
                br = name == "br"
                if br:
                    current.nodes.append(" ")
                elif name == "a":
                    link = True
            if element.text:
                characters(element.text)
            continue
        if event == "end":
            name = element.tag.rpartition("}")[2]
            selects -= "select" in name
            if name in PARAGRAPH_TAGS:
                start_paragraph()
            if name == "a":
                link = False
        if element.tail:
            characters(element.tail)
    start_paragraph()
    return paragraphs


def classify(paragraphs: list[_Paragraph], stoplist: frozenset[str]) -> None:
    """Sets the context-free class (`cf_class`) of each paragraph: good, neargood, short or bad, judged from its own
    text alone. The result is that of justext with the thresholds that trafilatura sets. Stop words are counted only
    where the class depends on them, because counting is slow."""
    for p in paragraphs:
        text = p.text
        length = len(text)
        if (p.in_links / length if length else 0) > 0.25 or "\xa9" in text or "&copy" in text or p.in_select:
            p.cf_class = "bad"
        elif length < 50:
            p.cf_class = "bad" if p.in_links > 0 else "short"
        else:
            words = text.split()
            density = sum(word.lower() in stoplist for word in words) / len(words) if words else 0
            if density >= 0.2:
                p.cf_class = "good" if length > 150 else "neargood"
            else:
                p.cf_class = "neargood" if density >= 0.1 else "bad"


_stoplist: frozenset[str] = frozenset()


def try_justext(tree: Any, url: str | None, target_language: str | None) -> etree._Element:
    """Replaces the function trafilatura.external.try_justext. Returns a <body> with the paragraphs of the tree that
    justext classifies as good. If a language is given, the original function is called."""
    global _stoplist
    if target_language is not None:
        return _try_justext(tree, url, target_language)
    if not _stoplist:
        _stoplist = frozenset(word.lower() for word in external.JT_STOPLIST or external.jt_stoplist_init())
    body = etree.Element("body")
    paragraphs = make_paragraphs(tree)
    classify(paragraphs, _stoplist)
    revise(paragraphs, 150)
    for p in paragraphs:
        if not p.is_boilerplate:
            etree.SubElement(body, "p").text = p.text
    return body


_try_justext = external.try_justext


# -- readability -----------------------------------------------------------------------------------------------------
#: readability writes XML, which is then parsed as HTML. An HTML parser then reads the markup after an empty element of
#: these as text inside the element.
_RAW_TEXT = ("title", "textarea", "iframe", "xmp", "noembed", "noframes", "plaintext", "noscript")


def longest_summary(tree: Any) -> int | None:
    """Returns an upper bound for the length of the text that readability can extract from a tree; None when no bound is
    known.

    readability extracts parts of the page, so its text is at most as long as the text of the page without scripts and
    styles. Only for a frame with a video it adds a word, "VIDEO", so the bound adds this word for every frame.

    No bound is known if the tree holds an empty element such as <title>. readability writes it as `<title/>`, and an
    HTML parser then takes the markup after it for text.
    """
    extra = 0
    for element in tree.iter(*_RAW_TEXT):
        if element.tag == "iframe":
            extra += len("VIDEO")
        elif element.tag != "noscript" and element.tag != "textarea" and not element.text:
            return None
    hidden = sum(len(utils.trim(e.text_content())) for e in tree.iter("script", "style", "fencedframe"))
    return len(" ".join(tree.text_content().split())) - hidden + extra


def cannot_win(tree: Any, body: Any, text: str, options: Any) -> bool:
    """Whether trafilatura would reject every text that readability can extract from this tree, so that readability need
    not run. The function tests the conditions of trafilatura's `_prefer_readability` for the longest possible text.
    `body` and `text` are trafilatura's own result."""
    if options.focus != "balanced" or not text:
        return False
    longest = longest_summary(tree)
    return longest is not None and longest <= 2 * len(text) and (
        longest <= 2 * options.min_extracted_size
        or (bool(body.xpath(".//p//text()")) and len(body.findall(".//table")) <= len(body.findall(".//p"))))


def extract_and_compare(cleaned: Any, backup: Any, tree: Any, options: Any) -> tuple[Any, str]:
    """Replaces the function trafilatura.core._extract_and_compare, which extracts the main text and compares it with
    the results of the fallback extractors. The replacement runs the fallback extractor readability only on pages where
    trafilatura could choose its result."""
    body, text = core.extract_content(cleaned, options)
    if options.fast:
        return body, text
    if cannot_win(tree, body, text, options):
        return _compare_without_readability(backup, tree, body, text, options)
    return external.compare_extraction(backup, copy(tree), body, text, options)


def _compare_without_readability(backup: Any, tree: Any, body: Any, text: str, options: Any) -> tuple[Any, str]:
    """Runs trafilatura's function compare_extraction as if readability had extracted no text. compare_extraction then
    still tries justext if `text` is short, or if `body` holds elements that cleaning should have removed."""
    summary.skip = True
    try:
        return external.compare_extraction(backup, tree, body, text, options)
    finally:
        summary.skip = False


class _Summary:
    """Replaces the function trafilatura.external.try_readability. While `skip` is set, a call returns an empty element
    instead of readability's result."""

    def __init__(self) -> None:
        self.skip, self.original = False, external.try_readability

    def __call__(self, tree: Any) -> Any:
        return HtmlElement() if self.skip else self.original(tree)


summary = _Summary()
