"""Formats the state of a run as text, for `tokenmill status`."""

from __future__ import annotations

from typing import Any

from pipeline.base.humanize import size
from pipeline.base.visible import visible
from pipeline.cli.options import as_typed
from pipeline.cluster.attempts import Standing, driver_of
from pipeline.engine.driver.hangs import age, clock
from pipeline.store.fs import Store

#: most failures, and most running tasks, shown at once
SHOWN = 8
#: seconds without a heartbeat (one comes every five) after which a driver is reported as stopped or hung
SILENT_S = 30.0
HINTS = {
    "submitted": "its driver has not begun yet",
    "died": "its driver ended without a message; tokenmill resume continues from what it had committed",
    "stopping": "what runs may finish, then it stops",
    "cancelled": "before it began; tokenmill resume starts it",
    "unknown": "its run.json or progress.json cannot be read; tokenmill resume writes them anew",
}


def text(store: Store, current: Standing, debug: bool = False) -> str:
    """Format the state of a run as text. With `debug`, the traceback of the run's error is included."""
    progress, facts = current.progress, current.facts
    head = [current.run, current.state]
    if progress.get("seconds"):
        head.append(clock(progress["seconds"] + (0.0 if current.ended else current.age_s or 0.0)))
    if facts.get("job"):
        head.append(f"job {facts.get('job')} at {facts.get('address')}")
    if current.attempt > 1:
        head.append(f"attempt {current.attempt}")
    lines = ["  ".join(map(str, head))]
    if current.state in HINTS:
        lines.append(f"  {HINTS[current.state]}")
    if current.silent_s is not None:
        lines += _signs(store, current, current.silent_s)
    if progress:
        lines += _progress(progress, current.ended)
    if progress.get("failures"):
        lines.append("failed attempts")
        for failure in progress["failures"][-SHOWN:]:
            times = f" × {failure['times']}" if failure["times"] > 1 else ""
            lines.append(f"  {failure['node']}  {failure['label']}{times}  {failure['kind']}: "
                         f"{_first(failure['message'])}")
    if progress.get("running"):
        later = current.age_s or 0.0                             # time since the driver's last report
        hung = [task for task in progress["running"] if task.get("hangs")]
        if hung:
            lines += ["without progress", *(f"  {task['node']}  {task['label']}  {task['hangs']}" for task in hung)]
        lines.append("running longest")
        for task in sorted(progress["running"], key=lambda task: -task["seconds"])[:SHOWN]:
            row = f"  row {task['row']:,}" if task["row"] >= 0 else ""
            where = f"  process {task['pid']} on {task['host']}" if task.get("pid") else ""
            lines.append(f"  {task['node']}  {task['label']}  {clock(task['seconds'] + later)}{row}{where}")
    if current.error:
        lines += ["error", *(f"  {line}" for line in current.error.splitlines()[:12])]
    if debug and progress.get("traceback"):
        lines += ["traceback", *(f"  {line}" for line in progress["traceback"].splitlines())]
    report = f"runs/{current.run}/report.html"
    if current.state == "done" and store.exists(report):
        lines.append(f"report: {store.root}/{report}")
    return visible("\n".join(lines))


def _signs(store: Store, current: Standing, silent_s: float) -> list[str]:
    """Return lines that say when the driver (the process that schedules a run) gave its last sign of life and when the
    last task finished. The last sign of life was `silent_s` seconds ago. If this is more than SILENT_S, the lines also
    say what to do."""
    words = [f"last sign of life {age(silent_s)} ago"]
    if current.age_s is not None:
        words.append(f"this is as of {age(current.age_s)} ago")
        if (finished := current.progress.get("finished_s")) is not None:
            words.append(f"last task finished {age(finished + current.age_s)} ago")
    lines = ["  " + "  ".join(words)]
    if silent_s > SILENT_S:
        driver = driver_of(store)
        lines.append(f"  no sign of life for {age(silent_s)}: its driver (process {driver.get('pid')} on "
                     f"{driver.get('host')}) is stopped or hangs; kill -CONT {driver.get('pid')} there if it was "
                     f"stopped, else {as_typed('resume', current.run, store)} --takeover goes on without it")
    return lines


def _progress(progress: dict[str, Any], ended: bool) -> list[str]:
    nodes: dict[str, dict[str, Any]] = progress.get("nodes", {})
    running = sum(n.get("running", 0) for n in nodes.values())
    failed = sum(n.get("failed_attempts", 0) for n in nodes.values())
    words = [f"{progress['done']:,}/{progress['parts']:,} partitions done", f"{running:,} running",
             f"{failed:,} attempts failed", f"{progress.get('docs_read', 0):,} documents read"]
    if not ended:
        words.append(f"{progress.get('docs_per_s', 0):,.0f} docs/s")
        words.append(f"{clock(progress['eta_s'])} left of what is planned" if progress.get("eta_s") is not None
                     else "time left unknown")
    lines = ["  " + "  ".join(words)]
    rows = [("pass", "done", "running", "failed", "documents", "docs/s", "read", "quarantined", "left")]
    for name, n in nodes.items():
        remaining = "-" if ended else "?" if n.get("eta_s") is None else clock(n["eta_s"])
        rows.append((name, f"{n['done']:,}/{n['parts']:,}", f"{n.get('running', 0):,}",
                     f"{n.get('failed_attempts', 0):,}", f"{n.get('docs', 0):,}", f"{n.get('docs_per_s', 0):,.0f}",
                     size(n.get("bytes_done", 0)), f"{n.get('quarantined', 0):,}",
                     f"({clock(n['seconds'])})" if n["done"] == n["parts"] else remaining))
    if len(rows) > 1:
        width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["  " + "  ".join([row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:]))]).rstrip()
                  for row in rows]
    return lines


def _first(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip()]
    return (lines[0] if lines else "")[:200]
