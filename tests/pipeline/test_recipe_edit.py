"""Changing a threshold changes the recipe's text at this place and nowhere else."""

from __future__ import annotations

import copy
import difflib
import random
from typing import Any

import pytest

from pipeline.recipe.edit import edit_recipe
from pipeline.recipe.errors import RecipeError
from pipeline.recipe.load import READY
from pipeline.recipe.marks import parse_yaml

TEXT = """\
# What we know of the web
version: 1
sources: {web: {read: jsonl, path: in}}    # one source

datasets:
  raw: {from: web, steps: [html, {language: {keep: [en], min: 0.65}}, pii]}
  clean:
    from: raw
    steps:
      - gopher_repetition          # as in the paper
      - gopher_quality:
          # fewer words than they had
          min_doc_words: 40   # forty

          min_stop_words: 2
          stop_words:
            - the
            - be

      # what C4 does
      - c4: {min_num_sentences: 5, filter_javascript: true}   # lax
      - fineweb:
      - where:
          language:
            - en   # and no other
            - de
      - "pii": {}
run: {partition: 70KB}   # small
"""


def edited(thresholds: dict[int, dict[str, Any]], off: set[int] = frozenset(), dataset: str = "clean",  # type: ignore
           text: str = TEXT) -> str:
    return edit_recipe(text, "r.yaml", dataset, thresholds, frozenset(off))


def differing(text: str, other: str) -> list[str]:
    return [line for line in difflib.ndiff(text.splitlines(), other.splitlines()) if line[:1] in "+-"]


@pytest.mark.parametrize(("thresholds", "lines"), [
    ({1: {"min_doc_words": 60}}, ["-           min_doc_words: 40   # forty",
                                  "+           min_doc_words: 60   # forty"]),
    ({0: {"dup_line_frac": 0.25}}, ["-       - gopher_repetition          # as in the paper",
                                    "+       - gopher_repetition: {dup_line_frac: 0.25}          # as in the paper"]),
    ({1: {"max_doc_words": None}}, ["+           max_doc_words: null"]),
    ({2: {"min_num_sentences": 3}}, [
        "-       - c4: {min_num_sentences: 5, filter_javascript: true}   # lax",
        "+       - c4: {min_num_sentences: 3, filter_javascript: true}   # lax"]),
    ({3: {"line_punct_thr": 1e-5}}, ["-       - fineweb:", "+       - fineweb: {line_punct_thr: 1.0e-05}"]),
    ({5: {"drop": ["emails", "ips"]}}, ['-       - "pii": {}', '+       - "pii": {drop: [emails, ips]}']),
])
def test_only_the_lines_of_the_changed_keys_differ(thresholds, lines):
    assert differing(TEXT, edited(thresholds)) == lines


def test_a_list_over_several_lines_becomes_one_on_a_line():
    text = edited({4: {"language": ["no", "fr", "1"]}})
    assert parse_yaml(text, "")[0]["datasets"]["clean"]["steps"][4] == {"where": {"language": ["no", "fr", "1"]}}
    assert "# what C4 does" in text and text.count("#") >= TEXT.count("#") - 1


def test_steps_left_out_become_comments():
    text = edited({}, {1})
    for line in ("      # - gopher_quality:", "      #     min_doc_words: 40   # forty"):
        assert line in text.splitlines()
    assert [*parse_yaml(text, "")[0]["datasets"]["clean"]["steps"]][:2] == [
        "gopher_repetition", {"c4": {"min_num_sentences": 5, "filter_javascript": True}}]


@pytest.mark.parametrize("off", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}])
def test_steps_are_taken_out_of_a_list_in_brackets(off):
    steps = parse_yaml(edited({}, off, "raw"), "")[0]["datasets"]["raw"]["steps"]
    assert steps == [s for i, s in enumerate(["html", {"language": {"keep": ["en"], "min": 0.65}}, "pii"])
                     if i not in off]


def test_the_only_step_may_be_left_out():
    text = edited({}, {0}, "d", "version: 1\ndatasets:\n  d:\n    from: web\n    steps:\n      - c4   # all\nrun: {}\n")
    assert parse_yaml(text, "")[0]["datasets"]["d"]["steps"] == [] and "# - c4   # all" in text


def test_many_changes_at_once_say_what_they_should_and_keep_every_comment():
    rng = random.Random(1)
    keys = {0: ["top_2_gram", "dup_line_frac"], 1: ["min_doc_words", "max_doc_words", "min_stop_words"],
            2: ["min_num_sentences"], 3: ["line_punct_thr"], 5: ["drop"]}
    values = [None, 3, 0.25, -1, 1e-9, 123456789, True, ["emails"], {"en": 0.5, "default": 1}, "no", "a: b", "\u202e",
              ""]
    unchanged = parse_yaml(TEXT, "")[0]
    comments = [line[line.index("#"):] for line in TEXT.splitlines() if "#" in line]
    for _ in range(150):
        changes = {n: {k: rng.choice(values) for k in rng.sample(keys[n], rng.randint(1, len(keys[n])))}
                   for n in rng.sample(sorted(keys), rng.randint(1, len(keys)))}
        off = set(rng.sample(range(6), rng.randint(0, 2)))
        text = edited(changes, off)
        wanted = copy.deepcopy(unchanged)
        steps = wanted["datasets"]["clean"]["steps"]
        for number, config in changes.items():
            name, old = (steps[number], {}) if isinstance(steps[number], str) else next(iter(steps[number].items()))
            steps[number] = {name: {**(old or {}), **config}}
        wanted["datasets"]["clean"]["steps"] = [s for i, s in enumerate(steps) if i not in off]
        assert parse_yaml(text, "")[0] == wanted
        assert all(comment in text for comment in comments)


@pytest.mark.parametrize("path", sorted(READY.glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_recipes_can_be_changed_in_every_step(path):
    text = path.read_text()
    data, _ = parse_yaml(text, str(path))
    for name, dataset in data["datasets"].items():
        for number in range(len(dataset.get("steps") or [])):
            new = edit_recipe(text, str(path), name, {number: {"threshold": 0.5}})
            assert len(differing(text, new)) <= 3
            edit_recipe(text, str(path), name, {}, frozenset({number}))


@pytest.mark.parametrize("text", [
    "version: 1\nbase: &q {min_doc_words: 3}\ndatasets:\n  clean: {from: w, steps: [{gopher_quality: *q}]}\n",
    "version: 1\ndatasets:\n  clean: {from: w}\n", "version: 1\ndatasets: {}\n", "version: 1\n"])
def test_what_cannot_be_changed_is_refused(text):
    with pytest.raises(RecipeError) as caught:
        edited({0: {"min_doc_words": 4}}, text=text)
    assert caught.value.problems[0].path[:1] == ("datasets",)
