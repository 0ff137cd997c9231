"""PDF extraction: every file gives a text or a counted reason, also if it is damaged, encrypted or hostile."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from stages import stage
from stages.document import Document
from stages.extract.pdf.chars import pieces_of
from stages.extract.pdf.glyphs import logical
from stages.extract.pdf.layout import Line, PdfPage, blocks_of
from stages.extract.pdf.step import Pdf, inflates_beyond
from stages.extract.pdf.text import text_of
from tests.conftest import shared_data


def pdf(*contents: bytes, filters: bytes = b"", trailer: bytes = b"") -> bytes:
    """Return a PDF with one page for each content stream."""
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
    assert doc.signals == {
        "pdf_pages": 2.0, "pdf_chars_per_page": 15.5, "pdf_garbled": 0.0, "pdf_spaces": pytest.approx(0.2, abs=0.05),
        "pdf_wordlike": 1.0, "pdf_confidence": pytest.approx(0.5), "pdf_ocr": 0.0, "pdf_unread": 0.0}
    assert doc.meta == {"pdf_routes": "tt", "pdf_confidence": "90"}            # the second page has but 12 characters
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


def text_lines(*texts: str, left: int = 0, top: int = 0, high: int = 640, pitch: int = 768) -> list[Line]:
    """Return lines, one below the other. `high` is their height, and a character is half as wide."""
    return [Line(left, top + pitch * i, left + high // 2 * len(t), top + pitch * i + high, t, 0, False)
            for i, t in enumerate(texts)]


@pytest.mark.parametrize(("pages", "text"), [
    ([[LONG, "and goes on here.", "New one."]], f"{LONG} and goes on here.\nNew one."),
    ([[LONG, "A short one.", "Another paragraph."]], f"{LONG} A short one.\nAnother paragraph."),
    ([["a hyphen\x02", "ation and soft\xad", "hyphen ﬁne ﬂow"]], "a hyphenation and softhyphen fine flow"),
    ([["in-house well-known", "both in\x02", "house and un\x02", "cut well\x02", "known"]],
     "in-house well-known both in-house and uncut well-known"),
    ([["up-to\x02", "date USB\x02", "Maus and Debian\x02", "Kernel, pre\x02", "and post\x02", "war"]],
     "up-to-date USB-Maus and Debian-Kernel, pre- and postwar"),
    ([["time passes, time flies, depending, depending", "time\x02", "depending on ti\x02", "me"]],
     "time passes, time flies, depending, depending time-depending on time"),
    ([["wriƟng beƩer soŌware of Ōsaka", "ﻛﺘﺎﺏ in Pythonمن"]], "writing better software of Ōsaka كتاب in Python من"),
    ([["庄子曰： ﹁吾生也有涯 ， 而知也"]], "庄子曰：「吾生也有涯，而知也"),
    ([[LONG, LONG, "4. By default"]], f"{LONG} {LONG} 4. By default"),
    ([[LONG, LONG + ":", "4. By default"]], f"{LONG} {LONG}:\n4. By default"),
    ([[LONG, "• item one", "• item two"]], f"{LONG}\n• item one\n• item two"),
    ([["日本語の文章はこのように", "書かれています"]], "日本語の文章はこのように書かれています"),
    ([[f"{LONG} and"], ["runs on to the next page."]], f"{LONG} and runs on to the next page."),
    ([[f"{LONG}."], ["A new page."]], f"{LONG}.\n\nA new page."), ([[""]], ""), ([], ""), ([["a\x00b\x07"]], "ab"),
    ([["Contents . . . . . . . . . . 7"]], "Contents ... 7"),
])
def test_paragraphs(pages, text):
    assert text_of([PdfPage([text_lines(*page)], 50_000) for page in pages]) == text


def test_running_heads_and_page_numbers_go():
    pages = [pdf_lines("The Title of the Book", *[f"Words {'abcdefghi'[k] * i} in line." for k in range(9)], 40, i)
             for i in range(1, 7)]
    text = run(pdf(*pages))[1].text
    assert "The Title" not in text and text.count("in line") == 54
    assert not re.search(r"^\d+$", text, re.MULTILINE)


def pdf_lines(*texts: str | int) -> bytes:
    """Return the content of a page: lines one below the other from the top, and the last text at the height (in points)
    given before it."""
    *body, low, last = texts
    return lines(*map(str, body)) + b"BT /F 9 Tf 20 %d Td (%s) Tj ET\n" % (low, str(last).encode())


def test_what_does_not_repeat_or_count_stays():
    """Lines of code with their numbers, and text beside a name in the margin, at the edges of pages."""
    pages = [pdf_lines(f"{'abcdef'[i]} {'xyz' * i} = 1", *[f"word {'abcdefghi'[k] * i} in line." for k in range(9)],
                       40, "}") + b"BT /F 9 Tf 240 780 Td (%s) Tj ET\n" % str(7 * i * i + 3).encode() for i in range(6)]
    pages[1] = pages[1].replace(b"20 40 Td (})", b"20 42 Td (next)")
    kept = run(pdf(*pages[:2], *pages[4:]))[1].text
    assert all(f"{'abcdef'[i]} {'xyz' * i} = 1" .replace("  ", " ") in kept for i in (0, 1, 4, 5)) and "next" in kept


@pytest.mark.parametrize(("heads", "stay"), [
    ([f"Section {c} {k}" for k, c in enumerate("ABCDEFGH", 5)], False),          # counted: every head is another
    ([f"Section {c} {k * k + 40}" for k, c in enumerate("ABCDEFGH")], True),
    ([f"{n} Preface {c}" for n, c in zip(("iii", "iv", "v", "vi", "vii", "viii", "ix", "x"), "ABCDEFGH")], False),
    (["The same"] * 4 + ["Another"] * 4, False),
    ([f"Set {k} of {k * k} and {k ** 3} and {k ** 4 + 1} by {k + 3} in {k + 9} lines" for k in range(11, 19)], True),
    ([f"{k} 7.{k * k} {k ** 3}.5" for k in range(11, 90, 10)], True), ([f"Title {c}." for c in "ABCDEFGH"], True)])
def test_heads(heads, stay):
    pages = [pdf_lines(head, *[f"Words {'abcdefghi'[k] * i} in line." for k in range(9)], 400, "End.")
             for i, head in enumerate(heads, 1)]
    text = run(pdf(*pages))[1].text
    assert [head in text for head in heads] == [stay] * len(heads)


def test_page_numbers_far_from_the_edge_go_where_they_count():
    def told(number: Callable[[int], int]) -> list[str]:
        pages = [pdf_lines(*[f"Words {'abcdefghi'[k] * i} in line." for k in range(9)], 160 - 9 * i, number(i))
                 for i in range(1, 6)]
        return re.findall(r"^\d+$", run(pdf(*pages))[1].text, re.MULTILINE)

    assert told(lambda i: 16 + i) == [] and told(lambda i: 16 + i * i) == ["17", "20", "25", "32", "41"]


def test_accents_apart_from_their_letters():
    """As TeX's OT1 fonts draw them: \"u before the letter, the accent of a capital after the word."""
    content = (b"BT /F 10 Tf 100 700 Td (m) Tj 10 0 Td (\250) Tj -1.1 0 Td (ude caf) Tj 30.6 0 Td (\264) Tj -1.1 0 Td "
               b"(e na) Tj ET BT /F 10 Tf 100 650 Td (LECCION) Tj 33.5 2 Td (\264) Tj ET "
               b"BT /F 10 Tf 100 600 Td (cd ~a `ls` 3^x) Tj ET")
    raw = pdf(content).replace(b"/BaseFont/Helvetica", b"/BaseFont/Helvetica/Encoding/WinAnsiEncoding")
    assert run(raw)[1].text.split() == ["müde", "café", "na", "LECCIÓN", "cd", "~a", "`ls`", "3^x"]


