"""Equal-output shortcuts for trafilatura 2.3.1: the same text from the same page, for about half of the CPU time.

Two thirds of trafilatura's time goes into evaluating XPath expressions whose `re:test(@class, …)` calls Python once for
every element, attribute and expression. Class and id values repeat all over a site, so here a rule is a function that
walks the elements once and remembers its answer by attribute value. What is remembered are values of pure functions of
one string (bounded, forgotten as a whole), so no page can influence another.

`install` changes nothing unless the installed trafilatura has exactly the expressions these rules were derived from:
a fingerprint of their text is compared. `tests/stages/test_extract_shortcuts.py` shows equal output on real pages.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import trafilatura
from justext.core import PARAGRAPH_TAGS, revise_paragraph_classification
from lxml import etree
from lxml.html import HtmlComment, HtmlElement, HtmlEntity, HtmlProcessingInstruction
from trafilatura import core, external, settings, utils, xpaths

baseline = importlib.import_module("trafilatura.baseline")     # the package has a function of that name
VERSION = "2.3.1"
#: blake2b of the expressions replaced here, in the order of `_replaced`
FINGERPRINT = "22a358864caaeadb08ba50561f961d36"
#: remembered values of one rule before they are forgotten
MEMO = 100_000


class Memo(dict):
    """Answers of a pure function of a string, by the string."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        super().__init__()
        self.function = function

    def __missing__(self, value: str) -> Any:
        if len(self) >= MEMO:
            self.clear()
        found = self[value] = self.function(value)
        return found


def _searcher(pattern: str, flags: int = 0) -> Memo:
    search = re.compile(pattern, flags).search
    return Memo(lambda value: search(value) is not None)


def _tests(path: str, subject: str) -> list[str]:
    """Patterns of the `re:test(subject, 'pattern'…)` calls in an expression, in order."""
    return re.findall(rf"re:test\({re.escape(subject)}, '([^']*)'", path)


def first_of(element: etree._Element, a: str, b: str) -> str:
    """XPath's string(@a|@b): the value of whichever stands first in the source."""
    for name in element.keys():  # noqa: SIM118 - an element is no dict
        if name in (a, b):
            return element.get(name)
    return ""


class Rule:
    """Stands in for an `etree.XPath`: called with a tree, gives the matching elements in document order."""

    def __init__(self, tags: tuple[str, ...], test: Callable[[Any], Any]) -> None:
        self.tags, self.test = tags, test

    def __call__(self, tree: Any) -> list[Any]:
        test = self.test
        return [element for element in tree.iterdescendants(*self.tags) if test(element)]


class First(Rule):
    """A rule of which only the first match is asked for."""

    def __call__(self, tree: Any) -> list[Any]:
        for element in tree.iterdescendants(*self.tags):
            if self.test(element):
                return [element]
        return []


# -- what is pruned ----------------------------------------------------------------------------------------------
_BLOCKS = ("div", "item", "list", "p", "section", "span")


def _overall() -> Rule:
    """OVERALL_DISCARD_XPATH, both expressions in one walk (the callers use their union, in any order)."""
    first, second = (x.path for x in xpaths.OVERALL_DISCARD_XPATH)
    block_id, block_class = (_searcher(_tests(first, s)[0]) for s in ("@id", "@class"))
    any_id, any_class = (_searcher(_tests(second, s)[0]) for s in ("@id", "@class"))
    blocks = frozenset(_BLOCKS)

    def test(e: Any) -> bool:
        get = e.get
        id_, class_, style = get("id"), get("class"), get("style")
        if class_ is not None and (any_class[class_] or class_ == "comments-title"):
            return True
        if id_ is not None and any_id[id_]:
            return True
        if style is not None and ("display:none" in style or "display: none" in style):
            return True
        if get("aria-hidden") == "true":
            return True
        if ((style is not None and "hidden" in style) or (id_ is not None and "hidden" in id_)) and \
                "hidden" in first_of(e, "id", "style"):
            return True
        if id_ is not None or class_ is not None:
            if first_of(e, "id", "class").startswith("reply-"):
                return True
            if e.tag not in blocks:
                return False
            if (id_ is not None and block_id[id_]) or (class_ is not None and block_class[class_]):
                return True
            if ((id_ is not None and "cookie" in id_) or (class_ is not None and "cookie" in class_)) and \
                    "cookie" in first_of(e, "id", "class"):
                return True
        elif e.tag not in blocks:
            return False
        role = get("role")
        if role is not None and "nav" in role.replace("N", "n"):
            return True
        return get("data-lp-replacement-content") is not None or "MostPopularStories" in get("data-component", "")

    return Rule(("*",), test)


