"""Code of the two processes in which a program that a model wrote is tested: one runs the program, the other the tests
(`trainer.evaluation.programs` says why there are two).

Both processes give up all rights but computing before they run anything (`confinement.isolate`). The tests send each
call of the tested function through a pipe, and get the result through another. Values are written as Python literals,
so that only plain values pass, whose equality no program can redefine. This module needs only the standard library: the
processes run without site packages.
"""

from __future__ import annotations

import ast
import json
import math
import os
import sys
from typing import IO, Any

from pipeline.base import confinement, process

#: exit codes of the process of the tests
PASSED, WRONG, ERROR = 77, 78, 79
#: largest number of bytes in a line that the two processes exchange
_MOST_BYTES = 1 << 20


class NoResult(Exception):
    """Raised in the tests if the tested function gave no result: it raised an error, its process ended, or its result
    is no plain value."""


def main(role: str, calls: str, answers: str, parent: str) -> None:
    """Run as the process `role`: `program` or `tests`. `calls` and `answers` are the numbers of the file descriptors of
    the two pipes, and `parent` is the id of the process that started this one. Stdin is JSON: the name of the function,
    the limits of memory and CPU time, and the code of the program or of the tests."""
    process.die_with_parent(int(parent))
    job = json.load(sys.stdin)
    if role == "program":
        with open(int(calls), "rb") as questions, open(int(answers), "wb") as results:
            confinement.isolate(job["memory"], job["cpu_s"])
            serve(job["program"], job["function"], questions, results)
    else:
        with open(int(calls), "wb") as questions, open(int(answers), "rb") as results:
            confinement.isolate(job["memory"], job["cpu_s"])
            os._exit(outcome(job["tests"], job["function"], questions, results))


def serve(program: str, function: str, calls: IO[bytes], answers: IO[bytes]) -> None:
    """Execute `program`, then call its function `function` for each line of `calls`, until there are no more. Writes a
    line to `answers` for each call: `=` and the result, or `!` if there was an error."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "program", "exec"), namespace)
    for line in calls:
        try:
            arguments, named = ast.literal_eval(line.decode())
            answer = "=" + literal(namespace[function](*arguments, **named))
        except BaseException:                                    # also SystemExit: the next call may be answered
            answer = "!"
        answers.write(answer.encode() + b"\n")
        answers.flush()


def outcome(tests: str, function: str, calls: IO[bytes], answers: IO[bytes]) -> int:
    """Execute `tests`, and call the function `check` that they define. `check` gets a stand-in for the tested function;
    each call of the stand-in is sent to the process of the program. The tests may also call the stand-in by the name
    `function`. Returns PASSED; WRONG when an assertion failed; ERROR when anything else was raised."""
    def candidate(*arguments: Any, **named: Any) -> Any:
        calls.write(literal((arguments, named)).encode() + b"\n")
        calls.flush()
        line = answers.readline(_MOST_BYTES)
        if not line.startswith(b"=") or not line.endswith(b"\n"):
            raise NoResult
        return ast.literal_eval(line[1:].decode())

    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(tests, "tests", "exec"), namespace)
        namespace[function] = candidate
        namespace["check"](candidate)
    except AssertionError:
        return WRONG
    except BaseException:
        return ERROR
    return PASSED


def literal(value: Any) -> str:
    """Return `value` as a Python literal in ASCII, from which `ast.literal_eval` makes an equal value. A value of a
    subclass of a builtin class, such as a Counter, is written as a value of the builtin class. Raises TypeError for
    values that no literal can express, such as NaN and objects."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return hex(value)                                        # Python limits the digits of decimals
    if isinstance(value, float) and not math.isnan(value):
        return float.__repr__(value).replace("inf", "1e999")
    if isinstance(value, str):
        return ascii(str.__str__(value))
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{literal(v)}, ' for v in value)})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(map(literal, value))}}}" if value else "set()"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    raise TypeError(f"{type(value).__name__} is no plain value")
