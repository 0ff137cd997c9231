"""C4's paragraphs and bad words, and MADLAD-400, beyond their test vectors: real lists, samples, models and hostile
texts."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.document import Document
from stages.filter.c4_badwords import ALLOWED, C4BadWords, pattern_of
from stages.filter.c4_paragraphs import C4Paragraphs
from stages.filter.madlad400 import _BREAK, _CURSE, _CURSED, _CURSED_END, _CURSED_ROWS, Madlad400
from tests.conftest import shared_data
from tests.stages.lid import lid176_model
from tests.stages.texts import assert_linear, random_texts, real_texts


@pytest.fixture
def lists(tmp_path):
    path = tmp_path / "lists.json"
    path.write_text(json.dumps({"en": ["thistle"], "ja": ["あざみ"]}), encoding="utf-8")
    return str(path)


# -- bad words ------------------------------------------------------------------------------------------------------
def their_pattern(words, language):
    """Return datatrove's pattern, built as its filter does."""
    joined = "|".join(re.escape(w) for w in words)
    return re.compile(joined) if language in ("ja", "th", "zh") else re.compile(rf"(?:\W|^)({joined})(?:\W|$)")


def test_real_lists_find_what_datatroves_pattern_finds():
    """All 28 lists of LDNOOBW on texts that hold their entries, pieces of them, and nothing of them."""
    rng, compared = random.Random(5), 0
    for path in sorted(shared_data("lists", "naughty-words").glob("*.json")):
        words = sorted(set(json.loads(path.read_text(encoding="utf-8"))) - ALLOWED)
        ours, theirs = pattern_of(words, path.stem), their_pattern(words, path.stem)
        texts = []
        for _ in range(60):
            parts = rng.choice(words), rng.choice(("the", "これは", "и", "-", "")), rng.choice(words)[:rng.randrange(9)]
            texts.append(rng.choice((" ", "", "_", ".", "\n", "x", "é", "語", "1")).join(parts))
        for text in [*texts, *(w[:-1] for w in words[:40]), *random_texts(10, seed=len(words))]:
            assert bool(ours.search(text.lower())) == bool(theirs.search(text.lower())), (path.stem, text)
            compared += 1
    assert compared > 28 * 60


@given(st.text(st.sampled_from("ab .é_\n1語"), max_size=14))
def test_any_text_finds_what_datatroves_pattern_finds(text):
    words = ["a", "ab", "b a", "é", "a.", ".b", "語"]
    for language in ("en", "ja"):
        assert bool(pattern_of(words, language).search(text)) == bool(their_pattern(words, language).search(text))


def test_a_sample_is_drawn_by_the_document(lists):
    ids = [f"{i:032x}" for i in range(2000)]

    def kept(share, order=1, **config):
        stage = C4BadWords(lists=lists, keep_fraction=share, **config)
        stage.setup()
        return {i for i in ids[::order] if stage.process(Document(i, "a thistle")) is None}

    tenth, third = kept(0.1), kept(0.33)
    assert 150 < len(tenth) < 250
    assert tenth < third == kept(0.33, order=-1)
    assert kept(0.1, seed=1) != tenth
    assert kept(0.0) == set()
    assert kept(1.0) == set(ids)


def test_shares_replay_from_signals(lists):
    none, half = C4BadWords(lists=lists), C4BadWords(lists=lists, keep_fraction=0.5)
    none.setup(), half.setup()
    assert none.key(("signal", "resource")) == half.key(("signal", "resource"))
    seen = set()
    for i in range(50):
        doc = Document(f"{i:032x}", "a thistle")
        none.process(doc)
        replayed = half.verdict(Document("", signals=doc.signals))
        assert replayed == half.process(Document(doc.id, doc.text))
        seen.add(replayed)
    assert seen == {None, "document_removed_with_badwords"}
    clean = Document("id", "a rose")
    assert none.process(clean) is None
    assert none.verdict(Document("", signals=clean.signals)) is None


def test_lists_count_by_content_and_missing_ones_are_said(lists, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="tokenmill fetch badwords"):
        C4BadWords().setup()
    copy = tmp_path / "copy.json"
    shutil.copyfile(lists, copy)
    assert C4BadWords(lists=lists).key() == C4BadWords(lists=str(copy)).key()
    copy.write_text('{"en": ["nettle"]}')
    assert C4BadWords(lists=lists).key() != C4BadWords(lists=str(copy)).key()
    only_allowed = tmp_path / "zh.json"
    only_allowed.write_text('{"zh": ["性"]}', encoding="utf-8")
    stage = C4BadWords(lists=str(only_allowed))
    stage.setup()
    assert stage.process(Document("id", "性", language="zh")) is None
    anywhere = tmp_path / "own.txt"
    anywhere.write_text("thistle\n# a comment\n")
    stage = C4BadWords(lists=str(anywhere))
    stage.setup()
    assert stage.process(Document("id", "a thistle", language="xx")) == "document_removed_with_badwords"


# -- paragraphs -----------------------------------------------------------------------------------------------------
LINE = "A wall of old brick runs along the foot of the hill, "


def test_paragraphs_equal_datatrove():
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.filters import C4ParagraphFilter

    def page(*lengths: int) -> str:
        return "\n".join((LINE * 9)[:length] for length in lengths)

    near = [page(*lengths) for lengths in itertools.product((0, 199, 200, 201), repeat=4)]
    block, stage, verdicts = C4ParagraphFilter(), C4Paragraphs(), Counter()
    for text in ["", "a", page(200, 200), page(300, 200, 250) + "\n", *near, *random_texts(60, seed=4),
                 *real_texts(150)]:
        doc = Document("id", text)
        reason = stage.process(doc)
        assert (reason is None) == (block.filter(Theirs(text=text, id="id")) is True)
        assert stage.verdict(Document("", signals=doc.signals)) == reason
        verdicts[reason] += 1
    assert verdicts["too_few_paragraphs"] > 100 and verdicts[None] > 60


