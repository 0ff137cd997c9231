"""Reads what a web page states about itself: title, author, date, canonical URL, language, licence, and forbidden uses.

Such facts are claims of the page, and they are not checked. Regular expressions run forwards once over the head and the
JSON-LD of a page, so the cost is small beside extraction. The library that trafilatura uses for dates is not used here,
because it reads the clock to tell which dates are plausible.

The table shows how often a fact equals the reference value, when only letters and digits are compared. Recall is the
share among the pages whose reference has the fact, precision the share among the pages on which a fact was found:

                          WCXB    Fundus
    titles                75 %    83 %
    authors, recall       63 %    70 %
    authors, precision    91 %    76 %
    dates, recall         66 %    94 %
    dates, precision      92 %    98 %

Authors are right only if all are named. WCXB stands for the 310 development pages of the Web Content Extraction
Benchmark, Fundus for 64 news pages from 27 countries. A fact that only the text of the page states is missed, because
the text is not searched.
"""

from __future__ import annotations

import datetime
import html
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from stages.text.robots import directives

#: characters at the beginning of a page that count as its head
HEAD = 256 << 10
#: characters at the end of a page that are searched for a licence
_FOOT = 64 << 10
#: JSON-LD blocks read, and characters of each
_BLOCKS, _BLOCK = 8, 100_000
#: Dates outside this range are ignored as mistakes: they precede the first web page, or follow any crawl. `describe`
#: sets an earlier end if it knows the day of the fetch.
_FIRST, _LAST = datetime.date(1991, 8, 6), datetime.date(2100, 1, 1)

