"""The wiki reader: markup becomes text, dumps are read as streams, hostile XML is refused, and damage is counted."""

from __future__ import annotations

import bz2
import gzip
import re
import time
from collections import Counter
from xml.parsers import expat

import pytest

from stages.document import BadRecord, Document, document_id
from stages.read import wiki
from stages.read.reader import Skipped, Slice
from stages.read.wiki import Wiki
from stages.read.wikitext import plain
from tests.conftest import shared_data
from tests.stages.texts import assert_linear

SITE = "<siteinfo><base>https://en.wikipedia.org/wiki/Main_Page</base></siteinfo>"


def dump(*pages: str, head: str = '<mediawiki xml:lang="en">', tail: str = "</mediawiki>") -> bytes:
    return (head + SITE + "".join(pages) + tail).encode()


def page(title: str, text: str, *, ns: int = 0, extra: str = "", model: str = "wikitext") -> str:
    return (f"<page><title>{title}</title><ns>{ns}</ns><id>12</id>{extra}<revision><id>99</id>"
            f"<timestamp>2020-01-02T03:04:05Z</timestamp><contributor><username>U</username><id>5</id></contributor>"
            f"<model>{model}</model><text xml:space=\"preserve\">{text}</text></revision></page>")


def read(local: object, **config: object) -> list[Document | BadRecord]:
    return list(Wiki(**config).read(str(local), Slice("w", "dump.xml")))


def reasons(items: list[Document | BadRecord]) -> Counter[str]:
    return Counter(i.reason if isinstance(i, BadRecord) else "document" for i in items)


@pytest.mark.parametrize(("markup", "text"), [
    ("'''Bold''' and ''italic''", "Bold and italic"),
    ("A [[link]], a [[target|label]], [[a (b)|]]s.", "A link, a label, s."),
    ("x[[File:A.jpg|thumb|A [[caption]] with {{t}}]]y [[Category:Z]][[de:Zett]][[:Category:Q|shown]]", "xy shown"),
    ("See [http://x.org the site] or [https://y.org].", "See the site or."),
    ("Text.<ref name=a>Note [[x]] {{cite|y}}</ref> More<ref name=a /> text<ref group=\"n\"/>.", "Text. More text."),
    ("before<!-- comment [[x]] --> after <!-- open", "before after"),
    ("a {{template|{{nested|[[x]]}}|b}} c", "a c"),
    ("{{lang|fr|bonjour}} {{nowrap|10 m}} {{convert|5|km}} 1{{ndash}}2{{nbsp}}x", "bonjour 10 m 5 km 1–2 x"),
    ("Anarchism ({{IPA|x}}; {{lang-el|ἀν}}) is", "Anarchism (ἀν) is"),
    ("Anarchism ({{IPA|x}}, {{y}}) is", "Anarchism is"),
    ("before\n{| class=wikitable\n|-\n| a || b\n{| nested\n|}\n|}\nafter", "before\n\nafter"),
    ("<math>\\frac{a}{b}</math> is <nowiki>x</nowiki> <br/>new", "$\\frac{a}{b}$ is x\nnew"),
    ("&lt;b&gt; &amp;amp; &nbsp;x", "<b> &amp; x"),
    ("__NOTOC__\nText", "Text"),
    ("* one\n* two\n# three\n: four\n; five", "- one\n- two\n1. three\nfour\nfive"),
    ("Intro\n== Head ==\nText\n=== Sub ===\n== Empty ==\n== See also ==\n{{reflist}}", "Intro\n\n## Head\n\nText"),
    ("== A ==\n=== B ===\nText", "## A\n\n### B\n\nText"),
    ("<ref>never closed. Text goes on", "never closed. Text goes on"),
    ("a [[b|c", "a b|c"), ("a {{b", "a b"), ("a ]] b }} c |} d", "a b c |} d"),
    ("[http://x   spaced label] [http://x  ]", "spaced label"),
    ("&#0065; &#" + "0" * 6000 + "66; &#" + "9" * 6000 + "; &#" + "7" * 6000 + " end", "A B \ufffd \ufffd end"),
    ("", ""), ("{{only a template}}", ""),
    # brackets and commas that templates leave
    ("Adobe ({{IPA|x}}; {{IPA|y}}, from Spanish: ''mud'') is", "Adobe (from Spanish: mud) is"),
    ("Albania (''Shqipëria''; {{IPA|x}}) has {{IPA|a}}, {{IPA|b}}, {{IPA|c}}, and", "Albania (Shqipëria) has, and"),
    ("* {{cite|a}}.\n* {{cite|b}}.\nText", "Text"), ("CO<sub>2,</sub> x<sup>,</sup>y", "CO₂, x,y"),
    # templates: ranges, named and numbered arguments, parser functions
    ("{{convert|5|to|10|km|mi}} {{cvt|3|x|4|m}} {{convert|5|km|mi}}", "5 to 10 km 3 × 4 m 5 km"),
    ("{{formatnum:12345}} {{lc:ABC}} {{#if:x|y|z}} {{DEFAULTSORT:A}}b", "12345 ABC b"),
    ("{{quote|text=Be it so.|author=A}} {{lang|1=fr|2=bonjour}} {{math|x {{=}} 2}}", "Be it so. bonjour x = 2"),
    ("{{lang|en|<span style=\"x\">a</span>}} {{US$|5}} {{chem|H|2|O}} {{s-|XIX}}", "a $5 H₂O XIXe siècle"),
    # other wikis: files, categories, languages, variants of Chinese
    ("a[[Datei:X.jpg|mini|Bild]]b[[Catégorie:Y]]c[[ファイル:z.png]]d[[Категория:E]]", "abcd"),
    ("[[Portal:Art|art]] and [[Help:IPA|sound]] [[Wikipedia:Stub]][[zh-min-nan:X]][[be-x-old:Y]][[simple:Z]]",
     "art and sound"),
    ("-{zh-hans:计算机; zh-hant:電腦}-是-{A|zh-hans:机器;zh-hant:機器}- -{T|zh:甲}--{原}-", "计算机是机器 原"),
    ("{| class=wikitable\n! a !! b\n|-\n| x || style=\"color:red\" {{yes}}\n|}", "| a | b |\n|---|---|\n| x |  |"),
])
def test_markup(markup, text):
    assert plain(markup) == text


