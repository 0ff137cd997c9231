"""The WARC reader: every real archive that is available, splits that change nothing, and damage that is counted."""

from __future__ import annotations

import errno
import gzip
import itertools
import os
import random
import zlib
from collections import Counter
from pathlib import Path

import pytest

from stages.document import BadRecord, Document, document_id
from stages.read import http as http_module
from stages.read import warc
from stages.read.http import TooLarge, decode_body, inflate, media_type, parse_response, unchunk
from stages.read.reader import Skipped, Slice
from stages.read.warc import Warc
from tests.conftest import shared_data

PAGE = b"<html><body><p>" + b"Some words of a page. " * 40 + b"</p></body></html>"


def record(number: int, block: bytes, kind: str = "response", url: str | None = None,
           mime: str = "application/http; msgtype=response") -> bytes:
    head = (f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number:032d}>\r\n"
            f"WARC-Target-URI: {url or f'http://example.org/{number}'}\r\nWARC-Date: 2024-01-01T00:00:00Z\r\n"
            f"Content-Type: {mime}\r\nContent-Length: {len(block)}\r\n\r\n")
    return head.encode() + block + b"\r\n\r\n"


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode() + body


def page(number: int, body: bytes = PAGE) -> bytes:
    return record(number, http(body, "Content-Type: text/html; charset=utf-8"))


def write(path: Path, *parts: bytes) -> str:
    path.write_bytes(b"".join(parts))
    return str(path)


def read(local: str, slice: Slice | None = None, **config: object) -> list[Document | BadRecord]:
    return list(Warc(**config).read(local, slice or Slice("web", "a.warc.gz")))


def facts(item: Document | BadRecord) -> tuple:
    if isinstance(item, BadRecord):
        return (type(item), item.reason, item.id, tuple(sorted(item.locator.items())), item.detail, item.fatal)
    return (item.id, item.url, item.raw, item.text, item.mime, item.charset, item.date, item.source,
            tuple(sorted(item.locator.items())), tuple(sorted(item.meta.items())))


def reasons(items: list[Document | BadRecord]) -> Counter[str]:
    return Counter(i.reason if isinstance(i, BadRecord) else "document" for i in items)


def assert_splits_change_nothing(local: str, target: int) -> int:
    """Check that the splits cover the file, and that reading them gives the same documents as reading the whole file.
    Returns the number of splits."""
    whole = [facts(i) for i in read(local)]
    pieces = Warc().splits(local, "a.warc.gz", target)
    if pieces is None:
        return 0
    assert pieces[0].start == 0 and pieces[0].ordinal == 0
    assert pieces[-1].stop == Path(local).stat().st_size
    for a, b in itertools.pairwise(pieces):
        assert (a.stop, a.ordinal + a.records) == (b.start, b.ordinal)
    parts = [[facts(i) for i in read(local, p.of("web", "a.warc.gz"))] for p in pieces]
    assert [f for part in parts for f in part] == whole
    assert all(len(part) == p.records for part, p in zip(parts[:-1], pieces))
    return len(pieces)


# -- real archives ---------------------------------------------------------------------------------------------------
EXPECTED = {        # archive: (documents, what is counted and fatal)
    "aut/badexample.arc.gz": (0, "arc_format"), "aut/example.warc.gz": (146, None), "aut/issue-493.warc": (4, None),
    "aut/issue-514.warc": (1, None), "dolma/sample-0000.warc.gz": (22, None), "dolma/sample-0001.warc.gz": (15, None),
    "pywb/dupes.warc.gz": (1, None), "pywb/example-wget-1-14.warc.gz": (1, None),
    "pywb/example.arc.gz": (0, "arc_format"), "pywb/iana.warc.gz": (21, None),
    "resiliparse/clipped.warc.gz": (0, "truncated"),
    "resiliparse/clueweb-quirk.warc.gz": (29, None), "resiliparse/warcfile.warc.gz": (16, None),
    "resiliparse/warcfile.warc.lz4": (16, None), "warcio/bad.arc": (0, "arc_format"),
    "warcio/example-bad-non-chunked.warc.gz": (1, None), "warcio/example-bad.warc.gz.bad": (1, None),
    "warcio/example-digest.warc": (0, None), "warcio/example-iana.org-chunked.warc": (1, None),
    "warcio/example-resource.warc.gz": (1, None), "warcio/example-space-in-target-uri.warc.gz": (0, None),
    "warcio/example-space-in-url.arc": (0, "arc_format"), "warcio/example-trunc.warc": (1, "corrupt_warc"),
    "warcio/example-wget-bad-target-uri.warc.gz": (1, None), "warcio/example-wrong-chunks.warc.gz": (1, None),
    "warcio/example.arc": (0, "arc_format"), "warcio/example.arc.gz": (0, "arc_format"),
    "warcio/example.warc": (1, None), "warcio/example.warc.gz": (1, None), "warcio/post-test.warc.gz": (3, None),
    "whirlwind/whirlwind.warc.gz": (1, None),
    "whirlwind/whirlwind.warc.wat.gz": (0, None), "whirlwind/whirlwind.warc.wet.gz": (1, None),
}