_TITLE = re.compile(r"<title[^<>]{0,500}>([^<]{1,2000})", re.IGNORECASE)
_H1 = re.compile(r"<h1(?:\s[^<>]{0,1000})?>", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_SITE = re.compile(r"\s[|–—·»-]\s|\|")
_HEAD_ENDS = ("</head", "</HEAD", "<body", "<BODY")
_MARKS = ("<time", 'itemprop="datePublished"', 'itemprop="author"')
_TAG = re.compile(r"<[^<>]*+>")
_CODE = r"[a-zA-Z]{2,3}(?:[-_][a-zA-Z0-9]{1,8})*"
_LANG = re.compile(rf"<html\b[^<>]{{0,2000}}?\slang\s*=\s*[\"']?({_CODE})", re.IGNORECASE)
#: matches a tag that carries metadata, from the character after its `<` on
_METADATA_TAG = re.compile(r"(meta|link|time)\b((?:[^>\"']++|\"[^\"]*+\"|'[^']*+')*+)>")
_KINDS = frozenset(("meta", "link", "time"))
#: a tag whose attributes hold none of these words states no fact that is read
_READ_ATTRIBUTES = re.compile(r"title|author|creator|byl|label1|data1|date|publish|issued|created|licen|lang|locale|"
                              r"canonical|og:url|robots|tdm-|rights")
_ATTRIBUTE = re.compile(r"([a-zA-Z][\w:.-]{0,40})\s{0,8}=\s{0,8}(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'<>]+))")
_HTTP = re.compile(r"https?://[^\s\"'<>]{1,2000}", re.IGNORECASE)
_REL = tuple(f"rel={quote}license" for quote in ('"', "'", ""))
_CC = re.compile(r"creativecommons\.org/((?:licenses/[a-z-]{2,12}|publicdomain/(?:zero|mark))/\d\.\d)", re.IGNORECASE)
_LD = {"date": re.compile(r'"datePublished"\s*:\s*"([^"]{4,40})"'),
       "licence": re.compile(r'"license"\s*:\s*"(https?:[^"]{4,300})"')}
_LD_AUTHOR = re.compile(r'"(?:author|creator)"\s*:\s*(?=["\[{])')
#: most characters of JSON that holds authors, and most brackets in it, since JSON is parsed by recursion
_AUTHORS, _NESTED = 20_000, 200
_DECODER = json.JSONDecoder(strict=False)
#: most authors kept
_MANY = 20
#: labels by which SEO plugins of WordPress mark the name of the author
_WRITTEN_BY = frozenset(("written by", "geschrieben von", "verfasst von", "escrito por", "écrit par", "scritto da",
                         "geschreven door", "skrevet av", "skriven av", "написано автором", "автор", "napisane przez"))
#: an author's name must follow the mark of an author within this many characters
_NEAR = 800
_CONTENT = re.compile(r"<[^<>]{0,300}?\bcontent\s{0,3}=\s{0,3}[\"']([^\"'<>]{2,100})[\"']")
_TEXT = re.compile(r"(?:\s{0,50}<(?:span|a|b|strong|em|i)\b[^<>]{0,500}>){0,4}\s{0,50}([^<>]{2,100})<")
#: a character reference of more digits names no character, and Python refuses to read it
_LONG_REFERENCE = re.compile(r"&#[0-9]{20,}+;?")
_DATE = re.compile(r"(?<!\d)((?:19|20)\d\d)([-/.]?)(0[1-9]|1[0-2])\2(0[1-9]|[12]\d|3[01])(?!\d)")
_MONTHS = {name: n for n, name in enumerate(
    ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1)}
_WRITTEN = re.compile(rf"(?<![^\W\d_])(?:(\d{{1,2}})(?:st|nd|rd|th)?\.?\s+(?:of\s+)?)?({'|'.join(_MONTHS)})"
                      r"[a-z]{0,6}\.?\s+(?:(\d{1,2})(?:st|nd|rd|th)?,?\s+)?((?:19|20)\d\d)(?!\d)", re.IGNORECASE)
_BY = re.compile(r"(?:by|von|par|por|di|door|av)\s*:?\s+(?=\S)", re.IGNORECASE)

#: fact → names of the `<meta>` tags that state it, the most reliable first
_NAMES: dict[str, tuple[str, ...]] = {
    "title": ("og:title", "citation_title", "dc.title", "dcterms.title", "twitter:title"),
    "author": ("author", "citation_author", "dc.creator", "dcterms.creator", "article:author", "parsely-author",
               "sailthru.author", "byl", "og:author", "twitter:creator:name", "article:author_name",
               "cxenseparse:author", "twitter:data1"),
    "date": ("article:published_time", "datepublished", "og:published_time", "citation_publication_date",
             "citation_date", "dc.date.issued", "dcterms.issued", "dc.date.created", "dcterms.created",
             "parsely-pub-date", "sailthru.date", "pubdate", "publishdate", "publish-date", "publish_date",
             "publication_date", "article.published", "dc.date", "dcterms.date", "date"),
    "licence": ("dcterms.license", "license", "dc.rights.license", "og:license"),
    "lang": ("content-language", "og:locale", "dc.language", "language"),
    "url": ("og:url",),
    "rights": ("dcterms.rights", "dc.rights", "copyright", "rights"),
    # TDM Reservation Protocol (W3C community group, 2024)
    "tdm": ("tdm-reservation",),
    "tdm_policy": ("tdm-policy",),
}
_META_FACTS = {name: (what, rank) for what, names in _NAMES.items() for rank, name in enumerate(names)}


def describe(page: str, crawled: str = "") -> dict[str, str]:
    """Returns the facts that a page states about itself, by name. Facts that are not found are left out.

    - `title`, `author`, `date` (YYYY-MM-DD), `lang` (lower case), and the URLs `canonical` (absolute) and `license`
    - `robots`: the directives that forbid all robots something
    - `tdm`: the reservation of text and data mining ("1")
    - `tdm_policy`: the address of the terms for text and data mining
    - `rights`: a copyright notice

    `crawled` is the ISO date of the fetch. A date on the page that is more than two days later than the fetch is
    ignored.
    """
    head = page[:next((end for end in (page.find(tag, 0, HEAD) for tag in _HEAD_ENDS) if end > 0), HEAD)]
    facts, authors, links, times = _head_facts(head + "".join(_microdata_tags(page, len(head))))
    json_ld = list(_json_ld(page))
    result: dict[str, str] = {}
    title = _title(facts.get("title") or _tag_title(head), _heading(page))
    if title:
        result["title"] = title[:500]
    if author := _authors(authors, json_ld) or _byline(page):
        result["author"] = author
    latest = _LAST
    if (fetched := _DATE.match(crawled)) and (day := _day(fetched[1], fetched[3], fetched[4])):
        latest = min(_LAST, day + datetime.timedelta(days=2))
    dates = (facts.get("date", ""), *_json_ld_values(json_ld, "date"), *times)
    date = next((d for d in map(parse_date, dates) if d is not None and d <= latest), None)
    if date is not None:
        result["date"] = date.isoformat()
    canonical = next(filter(_HTTP.fullmatch, (links.get("canonical", ""), facts.get("url", ""))), "")
    if canonical:
        result["canonical"] = canonical
    if (lang := _LANG.search(head, 0, 8192)) is not None:
        result["lang"] = lang[1].lower()
    elif re.fullmatch(_CODE, facts.get("lang", "")):
        result["lang"] = facts["lang"].lower()
    licence = links.get("license") or facts.get("licence", "")
    licence = licence if _HTTP.fullmatch(licence) else next(_json_ld_values(json_ld, "licence"), "") or _licence(page)
    if licence:
        result["license"] = licence
    if forbidden := directives(facts.get("robots", "")):
        result["robots"] = ", ".join(forbidden)
    result |= {fact: facts[fact][:500] for fact in ("rights", "tdm", "tdm_policy") if fact in facts}
    return result


def unescape(text: str) -> str:
    """Replaces the HTML character references in a text, like `html.unescape`, but never raises an error.
    `html.unescape` raises ValueError for a character reference of thousands of digits; such a reference becomes
    U+FFFD."""
    if "&" not in text:
        return text
    return html.unescape(_LONG_REFERENCE.sub("\ufffd", text) if "&#" in text else text)


def parse_date(text: str) -> datetime.date | None:
    """Returns the first date in the first 100 characters of a text. A date written as year-month-day is preferred to
    one with the English name of a month. Returns None when there is no date, or when the date is outside the range from
    `_FIRST` to `_LAST`. The result does not depend on today's date."""
    date = None
    if (m := _DATE.search(text[:100])) is not None:
        date = _day(m[1], m[3], m[4])
    elif (m := _WRITTEN.search(text[:100])) is not None and (m[1] or m[3]):
        date = _day(m[4], str(_MONTHS[m[2][:3].lower()]), m[1] or m[3])
    return date if date is not None and _FIRST <= date <= _LAST else None


def _day(year: str, month: str, day: str) -> datetime.date | None:
    try:
        return datetime.date(int(year), int(month), int(day))
    except ValueError:
        return None


def _head_facts(head: str) -> tuple[dict[str, str], list[list[str]], dict[str, str], list[str]]:
    """Reads the tags `<meta>`, `<link>` and `<time>` in `head`. Returns a tuple of four:

    - the facts that `<meta>` tags state, other than authors, by name of the fact
    - the authors that `<meta>` tags name: one list for each kind of `<meta>` tag, the most reliable kind first
    - the address in the first `<link>` of each relation, by relation
    - the `datetime` of up to eight `<time>` tags, those marked as dates of publication first ("" for a tag without one)
    """
    best: dict[str, tuple[int, str]] = {}
    authors: dict[int, list[str]] = {}
    links: dict[str, str] = {}
    published: list[str] = []
    other_times: list[str] = []
    label = ""
    for piece in head.split("<")[1:]:                     # a tag with an unclosed quote ends where the next tag begins
        kind = piece[:4].lower()
        if kind not in _KINDS or (m := _METADATA_TAG.match(kind + piece[4:])) is None:
            continue
        inside = m[2]
        lower = inside.lower()
        if _READ_ATTRIBUTES.search(lower) is None:
            continue
        attributes = {a[1].lower(): unescape(a[2] or a[3] or a[4] or "").strip()
                      for a in _ATTRIBUTE.finditer(inside[:8000])}
        if kind == "link":
            for relation in attributes.get("rel", "").lower().split():
                links.setdefault(relation, attributes.get("href", ""))
            continue
        if kind == "time":
            marked = "publish" in lower or "pubdate" in lower
            (published if marked else other_times).append(attributes.get("datetime", ""))
            continue
        name = next((attributes[k].lower() for k in ("property", "name", "itemprop", "http-equiv")
                     if attributes.get(k)), "")
        content = " ".join(attributes.get("content", "").split())
        if name == "twitter:label1":
            label = content.lower()
        if name == "robots":                                # the directives of all such tags count
            best["robots"] = 0, f"{best['robots'][1]}, {content}" if "robots" in best else content
        elif name in _META_FACTS and content and (name != "twitter:data1" or label in _WRITTEN_BY):
            fact, rank = _META_FACTS[name]
            if fact == "author":
                authors.setdefault(rank, []).append(content)
            elif fact not in best or rank < best[fact][0]:
                best[fact] = rank, content
    return ({fact: content for fact, (_, content) in best.items()}, [authors[rank] for rank in sorted(authors)], links,
            (published + other_times)[:8])


def _microdata_tags(page: str, at: int) -> Iterator[str]:
    """Yields the tags of a page's body that may state author or date: `<time>` and microdata. The body begins at
    position `at` of `page`."""
    for mark in _MARKS if page.find('itemprop="', at, HEAD) >= 0 else _MARKS[:1]:
        place = at
        for _ in range(8):
            place = page.find(mark, place, HEAD)
            if place < 0:
                break
            begin, end = page.rfind("<", max(0, place - 1000), place + 1), page.find(">", place, place + 2000) + 1
            if begin >= 0 and end:
                yield page[begin:end]
            place += len(mark)


def _json_ld(page: str) -> Iterator[str]:
    """Yields the JSON-LD blocks of a page."""
    at = 0
    for _ in range(_BLOCKS):
        at = page.find("ld+json", at, 2 * HEAD)
        begin = page.find(">", at, at + 200) + 1 if at >= 0 else 0
        if not begin:
            return
        end = page.find("</script", begin, begin + _BLOCK)
        yield page[begin:end if end >= 0 else begin + _BLOCK]
        at = begin


def _json_ld_values(blocks: list[str], fact: str) -> Iterator[str]:
    """Yields the value of a fact, `date` or `licence`, from each JSON-LD block that states it. The value is the first
    match of the pattern `_LD[fact]`, decoded from JSON."""
    for block in blocks:
        if (m := _LD[fact].search(block)) is not None:
            value = next(filter(None, m.groups()), "")
            try:
                yield unescape(str(json.loads(f'"{value}"', strict=False))).strip()
            except ValueError:
                continue


def _people(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(_person, names))))[:_MANY]