@pytest.mark.parametrize("unit", ["{{", "[[", "{|", "}}", "{{a|", "[[a|", "<ref>", "<!--", "'''", "[http://x ", "= ",
                                  "(", "&#", "<a ", "{{a}}[[b]]", "\n{|\n", "( , ", "<ref name=", "{{{", "}}}"])
def test_hostile_markup_takes_linear_time(unit):
    assert_linear(plain, lambda n: unit * n, 4_000)


@pytest.mark.parametrize("make", [
    lambda n: "[http://x" + " " * n, lambda n: "[http://x" + " \t" * n + "\n]", lambda n: "(" + " or" * n,
    lambda n: "<a " + "x " * n, lambda n: "&#" + "1" * n, lambda n: "'" * n, lambda n: " " * n + "{|"])
def test_one_long_run_takes_linear_time(make):
    """A pattern that shares a run between two repetitions tries every way to share it, once there is no end."""
    assert_linear(plain, make, 4_000)


ARTICLE = """{{Short description|Light from a surface}}
{{Infobox quantity|name=Albedo|symbol=''α''}}
'''Albedo''' ({{IPAc-en|æ|l}}; from {{lang-la|albedo}} "whiteness")<ref>{{cite book|title=A}}</ref> is the fraction of
[[sunlight]] that is [[Diffuse reflection|diffusely reflected]].<!-- lead -->
[[File:Albedo.svg|thumb|upright=1.2|Share of [[sunlight]] reflected<ref name="b"/>]]
== Surfaces ==
{{Main|Snow}}
It is <math>\\alpha = 1 - A</math> at {{convert|20|°C}}:
* fresh snow: 0.8
** old snow: 0.5
* [[water|open water]]
{| class="wikitable sortable" style="text-align:center"
|+ Sample albedos
! Surface !! Typical<br />albedo
|-
| Fresh asphalt || 0.04<ref>{{cite web|url=http://x.org}}</ref>
|-
| [[Ocean ice]] || 0.50 to 0.70
|}
=== Trees ===
See [http://x.org the data]; CO<sub>2</sub> matters.
== Gallery ==
<gallery>
File:A.jpg|A
</gallery>
== References ==
{{reflist}}
[[Category:Light]]
[[de:Albedo]]"""
ARTICLE_TEXT = """Albedo (from albedo "whiteness") is the fraction of
sunlight that is diffusely reflected.

## Surfaces

It is $\\alpha = 1 - A$ at 20 °C:
- fresh snow: 0.8
  - old snow: 0.5
- open water

| Surface | Typical albedo |
|---|---|
| Fresh asphalt | 0.04 |
| Ocean ice | 0.50 to 0.70 |

### Trees

See the data; CO₂ matters."""


def test_an_article_one_would_train_on():
    assert plain(ARTICLE) == ARTICLE_TEXT


def test_redirects_are_known_in_any_language(tmp_path):
    """Dumps of old, and of other software, have no <redirect>."""
    texts = ["#REDIRECT [[A]]", "#WEITERLEITUNG [[A]]", "# перенаправление: [[A]] {{R from x}}",
     "#重定向 [[A]]\n[[Category:B]]"]
    lists = ["# Foo [[A]]\n# Bar [[B]]", "#REDIRECT is a command. [[A]]"]
    (tmp_path / "a").write_bytes(dump(*(page("T", t) for t in texts + lists)))
    assert reasons(read(tmp_path / "a")) == {"redirect": 4, "document": 2}


