"""The settings of a tokenizer's training: digits, runs of spaces, special tokens."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stages.texts import assert_linear
from tests.tokenizer.test_tokenizers import corpus
from tokenizer.encode import encode_documents
from tokenizer.load import PROBES, HuggingFace, TokenizerError, load_tokenizer
from tokenizer.special import CHAT, FIM, special_tokens
from tokenizer.train import train_bpe, train_sentencepiece, train_tokenizer

DIGITS = ("single", "left3", "right3")
SPECIAL = {"fim": True, "chat": "chatml", "tokens": ["<|tool|>"], "reserved": 5}
TEXTS = [*corpus(100), *(str(n) for n in np.random.default_rng(0).integers(0, 10**9, 400)), "x = 1\n        y\n" * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("settings")
    for digits in DIGITS:
        train_bpe(TEXTS, 700, made / f"{digits}.json", digits=digits)
    train_bpe(TEXTS, 700, made / "all.json", digits="right3", space_runs=12, special=SPECIAL)
    train_sentencepiece(TEXTS, 345, made / "all.model", space_runs=12, special=SPECIAL)
    return made


def groups(digits: str, number: str) -> list[str]:
    """Return the groups into which the digits of a number are split, computed without a regular expression."""
    size = 1 if digits == "single" else 3
    if digits == "right3":
        first = len(number) % 3
        return [part for part in (number[:first], *(number[i:i + 3] for i in range(first, len(number), 3))) if part]
    return [number[i:i + size] for i in range(0, len(number), size)]


@pytest.mark.parametrize("digits", DIGITS)
@given(number=st.text("0123456789", min_size=1, max_size=51), sign=st.sampled_from(["", " ", "-", "x", "\n"]))
def test_no_token_crosses_a_group_of_digits(folder, digits, number, sign):
    tokenizer = load_cached(folder / f"{digits}.json")
    borders = np.cumsum([len(group) for group in groups(digits, number)]).tolist()
    tokens = [tokenizer.decode([id]) for id in tokenizer.encode(sign + number + "," + number)]
    for part in "".join(f"\0{token}" for token in tokens).replace(",", "\0,\0").split(",")[1:]:
        ends = np.cumsum([len(token) for token in part.split("\0") if token]).tolist()
        assert set(borders) <= set(ends)


_loaded = {}


def load_cached(path):
    return _loaded.setdefault(path, load_tokenizer(path))


def test_groups_of_three_are_tokens_of_their_own(folder):
    spelled = {digits: [load_cached(folder / f"{digits}.json").decode([id])
                        for id in load_cached(folder / f"{digits}.json").encode("1234567")] for digits in DIGITS}
    assert spelled["single"] == list("1234567")
    assert spelled["left3"][-1] == "7"
    assert spelled["right3"][0] == "1"


@given(number=st.text("0123456789٣", max_size=300))
def test_long_numbers_come_back_and_fast_equals_reference(folder, number):
    path = folder / "right3.json"
    reference = _loaded.setdefault("slow", HuggingFace(path.read_text()))
    ids = load_cached(path).encode(number)
    assert load_cached(path).decode(ids) == number
    assert ids.tolist() == reference.encode_flat([number])[0].tolist()


def test_a_million_digits_take_linear_time(folder):
    assert_linear(load_cached(folder / "right3.json").encode, lambda digits: "7" * digits, 100_000)


@pytest.mark.parametrize("name", ["all.json", "all.model"])
def test_names_of_special_tokens_in_a_text_are_text(folder, name):
    tokenizer = load_cached(folder / name)
    names = [*FIM, *CHAT["chatml"], "<|tool|>", "<|reserved_0|>", "<|reserved_4|>", tokenizer.eos_token]
    ids = {tokenizer._backend.token_id(token) for token in names}
    assert len(ids) == len(names)
    texts = [f"a{token}{token} {token}\n{other}" for token in names for other in names]
    tokens, lengths = encode_documents(tokenizer, texts)
    inside = np.delete(tokens, np.cumsum(lengths) - 1)
    assert not set(inside.tolist()) & ids
    assert [tokenizer.decode(t) for t in tokenizer.encode_batch(texts)] == texts


@pytest.mark.parametrize("name", ["all.json", "all.model"])
def test_a_run_of_spaces_is_one_token(folder, name):
    tokenizer = load_cached(folder / name)
    for n in range(2, 13):
        assert len(tokenizer.encode("x\n" + " " * n + "y")) == len(tokenizer.encode("x\ny")) + 1
    for text in [*PROBES, *TEXTS]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["all.json", "all.model"])
@given(text=st.one_of(st.text(max_size=60), st.text(" \n\tab1\u0301\u200d\ufeff<|>", max_size=60)))
@settings(max_examples=2 * settings.default.max_examples)
def test_hostile_text_comes_back(folder, name, text):
    tokenizer = load_cached(folder / name)
    if name.endswith(".model"):
        text = text.replace("\u2581", "")                        # SentencePiece writes a space as this character
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_of_special_tokens_follow_their_order(folder):
    for name, eos, first in (("all.json", "<|endoftext|>", 0), ("all.model", "</s>", 1)):
        tokenizer = load_cached(folder / name)
        wanted = special_tokens(SPECIAL, eos)
        assert (tokenizer.eos_token, tokenizer.eos) == (eos, first)
        assert len(wanted) == 1 + 4 + 2 + 1 + 5
        ids = [tokenizer._backend.token_id(token) for token in wanted]
        assert ids == sorted(ids)


def test_without_settings_the_file_is_the_same(tmp_path):
    for kind, vocab in (("bpe", 400), ("sentencepiece", 330)):
        train_tokenizer(corpus(), {"kind": kind, "vocab": vocab}, tmp_path / "a")
        train_tokenizer(corpus(), {"kind": kind, "vocab": vocab, "model": "unigram", "digits": None, "special": {}},
                        tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    train_bpe(corpus(), 400, tmp_path / "c", digits="left3")
    pattern = json.loads((tmp_path / "c").read_text())["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    assert r"|\p{N}{1,3}| ?" in pattern


@pytest.mark.parametrize(("train", "message"), [
    (lambda path: train_bpe([], 266, path, special=SPECIAL), "266 is below 269 (256 bytes, 13 special tokens)"),
    (lambda path: train_bpe([], 260, path, space_runs=12), "260 is below 268 (256 bytes, 1 special token, 11 runs"),
    (lambda path: train_sentencepiece([], 270, path, special=SPECIAL), "270 is below 271"),
    (lambda path: train_sentencepiece([], 400, path, digits="left3"), "tokenizer.train.digits: SentencePiece"),
    (lambda path: train_bpe([], 400, path, special={"tokens": ["<|im_end|>"], "chat": "chatml"}), "are called"),
    (lambda path: train_bpe([], 400, path, special={"tokens": [" a "]}), "no name of a special token")])
def test_settings_that_do_not_fit_are_refused(tmp_path, train, message):
    with pytest.raises(TokenizerError, match=re.escape(message)):
        train(tmp_path / "t")
    assert not (tmp_path / "t").exists()
