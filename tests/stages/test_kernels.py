"""Compiled kernels give the same results as their Python source: numba does not let a number overflow, widen it or
round it differently."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from stages.dedup import hashing, lsh, sets
from stages.extract.pdf import chars, layout, ocr
from stages.scoring import word_sums
from stages.text import ngrams, normalize, repeats
from stages.text.chunks import utf8
from stages.text.normalize import simplified_utf8, simplify
from stages.text.words import Vocabularies, Words
from tests.stages.lid import lid176_model
from tests.stages.texts import AWKWARD, random_texts

TEXTS = [*AWKWARD[:20], *random_texts(12, seed=8), "a b " * 40, "aa a a aa " * 12, "x y. z! " * 9,
         "日本語 ไทย word " * 4]


@pytest.fixture
def interpreted(monkeypatch):
    """A function that returns a context in which the kernels of a module run as plain Python, without numba. Integers
    overflow there without a warning."""
    @contextmanager
    def run(module: ModuleType) -> Iterator[None]:
        kernels = {name: value.py_func for name, value in vars(module).items() if hasattr(value, "py_func")}
        assert kernels, f"{module.__name__} has no kernel"
        with monkeypatch.context() as patch, np.errstate(over="ignore"):
            for name, function in kernels.items():
                patch.setattr(module, name, function)
            yield

    return run


def columns(words: Words) -> tuple[Any, ...]:
    v = words.vocabulary
    return v.lengths, v.hashes, v.powers, v.offsets, v.sizes, v.blob, v.kinds


def test_ngrams_and_their_hashes(interpreted, monkeypatch):
    # the vocabulary of the process may hold all words of earlier tests, and here all are hashed without numba
    monkeypatch.setattr("stages.text.words.VOCABULARIES", Vocabularies())

    def of(words: Words) -> list[Any]:
        lengths, hashes, powers, offsets, sizes, blob, kinds = columns(words)
        ids = words.ids
        again, bases = np.zeros(len(lengths), np.uint64), np.zeros(len(lengths), np.uint64)
        ngrams.hash_words(again, bases, offsets, sizes, blob, 0, len(lengths))
        return [again.tolist(), bases.tolist(), ngrams.top_ngrams(ids, lengths, 1, 4).tolist(),
                ngrams.duplicate_ngrams(ids, lengths, hashes, powers, offsets, sizes, blob,
                                        np.array([1, 2, 5])).tolist(),
                ngrams.distinct_words(ids, np.arange(0, 40, 3, np.int32)), ngrams.word_counts(ids, lengths, kinds),
                ngrams.sha1_shingles(ids[:9], offsets, sizes, blob, 2).tolist()]

    split = [Words.of(text.split()) for text in TEXTS]
    compiled = [of(words) for words in split]
    with interpreted(ngrams):
        assert [of(words) for words in split] == compiled


def test_repeated_ngrams(interpreted):
    def of(text: str) -> Any:
        return repeats.repeated(*repeats.number(text.split()), 2, 6).tolist()

    compiled = [of(text) for text in TEXTS]
    assert any(row[0] > 1 for rows in compiled for row in rows), "something is repeated"
    with interpreted(repeats):
        assert [of(text) for text in TEXTS] == compiled


@pytest.mark.parametrize("dialect", ["tokenmill", "datatrove"])
def test_signatures_and_band_keys(interpreted, dialect):
    def of(text: str, dtype: type = np.uint8) -> Any:
        words = hashing._word_hashes(simplified_utf8(utf8(text)).astype(dtype))
        shingles = hashing._join(words, 3)
        drawn = hashing.Permutations(6, seed=1, dialect=dialect)
        minima = hashing._minima_mersenne if dialect == "datatrove" else hashing._minima
        signature = minima(shingles, drawn.a, drawn.b)
        return (words.tolist(), shingles.tolist(), signature.tolist(), hashing.band_keys(signature, 3, 2).tolist(),
                hashing.mix(np.arange(5, dtype=np.uint64)).tolist())

    compiled = [of(text) for text in TEXTS]
    with interpreted(hashing):                       # a byte shifted by 12 is 0 in numpy, and the whole number in numba
        assert [of(text, np.int64) for text in TEXTS] == compiled


def test_shingle_sets_and_small_clusters(interpreted):
    rng = np.random.default_rng(6)
    values = [rng.integers(0, 2**64, 60, np.uint64) for _ in range(12)]
    documents = [np.concatenate([values[n // 3], values[n // 3], values[n][:4 * (n % 3)]]) for n in range(12)]
    bands = rng.integers(0, 2, (12, 5), np.uint64)
    starts, stops = np.array([0, 4, 6]), np.array([4, 6, 12])

    def of() -> Any:
        shingles, counts = sets.distinct_of_texts(np.concatenate(documents), np.array(list(map(len, documents))))
        offsets = np.cumsum(counts) - counts
        decided = sets.judge_clusters(starts, stops, bands, shingles, offsets, counts, 0.93, 0.97, 0.5)
        pair = [shingles[offset:offset + count] for offset, count in zip(offsets, counts)][:2]
        gone = decided.twins >= 0
        return (shingles.tolist(), counts.tolist(), int(sets.common(*pair)), decided.twins.tolist(),
                decided.similarities[gone].tolist(), decided.near.tolist(), decided.near_similarities.tolist(),
                decided.comparisons, decided.most_kept)

    compiled = of()
    assert max(compiled[3]) >= 0
    assert compiled[5]
    with interpreted(sets):
        assert of() == compiled


def test_simplified_texts(interpreted):
    texts = [*TEXTS, "ΟΔΥΣΣΕΥΣ' ΑΣ 1.2.3 ٣٫٤ 5,", "İ \u0301 한글 \U00010400 \ud800", "ꦄ꧀ꦄ"]

    def of() -> list[Any]:
        return [(simplify(text), simplified_utf8(utf8(text), gaps=True).tolist()) for text in texts]

    compiled = of()
    with interpreted(normalize):
        assert of() == compiled


@pytest.mark.parametrize("counted", [True, False])
def test_records_and_edges_of_band_keys(interpreted, counted):
    rng = np.random.default_rng(4)
    key, place = rng.integers(0, 30, 60, dtype=np.uint64), rng.permutation(60).astype(np.uint64)
    counts = rng.integers(1, 9, 60).astype(np.uint32) if counted else None

    def of() -> list[Any]:
        return [part.tolist() for part in lsh.stars(key, place, counts)]

    compiled = of()
    with interpreted(lsh):
        assert of() == compiled
    groups = [np.flatnonzero(key == one) for one in np.unique(key)]
    assert compiled[0] == [(int(key[g[0]]), int(place[g].min()), int(counts[g].sum()) if counted else len(g))
                           for g in groups]


def test_roots_of_a_forest(interpreted):
    rng = np.random.default_rng(3)
    graphs = [(rng.integers(0, n, edges), rng.integers(0, n, edges), n)
              for n, edges in ((1, 0), (2, 1), (40, 20), (40, 60), (90, 50))]
    chain = np.arange(30)
    graphs += [(chain[1:], chain[:-1], 30), (chain[:-1][::-1].copy(), chain[1:][::-1].copy(), 30)]
    compiled = [lsh._roots(*graph).tolist() for graph in graphs]
    with interpreted(lsh):
        assert [lsh._roots(*graph).tolist() for graph in graphs] == compiled
    for (a, b, n), roots in zip(graphs, compiled):
        assert all(roots[x] == roots[y] for x, y in zip(a, b)) and all(roots[x] <= x for x in range(n))


def test_language_by_sums_of_words(interpreted):
    model = str(lid176_model())
    texts = [text[:300] for text in (*TEXTS, "__label__x y", "a </s> b", "</s>", "\ud800 é", "")]
    # two words are kept: their table is emptied again and again
    compiled = [word_sums.WordSums(model, 2 * 4 * 16).predict(text) for text in texts]
    assert len({labels[0][0] for labels in compiled if labels}) > 3
    with interpreted(word_sums):
        slow = word_sums.WordSums(model, 2 * 4 * 16)
        for text, wanted in zip(texts, compiled):
            labels = slow.predict(text)
            assert [label for label, _ in labels] == [label for label, _ in wanted], text
            assert [p for _, p in labels] == pytest.approx([p for _, p in wanted], abs=1e-6), text


def test_pieces_and_gutters_of_a_pdf_page(interpreted):
    draw = random.Random(4)
    pages = []
    for k in range(12):
        code, box, left, top = [], [], 0, 0
        for _ in range(120):
            if draw.random() < 0.1:
                code.append(10)
                box.append([0, 0, 0, 0])
                left, top = draw.choice((0, 4000)), top + 800
                continue
            wide = draw.choice((300, 300, 200)) if k % 3 else 300
            low = draw.choice((0, 0, 0, 250))
            code.append(draw.choice((65, 97, 0x5D0, 0x4E2D)))
            box.append([left, top + low, left + wide, top + low + 600])
            left += wide + draw.choice((0, 0, 20, 1500, -900))
        pages.append((np.array(code, np.uint32), np.zeros(len(code), bool), np.array(code) != 10,
                      np.array(box, np.int64)))

    def of(page: Any) -> Any:
        starts, ends, edges, mono = chars._pieces(*page)
        rows = edges[:, 1] // 800
        strips = layout._gutters(edges, rows, int(rows.max()) + 1, 500, 2)
        return [x.tolist() for x in (starts, ends, edges, mono, strips)]

    compiled = [of(page) for page in pages]
    assert any(strips for *_, strips in compiled), "some page has a gutter"
    with interpreted(chars), interpreted(layout):
        assert [of(page) for page in pages] == compiled


def test_letters_on_a_picture_are_counted(interpreted):
    rng = np.random.default_rng(5)
    pictures = [np.full((40, 60), 255, np.uint8), *(np.where(rng.random((40, 60)) < p, 0, 255).astype(np.uint8)
                                                    for p in (0.1, 0.35, 0.6))]
    for at in (3, 15, 30):
        pictures[0][5:20, at:at + 4] = 0                    # three strokes, of which two are joined below
    pictures[0][20:22, 3:19] = 0
    compiled = [int(ocr.glyphs(picture)) for picture in pictures]
    assert compiled[0] == 2
    with interpreted(ocr):
        assert [int(ocr.glyphs(picture)) for picture in pictures] == compiled
