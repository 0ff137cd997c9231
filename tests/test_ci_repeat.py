"""The script `.ci/repeat.py` repeats each failed test once, alone. It repeats nothing if the run of the tests was
incomplete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: `test_flaky` fails in the first process that runs it
FLAKY = '''
import pathlib, pytest

@pytest.mark.parametrize("word", ["é [x]"])
def test_flaky(word):
    mark = pathlib.Path("ran")
    before, _ = mark.exists(), mark.touch()
    assert before
'''
BAD = '''
import pathlib, pytest

def test_good(): pass
def test_bad(): assert False
def test_skipped():
    mark = pathlib.Path("skips")
    if mark.exists(): pytest.skip("not here")
    mark.touch()
    assert False
'''
MANY = '''
import pytest

@pytest.mark.parametrize("n", range(21))
def test_one(n): assert False
'''


@pytest.fixture
def repeat(tmp_path, monkeypatch):
    """A function that runs the script on the given tests, in a folder with the same pytest cache settings as this
    repository."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_sessionfinish\n")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")          # the other plugins take longer than the tests
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def run(*command: str, **tests: str) -> tuple[int, list[str], str]:
        for name, text in tests.items():
            (tmp_path / f"{name}.py").write_text(text)
        done = subprocess.run([sys.executable, ROOT / ".ci" / "repeat.py", tmp_path / "flaky", *command], cwd=tmp_path,
                              capture_output=True, text=True, check=False)
        flaky = tmp_path / "flaky"
        return done.returncode, flaky.read_text().splitlines() if flaky.exists() else [], done.stdout + done.stderr

    return run


SUITE = (".venv/bin/python", "-m", "pytest", "-q")


@pytest.mark.slow
def test_a_test_that_passes_alone_is_listed_as_flaky(repeat):
    code, flaky, said = repeat(*SUITE, "-n", "1", "--dist", "loadgroup", test_some=FLAKY)
    assert (code, flaky) == (0, ["  test_some.py::test_flaky[\\xe9 [x]]"]), said
    assert "1 failed in" in said and "1 passed in" in said


@pytest.mark.slow
def test_a_test_that_fails_again_fails(repeat):
    code, flaky, said = repeat(*SUITE, test_some=BAD)
    assert (code, flaky) == (1, []), said
    assert "failed again: test_some.py::test_bad\nfailed again: test_some.py::test_skipped\n" in said
    assert said.count("once more, alone") == 2
    # as an installation that fails: what failed in the run before is not repeated
    assert repeat("false")[0] == 2


def test_a_run_that_did_not_end_is_not_repeated(repeat):
    code, flaky, said = repeat(*SUITE, test_other="import nothing_of_this_name\n", test_some=FLAKY)
    assert (code, flaky) == (2, []) and "nothing is repeated" in said, said


def test_many_failures_are_not_repeated(repeat):
    code, flaky, said = repeat(*SUITE, test_some=MANY)
    assert (code, flaky) == (1, []) and "21 tests failed" in said and "once more" not in said, said
