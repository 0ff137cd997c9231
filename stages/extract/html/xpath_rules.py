"""Functions that replace the XPath expressions of trafilatura 2.3.1. With them, trafilatura gives the same text in 0.6
of the CPU time.

Two thirds of trafilatura's time goes into evaluating XPath expressions whose `re:test(@class, …)` calls Python once for
every element, attribute and expression. The rules of this module replace these expressions. A rule is a function that
walks the elements once and caches its answer for each attribute value, since class and id values repeat all over a
site. An answer depends only on the attribute value, so no page can influence the text of another.

`install` puts the rules into this project's copy of trafilatura's modules (`stages.extract.html.private`). It changes
nothing if the installed trafilatura has other expressions than those from which the rules were derived; this is checked
by a fingerprint of the expressions. `tests/stages/test_extract_trafilatura.py` checks that real pages give the same
texts with and without the rules.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from lxml import etree
from lxml.html import HtmlComment, HtmlElement, HtmlEntity, HtmlProcessingInstruction

from stages.extract.html import fallbacks, private
from stages.extract.html.private import settings, xpaths
from stages.extract.html.step import FAST_TRAFILATURA

#: blake2b of the expressions replaced here, in the order of `_replaced_expressions`
FINGERPRINT = "22a358864caaeadb08ba50561f961d36"
#: answers of one rule that are cached before the cache is emptied
MEMO = 100_000
#: longest value that is cached, characters, so that hostile pages cannot fill the memory
LONGEST = 256


class Memo(dict):
    """A cache: a dictionary that computes a missing value by calling a pure function of its key, a string. The
    dictionary is emptied when it has `MEMO` entries, and does not store keys longer than `LONGEST` characters."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        super().__init__()
        self.function = function

    def __missing__(self, value: str) -> Any:
        if len(value) > LONGEST:
            return self.function(value)
        if len(self) >= MEMO:
            self.clear()
        answer = self[value] = self.function(value)
        return answer


def _searcher(pattern: str, flags: int = 0) -> Memo:
    search = re.compile(pattern, flags).search
    return Memo(lambda value: search(value) is not None)


def _tests(path: str, subject: str) -> list[str]:
    """Returns the regular expressions that the XPath expression `path` applies to `subject` (such as `@class`), in
    order. They are the patterns in its calls `re:test(subject, 'pattern'…)`."""
    return re.findall(rf"re:test\({re.escape(subject)}, '([^']*)'", path)


def first_of(element: etree._Element, a: str, b: str) -> str:
    """Returns the result of the XPath expression string(@a|@b): the value of whichever of the two attributes comes
    first in the source, "" if the element has neither."""
    for name in element.keys():  # noqa: SIM118 - an element is no dict
        if name in (a, b):
            return element.get(name)
    return ""


class XPathRule:
    """Replaces a compiled XPath expression (`etree.XPath`) of trafilatura. A call with a tree returns the elements that
    have one of the tags `tags` and pass `test`, in document order."""

    def __init__(self, tags: tuple[str, ...], test: Callable[[Any], Any]) -> None:
        self.tags, self.test = tags, test

    def __call__(self, tree: Any) -> list[Any]:
        test = self.test
        return [element for element in tree.iterdescendants(*self.tags) if test(element)]


class First(XPathRule):
    """A rule that returns only the first matching element. The search ends there, so it is faster than `XPathRule`."""

    def __call__(self, tree: Any) -> list[Any]:
        for element in tree.iterdescendants(*self.tags):
            if self.test(element):
                return [element]
        return []


# -- what is pruned ----------------------------------------------------------------------------------------------
_BLOCKS = ("div", "item", "list", "p", "section", "span")


def _overall() -> XPathRule:
    """Returns the rule that replaces trafilatura's list of expressions OVERALL_DISCARD_XPATH. The rule tests both
    expressions of the list in one walk over the elements, because the callers remove every element that either of the
    two selects, in any order."""
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

    return XPathRule(("*",), test)


