"""Runs `tokenmill` and kills it with SIGKILL at a chosen point: `python -m tests.e2e.kill POINT N ARGS…`

The points: `partition` (the N-th document was written), `tokens` (before the N-th block of tokens is written), `commit`
(the N-th result is in the store, but its record is not yet in the log), `map` and `reduce` (before the N-th exchange
file is written or read), `publish` (the folder of a dataset is half built), `copy` (before the N-th part is copied on
S3). The points of deduplications with indexes of old documents: `index` (before the N-th exchange file of an index is
written), `hashes` and `lookup` (before hashes or band keys are looked up for the N-th time), `routes` (before the N-th
exchange file with what was found is written), `old` (before the N-th text of an old document is read).

The result of each task is committed at once, not within a second. So the tasks that a killed run leaves to the next one
do not depend on the speed of the machine.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any


def die_at(owner: Any, name: str, nth: int) -> None:
    """Kill this process when `owner.name` is called for the `nth` time."""
    original, calls = getattr(owner, name), itertools.count(1)      # counts threads, too, each once

    def patched(*args: Any, **kw: Any) -> Any:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kw)

    setattr(owner, name, patched)


def main() -> None:
    from pipeline.engine.driver import scheduler

    scheduler.SEGMENT_S = -1.0
    point, nth = sys.argv[1], int(sys.argv[2])
    if point == "partition":
        from pipeline.store.parts import PartWriter

        die_at(PartWriter, "write", nth)
    elif point == "tokens":
        from pipeline.passes.part_tokens import TokensWriter

        die_at(TokensWriter, "add", nth)
    elif point == "commit":
        from pipeline.store.log import Log

        die_at(Log, "append", nth)
    elif point == "map":
        import stages.dedup.lsh as lsh

        die_at(lsh, "write_segments", nth)
    elif point == "reduce":
        import pipeline.engine.shuffle.exchange as exchange

        die_at(exchange, "merge_segments", nth)
    elif point == "index":
        import stages.dedup.index_texts as index_texts

        die_at(index_texts, "write_segments", nth)
    elif point == "hashes":
        import stages.dedup.exact_index as exact_index

        die_at(exact_index, "look_up", nth)
    elif point in ("lookup", "routes"):
        import stages.dedup.against as against

        die_at(against, "look_up" if point == "lookup" else "write_segments", nth)
    elif point == "old":
        from stages.dedup.index_texts import OldSets

        die_at(OldSets, "get", nth)
    elif point == "publish":
        import pipeline.store.dataset as dataset

        die_at(dataset.ManifestWriter, "__exit__", nth)
    elif point == "copy":
        from pipeline.store.s3 import S3

        die_at(S3, "copy", nth)
    else:
        raise SystemExit(f"unknown point {point}")
    sys.argv = ["tokenmill", *sys.argv[3:]]
    from pipeline.cli import main as cli

    cli()


if __name__ == "__main__":
    main()
