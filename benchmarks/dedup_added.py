"""Measure what it costs to add 1 % new documents to a deduplicated dataset (`against`), beside a run over all.

    python benchmarks/dedup_added.py [--documents N]

Old and new documents are texts of 500 words, of which every fifth is an edited copy of another one. Three figures are
printed for each of `minhash` and `exact`:

    all     signatures (or hashes) and waves of all documents
    index   the waves that make the index of the old documents
    added   signatures (or hashes) and waves of the new documents, which are compared with this index

A wave is a round of tasks. Both ways must remove equally many documents.

Costs are slopes: the CPU time with N old documents minus that with a quarter of them, divided by the difference.
Imports, compiled kernels and the fixed costs of tasks thus do not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.dedup import run_waves, synthetic  # noqa: E402
from pipeline.store.fs import Store  # noqa: E402
from stages.catalog import load  # noqa: E402
from stages.dedup.exact import Exact  # noqa: E402
from stages.dedup.index import IndexedBarrier  # noqa: E402
from stages.dedup.minhash import MinHash  # noqa: E402
from stages.document import Document  # noqa: E402
from tests.stages.dedup_fragment import Doc, write_parts  # noqa: E402


def preparing(barrier: IndexedBarrier, docs: list[Doc]) -> float:
    """Return the CPU seconds of the stage that computes the signatures (or hashes) of documents."""
    target, config = barrier.prepare()
    stage, begun = load(target)(config), time.process_time()
    for doc in docs:
        stage.process(Document(doc.id, doc.text))
    return time.process_time() - begun


def costs(barrier: IndexedBarrier, old: list[Doc], new: list[Doc], folder: str) -> dict[str, float]:
    """Return {figure: CPU seconds} for the three figures that are printed, and how many of the new documents were
    removed. Raises AssertionError if the two ways remove different numbers of documents."""
    store = Store(folder)
    everything = write_parts(barrier, old + new, store, part_rows=2000, ranks={"old": 0, "new": 1}, row_group=500)
    whole, done = run_waves(barrier.waves(everything), store)
    removed = sum(sum(by.values()) for task in done["slices"] for by in task.counters["removed"].values())
    parts = write_parts(barrier, old, store, part_rows=2000, row_group=500)
    _, done = run_waves(barrier.waves(parts), store)
    first = sum(sum(by.values()) for task in done["slices"] for by in task.counters["removed"].values())
    making, made = run_waves(barrier.index_waves(parts, list(barrier.slices(parts, done)), done), store)
    index = barrier.index(parts, made, 1)
    later = write_parts(barrier, new, store, part_rows=2000, row_group=500)
    added, done = run_waves(barrier.waves(later, [index]), store)
    second = sum(sum(by.values()) for task in done["slices"] for by in task.counters["removed"].values())
    assert removed == first + second, (removed, first, second)
    return {"removed": float(second), "all": preparing(barrier, old + new) + sum(whole.values()),
            "index": sum(making.values()), "added": preparing(barrier, new) + sum(added.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=80_000, help="old documents")
    sizes = (500, parser.parse_args().documents // 4, parser.parse_args().documents)    # the first one warms up
    for barrier in (MinHash(), Exact()):
        measured = []
        for size in sizes:
            docs = synthetic(size + max(size // 100, 10), size // 5, 500)
            old = [Doc(doc.text, "old", doc.id) for doc in docs[:size]]
            new = [Doc(doc.text, "new", doc.id) for doc in docs[size:]]
            with tempfile.TemporaryDirectory() as folder:
                measured.append(costs(barrier, old, new, folder))
        assert measured[-1]["removed"] > 0
        less, more = measured[-2:]
        each = {what: 1e6 * (more[what] - less[what]) / (sizes[-1] - sizes[-2]) for what in more}
        print(f"{barrier.name}: all {each['all']:.1f}, index {each['index']:.1f}, added {each['added']:.2f} us per old "
              f"document; adding 1 % costs {each['added'] / each['all']:.1%} of a run over all", flush=True)


if __name__ == "__main__":
    main()
