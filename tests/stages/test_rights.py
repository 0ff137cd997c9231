"""Rights: what pages and servers tell robots, reservations against text and data mining, copyright notices, and
licences."""

from __future__ import annotations

import gzip
import itertools

import pytest

from stages.document import Document
from stages.extract.html.metadata import describe
from stages.extract.html.step import Html
from stages.filter.rights import CLAIMS, Rights, licences
from stages.read.reader import Slice
from stages.read.warc import Warc
from stages.text.robots import directives


@pytest.mark.parametrize(("said", "found"), [
    ("index, follow, max-image-preview:large", ()),
    ("NoIndex,NOAI , noimageai", ("noai", "noimageai", "noindex")),
    ("none", ("noindex",)),
    ("noindex noai", ("noai", "noindex")),
    ("googlebot: noindex, nosnippet", ()),
    ("noarchive, somebot: noai, nosnippet", ("noarchive",)),
    ("somebot: noai, *: nosnippet", ("nosnippet",)),
    ("somebot: noindex, nosnippet\nnoai, noarchive", ("noai", "noarchive")),
    ("unavailable_after: Wed, 03 Dec 2025 13:09:53 PST, noai", ("noai",)),
    ("max-snippet:-1, noindex", ("noindex",)),
    ("noindexed, xnoai", ()), ("", ()), ("," * 5000 + "noai", ())])
def test_directives_for_all_robots(said, found):
    assert directives(said) == found


@pytest.mark.parametrize(("head", "meta"), [
    ('<meta name="robots" content="index, follow">', {}),
    ('<meta name="robots" content="noindex, NOAI, noimageai"/>', {"robots": "noai, noimageai, noindex"}),
    ("<meta content=noai name=ROBOTS><meta name='robots' content='nosnippet'>", {"robots": "noai, nosnippet"}),
    ('<meta name="googlebot" content="noindex">', {}),
    ('<meta name="tdm-reservation" content="1"><meta name="tdm-policy" content="https://x.org/tdm.json">',
     {"tdm": "1", "tdm_policy": "https://x.org/tdm.json"}),
    ('<meta name="dcterms.rights" content="© 2020 A. Press"><meta name="copyright" content="B">',
     {"rights": "© 2020 A. Press"})])
def test_what_the_head_of_a_page_says(head, meta):
    assert describe(f"<html><head>{head}</head><body><p>Words.</p></body></html>") == meta


def response(body: str, *headers: str) -> bytes:
    http = "\r\n".join(["HTTP/1.1 200 OK", "Content-Type: text/html", *headers, "", body]).encode()
    head = ("WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:1>\r\nWARC-Date: 2024-01-01T00:00:00Z\r\n"
            f"WARC-Target-URI: http://x.org/\r\nContent-Length: {len(http)}\r\n\r\n")
    return head.encode() + http + b"\r\n\r\n"


def test_from_the_archive_to_the_verdict(tmp_path):
    """Headers and heads of pages, through reader, extraction and step."""
    body = "<html><head>{}</head><body><main>" + "<p>Some words that are the text of this page, and more.</p>" * 20 + \
           "</main></body></html>"
    records = [
        response(body.format(""), "X-Robots-Tag: noarchive", "x-robots-tag: bot: noindex", "X-Robots-Tag: noai"),
        response(body.format(""), "TDM-Reservation: 1", "TDM-Policy: https://x.org/p", "Server: x"),
        response(body.format('<meta name="robots" content="noai">')),
        response(body.format('<meta name="tdm-reservation" content="0">'), "TDM-Reservation: 0"),
        response(body.format('<meta name="tdm-reservation" content="1">')),
    ]
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(gzip.compress(record) for record in records))
    docs = list(Warc().read(str(path), Slice("web", "a.warc.gz")))
    assert [doc.meta.get("http") for doc in docs] == [
        {"x-robots-tag": "noarchive\nbot: noindex\nnoai"},
        {"tdm-reservation": "1", "tdm-policy": "https://x.org/p"}, None, {"tdm-reservation": "0"}, None]
    html, rights = Html(), Rights(respect=["tdm", "noai"])
    html.setup()
    assert [html.process(doc) for doc in docs] == [None] * 5
    assert [rights.process(doc) for doc in docs] == ["rights_noai", "rights_tdm", "rights_noai", None, "rights_tdm"]
    first = docs[0].signals
    assert (first["rights_noarchive"], first["rights_noindex"], first["rights_tdm"]) == (1, 0, 0)


def said(text: str, **meta) -> dict[str, float]:
    doc = Document("0" * 32, text, meta=meta)
    assert Rights().process(doc) is None
    assert set(doc.signals) == set(Rights.signals)
    return {name.removeprefix("rights_"): value for name, value in doc.signals.items() if value}


