"""Programs that a model wrote: a right one passes, no other does, and none can do anything but compute."""

from __future__ import annotations

import ast
import json
import os
import socket
import time
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base import confinement
from tests.conftest import shared_data
from tests.trainer.evaluation import model_of, reader, write_task
from trainer.base.config import ConfigError
from trainer.evaluation.evaluate import prepare, score
from trainer.evaluation.program_process import literal
from trainer.evaluation.programs import ProgramLimits, WrittenProgram, check_isolation, outcome
from trainer.evaluation.task_file import tasks_named

lacking = confinement.missing(confinement.support())
needs_kernel = pytest.mark.skipif(bool(lacking), reason=f"this kernel: {lacking}")
#: for programs that end by themselves, however slow the machine is, and for those that do not
LONG, SHORT = (ProgramLimits(memory=256 << 20, cpu_s=cpu_s, wall_s=wall_s) for cpu_s, wall_s in ((120, 600), (1, 5)))


def run(text: str, tests: str, limits: ProgramLimits = LONG) -> str:
    return outcome(WrittenProgram(text, "f", tests), limits)


def returns(text: str, value: Any) -> str:
    """The outcome of a program of which one call without arguments must return `value`."""
    return run(text, f"def check(candidate):\n    assert candidate() == {value!r}\n")


DOUBLES = "def check(candidate):\n    for n in (1, 2, 30):\n        assert candidate(n) == 2 * n\n"


# -- the verdict ----------------------------------------------------------------------------------------------------
@needs_kernel
def test_a_right_program_passes_and_a_wrong_one_does_not():
    assert run("def f(n):\n    return n + n\n", DOUBLES) == "passed"
    assert run("def f(n):\n    return n * n\n", DOUBLES) == "wrong"
    assert run("def f(n):\n    return n +\n", DOUBLES) == "error"
    assert run("def g(n):\n    return n + n\n", DOUBLES) == "error"
    assert run("def f(n):\n    return n + n\n", "def chek(candidate):\n    pass\n") == "error"


#: writes a line to every pipe, again and again, before the first call
WRITES = """
import os
for i in range(1, 64):
    try:
        os.write(i, {line!r} * 9)
    except OSError:
        pass
def f(n): return 0
"""
EQUAL = "    __hash__ = None\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
FORGERIES = {
    "exit before the tests": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit code of a pass": "import os\ndef f(n): os._exit(77)",
    "exit in the call": "def f(n): raise SystemExit(0)",
    "end of iteration": "def f(n): raise StopIteration",
    "interrupt": "def f(n): raise KeyboardInterrupt",
    "the error that tests expect": "def f(n): raise AssertionError",
    "a printed pass": "def f(n): print('passed', 77, flush=True)",
    "an object that equals everything": f"class A:\n{EQUAL}def f(n): return A()",
    "a number that equals everything": f"class A(int):\n{EQUAL}def f(n): return A(0)",
    "a list that equals everything": f"class A(list):\n{EQUAL}def f(n): return A()",
    "no asserts": "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\ndef f(n): return 0",
    "another check": "import sys\nsys.modules['__main__'].check = print\ncheck = print\ndef f(n): return 0",
    "answers to all pipes": WRITES.format(line=b"=0\n"),
    "an answer that is no literal": WRITES.format(line=b"=__import__('os')._exit(77)\n"),
    "an answer of brackets": WRITES.format(line=b"=" + b"[" * 9999 + b"\n"),
    "an endless answer": "def f(n): return 'x' * (4 << 20)",
    "a generator": "def f(n): yield 2 * n",
}


@needs_kernel
@pytest.mark.parametrize("name", FORGERIES)
def test_a_pass_cannot_be_forged(name: str):
    assert run(FORGERIES[name], DOUBLES) in ("wrong", "error")
    # not even where the tests swallow the end of an iteration
    tests = "def check(candidate):\n    assert all(map(lambda n: n == 2, map(candidate, (1, 1))))\n"
    assert run(FORGERIES[name], tests) in ("wrong", "error")


