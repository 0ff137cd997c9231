"""Represents one child process (which runs tasks) in the supervisor that started it: its pipes, its crash cursor, the
end of its stderr, and its exit status."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping

from pipeline.base import confinement
from pipeline.base.auth import TOKEN
from pipeline.base.clock import Clock
from pipeline.base.process import import_path
from pipeline.engine.messages import ANSWERS, Answer, ProtocolError, Work, pack
from pipeline.engine.task import CrashCursor
from pipeline.engine.worker import limits as measure
from pipeline.engine.worker.job import Job

STDERR_BYTES = 16 << 10        # bytes of stderr kept for a failure message
#: variables that set the number of threads of libraries. A child has one thread: parallelism comes from the number of
#: children, and results must not depend on threads
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS",
           "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")


class ChildProcess:
    """A child process that a supervisor has started to run tasks. `job` is the attempt at a task that it runs now, or
    None while it is idle. Each child has a process group of its own. Processes that the child started therefore end
    with it, and Ctrl-C reaches only the driver."""

    def __init__(self, scratch: str, env: Mapping[str, str], store: str, clock: Clock, *,
                 confined: bool = True) -> None:
        self.scratch, self.confined, self._clock = scratch, confined, clock
        self.broker = StorageBroker(store, f"{scratch}-storage", env) if confined else None
        memory = os.memfd_create("tokenmill-cursor")      # shared memory without a name: nothing to clean up
        confined_arguments: list[str] = []
        inherited = [memory]
        if self.broker is not None:
            inherited.append(self.broker.child_end.fileno())
            confined_arguments = [str(inherited[1]), json.dumps(confinement.secret_files(env))]
        try:
            os.ftruncate(memory, mmap.PAGESIZE)
            self._map = mmap.mmap(memory, mmap.PAGESIZE)
            self.cursor = CrashCursor(self._map)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipeline.engine.worker.child", str(memory), str(os.getpid()),
                 *confined_arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                pass_fds=inherited, start_new_session=True,
                env=_environment(confinement.scrubbed(env) if confined else env, scratch))
        finally:
            os.close(memory)
            if self.broker is not None:
                self.broker.child_end.close()
        self.pid = self._process.pid
        self.returncode = 0
        self.job: Job | None = None
        self.node = ""            # node of its latest task
        self.empty_mb = 96.0      # more than it holds before any work (22 MB with numpy and pyarrow)
        self.position = self.last_position = (-1, -1, -1)
        self.cpu_position = self.cpu_quiet = 0.0
        self.quiet_since = clock.now()
        assert self._process.stdin and self._process.stdout and self._process.stderr         # all three are pipes
        self._in, self._out, self._err = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self._in, self._out, self._err):
            os.set_blocking(pipe.fileno(), False)         # a stopped child must not block us
        self._sending, self._received = bytearray(), bytearray()
        self._stderr: deque[bytes] = deque()
        self._open = {"out", "err"}

    def register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._out, selectors.EVENT_READ, (self, "out"))
        selector.register(self._err, selectors.EVENT_READ, (self, "err"))
        if self.broker is not None:
            selector.register(self.broker.own_end, selectors.EVENT_READ, (self, "storage"))

    def give(self, job: Job, order: Work) -> None:
        """Send `order`, the work order of `job` (an attempt at a task), to the child. Bytes for which the pipe has no
        room yet are kept until `send` is called."""
        self.cursor.clear()
        self.job, self.position, self.quiet_since = job, (-1, -1, -1), self._clock.now()
        with contextlib.suppress(OSError):
            self.cpu_position = self.cpu_quiet = measure.cpu_seconds(self.pid)
        self._sending += pack(order)
        self.send()

    def send(self) -> bool:
        """Write to the child those bytes of its orders for which its pipe had no room before. Returns whether there are
        bytes left to write."""
        try:
            while self._sending:
                del self._sending[:os.write(self._in.fileno(), self._sending[:1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self._sending.clear()                          # the child is dead: `exited` will be true
        return bool(self._sending)

    def move(self, what: str, selector: selectors.BaseSelector) -> Answer | None:
        """Read available bytes (at most 64 KiB) of one channel of the child process: `what` is "out" (its answers),
        "err" (its stderr) or "storage". Returns the child's answer once it is complete, otherwise None. Raises
        ProtocolError for invalid bytes. The first bytes on "storage" start the child's storage broker (the process that
        accesses object storage for it)."""
        if what == "storage":
            assert self.broker is not None
            selector.unregister(self.broker.own_end)
            self.broker.start(self.job.spec.roots if self.job else ())
            return None
        pipe = self._out if what == "out" else self._err
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            if what in self._open:
                self._open.discard(what)
                selector.unregister(pipe)
            return None
        if what == "err":
            self._keep(data)
            return None
        self._received += data
        return ANSWERS.unpack(self._received)

    def drain(self) -> Answer | None:
        """Read all bytes that a dead child left in its pipes. Returns its last answer if that is complete and valid,
        otherwise None."""
        for pipe, keep in ((self._err, self._keep), (self._out, self._received.extend)):
            with contextlib.suppress(OSError, ValueError):
                while data := os.read(pipe.fileno(), 1 << 16):
                    keep(data)
        try:
            return ANSWERS.unpack(self._received)
        except ProtocolError:
            return None

    def _keep(self, data: bytes) -> None:
        self._stderr.append(data)
        while sum(map(len, self._stderr)) - len(self._stderr[0]) > STDERR_BYTES:
            self._stderr.popleft()

    def stderr_tail(self) -> str:
        """Returns the end of the child's stderr (at most STDERR_BYTES bytes), which includes what the child printed to
        stdout."""
        return b"".join(self._stderr)[-STDERR_BYTES:].decode("utf-8", "replace").strip()

    def finished(self) -> None:
        self.job = None

    def cpu_seconds(self) -> float:
        """Return the CPU time that the child has used so far, in seconds; 0 after `end`."""
        try:
            return measure.cpu_seconds(self.pid)
        except OSError:
            return 0.0

    def exited(self) -> bool:
        """Whether the child is dead. A dead child stays a zombie until `end` has killed its process group, so that no
        other group can get the id of this one."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def end(self, selector: selectors.BaseSelector) -> None:
        """Kill the child and its process group, and remove its scratch folder. Sets `returncode`, its exit status, and
        `last_position`, the rows and the stage that it was working on."""
        dead = self.exited()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._process.wait()
        self.last_position = self.cursor.read()
        if dead:
            self.drain()
        for what in self._open:
            selector.unregister(self._out if what == "out" else self._err)
        self._open = set()
        if self.broker is not None:
            self.broker.end(selector)
        for pipe in (self._in, self._out, self._err):
            with contextlib.suppress(OSError):
                pipe.close()
        self._map.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


