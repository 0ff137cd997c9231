"""Tasks that the tests of the engine run. They are in a module of their own, because child processes import them by
path."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs, TaskSpec
from pipeline.store.content_keys import content_key
from pipeline.store.records import READING, Counters, PartRecord


class MemoryLog:
    """The log as the scheduler needs it, in memory. It counts what tests want to know."""

    epoch = 1

    def __init__(self) -> None:
        self.records: dict[str, PartRecord] = {}
        self.appended: list[str] = []
        self.flushed = 0
        self.rows: dict[str, dict[int, tuple[int, str]]] = {}

    def get(self, key: str) -> PartRecord | None:
        return self.records.get(key)

    def get_all(self, keys: Sequence[str]) -> dict[str, PartRecord]:
        return {key: self.records[key] for key in keys if key in self.records}

    def append(self, record: PartRecord) -> PartRecord:
        self.appended.append(record.key)
        return self.records.setdefault(record.key, record)

    def quarantine(self, key: str, row: int, stage: int, reason: str) -> None:
        self.rows.setdefault(key, {}).setdefault(row, (stage, reason))

    def quarantined_rows(self, key: str) -> dict[int, tuple[int, str]]:
        return dict(self.rows.get(key, ()))

    def release(self, key: str) -> None:
        self.rows.pop(key, None)

    def flush(self) -> None:
        self.flushed = len(self.appended)


RAN: list[str] = []      # tasks that this process has run; a warm child (one that runs several tasks) keeps the list


class Rows:
    """A small row-wise pass: it squares `rows` numbers in batches, and obeys `skip`, `only`, `batch_rows` and the
    cursor.

    Arguments: first, rows, batch, poison {row: what happens there}, ms (milliseconds of sleep per row), cpu_ms (of work
    per row).
    """

    name = "rows"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        a = inputs.args
        RAN.append(inputs.key)
        size = inputs.batch_rows or a.get("batch", 1)
        poison = {int(k): v for k, v in a.get("poison", {}).items()}
        lines, batch, bad = [], [], {}
        for row in range(a["rows"]):
            if inputs.only is not None and row not in inputs.only:
                continue
            if row in inputs.skip:
                said = inputs.skip[row]
                out.quarantine(row, f"doc{a['first'] + row}", "square", "k" * 32, said.reason)
                bad[said.reason] = bad.get(said.reason, 0) + 1
                continue
            batch.append(row)
            if len(batch) == size:
                lines += square(batch, a, poison, cursor)
                batch = []
        lines += square(batch, a, poison, cursor)
        cursor.clear()
        Path(out.path("rows.txt")).write_text("".join(lines))
        out.note("rows.txt", rows=len(lines))
        return {"in": {"t": {"docs": a["rows"], "bytes": a["rows"]}}, "kept": len(lines), "quarantined": bad}


def square(batch: list[int], a: dict[str, Any], poison: dict[int, str], cursor: CrashCursor) -> list[str]:
    if not batch:
        return []
    cursor.set(batch[0], batch[-1], 2)
    found = []
    for row in batch:
        if row in poison:
            POISON[poison[row]](a)
        if a.get("ms"):
            time.sleep(a["ms"] / 1000)
        until = time.process_time() + a.get("cpu_ms", 0) / 1000
        while time.process_time() < until:
            pass
        found.append(f"{(a['first'] + row) ** 2}\n")
    return found


def spin(a: dict[str, Any]) -> None:
    while True:
        pass


def hog(a: dict[str, Any]) -> None:
    """Allocate memory without end, but write nothing to it: filling it would take more CPU time than a slow machine has
    until the limit."""
    held = []
    while True:
        held.append(bytes(16 << 20))


def once(a: dict[str, Any]) -> None:
    """Crash by a segmentation fault, but only the first time, like an innocent document during which the process
    dies."""
    if not os.path.exists(a["mark"]):
        Path(a["mark"]).touch()
        ctypes.string_at(0)


def warm(a: dict[str, Any]) -> None:
    """Crash, but only in a process that has already run other tasks."""
    if len(RAN) > 1:
        ctypes.string_at(0)


def wait_for(mark: str | Path) -> None:
    """Wait until the file `mark` exists, which the test creates when it is time. Fails after ten minutes, because a
    limit of the engine might never end a task that only waits."""
    deadline = time.monotonic() + 600
    while not os.path.exists(mark):
        if time.monotonic() > deadline:
            raise AssertionError(f"nobody made {mark}")
        time.sleep(0.01)


def mapped(a: dict[str, Any]) -> None:
    """Read from a memory-mapped file whose storage fails, the first two times (SIGBUS)."""
    marks = Path(a["marks"])
    if len(times := list(marks.iterdir())) < 2:
        (marks / str(len(times))).touch()
        with open(marks.parent / "mapped", "w+b") as f:
            f.truncate(mmap.PAGESIZE)
            page = mmap.mmap(f.fileno(), mmap.PAGESIZE)
            f.truncate(0)
            page[0]


POISON = {"segfault": lambda a: ctypes.string_at(0), "spin": spin, "exit": lambda a: os._exit(3), "memory": hog,
          "warm": warm, "once": once, "sleep": lambda a: time.sleep(3600), "mapped": mapped,
          "held": lambda a: wait_for(a["mark"]), "killed": lambda a: os.kill(os.getpid(), signal.SIGKILL)}


class Fails:
    name = "fails"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        Path(out.path("half.txt")).write_text("half")
        raise ValueError(f"no such thing as {inputs.args['what']}")


class FailsFirst:
    """Raises an error in its first `times` calls."""

    name = "fails_first"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        marks = Path(inputs.args["marks"])
        n = len(list(marks.iterdir()))
        (marks / str(n)).touch()
        if n < inputs.args["times"]:
            raise OSError("storage hiccup")
        Path(out.path("ok.txt")).write_text("ok")
        return {"n": 1}


class Full:
    """Meets a full disk in its first `times` calls."""

    name = "full"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        marks = Path(inputs.args["marks"])
        n = len(list(marks.iterdir()))
        (marks / str(n)).touch()
        if n < inputs.args["times"]:
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch/x")
        Path(out.path("ok.txt")).write_text("ok")
        return {"n": 1}


class Endless:
    """Reads record 3 without ever coming to its end."""

    name = "endless"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        if inputs.args["record"] >= 0:
            cursor.set(inputs.args["record"], inputs.args["record"], -1)
        spin({})
        return {}


class Reads:
    """Reads files of three records each. Arguments: files, poison {file: [row, what happens there]}."""

    name = "reads"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        a, read = inputs.args, []
        for file in range(a["files"]):
            for row in range(3 * file, 3 * file + 3 if inputs.file in (None, file) else 0):
                cursor.reading(row, file)
                if row in inputs.skip and inputs.skip[row].stage == READING - file:
                    break
                if a["poison"].get(str(file), [None])[0] == row:
                    POISON[a["poison"][str(file)][1]](a)
                read.append(str(row))
        Path(out.path("rows.txt")).write_text(" ".join(read))
        return {"kept": len(read)}


class SetupDies:
    """Crashes before it is at any document."""

    name = "setup_dies"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        print("loading the model")
        ctypes.string_at(0)
        return {}


class Forgets:
    name = "forgets"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        out.path("forgotten.txt")
        return {}


class Deaf:
    """Sets the cursor, but obeys neither `skip` nor `only`."""

    name = "deaf"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        cursor.set(5, 5, 0)
        ctypes.string_at(0)
        return {}


class Straggles:
    """Sleeps for an hour in the first attempt if the argument `mark` is given. Otherwise returns at once."""

    name = "straggles"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        if mark := inputs.args.get("mark"):
            with contextlib.suppress(FileExistsError):       # another attempt may create it meanwhile
                Path(mark).touch(exist_ok=False)
                time.sleep(3600)
        Path(out.path("n.txt")).write_text(str(inputs.args["n"]))
        return {"n": 1}


class Devices:
    """Returns which GPUs it sees, and when it began and ended, in seconds of a clock that all processes of the machine
    share."""

    name = "devices"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        start = time.monotonic()
        if mark := inputs.args.get("mark"):
            wait_for(mark)
        time.sleep(inputs.args.get("s", 0.15))
        return {"n": inputs.args["n"], "seen": os.environ.get("CUDA_VISIBLE_DEVICES", "all"), "start": start,
                "end": time.monotonic()}


class Waits:
    """Ends when the file `mark` exists."""

    name = "waits"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        wait_for(inputs.args["mark"])
        return {"n": 1}


class Held:
    """A row-wise pass that stays at each of its `rows` until the file `marks`/ROW exists."""

    name = "held"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        for row in range(inputs.args["rows"]):
            cursor.set(row, row, 2)
            wait_for(Path(inputs.args["marks"], str(row)))
        return {"kept": inputs.args["rows"]}


class Noisy:
    """Prints to stdout, which must not disturb the protocol between child and supervisor."""

    name = "noisy"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        print("x" * 300_000)
        os.write(1, b"raw bytes on file descriptor 1\n")
        Path(out.path("pid.txt")).write_text(str(os.getpid()))
        return {"n": 1}


class Hostile:
    """A parser that an attacker has taken over. It tries everything that `args` names, and writes for each attempt the
    value or the name of the error."""

    name = "hostile"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        a, libc, results = inputs.args, ctypes.CDLL(None, use_errno=True), {}

        def trace() -> None:
            # another process traces this one for a moment. PTRACE_SEIZE does not stop it, as PTRACE_ATTACH would
            seize, nothing, parent = 0x4206, ctypes.c_void_p(None), os.getppid()
            if (tracer := os.fork()) == 0:
                failed = libc.ptrace(ctypes.c_long(seize), ctypes.c_long(parent), nothing, nothing) != 0
                os._exit(ctypes.get_errno() if failed else 0)
            if number := os.waitstatus_to_exitcode(os.waitpid(tracer, 0)[1]):
                raise OSError(number, "ptrace")

        def ring() -> None:
            if libc.syscall(ctypes.c_long(425), ctypes.c_long(4), ctypes.create_string_buffer(120)) < 0:
                raise OSError(ctypes.get_errno(), "io_uring_setup")

        attempts = {
            "names": lambda: sorted(os.environ),
            "parent": lambda: len(Path(f"/proc/{os.getppid()}/environ").read_bytes()),
            "other": lambda: len(Path(f"/proc/{a['other']}/environ").read_bytes()),
            "token": lambda: Path(a["token"]).read_text(),
            "connect": lambda: socket.create_connection(("127.0.0.1", a["port"]), timeout=5).close(),
            "unix": lambda: socket.socket(socket.AF_UNIX).close(),
            "datagrams": lambda: [s.close() for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)],
            "ring": ring,
            "shell": lambda: subprocess.run(["/bin/sh", "-c", "exit 0"], check=True).returncode,
            "trace": trace,
            "kill": lambda: os.kill(os.getppid(), 0),
            "write": lambda: Path(a["outside"]).write_text("x"),
            "kernels": lambda: os.environ["NUMBA_CACHE_DIR"],
            "kernels of others": lambda: Path(os.environ["NUMBA_CACHE_DIR"]).with_name("x.nbi").write_text("x"),
            "core": lambda: resource.getrlimit(resource.RLIMIT_CORE)[0] > 1,
            "privileges": lambda: "NoNewPrivs:\t0" in Path("/proc/self/status").read_text(),
            # what a sound task does goes on
            "pair": lambda: [s.close() for s in socket.socketpair()] and "pair",
            "thread": lambda: threading.Thread(target=len, args=("",)).start(),
            "scratch": lambda: Path(inputs.scratch, "x").write_text("x"),
        }
        for name, attempt in attempts.items():
            try:
                results[name] = attempt()
            except OSError as e:
                results[name] = type(e).__name__
        Path(out.path("results.json")).write_text(json.dumps(results))
        return {"n": 1}


class Programs:
    """A pass whose stages declare `programs`. It tries to start each program of `start`."""

    name = "programs"
    version = 1
    sets_up = True

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        with contextlib.suppress(PermissionError), socket.socket():         # allowed until it is confined
            subprocess.run(["/bin/sh", "-c", "exit 0"], check=True)
        results = {"kernels before": os.environ["NUMBA_CACHE_DIR"]}
        inputs.confine(inputs.args["programs"])
        results["kernels"] = os.environ["NUMBA_CACHE_DIR"]
        for program in inputs.args["start"]:
            try:
                results[program] = subprocess.run([program], check=True).returncode
            except OSError as e:
                results[program] = type(e).__name__
        Path(out.path("results.json")).write_text(json.dumps({**results, "pid": os.getpid()}))
        return {"n": 1}


def spec(task: type, node: str = "t", order: int = 0, weight: int = 1, memory_mb: int = 300, **args: Any) -> TaskSpec:
    name = f"{task.__module__}:{task.__name__}"
    return TaskSpec(content_key(task.name, task.version, args), name, node, args, weight, f"{node} {order}", memory_mb,
                    order=order, confined=not {"mark", "marks"} & args.keys())       # marks lie outside of its folders


def row_specs(parts: int = 6, rows: int = 40, poison: dict[int, dict[int, str]] | None = None,
              **more: Any) -> list[TaskSpec]:
    """Return `parts` tasks of the class Rows. `poison` is {part: {row: what happens there}}."""
    return [spec(Rows, order=p, weight=10 + p, first=p * rows, rows=rows,
                 poison={str(k): v for k, v in (poison or {}).get(p, {}).items()}, **{"batch": 8, **more})
            for p in range(parts)]


def outcome(records: list[PartRecord]) -> list[Any]:
    """Return what must be the same wherever, in whichever order and after however many deaths the tasks ran."""
    return [(r.key, sorted((n, f.sha256, f.content, f.rows, f.bytes) for n, f in r.files.items()), r.counters,
             r.quarantine) for r in records]