@needs_kernel
def test_a_program_never_sees_the_tests():
    """It looks for a word of the tests in its arguments, files and memory."""
    text = """
import gc, os, sys
def f():
    seen = [repr(sys.argv), repr(dict(os.environ))]
    for number in range(64):
        try:
            os.lseek(number, 0, 0)
            seen.append(repr(os.read(number, 1 << 20)))
        except OSError:
            pass
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)) and thing is not seen:
            parts = thing.values() if isinstance(thing, dict) else thing
            seen += [repr(part) for part in list(parts) if isinstance(part, (str, bytes))]
    return "".join(["xylo", "phone"]) in "".join(seen)
"""
    # the program itself, which is in its memory, is found
    assert returns(text.replace('"".join(["xylo", "phone"])', '"import gc, os, sys"'), True) == "passed"
    assert run(text, "word = 'xylophone'\ndef check(candidate):\n    assert candidate() == False\n") == "passed"


@needs_kernel
def test_results_compare_as_in_one_process():
    values: list[Any] = [None, True, -7, 10 ** 5000, 0.1, float("-inf"), "a\n\u2028\ud800é", b"\x00", [1, [2]], (1,),
                         (), {1, "x"}, set(), {"a": [None]}, {}]
    for value in values:
        assert ast.literal_eval(literal(value)) == value and "\n" not in literal(value)
    assert returns("from collections import Counter\ndef f(): return Counter('aab')", {"a": 2, "b": 1}) == "passed"
    assert returns("def f(): return frozenset([1])", {1}) == "passed"
    assert returns("def f(): return [1, 2]", (1, 2)) == "wrong"
    assert returns("def f(): return object()", None) == "error"
    # arguments are copies
    in_place = "def check(candidate):\n    x = []\n    candidate(x)\n    assert x == [1]\n"
    assert run("def f(x): x.append(1)", in_place) == "wrong"
    # a function of the prompt that the tests call, and the tested one by its name
    tests = "def half(n):\n    return n // 2\ndef check(candidate):\n    assert half(candidate(3)) == 3 == f(3) // 2\n"
    assert run("def f(n):\n    return 2 * n", tests) == "passed"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
                    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
                    max_leaves=20))
def test_plain_values_survive_the_pipe(value: Any):
    assert ast.literal_eval(literal(value)) == value


@pytest.mark.parametrize("value", [float("nan"), object(), range(3), iter([]), [object()], len])
def test_other_values_do_not_pass(value: Any):
    with pytest.raises(TypeError):
        literal(value)


def test_subclasses_are_written_as_what_they_extend():
    assert literal(Counter("aab")) == literal(dict(Counter("aab"))) and literal(OrderedDict(a=1)) == literal({"a": 1})


# -- what a program can do ------------------------------------------------------------------------------------------
DENIED = {
    "write a file": "open({outside!r}, 'w')", "write here": "open('x', 'w')", "make a folder": "os.mkdir('x')",
    "delete": "os.unlink({inside!r})", "rename": "os.rename({inside!r}, {outside!r})",
    "link": "os.link({inside!r}, 'x')",
    "truncate": "os.truncate({inside!r}, 0)", "mode": "os.chmod({inside!r}, 0)", "times": "os.utime({inside!r})",
    "shared memory": "open('/dev/shm/x', 'w')",
    "read a file": "open({inside!r})", "list a folder": "os.listdir('/')", "list here": "os.listdir('.')",
    "read the parent": "open('/proc/{parent}/environ')", "read itself": "open('/proc/self/mem')",
    "fork": "os.fork()", "run": "os.execv('/bin/true', ['true'])",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {{}})",
    "signal": "os.kill({parent}, 0)", "group": "os.killpg(0, 9)",
    "limits of others": "resource.prlimit({parent}, resource.RLIMIT_CPU, (1, 1))",
    "priority": "os.setpriority(0, {parent}, 19)",
    "socket": "socket.socket()", "pair": "socket.socketpair()",
    "connect": "socket.create_connection(('127.0.0.1', {port}))",
    "memory file": "os.memfd_create('x')", "pipe": "os.pipe()", "namespace": "syscall(unshare, 0x10000000)",
}


