"""The figures of `tokenizer eval`: compared with plain computations, by group, and on its page."""

from __future__ import annotations

import math
from collections import Counter
from html.parser import HTMLParser

import pytest

from pipeline.report.tokenizer_page import render
from tests.tokenizer.test_tokenizers import corpus
from tokenizer.evaluate import WORD, evaluate, rows_of
from tokenizer.load import byte_tokenizer, load_tokenizer
from tokenizer.train import train_bpe, train_sentencepiece

TEXTS = [("en", "the quick brown fox"), ("en", "jumps over it, 1234 times"), ("de", "der schnelle braune Fuchs"),
         ("de", "springt 1234 Mal über ihn"), ("x", "")]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    train_bpe(corpus(), 400, folder / "a.json")
    train_sentencepiece(corpus(), 330, folder / "b.model")
    return [load_tokenizer(folder / "a.json"), load_tokenizer(folder / "b.model"), byte_tokenizer()]


@pytest.fixture(scope="module")
def rows(tokenizers):
    return rows_of(["a", "b", "bytes"], evaluate(tokenizers, TEXTS, batch=1))


def test_figures_are_those_of_a_plain_computation(tokenizers, rows):
    assert [(row["group"], row["tokenizer"]) for row in rows] == [
        (group, name) for group in ("de", "en", "x", "all") for name in ("a", "b", "bytes")]
    for row in rows:
        tokenizer = tokenizers[["a", "b", "bytes"].index(row["tokenizer"])]
        texts = [text for group, text in TEXTS if row["group"] in (group, "all")]
        ids = [id for text in texts for id in tokenizer.encode(text).tolist()]
        size = sum(len(text.encode()) for text in texts)
        assert (row["texts"], row["tokens"], row["bytes"], row["broken"]) == (len(texts), len(ids), size, 0)
        if ids:
            entropy = math.log(sum((n / len(ids)) ** 2.5 for n in Counter(ids).values())) / (1 - 2.5)
            assert row["renyi"] == pytest.approx(entropy / math.log(tokenizer.vocab_size), abs=1e-4)
            assert row["bytes_per_token"] == pytest.approx(size / len(ids), abs=1e-4)
    by_bytes = {row["group"]: row for row in rows if row["tokenizer"] == "bytes"}
    assert by_bytes["de"]["parity"] == pytest.approx(51 / 44, abs=1e-4)        # bytes of the two pairs of texts
    assert by_bytes["en"]["parity"] == 1
    assert by_bytes["all"]["parity"] is None


def test_a_uniform_use_of_the_vocabulary_has_efficiency_1():
    every = "".join(map(chr, range(0x80)))
    [scores] = evaluate([byte_tokenizer()], [("g", every)])
    assert scores["g"].renyi == pytest.approx(math.log(128) / math.log(256))


@pytest.mark.parametrize(("text", "words"), [
    ("सभी मनुष्यों को, गौरव", ["सभी", "मनुष्यों", "को", "गौरव"]),
    ("มนุษย์ทั้งหลาย เกิดมามีอิสระ", ["มนุษย์ทั้งหลาย", "เกิดมามีอิสระ"]),
    ("كُلُّهُم می\u200cخواهم", ["كُلُّهُم", "می\u200cخواهم"]),
    ("e\u0301te\u0301 x² o'clock well-known", ["e\u0301te\u0301", "x²", "o'clock", "well-known"]),
    ("\u0301a_b 12,345", ["a", "b", "12", "345"]),                  # a mark without a letter is no word
    ("人人生而自由，平等", ["人人生而自由", "平等"])])
def test_a_word_has_its_vowel_signs_and_accents(text, words):
    assert WORD.findall(text) == words


def test_without_english_there_is_no_parity(tokenizers):
    assert all(row["parity"] is None for row in rows_of(["a"], evaluate(tokenizers[:1], [("de", "ein Wort")])))


def test_unknown_tokens_are_counted(tmp_path):
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(sentence_iterator=iter(corpus()), model_prefix=str(tmp_path / "m"), vocab_size=80,
                               model_type="bpe", minloglevel=2, character_coverage=0.98)
    [scores] = evaluate([load_tokenizer(tmp_path / "m.model")], [("g", "the 漢 fox 字")])
    assert scores["g"].unknown == 2
    assert scores["g"].broken == 1


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_page_works_offline_and_escapes_what_it_shows(tokenizers):
    evil = "<script>alert(1)</script>\"'\u202e"
    page = render(rows_of([evil, "b"], evaluate(tokenizers[:2], [(evil, "the fox"), ("en", "the dog")])))
    parser = Tags()
    parser.feed(page)
    names = {name for name, _ in parser.tags}
    assert {"svg", "rect", "table"} <= names
    assert not names & {"script", "link", "img", "iframe", "object", "use", "image", "foreignobject"}
    assert not any(key in ("href", "src", "style") or key.startswith("on") for _, attrs in parser.tags for key in attrs)
    [policy] = [attrs["content"] for name, attrs in parser.tags if attrs.get("http-equiv")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "\u202e" not in page
    assert "url(" not in page and "@import" not in page
