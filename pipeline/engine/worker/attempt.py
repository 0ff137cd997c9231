"""Runs one attempt at a task in this process: runs the task in a scratch folder, hashes its output files, and moves
them into the store.

The inline backend and the child processes of the other backends use this module. Output files go to
`objects/KEY/ATTEMPT.name`. ATTEMPT contains random characters, so a repeated attempt never overwrites files of an
earlier one. Nothing is committed here: the files do not count until the driver's commit log names them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence

from pipeline.base.clock import SYSTEM, Clock
from pipeline.engine.task import ChangedInput, CrashCursor, Skip, Task, TaskInputs, TaskOutputs, TaskSpec
from pipeline.store.content_keys import ref_contents
from pipeline.store.errors import FULL, DamagedFile, EnvironmentFailure, StoreError, disk_full
from pipeline.store.fs import Store
from pipeline.store.records import Counters, FileInfo, PartRecord
from stages.catalog import load

#: most content hashes that an exchange file lists one by one in its `covers`; if there are more, it names the lists in
#: the store that hold them
COVERS = 1000


def run_attempt(spec: TaskSpec, store: Store, name: str, cursor: CrashCursor, scratch: str | None = None, *,
                skip: Iterable[Skip] = (), only: Iterable[int] | None = None,
                batch_rows: int | None = None, file: int | None = None,
                confine: Callable[[Sequence[str]], None] = lambda programs: None,
                clock: Clock = SYSTEM) -> PartRecord:
    """Run the task `spec` once and return its commit record. Raises the errors of the task and of the store.

    `name` is the scheduler's name for this attempt. `scratch` is a folder for temporary files (default: the system's).
    With `only`, the run processes only these rows in order to investigate a crash: nothing is written to the store, and
    the record names no files. `skip`, `batch_rows` and `file` are passed on to the task (`TaskInputs`). If the run
    raises an error, `cursor` still shows the document that was being processed. `confine` removes the rights of this
    process that a parser must not have (`base.confinement`).
    """
    started, cpu = clock.now(), _cpu_seconds()
    _reset_peak_rss()
    cursor.clear()
    folder = tempfile.mkdtemp(prefix="attempt-", dir=scratch)
    try:
        inputs = TaskInputs(spec,
                            store,
                            folder,
                            skip=skip,
                            only=only,
                            batch_rows=batch_rows,
                            file=file,
                            confine=confine)
        covered = ref_contents(inputs.args)
        out = TaskOutputs(folder, covered if len(covered) <= COVERS else ref_contents(spec.args))
        with disk_full(folder):
            task = load(spec.task)
            if not getattr(task, "sets_up", False):
                confine(())
            counters = _run(task, inputs, cursor, out)
        cursor.clear()
        inputs.check()
        attempt = f"{name}-{clock.new_id()[:8]}"
        files = {} if only is not None else _deliver(spec, store, attempt, out)
        return PartRecord(
            key=spec.key, task=task.name, node=spec.node, attempt=attempt, files=files, counters=counters or {},
            quarantine=out.quarantined, cpu_s=round(_cpu_seconds() - cpu, 3), wall_s=round(clock.now() - started, 3),
            rss_mb=round(peak_rss_mb(), 1), replay_key=spec.replay_key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(task: Task, inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
    """Run the task and return its counters. If the task raises an error, the files that it read by range are checked,
    and DamagedFile is raised instead if one is damaged. Damaged records can cause any error in the task, because the
    checksum of a range is compared only at the end of the range. There is no such check after an error with a known
    cause: a temporary fault of the machine or the storage, a changed input, or a lack of memory."""
    try:
        return task.run(inputs, cursor, out)
    except (EnvironmentFailure, ChangedInput, MemoryError):
        raise
    except Exception as error:
        damage = None
        if not (isinstance(error, OSError) and error.errno in FULL):
            with contextlib.suppress(StoreError, OSError):        # the task's error says more than the check's
                damage = inputs.find_damage(error.path if isinstance(error, DamagedFile) else "")
        if damage is not None:
            raise damage from error
        raise


def _deliver(spec: TaskSpec, store: Store, attempt: str, out: TaskOutputs) -> dict[str, FileInfo]:
    """Hash the output files of an attempt and move them into the store. If one of them cannot be moved, all files of
    the attempt are removed from the store. Raises FileNotFoundError if the task named an output but did not write
    it."""
    files: dict[str, FileInfo] = {}
    for file, note in sorted(out.names.items()):
        local = out.path(file)
        if not os.path.isfile(local):
            raise FileNotFoundError(f"{spec.task} named the output '{file}' but wrote no such file; "
                                    f"let it call out.path('{file}') only when it writes it")
        digest = hashlib.sha256()
        with open(local, "rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
        files[file] = FileInfo(path=f"objects/{spec.key}/{attempt}.{file}", bytes=os.path.getsize(local),
                               sha256=digest.hexdigest(), content=note.get("content") or digest.hexdigest(),
                               rows=note.get("rows", 0), meta=note.get("meta") or {})
    uploaded: list[str] = []
    try:
        for file, info in files.items():
            uploaded.append(info.path)
            store.upload(out.path(file), info.path)
    except BaseException:
        for path in uploaded:
            with contextlib.suppress(Exception):      # files left behind are garbage: no record names them
                store.remove(path)
        raise
    return files


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of the child processes that it has waited for."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def _reset_peak_rss() -> None:
    """Restart the kernel's measurement of this process's peak memory (Linux: proc(5), clear_refs). A process that runs
    several tasks would otherwise report the peak of an earlier task."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def peak_rss_mb() -> float:
    """Returns the largest resident set of this process in MB since `_reset_peak_rss`; on systems other than Linux,
    since the start of the process."""
    with contextlib.suppress(OSError), open("/proc/self/status") as f:
        for line in f:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024
