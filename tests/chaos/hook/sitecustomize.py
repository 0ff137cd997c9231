"""Makes faults happen inside the processes of a scenario. Python imports this file first in every process.

Environment variables set faults for the whole life of a process:
CHAOS_LIMITS    JSON with other defaults for `pipeline.engine.worker.limits.ProcessLimits`. A driver passes them on to
                its supervisors
CHAOS_STORAGE   a folder for notes. Stores at `chaos://PATH` are then folders whose requests fail (`chaos_storage`)
CHAOS_CLOCK     number of seconds by which time.time() jumps now and then, forwards and backwards

Files in the folder CHAOS_FOLDER cause faults while they exist, also in processes that have already started:
full            no result can be written to a store, as if its disk were full. Each attempt adds a line to the file
                `refused`: the folder of its task
slow            contains the name of a node of the plan. The next child that has done a task of this node stands still
                for an hour, but only once
held            no child ends its task. If the file `inside` exists, too, children end their tasks, and each stands
                still at its next document, and creates the file `inside.PID`
hold            contains a number and the beginning of names of nodes. Once so many tasks of these nodes are done, the
                driver renames the file to `held`
"""

import json
import os
import sys

_ROLE = " ".join(sys.orig_argv)
_CHILD = "pipeline.engine.worker.child" in _ROLE
_OURS = _CHILD or any(role in _ROLE for role in ("pipeline.cli", "pipeline.store.broker", "tests.e2e.kill",
                                                  "default_worker.py"))

if _OURS and any(name.startswith("CHAOS") for name in os.environ):
    from pipeline.base import confinement

    # children, too, get the variables CHAOS_…, by which they know which faults to make and where to note them
    confinement._PREFIXES += ("CHAOS",)
    _seal = confinement.seal
    confinement.seal = lambda programs, writable: _seal(
        programs, [*writable, *filter(None, [os.environ.get("CHAOS_FOLDER")])])

if _OURS and "CHAOS_LIMITS" in os.environ:
    from pipeline.engine.worker.limits import ProcessLimits

    ProcessLimits.__init__.__defaults__ = tuple(
        json.loads(os.environ["CHAOS_LIMITS"]).get(n, d)
        for n, d in zip(ProcessLimits.__dataclass_fields__, ProcessLimits.__init__.__defaults__))

if _OURS and "CHAOS_STORAGE" in os.environ:
    from fsspec.registry import known_implementations

    known_implementations["chaos"] = {"class": "chaos_storage.ChaosStorage"}

if _OURS and "CHAOS_CLOCK" in os.environ:
    import time

    _time, _calls, _jump = time.time, 0, float(os.environ["CHAOS_CLOCK"])

    def _jumping():
        global _calls
        _calls += 1
        return _time() + _jump * ((_calls // 7) % 3 - 1)

    time.time = _jumping

if "CHAOS_FOLDER" in os.environ and ("pipeline.cli run" in _ROLE or "pipeline.cli resume" in _ROLE):
    from collections import Counter

    from pipeline.engine.driver.progress import Progress

    _done, _counts = Progress.done, Counter()
    _hold, _held = (os.path.join(os.environ["CHAOS_FOLDER"], name) for name in ("hold", "held"))

    def _counted(self, spec, record):
        _counts[spec.node] += 1
        if os.path.exists(_hold):
            with open(_hold) as f:
                count, _, phase = f.read().partition(" ")
            if sum(n for node, n in _counts.items() if node.startswith(phase)) >= int(count):
                os.rename(_hold, _held)
        _done(self, spec, record)                  # says so to the test, which then finds `held`

    Progress.done = _counted

if _CHILD and "CHAOS_FOLDER" in os.environ:
    import errno
    import time

    from pipeline.engine.task import CrashCursor
    from pipeline.engine.worker import attempt
    from pipeline.store import disk
    from pipeline.store.errors import cannot_write

    _move, _run, _folder, _init = disk.move, attempt.run_attempt, os.environ["CHAOS_FOLDER"], CrashCursor.__init__
    _held, _inside = os.path.join(_folder, "held"), os.path.join(_folder, "inside")

    def _full(local, target):
        if os.path.exists(os.path.join(_folder, "full")):
            with open(os.path.join(_folder, "refused"), "a") as f:
                f.write(f"{os.path.dirname(target)}\n")
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise cannot_write(target, error) from error
        _move(local, target)

    def _slow(spec, *args, **kw):
        record = _run(spec, *args, **kw)
        while os.path.exists(_held) and not os.path.exists(_inside):
            time.sleep(0.05)
        told = os.path.join(_folder, "slow")
        if os.path.exists(told):
            with open(told) as f:
                if f.read() != spec.node:
                    return record
            try:
                os.rename(told, told + ".done")          # one process alone can do this; it makes the fault
            except FileNotFoundError:
                return record
            time.sleep(3600)
        return record

    def _watched(self, buffer=None):
        _init(self, buffer)
        inner = self.set

        def set_(first, last, stage):
            inner(first, last, stage)
            if first >= 0 and os.path.exists(_held) and os.path.exists(_inside):
                open(f"{_inside}.{os.getpid()}", "w").close()
                while os.path.exists(_held):
                    time.sleep(0.05)

        if buffer is not None:                     # only a child has a buffer; other processes only serve messages
            self.set = set_

    CrashCursor.__init__ = _watched
    disk.move = _full
    attempt.run_attempt = _slow
