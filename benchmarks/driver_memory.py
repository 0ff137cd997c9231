"""Check that the driver's memory, and the time of a plan or a resume, stay bounded however many partitions a run has.

    python benchmarks/driver_memory.py [--partitions 10000 1000000]

Runs the real planner, driver, scheduler, log, publication and report over simulated workers and a simulated input:
files of 100 splits each, a pass that extracts and a pass that filters, each with one task per partition. There are four
phases, each in a process of its own:

    first plan   `plan` in a store that knows only where the files can be split
    run          the whole run, in a store of its own
    plan         `plan` after the run
    resume       the same run once more

The workers answer at once with records of the usual size. They are supervisors of 16 slots each, 10,000 slots in all.
Assignments are placed with them, and messages are encoded and decoded, as on a Ray cluster, but without Ray. The files
of the records do not exist, so listing and linking them, and the samples of the report, are left out.

Prints the driver's peak resident memory, its memory before (the libraries), and its CPU time. The CPU time of reading
the log is printed apart, because it grows with the log and not with the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.engine.backends.nodes import WorkerSlot
from pipeline.engine.backends.placing import Placement
from pipeline.engine.backends.pools import room_in
from pipeline.engine.messages import ASSIGNMENTS, EVENTS, Assignment, Done, Event, encode
from pipeline.engine.task import ResourceRequest
from pipeline.store.records import FileInfo, PartRecord

ROOT = Path(__file__).resolve().parent.parent
SPLITS = 100              # splits per file
SLOTS, SLOTS_EACH = 10_000, 16       # of all supervisors, and of each
RECIPE = """
version: 1
sources: {web: {read: warc, path: in/*.warc.gz}}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [gopher_quality, pii]}
run: {partition: 256MB}
"""
PHASES = ("first plan", "run", "plan", "resume")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", nargs="+", type=int, default=[10_000, 1_000_000])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.phase:
        print(json.dumps(measure(options.phase, options.folder, options.partitions[0])))
        return 0
    for n in options.partitions:
        with tempfile.TemporaryDirectory() as folder:
            for phase in options.phases:
                command = [sys.executable, __file__, "--phase", phase, "--folder", folder, "--partitions", str(n)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True,
                                      env={**os.environ, "PYTHONPATH": str(ROOT)})
                figures = json.loads(done.stdout.splitlines()[-1])
                print(f"{n:>9,} partitions, {figures['tasks']:>9,} tasks: {phase:<10} "
                      f"peak {figures['peak_mb']:.0f} MB "
                      f"(before: {figures['before_mb']:.0f} MB), {figures['cpu_s']:.1f} s CPU, "
                      f"{1000 * figures['cpu_s'] / figures['tasks']:.3f} ms a task; "
                      f"reading the log {figures['log_s']:.1f} s",
                      flush=True)
    return 0


def measure(phase: str, folder: str, partitions: int) -> dict[str, Any]:
    import resource

    from pipeline.engine.worker.attempt import peak_rss_mb
    from pipeline.recipe import load_recipe

    log_s = simulate(partitions)
    Path(folder, "r.yaml").write_text(RECIPE)
    recipe = load_recipe(f"{folder}/r.yaml", [])
    if phase == "first plan":
        index(recipe, f"{folder}/planned")
    before, cpu, log_before, Simulated.seconds = peak_rss_mb(), time.process_time(), log_s(), 0.0
    tasks = plan(recipe, f"{folder}/planned" if phase == "first plan" else f"{folder}/store") \
        if phase.endswith("plan") else run(recipe, f"{folder}/store", phase)
    log = log_s() - log_before
    assert tasks == 2 * partitions + -(-partitions // SPLITS), tasks
    return {"tasks": tasks, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "before_mb": before,
            "cpu_s": time.process_time() - cpu - log - Simulated.seconds, "log_s": log}


def simulate(partitions: int) -> Callable[[], float]:
    """Replace the functions that would need real files. Returns a function that gives the CPU seconds spent so far on
    reading the log."""
    from pipeline import run as run_module
    from pipeline.plan import planner
    from pipeline.plan.file_list import FileList
    from pipeline.report import domains, sampled, samples, signals
    from pipeline.store.fs import Store
    from pipeline.store.garbage import Swept
    from pipeline.store.view import LogView

    splits = json.dumps([{"start": i << 20, "stop": (i + 1) << 20, "ordinal": 1000 * i, "records": 1000,
                          "bytes": 256 << 20} for i in range(SPLITS)]).encode()
    real, refresh, spent = Store.read_checked, LogView.refresh, [0.0]

    def timed(view: LogView) -> None:
        began = time.process_time()
        refresh(view)
        spent[0] += time.process_time() - began

    def published(store: Store, name: str, state: list[str]) -> bool:
        path = f"nodes/{name}.published"
        return store.exists(path) and json.loads(store.read(path))["state"] == state

    Store.read_checked = lambda self, path, sha256: splits if path.endswith("splits.json") else real(self, path, sha256)
    Store.link = lambda self, path, to, anew=False: True
    LogView.refresh = timed
    planner.list_source = lambda name, *a, **kw: FileList(
        "/nowhere", ((f"crawl-{i:06d}.warc.gz", 4 << 30, "1", "", "") for i in range(-(-partitions // SPLITS))))
    run_module.collect_garbage = lambda log: Swept(0, 0, {})
    run_module.is_published = published
    samples._searched = lambda node, name: []
    sampled.PARTS = 0
    domains.strata = signals.strata = lambda passes, *a, **kw: sampled.strata(passes, 0)
    return lambda: spent[0]


def index(recipe: Any, root: str) -> None:
    """Make a store in which only the places are known where the input files can be split."""
    from pipeline.plan.estimate import open_plan
    from pipeline.store.log import Log

    plan = open_plan(recipe, root)
    node = plan.nodes[0]
    with Log.open(plan.store) as log:
        for i, spec in enumerate(next(node.work({}))):
            log.append(record(Assignment(i, spec, f"{log.epoch:08d}-{i:08d}")))


def plan(recipe: Any, root: str) -> int:
    from pipeline.plan.estimate import survey_recipe

    rows = survey_recipe(recipe, root)["nodes"]
    return sum(row["fresh"] + row["stale"] + row["pending"] for row in rows)


def run(recipe: Any, root: str, phase: str) -> int:
    from pipeline.run import run_recipe

    summary = run_recipe(recipe, root, make_backend=lambda store: Simulated())
    assert (summary.executed, summary.reused)[phase == "run"] == 0, "a resume runs nothing, a run reuses nothing"
    return summary.executed + summary.reused


class Simulated:
    """A backend whose tasks end at once. `seconds` is the CPU time of the simulated workers: reading assignments and
    making records. It is subtracted from the CPU time of this process, which then is the driver's."""

    interruptible, slots, seconds = False, SLOTS, 0.0

    def __init__(self) -> None:
        self._workers = [WorkerSlot(SLOTS_EACH, 64_000, host=str(i)) for i in range(SLOTS // SLOTS_EACH)]
        self._placement = Placement(lambda: self._workers)

    def start(self, memory_mb: int = 0) -> None: ...

    def close(self) -> None: ...

    def emit(self, run: str, snapshot: dict[str, Any]) -> None: ...

    def cancel(self, ids: list[int]) -> None: ...

    def set_demand(self, waiting: dict) -> dict:
        return {}

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        self._placement.place()
        return room_in(self._workers, ResourceRequest(memory_mb, gpus, cpu))

    def submit(self, assignment: Assignment) -> None:
        self._placement.submit(assignment)

    def wait(self, timeout: float) -> list[Event]:
        """Return the answers of half of the workers. The other half answers in the next call, so that tasks stay
        assigned for a while, as on a cluster that is polled."""
        self._placement.place()
        events: list[Event] = []
        self._workers = self._workers[len(self._workers) // 2:] + self._workers[:len(self._workers) // 2]
        for worker in self._workers[:len(self._workers) // 2 + 1]:
            sent, worker.unsent = [encode(a) for a in worker.unsent], []
            began = time.process_time()
            answers = [encode(Done(a.id, record(a))) for a in map(ASSIGNMENTS.decode, sent)]
            Simulated.seconds += time.process_time() - began
            done = [EVENTS.decode(e) for e in answers]
            self._placement.settle(worker, [e.id for e in done if isinstance(e, Done)])
            events += done
        return events


def record(assignment: Assignment) -> PartRecord:
    """The record of a finished task, of the usual size: with counters like those of real passes, and three files."""
    spec = assignment.spec
    key = spec.key
    index = spec.node.startswith("index:")
    names = ["splits.json"] if index else ["kept.parquet", "dropped.parquet", "quarantine.parquet"]
    files = {n: FileInfo(f"objects/{key}/{assignment.attempt}-00000000.{n}", 1 << 20, key * 2, key * 2, 1000,
                         {"text_bytes": 3 << 20}) for n in names}
    stage = {"in": 1000, "bytes_in": 1 << 24, "bytes_out": 1 << 22, "cpu_s": 3.2,
             "dropped": {"gopher_short_doc": {"web": 120}, "gopher_enough_stop_words": {"web": 31}}}
    counters = {"files": 1, "unsplittable": 0, "records": 100} if index else {
        "read": {"web": {"records": 1000, "skipped": {"not_response": 12}, "bad": {}}},
        "in": {"web": {"docs": 1000, "bytes": 1 << 24}}, "kept": {"web": {"docs": 849, "bytes": 3 << 20}},
        "stages": {"0:html": stage, "1:gopher_quality": stage, "2:pii": stage}, "dropped_bytes": {"web": 1 << 18},
        "quarantined": {}, "languages": {"web": {"en": 700, "de": 149}},
        "lengths": {"web": {str(b): 80 for b in range(6, 18)}}}
    return PartRecord(key, spec.task, spec.node, assignment.attempt, files, counters, cpu_s=3.4, wall_s=3.5,
                      rss_mb=400.0, replay_key=spec.replay_key)


if __name__ == "__main__":
    sys.exit(main())
