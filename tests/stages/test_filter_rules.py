"""The rules of Gopher, C4 and FineWeb: decision, reason and edited text equal datatrove's, and verdicts can be derived
again from signals."""

from __future__ import annotations

import random
import re

import pytest
from datatrove.data import Document as Theirs
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.catalog import stage_class
from stages.document import Document
from stages.filter.c4 import C4
from stages.filter.fineweb import FineWeb
from stages.filter.gopher_quality import GopherQuality
from stages.filter.gopher_repetition import GopherRepetition, lines, paragraphs
from stages.stage import role_of
from tests.stages.texts import AWKWARD, PROSE, random_texts, real_texts

PAIRS = {
    "gopher_repetition": (GopherRepetition(), GopherRepetitionFilter()),
    "gopher_quality": (GopherQuality(), GopherQualityFilter()),
    "c4": (C4(), C4QualityFilter(filter_no_terminal_punct=False)),
    "c4_punct": (C4(filter_no_terminal_punct=True), C4QualityFilter()),
    "fineweb": (FineWeb(), FineWebQualityFilter()),
}

#: texts that sit near every rule's threshold, besides the awkward and the random ones
SHAPED = [
    *("- item of a list that is long enough\n" * n + PROSE * m for n in (1, 5, 30, 60) for m in (1, 2, 5)),
    *("and then more ...\n" * n + PROSE for n in (1, 2, 4, 9)), *("# " * n + PROSE for n in (3, 12, 14, 15, 40)),
    *(PROSE + "x " * n for n in (5, 30, 60)), *(PROSE + " 12" * n for n in (5, 20, 40, 45, 80)),
    *(PROSE * n for n in range(1, 6)),
    *("\n\n".join([PROSE] * n) for n in range(1, 6)),
    *(PROSE + f"\nUsing cookies: we {verb} cookies here.\nSee the Privacy Policy." for verb in ("use", "eat")),
    PROSE + "\nPlease enable JavaScript to read this.", PROSE + "\na lorem ipsum of words.", PROSE + "\nif (x) { y; }",
    PROSE + "\n{ short", PROSE + "\n" + "w" * 1001 + " and a lorem ipsum",
    "One[1] two[edit] three. " * 4 + "[12] [3] [4]",
    "[1] [2] [3]\n" * 6, "Word of the day. " * 4, "Word of the day. " * 5, PROSE.replace(".", ""),
    "\n".join(f"Line {i} of the text" for i in range(30)), "\n".join("Short line." for _ in range(9)) + "\n" + PROSE,
    "word " * 49, "word " * 50, "w. " * 60, "incomprehensibilities " * 60,
    PROSE.replace("the", "der").replace("to", "zu"),
]


def run(stage, text: str) -> tuple[str | None, str]:
    doc = Document("id", text)
    return stage.process(doc), doc.text


def run_theirs(block, text: str) -> tuple[str | None, str]:
    doc = Theirs(text=text, id="id")
    result = block.filter(doc)
    return (result[1] if isinstance(result, tuple) else None if result else "dropped"), doc.text


@pytest.mark.parametrize("pair", PAIRS)
def test_equal_to_datatrove(pair):
    ours, theirs = PAIRS[pair]
    reasons = set()
    for text in [*AWKWARD, *SHAPED, *random_texts(100, seed=11), *real_texts(150)]:
        expected = run_theirs(theirs, text)
        assert run(ours, text) == expected, text[:200]
        reasons.add(expected[0])
    assert len(reasons) >= 4  # the texts reach the rules


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=settings.default.max_examples // 3)
@given(text=st.text(st.sampled_from("aab  .\n\n-•#…1é日{[]'\"w"), min_size=1, max_size=300))
def test_equal_to_datatrove_on_any_text(pair, text):
    ours, theirs = PAIRS[pair]
    assert run(ours, text) == run_theirs(theirs, text)


