"""OCR, judged by its results: which pages it reads, within which budget, and what happens without an OCR engine."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pypdfium2 as pdfium
import pytest

from pipeline.base.process import ProcessDied
from stages.document import Document
from stages.extract.pdf import ocr
from stages.extract.pdf.chars import PageChars, TextPiece
from stages.extract.pdf.ocr import MissingEngine, OcrEngine, Word, engine, glyphs, page_of, words_of
from stages.extract.pdf.picture import ALONG, PIXELS, dots, draw, pictures, size
from stages.extract.pdf.quality import DEGRADED, quality_of
from stages.extract.pdf.step import Pdf
from tests.conftest import shared_data
from tests.stages.test_extract_pdf import lines, pdf

PROSE = ["The committee met in the morning and talked about the harvest.", "Nobody could say how much rain had fallen",
         "since the beginning of the year, and nobody wanted to guess.",
         "In the end they wrote a letter to the county,",
         "asked for better instruments, and went home before it was dark."]


def has(name: str) -> bool:
    try:
        return bool(engine(name, "eng"))
    except MissingEngine:
        return False


tesseract = pytest.mark.skipif(not has("tesseract"), reason="tesseract is not at hand: apt install tesseract-ocr")
rapidocr = pytest.mark.skipif(not has("rapidocr"), reason="rapidocr is not installed: pip install 'tokenmill[ocr]'")


def scanned(data: bytes, pages: range | None = None, turn: int = 0) -> bytes:
    """Return the pages of a PDF as pictures at 200 dpi, without text, turned by `turn` degrees."""
    source, made = pdfium.PdfDocument(data), pdfium.PdfDocument.new()
    for number in pages or range(len(source)):
        width, height = source[number].get_size()
        if turn % 180:
            width, height = height, width
        bitmap = source[number].render(scale=200 / 72, grayscale=True, rotation=turn)
        image = pdfium.PdfImage.new(made)
        image.set_bitmap(bitmap)
        image.set_matrix(pdfium.PdfMatrix().scale(width, height))
        page = made.new_page(width, height)
        page.insert_obj(image)
        page.gen_content()
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


def extract(data: bytes, **config: object) -> tuple[str | None, Document]:
    doc = Document("id", raw=data, mime="application/pdf")
    return Pdf(**config).process(doc), doc


def word_f1(a: str, b: str) -> float:
    x, y = (Counter(re.findall(r"\w+", t)) for t in (a, b))
    return 2 * (x & y).total() / max(1, x.total() + y.total())


def command(folder: Path, name: str, body: str) -> OcrEngine:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return OcrEngine((str(file),), {})


IMAGE = np.full((100, 80), 255, np.uint8)
IMAGE[20:30] = 0


# -- without an engine -----------------------------------------------------------------------------------------------
def test_an_engine_that_is_not_at_hand_is_named_with_its_remedy_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for ask in (Pdf.key, Pdf.resource_files, Pdf.setup):         # the driver plans with keys, a worker sets up
        with pytest.raises(MissingEngine, match=r"`ocr: tesseract` is not installed: apt install tesseract-ocr"):
            ask(Pdf(ocr="tesseract"))
    monkeypatch.setattr(ocr.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingEngine, match=r"`ocr: rapidocr` is not installed: pip install 'tokenmill\[ocr\]'"):
        Pdf(ocr="rapidocr").key()


def test_without_ocr_a_scan_is_a_reason_and_counted():
    reason, doc = extract(scanned(pdf(lines(*PROSE))))
    assert reason == "pdf_no_text" and doc.meta["pdf_routes"] == "s" and doc.meta["pdf_confidence"] == "0"
    assert doc.signals["pdf_unread"] == 1 and doc.signals["pdf_ocr"] == 0


def test_an_engine_that_does_not_read_here_costs_no_document(monkeypatch, tmp_path):
    fake = command(tmp_path, "fake", "echo no such model >&2; exit 1")
    monkeypatch.setattr("stages.extract.pdf.step.engine", lambda name, languages: fake)
    with pytest.raises(RuntimeError, match="no such model"):
        Pdf(ocr="tesseract").setup()


def test_languages_are_tesseracts_alone():
    assert "ocr_languages" in Pdf(ocr="rapidocr", ocr_languages="deu").problems()
    assert not Pdf(ocr="rapidocr").problems() and not Pdf(ocr="tesseract", ocr_languages="deu").problems()
    assert Pdf(ocr="tesseract", ocr_languages="deu+script/Cyrillic").config.ocr_languages == "deu+script/Cyrillic"


def test_a_missing_language_names_its_package(monkeypatch, tmp_path):
    command(tmp_path, "tesseract", "echo 'List of available languages in \"/none\" (1):'; echo eng")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(MissingEngine, match=r"`ocr_languages: eng\+chi_sim`.*apt install tesseract-ocr-chi-sim"):
        engine("tesseract", "eng+chi_sim")
    assert engine("tesseract", "eng").files["tesseract eng"] == "/none/eng.traineddata"


def test_the_engine_is_part_of_the_key(monkeypatch, tmp_path):
    for model in ("eng", "osd"):
        (tmp_path / f"{model}.traineddata").write_bytes(b"one")
    command(tmp_path, "tesseract", f"echo 'List of available languages in \"{tmp_path}/\" (2):'; echo eng; echo osd")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    keys = {Pdf().key(), Pdf(ocr="tesseract").key()}
    (tmp_path / "eng.traineddata").write_bytes(b"two")
    keys.add(Pdf(ocr="tesseract").key())
    (tmp_path / "libtesseract.so.5").write_bytes(b"three")
    monkeypatch.setattr(ocr, "_parts", lambda binary: {"libtesseract": str(tmp_path / "libtesseract.so.5")})
    keys.add(Pdf(ocr="tesseract").key())
    assert len(keys) == 4


@tesseract
def test_the_library_that_reads_is_a_resource():
    """The program itself is hardly more than `main`."""
    files = Pdf(ocr="tesseract").resource_files()
    assert {"tesseract", "libtesseract", "tesseract eng"} <= set(files) and all(map(os.path.isfile, files.values()))


@pytest.mark.parametrize("languages", ["", "eng;rm", "-l", "eng+", "../eng", "script/", "a/b"])
def test_names_of_languages_are_no_options(languages):
    with pytest.raises(ValueError, match="ocr_languages"):
        Pdf(ocr="tesseract", ocr_languages=languages)


# -- hostile files, and other machines ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("title", "told"), [
    (b"<FEFF0041D800>", "A"), (b"<FEFFDC000042>", "B"), (b"<FEFFD83DDE00>", "😀"), (b"(a\x00b\x07)", "ab"),
    (b"(" + b"x" * 9000 + b")", "x" * 500), (b"5", None)])
def test_titles_of_any_bytes(title, told):
    data = pdf(lines("Some text."), trailer=b"/Info 3 0 R").replace(b"/BaseFont/Helvetica",
                                                                     b"/BaseFont/Helvetica/Title " + title)
    reason, doc = extract(data)
    assert reason is None and doc.meta.get("title") == told


PLACES = """
import sys
from pathlib import Path
import pypdfium2 as pdfium
from stages.document import Document
from stages.extract.pdf.step import Pdf

