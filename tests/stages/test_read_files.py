"""Readers of files, archives, code trees, Parquet tables: ids, caps, damage, row-group splits."""

from __future__ import annotations

import gzip
import io
import itertools
import random
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.catalog import READERS, reader_class
from stages.document import BadRecord, Document, document_id
from stages.read.code import Code
from stages.read.files import HtmlFiles, PdfFiles, TextFiles
from stages.read.parquet import Parquet
from stages.read.reader import Reader, Skipped, Slice
from tests.conftest import shared_data

OURS = [n for n in READERS if n != "datatrove"]


def read(reader: Reader, local: object, path: str = "") -> list[Document | BadRecord]:
    return list(reader.read(str(local), Slice("s", path or Path(str(local)).name)))


def reasons(items: list[Document | BadRecord]) -> Counter[str]:
    return Counter(i.reason if isinstance(i, BadRecord) else "document" for i in items)


# -- all readers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OURS)
def test_every_reader_says_what_is_missing(name, tmp_path):
    reader = reader_class(name)()
    assert reader.name == name and reader.suffixes and len(reader.key()) == 32
    with pytest.raises(FileNotFoundError, match="sub/x: no such file"):
        read(reader, tmp_path / "gone", "sub/x")
    with pytest.raises(IsADirectoryError, match="sub/x: is a folder"):
        read(reader, tmp_path, "sub/x")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("seed", range(12))
def test_no_reader_raises_on_rubbish(name, seed, tmp_path):
    """Rubbish, with and without a known beginning, gives documents or counted records."""
    rng = random.Random(seed)
    start = rng.choice([b"", b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"WARC/1.0\r\n", b"PAR1",
                        b"<?xml version='1.0'?><mediawiki>", b"BZh9",
                        b"\x28\xb5\x2f\xfd", b"%PDF-1.4\n", b'{"text": "', b"\x04\x22\x4d\x18", b"\xff\xfe"])
    local = tmp_path / "x"
    local.write_bytes(start + rng.randbytes(rng.choice((0, 5, 3000, 200_000))))
    reader = reader_class(name)()
    for path in ("x", "x.zip", "x.tar.gz", *(f"x{s}" for s in reader.suffixes[:3])):
        items = read(reader, local, path)
        assert all(isinstance(i, (Document, BadRecord)) for i in items)
        assert len({i.id for i in items}) == len(items)
        reader.splits(str(local), path, 1000)


def test_config_enters_the_key():
    assert TextFiles().key() == TextFiles(max_bytes=64 << 20).key() != TextFiles(max_bytes=5).key()


# -- texts, pages, PDFs ----------------------------------------------------------------------------------------------
def test_text_encodings_and_line_ends(tmp_path):
    for name, data in {"a.txt": "naïve\r\nZeile\rx".encode(), "b.txt": "Привет, мир. Как дела?".encode("cp1251"),
                       "c.md.gz": gzip.compress("# Über".encode("utf-16"))}.items():
        (tmp_path / name).write_bytes(data)
    (a,), (b,), (c,) = (read(TextFiles(), tmp_path / n) for n in ("a.txt", "b.txt", "c.md.gz"))
    assert (a.text, a.mime, a.meta, a.raw) == ("naïve\nZeile\nx", "text/plain", {}, None)
    assert b.text == "Привет, мир. Как дела?" and b.meta == {"encoding": "cp1251"}
    assert c.text == "# Über" and c.mime == "text/markdown"
    assert a.id == document_id("s", "a.txt", "", 0)


def test_pages_and_pdfs_are_raw(tmp_path):
    (tmp_path / "a.html").write_bytes(b"<html>")
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4")
    (page,), (pdf,) = read(HtmlFiles(), tmp_path / "a.html"), read(PdfFiles(), tmp_path / "a.pdf")
    assert (page.raw, page.mime, page.text) == (b"<html>", "text/html", "")
    assert (pdf.raw, pdf.mime) == (b"%PDF-1.4", "application/pdf")