def test_a_dump_says_what_its_namespaces_are_called(tmp_path):
    names = '<namespaces><namespace key="6">Skrá</namespace><namespace key="14">Flokkur</namespace></namespaces>'
    xml = dump(page("T",
     "a[[Skrá:X.jpg|thumb|Y]][[Flokkur:Z]][[Image:I.png]]b")).replace(b"</base>", b"</base>" + names.encode())
    (tmp_path / "a").write_bytes(xml)
    (doc,) = read(tmp_path / "a")
    assert doc.text == "ab" and doc.mime == "text/markdown"


def as_multistream(xml: bytes, pages: int) -> bytes:
    """Compress a dump as dumps.wikimedia.org does: the head, each group of `pages` pages, and the tail are separate
    streams."""
    head, tail = xml.index(b"<page>"), xml.rindex(b"</page>") + 7
    found = re.findall(rb"<page>.*?</page>", xml[head:tail], re.DOTALL)
    streams = [xml[:head], *(b"".join(found[i:i + pages]) for i in range(0, len(found), pages)), xml[tail:]]
    return b"".join(map(bz2.compress, streams))


@pytest.mark.parametrize("kind", ["plain", "multistream"])
def test_pieces_of_a_dump_are_the_dump(tmp_path, kind):
    names = '<namespaces><namespace key="6">Skrá</namespace></namespaces>'
    xml = dump(*(page(f"P{i}", f"Größe {i} [[Skrá:x]]" * (i % 7 + 1), ns=i % 5 == 4) for i in range(60)))
    xml = xml.replace(b"</base>", b"</base>" + names.encode())
    local = tmp_path / "dump.xml"
    local.write_bytes(xml if kind == "plain" else as_multistream(xml, 4))
    reader = Wiki()
    whole = [(i.id, i.locator, getattr(i, "text", i.__class__.__name__), getattr(i, "url", "")) for i in read(local)]
    assert len(whole) == 60
    for target, most in ((1, 61), (2_000, 15), (10**6, 0)):
        pieces = reader.splits(str(local), "dump.xml", target) or []
        assert len(pieces) <= most and (target == 10**6 or len(pieces) > 5)
        if pieces:
            found = [i for s in pieces for i in reader.read(str(local), s.of("w", "dump.xml"))]
            assert [(i.id, i.locator, getattr(i, "text", i.__class__.__name__), getattr(i, "url",
             "")) for i in found] == whole
            assert sum(s.bytes for s in pieces) == len(xml) and sum(s.records for s in pieces) == 60
            assert (pieces[0].start, pieces[-1].stop) == (0, local.stat().st_size)
            assert reader.needs(pieces[1].of("w", "d"), 10**9, lambda a, b: b"")[1] == (pieces[1].start, pieces[1].stop)


@pytest.mark.parametrize("make", [
    lambda xml: xml[:-30], lambda xml: xml.replace(b"P3<", b"P3</x><"), bz2.compress, gzip.compress,
    lambda xml: xml.replace(b"<mediawiki", b"<!DOCTYPE a><mediawiki"), lambda xml: xml.replace(b"</siteinfo>", b""),
    lambda xml: b'<?xml version="1.0" encoding="latin-1"?>' + xml, lambda xml: xml.replace(b"<page>", b"<x><page>", 1),
    lambda xml: as_multistream(xml, 4)[:-20], lambda xml: as_multistream(xml, 4).replace(b"BZh9", b"BZh0", 1)])
def test_a_dump_that_is_damaged_or_odd_is_not_cut(tmp_path, make):
    """Reading the pieces would not stop where reading the whole stops."""
    (tmp_path / "a").write_bytes(make(dump(*(page(f"P{i}", f"Text {i}") for i in range(9)))))
    assert Wiki().splits(str(tmp_path / "a"), "a.xml", 1) is None