def _raw_prune() -> Rule:
    """RAW_TREE_PRUNE_XPATH, both expressions (pruned one after the other; nested matches make no difference)."""
    path = xpaths.RAW_TREE_PRUNE_XPATH[0].path
    pattern, always = _tests(path, "@id")
    matches, wins = _searcher(pattern), _searcher(always)

    def test(e: Any) -> bool:
        id_, class_ = e.get("id"), e.get("class")
        if class_ is not None and "elementor-share-buttons" in class_:
            return True
        if (id_ is not None and matches[id_]) or (class_ is not None and matches[class_]):
            return ((id_ is not None and wins[id_]) or (class_ is not None and wins[class_])
                    or next(e.iterdescendants("h1"), None) is None)
        return False

    return Rule(("div", "section", "aside"), test)


def _comments_and_lists() -> Rule:
    """REMOVE_COMMENTS_AND_LISTS_XPATH."""
    path = xpaths.REMOVE_COMMENTS_AND_LISTS_XPATH[0].path
    anywhere, in_list = (_searcher(p) for p in _tests(path, "@id"))
    by_class = _searcher(_tests(path, "@class")[0])

    def test(e: Any) -> bool:
        class_ = e.get("class")
        if class_ is not None and by_class[class_]:
            return True
        id_ = e.get("id")
        return id_ is not None and anywhere[id_] and (in_list[id_] or e.tag not in ("ol", "ul"))

    return Rule(("div", "list", "section", "details", "ol", "ul"), test)


def _teaser() -> Rule:
    word = Memo(lambda value: "teaser" in value.replace("T", "t"))

    def test(e: Any) -> bool:
        id_, class_ = e.get("id"), e.get("class")
        return (class_ is not None and word[class_]) or (id_ is not None and word[id_])

    return Rule(_BLOCKS, test)


def _caption() -> Rule:
    def test(e: Any) -> bool:
        id_, class_ = e.get("id"), e.get("class")
        return (class_ is not None and "caption" in class_) or (id_ is not None and "caption" in id_)

    return Rule(_BLOCKS, test)


def _basic() -> Rule:
    """BASIC_CLEAN_XPATH."""
    path = settings.BASIC_CLEAN_XPATH.path
    consent = _searcher(_tests(path, "@class")[0], re.IGNORECASE)
    gone = frozenset(re.findall(r"\.//([a-z]+)(?=\|)", path))

    def test(e: Any) -> bool:
        if e.tag in gone:
            return True
        id_, class_ = e.get("id"), e.get("class")
        if (class_ is not None and consent[class_]) or (id_ is not None and consent[id_]):
            return True
        return e.tag == "div" and "footer" in first_of(e, "id", "class")

    return Rule(("*",), test)


# -- where the main text is ----------------------------------------------------------------------------------------
_FRAMES = ("article", "div", "main", "section")


def _frame(index: int, exact: dict[str, frozenset[str]], *, ignoring_case: str = "",
           more: Callable[[str], bool] | None = None) -> Rule:
    """A BODY_XPATH that tests attributes for equality (`exact`), id and class by patterns, and either by `more`."""
    path = xpaths.BODY_XPATH[index].path
    by_id = _searcher(_tests(path, "@id")[0])
    patterns = [p for p in _tests(path, "@class") if p != ignoring_case]
    search = re.compile(patterns[0]).search
    loose = re.compile(ignoring_case, re.IGNORECASE).search if ignoring_case else None
    classes, ids = exact.get("class", frozenset()), exact.get("id", frozenset())
    others = {k: v for k, v in exact.items() if k not in ("class", "id")}
    in_class = Memo(lambda v: v in classes or search(v) is not None or (loose is not None and loose(v) is not None)
                    or (more is not None and (more(v) or "page-content" in v.replace("C", "c").replace("P", "p"))))
    in_id = Memo(lambda v: v in ids or by_id[v] or (more is not None and more(v)))

    def test(e: Any) -> bool:
        class_, id_ = e.get("class"), e.get("id")
        return ((class_ is not None and in_class[class_]) or (id_ is not None and in_id[id_])
                or any(e.get(k) in v for k, v in others.items()))

    return First(_FRAMES, test)


