"""A function that is run over columns gives each document the same result as when it is run over the document alone."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest

from pipeline.passes.columnwise import DocumentColumns, NotColumnwise, for_all
from pipeline.passes.verdicts import stored_verdicts
from stages.catalog import STAGES, stage_class
from stages.document import Document
from stages.stage import Stage, role_of
from stages.vectors import outcome, read_vectors, stage_of
from tests.stages.test_conformance_vectors import FILES, FOLDER

ROWS = 400
LANGUAGES, SOURCES = ["", "en", "eng_Latn", "fra_Latn", "zz"], ["web", "docs"]
#: settings without which a step cannot be made, or has no verdict to speak of
NEEDS: dict[str, dict[str, Any]] = {
    "quality": {"model": "m"}, "encoder": {"model": "m"}, "toxicity": {"model": "m", "max_sentence": 0.5},
    "perplexity": {"models": {"en": "m"}, "min": {"en": 5.0}, "max": 300.0},
    "where": {"signals": {"a": {"min": 0.2, "max": 0.7}, "b": [1, 2]}, "language": ["en"], "source": ["web"]},
    "language": {"keep": ["en", "fra_Latn"], "min": {"en": 0.4, "default": 0.2}, "script": True},
    "rights": {"respect": ["noai", "tdm"]}, "pii": {"drop": ["emails", "ips"]}, "url": {"soft_words": 1},
    "badwords": {"max_count": 1}, "c4_badwords": {"keep_fraction": 0.5}, "buckets": {"edges": "e"},
    "decontaminate": {"sets": {"mine": "questions.jsonl"}},
}


def columns(names: list[str], seed: int = 0, rows: int = ROWS) -> DocumentColumns:
    """Return random columns with all kinds of numbers that signals can have: missing, whole, 0, shares, large."""
    rng = random.Random(seed)

    def value() -> float:
        return rng.choice([0.0, 1.0, 2.0, 0.05, 0.5, 0.999, rng.random(), rng.random() / 5, float(rng.randrange(200)),
                           1e6, -1.0])

    table = DocumentColumns(rows, language=np.array([rng.randrange(len(LANGUAGES)) for _ in range(rows)], np.int32),
                            languages=LANGUAGES, source=np.array([rng.randrange(2) for _ in range(rows)], np.int32),
                            sources=SOURCES)
    for name in names:
        whole = name in ("script", "url_category", "languages")
        table.signals[name] = np.array([float(rng.randrange(3)) if whole else value() for _ in range(rows)])
        if rng.random() < 0.7 and not whole:
            table.present[name] = np.array([rng.random() < 0.9 for _ in range(rows)])
            table.signals[name][~table.present[name]] = np.nan
    return table


def same(function: Any, table: DocumentColumns, seed: int = 0) -> list[Any]:
    """Check that both ways give the same results. Returns them."""
    rows = np.random.default_rng(seed).permutation(table.rows)
    results, codes = for_all(function, table, rows, one_by_one=False)
    there = [results[code] for code in codes]
    assert there == [function(table.document(row)) for row in rows.tolist()]
    return there


def decisions() -> list[str]:
    return [name for name in STAGES if any(role_of(stage_class(name).Config, f) == "decision"
                                           for f in stage_class(name).Config.model_fields)
            and stage_class(name).verdict is not Stage.verdict]


@pytest.mark.parametrize("name", decisions())
def test_verdicts_of_every_filter_with_thresholds_run_over_columns(name):
    stage = stage_class(name)({**NEEDS.get(name, {})})
    names = sorted({*stage.signals, *stage.reads()} - {"language"})
    results = set()
    for seed in range(4):
        results |= set(same(lambda doc: stored_verdicts(doc, stage), columns(names, seed), seed))
    assert len(results) > 1, "a rule that decides nothing tests nothing"


def test_fineweb2_runs_over_columns_with_limits_of_several_languages():
    stage = stage_class("fineweb2")({"languages": ["fra_Latn", "deu_Latn"],
                                     "change": {"fra_Latn": {"line_punct_thr": 0.3}}})
    assert len(set(same(lambda doc: stored_verdicts(doc, stage), columns(sorted(stage.signals))))) > 2


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_verdict_is_whole_unless_the_step_says_otherwise(path):
    """Where a step has left signals of a document and can judge by them, its verdict is that of `process`."""
    head, cases = read_vectors(path)
    for case in cases:
        stage = stage_of(head["stage"], json.dumps(case.get("config", {}), sort_keys=True), FOLDER)
        if type(stage).verdict is Stage.verdict or not stage.verdict_is_whole or not stage.signals:
            continue
        reason, doc = outcome(stage, case)
        if any(signal in doc.signals for signal in stage.signals):
            verdicts = stored_verdicts(Document("", signals=doc.signals, language=doc.language), stage)
            cuts = case.get("config", {}).get("action") == "cut"       # signals do not say what another cut would leave
            assert verdicts == (reason,) or (verdicts is None and cuts), case.get("name")


FUNCTIONS = {
    "arithmetic": lambda d: (d.signals["a"] * 2 - 1) / (d.signals["b"] + 3) > 1 - d.signals["a"] * 0.5,
    "division": lambda d: None if not d.signals["b"] else d.signals["a"] / d.signals["b"] > 1,
    "turned": lambda d: 1 - d.signals["a"] > 2 * d.signals["b"] or 0.2 / (d.signals["a"] + 5) < 0.05,
    "missing": lambda d: "c" in d.signals or d.signals.get("d", 7) == 7,
    "tuple": lambda d: d.signals["a"] in (0.0, 1.0, 0.5),
    "most": lambda d: max(d.signals["a"], d.signals["b"]) == d.signals["a"],
    "whole": lambda d: int(d.signals["b"]) % 3 if 0 <= d.signals["b"] < 50 else None,
    "words": lambda d: (d.language, d.source),
    "huge": lambda d: (d.signals["a"] < 10 ** 30, d.signals["b"] == 2 ** 53 + 1, d.signals["b"] > -10 ** 400),
    "nothing": lambda d: d.signals["a"] is None or d.signals["a"] == "a",
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_a_verdict_may_do_with_numbers(function):
    table = columns(["a", "b", "c", "d"], 3)
    for name in ("a", "b"):
        table.present.pop(name, None)
        table.signals[name] = np.nan_to_num(table.signals[name], nan=0.3)
    same(function, table)


def test_errors_of_single_documents_are_theirs_alone():
    table = columns(["a"], 1)
    table.present.pop("a", None)
    table.signals["a"] = np.array([0.0, 2.0] * (ROWS // 2))

    def divided(doc: Any) -> str:
        try:
            return "more" if 1 / doc.signals["a"] > 0.4 else "less"
        except ZeroDivisionError:
            return "none"

    assert set(same(divided, table)) == {"more", "none"}


@pytest.mark.parametrize("function", [
    lambda d: math.log(d.signals["a"] + 9) > 2, lambda d: len(d.text), lambda d: f"{d.signals['a']:.0f}",
    lambda d: round(d.signals["a"]), lambda d: tuple(d.signals),
    lambda d: {d.signals["a"]: 1} and 1])
def test_what_columns_cannot_do_is_done_document_by_document(function):
    table = columns(["a"], 2)
    table.present.pop("a", None)
    table.signals["a"] = np.nan_to_num(np.abs(table.signals["a"]), nan=0.3)
    with pytest.raises(NotColumnwise):
        for_all(function, table, np.arange(ROWS), one_by_one=False)
    results, codes = for_all(function, table, np.arange(ROWS))
    assert [results[code] for code in codes] == [function(table.document(row)) for row in range(ROWS)]


def test_a_stage_cannot_swallow_that_it_does_not_run_over_columns():
    class Greedy(Stage):
        name = "greedy"

        def verdict(self, doc: Document) -> str | None:
            try:
                return "long" if math.log(doc.signals["a"] + 9) > 3 else None
            except Exception:
                return "wrong"

    table = columns(["a"], 5)
    table.present.pop("a", None)
    table.signals["a"] = np.nan_to_num(np.abs(table.signals["a"]), nan=0.3)
    results, codes = for_all(lambda doc: stored_verdicts(doc, Greedy()), table, np.arange(ROWS))
    assert {results[code] for code in codes} == {("long",), (None,)}


def test_more_paths_than_documents_are_worth_end_in_calls_for_each():
    table = columns(["a"], 4, rows=20_000)
    table.present.pop("a", None)
    table.signals["a"] = np.arange(20_000, dtype=float)
    results, codes = for_all(lambda doc: int(doc.signals["a"]), table, np.arange(20_000))
    assert [results[code] for code in codes] == list(range(20_000))
