"""What does it cost to find passages that occur twice?

    python benchmarks/substring.py [--mb 20 60] [--repeated 0.1] [--length 500]

Makes texts of random words, and copies passages of 600 to 4,200 characters into them: about the share --repeated of all
bytes. The tasks of the step `substring` run in this process, wave by wave. The CPU time of each wave is given per MB of
text, by the difference between the two sizes, so that start-up and compilation do not count. `peak` is the largest
resident memory of the process. `exchange` is the size of all files that the waves exchange, in bytes per byte of text.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.engine.task import CrashCursor, TaskSpec  # noqa: E402
from pipeline.engine.worker.attempt import run_attempt  # noqa: E402
from pipeline.store.content_keys import task_key  # noqa: E402
from pipeline.store.fs import Store  # noqa: E402
from stages.barrier import TaskResult  # noqa: E402
from stages.dedup.substring import Substring  # noqa: E402
from tests.stages.dedup_fragment import Doc, write_parts  # noqa: E402

PART_ROWS = 2_000


def documents(megabytes: int, repeated: float) -> Iterator[Doc]:
    """Yield texts of 5 kB on average. About the share `repeated` of their bytes is copied from earlier texts."""
    draw = random.Random(1)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randrange(2, 11))) for _ in range(50_000)]
    earlier: list[str] = []
    for number in range(megabytes * 200):
        parts = [" ".join(draw.choices(words, k=round(700 * (1 - repeated))))]
        if earlier and draw.random() < repeated * 5_000 / 2_400:           # the mean of a passage
            source = draw.choice(earlier)
            length = min(draw.randrange(600, 4_200), len(source))
            start = draw.randrange(len(source) - length + 1)
            parts.insert(draw.randrange(2), source[start:start + length])
        text = "\n".join(parts)
        if len(earlier) < 5_000:
            earlier.append(text)
        yield Doc(text, "web", f"{number:032x}")


def cost(megabytes: int, repeated: float, length: int, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Run the step on generated texts. Returns two mappings: the CPU seconds of each wave, and the sizes in bytes of
    the texts (`size`), of the exchange files (`exchange`) and of the passages that were cut (`cut`)."""
    store, barrier = Store(folder), Substring(length=length)
    docs = list(documents(megabytes, repeated))
    size = sum(len(doc.text) for doc in docs)
    seconds = {}
    start = time.process_time()
    parts = write_parts(barrier, docs, store, part_rows=PART_ROWS, row_group=500)
    seconds["prepare and write"] = time.process_time() - start
    del docs
    done: dict[str, list[TaskResult]] = {}
    exchange = 0
    for wave in barrier.waves(parts):
        start, results = time.process_time(), []
        for draft in wave.tasks(done):
            record = run_attempt(TaskSpec(task_key(draft.task, draft.args), draft.task, wave.name, draft.args), store,
                                 "a0", CrashCursor())
            results.append(TaskResult({n: f.ref() for n, f in record.files.items()}, record.counters))
            exchange += sum(f.bytes for n, f in record.files.items() if n.endswith(".seg"))
        done[wave.name], seconds[wave.name] = results, time.process_time() - start
    cut = sum(r.counters["cut"]["web"]["bytes"] for r in done["slices"])
    return seconds, {"size": size, "exchange": exchange, "cut": cut}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", nargs=2, type=int, default=[20, 60])
    parser.add_argument("--repeated", type=float, default=0.1)
    parser.add_argument("--length", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cost(1, options.repeated, options.length, Path(folder, "compile"))
        small, large = (cost(mb, options.repeated, options.length, Path(folder, str(mb))) for mb in options.mb)
    size = (large[1]["size"] - small[1]["size"]) / 1e6
    total = 0.0
    for wave, seconds in large[0].items():
        each = (seconds - small[0][wave]) / size
        total += each
        print(f"{wave:<18} {1000 * each:8.1f} ms of CPU per MB")
    print(f"{'all':<18} {1000 * total:8.1f} ms of CPU per MB, {1 / total:.1f} MB per CPU second; "
          f"{large[1]['cut'] / large[1]['size']:.1%} cut, "
          f"exchange {large[1]['exchange'] / large[1]['size']:.2f} bytes per byte, "
          f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
