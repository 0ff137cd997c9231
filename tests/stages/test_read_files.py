"""Readers of files, archives, code trees and Parquet tables: ids, limits, damage, and splits at row groups."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import itertools
import json
import lzma
import random
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import stage
from stages.catalog import READERS, reader_class
from stages.document import BadRecord, Document, document_id
from stages.extract.html.step import Html
from stages.read import parquet, row_groups, streams
from stages.read.code import Code
from stages.read.files import HtmlFiles, PdfFiles, TextFiles
from stages.read.jsonl import Jsonl
from stages.read.parquet import Parquet
from stages.read.reader import Reader, Skipped, Slice
from stages.read.streams import DamagedStream, DecompressedStream
from stages.read.wiki import Wiki
from tests.conftest import shared_data

OURS = [n for n in READERS if n not in ("datatrove", "tokens")]           # the files of `tokens` are no documents


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
def test_no_reader_raises_on_rubbish(name, tmp_path):
    """Rubbish, with and without a known beginning, gives documents or counted records."""
    rng, local, reader = random.Random(name), tmp_path / "x", reader_class(name)()
    paths = ("x", "x.zip", "x.tar.gz", *(f"x{s}" for s in reader.suffixes[:3]))
    for start in (b"", b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"WARC/1.0\r\n", b"PAR1",
                  b"<?xml version='1.0'?><mediawiki>", b"BZh9", b"\x28\xb5\x2f\xfd", b"%PDF-1.4\n",
                  b'{"text": "', b"\x04\x22\x4d\x18", b"\xff\xfe"):
        local.write_bytes(start + rng.randbytes(rng.choice((0, 5, 3000, 100_000))))
        for path in paths:
            items = read(reader, local, path)
            assert all(isinstance(i, (Document, BadRecord)) for i in items)
            assert len({i.id for i in items}) == len(items)
            reader.splits(str(local), path, 1000)


def test_config_enters_the_key():
    assert TextFiles().key() == TextFiles(max_bytes=64 << 20).key() != TextFiles(max_bytes=5).key()


def test_python_enters_the_keys(monkeypatch):
    """Its Unicode tables decide what is a letter or a space: another one may make another text."""
    keys = TextFiles().key(), Html().key()
    monkeypatch.setattr(stage, "sys", SimpleNamespace(version_info=SimpleNamespace(major=3, minor=99)))
    assert (TextFiles().key() != keys[0], Html().key() != keys[1]) == (True, True)


def test_no_stage_reads_or_writes_in_the_encoding_of_the_locale():
    root = Path(stage.__file__).parent
    found = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--preview", "--select", "PLW1514",
                            "--output-format", "concise", str(root)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


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


@pytest.mark.parametrize(("make", "name"), [(make_zip, "a.zip"), (make_tar, "a.tar.gz")])
def test_an_archive_that_inflates_without_end_is_cut_off(tmp_path, make, name, monkeypatch):
    monkeypatch.setattr(streams, "MAX_ARCHIVE_BYTES", 100_000)
    items = read(TextFiles(), make(tmp_path / name, [(f"{i}.txt", b"x" * 30_000) for i in range(9)]))
    assert reasons(items) == {"document": 3, "too_large": 1} and items[-1].fatal


def test_overlapping_entries_of_a_zip_count_each_time(tmp_path, monkeypatch):
    """One member, listed a thousand times (a bomb needs no nesting, https://www.bamsoftware.com/hacks/zipbomb/)."""
    monkeypatch.setattr(streams, "MAX_ARCHIVE_BYTES", 10**6)
    data = make_zip(tmp_path / "a.zip", [("a.txt", b"x" * 30_000)]).read_bytes()
    start, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    tail = bytearray(data[end:])
    tail[8:10] = tail[10:12] = (1000).to_bytes(2, "little")
    tail[12:16] = (1000 * (end - start)).to_bytes(4, "little")
    (tmp_path / "a.zip").write_bytes(data[:start] + data[start:end] * 1000 + bytes(tail))
    found = reasons(read(TextFiles(), tmp_path / "a.zip"))
    assert found == {"document": 33, "too_large": 1}


# -- code ------------------------------------------------------------------------------------------------------------
GOOD = b"def f(x):\n    return x + 1\n" * 5


@pytest.mark.parametrize(("path", "data", "outcome"), [
    ("src/a.py", GOOD, "python"), ("a.rs", b"fn main() { println(1); }\n", "rust"),
    ("Makefile", b"all:\n\tcc x.c\n", "makefile"),
    ("w/Dockerfile", b"FROM scratch\nRUN make\n", "dockerfile"), ("a.h", b"int f(void);\n", "c"),
    (".git/a.py", GOOD, "hidden"), ("node_modules/x/a.js", GOOD, "vendored"), ("jquery.min.js", GOOD, "vendored"),
    ("a.py", b"x = '" + b"y" * 2000 + b"'\n", "long_lines"), ("a.js", (b"a" * 150 + b"\n") * 50, "minified"),
    ("a.py", b"\x00\x01" + GOOD, "binary"), ("a.py", b"  \n", "empty"),
    ("a.go", b"// Code generated by protoc. DO NOT EDIT.\n" + GOOD, "generated"),
    ("a.py", b"#$%^&*(){}[]!@ ~`\n" * 50, "few_letters"), ("a.py", b"x = 1\n" * 2000, "too_large"),
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


@pytest.mark.parametrize("named", [True, False], ids=["dictionary", "plain"])
def test_a_parquet_file_that_repeats_one_text_needs_no_memory_for_each(tmp_path, named):
    """450 rows of one megabyte in a file of a few kB: they are never all in memory, whatever type the column says."""
    text = "all work and no play " * 50_000
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 450, pa.int32()), pa.array([text]))
    # without Arrow's schema in the file the column is one of plain strings
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd", store_schema=named)
    assert pa.types.is_dictionary(pq.read_schema(tmp_path / "a.parquet").field("text").type) == named
    held, before, docs = 0, pa.total_allocated_bytes(), 0
    for doc in Parquet().read(str(tmp_path / "a.parquet"), Slice("s", "a.parquet")):
        held = max(held, pa.total_allocated_bytes() - before)
        docs += doc.text == text
    assert docs == 450 and held < 300 << 20


def test_parquet_reads_books_a_few_at_a_time(tmp_path):
    books = [f"book {i} " + "x" * (2 << 20) for i in range(40)]
    pq.write_table(pa.table({"text": books, "n": range(40)}), tmp_path / "a.parquet", use_dictionary=False)
    info = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    assert info.num_rows == 40
    assert row_groups.rows_per_batch(info, ["text"]) == 15 and row_groups.rows_per_batch(info, ["n"]) == 256
    assert [d.text for d in read(Parquet(), tmp_path / "a.parquet")] == books


def test_a_text_may_begin_like_a_compressed_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"BZh is how bzip2 begins.")
    (item,) = read(TextFiles(), tmp_path / "a.txt")
    assert item.text == "BZh is how bzip2 begins."
    for text in (b"", b"something"):
        (tmp_path / "a.txt.bz2").write_bytes(bz2.compress(text))
        with DecompressedStream(str(tmp_path / "a.txt.bz2")) as stream:
            assert stream.coding == "bz2" and stream.read_all(100) == text


