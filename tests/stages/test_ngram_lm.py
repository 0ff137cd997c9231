"""n-gram models: trained as by lmplz, scored as by KenLM; and which files are read and which are refused."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stages.text.arpa import compile_arpa
from stages.text.kneser_ney import columns, save, save_arpa, train
from stages.text.ngram_lm import BadModel, NgramLM
from tests.stages.test_conformance import WORDS, pick

#: made by lmplz and the Python package of kenlm 0.3.0
GOLDEN = json.loads(Path(__file__).with_name("ngram_golden.json").read_text(encoding="utf-8"))


def corpus(n: int = 300) -> list[list[str]]:
    """Return sentences in which some words are far more frequent than others."""
    out = []
    for i in range(n):
        draws = pick(f"lm/{i}", 4 + i % 9)
        out.append([WORDS[(d % 7) * (d // 7 % 7) * (d // 49 % 3) + i % 3] for d in draws])
    return out


def entries(estimate) -> dict[str, tuple[float, float]]:
    """Return {n-gram: (log10 probability, back-off weight)}."""
    return {" ".join(estimate.words[i] for i in ids): (float(p), float(b))
            for n in range(1, len(estimate.orders) + 1)
            for ids, (p, b) in zip(zip(*columns(estimate, n)), estimate.values[n - 1])}


# -- training ----------------------------------------------------------------------------------------------------------
def test_training_equals_lmplz():
    estimate = train(corpus(), order=3)
    assert [len(g.word) for g in estimate.orders] == GOLDEN["counts"] and not estimate.fallback
    for mine, theirs in zip(estimate.discounts, GOLDEN["discounts"]):
        assert mine == pytest.approx(theirs, rel=1e-5)
    found = entries(estimate)
    assert len(GOLDEN["entries"]) >= 60
    for line in GOLDEN["entries"]:
        assert found[line[1]] == pytest.approx([float(x) for x in (line[0], *line[2:], 0)][:2], abs=1e-5), line


def test_training_equals_lmplz_where_discounts_cannot_be_had():
    estimate = train([line.split() for line in GOLDEN["tiny"]["text"].splitlines()], order=3)
    theirs = {f[1]: [float(x) for x in (f[0], *f[2:], 0)][:2]
              for line in GOLDEN["tiny"]["arpa"].split("\n") if len(f := line.split("\t")) > 1}
    found = entries(estimate)
    assert estimate.fallback == [1, 3]
    assert found.keys() == theirs.keys() and len(found) == 26
    for gram, values in theirs.items():
        assert found[gram] == pytest.approx(values, abs=1e-6), gram


@given(st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=7), min_size=1, max_size=12), st.integers(1, 4),
       st.lists(st.sampled_from("abcdez"), max_size=3))
@example([["a"]], 4, [])              # no context of the highest order is there
def test_probabilities_after_any_context_sum_to_one(tmp_path_factory, texts, order, context):
    path = tmp_path_factory.mktemp("lm") / "m.lm"
    save(train(texts, order=order), path)
    model = NgramLM(path)
    before = model.ids(context)
    total = sum(10.0 ** float(model.word_scores(np.append(before, w), eos=False)[0][-1])
                for w in range(len(model.words)) if w != model.bos)
    assert total == pytest.approx(1, abs=1e-5)


def test_training_stops_at_the_most_tokens_and_refuses_nothing():
    lengths = list(itertools.accumulate(len(text) + 1 for text in corpus()))
    fit = sum(n <= 50 for n in lengths)
    a, b = train(corpus(), order=2, most=50), train(corpus(fit), order=2)
    assert a.tokens == b.tokens == lengths[fit - 1] and entries(a) == entries(b)
    for texts, kw in (([], {}), ([[]], {}), (corpus(3), {"most": 2}), (corpus(3), {"order": 0})):
        with pytest.raises(ValueError):
            train(texts, **kw)


def test_the_models_own_words_in_a_text_are_unknown_words(tmp_path):
    save(train([["a", "</s>", "b"], ["<s>", "a", "<unk>"], ["a", "b"]], order=2), tmp_path / "m.lm")
    model = NgramLM(tmp_path / "m.lm")
    assert model.words == ["<unk>", "<s>", "</s>", "a", "b"]
    assert 10 ** model.unigrams[0, 0] > 0.1


# -- scoring -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm") / "m.lm"
    save(train(corpus(), order=3), path)
    return NgramLM(path)


def test_scores_equal_kenlms(model):
    for case in GOLDEN["scores"]:
        scores, lengths = model.word_scores(model.ids(case["text"].split()))
        assert lengths.tolist() == [n for _, n in case["words"]]
        assert scores.tolist() == pytest.approx([s for s, _ in case["words"]], abs=2e-5), "lmplz rounds on the way"
        assert model.score(model.ids(case["text"].split())) == pytest.approx(case["total"], rel=1e-5)


def test_scores_of_a_model_that_lacks_the_ends_of_n_grams_equal_kenlms_to_the_bit(tmp_path):
    (tmp_path / "m.arpa").write_text(GOLDEN["unclosed"]["arpa"])
    assert compile_arpa(tmp_path / "m.arpa", tmp_path / "m.lm") == [6, 9, 3]
    model = NgramLM(tmp_path / "m.lm")
    for case in GOLDEN["unclosed"]["scores"]:
        scores, lengths = model.word_scores(model.ids(case["text"].split()))
        assert list(zip(scores.tolist(), lengths.tolist())) == [tuple(w) for w in case["words"]], case["text"]


def test_scores_equal_the_installed_kenlms(tmp_path):
    kenlm = pytest.importorskip("kenlm")
    save_arpa(train(corpus(), order=4), tmp_path / "m.arpa")
    compile_arpa(tmp_path / "m.arpa", tmp_path / "m.lm")
    mine, theirs, rng = NgramLM(tmp_path / "m.lm"), kenlm.Model(str(tmp_path / "m.arpa")), random.Random(2)
    for text in [*corpus(100), *(rng.choices([*mine.words[3:], "zebra"], k=n) for n in range(40))]:
        expected = [(s, n) for s, n, _ in theirs.full_scores(" ".join(text))]
        scores, lengths = mine.word_scores(mine.ids(text))
        assert list(zip(scores.tolist(), lengths.tolist())) == expected


def test_a_score_is_that_of_the_definition(model):
    """The plain rule, in a dict of n-grams: the longest n-gram that is there, and the back-off of longer contexts."""
    table = entries(train(corpus(), order=3))

    def log10(context: tuple[str, ...], word: str) -> float:
        if " ".join((*context, word)) in table or not context:
            return table[" ".join((*context, word))][0]
        return table.get(" ".join(context), (0, 0.0))[1] + log10(context[1:], word)

    rng = random.Random(1)
    for _ in range(200):
        text = rng.choices(model.words[3:], k=rng.randrange(9))
        words, total = ["<s>", *text, "</s>"], 0.0
        for i in range(1, len(words)):
            total += log10(tuple(words[max(0, i - 2):i]), words[i])
        assert model.score(model.ids(text)) == pytest.approx(total, abs=1e-5)


def test_ids_out_of_range_are_refused(model):
    for ids in ([len(model.words)], [-1]):
        with pytest.raises(IndexError):
            model.score(np.array(ids, np.int64))


# -- files -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [1, 2, 4])
def test_arpa_gives_back_the_model(tmp_path, order):
    estimate = train(corpus(60), order=order)
    save(estimate, tmp_path / "a.lm")
    save_arpa(estimate, tmp_path / "a.arpa")
    (tmp_path / "a.arpa.gz").write_bytes(gzip.compress((tmp_path / "a.arpa").read_bytes()))
    compile_arpa(tmp_path / "a.arpa", tmp_path / "b.lm")
    compile_arpa(tmp_path / "a.arpa.gz", tmp_path / "c.lm")
    assert (tmp_path / "b.lm").read_bytes() == (tmp_path / "c.lm").read_bytes()
    a, b = NgramLM(tmp_path / "a.lm"), NgramLM(tmp_path / "b.lm")
    for text in corpus(60):
        assert a.word_scores(a.ids(text))[0].tolist() == b.word_scores(b.ids(text))[0].tolist()


def test_equal_texts_give_equal_files(tmp_path):
    for name in "ab":
        save(train(corpus(60), order=3), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_arpa_as_others_write_it(tmp_path):
    arpa = ("text before the model\n\n\\data\\\nngram 1=4\nngram 2=1\n\n\\1-grams:\n-1.0 <UNK>\n-0.5 a -0.25\n"
            "-0.5 </s>\n-99 <s> -0.1\n\n\\2-grams:\n-0.125 a a\n\n\\end\\\n")
    (tmp_path / "m.arpa").write_text(arpa)
    compile_arpa(tmp_path / "m.arpa", tmp_path / "m.lm")
    model = NgramLM(tmp_path / "m.lm")
    assert model.score(model.ids(["a", "a", "b"])) == pytest.approx(-0.1 - 0.5 - 0.125 - 0.25 - 1.0 - 0.5)


GOOD = "\\data\\\nngram 1=2\nngram 2=1\n\n\\1-grams:\n-1\ta\t-1\n-1\tb\n\n\\2-grams:\n-1\ta b\n\n\\end\\\n"


@pytest.mark.parametrize(("arpa", "said"), [
    ("", "no ARPA file"), ("hello\nworld\n", "no ARPA file"), (GOOD.replace("\\end\\", ""), "cut one"),
    ("mmap lm http://kheafield.com/code format version 5\n\0" + "x" * 99, "Binary files of KenLM"),
    (GOOD.replace("a b", "a c"), ":10: the word 'c' is no unigram"),
    (GOOD.replace("-1\ta b", "-1\ta"), ":10: an entry"),
    (GOOD.replace("-1\ta b", "x\ta b"), ":10: could not convert"), (GOOD.replace("\\2-", "\\3-"), ":9: expected"),
    (GOOD.replace("-1\ta b\n", "-1\ta b\n-2\ta b\n"), "the same 2-gram"),
    (GOOD.replace("-1\ta b\n", "-1\ta b\n\n\\3-grams:\n-1\tb a b\n"), "the context of the 3-gram 'b a b'"),
    (GOOD.replace("-1\ta b", "nan\ta b"), ":10: nan, 0: .* finite"),
    (GOOD.replace("-1\ta\t-1", "-1\ta\tinf"), ":6: -1, inf: "),
])
def test_what_is_no_arpa_is_refused_by_line(tmp_path, arpa, said):
    (tmp_path / "m.arpa").write_text(arpa)
    with pytest.raises(BadModel, match=said.replace("\\", "\\\\")):
        compile_arpa(tmp_path / "m.arpa", tmp_path / "m.lm")


def test_damaged_models_are_refused(tmp_path, model):
    whole = Path(model.path).read_bytes()
    length = int.from_bytes(whole[18:26], "little")
    header = json.loads(whole[26:26 + length])
    for broken in (b"", b"no model", whole[:30], whole[:26 + length + 500],
                   whole[:18] + (1 << 40).to_bytes(8, "little"),
                   whole.replace(b'"sections": {', b'"sections":1,"x":{'),
                   whole[:18] + (1 << 19).to_bytes(8, "little") + b"[" * (1 << 19),
                   whole.replace(b'"order": 3', b'"order": 9'), whole.replace(b'"order": 3', b'"order": x'),
                   whole.replace(f'"words": [{header["sections"]["words"][0]}'.encode(),
                                 f'"words": [{header["sections"]["words"][0] + 64}'.encode())):
        (tmp_path / "m").write_bytes(broken)
        with pytest.raises(BadModel, match="m "):
            NgramLM(tmp_path / "m")


def test_numbers_of_any_size_are_found(tmp_path):
    """Tables of many sizes: every n-gram is found, and no other is."""
    for n in (1, 2, 3, 30, 900):
        pairs = list(itertools.islice(itertools.product(range(40), repeat=2), n))
        words = [f"w{i}" for i in range(40)]
        arpa = ["\\data\\", "", "\\1-grams:", *(f"-1\t{w}\t0" for w in words), "", "\\2-grams:",
                *(f"-{i + 2}\tw{a} w{b}" for i, (a, b) in enumerate(pairs)), "", "\\end\\"]
        (tmp_path / "m.arpa").write_text("\n".join(arpa))
        compile_arpa(tmp_path / "m.arpa", tmp_path / "m.lm")
        model = NgramLM(tmp_path / "m.lm")
        for i, (a, b) in enumerate(itertools.product(range(40), repeat=2)):
            score = model.word_scores(model.ids([f"w{a}", f"w{b}"]), bos=False, eos=False)[0][1]
            assert score == (-(i + 2) if i < n else -1)
    assert not math.isnan(score)
