"""The child: a process that runs tasks for a supervisor, one after the other, and may be killed at any moment. A
supervisor starts and watches the children on one machine.

The command is `python -m pipeline.engine.worker.child CURSOR_FD PARENT_PID [BROKER_FD SECRETS]`. With the last two
arguments the child is confined. It then reaches object storage only through the broker (a process that accesses storage
for it, `store.broker`), and may not read the files SECRETS (JSON).

The child receives `Work` and sends answers over its original stdin and stdout (`engine.messages`). Output of libraries
goes to stderr; the supervisor keeps the end of it. Models and caches stay in memory between tasks. The crash cursor, in
shared memory, records which document is being processed; an update takes 168 ns.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import mmap
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from io import BufferedReader, TextIOWrapper

from pipeline.base import confinement, process
from pipeline.base.compiled import keep_in
from pipeline.base.process import ProcessDied
from pipeline.engine.messages import ORDERS, Answer, Finished, NeedsFreshProcess, Raised, Work, pack
from pipeline.engine.task import CrashCursor
from pipeline.engine.worker import limits
from pipeline.engine.worker.attempt import run_attempt
from pipeline.engine.worker.crash_triage import MEMORY_EXIT, failure
from pipeline.store.broker import Broker
from pipeline.store.fs import Store
from pipeline.store.remote import connect_through


def _receive(source: BufferedReader) -> Work | None:
    """Returns the next order of the supervisor (the process that started this child); None when the supervisor has
    closed the pipe."""
    buffer = bytearray()
    while (order := ORDERS.unpack(buffer)) is None:
        data = source.read1(1 << 16)
        if not data:
            return None
        buffer += data
    return order


def main() -> None:
    cursor_fd, parent = int(sys.argv[1]), int(sys.argv[2])
    process.die_with_parent(parent)
    limits.raise_oom_score()
    broker = None
    if len(sys.argv) > 3:
        confinement.enter(json.loads(sys.argv[4]))
        broker = Broker(socket.socket(fileno=int(sys.argv[3])))
        connect_through(broker.connect)
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                                       # prints cannot disturb the protocol
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)     # output before a crash is not lost
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    faulthandler.enable()
    cursor = CrashCursor(mmap.mmap(cursor_fd, mmap.PAGESIZE))
    os.close(cursor_fd)

    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    # documents make many objects and few reference cycles, and looking for cycles every 700 objects costs 2 µs a
    # document. The thresholds are still low enough to free cycles that hold several MB of pages (of a traceback, say)
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)
    empty = process.data_bytes()                        # reserved by interpreter and libraries before any work
    while (order := _receive(source)) is not None:
        sink.write(pack(_work(order, cursor, empty, broker is not None)))
        sink.flush()
        cursor.clear()
        if broker is not None:
            broker.release()
        gc.collect()
        gc.freeze()                                     # skip stages and models: visiting them takes 50 ms a task
        pa.default_memory_pool().release_unused()
        ctypes.CDLL(None).malloc_trim(0)


def _work(order: Work, cursor: CrashCursor, empty: int, confined: bool) -> Answer:
    store, spec, rows = Store(order.store), order.spec, order.rows
    confine = partial(_seal, store, order.scratch) if confined else _stay_open
    only = range(rows[0], rows[1] + 1) if rows is not None else None if order.file is None else ()
    # CUDA and torch reserve far more address space than they use: for such tasks the supervisor watches memory instead
    polled = spec.gpus > 0 or "torch" in sys.modules
    process.limit_data(None if polled else empty + (spec.memory_mb << 20))
    try:
        return Finished(run_attempt(spec, store, order.attempt, cursor, order.scratch, skip=order.skip, only=only,
                                    batch_rows=order.batch_rows, file=order.file, confine=confine))
    except confinement.FreshProcess:
        return NeedsFreshProcess()
    except MemoryError:
        os._exit(MEMORY_EXIT)                           # the cursor still shows the document
    except ProcessDied as e:
        print(f"{e}", file=sys.stderr, flush=True)
        limits.die_of(-e.returncode)
    except Exception as e:
        return Raised(failure(e, cursor.read()[0], confinement.hint(e)))
    finally:
        process.limit_data(None)


def _stay_open(programs: Sequence[str]) -> None:
    """Does nothing. A child that is not confined passes this function to tasks as `confine`."""


def _seal(store: Store, scratch: str, programs: Sequence[str]) -> None:
    """Confine this child process for good. It may then start only `programs`. It may write only to `scratch`, to the
    folder of the kernels that sealed processes compile, and to `objects/` of a local store. Raises FreshProcess if the
    process was sealed before without one of `programs`.

    Compiled kernels are pickles, which can run any code when they are loaded. A hostile document may have taken over a
    sealed (confined) process. A process that is not sealed yet must therefore not load kernels that a sealed one wrote.
    Sealed processes keep their kernels in a separate folder for this reason."""
    if not confinement.sealed():
        keep_in(os.path.join(os.environ["NUMBA_CACHE_DIR"], "sealed"))
    folders = [scratch, os.environ["NUMBA_CACHE_DIR"]]
    if store.local is not None:
        folders.append(str(store.local / "objects"))
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
    confinement.seal(programs, folders)


if __name__ == "__main__":
    main()
