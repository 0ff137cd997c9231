"""The differences between the texts of a group of duplicates, and how groups are shown."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.clusters import AROUND, SHOWN, difference
from pipeline.report.groups import cluster_cards, words
from pipeline.report.html import render
from tests.pipeline.generated_report import generated

ADDRESS = "someone.somewhere@mail.example.org"


def only(diff: list[list[str]], *kinds: str) -> list[str]:
    return [word for kind, text in diff for word in text.split() if kind in kinds]


@given(st.lists(st.sampled_from("abcdef"), max_size=40), st.lists(st.sampled_from("abcdef"), max_size=40))
def test_a_difference_without_cuts_gives_both_texts_back(a, b):
    diff = difference(" ".join(a), " ".join(b))
    if a != b and not any(kind == "cut" for kind, _ in diff):
        assert only(diff, "both", "kept") == a and only(diff, "both", "removed") == b
    if a == b:
        assert only(diff, "both") == a


def test_long_common_stretches_are_cut():
    common = [f"w{i}" for i in range(300)]
    diff = difference(" ".join([*common, "old", *common]), " ".join([*common, "new", *common, "end"]))
    assert diff == [["cut", ""], ["both", " ".join(common[-AROUND:])], ["kept", "old"], ["removed", "new"],
                    ["both", " ".join(common[:AROUND])], ["cut", ""], ["both", " ".join(common[-AROUND:])],
                    ["removed", "end"]]
    rng = random.Random(2)
    other = difference(*(" ".join(f"{letter}{rng.random()}" for _ in range(2000)) for letter in "ab"))
    assert sum(len(text.split()) for _, text in other) <= SHOWN and ["cut", ""] in other


def test_addresses_are_scrubbed_wherever_texts_are_cut():
    for lead in range(32730, 32770, 3):
        text = "x" * lead + " " + ADDRESS
        assert "someone" not in str(difference(text, "y " + text)), lead
    assert "someone" not in str(difference("a b", f"a {ADDRESS} b"))


def test_scripts_without_spaces_are_compared_by_characters():
    text = "".join(chr(0x4e00 + i % 997) for i in range(3000))
    for place in (0, 100, 1600, 2999):
        diff = difference(text, text[:place] + "新しい" + text[place:])
        assert only(diff, "removed") == ["新しい"] and only(diff, "kept") == [], place
        assert sum(len(part) for _, part in diff) < 100
    assert difference(text * 20, text * 20)[0][1] == text[:400], "more than CHARS without a space"
    assert only(difference("新" + text * 20, text * 20), "kept")[0].startswith("新")


def test_long_words_are_compared_whole_and_shown_short():
    words_ = ["some", "short", "words", "stand", "around", "it", "so", "that", "words", "are", "words"] * 4
    long = "x" * 100
    diff = difference(" ".join([*words_, long + "a"]), " ".join([*words_, long + "b"]))
    assert [[kind, text[-1], len(text) < 90] for kind, text in diff if kind in ("kept", "removed")] == [
        ["kept", "a", True], ["removed", "b", True]]
    late = [f"w{i}" for i in range(4000)]
    assert only(difference(" ".join(late), " ".join([*late, "end"])), "removed") == ["end"]
    lines = "\n".join(f"w{i}" for i in range(20_000))
    assert difference(lines, lines)[0][1].startswith("w0 w1 "), "cut at any white space"


def test_words_are_escaped():
    shown = str(words([["both", "<i>"], ["kept", "<script>"], ["removed", "a\"b"], ["cut", ""]]))
    assert "<script" not in shown and "<i>" not in shown and "&lt;script&gt;" in shown
    assert shown.count("<mark") == 2 and words(None) == ""


def test_many_sources_are_listed_as_pairs():
    names = [f"s{i}" for i in range(20)]
    section = {"barrier": "d/exact.1", "step": "exact", "read": {"docs": 1, "of": 1, "exact": True}, "groups": 3,
               "sizes": {"1": 2, "4": 1}, "largest": [], "unknown": 0,
               "pairs": [{"removed": s, "kept": "s0", "docs": 3} for s in names]}
    [card] = cluster_cards({"names": {"sources": names}, "clusters": [section]})
    assert card["table"] is None and "16–31" in card["charts"][0][1]
    two = {**section, "pairs": section["pairs"][:2]}
    [card] = cluster_cards({"names": {"sources": names}, "clusters": [two]})
    assert card["table"]["names"] == ["s0", "s1"]
    assert [[c["docs"] for c in row["cells"]] for row in card["table"]["rows"]] == [[3, 0], [3, 0]]
    assert cluster_cards({"names": {"sources": names}, "clusters": [{**section, "groups": 0}]}) == []


def test_a_kept_text_that_was_not_found_may_have_been_dropped_later():
    document = generated(2)
    assert "a later step dropped it" not in render(document)
    document["clusters"][0]["unknown"] = 3
    assert "a later step dropped it" in render(document)
