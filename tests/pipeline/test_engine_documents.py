"""The engine under a real pass: documents that kill the interpreter cost themselves, and nothing else."""

from __future__ import annotations

import json
import sys
import textwrap

import pyarrow.dataset as ds
import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")

STAGE = """
    import ctypes, os
    from stages.stage import Stage

    class Poison(Stage):
        '''Dies of what a document says.'''
        name = "poison"

        def process(self, doc):
            if "segfault" in doc.text:
                ctypes.string_at(0)
            if "exit" in doc.text:
                os._exit(4)
            if "hog" in doc.text:
                held = []
                while True:
                    held.append(bytearray(b"x" * (16 << 20)))
            if "raise" in doc.text:
                raise ValueError("bad")
            return None
"""
POISON = {17: "segfault", 18: "exit", 150: "hog", 299: "raise"}
REASONS = {17: "crash:SIGSEGV", 18: "crash:exit4", 150: "memory", 299: "error:ValueError"}


def test_poisoned_documents_of_a_pass_go_into_quarantine_and_the_rest_is_untouched(tmp_path):
    module = f"poison_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(STAGE))

    def run(name: str, poison: dict[int, str], kind: str) -> tuple[dict[str, str], dict[int, str]]:
        folder = tmp_path / name
        folder.mkdir()
        with open(folder / "in.jsonl", "w") as f:
            for i in range(300):
                f.write(json.dumps({"text": f"Document number {i} says hello. {poison.get(i, '')}".strip()}) + "\n")
        (folder / "r.yaml").write_text(
            f"version: 1\ncode: [../{module}.py]\nsources: {{web: {{read: jsonl, path: in.jsonl}}}}\n"
            f"datasets:\n  clean: {{from: web, steps: ['{module}:Poison']}}\n")
        recipe = load_recipe(str(folder / "r.yaml"), [], allow_custom=True)
        run_recipe(recipe, str(folder / "store"), make_backend=make_backend(kind, 2, None), report=False)
        kept = ds.dataset(sorted(map(str, (folder / "store/datasets/clean").glob("part-*.parquet")))).to_table()
        parts = sorted(map(str, (folder / "store/quarantine/clean").glob("part-*.parquet")))
        lost = ds.dataset(parts).to_table().to_pylist() if parts else []
        return (dict(zip(kept["id"].to_pylist(), kept["text"].to_pylist())),
                {row["record"]: row["reason"] for row in lost})

    clean, none = run("clean", {}, "inline")
    kept, lost = run("poisoned", POISON, "process")
    assert (len(clean), none) == (300, {})
    assert lost == REASONS
    assert len(kept) == 296
    assert kept.items() <= clean.items()
