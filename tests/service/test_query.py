"""Queries over published documents. Every result is compared with one that is computed in plain Python from the
documents."""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pytest

from pipeline.base.clock import Clock
from pipeline.service.answer_memory import AnswerMemory
from pipeline.service.duck import Busy, Cancelled, Database, QueryError, QueryLimits, Stop, TooDear
from pipeline.service.filters import Filter, SignalRange, SortOrder
from pipeline.service.parts import Checked, NoDataset, PublishedPart, StillChecking, hash_of, published
from pipeline.service.query import DocumentKind, PlaceGone, Queries
from pipeline.service.reader import PartReader
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from tests.service.corpus import HOSTILE, SOURCES, documents, publish_rows

KEPT, DROPPED = documents(300, 1), documents(120, 2, dropped=True)
BAD = [{"id": "" if i % 2 else f"{i:032x}", "source": "web", "file": f"f{i % 3}", "record": i, "stage": None,
        "reason": "broken" if i % 3 else "lo'st", "detail": "x", "bytes": i} for i in range(20)]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    top = tmp_path_factory.mktemp("a [store] *")                  # wildcards in the folder of a store
    store = Store(top / "store")
    publish_rows(store, top / "scratch", KEPT, dropped=DROPPED, quarantined=BAD)
    return store


@pytest.fixture(scope="module")
def queries() -> Queries:
    return Queries(QueryLimits(seconds=120))


def walk(queries: Queries, of: DocumentKind, filter: Filter, order: SortOrder, limit: int = 7, **how: Any) -> list[Any]:
    """Return the rows of all pages of a query."""
    rows, after = [], ""
    while True:
        page = queries.page(of, filter, order, limit, queries.stop(), after, **how)
        assert len(page.rows) == limit or page.next is None
        rows += page.rows
        if page.next is None:
            return rows
        after = page.next


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def host(url: str) -> str:
    found = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)", url)
    place = found[1].rpartition("@")[2] if found else ""
    return (place.partition("]")[0] + "]" if place.startswith("[") else place.partition(":")[0]).lower()


def within(signal: str, least: float | None, most: float | None) -> Callable[[dict[str, Any]], bool]:
    def fulfilled(row: dict[str, Any]) -> bool:
        value = row["signals"].get(signal)
        return value is not None and not math.isnan(value) and (least is None or value >= least) and (
            most is None or value <= most)
    return fulfilled


FILTERS: list[tuple[Filter, Callable[[dict[str, Any]], bool]]] = [
    (Filter(), lambda r: True),
    (Filter(source=("co'de",)), lambda r: r["source"] == "co'de"),
    (Filter(source=("web", 'wi"ki')), lambda r: r["source"] in ("web", 'wi"ki')),
    (Filter(source=("' or 1=1 --",)), lambda r: False),
    (Filter(language=("",)), lambda r: r["language"] == ""),
    (Filter(domain="example.org"), lambda r: f".{host(r['url'])}".endswith(".example.org")),
    (Filter(domain="[::1]"), lambda r: host(r["url"]) == "[::1]"),
    (Filter(domain="MÜNCHEN.de"), lambda r: host(r["url"]) == "münchen.de"),
    (Filter(domain=".*"), lambda r: False),
    (Filter(signals=(SignalRange("a", 0.0, 0.5),)), within("a", 0.0, 0.5)),
    (Filter(signals=(SignalRange("a"),)), within("a", None, None)),
    (Filter(signals=(SignalRange("b", 3.0), SignalRange("a", None, 1.0))),
     lambda r: within("b", 3.0, None)(r) and within("a", None, 1.0)(r)),
    (Filter(id="0"), lambda r: r["id"].startswith("0")),
    (Filter(id="%"), lambda r: False),
    (Filter(text="alpha", source=("web",), language=("en", "de")),
     lambda r: "alpha" in r["text"] and r["source"] == "web" and r["language"] in ("en", "de")),
    *[(Filter(text=text), lambda r, text=text: text in r["text"]) for text in HOSTILE],
]


@pytest.mark.parametrize(("filter", "takes"), FILTERS, ids=range(len(FILTERS)))
def test_a_filter_takes_what_python_takes(store, queries, filter, takes):
    wanted = [row["id"] for row in KEPT if takes(row)]
    at = DocumentKind(store, "kept", "d")
    assert ids(walk(queries, at, filter, SortOrder(), 120)) == wanted                # stored order: that of the parts
    assert ids(walk(queries, at, filter, SortOrder("id"), 120)) == sorted(wanted)
    total = queries.counts(at, filter, ["source"], queries.stop())
    sources = Counter(row["source"] for row in KEPT if takes(row))
    assert {g["source"]: g["documents"] for g in total["groups"]} == sources
    assert (total["documents"], total["of"]) == (len(wanted), len(sources))


def test_the_filters_of_the_test_take_something_and_not_everything():
    taken = [sum(map(takes, KEPT)) for _, takes in FILTERS]
    assert sum(0 < n < len(KEPT) for n in taken) > len(FILTERS) // 2