@pytest.mark.parametrize(("text", "notices"), [
    ("© 2020 The Press", 1), ("Copyright © 2019-2020 Press", 1), ("Copyright (c) 1999 Press. ©2001", 2),
    ("(C) 2011", 1),
    ("COPYRIGHT BY 2011 Press", 1), ("Foto: © Reuters", 1), ("℗ 1999 Records", 1),
    ("Copyright law of 2020 is a law", 0), ("a copyrighted 2020 work", 0), ("section (c) of 2020", 0), ("in 2020", 0),
    ("option (c) 20200", 0), ("©", 0)])
def test_copyright_notices(text, notices):
    assert said(f"Some words. {text}").get("copyright", 0) == notices


@pytest.mark.parametrize("text", [
    "All Rights Reserved.", "Alle Rechte vorbehalten", "TOUS DROITS RÉSERVÉS", "版权所有", "無断転載を禁じます",
    "Все права защищены",
    "Alle rettigheter reservert", "무단전재", "무단 전재", "جميع الحقوق محفوظة", "Tüm hakları saklıdır",
    "TÜM HAKLARI SAKLIDIR"])
def test_rights_reserved(text):
    assert said(text) == {"reserved": 1}
    assert said("All rights and duties. Alle Rechte und Pflichten.") == {}


@pytest.mark.parametrize(("text", "found"), [
    ("under the Creative Commons Attribution-ShareAlike 4.0 International License", ["cc-by-sa-4.0"]),
    ("a Creative Commons Attribution License (CC BY 4.0)", ["cc-by-4.0"]),
    ("Creative Commons Attribution-NonCommercial-NoDerivs 3.0", ["cc-by-nc-nd-3.0"]),
    ("Creative Commons Attribution-NonCommercial-NoDerivatives 4.0", ["cc-by-nc-nd-4.0"]),
    ("Creative Commons CC0", ["cc0"]), ("is CC0.", ["cc0"]),
    ("CC-BY-SA-3.0 and cc-by-nc", ["cc-by-nc", "cc-by-sa-3.0"]),
    ("https://creativecommons.org/licenses/by-nc/4.0/", ["cc-by-nc-4.0"]),
    ("creativecommons.org/publicdomain/zero/1.0/ creativecommons.org/publicdomain/mark/1.0", ["cc0", "public-domain"]),
    ("This book is in the public domain.", ["public-domain"]), ("GNU Free Documentation License", ["gfdl"]),
    ("Open Government Licence v3.0", ["ogl"]), ("Open Database License", ["odbl"]),
    ("Creative Commons is an organisation.", []), ("sent in cc by mail, CC BYTES, CC00", []), ("", [])])
def test_licences(text, found):
    assert licences(text) == found


def test_licences_that_let_anybody_and_those_that_do_not():
    assert said("CC BY 4.0") == said("x", license="https://creativecommons.org/licenses/by/4.0/") == {"open": 1}
    assert said("CC BY-NC 4.0") == {"restricted": 1}
    assert said("CC BY-NC 4.0, CC0") == {"restricted": 1, "open": 1}
    assert said("x", licence="Apache-2.0") == {"open": 1}
    doc = Document("0" * 32, "CC BY 4.0")
    Rights().process(doc)
    assert doc.meta == {"licences": ["cc-by-4.0"]}
    doc = Document("0" * 32, "nothing")
    Rights().process(doc)
    assert doc.meta == {}


def test_what_stands_at_the_ends_of_a_long_text_counts():
    words = "word " * 10_000
    assert said(f"© 2020 A {words} © 2021 B", rights="© 2022 C") == {"copyright": 3}
    assert said(f"{words} © 2020 A {words}") == {}


@pytest.mark.parametrize("meta", [
    {"http": "noai", "robots": 3, "tdm": 1, "rights": None, "license": [], "licence": {}},
    {"http": {"x-robots-tag": ["noai"], "tdm-reservation": True}, "robots": ["noai"]}])
def test_meta_of_other_makes_is_no_error(meta):
    assert said("x", **meta) == {}


def test_respect_drops_what_it_names_and_is_replayed_from_signals():
    doc = Document("0" * 32, "© 2020 A. All rights reserved.", meta={"robots": "noai"})
    Rights().process(doc)
    for n in (0, 1, 2):
        for respect in itertools.permutations(CLAIMS, n):
            stage = Rights(respect=respect)
            again = Document("0" * 32, "© 2020 A. All rights reserved.", meta={"robots": "noai"})
            reason = stage.process(again)
            assert reason == stage.verdict(Document("0" * 32, "", signals=doc.signals))
            assert reason == next((f"rights_{w}" for w in respect if w in ("noai", "reserved", "copyright")), None)
    assert Rights().key(("signal",)) == Rights(respect=["tdm"]).key(("signal",))


def test_hostile_texts_take_time_in_proportion():
    for unit in ("creative commons ", "copyright ", "© ", "creative  commons attribution - ", "cc-by-", "(c) (c)"):
        said(unit * 4000)
