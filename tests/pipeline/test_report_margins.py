"""How far dropped documents were from the thresholds that dropped them (`pipeline.report.margins`)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.report.margins import Margins
from stages.document import Document
from tests.pipeline.test_report_compare import quality


def dropped(stage: str, reason: str, signals: list[dict[str, float]], language: str = "") -> pa.RecordBatch:
    names = sorted({name for row in signals for name in row})
    rows = [{"id": f"{i:032x}", "source": "s", "language": language, "signals": row, "meta": "{}", "reason": reason,
             "stage": stage} for i, row in enumerate(signals)]
    return pa.RecordBatch.from_pylist(rows, pa.schema([
        ("id", pa.string()), ("source", pa.string()), ("language", pa.string()),
        ("signals", pa.struct([(name, pa.float64()) for name in names])),
        ("meta", pa.string()), ("reason", pa.string()), ("stage", pa.string())]))


def distances(step: dict[str, Any], batch: pa.RecordBatch) -> list[float | None]:
    return [None if math.isnan(x) else x for x in Margins([step]).distances(batch).tolist()]


def test_margins_of_thresholds_from_below_and_above():
    step = {"gopher_quality": {}}
    short = dropped("gopher_quality", "gopher_short_doc", [quality(gopher_words=n) for n in (49, 40, 1)])
    assert distances(step, short) == pytest.approx([1 / 50, 10 / 50, 49 / 50])
    assert distances(step, dropped("gopher_quality", "gopher_below_avg_threshold",
                                   [quality(gopher_mean_word_length=2.7)])) == pytest.approx([0.1])
    assert distances(step, dropped("gopher_quality", "gopher_too_many_ellipsis",
                                   [quality(gopher_ellipsis_ratio=0.15)])) == pytest.approx([0.5])


def test_a_document_that_breaks_two_rules_is_measured_once_the_other_is_known():
    """Short, and without stop words: one threshold alone would not keep it."""
    margins = Margins([{"gopher_quality": {}}])
    both = dropped("gopher_quality", "gopher_short_doc", [quality(gopher_words=40, gopher_stop_words=0)])
    assert np.isnan(margins.distances(both)).all()
    margins.distances(dropped("gopher_quality", "gopher_enough_stop_words", [quality(gopher_stop_words=1)]))
    assert margins.distances(both).tolist() == pytest.approx([0.2])


def test_another_signal_of_the_stage_is_never_taken_for_the_one_that_decided():
    """One threshold serves two signals here, and others lie nearer to it."""
    row = quality(gopher_hash_ratio=0.3, gopher_ellipsis_ratio=0.11, gopher_bullet_lines_ratio=0.101)
    margins = Margins([{"gopher_quality": {}}])
    batch = dropped("gopher_quality", "gopher_too_many_hashes", [row])
    assert margins.distances(batch).tolist() == pytest.approx([2.0])
    assert margins.decided(batch.to_pylist()[0])["signal"] == "gopher_hash_ratio"


def test_a_signal_that_has_the_same_value_by_chance_is_no_rule():
    margins = Margins([{"gopher_quality": {}}])
    rows = [quality(gopher_hash_ratio=0.3, gopher_ellipsis_ratio=0.3),
            quality(gopher_hash_ratio=0.2, gopher_ellipsis_ratio=0.9)]
    batch = dropped("gopher_quality", "gopher_too_many_hashes", [quality(gopher_hash_ratio=0.3), *rows])
    assert margins.distances(batch).tolist() == pytest.approx([2, 2, 1])
    margins = Margins([{"where": {"signals": {"x": {"max": 1}}}}])
    batch = dropped("where", "where_x", [{"x": 3.0, "y": 3.0}, {"x": 2.0, "y": 9.0}])
    assert margins.distances(batch).tolist() == pytest.approx([2, 1])


def test_margins_follow_the_language():
    step = {"language": {"min": {"default": 0.65, "de": 0.9}}}
    signals = [{"language_score": 0.6, "script": 1.0, "script_share": 1.0}]
    assert distances(step, dropped("language", "language_score", signals, "de")) == pytest.approx([0.3 / 0.9])
    assert distances(step, dropped("language", "language_score", signals, "fr")) == pytest.approx([0.05 / 0.65])


def test_margins_are_unknown_where_no_number_of_the_recipe_decided():
    words = [quality(gopher_words=3)]
    for step, stage, reason in (({"language": {"keep": ["de"]}}, "language", "language"),
                                ({"own:Stage": {}}, "own:Stage", "short"), ({"no_such_step": {}}, "no_such_step", "x"),
                                ({"gopher_quality": {"no_such_key": 1}}, "gopher_quality", "gopher_short_doc"),
                                ({"gopher_quality": {}}, "gopher_quality", "another reason")):
        assert distances(step, dropped(stage, reason, words, "fr")) == [None]


def test_a_threshold_of_zero_is_measured_absolutely():
    step = {"where": {"signals": {"x": {"max": 0}}}}
    assert distances(step, dropped("where", "where_x", [{"x": 0.25}, {"x": 0.0}])) == pytest.approx([0.25, 0])


def test_learning_ends_after_a_few_tries(monkeypatch):
    """A reason that no rule explains must not cost a probe for each of millions of documents."""
    from stages.filter.gopher_quality import GopherQuality

    calls = Counter()
    own = GopherQuality.verdict

    def verdict(self: GopherQuality, doc: Document) -> str | None:
        calls["verdict"] += 1
        return own(self, doc)

    monkeypatch.setattr(GopherQuality, "verdict", verdict)
    margins = Margins([{"gopher_quality": {}}])
    batch = dropped("gopher_quality", "another reason", [quality(gopher_words=3)] * 500)
    assert np.isnan(margins.distances(batch)).all() and np.isnan(margins.distances(batch)).all()
    assert 0 < calls["verdict"] < 50