def test_dropped_documents_are_found_by_reason_and_stage(store, queries):
    at = DocumentKind(store, "dropped", "d")
    for filter in (Filter(reason=("lo'ng",)), Filter(reason=("%",), stage=("c4",)), Filter(stage=("c4", "gopher"))):
        wanted = [r["id"] for r in DROPPED if (not filter.reason or r["reason"] in filter.reason)
                  and (not filter.stage or r["stage"] in filter.stage)]
        assert wanted and ids(walk(queries, at, filter, SortOrder())) == wanted
    groups = queries.counts(at, Filter(), ["reason", "stage"], queries.stop())["groups"]
    assert [((g["reason"], g["stage"]), g["documents"]) for g in groups] == sorted(
        Counter((r["reason"], r["stage"]) for r in DROPPED).items(), key=lambda kv: (-kv[1], kv[0]))
    sizes: Counter[tuple[str, str]] = Counter()
    for r in DROPPED:
        sizes[r["reason"], r["stage"]] += len(r["text"].encode())
    assert {(g["reason"], g["stage"]): g["bytes"] for g in groups} == sizes


def test_quarantined_records_are_paged_though_ids_repeat(store, queries):
    at = DocumentKind(store, "quarantined", "d")
    rows = walk(queries, at, Filter(), SortOrder(), 3, show=("source", "file", "record", "reason", "detail", "bytes"))
    assert [(r["id"], r["record"], r["reason"], r["bytes"]) for r in rows] == [
        (b["id"], b["record"], b["reason"], b["bytes"]) for b in BAD]
    some = walk(queries, at, Filter(reason=("lo'st",)), SortOrder(), 3, show=("record",))
    assert [r["record"] for r in some] == [b["record"] for b in BAD if b["reason"] == "lo'st"]
    for wrong, key in ((Filter(language=("en",)), "language"), (Filter(text="x"), "text"),
                       (Filter(domain="x"), "domain")):
        with pytest.raises(QueryError) as e:
            queries.page(at, wrong, SortOrder(), 3, queries.stop())
        assert e.value.key == key
    with pytest.raises(QueryError) as e:
        queries.page(at, Filter(), SortOrder("id"), 3, queries.stop())
    assert e.value.key == "sort"


@pytest.mark.parametrize("by", ["id", "source", "language", "date", "signals.a", "signals.b", "signals.bytes"])
@pytest.mark.parametrize("descending", [False, True])
def test_sorted_pages_are_the_sorted_documents(store, queries, by, descending):
    def value(row: dict[str, Any]) -> Any:
        if by == "signals.bytes":
            return float(len(row["text"].encode()))
        return row["signals"].get(by[8:]) if by.startswith("signals.") else row[by]

    def rank(row: dict[str, Any]) -> Any:
        v = value(row)
        return (math.inf, 1) if isinstance(v, float) and math.isnan(v) else (v, 0)          # NaN is the largest

    known = sorted((r for r in KEPT if value(r) is not None), key=lambda r: r["id"])
    known.sort(key=rank, reverse=descending)                                     # stable: ids stay in order
    if by == "id":
        known.sort(key=lambda r: r["id"], reverse=descending)
    wanted = [r["id"] for r in known] + sorted(r["id"] for r in KEPT if value(r) is None)
    assert ids(walk(queries, DocumentKind(store, "kept", "d"), Filter(), SortOrder(by, descending), 23)) == wanted


def test_pages_beyond_what_is_read_ahead_are_the_sorted_documents(tmp_path, monkeypatch):
    """The second page reads many hits ahead. Walks with pages of other sizes meet on the way: each takes what is
    remembered only if it holds the whole page."""
    monkeypatch.setattr("pipeline.service.query.AHEAD", 80)
    store, queries, rows = Store(tmp_path / "store"), Queries(), documents(300, 14)
    publish_rows(store, tmp_path / "scratch", rows, 12)
    at = DocumentKind(store, "kept", "d")
    for by in ("source", "signals.b"):
        for descending in (False, True):
            def value(row: dict[str, Any], by: str = by) -> Any:
                return row["signals"].get("b") if by == "signals.b" else row["source"]

            wanted = sorted((r for r in rows if value(r) is not None), key=lambda r: r["id"])
            wanted.sort(key=value, reverse=descending)
            wanted += sorted((r for r in rows if value(r) is None), key=lambda r: r["id"])
            for limit in (29, 23, 50):
                assert ids(walk(queries, at, Filter(), SortOrder(by, descending), limit)) == ids(wanted)


def test_pages_of_random_questions_are_those_of_python(tmp_path):
    """Few documents have equal values of `c`, half of them have one value of `a`, and some parts have no `b`."""
    rng, store, rows = random.Random(17), Store(tmp_path / "store"), documents(600, 17)
    for row in rows:
        row["signals"]["a"] = rng.choice((0.0, -0.0, 1.0, 1.0, 1.0, math.nan, math.inf, -2.5))
        row["signals"]["c"] = float(rng.randrange(400))
    publish_rows(store, tmp_path / "scratch", rows, 12, signals=("a", "c"))
    at = DocumentKind(store, "kept", "d")
    for by in ("a", "b", "c") * 4:
        least, descending = rng.choice((None, 3.0, 390.0)), rng.random() < 0.5
        sources = tuple(rng.sample(SOURCES, rng.randrange(4)))
        filter = Filter(source=sources, signals=() if least is None else (SignalRange("c", least),))
        taken = sorted((r for r in rows if (not sources or r["source"] in sources)
                        and (least is None or r["signals"]["c"] >= least)), key=lambda r: r["id"])
        wanted = [r for r in taken if by in r["signals"]]
        wanted.sort(key=lambda r: (math.inf, 1) if math.isnan(v := r["signals"][by]) else (v, 0), reverse=descending)
        wanted += [r for r in taken if by not in r["signals"]]
        queries, got, after = Queries(), [], ""
        for limit in (rng.randrange(1, 30), rng.randrange(1, 9)):
            page = queries.page(at, filter, SortOrder(f"signals.{by}", descending), limit, queries.stop(), after,
                                show=("url", "signals"))
            got += page.rows
            if not (after := page.next or ""):
                break
        assert [(r["id"], r["url"], repr(r["signals"]["c"])) for r in got] == [
            (r["id"], r["url"], repr(r["signals"]["c"])) for r in wanted[:len(got)]]
        assert after or len(got) == len(wanted)


