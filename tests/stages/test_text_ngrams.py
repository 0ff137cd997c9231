"""The compiled n-gram kernels, compared with plain Python and with datatrove's own functions."""

from __future__ import annotations

import hashlib

import numpy as np
import xxhash

from stages.text import ngrams
from stages.text.normalize import simplify
from stages.text.words import Words, shingle_sha1, shingle_xxhash, words_of
from tests.stages.texts import AWKWARD, random_texts, real_texts

NS = np.array([5, 6, 7, 8, 9, 10])


def duplicates(words: Words, ns: np.ndarray = NS) -> list[int]:
    v = words.vocabulary
    return ngrams.duplicate_ngrams(words.ids, v.lengths, v.hashes, v.powers, v.offsets, v.sizes, v.blob, ns).tolist()


def test_repeated_ngrams_equal_datatrove():
    from datatrove.pipeline.filters.gopher_repetition_filter import find_all_duplicate, find_top_duplicate, get_n_grams

    texts = [*AWKWARD, *random_texts(150, seed=5), *real_texts(60), "a b " * 300, "aa a a aa " * 60]
    for text in texts:
        words = words_of(text)
        strings = words.strings()
        found = ngrams.top_ngrams(words.ids, words.vocabulary.lengths, 1, 4).tolist()
        for n, covered in enumerate(found, 1):
            grams = get_n_grams(strings, n)
            assert covered == (find_top_duplicate(grams) if grams else -1)
        assert ngrams.top_ngrams(words.ids, words.vocabulary.lengths, 2, 4).tolist() == found[1:]
        assert duplicates(words) == [find_all_duplicate(strings, n) for n in NS.tolist()]


def test_equal_hashes_of_different_words_are_no_duplicates():
    # Thue–Morse strings of 2**11 characters collide under every polynomial hash modulo 2**64
    thue = "".join("ab"[i.bit_count() & 1] for i in range(2048))
    other = thue.translate(str.maketrans("ab", "ba"))
    words = Words.of([thue, other])
    assert words.vocabulary.hashes[words.ids[0]] == words.vocabulary.hashes[words.ids[1]]
    assert duplicates(words, np.array([1])) == [0]
    assert duplicates(Words.of([thue, other, thue]), np.array([1])) == [2048]


def test_shingles_of_the_datatrove_dialects():
    for text in [*AWKWARD, *random_texts(60, seed=6), *real_texts(10)]:
        words = words_of(simplify(text))
        strings = words.strings()
        grams = [" ".join(strings[i:i + 5]).encode() for i in range(len(strings) - 4)]
        sha1 = [int.from_bytes(hashlib.sha1(gram).digest()[:8], "little") for gram in grams]
        assert shingle_sha1(words).tolist() == sha1
        assert shingle_sha1(strings).tolist() == sha1
        assert shingle_xxhash(words).tolist() == [xxhash.xxh64_intdigest(gram) for gram in grams]
    long = ["x" * length for length in range(40, 300)]  # messages over several SHA-1 blocks
    assert shingle_sha1(long, 3).tolist() == [
        int.from_bytes(hashlib.sha1(" ".join(long[i:i + 3]).encode()).digest()[:8], "little") for i in range(258)]
