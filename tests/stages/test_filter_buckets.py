"""Buckets and ensembles: edges are exact percentiles, however documents are divided into parts, and tiers become
datasets."""

from __future__ import annotations

import json
import math
import os
import random
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.app import run_command
from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.fs import Store
from stages.document import Document
from stages.filter import buckets
from stages.filter.buckets import Buckets, Edges, Fit, Weights, group_name, vigintiles
from stages.filter.ensemble import Ensemble


# -- edges -------------------------------------------------------------------------------------------------------------
def fit(values, weights=None, shares=None) -> list[float]:
    made = Weights()
    made.add(np.array(values, float), np.ones(len(values), np.int64) if weights is None else np.array(weights))
    return made.edges(shares or vigintiles())


def bucket(edges: list[float], value: float) -> int:
    return sum(edge <= value for edge in edges)


def test_distinct_scores_fall_into_buckets_of_equal_size():
    values = random.Random(1).sample(range(10**6), 2000)
    counts = np.bincount([bucket(fit(values), v) for v in values], minlength=20)
    assert counts.tolist() == [100] * 20


def test_weight_counts_not_documents():
    """As many bytes in the upper half as in the lower, though nine of ten documents are short."""
    values, weights = list(range(100)), [1] * 90 + [9] * 10
    assert fit(values, weights, vigintiles(2)) == [90.0]


SCORES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=60)


@given(SCORES, st.sampled_from([2, 3, 20]))
def test_the_bucket_of_a_value_is_that_of_its_middle_rank(scored, n):
    """Against the definition, in fractions: documents of equal score share the bucket in which their middle lies."""
    edges, total = fit(*zip(*scored), vigintiles(n)), sum(w for _, w in scored)
    assert edges == sorted(edges) and len(edges) == n - 1
    for value, weight in scored:
        if weight:
            own = sum(w for v, w in scored if v == value)
            rank = Fraction(2 * sum(w for v, w in scored if v < value) + own, 2 * total)
            assert bucket(edges, value) == min(int(rank * n), n - 1)


@given(SCORES, st.integers(0, 60), st.randoms())
def test_edges_do_not_depend_on_how_documents_are_parted(scored, cut, rng):
    one, two, mixed = Weights(), Weights(), Weights()
    shuffled = rng.sample(scored, len(scored))
    for made, part in ((one, scored[:cut]), (two, scored[cut:]), (mixed, shuffled)):
        values, weights = (np.array(x) for x in (zip(*part) if part else ((), ())))
        made.add(values.astype(float), weights.astype(np.int64))
    one.merge(two)
    assert one.edges(vigintiles(7)) == mixed.edges(vigintiles(7)) and one.documents == mixed.documents == len(scored)


def test_equal_scores_are_in_one_bucket_and_others_may_be_empty():
    edges = fit([0.0] * 90 + list(range(1, 11)))
    assert bucket(edges, 0.0) == 9 and [bucket(edges, v) for v in (1, 10)] == [18, 19]
    edges = fit([1.0] * 50)
    assert {bucket(edges, v) for v in (0.0, 1.0)} == {0, 10} and math.isinf(edges[-1])


def test_groups_have_edges_of_their_own(tmp_path):
    found = Fit(["s"], "language")
    found.add(["de"] * 100 + ["en"] * 100, {"s": np.arange(200.0)}, np.ones(200, np.int64))
    found.add(["en"], {"s": np.array([np.nan])}, np.ones(1, np.int64))
    (tmp_path / "e").write_text(json.dumps(found.document([Fraction(3, 10), Fraction(6, 10)], "documents")))
    assert found.missing == {"s": 1}
    assert Edges.read(tmp_path / "e").scores == {"s": {"de": [30.0, 60.0], "en": [130.0, 160.0]}}
    stage = Buckets(edges=str(tmp_path / "e"))
    assert stage.signals == ("s_bucket",) and stage.reads() == {"s": "scores", "language": "edges"}
    for language, value, expected in (("de", 29.9, 0), ("de", 30, 1), ("de", 130, 2), ("en", 130, 1), ("fr", 130, None),
                                      ("en", None, None)):
        doc = Document("0" * 32, "", language=language, signals={} if value is None else {"s": value})
        assert stage.process(doc) is None and doc.signals.get("s_bucket") == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x"}', '{"format": "tokenmill buckets 1", "by": null}', (
    '{"format": "tokenmill buckets 1", "by": null, "scores": {"s": {"": {"edges": [2, 1]}}}}'), (
    '{"format": "tokenmill buckets 1", "by": null, "scores": {"s": {"": {"edges": ["a"]}}}}'), (
    '{"format": "tokenmill buckets 1", "by": null, "scores": {"s": {"": {"edges": [1, NaN, 0]}}}}'), (
    '{"format": "tokenmill buckets 1", "by": ["s"], "scores": {"s": {"": {"edges": [1]}}}}'), "[" * 100_000])
