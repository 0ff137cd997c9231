"""`python -m tests.simulate`: run many histories (simulated sequences of events), or one of them again."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulate.history import Failure, History, run, search, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="the seed of one history; with --count of the first")
    parser.add_argument("--count", type=int, help="run so many histories (default 1000, with --seed 1)")
    parser.add_argument("--tasks", type=int, help="so many tasks, instead of what the seed says")
    parser.add_argument("--only", help="names of the faults that may happen, with commas between")
    options = parser.parse_args()
    began, first = time.process_time(), options.seed or 0
    count = options.count or (1000 if options.seed is None else 1)
    failure: Failure | None
    if options.tasks is None and options.only is None:
        failure = search(range(first, first + count), _tell)
    else:
        only = None if options.only is None else tuple(filter(None, options.only.split(",")))
        failure = run(History(first, options.tasks or History.of(first).tasks, only))
    if failure is None:
        print(f"{count} histories from seed {first}: all promises kept, {time.process_time() - began:.1f} s of CPU")
        return 0
    print(f"seed {failure.history.seed}: {failure}\n\nshrunk: {shrink(failure)}", file=sys.stderr)
    return 1


def _tell(seed: int) -> None:
    if seed and seed % 1000 == 0:
        print(f"seed {seed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