def _main() -> Rule:
    """The last BODY_XPATH: the first of (first frame whose class, id or role begins with 'main') and (first main)."""
    def test(e: Any) -> bool:
        return e.tag == "main" or any(e.get(k, "").startswith("main") for k in ("class", "id", "role"))

    return First(_FRAMES, test)


# -- justext ---------------------------------------------------------------------------------------------------------
_WHITESPACE = re.compile(r"\s{2,}|[^\S ]")


def _normalize(text: str) -> str:
    """justext's normalize_whitespace; a single space, which it replaces by itself, does not cost a call."""
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
    """justext's ParagraphMaker without SAX events and without the XPath string it makes for every paragraph."""
    done: list[_Paragraph] = []
    current = _Paragraph(False)
    link = br = False
    selects = 0

    def fresh() -> None:
        nonlocal current
        if current.nodes:
            current.text = _normalize("".join(current.nodes).strip())
            done.append(current)
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
                fresh()
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
                fresh()
            if name == "a":
                link = False
        if element.tail:
            characters(element.tail)
    fresh()
    return done


def classify(paragraphs: list[_Paragraph], stoplist: frozenset[str]) -> None:
    """justext's context-free classification with trafilatura's thresholds (50, 150, 0.1, 0.2, 0.25, no headings); the
    density of stop words, the dear part, is computed only where it decides."""
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
    """trafilatura.external.try_justext for pages whose language is not given."""
    global _stoplist
    if target_language is not None:
        return _try_justext(tree, url, target_language)
    if not _stoplist:
        _stoplist = frozenset(word.lower() for word in external.JT_STOPLIST or external.jt_stoplist_init())
    body = etree.Element("body")
    paragraphs = make_paragraphs(tree)
    classify(paragraphs, _stoplist)
    revise_paragraph_classification(paragraphs, 150)
    for p in paragraphs:
        if not p.is_boilerplate:
            etree.SubElement(body, "p").text = p.text
    return body


_try_justext = external.try_justext


# -- readability -----------------------------------------------------------------------------------------------------
#: elements that, left empty, swallow the markup after them as text when readability's XML is parsed as HTML again
_RAW_TEXT = ("title", "textarea", "iframe", "xmp", "noembed", "noframes", "plaintext", "noscript")