def test_other_files_are_refused_by_name(tmp_path, text):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(ValueError, match=r"e\.json is no file of `tokenmill buckets fit`"):
        Edges.read(tmp_path / "e.json")
    assert "no file of" in Buckets(edges=str(tmp_path / "e.json")).problems()["edges"]


def test_what_a_dataset_before_has_stored_is_not_taken_for_ones_own(tmp_path):
    (tmp_path / "e").write_text('{"format": "tokenmill buckets 1", "by": "language", "scores": {"s": {"en": {'
                                '"edges": [1]}}}}')
    doc = Document("0" * 32, language="fr", signals={"s": 2.0, "s_bucket": 19.0, "ensemble_bucket": 1,
                                                     "ensemble_tier": 0})
    Buckets(edges=str(tmp_path / "e")).process(doc)
    Ensemble(of=["s_bucket"]).process(doc)
    assert doc.signals == {"s": 2.0}


def test_what_could_not_be_held_is_refused_before_it_fills_memory(tmp_path):
    weights = Weights(most_values=3)
    weights.add(np.array([1.0, 2.0, 3.0, 1.0]), np.ones(4, np.int64))
    with pytest.raises(ValueError, match="more than 3 different values; round the score to a grid"):
        weights.add(np.array([4.0]), np.ones(1, np.int64))
    fit = Fit(["s"], "topic")
    fit.weights["s"] = {f"topic {n}": Weights() for n in range(buckets.MOST_GROUPS - 1)}
    fit.add(["a", "topic 1", "a"], {"s": np.array([1.0, 2.0, np.nan])}, np.ones(3, np.int64))
    assert fit.missing == {"s": 1}
    with pytest.raises(ValueError, match="more than 100,000 different values of 'topic'"):
        fit.add(["c"], {"s": np.array([1.0])}, np.ones(1, np.int64))
    (tmp_path / "e.json").touch()
    os.truncate(tmp_path / "e.json", buckets.MOST_BYTES + 1)
    with pytest.raises(ValueError, match=r"e\.json is no file of `tokenmill buckets fit` \(more than 67,108,864 bytes"):
        Edges.read(tmp_path / "e.json")
    for n in (1, buckets.MOST_BUCKETS + 1):
        with pytest.raises(ValueError, match=f"{n} buckets; 2 … "):
            vigintiles(n)


@pytest.mark.parametrize(("value", "name"), [
    (None, ""), (float("nan"), ""), (float("inf"), ""), (3.0, "3"), (-0.0, "0"), (2.5, "2.5"), (1e20, "1" + 20 * "0")])
def test_groups_of_a_signal_have_the_name_of_its_value(value, name):
    assert group_name(value) == name
    doc = Document("0" * 32, source="web", language="de", signals={} if value is None else {"topic": value})
    assert [Edges(by, {}).group(doc) for by in ("topic", "source", "language", None)] == [name, "web", "de", ""]


# -- ensembles ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("signals", "combine", "expected"), [
    ({"a": 3.0, "b": 18.0}, "max", (18, 3)), ({"a": 3.0, "b": 18.0}, "min", (3, 0)),
    ({"a": 3.0, "b": 18.0}, "mean", (10.5, 1)), ({"b": 19.0}, "max", (19, 4)), ({"a": 6.0}, "max", (6, 0)),
    ({"a": 7.0}, "max", (7, 1)), ({"a": 11.0}, "max", (11, 1)), ({"a": 12.0, "b": 17.0}, "max", (17, 2)),
    ({"c": 5.0}, "max", (None, None))])
def test_nemotrons_ensemble(signals, combine, expected):
    doc = Document("0" * 32, signals=dict(signals))
    assert Ensemble(of=["a", "b"], combine=combine).process(doc) is None
    assert (doc.signals.get("ensemble_bucket"), doc.signals.get("ensemble_tier")) == expected


def test_tiers_ascend():
    with pytest.raises(ValueError, match="must ascend"):
        Ensemble(of=["a"], tiers=[7, 7])


# -- commands and a recipe ---------------------------------------------------------------------------------------------
RECIPE = """
version: 1
sources: {{web: {{read: jsonl, path: in, language: language}}}}
datasets:
  scored: {{from: web, steps: [gopher_repetition, gopher_quality]}}
{rest}
run: {{partition: 200KB, signals: all}}
"""
TIERS = """
  tiered: {from: scored, steps: [{buckets: {edges: edges.json}},
                                 {ensemble: {of: [gopher_words_bucket, gopher_mean_word_length_bucket]}}]}
  high:   {from: tiered, steps: [{where: {signals: {ensemble_tier: [4]}}}]}
  medium: {from: tiered, steps: [{where: {signals: {ensemble_tier: [2, 3]}}}]}
  low:    {from: tiered, steps: [{where: {signals: {ensemble_tier: {max: 2}}}}]}
  mixed:  {from: [high, medium], steps: []}
"""


def execute(at, rest: str = "") -> Store:
    (at / "r.yaml").write_text(RECIPE.format(rest=rest))
    run_recipe(load_recipe(at / "r.yaml", []), str(at / "store"), make_backend=make_backend("inline", 1, None),
               report=False)
    return Store(str(at / "store"))


