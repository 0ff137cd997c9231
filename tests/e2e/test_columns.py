"""Columns of an input on their way through a run: as signals that `where` uses, in the documents' meta, or reported as
left out."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from pipeline.cli.app import run_command
from pipeline.recipe import RecipeError, load_recipe

RECIPE = """
version: 1
sources:
  edu: {read: parquet, path: edu.parquet, signals: [score]}
  plain: {read: text, path: plain.txt}
datasets:
  all: {from: [edu, plain]}
  good: {from: all, steps: [{where: {signals: {score: {min: 2.5}}}}]}
"""


@pytest.fixture
def site(tmp_path) -> Path:
    rows = [{"text": f"Page {i} of the set.", "score": i / 2, "dump": "CC-MAIN-2013-20", "image": b"\xff\xd8"}
            for i in range(10)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "edu.parquet")
    (tmp_path / "plain.txt").write_text("A text without any columns.")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_columns_become_signals_and_meta(site, capfd):
    assert run_command(["run", str(site / "recipe.yaml"), "--store", str(site / "store"), "--backend", "inline"]) == 0
    said = capfd.readouterr()
    warning = "source 'edu': documents cannot keep some values of 'image' (binary × 10)"
    assert (said.out + said.err).replace("\n", " ").count(warning) == 1, "once, though two datasets are made of it"
    every, good = (ds.dataset(site / "store" / "datasets" / name).to_table().to_pylist() for name in ("all", "good"))
    assert sorted(r["signals"]["score"] for r in good) == [2.5, 3.0, 3.5, 4.0, 4.5]
    assert {r["meta"] for r in good} == {json.dumps({"dump": "CC-MAIN-2013-20"})}
    assert [r["signals"]["score"] for r in every if r["source"] == "plain"] == [None]
    report = json.loads((site / "store" / "report.json").read_text())
    assert report["sources"]["edu"]["lost"] == {"image": {"binary": 10}} and "lost" not in report["sources"]["plain"]


def test_another_threshold_reads_stored_signals(site):
    """A column is stored as any signal is, so verdicts about it are drawn again without reading the source."""
    run = ["run", str(site / "recipe.yaml"), "--store", str(site / "store"), "--backend", "inline", "--quiet"]
    assert run_command(run) == 0
    assert run_command([*run, "--set", "datasets.good.steps.where.signals.score.min=4"]) == 0
    good = ds.dataset(site / "store" / "datasets" / "good").to_table().to_pylist()
    assert sorted(r["signals"]["score"] for r in good) == [4.0, 4.5]


def test_a_signal_has_one_writer(site):
    recipe = site / "recipe.yaml"
    recipe.write_text(RECIPE.replace("signals: [score]", "signals: [score, gopher_words]").replace(
        "steps: [", "steps: [gopher_quality, "))
    with pytest.raises(RecipeError, match="writes a signal with the same name"):
        load_recipe(recipe)
    recipe.write_text(RECIPE.replace(", signals: [score]", ""))
    with pytest.raises(RecipeError, match="no step before this one writes a signal 'score'"):
        load_recipe(recipe)
