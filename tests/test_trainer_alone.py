"""The trainer runs where only torch, numpy, pyarrow and PyYAML are installed. The tests use import hooks that refuse
all other packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tests.trainer.synthetic import make_run

ROOT = Path(__file__).resolve().parents[1]
OURS = {"trainer", "tokenizer"}

SCRIPT = """
import json, sys

allowed = set(json.loads(sys.argv[1])) | set(sys.stdlib_module_names)

class Only:
    # a finder that knows what is allowed alone, as if nothing else were installed
    def __init__(self, inner):
        self.inner = inner

    def find_spec(self, name, path=None, target=None):
        ours = name in ("pipeline", "pipeline.base") or name.startswith("pipeline.base.")
        return self.inner.find_spec(name, path, target) if ours or name.partition(".")[0] in allowed else None

    def __getattr__(self, name):
        return getattr(self.inner, name)

sys.meta_path[:] = [Only(finder) for finder in sys.meta_path]
for name in ("pydantic", "ray", "datatrove", "trafilatura", "tokenizers", "tensorboard", "pipeline.store"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"the hook let {name} through")

import trainer
from trainer.__main__ import main
code = main(["run", sys.argv[2], "--stop-at", "5", "--device", "cpu"])
print(json.dumps(sorted({m.partition(".")[0] for m in sys.modules} - set(sys.stdlib_module_names))))
raise SystemExit(code)
"""


def closure(names: list[str]) -> set[str]:
    """Return the names of the distributions that `names` require, directly or indirectly, with `names` themselves.
    Requirements of extras and of other platforms are left out."""
    found: set[str] = set()
    todo = [name.lower().replace("_", "-") for name in names]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        todo += [re.match(r"[A-Za-z0-9_.-]+", r)[0].lower().replace("_", "-") for r in requires if "extra ==" not in r]
    return found


def test_import_and_five_steps_with_torch_numpy_pyarrow_yaml_alone(tmp_path):
    run = make_run(tmp_path, documents=100, total=1920)
    wanted = closure(["torch", "numpy", "pyarrow", "pyyaml", "safetensors"])
    modules = {top for top, dists in metadata.packages_distributions().items()
               if any(d.lower().replace("_", "-") in wanted for d in dists)}
    assert {"torch", "numpy", "pyarrow", "yaml"} <= modules
    assert not modules & {"ray", "pydantic", "datatrove", "tokenizers", "pipeline", "xxhash"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(sorted(modules | OURS)), str(run)], cwd=ROOT,
                          capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "tensorboard is not installed" in done.stdout
    lines = (run / "train" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"event": "step"' in line]
    assert steps == [1, 2, 3, 4, 5]
    assert len(list((run / "train" / "checkpoints").glob("step_00000005/COMPLETE"))) == 1
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"torch", "numpy", "trainer", "tokenizer"} <= loaded and "stages" not in loaded
