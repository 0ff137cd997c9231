"""The child: runs tasks for a supervisor, one after the other, and may be killed at any moment.

`python -m pipeline.engine.worker.child CURSOR_FD PARENT_PID [BROKER_FD SECRETS]`; with the latter it is confined: this
way it reaches object storage (`store.broker`), and these files (JSON) it must not read. It takes `Work` and answers on
what were stdin and stdout (`engine.messages`); anything a library prints goes to stderr, which the supervisor keeps the
end of. Models and caches stay warm between tasks. A crash cursor in shared memory says which
document is in work (168 ns to write).
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
from pipeline.engine.messages import ORDERS, Answer, Finished, NeedsFreshProcess, Raised, Work, pack
from pipeline.engine.task import Cursor
from pipeline.engine.worker import limits
from pipeline.engine.worker.attempt import run_attempt
from pipeline.engine.worker.faults import MEMORY_EXIT, failure
from pipeline.store.broker import Broker
from pipeline.store.fs import Store
from pipeline.store.remote import connect_through
from stages.stage import ProcessDied
from stages.text.compiled import keep_in


def _receive(source: BufferedReader) -> Work | None:
    """The next order; None when the supervisor has closed the pipe."""
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
    limits.first_to_go()
    broker = None
    if len(sys.argv) > 3:
        confinement.enter(json.loads(sys.argv[4]))
        broker = Broker(socket.socket(fileno=int(sys.argv[3])))
        connect_through(broker.connect)
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                                       # whatever prints cannot disturb the protocol
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)     # and what it said before a crash is there
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    faulthandler.enable()
    cursor = Cursor(mmap.mmap(cursor_fd, mmap.PAGESIZE))
    os.close(cursor_fd)

    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    # documents make many objects and few cycles: looking for those every 700 objects costs 2 µs a document. Not so rare
    # that pages of several MB in cycles (of a traceback, say) could gather
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)
    empty = process.data_bytes()                        # what interpreter and libraries reserve before any work
    while (order := _receive(source)) is not None:
        sink.write(pack(_work(order, cursor, empty, broker is not None)))
        sink.flush()
        cursor.clear()
        if broker is not None:
            broker.release()
        gc.collect()
        gc.freeze()                                     # stages, models: going through them again takes 50 ms a task
        pa.default_memory_pool().release_unused()
        ctypes.CDLL(None).malloc_trim(0)


def _work(order: Work, cursor: Cursor, empty: int, confined: bool) -> Answer:
    store, spec, rows = Store(order.store), order.spec, order.rows
    confine = partial(_seal, store, order.scratch) if confined else _stay_open
    only = range(rows[0], rows[1] + 1) if rows is not None else None if order.file is None else ()
    # CUDA and torch reserve far more address space than they use: the supervisor polls their memory instead
    polled = spec.gpus > 0 or "torch" in sys.modules
    process.limit_data(None if polled else empty + (spec.memory_mb << 20))
    try:
        return Finished(run_attempt(spec, store, order.attempt, cursor, order.scratch, skip=order.skip, only=only,
                                    batch_rows=order.batch_rows, file=order.file, confine=confine))
    except confinement.FreshProcess:
        return NeedsFreshProcess()
    except MemoryError:
        os._exit(MEMORY_EXIT)                           # the cursor still says where
    except ProcessDied as e:
        print(f"{e}", file=sys.stderr, flush=True)
        limits.die_of(-e.returncode)
    except Exception as e:
        return Raised(failure(e, cursor.read()[0], confinement.hint(e)))
    finally:
        process.limit_data(None)


def _stay_open(programs: Sequence[str]) -> None:
    """The confinement of a child whose stages asked for none."""


def _seal(store: Store, scratch: str, programs: Sequence[str]) -> None:
    """Confine this child: it writes to its scratch, compiled kernels, and its results in a store on this disk.

    Compiled kernels are pickles: who is not sealed yet must not load what sealed ones, which may have been taken over,
    have written."""
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
