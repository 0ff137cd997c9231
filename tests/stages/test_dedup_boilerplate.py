"""Pages of one template stay although most of their words are equal, and copies of a page still go."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from pipeline.store.fs import Store
from stages.dedup.boilerplate import MEMORY_MB, Boilerplate, Remainders, boilerplate_limits, frequent_shingles
from stages.dedup.explain import explain
from stages.dedup.fragment import PartGroup, Sizes
from stages.dedup.minhash import MinHash
from stages.dedup.sets import jaccard
from stages.stage import SettingsError
from tests.conftest import alone
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
    small = Sizes(group_rows=max(8, 3 * rows), bucket_bytes=40_000, segment_bytes=1, shingle_cache_bytes=3000)
    got = run(docs, tmp_path / "b", rows, small, boilerplate=0.1)
    assert (got.removed, got.clusters) == (expected.removed, expected.clusters)


def test_near_duplicates_of_a_small_input_go_as_without_boilerplate(tmp_path):
    """5 % of 38 documents are one: what a text shares with its copy would be boilerplate."""
    rng = random.Random(6)
    names = vocabulary(rng)
    originals = [rng.choices(names, k=200) for _ in range(19)]
    docs = [Doc(" ".join(words), "web", f"{rng.getrandbits(128):032x}")
            for words in (*originals, *(edited(rng, words, 0.02, names) for words in originals))]
    without = run(docs, tmp_path / "a")
    assert len(without.removed) > 10
    assert run(docs, tmp_path / "b", boilerplate=0.05).removed == without.removed


def counted(sets: list[np.ndarray], groups: np.ndarray, sources: list[int], limits: list[int]) -> list[int]:
    """Return the boilerplate of shingle sets as a plain count finds it."""
    boilerplate: set[int] = set()
    for source, limit in enumerate(limits):
        counts = Counter(int(value) for group, values in zip(groups, sets) if sources[group] == source
                         for value in values)
        boilerplate |= {value for value, n in counts.items() if n > limit}
    return sorted(boilerplate)


def overlapping_sets(seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (50 shingle sets that share many of 300 shingles, the number of the group of each)."""
    rng = np.random.default_rng(seed)
    shingles = rng.integers(0, 2**64, 300, dtype=np.uint64)
    sets = [np.unique(rng.choice(shingles[:rng.integers(5, 300)], 40)) for _ in range(50)]
    return sets, rng.integers(0, 5, 50)


@pytest.mark.parametrize("seed", range(3))
def test_boilerplate_is_what_counting_finds(seed):
    sets, groups = overlapping_sets(seed)
    sources, limits = [0, 1, 0, 1, 1], [13, 9]
    expected = counted(sets, groups, sources, limits)
    assert expected
    assert Boilerplate(sources, limits).of(groups, sets.__getitem__).tolist() == expected


@pytest.mark.parametrize(("batch", "bits"), [(100, 21), (1, 4)])
@pytest.mark.parametrize("limit", [6, 9])
def test_frequent_shingles_are_what_counting_finds(batch, bits, limit):
    """Whatever is counted together, and although 16 counters are shared by 300 shingles."""
    sets, _ = overlapping_sets(bits)
    some = list(range(0, 50, 2))
    expected = counted([sets[i] for i in some], np.zeros(len(some), int), [0], [limit])
    assert expected
    assert frequent_shingles(some, sets.__getitem__, limit, batch=batch, bits=bits).tolist() == expected


def test_more_shingles_than_are_counted_exactly_hide_none_that_is_frequent():
    """One pair of counters for all shingles, so that all are counted exactly, of which there is room for 60."""
    rng = np.random.default_rng(7)
    frame = rng.integers(0, 2**64, 20, dtype=np.uint64)
    some = rng.integers(0, 2**64, 3, dtype=np.uint64)                     # in 12 of 200 documents: at most the limit
    sets = [np.unique(np.r_[frame, some[:3 if i < 12 else 0], rng.integers(0, 2**64, 30, dtype=np.uint64)])
            for i in range(200)]
    frequent = frequent_shingles(range(200), sets.__getitem__, 12, bits=1, most=60, batch=50)
    assert frequent.tolist() == sorted(frame.tolist())


def test_the_limit_is_a_share_of_each_input_and_at_least_ten_documents():
    parts = [PartGroup((), 0, 1, "web", 0, rows, 0) for rows in (300, 500)] + [PartGroup((), 2, 1, "wiki", 1, 90, 0)]
    assert boilerplate_limits(0.05, parts) == {"sources": [0, 0, 1], "limits": [40, 10]}


