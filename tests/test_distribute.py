"""A worker of pytest-xdist that crashes costs one test, and the run ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CRASH = "def test_crash():\n    import os\n    os._exit(1)\n"
REST = "import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test_{}(n): pass\n"


@pytest.mark.parametrize(("files", "crashing", "closing"), [
    ("abcdef", "b", "1 failed, 21 passed"), ("abcdef", "f", "1 failed, 21 passed"),
    ("abcdef", "abcdef", "6 failed, 36 passed"), ("a", "a", "1 failed, 6 passed")])
def test_all_tests_but_the_crashing_ones_run(tmp_path, monkeypatch, files, crashing, closing):
    for name in files:
        (tmp_path / f"test_{name}.py").write_text(
            REST.format("one") + (CRASH + REST.format("two") if name in crashing else ""))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")      # they take longer than the tests
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p",
                           "tests.distribute", "-p", "no:cacheprovider"], cwd=tmp_path, capture_output=True, text=True,
                          check=False, timeout=600)
    assert closing in done.stdout, done.stdout + done.stderr