# -- MADLAD-400 -----------------------------------------------------------------------------------------------------
SENTENCE = "The old wall stands there still. "
#: sentences that hold one of the cursed strings, end in one or have a row, and others that nearly do
CURSED = (*(f"They wrote{text}on the wall" for text in _CURSED), "Home | About us | ", "Look under nr.",
          "He was born in 1990 г. ", "It weighs 5 кг. ", "and the old men can not eat any hot pie",
          "they have seen that this will come from over here with more", "a b c d e f g h i j k",
          "In rows, ab, cd, ef, gh, they stand")
HARMLESS = ("They own loads of it.", "A volume of nine parts.", "The sextant was old.", "He wrote an mp2 player.",
            "by the way all of the old men can not", "a b c d e f g h", "A face and a book.",
            "It stands | for or | else.")


def cursed_texts(count: int) -> list[str]:
    rng = random.Random(8)
    return ["! ".join(rng.choice((*CURSED, *HARMLESS, SENTENCE)) for _ in range(12)) for _ in range(count)]


@pytest.mark.parametrize("rules", [("list_case", "length", "technical", "cursed"), ("length",), ("cursed", "length")])
def test_madlad_verdicts_replay_from_signals(rules):
    stage, verdicts = Madlad400(rules=rules), set()
    loose = Madlad400(rules=rules, min_sentences=1, max_questionable=0.6)
    assert stage.key(("signal", "resource")) == loose.key(("signal", "resource"))
    for text in [*random_texts(40, seed=6), *real_texts(120), "", SENTENCE * 9]:
        doc = Document("id", text)
        reason = stage.process(doc)
        assert set(doc.signals) <= set(stage.signals)
        assert stage.verdict(Document("", signals=doc.signals)) == reason
        assert loose.verdict(Document("", signals=doc.signals)) == loose.process(Document("id", text))
        verdicts.add(reason)
    assert verdicts == {None, "madlad400_few_sentences", "madlad400_questionable"}


def test_madlad_by_a_plain_implementation():
    """The rules written down once more, sentence by sentence, each pattern alone."""
    patterns = [re.compile(p) for p in (*map(re.escape, _CURSED), *_CURSED_END, *_CURSED_ROWS)]
    assert len(patterns) == 32
    stage, hits = Madlad400(), 0
    assert all(any(p.search(s) for s in CURSED) for p in patterns)
    assert not any(p.search(s) for p in patterns for s in HARMLESS)
    for text in [*random_texts(60, seed=7), *cursed_texts(40), *real_texts(100)]:
        sentences = [s for s in re.split(r"[.!?]+\s+", text) if s.strip()]
        doc = Document("id", text)
        stage.process(doc)
        assert doc.signals["madlad400_sentences"] == len(sentences)
        if not sentences:
            continue
        bad = []
        for s in sentences:
            words = [w for w in re.split(r"[^\w'’.:]+", s) if w]
            technical = sum(c in "0123456789{}+/()>" for c in s)
            cursed = any(p.search(s) for p in patterns)
            length = not 20 <= len(s) <= 500
            hits += cursed
            assert cursed == bool(_CURSE.search(s)), s
            if s.isascii() and re.fullmatch(r"[A-Za-z ]*", s):
                lists = len(words) >= 12 and sum(w[0].isupper() for w in words) > 0.5 * len(words)
                assert stage._list_case(s, "") == lists, s
            bad.append(length or technical / len(s) > 0.2 or cursed or stage._list_case(s, ""))
        assert doc.signals["madlad400_questionable"] == sum(bad) / len(sentences)
    assert hits > 100


@given(st.text(st.sampled_from("a.!? \n"), max_size=30))
def test_sentences_are_split_as_the_simple_pattern_does(text):
    assert _BREAK.split(text) == re.split(r"[.!?]+\s+", text)


def test_madlad_takes_linear_time():
    stage = Madlad400()
    for make in (lambda n: "." * n, lambda n: "a." * n, lambda n: "A " * n, lambda n: "|" + " " * n + "x",
                 lambda n: "| " * n + "x", lambda n: " a" * n, lambda n: ", ab" * n, lambda n: " г. " * n):
        assert_linear(lambda text: stage.process(Document("id", text)), make)


def test_consistency_asks_a_model():
    model = str(lid176_model())
    stage = Madlad400(rules=["consistency"], model=model)
    assert not stage.exact
    assert Madlad400().exact
    assert stage.reads() == {"language": "rules"}
    stage.setup()
    english = "The old wall has stood at the end of the garden for many years now. "
    german = "Die alte Mauer steht seit vielen Jahren am Ende des großen Gartens. "
    for text, language, share in ((english * 4 + german, "en", 0.2), (english * 4 + german, "eng_Latn", 0.2),
                                  (english + german * 4, "de", 0.2), (english * 5, "fr", 1.0),
                                  (german * 5, "deu", 0.0)):
        doc = Document("id", text, language=language)
        assert stage.process(doc) == (None if share <= 0.2 else "madlad400_questionable")
        assert doc.signals["madlad400_consistency"] == doc.signals["madlad400_questionable"] == share
    assert stage.resource_files() == {"model": model}
    assert stage.key() != Madlad400(rules=["consistency", "length"], model=model).key()