def test_pages_and_what_is_counted(tmp_path):
    local = tmp_path / "a"
    local.write_bytes(dump(
        page("One &amp; two", "Text of ''one''."), page("Talk:One", "chat", ns=1),
        page("R", "#REDIRECT [[One]]", extra='<redirect title="One" />'), page("Empty", "{{stub}}"),
        page("Module", "return 1", model="Scribunto"), page("Big", "x" * 5000),
        page("Last", "Größe &lt;b&gt;fett&lt;/b&gt;")))
    items = read(local, max_bytes=4000)
    assert reasons(items) == {"document": 2, "namespace": 1, "redirect": 1, "empty": 1, "content_model": 1,
                              "too_large": 1}
    assert [i.locator["record"] for i in items] == list(range(7))
    assert [type(i) for i in items if isinstance(i, BadRecord)].count(Skipped) == 4
    one, last = items[0], items[-1]
    assert (one.text, one.date) == ("Text of one.", "2020-01-02T03:04:05Z")
    assert one.url == "https://en.wikipedia.org/wiki/One_%26_two"
    assert one.meta == {"title": "One & two", "page_id": "12"}
    assert one.id == document_id("w", "dump.xml", "", 0) and last.text == "Größe fett"
    assert read(local, markup=True)[0].text == "Text of ''one''."
    assert reasons(read(local, namespaces=(1,)))["document"] == 1


@pytest.mark.parametrize("head", [
    '<!DOCTYPE lolz [<!ENTITY lol "lol"><!ENTITY lol1 "&lol;&lol;">]><mediawiki>',
    '<!DOCTYPE m SYSTEM "file:///etc/passwd"><mediawiki>',
    '<!DOCTYPE m [<!ENTITY x SYSTEM "file:///etc/passwd">]><mediawiki>',
])
def test_document_types_and_entities_are_refused(tmp_path, head):
    (tmp_path / "a").write_bytes(dump(page("One", "&lol1;"), head=head))
    (item,) = read(tmp_path / "a")
    assert item.reason == "xml_doctype" and item.fatal


@pytest.mark.parametrize("begin", [b"x", b"<mediawiki><page a='x", b"<!--x"])
def test_a_tag_without_end_is_not_looked_at_again_and_again(tmp_path, begin):
    (tmp_path / "a").write_bytes(begin + begin[-1:] * (6 << 20))
    began = time.process_time()
    (item,) = read(tmp_path / "a")
    assert item.fatal and Wiki().splits(str(tmp_path / "a"), "a.xml", 1 << 20) is None
    assert time.process_time() - began < 5, "the whole file looked at once for each block takes minutes"


def test_hostile_nesting_and_fields(tmp_path):
    (tmp_path / "a").write_bytes(dump("<a>" * 5000))
    assert reasons(read(tmp_path / "a")) == {"xml_doctype": 1}
    (tmp_path / "b").write_bytes(dump(page("t" * 100_000, "text"), page("Two", "text")))
    assert reasons(read(tmp_path / "b")) == {"too_large": 1, "document": 1}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_cut_and_broken_dumps_keep_what_came_before(tmp_path, pack):
    pages = [page(f"P{i}", f"Text number {i}. " + "word " * 400) for i in range(100)]
    local = tmp_path / "a"
    data = pack(dump(*pages))
    local.write_bytes(data)
    assert reasons(read(local)) == {"document": 100}
    local.write_bytes(data[:len(data) * 3 // 4])
    items = read(local)
    assert items[-1].fatal and items[-1].reason == "truncated"
    if pack is not bz2.compress:
        assert len(items) > 50
    local.write_bytes(pack(dump(*pages[:50], "<broken", *pages[50:])))
    items = read(local)
    assert reasons(items) == {"document": 50, "corrupt_xml": 1} and items[-1].fatal


def test_empty_file(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (item,) = read(tmp_path / "a")
    assert item.fatal


def test_real_dump():
    items = read(shared_data("text", "enwiki-slice.xml.bz2"))
    assert reasons(items) == {"document": 106, "redirect": 99, "namespace": 1}
    docs = [i for i in items if isinstance(i, Document)]
    kept = re.compile(r"\$\$?[^$\n]+\$\$?|^```.*?^```|^ *\|[^\n]*\|$", re.M | re.S)        # formulas, code, tables
    text = "\n".join(kept.sub("", d.text) for d in docs)
    assert 2_500_000 < len(text) < 3_500_000
    assert not any(mark in text for mark in ("{{", "}}", "[[", "]]", "{|", "''", "<ref", "=="))
    assert docs[0].meta["title"] == "Anarchism" and docs[0].url == "https://en.wikipedia.org/wiki/Anarchism"
    assert docs[0].text.startswith("Anarchism is a political philosophy that advocates self-governed societies")


def test_no_memory_is_no_damage(tmp_path, monkeypatch):
    """expat says it as it says a syntax error; the page must not be lost to a machine that is too small."""
    (tmp_path / "a.xml").write_bytes(dump(page("One", "Text.")))

    def full(self: object, block: bytes, last: bool) -> None:
        error = expat.ExpatError("out of memory: line 1, column 0")
        error.code = expat.errors.codes[expat.errors.XML_ERROR_NO_MEMORY]
        raise error

    monkeypatch.setattr(wiki._Pages, "feed", full)
    with pytest.raises(MemoryError):
        read(tmp_path / "a.xml")
