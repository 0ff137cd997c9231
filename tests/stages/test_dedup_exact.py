"""Exact duplicates: against brute force, under every layout, by text, by URL, by both."""

from __future__ import annotations

import random
import re

import pytest

from pipeline.store.fs import Store
from stages.dedup.exact import Exact, ExactHash, same_url
from stages.dedup.fragment import Sizes
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
    """Removed id → (reason, kept, similarity, cluster), in plain Python."""
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