def test_every_archive_at_hand_is_listed():
    root = shared_data("warc")
    found = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p.name != "LICENSE"}
    assert found == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_real_archives(name):
    local = str(shared_data("warc", *name.split("/")))
    items = read(local)
    documents, fatal = EXPECTED[name]
    assert reasons(items)["document"] == documents
    assert [i.reason for i in items if isinstance(i, BadRecord) and i.fatal] == ([fatal] if fatal else [])
    ordinals = [i.locator["record"] for i in items]
    assert ordinals == list(range(len(items))), "ordinals count every record of the file"
    assert len({i.id for i in items}) == len(items)
    for target in (1, 5_000, 100_000):
        assert_splits_change_nothing(local, target)


def test_bench_archive_splits_into_equal_documents():
    local = str(shared_data("bench", "realweb.warc.gz"))
    reader = Warc()
    whole = [(i.id, i.url, zlib.crc32(i.raw)) for i in read(local) if isinstance(i, Document)]
    assert len(whole) == 1554
    for target in (16 << 20, 60 << 20):
        pieces = reader.splits(local, "a.warc.gz", target)
        assert len(pieces) >= 7 and not reader.warnings
        parts = [(i.id, i.url, zlib.crc32(i.raw)) for p in pieces for i in read(local, p.of("web", "a.warc.gz"))
                 if isinstance(i, Document)]
        assert parts == whole
        assert sum(p.bytes for p in pieces) == pytest.approx(423_453_166, rel=1e-3)


# -- splits ----------------------------------------------------------------------------------------------------------
def test_a_warc_inside_a_record_makes_no_false_boundary(tmp_path):
    inner = b"".join(gzip.compress(page(i)) for i in range(5))
    outer = [gzip.compress(page(0)), gzip.compress(record(1, http(inner, "Content-Type: application/gzip")), 0),
             gzip.compress(page(2)), gzip.compress(page(3))]
    local = write(tmp_path / "a.warc.gz", *outer)
    assert sum(1 for i in range(len(b"".join(outer))) if b"".join(outer)[i:i + 3] == b"\x1f\x8b\x08") > 4
    assert assert_splits_change_nothing(local, 1) == 4


@pytest.mark.parametrize("seed", range(6))
def test_splits_of_random_archives(tmp_path, seed):
    rng = random.Random(seed)
    members = []
    for i in range(rng.randrange(5, 60)):
        body = bytes(rng.choices(b"<p> abcdefghij\n", k=rng.choice((0, 10, 300, 70_000))))
        other = record(i, b"x: y\r\n", rng.choice(("request", "metadata", "warcinfo")))
        block = page(i, body) if rng.random() < 0.7 else other
        members.append(gzip.compress(block, rng.choice((0, 1, 9))))
    if seed % 3 == 2:                       # an odd one: from here on the file is one piece
        at = rng.randrange(len(members))
        members[at] = gzip.compress(gzip.decompress(members[at]) + page(99))
    local = write(tmp_path / "a.warc.gz", *members)
    for target in (1, 1000, 100_000):
        assert_splits_change_nothing(local, target)


