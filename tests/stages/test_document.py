"""Views of a text (such as its words) are computed once, shared by all stages, and forgotten when the text changes."""

from __future__ import annotations

from stages.catalog import stage_class
from stages.document import Document

TEXT = ("It is often said that the river ran where the mill stood. Nobody believed it (at first).\n"
        "They went to see it with their own eyes, and there it was. Then they went home again.\n"
        "What they had seen was not to be forgotten by any of them. It had been a clear day.")


def test_views_are_made_once_and_go_with_the_text():
    doc = Document("", "Größe\u2028zählt. \ud800")
    views = [doc.words, doc.lines, doc.lower, doc.utf8]
    assert [doc.words, doc.lines, doc.lower, doc.utf8] == views and doc.words is views[0]
    assert doc.utf8 == doc.text.encode("utf-8", "surrogatepass") and doc.text_bytes == len(doc.utf8)
    assert (doc.lower, doc.lines) == ("größe\u2028zählt. \ud800", ["Größe", "zählt. \ud800"])
    doc.text = "".join(["Größe\u2028zä", "hlt. \ud800"])          # equal, another object
    assert doc.words is views[0] and doc.lines is views[1]
    doc.text = "Größe"
    assert doc.words.strings() == ["Größe"] and doc.lines == ["Größe"] and doc.utf8 == "Größe".encode()
    assert (doc.lower, doc.text_bytes) == ("größe", 7)


def test_a_chain_of_rules_splits_a_text_once(monkeypatch):
    from stages.text import words

    split: list[str] = []
    made = words.Vocabulary.encode
    monkeypatch.setattr(words.Vocabulary, "encode", lambda self, text: split.append(text) or made(self, text))
    stages = [stage_class(name)() for name in ("gopher_repetition", "gopher_quality", "c4", "fineweb")]
    for stage in stages:
        stage.setup()
    for text, times in ((TEXT, 1), (TEXT + "\nshort", 2)):        # C4 cuts a line off the second
        split.clear()
        doc = Document("", text)
        assert [stage.process(doc) for stage in stages] == [None] * 4, doc.signals
        assert len(split) == times and len(set(split)) == times
