"""Runs programs that a model wrote, and the tests of a benchmark on them, as in HumanEval (Chen et al. 2021, arXiv
2107.03374).

The code is treated as hostile. It runs in processes that can only compute (`confinement.isolate`). They have no network
and no environment variables. They cannot start processes or threads, send signals to other processes, or write files,
and can read only the files of Python and the system's libraries. Their working folder is empty, and their memory, CPU
time and wall time are limited.

Program and tests run in two processes. If they shared one, a program could pass without solving anything: by ending it
with exit code 0, by printing what a pass prints, by changing what `assert` compares, or by returning an object that is
equal to everything. Here the process of the tests calls the tested function through a pipe, and only plain values come
back. The process of the program sees the arguments of the calls, but neither the tests nor the expected results.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.base import confinement
from trainer.base.config import ConfigError
from trainer.evaluation.program_process import PASSED, WRONG

#: passed: all tests did; wrong: an assertion failed; error: the program or the tests raised another error, ended, or
#: needed more memory than they may; timeout: they needed more time than they may
Outcome = Literal["passed", "wrong", "error", "timeout"]
#: seconds within which the process of the program must end after that of the tests, when it gets no more calls
ENDING_S = 1.0
#: the code of both processes. Python starts without site packages and without the working folder among its imports. It
#: is not started with -I, which would ignore PYTHONHASHSEED, and with it the order of sets would differ between runs
_COMMAND = [sys.executable, "-P", "-s", "-S", "-c",
          "import sys; sys.path.append(sys.argv.pop(1)); from trainer.evaluation.program_process import main; "
          "sys.path.pop(); main(*sys.argv[1:])", str(Path(__file__).resolve().parents[2])]


@dataclass(frozen=True)
class WrittenProgram:
    """A program in Python that a model wrote, with its tests. `function` is the name of the function in `text` that is
    tested. `tests` is Python code that defines `check`, which is called with the function. The tests may also call the
    function by its name."""

    text: str
    function: str
    tests: str


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of the two processes that run a program and its tests: for each process bytes of address space and seconds
    of CPU time, and for both together seconds of wall time."""

    memory: int = 512 << 20
    cpu_s: int = 10
    wall_s: float = 30.0


def check_isolation() -> None:
    """Raise ConfigError if programs cannot be isolated on this machine."""
    supported = confinement.support()
    if lacking := [name for name, key in (("seccomp", "seccomp"), ("Landlock", "landlock")) if not supported[key]]:
        raise ConfigError(f"--allow-code: this machine or its container has no {' and no '.join(lacking)} to keep "
                          f"programs from the network and from files; use Linux 5.13 or newer (x86_64 or aarch64) with "
                          f"both allowed, or leave --allow-code out")
    tests = "def check(candidate):\n    assert candidate(1) == 2\n"
    outcomes = [outcome(WrittenProgram(f"def f(x):\n    return x + {n}", "f", tests)) for n in (1, 2)]
    if outcomes != ["passed", "wrong"]:
        raise ConfigError(f"--allow-code: Python cannot run isolated here (a right and a wrong program gave "
                          f"{' and '.join(outcomes)} instead of passed and wrong); leave --allow-code out, or use "
                          f"another machine")


def outcome(program: WrittenProgram, limits: ProgramLimits = ProgramLimits()) -> Outcome:
    """Run a program and its tests in isolation. Returns whether they "passed" or were "wrong" (an assertion failed),
    whether they used up their time ("timeout"), or whether there was another "error"."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        call_out, call_in = os.pipe()                            # the ends for reading and for writing
        answer_out, answer_in = os.pipe()
        try:
            job = {"function": program.function, "memory": limits.memory, "cpu_s": limits.cpu_s}
            tested = _start(stack, "program", folder, call_out, answer_in, {**job, "program": program.text})
            tests = _start(stack, "tests", folder, call_in, answer_out, {**job, "tests": program.tests})
        finally:
            for descriptor in (call_out, call_in, answer_out, answer_in):
                os.close(descriptor)
        try:
            code = tests.wait(limits.wall_s)
        except subprocess.TimeoutExpired:
            return "timeout"
        if code in (PASSED, WRONG):
            return "passed" if code == PASSED else "wrong"
        # the kernel kills a process that has used up its CPU time; the program's may end a little after its tests
        with suppress(subprocess.TimeoutExpired):
            tested.wait(ENDING_S)
        return "timeout" if -signal.SIGKILL in (code, tested.returncode) else "error"


def _start(stack: ExitStack, role: str, folder: str, calls: int, answers: int,
           job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the process `role`, which runs the program or the tests, with the input `job`. `calls` and `answers` are
    its ends of the two pipes. The process is killed when `stack` is closed."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(job).encode())
        stdin.seek(0)
        child = subprocess.Popen([*_COMMAND, role, str(calls), str(answers), str(os.getpid())], stdin=stdin,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
                                 env={"PYTHONHASHSEED": "0"}, pass_fds=(calls, answers), start_new_session=True)
    stack.callback(child.wait)
    stack.callback(child.kill)
    return child
