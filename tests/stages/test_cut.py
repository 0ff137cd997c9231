"""Cutting passages out of documents, compared with a reference that works character by character."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.cut import MOST_NOTED, TOO_SHORT, CutPassages, cut_name, moved, whole_passages, without
from stages.document import Document

TEXTS = st.text(st.sampled_from("ab \n.é–漢😀\u0301"), max_size=60)
PLACES = st.integers(0, 260)
#: (start, end) in bytes; many do not lie at borders of characters, overlap, or lie outside the text
RANGES = st.lists(st.tuples(PLACES, PLACES), max_size=8)


def passages(ranges: list[tuple[int, int]], reason: str = "r") -> list[dict[str, Any]]:
    return [{"start": a, "end": b, "reason": reason, "match": None} for a, b in ranges]


def characters(text: str) -> list[tuple[int, int]]:
    """Return the range of bytes of each character."""
    ends = [len(text[:i].encode()) for i in range(len(text) + 1)]
    return list(pairwise(ends))


@given(TEXTS, RANGES)
def test_exactly_the_characters_that_lie_whole_in_one_passage_are_cut(text, ranges):
    data = text.encode()
    whole = whole_passages(data, passages(ranges))
    kept = "".join(c for c, (a, b) in zip(text, characters(text)) if not any(s <= a and b <= e for s, e in ranges))
    assert without(data, whole).decode() == kept
    assert all(p["start"] < p["end"] for p in whole)
    assert all(p["end"] <= q["start"] for p, q in pairwise(whole))


@given(TEXTS, RANGES, RANGES)
def test_loss_spans_hold_the_characters_that_they_held_before(text, ranges, span_ranges):
    borders = [0, *(end for _, end in characters(text))]
    places = sorted({place for span in span_ranges for place in span if place in borders})
    spans = list(zip(places[::2], places[1::2]))
    whole = whole_passages(text.encode(), passages(ranges))
    left = moved([{"start": a, "end": b} for a, b in spans], whole)
    data = without(text.encode(), whole)
    gone = [(p["start"], p["end"]) for p in whole]
    expected = ["".join(c for c, (a, b) in zip(text, characters(text))
                        if start <= a and b <= end and not any(s <= a and b <= e for s, e in gone))
                for start, end in spans]
    assert [data[s["start"]:s["end"]].decode() for s in left] == [piece for piece in expected if piece]
    assert all(s["end"] <= t["start"] for s, t in pairwise(left))


def test_a_cut_document_has_signals_and_metadata_and_other_documents_have_none():
    stage = CutPassages(step="s", min_chars=0)
    doc = Document("0" * 32, "one two three", meta={"title": "t"})
    doc.cuts = [{"start": 0, "end": 4, "reason": "here", "match": "f" * 32},
                {"start": 2, "end": 8, "reason": "there", "match": None}]
    assert stage.process(doc) is None
    assert doc.text == "three"
    assert doc.signals == {"s_cut_bytes": 8, "s_left_chars": 5, "s_left_words": 1}
    assert doc.meta == {"title": "t", "s_cut": {
        "cuts": {"here": 1, "there": 1}, "bytes": {"here": 4, "there": 4},
        "passages": [{"start": 0, "end": 4, "reason": "here", "match": "f" * 32},
                     {"start": 4, "end": 8, "reason": "there"}]}}
    assert stage.counts(doc) == {"docs": 1, "cuts": {"here": 1, "there": 1}, "bytes": {"here": 4, "there": 4},
                                 "sources": {doc.source: 8}}
    doc.cuts = None                                     # a later dataset with the same step finds nothing to cut
    assert stage.process(doc) is None
    assert (doc.text, doc.signals, doc.meta) == ("three", {}, {"title": "t"})
    assert stage.counts(doc) is None


@pytest.mark.parametrize(("config", "reason"), [
    ({"min_chars": 5}, None), ({"min_chars": 6}, TOO_SHORT), ({"min_chars": 0, "min_words": 1}, None),
    ({"min_chars": 0, "min_words": 2}, TOO_SHORT)])
def test_documents_with_less_left_than_the_limits_are_dropped(config, reason):
    stage = CutPassages(step="s", **config)
    doc = Document("0" * 32, "one two three")
    doc.cuts = passages([(0, 8)])
    assert stage.process(doc) == reason == stage.verdict(doc)


def test_a_document_without_text_is_dropped_and_a_short_one_that_was_not_cut_is_kept():
    stage = CutPassages(step="s", min_chars=0)
    empty, short = Document("0" * 32, "all \n"), Document("1" * 32, "a")
    empty.cuts = passages([(0, 3)])
    assert stage.process(empty) == TOO_SHORT
    assert CutPassages(step="s").process(short) is None


def test_places_that_the_step_pii_noted_move_and_foreign_metadata_of_that_name_stays():
    for value, after in (([{"kind": "emails", "start": 8, "end": 13}], [{"kind": "emails", "start": 4, "end": 9}]),
                         ([{"kind": "emails", "start": 4, "end": 8}], []), ("no list", "no list"), ([1], [1])):
        doc = Document("0" * 32, "one two three", meta={"pii": value})
        doc.cuts = passages([(4, 8)])
        CutPassages(step="s", min_chars=0).process(doc)
        assert doc.meta["pii"] == after


def test_metadata_lists_a_limited_number_of_passages_and_counts_all():
    doc = Document("0" * 32, "ab" * 100)
    doc.cuts = passages([(i, i + 1) for i in range(0, 200, 2)])
    CutPassages(step="s", min_chars=0).process(doc)
    entry = doc.meta[cut_name("s")]
    assert len(entry["passages"]) == MOST_NOTED and entry["cuts"] == {"r": 100} == entry["bytes"]
