"""The engine with a real pass: documents that crash the interpreter cost only themselves."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.task import CrashCursor, Skip, TaskSpec
from pipeline.engine.worker.attempt import run_attempt
from pipeline.recipe import load_recipe
from pipeline.recipe.model import Recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store

pytestmark = [pytest.mark.usefixtures("room"),
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]

STAGE = """
    import ctypes
    from stages.stage import Stage

    class Poison(Stage):
        '''Dies of what a document says.'''
        name = "poison"

        def process(self, doc):
            if "segfault" in doc.text:
                ctypes.string_at(0)
            if "raise" in doc.text:
                raise ValueError("bad")
            return "picked" if "drop" in doc.text else None
"""
SCRUBBER = """
    import ctypes
    import pipeline.passes.storable as storable

    real = storable.scrub_text

    def scrub_text(text):
        if "hostile" in text:
            ctypes.string_at(0)
        return real(text)

    storable.scrub_text = scrub_text
"""
POISON = {17: "segfault", 150: "drop this hostile one", 151: "drop this", 299: "raise"}
REASONS = {17: "crash:SIGSEGV", 150: "crash:SIGSEGV", 299: "error:ValueError"}


def test_poisoned_documents_of_a_pass_go_into_quarantine_and_the_rest_is_untouched(tmp_path, monkeypatch):
    """What is dropped is scrubbed to be shown: a text that the scrubber dies of is poison like any other."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(textwrap.dedent(SCRUBBER))
    monkeypatch.syspath_prepend(str(tmp_path / "hook"))
    module = f"poison_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(STAGE))

    def run(name: str, poison: dict[int, str], kind: str) -> dict[str, list[dict]]:
        folder = tmp_path / name
        folder.mkdir()
        with open(folder / "in.jsonl", "w") as f:
            for i in range(300):
                f.write(json.dumps({"text": f"Document number {i} says hello. {poison.get(i, '')}".strip()}) + "\n")
        (folder / "r.yaml").write_text(
            f"version: 1\ncode: [../{module}.py]\nsources: {{web: {{read: jsonl, path: in.jsonl}}}}\n"
            f"datasets:\n  clean: {{from: web, steps: ['{module}:Poison']}}\n")
        recipe = load_recipe(str(folder / "r.yaml"), [], allow_custom=True)
        run_recipe(recipe, str(folder / "store"), make_backend=make_backend(kind, 1, None), report=False)
        return {kind: [row for part in sorted((folder / "store" / kind / "clean").glob("part-*.parquet"))
                       for row in pq.read_table(part).to_pylist()] for kind in ("datasets", "dropped", "quarantine")}

    clean, poisoned = run("clean", {}, "inline"), run("poisoned", POISON, "process")
    kept, untouched = ({row["id"]: row["text"] for row in run["datasets"]} for run in (poisoned, clean))
    assert (len(clean["datasets"]), clean["dropped"], clean["quarantine"]) == (300, [], [])
    assert {row["record"]: row["reason"] for row in poisoned["quarantine"]} == REASONS
    assert {row["stage"] for row in poisoned["quarantine"]} == {"Poison"}
    assert [row["locator"]["record"] for row in poisoned["dropped"]] == [151]
    assert len(kept) == 296 and kept.items() <= untouched.items()


PICKY = """
    from stages.stage import Stage

    class Picky(Stage):
        '''Fails on some documents and drops some others.'''
        name = "picky"

        def process(self, doc):
            if "fails" in doc.text:
                raise ValueError("no")
            return "picked" if "drop" in doc.text else None
"""


def picky(tmp_path: Path, datasets: str) -> Recipe:
    """Return a recipe over in.jsonl in which STEP is the stage `Picky`."""
    module = f"picky_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(PICKY))
    (tmp_path / "r.yaml").write_text(
        f"version: 1\ncode: [{module}.py]\nsources: {{web: {{read: jsonl, path: in.jsonl}}}}\ndatasets:\n"
        + datasets.replace("STEP", f"'{module}:Picky'") + "\nrun: {max_error_rate: 100%}\n")
    return load_recipe(str(tmp_path / "r.yaml"), [], allow_custom=True)


def test_how_records_are_batched_is_not_to_be_seen_in_any_file(tmp_path):
    """A run that goes on one by one after a crash, and one that skips what was quarantined, cut other batches."""
    with open(tmp_path / "in.jsonl", "w") as f:
        for i in range(300):
            word = {3: "fails", 4: "drop", 5: "twin", 7: "fails"}.get(i % 11, "well")
            line = json.dumps({"text": f"Document {word}" + (f" {i}" if word != "twin" else "")})
            f.write("{broken\n" if i % 13 == 6 else line + "\n")
    recipe = picky(tmp_path, "  clean: {from: web, steps: [exact, STEP]}\n  again: {from: web, steps: [STEP]}")
    specs: list[TaskSpec] = []

    class Noting(InlineBackend):
        def submit(self, assignment):
            specs.append(assignment.spec)
            super().submit(assignment)

    run_recipe(recipe, str(tmp_path / "store"), make_backend=Noting, report=False)
    passes = [s for s in specs if s.task.endswith(":DocumentPass")]
    assert len(passes) == 3

    def files(spec: TaskSpec, **how) -> dict[str, tuple]:
        record = run_attempt(spec, Store(tmp_path / "store"), "1-1", CrashCursor(), str(tmp_path), **how)
        return {name: (info.sha256, info.rows) for name, info in record.files.items()}

    for spec in passes:
        whole = files(spec)
        assert whole["quarantine.parquet"][1] > 20
        for rows in (1, 7):
            assert files(spec, batch_rows=rows) == whole
        if spec.args["chain"]:
            some = [files(spec, batch_rows=rows, skip=[Skip(8, 0, "memory")]) for rows in (None, 1)]
            assert some[0] == some[1] != whole
