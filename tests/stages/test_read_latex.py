"""Papers of several files: the main file is found, and the others are inserted where TeX reads them."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import zipfile

import pytest

from stages.document import BadRecord, Document, document_id
from stages.extract.latex.step import Latex as Extract
from stages.read import latex
from stages.read.latex import LatexPapers, join, main_file
from stages.read.reader import Skipped, Slice

MAIN = r"""\documentclass{article}
\usepackage{amsmath, mymacros}
\input{defs}
\title{On $\R$}
\begin{document}
\maketitle
% \input{never}
\input sections/intro
\include{sections/method}
\import{sections/}{end.tex}
\includegraphics{fig.pdf}
\input{missing}
\bibliography{refs}
\end{document}
"""
FILES = {"paper/ms.tex": MAIN, "paper/defs.tex": "\\newcommand{\\R}{\\mathbb{R}}\n", "paper/never.tex": "Never.",
         "paper/sections/intro.tex": "\\section{Intro}\nText in $\\R$ of \\name.\n\\endinput gone\n",
         "paper/sections/method.tex": "\\section{Method}\n\\input{deep}\n",
         "paper/sections/deep.tex": "Deep.\n\\input{ms}",
         "paper/sections/end.tex": "\\section{End}\nDone.", "paper/mymacros.sty": "\\newcommand{\\name}{Anna}\n",
         "paper/ms.bbl": "\\begin{thebibliography}{9} gone", "paper/fig.pdf": "%PDF", "paper/00README": "x",
         "paper/template.tex": "\\documentclass{article}\\begin{document}Short\\end{document}"}
TEXT = """# On $\\mathbb{R}$

## Intro

Text in $\\mathbb{R}$ of Anna.

## Method

Deep.

## End