def _authors(meta_authors: list[list[str]], json_ld: list[str]) -> str:
    """Returns the authors of a page, separated by "; ". `meta_authors` holds the authors that `<meta>` tags name,
    `json_ld` the JSON-LD blocks of the page. The authors in JSON-LD are used if there are more of them, since `<meta>`
    tags often name only one."""
    meta_names = next(filter(None, map(_people, meta_authors)), [])
    json_ld_names = next(filter(None, map(_people, map(_json_ld_authors, json_ld))), [])
    return "; ".join(json_ld_names if len(json_ld_names) > len(meta_names) else meta_names)


def _byline(page: str) -> str:
    """Returns the author that the first `itemprop="author"` of a page names, or else the author that its first
    `rel="author"` names; "" when neither names one."""
    at = page.find('itemprop="author"', 0, HEAD)
    if at >= 0:
        nearby = page[at:at + _NEAR]
        place = nearby.find('itemprop="name"')
        tag = nearby[max(nearby.rfind("<", 0, place), 0):] if place >= 0 else nearby
        if (content := _CONTENT.match(tag)) is not None:
            return _person(unescape(content[1]))
        if name := _person(_text_after_tag(tag)):
            return name
    at = page.find('rel="author"', 0, HEAD)
    return _person(_text_after_tag(page[at:at + _NEAR])) if at >= 0 else ""


