"""Attacks on the processes in which programs of a model run (`confinement.isolate`): machine code, old kernels, answers
made to break the parser, and a parent that dies. `test_programs` has those that need Python alone."""

from __future__ import annotations

import ast
import os
import platform
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.base import confinement, kernel
from tests.processes import alive, until
from trainer.evaluation.programs import ProgramLimits, WrittenProgram, outcome

lacking = confinement.missing(confinement.support())
needs_kernel = pytest.mark.skipif(bool(lacking), reason=f"this kernel: {lacking}")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")
SHORT = ProgramLimits(memory=256 << 20, cpu_s=2, wall_s=8)
DOUBLES = "def check(candidate):\n    for n in (1, 2, 30):\n        assert candidate(n) == 2 * n\n"
ISOLATE = "confinement.isolate(512 << 20, 20)"
#: a process that is confined by {sealing}
ISOLATED = """
import ctypes, errno, mmap, os, sys
from pipeline.base import confinement, kernel
{before}
{sealing}
{after}
"""


def confined(after: str, before: str = "", sealing: str = ISOLATE) -> Any:
    """What a process that runs `before`, is confined and then runs `after` writes to its stdout, a literal."""
    code = ISOLATED.format(before=textwrap.dedent(before), sealing=sealing, after=textwrap.dedent(after))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600,
                          env={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr.decode()
    return ast.literal_eval(done.stdout.decode())


# -- system calls ---------------------------------------------------------------------------------------------------
CALLS = """
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
allowed = {allowed}
def refused(number):
    ctypes.set_errno(0)
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6) == -1 and ctypes.get_errno() == errno.EPERM
"""


def allowed_calls() -> list[int]:
    column = kernel._ARCH[platform.machine()][0]
    return [numbers[column] for numbers in (*kernel._COMPUTING.values(), kernel._CALLS["openat"])]


@needs_kernel
def test_every_call_is_refused_that_is_not_allowed():
    """io_uring, keyctl, memfd_create, execveat, ptrace, process_vm_readv, personality, clone3, bpf and all others, also
    those that are still to come. uretprobe and uprobe (335 and 336 of x86_64) pass every filter, but the kernel ends a
    process that makes them itself."""
    own = (335, 336) if platform.machine() == "x86_64" else ()
    after = f"print([n for n in range(1000) if n not in {own} and n not in allowed and not refused(n)])"
    assert confined(after, CALLS.format(allowed=allowed_calls())) == []
    assert len(allowed_calls()) < 50


@needs_kernel
@needs_x86
def test_calls_of_other_architectures_are_refused():
    """Through the x32 ABI all numbers, also of allowed calls; through the gate of 32-bit programs getpid, write, execve
    and socket, whose numbers mean allowed calls in 64 bits."""
    before = CALLS.format(allowed=[]) + """
def gate(number):                                  # mov eax, number; int 0x80; cdqe; ret
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(b"\\xb8" + number.to_bytes(4, "little") + b"\\xcd\\x80\\x48\\x98\\xc3")
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(memory))), memory
gates = [gate(number) for number in (20, 4, 11, 359, 1 << 30)]
"""
    after = "print(([n for n in range(600) if not refused(n | 0x40000000)], [code() for code, memory in gates]))"
    through_x32, through_gate = confined(after, before)
    assert through_x32 == [] and set(through_gate) == {-1}


HEADERS = (("asm/unistd_64.h", ()), ("asm-generic/unistd.h", (
    "__BITS_PER_LONG 64", "__ARCH_WANT_RENAMEAT", "__ARCH_WANT_NEW_STAT", "__ARCH_WANT_SYS_CLONE3")))


@pytest.mark.parametrize("column", [0, 1], ids=["x86_64", "aarch64"])
def test_numbers_of_calls_are_those_of_the_kernels_headers(column: int):
    """Those of aarch64 are the generic ones, with the choices of arch/arm64/include/uapi/asm/unistd.h."""
    header, defined = HEADERS[column]
    names = {**kernel._CALLS, **kernel._COMPUTING}
    text = "".join(f"#define {d}\n" for d in defined) + f"#include <{header}>\n"
    text += "".join(f"number {name} __NR_{name}\n" for name in names)
    try:
        done = subprocess.run(["cc", "-E", "-P", "-"], input=text, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no compiler, or no {header}: {e}")
    found = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("number "))
    assert found == {name: str(numbers[column]) for name, numbers in names.items()}


# -- files ----------------------------------------------------------------------------------------------------------
SEALED = "confinement.enter([]); confinement.seal([], [folder])"
OPENS = """
def tried(call, *arguments):
    try:
        call(*arguments)
        return "done"
    except PermissionError:
        return "denied"
"""


@needs_kernel
@pytest.mark.parametrize("version", [1, 2, None], ids=["Linux 5.13", "Linux 5.19", "this kernel"])
@pytest.mark.parametrize("sealing", [SEALED, ISOLATE], ids=["seal", "isolate"])
def test_no_file_is_emptied_whatever_landlock_knows(sealing: str, version: int | None, tmp_path: Path):
    """Landlock knows since version 3 that a file can be emptied without being written."""
    victim, own = tmp_path / "victim", tmp_path / "own"
    victim.write_text("precious")
    own.mkdir()
    (own / "mine").write_text("text")
    before = f"folder, victim = {str(own)!r}, {str(victim)!r}\n" + OPENS
    if version:
        before += f"kernel.landlock_version = lambda: {version}\n"
    flags = [os.O_TRUNC, os.O_TRUNC | 3, os.O_TRUNC | os.O_WRONLY, os.O_TRUNC | os.O_RDWR, os.O_WRONLY, os.O_RDWR]
    after = f"""
    how_open2 = int.to_bytes({os.O_TRUNC}, 8, "little") + bytes(16)
    libc = ctypes.CDLL(None)
    libc.syscall(437, -100, victim.encode(), how_open2, 24)
    libc.open(victim.encode(), {os.O_TRUNC | 3})
    print([*(tried(os.open, victim, flag) for flag in {flags}), tried(os.truncate, victim, 0)])
    """
    assert set(confined(after, before, sealing)) == {"denied"}
    assert victim.read_text() == "precious"
    if sealing == SEALED:                                       # its own files it may write as before
        after = "print([tried(os.open, folder + '/mine', os.O_TRUNC | os.O_WRONLY), tried(open, folder + '/new', 'w')])"
        assert confined(after, before, sealing) == ["done", "done"]
        assert (own / "mine").read_text() == ""


TYPES = """
import fcntl, pty, termios
pid, master = pty.fork()
if pid:
    print(repr(os.read(master, 99).split()[-1]), flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not confinement.support()["seccomp"], reason="this kernel: no seccomp")
@pytest.mark.parametrize("request_", ["termios.TIOCSTI", "0x541C"])
def test_a_parser_cannot_type_into_the_terminal_in_which_it_was_started(request_: str):
    """What is typed, the shell of the terminal would run."""
    after = f"print(tried(fcntl.ioctl, os.open('/dev/tty', os.O_RDWR), {request_}, b'x'))"
    assert confined(after, OPENS + TYPES, "confinement.enter([]); confinement.seal([], [])") == b"denied"


@needs_kernel
def test_a_program_has_only_the_pipes_and_files_that_it_was_given(tmp_path: Path):
    """Not even descriptors that the parent has marked as inheritable."""
    (tmp_path / "secret").write_text("secret")
    secret = os.open(tmp_path / "secret", os.O_RDWR)
    os.set_inheritable(secret, True)
    text = """
import os, stat
def f():
    kinds = []
    for number in range(4096):
        try:
            kinds.append(stat.S_IFMT(os.fstat(number).st_mode))
        except OSError:
            pass
    return sorted(kinds)
"""
    expected = sorted([stat.S_IFREG, stat.S_IFCHR, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFIFO])
    tests = f"def check(candidate):\n    assert candidate() == {expected}\n"
    assert outcome(WrittenProgram(text, "f", tests), ProgramLimits(cpu_s=120, wall_s=600)) == "passed"
    os.close(secret)


# -- answers --------------------------------------------------------------------------------------------------------
#: `w` is the pipe of the answers
ANSWER = "import sys\ndef f(n):\n    w = sys._getframe(1).f_locals['answers']\n    {}\n    w.flush()\n    return 0\n"
BOMBS = {
    "many minus signs": "w.write(b'=' + b'-' * 60000 + b'1\\n')",
    "deep brackets": "w.write(b'=' + b'(' * 190 + b')' * 190 + b'\\n')",
    "a long sum": "w.write(b'=1' + b'+1j' * 20000 + b'\\n')",
    "not a number": "w.write(b'=1e999-1e999\\n' * 9)",
    "a decimal of many digits": "w.write(b'=' + b'9' * 999999 + b'\\n')",
    "an expression in a string": "w.write(b'=f\"{__import__(\\'os\\')._exit(77)}\"\\n')",
    "hashes that collide": "w.write(b'={' + b','.join(b'%d' % (i * (2 ** 61 - 1)) for i in range(40000)) + b'}\\n')",
    "answers ahead": "w.write(b'=2\\n=2\\n=2\\n=2\\n')",
    "lines without end": "while True: w.write(b'\\n' * 65536)",
    "a line without end": "while True: w.write(b'=' + b' ' * 65536)",
}


@needs_kernel
@pytest.mark.parametrize("name", BOMBS)
def test_answers_that_are_bombs_do_not_pass(name: str):
    began = time.monotonic()
    assert outcome(WrittenProgram(ANSWER.format(BOMBS[name]), "f", DOUBLES), SHORT) in ("wrong", "error", "timeout")
    assert time.monotonic() - began < 300


@needs_kernel
def test_a_program_that_spends_its_time_in_the_call_is_a_timeout_in_every_run():
    text = "def f(n):\n    while True: pass"
    limits = ProgramLimits(memory=256 << 20, cpu_s=1, wall_s=30)
    assert {outcome(WrittenProgram(text, "f", DOUBLES), limits) for _ in range(3)} == {"timeout"}


# -- who runs them --------------------------------------------------------------------------------------------------
@needs_kernel
def test_both_processes_end_with_the_one_that_started_them():
    code = f"""
from trainer.evaluation.programs import *
outcome(WrittenProgram("import time\\ntime.sleep(600)", "f", {DOUBLES!r}), ProgramLimits(wall_s=600))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path)})
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")

    def both_isolated() -> list[int]:
        pids = [int(pid) for pid in children.read_text().split()]
        isolated = ["Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return pids if len(pids) == 2 and all(isolated) else []

    pids = until(both_isolated, what="two isolated processes", job=parent)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not any(alive(pid) for pid in pids), what="their end")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; those above `tmp_path` belong to one user alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@needs_kernel
@pytest.mark.skipif(os.getuid() != 0, reason="all other tests run as a user already")
def test_a_user_without_rights_is_isolated_as_root_is(open_folder: Path):
    own = open_folder / "own"
    own.write_text("text")
    os.chown(own, 65534, 65534)
    sealing = "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)"
    after = f"print([os.getuid(), *(tried(os.open, {str(own)!r}, flag) for flag in (os.O_RDONLY, os.O_RDWR))])"
    assert confined(after, OPENS, sealing) == [65534, "done", "done"]
    assert confined(after, OPENS, f"{sealing}; {ISOLATE}") == [65534, "denied", "denied"]


@pytest.mark.parametrize("lacks", ["landlock_create_ruleset", "seccomp"])
def test_no_code_runs_where_the_kernel_lacks_a_means(lacks: str):
    """Even if nobody asked beforehand (`check_isolation`)."""
    before = f"""
call = kernel._call
def old(name, *arguments):
    if name == {lacks!r}:
        raise OSError(errno.ENOSYS, name)
    return call(name, *arguments)
kernel._call = old
"""
    sealing = f"try: {ISOLATE}\nexcept OSError: print(1); sys.exit()"
    assert confined("print(2)", before, sealing) == 1
