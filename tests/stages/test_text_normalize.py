"""The compiled kernel that simplifies texts gives the same as Python's own functions, for every character of
Unicode."""

from __future__ import annotations

import random
import re
import sys
import unicodedata

import numpy as np
import pytest
import regex

from stages.text import normalize
from stages.text.characters import PUNCTUATION
from stages.text.chunks import utf8
from stages.text.normalize import by_rules, simplified_texts, simplified_utf8, simplify

NUMBER = regex.compile(r"\p{Nd}+([.,،٫⎖⎗⎘]{1}\p{Nd}+)?", regex.VERBOSE | regex.UNICODE)
GAP = re.compile(rf"[\s{re.escape(PUNCTUATION)}]")


def reference(text: str) -> str:
    """Simplify a text by datatrove's steps, one after the other."""
    joined = " ".join(word for word in GAP.sub(" ", NUMBER.sub("0", text.lower())).split(" ") if word)
    return "".join(c for c in unicodedata.normalize("NFD", joined) if unicodedata.category(c) != "Mn").strip()


@pytest.mark.slow
def test_every_character_alone_and_between_others():
    """256 characters at a time; one at a time where the kernel might leave the text to `by_rules`."""
    for block in range(0, sys.maxunicode + 1, 256):
        chars = [chr(code) for code in range(block, block + 256)]
        sure = [c for c in chars if not any(map(unicodedata.combining, c)) or unicodedata.category(c) == "Mn"]
        text = "".join(f" {c} x{c}1{c}2 AΣ{c} ΑΣ{c}Α {c}" for c in sure)
        assert simplify(text) == reference(text), hex(block)
        for c in chars if len(sure) < 256 else ():
            assert simplify(f"AΣ{c}1{c}2 {c}") == reference(f"AΣ{c}1{c}2 {c}"), hex(ord(c))


def test_random_texts_of_awkward_characters():
    rng = random.Random(3)
    pool = [c for c in map(chr, range(sys.maxunicode + 1)) if c.lower() != c or unicodedata.decomposition(c)
            or unicodedata.category(c) in ("Mn", "Mc", "Nd", "Zs", "Cc", "Pd", "Po", "Lm", "Cs")]
    for _ in range(60_000):
        text = "".join(rng.choice(pool) if rng.random() < 0.5 else rng.choice(" aAΣσ1.,،é'.:\u0301\u0345가한")
                       for _ in range(rng.randint(0, 14)))
        assert simplify(text) == by_rules(text) == reference(text), ascii(text)


@pytest.mark.parametrize(("text", "simplified"), [
    ("ΟΔΥΣΣΕΥΣ", "οδυσσευς"), ("ΟΔΥΣΣΕΥΣ' ΑΣ", "οδυσσευς ας"), ("ΑΣ'Α", "ασ α"), ("Σ", "σ"), ("ΑΣ\u0301", "ας"),
    ("İstanbul K Å", "istanbul k a"), ("1.2.3,4 5. 6،7 ٣٫٤", "0 0 0 0 0"), ("\u0301 a \u0301", "a"),
    ("a \u0301 b", "a  b"), ("한글", unicodedata.normalize("NFD", "한글")),
    ("１２3", "0"), ("\ud800x", "\ud800x"), ("ꦄ꧀ꦄ", "ꦄ꧀ꦄ"), ("", "")])
def test_known_cases(text, simplified):
    assert simplify(text) == simplified == reference(text)


def test_utf8_is_that_of_the_text():
    text = "Café \U0001d7d8\U00010400 3.14 — 今天"
    assert simplified_utf8(utf8(text)).tobytes() == simplify(text).encode() == reference(text).encode()


def test_with_gaps_the_words_are_the_same():
    def words(simplified: str) -> list[str]:
        return [word for word in simplified.split(" ") if word]

    rng = random.Random(9)
    texts = ["x" * before + char + "Yz" * 6 for char in map(chr, range(128)) for before in range(9)]
    texts += ["".join(rng.choice(" .aZ{`@[/:09\x7fé\u0301Σ한—") if rng.random() < 0.1 else rng.choice("abXY ,-")
                      for _ in range(rng.randint(0, 90))) for _ in range(2000)]
    for text in [*texts, "ꦄ꧀ꦄ  x", "\ud800 \U0001e900"]:
        gaps = simplified_utf8(utf8(text), gaps=True).tobytes().decode("utf-8", "surrogatepass")
        assert words(gaps) == words(simplify(text)), ascii(text)
        assert gaps == gaps.strip(" ")
    assert simplified_utf8(utf8("one,  two -- THREE"), gaps=True).tobytes() == b"one   two    three"


@pytest.mark.parametrize("more", [[], ["ꦄ꧀ꦄ x", "ꦄ꧀ꦄ", "ꦄ꧀ꦄ y"], ["\U0001e900 \u10a0"]], ids=["", "by_rules", "new pages"])
def test_many_texts_are_simplified_as_each_of_them(more):
    rng = random.Random(5)
    mixed = ["".join(rng.choice(" aB1.é\u0301Σ한今—") for _ in range(n)) for n in range(40)]
    texts = ["", " ", "\u0301 a \u0301", "ΟΔΥΣΣΕΥΣ' ΑΣ 1.2.3", *more, *mixed, "end ", ""]
    data, sizes = utf8("#".join(texts)), [len(utf8(text)) for text in texts]
    stops = np.cumsum(sizes) + np.arange(len(texts))
    simplified, ends = simplified_texts(data, stops - sizes, stops)
    assert [part.tobytes().decode() for part in np.split(simplified, ends[:-1])] == [simplify(text) for text in texts]
    simplified, ends = simplified_texts(data, stops - sizes, stops, gaps=True)
    assert [part.tobytes() for part in np.split(simplified, ends[:-1])] \
        == [simplified_utf8(utf8(text), gaps=True).tobytes() for text in texts]
    assert simplified_texts(data, stops[:0], stops[:0])[0].tolist() == []


def test_only_the_odd_texts_of_many_are_simplified_by_rules(monkeypatch):
    slow = []
    monkeypatch.setattr(normalize, "by_rules", lambda text: slow.append(text) or by_rules(text))
    texts = ["ꦄ꧀ꦄ first", *["plain words"] * 50, "ꦄ꧀ꦄ middle", *["more words"] * 50, "ꦄ꧀ꦄ last"]
    data, stops = utf8("".join(texts)), np.cumsum([len(utf8(text)) for text in texts])
    simplified, ends = simplified_texts(data, np.r_[0, stops[:-1]], stops)
    assert slow == [texts[0], texts[51], texts[-1]]
    assert [part.tobytes().decode() for part in np.split(simplified, ends[:-1])] == [reference(text) for text in texts]