def test_empty_binary_too_large_and_cut(tmp_path):
    for name, data in {"empty.txt": b"", "blank.txt": b" \n ", "bin.txt": b"a\x00b", "big.txt": b"x" * 2000,
                       "bomb.txt.gz": gzip.compress(b"x" * 10**7),
                       "cut.txt.gz": gzip.compress(b"x" * 900)[:-9]}.items():
        (tmp_path / name).write_bytes(data)
    found = {p.name: read(TextFiles(max_bytes=1000), p)[0] for p in tmp_path.iterdir()}
    assert {k: v.reason for k, v in found.items()} == {
        "empty.txt": "empty", "blank.txt": "empty", "bin.txt": "binary", "big.txt": "too_large",
        "bomb.txt.gz": "too_large", "cut.txt.gz": "truncated"}
    assert isinstance(found["empty.txt"], Skipped) and not isinstance(found["big.txt"], Skipped)


def test_real_books_and_pages():
    books = [read(TextFiles(), p)[0] for p in sorted(shared_data("text", "books").glob("*.md.gz"))]
    assert len(books) == 14 and all(len(b.text) > 100_000 and b.mime == "text/markdown" for b in books)
    pages = [read(HtmlFiles(), p)[0] for p in sorted(shared_data("html", "fundus").rglob("*.html.gz"))]
    assert len(pages) >= 60 and all(b"<" in p.raw for p in pages)


