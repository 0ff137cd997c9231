"""`where`: what it keeps, what it reports, which recipes it refuses, and that a changed condition is evaluated again
without reading texts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.passes.chain import LoadedStage
from pipeline.passes.verdicts import overwritten
from pipeline.plan.inputs import InputError
from pipeline.plan.overlap import check_overlaps
from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.document import Document
from stages.filter.where import Condition, Where
from stages.stage import Stage


def test_sources_are_told_apart():
    """Everything else that a condition may say has vectors, in which a source cannot stand."""
    for config, reason in (({"source": "web"}, None), ({"source": ["wiki"]}, "where_source")):
        document = Document("0" * 32, "text", source="web")
        assert Where(config).process(document) == Where(config).verdict(document) == reason


@pytest.mark.parametrize(("config", "said"), [
    ({}, "without a condition"),
    ({"language": []}, "at least 1 item"),
    ({"quality_score": {"min": 0.3}}, r"signals: \{quality_score: \{min"),
    ({"signals": {"a": {}}}, "takes no document"),
    ({"signals": {"a": []}}, "takes no document"),
    ({"signals": {"a": {"min": 1, "max": 1}}}, "min 1 is not below max 1"),
    ({"signals": {"a": {"min": float("nan")}}}, "finite"),
    ({"signals": {"a": {"any": [1], "min": 0}}}, "not both"),
    ({"signals": {"a": {"above": 1}}}, "above"),
    ({"signals": {"a": "high"}}, "a"),
])
def test_conditions_that_say_nothing_or_contradict_themselves_are_refused(config, said):
    with pytest.raises(ValueError, match=said):
        Where(config)


#: 0 … 20 in halves, so that chance finds equal edges
EDGE = st.integers(0, 40).map(lambda n: n / 2)
RANGE = st.one_of(st.builds(lambda v: {"any": v}, st.lists(EDGE, min_size=1, max_size=3)),
                  st.builds(lambda a, b: {"min": min(a, b), "max": max(a, b) + 0.5}, EDGE, EDGE),
                  st.builds(lambda a: {"min": a}, EDGE), st.builds(lambda a: {"max": a}, EDGE))


@given(RANGE, RANGE)
def test_disjoint_conditions_share_no_value(one, other):
    one, other = Condition(**one), Condition(**other)
    quarters = [n / 4 for n in range(-8, 180)]
    assert one.disjoint(other) == (not any(one.holds(v) and other.holds(v) for v in quarters))
    assert one.disjoint(other) == other.disjoint(one)


def test_apart():
    def apart(one, other):
        return Where.disjoint_configs(Where.Config(**one), Where.Config(**other))

    assert apart({"language": "de"}, {"language": ["en", "fr"]})
    assert not apart({"language": "de"}, {"language": ["de", "fr"]})
    assert apart({"source": "a"}, {"source": "b"})
    assert not apart({"source": "a"}, {"language": "b"})
    assert apart({"signals": {"b": {"max": 18}}}, {"signals": {"b": {"min": 18}}})
    assert not apart({"signals": {"b": {"max": 18}}}, {"signals": {"c": {"min": 18}}})


# -- in a recipe -----------------------------------------------------------------------------------------------------
RECIPE = """
version: 1
sources: {{web: {{read: jsonl, path: in, language: lang}}}}
datasets:
  scored: {{from: web, steps: [{{gopher_quality: {{min_doc_words: 1, min_stop_words: 0}}}}]}}
  short:  {{from: scored, steps: [{{where: {{signals: {{gopher_words: {{max: {edge}}}}}}}}}]}}
  long:   {{from: scored, steps: [{{where: {{language: [en], signals: {{gopher_words: {{min: {edge}}}}}}}}}]}}
  both:   {{from: [short, long], steps: []}}