@needs_kernel
@pytest.mark.parametrize("name", DENIED)
def test_a_program_can_only_compute(name: str, tmp_path: Path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.write_text("text")
    mode = inside.stat()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        action = DENIED[name].format(inside=str(inside), outside=str(outside), port=listener.getsockname()[1],
                                     parent=os.getpid())
        text = f"""
import ctypes, os, resource, socket
unshare = {{"x86_64": 272, "aarch64": 97}}[{os.uname().machine!r}]
def syscall(*arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "syscall")
def f():
    try:
        {action}
    except PermissionError:
        return "denied"
"""
        assert returns(text, "denied") == "passed"
    assert not outside.exists() and inside.read_text() == "text"
    assert (inside.stat().st_mode, inside.stat().st_mtime_ns) == (mode.st_mode, mode.st_mtime_ns)


@needs_kernel
def test_a_program_has_no_environment_threads_or_site_packages(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    assert returns("import os\ndef f(): return sorted(set(os.environ) - {'LC_CTYPE'})", ["PYTHONHASHSEED"]) == "passed"
    for action, error in (("import numpy", "ImportError"), ("threading.Thread(target=print).start()", "RuntimeError")):
        assert returns(f"import threading\ndef f():\n    try:\n        {action}\n    except {error}:\n        return 1",
                       1) == "passed"


@needs_kernel
@pytest.mark.parametrize(("text", "expected"), [
    ("while True: pass", "timeout"), ("def f(n):\n    while True: pass", "timeout"),
    ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
    ("import time\ntime.sleep(600)", "timeout"),
    ("x = bytearray(1 << 30)", "error"), ("x = []\nwhile True: x.append(bytes(1 << 20))", "error"),
    ("def f(n): return f(n)", "error"), ("import ctypes\nctypes.string_at(0)", "error"),
    ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout")])
def test_bombs_hit_their_limits(text: str, expected: str):
    began = time.monotonic()
    assert run(text, DOUBLES, SHORT if expected == "timeout" else LONG) == expected
    assert time.monotonic() - began < 500


@needs_kernel
def test_the_order_of_sets_is_the_same_in_every_run():
    text = "def f(): return list({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    tests = "def check(candidate):\n    assert candidate() == list({'a', 'b', 'c', 'd', 'e', 'f', 'g'})\n"
    assert run(text, tests) == "passed"


def test_nothing_runs_where_programs_cannot_be_isolated(monkeypatch):
    monkeypatch.setattr(confinement, "support", lambda: {"landlock": 0, "seccomp": True})
    with pytest.raises(ConfigError, match="Landlock") as error:
        check_isolation()
    assert "\n" not in str(error.value) and "leave --allow-code out" in str(error.value)


# -- the task -------------------------------------------------------------------------------------------------------
CODE = {"forms": ["bpb", "code"], "context": "{prompt}", "answer": "{solution}", "lettered": "", "prior": None,
        "choices_from": "", "choices": ["{solution}"], "gold": "0",
        "generate": {"tokens": 3, "stop": ["\n"], "extract": "text"},
        "code": {"function": "{name}", "tests": "{test}"}}


def rows() -> list[dict[str, str]]:
    """Problems that are solved already: what the model adds to the prompt is a comment. Every third solution is
    wrong."""
    return [{"prompt": f"def f(n):\n    return n + {i % 3 > 0:d}  #", "solution": " one", "name": "f",
             "test": "def check(candidate):\n    assert candidate(3) == 4\n"} for i in range(6)]


@needs_kernel
def test_programs_are_scored_by_their_tests(tmp_path: Path):
    ready = prepare(write_task(tmp_path, rows(), **CODE), tmp_path / "data", 0, 0, reader())
    done: list[int] = []
    scores = score(model_of(), ready, reader(), progress=done.append)
    assert [item.outcome for item in scores.items] == ["wrong", "passed", "passed"] * 2
    assert scores.measures["code"].value == pytest.approx(2 / 3) and "fg" not in scores.measures
    assert scores.items[0].generated is not None and sum(done) == ready.work
    assert json.dumps(scores.to_json())


@pytest.mark.parametrize(("settings", "key"), [
    ({"code": None}, "code"), ({"generate": None}, "generate"), ({"forms": ["fg", "code"]}, "fg"),
    ({"code": {"function": "f"}}, "tests")])
def test_task_files_without_tests_are_refused(tmp_path: Path, settings: dict[str, Any], key: str):
    with pytest.raises(ConfigError, match=key):
        write_task(tmp_path, rows(), **{**CODE, **settings})


@needs_kernel
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_the_solutions_of_humaneval_pass_and_empty_ones_do_not(every: int):
    data = shared_data("evals")
    (task,) = tasks_named(["humaneval"])
    ready = prepare(task, data, 0, 0, reader(context=8192))
    wrong = [outcome(replace(program, text=f"{program.text}\n    return None\n"))
             for program in ready.programs[::every]]
    assert len(ready.programs) == 164 and set(wrong) <= {"wrong", "error"}
    right = [outcome(replace(program, text=program.text + "\n" + item.choices[0]))
             for program, item in list(zip(ready.programs, ready.items))[::every]]
    assert right == ["passed"] * len(right)