def _raw_prune() -> XPathRule:
    """Returns the rule that replaces trafilatura's list of expressions RAW_TREE_PRUNE_XPATH. trafilatura prunes by the
    two expressions of the list one after the other. The rule tests both in one walk over the elements, which gives the
    same result even if matches are nested."""
    path = xpaths.RAW_TREE_PRUNE_XPATH[0].path
    pattern, always = _tests(path, "@id")
    matches, unconditional = _searcher(pattern), _searcher(always)

    def test(e: Any) -> bool:
        id_, class_ = e.get("id"), e.get("class")
        if class_ is not None and "elementor-share-buttons" in class_:
            return True
        if (id_ is not None and matches[id_]) or (class_ is not None and matches[class_]):
            return ((id_ is not None and unconditional[id_]) or (class_ is not None and unconditional[class_])
                    or next(e.iterdescendants("h1"), None) is None)
        return False

    return XPathRule(("div", "section", "aside"), test)


def _comments_and_lists() -> XPathRule:
    """Returns the rule that replaces trafilatura's expression REMOVE_COMMENTS_AND_LISTS_XPATH."""
    path = xpaths.REMOVE_COMMENTS_AND_LISTS_XPATH[0].path
    anywhere, in_list = (_searcher(p) for p in _tests(path, "@id"))
    by_class = _searcher(_tests(path, "@class")[0])

    def test(e: Any) -> bool:
        class_ = e.get("class")
        if class_ is not None and by_class[class_]:
            return True
        id_ = e.get("id")
        return id_ is not None and anywhere[id_] and (in_list[id_] or e.tag not in ("ol", "ul"))

    return XPathRule(("div", "list", "section", "details", "ol", "ul"), test)


def _teaser() -> XPathRule:
    word = Memo(lambda value: "teaser" in value.replace("T", "t"))

    def test(e: Any) -> bool:
        id_, class_ = e.get("id"), e.get("class")
        return (class_ is not None and word[class_]) or (id_ is not None and word[id_])

    return XPathRule(_BLOCKS, test)


def _caption() -> XPathRule:
    def test(e: Any) -> bool:
        id_, class_ = e.get("id"), e.get("class")
        return (class_ is not None and "caption" in class_) or (id_ is not None and "caption" in id_)

    return XPathRule(_BLOCKS, test)


def _basic() -> XPathRule:
    """Returns the rule that replaces trafilatura's expression BASIC_CLEAN_XPATH."""
    path = settings.BASIC_CLEAN_XPATH.path
    consent = _searcher(_tests(path, "@class")[0], re.IGNORECASE)
    removed_tags = frozenset(re.findall(r"\.//([a-z]+)(?=\|)", path))

    def test(e: Any) -> bool:
        if e.tag in removed_tags:
            return True
        id_, class_ = e.get("id"), e.get("class")
        if (class_ is not None and consent[class_]) or (id_ is not None and consent[id_]):
            return True
        return e.tag == "div" and "footer" in first_of(e, "id", "class")

    return XPathRule(("*",), test)


# -- where the main text is ----------------------------------------------------------------------------------------
_FRAMES = ("article", "div", "main", "section")


def _frame(index: int, exact: dict[str, frozenset[str]], *, ignoring_case: str = "",
           more: Callable[[str], bool] | None = None) -> XPathRule:
    """Returns the rule that replaces trafilatura's expression `BODY_XPATH[index]`, which finds the element with the
    main text.

    An element matches if one of its attributes has a value in `exact`, or if its id or class matches a pattern of the
    expression. `ignoring_case` is the one pattern that ignores case. `more`, if given, accepts further values of id and
    class.
    """
    path = xpaths.BODY_XPATH[index].path
    by_id = _searcher(_tests(path, "@id")[0])
    patterns = [p for p in _tests(path, "@class") if p != ignoring_case]
    search = re.compile(patterns[0]).search
    search_ignoring_case = re.compile(ignoring_case, re.IGNORECASE).search if ignoring_case else None
    classes, ids = exact.get("class", frozenset()), exact.get("id", frozenset())
    other_values = {k: v for k, v in exact.items() if k not in ("class", "id")}
    in_class = Memo(lambda v: v in classes or search(v) is not None
                    or (search_ignoring_case is not None and search_ignoring_case(v) is not None)
                    or (more is not None and (more(v) or "page-content" in v.replace("C", "c").replace("P", "p"))))
    in_id = Memo(lambda v: v in ids or by_id[v] or (more is not None and more(v)))

    def test(e: Any) -> bool:
        class_, id_ = e.get("class"), e.get("id")
        return ((class_ is not None and in_class[class_]) or (id_ is not None and in_id[id_])
                or any(e.get(k) in v for k, v in other_values.items()))

    return First(_FRAMES, test)


