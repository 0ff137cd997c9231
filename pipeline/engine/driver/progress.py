"""Shows the progress of a run in three ways: to people (rich), to programs (JSON lines), and as a snapshot in the
store.

Programs that did not start the driver, such as the service, read the snapshot (`runs/RUN/progress.json`), which remains
when the driver ends. The times measured here are only shown; nothing else depends on them. The remaining time is
estimated from the bytes still to be read, not from the number of tasks.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.humanize import size
from pipeline.base.redact import redact
from pipeline.base.visible import visible
from pipeline.engine.driver.hangs import clock, hang_of, stage_of
from pipeline.engine.driver.labels import label_of, masked_label
from pipeline.engine.driver.metrics import OUTCOMES, outcomes
from pipeline.engine.driver.protocols import Running
from pipeline.engine.driver.sums import BatchSums, docs_in, input_docs_of
from pipeline.engine.task import TaskSpec
from pipeline.engine.worker.crash_triage import gist
from pipeline.store.fs import StoreError
from pipeline.store.records import PartRecord, merge_counters

SNAPSHOT_S = 3.0
PLAIN_S = 20.0          # seconds between two lines when there is no terminal to redraw
AGAIN_S = 600.0         # seconds before a failure is printed again that differs from an earlier one only in its paths
SHOWN = 50              # entries of a snapshot: longest-running tasks, latest failures
LONGEST = 1000          # characters of a message in a snapshot


@dataclass
class _Node:
    """The counts of one plan node (a group of tasks, such as a pass or a barrier). `parts` counts its tasks, and
    `weight` the bytes that they read."""

    parts: int = 0
    done: int = 0
    fresh: int = 0              # tasks among `done` whose records were in the log already
    weight: int = 0
    weight_done: int = 0
    weight_run: int = 0         # bytes among `weight_done` that this run read
    docs: int = 0
    docs_run: int = 0
    input_docs: dict[str, int] = field(default_factory=dict)    # documents read from sources, by source
    quarantined: int = 0
    failed: int = 0             # failed attempts
    retried: int = 0            # repeated attempts
    doubled: int = 0            # second attempts beside a slow one
    outcomes_run: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))    # documents of this run
    running: int = 0
    hung: int = 0
    cpu_s: float = 0.0
    started: float | None = None    # when tasks began to run; None while they wait for workers
    earlier_s: float = 0.0              # seconds that its tasks ran before `started`

    def seconds(self, now: float) -> float:
        return self.earlier_s + (now - self.started if self.started is not None else 0.0)

    def start(self, when: float) -> None:
        if self.started is None and self.done < self.parts:
            self.started = when

    def stop(self, now: float) -> None:
        self.earlier_s, self.started = self.seconds(now), None

    def snapshot(self, now: float) -> dict[str, Any]:
        seconds = max(self.seconds(now), 1e-3)
        rate = self.weight_run / seconds
        remaining = self.weight - self.weight_done
        return {"parts": self.parts, "done": self.done, "running": self.running, "reused": self.fresh,
                "bytes": self.weight,
                "bytes_done": self.weight_done, "docs": self.docs, "quarantined": self.quarantined,
                "failed_attempts": self.failed, "retried": self.retried, "doubled": self.doubled,
                "bytes_run": self.weight_run, "documents_run": dict(self.outcomes_run),
                "docs_reused": self.docs - self.docs_run,
                "cpu_s": round(self.cpu_s, 2), "seconds": round(self.seconds(now), 1),
                "bytes_per_s": round(rate), "docs_per_s": round(self.docs_run / seconds, 1),
                "eta_s": 0 if remaining == 0 else round(remaining / rate) if rate else None}


class Progress:
    """Collects the scheduler's reports about a run and shows them.

    `mode` is "rich", "json" or "quiet". "rich" draws bars on stderr; if that is no terminal, it prints the changed
    lines every PLAIN_S seconds. "json" prints one event per line on stdout. `snapshot` is a function that is called
    with a JSON-able dict at the beginning, every few seconds and at the end. The entries of `facts` are added to every
    snapshot.

    Secrets are removed from messages, errors and tracebacks (`pipeline.base.redact`). Labels of tasks lose secrets and
    personal data."""

    def __init__(self, mode: str = "rich", snapshot: Callable[[dict[str, Any]], None] | None = None, *,
                 stream: TextIO | None = None, clock: Clock = SYSTEM,
                 facts: Mapping[str, Any] | None = None) -> None:
        if mode not in ("rich", "quiet", "json"):
            raise ValueError(f"progress mode '{mode}': use rich, quiet or json")
        self.mode, self._snapshot, self._clock = mode, snapshot, clock
        self._stream = stream or (sys.stdout if mode == "json" else sys.stderr)
        self.nodes: dict[str, _Node] = {}
        self.state, self.slots = "running", 0
        self.tasks: list[dict[str, Any]] = []
        self.facts = dict(facts or {})
        self.error: str | None = None
        self.traceback: str | None = None
        #: (node, kind, gist of the message) → its latest label and message, and its count; latest last
        self.failures: dict[tuple[str, str, str], tuple[str, str, int]] = {}
        self._printed: dict[str, float] = {}                            # gist of a message → when it was last printed
        self._redact = lru_cache(SHOWN)(redact)      # a lost rack ends thousands of attempts with one message
        self._hung: dict[str, tuple[int, int]] = {}                  # task key → row and stage where it hangs
        self._finished: float | None = None                          # when the last task finished
        self._written = self._printed_at = self._begun = clock.now()
        self._bars: Bars | None = None
        self._ids: dict[str, TaskID] = {}
        self._last_lines: dict[str, str] = {}
        if mode == "rich":
            console = Console(file=self._stream, emoji=False)        # node names such as index:b:1 hold no emoji
            self._console = console
            if console.is_terminal:
                self._bars = Bars(TextColumn("{task.description}", markup=False), BarColumn(bar_width=24),
                                  TextColumn("{task.fields[say]}", markup=False), console=console, refresh_per_second=4)
                self._bars.start()

    # -- reports from the scheduler -------------------------------------------------------------------------------
    def plan_again(self) -> None:
        """Clear the counts of all plan nodes (groups of tasks, such as a pass), because the plan is made again and its
        tasks are about to be added again. Tasks that have finished will then count as reused."""
        self.nodes.clear()

    def planned(self, specs: list[TaskSpec], fresh: Mapping[str, PartRecord]) -> None:
        names = dict.fromkeys(s.node for s in specs)
        for spec in {s.key: s for s in specs}.values():
            node = self.nodes.setdefault(spec.node, _Node())
            node.parts += 1
            node.weight += spec.weight
            if spec.key in fresh:
                node.done += 1
                node.fresh += 1
                node.weight_done += spec.weight
                record = fresh[spec.key]
                node.docs += docs_in(record)
                merge_counters(node.input_docs, input_docs_of(record), False)
                node.quarantined += len(record.quarantine)
        for name in names:
            node = self.nodes[name]
            self._event("planned", node=name, parts=node.parts, reused=node.fresh, bytes=node.weight)
            self._draw(name)
        self._tick()                 # reading a million finished tasks takes minutes, so show progress

    def reused(self, sums: BatchSums) -> None:
        """Count the tasks of a plan node (a group of tasks, such as a pass) whose results are all in the store already.
        `sums` are sums over these tasks."""
        node = self.nodes.setdefault(sums.node, _Node())
        node.parts += sums.tasks
        node.done += sums.tasks
        node.fresh += sums.tasks
        node.weight += sums.weight
        node.weight_done += sums.weight
        node.docs += sums.docs
        merge_counters(node.input_docs, sums.input_docs, False)
        node.quarantined += sums.quarantined
        self._event("planned", node=sums.node, parts=node.parts, reused=node.fresh, bytes=node.weight)
        self._draw(sums.node)
        self._tick()

    def done(self, spec: TaskSpec, record: PartRecord) -> None:
        node, docs, quarantined = self.nodes[spec.node], docs_in(record), len(record.quarantine)
        self._hung.pop(spec.key, None)
        self._finished = now = self._clock.now()
        node.start(now - record.wall_s)
        node.done += 1
        node.weight_done += spec.weight
        node.weight_run += spec.weight
        node.docs += docs
        node.docs_run += docs
        merge_counters(node.input_docs, input_docs_of(record), False)
        node.quarantined += quarantined
        for outcome, n in outcomes(record.counters).items():
            node.outcomes_run[outcome] += n
        node.cpu_s += record.cpu_s
        if node.done == node.parts:
            node.stop(now)
        self._event("done", spec=spec, parts=node.parts, done=node.done,
                    docs=docs, bytes=spec.weight, cpu_s=record.cpu_s, wall_s=record.wall_s, rss_mb=record.rss_mb,
                    quarantined=quarantined)
        self._draw(spec.node)
        self._tick()

    def failed(self, spec: TaskSpec, kind: str, message: str, again: bool) -> None:
        """Count a failed attempt at a task, and print its message if the task gets another attempt (`again`). Without
        another attempt the run ends with an error that gives the reason, so nothing is printed here."""
        self.nodes[spec.node].failed += 1
        message = self._redact(message)
        key = (spec.node, kind, gist(message))
        _, _, times = self.failures.pop(key, ("", "", 0))
        self.failures[key] = label_of(spec), message[:LONGEST], times + 1
        if len(self.failures) > SHOWN:
            del self.failures[next(iter(self.failures))]
        self._event("failed", spec=spec, kind=kind, message=message)
        if again:
            self._print_once(message, f"{spec.node}: {label_of(spec)}: {message} ({kind}, trying again)")

    def hindered(self, spec: TaskSpec, message: str) -> None:
        """Report a task that waits for its machine or storage: the disk is full, or the storage does not answer."""
        message = self._redact(message)
        self._event("hindered", spec=spec, message=message)
        self._print_once(message, f"{spec.node}: {label_of(spec)}: {message} (waiting, then trying again)")

    def repeated(self, spec: TaskSpec) -> None:
        """Count a task that waits for another attempt, because its last attempt failed, was lost with its node, or was
        given back by its worker."""
        self.nodes[spec.node].retried += 1

    def doubled(self, spec: TaskSpec) -> None:
        """Count a second attempt that starts beside the first, because the task runs much longer than others (a
        straggler)."""
        self.nodes[spec.node].doubled += 1
        self._event("doubled", spec=spec)

    def quarantined(self, spec: TaskSpec, row: int, reason: str) -> None:
        self._event("quarantined", spec=spec, row=row, reason=reason)
        self._print(f"{spec.node}: {label_of(spec)}: document {row} goes into quarantine ({reason})")

    def hanging(self, task: Running) -> None:
        """Report a task whose crash cursor (the record of which document it works on) has not moved for a long time.
        The report is only shown and has no other effect, because the task may just be slow."""
        spec = task.spec
        self._hung[spec.key] = task.row, task.stage
        self._event("hanging", spec=spec, row=task.row,
                    stage=stage_of(task) if task.row >= 0 else "", seconds=task.still, host=task.host, pid=task.pid,
                    does=task.does)
        self._print(f"{spec.node}: {label_of(spec)}: {hang_of(task)}")

    def running(self, slots: int, tasks: list[Running]) -> None:
        """Note which tasks run. Hanging tasks are listed first, with their position and a remedy, until their crash
        cursor (the record of which document a task works on) moves again."""
        self.slots = slots
        for t in tasks:
            if t.spec.key in self._hung and self._hung[t.spec.key] != (t.row, t.stage):        # it moves again
                del self._hung[t.spec.key]
        ranked = sorted(tasks, key=lambda t: (t.spec.key not in self._hung, -t.seconds))[:SHOWN]
        self.tasks = [{"node": t.spec.node, "label": label_of(t.spec), "seconds": round(t.seconds, 1),
                       "row": t.row, "stage": stage_of(t) if t.row >= 0 else "", "still": t.still, "host": t.host,
                       "pid": t.pid, **({"hangs": hang_of(t)} if t.spec.key in self._hung else {})} for t in ranked]
        counts = Counter(t.spec.node for t in tasks)
        hung = Counter(t.spec.node for t in tasks if t.spec.key in self._hung)
        for name, node in self.nodes.items():
            node.running, node.hung = counts[name], hung[name]
        for t in tasks:
            self.nodes[t.spec.node].start(self._clock.now() - t.seconds)
        for name in counts:
            self._draw(name)
        self._tick()

    def stopping(self) -> None:
        """Report that the run was asked to stop: no further task begins, and running tasks may finish."""
        if self.state == "running":
            self.state = "stopping"
            self._write()
            self._event("stopping")

    # -- output --------------------------------------------------------------------------------------------------
    def snapshot(self) -> dict[str, Any]:
        """Returns the progress of the run as a dict that can be written as JSON. It has totals, the remaining seconds
        (None: unknown), and a dict for each plan node (a group of tasks, such as a pass)."""
        now = self._clock.now()
        nodes = {name: node.snapshot(now) for name, node in self.nodes.items()}
        remaining = sum(n.weight - n.weight_done for n in self.nodes.values())
        elapsed = max(now - self._begun, 1e-3)
        rate = sum(n.weight_run for n in self.nodes.values()) / elapsed
        failures = [{"node": node, "label": label, "kind": kind, "message": message, "times": times}
                    for (node, kind, _), (label, message, times) in self.failures.items()]
        finished = None if self._finished is None else round(now - self._finished, 1)
        return {**self.facts, "state": self.state, "at": round(self._clock.wall(), 1), "finished_s": finished,
                "seconds": round(now - self._begun, 1), "slots": self.slots,
                "parts": sum(n.parts for n in self.nodes.values()), "done": sum(n.done for n in self.nodes.values()),
                "docs_read": self._docs_read(), "docs": sum(n.docs for n in self.nodes.values()),
                "docs_per_s": round(sum(n.docs_run for n in self.nodes.values()) / elapsed, 1),
                "bytes_left": remaining, "eta_s": 0 if remaining == 0 else round(remaining / rate) if rate else None,
                "nodes": nodes, "running": self.tasks, "failures": failures, "error": self.error,
                "traceback": self.traceback}

    def _docs_read(self) -> int:
        """Return the number of documents that were read from sources. A source that several nodes of the plan read
        counts once, with the documents of the node that has read most of it."""
        most: dict[str, int] = {}
        for node in self.nodes.values():
            for source, docs in node.input_docs.items():
                most[source] = max(docs, most.get(source, 0))
        return sum(most.values())

    def begin(self) -> None:
        """Write the first snapshot, which tells other programs that this run has begun."""
        self._write()

    def close(self, state: str = "done", error: str | None = None, traceback: str | None = None) -> None:
        """End the display and write the last snapshot. `state`: done, failed or stopped. `error`: the error that ended
        the run."""
        self.state, self.tasks = state, []
        self.error = None if error is None else redact(error)[:4 * LONGEST]
        self.traceback = None if traceback is None else redact(traceback)[-16 * LONGEST:]
        for node in self.nodes.values():
            node.running = node.hung = 0
        for name in self.nodes:
            self._draw(name)
        if self._bars is not None:
            self._bars.stop()
        elif self.mode == "rich":
            self._lines()
        self._write()
        left_out = ("running", "nodes", "failures", "traceback")
        self._event("end", **{k: v for k, v in self.snapshot().items() if k not in left_out})

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("done" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _tick(self) -> None:
        now = self._clock.now()
        if now - self._written >= SNAPSHOT_S:
            self._written = now
            self._write()
            self._event("progress", **self.snapshot())
        if self.mode == "rich" and self._bars is None and now - self._printed_at >= PLAIN_S:
            self._printed_at = now
            self._lines()

    def _write(self) -> None:
        if self._snapshot is not None:
            with contextlib.suppress(OSError, StoreError):      # if the store is gone, the commit log raises an error
                self._snapshot(self.snapshot())

    def _event(self, event: str, spec: TaskSpec | None = None, **fields: Any) -> None:
        if self.mode == "json":
            task = {} if spec is None else {"node": spec.node, "key": spec.key, "label": masked_label(spec.label)}
            self._stream.write(json.dumps({"event": event, **task, **fields}) + "\n")
            self._stream.flush()

    def _print(self, line: str) -> None:
        if self.mode == "rich":
            console = self._bars.console if self._bars is not None else self._console
            console.print(visible(line), highlight=False, markup=False, soft_wrap=True)

    def _print_once(self, message: str, line: str) -> None:
        """Print `line`, which reports `message`, unless the same message was reported in the last AGAIN_S seconds.
        Messages that differ only in paths count as the same, because many workers may meet the same failure."""
        now, key = self._clock.now(), gist(message)
        if now - self._printed.get(key, -AGAIN_S) >= AGAIN_S:
            self._printed[key] = now
            self._print(line)

    def _lines(self) -> None:
        for name, node in self.nodes.items():
            if (words := self._words(node)) != self._last_lines.get(name):       # a finished pass is printed once
                self._last_lines[name] = words
                self._print(f"{name}: {words}")

    def _words(self, node: _Node) -> str:
        counts = node.snapshot(self._clock.now())
        words = [f"{counts['done']}/{counts['parts']}"]
        if counts["reused"]:
            words.append(f"{counts['reused']} reused")
        if counts["bytes_per_s"]:
            words.append(f"{size(counts['bytes_per_s'])}/s")
        if counts["docs_per_s"]:
            words.append(f"{counts['docs_per_s']:,.0f} docs/s")
        if counts["quarantined"]:
            words.append(f"{counts['quarantined']} in quarantine")
        if node.hung:
            words.append(f"{node.hung} without progress")
        if counts["done"] == counts["parts"]:
            words.append(clock(counts["seconds"]))
        elif counts["eta_s"] is not None:
            words.append(f"{clock(counts['eta_s'])} left")
        return "  ".join(words)

    def _draw(self, name: str) -> None:
        if self._bars is None:
            return
        node = self.nodes[name]
        if name not in self._ids:
            self._ids[name] = self._bars.add_task(name, total=max(node.weight, 1), say="")
        self._bars.update(self._ids[name], total=max(node.weight, 1), say=self._words(node),
                          completed=node.weight_done if node.done < node.parts else max(node.weight, 1))