# -- archives --------------------------------------------------------------------------------------------------------
def make_zip(path: Path, files: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files:
            z.writestr(name, data)
    return path


def make_tar(path: Path, files: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as t:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return path


FILES = [("d/one.txt", b"first"), ("two.md", b"second"), ("x.png", b"\x89PNG"), ("../../evil.txt", b"third"),
         ("big.txt", b"y" * 5000), ("empty.txt", b"")]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("make", "name"), [(make_zip, "a.zip"), (make_tar, "a.tar.gz")])
def test_archives(tmp_path, make, name):
    local = make(tmp_path / name, [*FILES, ("two.md", b"again")])
    items = read(TextFiles(max_bytes=1000), local)
    docs = {i.locator["sub"]: i for i in items if isinstance(i, Document)}
    assert reasons(items) == {"document": 4, "other_type": 1, "too_large": 1, "empty": 1}
    assert docs["d/one.txt"].id == document_id("s", name, "d/one.txt", 0)
    assert docs["two.md"].id == document_id("s", name, "two.md", 1) and docs["two.md"].text == "again"
    assert docs["../../evil.txt"].text == "third", "names are names, nothing is written anywhere"
    local.write_bytes(local.read_bytes()[:150])
    cut = read(TextFiles(), local)
    assert cut[-1].fatal and cut[-1].reason in ("corrupt_zip", "truncated", "corrupt_tar")


def test_zip_bomb_and_encrypted_member(tmp_path):
    local = make_zip(tmp_path / "a.zip", [("bomb.txt", b"\x20" * 10**7), ("good.txt", b"fine")])
    assert reasons(read(TextFiles(max_bytes=10**6), local)) == {"too_large": 1, "document": 1}
    data = bytearray(make_zip(tmp_path / "e.zip", [("a.txt", b"secret")]).read_bytes())
    data[6] |= 1                                            # flag bits of the local header and of the directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "e.zip").write_bytes(data)
    assert reasons(read(TextFiles(), tmp_path / "e.zip")) == {"encrypted": 1}


# -- code ------------------------------------------------------------------------------------------------------------
GOOD = b"def f(x):\n    return x + 1\n" * 5


@pytest.mark.parametrize(("path", "data", "outcome"), [
    ("src/a.py", GOOD, "python"), ("a.rs", b"fn main() { println(1); }\n", "rust"),
    ("Makefile", b"all:\n\tcc x.c\n", "makefile"),
    ("w/Dockerfile", b"FROM scratch\nRUN make\n", "dockerfile"), ("a.h", b"int f(void);\n", "c"),
    (".git/a.py", GOOD, "hidden"), ("node_modules/x/a.js", GOOD, "vendored"), ("jquery.min.js", GOOD, "vendored"),
    ("a.py", b"x = '" + b"y" * 2000 + b"'\n", "long_lines"), ("a.js", (b"a" * 150 + b"\n") * 50, "long_lines"),
    ("a.py", b"\x00\x01" + GOOD, "binary"), ("a.py", b"  \n", "empty"),
    ("a.go", b"// Code generated by protoc. DO NOT EDIT.\n" + GOOD, "generated"),
    ("a.py", b"#$%^&*(){}[]!@ ~`\n" * 10, "few_letters"), ("a.py", b"x = 1\n" * 2000, "too_large"),
])
def test_code_rules(tmp_path, path, data, outcome):
    (tmp_path / "x").write_bytes(data)
    (item,) = read(Code(max_bytes=10_000), tmp_path / "x", path)
    assert (item.reason if isinstance(item, BadRecord) else item.meta["code_language"]) == outcome
    assert isinstance(item, (Document, Skipped))
    if isinstance(item, Document):
        assert item.text == data.decode() and item.language == ""


def test_standard_library_as_code():
    root = Path(sysconfig.get_paths()["stdlib"]) / "json"
    items = [read(Code(), p, f"json/{p.name}")[0] for p in sorted(root.glob("*.py"))]
    assert len(items) >= 5 and reasons(items)["document"] >= 4, sys.version


# -- Parquet ---------------------------------------------------------------------------------------------------------
def table(rows: int, **more: object) -> pa.Table:
    return pa.table({"id": [f"r{i}" for i in range(rows)], "text": [f"text {i} ü" for i in range(rows)],
                     "url": [f"http://x/{i}" for i in range(rows)], "n": list(range(rows)), **more})


def facts(item: Document | BadRecord) -> tuple:
    if isinstance(item, BadRecord):
        return item.reason, item.id, str(item.locator)
    return item.id, item.text, item.url, str(item.locator), str(item.meta)


def test_parquet_columns_and_splits(tmp_path):
    local = tmp_path / "a.parquet"
    pq.write_table(table(1000), local, row_group_size=130)
    reader = Parquet(keep=("n",))
    whole = read(reader, local)
    assert len(whole) == 1000 and whole[7].meta == {"id": "r7", "n": 7} and whole[7].url == "http://x/7"
    assert whole[131].locator == {"file": "a.parquet", "offset": 1, "record": 131, "sub": ""}
    for target in (1, 5000, 10**9):
        pieces = reader.splits(str(local), "a.parquet", target)
        assert pieces[-1].stop == 8
        for a, b in itertools.pairwise(pieces):
            assert (a.stop, a.ordinal + a.records) == (b.start, b.ordinal)
        parts = [facts(i) for p in pieces for i in reader.read(str(local), p.of("s", "a.parquet"))]
        assert parts == [facts(i) for i in whole]
    assert len(reader.splits(str(local), "a.parquet", 1)) == 8


def test_parquet_bad_rows_and_files(tmp_path):
    texts = pa.array([b"ok", None, b"\xff\xfe", b"", b"x" * 500], pa.binary())
    local = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), local)
    assert [facts(i)[0] if isinstance(i, BadRecord) else i.text for i in read(Parquet(max_bytes=100), local)] == [
        "ok", "missing_text", "invalid_utf8", "empty", "too_large"]
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), local)
    assert [d.text for d in read(Parquet(), local)] == ["a", "b", "a"]
    data = bytearray(local.read_bytes())
    data[20] ^= 0xFF
    local.write_bytes(data[:-30])
    (item,) = read(Parquet(), local)
    assert item.reason == "corrupt_parquet" and item.fatal and Parquet().splits(str(local), "a", 1) is None


def test_parquet_wrong_columns_are_a_clear_error(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'text'; it has body, n"):
        read(Parquet(), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="not text"):
        read(Parquet(text="n"), tmp_path / "a.parquet")
    assert read(Parquet(text="body"), tmp_path / "a.parquet")[0].text == "x"


def test_parquet_row_group_cap_leaves_ordinals_alone(tmp_path):
    pq.write_table(table(300), tmp_path / "a.parquet", row_group_size=100)
    size = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).total_byte_size
    assert reasons(read(Parquet(max_group=size - 1), tmp_path / "a.parquet"))["too_large"] >= 1
