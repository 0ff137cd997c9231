"""Measure what a source of many small files, and of one huge file, costs the driver until its tasks are known.

    python benchmarks/many_files.py [--files 100000 1000000] [--scratch DIR]

With many files, the driver lists a folder of empty files, cuts it into partitions, forms the keys of all tasks, and
writes inputs.parquet. The huge file is a sparse JSON Lines file of 1 TB. It is planned up to the task that finds the
places where it can be split. Every source is planned in a process of its own. Prints the process's peak resident memory
above that of the libraries, and CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "version: 1\nsources: {s: {read: READER, path: in}}\ndatasets: {d: {from: s, steps: [gopher_quality]}}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--scratch", help="folder for the files (default: the system's)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.one:
        measure(options.one)
        return 0
    for n in (*options.files, 0):
        with tempfile.TemporaryDirectory(dir=options.scratch) as site:
            make(Path(site), n)
            subprocess.run([sys.executable, __file__, "--one", site], check=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    return 0


def make(site: Path, files: int) -> None:
    """Make `files` empty files, a thousand in each folder. With 0, make the one file of 1 TB."""
    (site / "in").mkdir()
    (site / "r.yaml").write_text(RECIPE.replace("READER", "text" if files else "jsonl"))
    for i in range(files):
        folder = site / "in" / f"{i // 1000:04d}"
        if i % 1000 == 0:
            folder.mkdir()
        os.close(os.open(folder / f"{i:07d}.txt", os.O_CREAT))
    if not files:
        with open(site / "in" / "huge.jsonl", "wb") as f:
            f.truncate(1 << 40)


def measure(site: str) -> None:
    from pipeline.plan.planner import Planner
    from pipeline.plan.provenance import node_ingredients, write_provenance
    from pipeline.recipe import load_recipe
    from pipeline.store.fs import Store

    planner = Planner(load_recipe(f"{site}/r.yaml", []), lambda path, sha256: b"")
    nodes = planner.nodes()
    before, began = peak_mb(), time.process_time()

    def say(what: str) -> None:
        print(f"{len(files):>9,} files, {what}: peak +{peak_mb() - before:.0f} MB, "
              f"{time.process_time() - began:.1f} s of CPU so far", flush=True)

    files = planner.source_files("s")
    say("listed")
    work = nodes[0].work({})
    big = sum(1 for _ in next(work))
    if big:
        say(f"{big} to be indexed")
    else:
        try:
            work.send([])
        except StopIteration as end:
            say(f"{sum(1 for _ in next(nodes[1].work({'index:s': end.value}))):,} tasks")
    write_provenance(Store(f"{site}/store"), "run", planner, node_ingredients(planner, nodes), 1)
    say("inputs.parquet written")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
