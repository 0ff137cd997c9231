"""The names of labels, and which labels get a stream of their own."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.passes.encode import SPLITS
from pipeline.passes.labels import MOST_STREAMS, TooManyStreams, label_name, streams_of
from pipeline.passes.part_tokens import LabelPiece
from pipeline.plan.label_pieces import LabelPieces


@given(st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.lists(st.text(max_size=3), max_size=2)))
def test_every_value_has_a_name_that_can_be_a_folder(value):
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,24}", label_name(value))


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_texts_have_different_names(a, b):
    assert (label_name(a) == label_name(b)) == (a == b)


def test_no_document_can_pretend_to_have_no_label():
    assert label_name(None) == label_name("") == "none"
    assert label_name("none") != "none" and label_name("other") != "other"


def test_labels_with_few_tokens_are_put_together_level_by_level():
    tokens = {("en", "b0"): 100, ("en", "b1"): 4, ("en", "b2"): 7, ("de", "b0"): 5, ("de", "b1"): 6, ("is", "b0"): 3,
              ("fo", "b0"): 2}
    assert streams_of("web", tokens, 10) == {
        ("en", "b0"): "web.en.b0", ("en", "b1"): "web.en.other", ("en", "b2"): "web.en.other",
        ("de", "b0"): "web.de.other", ("de", "b1"): "web.de.other", ("is", "b0"): "web.other",
        ("fo", "b0"): "web.other"}


@given(st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.sampled_from("uvw")),
                       st.integers(0, 30)), st.integers(0, 40))
def test_only_the_last_resort_has_fewer_tokens_than_the_least(tokens, least):
    streams = streams_of("s", tokens, least)
    assert set(streams) == set(tokens)
    sums: dict[str, int] = {}
    for label, stream in streams.items():
        sums[stream] = sums.get(stream, 0) + tokens[label]
        assert stream.split(".")[1:-1] == list(label[:stream.count(".") - 1])
    assert all(total >= least for stream, total in sums.items() if stream != "s.other")
    assert streams == streams_of("s", dict(reversed(tokens.items())), least)


def test_hostile_labels_have_names_of_their_own():
    hostile = ["..", ".", "a/b", "a.b", "a\nb", "a\0b", " ", "en ", "\u0435n", "EN", "e\u0301", "\u00e9", "x" * 10_000,
               "x" * 9_999, "-", "--", "\ud800", "\u202een", "con", "split=train", "web.other", "*", "~", "$HOME"]
    names = [label_name(label) for label in hostile]
    assert len(set(names)) == len(hostile)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,24}", name) for name in names)


def test_ten_thousand_labels_make_few_streams_unless_all_have_tokens():
    tokens = {(label_name(f"топик {i}"),): 1 + i for i in range(10_000)}
    assert len(tokens) == 10_000
    streams = streams_of("web", tokens, 9_001)
    assert len(set(streams.values())) == 1001 and list(streams.values()).count("web.other") == 9000


def test_a_stream_name_too_long_for_a_folder_is_an_error_that_names_the_key():
    with pytest.raises(TooManyStreams, match=r"^shards\.web\.by:"):
        streams_of("web", {("x" * 24,) * 9: 100}, 10)


def test_more_streams_than_allowed_are_an_error_that_names_the_key():
    with pytest.raises(TooManyStreams, match=r"^shards\.web\.by:"):
        streams_of("web", {(str(i),): 100 for i in range(MOST_STREAMS + 1)}, 10)


@given(st.lists(st.tuples(st.sampled_from(SPLITS), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9)),
                                                            unique_by=lambda item: item[0], max_size=6)), max_size=8))
def test_pieces_on_disk_are_those_of_the_parts(given_parts):
    parts, reference = [], {}
    for number, (split, labels) in enumerate(given_parts):
        first, entries = 0, []
        for label, tokens in sorted(labels):
            piece = LabelPiece(1, first, first + tokens, first * 7, (first + tokens) * 7, (number, tokens, 0))
            entries.append([[label], list(piece)])
            reference[label, split, number] = piece
            first += tokens
        parts.append({other: entries if other == split else [] for other in SPLITS})
    pieces = LabelPieces(json.loads(json.dumps(part)) for part in parts)
    labels = sorted({label for label, _, _ in reference})
    assert pieces.tokens == {(label,): sum(p.stop - p.first for (own, split, _), p in reference.items()
                                           if own == label and split == "train") for label in labels}
    for some in (labels, labels[:1], labels[1:]):
        found = pieces.of([(label,) for label in some])
        for split in SPLITS:
            assert [[LabelPiece(*p[:5], tuple(p.sums)) for p in part] for part in found[split]] == [
                [reference[label, split, number] for label in some if (label, split, number) in reference]
                for number in range(len(parts))]
