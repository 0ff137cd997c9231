"""Near-duplicate removal as a whole: compared with brute force, for every division into parts, on chains of similar
documents, templates and priorities."""

from __future__ import annotations

import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.store.fs import Store
from stages.dedup.explain import explain
from stages.dedup.fragment import Sizes, groups
from stages.dedup.minhash import MinHash
from stages.dedup.signature import MinHashSignature
from stages.document import DuplicateId
from tests.stages.dedup_corpus import corpus, edited, expected, vocabulary
from tests.stages.dedup_fragment import Doc, run_fragment, write_parts
from tests.stages.test_dedup_exact import PREFERENCES, dated, wanted

RANKS = {"wiki": 0, "web": 1, "books": 2}


def outcome(barrier, docs, path, *, shuffle=None, ranks=None, **layout):
    store = Store(path)
    parts = write_parts(barrier, docs, store, ranks=RANKS if ranks is None else ranks, **layout)
    return run_fragment(barrier, parts, store, shuffle=shuffle)


@pytest.mark.parametrize("config", [{}, {"verify": 0.9}, {"verify": 0.5, "bands": 20, "rows": 5}, {"verify": None},
                                    {"verify": 0, "ngram": 3}, {"dialect": "datatrove", "verify": None},
                                    {"verify": "record"}, {"containment": 0.8, "bands": 40, "rows": 3},
                                    {"recall": 0.99, "verify": 0.7}, {"dialect": "datasketch", "recall": 0.9},
                                    {"shingles": "characters"}, {"shingles": "characters", "ngram": 9}])
def test_equals_brute_force(tmp_path, config):
    docs = corpus(7, 40)
    barrier = MinHash(config)
    got = outcome(barrier, docs, tmp_path)
    removed, clusters = expected(barrier, docs, RANKS)
    assert got.removed == removed
    assert got.clusters == clusters
    assert len(removed) >= 5
    gone = got.counters["slices"]["removed"]
    assert sum(sum(n.values()) for n in gone.values()) == len(removed) == got.counters["verify"]["removed"]
    assert got.counters["clusters"]["candidates"] == len(clusters)
    assert got.counters["clusters"]["clusters"] == len(set(clusters.values()))


@pytest.mark.parametrize("prefer", [p for p in PREFERENCES if p])
def test_the_preferred_document_survives(tmp_path, prefer):
    rng = random.Random(3)
    docs = [dated(rng, d) for d in corpus(21, 25)]
    barrier = MinHash(prefer=prefer, verify=0.6, bands=30, rows=4)
    barrier.sizes = Sizes(group_rows=20, bucket_bytes=5000, segment_bytes=1)
    got = outcome(barrier, docs, tmp_path, shuffle=2, part_rows=6)
    removed, clusters = expected(barrier, docs, RANKS, wanted(prefer, RANKS))
    assert (got.removed, got.clusters) == (removed, clusters)
    assert len(removed) > 10
    assert removed != expected(barrier, docs, RANKS)[0] or prefer == ("priority", "longest")


def test_a_long_text_never_goes_for_a_short_one_that_it_contains(tmp_path):
    """Whatever the priority: its other words would be lost. The short one goes, if the long one is kept first."""
    names = vocabulary(random.Random(2))
    long = random.Random(3).choices(names, k=300)
    inside = long[20:200]
    docs = [Doc(" ".join(long), "web", "a" * 32), Doc(" ".join(inside), "wiki", "b" * 32)]
    config = {"containment": 0.9, "bands": 60, "rows": 2}
    assert not outcome(MinHash(config), docs, tmp_path / "1").removed                  # wiki comes before web
    contained = outcome(MinHash(config), docs, tmp_path / "2", ranks={})
    assert set(contained.removed) == {"b" * 32} and contained.removed["b" * 32][0] == "minhash_contained"
    assert contained.counters["slices"]["removed"]["wiki"] == {"minhash": 0, "minhash_contained": 1}
    assert not outcome(MinHash(bands=60, rows=2), docs, tmp_path / "3", ranks={}).removed