run: {{partition: 4KB}}
"""


def execute(at: Path, text: str) -> Store:
    (at / "r.yaml").write_text(text)
    run_recipe(load_recipe(at / "r.yaml", []), str(at / "store"), make_backend=make_backend("inline", 1, None),
               report=False)
    return Store(str(at / "store"))


def words(store: Store, folder: str) -> list[tuple[float, str]]:
    return sorted((row["signals"]["gopher_words"], row["language"])
                  for row in iter_rows(store, folder, ["signals", "language"]))


@pytest.fixture
def site(tmp_path):
    (tmp_path / "in").mkdir()
    with open(tmp_path / "in" / "a.jsonl", "w") as f:
        for n in range(1, 81):
            f.write(json.dumps({"text": " ".join(["word"] * n), "lang": "de" if n % 4 == 0 else "en"}) + "\n")
    return tmp_path


def test_documents_are_routed_by_what_an_earlier_dataset_stored(site):
    store = execute(site, RECIPE.format(edge=50))
    every = [(float(n), "de" if n % 4 == 0 else "en") for n in range(1, 81)]
    assert words(store, "datasets/short") == [e for e in every if e[0] < 50]
    assert words(store, "datasets/long") == [e for e in every if e[0] >= 50 and e[1] == "en"]
    assert words(store, "datasets/both") == [e for e in every if e[0] < 50 or e[1] == "en"]
    dropped = [(r["stage"], r["reason"]) for r in iter_rows(store, "dropped/long", ["stage", "reason"])]
    assert sorted(set(dropped)) == [("where", "where_gopher_words"), ("where", "where_language")]
    assert len(dropped) == 80 - len(words(store, "datasets/long"))


@pytest.mark.parametrize("front", ["", "{where: {language: [en, de], source: web}}, "])
def test_changed_conditions_are_replayed(site, front):
    recipe = RECIPE.replace("[{{where", f"[{front.replace('{', '{{').replace('}', '}}')}{{{{where") if front else RECIPE
    known = {r.key for r in Log.read(execute(site, recipe.format(edge=50))).records()}
    store = execute(site, recipe.format(edge=30))
    new = [r for r in Log.read(store).records() if r.key not in known and r.node in ("short", "long")]
    replayed, documents = sum(r.counters["replayed"]["docs"] for r in new), sum(
        n["docs"] for r in new for n in r.counters["in"].values())
    assert 0 < replayed < documents
    (site / "anew").mkdir()
    os.symlink(site / "in", site / "anew" / "in")
    anew = execute(site / "anew", recipe.format(edge=30))
    for folder in ("datasets/short", "datasets/long", "dropped/short", "dropped/long", "datasets/both"):
        assert words(store, folder) == words(anew, folder)


def test_a_condition_taken_away_is_not_replayed_from_a_signal_that_a_later_step_has_written_over(site):
    (site / "in" / "b.jsonl").write_text(json.dumps({"text": "Ten words that end with a stop and so stay.\n" * 4 + (
        "words of javascript here " * 10)}) + "\n")
    words = "{gopher_quality: {min_doc_words: 1, min_stop_words: 0}}"
    recipe = """
version: 1
sources: {web: {read: jsonl, path: in/b.jsonl}}
datasets: {d: {from: web, steps: [%s, {where: {source: web%s}}, {c4: {min_num_sentences: 1}}, %s]}}
run: {signals: all}
"""
    store = execute(site, recipe % (words, ", signals: {gopher_words: {max: 60}}", words))
    assert [row["reason"] for row in iter_rows(store, "dropped/d", ["reason"])] == ["where_gopher_words"]
    store = execute(site, recipe % (words, "", words))
    assert len(list(iter_rows(store, "datasets/d", ["id"]))) == 1


class Namer(Stage):
    """A stage that sets the language of every document to "xx"."""

    name = "namer"
    sets_language = True

    def process(self, doc):
        doc.language = "xx"


def test_no_replay_from_a_language_that_a_later_step_has_set():
    def steps(*stages):
        return [LoadedStage(s.name, s.name, s.name, s) for s in stages]

    assert overwritten(steps(Where(language="en"), Namer()), 0) == 1
    assert overwritten(steps(Where(source="web"), Namer()), 0) is None
    assert overwritten(steps(Namer(), Where(language="en")), 1) is None


@pytest.mark.parametrize(("steps", "said"), [
    ("[{where: {signals: {gopher_wrods: {min: 5}}}}]", "no step before this one writes a signal 'gopher_wrods': did "
     "you mean 'gopher_words'"),
    ("[{where: {signals: {line_punct: {min: 5}}}}, fineweb]", "no step before this one writes a signal 'line_punct'"),
    ("[{where: {gopher_words: {min: 5}}}]", "signals: {gopher_words: {min"),
    ("[{where: {signals: {gopher_words: {min: 5, max: 4}}}}]", "min 5 is not below max 4"),
])
def test_recipes_that_cannot_mean_what_they_say(site, steps, said):
    (site / "r.yaml").write_text(f"""
version: 1
sources: {{web: {{read: jsonl, path: in}}}}
datasets:
  scored: {{from: web, steps: [gopher_quality]}}
  picked: {{from: scored, steps: {steps}}}
""")
    with pytest.raises(RecipeError) as caught:
        load_recipe(site / "r.yaml", [])
    assert said in str(caught.value) and "r.yaml:6:" in str(caught.value)


@pytest.mark.parametrize(("source", "refused"), [("again", True), ("scored", False)])
def test_signals_of_one_name_in_two_datasets_keep_nothing_apart(site, source, refused):
    """Each dataset has scored the documents on its own: one may be short in this and long in that."""
    again = "  again:  {from: web, steps: [c4, {gopher_quality: {min_doc_words: 1}}]}"
    (site / "r.yaml").write_text(RECIPE.format(edge=50).replace("  long:   {from: scored", again + (
        "\n  long:   {from: " + source)))
    recipe = load_recipe(site / "r.yaml", [])
    if refused:
        with pytest.raises(InputError, match="both hold documents of 'web'"):
            check_overlaps(recipe)
    else:
        check_overlaps(recipe)


def test_inputs_that_share_documents_are_still_refused(site):
    with pytest.raises(InputError, match="both hold documents of 'web'"):
        execute(site, RECIPE.format(edge=50).replace("max: 50", "max: 51"))