def _main() -> XPathRule:
    """Returns the rule that replaces the last of trafilatura's expressions BODY_XPATH, which find the element with the
    main text. The rule finds the first element that is a `main`, or that is an article, div or section whose class, id
    or role begins with 'main'."""
    def test(e: Any) -> bool:
        return e.tag == "main" or any(e.get(k, "").startswith("main") for k in ("class", "id", "role"))

    return First(_FRAMES, test)


# -- parsing ---------------------------------------------------------------------------------------------------------
class _InvalidChars:
    """Replaces the pattern trafilatura.utils.INVALID_XML_CHARS, which matches characters that XML forbids. Nearly all
    pages contain no such character. For these pages the method `sub` only scans the bytes, instead of trying a regular
    expression at every character."""

    _CONTROLS = bytes({*range(0x20)} - {9, 10, 13})

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def sub(self, replacement: str, text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        if len(data.translate(None, self._CONTROLS)) == len(data) and b"\xef\xbf\xbe" not in data \
                and b"\xef\xbf\xbf" not in data:
            return text
        return self.pattern.sub(replacement, text)


class _Forum:
    """Replaces the pattern with which trafilatura.core searches a script for the JSON-LD of a forum thread. From each
    `"@type": [` the original reads on to the next `]`, so its time can grow with the square of the script's length. The
    replacement reads at most 500 characters there, and skips a script that does not contain `_WORD`."""

    _WORD = "DiscussionForumPosting"
    _LISTED = re.compile(rf'"@type"\s*:\s*(?:"{_WORD}"|\[[^\]]{{0,500}}"{_WORD}")')

    def search(self, script: str) -> re.Match[str] | None:
        return self._LISTED.search(script) if self._WORD in script else None


# -- installation ----------------------------------------------------------------------------------------------------
def _replaced_expressions() -> Iterator[etree.XPath]:
    yield from xpaths.OVERALL_DISCARD_XPATH
    yield from xpaths.RAW_TREE_PRUNE_XPATH
    yield from xpaths.REMOVE_COMMENTS_AND_LISTS_XPATH
    yield from xpaths.TEASER_DISCARD_XPATH
    yield from xpaths.DISCARD_IMAGE_ELEMENTS
    yield from xpaths.BODY_XPATH
    yield settings.BASIC_CLEAN_XPATH


def fingerprint() -> str:
    return hashlib.blake2b("\n".join(getattr(x, "path", "") for x in _replaced_expressions()).encode(),
                           digest_size=16).hexdigest()


def install(expected: str = FINGERPRINT) -> bool:
    """Replace slow parts of this project's copy of trafilatura (XPath expressions, fallback extractors) with the faster
    functions of this package. Returns whether they are in place. The copy stays unchanged, and the result is False, if
    the installed trafilatura is another version or its expressions have another fingerprint than `expected`."""
    if isinstance(xpaths.BODY_XPATH[0], XPathRule):
        return True
    if private.version != FAST_TRAFILATURA or fingerprint() != expected:
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
        target[:] = rule                                  # all importers share the list, so it is changed in place
    private.baseline.BASIC_CLEAN_XPATH = basic
    private.external.try_justext = fallbacks.try_justext
    private.external.try_readability = fallbacks.summary
    private.core._DISCUSSION_FORUM_POSTING_RE = _Forum()
    private.core._extract_and_compare = fallbacks.extract_and_compare
    private.utils.INVALID_XML_CHARS = _InvalidChars(private.utils.INVALID_XML_CHARS)
    # lxml.html calls a Python function to get the class of every element it touches. Here every element is a plain
    # HtmlElement, since trafilatura never uses the special classes (forms, inputs, labels).
    private.utils.HTML_PARSER.set_element_class_lookup(etree.ElementDefaultClassLookup(
        element=HtmlElement, comment=HtmlComment, pi=HtmlProcessingInstruction, entity=HtmlEntity))
    return True
