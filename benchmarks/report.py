"""Time, memory and size of the report of a run with many tasks and sources.

    python -m benchmarks.report [--tasks 1000000] [--sources 500] [--rows 5000]

The run is generated: a filtered dataset, a deduplication and a deduplicated dataset over all sources. The record of a
task is made when the report asks for it, and the counters are given as sums, as a run gives them. The parts are real
files with `--rows` documents. There are 64 sets of them, which all tasks share; the report reads as many parts as if
each task had its own. Reading the commit log is not measured.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.engine.driver.sums import NodeSums
from pipeline.report.collect import write_report
from pipeline.report.signals import measured
from pipeline.store.fs import Store
from pipeline.store.parts import PartWriter, document_schema
from pipeline.store.records import FileInfo, PartRecord
from pipeline.store.runs import write_tasks
from stages.document import Document
from stages.filter.fineweb import FineWeb
from stages.filter.gopher_quality import GopherQuality
from stages.filter.gopher_repetition import GopherRepetition

SETS = 64
STAGES = (GopherRepetition(), GopherQuality(), FineWeb())
SIGNALS = tuple(name for stage in STAGES for name in stage.signals)
LANGUAGES = ("en", "de", "fr", "es", "it", "nl", "pl", "pt", "ru", "sv", "")
WORDS = [f"word{i}" for i in range(500)]


def document(rng: random.Random, source: str, twin: str = "") -> Document:
    meta = {"exact": {"kept": twin, "similarity": 1.0}, "cluster": twin} if twin else {}
    return Document(id=f"{rng.getrandbits(128):032x}", text=" ".join(rng.choices(WORDS, k=rng.randrange(20, 120))),
                    source=source, language="en", url=f"https://host{rng.randrange(20000)}.example/{rng.random()}",
                    signals={name: rng.random() ** 3 for name in SIGNALS}, meta=meta)


def parts(store: Store, sources: list[str], rows: int) -> list[dict[str, FileInfo]]:
    """Write SETS sets of a kept and a dropped part. A third of the documents of a set are dropped, half of these as
    duplicates. Returns the files of each set."""
    rng = random.Random(1)
    (store.local / "objects").mkdir(parents=True)
    out = []
    for number in range(SETS):
        files = {}
        ids: list[str] = []
        for name, count in (("kept.parquet", rows * 2 // 3), ("dropped.parquet", rows // 3)):
            path = f"objects/{number}.{name}"
            writer = PartWriter(str(store.local / path), document_schema(SIGNALS, dropped=name == "dropped.parquet"))
            for i in range(count):
                if name == "kept.parquet":
                    doc = document(rng, sources[i % len(sources)])
                    ids.append(doc.id)
                    writer.write(doc)
                else:
                    twin = rng.choice(ids) if i % 2 else ""
                    writer.write(document(rng, sources[i % len(sources)], twin), stage="exact" if twin else
                                 "gopher_quality", reason="exact_text" if twin else f"reason_{i % 20}")
            writer.close()
            files[name] = FileInfo(path, (store.local / path).stat().st_size, "", "", writer.rows)
        files["quarantine.parquet"] = FileInfo("", 0, "", "", 0)
        out.append(files)
    return out


def counters(sources: list[str], tasks: int, rows: int, stage: str) -> dict[str, Any]:
    """Return the counters of a pass over all sources, summed over `tasks` tasks with `rows` documents each."""
    each = max(1, tasks * rows // len(sources) // 3)
    bins = {str(b): each // 9 for b in range(6, 15)}
    return {
        "read": {s: {"records": 3 * each, "bad": {}, "skipped": {}} for s in sources},
        "in": {s: {"docs": 3 * each, "bytes": 3000 * each} for s in sources},
        "kept": {s: {"docs": 2 * each, "bytes": 2000 * each} for s in sources}, "quarantined": {}, "dropped_bytes": {},
        "languages": {s: dict.fromkeys(LANGUAGES, each // 6) for s in sources},
        "lengths": dict.fromkeys(sources, bins), "dropped_lengths": dict.fromkeys(sources, bins),
        "licences": {s: {"mit": each} for s in sources},
        "dropped_licences": {s: {"": each // 20 * 20} for s in sources},
        "dropped_languages": {"gopher_quality": {name: each * len(sources) // 11 for name in LANGUAGES}},
        "stages": {stage: {"in": 3 * each * len(sources), "bytes_in": 0, "bytes_out": 0, "cpu_s": 10.0 * tasks,
                           "dropped": {f"reason_{i}": dict.fromkeys(sources, each // 20) for i in range(20)}}}}


def run(store: Store, tasks: int, sources: list[str], rows: int) -> tuple[Any, dict[str, NodeSums]]:
    """Writes the plan and the list of tasks of a run. Returns (function that makes the record of a task, by its key;
    sums of the counters of each node)."""
    files = parts(store, sources, rows)
    shares = {"clean": tasks // 2, "deduped/exact.1": 10, "deduped": tasks - tasks // 2 - 10}
    index = [f"index:{s}" for s in sources]
    measures = [measured(s.name, s) for s in STAGES]
    nodes = [*({"name": n, "kind": "index", "dataset": n[6:], "deps": [], "steps": [], "publishes": False, "tasks": 0}
               for n in index),
             {"name": "clean", "kind": "pass", "dataset": "clean", "deps": index, "steps": [s.name for s in STAGES],
              "publishes": True, "tasks": shares["clean"], "measures": measures},
             {"name": "deduped/exact.1", "kind": "barrier", "dataset": "deduped", "deps": ["clean"],
              "steps": ["exact"], "publishes": False, "tasks": shares["deduped/exact.1"]},
             {"name": "deduped", "kind": "pass", "dataset": "deduped", "deps": ["clean", "deduped/exact.1"],
              "steps": ["apply exact"], "publishes": True, "tasks": shares["deduped"]}]
    plan = {"version": 1, "recipe": "0" * 64, "about": None, "warnings": [], "unconfined": [],
            "sources": {s: {"files": tasks // len(sources), "bytes": 10**12} for s in sources}, "nodes": nodes}
    store.write("runs/big/plan.json", json.dumps(plan).encode())
    rng = random.Random(2)
    write_tasks(store, "big", ((n["name"], (f"{rng.getrandbits(128):032x}" for _ in range(n["tasks"]))) for n in nodes))
    stage = {"clean": "1:gopher_quality", "deduped": "barrier:exact", "deduped/exact.1": ""}
    sums = {name: NodeSums(tasks=n, cpu_s=20.0 * n, wall_s=21.0 * n, max_rss_mb=900.0, writes=["kept.parquet"],
                           counters=counters(sources, n, rows, stage[name]) if stage[name] else {})
            for name, n in shares.items()} | {n: NodeSums() for n in index}
    one = {"stages": {"barrier:exact": {"dropped": {"exact_text": {sources[0]: 1}}}}}

    def get(key: str) -> PartRecord:
        return PartRecord(key, "documents", "", "a", files[int(key[:4], 16) % SETS], one)

    return get, sums


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--tasks", type=int, default=1_000_000)
    arguments.add_argument("--sources", type=int, default=500)
    arguments.add_argument("--rows", type=int, default=5000)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        get, sums = run(store, given.tasks, [f"source-{i:03d}" for i in range(given.sources)], given.rows)
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        write_report(store, "big", get, sums=sums)
        after = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps({
            "tasks": given.tasks, "sources": given.sources, "seconds": round(time.perf_counter() - began, 1),
            "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "rss_mb_before": before.ru_maxrss >> 10, "rss_mb": after.ru_maxrss >> 10,
            "html_kb": Path(folder, "runs/big/report.html").stat().st_size >> 10,
            "json_kb": Path(folder, "runs/big/report.json").stat().st_size >> 10}))


if __name__ == "__main__":
    main()
