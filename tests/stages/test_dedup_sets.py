"""Shingle sets computed for many texts at once, and small clusters decided by a kernel, are those computed one by
one."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.base.parquet import write_table
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from stages.dedup import judge
from stages.dedup.fragment import Sizes
from stages.dedup.minhash import MinHash
from stages.dedup.part_texts import Texts, text_batches, utf8_at
from stages.dedup.sets import distinct, distinct_of_texts
from stages.dedup.shingle_sets import ShingleSetReader, ShingleSetWriter
from stages.dedup.signature import MinHashSignature
from stages.text.chunks import utf8
from tests.stages.dedup_corpus import corpus
from tests.stages.dedup_fragment import run_fragment, write_parts
from tests.stages.test_dedup_signatures import AWKWARD, texts

RNG = np.random.default_rng(3)
VALUES = [np.zeros(0, np.uint64), np.full(1, 2**64 - 1, np.uint64), np.full(500, 7, np.uint64),
          *(RNG.integers(0, 2**64, n, np.uint64) for n in (1, 2, 3, 64, 65, 1000)),
          RNG.integers(0, 40, 300, np.uint64), RNG.integers(2**63, 2**63 + 900, 700, np.uint64),
          np.repeat(RNG.integers(0, 2**64, 9, np.uint64), 70)[RNG.permutation(630)]]


@pytest.mark.parametrize("values", VALUES, ids=len)
def test_distinct_values_are_those_of_numpy(values):
    assert distinct(values).tolist() == np.unique(values).tolist()


def test_distinct_values_of_many_texts_are_those_of_each():
    counts = np.array([len(values) for values in VALUES])
    values, sizes = distinct_of_texts(np.concatenate(VALUES), counts)
    parts = np.split(values, np.cumsum(sizes)[:-1])
    assert [part.tolist() for part in parts] == [np.unique(v).tolist() for v in VALUES]
    assert counts.tolist() == [len(v) for v in VALUES]                     # not changed


def test_few_distinct_values_keep_no_large_buffer():
    values, _ = distinct_of_texts(np.full(10_000, 7, np.uint64), np.array([6000, 4000]))
    assert values.tolist() == [7, 7] and values.base is None
    assert distinct(np.full(10_000, 7, np.uint64)).base is None


@pytest.mark.parametrize("config", [{}, {"ngram": 1}, {"ngram": 2, "max_chars": 25}, {"shingles": "characters"},
                                    {"dialect": "datasketch"}, {"dialect": "datatrove", "words": "language"}], ids=str)
def test_shingles_of_many_texts_are_those_of_each(config):
    stage = MinHashSignature(config)
    sample = [*texts(), "今天天气很好 " * 9, "وقال 3,5 " * 4, "ꦄ꧀ꦄ " * 7]
    languages = [("deu_Latn", "eng_Latn", "")[n % 3] for n in range(len(sample))]
    stops = np.cumsum([len(utf8(text)) for text in sample])
    batch = Texts(utf8("".join(sample)), np.r_[0, stops[:-1]], stops)
    shingles, counts = stage.shingles_of_texts(batch, languages if "words" in config else None)
    each = [stage.shingles(text, language if "words" in config else "")[0].tolist()
            for text, language in zip(sample, languages)]
    assert [part.tolist() for part in np.split(shingles, np.cumsum(counts)[:-1])] == each
    assert sum(map(bool, each)) > 20


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_texts_of_chosen_rows_come_in_batches(tmp_path, kind):
    rng = random.Random(2)
    stored = ["é" * rng.randint(0, 60) for _ in range(90)] + AWKWARD
    path = str(tmp_path / "part.parquet")
    write_table(pa.table({"text": pa.array(stored, kind)}), path, row_group_size=13)
    rows = np.array(sorted(rng.sample(range(len(stored)), 40)), np.uint32)
    batches = list(text_batches(path, rows, batch_bytes=100))
    assert [b.data[i:j].tobytes().decode() for b in batches for i, j in zip(b.starts, b.stops)] \
        == [data.tobytes().decode() for data in utf8_at(path, rows)] == [stored[row] for row in rows.tolist()]
    assert len(batches) > 15
    with pytest.raises(ValueError, match="speaks of row 300"):
        list(text_batches(path, np.array([3, 300])))


def verify_files(tmp_path, config, docs, small, **layout):
    barrier, store = MinHash(config), Store(tmp_path / str(small))
    barrier.sizes = Sizes(**layout)
    got = run_fragment(barrier, write_parts(barrier, docs, store, part_rows=30, ranks={"wiki": 0, "web": 1}), store)
    return got, [{name: file["content"] for name, file in task.files.items()} for task in got.results["verify"]]


MANY = {"bands": 25, "rows": 3}


@pytest.mark.parametrize("config", [{}, {"verify": 0.4, **MANY}, {"containment": 0.7, **MANY},
                                    {"prefer": ["longest"], "verify": 0.6}, {"max_comparisons": 2, **MANY}], ids=str)
def test_small_clusters_are_decided_as_large_ones(tmp_path, monkeypatch, config):
    """The kernel and the general way give the same verdicts, similarities, near-duplicates and counters."""
    docs = corpus(11, 70)
    sizes = {"bucket_bytes": 60_000, "segment_bytes": 1, "shingle_cache_bytes": 5000}
    got, files = verify_files(tmp_path, config, docs, "small", **sizes)
    with monkeypatch.context() as patch:
        patch.setattr(judge, "SMALL", 0)
        patch.setattr(judge.ClusterJudge, "_judge_small", None)
        general, expected = verify_files(tmp_path, config, docs, "general", **sizes)
    assert files == expected
    assert len(files) > 1
    assert got.removed == general.removed
    assert got.counters["verify"] == general.counters["verify"]
    assert got.counters["verify"]["removed"] > 30
    assert got.counters["verify"]["comparisons"] > got.counters["verify"]["removed"]


def test_pairs_of_short_texts_are_decided_in_bounded_memory():
    """Texts of one shingle: 300 clusters of 20 texts have 48 kB of sets, but 57,000 pairs of 24 bytes."""
    clusters, size, limit = 300, 20, 50_000
    of_cluster = judge.ClusterJudge.__new__(judge.ClusterJudge)
    of_cluster.candidates = np.zeros(clusters * size, [("root", "<u8"), ("count", "<u4")])
    of_cluster.candidates["root"], of_cluster.candidates["count"] = np.repeat(np.arange(clusters), size), 1
    of_cluster.sets = SimpleNamespace(chunk_bytes=limit)
    sizes = np.full(clusters, size)
    chunks = list(of_cluster._chunks(np.cumsum(sizes) - size, sizes))
    assert max(24 * int((n * (n - 1) // 2).sum()) for _, n in chunks) < 2 * limit
    assert sorted(first for starts, _ in chunks for first in starts.tolist()) == list(range(0, clusters * size, size))


def test_an_empty_set_is_not_taken_for_the_set_after_it(tmp_path):
    """A text may have words when it is signed, and too few once its personal data is replaced."""
    path = str(tmp_path / "shingles.bin")
    writer = ShingleSetWriter(path, 1000)
    writer.add(np.zeros(2, np.uint64), np.arange(3, dtype=np.uint64), np.array([0, 3]))
    places = list(zip(*writer.close()))
    with open(path, "rb") as file:
        reader = ShingleSetReader(SimpleNamespace(open=lambda ref: file), [{}], 1000)
        values = [reader.get(0, int(offset), count, expected).tolist() for count, offset, expected in places]
    assert values == [[], [0, 1, 2]]


def test_small_sets_in_memory_are_limited_by_what_their_objects_take(tmp_path):
    path, reads = str(tmp_path / "shingles.bin"), []
    writer = ShingleSetWriter(path, 10_000)
    writer.add(np.zeros(100, np.uint64), np.arange(100, dtype=np.uint64), np.ones(100, np.int64))
    places = [(0, int(offset), count, expected) for count, offset, expected in zip(*writer.close())]
    with open(path, "rb") as file:
        counting = SimpleNamespace(seek=file.seek, read=lambda size: reads.append(size) or file.read(size))
        reader = ShingleSetReader(SimpleNamespace(open=lambda ref: counting), [{}], 10_000)
        for place in [*places, places[-1], places[0]]:
            reader.get(*place)
    assert len(reads) == 101, "800 bytes of values, of which the last ones are held and the first ones are not"


def test_a_damaged_shingle_set_is_noticed(tmp_path):
    docs, barrier, store = corpus(5, 30), MinHash(), Store(tmp_path)
    parts = write_parts(barrier, docs, store, part_rows=200)
    waves = barrier.waves(parts)
    (number,) = [n for n, wave in enumerate(waves) if wave.name == "verify"]

    def damaging(done):
        files = [task.files["shingles.bin"] for task in done["shingles"]]
        path = tmp_path / max(files, key=lambda file: file["bytes"])["$ref"]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.unlink()
        path.write_bytes(data)
        return whole.tasks(done)

    whole = waves[number]
    waves[number] = dataclasses.replace(whole, tasks=damaging)
    barrier.waves = lambda parts: waves
    with pytest.raises(DamagedFile, match=r"shingles\.bin"):
        run_fragment(barrier, parts, store)
