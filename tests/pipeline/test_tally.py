"""What a pass counts over its documents: histograms of scores, and which documents are counted where."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.passes.chain import LoadedStage
from pipeline.passes.tally import BINS, HIGHEST, LOWEST, Tally, bin_edges, score_bin
from pipeline.recipe import load_recipe
from pipeline.report.html import bars_of, language_fates, score_charts
from pipeline.run import make_backend, run_recipe
from pipeline.store.parts import read_documents
from pipeline.store.records import merge_counters
from stages.document import Document
from stages.stage import Stage


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_score_is_between_the_edges_of_its_bin(score):
    number = score_bin(score)
    low, high = bin_edges(number)
    if abs(score) < 2.0 ** HIGHEST:
        assert low <= abs(score) < high
    assert number == 0 if abs(score) < 2.0 ** LOWEST else (number < 0) == (score < 0)
    assert number == 0 or high / low <= 1 + 1 / BINS, "a sixteenth of the lower edge at most"


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_bins_are_ordered_as_scores_are(values):
    bins = [score_bin(v) for v in sorted(values)]
    assert bins == sorted(bins)


def test_bins_at_their_edges():
    assert [score_bin(x) for x in (0.0, -0.0, 1e-9, math.nan, math.inf, -math.inf)] == [0, 0, 0, None, None, None]
    assert score_bin(1.0) - score_bin(0.5) == BINS and score_bin(math.nextafter(0.5, 0)) == score_bin(0.5) - 1
    assert bin_edges(score_bin(1.0)) == (1.0, 1 + 1 / BINS) and score_bin(-1.0) == -score_bin(1.0)
    assert score_bin(1e300) == score_bin(2.0 ** (HIGHEST - 1) * 1.99)
    assert [bin_edges(n)[1] == bin_edges(n + 1)[0] for n in range(1, 300)] == [True] * 299


class Scored(Stage):
    name = "scored"
    exact = False
    signals = ("a_score",)


class Counting(Stage):
    name = "counting"
    signals = ("other",)

    def counts(self, doc: Document) -> dict[str, Any] | None:
        return {"docs": 1, "of": {doc.source: 2}} if "other" in doc.signals else None


def doc(language: str, source: str = "x", **signals: float) -> Document:
    return Document(id="0", text="four words are here", language=language, source=source, signals=signals)


def licensed(doc: Document) -> Document:
    doc.meta["licence"] = "MIT"
    return doc


@pytest.mark.parametrize("until_drop", [True, False])
def test_what_is_counted_of_whom(until_drop):
    steps = [LoadedStage(s.name, "k", f"{i}:{s.name}", s) for i, s in enumerate((Scored(), Counting()))]
    tally = Tally(steps, ["a_score", "pii_ips", "other"], until_drop)
    tally.kept([doc("en", a_score=0.7, other=1.0, pii_ips=2.0), doc("de", "y", a_score=0.1, other=0.0, pii_ips=3.0)])
    tally.dropped(licensed(doc("fr", a_score=0.7, other=1.0, pii_ips=9.0)), "scored")
    tally.dropped(doc("fr", other=1.0), "counting")          # of it no score is known
    tally.removed(licensed(doc("en", a_score=0.7, other=1.0, pii_ips=4.0)), "minhash", 1.0)
    tally.removed(doc("4111 1111 1111 1111", a_score=0.7), "minhash", None)
    counters: dict[str, Any] = {"kept": {}, "languages": {}, "lengths": {}}
    tally.into(counters)
    assert counters["kept"] == {"x": {"docs": 1, "bytes": 19}, "y": {"docs": 1, "bytes": 19}}
    assert counters["languages"] == {"x": {"en": 1}, "y": {"de": 1}}
    assert counters["dropped_languages"] == {"scored": {"fr": 1}, "counting": {"fr": 1},
                                             "minhash": {"en": 1, "other": 1}}
    assert counters["dropped_lengths"] == {"x": {"4": 4}}, "of 19 characters, whoever dropped them"
    assert counters["dropped_licences"] == {"x": {"mit": 2, "": 2}}
    assert (counters["pii"], counters["dropped_pii"]) == ({"pii_ips": 5}, {"pii_ips": 13})
    assert counters["scores"] == {"a_score": {str(score_bin(0.1)): 1, str(score_bin(0.7)): 2}}
    assert counters["similarity"] == {"minhash": {"19": 1}}
    beyond = not until_drop                                   # the stage behind the one that dropped it saw it, too
    assert counters["tallies"] == {"counting": {"docs": 3 + beyond, "of": {"x": 2 * (2 + beyond), "y": 2}}}
    assert json.loads(json.dumps(counters)) == counters


def test_what_a_stage_of_ones_own_calls_personal_data_is_counted_whole():
    """A NaN would end the task, and sums of fractions hang on how documents are parted."""
    found = [math.nan, math.inf, -math.inf, 2.0, 0.7, 0.7, 3.0]
    counters: dict[str, Any] = {"kept": {}, "languages": {}, "lengths": {}}
    tally = Tally([], ["pii_own"], True)
    tally.kept(doc("en", pii_own=n) for n in found)
    tally.into(counters)
    assert counters["pii"] == {"pii_own": 5}


def test_a_language_called_max_adds_up():
    """North Moluccan Malay, as GlotLID calls it; `max_*` of a task itself is a maximum."""
    part = {"languages": {"web": {"max_Latn": 3}}, "dropped_languages": {"s": {"max_Latn": 2}}, "max_bucket": 4}
    assert merge_counters(merge_counters({}, part), part) == {
        "languages": {"web": {"max_Latn": 6}}, "dropped_languages": {"s": {"max_Latn": 4}}, "max_bucket": 4}


def test_languages_as_long_as_texts_are_not_held():
    tally = Tally([LoadedStage("scored", "k", "0:scored", Scored())], [], True)
    for i in range(50):
        tally.kept([doc(f"{i} " + "no language " * 500)])
        tally.dropped(doc(f"{i} " + "no language " * 500), "scored")
    assert len(tally._kept) == len(tally._dropped) == 1


def test_which_signals_are_scores():
    class Exact(Stage):
        name, signals = "exact_one", ("b",)

    class Named(Stage):
        name, exact, signals, scores = "named", False, ("c", "d"), ("d",)

    assert (Scored().scored(), Exact().scored(), Named().scored()) == (("a_score",), (), ("d",))


# -- in the report -------------------------------------------------------------------------------------------------
def test_thresholds_that_keep_a_share():
    rng = random.Random(1)
    scores = sorted((rng.random() ** 4 for _ in range(4000)), reverse=True)
    bins: dict[str, int] = {}
    for score in scores:
        merge_counters(bins, {str(score_bin(score)): 1})
    document = {"names": {"datasets": ["d"]}, "datasets": {"d": {"scores": {"s": bins}}}}
    [chart] = score_charts(document)
    assert chart["docs"] == 4000 and [share for share, _ in chart["reached"]] == [0.5, 0.25, 0.1, 0.05]
    alike = {"names": {"datasets": ["d"]}, "datasets": {"d": {"scores": {"s": {"200": 99, "190": 1}}}}}
    assert [share for share, _ in score_charts(alike)[0]["reached"]] == [0.5], "others would say the same again"
    for share, least in chart["reached"]:
        exact = scores[int(share * len(scores)) - 1]
        assert least <= exact and score_bin(least) == score_bin(exact)
        assert sum(s >= least for s in scores) >= share * len(scores)


@pytest.mark.parametrize("values", [[0.5], [0.0], [-3.0, 3.0], [0.97, 0.99], [1e-4, 1e9],
                                    [k / 7 for k in range(1, 70)]])
def test_bars_hold_every_document(values):
    bins: dict[int, int] = {}
    for value in values:
        bins[score_bin(value)] = bins.get(score_bin(value), 0) + 1
    bars = bars_of(bins)
    assert sum(docs for *_, docs in bars) == len(values) and 1 <= len(bars) <= 42
    assert all(low < high for low, high, _ in bars) and all(a[1] == b[0] for a, b in pairwise(bars))
    assert all(any(low <= v < high or abs(v) < 2.0 ** LOWEST for low, high, docs in bars if docs) for v in values
               if v >= 0)


def test_fates_of_languages():
    section = {"languages": {"a": {"en": 5, "": 1}, "b": {"en": 2}},
               "dropped_languages": {"s": {"en": 1, "de": 9}, "t": {"de": 1}}}
    assert [(r["language"], r["kept"], r["dropped"], r["stages"]) for r in language_fates(section)] == [
        ("de", 0, 10, [("s", 9), ("t", 1)]), ("en", 7, 1, [("s", 1)]), ("", 1, 0, [])]
    assert language_fates({"languages": {"a": {"en": 5}}, "dropped_languages": {"s": {"en": 3}}}) == []
    many = language_fates({"languages": {"a": {f"l{i:02}": 1 for i in range(40)}}, "dropped_languages": {}})
    assert len(many) == 13 and many[-1]["language"] == "28 others" and many[-1]["kept"] == 28


def test_a_report_opens_no_part_but_for_samples(tmp_path, monkeypatch):
    """Personal data, languages, scores and similarities come from the log, however many parts there are."""
    import pipeline.report.clusters
    import pipeline.report.collect
    import pipeline.report.documents
    from pipeline.report.collect import collect
    from pipeline.report.nodes import NodeFigures
    from pipeline.store.fs import Store
    from pipeline.store.log import Log

    (tmp_path / "docs").mkdir()
    for i in range(4):
        (tmp_path / "docs" / f"{i}.txt").write_text(f"Write to a{i}@mail.example.org. " + f"word{i} " * 40)
    (tmp_path / "docs" / "again.txt").write_text((tmp_path / "docs" / "0.txt").read_text())
    (tmp_path / "r.yaml").write_text("version: 1\nsources: {docs: {read: text, path: docs}}\n"
                                     "datasets: {clean: {from: docs, steps: [exact, pii]}}\n")
    summary = run_recipe(load_recipe(tmp_path / "r.yaml"), str(tmp_path / "store"),
                         make_backend=make_backend("inline", 1, None))
    for name, none in (("drop_samples", {}), ("pair_samples", []), ("quarantine_samples", [])):
        monkeypatch.setattr(pipeline.report.documents, name, lambda *_, none=none: none)
    monkeypatch.setattr(pipeline.report.collect, "NodeFigures", lambda *args: NodeFigures(*args[:3], lambda n: []))
    monkeypatch.setattr(pipeline.report.collect, "kept_samples", lambda *_: [])
    store = Store(str(tmp_path / "store"))
    opened, parquet = [], Store.parquet
    monkeypatch.setattr(Store, "parquet", lambda self, path: (opened.append(path), parquet(self, path))[1])
    found = collect(store, summary.run, Log.read(store).get)
    assert opened and {path.rpartition("/")[2] for path in opened} == {"tasks.parquet"}
    assert found["datasets"]["clean"]["pii"]["pii_emails"] == 4
    assert found["duplicates"][0]["removed"] and found["datasets"]["clean"]["dropped_languages"] == {"exact": {"": 1}}
    kept = [d for p in (tmp_path / "store/datasets/clean").glob("part-*") for d in read_documents(str(p))]
    assert sum(d.signals["pii_emails"] for d in kept) == 4
    assert found["warnings"] == []
