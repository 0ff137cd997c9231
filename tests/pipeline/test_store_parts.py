"""Parts: what is written is read back, equal rows give equal bytes, and the hash `content` depends on every field but
not on the order of rows."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.store import parts
from pipeline.store.parts import PartWriter, RowDigester, copy_without, document_schema, read_documents
from stages.document import Document, DuplicateId
from tests.conftest import UNTIMED
from tests.pipeline.parts_reference import content_of

SIGNALS = ("zeta", "alpha", "lines")


def fields(i: int = 0) -> dict:
    return {"id": hashlib.md5(str(i).encode()).hexdigest(), "text": f"Grüße {i}\n" * (i % 7), "source": "web",
            "url": f"https://example.org/{i}", "language": "de", "date": None if i % 3 else "2024-05-01T00:00:00Z",
            "locator": {"file": "a/b.warc.gz", "offset": 100 * i, "record": i, "sub": ""},
            "meta": {"b": [1, "ü"], "a": None} if i % 2 else {}, "signals": {"alpha": i / 7, "lines": float(i)},
            "loss_spans": None if i % 5 else [{"start": 0, "end": i}]}


def write(path, rows, signals=SIGNALS, dropped=False, **sizes):
    writer = PartWriter(str(path), document_schema(signals, dropped), **sizes)
    for row in rows:
        extra = {k: row[k] for k in ("reason", "stage") if k in row}
        writer.write(Document(**{k: copy.deepcopy(v) for k, v in row.items() if k not in extra}), **extra)
    writer.close()
    return writer


def as_fields(doc: Document) -> dict:
    return {k: getattr(doc, k) for k in ("id", "text", "source", "url", "language", "date", "locator", "meta",
                                         "signals", "loss_spans")}


def test_round_trip_and_schema(tmp_path):
    rows = [fields(i) for i in range(1200)]
    writer = write(tmp_path / "p.parquet", rows)
    assert writer.rows == 1200
    assert writer.text_bytes == sum(len(r["text"].encode()) for r in rows)
    schema = pq.read_schema(tmp_path / "p.parquet")
    assert schema.equals(document_schema(SIGNALS))
    assert schema.field("text").type == pa.large_string()
    assert [f.name for f in schema.field("signals").type] == ["bytes", "alpha", "lines", "zeta"]
    found = [as_fields(d) for d in read_documents(str(tmp_path / "p.parquet"))]
    for row in rows:
        row["signals"]["bytes"] = float(len(row["text"].encode()))
    assert found == rows
    some = next(read_documents(str(tmp_path / "p.parquet"), columns=["id", "language"]))
    assert (some.id, some.language, some.text, some.signals, some.url) == (rows[0]["id"], "de", "", {}, "")


def test_what_others_read(tmp_path):
    path = tmp_path / "p.parquet"
    write(path, [fields(i) for i in range(30)])
    count, size, meta, offset, zeta = duckdb.sql(
        f"select count(*), sum(strlen(text)), min(meta), max(locator.\"offset\"), count(signals.zeta) "
        f"from '{path}'").fetchall()[0]
    assert (count, size) == (30, sum(len(fields(i)["text"].encode()) for i in range(30)))
    assert (json.loads(meta), offset, zeta) == ({"a": None, "b": [1, "ü"]}, 2900, 0)
    assert meta.index('"a"') < meta.index('"b"')


def test_no_signals_and_no_rows(tmp_path):
    writer = write(tmp_path / "p.parquet", [], signals=(), dropped=True)
    assert (writer.rows, writer.content) == (0, hashlib.sha256().hexdigest())
    assert list(read_documents(str(tmp_path / "p.parquet"))) == []
    assert duckdb.sql(f"select count(*) from '{tmp_path}/*.parquet'").fetchall() == [(0,)]
    assert pq.read_schema(tmp_path / "p.parquet").names[-2:] == ["reason", "stage"]


def test_equal_rows_give_equal_bytes_in_another_process(tmp_path):
    rows = [fields(i) for i in range(700)]
    write(tmp_path / "a.parquet", rows)
    code = f"""
        from tests.pipeline.test_store_parts import *
        write({str(tmp_path / "b.parquet")!r}, [fields(i) for i in range(700)], signals=("lines", "alpha", "zeta"))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=Path(__file__).parents[2],
                   env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "TZ": "Asia/Tokyo"})
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_content_knows_no_order(tmp_path):
    rows = [fields(i) for i in range(1100)]
    contents = set()
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        contents.add(write(tmp_path / "p.parquet", rows).content)
    assert len(contents) == 1


