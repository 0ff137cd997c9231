"""A filter decides by its own numbers: signals that an earlier dataset has stored under the same names are removed,
also if the filter has nothing to say about a document."""

from __future__ import annotations

import json

import pytest

from stages.catalog import stage_class
from stages.document import Document
from stages.stage import Stage

TEXTS = ("", " \n ", "! ! !", "ab cd", "One line. " * 3, "{ lorem ipsum }", "It is a text, and so on. " * 20)
PLAIN = ("c4", "dclm_lines", "dclm_quality", "dclm_repetition", "fineweb", "fineweb2", "gopher_quality",
         "gopher_repetition", "madlad400", "redpajama2", "refinedweb_lines", "rights", "url")


def words(folder, name: str, *entries: str) -> str:
    path = folder / name
    path.write_text(json.dumps({"en": entries}), encoding="utf-8")
    return str(path)


def looked_at(stage: Stage, text: str, language: str, signals: dict[str, float]) -> tuple:
    doc = Document("0" * 32, text, language=language, signals=dict(signals))
    reason = stage.process(doc)
    return reason, doc.signals, doc.text


@pytest.mark.parametrize("name", PLAIN)
def test_numbers_of_before_count_for_nothing(name):
    stage = stage_class(name)({"languages": ["deu_Latn"]} if name == "fineweb2" else None)
    stage.setup()
    for value in (0.0, 1.0, 1000.0):
        before = dict.fromkeys(stage.signals, value)
        for text in TEXTS:
            for language in ("", "deu_Latn"):
                assert looked_at(stage, text, language, before) == looked_at(stage, text, language, {}), (text, value)


def test_a_word_of_another_list_drops_nothing(tmp_path):
    one, other = words(tmp_path, "one.json", "damn"), words(tmp_path, "other.json", "heck")
    first = stage_class("c4_badwords")(lists=one, keep_fraction=1.0)
    second = stage_class("c4_badwords")(lists=other)
    third = stage_class("badwords")(lists=one, max_rate=None)
    fourth = stage_class("badwords")(lists=other)
    for stage in (first, second, third, fourth):
        stage.setup()
    doc = Document("0" * 32, "a damn text", language="en")
    assert first.process(doc) is None and "c4_badwords_draw" in doc.signals
    assert second.process(doc) is None and doc.signals == {"c4_badwords": 0.0}
    third.process(doc)
    doc.language = "fr"                                    # which has no list: nothing is known of it
    assert fourth.process(doc) is None and doc.signals == {"c4_badwords": 0.0}
