"""Kernels that are only compiled when they are first called give the same results as kernels that numba compiles at
once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.base import confinement
from pipeline.base.compiled import SHIPPED as SHIPPED_IN

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
from pipeline.base.compiled import njit

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
    """Run `code` and return what it prints. It writes no .pyc file: one of a module that a test writes anew, within the
    second and with as many bytes, would be taken for up to date."""
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=folder, env={"PYTHONPATH": f"{ROOT}:{folder}"},
                          capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


#: reads folders and programs, and runs each program in a fork of itself, in which numba is imported and has compiled
SERVER = """
import json, os, sys
import numba
numba.njit(lambda x: x + 1)(1)
for line in sys.stdin:
    folder, program = json.loads(line)
    if os.fork() == 0:
        os.dup2(2, 1)
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.stdout = open("printed", "w")
        exec(program, {})
        sys.stdout.close()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[Callable[[str, Path], str]]:
    """A function that does what `python` does, but in half the time: the process has imported numba before."""
    with subprocess.Popen([sys.executable, "-B", "-c", SERVER], env={"PYTHONPATH": str(ROOT)}, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:

        def run(code: str, folder: Path) -> str:
            server.stdin.write(json.dumps([str(folder), code]) + "\n")
            server.stdin.flush()
            assert server.stdout.readline() == "0\n"
            return (folder / "printed").read_text()

        yield run


def test_numba_comes_with_the_first_call_and_threads_may_make_it_together(tmp_path):
    (tmp_path / "kernels.py").write_text(MODULE)
    said = python("import sys, numpy as np\n"
                  "from concurrent.futures import ThreadPoolExecutor\n"
                  "from kernels import square, total, plain\n"
                  "import kernels\n"
                  "print('numba' in sys.modules)\n"
                  "print(sum(ThreadPoolExecutor(8).map(square, range(50))))\n"
                  "print(total(np.arange(5)), plain(7), kernels.square(3))\n"
                  "print('numba' in sys.modules, type(kernels.square).__name__, total.__name__)\n", tmp_path)
    assert said.splitlines() == ["False", "40425", "30 49 9", "True CPUDispatcher total"]


@pytest.mark.slow
def test_kernels_are_kept_elsewhere_from_then_on(tmp_path):
    """…and found again there, also of a module that numba had before, and by a process that comes to it later."""
    (tmp_path / "kernels.py").write_text(MODULE)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    code = (f"import os; os.environ['NUMBA_CACHE_DIR'] = {str(ours)!r}\n"
            f"import kernels\n"
            f"from pipeline.base.compiled import keep_in\n"
            f"FIRST\n"
            f"keep_in({str(theirs)!r})\n"
            f"print(kernels.square(3), kernels.square(1.5), kernels.plain(2.5))\n"
            f"print(sum(kernels.square.stats.cache_hits.values()), len(kernels.square.overloads))\n")
    early = code.replace("FIRST", "kernels.square(2)")
    assert python(early, tmp_path) == "9 2.25 6.25\n0 2\n"
    kept = {folder: sorted(p.name for p in folder.rglob("*.nbc")) for folder in (ours, theirs)}
    assert [len(kept[ours]), len(kept[theirs])] == [1, 1], "one for whole numbers, one for fractions"
    assert python(early, tmp_path) == "9 2.25 6.25\n2 2\n"
    assert python(code.replace("FIRST", ""), tmp_path) == "9 2.25 6.25\n1 2\n"
    assert len(list(ours.rglob("*.nbc"))) == 1 and len(list(theirs.rglob("*.nbc"))) == 2


def test_kernels_are_compiled_where_nothing_can_be_kept(tmp_path):
    """As in a container whose disks are all read-only: numba then knows no folder for its cache."""
    (tmp_path / "kernels.py").write_text(MODULE)
    code = ("from numba.core import caching\ncaching.FunctionCache._impl_class._locator_classes = []\n"
            "import kernels, numpy as np\nprint(kernels.total(np.arange(5)))\n")
    assert python(code, tmp_path) == "30\n"
    assert not list(tmp_path.rglob("*.nbi"))


@pytest.mark.slow
def test_kernels_call_kernels_of_other_modules_and_notice_when_their_files_change(tmp_path, forked):
    """Two modules away, and where the cache keeps what was compiled: numba looks at the file of the caller alone."""
    once, twice = (MODULE.partition("@njit")[0] + part for part in (
        "@njit(cache=True)\ndef square(x):\n    return x * x\n",
        "from squares import square as of\n@njit(cache=True)\ndef fourth(x):\n    return of(of(x))\n"))
    (tmp_path / "squares.py").write_text(once)
    (tmp_path / "fourths.py").write_text(twice)
    (tmp_path / "kernels.py").write_text(MODULE.replace("@njit", "from fourths import fourth\n@njit", 1).replace(
        "return x * x", "return fourth(x)"))
    code = ("import kernels, fourths, squares, numpy as np\nfrom pipeline.base.compiled import keep_in\n"
            "KEEP\n"
            "print(kernels.total(np.arange(4)), kernels.plain(3), sum(kernels.total.stats.cache_hits.values()))\n"
            "print({type(k).__name__ for k in (kernels.fourth, fourths.of, squares.square)})\n")
    kept = code.replace("KEEP", f"kernels.square(1)\nkeep_in({str(tmp_path / 'kept')!r})")
    for program in (code.replace("KEEP", ""), kept):
        assert forked(program, tmp_path) == "98 81 0\n{'CPUDispatcher'}\n"
        assert forked(program, tmp_path) == "98 81 1\n{'CPUDispatcher'}\n"
    (tmp_path / "squares.py").write_text(once.replace("x * x", "x * x + 1"))
    for program in (code.replace("KEEP", ""), kept):
        assert forked(program, tmp_path) == "134 101 0\n{'CPUDispatcher'}\n"


@pytest.mark.slow
def test_kernels_notice_when_constants_of_other_modules_change(tmp_path, forked):
    """numba writes the values of constants into the machine code, and looks at the file of the kernel alone."""
    (tmp_path / "kernels.py").write_text(MODULE.replace("@njit", "import columns as c\nfrom columns import LATE\n"
                                                        "FIRST = c.FIRST + 0\n@njit", 1).replace(
        "return x * x", "return x * FIRST + LATE[0] + TABLE[1] + c.LAST").replace(
        "FIRST = ", "TABLE = c.TABLE\nFIRST = "))
    code = ("import kernels, numpy as np\n"
            "print(kernels.total(np.arange(2)), sum(kernels.total.stats.cache_hits.values()))\n")
    values = {"FIRST": "1", "LATE": "(10, 0)", "LAST": "100", "TABLE": "np.array([0, 1000])"}

    def write() -> None:
        (tmp_path / "columns.py").write_text("import numpy as np\n" + "".join(
            f"{name} = {value}\n" for name, value in values.items()))

    write()
    assert [forked(code, tmp_path), forked(code, tmp_path)] == ["2221 0\n", "2221 1\n"]
    for name, value, total in (("FIRST", "2", 2222), ("LATE", "(20, 0)", 2242), ("LAST", "200", 2442),
                               ("TABLE", "np.array([0, 2000])", 4442)):
        values[name] = value
        write()
        assert forked(code, tmp_path) == f"{total} 0\n", name
    assert forked(code, tmp_path) == "4442 1\n"


def test_kernels_run_without_compilation_to_be_debugged(tmp_path):
    (tmp_path / "squares.py").write_text(MODULE)
    (tmp_path / "kernels.py").write_text(MODULE.replace("@njit", "from squares import square as of\n@njit", 1).replace(
        "return x * x", "return of(x) + 1"))
    code = "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'\nimport kernels\nprint(kernels.total([1, 2]))\n"
    assert python(code, tmp_path) == "7\n"


LATER = MODULE.replace("square", "later").replace("total", "first")


def test_kernels_take_their_place_all_at_once(tmp_path):
    """A thread that calls a kernel while another one hands the module to numba finds all of it put off, or nothing:
    what calls a kernel that is put off still cannot be compiled."""
    (tmp_path / "kernels.py").write_text(LATER.replace("found = 0", "found = 0 * last(1)") + '''
@njit(cache=True)
def last(x):
    return x
''')
    said = python("import numba, numpy as np, kernels\n"
                  "seen, made = [], numba.njit\n"
                  "def noted(*given, **options):\n"
                  "    seen.append({type(k).__name__ for k in (kernels.first, kernels.later, kernels.last)})\n"
                  "    return made(*given, **options)\n"
                  "numba.njit = noted\n"
                  "print(kernels.first(np.arange(5)), seen[:3] == [{'function'}] * 3)\n"
                  "print({type(k).__name__ for k in (kernels.first, kernels.later, kernels.last)})\n", tmp_path)
    assert said.splitlines() == ["30 True", "{'CPUDispatcher'}"]


#: calls a kernel, and prints how many variants were compiled for that. The first process keeps what it has compiled
#: only when the second one waits for it, or is done without waiting
ONCE = """
import sys
from pathlib import Path
import kernels
from numba.core.caching import IndexDataCacheFile as Files
from pipeline.base import compiled
from tests.processes import until

def data(self, name, code, keep=Files._save_data):
    Path("compiling").touch()
    until(Path("waits").exists)
    keep(self, name, code)

def sleep(seconds, sleep=compiled.SYSTEM.sleep):
    Path("waits").touch()
    sleep(seconds)

if sys.argv[1] == "first":
    Files._save_data = data
else:
    until(Path("compiling").exists)
    compiled.SYSTEM.sleep = sleep
print(kernels.square(3), sum(kernels.square.stats.cache_misses.values()))
Path("waits").touch()
"""


@pytest.mark.slow
def test_of_two_processes_that_need_a_kernel_one_compiles_it(tmp_path):
    (tmp_path / "kernels.py").write_text(MODULE)
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    runs = [subprocess.Popen([sys.executable, "-c", ONCE, which], cwd=tmp_path, env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for which in ("first", "second")]
    ends = [run.communicate(timeout=600) for run in runs]
    assert [out for out, _ in ends] == ["9 1\n", "9 0\n"], ends


@pytest.mark.slow
def test_a_process_that_stands_still_keeps_another_from_compiling_once_and_not_for_long(tmp_path):
    (tmp_path / "kernels.py").write_text(MODULE)
    assert python("from kernels import square; print(square(3))", tmp_path) == "9\n"
    with contextlib.ExitStack() as stack:
        locks = [stack.enter_context(open(path, "ab")) for path in tmp_path.rglob("*.lock")]
        assert len(locks) == 1
        fcntl.flock(locks[0], fcntl.LOCK_EX)
        assert python("from pipeline.base import compiled; compiled.PATIENCE_S = 0.1\n"
                      "from kernels import square; print(square(0.5))\n"
                      "compiled.SYSTEM.sleep = exit         # it does not wait again\n"
                      "print(square(1j))", tmp_path) == "0.25\n(-1+0j)\n"
    assert python("import kernels; print(kernels.square(0.5), *kernels.square.stats.cache_misses)", tmp_path) == \
        "0.25\n", "it was kept all the same"


#: compiles a kernel for numbers of its kind, on a file system without locks. The one of whole numbers keeps its code
#: last, the one of fractions looks what there is before anything is kept, and keeps its own in between
TOGETHER = """
import sys, time
from pathlib import Path
from numba.core.caching import IndexDataCacheFile as Files
from pipeline.base import compiled
from kernels import square

compiled._wait_for_lock = lambda path: None

kind = float if sys.argv[1] == "fraction" else int

def put(name):
    Path(name).touch()

def wait(name):
    until = time.monotonic() + 500
    while not Path(name).exists():
        assert time.monotonic() < until, name
        time.sleep(0.01)

def index(self, overloads, keep=Files._save_index):
    if kind is float:
        put("looked")
        wait("whole index")
    keep(self, overloads)

def data(self, name, code, keep=Files._save_data):
    if kind is int:
        put("whole index")
        wait("fraction kept")
    keep(self, name, code)

Files._save_index, Files._save_data = index, data
if kind is int:
    wait("looked")
print(square(kind(3)))
put("fraction kept") if kind is float else None
"""


@pytest.mark.slow
def test_two_processes_that_keep_two_variants_of_a_kernel_at_once(tmp_path):
    """Who comes later finds the code of a variant, or none: never that of the other, which gives other numbers."""
    (tmp_path / "kernels.py").write_text(MODULE)
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    runs = [subprocess.Popen([sys.executable, "-c", TOGETHER, kind], cwd=tmp_path, env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for kind in ("fraction", "whole")]
    ends = [run.communicate(timeout=600) for run in runs]
    assert [out for out, _ in ends] == ["9.0\n", "9\n"], ends
    assert python("from kernels import square; print(square(0.5), square(3))", tmp_path) == "0.25 9\n"

#: calls a kernel, and tells whether one was compiled and what registers it uses that not every processor has
SHIPPED = """
import kernels
import numpy as np
from numba.core import event
with event.install_recorder("numba:compile") as seen:
    print(kernels.total(np.arange(5)), bool(seen.buffer))
if seen.buffer:
    print(sorted({r for a in kernels.total.inspect_asm().values() for r in ("xmm", "ymm", "zmm") if r in a}))
"""


@pytest.mark.slow
def test_an_image_brings_its_kernels_for_any_processor(tmp_path):
    """Compiled once for a generic processor and never written again; any other processor runs them as they are."""
    image, own = tmp_path / "image", tmp_path / "own"
    (tmp_path / "kernels.py").write_text(MODULE)

    def run(**env: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", SHIPPED], cwd=tmp_path, capture_output=True, text=True,
                              timeout=600, check=True, env={"PYTHONPATH": f"{ROOT}:{tmp_path}", **env})
        return done.stdout.splitlines()

    made = run(NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR=str(image))
    assert made[0] == "30 True" and "ymm" not in made[1] and "zmm" not in made[1]
    before = {path: path.stat().st_mtime_ns for path in image.rglob("*")}
    others = [{}, *([{"NUMBA_CPU_NAME": "nehalem"}] if platform.machine() == "x86_64" else [])]
    for other in others:
        assert run(TOKENMILL_KERNELS=str(image), NUMBA_CACHE_DIR=str(own), **other)[0] == "30 False", other
        assert not [path for path in own.rglob("*") if path.is_file()]
    # what the image does not have is compiled, and kept elsewhere
    (tmp_path / "kernels.py").write_text(MODULE.replace("x * x", "x * x + 1"))
    assert run(TOKENMILL_KERNELS=str(image), NUMBA_CACHE_DIR=str(own))[0] == "35 True"
    assert [path for path in own.rglob("*") if path.is_file()]
    assert before == {path: path.stat().st_mtime_ns for path in image.rglob("*")}


def test_the_image_has_the_kernels_of_the_default_engine_compiled(tmp_path):
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    built, runtime = text.split("FROM system AS runtime")
    command = re.search(r'NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=/opt/tokenmill/kernels \\\n.*python -c "([^"]+)"',
                        built)
    assert command, "the image compiles kernels"
    # without numba's compiler, which takes 14 s for them
    code = (f"import os; os.environ['NUMBA_DISABLE_JIT'] = '1'\n{command[1]}\n"
            "from pipeline.base import compiled\nprint(*sorted({k.__module__ for k in compiled._compiled}))")
    kernels = {f"stages.extract.html.mill.{name}" for name in ("features", "forest", "markup", "scan", "second_pass",
                                                               "structure")}
    assert kernels <= set(python(code, tmp_path).split())
    assert "TOKENMILL_KERNELS=/opt/tokenmill/kernels" in runtime and "NUMBA_CPU_NAME" not in runtime
    assert confinement.scrubbed({SHIPPED_IN: "/opt/tokenmill/kernels"}) == {SHIPPED_IN: "/opt/tokenmill/kernels"}, (
        "workers that parse would not see them")
