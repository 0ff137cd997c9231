"""The step `rights`: notes what a document and its publisher say about rights, such as directives to robots,
reservations, copyright notices and licences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from stages.stage import Stage, StageConfig, decision
from stages.text.marks import Span, merged_spans, pattern_spans, same_length_lower
from stages.text.robots import FORBIDDING, directives

if TYPE_CHECKING:
    from stages.document import Document

Claim = Literal["noai", "noimageai", "noindex", "noarchive", "nosnippet", "tdm", "copyright", "reserved", "restricted"]
CLAIMS: tuple[Claim, ...] = get_args(Claim)
#: characters searched at each end of a text, where most notices are
_END = 20_000

_SIGN = r"(?:©|\(c\)|℗|\bcopyright\b)"
#: a copyright sign or word, perhaps a second one, and a year; or © and a name
_NOTICE = re.compile(rf"{_SIGN}(?:[\s.,:]{{0,3}}(?:©|\(c\)|copyright\b|by\b))?[\s.,:]{{0,3}}(?:19|20)\d\d(?!\d)"
                     r"|©\s?[^\W\d_]", re.IGNORECASE)
_RESERVED = re.compile("|".join((
    "all rights reserved", "alle rechte vorbehalten", "tous droits réservés", "todos los derechos reservados",
    "todos os direitos reservados", "tutti i diritti riservati", "tots els drets reservats",
    "alle rechten voorbehouden", "wszelkie prawa zastrzeżone",
    "wszystkie prawa zastrzeżone", "všechna práva vyhrazena", "všetky práva vyhradené",
    "minden jog fenntartva", "toate drepturile rezervate", "sva prava pridržana", "sva prava zadržana",
    "vse pravice pridržane", "visas tiesības aizsargātas", "visos teisės saugomos", "kõik õigused kaitstud",
    "kaikki oikeudet pidätetään", "alla rättigheter förbehåll", "alle rettigheder forbehold",
    "alle rettigheter (?:forbehold|reservert)", "öll réttindi áskilin", "tüm haklar[ıi] sakl[ıi]d[ıi]r",
    "все права защищены",
    "всі права захищені", "усі права захищено", "всички права запазени", "με επιφύλαξη παντός δικαιώματος",
    "כל הזכויות שמורות", "جميع الحقوق محفوظة", "تمامی حقوق محفوظ", "सर्वाधिकार सुरक्षित", "สงวนลิขสิทธิ์",
    "hak cipta dilindungi", "bảo lưu mọi quyền", "版权所有", "版權所有", "保留所有权利", "保留所有權利",
    "無断転載", "無断複製", "무단 ?전재")))
_CC_URL = re.compile(r"creativecommons\.org/(?:licenses/([a-z-]{2,12})|publicdomain/(zero|mark))(?:/(\d\.\d))?")
#: case matters: `cc by` also occurs in e-mails
_CC_SHORT = re.compile(r"\b(?:CC[ -](BY(?:[ -](?:NC|ND|SA)){0,2})|cc-(by(?:-(?:nc|nd|sa)){0,2}))(?:[ -](\d\.\d))?"
                       r"(?![\w-])|\bCC-?(0)(?![\w-])")
_CC_LONG = re.compile(r"creative\s{1,3}commons\s{1,3}((?:attribution|share[\s-]?alike|non[\s-]?commercial|no[\s-]?deriv"
                      r"\w{1,10}|cc0|zero|[\s,–/-]{1,3}){1,10})(?:licen[cs]e\s{1,3})?\(?(?:v|version\s)?(\d\.\d)?")
_CC_PARTS = (("by", "attribution"), ("nc", "commercial"), ("nd", "deriv"), ("sa", "alike"))
_OTHERS = tuple((name, re.compile(words)) for name, words in (
    ("gfdl", r"gnu free documentation licen[cs]e"), ("ogl", r"open government licen[cs]e"),
    ("odbl", r"open (?:data commons open )?database licen[cs]e"),
    ("public-domain", r"(?:is|are|as|into|in|to) the public domain|public domain (?:work|mark|in the u)|"
                      r"project gutenberg e-?(?:text|book)|released under (?:the )?unlicense")))


class Rights(Stage):
    """Note what a document says about the rights in it, and drop documents that make a claim named in the setting
    `respect`.

    Signals (numbers stored with the document), 1 if the document makes the claim and 0 if not:

        rights_noai, rights_noimageai, rights_noindex, rights_noarchive, rights_nosnippet
                             directives to all robots in the page's head (`meta.robots`) or in X-Robots-Tag
                             (`meta.http`, which the WARC reader fills). noai: DeviantArt's convention (2022)
        rights_tdm           text and data mining is reserved: `tdm-reservation: 1` as header or `<meta>` (TDM
                             Reservation Protocol, W3C community group, 2024; article 4 of directive (EU) 2019/790)
        rights_reserved      "all rights reserved", in 39 languages
        rights_open          a licence that lets anybody use the work
        rights_restricted    a licence that forbids commercial use or derivatives (Creative Commons' NC and ND)

    `rights_copyright` is the number of copyright notices ("©", "(c)", "℗" or "copyright" with a year, or "©" with a
    name). Notices and licences are searched for in the first and last 20,000 characters of the text and in the notice
    of the page's head (`meta.rights`). Licences found go into `meta.licences` (`cc-by-sa-4.0`, `cc0`, `gfdl` …). They
    include the licence that the page's markup states (`meta.license`). A licence noted by the readers of code
    (`meta.licence`) counts as open.

    Nobody has checked these claims. Most are about a page and not about each text on it. robots.txt, ai.txt and a
    site's `/.well-known/tdmrep.json` are not part of a page, so this step cannot see them: the crawler must have obeyed
    them.
    """

    name = "rights"
    version = 1
    cost_ms, drops = 0.6, True
    memory_mb = 5
    signals = (*(f"rights_{claim}" for claim in CLAIMS), "rights_open")

    class Config(StageConfig):
        respect: tuple[Claim, ...] = decision((), "claims for which a document is dropped, e.g. [noai, tdm]")

    @classmethod
    def may_drop(cls, config: Mapping[str, Any]) -> bool:
        return bool(config.get("respect"))

    def process(self, doc: Document) -> str | None:
        meta, signals = doc.meta, doc.signals
        http = meta.get("http")
        http = http if isinstance(http, dict) else {}
        forbidden = directives(_text_of(http, "x-robots-tag")) + directives(_text_of(meta, "robots"))
        for name in FORBIDDING:
            signals[f"rights_{name}"] = int(name in forbidden)
        signals["rights_tdm"] = int("1" in (_text_of(http, "tdm-reservation"), _text_of(meta, "tdm")))
        text = doc.text if len(doc.text) <= 2 * _END else f"{doc.text[:_END]}\n{doc.text[-_END:]}"
        text = f"{text}\n{_text_of(meta, 'rights')}"
        lower = text.lower()
        signals["rights_copyright"] = sum(1 for _ in _NOTICE.finditer(text)) if _signed(lower) else 0
        signals["rights_reserved"] = int(_RESERVED.search(lower) is not None)
        named_licences = licences(f"{text}\n{_text_of(meta, 'license')}")
        if named_licences:
            meta["licences"] = named_licences
        restricted = [name for name in named_licences if "-nc" in name or "-nd" in name]
        signals["rights_restricted"] = int(bool(restricted))
        signals["rights_open"] = int(len(named_licences) > len(restricted) or bool(_text_of(meta, "licence")))
        return self.verdict(doc)

    def matches(self, doc: Document, reason: str) -> list[Span]:
        lower = same_length_lower(doc.text)
        if reason == "rights_restricted":
            named = [span for pattern, text in ((_CC_URL, lower), (_CC_SHORT, doc.text), (_CC_LONG, lower))
                     for span in pattern_spans(pattern, text)]
            return merged_spans([span for span in named if any(
                "-nc" in name or "-nd" in name for name in licences(doc.text[slice(*span)]))])
        pattern = {"rights_copyright": _NOTICE, "rights_reserved": _RESERVED}.get(reason)
        return pattern_spans(pattern, lower) if pattern is not None else []

    def verdict(self, doc: Document) -> str | None:
        return next((f"rights_{claim}" for claim in self.config.respect if doc.signals[f"rights_{claim}"]), None)


def licences(text: str) -> list[str]:
    """Find the licences that a text mentions by their usual names or by links to them. Returns a sorted list of our own
    short names for licences, such as `cc-by-nc-4.0`, `cc0`, `public-domain`, `gfdl`, `ogl` and `odbl`."""
    lower = text.lower()
    result: set[str] = set()
    if "creativecommons.org/" in lower:
        for kinds, public, version in _CC_URL.findall(lower):
            result.add(_creative_commons(kinds, version) if kinds else "cc0" if public == "zero" else "public-domain")
    if "cc" in lower:
        for capitals, small, version, zero in _CC_SHORT.findall(text):
            result.add("cc0" if zero else _creative_commons((capitals.lower() or small).replace(" ", "-"), version))
    if "commons" in lower:
        for words, version in _CC_LONG.findall(lower):
            kinds = "-".join(part for part, sign in _CC_PARTS if sign in words)
            if kinds:
                result.add(_creative_commons(kinds, version))
            elif "zero" in words or "cc0" in words:
                result.add("cc0")
    result.update(name for name, words in _OTHERS if words.search(lower))
    return sorted(name for name in result if not any(longer.startswith(f"{name}-") and longer[len(name) + 1].isdigit()
                                                    for longer in result))


def _creative_commons(kinds: str, version: str) -> str:
    return f"cc-{kinds}-{version}" if version else f"cc-{kinds}"


def _signed(lower: str) -> bool:
    """Return whether a text in lower case holds a copyright sign or the word "copyright". If not, it has no copyright
    notice, and the slower pattern `_NOTICE` need not be tried."""
    return "©" in lower or "(c)" in lower or "copyright" in lower or "℗" in lower


def _text_of(mapping: dict[str, Any], name: str) -> str:
    """Return the string under the key `name` of a mapping, without white space at its ends. The result is "" if the
    value is missing or no string."""
    value = mapping.get(name)
    return value.strip() if isinstance(value, str) else ""
