"""Deduplicate millions of synthetic signatures, and check that the driver's memory does not grow with the documents.

    python benchmarks/dedup_driver_memory.py [--documents 5000000] [--workers 2] [--rounds] [--scratch DIR]

Makes at least two parts (files of at most 100,000 documents) with random band keys. Signatures are not computed,
because only the waves (rounds of tasks) are measured. In each part but the first, a tenth of the documents are
near-duplicates of documents of the part before. Their text differs from the original in one word of forty, and they
have 1 to 14 band keys in common with it. Half of the near-duplicates of a part copy a small group of documents (1 % of
the part before), so that there are large clusters and frequent keys.

Runs the waves of `minhash` with every task in a worker process, as the engine does. Prints the time of each wave, the
number of removals, and the growth of the driver's resident memory from before the first wave to its peak. Exits 1 if
the growth is over 200 MB, or if the number of removals is not the number of near-duplicates made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.task import CrashCursor, TaskSpec
from pipeline.engine.worker.attempt import run_attempt
from pipeline.store.content_keys import content_key
from pipeline.store.fs import Store
from pipeline.store.lists import ListFiles, writes_to
from pipeline.store.records import Counters, PartRecord, merge_counters
from stages.barrier import PartRef, TaskResult
from stages.catalog import load
from stages.dedup.fragment import Sizes
from stages.dedup.minhash import MinHash

PART, WORDS, WIDTH, BANDS = 100_000, 40, 6, 14
LIMIT_MB = 200


def memory_mb(field: str) -> float:
    """VmRSS (current) or VmHWM (peak) of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {field} in /proc/self/status")


