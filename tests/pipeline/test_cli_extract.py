"""`tokenmill extract`: files of every kind, stdin, output formats, and two engines side by side."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pypdfium2 as pdfium
import pytest
from rich.console import Console

from pipeline.base.word_diff import rows
from pipeline.cli import file_types
from pipeline.cli.compare import side_by_side, stacked
from stages.document import Document
from stages.extract.html.step import ENGINES, Html
from tests.corpus import Page, warc
from tests.e2e.every_kind import PROSE, response, scanned
from tests.stages.test_extract_pdf import lines, pdf

S = "The quick brown fox jumps over the lazy dog, and nobody in the village ever asked it why it did so. "
PAGE = ("<!DOCTYPE html><html lang=en><head><title>A title</title></head><body><nav><a href=/a>Menu</a></nav><article>"
        "<h1>A <b>heading</b></h1>" + "".join(f"<p>Number {i}: {S * 3}</p>" for i in range(4))
        + "<table><tr><th>Name<th>Value<tr><td>alpha<td>1</table></article><footer>Imprint</footer></body></html>")


@pytest.fixture(autouse=True)
def patience(request, monkeypatch):
    """Sets the seconds after which the command says what it waits for: an hour, because the machine of the tests may be
    busy, or the parameter of the fixture."""
    monkeypatch.setattr(file_types, "PATIENCE", getattr(request, "param", 3600.0))


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(PAGE)
    return path


def staged(**config) -> str:
    doc = Document("id", raw=PAGE.encode(), mime="text/html")
    assert Html(**config).process(doc) is None
    return doc.text


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_it_is_what_the_stage_makes(page, tokenmill, engine):
    assert tokenmill("extract", page, "--engine", engine).out == staged(engine=engine) + "\n"
    said = tokenmill("extract", page, "--engine", engine, "--format", "markdown")
    assert said.out == staged(engine=engine, format="markdown") + "\n" and "# A heading" in said.out and said.err == ""
    [row] = tokenmill("extract", page, "--engine", engine, "--format", "json").json()
    assert row["text"] == staged(engine=engine) and row["engine"] == engine and row["reason"] is None
    assert row["meta"]["title"] == "A title" and row["meta"]["lang"] == "en" and row["kind"] == "html"


def test_files_are_told_by_content_and_suffix(tmp_path, tokenmill):
    (tmp_path / "noname").write_text(PAGE)
    (tmp_path / "page.htm.gz").write_bytes(gzip.compress(PAGE.encode()))
    (tmp_path / "tool.py").write_text('"""A tool."""\n\n\ndef main() -> None:\n    print("<html><body>")\n')
    (tmp_path / "notes.txt").write_bytes("<p> is a tag.\r\nÜber".encode("cp1252"))
    (tmp_path / "plain").write_text("Only words, no tag.\n")
    names = ["noname", "page.htm.gz", "tool.py", "notes.txt", "plain"]
    rows = tokenmill("extract", "--json", *(tmp_path / n for n in names)).json()
    assert [r["kind"] for r in rows] == ["html", "html", "code", "text", "text"]
    assert [r["engine"] for r in rows] == ["mill", "mill", None, None, None]
    assert rows[0]["text"] == rows[1]["text"] == staged() and rows[2]["meta"]["code_language"] == "python"
    assert rows[3]["text"] == "<p> is a tag.\nÜber" and rows[4]["text"].startswith("Only words")


def test_archives_and_places_that_a_source_would_pass_over(tmp_path, tokenmill):
    with zipfile.ZipFile(tmp_path / "pages.zip", "w") as z:
        z.writestr("one.html", PAGE)
        z.writestr("none.html", "<html><body></body></html>")
        z.writestr("read.me.txt", "Read me first.")
        z.writestr("picture.png", b"\x89PNG")
        z.writestr("paper/main.tex", "\\section{A part} % secret\n\nof it")
    said = tokenmill("extract", tmp_path / "pages.zip")
    assert "A heading" in said.out and "Read me first." in said.out and "picture" not in said.out + said.err
    assert "pages.zip:none.html: no text: no_text" in said.err
    assert "pages.zip (latex) <==\n" in said.out and said.out.count("A part\n\nof it") == 1
    said = tokenmill("extract", "--as", "html", tmp_path / "pages.zip")
    assert said.out.count("==> ") == 1 and "1 documents with text; without: 1 no_text, 3 other_type" in said.err
    said = tokenmill("extract", tmp_path / "pages.zip", "--engine", "justext,trafilatura")
    assert "pages.zip:one.html  trafilatura  " in said.out and "(text) <==\nRead me first.\n" in said.out
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "a.js").write_text("function f(first, second) {\n  return first + second;\n}\n")
    assert "return first + second" in tokenmill("extract", tmp_path / "node_modules" / "a.js").out


def test_stdin_and_a_pipe(page, tokenmill, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PAGE.encode())))
    said = tokenmill("extract", "-", "--engine", "resiliparse,readability")
    out = said.out.splitlines()
    assert said.code == 0 and out[0].startswith("--- -  resiliparse  ")
    assert out[1].startswith("+++ -  readability  ") and out[0].endswith("only here")
    assert {line[0] for line in out[2:]} <= set("-+~ ")
    assert "\x1b" not in said.out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert tokenmill("extract", "-").err.startswith("-: no text: empty")


def test_two_engines_on_what_is_no_page(tmp_path, page, tokenmill):
    (tmp_path / "notes.txt").write_text("Notes of the day.\n")
    said = tokenmill("extract", "--engine", "trafilatura,justext", tmp_path / "notes.txt")
    assert said.out == "Notes of the day.\n"
    rows = tokenmill("extract", "--engine", "trafilatura,justext", "--json", page, tmp_path / "notes.txt").json()
    assert [(r["engine"], r["kind"]) for r in rows] == [("trafilatura", "html"), ("justext", "html"), (None, "text")]
    assert rows[0]["text"] == staged(engine="trafilatura") and rows[1]["text"] == staged(engine="justext")


def test_equal_texts_are_said_to_be(tmp_path, tokenmill):
    (tmp_path / "p.html").write_text("<!DOCTYPE html><html><body>" + "".join(
        f"<p>Number {i}: {S * 4}</p>" for i in range(4)) + "</body></html>")
    said = tokenmill("extract", "--engine", "trafilatura,justext", tmp_path / "p.html")
    assert said.code == 0 and said.out == "" and "trafilatura and justext find the same text" in said.err
    (tmp_path / "e.html").write_text("<html><body></body></html>")
    said = tokenmill("extract", "--engine", "trafilatura,justext", tmp_path / "e.html")
    assert said.err.count("no text: no_text (it has no main text") == 2


SAME = ["Head", *(f"line {i}" for i in range(20))]
LEFT = [*SAME, "the quick brown fox", "split here. and there it goes on.", "only [bold]left[/bold]"]
RIGHT = [*SAME, "", "- the slow brown fox", "split here.", "and there it goes on."]


def test_side_by_side():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system="standard")
    side_by_side("page.html", ("one", "two"), rows("\n".join(LEFT), "\n".join(RIGHT)), console)
    text = out.getvalue()
    assert "\x1b[1;31mquick" in text and "\x1b[1;32mslow" in text and "\x1b[1;31monly [bold]left[/bold]" in text
    assert "… 20 paragraphs the same" in text and "line 7" not in text and "line 19" in text
    assert "\x1b[2msplit here. and there" in text, "broken otherwise, but the same"


def test_one_under_the_other():
    assert list(stacked(rows("\n".join(LEFT), "\n".join(RIGHT)))) == [
        "  … 20 paragraphs the same", "  line 19", "~ the [-quick-] {+slow+} brown fox",
        "  split here. and there it goes on.", "- only [bold]left[/bold]"]
    assert list(stacked(rows("# Head\n東京都は大きい", "Head\n京都は大きい", marks=True))) == [
        "~ [-#-] Head", "~ [-東-]京都は大きい"]


def test_texts_that_are_long_and_alike_are_compared_soon():
    alike = "\n".join(f"the same words again and again {i % 7}" for i in range(20_000))
    found = rows(alike, alike.replace("again 3", "once 3"))
    assert "".join(r.left for r in found).count("again 3") == "".join(r.right for r in found).count("once 3") > 2_500


def test_mistakes_are_named_with_what_to_do(tmp_path, page, tokenmill):
    said = tokenmill("extract", "--engine", "readabilty", page)
    assert said.code == 2 and "there is no engine 'readabilty'; did you mean 'readability'?" in said.err
    for engines in ("trafilatura,trafilatura", "trafilatura,justext,readability"):
        said = tokenmill("extract", "--engine", engines, page)
        assert said.code == 2 and "give one engine, or two different ones" in said.err
    assert tokenmill("extract", "-", "-").code == 2 and "only once" in tokenmill("extract", "-", "-").err
    assert "known: " in tokenmill("extract", "--engine", "", page).err
    said = tokenmill("extract", tmp_path / "nosuch.html")
    assert said.code == 2 and "cannot read" in said.err and "nosuch.html" in said.err
    (tmp_path / "feed.html").write_text("<rss version='2'><p>x</p></rss>")
    said = tokenmill("extract", tmp_path / "feed.html")
    assert said.code == 0 and "feed.html: no text: not_html (it does not begin like a web page)" in said.err
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7\n" + b"rubbish" * 50)
    [found] = tokenmill("extract", "--json", tmp_path / "broken.pdf").json()
    assert (found["kind"], found["reason"], found["text"]) == ("pdf", "pdf_damaged", None)
    (tmp_path / "cut.html.gz").write_bytes(gzip.compress(PAGE.encode())[:100])
    said = tokenmill("extract", tmp_path / "cut.html.gz")
    assert "no text: truncated (the compressed file ends too early" in said.err


@pytest.mark.parametrize("patience", [0.01], indirect=True)
def test_who_waits_is_told_for_what(page, tokenmill, monkeypatch):
    told, echo = threading.Event(), file_types.typer.echo

    def tell(*said, **kw):
        echo(*said, **kw)
        told.set()
    monkeypatch.setattr(file_types.typer, "echo", tell)
    monkeypatch.setattr(Html, "setup", lambda self: told.wait(300))
    assert "preparing the step 'html'" in tokenmill("extract", page).err


def test_a_stage_that_fails_fails_the_command(page, tokenmill, monkeypatch):
    def broken(self, doc):
        raise ValueError("so it goes")

    monkeypatch.setattr(Html, "process", broken)
    said = tokenmill("extract", page, "--json")
    assert said.code == 1 and "1 of 1 files could not be extracted" in said.err
    assert json.loads(said.out)["reason"] == "error: ValueError: so it goes"
    said = tokenmill("extract", page, "--engine", "trafilatura,justext")
    assert said.code == 1 and "2 of 1" not in said.err


# -- kinds -------------------------------------------------------------------------------------------------------------
CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
TEX = "\\documentclass{article}\n% secret\n\\begin{document}\nLet $x$ be \\emph{small}.\n\\end{document}\n"
BOOK = ("The Project Gutenberg EBook of Words\n\n*** START OF THE PROJECT GUTENBERG EBOOK WORDS ***\n\n"
        "It was a word.\n\n*** END OF THE PROJECT GUTENBERG EBOOK WORDS ***\nlicence\n")
WIKI = ("<mediawiki><page><title>One</title><ns>0</ns><id>1</id><revision><text>'''One''' is [[a|thing]].</text>"
        "</revision></page><page><title>R</title><ns>0</ns><id>2</id><redirect title='One'/></page></mediawiki>")
NOTEBOOK = {"cells": [{"cell_type": "code", "source": "1 + 1", "outputs": []}], "metadata": {}, "nbformat": 4}


def lines_of(*rows: dict) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table_of(*rows: dict) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), out)
    return out.getvalue()


PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
FILES = {                                         # name → (bytes, kind, what is in its text)
    "a.tex": (TEX.encode(), "latex", "Let $x$ be small."),
    "paper": (TEX.encode(), "latex", "Let $x$ be small."),
    "b.txt": (BOOK.encode(), "book", "It was a word."),
    "c.ipynb": (json.dumps(NOTEBOOK).encode(), "notebook", "1 + 1"),
    "notebook": (json.dumps(NOTEBOOK, indent=1).encode(), "notebook", "1 + 1"),
    "d.xml": (WIKI.encode(), "wiki", "One is thing."),
    "d.xml.bz2": (bz2.compress(WIKI.encode()), "wiki", "One is thing."),
    "e.jsonl": (lines_of(CHAT), "sft", "Because."),
    "f.jsonl.gz": (gzip.compress(lines_of(PAIR)), "preference", "Because."),
    "g.jsonl": (lines_of({"instruction": "Why?", "output": "Because."}), "sft", "Because."),
    "h.jsonl": (lines_of({"text": "Only words.", "prompt": "no", "completion": "no"}), "jsonl", "Only words."),
    "array.json": (json.dumps([CHAT], indent=1).encode(), "sft", "Because."),
    "lines": (lines_of({"text": "Only words."}), "jsonl", "Only words."),
    "i.parquet": (table_of({"text": "Only words."}), "parquet", "Only words."),
    "j.parquet": (table_of(CHAT), "sft", "Because."),
    "k.parquet": (table_of(PAIR), "preference", "Because."),
    "stack.parquet": (table_of({"content": "x = 1  # a number\n", "max_stars_repo_path": "a.py",
                                "max_stars_repo_name": "me/it"}), "code_table", "a number"),
    "l.warc.gz": (warc([Page("https://a.example/", PAGE, "")]), "html", "A heading"),
    "crawl": (warc([Page("https://a.example/", PAGE, "")]), "html", "A heading"),
    "m.pdf": (pdf(lines("A line of a page.")), "pdf", "A line of a page."),
}


def test_every_kind_is_told(tmp_path, tokenmill):
    for name, (data, _, _) in FILES.items():
        (tmp_path / name).write_bytes(data)
    rows = {os.path.basename(row["file"]): row for row in tokenmill("extract", "--json", tmp_path).json()}
    assert rows.keys() == FILES.keys()
    for name, (_, kind, text) in FILES.items():
        row = rows[name]
        assert (row["kind"], row["reason"]) == (kind, None) and text in row["text"], name
        assert "secret" not in row["text"]
        assert row["loss_spans"] if kind in ("sft", "preference") else row["loss_spans"] is None


def test_what_it_is_can_be_said(tmp_path, tokenmill):
    (tmp_path / "novel.txt").write_text("\n".join(["A line that was broken where the typewriter's paper ended, "] * 30))
    (tmp_path / "words.py").write_text("def f(value):\n    return value\n")
    assert tokenmill("extract", tmp_path / "novel.txt").out.count("\n") == 30
    assert tokenmill("extract", "--as", "book", tmp_path / "novel.txt").out.count("\n") == 1
    [row] = tokenmill("extract", "--as", "text", "--json", tmp_path / "words.py").json()
    assert row["kind"] == "text" and "code_language" not in row["meta"]
    said = tokenmill("extract", "--as", "poem", tmp_path / "novel.txt")
    assert said.code == 2 and "--as poem: no reader has this name" in said.err


def test_settings_of_readers_and_steps(tmp_path, page, tokenmill):
    (tmp_path / "e.jsonl").write_bytes(lines_of(CHAT))
    assert "User: Why?" in tokenmill("extract", "--set", "sft.template=plain", tmp_path / "e.jsonl").out
    (tmp_path / "t.parquet").write_bytes(table_of({"body": "Only words."}))
    said = tokenmill("extract", tmp_path / "t.parquet")
    assert said.code == 1 and "no column 'text'; it has body" in said.err
    assert "Only words." in tokenmill("extract", "--set", "parquet.text=body", tmp_path / "t.parquet").out
    said = tokenmill("extract", page, "--set", "html.max_bytes=10")
    assert "no text: too_large" in said.err
    for given, remedy in (("pdf.ocr=teseract", "'teseract' is not one of none, tesseract, rapidocr; did you mean"),
                          ("pdf.orc=none", "unknown key 'orc': did you mean 'ocr'?"),
                          ("pdf", "write --set NAME.KEY=VALUE"),
                          ("pfd.ocr=none", "no reader or step 'pfd': did you mean 'pdf'?"),
                          ("html.engine=mill", "give it by --engine"), ("pdf.ocr=[", "not YAML")):
        said = tokenmill("extract", page, "--set", given)
        assert said.code == 2 and remedy in said.err and said.out == "", given


def test_a_scan_says_how_it_can_be_read(tmp_path, tokenmill, monkeypatch):
    (tmp_path / "scan.pdf").write_bytes(scanned(pdf(lines(*PROSE))))
    said = tokenmill("extract", tmp_path / "scan.pdf")
    assert "no text: pdf_no_text" in said.err and "--set pdf.ocr=tesseract" in said.err
    both = pdfium.PdfDocument.new()
    for data in (pdf(lines(*PROSE)), (tmp_path / "scan.pdf").read_bytes()):
        both.import_pages(pdfium.PdfDocument(data))
    both.save(tmp_path / "both.pdf")
    said = tokenmill("extract", tmp_path / "both.pdf")
    assert "The committee met" in said.out
    assert "both.pdf: 1 of 2 pages without text (2): read them with --set pdf.ocr=tesseract" in said.err
    monkeypatch.setenv("PATH", str(tmp_path))
    said = tokenmill("extract", tmp_path / "scan.pdf", "--set", "pdf.ocr=tesseract", "--set", "pdf.ocr_languages=deu")
    assert "is not installed: apt install tesseract-ocr" in said.err and "cannot read" not in said.err


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not at hand: apt install tesseract-ocr")
def test_a_scan_is_read_by_ocr(tmp_path, tokenmill):
    (tmp_path / "scan.pdf").write_bytes(scanned(pdf(lines(*PROSE))))
    [row] = tokenmill("extract", "--json", "--set", "pdf.ocr=tesseract", tmp_path / "scan.pdf").json()
    assert "The committee met in the morning" in row["text"] and row["meta"]["pdf_routes"] == "o"


def test_a_crawl(tmp_path, tokenmill):
    crawl = warc([Page("https://a.example/", PAGE, ""), Page("https://b.example/", "<html><body></body></html>", "")])
    paper = response("https://a.example/p.pdf", "application/pdf", pdf(lines("On paper.")))
    (tmp_path / "c.warc.gz").write_bytes(crawl + paper)
    said = tokenmill("extract", tmp_path / "c.warc.gz")
    assert f"==> {tmp_path}/c.warc.gz record 1 https://a.example/ (html) <==" in said.out
    assert "(pdf) <==\nOn paper." in said.out
    assert "record 2 https://b.example/: no text: no_text" in said.err
    assert "2 documents with text; without: 1 no_text, 1 warcinfo" in said.err
    assert tokenmill("extract", "-n", "1", tmp_path / "c.warc.gz").out.count("==>") == 1
    said = tokenmill("extract", "--engine", "mill,justext", tmp_path / "c.warc.gz", "--json")
    assert [(r["record"], r["engine"]) for r in said.json()] == [
        (1, "mill"), (1, "justext"), (2, "mill"), (2, "justext"), (3, None)]


# -- files -------------------------------------------------------------------------------------------------------------
def test_folders_and_globs(tmp_path, page, tokenmill):
    (tmp_path / "site" / "deep").mkdir(parents=True)
    (tmp_path / "site" / ".git").mkdir()
    for name in ("b.html", "a.html", "deep/c.html", ".git/config"):
        (tmp_path / "site" / name).write_text(PAGE)
    (tmp_path / "site" / "aa.html").symlink_to("nowhere")
    said = tokenmill("extract", "--json", tmp_path / "site")
    assert said.code == 1 and "aa.html: No such file" in said.err and "1 of 4 files could not" in said.err
    (tmp_path / "site" / "aa.html").unlink()
    rows = said.json()
    assert [r["file"][len(str(tmp_path)):] for r in rows] == ["/site/a.html", "/site/b.html", "/site/deep/c.html"]
    said = tokenmill("extract", tmp_path / "site" / "*.html")
    assert said.out.count("==> ") == 2 and said.out.index("a.html (html) <==") < said.out.index("b.html (html) <==")
    assert tokenmill("extract", "--json", tmp_path / "**" / "*.html").out.count("\n") == 4
    (tmp_path / "void").mkdir()
    for what, why in (("void", "no file in this folder"), ("*.pdf", "no file matches"), ("x.html", "no such file")):
        said = tokenmill("extract", page, tmp_path / what)
        assert said.code == 2 and why in said.err and said.out == "", "said before anything is read"
    said = tokenmill("extract", "https://example.org/page.html")
    assert said.code == 2 and "curl -s https://example.org/page.html | tokenmill extract -" in said.err
    (tmp_path / "pictures.zip").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as z:
        z.writestr("a.png", b"\x89PNG")
    assert "0 documents with text; without: 1 other_type" in tokenmill("extract", tmp_path / "pictures.zip").err


def test_a_named_pipe_is_read_once(tmp_path, tokenmill):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(PAGE.encode()), daemon=True)
    writer.start()
    assert "A heading" in tokenmill("extract", tmp_path / "pipe").out
    writer.join()


# -- terminals ---------------------------------------------------------------------------------------------------------
EVIL = "\x1b]0;owned\x07\x9b2J\x7f"


def test_nothing_that_a_terminal_obeys_gets_through(tmp_path, tokenmill):
    bad = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as z:
        z.writestr(f"{EVIL}\n.html", PAGE.replace("heading", f"heading {EVIL}"))
        z.writestr(f"{EVIL}.txt", f"text {EVIL}")
        z.writestr(f"{EVIL}none.html", "<html>")
    (tmp_path / f"{EVIL}.txt").write_text("words " + EVIL)
    for options in ((), ("--json",), ("--engine", "mill,resiliparse"), ("--engine", "mill,resiliparse", "--json")):
        for file in ("z.zip", f"{EVIL}.txt"):
            said = tokenmill("extract", *options, tmp_path / file)
            assert said.code == 0 and said.out and not bad.search(said.out + said.err), (options, file)
    said = tokenmill("extract", tmp_path / f"{EVIL}none")
    assert said.code == 2 and not bad.search(said.err)


def test_a_terminal_that_knows_few_characters(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße, 世界")
    said = subprocess.run([sys.executable, "-m", "pipeline.cli", "extract", tmp_path / "a.txt"], capture_output=True,
                          check=False, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert said.returncode == 0 and said.stdout == b"Gr\xfc\xdfe, \\u4e16\\u754c\n" and said.stderr == b""


def test_a_reader_that_has_seen_enough(tmp_path):
    (tmp_path / "long.txt").write_text("line\n" * 1_000_000)
    with subprocess.Popen([sys.executable, "-m", "pipeline.cli", "extract", str(tmp_path / "long.txt")],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"line\n"
        run.stdout.close()
        assert run.stderr.read() == b""
