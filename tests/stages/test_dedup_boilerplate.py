"""Pages of one template stay although most of their words are equal, and copies of a page still go."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from pipeline.store.fs import Store
from stages.dedup import boilerplate
from stages.dedup.boilerplate import Boilerplate, similarity_without
from stages.dedup.fragment import Sizes
from stages.dedup.minhash import MinHash
from stages.stage import SettingsError
from tests.stages.dedup_corpus import edited, vocabulary
from tests.stages.dedup_fragment import Doc, Outcome, run_fragment, write_parts


def trap(seed: int, sources: tuple[str, ...] = ("web",)) -> tuple[list[Doc], dict[str, str]]:
    """Return (documents, kind of each document by id). A text of kind "other" has its own words. Of a "page", more than
    three quarters of the shingles are those of all pages; a "twin" is a page with few other words. A "copy" is one of
    many copies of one text."""
    rng = random.Random(seed)
    names = vocabulary(rng)
    frame, popular = rng.choices(names, k=400), rng.choices(names, k=200)
    texts = [("other", rng.choices(names, k=200)) for _ in range(100)]
    for number in range(40):
        body = rng.choices(names, k=60)
        texts.append(("page", frame + body))
        if number < 10:
            texts.append(("twin", frame + edited(rng, body, 0.02, names)))
    texts += [("copy", edited(rng, popular, 0.01, names)) for _ in range(30)]
    rng.shuffle(texts)
    docs, kinds = [], {}
    for kind, words in texts:
        docs.append(Doc(" ".join(words), rng.choice(sources), f"{rng.getrandbits(128):032x}"))
        kinds[docs[-1].id] = kind
    return docs, kinds


def run(docs: list[Doc], path, part_rows: int = 1000, sizes: Sizes | None = None, **config) -> Outcome:
    barrier, store = MinHash(config), Store(path)
    if sizes is not None:
        barrier.sizes = sizes
    return run_fragment(barrier, write_parts(barrier, docs, store, part_rows=part_rows), store, shuffle=part_rows)


@pytest.mark.parametrize("seed", range(2))
def test_pages_of_a_template_stay_and_copies_go(tmp_path, seed):
    docs, kinds = trap(seed)
    before, after = (Counter(kinds[id] for id in outcome.removed) for outcome in (
        run(docs, tmp_path / "a"), run(docs, tmp_path / "b", boilerplate=0.1)))
    assert before["page"] > 30, "a trap: the pages are similar"
    assert after["page"] + after["twin"] == 10, "of a page and its twin one stays"
    assert before["copy"] == after["copy"] == 29, "a page that is copied often is not taken for a template"
    assert before["other"] == after["other"] == 0


def test_what_is_rare_in_each_source_is_not_left_out(tmp_path):
    docs, _ = trap(3)
    without = run(docs, tmp_path / "a")
    assert run(docs, tmp_path / "b", boilerplate=0.5).removed == without.removed
    rng = random.Random(9)
    names = vocabulary(rng)
    more = [Doc(" ".join(rng.choices(names, k=9)), "web", f"{number:032x}") for number in range(400)]
    assert run(docs + more, tmp_path / "c", boilerplate=0.1).removed == without.removed, "50 of 580 documents"


@pytest.mark.parametrize("rows", [1, 7])
def test_the_layout_changes_no_verdict(tmp_path, rows):
    docs, _ = trap(4, ("web", "wiki"))
    expected = run(docs, tmp_path / "a", boilerplate=0.1)
    small = Sizes(group_rows=3 * rows, bucket_bytes=4000, segment_bytes=1, shingle_cache_bytes=3000)
    got = run(docs, tmp_path / "b", rows, small, boilerplate=0.1)
    assert (got.removed, got.clusters) == (expected.removed, expected.clusters)


@pytest.mark.parametrize(("documents", "bits"), [(1024, 22), (3, 22), (5, 4)])
def test_boilerplate_is_what_counting_finds(monkeypatch, documents, bits):
    """Whatever is counted together, and although 16 counters are shared by 300 shingles."""
    monkeypatch.setattr(boilerplate, "_DOCUMENTS", documents)
    monkeypatch.setattr(boilerplate, "_BITS", bits)
    rng = np.random.default_rng(bits)
    shingles = rng.integers(0, 2**64, 300, dtype=np.uint64)
    sets = [np.unique(rng.choice(shingles[:rng.integers(5, 300)], 40)) for _ in range(50)]
    groups = rng.integers(0, 5, 50)
    sources, rows, share = [0, 1, 0, 1, 1], [90, 60], 0.15
    expected: set[int] = set()
    for source, limit in enumerate(share * n for n in rows):
        counts = Counter(int(value) for group, values in zip(groups, sets) if sources[group] == source
                         for value in values)
        expected |= {value for value, n in counts.items() if n > limit}
    assert expected
    assert Boilerplate(share, sources, rows).of(groups, sets.__getitem__).tolist() == sorted(expected)


def test_boilerplate_is_left_out_unless_little_else_is_left():
    frame = np.arange(100, dtype=np.uint64)
    one, two = (np.r_[frame, np.arange(start, start + 20, dtype=np.uint64)] for start in (200, 210))
    assert similarity_without(frame, one, two) == 10 / 30
    assert similarity_without(frame[:0], one, two) == 110 / 130
    short = np.r_[frame, np.arange(200, 205, dtype=np.uint64)]
    assert similarity_without(frame, one, short) == 105 / 120, "5 of 105 are less than a tenth"
    assert similarity_without(frame, frame, frame) == 1.0


@pytest.mark.parametrize(("more", "words"), [({"verify": None}, "boilerplate needs verify"),
                                             ({"verify": "record"}, "boilerplate needs verify"),
                                             ({"containment": 0.8}, "remove one of the two"),
                                             ({"against": ["old"]}, "remove boilerplate or against")])
def test_boilerplate_is_refused_where_it_means_nothing(more, words):
    with pytest.raises((SettingsError, ValueError), match=words):
        MinHash({"boilerplate": 0.05, **more})
