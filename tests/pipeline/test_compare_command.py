"""At its end, a run prints the command that compares it with the run before it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from pipeline.plan.changes import comparable_run
from pipeline.store.fs import Store

RECIPE = """
version: 1
sources: {docs: {read: text, path: docs}}
datasets:
  clean: {from: docs, steps: [{gopher_quality: {min_doc_words: 3}}]}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for i in range(6):
        (tmp_path / "docs" / f"{i}.txt").write_text("the word and " * (i + 1))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_the_end_of_a_run_names_the_command_that_compares_it(site, tokenmill):
    def run(name: str) -> str:
        said = tokenmill("run", site / "recipe.yaml", "--store", site / "store", "--backend", "inline", "--name", name)
        assert said.code == 0, said.err
        return said.out

    assert "--compare" not in run("first")
    (site / "recipe.yaml").write_text(RECIPE.replace("3", "9"))
    [line] = [line for line in run("second").splitlines() if "--compare" in line]
    command = shlex.split(line.partition(": ")[2])
    assert command[:5] == ["tokenmill", "report", "--compare", "first", "second"]
    said = tokenmill(*command[1:])
    assert said.code == 0 and "gopher_quality.min_doc_words: 3 → 9" in said.out and "newly dropped" in said.out
    assert line in run("second"), "a repeated run is still compared with the run before it"


def test_no_command_compares_a_run_with_one_of_another_recipe_or_one_that_is_gone(site, tokenmill):
    store = Store(str(site / "store"))
    for name, dataset in (("first", "clean"), ("other", "odd")):
        (site / "recipe.yaml").write_text(RECIPE.replace("clean", dataset))
        assert tokenmill("run", site / "recipe.yaml", "--store", store.root, "--backend", "inline", "--name",
                         name).code == 0
    assert json.loads(store.read("runs/other/run.json"))["before"] == "first"
    assert comparable_run(store, "other") is None and comparable_run(store, "first") is None
    for hostile in ("../../etc", "missing", "other"):
        facts = json.loads(store.read("runs/other/run.json"))
        store.write("runs/other/run.json", json.dumps({**facts, "before": hostile}).encode())
        assert comparable_run(store, "other") is None