def places(data):
    text = pdfium.PdfDocument(data)[0].get_textpage()
    return [text.get_charbox(i, loose=True) for i in range(text.count_chars())]

one, other, scan = (Path(name).read_bytes() for name in sys.argv[1:])
before = places(one)
Pdf(ocr="tesseract").process(Document("id", raw=scan))
print(before == places(one) and "same after OCR", before == places(other) and "same as a font nobody has")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="OCR needs Linux")
def test_characters_are_placed_the_same_on_every_machine_and_whatever_came_before(tmp_path):
    """Fonts that are not in the file: those of the machine take no part, and PDFium, which places their characters
    otherwise once it has drawn, does not draw in this process."""
    font = b"LiberationSansNarrow"

    def named(name: bytes, *text: str) -> bytes:
        return pdf(lines(*text)).replace(b"/Subtype/Type1/BaseFont/Helvetica", b"/Subtype/TrueType/BaseFont/" + name)

    command(tmp_path, "tesseract",
            f"[ $1 = --list-langs ] && printf 'in \"{tmp_path}/\" (1):\\neng\\n' || cat >/dev/null")
    (tmp_path / "eng.traineddata").touch()
    for name, data in (("one", named(font, *PROSE)), ("other", named(b"Nobodys", *PROSE)), ("scan", named(font, "x"))):
        (tmp_path / name).write_bytes(data)
    ran = subprocess.run([sys.executable, "-c", PLACES, *(tmp_path / n for n in ("one", "other", "scan"))],
                         capture_output=True, text=True, cwd=Path(__file__).parents[2],
                         env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert ran.stdout.strip() == "same after OCR same as a font nobody has", ran.stderr


# a page of 200 inches, and pictures that are small only in the file
def page_with(image: bytes, box: bytes = b"0 0 600 800", body: bytes = b"q 600 0 0 800 0 0 cm /I Do Q") -> bytes:
    """Return a PDF with one page that `image` (entries of its dictionary) fills."""
    extra = b"<</Type/XObject/Subtype/Image/BitsPerComponent 8/ColorSpace/DeviceGray%s/Length 1>>stream\n0\nendstream"
    return pdf(body).replace(b"/Resources<<", b"/Resources<</XObject<</I 9 0 R>>").replace(
        b"[0 0 600 800]", b"[" + box + b"]").replace(b"xref\n", b"9 0 obj\n" + extra % image + b"\nendobj\nxref\n", 1)


@pytest.mark.parametrize(("width", "height", "read"), [(2000, 3000, True), (60_000, 60_000, False),
                                                       (9_000, 9_000, False)])
def test_pictures_with_too_many_pixels_are_not_drawn(monkeypatch, tmp_path, width, height, read):
    def asked(*given: object) -> None:
        seen.append(given)

    seen: list[object] = []
    monkeypatch.setattr("stages.extract.pdf.step.engine", lambda name, languages: OcrEngine(("true",), {}))
    monkeypatch.setattr("stages.extract.pdf.step.words_of", asked)
    image = b"/Width %d/Height %d" % (width, height)
    assert extract(page_with(image), ocr="tesseract")[0] == "pdf_no_text" and bool(seen) == read
    # shown often, and in a form, it counts as often
    many = page_with(b"/Width 2000/Height 3000", body=b"q 600 0 0 800 0 0 cm /I Do Q " * 20)
    assert pictures(pdfium.PdfDocument(many)[0]) == (True, 20 * 6_000_000)


@pytest.mark.parametrize(("width", "height"), [(14_400, 14_400), (14_400, 1), (1, 14_400), (0.01, 0.01), (600, 800)])
def test_pages_of_any_size_are_pictures_of_bounded_size(width, height):
    page = pdfium.PdfDocument(pdf(lines("x")).replace(b"[0 0 600 800]", b"[0 0 %g %g]" % (width, height)))[0]
    high, wide = draw(page, dots(page)).shape
    assert (wide, high) == size(page, dots(page)) and wide * high <= PIXELS * 1.01 and max(wide, high) <= ALONG
    larger = pdf(lines("x")).replace(b"[0 0 600 800]", b"[0 0 14401 9]")
    assert dots(pdfium.PdfDocument(larger)[0]) == 0


# -- the budget ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_cpu_and_memory_end_at_the_budget(tmp_path):
    def died(engine: OcrEngine, *, draw=lambda: IMAGE, cpu_s: int = 5, memory_mb: int = 500) -> int:
        with pytest.raises(ProcessDied, match=f"`ocr_cpu_s: {cpu_s}`, `ocr_memory_mb: {memory_mb}`") as found:
            words_of(engine, draw, cpu_s, memory_mb)
        return -found.value.returncode

    def spin() -> np.ndarray:
        while True:
            pass

    glyphs(IMAGE)                                        # compiled here, as `Pdf` does, not in the budget
    fine = command(tmp_path, "fine", "cat >/dev/null")
    assert died(command(tmp_path, "busy", "while :; do :; done"), cpu_s=1) == signal.SIGXCPU
    assert died(fine, draw=spin, cpu_s=1) == signal.SIGXCPU                          # drawing is in the same budget
    assert died(fine, draw=lambda: np.zeros(1 << 29, np.uint8), memory_mb=100) == signal.SIGABRT
    assert died(command(tmp_path, "killed", "kill -9 $$")) == signal.SIGKILL         # that is nobody's budget
    greedy = command(tmp_path, "greedy", "exec python3 -c 'x = bytearray(1 << 30)'")
    with pytest.raises(RuntimeError, match="MemoryError"):
        words_of(greedy, lambda: IMAGE, 5, 200)
    with pytest.raises(RuntimeError, match=r"ended with 3: it is broken"):
        words_of(command(tmp_path, "broken", "echo it is broken >&2; exit 3"), lambda: IMAGE, 5, 500)
    assert words_of(fine, lambda: IMAGE, 5, 500) == [] and words_of(fine, lambda: IMAGE[30:], 5, 500) is None


def test_a_page_that_is_read_stays_far_within_the_budget():
    """How long it takes depends on the machine and on what else it does: what is read is decided by its letters."""
    seconds = {"tesseract": 0.001, "rapidocr": 0.004}                                # a letter
    assert all(3 * seconds[name] * most < Pdf().config.ocr_cpu_s for name, most in ocr.GLYPHS.items())


def test_pages_beyond_the_cap_are_not_read(monkeypatch, tmp_path):
    fake = command(tmp_path, "fake", "cat >/dev/null; printf '5\\t1\\t1\\t1\\t1\\t1\\t9\\t9\\t50\\t20\\t80\\tseen\\n'")
    monkeypatch.setattr("stages.extract.pdf.step.engine", lambda name, languages: fake)
    reason, doc = extract(scanned(pdf(*[lines(*PROSE)] * 3)), ocr="tesseract", ocr_pages=2)
    assert reason is None and doc.text.split() == ["seen", "seen"]
    assert doc.meta["pdf_routes"] == "oos" and doc.meta["pdf_confidence"] == "880"
    assert doc.signals["pdf_ocr"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("sure", "route"), [(59, "o"), (58, "s")])
def test_what_ocr_is_not_sure_of_is_not_kept(monkeypatch, tmp_path, sure, route):
    """A photograph, or a script the languages do not have: tesseract makes words of anything."""
    words = "".join(f"5\\t1\\t1\\t1\\t1\\t{k}\\t{9 * k}\\t9\\t8\\t20\\t{sure}\\tBbI6op\\n" for k in range(40))
    fake = command(tmp_path, "fake", f"cat >/dev/null; printf '{words}'")
    monkeypatch.setattr("stages.extract.pdf.step.engine", lambda name, languages: fake)
    reason, doc = extract(scanned(pdf(lines(*PROSE))), ocr="tesseract")
    assert doc.meta["pdf_routes"] == route and reason == (None if route == "o" else "pdf_no_text")


def test_only_pages_without_usable_text_are_read(monkeypatch, tmp_path):
    fake = command(tmp_path, "fake", "cat >/dev/null; printf '5\\t1\\t1\\t1\\t1\\t1\\t9\\t9\\t50\\t20\\t80\\tseen\\n'")
    monkeypatch.setattr("stages.extract.pdf.step.engine", lambda name, languages: fake)
    broken = ["".join(chr(ord(c) - 29) if c.isalpha() else c for c in line).replace("(", "").replace(")", "")
              .replace("\\", "") for line in PROSE * 3]
    mixed = pdf(lines(*PROSE), b"", lines(*broken))
    assert extract(mixed, ocr="tesseract")[1].meta["pdf_routes"] == "teo"
    assert extract(mixed)[1].meta["pdf_routes"] == "tec"             # without OCR such a page gives no text


# -- words to a page -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("turn", range(4))
def test_turned_pictures_are_turned_back(turn):
    width, height = 400, 300
    upright = [Word(("1", "1", str(k)), 20 + 60 * i, 30 + 40 * k, 70 + 60 * i, 50 + 40 * k, 90, word)
               for k, line in enumerate(["first line of all", "second line comes then"]) for i, word in
               enumerate(line.split())]
    place = (lambda w: (w.left, w.top, w.right, w.bottom),
             lambda w: (height - w.bottom, w.left, height - w.top, w.right),
             lambda w: (width - w.right, height - w.bottom, width - w.left, height - w.top),
             lambda w: (w.top, width - w.right, w.bottom, width - w.left))[turn]
    seen = [w._replace(**dict(zip(("left", "top", "right", "bottom"), place(w)))) for w in upright]
    size = (width, height) if turn % 2 == 0 else (height, width)
    page, sure = page_of(seen, *size, 72)
    assert [p.text for p in page.pieces] == ["first line of all", "second line comes then"] and sure == 90
    assert page.pieces[0][:4] == (20 * 64, 30 * 64, 250 * 64, 50 * 64) and (page.width, page.height) == (25600, 19200)


def test_leaders_say_nothing_of_the_page():
    """A table of contents: half of its characters are dots that engines are not sure of."""
    seen = [Word(("1", "1", "1"), 40 * i, 0, 40 * i + 30, 20, sure, text) for i, (text, sure) in
            enumerate([("Chapters", 95), ("...........", 10), ("12", 95)])]
    assert page_of(seen, 200, 100, 72)[1] == 95


def test_scripts_without_spaces_are_joined_without():
    texts = ["日本", "語", "PDF", "の"]
    seen = [Word(("1", "1", "1"), 20 * i, 0, 20 * i + 20, 20, 90, text) for i, text in enumerate(texts)]
    assert [p.text for p in page_of(seen, 100, 100, 72)[0].pieces] == ["日本語 PDF の"]


def test_letters_are_counted():
    """Connected areas as high as letters: not specks, not what is black all over, and a "u" once."""
    image = np.full((300, 300), 255, np.uint8)
    image[5:15, 5:8] = image[5:15, 20:22] = 0
    image[14, 5:22] = 0                                          # joins the two
    image[40:45, 50], image[45, 51], image[46, 52] = 0, 0, 0     # corners touch
    image[60:63, 5:90] = 0                                       # too flat
    image[:, 200:] = 0                                           # too high
    assert glyphs(image) == glyphs(image[::-1].copy()) == 2


def test_a_page_with_more_letters_than_a_budget_is_enough_for_is_not_read(monkeypatch, tmp_path):
    fine = command(tmp_path, "fine", "cat >/dev/null; printf '5\\t1\\t1\\t1\\t1\\t1\\t9\\t9\\t50\\t20\\t80\\tseen\\n'")
    image = np.full((1000, 1000), 255, np.uint8)
    for x, y in itertools.product(range(0, 1000, 8), repeat=2):
        image[y:y + 6, x:x + 3] = 0
    glyphs(image)                                        # compiled here, not in the budget
    assert words_of(fine, lambda: image, 5, 500) == [] != words_of(fine, lambda: image[:500], 5, 500)


def test_no_words_are_a_page_without_text():
    page, sure = page_of([], 100, 100, 200)
    assert page.pieces == [] and sure == 0


# -- quality ---------------------------------------------------------------------------------------------------------
def judged(text: str, garbled: int = 0) -> int:
    chars = sum(not c.isspace() for c in text)
    return quality_of(PageChars([TextPiece(0, 0, 1, 1, text, 0, False)], 1, 1, chars, len(text) - chars, garbled,
                                0)).confidence


@pytest.mark.parametrize("text", [
    " ".join(PROSE), "Über Größe und Maß, wohlgemerkt, entschied der Ausschuss nach langen Verhandlungen. " * 4,
    "日本語の文章です。これは英語ではありません。" * 4, "Это предложение написано по-русски и повторяется здесь. " * 4,
    "هذه جملة مكتوبة باللغة العربية وتتكرر هنا. " * 5, "McDonald and O'Neill bought iPhones, LaTeX books and TeX. " * 4,
    "Câu này được viết bằng tiếng Việt và được lặp lại ở đây. " * 4])
def test_text_is_trusted(text):
    assert judged(text) >= 90


@pytest.mark.parametrize("language", ["bn", "gu", "hi", "mr", "pa", "ta", "te", "vi", "yo"])
def test_combining_marks_are_no_damage(language):
    lines_ = (shared_data("lid", "lingua-sentences") / f"{language}.txt").read_text(encoding="utf-8").splitlines()
    assert all(judged("\n".join(lines_[k:k + 15])) > DEGRADED for k in range(0, len(lines_), 15))


@pytest.mark.parametrize(("language", "encoding"), [("ru", "cp1251"), ("ru", "koi8-r"), ("bg", "cp1251"),
                                                    ("el", "iso8859-7"), ("ar", "cp1256"), ("he", "cp1255")])
def test_eight_bits_of_another_script_are_damage(language, encoding):
    text = (shared_data("lid", "lingua-sentences") / f"{language}.txt").read_text(encoding="utf-8")[:2000]
    assert judged(text.encode(encoding, "replace").decode("latin-1")) < DEGRADED


@pytest.mark.parametrize(("text", "garbled"), [
    (" ".join(PROSE), 30), ("7KLV LV QRW 5HDGDEOH: WKH IRQW KDV ORVW LWV HQFRGLQJ DQG VKLIWV " * 4, 0),
    ("T h e l e t t e r s s t a n d a p a r t " * 8, 0),
    ("the words of this page run together".replace(" ", "") * 8, 0),
    ("G31G32/G12 a1b2c3 x9y8z7 q#w@e ~~~ B0t4x 3e4r5t " * 6, 0), ("few", 0), ("", 0)])
def test_damage_is_seen(text, garbled):
    assert judged(text, garbled) < DEGRADED


# -- real engines ----------------------------------------------------------------------------------------------------
@tesseract
def test_tesseract_reads_a_scan():
    whole = pdf(lines(*PROSE))
    reason, doc = extract(scanned(whole), ocr="tesseract")
    assert reason is None and doc.meta["pdf_routes"] == "o" and int(doc.meta["pdf_confidence"]) >= 8
    assert word_f1(doc.text, extract(whole)[1].text) >= 0.97


def told(data: bytes, engine: str) -> str:
    doc = extract(data, ocr=engine)[1]
    return json.dumps([doc.text, doc.meta, doc.signals], sort_keys=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("tesseract", marks=tesseract), pytest.param("rapidocr", marks=rapidocr)])
