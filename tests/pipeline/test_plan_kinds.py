"""What stages declare reaches their tasks (memory, GPUs, and the kind of CPU for numeric stages) and the children that
run them."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter

import pyarrow.parquet as pq
import pytest

from pipeline.base.machine import cpu_tag
from pipeline.engine.backends.local import ProcessBackend
from pipeline.engine.task import ResourceRequest
from pipeline.recipe import load_recipe
from pipeline.run import run_recipe

STAGES = """
    import os
    from stages.stage import Stage

    class Before(Stage):
        '''Notes which devices it sees.'''
        name = "before"

        def process(self, doc):
            doc.meta[self.name] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")

    class Classifier(Before):
        name, gpus, exact, memory_mb = "classifier", 0.5, False, 700

    class Exact(Before):
        name, gpus = "exact", 1.0

    class After(Before):
        name = "after"
"""


class Noting(ProcessBackend):
    """A backend that notes the resource request of every task, by node."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.kinds: dict[str, set[ResourceRequest]] = {}

    def submit(self, assignment):
        self.kinds.setdefault(assignment.spec.node, set()).add(assignment.spec.kind)
        super().submit(assignment)


@pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")
def test_gpu_stages_have_passes_of_their_own_and_see_their_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    module = f"kinds_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(STAGES))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"Document {i}."}) + "\n" for i in range(40)))
    steps = ", ".join(f"'{module}:{name}'" for name in ("Before", "Classifier", "Exact", "After"))
    (tmp_path / "r.yaml").write_text(
        f"version: 1\ncode: [{module}.py]\nsources: {{web: {{read: jsonl, path: in.jsonl}}}}\n"
        f"datasets:\n  clean: {{from: web, steps: [{steps}]}}\n")
    recipe = load_recipe(str(tmp_path / "r.yaml"), [], allow_custom=True)
    made = []

    def make(store):
        made.append(Noting(store, 2, scratch=str(tmp_path)))
        return made[0]

    run_recipe(recipe, str(tmp_path / "store"), make_backend=make, report=False)
    passes = {node: kinds for node, kinds in made[0].kinds.items() if node.startswith("clean")}
    assert {node: {(k.gpus, k.cpu) for k in kinds} for node, kinds in passes.items()} == {
        "clean:1": {(0.0, "")}, "clean:2": {(0.5, cpu_tag())}, "clean:3": {(1.0, "")}, "clean": {(0.0, "")}}
    assert {k.memory_mb for k in passes["clean:2"]} == {1000}
    rows = [json.loads(meta) for path in (tmp_path / "store/datasets/clean").glob("part-*.parquet")
            for meta in pq.read_table(path)["meta"].to_pylist()]
    assert Counter(json.dumps(r, sort_keys=True) for r in rows) == {
        '{"after": "", "before": "", "classifier": "4", "exact": "4"}': 40}
