"""`tokenmill extract`: files of every kind, stdin, formats, and two engines against each other."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile

import pytest
from rich.console import Console

from pipeline.cli.extract import side_by_side
from stages.document import Document
from stages.extract.html import ENGINES, Html

S = "The quick brown fox jumps over the lazy dog, and nobody in the village ever asked it why it did so. "
PAGE = ("<!DOCTYPE html><html lang=en><head><title>A title</title></head><body><nav><a href=/a>Menu</a></nav><article>"
        "<h1>A <b>heading</b></h1>" + "".join(f"<p>Number {i}: {S * 3}</p>" for i in range(4))
        + "<table><tr><th>Name<th>Value<tr><td>alpha<td>1</table></article><footer>Imprint</footer></body></html>")


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
    assert [r["engine"] for r in rows] == ["trafilatura", "trafilatura", None, None, None]
    assert rows[0]["text"] == rows[1]["text"] == staged() and rows[2]["meta"]["code_language"] == "python"
    assert rows[3]["text"] == "<p> is a tag.\nÜber" and rows[4]["text"].startswith("Only words")


def test_archives_and_places_that_a_source_would_pass_over(tmp_path, tokenmill):
    with zipfile.ZipFile(tmp_path / "pages.zip", "w") as z:
        z.writestr("one.html", PAGE)
        z.writestr("none.html", "<html><body></body></html>")
        z.writestr("read.me.txt", "Read me first.")
        z.writestr("picture.png", b"\x89PNG")
    said = tokenmill("extract", tmp_path / "pages.zip")
    assert "A heading" in said.out and "Read me first." in said.out and "picture" not in said.out + said.err
    assert "pages.zip:none.html: no text: no_text" in said.err
    said = tokenmill("extract", tmp_path / "pages.zip", "--engine", "justext,trafilatura")
    assert "+++ " in said.out and "(trafilatura)" in said.out and "+Read me first." not in said.out
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "a.js").write_text("function f(first, second) {\n  return first + second;\n}\n")
    assert "return first + second" in tokenmill("extract", tmp_path / "node_modules" / "a.js").out


def run_process(*arguments, **kw):
    return subprocess.run([sys.executable, "-m", "pipeline.cli", "extract", *map(str, arguments)], capture_output=True,
                          check=False, **kw)


def test_stdin_and_a_pipe(page):
    said = run_process("-", "--engine", "resiliparse,readability", input=PAGE.encode())
    lines = said.stdout.decode().splitlines()
    assert said.returncode == 0 and lines[:2] == ["--- - (resiliparse)", "+++ - (readability)"]
    assert lines[2].startswith("@@") and {line[0] for line in lines[3:] if line} <= set("-+ @")
    assert b"\x1b" not in said.stdout
    assert run_process("-", input=b"").stderr.startswith(b"-: no text: empty")


def test_two_engines_on_what_is_no_page(tmp_path, page, tokenmill):
    (tmp_path / "notes.txt").write_text("Notes of the day.\n")
    said = tokenmill("extract", "--engine", "trafilatura,justext", tmp_path / "notes.txt")
    assert said.out == "Notes of the day.\n\n"
    rows = tokenmill("extract", "--engine", "trafilatura,justext", "--json", page, tmp_path / "notes.txt").json()
    assert [(r["engine"], r["kind"]) for r in rows] == [("trafilatura", "html"), ("justext", "html"), (None, "text")]
    assert rows[0]["text"] == staged() and rows[1]["text"] == staged(engine="justext")


def test_equal_texts_are_said_to_be(tmp_path, tokenmill):
    (tmp_path / "p.html").write_text("<!DOCTYPE html><html><body>" + "".join(
        f"<p>Number {i}: {S * 4}</p>" for i in range(4)) + "</body></html>")
    said = tokenmill("extract", "--engine", "trafilatura,justext", tmp_path / "p.html")
    assert said.code == 0 and said.out == "" and "trafilatura and justext find the same text" in said.err
    (tmp_path / "e.html").write_text("<html><body></body></html>")
    said = tokenmill("extract", "--engine", "trafilatura,justext", tmp_path / "e.html")
    assert said.err.count("no text: no_text (this engine finds no main text") == 2


def test_side_by_side():
    out = io.StringIO()
    left = ["Head", *(f"line {i}" for i in range(20)), "the quick brown fox", "only [bold]left[/bold]"]
    right = ["Head", *(f"line {i}" for i in range(20)), "the slow brown fox"]
    console = Console(file=out, force_terminal=True, width=100, color_system="standard")
    side_by_side("page\x1b[2J.html", ("one", "two"), ["\n".join(left), "\n".join(right)], console)
    text = out.getvalue()
    assert "\x1b[1;31mquick" in text and "\x1b[1;32mslow" in text and "\x1b[31monly [bold]left[/bold]" in text
    assert "19 equal lines" in text and "line 7" not in text and "line 19" in text and "\x1b[2J" not in text
    assert "one  " in text and "two  " in text


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
    (tmp_path / "cut.html.gz").write_bytes(gzip.compress(PAGE.encode())[:100])
    said = tokenmill("extract", tmp_path / "cut.html.gz")
    assert "no text: truncated (the compressed file ends too early" in said.err


def test_a_stage_that_fails_fails_the_command(page, tokenmill, monkeypatch):
    def broken(self, doc):
        raise ValueError("so it goes")

    monkeypatch.setattr(Html, "process", broken)
    said = tokenmill("extract", page, "--json")
    assert said.code == 1 and "1 of 1 files could not be extracted" in said.err
    assert json.loads(said.out)["reason"] == "error: ValueError: so it goes"
    said = tokenmill("extract", page, "--engine", "trafilatura,justext")
    assert said.code == 1 and "2 of 1" not in said.err
