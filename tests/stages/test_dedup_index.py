"""Crawls that are added one after another: the documents kept are those of one run over all, and no old one goes."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.store.fs import Store
from stages.dedup.exact import Exact
from stages.dedup.fragment import Sizes
from stages.dedup.index import IndexedBarrier
from stages.dedup.index_texts import OldSets
from stages.dedup.minhash import MinHash
from stages.dedup.signature import MinHashSignature
from stages.document import DuplicateId
from stages.text.chunks import utf8
from tests.conftest import alone
from tests.stages.dedup_corpus import corpus, edited, vocabulary
from tests.stages.dedup_fragment import Doc, Outcome, run_fragment, write_parts
from tests.stages.test_dedup_counts import count
from tests.stages.test_dedup_exact import dated
from tests.stages.test_dedup_real import licences

CRAWLS = ("one", "two", "three")
RANKS = {name: number for number, name in enumerate(CRAWLS)}


def added_one_after_another(barrier: IndexedBarrier, docs: list[Doc], path, *, shuffle: int | None = None,
                            part_rows: int = 7) -> dict[str, Outcome]:
    """The outcome of each crawl, compared with the indexes of those before it."""
    store = Store(path)
    out: dict[str, Outcome] = {}
    for name in CRAWLS:
        mine = [doc for doc in docs if doc.dataset == name]
        parts = write_parts(barrier, mine, store, part_rows=part_rows)
        out[name] = run_fragment(barrier, parts, store, shuffle=shuffle, ranks=1,
                                 against=[earlier.index for earlier in out.values()])
    return out


def at_once(barrier: IndexedBarrier, docs: list[Doc], path) -> Outcome:
    return run_fragment(barrier, write_parts(barrier, docs, Store(path), ranks=RANKS), Store(path))


def removals(outcomes: dict[str, Outcome]) -> dict[str, tuple]:
    """Of each removed document the reason, the kept document and the similarity."""
    return {id: verdict[:3] for outcome in outcomes.values() for id, verdict in outcome.removed.items()}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("config", [{}, {"verify": 0.6, "bands": 30, "rows": 4},
                                    {"containment": 0.8, "bands": 40, "rows": 3},
                                    {"verify": 0.5, "bands": 30, "rows": 4, "prefer": ["priority", "newest"]},
                                    {"verify": 0.6, "bands": 40, "rows": 3, "max_comparisons": 2},
                                    {"dialect": "datatrove", "words": "language", "verify": 0.7}])
def test_near_duplicates_of_three_crawls_are_those_of_one_run(tmp_path, config, seed):
    rng = random.Random(seed)
    docs = [dated(rng, doc) for doc in corpus(seed, 30, CRAWLS)]
    whole = at_once(MinHash(config), docs, tmp_path / "whole")
    barrier = MinHash(config)
    barrier.sizes = Sizes(group_rows=20, bucket_bytes=8000, segment_bytes=1, shingle_cache_bytes=3000)
    parts = added_one_after_another(barrier, docs, tmp_path / "parts", shuffle=seed, part_rows=rng.choice([1, 5, 1000]))
    assert removals(parts) == {id: verdict[:3] for id, verdict in whole.removed.items()}
    assert sum(outcome.counters.get("verify", {}).get("removed_for_old", 0) for outcome in parts.values()) >= 3


def crawl_of_copies(rng: random.Random, n: int) -> list[Doc]:
    """Documents of which many have a text, a URL or a DOI of others."""
    return [dated(rng, Doc(f"Text  {rng.randrange(n // 4)} " + "x" * rng.randrange(3), rng.choice(CRAWLS),
                           f"{rng.getrandbits(128):032x}", rng.choice(["", f"http://a.b/{rng.randrange(n // 4)}"]),
                           meta=(("doi", rng.choice([None, rng.randrange(n // 4)])),
                                 ("isbn", rng.choice([None, rng.randrange(n // 4)])))))
            for _ in range(n)]


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("config", [{}, {"by": "both"}, {"by": ["meta.doi", "meta.isbn", "no-space"]},
                                    {"by": "bytes", "prefer": ["priority", "newest"]}])
def test_equal_documents_of_three_crawls_are_those_of_one_run(tmp_path, config, seed):
    rng = random.Random(seed)
    docs = crawl_of_copies(rng, 120)
    whole = at_once(Exact(config), docs, tmp_path / "whole")
    barrier = Exact(config)
    barrier.sizes = Sizes(group_rows=20, bucket_bytes=500, segment_bytes=1)
    parts = added_one_after_another(barrier, docs, tmp_path / "parts", shuffle=seed, part_rows=rng.choice([1, 5, 1000]))
    assert removals(parts) == {id: verdict[:3] for id, verdict in whole.removed.items()}
    old = {doc.name for doc in docs if doc.dataset == "one"}
    assert sum(kept in old for _, kept, _ in removals({"three": parts["three"]}).values()) >= 3


def test_many_old_documents_with_one_band_key_are_chosen_from_as_in_one_run(tmp_path):
    """A template: more kept documents share a key than a new one is compared with."""
    rng = random.Random(5)
    names = vocabulary(rng)
    template = rng.choices(names, k=120)
    docs = [Doc(" ".join(template + rng.choices(names, k=rng.randint(5, 60))), rng.choice(CRAWLS),
                f"{rng.getrandbits(128):032x}") for _ in range(90)]
    docs += [Doc(" ".join(edited(rng, doc.text.split(), 0.01, names)), rng.choice(CRAWLS),
                 f"{rng.getrandbits(128):032x}")
             for doc in docs[:40]]
    config = {"max_comparisons": 3, "verify": 0.9}
    whole = at_once(MinHash(config), docs, tmp_path / "whole")
    parts = added_one_after_another(MinHash(config), docs, tmp_path / "parts")
    assert removals(parts) == {id: verdict[:3] for id, verdict in whole.removed.items()}
    assert whole.counters["verify"]["capped"] > 10


@pytest.mark.parametrize("barrier", [Exact(), MinHash()])
def test_layout_changes_no_verdict_about_new_documents(tmp_path, barrier):
    docs = corpus(8, 25, CRAWLS)
    before = added_one_after_another(barrier, docs, tmp_path / "a", part_rows=1000)
    for rows in (1, 6):
        barrier.sizes = Sizes(group_rows=2 * rows, bucket_bytes=800, segment_bytes=1, one_task_edges=0 if rows == 6
                              else 10**6)
        random.Random(rows).shuffle(docs)
        after = added_one_after_another(barrier, docs, tmp_path / str(rows), part_rows=rows, shuffle=rows)
        for name in CRAWLS:
            assert (after[name].removed, after[name].clusters) == (before[name].removed, before[name].clusters)
        if isinstance(barrier, MinHash):
            assert len(after["three"].results["lookup"]) > 2
            assert bool(after["three"].results["star"]) == (rows == 6)
            assert after["three"].counters["clusters"] == before["three"].counters["clusters"]


@pytest.mark.parametrize("barrier", [Exact(), MinHash()])
def test_an_old_document_among_the_new_ones_is_an_error(tmp_path, barrier):
    docs = corpus(8, 5, ("one",))
    store = Store(tmp_path)
    old = run_fragment(barrier, write_parts(barrier, docs, store), store, ranks=1)
    with pytest.raises(DuplicateId):
        run_fragment(barrier, write_parts(barrier, docs[:1], store), store, against=[old.index])


@pytest.mark.parametrize("barrier", [Exact(by="both"), MinHash()])
def test_crawls_without_documents_change_nothing(tmp_path, barrier):
    docs = corpus(8, 12, ("two",))
    parts = added_one_after_another(barrier, docs, tmp_path / "a")
    alone = run_fragment(barrier, write_parts(barrier, docs, Store(tmp_path / "b")), Store(tmp_path / "b"))
    assert parts["two"].removed == alone.removed
    assert not parts["one"].removed
    assert not parts["three"].removed


def test_only_the_old_texts_that_are_compared_are_read(tmp_path):
    rng = random.Random(1)
    names = vocabulary(rng)
    old = [Doc(" ".join(rng.choices(names, k=200)), "one", f"{rng.getrandbits(128):032x}") for _ in range(200)]
    new = [Doc(" ".join(edited(rng, old[n].text.split(), 0.01, names)), "two", f"{rng.getrandbits(128):032x}")
           for n in (3, 77)] + [Doc("one two three four five six", "two", "f" * 32)]
    parts = added_one_after_another(MinHash(), old + new, tmp_path)
    assert {kept for _, kept, _ in removals(parts).values()} == {old[3].id, old[77].id}
    counters = parts["two"].counters["verify"]
    assert (counters["old_documents"], counters["old_texts"], counters["comparisons"]) == (2, 2, 2)


def test_a_new_document_goes_only_for_one_that_stays(tmp_path):
    """A chain: the second text is like the first one, the third like the second, but not like the first."""
    rng = random.Random(2)
    words = rng.sample(vocabulary(rng), 150)
    old, middle, last = (" ".join(words[start:start + 100]) for start in (0, 9, 18))
    docs = [Doc(old, "one", "1" * 32), Doc(middle + " and so on", "two", "2" * 32), Doc(last, "two", "3" * 32),
            Doc(last + " again", "three", "4" * 32)]
    config = {"verify": 0.75, "bands": 60, "rows": 3}
    whole = at_once(MinHash(config), docs, tmp_path / "whole")
    parts = added_one_after_another(MinHash(config), docs, tmp_path / "parts")
    assert {id: verdict[1] for id, verdict in removals(parts).items()} == {"2" * 32: "1" * 32, "4" * 32: "3" * 32}
    assert removals(parts) == {id: verdict[:3] for id, verdict in whole.removed.items()}
    alone = at_once(MinHash(config), docs[1:3], tmp_path / "alone")
    assert alone.removed["3" * 32][1] == "2" * 32, "without the old document the third text would go for the second"


def test_an_old_id_with_another_text_is_a_document_of_its_own(tmp_path):
    """A page that has changed since the last crawl, and whose id depends only on its place."""
    rng = random.Random(3)
    names = vocabulary(rng)
    first, changed = (" ".join(rng.choices(names, k=80)) for _ in range(2))
    docs = [Doc(first, "one", "a" * 32), Doc(changed, "two", "a" * 32), Doc(changed + " end", "two", "b" * 32)]
    assert not removals(added_one_after_another(Exact(by="both"), docs, tmp_path / "exact"))
    assert removals(added_one_after_another(MinHash(), docs, tmp_path / "minhash")) == {
        "a" * 32: ("minhash", "b" * 32, pytest.approx(0.987, abs=.01))}


def test_counts_of_duplicates_are_those_of_the_new_documents(tmp_path):
    rng = random.Random(4)
    names = vocabulary(rng)
    old, new = (rng.choices(names, k=100) for _ in range(2))
    docs = [Doc(" ".join(old), "one", "1" * 32)]
    docs += [Doc(" ".join([*text, *extra]), "two", f"{number:032x}") for number, (text, extra) in enumerate(
        [(old, ["x"]), (old, ["y"]), (new, ["a", "b", "c"]), (new, ["a"]), (new, ["b"])], 2)]
    barrier, store = MinHash(), Store(tmp_path)
    first = run_fragment(barrier, write_parts(barrier, docs[:1], store), store, ranks=1)
    parts = write_parts(barrier, docs[1:], store, part_rows=2)
    second = run_fragment(barrier, parts, store, against=[first.index])
    assert {id: verdict[1][-1] for id, verdict in second.removed.items()} == {
        f"{2:032x}": "1", f"{3:032x}": "1", f"{5:032x}": "4", f"{6:032x}": "4"}
    _, more = count(parts, store, second.slices, barrier.rounds, Sizes())
    assert more == {f"{4:032x}": 2}, "what goes for an old document counts for none of the new ones"


def test_small_sets_of_old_documents_are_limited_by_what_their_objects_take(monkeypatch):
    monkeypatch.setattr(OldSets, "_text", lambda self, ref, document: (utf8("one two three four five"), ""))
    old = OldSets(SimpleNamespace(), MinHashSignature(), 10_000)
    for offset in [*range(100), 99, 0]:
        assert len(old.get({"content": "x"}, {"offset": offset, "number": 0})) == 1
    assert old.read == 101, "800 bytes of values, of which the last ones are held and the first ones are not"


def measured_peaks(folder: Path) -> dict[int, int]:
    """Return the most bytes that Python allocates while 20 documents are compared with an index of 400 and of 4,000.
    What is imported and compiled at first use takes memory as well; it is measured with an index of 20."""
    rng = random.Random(6)
    names = vocabulary(rng)
    new = [Doc(" ".join(rng.choices(names, k=60)), "two", f"{rng.getrandbits(128):032x}") for _ in range(20)]
    peaks = {}
    for n in (20, 400, 4000):
        barrier, store = MinHash(), Store(folder / str(n))
        old = [Doc(doc.text + " end", "one", f"{rng.getrandbits(128):032x}") for doc in new]
        old += [Doc(" ".join(rng.choices(names, k=60)), "one", f"{rng.getrandbits(128):032x}") for _ in range(n)]
        index = run_fragment(barrier, write_parts(barrier, old, store, part_rows=1000, row_group=100), store,
                             ranks=1).index
        parts = write_parts(barrier, new, store)
        tracemalloc.start()
        outcome = run_fragment(barrier, parts, store, against=[index])
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(outcome.removed) == 20
    return peaks


def test_memory_does_not_grow_with_the_index(tmp_path):
    peaks = alone(measured_peaks, tmp_path)
    keys = 14 * 16 * 4000                                    # bytes of the keys of the larger index alone
    assert peaks[4000] - peaks[400] < keys / 2, peaks


@pytest.mark.parametrize("config", [{}, {"recall": 0.99, "containment": 0.8}, {"recall": 0.99, "max_comparisons": 8}])
def test_licences_in_three_crawls_are_kept_as_by_one_run(tmp_path, config):
    rng = random.Random(5)
    docs = [Doc(doc.text, rng.choice(CRAWLS), doc.id) for doc in licences()]
    whole = at_once(MinHash(config), docs, tmp_path / "whole")
    parts = added_one_after_another(MinHash(config), docs, tmp_path / "parts", part_rows=300)
    assert removals(parts) == {id: verdict[:3] for id, verdict in whole.removed.items()}
    assert sum(parts[name].counters["verify"]["removed_for_old"] for name in ("two", "three")) > 1000
