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
from stages.document import Document
from stages.text.badwords import BadWords, normal
from stages.text.marks import copies, merged_spans, repeated_words
from stages.vectors import read_vectors

FOLDER = Path(__file__).parents[1] / "conformance"


def parts(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[a:b] for a, b in spans]


def test_copies_are_the_later_lines_and_paragraphs():
    text = "one\n  two \nthree\ntwo\none\n\n\none"
    assert parts(text, copies(text)) == ["two", "one", "one"]
    assert parts(text, copies(text, first=True)) == ["one", "two", "two", "one", "one"]
    assert parts("a\nb\n\nc\n\na\nb", copies("a\nb\n\nc\n\na\nb", "\n\n")) == ["a\nb"]


def test_repeated_words():
    text = "to be or not to be that is to be"
    assert parts(text, repeated_words(text, 2, top=True)) == ["to be"] * 3
    assert parts(text, repeated_words(text, 2, top=False)) == ["to be"] * 2
    assert repeated_words("all words differ here", 2, top=True) == [] == repeated_words("a", 5, top=False)
    again = "a b c d e x a b c d e"
    assert parts(again, repeated_words(again, 5, top=False)) == ["a b c d e"]
    assert parts(again, repeated_words(again, 5, top=False, first=True)) == ["a b c d e"] * 2
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
    ("fineweb", {"char_dup_ratio"}), ("madlad400", {"madlad400_questionable"}),
    ("badwords", {"badwords_count", "badwords_rate"}), ("c4_badwords", {"document_removed_with_badwords"}),
    ("rights", {"rights_reserved"}),
    ("decontaminate", {"contaminated", "contaminated_all"})])
def test_stages_name_places_for_what_they_drop(name, reasons):
    """Each of these reasons has a vector with a place, and places lie in the text. (A pair of words that occurs once
    may be the most frequent one, too; there is nothing to mark then.)"""
    seen = set()
    for case in read_vectors(FOLDER / f"{name}.jsonl")[1]:
        stage = vectors.stage_of(name, json.dumps(case.get("config", {}), sort_keys=True), FOLDER)
        reason, doc = vectors.outcome(stage, case)
        if reason in reasons:
            spans = stage.matches(doc, reason)
            assert all(0 <= a < b <= len(doc.text) for a, b in spans), case.get("name")
            seen |= {reason} if spans else set()
    assert seen == reasons


@pytest.mark.parametrize("name", ["c4", "gopher_quality", "gopher_repetition", "dclm_quality", "dclm_repetition",
                                  "fineweb", "fineweb2", "exact", "madlad400", "rights"])
def test_other_reasons_have_no_place(name):
    assert stage_class(name)().matches(Document("", "a { lorem ipsum # # ... a {"), "some_other") == []


def test_every_copy_is_marked_where_the_rule_counts_the_first():
    text = Document("", "one line\nanother\none line")
    for name, reason, marked in (("gopher_repetition", "dup_line_frac", 1), ("dclm_repetition", "dclm_line", 2)):
        assert parts(text.text, stage_class(name)().matches(text, reason)) == ["one line"] * marked


def test_a_bad_word_is_marked_wherever_it_counts():
    """In all languages, also where the normal form of a text has another length."""
    lengths = 0
    for case in read_vectors(FOLDER / "badwords.jsonl")[1]:
        stage = vectors.stage_of("badwords", json.dumps(case.get("config", {}), sort_keys=True), FOLDER)
        _, doc = vectors.outcome(stage, case)
        spans = stage.matches(doc, "badwords_count")
        assert len(spans) == (doc.signals.get("badwords") or 0), case
        lengths += len(normal(doc.text, "en")) != len(doc.text)
    assert lengths > 3
    words = BadWords("en", ["tulip"])
    text = "A … of ﬁne tu\xadlips,\xa0Ｔulip…tu\xadlip ﬁ (TULIP)"
    assert parts(text, words.places(text)) == ["Ｔulip", "tu\xadlip", "TULIP"]


@pytest.mark.parametrize(("name", "config", "reason", "text", "marked"), [
    ("madlad400", {}, "madlad400_questionable", "Short one. We saw 12 (34) {56} >78 +90 1/2 there. "
     "It is a page about the Facebook of birds. The old wall stands there still.",
     ["Short one", "We saw 12 (34) {56} >78 +90 1/2 there", "Facebook"]),
    ("madlad400", {"rules": ["length"]}, "madlad400_questionable", "Short one. We saw 12 (34) {56} >78 +90 there.",
     ["Short one"]),
    ("rights", {}, "rights_restricted", "CC BY-SA 4.0. Photos: CC BY-NC 2.0, creativecommons.org/licenses/by-nd/4.0; "
     "Creative Commons Attribution-NonCommercial 4.0",
     ["CC BY-NC 2.0", "creativecommons.org/licenses/by-nd/4.0", "Creative Commons Attribution-NonCommercial 4.0"]),
    ("rights", {}, "rights_reserved", "İ All Rights Reserved.", ["All Rights Reserved"]),
    ("rights", {}, "rights_copyright", "Text. © 2020 Somebody", ["© 2020"]),
    ("rights", {}, "rights_noai", "All rights reserved", []),
    ("pii", {"cards": True, "drop": ["cards"]}, "pii_cards", "Pay by <CREDIT_CARD>, ask email@example.com",
     ["<CREDIT_CARD>"]),
    ("pii", {"drop": ["emails", "ips"]}, "pii_ips", "From 22.214.171.124 and 2001:db8::1, email@example.com",
     ["22.214.171.124", "2001:db8::1"]),
    ("pii", {}, "pii_own", "<CREDIT_CARD>", [])])
def test_the_rules_own_words_are_marked(name, config, reason, text, marked):
    assert parts(text, stage_class(name)(config).matches(Document("", text), reason)) == marked


def test_items_of_evaluation_sets_are_marked_by_characters(tmp_path):
    question = "why did the grey herons leave the old mill before the pond was frozen over again"
    (tmp_path / "set.jsonl").write_text(json.dumps({"question": question}))
    stage = stage_class("decontaminate")({"sets": {"s": str(tmp_path / "set.jsonl")}})
    text = f"Ünïcödé — ahead: {question} — and öthers behind. Also: {question}!"
    assert parts(text, stage.matches(Document("", text), "contaminated")) == [question, question]
