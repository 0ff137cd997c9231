"""`dedup explain`: computes from two texts again why one of them was removed."""

from __future__ import annotations

import json

import pytest

from pipeline.store.fs import Store
from stages.dedup.explain import explain
from stages.dedup.hashing import split_words, word_shingles
from stages.dedup.minhash import MinHash
from stages.text.chunks import utf8
from stages.text.normalize import simplify
from tests.stages.dedup_corpus import corpus
from tests.stages.dedup_fragment import run_fragment, write_parts


@pytest.mark.parametrize("config", [{}, {"ngram": 3, "verify": 0.6}, {"dialect": "datatrove"},
                                    {"containment": 0.6, "bands": 40, "rows": 3}, {"verify": "record"},
                                    {"shingles": "characters"}, {"dialect": "datasketch", "recall": 0.9}])
def test_agrees_with_every_removal(tmp_path, config):
    docs = corpus(31, 25)
    store = Store(tmp_path)
    got = run_fragment(MinHash(config), write_parts(MinHash(config), docs, store), store)
    texts = {d.id: d.text for d in docs}
    assert len(got.removed) > 5
    for removed, (_, kept, similarity, _) in got.removed.items():
        said = explain(texts[removed], texts[kept], config)
        assert said.similarity == similarity
        # without a check, a document may go for one with which it shares bands only through others
        assert config.get("verify") == "record" or (said.confirmed and said.shared_bands > 0)
        assert said.common_ngrams <= min(said.removed_ngrams, said.kept_ngrams)
        assert json.loads(json.dumps(said.to_json()))["confirmed"] is said.confirmed


def test_shows_what_differs():
    alike = "the quick brown fox jumps over the lazy dog and then it runs away into the dark forest to sleep"
    said = explain(alike + " for one night", "Once: " + alike.upper() + "!")
    assert said.only_removed == ("for one night",)
    assert said.only_kept == ("once",)
    assert 0 < said.similarity < said.contained < 1
    assert not said.equal_text
    same = explain(alike, "  " + alike.title().replace(" ", "\n"))
    assert (same.similarity, same.shared_bands, same.equal_text, same.only_removed) == (1.0, 14, True, ())
    assert same.detection == 1.0


def test_nothing_in_common():
    said = explain("", "one two three four five six")
    assert (said.similarity, said.shared_bands, said.contained, said.confirmed) == (0.0, 0, 0.0, False)
    assert explain("a b", "c d").similarity == 0.0
    long = " ".join("abcdefghijklmnopqrstuvwxyz"[i % 26] * (1 + i // 26) for i in range(100))
    assert explain(long, "one two three four five six").only_removed[0].endswith(" …")


@pytest.mark.parametrize("text", ["Das ist — ein Test", "我们去学校 and back ภาษาไทย ｶﾅ", " 𠀀𠀁 x", "", "a\u200bb c"])
def test_words_for_people_are_the_kernels(text):
    plain = simplify(text)
    words = split_words(plain)
    assert len(words) == word_shingles(utf8(plain), 1)[1]
    again = [word_shingles(utf8(w), 1)[0].tolist() for w in words]
    assert [h for one in again for h in one] == word_shingles(utf8(plain), 1)[0].tolist()