Done."""


def tar(files: dict[str, str | bytes] | list[tuple[str, str | bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, text in files.items() if isinstance(files, dict) else files:
            data = text if isinstance(text, bytes) else text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read(path, **config) -> list[Document | BadRecord]:
    return list(LatexPapers(**config).read(str(path), Slice("papers", path.name)))


def extracted(doc: Document) -> str:
    assert Extract().process(doc) is None
    return doc.text


@pytest.mark.parametrize("name", ["p.tar", "p.tar.gz", "p.gz", "p.zip"])
def test_a_paper_of_many_files(tmp_path, name):
    path, data = tmp_path / name, tar(FILES)
    if name.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            for member, text in FILES.items():
                archive.writestr(member, text)
    else:
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (doc,) = read(path)
    assert doc.meta == {"files": 7} and doc.id == document_id("papers", name, "", 0) and doc.locator["file"] == name
    assert extracted(doc) == TEXT and doc.meta["title"] == "On $\\mathbb{R}$"


def test_a_month_of_arxiv_is_a_paper_a_member(tmp_path):
    members = {f"2101/2101.0000{i}.gz": gzip.compress(data) for i, data in (
        (1, tar(FILES)), (2, b"\\section{One} file"), (4, tar({"a.pdf": "%PDF"})), (5, b"x" * 999),
        (6, b"%PDF-1.4 \0"), (7, b"\\bf " * 4000))}
    members["2101/2101.00005.gz"] = members["2101/2101.00005.gz"][:-9]
    members = dict(sorted((members | {"2101/2101.00003.pdf": b"%PDF-1.4"}).items()))
    (tmp_path / "arXiv_src_2101_001.tar").write_bytes(tar(members))
    items = read(tmp_path / "arXiv_src_2101_001.tar", max_paper=30_000)
    assert [(type(i), getattr(i, "reason", None), i.locator["sub"][10:]) for i in items] == [
        (Document, None, "00001.gz"), (Document, None, "00002.gz"), (Skipped, "no_tex", "00003.pdf"),
        (Skipped, "no_tex", "00004.gz"), (BadRecord, "truncated", "00005.gz"), (Skipped, "no_tex", "00006.gz"),
        (Document, None, "00007.gz")]
    assert extracted(items[0]) == TEXT and items[1].text == "\\section{One} file"
    assert len({i.id for i in items if isinstance(i, Document)}) == 3
    assert items[0].id == document_id("papers", "arXiv_src_2101_001.tar", "2101/2101.00001.gz", 0)
    assert read(tmp_path / "arXiv_src_2101_001.tar", max_paper=900)[0].reason == "too_large"


@pytest.mark.parametrize("name", ["p.tar.gz", "p.gz", "month.tar"])
def test_the_last_of_equal_names_counts_however_a_paper_is_packed(tmp_path, name):
    paper = gzip.compress(tar([("a.tex", MAIN + "first"), ("./a.tex", MAIN + "second")]))
    (tmp_path / name).write_bytes(tar({"2101/1.gz": paper}) if name == "month.tar" else paper)
    (doc,) = read(tmp_path / name)
    assert "second" in doc.text and "first" not in doc.text


def test_single_files_and_what_is_none(tmp_path):
    cases = {"a.tex": (b"\\bf \xe9t\xe9", None), "b.tex.gz": (gzip.compress(b"\\it x"), None), "c.tex": (b"", "empty"),
             "d.tex": (b" \n", "empty"), "e.gz": (gzip.compress(b"%!PS"), "no_tex"),
             "f.tar": (tar({"x.pdf": "y"}), "no_tex"),
             "g.tar": (b"junk" * 300, "corrupt_tar"), "h.tar.gz": (gzip.compress(tar(FILES))[:400], "truncated"),
             "i.zip": (b"PK", "corrupt_zip")}
    for name, (data, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        (item,) = read(tmp_path / name)
        assert getattr(item, "reason", None) == reason, name
    assert read(tmp_path / "a.tex")[0].text == "\\bf été"
    with pytest.raises(FileNotFoundError, match=r"gone\.tex"):
        read(tmp_path / "gone.tex")


def test_damaged_archives_are_counted(tmp_path):
    rng = random.Random(3)
    whole = {"a.tar": tar({"2101/1.gz": gzip.compress(tar(FILES)), "b.tex": MAIN}), "b.gz": gzip.compress(tar(FILES)),
             "c.tar.gz": gzip.compress(tar(FILES))}
    for i in range(150):
        name = rng.choice(sorted(whole))
        data = bytearray(whole[name])
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path = tmp_path / f"{i}{name}"
        path.write_bytes(data[:rng.randrange(1, len(data))] if i % 3 == 0 else data)
        for item in read(path):
            assert isinstance(item, BadRecord) or Extract().process(item) in (None, "no_text")


def test_the_main_file():
    body = "\\begin{document}x\\end{document}"
    assert main_file({"a.tex": "text", "b.tex": "\\documentclass{x}" + body, "c.sty": "\\documentclass"}) == "b.tex"
    assert main_file({"a.tex": "\\documentclass{x}" + body, "old/b.tex": "\\documentclass{x}" + body * 2}) == "a.tex"
    assert main_file({"a.tex": "\\input b \\bye", "b.tex": "much longer text " * 9}) == "a.tex", "plain TeX"
    assert main_file({"supp.tex": "\\documentclass{x}" + body, "ms.tex": "\\documentclass{x}" + body * 2}) == "ms.tex"
    assert main_file({"a.tex": "\\documentclass{x}\\input{b}", "b.tex": body}) == "a.tex"
    assert main_file({"a.tex": "% \\documentclass{x}", "b.tex": "\\documentstyle[12pt]{x}"}) == "b.tex"
    assert main_file({"paper.txt": "\\documentstyle{x}"}) == "paper.txt" and main_file({"a.sty": "x"}) is None


def test_joining_is_bounded():
    text, files = join({"a.tex": "A\\input{b}", "b.tex": "B\\input{a}"}, "a.tex", 99)
    assert (text.replace("\n", ""), files) == ("AB", 2)
    chain = {f"{i}.tex": f"{i}\\input{{{i + 1}}}" for i in range(50)}
    text, files = join(chain, "0.tex", 999)
    assert files <= 10 and text.startswith("0\n1\n2")
    wide = {"a.tex": "\\input{b}" * 5000, "b.tex": "\\input{c}" * 5000, "c.tex": "x" * 1000}
    text, files = join(wide, "a.tex", 100_000)
    assert len(text) <= 100_000 + 20_000 and files <= latex._FILES
