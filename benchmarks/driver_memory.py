"""Check that the driver's memory stays bounded however many partitions a run has.

    python benchmarks/driver_memory.py [--partitions 10000 1000000]

Runs the real planner, driver, scheduler, log and publication over simulated workers and a simulated input: files of 100
splits each, a pass that extracts and a pass that filters, each with one task per partition. Then reads the log again
and adds up the report's counters. The workers answer at once with records of the usual size. Their files do not exist,
so linking them and the report's samples are left out. Every size runs in a process of its own. Prints the driver's peak
resident memory, its memory before the run (the libraries), and the CPU time per task.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.engine.messages import Assignment, Done, Event
from pipeline.store.records import FileInfo, PartRecord

ROOT = Path(__file__).resolve().parent.parent
SPLITS = 100              # splits per file
SLOTS = 10_000
RECIPE = """
version: 1
sources: {web: {read: warc, path: in/*.warc.gz}}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [gopher_quality, pii]}
run: {partition: 256MB}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", nargs="+", type=int, default=[10_000, 1_000_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.one:
        print(json.dumps(run(options.one)))
        return 0
    found = []
    for n in options.partitions:
        done = subprocess.run([sys.executable, __file__, "--one", str(n)], check=True, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
        found.append(json.loads(done.stdout.splitlines()[-1]))
        said = found[-1]
        print(f"{n:>9,} partitions, {said['tasks']:>9,} tasks: driver peak {said['peak_mb']:.0f} MB "
              f"(before: {said['before_mb']:.0f} MB), {said['cpu_ms']:.2f} ms CPU a task", flush=True)
    print(f"growth: {found[-1]['peak_mb'] - found[0]['peak_mb']:.0f} MB")
    return 0


def run(partitions: int) -> dict[str, Any]:
    import resource
    import time

    from pipeline import run as run_module
    from pipeline.engine.worker.attempt import peak_rss_mb
    from pipeline.plan import planner as passes
    from pipeline.plan.file_list import FileList
    from pipeline.recipe import load_recipe
    from pipeline.report.collect import nodes_of
    from pipeline.store.fs import Store
    from pipeline.store.log import Log

    splits = json.dumps([{"start": i << 20, "stop": (i + 1) << 20, "ordinal": 1000 * i, "records": 1000,
                          "bytes": 256 << 20} for i in range(SPLITS)]).encode()
    real = Store.read_checked
    Store.read_checked = lambda self, path, sha256: splits if path.endswith("splits.json") else real(self, path, sha256)
    Store.link = lambda self, path, to, anew=False: True
    passes.list_source = lambda name, *a, **kw: FileList(
        "/nowhere", ((f"crawl-{i:06d}.warc.gz", 4 << 30, "1", "", "") for i in range(partitions // SPLITS)))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "r.yaml").write_text(RECIPE)
        recipe = load_recipe(f"{folder}/r.yaml", [])
        before, cpu = peak_rss_mb(), time.process_time()
        # the parts do not exist, so the report, which opens them, is left out
        summary = run_module.run_recipe(recipe, f"{folder}/store", make_backend=lambda store: Simulated(), report=False)
        tasks = summary.executed
        store = Store(f"{folder}/store")
        counted = sum(n.tasks for n in nodes_of(store, summary.run, Log.read(store).get)[1])
        assert counted == tasks, (counted, tasks)
        spent = time.process_time() - cpu
    return {"tasks": tasks, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "before_mb": before,
            "cpu_ms": 1000 * spent / tasks}


class Simulated:
    """A backend whose tasks are done at once."""

    interruptible, slots = False, SLOTS

    def __init__(self) -> None:
        self._open: list[Assignment] = []

    def start(self, memory_mb: int = 0) -> None: ...

    def close(self) -> None: ...

    def emit(self, run: str, snapshot: dict[str, Any]) -> None: ...

    def cancel(self, ids: list[int]) -> None: ...

    def set_demand(self, waiting: dict) -> dict:
        return {}

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        return self.slots - len(self._open)

    def submit(self, assignment: Assignment) -> None:
        self._open.append(assignment)

    def wait(self, timeout: float) -> list[Event]:
        done, self._open = self._open, []
        return [Done(a.id, record(a)) for a in done]


def record(assignment: Assignment) -> PartRecord:
    """The record of a task of the usual size: counters like those of real passes, three files."""
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