def test_columns_are_remembered_of_so_many_parts(tmp_path):
    """A server must not keep the columns of every part that ever was published."""
    store, checked = Store(tmp_path / "store"), Checked(QueryLimits(), remembered=2)
    for names in (("a",), ("a", "x"), ("a", "y"), ("a",)):
        publish_rows(store, tmp_path / "scratch", documents(4, 5), 1, salt=names[-1], signals=names)
        [columns] = checked.columns(store, published(store, "kept", "d"), Stop(60))
        assert {"signals.x", "signals.y"} & set(columns) == {f"signals.{name}" for name in names[1:]}
        assert len(checked._columns) <= 2


def test_no_page_lacks_documents_with_nan(tmp_path):
    """The statistics of Parquet files leave NaN out: the largest value of most parts here is 1.0 in them."""
    store, queries, rows = Store(tmp_path / "store"), Queries(), documents(24, 20)
    for i, row in enumerate(rows):
        row["signals"] = {"a": math.nan if i % 5 else 1.0}
    publish_rows(store, tmp_path / "scratch", rows, 12)
    at, rows = DocumentKind(store, "kept", "d"), sorted(rows, key=lambda row: row["id"])
    wanted = [row["id"] for row in rows if row["signals"]["a"] == 1.0]
    odd = [row["id"] for row in rows if row["signals"]["a"] != 1.0]
    for limit in (7, 20):
        assert ids(walk(queries, at, Filter(), SortOrder("signals.a"), limit)) == wanted + odd
        assert ids(walk(queries, at, Filter(), SortOrder("signals.a", True), limit)) == odd + wanted
    histogram = queries.histogram(at, Filter(), "a", 1, queries.stop())
    assert (histogram["odd"], histogram["counts"]) == (len(odd), [len(wanted)])
    assert sorted(ids(walk(queries, at, Filter(signals=(SignalRange("a", 1.0),)), SortOrder(), 20))) == wanted