def test_records_spread_over_members_are_not_split_apart(tmp_path):
    first, second = page(0), page(1)
    halves = [gzip.compress(first[:500]), gzip.compress(first[500:]), gzip.compress(second)]
    local = write(tmp_path / "a.warc.gz", gzip.compress(page(2)), *halves)
    assert reasons(read(local))["document"] == 3
    assert_splits_change_nothing(local, 1)


def test_one_gzip_member_cannot_be_split_and_says_so(tmp_path):
    local = write(tmp_path / "a.warc.gz", gzip.compress(b"".join(page(i) for i in range(9))))
    reader = Warc()
    assert reader.splits(local, "a.warc.gz", 1000) is None
    assert "a.warc.gz" in reader.warnings[0] and "recompress" in reader.warnings[0]
    assert reasons(read(local)) == {"document": 9}


def test_ids_come_from_source_path_and_ordinal(tmp_path):
    local = write(tmp_path / "x", gzip.compress(record(0, b"", "warcinfo")), gzip.compress(page(1)))
    doc = read(local, Slice("web", "dir/a.warc.gz"))[1]
    assert doc.id == document_id("web", "dir/a.warc.gz", "", 1)
    assert doc.locator == {"file": "dir/a.warc.gz", "offset": len(gzip.compress(record(0, b"", "warcinfo"))),
                           "record": 1, "sub": ""}
    assert (doc.source, doc.url, doc.date) == ("web", "http://example.org/1", "2024-01-01T00:00:00Z")
    assert (doc.mime, doc.charset, doc.raw, doc.text) == ("text/html", "utf-8", PAGE, "")


# -- damage ----------------------------------------------------------------------------------------------------------
def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.warc\.gz: no such file"):
        read(str(tmp_path / "gone"))
    with pytest.raises(IsADirectoryError, match="folder"):
        read(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"no warc at all", gzip.compress(b"", mtime=0),
                                     gzip.compress(b"text", mtime=0)])
def test_what_is_no_warc_is_one_fatal_bad_record(tmp_path, content):
    items = read(write(tmp_path / "a", content))
    assert len(items) == 1 and items[0].fatal and not isinstance(items[0], Skipped)
    assert Warc().splits(str(tmp_path / "a"), "a", 1) is None


@pytest.mark.parametrize("cut", [3, 9, 60, 400])
def test_truncated_gzip_keeps_what_came_before(tmp_path, cut):
    members = [gzip.compress(page(i, random.Random(i).randbytes(2000))) for i in range(5)]
    local = write(tmp_path / "a", b"".join(members)[:-cut])
    items = read(local)
    assert all(isinstance(i, Document) for i in items[:4])
    assert items[-1].reason in ("truncated", "corrupt_gzip") and items[-1].fatal
    assert len({i.id for i in items}) == len(items)
    assert_splits_change_nothing(local, 1)


@pytest.mark.parametrize("where", [0, 10, 1000, -5])
def test_corrupt_member_keeps_what_came_before(tmp_path, where):
    members = [bytearray(gzip.compress(page(i, random.Random(i).randbytes(2000)))) for i in range(5)]
    members[3][where] ^= 0xFF
    local = write(tmp_path / "a", *members)
    items = read(local)
    assert reasons(items[:3]) == {"document": 3}
    assert items[-1].fatal and sum(i.fatal for i in items if isinstance(i, BadRecord)) == 1
    assert_splits_change_nothing(local, 1)


def test_garbage_after_the_last_member_is_counted(tmp_path):
    items = read(write(tmp_path / "a", gzip.compress(page(0)), b"garbage" * 50))
    assert reasons(items) == {"document": 1, "corrupt_gzip": 1} and items[-1].fatal