CHANGES = {
    "id": {"id": "0" * 32}, "text": {"text": "other"}, "empty text": {"text": ""}, "url": {"url": "u"},
    "url null": {"url": None}, "url empty": {"url": ""}, "source": {"source": "wiki"}, "language": {"language": "en"},
    "date": {"date": "2024-05-02T00:00:00Z"}, "date null": {"date": None}, "date empty": {"date": ""},
    "file": {"locator": {"file": "a", "offset": 2100, "record": 21, "sub": ""}},
    "offset": {"locator": {"file": "a/b.warc.gz", "offset": 1, "record": 21, "sub": ""}},
    "offset zero": {"locator": {"file": "a/b.warc.gz", "offset": 0, "record": 21, "sub": ""}},
    "offset null": {"locator": {"file": "a/b.warc.gz", "record": 21, "sub": ""}},
    "record": {"locator": {"file": "a/b.warc.gz", "offset": 2100, "record": 22, "sub": ""}},
    "sub": {"locator": {"file": "a/b.warc.gz", "offset": 2100, "record": 21, "sub": "x"}},
    "sub null": {"locator": {"file": "a/b.warc.gz", "offset": 2100, "record": 21}},
    "moved between columns": {"url": "https://example.org/21w", "source": "eb"},
    "meta": {"meta": {"a": 1}}, "no meta": {"meta": {}},
    "signal": {"signals": {"alpha": math.nextafter(3.0, 4), "lines": 21.0}},
    "minus zero": {"signals": {"alpha": -0.0, "lines": 21.0}}, "zero": {"signals": {"alpha": 0.0, "lines": 21.0}},
    "nan": {"signals": {"alpha": math.nan, "lines": 21.0}}, "signal null": {"signals": {"lines": 21.0}},
    "signals exchanged": {"signals": {"alpha": 21.0, "lines": 3.0}},
    "signal elsewhere": {"signals": {"alpha": 3.0, "zeta": 21.0}},
    "spans": {"loss_spans": [{"start": 0, "end": 21}]}, "no spans": {"loss_spans": []},
    "two spans": {"loss_spans": [{"start": 0, "end": 21}, {"start": 30, "end": 31}]},
}


def test_content_sees_every_field(tmp_path):
    base = {**fields(21), "text": "Grüße"}
    rows = [fields(3), base, fields(8)]
    contents = {"base": write(tmp_path / "p.parquet", rows).content}
    for name, change in CHANGES.items():
        contents[name] = write(tmp_path / "p.parquet", [rows[0], {**base, **change}, rows[2]]).content
    contents["a column more"] = write(tmp_path / "p.parquet", rows, signals=(*SIGNALS, "mean")).content
    contents["a row less"] = write(tmp_path / "p.parquet", rows[1:]).content
    dropped = [{**r, "reason": "short", "stage": "c4"} for r in rows]
    contents["dropped"] = write(tmp_path / "p.parquet", dropped, dropped=True).content
    dropped[1]["reason"] = "long"
    contents["reason"] = write(tmp_path / "p.parquet", dropped, dropped=True).content
    dropped[1].update(reason="longc", stage="4")
    contents["stage"] = write(tmp_path / "p.parquet", dropped, dropped=True).content
    by_content: dict[str, list[str]] = {}
    for name, content in contents.items():
        by_content.setdefault(content, []).append(name)
    assert [names for names in by_content.values() if len(names) > 1] == []


def test_row_digest_is_what_the_docstring_says(tmp_path):
    """The encoding written out by hand, from its description."""
    write(tmp_path / "p.parquet", [fields(21)])
    row = pq.read_table(tmp_path / "p.parquet")
    doc = fields(21)
    strings = [doc["id"], doc["url"], doc["source"], doc["language"], doc["date"],
               json.dumps(doc["meta"], sort_keys=True, ensure_ascii=False), "a/b.warc.gz", "", doc["text"]]
    data = [None if s is None else s.encode() for s in strings]
    title = json.dumps(["tokenmill row 1", row.schema.names, ["bytes", "alpha", "lines", "zeta"]])
    body = hashlib.sha256(title.encode()).digest()
    body += b"".join(struct.pack("<q", -1 if d is None else len(d)) for d in data)
    body += struct.pack("<qq", 2100, 21) + struct.pack("<dddd", len(data[-1]), 3.0, 21.0, 0.0) + struct.pack("<q", -1)
    body += bytes([0, 0, 0, 0, 0, 1]) + b"".join(d or b"" for d in data)
    digest = hashlib.sha256(body).digest()
    assert RowDigester(row.schema).digests(row.combine_chunks().to_batches()[0]) == [digest]


