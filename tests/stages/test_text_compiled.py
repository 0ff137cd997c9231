"""Kernels put off until they are called give what numba gives at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
from stages.text.compiled import njit

@njit(cache=True)
def square(x):
    return x * x

@njit(cache=True)
def total(xs):
    found = 0
    for x in xs:
        found += square(x)
    return found

def plain(x):
    return square(x)
'''


def python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env={"PYTHONPATH": f"{ROOT}:{folder}"},
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_of_a_module_call_each_other_and_numba_comes_with_the_first_call(tmp_path):
    (tmp_path / "kernels.py").write_text(MODULE)
    said = python("import sys, numpy as np\n"
                  "from kernels import total, plain\n"
                  "import kernels\n"
                  "print('numba' in sys.modules)\n"
                  "print(total(np.arange(5)), plain(7), kernels.square(3))\n"
                  "print('numba' in sys.modules, type(kernels.square).__name__, total.__name__)\n", tmp_path)
    assert said.split("\n")[:3] == ["False", "30 49 9", "True CPUDispatcher total"]


def test_threads_that_call_first_at_the_same_time(tmp_path):
    (tmp_path / "kernels.py").write_text(MODULE)
    said = python("import numpy as np\n"
                  "from concurrent.futures import ThreadPoolExecutor\n"
                  "from kernels import square\n"
                  "print(sum(ThreadPoolExecutor(8).map(square, range(50))))\n", tmp_path)
    assert int(said) == int(np.sum(np.arange(50) ** 2))