def make_part(root: str, number: int, rows: int, before: int) -> dict[str, Any]:
    """Write text and side table of one part: 90 % new documents and, except in the first part, 10 % near-duplicates of
    new documents of the part before, which has `before` rows. Every part can be made alone, because its number and a
    row number determine each new document."""
    words, bands = originals(number, rows)
    copies = rows // 10
    if number and copies:
        rng = np.random.default_rng([2, number])
        before_words, before_bands = originals(number - 1, before)
        source = rng.integers(0, before - before // 10, copies)
        source[:copies // 2] = rng.integers(0, max(1, before // 100), copies // 2)
        words[-copies:] = before_words[source]
        words[-copies:, rng.integers(0, WORDS)] = letters(rng, copies, 1)[:, 0]
        shared = np.arange(BANDS)[None, :] < rng.integers(1, BANDS + 1, copies)[:, None]
        bands[-copies:] = np.where(shared, before_bands[source], bands[-copies:])
    text = np.full((rows, WORDS, WIDTH), ord(" "), np.uint8)
    text[:, :, :-1] = words
    width = WORDS * WIDTH
    ids = np.array([f"{number:016x}{row:016x}" for row in range(rows)])
    tables = {
        "kept": pa.table({"id": ids, "text": pa.LargeStringArray.from_buffers(
            rows, pa.py_buffer(np.arange(0, rows * width + 1, width, dtype=np.int64)), pa.py_buffer(text.tobytes()))}),
        "side": pa.table({
            "row": pa.array(np.arange(rows), pa.uint32()), "id": ids, "bands": pa.BinaryArray.from_buffers(
                pa.binary(), rows, [None, pa.py_buffer(np.arange(0, rows * 8 * BANDS + 1, 8 * BANDS, dtype=np.int32)),
                                    pa.py_buffer(bands.tobytes())]),
            "chars": pa.array(np.full(rows, width), pa.uint32()),
            "words": pa.array(np.full(rows, WORDS), pa.uint32())})}
    out = {}
    for name, table in tables.items():
        path = Path(root) / "in" / f"{number:05d}.{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, compression="zstd", row_group_size=20_000)
        out[name] = {"$ref": f"in/{path.name}", "content": f"{number}/{name}", "bytes": path.stat().st_size,
                     "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": rows}
    return out


def originals(number: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([1, number])
    return letters(rng, rows, WORDS), rng.integers(0, 2**64, (rows, BANDS), dtype=np.uint64)


def letters(rng: np.random.Generator, rows: int, words: int) -> np.ndarray:
    """uint8[rows, words, WIDTH - 1] of random lower-case letters."""
    return rng.integers(ord("a"), ord("z") + 1, (rows, words, WIDTH - 1), dtype=np.uint8)


def attempt(spec: dict[str, Any], root: str) -> dict[str, Any]:
    return run_attempt(TaskSpec.from_json(spec), Store(root), "a0", CrashCursor()).to_json()


def main() -> int:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--documents", type=int, default=5_000_000)
    args.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    args.add_argument("--rounds", action="store_true", help="find clusters by rounds of tasks, as above 30 M edges")
    args.add_argument("--scratch", default=None, help="folder for about 500 bytes a document (default: the system's)")
    given = args.parse_args()
    with tempfile.TemporaryDirectory(prefix="dedup-", dir=given.scratch) as root:
        most = min(PART, (given.documents + 1) // 2)         # at least two parts: the first has no near-duplicates
        sizes = [min(most, given.documents - start) for start in range(0, given.documents, most)]
        began = time.monotonic()
        with processes(given.workers) as pool:
            refs = list(pool.map(make_part, [root] * len(sizes), range(len(sizes)), sizes, [most] * len(sizes)))
        parts = [PartRef(f"{n:032x}", "synthetic", 0, rows, ref["kept"]["bytes"], ref["kept"], ref["side"])
                 for n, (rows, ref) in enumerate(zip(sizes, refs))]
        say(f"{given.documents:,} documents in {len(parts)} parts made in {time.monotonic() - began:.0f} s")
        with processes(given.workers) as pool:
            return measure(pool, root, parts, given.rounds)


def say(line: str) -> None:
    print(line, flush=True)


def processes(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def measure(pool: ProcessPoolExecutor, root: str, parts: list[PartRef], rounds: bool) -> int:
    documents = sum(p.rows for p in parts)
    barrier = MinHash()
    if rounds:
        barrier.sizes = Sizes(one_task_edges=0)
    Path("/proc/self/clear_refs").write_text("5")                # resets the peak
    before = memory_mb("VmRSS")
    began = time.monotonic()
    done: dict[str, list[TaskResult]] = {}
    counters: Counters = {}
    lists = ListFiles(writes_to(Store(root)))
    todo = list(barrier.waves(parts))
    while todo:
        wave, started, specs = todo[0], time.monotonic(), []
        for draft in wave.tasks(done):
            args = lists.fold(draft.args)
            specs.append(TaskSpec(content_key(draft.task, load(draft.task).version, args), draft.task, wave.name,
                                  args).to_json())
        records = [PartRecord.from_json(r) for r in pool.map(attempt, specs, [root] * len(specs))]
        done[wave.name] = [TaskResult({n: f.ref() for n, f in r.files.items()}, r.counters) for r in records]
        counts = counters.setdefault(wave.name, {})             # stays empty for a wave without tasks
        for r in records:
            merge_counters(counts, r.counters)
        if records:
            say(f"  {wave.name:9s} {len(records):3d} tasks {time.monotonic() - started:6.1f} s, "
                f"{sum(r.cpu_s for r in records):6.1f} s of CPU, largest {max(r.rss_mb for r in records):5.0f} MB, "
                f"longest spec {max(len(json.dumps(s)) for s in specs):,} bytes")
        if not wave.again(done):
            todo.pop(0)
    slices = list(barrier.slices(parts, done))
    took, grown = time.monotonic() - began, memory_mb("VmHWM") - before
    removed = counters["slices"].get("removed", {}).get("synthetic", {}).get("minhash", 0)
    clusters, verified = counters["clusters"], counters["verify"]
    planted = sum(p.rows // 10 for p in parts[1:])
    print(json.dumps({
        "documents": documents, "band_records": documents * BANDS, "seconds": round(took, 1),
        "documents_per_s": round(documents / took), "records_per_s": round(documents * BANDS / took),
        "candidates": clusters.get("candidates", 0), "clusters": clusters.get("clusters", 0),
        "largest_cluster": clusters.get("max_cluster", 0), "comparisons": verified.get("comparisons", 0),
        "planted": planted, "removed": removed, "slices": sum(s is not None for s in slices),
        "driver_mb_before": round(before), "driver_mb_grown": round(grown, 1)}, indent=1))
    if removed != planted:
        print(f"{planted:,} near-duplicates were planted, {removed:,} removed", file=sys.stderr)
    if grown > LIMIT_MB:
        print(f"the driver grew by {grown:.0f} MB, more than {LIMIT_MB}", file=sys.stderr)
    return int(grown > LIMIT_MB or removed != planted)


if __name__ == "__main__":
    sys.exit(main())