def test_a_capped_search_with_other_preferences_compares_texts_of_similar_length(tmp_path):
    rng = random.Random(11)
    names = vocabulary(rng)
    template = rng.choices(names, k=120)
    docs = [dated(rng, Doc(" ".join(template + rng.choices(names, k=rng.randint(5, 60))), rng.choice(list(RANKS)),
                           f"{rng.getrandbits(128):032x}")) for _ in range(60)]
    barrier = MinHash(max_comparisons=3, prefer=["newest", "priority"])
    before = outcome(barrier, docs, tmp_path / "a")
    barrier.sizes = Sizes(group_rows=9, bucket_bytes=8000, segment_bytes=1)
    after = outcome(barrier, docs[::-1], tmp_path / "b", part_rows=4, shuffle=1)
    assert before.removed == after.removed
    assert before.counters["verify"]["capped"] > 0


def test_shingles_of_tokens_are_those_of_a_given_tokenizer(tmp_path):
    """With one token for every word, token n-grams decide as word n-grams do. The tokenizer's content is in the key."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    docs = corpus(7, 25)
    words = {w: n for n, w in enumerate(dict.fromkeys(["<eos>", "<unk>", *(w for d in docs for w in d.text.split())]))}
    paths = []
    for name in ("a.json", "b.json", "c.json"):
        made = Tokenizer(models.WordLevel(words if name != "c.json" else {**words, "more": len(words)}, "<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens(["<eos>", "<unk>"])
        made.save(str(tmp_path / name))
        paths.append(str(tmp_path / name))
    a, b, c = (MinHash(shingles="tokens", tokenizer=path, bands=40, rows=4) for path in paths)
    assert a.key() == b.key() != c.key()
    got = outcome(a, docs, tmp_path / "store")
    truth = {i: r[2] for i, r in expected(MinHash(bands=40, rows=4), docs, RANKS)[0].items()}
    assert len(got.removed) > 10
    assert {i: truth.get(i, r[2]) for i, r in got.removed.items()} == {i: r[2] for i, r in got.removed.items()}
    (tmp_path / "bad.json").write_text("{}")
    assert "tokenizer.json" in MinHash(shingles="tokens", tokenizer=str(tmp_path / "bad.json")).problems()["tokenizer"]
    assert not a.problems()
    moved = run_fragment(b, write_parts(b, docs, Store(tmp_path / "other"), ranks=RANKS), Store(tmp_path / "other"))
    assert moved.removed == got.removed


def test_layout_changes_nothing(tmp_path):
    """Part size, group size, number of buckets, order of documents, order of completion, chunking, cache: all free."""
    docs = corpus(8, 18)
    barrier = MinHash(verify=0.7)
    before = outcome(barrier, docs, tmp_path / "a")
    assert len(before.removed) > 3
    for rows in (1, 7, 1000):
        random.Random(rows).shuffle(docs)
        barrier.sizes = Sizes(group_rows=2 * rows, bucket_bytes=3000, segment_bytes=1, shingle_chunk_bytes=2000,
                              shingle_cache_bytes=1500)
        after = outcome(barrier, docs, tmp_path / str(rows), part_rows=rows, row_group=2, shuffle=rows)
        assert (after.removed, after.clusters) == (before.removed, before.clusters)
        assert len(after.results["links"]) > 2
        assert len(after.results["verify"]) > 2
        assert len(after.results["bands"]) > (2 if rows < 1000 else 0)


def test_clusters_by_rounds_are_those_of_one_task(tmp_path):
    """Above `one_task_edges` clusters come from large-star and small-star: members, verdicts, slices are the same."""
    docs = corpus(19, 20)
    barrier = MinHash(verify=0.7)
    before = outcome(barrier, docs, tmp_path / "a", part_rows=7)
    assert not before.results["star"]
    assert len(before.removed) > 10
    barrier.sizes = Sizes(group_rows=20, bucket_bytes=1000, segment_bytes=1, one_task_edges=0, spread_bytes=300)
    for part_rows, shuffle in ((7, None), (5, 2)):
        after = outcome(barrier, docs, tmp_path / str(part_rows), part_rows=part_rows, shuffle=shuffle)
        assert len(after.results["spread"]) > 1 and len(after.results["clusters"]) > 1
        assert (after.removed, after.clusters) == (before.removed, before.clusters)
        if part_rows == 7:
            assert after.content == before.content
        for name in ("candidates", "clusters", "max_cluster", "cluster_sizes"):
            assert after.counters["clusters"][name] == before.counters["clusters"][name]


def test_slices_do_not_depend_on_tasks(tmp_path):
    """The content of every slice is the same for other groups, buckets and completion orders: only data decides."""
    docs = corpus(9, 15)
    barrier = MinHash()
    before = outcome(barrier, docs, tmp_path / "a", part_rows=6)
    barrier.sizes = Sizes(group_rows=7, bucket_bytes=5000, segment_bytes=1)
    after = outcome(barrier, docs, tmp_path / "b", part_rows=6, shuffle=3)
    assert after.content == before.content
    assert any(before.content)


def test_new_part_disturbs_only_slices_that_change(tmp_path):
    docs = corpus(10, 40, ("web",))
    barrier = MinHash()
    rng = random.Random(0)
    twin = Doc(docs[3].text + " and more", "web", f"{rng.getrandbits(128):032x}")
    before = outcome(barrier, docs, tmp_path / "a", part_rows=8)
    after = outcome(barrier, [*docs, twin], tmp_path / "b", part_rows=8)
    changed = [i for i, (a, b) in enumerate(zip(before.content, after.content)) if a != b]
    assert 0 in changed
    assert len(changed) < len(before.content) / 2


def test_what_becomes_stale(tmp_path):
    """Another threshold reruns only the verdicts; a new part leaves the band keys of other groups as they were."""
    def small(**config) -> MinHash:
        barrier = MinHash(**config)
        barrier.sizes = Sizes(group_rows=10)
        return barrier

    docs = corpus(15, 20)
    store = Store(tmp_path)
    parts = write_parts(MinHash(), docs, store, part_rows=5, ranks=RANKS)
    before = run_fragment(small(verify=0.75), parts, store)
    after = run_fragment(small(verify=0.9, max_comparisons=9), parts, store)
    assert [w for w in before.keys if before.keys[w] != after.keys[w]] == ["verify", "slices"]
    assert set(after.removed) < set(before.removed)
    other = run_fragment(small(ngram=4), parts, store)
    assert other.keys["shingles"] != before.keys["shingles"]
    extra = write_parts(MinHash(), corpus(16, 8, ("more",)), store, part_rows=100)
    more = run_fragment(small(), [*parts, *extra], store)
    assert set(before.keys["bands"]) < set(more.keys["bands"])


def test_object_storage_gives_the_same(tmp_path):
    barrier = MinHash()
    barrier.sizes = Sizes(group_rows=20, bucket_bytes=5000, segment_bytes=1)
    local, remote = Store(tmp_path), Store(f"memory://{tmp_path.name}")
    parts = write_parts(MinHash(), corpus(17, 25), local, ranks=RANKS)
    for path in local.list("in"):
        assert remote.put_absent(path, local.read(path))
    before, after = run_fragment(barrier, parts, local), run_fragment(barrier, parts, remote)
    assert after.removed == before.removed
    assert after.content == before.content
    assert len(after.removed) > 5


def test_priority_then_length_then_id(tmp_path):
    names = vocabulary(random.Random(2))
    words = random.Random(3).choices(names, k=200)
    long, short = " ".join(words), " ".join(words[:195])
    docs = [Doc(long, "web", "a" * 32), Doc(short, "wiki", "b" * 32), Doc(short, "wiki", "c" * 32)]
    assert {i: r[1] for i, r in outcome(MinHash(), docs, tmp_path / "1").removed.items()} == {
        "a" * 32: "b" * 32, "c" * 32: "b" * 32}
    same = outcome(MinHash(), docs, tmp_path / "2", ranks={})
    assert {i: r[1] for i, r in same.removed.items()} == {"b" * 32: "a" * 32, "c" * 32: "a" * 32}


def test_chain_is_not_closed(tmp_path):
    """A ~ B ~ C but not A ~ C: B goes in favour of A, and C stays, for nothing like it was kept."""
    rng = random.Random(5)
    names = vocabulary(rng)
    a = rng.choices(names, k=400)
    b = [*rng.choices(names, k=1), *a[45:]]
    c = [*rng.choices(names, k=1), *b[46:]]
    docs = [Doc(" ".join(w), "web", f"{n:032x}") for n, w in enumerate([a, b, c])]
    with_lsh_alone = outcome(MinHash(verify=None, bands=60, rows=3), docs, tmp_path / "a")
    assert len(with_lsh_alone.removed) == 2
    got = outcome(MinHash(verify=0.8, bands=60, rows=3), docs, tmp_path / "b")
    assert {i: r[1] for i, r in got.removed.items()} == {f"{1:032x}": f"{0:032x}"}
    assert set(got.clusters.values()) == {f"{0:032x}"}


def test_template_does_not_delete_its_pages(tmp_path):
    """Two hundred pages that share a long template and differ in a third of their text form one cluster and all stay;
    true copies among them go. Few comparisons a document suffice."""
    rng = random.Random(6)
    names = vocabulary(rng)
    template = rng.choices(names, k=320)
    bodies = [rng.choices(names, k=100) for _ in range(200)]
    docs = [Doc(" ".join(template + body), "web", f"{rng.getrandbits(128):032x}") for body in bodies]
    copies = [Doc(" ".join(template + edited(rng, body, 0.01, names)), "web", f"{rng.getrandbits(128):032x}")
              for body in bodies[::10]]
    everything = [*docs, *copies]
    blind = outcome(MinHash(verify=None), everything, tmp_path / "a", part_rows=50)
    assert blind.counters["clusters"]["max_cluster"] > 150
    assert len(blind.removed) > 150
    got = outcome(MinHash(), everything, tmp_path / "b", part_rows=50)
    assert 18 <= len(got.removed) <= 20
    capped = outcome(MinHash(max_comparisons=8), everything, tmp_path / "c", part_rows=50)
    assert capped.counters["verify"]["comparisons"] < len(everything) * 9
    assert capped.counters["verify"]["capped"] > 0
    assert set(capped.removed) <= set(got.removed)
    assert len(capped.removed) >= 15


def test_kept_documents_that_resemble_each_other_know_it(tmp_path):
    """Of documents with six tenths of their shingles in common none goes at `verify: 0.75`; each names the other."""
    words, others = ([head + chr(97 + i // 26) + chr(97 + i % 26) for i in range(400)] for head in "wx")
    texts = (words, words[:300] + others[:90], others)
    docs = [Doc(" ".join(text), id=f"{n:032x}") for n, text in enumerate(texts)]
    config = {"bands": 64, "rows": 2}
    out = outcome(MinHash(**config), docs, tmp_path / "a", part_rows=1)
    assert not out.removed
    near = {}
    for number, ref in enumerate(out.slices):
        for row in pq.read_table(Store(tmp_path / "a").at(ref["$ref"])).to_pylist() if ref else ():
            near[docs[number].name] = {n["id"]: n["similarity"] for n in row["near"] or ()}
    similarity = 296 / (396 + 386 - 296)
    a, b, _ = (d.name for d in docs)
    assert near == {a: {b: pytest.approx(similarity)}, b: {a: pytest.approx(similarity)}}
    again = outcome(MinHash(**config), docs, tmp_path / "b", part_rows=3, shuffle=1)
    assert [n for ref in again.slices if ref for n in pq.read_table(Store(tmp_path / "b").at(ref["$ref"]))["near"]
            .to_pylist() if n] == [[{"id": b, "similarity": near[a][b]}], [{"id": a, "similarity": near[b][a]}]]


def test_cap_does_not_depend_on_layout(tmp_path):
    rng = random.Random(11)
    names = vocabulary(rng)
    template = rng.choices(names, k=120)
    docs = [Doc(" ".join(template + rng.choices(names, k=rng.randint(5, 60))), rng.choice(list(RANKS)),
                f"{rng.getrandbits(128):032x}") for _ in range(60)]
    barrier = MinHash(max_comparisons=3)
    before = outcome(barrier, docs, tmp_path / "a")
    barrier.sizes = Sizes(group_rows=9, bucket_bytes=8000, segment_bytes=1)
    after = outcome(barrier, docs[::-1], tmp_path / "b", part_rows=4, shuffle=1)
    assert before.removed == after.removed
    assert before.counters["verify"]["capped"] > 0


def test_short_and_empty_texts_are_left_alone(tmp_path):
    docs = [Doc(t, "web", f"{n:032x}") for n, t in enumerate(["", "", "one two", "one two", "...", "a b c d e",
                                                              "a b c d e"])]
    got = outcome(MinHash(), docs, tmp_path)
    assert set(got.removed) == {f"{6:032x}"}
    assert got.counters["bands"]["signed"] == 2


def test_nothing_alike_ends_early(tmp_path):
    rng = random.Random(12)
    names = vocabulary(rng)
    docs = [Doc(" ".join(rng.choices(names, k=80)), "web", f"{n:032x}") for n in range(30)]
    got = outcome(MinHash(), docs, tmp_path)
    assert got.slices == [None, None, None]
    assert not got.results["clusters"]
    assert list(MinHash().slices([], {name: [] for name in got.results})) == []


LINES = {"zho_Hans": "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜金生丽水玉出昆冈",
         "ja": "いろはにほへとちりぬるをわかよたれそつねならむうゐのおくやまけふこえてあさきゆめみしゑひもせす",
         "tha": "วันนี้อากาศดีมากเราไปเดินเล่นที่สวนสาธารณะกันเถอะแล้วค่อยกลับบ้านกินข้าวเย็นด้วยกันทุกคน",
         "eng_Latn": "you cannot know what they dont say for im gonna be late and its not ill that were all there",
         "deu_Latn": "im haus am see war es am abend still und niemand ging mehr vor die tuer denn es regnete wie nie"}


@pytest.mark.parametrize("language", sorted(LINES))
def test_near_duplicates_are_found_by_the_words_of_their_language(tmp_path, language):
    """A page that says the same with another last line; English rules see one word a line where nothing parts them."""
    rng = random.Random(language)
    parted = " " if " " in LINES[language] else ""
    pool = LINES[language].split() if parted else list(LINES[language])
    lines = [parted.join(rng.choices(pool, k=40)) for _ in range(12)]
    pages = ["。".join(lines), "。".join([*lines[:-1], lines[-1] + parted + pool[0], parted.join(pool[:9])]),
             "。".join(parted.join(rng.choices(pool, k=40)) for _ in range(12))]
    docs = [Doc(page, id=f"{i:032x}", language=language) for i, page in enumerate(pages)]
    barrier = MinHash(dialect="datatrove", hash="xxhash", words="language", verify=0.75)
    found = outcome(barrier, docs, tmp_path)
    assert set(found.removed) == {docs[0].name} and found.removed[docs[0].name][1] == docs[1].name
    stage = MinHashSignature(barrier.prepare()[1])
    a, b = (set(stage.shingles(page, language)[0].tolist()) for page in pages[:2])
    assert found.removed[docs[0].name][2] == len(a & b) / len(a | b)
    said = explain(pages[0], pages[1], barrier.config.model_dump(), languages=(language, language))
    assert said.confirmed and said.similarity == found.removed[docs[0].name][2]


def test_same_id_twice_is_an_error(tmp_path):
    text = " ".join(vocabulary(random.Random(1))[:60])
    with pytest.raises(DuplicateId, match="0" * 32):
        outcome(MinHash(), [Doc(text, "web", "0" * 32), Doc(text, "wiki", "0" * 32)], tmp_path)


def test_part_without_signatures_is_an_error(tmp_path):
    store = Store(tmp_path)
    part = write_parts(MinHash(), corpus(1, 3), store)[0]
    bare = type(part)(part.key, part.dataset, 0, part.rows, part.bytes, part.text, None)
    with pytest.raises(ValueError, match="no side table"):
        MinHash().waves([bare])


def test_groups_are_runs_of_one_dataset(tmp_path):
    store = Store(tmp_path)
    parts = write_parts(MinHash(), corpus(2, 30), store, part_rows=3, ranks=RANKS)
    plan = groups(parts, Sizes(group_rows=12))
    assert [p for g in plan for p in g.parts] == parts
    assert [g.first for g in plan] == np.cumsum([0] + [len(g.parts) for g in plan[:-1]]).tolist()
    assert all(len({p.dataset for p in g.parts}) == 1 and g.rows <= 12 for g in plan)
    # a part more at the front leaves most later groups as they were
    first = parts[0]
    new = type(first)("new", first.dataset, first.rank, 3, 100, first.text, first.side)
    more = groups([new, *parts], Sizes(group_rows=12))
    common = {tuple(p.key for p in g.parts) for g in plan} & {tuple(p.key for p in g.parts) for g in more}
    assert len(common) >= len(plan) / 2


def test_lsh_alone_removes_what_datatrove_removes(tmp_path):
    """datatrove's own stages 1-3 on the same documents: the same clusters, in each all but one document removed.
    (Which one survives is arbitrary there: the last root of a union by size over file order.)"""
    from datatrove.data import Document
    from datatrove.pipeline.dedup import minhash as theirs
    from datatrove.utils.hashing import HashConfig, create_hash_func

    docs = corpus(13, 40, ("web",))
    config = theirs.MinhashConfig(hash_config=HashConfig(hash_fc="xxhash", precision=64))
    stage = theirs.MinhashDedupSignature(str(tmp_path / "sigs"), config)
    function_of_bytes = create_hash_func(config.hash_config, bytes)     # xxhash 4 no longer takes the str it passes
    stage._hash_func = lambda text: function_of_bytes(text.encode())
    with np.errstate(over="ignore"):
        stage.run([Document(text=d.text, id=d.id) for d in docs])
    for band in range(14):
        theirs.MinhashDedupBuckets(str(tmp_path / "sigs"), str(tmp_path / "buckets"), config=config).run(None, band, 14)
    theirs.MinhashDedupCluster(str(tmp_path / "buckets"), str(tmp_path / "remove"), config=config).run()
    gone = {docs[i].id for i in np.fromfile(tmp_path / "remove" / "000000.remove", "<u4")}

    got = outcome(MinHash(dialect="datatrove", hash="xxhash", verify=None), docs, tmp_path / "ours")
    assert len(got.removed) == len(gone) > 20
    members: dict[str, list[str]] = {}
    for i, name in got.clusters.items():
        members.setdefault(name, []).append(i)
    assert gone <= set(got.clusters)
    assert all(len([i for i in ids if i not in gone]) == 1 for ids in members.values())


def test_defaults_that_came_later_enter_no_key():
    """Stores that were written before these settings stay valid."""
    later = {"shingles", "tokenizer", "prefer", "containment", "recall"}
    assert later.isdisjoint(MinHash().prepare()[1])
    assert MinHash(prefer=["priority", "longest"], containment=None).key() == MinHash().key()
    assert MinHash(recall=0.95).prepare()[1] == MinHash(bands=16, rows=6).prepare()[1]
    assert MinHash(recall="95e-2").prepare()[1] == MinHash(bands=16, rows=6).prepare()[1]     # a text to YAML


@pytest.mark.parametrize("bad", [
    {"verify": 1.5}, {"bands": 0}, {"verfy": 0.5}, {"dialect": "other"}, {"verify": "recorded"}, {"containment": 0},
    {"recall": 0.99, "bands": 14}, {"recall": 0.9, "verify": None}, {"recall": 0.999999, "verify": 0.01},
    {"containment": 0.8, "verify": None}, {"containment": 0.8, "verify": "record"}, {"prefer": ["shortest"]},
    {"shingles": "tokens"}, {"tokenizer": "t.json"}, {"shingles": "characters", "dialect": "datatrove"},
    {"words": "language", "dialect": "datasketch"}])
def test_config_is_checked(bad):
    with pytest.raises(ValueError):
        MinHash(bad)