@pytest.mark.parametrize("seed", range(2))
def test_equal_to_datatrove_with_other_thresholds(seed):
    rng = random.Random(seed)
    u = rng.uniform
    lines = {f"dup_{kind}_frac": u(0.01, 0.4) for kind in ("line", "para", "line_char", "para_char")}
    top, dup = {n: u(0.005, 0.1) for n in (2, 3, 4)}, {n: u(0.005, 0.1) for n in range(5, 11)}
    quality = {"min_doc_words": rng.choice([1, 20, None]), "max_doc_words": 400, "min_avg_word_length": u(2, 4),
               "max_avg_word_length": u(4, 6), "max_symbol_word_ratio": u(0.001, 0.1),
               "min_stop_words": rng.randrange(9),
               "max_bullet_lines_ratio": u(0.1, 0.9), "max_non_alpha_words_ratio": u(0.6, 0.95),
               "max_ellipsis_lines_ratio": u(0.05, 0.3)}
    c4 = {"remove_citations": False, "min_words_per_line": rng.randrange(6), "max_word_length": 12,
          "filter_javascript": False, "filter_curly_bracket": False, "filter_policy": False, "min_num_sentences": 3}
    fineweb = {"line_punct_thr": u(0.1, 0.9), "line_punct_exclude_zero": True, "short_line_thr": u(0.1, 0.9),
               "short_line_length": 50, "char_duplicates_ratio": u(0, 0.05), "new_line_ratio": u(0.02, 0.3)}
    pairs = [
        (GopherRepetition(**lines, **{f"top_{n}_gram": x for n, x in top.items()},
                          **{f"dup_{n}_gram": x for n, x in dup.items()}),
         GopherRepetitionFilter(**lines, top_n_grams=tuple(top.items()), dup_n_grams=tuple(dup.items()))),
        (GopherQuality(**quality), GopherQualityFilter(**quality)),
        (C4(**c4), C4QualityFilter(filter_no_terminal_punct=False, **c4)),
        (FineWeb(**fineweb), FineWebQualityFilter(**fineweb)),
    ]
    for text in [text for text in [*AWKWARD, *SHAPED, *real_texts(40)] if text.strip()]:
        for ours, theirs in pairs:
            assert run(ours, text) == run_theirs(theirs, text)


def test_thresholds_do_not_change_signals():
    for name in ("gopher_repetition", "gopher_quality", "fineweb"):
        cls = stage_class(name)
        decisions = [f for f in cls.Config.model_fields if role_of(cls.Config, f) == "decision"]
        assert decisions
        strict = cls(**{f: 1 for f in decisions if cls.Config.model_fields[f].annotation is not bool})
        for text in SHAPED:
            first, second = Document("id", text), Document("id", text)
            cls().process(first)
            strict.process(second)
            assert first.signals == second.signals
        assert cls().key(("signal",)) == strict.key(("signal",))
        assert cls().key() != strict.key()


@given(st.text("a\n \r", max_size=30))
def test_lines_and_paragraphs_are_cut_as_by_the_patterns(text):
    assert lines(text) == re.split(r"\n+", text)
    assert paragraphs(text.strip()) == re.split(r"\n{2,}", text.strip())


@given(st.lists(st.sampled_from([
    "A line of some words.", "[1]", "lorem [2]ipsum", "javascript", "{", "use coo\u212aies here", " ", "", "\u2028",
    "\x1c", "é", "two words", "x):", ":) is it.", "No. end", "w" * 1001]), max_size=14),
    st.sampled_from([" ", "\n", "\r\n"]), st.sampled_from([None, 0, 1, 3]), st.booleans())
def test_c4_asks_each_line_the_same(pieces, gap, fewest, citations):
    """The lines that come ready from the words of the text, against `splitlines` and `split`."""
    text = gap.join(pieces)
    ours = C4(min_words_per_line=fewest, remove_citations=citations)
    doc, other = Document("", text), Document("", text)
    slow = C4(min_words_per_line=fewest, remove_citations=citations)
    slow._lines = lambda d: ((line.strip(), len(line.split()), -1) for line in d.lines)
    assert (ours.process(doc), doc.text, doc.signals) == (slow.process(other), other.text, other.signals)
