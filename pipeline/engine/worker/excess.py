"""Compares the CPU time, memory and idle time of a child process with its limits."""

from __future__ import annotations

from pipeline.engine.worker import limits as measure
from pipeline.engine.worker.crash_triage import CPU_LIMIT, ENDLESS, MEMORY, STALLED, Fault
from pipeline.engine.worker.job import Job
from pipeline.engine.worker.limits import READING_BYTES, RECORD_BYTES, ProcessLimits
from pipeline.engine.worker.process import ChildProcess
from pipeline.store.records import READING


def excess(child: ChildProcess, job: Job, limits: ProcessLimits, now: float) -> Fault | None:
    """Returns the fault if the child process exceeds a limit, otherwise None.

    The CPU limits apply to the time that the child spends at one position of its crash cursor. A position is a batch of
    documents (or one document) in one stage, one record that is being read from an input file, or anything else. Each
    call compares with what earlier calls have noted in `child`: the position, and the CPU time that the child had used
    when it was first seen there."""
    cursor = child.cursor.read()
    try:
        cpu, memory = measure.cpu_seconds(child.pid), measure.anonymous_mb(child.pid)
        working = measure.working_seconds(child.pid)
    except (OSError, IndexError):            # the child is just ending
        return None
    # CPU time used between two samples cannot be attributed to one document, so it is dropped
    moved = cursor != child.position or cursor != child.cursor.read()
    if moved or working - child.cpu_quiet > limits.idle_cpu_s:
        child.quiet_since, child.cpu_quiet = now, working
    if moved:
        child.position, child.cpu_position = cursor, cpu
    (first, last, stage), used = cursor, cpu - child.cpu_position
    if first >= 0 and stage <= READING:
        if used > limits.record_cpu_s + job.spec.weight / RECORD_BYTES:
            return CPU_LIMIT
    elif first < 0 or stage < 0:
        if used > limits.reading_cpu_s + job.spec.weight / READING_BYTES:
            return ENDLESS
    elif used > limits.batch_cpu_s(last - first + 1):
        return CPU_LIMIT
    if memory > job.spec.memory_mb + child.empty_mb:
        return MEMORY
    if now - child.quiet_since > limits.wall_s:
        return STALLED
    return None