@pytest.fixture
def site(tmp_path):
    (tmp_path / "in").mkdir()
    rng = random.Random(7)
    known = ["the", "of", "and", "market", "river", "however", "science", "people", "to", "reasonable", "understanding"]
    with open(tmp_path / "in" / "a.jsonl", "w") as f:
        for i in range(300):
            text = ". ".join(" ".join(rng.choices(known, k=9)) + str(rng.random())[2:9] for _ in range(8 + i % 40))
            f.write(json.dumps({"text": text, "language": "de" if i % 3 == 0 else "en"}) + "\n")
    return tmp_path


def test_tiers_of_an_ensemble_become_datasets(site, capsys):
    store = execute(site)
    scored = {r["id"]: r["signals"] for r in iter_rows(store, "datasets/scored", ["id", "signals"])}
    assert len(scored) > 200
    line = ["buckets", "fit", str(site / "store/datasets/scored"), "--score", "gopher_words", "--score",
            "gopher_mean_word_length", "--weight", "bytes", "--out", str(site / "edges.json")]
    assert run_command([*line, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["buckets"] == 20 and said["scores"]["gopher_words"]["documents"] == len(scored)
    first = (site / "edges.json").read_bytes()
    assert run_command(line) == 0 and (site / "edges.json").read_bytes() == first
    assert "edges are rough: all" in capsys.readouterr().out
    store = execute(site, TIERS)
    tiers = {name: {r["id"]: r["signals"] for r in iter_rows(store, f"datasets/{name}", ["id", "signals"])}
             for name in ("high", "medium", "low", "mixed", "tiered")}
    assert tiers["high"] and tiers["medium"] and tiers["low"]
    assert tiers["mixed"].keys() == tiers["high"].keys() | tiers["medium"].keys()
    assert tiers["tiered"].keys() == scored.keys() == tiers["mixed"].keys() | tiers["low"].keys()
    edges = json.loads(first)["scores"]
    for name, signals in ((n, s) for n, docs in tiers.items() for s in docs.values()):
        best = max(bucket([e for e in edges[score][""]["edges"] if e is not None], signals[score])
                   for score in ("gopher_words", "gopher_mean_word_length"))
        assert signals["ensemble_bucket"] == best
        tier = sum(best >= low for low in (7, 12, 18, 19))
        assert signals["ensemble_tier"] == tier
        assert {"high": tier == 4, "medium": tier in (2, 3), "low": tier < 2}.get(name, True)
    words = sum(s["bytes"] for s in scored.values())
    top = sum(s["bytes"] for s in tiers["tiered"].values() if s["gopher_words_bucket"] == 19)
    assert 0.03 < top / words < 0.07, "a bucket holds a twentieth of the bytes"


def test_recipes_that_name_what_is_not_there(site, capsys):
    store = execute(site)
    assert run_command(["buckets", "fit", f"{site}/store/datasets/scored", "--score", "gopher_words", "--out",
                        f"{site}/edges.json"]) == 0
    assert list(iter_rows(store, "datasets/scored", ["id"]))
    for rest, said in (
            (TIERS, "no step before this one writes a signal 'gopher_mean_word_length_bucket': did you mean "
                    "'gopher_mean_word_length'?"),
            ("  t: {from: scored, steps: [{buckets: {edges: edges.json, scores: [words]}}]}",
             "has no edges for 'words'"),
            ("  t: {from: web, steps: [{buckets: {edges: edges.json}}]}",
             "no step before this one writes a signal 'gopher_words'"),
            ("  t: {from: web, steps: [{buckets: {edges: r.yaml}}]}", "is no file of `tokenmill buckets fit`")):
        (site / "r.yaml").write_text(RECIPE.format(rest=rest))
        with pytest.raises(RecipeError) as caught:
            load_recipe(site / "r.yaml", [])
        assert said in str(caught.value)


@pytest.mark.parametrize(("options", "said"), [
    (["--score", "b"], "has no signal 'b': known: a"), (["--score", "a", "--by", "topic"], "has no signal 'topic'"),
    (["--score", "a", "--at", "60,30"], "percentages ascend"), (["--score", "a", "--at", "x"], "give percentages"),
    (["--score", "a", "--at", "30", "--buckets", "3"], "either --buckets or --at"),
    (["--score", "a", "--weight", "a"], "no whole numbers"), (["--score", "nothing"], "null everywhere")])
def test_fit_names_what_is_wrong(tmp_path, capsys, options, said):
    signals = pa.StructArray.from_arrays([pa.array([0.5, 0.7]), pa.array([None, None], pa.float64())], ["a", "nothing"])
    pq.write_table(pa.table({"id": ["x", "y"], "language": ["en", "de"], "signals": signals}), tmp_path / "p.parquet")
    assert run_command(["buckets", "fit", str(tmp_path), "--out", str(tmp_path / "e.json"), *options]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "e.json").exists()
