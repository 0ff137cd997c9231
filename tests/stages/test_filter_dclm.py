"""The rules of DCLM and RefinedWeb, compared with plain implementations. Test vectors are in tests/conformance."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.document import Document
from stages.filter.dclm_lines import DclmLines
from stages.filter.dclm_links import DclmLinks
from stages.filter.dclm_quality import DclmQuality, word_count
from stages.filter.dclm_repetition import DclmRepetition
from stages.filter.refinedweb_lines import RefinedWebLines
from stages.stage import role_of
from stages.text.segments import segments
from tests.stages.texts import AWKWARD, PROSE, assert_linear, random_texts, real_texts

LINES = ("3 likes", "1,204 Views!", "READ THIS NOW", "12345", "  99  ", "Sign-in", "sign-in here", "2 items in cart",
         "items in cart", "and so Read Moreabc", "one", "MENU items", "Ünïcode ÄÖÜ", "٣٤٥", "²³", " ", "", "\t",
         "see http://www.example.com/a?b=c.", "at example.org, or b.co.uk", "10.0.0.1:80/x", "- item", "the end ...",
         "\u00a0\x1c", "x\0y z", "ABC def GHI jkl")


def mixed_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    base = [*AWKWARD, *random_texts(50, seed)]
    out = []
    for _ in range(count):
        lines: list[str] = []
        for _ in range(rng.randrange(1, 20)):
            lines += [rng.choice(LINES)] if rng.random() < 0.4 else rng.choice(base).split("\n")[:4]
        out.append(rng.choice(["\n", "\n", "\n\n", "\n\n\n\n"]).join(lines))
    return out


TEXTS = [*AWKWARD, *mixed_texts(250, seed=5), *(PROSE * n for n in (2, 5)), "the same again\n" * 40]


def plain_shares(text: str) -> dict[str, float]:
    """Compute the shares of repetition by their definitions, in quadratic time where that is simplest."""
    out: dict[str, float] = {}
    for kind, end in (("line", "\n"), ("paragraph", "\n\n")):
        parts = [part.strip() for part in text.split(end) if part.strip()]
        again = [part for part in parts if parts.count(part) > 1]
        out[kind] = len(again) / len(parts)
        out[f"{kind}_chars"] = len("".join(again)) / len("".join(parts))
    words = segments(text)
    for n in range(2, 11):
        grams = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
        counts = Counter(grams)
        most = max(counts.values(), default=0)
        if n < 5:
            longest = max((len("".join(gram)) for gram in grams if counts[gram] == most), default=0)
            out[f"top_{n}_gram"] = longest * most / len("".join(words)) if most > 1 else 0.0
        else:
            inside = {k for i, gram in enumerate(grams) if counts[gram] > 1 for k in range(i, i + n)}
            out[f"dup_{n}_gram"] = sum(len(words[k]) for k in inside) / len("".join(words)) if words else 0.0
    return {f"dclm_rep_{name}": value for name, value in out.items()}


def test_repetition_by_its_definition():
    stage = DclmRepetition()
    reasons = set()
    for text in [*TEXTS, *real_texts(20)]:
        doc = Document("id", text)
        reasons.add(stage.process(doc))
        assert doc.signals == (plain_shares(text) if text.strip() else {}), text[:200]
    assert {None, "empty", "dclm_line", "dclm_top_2_gram", "dclm_line_chars"} <= reasons


@given(text=st.text(st.sampled_from("ab.  \n\n"), max_size=120))
def test_repetition_of_any_text(text):
    assert DclmRepetition().process(Document("id", text)) in {
        None, "empty", *(f"dclm_{rule}" for rule in DclmRepetition.Config.model_fields)}
    if text.strip():
        assert DclmRepetition().measure(Document("id", text)) == plain_shares(text)


def test_words_are_those_of_uniseg():
    uniseg = pytest.importorskip("uniseg.wordbreak", reason="DCLM's word splitter, uniseg, is not installed")
    rng = random.Random(3)
    pool = "ab1_.,'\"é日本カナｶﾞ한글\u0301\u200d\u200b\u202f \n\t\r👍🏽🇩🇪אב\":;٫0·’ℹ²½ไทย\u00ad"
    texts = ["".join(rng.choices(pool, k=rng.randrange(1, 40))) for _ in range(800)]
    for text in [*TEXTS, *texts, *real_texts(15)]:
        assert segments(text) == [word for word in uniseg.words(text) if word[0].isalnum()], ascii(text)


@pytest.mark.parametrize(("text", "words"), [
    ("can't stop, won't: 3.14 or 1,000.5!", ["can't", "stop", "won't", "3.14", "or", "1,000.5"]),
    ("U.S.A. a_b _ __x x/y e-mail 'quoted'", ["U.S.A", "a_b", "x", "y", "e", "mail", "quoted"]),
    ("日本語 カタカナ ｶﾞ한글", ["日", "本", "語", "カタカナ", "ｶﾞ", "한글"]),
    ("a\u202fb c\u00a0d", ["a\u202fb", "c", "d"]),
    (" \uff9e x", ["x"]), ("\n\uff9e x", ["\uff9e", "x"]), ("e\u0301te\u0301 \u0301a", ["e\u0301te\u0301", "a"]),
    ("אב\"גד ab\"cd אב'", ["אב\"גד", "ab", "cd", "אב'"]), ("", [])])
def test_words_of_unicode(text, words):
    assert segments(text) == words


def test_words_do_not_depend_on_what_was_seen():
    from stages.text import segments as module

    texts = [*random_texts(40, seed=9), *AWKWARD]
    module._cache.clear()
    first = [segments(text) for text in texts]
    assert [segments(text) for text in texts[::-1]][::-1] == first
    assert all(len(chunk) <= module.CACHED_LONGEST for chunk in module._cache)


def test_length_counts_words_as_fasttext_has_them():
    fasttext = pytest.importorskip("fasttext", reason="fastText's own tokenizer is not installed")
    for text in [*TEXTS, "a\x1cb\x85c\u2028d e\u00a0f", "\0a\0\0b", "é ü² ٣x …a", "\r\n a\r\nb", "\u3000a"]:
        if not any("\ud800" <= c <= "\udfff" for c in text):
            expected = [word for word in fasttext.FastText.tokenize(text) if word[0].isalnum()]
            assert word_count(text) == len(expected), ascii(text)


@pytest.mark.parametrize("cls", [DclmQuality, DclmRepetition, DclmLines, RefinedWebLines])
def test_verdicts_replay(cls):
    stage = cls()
    stage.setup()
    decisions = [f for f in cls.Config.model_fields if role_of(cls.Config, f) == "decision"]
    loose = cls(**{f: 0 if f.startswith("min") else 10**6 for f in decisions})
    loose.setup()
    reasons = set()
    for text in [*TEXTS, *real_texts(20)]:
        doc, other = Document("id", text), Document("id", text)
        reason = stage.process(doc)
        reasons.add(reason)
        assert set(doc.signals) <= set(stage.signals)
        assert stage.verdict(Document("", signals=doc.signals)) == reason
        if reason is not None:
            assert doc.text == text, "a dropped document keeps its text"
        kept = loose.process(other)
        assert other.signals == doc.signals
        assert loose.verdict(Document("", signals=doc.signals)) == kept
    assert None in reasons and len(reasons) > 2


def test_expressions_that_are_none_are_named():
    with pytest.raises(ValueError, match="dclm_lines: at_end: not a regular expression"):
        DclmLines(at_end=("more (",)).setup()


def test_urls_go_piece_by_piece_as_from_the_whole_text():
    stage = DclmLinks(everywhere=True, max_newlines=1000)
    stage.setup()
    ipv4 = re.compile(r"\s{0,10}\b((https?|ftp)://)?(?:[0-2]?[0-9]{1,2}\.){3}[0-2]?[0-9]{1,2}"
                      r"[-a-zA-Z0-9()@:%_\+.~#?&//=]*")
    pieces = ["www.a.com", "x.org/y?z", ".com", "a.", ".", "com", "http://", "b.de,c.de", " ", "\n", " " * 12, "é.net",
              "x.COM", "1.2.3.4", "10.0.0.256/x", "a@b.info", "end.So", "\u00a0", "…", "x.com_y"]
    rng = random.Random(4)
    for _ in range(1500):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 15)))
        doc = Document("id", text)
        expected = ipv4.sub("", stage._url.sub("", text))
        assert (stage.process(doc), doc.text) == ((None, expected) if expected else ("empty", text)), ascii(text)
        assert doc.signals["dclm_links_cut"] == len(text) - len(expected)


def test_own_top_level_domains(tmp_path):
    (tmp_path / "tlds").write_text("# ours\ncom\nzzz\n", encoding="utf-8")
    (tmp_path / "none").write_text("# ours\n", encoding="utf-8")
    stage = DclmLinks(tlds=str(tmp_path / "tlds"), everywhere=True)
    stage.setup()
    doc = Document("id", "from a.zzz and b.org it came")
    assert stage.process(doc) is None and doc.text == "from and b.org it came"
    with pytest.raises(ValueError, match="holds no top-level domain"):
        DclmLinks(tlds=str(tmp_path / "none")).setup()


@pytest.mark.parametrize("make", [lambda n: "a" * n, lambda n: "_" * n, lambda n: "a.b" * n, lambda n: "א'" * n,
                                  lambda n: "a\u0301" * n, lambda n: "1," * n, lambda n: "1 " * n + "x",
                                  lambda n: "ab " * n])
def test_hostile_texts_take_linear_time(make):
    stages = [DclmQuality(), DclmRepetition(), DclmLines(), RefinedWebLines(), DclmLinks(everywhere=True)]
    for stage in stages:
        stage.setup()

    def read(text: str) -> None:
        for stage in stages:
            stage.process(Document("id", text))

    assert_linear(read, make, 300)


def plain_refinedweb(text: str) -> tuple[int, int, str]:
    """Compute (words, words in flagged lines, remaining text) with the stage's default settings."""
    total = flagged = 0
    kept = []
    counter = re.compile(r"\W*\d[\d.,]*\s?[kmb]?\+?\s+(like|share|comment|retweet|view|follower|download)s?\W*"
                         r"|\W*\d[\d.,]*\s?[kmb]?\+?\s+repl(y|ies)\W*", re.IGNORECASE)
    for line in text.split("\n"):
        words = line.split()
        total += len(words)
        capitals = [c for c in line if c.isupper()]
        if words and (len(words) == 1 or 2 * len(capitals) > len(line) or all(w.isdigit() for w in words)
                      or counter.fullmatch(line)):
            flagged += len(words)
            continue
        if 0 < len(words) <= 10:
            left = re.sub(r"(?i)^\s*sign-in|read more\.\.\.\s*$|items in cart", "", line)
            if left != line:
                flagged += len(words)
                line = left.strip()
                if not line:
                    continue
        kept.append(line)
    return total, flagged, "\n".join(kept).strip()


def test_refinedweb_lines_by_their_definition():
    stage = RefinedWebLines()
    stage.setup()
    edited = 0
    for text in itertools.chain(TEXTS, real_texts(30)):
        total, flagged, left = plain_refinedweb(text)
        doc = Document("id", text)
        reason = stage.process(doc)
        assert (doc.signals["refinedweb_words"], doc.signals["refinedweb_words_flagged"]) == (total, flagged)
        assert reason == ("refinedweb_no_lines" if not left.split()
                          else "refinedweb_words_flagged" if flagged / total > 0.05 else None), ascii(text)
        if reason is None and flagged:
            edited += 1
            assert doc.text == left
    assert edited