def piece(text: str, boxes: list[int]) -> str:
    """Return `logical` of characters that are 10 wide and at these places."""
    return logical(text, [False] * len(text), [[10 * x, 0, 10 * x + 10, 20] for x in boxes])


@pytest.mark.parametrize(("text", "places", "wanted"), [
    ("بابك", [3, 2, 1, 0], "بابك"),                                             # as PDFium turned it
    ("كباب", [0, 1, 2, 3], "بابك"),                                             # as drawn
    ("كب (2024)", range(9), "(2024) بك"), ("ab كبا cd", range(9), "ab ابك cd"),
    ("كباب ab 12", range(10), "ab 12 بابك"), ("كب 12 34", range(8), "34 12 بك"),
    ("االبك", [3, 2, 2, 1, 0], "الابك"),                                        # a ligature has one box: alef, lam
    ("با\u064dك", [3, 2, 2, 1], "با\u064dك"), ("أي\u064bضا", [4, 3, 2, 2, 1], "أيض\u064bا")])
def test_right_to_left(text, places, wanted):
    assert piece(text, list(places)) == wanted


def test_columns_are_read_one_after_the_other():
    column = [f"column {{}} has in line {k} some words" for k in range(12)]
    content = b"".join(
        b"BT /F 9 Tf %d %d Td (%s) Tj ET\n" % (30 + 280 * side, 700 - 12 * k, t.format("ab"[side]).encode())
        for k, t in enumerate(column) for side in (0, 1))
    head = b"BT /F 14 Tf 30 760 Td (A headline that goes over the width of both of the columns here) Tj ET\n"
    text = run(pdf(head + content))[1].text
    assert text.startswith("A headline") and text.rindex("column a") < text.index("column b")


