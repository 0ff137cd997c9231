"""PDF extraction: text or a counted reason for every file, damaged, encrypted and hostile ones too."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter

import pytest

from stages import stage
from stages.document import Document
from stages.extract.pdf import Pdf, inflates_beyond, paragraphs
from tests.conftest import shared_data


def pdf(*contents: bytes, filters: bytes = b"", trailer: bytes = b"") -> bytes:
    """A PDF with one page for each content stream."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(contents)))
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(contents), kids),
               b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    for i, content in enumerate(contents):
        objects += [b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Resources<</Font<</F 3 0 R>>>>/Contents %d 0 R>>"
                    % (5 + 2 * i), b"<</Length %d%s>>stream\n%s\nendstream" % (len(content), filters, content)]
    out, places = b"%PDF-1.4\n", []
    for n, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (n, body)
    table = b"".join(b"%010d 00000 n \n" % p for p in places)
    return out + (b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF"
                  % (len(objects) + 1, table, len(objects) + 1, trailer, len(out)))


def lines(*texts: str) -> bytes:
    return b"".join(b"BT /F 9 Tf 20 %d Td (%s) Tj ET\n" % (780 - 12 * i, t.encode()) for i, t in enumerate(texts))


def run(raw: bytes | None, **config: object) -> tuple[str | None, Document]:
    doc = Document("id", raw=raw, mime="application/pdf")
    return Pdf(**config).process(doc), doc


def test_text_and_signals():
    reason, doc = run(pdf(lines("A first line.", "A second."), lines("The next page.")))
    assert reason is None and doc.text == "A first line.\nA second.\n\nThe next page."
    assert doc.signals == {"pdf_pages": 2.0, "pdf_chars_per_page": pytest.approx(18.5, abs=3), "pdf_garbled": 0.0}
    assert set(doc.signals) == set(Pdf.signals)


@pytest.mark.parametrize(("reason", "raw", "config"), [
    ("not_pdf", b"", {}), ("not_pdf", b"<html>", {}), ("pdf_damaged", b"%PDF-1.4\nrubbish", {}),
    ("pdf_damaged", pdf(lines("x"))[:40], {}), ("pdf_no_text", pdf(b""), {}), ("pdf_no_text", None, {}),
    ("pdf_too_large", pdf(lines("x")), {"max_bytes": 100}),
    ("pdf_too_many_pages", pdf(*[lines("x")] * 5), {"max_pages": 4}),
    ("pdf_too_many_chars", pdf(*[lines("x" * 50)] * 5), {"max_chars": 120}),
])
def test_reasons(reason, raw, config):
    assert run(raw, **config)[0] == reason


def test_a_file_cut_in_the_middle_is_text_or_reason():
    whole = pdf(*[lines(f"Page number {i}.") for i in range(20)])
    for cut in range(0, len(whole), 97):
        reason, doc = run(whole[:cut])
        assert bool(doc.text) == (reason is None) and reason in (None, "not_pdf", "pdf_damaged", "pdf_no_text")


def test_bombs():
    bomb = zlib.compress(b" " * 50_000_000, 9)
    raw = pdf(bomb, filters=b"/Filter/FlateDecode")
    assert len(raw) < 100_000 and run(raw, max_inflated=40_000_000)[0] == "pdf_too_large"
    twice = pdf(zlib.compress(bomb, 9), filters=b"/Filter[/FlateDecode /FlateDecode]")
    assert run(twice)[0] == "pdf_too_large"
    fine = pdf(zlib.compress(lines("Some text.")), filters=b"/Filter/FlateDecode")
    assert run(fine)[1].text == "Some text." and not inflates_beyond(fine, 10_000)


def test_inflated_bytes_are_summed_over_streams():
    raw = pdf(*[zlib.compress(lines(f"x{i}") + b" " * 1000) for i in range(30)], filters=b"/Filter/FlateDecode")
    assert inflates_beyond(raw, 29_000) and not inflates_beyond(raw, 60_000)


# -- lines to paragraphs ---------------------------------------------------------------------------------------------
LONG = "This line is about as long as all of the wrapped lines of this page are"


@pytest.mark.parametrize(("pages", "text"), [
    ([f"{LONG}\r\nand goes on here.\r\nNew one."], f"{LONG} and goes on here.\nNew one."),
    ([f"{LONG}.\r\nAnother paragraph."], f"{LONG}.\nAnother paragraph."),
    (["hyphen\x02ation and soft\xad\r\nhyphen ﬁne ﬂow"], "hyphenation and softhyphen fine flow"),
    ([f"{LONG}\r\n• item one\r\n• item two"], f"{LONG}\n• item one\n• item two"),
    (["日本語の文章はこのように\r\n書かれています"], "日本語の文章はこのように書かれています"),
    ([f"{LONG} and", "runs on to the next page."], f"{LONG} and runs on to the next page."),
    ([f"{LONG}.", "A new page."], f"{LONG}.\n\nA new page."), ([""], ""), ([], ""), (["a\x00b\x07"], "ab"),
])
def test_paragraphs(pages, text):
    assert paragraphs(pages) == text


def test_running_heads_and_page_numbers_go():
    pages = [f"The Title of the Book\r\nText of page {i} that says something.\r\n{i}" for i in range(1, 7)]
    text = paragraphs(pages)
    assert "The Title" not in text and text.count("says something.") == 6
    assert not re.search(r"^\d+$", text, re.MULTILINE)


# -- real data -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "least"), [
    ("debian-faq.en", 0.97), ("debian-faq.fr", 0.97), ("debian-faq.pt", 0.97), ("maint-guide.de", 0.96),
    ("maint-guide.ru", 0.93), ("maint-guide.vi", 0.96)])
def test_manuals_against_their_source(name, least):
    folder = shared_data("pdf", "debian-pairs")
    reason, doc = run((folder / f"{name}.pdf").read_bytes())
    source = gzip.decompress((folder / f"{name}.txt.gz").read_bytes()).decode()
    a, b = (Counter(re.findall(r"\w+", t)) for t in (doc.text, source))
    assert reason is None and 2 * (a & b).total() / (a.total() + b.total()) >= least
    assert doc.signals["pdf_pages"] > 50 and doc.signals["pdf_garbled"] < 0.001 and doc.meta["title"]


def test_hard_files_end_as_text_or_reason():
    seen: Counter[str] = Counter()
    for path in sorted(shared_data("pdf", "hard").rglob("*.pdf")):
        reason, doc = run(path.read_bytes())
        assert bool(doc.text) == (reason is None)
        doc.text.encode()
        seen[reason or "text"] += 1
    assert sum(seen.values()) >= 130 and seen["text"] >= 60 and seen["pdf_encrypted"] >= 3
    assert set(seen) <= {"text", "not_pdf", "pdf_no_text", "pdf_encrypted", "pdf_damaged", "pdf_too_large"}


def test_same_text_again():
    raw = (shared_data("pdf", "debian-pairs") / "maint-guide.de.pdf").read_bytes()
    assert run(raw)[1].text == run(raw)[1].text


def test_layout_is_numeric(monkeypatch):
    """PDFium places characters in floating point: the pass ends after it, its key names the CPU (contracts §5)."""
    assert not Pdf.exact
    key = Pdf().key()
    monkeypatch.setattr(stage, "cpu_tag", lambda: "another")
    assert Pdf().key() != key