class StorageBroker:
    """Starts and ends the storage broker of a confined child process. The broker is a process that accesses object
    storage for the child (`store.broker`). At first there is only a pair of sockets, of which the child gets
    `child_end`; the broker starts when the child first writes to it."""

    def __init__(self, store: str, scratch: str, env: Mapping[str, str]) -> None:
        self.own_end, self.child_end = socket.socketpair()
        #: roots of object storage that the broker serves; None until it has started
        self.roots: tuple[str, ...] | None = None
        self._store, self._scratch, self._env = store, scratch, env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, roots: tuple[str, ...]) -> None:
        """Start the broker process, which gives the child access to the store and to the object storage at `roots`.
        Does nothing if the child closed its socket without writing."""
        with self.own_end, contextlib.suppress(OSError):
            if self.own_end.recv(1, socket.MSG_PEEK):
                os.mkdir(self._scratch, 0o700)
                self.roots = roots
                settings = json.dumps({"store": self._store, "roots": roots, "scratch": self._scratch})
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "pipeline.store.broker", str(self.own_end.fileno()), str(os.getpid()),
                     settings], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=(self.own_end.fileno(),), start_new_session=True,
                    env=_environment(self._env, self._scratch))

    def end(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(self.own_end)
        self.own_end.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _environment(env: Mapping[str, str], scratch: str) -> dict[str, str]:
    """Returns the environment variables of a child process or its storage broker, based on `env`. They give libraries
    one thread each, and set the import path of this process and the folder for temporary files (`scratch`). The token
    of the Ray cluster is left out."""
    own = {**env, **dict.fromkeys(THREADS, "1"), "TMPDIR": scratch, "TOKENIZERS_PARALLELISM": "false",
          # mimalloc reserves 1 GB at once, which RLIMIT_DATA counts, and does not return freed memory
          "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
    own["PYTHONPATH"] = import_path()
    own.pop(TOKEN, None)                    # a child that parses hostile documents must not reach the cluster
    return own
