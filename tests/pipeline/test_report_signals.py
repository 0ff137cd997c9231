"""Histograms of signals with their thresholds: bins, the effect of other thresholds, and estimates when not all parts
are read."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.passes.tally import score_bin
from pipeline.report import sampled
from pipeline.report.distributions import histogram, sections
from pipeline.report.domains import domain_section
from pipeline.report.nodes import NodeFigures
from pipeline.report.signals import measured, score_bins, signal_section, tried
from pipeline.store.fs import Store
from pipeline.store.parts import PartWriter, document_schema
from pipeline.store.records import FileInfo, PartRecord
from stages.document import Document
from stages.filter.gopher_quality import GopherQuality
from stages.filter.language import Language
from stages.filter.where import Where


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_bins_are_those_of_the_tally(values):
    assert score_bins(np.array(values)).tolist() == [score_bin(v) for v in values]


@pytest.mark.parametrize(("stage", "key", "thresholds"), [
    (GopherQuality(min_doc_words=50), "min_doc_words", [25, 40, 50, 62, 100]),
    (Where(signals={"s": {"min": 0.2}}), "signals.s.min", [0.1, 0.16, 0.2, 0.25, 0.4]),
    (Where(signals={"s": {"min": 0.0}}), "signals.s.min", [0]),
    (Where(signals={"s": {"min": -2.0}}), "signals.s.min", [-4, -2, -1]),       # whole, and none stands twice
    # what a recipe refuses is not tried
    (Language(model="whatlang", min_script_share=0.9), "min_script_share", [0.45, 0.72, 0.9]),    # le=1
    (GopherQuality(min_stop_words=1), "min_stop_words", [1, 2]),                                  # whole numbers only
    (Where(signals={"a.b": {"min": 0.5, "max": 0.6}}), "signals.a.b.min", [0.25, 0.4, 0.5]),      # min < max
    (Where(signals={"a.b": {"min": 0.5, "max": 0.6}}), "signals.a.b.max", [0.6, 0.75, 1.2]),
])
def test_other_thresholds_that_a_recipe_may_have_stand_around_the_one_set(stage, key, thresholds):
    [bound] = [bound for bound in stage.bounds() if bound.key == key]
    assert tried(bound, stage.config) == thresholds


def test_bounds_follow_the_settings():
    off = GopherQuality(min_doc_words=7, max_doc_words=0, max_symbol_word_ratio=None).bounds()
    assert ("gopher_words", "min_doc_words", "min", 7.0) in off
    assert not {"max_doc_words", "max_symbol_word_ratio"} & {b.key for b in off}, "0 and null switch a rule off"
    assert [tuple(b) for b in Where(signals={"a": {"min": 1, "max": 2}, "b": [3]}).bounds()] == [
        ("a", "signals.a.min", "min", 1.0), ("a", "signals.a.max", "below", 2.0)]
    assert [tuple(b) for b in Language(min=0.6, min_script_share=0.5).bounds()] == [
        ("language_score", "min", "above", 0.6), ("script_share", "min_script_share", "min", 0.5)]


def nodes(store: Store, values: list[tuple[float | None, bool]], tasks: int,
          cut: list[list[tuple[float | None, bool]]] | None = None) -> list[NodeFigures]:
    """Return a pass of `tasks` tasks over documents given as (value of the signal, whether it is kept). With `cut`, the
    documents are given for each task."""
    store.local.mkdir(parents=True, exist_ok=True)
    records = []
    for task, mine in enumerate(cut or [values[task::tasks] for task in range(tasks)]):
        files = {}
        for name, kept in (("kept.parquet", True), ("dropped.parquet", False)):
            writer = PartWriter(str(store.local / f"{task}.{name}"), document_schema(("s", "t"), dropped=not kept))
            for i, (value, stays) in enumerate(mine):
                if stays == kept:
                    doc = Document(id=f"{task:016x}{i:016x}", text="t", source="x", language="", url=f"https://{value}/",
                                   signals={} if value is None else {"s": value})
                    writer.write(doc) if kept else writer.write(doc, stage="step", reason="r")
            writer.close()
            files[name] = FileInfo(f"{task}.{name}", 1, "", "", writer.rows)
        gone = sum(not stays for _, stays in mine)
        counters: dict[str, Any] = {"kept": {"x": {"docs": len(mine) - gone, "bytes": 1}}, "in": {}, "stages": {
            "0:step": {"in": len(mine), "dropped": {"r": {"x": gone}} if gone else {}, "cpu_s": 0.0}}}
        records.append(PartRecord(f"{random.Random(task).getrandbits(128):032x}", "documents", "d", "a", files,
                                  counters))
    bounds = measured("step", Where(signals={"s": {"min": 0.5}}))["bounds"]
    return [
        NodeFigures(
            {
                "name": "d",
                "kind": "pass",
                "dataset": "d",
                "steps": ["step"],
                "deps": [],
                "publishes": True,
                "measures": [{
                    "step": "step",
                    "signals": ["s", "t"],
                    "bounds": bounds
                }]
            }, lambda: iter(records))
    ]


def test_all_signals_of_a_dataset_are_in_the_figures(tmp_path: Path):
    names = [f"s{i:03}" for i in range(170)]
    passes = nodes(Store(str(tmp_path)), [(0.5, True)], 1)
    passes[0].measures = [{"step": "step", "signals": names, "bounds": []}]
    writer = PartWriter(str(tmp_path / "0.kept.parquet"), document_schema(tuple(names)))
    writer.write(Document(id="0" * 32, text="t", source="x", signals=dict.fromkeys(names, 1.0)))
    writer.close()
    section = signal_section(Store(str(tmp_path)), passes)
    assert ([row["signal"] for row in section["signals"]], section["left_out"]) == (names, 0)


def test_a_bound_that_two_steps_set_counts_once(tmp_path: Path):
    passes = nodes(Store(str(tmp_path)), drawn_values(60), 2)
    once = signal_section(Store(str(tmp_path)), passes)["signals"]
    [measured] = passes[0].measures
    passes[0].measures = [measured, {"step": "again", "signals": [], "bounds": measured["bounds"]}]
    assert signal_section(Store(str(tmp_path)), passes)["signals"] == once != []


def drawn_values(n: int) -> list[tuple[float | None, bool]]:
    rng = random.Random(4)
    return [(None, False) if i % 50 == 0 else (value, value >= 0.5) for i in range(n) for value in [rng.random()]]


def test_figures_of_a_signal(tmp_path: Path):
    values = [*drawn_values(600), (float("nan"), True), (float("inf"), False)]
    section = signal_section(Store(str(tmp_path)), nodes(Store(str(tmp_path)), values, 3))
    assert section["read"] == {"docs": 602, "of": 602, "exact": True}
    [signal] = section["signals"]                     # of `t` no document has a value
    there = [(v, kept) for v, kept in values[:600] if v is not None]
    assert (signal["signal"], signal["docs"], signal["kept"]) == ("s", len(there), sum(k for _, k in there))
    for word, stays in (("kept", True), ("dropped", False)):
        bins: dict[str, int] = {}
        for value in (v for v, kept in there if kept == stays):
            bins[str(score_bin(value))] = bins.get(str(score_bin(value)), 0) + 1
        assert signal["bins"][word] == bins
    [bound] = signal["bounds"]
    assert [a["value"] for a in bound["at"]] == [0.25, 0.4, 0.5, 0.625, 1.0]
    for at in bound["at"]:
        assert at["docs"] == sum(v >= at["value"] for v, _ in there)
        assert at["kept"] == sum(v >= at["value"] for v, kept in there if kept)


def test_estimates_where_not_all_parts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampled, "PARTS", 6)
    monkeypatch.setattr(sampled, "ROWS", 600)
    values = drawn_values(8000)
    passes = nodes(Store(str(tmp_path)), values, 20)
    section = signal_section(Store(str(tmp_path)), passes)
    assert section["read"]["of"] == 8000 and not section["read"]["exact"] and section["read"]["docs"] <= 1200
    [signal] = section["signals"]
    there = [(v, kept) for v, kept in values if v is not None]
    assert abs(signal["docs"] - len(there)) < 0.05 * len(there)
    assert signal["kept"] == sum(k for _, k in there), "each kept document has a value: only the total counts"
    for at in signal["bounds"][0]["at"]:
        assert abs(at["docs"] - sum(v >= at["value"] for v, _ in there)) < 0.06 * len(there)
    again = nodes(Store(str(tmp_path)), values, 20)
    assert signal_section(Store(str(tmp_path)), again) == section, "the choice is the same each time"


def test_the_end_of_a_half_open_range_does_not_pass(tmp_path: Path):
    passes = nodes(Store(str(tmp_path)), [(value, value < 10) for value in (3.0, 5.0, 10.0, 20.0)], 1)
    passes[0].measures = [measured("step", Where(signals={"s": {"max": 10}}))]
    [signal] = signal_section(Store(str(tmp_path)), passes)["signals"]
    assert [(at["value"], at["docs"]) for at in signal["bounds"][0]["at"]] == [
        (5, 1), (8, 2), (10, 2), (12, 3), (20, 3)]


def test_rows_of_a_large_part_stand_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampled, "ROWS", 200)
    passes = nodes(Store(str(tmp_path)), [], 0, [[(0.6, True)] * 900, [(0.9, True)] * 100])
    [signal] = signal_section(Store(str(tmp_path)), passes)["signals"]
    assert signal["bins"]["kept"] == {str(score_bin(0.6)): 900, str(score_bin(0.9)): 100}
    top = domain_section(Store(str(tmp_path)), passes)["top"]
    assert [(row["domain"], row["kept"]) for row in top] == [("0.6", 900), ("0.9", 100)]
    assert "uncovered" not in signal_section(Store(str(tmp_path)), passes)["read"]


def test_documents_that_no_part_read_has_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    passes = nodes(Store(str(tmp_path)), [], 0, [[(0.6, True)] * 4, [(0.1, False)] * 3])
    last = max(record.key for record in passes[0].records())
    kept_last = next(r for r in passes[0].records() if r.key == last).files["kept.parquet"].rows > 0
    monkeypatch.setattr(sampled, "PARTS", 1)
    read = signal_section(Store(str(tmp_path)), passes)["read"]
    assert read == {"docs": 3 if kept_last else 4, "of": 7, "exact": False, "uncovered": 4 if kept_last else 3}


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (1.0, "about 1"), (0.7, "about 0.688"), (215.0, "208 to 216"),
                                             (-215.0, "-216 to -208")])
def test_a_signal_that_is_alike_in_all_documents_is_told_by_its_bin(value, text):
    row = {"signal": "s", "step": "step", "docs": 9, "kept": 9, "bounds": [],
           "bins": {"kept": {str(score_bin(value)): 9}, "dropped": {}}}
    section = {"read": {}, "left_out": 0, "signals": [row]}
    shown = sections({"names": {"datasets": ["d"]}, "signals": {"d": section}}, [])
    assert shown["signals"][0]["cards"][0]["only"] == text


def test_charts_say_what_they_show():
    row = {"signal": "<b>s", "step": "step", "docs": 14, "kept": 9, "bins": {"kept": {"200": 9}, "dropped": {"10": 5}},
           "bounds": [{"key": "least", "side": "min", "value": 0.4, "at": [{"value": 0.4, "docs": 9, "kept": 9}]}]}
    drawn = ET.fromstring(histogram(row))
    kinds = {path.get("class"): path.get("d") or "" for path in drawn.findall("path")}
    assert [kinds[k].count("z") for k in ("kept", "gone")] == [1, 1] and len(drawn.findall("line")) == 1
    assert drawn.get("aria-label", "").startswith("<b>s: 14 documents from ")
    shown = sections({"names": {"datasets": ["d", "old"]}, "signals": {"d": {
        "read": {"docs": 14, "of": 14, "exact": True}, "left_out": 0, "signals": [row]}}},
        [{"dataset": "d", "signal": "<b>s", "reached": [(0.5, 1.0)]}, {"dataset": "old", "signal": "s", "reached": []}])
    assert [c["dataset"] for c in shown["scores"]] == ["old"], "one chart of a signal is enough"
    [card] = shown["signals"][0]["cards"]
    assert card["reached"] == [(0.5, 1.0)] and card["bounds"][0]["at"] == [
        {"value": "0.4", "set": True, "docs": "64.3%", "kept": "100%"}]
