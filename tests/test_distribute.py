"""A worker of pytest-xdist that crashes or hangs costs one test, and the run ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import rest_slow

ROOT = Path(__file__).resolve().parents[1]
HANG = "def test_hang():\n    import time\n    time.sleep(1000)\n"
CRASH = "def test_crash():\n    import os\n    os._exit(1)\n"
REST = "import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test_{}(n): pass\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs the tests in the temporary folder with two workers and returns what pytest says."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")          # the other plugins take longer than the tests
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "tests.distribute",
                   "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider", *options, tmp_path]
        return subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False, timeout=600).stdout

    return run


@pytest.mark.parametrize(("files", "crashing", "closing"), [
    ("abcdef", "b", "1 failed, 21 passed"), *rest_slow(0, [
        ("abcdef", "f", "1 failed, 21 passed"), ("abcdef", "abcdef", "6 failed, 36 passed"),
        ("a", "a", "1 failed, 6 passed")])])
def test_all_tests_but_the_crashing_ones_run(tmp_path, run, files, crashing, closing):
    for name in files:
        (tmp_path / f"test_{name}.py").write_text(
            REST.format("one") + (CRASH + REST.format("two") if name in crashing else ""))
    printed = run()
    assert closing in printed, printed


@pytest.mark.slow
def test_a_test_that_hangs_ends_with_its_stack(tmp_path, run):
    """It is the only test, because on a busy machine others could take a second, too."""
    (tmp_path / "test_a.py").write_text(HANG)
    printed = run("-o", "faulthandler_timeout=1")
    assert "1 failed in" in printed and 'test_a.py", line 3 in test_hang' in printed, printed