LIES = {
    "no length": (page(9).replace(b"Content-Length", b"Xontent-Length"), {"not_http": 1, "corrupt_warc": 1}),
    "negative length": (page(9).replace(b"Content-Length: ", b"Content-Length: -"), {"not_http": 1, "corrupt_warc": 1}),
    "too long": (page(9).replace(b"Content-Length: ", b"Content-Length: 9"), {"truncated": 1}),
    "another version": (page(9).replace(b"WARC/1.", b"WARC/9."), {"corrupt_warc": 1}),
    "garbage": (b"garbage" * 9, {"corrupt_warc": 1}), "zeros": (bytes(99), {"corrupt_warc": 1}),
    "nothing": (b"", {}), "blank lines": (b"\r\n" * 9, {}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_record_that_lies_costs_no_other_member_of_a_gzip_file(tmp_path, lie):
    """Each member holds one record: behind the one that is none fastwarc sees no further, or swallows what follows."""
    wrong, counted = LIES[lie]
    local = write(tmp_path / "a", *map(gzip.compress, (page(0), page(1), wrong, page(2), wrong, wrong, page(3))))
    items = read(local)
    assert [i.url for i in items if isinstance(i, Document)] == [facts(i)[1] for i in read(write(
        tmp_path / "sound", *(gzip.compress(page(i)) for i in range(4))))]
    seen = reasons(items)
    assert seen.pop("document") == 4 and set(seen) == set(counted)
    assert not any(i.fatal for i in items if isinstance(i, BadRecord))
    assert len({i.id for i in items}) == len(items)
    assert_splits_change_nothing(local, 1)


def test_what_stands_before_the_first_record_is_not_cut_off(tmp_path):
    parts = (b"WARC/1.0\r\n", page(0).replace(b"WARC/1.", b"WARC/9."), page(1))
    local = write(tmp_path / "a", *map(gzip.compress, parts))
    assert Warc().splits(local, "a", 1) is None


def test_what_is_no_document_is_counted_not_quarantined(tmp_path):
    local = write(tmp_path / "a.warc", record(0, b"", "warcinfo"), record(1, http(b""), "request"),
                  record(2, http(b"moved", status="301 Moved")), record(3, http(b"no", status="404 Not Found")),
                  record(4, b"\x00\x01 dns answer", url="dns:example.org", mime="text/dns"),
                  record(5, http(b"\x89PNG", "Content-Type: image/png")), record(6, http(b"")),
                  record(7, http(b""), "revisit"), record(8, b"log", "resource", "metadata://x/log", "text/plain"),
                  record(9, b"<html>saved", "resource", "http://x/", "text/html"), record(10, b"x", "strange"))
    items = read(local)
    assert reasons(items) == {"warcinfo": 1, "request": 1, "http_status": 2, "not_http": 1, "media": 1, "empty": 1,
                              "revisit": 1, "not_web": 1, "document": 1, "unknown": 1}
    assert all(isinstance(i, Skipped) for i in items if isinstance(i, BadRecord))


def test_caps_on_stored_and_decoded_bytes(tmp_path):
    bomb = gzip.compress(b"\x00" * 5_000_000)
    local = write(tmp_path / "a.warc.gz", gzip.compress(page(0, b"x" * 200_000)),
                  gzip.compress(record(1, http(bomb, "Content-Encoding: gzip", "Content-Type: text/html"))),
                  gzip.compress(page(2)))
    assert reasons(read(local, max_bytes=100_000)) == {"too_large": 2, "document": 1}
    assert reasons(read(local)) == {"document": 3}


def test_duplicate_urls_and_wet_text(tmp_path):
    local = write(tmp_path / "a.warc", record(0, http(PAGE), url="http://x/"), record(1, http(PAGE), url="<http://x/>"),
                  record(2, "Straße\n".encode(), "conversion", "http://y/", "text/plain"))
    one, two, wet = read(local)
    assert one.url == two.url == "http://x/" and one.id != two.id
    assert wet.text == "Straße\n" and wet.raw is None


# -- HTTP ------------------------------------------------------------------------------------------------------------
def test_http_heads():
    assert parse_response(b"GET / HTTP/1.1\r\n\r\n") is None
    status, headers, body = parse_response(b"HTTP/1.0 203 Odd\nContent-Type: a\nCONTENT-TYPE: b\n\nbody")
    assert (status, headers, body) == (203, {"content-type": "a"}, b"body")
    assert parse_response(b"HTTP/1.1 200 OK") == (200, {}, b"")
    assert media_type('Text/HTML; x=y; charset="ISO-8859-1"') == ("text/html", "iso-8859-1")
    assert media_type(None) == ("", "")


def test_chunks():
    assert unchunk(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n") == b"abcde"
    assert unchunk(b"<!doctype html>") == b"<!doctype html>", "declared chunked, stored decoded"
    assert unchunk(b"3\r\nabc\r\nZZ\r\nrest") == b"abc"
    assert unchunk(b"0\r\n\r\n") == b""
    assert unchunk(b"3\nabc\n2\nde\n0\n\n") == b"abcde", "lines that end in a bare line feed"
    assert unchunk(b"ffffffff\r\nshort") == b"short"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "raw deflate", "br"])
def test_content_codings(coding):
    raw = zlib.compressobj(9, zlib.DEFLATED, -15)
    coded = {"gzip": lambda: gzip.compress(PAGE), "deflate": lambda: zlib.compress(PAGE),
             "raw deflate": lambda: raw.compress(PAGE) + raw.flush(),
             "br": lambda: pytest.importorskip("brotli").compress(PAGE)}[coding]()
    headers = {"content-encoding": coding.removeprefix("raw ")}
    assert decode_body(coded, headers, 10_000) == PAGE
    assert decode_body(PAGE, headers, 10_000) == PAGE, "declared, but stored decoded"
    if coding != "br":
        assert PAGE.startswith(decode_body(coded[:-12], headers, 10_000)[:20]), "cut short: what there is"
    with pytest.raises(TooLarge):
        decode_body(coded, headers, 100)


def test_inflate_reads_all_members_and_stops_at_the_cap():
    assert inflate(gzip.compress(b"a") + gzip.compress(b"b"), 47, 10) == b"ab"
    assert inflate(b"no gzip", 47, 10) is None
    with pytest.raises(TooLarge):
        inflate(gzip.compress(b"\x00" * 10**7), 47, 10**6)


def test_inflate_costs_no_more_than_its_input(monkeypatch):
    """Empty gzip members: their number is capped, and none of them copies what comes behind it."""
    empty = gzip.compress(b"")
    assert inflate(empty * 900 + gzip.compress(b"end"), 47, 10) == b"end"
    with pytest.raises(TooLarge):
        inflate(empty * 2000 + gzip.compress(b"end"), 47, 10)
    given, engine = [], zlib.decompressobj

    class Counted:
        def __init__(self, wbits: int) -> None:
            self.inner = engine(wbits)

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def decompress(self, block: bytes, most: int) -> bytes:
            given.append(len(block))
            return self.inner.decompress(block, most)

    monkeypatch.setattr(http_module.zlib, "decompressobj", Counted)
    body = random.Random(3).randbytes(3 << 20)
    data = empty * 900 + gzip.compress(body)
    assert inflate(data, 47, 4 << 20) == body
    assert sum(given) < 2 * len(data) + 900 * (64 << 10)
    given.clear()
    assert inflate(gzip.compress(bytes(30 << 20)), 47, 31 << 20) == bytes(30 << 20)
    assert sum(given) < 500 * (64 << 10), "what one call leaves of its input is small"


@pytest.mark.parametrize("coding", ["gz", "plain"])
def test_an_error_of_the_disk_fails_the_task_and_loses_no_records(tmp_path, coding, monkeypatch):
    """Whichever read of the file fails: taken for damage, the rest of the file would be committed as lost."""
    rng = random.Random(4)
    local = write(tmp_path / "a", *(gzip.compress(page(i, rng.randbytes(9000))) if coding == "gz" else
                                    page(i, rng.randbytes(9000)) for i in range(20)))
    pread, calls, broken = os.pread, itertools.count(), None

    def failing(*at: int) -> bytes:
        if next(calls) == broken:
            raise OSError(errno.EIO, "Input/output error")
        return pread(*at)

    monkeypatch.setattr(warc.os, "pread", failing)
    for work in (lambda: read(local), lambda: Warc().splits(local, "a.warc.gz", 20_000)):
        broken, calls = None, itertools.count()
        assert len(work()) > 5
        for number in range(next(calls)):
            broken, calls = number, itertools.count()
            with pytest.raises(OSError, match="Input/output error") as raised:
                work()
            assert raised.value.errno == errno.EIO