def test_parquet_one_bad_cell_is_one_bad_record(tmp_path):
    """Cells that Python cannot hold: bytes that are no UTF-8 in a string column, a date beyond the year 9999."""
    urls = pa.StringArray.from_buffers(3, pa.array([0, 1, 2, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xffc"))
    dates = pa.array([0, 0, 2**60], pa.timestamp("ms"))
    local = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two", "three"], "url": urls, "when": dates, "n": [1, 2, 3]}), local)
    items = read(Parquet(date="when"), local)
    assert [i.reason if isinstance(i, BadRecord) else i.text for i in items] == ["one", "invalid_utf8", "bad_value"]
    assert [i.locator["record"] for i in items] == [0, 1, 2] and not any(getattr(i, "fatal", 0) for i in items)
    assert [i.id for i in items] == [document_id("s", "a.parquet", "", n) for n in range(3)]
    reader = Parquet(url="", keep=("when", "url"))          # in meta it costs the value, not the document
    items = read(reader, local)
    assert [(i.text, i.meta.get("url")) for i in items] == [("one", "a"), ("two", None), ("three", "c")]
    assert reader.lost == {"when": {"bad_value": 1}, "url": {"invalid_utf8": 1}} and "when" not in items[2].meta


@pytest.mark.parametrize("odd", ["", "a blank text", "an empty text", "a null", "a number", "no number", "bytes",
                                 "a large one", "not UTF-8", "views"])
def test_batches_of_nothing_odd_are_read_as_row_by_row(tmp_path, monkeypatch, odd):
    texts = [f"Text {i}, größer: {chr(0x1F600 + i)}." for i in range(700)]
    more = {"lang": [None if i % 3 else "de" for i in range(700)], "when": ["2026-11-21"] * 700,
            "note": [None if i % 5 else f"n{i}" for i in range(700)]}
    if odd == "a blank text":
        texts[300] = " \n\t"
    elif odd == "an empty text":
        texts[300] = ""
    elif odd == "a large one":
        texts[300] *= 100
    elif odd == "a null":
        texts[300] = None
    elif odd == "a number":
        more["note"] = list(range(700))
    elif odd == "no number":
        more["note"] = [i / 7 for i in range(699)] + [float("nan")]
    column = pa.array(texts)
    if odd == "bytes":
        column = column.cast(pa.binary())
    elif odd == "views":
        column = column.cast(pa.string_view())
    elif odd == "not UTF-8":
        data = b"".join(t.encode() for t in texts)
        sizes = np.cumsum([0, *(len(t.encode()) for t in texts)]).astype("<i4")
        broken = bytearray(data)
        broken[int(sizes[300])] = 0xFF
        column = pa.StringArray.from_buffers(700, pa.py_buffer(sizes), pa.py_buffer(bytes(broken)))
    local = tmp_path / "a.parquet"
    pq.write_table(table(700, **more).set_column(1, "text", column), local, row_group_size=600)
    most = 900 if odd == "a large one" else 20_000
    reader = Parquet(language="lang", date="when", keep=("note", "url"), max_bytes=most)
    quick: list[bool] = []
    plain = Parquet._fast_documents
    monkeypatch.setattr(Parquet, "_fast_documents", lambda *a: quick.append(bool(found := plain(*a))) or found)
    found = read(reader, local)
    assert any(quick) == (odd not in ("bytes", "a large one", "views")) and (all(quick) == (odd in ("", "a number")))
    monkeypatch.setattr(Parquet, "_fast_documents", lambda *a: None)
    assert [all_facts(d) for d in found] == [all_facts(d) for d in read(reader, local)]
    assert len(found) == 700


def all_facts(item: Document | BadRecord) -> tuple:
    if isinstance(item, BadRecord):
        return item.reason, item.id, item.locator, item.detail
    return item.id, item.text, item.url, item.source, item.language, item.date, item.locator, list(item.meta.items())


def test_parquet_memory_is_nobody_s_fault(tmp_path, monkeypatch):
    pq.write_table(table(3), tmp_path / "a.parquet")

    def full(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    for name in ("document_id", "make_document"):
        with monkeypatch.context() as patched:
            patched.setattr(parquet, name, full)
            patched.setattr(parquet, "_PLAIN_BYTES", parquet._PLAIN_BYTES if name == "document_id" else 0)
            with pytest.raises(MemoryError):
                read(Parquet(), tmp_path / "a.parquet")
    monkeypatch.setattr(parquet.pq, "ParquetFile", full)
    with pytest.raises(MemoryError):
        Parquet().splits(str(tmp_path / "a.parquet"), "a.parquet", 1)


# -- the machine's fault ---------------------------------------------------------------------------------------------
class Failing(io.FileIO):
    """A file whose disk fails beyond byte `good`."""

    error: BaseException = OSError(errno.EIO, "Input/output error")
    good = 0

    def readinto(self, buffer: bytearray) -> int:
        if self.tell() >= self.good:
            raise self.error
        return super().readinto(memoryview(buffer)[:max(self.good - self.tell(), 1)])


@pytest.fixture
def failing(monkeypatch):
    """A function that makes all reading through `streams`, `zipfile` or pyarrow raise `error` beyond byte `good`."""
    def break_disk(error: BaseException, good: int) -> None:
        kind = type("Broken", (Failing,), {"error": error, "good": good})
        monkeypatch.setattr(streams, "open", lambda path, mode: io.BufferedReader(kind(path)), raising=False)
        monkeypatch.setattr(streams.zipfile, "io", SimpleNamespace(**{**vars(io), "open": streams.open}))
        monkeypatch.setattr(parquet.pq, "ParquetFile",
                            lambda path, **kw: parquet_file(pa.PythonFile(io.BufferedReader(kind(path)), "r")))

    parquet_file = pq.ParquetFile
    return break_disk


FAULTS = [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle"), MemoryError("no room"),
          pa.ArrowMemoryError("no room")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.txt",
                                  "a.txt.gz", "a.xml.bz2", "a.zip", "a.tar.gz", "a.tar", "a.parquet"])
def test_a_fault_of_the_machine_fails_the_task_and_loses_no_documents(name, tmp_path, failing):
    """It is raised as it is: taken for damage, the rest of the file would be committed as lost."""
    rng, local = random.Random(0), tmp_path / name
    rows = [{"text": f"{i} {rng.randbytes(45_000).hex()}"} for i in range(4)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    if name.endswith((".zip", ".tar", ".tar.gz")):
        (make_zip if name.endswith(".zip") else make_tar)(local, [(f"{i}.txt", r["text"].encode())
                                                                  for i, r in enumerate(rows)])
        reader = TextFiles()
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), local, row_group_size=1)
        reader = Parquet()
    else:
        pages = "".join(f"<page><title>{i}</title><text>{r['text']}</text></page>" for i, r in enumerate(rows))
        data = f"<mediawiki>{pages}</mediawiki>".encode() if ".xml" in name else lines
        pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
                "zst": lambda b: pa.compress(b, "zstd", asbytes=True)}
        local.write_bytes(pack.get(name.rpartition(".")[2], bytes)(data))
        reader = TextFiles() if ".txt" in name else Wiki() if ".xml" in name else Jsonl()
    assert set(reasons(read(reader, local))) == {"document"}
    for error, good in itertools.product(FAULTS, (0, 100_000, local.stat().st_size - 100)):
        failing(error, good)
        with pytest.raises(type(error)) as raised:
            read(reader, local)
        assert not isinstance(raised.value, DamagedStream) and raised.value.args == error.args


def test_a_seek_no_file_can_make_is_damage_not_the_disk(tmp_path):
    """A directory that lies about offsets is the archive's fault: the run goes on."""
    local = make_zip(tmp_path / "a.zip", [("a.txt", b"first"), ("b.txt", b"second")])
    whole = local.read_bytes()
    end, entry = whole.index(b"PK\x05\x06"), whole.index(b"PK\x01\x02")
    for at in (end + 12, end + 16, entry + 42):
        for value in (0xFFFFFFFE, 0x7FFFFFFF, len(whole) + 1):
            local.write_bytes(whole[:at] + value.to_bytes(4, "little") + whole[at + 4:])
            assert "corrupt_zip" in reasons(read(TextFiles(), local))
    # an offset in a zip64 field, larger than any file
    far = b"\x01\x00\x08\x00" + (2**64 - 1).to_bytes(8, "little")
    lying = bytearray(whole[:end])
    lying[entry + 30:entry + 32] = len(far).to_bytes(2, "little")
    lying[entry + 42:entry + 46] = b"\xff" * 4
    name = entry + 46 + len("a.txt")
    lying[name:name] = far
    tail = bytearray(whole[end:])
    tail[12:16] = (int.from_bytes(tail[12:16], "little") + len(far)).to_bytes(4, "little")
    local.write_bytes(bytes(lying) + bytes(tail))
    assert reasons(read(TextFiles(), local)) == {"corrupt_zip": 1, "document": 1}


def test_a_dictionary_page_tells_how_large_its_entries_can_be(tmp_path):
    """Ordinary texts, which pyarrow begins to write as a dictionary, are not read a few rows at a time."""
    texts = [f"document {i} " + "x" * 2000 for i in range(9000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd")
    info = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    [chunk] = [info.column(0)]
    assert chunk.has_dictionary_page and chunk.total_uncompressed_size > 16 << 20
    size = row_groups.dictionary_bytes(chunk, str(tmp_path / "a.parquet"))
    assert 1 << 20 <= size < 4 << 20                     # about pyarrow's limit of a dictionary page
    assert row_groups.rows_per_batch(info, ["text"], str(tmp_path / "a.parquet")) > 100
    assert row_groups.rows_per_batch(info, ["text"]) < 20
    assert [d.text for d in read(Parquet(), tmp_path / "a.parquet")] == texts
    pq.write_table(pa.table({"text": ["y" * (9 << 20)] * 50}), tmp_path / "b.parquet", compression="zstd")
    large = pq.ParquetFile(tmp_path / "b.parquet").metadata.row_group(0)
    assert row_groups.dictionary_bytes(large.column(0), str(tmp_path / "b.parquet")) >= 9 << 20
