"""When functions of stages are compiled: after the set-up, in the process that handles documents, before its first
document."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pipeline.base import compiled
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs, TaskSpec
from pipeline.passes import chain
from pipeline.passes.documents import DocumentPass
from pipeline.store.fs import Store
from stages.catalog import STAGES, stage_class
from stages.dedup.signature import MinHashSignature
from stages.stage import Stage
from tests.stages.lid import lid176_model

STEPS = {"gopher_repetition": {}, "gopher_quality": {}, "c4": {}, "fineweb": {}, "fineweb2": {}, "dclm_repetition": {},
         "redpajama2": {}, "html": {"engine": "mill"}}
SET_UP = """
import json, sys
from pipeline.base import compiled
from stages.catalog import stage_class
for name, config in json.loads(sys.argv[1]).items():
    stage_class(name)(config).setup()
print(sorted(f.__name__ for f, kernel in compiled._compiled.items() if kernel.signatures))
"""


def test_no_set_up_compiles() -> None:
    """A worker sets stages up with more rights than it has later, and keeps what it compiles then apart. The next run
    would compile the same functions again."""
    steps = {**STEPS, "language": {"model": str(lid176_model())}}
    done = subprocess.run([sys.executable, "-c", SET_UP, json.dumps(steps)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_kernel_is_compiled_for_a_constant() -> None:
    """A kernel that another one calls with `0` is compiled for 0 and, once the variable has another value, for int64
    as well. The index of numba's cache knows what any process has compiled."""
    steps = {**STEPS, "language": {"model": str(lid176_model())}, "signature": {}}
    for name, config in steps.items():
        stage = stage_class(name)(config) if name in STAGES else MinHashSignature(config)
        stage.setup()
        stage.warm()
    kernels = [kernel for kernel in compiled._compiled.values() if compiled._cache_files(kernel)]
    assert len(kernels) > 50
    assert [f"{kernel.py_func.__module__}.{kernel.__name__}{arguments}" for kernel in kernels
            for arguments, *_ in compiled._cache_files(kernel)._load_index() if "Literal" in str(arguments)] == []


class Told(Stage):
    """Notes what is called."""

    name, version = "told", 1

    def setup(self) -> None:
        CALLS.append("setup")

    def warm(self) -> None:
        CALLS.append("warm")


CALLS: list[str] = []


def test_stages_are_warmed_once_they_are_confined_and_only_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_loaded", {})
    CALLS.clear()

    def run(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        entry: dict[str, Any] = {"name": "told", "key": "0" * 32,
                                 "$volatile": {"target": f"{__name__}:Told", "config": {}}}
        spec = TaskSpec("k", "documents", "d", {
            "source": "s", "reader": {"name": "jsonl", "key": "1" * 32,
                                      "$volatile": {"target": "jsonl", "config": {}}},
            "slices": [], "chain": [entry], "signals": [], "signals_mode": "until-drop", "rewrites": True})
        inputs = TaskInputs(spec, Store(tmp_path / "store"), str(folder),
                            confine=lambda programs: CALLS.append("confine"))
        DocumentPass.run(inputs, CrashCursor(), TaskOutputs(str(folder)))

    run(1)
    assert CALLS == ["setup", "confine", "warm"]
    run(2)
    assert CALLS == ["setup", "confine", "warm", "confine"]
