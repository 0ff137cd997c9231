"""Describes tasks that make no progress, and time spans, in words for people."""

from __future__ import annotations

from pipeline.engine.driver.protocols import Running


def stage_of(task: Running) -> str:
    """Returns the name of the stage (a step on documents) that a task is running. Returns the stage's number if the
    task's arguments do not name it, and "read" while the task reads a record."""
    chain = task.spec.args.get("chain", ())
    stage = task.stage
    return chain[stage].get("name", str(stage)) if 0 <= stage < len(chain) else str(stage) if stage >= 0 else "read"


#: state of a child without progress → what the user can do
_REMEDIES = {
    "stopped": "on its machine, kill -CONT {pid} lets it continue, and kill -9 {pid} makes its task run again",
    "waiting": "a disk or a network share does not answer: dmesg on its machine may say which",
    "sleeping": "it waits for something; if this takes too long, its task runs again",
    "computing": "it may just be slow; if it does not end, its document goes into quarantine",
}


def hang_of(task: Running) -> str:
    """Describes a hanging task in words: for how long it has made no progress, at which document, on which worker, and
    what the user can do."""
    place = "outside any document" if task.row < 0 else f"document {task.row} in stage {stage_of(task)}" \
        if task.stage >= 0 else f"while record {task.row} is read"
    words = [f"no progress for {age(task.still)}", place]
    if task.pid:
        words.append(f"process {task.pid} on {task.host}" + (f" ({task.does})" if task.does else ""))
    remedy = _REMEDIES.get(task.does, "").format(pid=task.pid)
    return ", ".join(words) + (f"; {remedy}" if remedy else "")


def age(seconds: float) -> str:
    """Format a time span for people: 75 → '75 s', 1234 → '20:34'."""
    return f"{seconds:.0f} s" if seconds < 600 else clock(seconds)


def clock(seconds: float) -> str:
    """Format a duration for people: 75 → '1:15', 4000 → '1:06:40'."""
    total = int(seconds)
    return (f"{total // 3600}:{total % 3600 // 60:02d}:{total % 60:02d}" if total >= 3600 else
            f"{total // 60}:{total % 60:02d}")
