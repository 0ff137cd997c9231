"""Exact duplicates, by text, by URL or by both: compared with brute force, for every division into parts."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from pipeline.store.fs import Store
from stages.dedup.exact import Exact, NoSuchMetadata
from stages.dedup.exact_hash import ExactHash, same_url
from stages.dedup.fragment import Sizes, ids_to_ints
from stages.dedup.units import same_text
from stages.document import Document, DuplicateId
from tests.stages.dedup_fragment import Doc, run_fragment, write_parts

RANKS = {"wiki": 0, "web": 1, "books": 2}


def documents(seed: int, n: int = 400) -> list[Doc]:
    rng = random.Random(seed)
    docs = []
    for _ in range(n):
        text = f"text {rng.randint(0, n // 3)} of a document"
        if rng.random() < 0.3:
            text = text.upper().replace(" ", rng.choice(["  ", "\n", " \t"])) + " " * rng.randint(0, 3)
        page = rng.randint(0, n // 2)
        url = rng.choice(["", f"https://x.org/{page}", f"http://X.org:80/{page}#top"])
        docs.append(Doc(text, rng.choice(list(RANKS)), f"{rng.getrandbits(128):032x}", url))
    return docs


def expected(docs: list[Doc], by: str, normalise: bool = True) -> dict[str, tuple]:
    """Compute in plain Python {removed id: (reason, kept id, similarity, cluster)}."""
    def text_key(d):
        return re.sub(r"\s+", " ", d.text.lower()).strip() if normalise else d.text

    def url_key(d):
        host_lower = re.sub(r"^https?://([^/#?]*)", lambda m: m[1].lower().removesuffix(":80"), d.url)
        return host_lower.partition("#")[0] or None

    removed: dict[str, tuple] = {}
    for column, key in (("url", url_key), ("text", text_key)):
        if by not in (column, "both"):
            continue
        best: dict[str, Doc] = {}
        alive = sorted((d for d in docs if d.id not in removed and key(d) is not None),
                       key=lambda d: (RANKS[d.dataset], -len(d.text), d.id))
        for d in alive:
            kept = best.setdefault(key(d), d)
            if kept is not d:
                removed[d.id] = (f"exact_{column}", kept.id, 1.0, kept.id)
    return removed


@pytest.mark.parametrize(("by", "rows", "small"), [
    ("text", 1000, None), ("url", 7, None), ("both", 7, None), ("both", 3, 10), ("url", 3, 10)])
def test_equals_brute_force(tmp_path, by, rows, small):
    docs = documents(3, 150)
    store = Store(tmp_path)
    barrier = Exact(by=by)
    if small:
        barrier.sizes = Sizes(group_rows=small, bucket_bytes=1500, segment_bytes=1)
    got = run_fragment(barrier, write_parts(barrier, docs, store, part_rows=rows, ranks=RANKS), store, shuffle=small)
    want = expected(docs, by)
    assert got.removed == want
    assert len(want) > 20
    texts = {d.id: same_text(d.text) for d in docs}
    for kept in {r[1] for r in got.removed.values()}:            # what anything went for is there, or its equal is
        assert kept not in got.removed or texts[got.removed[kept][1]] == texts[kept]
        assert kept not in got.removed or got.removed[kept][1] not in got.removed
    told = got.counters["slices"]["removed"]
    assert sum(sum(n.values()) for n in told.values()) == len(want)
    if small:
        assert len(got.results[f"{'text' if by == 'both' else by}_reduce"]) > 2


def test_byte_for_byte(tmp_path):
    docs = documents(4, 100)
    store = Store(tmp_path)
    barrier = Exact(normalise=False)
    got = run_fragment(barrier, write_parts(barrier, docs, store, ranks=RANKS), store)
    assert got.removed == expected(docs, "text", normalise=False)
    assert len(got.removed) < len(expected(docs, "text"))


def test_untouched_parts_have_no_slice(tmp_path):
    docs = [Doc(f"a text like no other, number {n}", "web", f"{n:032x}") for n in range(20)]
    store = Store(tmp_path)
    parts = write_parts(Exact(), [*docs, Doc(docs[2].text, "web", "f" * 32)], store, part_rows=5)
    got = run_fragment(Exact(), parts, store)
    assert [s is not None for s in got.slices] == [False, False, False, False, True]
    assert run_fragment(Exact(), parts[:4], store).slices == [None] * 4
    assert run_fragment(Exact(), [], store).slices == []


def test_ids_in_upper_case_are_refused():
    with pytest.raises(ValueError, match="lower-case"):
        ids_to_ints(pa.array(["ab" * 16, "AB" * 16]))


def test_same_id_twice_is_an_error(tmp_path):
    for number, datasets in enumerate([("web", "web"), ("web", "wiki")]):
        store = Store(tmp_path / str(number))
        docs = [Doc("one text", name, "a" * 32) for name in datasets]
        with pytest.raises(DuplicateId, match="a" * 32):
            run_fragment(Exact(), write_parts(Exact(), docs, store), store)


@pytest.mark.parametrize(("a", "b"), [
    ("http://Example.org", "https://example.org/"), ("http://x.org:80/a", "https://x.org/a#part"),
    ("https://x.org:443/?q=1", "http://x.org/?q=1"), (" http://x.org/a ", "http://X.ORG/a")])
def test_same_url(a, b):
    assert same_url(a) == same_url(b)


@pytest.mark.parametrize(("a", "b"), [
    ("http://x.org/a", "http://x.org/A"), ("http://x.org/a", "http://x.org/a/"), ("http://x.org/?a", "http://x.org/?b"),
    ("http://x.org:8080/", "http://x.org/"), ("ftp://x.org/", "http://x.org/"), ("http://[bad", "http://[bat"),
    ("http://x.org:99999999/", "http://x.org/"), ("not a url", "nor this")])
def test_other_url(a, b):
    assert same_url(a) != same_url(b)


def test_side_row():
    assert same_text("  A\u00a0b\n\n C ") == "a b c"
    doc = Document("0" * 32, "Some  text", url="http://x.org/")
    for by, text, url in (("text", 16, 0), ("url", 0, 16), ("both", 16, 16)):
        assert ExactHash(by=by).process(doc) is None
        row = doc.side["exact_hash"]
        assert (len(row["text"]), len(row["url"]), row["chars"]) == (text, url, 10)
    bare = Document("1" * 32, "")
    ExactHash(by="both").process(bare)
    assert bare.side["exact_hash"]["url"] == b""


def test_a_hash_that_a_third_of_the_documents_share_costs_one_record_a_group(tmp_path):
    """A page that is everywhere: combined where it is read, however the rest is spread."""
    rng = random.Random(4)
    docs = [Doc("404 not found" if rng.random() < 0.3 else f"text {i}", rng.choice(list(RANKS)),
                f"{rng.getrandbits(128):032x}") for i in range(300)]
    hot = sum(d.text == "404 not found" for d in docs)
    barrier, store = Exact(), Store(tmp_path)
    barrier.sizes = Sizes(group_rows=20, bucket_bytes=1500, segment_bytes=1)
    got = run_fragment(barrier, write_parts(barrier, docs, store, ranks=RANKS), store, shuffle=1)
    assert got.removed == expected(docs, "text") and len(got.removed) == hot - 1 > 70
    maps = got.results["text_map"]
    assert len(maps) > 10
    # every text that is there once, and the hot one once a group (that has it)
    assert len(docs) - hot < sum(r.counters["hashes"] for r in maps) <= len(docs) - hot + len(maps)
    assert got.counters["text_reduce"]["max_repeats"] == hot


@pytest.mark.parametrize(("by", "same", "other"), [
    ("bytes", ("a b", "a b"), ("a b", "A b")), ("no-space", ("A b c", "ab\n\u00a0C"), ("ab", "ac")),
    ("text", ("A  b", "a b"), ("ab", "a b"))])
def test_what_makes_texts_equal(tmp_path, by, same, other):
    for number, (texts, removed) in enumerate(((same, 1), (other, 0))):
        docs = [Doc(text, "web", f"{n:032x}") for n, text in enumerate(texts)]
        store = Store(tmp_path / str(number))
        got = run_fragment(Exact(by=by), write_parts(Exact(by=by), docs, store), store)
        assert [r[0] for r in got.removed.values()] == [f"exact_{by.replace('-', '_')}"] * removed


def test_equal_metadata_then_equal_bytes_then_equal_text(tmp_path):
    """Each property decides about those documents that all properties before it have kept."""
    rng = random.Random(12)
    texts = ["one text", "One  text", "two", "three"]
    docs = [Doc(rng.choice(texts) + " " * rng.randint(0, 1), rng.choice(list(RANKS)), f"{rng.getrandbits(128):032x}",
                meta=rng.choice([(), (("doi", None),), (("doi", ""),), *((("doi", n),) for n in range(30))]))
            for _ in range(90)]
    by = ["meta.doi", "bytes", "text"]
    want: dict[str, tuple] = {}
    for column, key in (("meta", lambda d: dict(d.meta).get("doi")), ("bytes", lambda d: d.text),
                        ("text", lambda d: same_text(d.text))):
        best: dict[object, Doc] = {}
        for d in sorted((d for d in docs if d.id not in want and key(d) not in (None, "")),
                        key=lambda d: (RANKS[d.dataset], -len(d.text), d.id)):
            if (kept := best.setdefault(key(d), d)) is not d:
                want[d.id] = (f"exact_{column}", kept.id, 1.0, kept.id)
    barrier, store = Exact(by=by), Store(tmp_path)
    barrier.sizes = Sizes(group_rows=9, bucket_bytes=1500, segment_bytes=1)
    got = run_fragment(barrier, write_parts(barrier, docs, store, part_rows=4, ranks=RANKS), store, shuffle=3)
    assert got.removed == want
    assert {r[0] for r in want.values()} == {"exact_meta", "exact_bytes", "exact_text"}


def test_a_key_that_no_document_has_is_an_error(tmp_path):
    store, barrier = Store(tmp_path), Exact(by=["text", "meta.doi"])
    parts = write_parts(barrier, [Doc("a text", "web", "1" * 32)], store)
    with pytest.raises(NoSuchMetadata, match=r"exact\.by.*meta\.doi"):
        run_fragment(barrier, parts, store)
    assert run_fragment(barrier, [], store).slices == []


@pytest.mark.parametrize("bad", [{"by": "texts"}, {"by": []}, {"by": ["url", "url"]}, {"by": "meta."},
                                 {"prefer": ["newer"]}, {"prefer": ["signal:"]}, {"prefer": ["longest", "longest"]}])
def test_unknown_properties_and_preferences_are_refused(bad):
    with pytest.raises(ValueError, match=r"name|twice"):
        Exact(bad)


PREFERENCES = [("priority", "newest", "longest"), ("newest", "priority"), ("signal:score", "longest"), ("longest",),
               ("newest", "signal:score", "priority", "longest"), ()]


def seconds(date: str) -> float:
    """Return the seconds since 1970. A date without a time zone is in UTC, wherever this runs."""
    time = datetime.fromisoformat(date)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def wanted(prefer: tuple[str, ...], ranks: dict[str, int]) -> Callable[[Doc], tuple]:
    """Return a function that gives the sort key of a document among its duplicates, the preferred one first."""
    def place(d: Doc) -> tuple:
        score = dict(d.signals).get("score")
        said = {"priority": ranks.get(d.dataset, 0), "longest": -len(d.text),
                "newest": -seconds(d.date) if d.date else math.inf,
                "signal:score": math.inf if score is None else -score}
        return (*(said[item] for item in prefer), d.id)

    return place


def dated(rng: random.Random, doc: Doc) -> Doc:
    """Return the document with a date and a score, or without one of them."""
    dates = [None, "2024-05-01", "2024-05-01T00:00:00Z", "2024-05-01T00:30:00+01:00", "1999-12-31T23:59:59.5Z"]
    return replace(doc, date=rng.choice(dates),
                   signals=rng.choice([(), *((("score", x),) for x in (-1.5, -0.25, 0.0, 1e-300, 2.0, 1e9))]))


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_the_preferred_document_survives(tmp_path, prefer):
    rng = random.Random(5)
    docs = [dated(rng, d) for d in documents(6, 150)]
    barrier, store = Exact(prefer=prefer), Store(tmp_path)
    barrier.sizes = Sizes(group_rows=10, bucket_bytes=1500, segment_bytes=1)
    got = run_fragment(barrier, write_parts(barrier, docs, store, part_rows=3, ranks=RANKS), store, shuffle=1)
    best: dict[str, Doc] = {}
    want = {}
    for d in sorted(docs, key=wanted(prefer, RANKS)):
        if (kept := best.setdefault(same_text(d.text), d)) is not d:
            want[d.id] = ("exact_text", kept.id, 1.0, kept.id)
    assert got.removed == want and len(want) > 30


def test_settings_added_later_enter_no_key_while_they_have_their_default():
    assert "prefer" not in Exact().prepare()[1] and Exact(prefer=["priority", "longest"]).key() == Exact().key()
    assert Exact(prefer=["longest"]).key() != Exact().key()
    assert Exact(prefer=["signal:score"]).reads() == {"score": "prefer"}
