"""Wiki reader: markup to text, dumps streamed, hostile XML refused, damage counted."""

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
    ("Intro\n== Head ==\nText\n=== Sub ===\n== Empty ==\n== See also ==\n{{reflist}}", "Intro\n\nHead\n\nText"),
    ("== A ==\n=== B ===\nText", "A\n\nB\n\nText"),
    ("<ref>never closed. Text goes on", "never closed. Text goes on"),
    ("a [[b|c", "a b|c"), ("a {{b", "a b"), ("a ]] b }} c |} d", "a b c |} d"),
    ("[http://x   spaced label] [http://x  ]", "spaced label"),
    ("&#0065; &#" + "0" * 6000 + "66; &#" + "9" * 6000 + "; &#" + "7" * 6000 + " end", "A B \ufffd \ufffd end"),
    ("", ""), ("{{only a template}}", ""),
])
def test_markup(markup, text):
    assert plain(markup) == text


@pytest.mark.parametrize("unit", ["{{", "[[", "{|", "}}", "{{a|", "[[a|", "<ref>", "<!--", "'''", "[http://x ", "= ",
                                  "(", "&#", "<a ", "{{a}}[[b]]", "\n{|\n", "( , ", "<ref name=", "{{{", "}}}"])
def test_hostile_markup_takes_linear_time(unit):
    assert_linear(lambda n: unit * n)


@pytest.mark.parametrize("make", [
    lambda n: "[http://x" + " " * n, lambda n: "[http://x" + " \t" * n + "\n]", lambda n: "(" + " or" * n,
    lambda n: "<a " + "x " * n, lambda n: "&#" + "1" * n, lambda n: "'" * n, lambda n: " " * n + "{|"])
def test_one_long_run_takes_linear_time(make):
    """A pattern that shares a run between two repetitions tries every way to share it, once there is no end."""
    assert_linear(make)


def assert_linear(make):
    began = time.process_time()
    plain(make(20_000))
    small = time.process_time() - began
    began = time.process_time()
    plain(make(200_000))
    assert time.process_time() - began < 40 * max(small, 0.05), "10 times the markup, not 100 times the time"


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


def test_hostile_nesting_and_fields(tmp_path):
    (tmp_path / "a").write_bytes(dump("<a>" * 5000))
    assert reasons(read(tmp_path / "a")) == {"xml_doctype": 1}
    (tmp_path / "b").write_bytes(dump(page("t" * 100_000, "text"), page("Two", "text")))
    assert reasons(read(tmp_path / "b")) == {"too_large": 1, "document": 1}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_cut_and_broken_dumps_keep_what_came_before(tmp_path, pack):
    pages = [page(f"P{i}", f"Text number {i}. " + "word " * 2000) for i in range(300)]
    local = tmp_path / "a"
    data = pack(dump(*pages))
    local.write_bytes(data)
    assert reasons(read(local)) == {"document": 300}
    local.write_bytes(data[:len(data) * 3 // 4])
    items = read(local)
    assert items[-1].fatal and items[-1].reason == "truncated"
    if pack is not bz2.compress:
        assert len(items) > 150
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

    def full(self: object, block: bytes) -> None:
        error = expat.ExpatError("out of memory: line 1, column 0")
        error.code = expat.errors.codes[expat.errors.XML_ERROR_NO_MEMORY]
        raise error

    monkeypatch.setattr(wiki._Pages, "feed", full)
    with pytest.raises(MemoryError):
        read(tmp_path / "a.xml")