def longest_summary(tree: Any) -> int | None:
    """Upper bound for the length of what readability can find in a tree, None when there is none.

    Its summary is made of pieces of the page in their order, scripts and styles apart, each used once; leaving pieces
    out never makes trimmed text longer. The exception are elements whose empty form `<title/>` HTML reads as an opening
    tag. "VIDEO" is what it writes into a frame with one.
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
    """Whether `_prefer_readability` says no to any summary of this tree (its conditions, for the longest possible)."""
    if options.focus != "balanced" or not text:
        return False
    longest = longest_summary(tree)
    return longest is not None and longest <= 2 * len(text) and (
        longest <= 2 * options.min_extracted_size
        or (bool(body.xpath(".//p//text()")) and len(body.findall(".//table")) <= len(body.findall(".//p"))))


def extract_and_compare(cleaned: Any, backup: Any, tree: Any, options: Any) -> tuple[Any, str]:
    """trafilatura.core._extract_and_compare that asks readability only where its answer can matter."""
    body, text = core.extract_content(cleaned, options)
    if options.fast:
        return body, text
    if cannot_win(tree, body, text, options):
        return _compare_without_readability(backup, tree, body, text, options)
    return external.compare_extraction(backup, copy(tree), body, text, options)


def _compare_without_readability(backup: Any, tree: Any, body: Any, text: str, options: Any) -> tuple[Any, str]:
    """compare_extraction with readability having found nothing: what is left is the look for uncleaned elements."""
    _summary.skip = True
    try:
        return external.compare_extraction(backup, tree, body, text, options)
    finally:
        _summary.skip = False


class _Summary:
    """trafilatura.external.try_readability with a switch."""

    def __init__(self) -> None:
        self.skip, self.ask = False, external.try_readability

    def __call__(self, tree: Any) -> Any:
        return HtmlElement() if self.skip else self.ask(tree)


_summary = _Summary()


# -- parsing ---------------------------------------------------------------------------------------------------------
class _InvalidChars:
    """trafilatura.utils.INVALID_XML_CHARS.sub for pages that hold none of them, which is nearly all: one look at the
    bytes instead of a regular expression over every character."""

    _CONTROLS = bytes({*range(0x20)} - {9, 10, 13})

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def sub(self, new: str, text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        if len(data.translate(None, self._CONTROLS)) == len(data) and b"\xef\xbf\xbe" not in data \
                and b"\xef\xbf\xbf" not in data:
            return text
        return self.pattern.sub(new, text)


# -- installation ----------------------------------------------------------------------------------------------------
def _replaced() -> Iterator[etree.XPath]:
    yield from xpaths.OVERALL_DISCARD_XPATH
    yield from xpaths.RAW_TREE_PRUNE_XPATH
    yield from xpaths.REMOVE_COMMENTS_AND_LISTS_XPATH
    yield from xpaths.TEASER_DISCARD_XPATH
    yield from xpaths.DISCARD_IMAGE_ELEMENTS
    yield from xpaths.BODY_XPATH
    yield settings.BASIC_CLEAN_XPATH


def fingerprint() -> str:
    return hashlib.blake2b("\n".join(getattr(x, "path", "") for x in _replaced()).encode(), digest_size=16).hexdigest()


def install() -> bool:
    """Put the shortcuts in place, once per process. False when the installed trafilatura is another one."""
    if isinstance(xpaths.BODY_XPATH[0], Rule):
        return True
    if trafilatura.__version__ != VERSION or fingerprint() != FINGERPRINT:
        return False
    rules = [_overall()], [_raw_prune()], [_comments_and_lists()], [_teaser()], [_caption()]
    main_content = Memo(lambda v: "main-content" in v.replace("C", "c").replace("M", "m"))
    frames = [
        _frame(0, {"class": frozenset({"post", "entry"}), "itemprop": frozenset({"articleBody"}),
                   "id": frozenset({"articleContent"})}),
        First(("article",), lambda e: True),
        _frame(2, {"role": frozenset({"article"}), "id": frozenset({"article", "story"}),
                   "class": frozenset({"postarea", "art-postcontent", "text", "cell", "story"})},
               ignoring_case="fulltext"),
        _frame(3, {"id": frozenset({"content"}), "class": frozenset({"content"})}, more=main_content.__getitem__),
        _main(),
    ]
    basic = _basic()
    for target, rule in zip((xpaths.OVERALL_DISCARD_XPATH, xpaths.RAW_TREE_PRUNE_XPATH,
                             xpaths.REMOVE_COMMENTS_AND_LISTS_XPATH, xpaths.TEASER_DISCARD_XPATH,
                             xpaths.DISCARD_IMAGE_ELEMENTS, xpaths.BODY_XPATH), (*rules, frames)):
        target[:] = rule                                  # lists are shared by all importers: change them in place
    baseline.BASIC_CLEAN_XPATH = basic
    external.try_justext = try_justext
    external.try_readability = _summary
    core._extract_and_compare = extract_and_compare
    utils.INVALID_XML_CHARS = _InvalidChars(utils.INVALID_XML_CHARS)
    # lxml.html asks a Python function for the class of every element it touches; here all of them are HtmlElement,
    # whose special classes (forms, inputs, labels) trafilatura never uses
    utils.HTML_PARSER.set_element_class_lookup(etree.ElementDefaultClassLookup(
        element=HtmlElement, comment=HtmlComment, pi=HtmlProcessingInstruction, entity=HtmlEntity))
    return True