def test_digests_of_slices_and_of_the_file_equal_those_of_the_writer(tmp_path):
    rows = [fields(i) for i in range(300)]
    content = write(tmp_path / "p.parquet", rows).content
    table = pq.read_table(tmp_path / "p.parquet").combine_chunks()
    whole = table.to_batches()[0]
    digester = RowDigester(table.schema)
    digests = digester.digests(whole)
    cut = [d for a, b in ((0, 1), (1, 1), (1, 130), (130, 300)) for d in digester.digests(whole.slice(a, b - a))]
    assert digests == cut
    order = np.argsort(table["id"].to_numpy(zero_copy_only=False))
    assert hashlib.sha256(b"".join(digests[i] for i in order)).hexdigest() == content


def test_row_groups_are_bounded_and_a_long_text_stands_alone(tmp_path):
    rng = random.Random(3)
    rows = [{**fields(i), "text": rng.choice("abcü") * rng.choice([10, 3000, 9000, 700_000 if i == 50 else 1])}
            for i in range(300)]
    rows[50]["text"] = "x" * 700_000
    write(tmp_path / "p.parquet", rows, row_group_bytes=400_000, batch_chars=50_000)
    file = pq.ParquetFile(tmp_path / "p.parquet")
    sizes = [file.metadata.row_group(g).total_byte_size for g in range(file.num_row_groups)]
    assert file.num_row_groups > 3
    texts = [file.read_row_group(g, ["text"])["text"].to_pylist() for g in range(file.num_row_groups)]
    assert [t for group in texts for t in group] == [r["text"] for r in rows]
    for group in texts:
        assert sum(len(t.encode()) for t in group) <= 400_000 or len(group) == 1
    assert max(sizes) <= 800_000