def test_a_first_sorted_page_reads_ids_only_of_parts_that_have_its_documents(tmp_path, monkeypatch):
    store, rows, read = Store(tmp_path / "store"), documents(400, 18), []
    for i, row in enumerate(rows):
        row["signals"]["a"] = float(i // 3)                      # three documents have one value
    publish_rows(store, tmp_path / "scratch", rows, 40)
    real = PartReader.rows_of_each
    monkeypatch.setattr(PartReader, "rows_of_each",
                        lambda self, selects: read.extend((sql, values[0]) for sql, values in selects) or real(
                            self, selects))
    queries, at = Queries(), DocumentKind(store, "kept", "d")
    page = queries.page(at, Filter(), SortOrder("signals.a"), 23, queries.stop(), show=("url",))
    first = sorted(rows[:24], key=lambda r: (r["signals"]["a"], r["id"]))[:23]
    assert page.rows == [{"id": row["id"], "url": row["url"]} for row in first]
    best, ranked, *shown = read
    assert len(best[1]) == 40 and " id" not in best[0].partition(" FROM ")[0]
    assert len(ranked[1]) == 3 and len(shown) == 3               # the parts have ten documents each
    assert not any("id" in sql.partition(" FROM ")[0].replace("file_row", "").split(", ") for sql, _ in shown)
    read.clear()
    for row in rows:
        row["signals"]["a"] = float(row["signals"]["a"] > 2)     # more equal values than spare ones
    publish_rows(store, tmp_path / "scratch2", rows, 40, salt="new")
    page = queries.page(at, Filter(), SortOrder("signals.a", True), 23, queries.stop())
    assert ids(page.rows) == sorted(row["id"] for row in rows[9:])[:23] and len(read[1][1]) == 40


def test_a_page_in_stored_order_reads_about_as_many_parts_as_have_its_documents(tmp_path, monkeypatch):
    """Every part has one document of the domain: a page of 40 documents is found in 42 parts, not in 63."""
    store, rows, read = Store(tmp_path / "store"), documents(160, 19), []
    for i, row in enumerate(rows):
        row["url"] = f"https://{'one' if i % 2 else 'other'}.example/{i}"
    publish_rows(store, tmp_path / "scratch", rows, 80)
    real = PartReader.source
    monkeypatch.setattr(PartReader, "source", lambda self, numbers=None: read.extend(numbers) or real(self, numbers))
    queries = Queries()
    page = queries.page(DocumentKind(store, "kept", "d"), Filter(domain="one.example"), SortOrder(), 40, queries.stop())
    assert ids(page.rows) == [row["id"] for row in rows[1:80:2]] and page.next
    assert read == list(range(42))


def test_a_repeated_question_reads_no_part_and_has_the_same_answer(tmp_path, monkeypatch):
    store, queries = Store(tmp_path / "store"), Queries()
    publish_rows(store, tmp_path / "scratch", documents(200, 15), 10)
    at, reads = DocumentKind(store, "kept", "d"), []
    show = ("id", "text", "signals")

    def questions() -> list[Any]:
        first = queries.page(at, Filter(source=("web",)), SortOrder("id"), 5, queries.stop(), show=show, chars=9)
        stored = queries.page(at, Filter(text="日本"), SortOrder(), 5, queries.stop(), show=show)
        return [first, stored, queries.page(at, Filter(text="日本"), SortOrder(), 5, queries.stop(), stored.next or ""),
                queries.counts(at, Filter(), ["source"], queries.stop()),
                queries.counts(at, Filter(), ["language"], queries.stop()),
                queries.counts(at, Filter(source=("web",)), ["source"], queries.stop()),
                queries.histogram(at, Filter(), "bytes", 5, queries.stop()),
                queries.histogram(at, Filter(), "bytes", 6, queries.stop())]

    answers = questions()
    assert len({repr(answer) for answer in answers}) == len(answers)
    real = PartReader.rows_of_each
    monkeypatch.setattr(PartReader, "rows_of_each",
                        lambda self, selects: reads.extend(sql for sql, _ in selects) or real(self, selects))
    again = questions()
    assert repr(again[:2] + again[3:]) == repr(answers[:2] + answers[3:]) and len(reads) <= 12
    assert not any("GROUP BY" in sql or "ORDER BY v" in sql or "text" in sql.partition("WHERE")[0] for sql in reads)
    publish_rows(store, tmp_path / "scratch2", documents(220, 16), 10, salt="new")
    other = questions()
    fresh, queries = other, Queries()
    assert repr(questions()) == repr(fresh) != repr(answers)


def test_a_query_hashes_the_list_of_the_parts_once(store, monkeypatch):
    queries, at, hashed = Queries(), DocumentKind(store, "kept", "d"), []
    monkeypatch.setattr("pipeline.service.reader.hash_of", lambda parts: hashed.append(len(parts)) or hash_of(parts))
    for ask in (lambda: queries.page(at, Filter(), SortOrder("id"), 5, queries.stop()),
                lambda: queries.page(at, Filter(), SortOrder(), 5, queries.stop()),
                lambda: queries.counts(at, Filter(), ["source"], queries.stop())):
        for answer in ("new", "remembered"):
            hashed.clear()
            ask()
            assert len(hashed) == 1, answer


@pytest.mark.parametrize("ask", [
    lambda q, at: q.counts(at, Filter(), ["source"], q.stop()),
    lambda q, at: q.histogram(at, Filter(), "a", 5, q.stop()),
    lambda q, at: q.page(at, Filter(), SortOrder("signals.a"), 5, q.stop()),
    lambda q, at: q.page(at, Filter(text="nowhere"), SortOrder(), 5, q.stop())])
def test_a_remembered_answer_is_not_given_when_a_part_is_damaged(tmp_path, ask):
    store, queries = Store(tmp_path / "store"), Queries()
    publish_rows(store, tmp_path / "scratch", documents(60, 8), 9)
    at = DocumentKind(store, "kept", "d")
    assert ask(queries, at) == ask(queries, at)
    last = sorted(Path(store.at("datasets/d")).glob("part-*"))[-1]
    data = last.read_bytes()
    last.unlink()
    last.write_bytes(data[:-20] + b"x" * 20)
    with pytest.raises(DamagedFile):
        ask(queries, at)


def test_the_memory_of_answers_forgets_those_not_used_for_the_longest_time():
    memory, part = AnswerMemory(most=1000), PublishedPart("datasets/d/p", "k", "n", 1, 1, "0" * 64)
    parts = hash_of([part])
    for i in range(5):
        memory.put(parts, ("q", i), "x" * 200)
        assert memory.get(parts, ("q", 0)) == "x" * 200              # used again and again
    assert [memory.get(parts, ("q", i)) is None for i in range(5)] == [False, True, False, False, False]
    memory.put(parts, ("long",), "x" * 600)
    assert memory.get(parts, ("long",)) is None and memory.get(parts, ("q", 4))
    assert memory.get(hash_of([part._replace(sha256="1" * 64)]), ("q", 4)) is None
    for _ in range(9):
        memory.put(parts, ("q", 4), "y" * 240)                       # an answer that is put again counts once
    assert memory.get(parts, ("q", 0)) and memory.get(parts, ("q", 4)) == "y" * 240


def test_the_columns_asked_for_come_back_as_they_were(store, queries):
    at = DocumentKind(store, "kept", "d")
    rows = walk(queries, at, Filter(), SortOrder(), 40, chars=12,
                show=("text", "url", "source", "language", "date", "signals", "meta"))
    for row, wanted in zip(rows, KEPT, strict=True):
        assert (row["text"], row["chars"]) == (wanted["text"][:12], len(wanted["text"]))
        assert all(row[k] == wanted[k] for k in ("url", "source", "language", "date"))
        found = {k: v for k, v in row["signals"].items() if v is not None}
        assert repr(found) == repr({"bytes": float(len(wanted["text"].encode())), **wanted["signals"]})
    assert set(queries.page(at, Filter(), SortOrder(), 1, queries.stop()).rows[0]) == {"id"}
    [row, *_] = walk(queries, at, Filter(text="日本"), SortOrder(), 40)
    assert "日本" in row["match"] and set(row) == {"id", "match"}


@pytest.mark.parametrize(("signal", "bounds"), [("a", (0.0, 1.0)), ("a", (None, None)), ("b", (None, None)),
                                                ("b", (2.0, 2.0)), ("bytes", (None, 100.0))])
def test_histograms(store, queries, signal, bounds):
    bins = 7
    found = queries.histogram(DocumentKind(store, "kept", "d"), Filter(), signal, bins, queries.stop(), *bounds)
    values = [float(len(r["text"].encode())) if signal == "bytes" else r["signals"].get(signal) for r in KEPT]
    sound = [v for v in values if v is not None and math.isfinite(v)]
    low, high = (b if b is not None else f(sound) for b, f in zip(bounds, (min, max)))
    width = (high - low) / bins
    counts = Counter(min(int((v - low) // width) if width else 0, bins - 1) if width else 0
                     for v in sound if low <= v <= high)
    assert found["counts"] == [counts[i] for i in range(bins)]
    assert (found["below"], found["above"]) == (sum(v < low for v in sound), sum(v > high for v in sound))
    assert found["missing"] == values.count(None) and found["documents"] == len(values)
    assert found["odd"] == len(values) - len(sound) - values.count(None)
    assert found["missing"] + found["odd"] + found["below"] + found["above"] + sum(found["counts"]) == len(values)


def test_counts_by_domain_and_language(store, queries):
    found = queries.counts(DocumentKind(store, "kept", "d"), Filter(), ["domain", "language"], queries.stop())
    assert {(g["domain"], g["language"]): g["documents"] for g in found["groups"]} == Counter(
        (host(r["url"]), r["language"]) for r in KEPT)


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("call", "key"), [
    (lambda q, at: q.page(at, Filter(), SortOrder("signals.nosuch"), 5, q.stop()), "sort"),
    (lambda q, at: q.page(at, Filter(), SortOrder('id" DESC; drop table x'), 5, q.stop()), "sort"),
    (lambda q, at: q.page(at, Filter(), SortOrder("text"), 5, q.stop()), "sort"),
    (lambda q, at: q.page(at, Filter(), SortOrder("reason"), 5, q.stop()), "sort"),
    (lambda q, at: q.page(at, Filter(signals=(SignalRange('a", 1 --'),)), SortOrder(), 5, q.stop()), "signal"),
    (lambda q, at: q.page(at, Filter(signals=(SignalRange("a", math.nan),)), SortOrder(), 5, q.stop()), "signal"),
    (lambda q, at: q.page(at, Filter(stage=("x",)), SortOrder(), 5, q.stop()), "stage"),
    (lambda q, at: q.page(at, Filter(text="\ud800"), SortOrder(), 5, q.stop()), "text"),
    (lambda q, at: q.page(at, Filter(text="x" * 1001), SortOrder(), 5, q.stop()), "text"),
    (lambda q, at: q.page(at, Filter(source=("x",) * 101), SortOrder(), 5, q.stop()), "source"),
    (lambda q, at: q.page(at, Filter(), SortOrder(), 0, q.stop()), "limit"),
    (lambda q, at: q.page(at, Filter(), SortOrder(), 5, q.stop(), show=("id, text",)), "show"),
    (lambda q, at: q.page(at, Filter(), SortOrder("stored", True), 5, q.stop()), "descending"),
    (lambda q, at: q.counts(at, Filter(), ["text"], q.stop()), "by"),
    (lambda q, at: q.counts(at, Filter(), ["source", "source"], q.stop()), "by"),
    (lambda q, at: q.histogram(at, Filter(), "nosuch", 5, q.stop()), "signal"),
    (lambda q, at: q.histogram(at, Filter(), "a", 0, q.stop()), "bins"),
    (lambda q, at: q.histogram(at, Filter(), "a", 5, q.stop(), 2.0, 1.0), "most"),
    (lambda q, at: q.histogram(at, Filter(), "a", 5, q.stop(), -1.7e308, 1.7e308), "most"),
    (lambda q, at: q.page(at._replace(kind="objects"), Filter(), SortOrder(), 5, q.stop()), "kind"),
    (lambda q, at: q.page(at._replace(dataset="../dropped/d"), Filter(), SortOrder(), 5, q.stop()), "dataset"),
    (lambda q, at: q.page(at._replace(dataset="nosuch"), Filter(), SortOrder(), 5, q.stop()), "dataset"),
])
def test_a_wrong_question_names_the_parameter(store, queries, call, key):
    with pytest.raises(QueryError) as e:
        call(queries, DocumentKind(store, "kept", "d"))
    assert (e.value.key, e.value.status in (400, 404)) == (key, True) and e.value.remedy


@pytest.mark.parametrize("place", ["x", "W10", "e30", "bnVsbA", "%00", "é", "A" * 9000, "W1tbW1tbW1tbW1tbW1tdXV1d"])
def test_a_place_that_was_made_up_is_refused(store, queries, place):
    at = DocumentKind(store, "kept", "d")
    for order in (SortOrder(), SortOrder("id")):
        with pytest.raises(QueryError) as e:
            queries.page(at, Filter(), order, 5, queries.stop(), place)
        assert e.value.key == "after"
    place = queries.page(at, Filter(), SortOrder("id"), 5, queries.stop()).next
    with pytest.raises(QueryError) as e:                                          # of another query
        queries.page(at, Filter(source=("web",)), SortOrder("id"), 5, queries.stop(), place)
    assert e.value.key == "after"


def test_selects_that_need_too_much_memory_together_run_one_after_another(tmp_path):
    file, turn = tmp_path / "x.parquet", threading.Lock()
    duckdb.sql("SELECT 1 AS x").write_parquet(str(file))

    class Narrow:
        """A connection whose memory does not suffice for a SELECT while another connection runs one."""

        def __init__(self, real: Any) -> None:
            self.real = real

        def execute(self, sql: str, values: list[Any]) -> Any:
            if not turn.acquire(blocking=False):
                raise duckdb.OutOfMemoryException("too much")
            try:
                time.sleep(0.05)
                return self.real.execute(sql, values)
            finally:
                turn.release()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    with Database([str(file)], QueryLimits(), Stop(60)) as database:
        database._connections = [Narrow(real) for real in database._connections]
        selects = [("SELECT x + ? AS y FROM read_parquet(?)", [i, str(file)]) for i in range(6)]
        assert database.rows_of_each(selects) == [[{"y": 1 + i}] for i in range(6)]


def test_duckdb_opens_the_files_it_was_given_and_nothing_else(tmp_path, store):
    inside, outside = tmp_path / "in.parquet", tmp_path / "out.parquet"
    for path in (inside, outside):
        duckdb.sql("select 1 as x").write_parquet(str(path))
    with Database([str(inside)], QueryLimits(), Stop(60)) as database:
        assert database.rows("SELECT x FROM read_parquet(?)", [[str(inside)]]) == [{"x": 1}]
        for sql in (f"SELECT * FROM read_parquet('{outside}')", f"SELECT * FROM read_parquet('{tmp_path}/*.parquet')",
                    "SELECT * FROM read_text('/etc/hostname')", f"SELECT * FROM glob('{tmp_path}/*')",
                    "SELECT * FROM read_csv('http://127.0.0.1:9/x')", "SELECT * FROM tmp_path",
                    f"SELECT * FROM sniff_csv('{outside}')"):
            with pytest.raises(duckdb.Error):
                database.rows(sql, [])
        for sql in (f"COPY (SELECT 1) TO '{inside}' (USE_TMP_FILE false)", f"ATTACH '{tmp_path}/new.db'", "LOAD httpfs",
                    "SET enable_external_access = true", "SELECT 1; SELECT 2", "CREATE TABLE t (a int)", ""):
            with pytest.raises((duckdb.Error, ValueError)):
                database.rows(sql, [])
        settings = {r["name"]: r["value"] for r in database.rows("SELECT name, value FROM duckdb_settings()", [])}
    assert settings["lock_configuration"] == "true" and settings["enable_external_access"] == "false"
    assert settings["autoload_known_extensions"] == settings["autoinstall_known_extensions"] == "false"
    assert (settings["temp_directory"], settings["threads"]) == ("", "2")


# -- parts that change or are damaged --------------------------------------------------------------------------------
def test_pages_by_id_outlast_publications(tmp_path):
    """Half of the documents stay through three publications, each in other parts: every one of them is seen once."""
    store, queries = Store(tmp_path / "store"), Queries()
    rows = documents(240, 5)
    stay, come_and_go = rows[::2], rows[1::2]
    at, seen, after = DocumentKind(store, "kept", "d"), [], ""
    for turn in range(200):
        if turn % 4 == 0:
            publish_rows(store, tmp_path / "scratch", stay + come_and_go[turn % 3::3], 2 + turn % 5, salt=str(turn))
        page = queries.page(at, Filter(), SortOrder("id"), 9, queries.stop(), after)
        seen += ids(page.rows)
        if page.next is None:
            break
        after = page.next
    assert turn > 12 and seen == sorted(seen) and len(set(seen)) == len(seen)
    assert {r["id"] for r in stay} <= set(seen)


def test_a_stored_walk_goes_on_while_its_part_is_there_and_says_when_it_is_gone(tmp_path):
    store, queries = Store(tmp_path / "store"), Queries()
    rows, at = documents(60, 6), DocumentKind(Store(tmp_path / "store"), "kept", "d")
    publish_rows(store, tmp_path / "scratch", rows, 4)
    first = queries.page(at, Filter(), SortOrder(), 20, queries.stop())
    publish_rows(store, tmp_path / "scratch", rows, 4)                       # the same again
    second = queries.page(at, Filter(), SortOrder(), 20, queries.stop(), first.next)
    assert ids(first.rows + second.rows) == [r["id"] for r in rows[:40]]
    publish_rows(store, tmp_path / "scratch", rows, 4, salt="other")
    with pytest.raises(PlaceGone) as e:
        queries.page(at, Filter(), SortOrder(), 20, queries.stop(), first.next)
    assert e.value.status == 410


def test_queries_beside_publications_see_one_publication_each(tmp_path):
    """A publisher replaces all parts again and again: every answer is that of one of its publications, whole."""
    store, queries = Store(tmp_path / "store"), Queries(QueryLimits(seconds=600, wait_s=600))
    rows, at = documents(80, 7), DocumentKind(Store(tmp_path / "store"), "kept", "d")
    publish_rows(store, tmp_path / "scratch", rows, 3, salt="0")
    turns, done = threading.Semaphore(0), threading.Semaphore(0)

    def publish_again() -> None:
        for turn in range(1, 26):
            assert turns.acquire(timeout=300)
            publish_rows(store, tmp_path / "scratch", rows[turn % 5:], 3 + turn % 4, salt=str(turn))
            done.release()

    publisher = threading.Thread(target=publish_again)
    publisher.start()
    answers = []
    for _ in range(25):
        turns.release()                                          # one publication beside every query
        answers.append(queries.page(at, Filter(), SortOrder("id"), 200, queries.stop()).rows)
        assert done.acquire(timeout=300)
    publisher.join()
    whole = [sorted(r["id"] for r in rows[k:]) for k in range(5)]
    assert all(ids(answer) in whole for answer in answers)


@pytest.mark.parametrize("spoil", ["flip", "cut", "gone", "link", "folder", "manifest"])
def test_a_damaged_part_is_told_and_not_read(tmp_path, spoil):
    store, queries = Store(tmp_path / "store"), Queries()
    publish_rows(store, tmp_path / "scratch", documents(60, 8), 2)
    at = DocumentKind(store, "kept", "d")
    queries.page(at, Filter(), SortOrder("id"), 5, queries.stop())
    folder = Path(store.at("datasets/d"))
    first = sorted(folder.glob("part-*"))[0]
    data = bytearray(first.read_bytes())
    if spoil == "flip":                                            # a page that still decodes, in DuckDB's eyes
        data[len(data) // 3] ^= 1
    first.unlink()
    if spoil in ("flip", "cut"):
        first.write_bytes(data if spoil == "flip" else data[:-20])
    elif spoil == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        first.symlink_to(tmp_path / "elsewhere")
    elif spoil == "folder":
        first.write_bytes(data)
        folder.rename(tmp_path / "away")
        folder.symlink_to(tmp_path / "away")
    elif spoil == "manifest":
        first.write_bytes(data)
        (folder / ".manifest").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DamagedFile) as e:
        queries.page(at, Filter(), SortOrder("id"), 5, queries.stop())
    assert e.value.path.startswith("datasets/d")
    assert str(tmp_path) not in str(e.value)


def test_a_page_in_stored_order_compares_and_reads_only_the_parts_that_it_needs(tmp_path):
    """Later parts are damaged: the page is right, and the one that reaches them is refused."""
    store, queries, rows = Store(tmp_path / "store"), Queries(), documents(200, 11)
    publish_rows(store, tmp_path / "scratch", rows, 20)
    for part in sorted(Path(store.at("datasets/d")).glob("part-*"))[11:]:                # part 10 tells its columns
        part.write_bytes(b"PAR1 nonsense PAR1")
    at, kept = DocumentKind(store, "kept", "d"), [row["id"] for row in rows[:70] if "alpha" in row["text"]]
    page = queries.page(at, Filter(text="alpha"), SortOrder(), len(kept) - 1, queries.stop())
    assert ids(page.rows) == kept[:-1] and page.next
    with pytest.raises(DamagedFile):
        queries.page(at, Filter(text="alpha"), SortOrder(), len(kept) - 1, queries.stop(), page.next)


def test_stored_pages_over_many_parts_with_other_columns_are_those_of_python(tmp_path):
    store, queries, rows = Store(tmp_path / "store"), Queries(), documents(400, 12)
    publish_rows(store, tmp_path / "scratch", rows, 40)
    for filter, takes in ((Filter(signals=(SignalRange("b", 9.0),)), within("b", 9.0, None)),
                          (Filter(text="日本"), lambda row: "日本" in row["text"])):
        wanted = [row["id"] for row in rows if takes(row)]
        assert 10 < len(wanted) < 390
        assert ids(walk(queries, DocumentKind(store, "kept", "d"), filter, SortOrder(), 23)) == wanted


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    store, queries = Store(tmp_path / "store"), Queries()
    publish_rows(store, tmp_path / "scratch", documents(20, 9), 1)
    manifest = Path(store.at("datasets/d/.manifest"))
    table = duckdb.sql(f"select * replace ('../../secret.parquet' as part) from read_parquet('{manifest}')")
    table.write_parquet(str(tmp_path / "forged"))
    manifest.write_bytes((tmp_path / "forged").read_bytes())
    with pytest.raises(DamagedFile):
        queries.page(DocumentKind(store, "kept", "d"), Filter(), SortOrder(), 5, queries.stop())


def test_an_empty_dataset_and_a_store_that_vanished(tmp_path):
    store, queries = Store(tmp_path / "store"), Queries()
    publish_rows(store, tmp_path / "scratch", [], 2)
    at = DocumentKind(store, "kept", "d")
    for order in (SortOrder(), SortOrder("id"), SortOrder("signals.a")):
        assert queries.page(at, Filter(text="x"), order, 5, queries.stop()).rows == []
    assert queries.counts(at, Filter(), ["source"], queries.stop())["documents"] == 0
    assert queries.histogram(at, Filter(), "a", 5, queries.stop())["counts"] == []
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(NoDataset):
        queries.page(at, Filter(), SortOrder(), 5, queries.stop())


def test_object_storage(tmp_path, store, monkeypatch):
    """The same answers as from a disk; a sorted page fetches a part at most to find documents and to show them; no more
    is fetched than allowed; a damaged part is told."""
    memory, root = fsspec.filesystem("memory"), "/service-query"
    for path in store.list("datasets"):
        memory.pipe(f"{root}/{path}", store.read(path))
    remote, local = DocumentKind(Store(f"memory:/{root}"), "kept", "d"), DocumentKind(store, "kept", "d")
    queries = Queries()
    for order in (SortOrder(), SortOrder("id"), SortOrder("signals.b", True)):
        assert walk(queries, remote, Filter(text="alpha"), order, 50) == walk(queries, local, Filter(text="alpha"),
                                                                              order, 50)
    fetched, real = [], Store.checked
    with monkeypatch.context() as patch:
        patch.setattr(Store, "checked",
                      lambda self, path, *args, **how: fetched.append(path) or real(self, path, *args, **how))
        assert queries.page(remote, Filter(), SortOrder("signals.a"), 5, queries.stop()).next
    assert len(fetched) > 5 and max(Counter(fetched).values()) == 2
    small = Queries(QueryLimits(fetched_bytes=1000))
    with pytest.raises(TooDear):
        small.page(remote, Filter(), SortOrder("id"), 5, small.stop())
    part = sorted(memory.ls(f"{root}/datasets/d", detail=False))[-1]
    data = bytearray(memory.cat(part))
    data[len(data) // 3] ^= 1
    memory.pipe(part, bytes(data))
    with pytest.raises(DamagedFile):
        queries.page(remote, Filter(), SortOrder("id"), 5, queries.stop())


# -- limits ----------------------------------------------------------------------------------------------------------
LONG = "SELECT count(*) AS n FROM range(1000000) a, range(1000000000) b WHERE (a.range * b.range) % 7 = 3"


def test_a_query_ends_when_its_time_is_up():
    with Database([], QueryLimits(), stop := Stop(0.3)) as database, pytest.raises(TooDear):
        database.rows(LONG, [])
    with pytest.raises(TooDear):
        stop.check()


def test_all_selects_of_a_query_end_when_its_time_is_up():
    with Database([], QueryLimits(), Stop(0.3)) as database, pytest.raises(TooDear):
        database.rows_of_each([(LONG, [])] * 5)


def test_selects_that_run_at_a_time_have_the_same_limits(tmp_path):
    inside, outside = tmp_path / "in.parquet", tmp_path / "out.parquet"
    for path in (inside, outside):
        duckdb.sql("select 1 as x").write_parquet(str(path))
    both = threading.Barrier(2, timeout=300)
    with Database([str(inside)], QueryLimits(threads=2), Stop(60)) as database:
        assert database.rows_of_each([("SELECT ? AS x", [i]) for i in range(9)]) == [[{"x": i}] for i in range(9)]
        for connection in database._connections:
            with pytest.raises(duckdb.Error):
                connection.execute("SELECT * FROM read_parquet(?)", [str(outside)])
            with pytest.raises(duckdb.Error):
                connection.execute("SET enable_external_access = true")
        with pytest.raises(ValueError, match="one SELECT"):
            database.rows_of_each([("SELECT 1", []), ("CREATE TABLE t (a int)", [])])

        class Meeting(Stop):
            def check(self) -> None:
                if threading.current_thread() is not threading.main_thread():
                    both.wait()                                  # passes only if two selects run at a time

        database._stop = Meeting(60)
        assert len(database.rows_of_each([("SELECT 1", [])] * 2)) == 2


def test_a_query_ends_when_the_client_goes():
    stop = Stop(600)
    threading.Timer(0.2, stop.cancel).start()
    with Database([], QueryLimits(), stop) as database, pytest.raises(Cancelled):
        database.rows(LONG, [])
    with Database([], QueryLimits(), stop) as database, pytest.raises(Cancelled):
        database.rows("SELECT 1", [])


def test_a_cancelled_query_hashes_no_part(store):
    queries, stop = Queries(), Stop(600)
    stop.cancel()
    with pytest.raises(Cancelled):
        queries.page(DocumentKind(store, "kept", "d"), Filter(), SortOrder(), 5, stop)


def test_hashing_goes_on_where_the_query_before_ended(tmp_path):
    """The time of a query is enough for a few of the parts: each query gets some parts further."""
    class Ticking(Clock):
        time = 0.0

        def now(self) -> float:
            self.time += 1.0
            return self.time

    store, queries = Store(tmp_path / "store"), Queries(QueryLimits(threads=1, wait_s=600), Ticking())
    publish_rows(store, tmp_path / "scratch", documents(40, 1), 20)
    at, told = DocumentKind(store, "kept", "d"), []
    for _ in range(30):
        try:
            queries.counts(at, Filter(), ["source"], Stop(12, Ticking()))
            break
        except StillChecking as e:
            told.append(int(e.detail.split()[0]))
        except TooDear:
            pass                                              # in the query itself: all is hashed
    assert told and told == sorted(told) and told[-1] > told[0]


def test_memory_is_bounded():
    with Database([], QueryLimits(memory_mb=30), Stop(600)) as database, pytest.raises(TooDear):
        database.rows("SELECT list(repeat('x', 100) || range) AS x FROM range(10000000)", [])


def test_no_more_queries_at_once_than_allowed(store):
    queries = Queries(QueryLimits(at_once=1, wait_s=0.05))
    at, inside, go = DocumentKind(store, "kept", "d"), threading.Event(), threading.Event()

    class Slow(Stop):
        def check(self) -> None:
            inside.set()
            assert go.wait(300)

    held = threading.Thread(target=queries.page, args=(at, Filter(), SortOrder(), 5, Slow(600)))
    held.start()
    try:
        assert inside.wait(300)
        with pytest.raises(Busy) as e:
            queries.page(at, Filter(), SortOrder(), 5, queries.stop())
        assert e.value.status == 503
    finally:
        go.set()
        held.join()
    assert len(queries.page(at, Filter(), SortOrder(), 5, queries.stop()).rows) == 5