def counting_peak() -> tuple[list[int], int]:
    """Return (how many of the shingles of a template are found, how many others are, peak of the memory in bytes) for
    1,000 pages of a template. Each page has 20,000 shingles of its own: a third of these share a counter that is beyond
    the limit, which are more than can be counted exactly."""
    frame = np.random.default_rng(8).integers(0, 2**64, 2000, dtype=np.uint64)

    def page(number: int) -> np.ndarray:
        return np.sort(np.r_[frame, np.random.default_rng(number).integers(0, 2**64, 20_000, dtype=np.uint64)])

    jaccard(frame, frame)                    # compiles, which takes memory as well
    tracemalloc.start()
    values = Boilerplate([0], [10]).of(np.zeros(1000, int), page)
    remainders = Remainders(values, page)
    for number in range(1, 300):
        remainders.similarity(number - 1, number)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return [int(np.isin(frame, values).sum()), int((~np.isin(values, frame)).sum())], peak


@pytest.mark.slow
def test_memory_is_bounded_as_declared():
    counts, peak = alone(counting_peak)
    assert counts == [2000, 0]
    assert 40 << 20 < peak < MEMORY_MB << 20


def test_a_task_that_compares_texts_declares_the_memory_of_boilerplate(tmp_path):
    docs, _ = trap(2)
    memory = []
    for number, config in enumerate(({}, {"boilerplate": 0.1})):
        barrier, store = MinHash(config), Store(tmp_path / str(number))
        parts = write_parts(barrier, docs, store, part_rows=1000)
        results = run_fragment(barrier, parts, store).results
        [verify] = [wave for wave in barrier.waves(parts) if wave.name == "verify"]
        memory.append([draft.memory_mb for draft in verify.tasks(results)])
    assert memory[1] == [mb + MEMORY_MB for mb in memory[0]] != []


def test_boilerplate_is_left_out_unless_little_else_is_left():
    frame = np.arange(100, dtype=np.uint64)
    one, two = (np.r_[frame, np.arange(start, start + 20, dtype=np.uint64)] for start in (200, 210))
    short = np.r_[frame, np.arange(200, 205, dtype=np.uint64)]
    remainders = Remainders(frame, [one, two, short, frame].__getitem__)
    assert remainders.similarity(0, 1) == 10 / 30
    assert remainders.similarity(0, 2) == 105 / 120, "5 of 105 are less than a tenth"
    assert remainders.similarity(3, 3) == 1.0


def test_pages_of_boilerplate_alone_do_not_stay_in_memory():
    frame = np.arange(100, dtype=np.uint64)
    fetched: Counter[int] = Counter()

    def page(number: int) -> np.ndarray:
        fetched[number] += 1
        return frame

    remainders = Remainders(frame, page, kept_bytes=4000)
    for number in range(20):
        remainders.similarity(0, number)
        remainders.similarity(number, 0)
    before = fetched[1]
    remainders.similarity(1, 0)
    assert fetched[1] == before + 2, "read once to find what is left, and once because less than a tenth is left"


def test_what_is_left_of_a_page_is_computed_once_for_all_its_comparisons():
    rng = np.random.default_rng(1)
    frame = np.sort(rng.integers(0, 2**64, 100, dtype=np.uint64))
    pages = [np.sort(np.r_[frame, rng.integers(0, 2**64, 50, dtype=np.uint64)]) for _ in range(20)]
    fetched: Counter[int] = Counter()

    def page(number: int) -> np.ndarray:
        fetched[number] += 1
        return pages[number]

    def compare(remainders: Remainders) -> list[float]:
        return [remainders.similarity(i, j) for i in range(20) for j in range(i)]

    expected = compare(Remainders(frame, page))
    assert set(fetched.values()) == {1}
    fetched.clear()
    two_pages = Remainders(frame, page, kept_bytes=2000)                   # of 400 bytes each, and their objects
    assert compare(two_pages) == expected
    assert max(fetched.values()) > 1


def test_an_explanation_goes_by_the_similarity_that_the_run_noted(tmp_path):
    """Of two pages of a template most shingles are common, but only the run knows which are boilerplate."""
    docs, kinds = trap(5)
    texts = {doc.id: doc.text for doc in docs}
    pages = [id for id in texts if kinds[id] == "page"]
    removed = {id: (kept, similarity) for id, (_, kept, similarity, _) in
               run(docs, tmp_path, boilerplate=0.1).removed.items() if kinds[id] in ("page", "twin")}
    assert removed
    config = {"boilerplate": 0.1}
    for id, (kept, similarity) in removed.items():
        assert explain(texts[id], texts[kept], config, recorded=similarity).confirmed is True
    alike = explain(texts[pages[0]], texts[pages[1]], config)
    assert alike.similarity > 0.75 and alike.confirmed is None
    assert explain(texts[pages[0]], texts[pages[1]], config, recorded=0.1).confirmed is False


@pytest.mark.parametrize(("more", "words"), [({"verify": None}, "boilerplate needs verify"),
                                             ({"verify": "record"}, "boilerplate needs verify"),
                                             ({"containment": 0.8}, "remove one of the two"),
                                             ({"against": ["old"]}, "remove boilerplate or against")])
def test_boilerplate_is_refused_where_it_means_nothing(more, words):
    with pytest.raises((SettingsError, ValueError), match=words):
        MinHash({"boilerplate": 0.05, **more})