def test_memory_is_a_row_group_not_the_part(tmp_path):
    """80 MB through a writer and back: peak well below the part. In a process of its own, whose peak is not that of
    who started it (as ru_maxrss is)."""
    code = f"""
        import random
        from pipeline.engine.worker.attempt import peak_rss_mb
        from pipeline.store.parts import PartWriter, document_schema, read_documents
        from stages.document import Document
        before = peak_rss_mb()
        writer = PartWriter({str(tmp_path / "p.parquet")!r}, document_schema(("a",)), 4 << 20, 1 << 20)
        words = [random.Random(i).randbytes(50).hex() for i in range(2000)]
        for i in range(800):
            writer.write(Document(f"{{i:032x}}", " ".join(words[(i * 31 + j) % 2000] for j in range(1000)), source="s"))
        writer.close()
        assert writer.text_bytes > 80e6
        assert sum(len(d.text) for d in read_documents({str(tmp_path / "p.parquet")!r})) == writer.text_bytes
        print(peak_rss_mb() - before)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=Path(__file__).parents[2],
                         capture_output=True, text=True,
                         env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "mimalloc"})      # the pool keeps some MB
    assert float(out.stdout) < 70                 # MB, for 80 MB of text, of which Arrow itself takes 40


def test_duplicate_id_is_an_error(tmp_path):
    writer = PartWriter(str(tmp_path / "p.parquet"), document_schema())
    for i in [*range(600), 17]:
        writer.write(Document(fields(i)["id"], "x"))
    with pytest.raises(DuplicateId, match=fields(17)["id"]):
        writer.close()


def test_undeclared_signal_is_an_error(tmp_path):
    writer = PartWriter(str(tmp_path / "p.parquet"), document_schema(("a",)))
    with pytest.raises(KeyError, match="signal 'b' of document x"):
        writer.write(Document("x", signals={"a": 1.0, "b": 2.0}))


def test_surrogates_and_odd_values(tmp_path):
    row = {**fields(1), "text": "lone \ud800 pair \ud83d\ude00 low \udc80", "url": "\udcff", "meta": {"k": "\ud800"},
           "signals": {"alpha": True, "lines": 3, "zeta": np.float64(0.5)}}
    row["locator"]["file"] = "caf\udce9.warc"
    write(tmp_path / "p.parquet", [row])
    doc = next(read_documents(str(tmp_path / "p.parquet")))
    assert doc.text == "lone \ufffd pair \U0001f600 low \ufffd"
    assert (doc.url, doc.meta, doc.locator["file"]) == ("\ufffd", {"k": "\ufffd"}, "caf\ufffd.warc")
    assert doc.signals == {"alpha": 1.0, "lines": 3.0, "zeta": 0.5, "bytes": float(len(doc.text.encode()))}


_odd = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
_json = st.recursive(st.none() | st.booleans() | st.integers(-2**40, 2**40) | _odd,
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_odd, inner, max_size=3), max_leaves=5)
_span = st.fixed_dictionaries({"start": st.integers(0, 99), "end": st.integers(0, 99)})


@st.composite
def any_document(draw, number: int) -> Document:
    ours = draw(st.booleans())
    some = draw(st.sampled_from(["%032x", "%032X", "doc %d", "%031x\u00fc"]))
    id = f"{draw(st.integers(0, 3)):016x}{number:016x}" if ours else some % number
    place = {"file": draw(_odd), "offset": draw(st.none() | st.integers(0, 2**62)), "record": number,
             "sub": draw(st.none() | _odd)}
    return Document(
        id, draw(_odd) * draw(st.sampled_from([1, 1, 40])), source=draw(st.sampled_from(["web", "wiki"])),
        url=draw(_odd), language=draw(st.sampled_from(["", "en"])), date=draw(st.none() | _odd), locator=place,
        meta=draw(st.dictionaries(_odd, _odd, max_size=3) | st.dictionaries(_odd, _json, max_size=3)),
        signals={s: draw(st.floats(allow_nan=False) | st.booleans() | st.integers(-9, 9))
                 for s in SIGNALS if draw(st.booleans())},
        loss_spans=draw(st.none() | st.lists(_span, max_size=3)))


@pytest.mark.hypothesis
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, *UNTIMED])
@given(st.data(), st.integers(0, 12), st.booleans(), st.integers(1, 5))
def test_any_documents_have_the_content_of_the_plain_description(tmp_path, data, n, dropped, rows):
    docs = [data.draw(any_document(i)) for i in range(n)]
    wanted = content_of([(d, "r" if dropped else None, "s" if dropped else None) for d in docs], SIGNALS, dropped)
    before, parts.BATCH_ROWS = parts.BATCH_ROWS, rows
    try:
        writer = PartWriter(str(tmp_path / "p.parquet"), document_schema(SIGNALS, dropped))
        for doc in docs:
            writer.write(doc, **({"reason": "r", "stage": "s"} if dropped else {}))
        writer.close()
    finally:
        parts.BATCH_ROWS = before
    assert writer.content == wanted


@pytest.mark.parametrize("name", ["{:032x}", "{:032X}", "{:x}", "doc {}"])
def test_twins_are_found_whatever_their_ids_look_like(tmp_path, name):
    for twin in (None, 3):
        writer = PartWriter(str(tmp_path / "p.parquet"), document_schema())
        for i in [*range(40), *([] if twin is None else [twin])]:
            writer.write(Document(name.format(i << (64 if i % 2 else 0)), "x"))
        if twin is None:
            writer.close()
        else:
            with pytest.raises(DuplicateId, match=name.format(twin << 64)):
                writer.close()


@pytest.mark.parametrize("dropped", [False, True])
def test_a_copy_without_some_rows_is_what_would_have_been_written_without_them(tmp_path, dropped):
    rows = [Document(**fields(i)) for i in range(50)]
    gone = {row.id for row in rows[::7]} | {"0" * 32}
    extra = {"stage": "gopher", "reason": "short"} if dropped else {}

    def write(name: str, documents: list[Document]) -> PartWriter:
        writer = PartWriter(str(tmp_path / name), document_schema(SIGNALS, dropped=dropped), row_group_bytes=900,
                            batch_chars=200)
        for document in documents:
            writer.write(document, **extra)
        writer.close()
        return writer

    write("whole", rows)
    wanted = write("wanted", [row for row in rows if row.id not in gone])
    copied = copy_without(str(tmp_path / "whole"), str(tmp_path / "copy"), gone)
    assert copied == (wanted.rows, wanted.text_bytes, wanted.content) and copied.rows == 42
    copy, expected = (pq.ParquetFile(tmp_path / name).read() for name in ("copy", "wanted"))
    assert copy.equals(expected) and copy.schema.equals(expected.schema, check_metadata=True)
    assert copy_without(str(tmp_path / "whole"), str(tmp_path / "none"), {row.id for row in rows}).rows == 0