def test_a_table_keeps_its_rows():
    rows = [("Name", "Count", "Share"), ("apples", "12", "40 %"), ("pears", "6", "20 %"), ("plums", "12", "40 %")]
    content = b"".join(b"BT /F 9 Tf %d %d Td (%s) Tj ET\n" % (40 + 120 * c, 600 - 14 * r, cell.encode())
                       for r, row in enumerate(rows) for c, cell in enumerate(row))
    assert run(pdf(lines("Some words before the table.") + content))[1].text.split("\n\n")[1] == (
        "| Name | Count | Share |\n| --- | --- | --- |\n"
        "| apples | 12 | 40 % |\n| pears | 6 | 20 % |\n| plums | 12 | 40 % |")


def test_lines_that_run_down(monkeypatch):
    """Three lines from right to left, the last with a word in Latin script that stands turned."""
    text = ["春はあけぼのやうやうしろく", "なりゆく山ぎはすこしあかり", "て紫だちたる", "cloud"]
    count = sum(map(len, text))
    loose, angle = np.zeros((count, 4), np.float32), np.zeros(count, np.float32)
    places = [(300 - 20 * min(k, 2), 500 - 10 * i - (60 if k == 3 else 0), k == 3)
              for k, line in enumerate(text) for i in range(len(line))]
    for i, (x, y, turned) in enumerate(places):
        loose[i], angle[i] = (x, y, x + 10, y - 10), np.pi / 2 * turned
    tight = loose[:, [0, 2, 3, 1]].astype(np.float64)
    monkeypatch.setattr("stages.extract.pdf.native.read", lambda layer, n: (
        np.array([*map(ord, "".join(text))], np.uint32), np.zeros(count, np.bool_), angle, loose, tight))
    page = pieces_of(None, count, (0, 0, 600, 800))
    assert text_of([PdfPage(blocks_of(page), page.height)]) == "".join(text)
    assert (page.width, page.height, page.across) == (800 * 64, 600 * 64, 0)


def test_a_table_of_contents_is_none_and_one_of_numbers_is():
    def rows(*cells: tuple[str, ...]) -> bytes:
        return b"".join(b"BT /F 9 Tf %d %d Td (%s) Tj ET\n" % (40 + 120 * c, 600 - 14 * r, cell.encode())
                        for r, row in enumerate(cells) for c, cell in enumerate(row))

    contents = rows(*[(f"{k} Chapter", ". . . . . . . .", str(7 * k)) for k in range(1, 6)])
    assert run(pdf(lines("Contents of it.") + contents))[1].text.endswith(
        "\n1 Chapter ... 7\n2 Chapter ... 14\n3 Chapter ... 21\n4 Chapter ... 28\n5 Chapter ... 35")
    numbers = rows(("12345", "67890", "24680"), ("13579", "98765", "43210"), ("10293", "84756", "57483"))
    assert "| 13579 | 98765 | 43210 |" in run(pdf(lines("Numbers of it.") + numbers))[1].text


def test_a_form_with_lower_values_keeps_its_rows():
    content = b"".join(b"BT /F 9 Tf %d %d Td (%s%d) Tj ET\n" % (40 + 150 * c, 600 - 14 * r - 2 * c, name, r)
                       for r in range(14) for c, name in enumerate((b"name", b"value")))
    assert "| name7 | value7 |" in run(pdf(lines("Some form.") + content))[1].text


def test_code_with_numbers_is_no_table():
    content = b"".join(b"BT /F 9 Tf %d %d Td (%s) Tj ET\n" % (x, 600 - 14 * r, t.encode()) for r in range(5)
                       for x, t in ((40, str(1121 + r)), (80, f"let x{r} be {7 ** r}")))
    assert "|" not in run(pdf(lines("Some code.") + content))[1].text


def test_cards_of_short_lines_are_read_one_after_the_other():
    """Columns of short lines, as a reference card has them: a table's rows would be level with each other."""
    content = b"".join(b"BT /F 9 Tf %d %d Td (%c%d runs) Tj ET\n" % (
        30 + 200 * side, 700 - (12 + side) * k, b"ab"[side], k) for k in range(24) for side in (0, 1))
    text = run(pdf(lines("Some card.") + content))[1].text
    assert text.index("a23 runs") < text.index("b0 runs") and "|" not in text


@pytest.mark.parametrize("matrix", ["0 1 -1 0 300 100", "-1 0 0 -1 500 400", "0 -1 1 0 300 700"])
def test_turned_text_is_read_and_what_stands_across_is_not(matrix):
    turned = b"".join(b"BT /F 9 Tf 1 0 0 1 0 %d Tm (%s) Tj ET\n" % (-12 * k, t) for k, t in enumerate(
        [b"The first of the turned lines is", b"followed by a second one here and", b"ends in the third."]))
    page = f"q {matrix} cm\n".encode() + turned + b"Q\nBT /F 9 Tf 20 20 Td (margin) Tj ET\n"
    assert " ".join(run(pdf(page))[1].text.split()) == (
        "The first of the turned lines is followed by a second one here and ends in the third.")


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
    """PDFium places characters in floating point: the pass ends after it, its key names the CPU."""
    assert not Pdf.exact
    key = Pdf().key()
    monkeypatch.setattr(stage, "cpu_tag", lambda: "another")
    assert Pdf().key() != key
