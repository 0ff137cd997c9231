"""Writes a little input of every kind, and one recipe that takes all of it to a curriculum."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import random
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pypdfium2 as pdfium

from tests.corpus import pages, sentences, write_warcs
from tests.stages.test_extract_pdf import lines, pdf

PROSE = ["The committee met in the morning and talked about the harvest.", "Nobody could say how much rain had fallen",
         "since the beginning of the year, and nobody wanted to guess.",
         "In the end they wrote a letter to the county,",
         "asked for better instruments, and went home before it was dark."]

MORE = ["A second page has other things to say about the weather.", "The river was high that spring, and the mill",
        "stood still for a week, because nobody would open the gates.",
        "Then the water fell as quickly as it had come."]

RECIPE = """
version: 1
sources:
  web:       {read: warc, path: crawl}
  webpdf:    {read: warc, path: crawl}
  saved:     {read: html, path: saved}
  scans:     {read: pdf, path: pdf}
  code:      {read: code, path: code}
  repos:     {read: code, path: repos/*.tar.gz, repository: true}
  notebooks: {read: notebook, path: notebooks}
  wiki:      {read: wiki, path: wiki.xml.bz2}
  papers:    {read: latex, path: papers}
  books:     {read: text, path: books}
  chats:     {read: sft, path: chats.jsonl}
  liked:     {read: preference, path: pairs.parquet, template: plain}
datasets:
  pages:  {from: [web, saved], steps: [html]}
  scan:   {from: scans, steps: [{pdf: {ocr: tesseract}}]}
  pdfs:   {from: webpdf, steps: [pdf]}
  paper:  {from: papers, steps: [latex]}
  book:   {from: books, steps: [book]}
  clean:
    from: [pages, scan, pdfs, paper, book, wiki]
    steps: [gopher_repetition, {gopher_quality: {min_doc_words: 20, max_non_alpha_words_ratio: 0.7}}, pii]
  made:   {from: [code, repos, notebooks], steps: [pii]}
  unique: {from: [clean, made], steps: [exact, {minhash: {verify: 0.75}}], priority: [made, clean]}
  post:   {from: [chats, liked], steps: [{pii: {}}]}
tokenizer: {train: {kind: bpe, vocab: 600, from: [unique, post], sample: 300KB}}
shards:
  web:   {from: unique, where: {source: [web, saved]}, longest: 256, val: 5%}
  read:  {from: unique, where: {source: [scans, webpdf, papers, books, wiki]}, longest: 256, val: 5%}
  code:  {from: unique, where: {source: [code, repos, notebooks]}, longest: 256, val: 5%}
  post:  {from: post, longest: 256, val: 5%}
curriculum:
  seed: 3
  total: 40k
  phases:
    - {name: stable, until: 70%, sequence: 128, batch: 512, mix: {web: 50, read: 20, code: 30}, on_exhausted: repeat}
    - {name: anneal, until: 100%, sequence: 128, mix: {web: 20, read: 20, code: 20, post: 40}, lr: decay}
run: {partition: 60KB, max_error_rate: 50%}
"""


def write(top: Path) -> Path:
    """Write the inputs and the recipe to the folder `top`. Returns the path of the recipe."""
    rng, prose = random.Random(8), sentences()

    def some(n: int) -> str:
        return " ".join(rng.sample(prose, n))

    write_warcs(top / "crawl", 60, 2)
    with open(top / "crawl" / "crawl-01.warc.gz", "ab") as f:
        f.write(response("https://site1.example/paper.pdf", "application/pdf", native(some(40))))
    for folder in ("saved", "pdf", "code", "code/node_modules", "repos", "notebooks", "papers", "books"):
        (top / folder).mkdir(parents=True)
    for i, page in enumerate(pages(12, seed=99)):
        (top / "saved" / f"{i}.html").write_text(page.html)
    (top / "saved" / "empty.html").write_text("<html><body></body></html>")
    (top / "pdf" / "native.pdf").write_bytes(native(some(30)))
    (top / "pdf" / "scan.pdf").write_bytes(scanned(pdf(lines(*PROSE), lines(*MORE))))
    (top / "pdf" / "broken.pdf").write_bytes(b"%PDF-1.4\nrubbish")
    for i in range(12):
        (top / "code" / f"m{i}.py").write_text(
            f'"""Module {i}: {prose[i]}"""\n\n# SPDX-License-Identifier: MIT\n\n\n' + "".join(
                f"def f{i}_{k}(value):\n    # {rng.choice(prose)}\n    return value + {k}\n\n\n" for k in range(12)))
    (top / "code" / "node_modules" / "x.js").write_text("function f(a) { return a; }\n")
    with tarfile.open(top / "repos" / "tool-1.0.tar.gz", "w:gz") as tar:
        for name in ("setup.py", "tool/main.py"):
            data = "".join(f"# {s}\nprint({i})\n" for i, s in enumerate(rng.sample(prose, 12))).encode()
            info = tarfile.TarInfo(f"tool-1.0/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    for i in range(4):
        cells = [{"cell_type": "markdown", "source": [f"# Lesson {i}\n", some(6)]},
                 {"cell_type": "code", "source": "print(40 + 2)", "execution_count": 1, "metadata": {},
                  "outputs": [{"output_type": "stream", "name": "stdout", "text": ["42\n"]}]}]
        (top / "notebooks" / f"n{i}.ipynb").write_text(json.dumps(
            {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}))
    articles = "".join(
        f"<page><title>Thing {i}</title><ns>0</ns><id>{i + 1}</id><revision><id>{i}</id><text>'''Thing {i}''' is "
        f"[[a thing|one]].{{{{cite|x}}}} {escaped(some(12))}\n== Use ==\n* {escaped(some(3))}</text></revision></page>"
        for i in range(10))
    (top / "wiki.xml.bz2").write_bytes(bz2.compress(
        f"<mediawiki><siteinfo><base>https://en.wiki.example/wiki/Main</base></siteinfo>{articles}<page><title>R"
        f"</title><ns>0</ns><id>99</id><redirect title='Thing 1'/></page></mediawiki>".encode()))
    for i in range(6):
        (top / "papers" / f"p{i}.tex").write_text(
            f"\\documentclass{{article}}\n% a secret remark\n\\title{{Paper {i}}}\n\\begin{{document}}\n\\maketitle\n"
            f"\\section{{One}}\n{tex(some(10))}\n\\[ x_{{{i}}} = \\frac{{1}}{{2}} \\]\n{tex(some(8))}\n"
            "\\end{document}\n")
    body = "\n\n".join(wrapped(some(12)) for _ in range(8))
    (top / "books" / "b.txt").write_text(
        f"The Project Gutenberg EBook of A Book, by N. N.\n\nTitle: A Book\n\nAuthor: N. N.\n\n"
        f"*** START OF THIS PROJECT GUTENBERG EBOOK A BOOK ***\n\n{body}\n\n*** END OF THIS PROJECT GUTENBERG EBOOK A "
        f"BOOK ***\nLicence of Gutenberg, long and legal.\n")
    with open(top / "chats.jsonl", "w") as f:
        for i in range(60):
            f.write(json.dumps({"messages": [
                {"role": "user", "content": f"ASKED {i}: what is {prose[i][:60]} Write to u{i}@mail.example.org."},
                {"role": "assistant", "content": f"Answer {i}: {rng.choice(prose)}"}]}) + "\n")
        f.write('{"messages": [{"role": "critic", "content": "nobody knows this role"}]}\n')
    pq.write_table(pa.Table.from_pylist(
        [{"prompt": f"ASKED {i} again", "chosen": f"Better {rng.choice(prose)}",
          "rejected": f"Worse {rng.choice(prose)}"} for i in range(40)]), top / "pairs.parquet")
    (top / "recipe.yaml").write_text(RECIPE)
    return top / "recipe.yaml"


def response(url: str, mime: str, body: bytes) -> bytes:
    """Return a WARC record with an HTTP response, compressed with gzip."""
    block = f"HTTP/1.1 200 OK\r\nContent-Type: {mime}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    head = (f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:0>\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
            f"WARC-Target-URI: {url}\r\nContent-Type: application/http; msgtype=response\r\n"
            f"Content-Length: {len(block)}\r\n\r\n").encode()
    return gzip.compress(head + block + b"\r\n\r\n", mtime=0)


def scanned(data: bytes) -> bytes:
    """Return the pages of a PDF as a new PDF of pictures at 200 dpi, without text, like a scan."""
    source, made = pdfium.PdfDocument(data), pdfium.PdfDocument.new()
    for page in source:
        size = page.get_size()
        image = pdfium.PdfImage.new(made)
        image.set_bitmap(page.render(scale=200 / 72, grayscale=True))
        image.set_matrix(pdfium.PdfMatrix().scale(*size))
        new = made.new_page(*size)
        new.insert_obj(image)
        new.gen_content()
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


def native(text: str) -> bytes:
    """Return a PDF whose text can be extracted without OCR."""
    plain = text.encode("ascii", "ignore").decode().replace("\\", "").replace("(", "").replace(")", "")
    broken = wrapped(plain).split("\n")
    return pdf(*(lines(*broken[i:i + 50]) for i in range(0, len(broken), 50)))


def wrapped(text: str) -> str:
    out, line = [], ""
    for word in text.split():
        if len(line) + len(word) > 70:
            out.append(line.rstrip())
            line = ""
        line += word + " "
    return "\n".join([*out, line.rstrip()])


def escaped(text: str) -> str:
    return text.replace("&", "and").replace("<", "").replace("[", "").replace("{", "").replace("'", "")


def tex(text: str) -> str:
    return "".join(c for c in text if c not in "\\{}$%&#_^~")
