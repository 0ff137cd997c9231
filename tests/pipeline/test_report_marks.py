"""Excerpts of dropped documents around the place that a rule matched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pipeline.report import marks
from pipeline.report.figures import places
from pipeline.report.marks import SEARCHED, SHOWN, excerpt, stages_of
from pipeline.report.samples import PARTING_CHARS, parting, sample
from pipeline.report.samples import excerpt as sampled_excerpt
from stages.document import Document
from stages.filter import blacklists
from stages.scrub.rows import mask, mask_url
from stages.stage import Stage, StageConfig, resource


def match(step: str, reason: str, text: str, meta: str | None = None, language: str = "",
          config: dict[str, Any] | None = None, files: bool = True, url: str = "") -> dict[str, Any]:
    """The excerpt of a text that a step of a recipe dropped."""
    stages = stages_of({"datasets": {"d": {"steps": [{step: config}]}}}, "d", files=files)
    return marks.match(stages.get(step), reason, {"text": text, "meta": meta, "language": language}, url)


def test_the_place_is_marked_with_words_around_it():
    text = "word " * 400 + "and Lorem\n ipsum " + "tail " * 400
    assert match("c4", "lorem_ipsum", text.replace("\n", "")) == {"match": excerpt(
        text.replace("\n", ""), [(text.index("Lorem"), text.index("Lorem") + 11)])}
    pieces = match("c4", "lorem_ipsum", text.replace("\n", ""))["match"]
    assert pieces[0] == ["cut", ""] == pieces[-1] and ["mark", "Lorem ipsum"] in pieces
    assert pieces[1][1].startswith("word ") and pieces[1][1].endswith(" and ")
    assert sum(len(t) for _, t in pieces) <= SHOWN


def test_several_places_at_the_beginning():
    assert match("gopher_quality", "gopher_too_many_hashes", "# a # b")["match"] == [
        ["mark", "#"], ["text", " a "], ["mark", "#"], ["text", " b"]]


def test_what_no_rule_names_is_not_marked():
    assert match("c4", "too_few_sentences", "{") == {} == match("mine:Own", "lorem_ipsum", "lorem ipsum")
    assert match("minhash", "minhash", "{") == {} == match("c4", "curly_bracket", "none of it")
    assert match("exact", "exact_text", "{", json.dumps({"exact": {"kept": "0"}})) == {}


@pytest.mark.parametrize("column", [0.5, None, "kept", ["kept"], {"kept": 1}, {"kept": "1"},
                                    {"kept": "1", "similarity": "high"}])
def test_a_column_with_the_name_of_a_step_is_no_verdict(column):
    meta = json.dumps({"c4": column, "kept": 1})
    assert match("c4", "lorem_ipsum", "Lorem ipsum.", meta) == match("c4", "lorem_ipsum", "Lorem ipsum.") != {}
    row = {"id": "0", "url": None, "source": "web", "text": "Lorem ipsum.", "locator": None, "meta": meta}
    assert sample(row, "c4").keys().isdisjoint({"kept", "similarity"})
    noted = {"kept": "1", "similarity": None}
    assert sample({**row, "meta": json.dumps({"exact": noted})}, "exact").items() >= noted.items()


def test_addresses_never_come_through():
    rng = random.Random(1)
    for lead in (*range(0, 200, 7), 65520, 65530, 65536):
        text = "x" * lead + " {someone.somewhere@mail.example.org} { " + "".join(rng.choices("ab ", k=500))
        assert "someone" not in json.dumps(match("c4", "curly_bracket", text))


@pytest.mark.parametrize("searched", [SEARCHED, 4096, PARTING_CHARS])
def test_no_part_of_a_number_with_spaces_comes_through(searched: int):
    """A search ends at a space, which may be one inside a number."""
    card, pad = "4556 7375 8689 9855", "a" * 97 + " "
    for shown in range(len(card) + 1):
        lead = (pad * searched)[:searched - 12 - shown] + "lorem ipsum "
        text = f"{lead}{card} is the number. " + "tail " * 200
        marked = match("c4", "lorem_ipsum", text)
        assert "match" in marked
        assert "4556" not in json.dumps(marked), shown
        blank = " " * (searched - 12 - shown) + f"lorem ipsum {card} is the number. " + "tail " * 200
        assert "4556" not in sampled_excerpt(blank), shown
        same = "one two three four five six seven eight nine ten " + " " * (searched - 61 - shown)
        assert "4556" not in json.dumps(parting(f"{same}lorem ipsum {card} is it", f"{same}lorem other {card} is it"))


@pytest.mark.parametrize(("url", "shown", "marked"), [
    ("https://john:hunter2secret@bad.com/x", "https://bad.com/x", "bad.com"),
    ("https://bad.com/?a=1&access_token=f00dfeed", "https://bad.com/?a=1&access_token=***", "bad.com"),
    ("https://bad.com/?to=a.b%40mail.example.org", "https://email@example.com", ""),
])
def test_a_url_has_neither_a_password_nor_a_mark_of_a_placeholder(url: str, shown: str, marked: str):
    """Of a user name and the host, an e-mail address would be made, whose host would then be marked as blocked."""
    row = {"id": "0", "url": url, "source": "web", "text": "Text.", "locator": None, "meta": None}
    assert sample(row)["url"] == shown
    pieces = match("url", "domain", "Text.", url=sample(row)["url"], config={"integrated": False}).get("url_match", [])
    assert "".join(text for kind, text in pieces if kind == "mark") == marked
    if marked:
        mask(row)
        assert row["url"] == shown, "on the service's pages, too"


def test_a_step_finds_what_it_dropped_by_the_settings_of_the_recipe(tmp_path: Path):
    (tmp_path / "lists.json").write_text(json.dumps({"de": ["distel"]}))
    config = {"lists": str(tmp_path / "lists.json")}
    for step in ("badwords", "c4_badwords"):
        assert match(step, "any", "Eine Distel.", language="de", config=config)["match"][1] == ["mark", "Distel"]
        assert match(step, "any", "Eine Distel.", language="en", config=config) == {}
        assert match(step, "any", "Eine Distel.", language="de", config=config, files=False).keys() == {"unmarked"}
        [said] = match(step, "any", "Eine Distel.", config={"lists": str(tmp_path / "gone.json")}).values()
        assert "gone.json" in said
    [said] = match("badwords", "any", "Eine Distel.", config={"no_such_key": 1}).values()
    assert "no_such_key" in said and "\n" not in said and len(said) <= SHOWN
    assert match("quality", "quality", "Text.", config={"model": "m.bin"}, files=False) == {}, "it never marks"


def test_the_empty_path_names_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    read: list[Path] = []
    monkeypatch.setattr(blacklists, "file_sha256", lambda path: read.append(path) or "0" * 64)
    config = {"blacklists": "", "categories": ["gambling"], "integrated": False}
    shown = match("url", "url_gambling", "Text.", url="https://a.com/", config=config, files=False)
    assert (shown.keys(), read) == ({"unmarked"}, [])
    assert match("language", "script_share", "Text на.", config={"model": None}, files=False).keys() == {"match"}


def test_a_step_that_reads_its_file_at_once_tells_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Reading(Stage):
        name = "reading"

        class Config(StageConfig):
            path: str = resource(..., "a file")

        def __init__(self, config: Any = None) -> None:
            super().__init__(config)
            raise ValueError(f"no number: {Path(self.config.path).read_text()}")

        def matches(self, doc: Document, reason: str) -> list[tuple[int, int]]:
            return []

    monkeypatch.setattr(marks, "stage_class", lambda _: Reading)
    (tmp_path / "key").write_text("hidden words")
    config = {"path": str(tmp_path / "key")}
    assert match("c4", "any", "Text.", config=config) == {"unmarked": "no number: hidden words"}
    for path in ("key", "gone"):
        [said] = match("c4", "any", "Text.", config={"path": str(tmp_path / path)}, files=False).values()
        assert said.startswith("the recipe names a file"), "not even whether there is one"


def test_the_part_of_a_url_is_marked_and_no_more_of_a_list_is_told(tmp_path: Path):
    (tmp_path / "words.txt").write_text("tulip\ndistel\n")
    config = {"integrated": False, "banned_words": str(tmp_path / "words.txt")}
    url = "https://a.example/<b>-tulip"
    result = match("url", "hard_blacklisted", "A tulip.", config=config, url=url)
    assert result == {"url_match": [["text", "https://a.example/<b>-"], ["mark", "tulip"]]}
    assert "&lt;b&gt;-<mark>tulip</mark>" in str(places(result["url_match"]))
    [said] = match("url", "hard_blacklisted", "A tulip.", config=config, url=url, files=False).values()
    assert "tulip" not in said and "words.txt" not in said


def test_hostile_text_is_only_text():
    shown = str(places(match("c4", "curly_bracket", "<script>alert(1)</script> { <b onclick=x>")["match"]))
    assert "<script" not in shown and "<b" not in shown and "<mark>{</mark>" in shown


@pytest.mark.parametrize(("url", "masked"), [
    ("https://me:secret@a.example/x", "https://a.example/x"), ("//me@a.example", "//a.example"),
    ("https://a.example/?u=some.one@b.example", "https://email@example.com")])
def test_a_url_that_is_masked_twice_is_as_masked_once(url, masked):
    assert mask_url(url) == mask_url(mask_url(url)) == masked