def test_an_engine_reads_the_same_whatever_came_before_and_beside_others(name):
    one, other = scanned(pdf(lines(*PROSE))), scanned(pdf(lines(*PROSE[::-1])), turn=90)
    here = [told(data, name) for data in (one, other, one)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        there = list(pool.map(told, (other, one, other), [name] * 3))
    assert here == [here[0], here[1], here[0]] and there == [here[1], here[0], here[1]] and here[0] != here[1]


@tesseract
@pytest.mark.slow
def test_tesseract_reads_scanned_manuals():
    for name in ("debian-faq.en", "maint-guide.en"):
        data = (shared_data("pdf", "debian-pairs") / f"{name}.pdf").read_bytes()
        source, made = pdfium.PdfDocument(data), pdfium.PdfDocument.new()
        made.import_pages(source, [11, 12])
        out = io.BytesIO()
        made.save(out)
        doc = extract(scanned(out.getvalue()), ocr="tesseract")[1]
        assert word_f1(doc.text, extract(out.getvalue())[1].text) >= 0.97


@tesseract
@pytest.mark.slow
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_tesseract_reads_turned_scans(degrees):
    name = f"ocr_test_rotated_{degrees}.pdf" if degrees else "ocr_test.pdf"
    doc = extract((shared_data("pdf", "docling") / name).read_bytes(), ocr="tesseract")[1]
    assert "Docling bundles PDF document conversion to JSON and Markdown" in " ".join(doc.text.split())


@rapidocr
@pytest.mark.slow
def test_rapidocr_reads_a_scan():
    whole = pdf(lines(*PROSE))
    doc = extract(scanned(whole), ocr="rapidocr")[1]
    assert doc.meta["pdf_routes"] == "o" and word_f1(doc.text, extract(whole)[1].text) >= 0.8
