"""A user's own stage: a file beside the recipe, run in children, only when allowed, stale when its source changes."""

from __future__ import annotations

import sys
from pathlib import Path

import duckdb

from tests.corpus import sentences
from tests.e2e.test_same_bytes import command, commits

STAGE = '''
from stages.stage import Stage, StageConfig, decision


class Short(Stage):
    """Drop short texts."""

    name = "short"
    signals = ("characters",)

    class Config(StageConfig):
        min: int = decision(500, "fewest characters kept")

    def process(self, doc):
        doc.signals["characters"] = len(doc.text)
        return "too_short" if len(doc.text) < self.config.min else None
'''
RECIPE = """
version: 1
code: [./own_stages.py]
sources: {docs: {read: text, path: docs}}
datasets: {kept: {from: docs, steps: [{"own_stages:Short": {min: 600}}]}}
"""


def arguments(site: Path, backend: str) -> list[str]:
    return ["run", str(site / "recipe.yaml"), "--store", str(site / "store"), "--backend", backend, "--quiet"]


def test_a_stage_of_ones_own(tmp_path, tokenmill):
    (tmp_path / "docs").mkdir()
    for i in range(6):
        (tmp_path / "docs" / f"{i}.txt").write_text(" ".join(sentences()[i * 20:i * 20 + (2 if i % 2 else 12)]))
    (tmp_path / "own_stages.py").write_text(STAGE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    refused = tokenmill(*arguments(tmp_path, "inline"))
    assert refused.code == 2 and "--allow-custom-stages" in refused.err
    assert not (tmp_path / "store").exists()
    done = command("-m", "pipeline.cli", *arguments(tmp_path, "process"), "--workers", "1", "--allow-custom-stages")
    assert done.returncode == 0, done.stderr
    parts = tmp_path / "store" / "dropped" / "kept" / "part-*.parquet"
    dropped = duckdb.sql(f"select reason, stage, signals.characters from '{parts}'")
    assert sorted(dropped.fetchall()) and {row[:2] for row in dropped.fetchall()} == {("too_short", "Short")}
    before = commits(tmp_path / "store")
    again = [*arguments(tmp_path, "inline"), "--allow-custom-stages"]
    assert tokenmill(*again).code == 0
    assert commits(tmp_path / "store") == before, "an unchanged stage was run again"
    (tmp_path / "own_stages.py").write_text(STAGE.replace("< self.config.min", "<= self.config.min"))
    sys.modules.pop("own_stages")                        # a command of its own would import the file as it is now
    assert tokenmill(*again).code == 0
    assert len(commits(tmp_path / "store")) > len(before), "a changed source must make its results stale"
