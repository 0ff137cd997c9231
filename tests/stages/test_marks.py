"""The places in a dropped text that show the reason: what they are, and that stages name them for texts that they
drop."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import vectors
from stages.catalog import stage_class
from stages.text.marks import copies, merged_spans, repeated_words
from stages.vectors import read_vectors

FOLDER = Path(__file__).parents[1] / "conformance"


def parts(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[a:b] for a, b in spans]


def test_copies_are_the_later_lines_and_paragraphs():
    text = "one\n  two \nthree\ntwo\none\n\n\none"
    assert parts(text, copies(text)) == ["two", "one", "one"]
    assert parts("a\nb\n\nc\n\na\nb", copies("a\nb\n\nc\n\na\nb", "\n\n")) == ["a\nb"]


def test_repeated_words():
    text = "to be or not to be that is to be"
    assert parts(text, repeated_words(text, 2, top=True)) == ["to be"] * 3
    assert parts(text, repeated_words(text, 2, top=False)) == ["to be"] * 2
    assert repeated_words("all words differ here", 2, top=True) == [] == repeated_words("a", 5, top=False)
    again = "a b c d e x a b c d e"
    assert parts(again, repeated_words(again, 5, top=False)) == ["a b c d e"]
    assert parts("a a a a", repeated_words("a a a a", 2, top=False)) == ["a a a"], "overlapping runs are one place"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=20))
def test_joined_spans_cover_the_same_and_stand_apart(spans):
    given_ = [(a, a + n) for a, n in spans]
    out = merged_spans(given_)
    inside = {i for a, b in given_ for i in range(a, b)}
    assert inside <= {i for a, b in out for i in range(a, b)}
    assert all(b + 1 < c for (_, b), (c, _) in pairwise(out))


@pytest.mark.parametrize(("name", "reasons"), [
    ("c4", {"lorem_ipsum", "curly_bracket"}),
    ("gopher_quality", {"gopher_too_many_hashes", "gopher_too_many_ellipsis", "gopher_too_many_bullets",
                        "gopher_too_many_end_ellipsis"}),
    ("gopher_repetition", {"dup_line_frac", "dup_para_frac", "top_2_gram", "duplicated_5_n_grams"}),
    ("dclm_quality", {"dclm_symbols", "dclm_bullets", "dclm_ellipses"}),
    ("dclm_repetition", {"dclm_line", "dclm_line_chars", "dclm_paragraph", "dclm_top_2_gram", "dclm_dup_5_gram"}),
    ("fineweb", {"char_dup_ratio"})])
def test_stages_name_places_for_what_they_drop(name, reasons):
    """Each of these reasons has a vector with a place, and places lie in the text. (A pair of words that occurs once
    may be the most frequent one, too; there is nothing to mark then.)"""
    seen = set()
    for case in read_vectors(FOLDER / f"{name}.jsonl")[1]:
        stage = vectors.stage_of(name, json.dumps(case.get("config", {}), sort_keys=True), FOLDER)
        reason, doc = vectors.outcome(stage, case)
        if reason in reasons:
            spans = stage_class(name).matches(doc.text, reason)
            assert all(0 <= a < b <= len(doc.text) for a, b in spans), case.get("name")
            seen |= {reason} if spans else set()
    assert seen == reasons


@pytest.mark.parametrize("name", ["c4", "gopher_quality", "gopher_repetition", "dclm_quality", "dclm_repetition",
                                  "fineweb", "fineweb2", "where"])
def test_other_reasons_have_no_place(name):
    assert stage_class(name).matches("a { lorem ipsum # # ... a {", "some_other") == []