def _text_after_tag(tag: str) -> str:
    """Returns the text after the first start tag in `tag`, up to the next tag. Up to four inline tags before the text
    are skipped."""
    begin = tag.find(">") + 1
    match = _TEXT.match(tag, begin) if begin else None
    return " ".join(unescape(match[1]).split()) if match else ""


def _json_ld_authors(block: str) -> list[str]:
    """Returns the names of the authors in a JSON-LD block. They come from the first `author` or `creator` field that
    yields a name; only the first four such fields are tried."""
    for m in islice(_LD_AUTHOR.finditer(block), 4):
        value = block[m.end():m.end() + _AUTHORS]
        if value.count("[") + value.count("{") > _NESTED:
            value = value[:_AUTHORS // 10]
            if value.count("[") + value.count("{") > _NESTED:
                continue
        try:
            names = _names(_DECODER.raw_decode(value)[0])
        except ValueError:
            continue
        if names:
            return names
    return []


def _names(value: Any) -> list[str]:
    """Returns the names in the value of a schema.org field `author`. The value may be a name, a person or organisation
    (an object with a name), or a list of these."""
    if isinstance(value, str):
        return [unescape(value)]
    if isinstance(value, dict):
        return _names(value.get("name")) if isinstance(value.get("name"), str | list) else []
    return [name for item in value[:_MANY] for name in _names(item)] if isinstance(value, list) else []


def _person(name: str) -> str:
    """Returns a name of a person or organisation without a leading "by"; "" for an address, a number, or a text too
    short or too long to be a name."""
    name = " ".join(_BY.sub("", name, count=1).split()) if _BY.match(name) else " ".join(name.split())
    if "://" in name or "@" in name or "<" in name or not 2 <= len(name) <= 100 or name.isdecimal():
        return ""
    return name


def _title(full: str, heading: str) -> str:
    """Returns the title of a page, given the content of its <title> tag, `full`, and its `heading`. The heading is the
    title if its words occur in `full`, or if `full` is empty. Otherwise the title is `full`. The name of the site after
    a bar or dash is then removed, if at least 8 characters remain."""
    if heading and " ".join(_WORD.findall(heading.lower())) in " ".join(_WORD.findall(full.lower())):
        return heading
    first = _SITE.split(full, maxsplit=1)[0].strip()
    return (first if len(first) >= 8 else full) or heading


def _tag_title(head: str) -> str:
    match = _TITLE.search(head)
    return " ".join(unescape(match[1]).split()) if match else ""


def _heading(page: str) -> str:
    """Returns the text of the first `<h1>` of a page."""
    match = _H1.search(page, 0, HEAD)
    if match is None:
        return ""
    inside = page[match.end():match.end() + 3000]
    end = inside.lower().find("</h1")
    # documentation generators add an anchor sign after the heading
    return " ".join(unescape(_TAG.sub(" ", inside[:end])).split()).rstrip(" ¶#") if end > 0 else ""


def _licence(page: str) -> str:
    """Returns the URL of the licence to which the end of a page links; "" if there is none. A link with `rel=license`
    is preferred to a link to a Creative Commons licence."""
    begin = max(0, len(page) - _FOOT)
    for rel in _REL if page.find("license", begin) >= 0 else ():
        if (at := page.find(rel, begin)) >= 0:
            tag = page[max(page.rfind("<", max(0, at - 2000), at), 0):page.find(">", at, at + 2000)]
            if (url := _HTTP.search(tag)) is not None:
                return unescape(url[0])
    at = page.find("creativecommons.org/", begin)
    for _ in range(20):
        if at < 0:
            return ""
        if (match := _CC.match(page, at)) is not None:
            return f"https://creativecommons.org/{match[1].lower()}/"
        at = page.find("creativecommons.org/", at + 1)
    return ""
