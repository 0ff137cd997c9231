"""Formats the state of a run for `tokenmill status`, as text or JSON."""

from __future__ import annotations

from typing import Any

from pipeline.base.humanize import size
from pipeline.base.visible import visible
from pipeline.cli.options import as_typed
from pipeline.cluster.attempts import Standing, driver_of
from pipeline.engine.driver.progress import age, clock
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
    """The state of a run as lines of text. With `debug`, they end with the traceback of its error."""
    p, facts = current.progress, current.facts
    head = [current.run, current.state]
    if p.get("seconds"):
        head.append(clock(p["seconds"] + (0.0 if current.ended else current.age_s or 0.0)))
    if facts.get("job"):
        head.append(f"job {facts.get('job')} at {facts.get('address')}")
    if current.attempt > 1:
        head.append(f"attempt {current.attempt}")
    lines = ["  ".join(map(str, head))]
    if current.state in HINTS:
        lines.append(f"  {HINTS[current.state]}")
    if current.silent_s is not None:
        lines += _signs(store, current, current.silent_s)
    if p:
        lines += _progress(p, current.ended)
    if p.get("failures"):
        lines.append("failed attempts")
        for f in p["failures"][-SHOWN:]:
            times = f" × {f['times']}" if f["times"] > 1 else ""
            lines.append(f"  {f['node']}  {f['label']}{times}  {f['kind']}: {_first(f['message'])}")
    if p.get("running"):
        later = current.age_s or 0.0                             # time since the driver's last report
        hung = [t for t in p["running"] if t.get("hangs")]
        if hung:
            lines += ["without progress", *(f"  {t['node']}  {t['label']}  {t['hangs']}" for t in hung)]
        lines.append("running longest")
        for t in sorted(p["running"], key=lambda t: -t["seconds"])[:SHOWN]:
            row = f"  row {t['row']:,}" if t["row"] >= 0 else ""
            where = f"  process {t['pid']} on {t['host']}" if t.get("pid") else ""
            lines.append(f"  {t['node']}  {t['label']}  {clock(t['seconds'] + later)}{row}{where}")
    if current.error:
        lines += ["error", *(f"  {line}" for line in current.error.splitlines()[:12])]
    if debug and p.get("traceback"):
        lines += ["traceback", *(f"  {line}" for line in p["traceback"].splitlines())]
    report = f"runs/{current.run}/report.html"
    if current.state == "done" and store.exists(report):
        lines.append(f"report: {store.root}/{report}")
    return visible("\n".join(lines))


def _signs(store: Store, current: Standing, silent_s: float) -> list[str]:
    """Lines that say when the driver gave its last sign of life and when its last task finished. If its last sign of
    life is longer ago than SILENT_S, they say what to do. `silent_s` is the number of seconds since then."""
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


def _progress(p: dict[str, Any], ended: bool) -> list[str]:
    nodes: dict[str, dict[str, Any]] = p.get("nodes", {})
    running = sum(n.get("running", 0) for n in nodes.values())
    failed = sum(n.get("failed_attempts", 0) for n in nodes.values())
    words = [f"{p['done']:,}/{p['parts']:,} partitions done", f"{running:,} running", f"{failed:,} attempts failed",
             f"{p.get('docs', 0):,} documents"]
    if not ended:
        words.append(f"{p.get('docs_per_s', 0):,.0f} docs/s")
        words.append(f"{clock(p['eta_s'])} left of what is planned" if p.get("eta_s") is not None
                     else "time left unknown")
    lines = ["  " + "  ".join(words)]
    rows = [("pass", "done", "running", "failed", "documents", "docs/s", "read", "quarantined", "left")]
    for name, n in nodes.items():
        left = "-" if ended else "?" if n.get("eta_s") is None else clock(n["eta_s"])
        rows.append((name, f"{n['done']:,}/{n['parts']:,}", f"{n.get('running', 0):,}",
                     f"{n.get('failed_attempts', 0):,}", f"{n.get('docs', 0):,}", f"{n.get('docs_per_s', 0):,.0f}",
                     size(n.get("bytes_done", 0)), f"{n.get('quarantined', 0):,}",
                     f"({clock(n['seconds'])})" if n["done"] == n["parts"] else left))
    if len(rows) > 1:
        width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["  " + "  ".join([row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:]))]).rstrip()
                  for row in rows]
    return lines


def _first(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip()]
    return (lines[0] if lines else "")[:200]
